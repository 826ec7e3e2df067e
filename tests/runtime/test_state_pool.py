"""Guards the memory of recurrent states."""

from __future__ import annotations

import torch

from cbatch.runtime.state_pool import StatePool, StateShape

CPU = torch.device("cpu")


def test_states_of_one_type_lie_in_one_tensor() -> None:
    """Guards kernels that find every state by where it begins, and slots that are zeroed or copied for them."""
    shapes = [StateShape((3, 2), torch.float32), StateShape((5,), torch.float32)]
    pool = StatePool(shapes, 4, CPU)
    assert pool.flat is not None and len(pool.flat) == 4 * 11
    pool.flat.copy_(torch.arange(44.0))
    pool.zero([2])
    pool.copy([0, 2], [3, 1])
    first, second = pool.flat[:24].view(4, 6), pool.flat[24:].view(4, 5)
    assert first[1:].tolist() == [[0.0] * 6, [0.0] * 6, list(range(6))]
    assert second[1:].tolist() == [[0.0] * 5, [0.0] * 5, [24.0, 25.0, 26.0, 27.0, 28.0]]


def test_states_of_several_types_lie_apart() -> None:
    """Guards models whose states differ in their types: each has a tensor of its own."""
    pool = StatePool([StateShape((3,), torch.float32), StateShape((2, 2), torch.bfloat16)], 2, CPU)
    assert pool.flat is None
    assert [(tensor.shape, tensor.dtype) for tensor in pool.tensors] == [
        ((2, 3), torch.float32),
        ((2, 2, 2), torch.bfloat16),
    ]
