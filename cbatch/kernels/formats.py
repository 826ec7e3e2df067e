"""Packed formats of matrices, the same on every device: what their integers stand for, and how numbers are rounded.

Numbers of a column are cut into groups of 32, of nvfp4 16, each of which has a scale; larger groups repeat theirs.

| format | a number is | scales |
|---|---|---|
| int8 | scale * integer, from -128 to 127 | float16 |
| int4 | scale * (integer - 8), from 0 to 15 | float16 |
| int4_zeros | scale * (integer - zero point), which is any number | float16, as zero points are |
| mxfp4 | scale * level, whose place in a table of 16 is kept | bfloat16, powers of 2 |
| iq4_nl | the same | float16 |
| nvfp4 | the same, with the levels of mxfp4 | float16, for 16 numbers |
| fp8 | scale * e4m3, whose 8 bits are kept | float32, for a multiple of 32 numbers |

That covers Q8_0, Q4_0, Q4_1, MXFP4 and IQ4_NL of GGUF, AWQ, GPTQ, NVFP4 and compressed-tensors.
`cpu/matmul/formats.py` and `quantized_matrix.py` say how a matrix lies in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

FORMATS = ("float32", "bfloat16", "int8", "int4", "int4_zeros", "mxfp4", "iq4_nl", "nvfp4", "fp8")
FLOAT32, BFLOAT16, INT8, INT4, INT4_ZEROS, MXFP4, IQ4_NL, NVFP4, FP8 = range(len(FORMATS))

ON_CPU, ON_GPU = (INT8, INT4, INT4_ZEROS, MXFP4, IQ4_NL, NVFP4), (INT8, FP8, INT4, INT4_ZEROS, MXFP4, NVFP4)
"""Those that kernels have for packed matrices."""

GROUP = 32
"""Numbers of a column that share a scale, unless `group_of` says otherwise."""

MIDDLE = 8
"""The integer of int4 that stands for 0."""

_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)

LEVELS = {
    MXFP4: _E2M1,
    NVFP4: _E2M1,
    IQ4_NL: (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
}
"""Numbers that the 16 codes of a format stand for: of MXFP4 and NVFP4 twice those of e2m1, which are halves.

Sources: Open Compute Project, Microscaling Formats 1.0; `kvalues_iq4nl` of llama.cpp.
"""


def group_of(format: int) -> int:
    """Numbers of a column that share a scale in a packed format; of FP8 at least."""
    return 16 if format == NVFP4 else GROUP


class Integers(NamedTuple):
    """Rows of a matrix in a packed format.

    numbers: [rows, depth] integers of 8 bits; bytes of fp8
    scales:  [rows, groups] float32, rounded to what the format keeps
    zeros:   as scales, for INT4_ZEROS
    """

    numbers: Tensor
    scales: Tensor
    zeros: Tensor | None = None

    @classmethod
    def of_arrays(cls, numbers: NDArray[Any], scales: NDArray[Any], zeros: NDArray[Any] | None = None) -> Integers:
        def tensor(part: NDArray[Any]) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(part, np.float32))

        integers = torch.from_numpy(np.ascontiguousarray(numbers))
        return cls(integers, tensor(scales), None if zeros is None else tensor(zeros))

    @classmethod
    def concatenated(cls, parts: Sequence[Integers]) -> Integers:
        """Rows of several one after the other."""
        return parts[0].map(lambda *each: torch.cat(each), *parts[1:])

    def map(self, function: Callable[..., Tensor], *others: Integers) -> Integers:
        """A function of numbers, of scales and of zero points, here and in others."""
        numbers, scales, zeros = zip(self, *others, strict=True)
        return Integers(function(*numbers), function(*scales), None if self.zeros is None else function(*zeros))

    def within(self, first: int, stop: int) -> Integers:
        """Columns first .. stop-1, which are whole groups of a depth of whole groups."""
        depth = self.numbers.shape[1]

        def cut(part: Tensor) -> Tensor:
            group = depth // part.shape[1]
            return part[:, first // group : stop // group]

        return self.map(cut)

    def values(self, format: int, group: int = 0) -> Tensor:
        """The numbers [rows, depth] float32 that they stand for.

        group: numbers that share a scale; 0 for as many as the format says
        """

        def spread(groups: Tensor) -> Tensor:
            return groups.float().repeat_interleave(group or group_of(format), dim=1)[:, : self.numbers.shape[1]]

        if format in LEVELS:
            levels = torch.tensor(LEVELS[format], dtype=torch.float32, device=self.numbers.device)
            centred = levels[self.numbers.int()]
        elif format == FP8:
            centred = self.numbers.view(torch.float8_e4m3fn).float()
        else:
            middle: Tensor | int = MIDDLE if format == INT4 else 0
            centred = self.numbers.float() - (middle if self.zeros is None else spread(self.zeros))
        return centred * spread(self.scales)

    def widened(self, own: int, target: int) -> Integers | None:
        """The same numbers in another format than their own; None if it does not have them all."""
        if own == target:
            return self
        if own == INT4 and target == INT8:
            return self._replace(numbers=self.numbers.to(torch.int8) - MIDDLE)
        if own == INT4 and target == INT4_ZEROS:
            return self._replace(zeros=torch.full_like(self.scales, MIDDLE))
        if own in (MXFP4, IQ4_NL) and target == INT8 and torch.equal(self.scales.half().float(), self.scales):
            return self._replace(numbers=torch.tensor(LEVELS[own], dtype=torch.int8)[self.numbers.int()])
        return None


def quantized(weight: Tensor, format: int) -> Integers:
    """A weight [columns, depth] rounded to INT8 or INT4.

    The integers are those of llama.cpp's Q8_0 and Q4_0. In INT8 the number furthest from 0 of a group becomes 127 or
    -127, and in INT4 it becomes 0.
    """
    groups = -(-weight.shape[1] // GROUP)
    padded = pad(weight.float(), (0, groups * GROUP - weight.shape[1])).view(-1, groups, GROUP)
    largest = padded.abs().amax(dim=2, keepdim=True)
    scales = (largest / 127 if format == INT8 else _furthest(padded, largest) / -MIDDLE).half().float()
    numbers = (padded * torch.where(scales == 0, 0, 1 / scales)).round_()
    numbers = numbers.clamp_(-127, 127) if format == INT8 else numbers.add_(MIDDLE).clamp_(0, 15)
    return Integers(numbers.to(torch.int8).view(len(weight), -1)[:, : weight.shape[1]], scales[..., 0])


def _furthest(numbers: Tensor, largest: Tensor) -> Tensor:
    """The first number of each group whose absolute value is the largest, which is given.

    Searching for its place takes longer than all other rounding, so only groups that have it with both signs are
    searched.
    """
    furthest = torch.where(numbers.amax(dim=2, keepdim=True) == largest, largest, -largest)
    both = ((numbers.amin(dim=2, keepdim=True) == -largest) & (furthest > 0))[..., 0]
    groups = numbers[both]
    furthest[both] = groups.gather(1, groups.abs().argmax(dim=1, keepdim=True))
    return furthest
