"""What a model's weights and the rows that they are multiplied with are rounded to."""

from __future__ import annotations

from dataclasses import dataclass

WEIGHTS = ("int8", "int4")
ACTIVATIONS = ("int8", "bf16")


@dataclass(frozen=True, slots=True)
class Quantization:
    """Weights that are kept as integers.

    weights:     int8: a byte each, with a scale for each column. int4: half a byte each, with a scale for each 32
                 numbers of a column; the head stays int8
    activations: how rows are rounded before they are multiplied. int8: to a byte, with a scale for each 128 numbers, or
                 for each 32 with int4 weights. bf16: to 16 bits, which loses nothing that bfloat16 has
    """

    weights: str
    activations: str = "int8"

    def __str__(self) -> str:
        return f"{self.weights} with {self.activations} activations"
