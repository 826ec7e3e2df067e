"""Products by the library."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear


def multiply_logits(hidden: Tensor, lm_head: Tensor, out: Tensor | None = None) -> Tensor:
    """Logits [R, vocabulary] float32 of hidden [R, hidden], in `out` if it is given.

    In bfloat16, many tokens would share the largest logit. A GPU sums in float32 anyway, and writing that takes less
    time than a kernel that widens the logits for the sampler.
    """
    if hidden.is_cuda and hidden.dtype != torch.float32:
        return torch.mm(hidden, lm_head.t(), out_dtype=torch.float32, out=out)
    values = linear(hidden, lm_head).float()
    return values if out is None else out.copy_(values)


def multiply(source: Tensor, matrix: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """out [T, columns] = source [T, depth] times a matrix [columns, depth], plus bias [columns].

    out: of the type of the source, or of float32
    """
    if bias is None:
        torch.mm(source, matrix.t(), out=out)
    else:
        torch.addmm(bias, source, matrix.t(), out=out)
