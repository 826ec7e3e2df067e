"""Rounds a matrix to 4 bits so that what it is multiplied with changes its products least: GPTQ.

The numbers of a row are rounded one after the other, and each error is taken off those that follow, by what goes
together in the rows that the matrix is multiplied with (Frantar et al., https://arxiv.org/abs/2210.17323). Those that
are multiplied with the largest numbers come first. Scale and zero point of a group are chosen before, those of some
with the smallest sum of squared errors, weighted likewise.

Rows of the matrix are independent: threads take fixed parts of them, so the result does not depend on their number.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from cbatch.kernels.formats import GROUP, Integers
from cbatch.runtime.cpu import num_threads, single_threaded

_DAMPING = 0.15
"""Share of the mean second moment that is added to each: what was seen too rarely counts less."""

_SHRINKING = tuple(0.65 + 0.05 * step for step in range(8))
"""Scales that are tried, as shares of the one that has room for the largest and the smallest number."""

_MOST = 15
"""The largest code."""

_TOKENS_AT_ONCE, _ROWS_AT_ONCE = 512, 2048

_AT_ONCE = 64
"""Numbers of a row after which errors are taken off those that are further away."""

Made = TypeVar("Made")


def in_parts(function: Callable[[slice], Made], count: int, size: int = _TOKENS_AT_ONCE) -> list[Made]:
    """A function of parts of so many rows, in all threads, each of which computes by itself."""

    @torch.inference_mode()  # of a thread
    def made(first: int) -> Made:
        return function(slice(first, min(first + size, count)))

    with single_threaded(), ThreadPoolExecutor(num_threads(), "cbatch-round") as executor:
        return list(executor.map(made, range(0, count, size)))


def moments_of(rows: Tensor) -> Tensor:
    """The second moments [depth, depth] of rows [T, depth] float32."""
    return reduce(torch.add, in_parts(lambda part: rows[part].T @ rows[part], len(rows)))


def rounded_to_4_bits(weight: Tensor, moments: Tensor | None) -> Integers:
    """A weight [columns, depth] float32 in INT4_ZEROS, with zero points that are whole.

    moments: of the rows that it is multiplied with, [depth, depth] float32; None if they are not known: then scales are
             searched, and no error is taken off
    """
    padding = -weight.shape[1] % GROUP
    feedback, importance = None, torch.ones(weight.shape[1] + padding, device=weight.device)
    if moments is not None:
        moments = pad(moments, (0, padding, 0, padding))
        own = moments.diagonal()
        moments = moments + torch.diag((own == 0).float() + _DAMPING * own.mean())
        feedback = _feedback(moments)
        importance = importance if feedback is None else moments.diagonal()

    def rounded(rows: slice) -> Integers:
        return _rounded(pad(weight[rows], (0, padding)).T.contiguous(), importance, feedback)

    found = Integers.concatenated(in_parts(rounded, len(weight), _ROWS_AT_ONCE))
    return found._replace(numbers=found.numbers[:, : weight.shape[1]].contiguous())


class _Feedback(NamedTuple):
    """How errors are taken off.

    order:  places in the depth, those that matter most first, whose errors most others can still make up for
    shares: how much of the error of a number is taken off each that follows it in that order, [depth, depth]
    """

    order: Tensor
    shares: Tensor


def _feedback(moments: Tensor) -> _Feedback | None:
    """None if numbers are too large for float32.

    The shares are the upper Cholesky factor of the inverse of the moments, with ones on its diagonal.
    """
    order = moments.diagonal().argsort(descending=True, stable=True)
    factor, failed = torch.linalg.cholesky_ex(moments[order][:, order])
    inverse, failed_too = torch.linalg.cholesky_ex(torch.cholesky_inverse(factor), upper=True)
    return None if failed or failed_too else _Feedback(order, inverse / inverse.diagonal()[:, None])


def _rounded(numbers: Tensor, importance: Tensor, feedback: _Feedback | None) -> Integers:
    """numbers [depth, columns]"""
    groups = list(zip(torch.split(numbers, GROUP), torch.split(importance, GROUP), strict=True))
    grids = [_grid_of(*group) for group in groups]
    scales, zeros, inverses = (torch.stack(parts) for parts in zip(*grids, strict=True))
    if feedback is None:
        codes = torch.cat(
            [_codes(group, zero, inverse) for (group, _), (_, zero, inverse) in zip(groups, grids, strict=True)]
        )
    else:
        order, shares = feedback
        numbers, codes = numbers[order], torch.empty_like(numbers)
        places = order.tolist()
        for first in range(0, len(numbers), _AT_ONCE):
            block = slice(first, first + _AT_ONCE)
            errors = torch.empty_like(numbers[block])
            for row, place in enumerate(places[block], start=first):
                group = place // GROUP
                code = codes[place] = _codes(numbers[row], zeros[group], inverses[group])
                error = torch.addcmul(
                    numbers[row], code - zeros[group], scales[group], value=-1, out=errors[row - first]
                )
                numbers[row + 1 : block.stop].addr_(shares[row, row + 1 : block.stop], error, alpha=-1)
            numbers[block.stop :].addmm_(shares[block, block.stop :].T, errors, alpha=-1)
    integers = codes.T.to(torch.int8, memory_format=torch.contiguous_format)
    return Integers(integers, scales.T.contiguous(), zeros.T.contiguous())


def _codes(numbers: Tensor, zero: Tensor, inverse: Tensor) -> Tensor:
    return torch.addcmul(zero, numbers, inverse).round_().clamp_(0, _MOST)


def _grid_of(group: Tensor, importance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scales, zero points and inverse scales [columns] of a group [32, columns], whose numbers count by importance."""
    high, low = group.amax(0).clamp(min=0), group.amin(0).clamp(max=0)
    exact, least = (high - low) / _MOST, torch.full_like(high, torch.inf)
    found = [torch.zeros_like(high)] * 3
    for share in _SHRINKING:
        scale = (exact * share).bfloat16().half().float()  # which others may read as bfloat16
        inverse = torch.where(scale == 0, 0, 1 / scale)
        zero = (-share * low * inverse).round_().clamp_(0, _MOST)
        total = importance @ _codes(group, zero, inverse).sub_(zero).mul_(scale).sub_(group).square_()
        is_better = total < least
        found = [torch.where(is_better, *pair) for pair in zip((scale, zero, inverse), found, strict=True)]
        least = torch.minimum(total, least)
    return found[0], found[1], found[2]
