"""The types to which a model's weights, and the rows that they are multiplied with, are rounded."""

from __future__ import annotations

from dataclasses import dataclass

WEIGHTS = ("int8", "int4", "auto")
ACTIVATIONS = ("int8", "bf16", "fp8")

MOST_DIVERGENCE = 0.05
"""Of a model in int4 that `auto` takes: nats, see `CalibratedWeights.divergence`."""

STORED = "stored"
"""In place of a type of weights: that of the file, in which each matrix may have another."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """Weights that are kept as integers.

    weights:     int8: a byte each; int4: half a byte each, but the head stays int8. Groups of 32 numbers of a column
                 have a scale, and zero points if the model is rounded by what goes through it (`model/rounding`).
                 auto: int4 if that is near enough to the model, else int8. stored: as the file has them
    activations: how rows are rounded before they are multiplied. int8: to a byte, with a scale for each 32 numbers,
                 and the largest of a row to two. bf16: to 16 bits, which loses nothing that bfloat16 has. fp8: to e4m3,
                 with a scale for each row, on GPUs and beside FP8 weights that allow it. Others on a GPU are of the
                 model's type
    """

    weights: str
    activations: str = "int8"

    @property
    def keeps_stored(self) -> bool:
        return self.weights == STORED

    @property
    def tries_4_bits(self) -> bool:
        """Whether weights are rounded to 4 bits, at least to see what that loses."""
        return self.weights in ("int4", "auto")

    def __str__(self) -> str:
        return f"{self.weights} with {self.activations} activations"
