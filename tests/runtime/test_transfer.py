"""Small arrays on their way to a device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cbatch.runtime.transfer import pack, synchronize, to_device, unpack


def test_packed_arrays_are_unpacked_unchanged() -> None:
    """Guards one buffer for arrays of all types and shapes, also empty ones and those that are not contiguous."""
    table = np.arange(12, dtype=np.int32).reshape(3, 4)
    arrays = [
        np.arange(5),
        table,
        table.T[1:3],
        np.array([True, False, True]),
        np.empty(0, np.int64),
        np.float32([1.5]),
    ]
    buffer = pack(arrays, arrays, pin=False)
    for array, tensor in zip(arrays, unpack(buffer, arrays), strict=True):
        assert tensor.shape == array.shape and tensor.data_ptr() % 16 == buffer.data_ptr() % 16
        assert np.array_equal(tensor.numpy(), array) and tensor.numpy().dtype == array.dtype


def test_arrays_are_not_copied_on_a_cpu() -> None:
    """Guards the CPU path against copies."""
    array = np.arange(3)
    (tensor,) = to_device([array], torch.device("cpu"))
    array[0] = 7
    assert tensor.tolist() == [7, 1, 2]


def test_arrays_for_other_accelerators_are_copied() -> None:
    """Guards devices without pinned memory, which torch refuses to make for them."""
    meta = torch.device("meta")
    (tensor,) = to_device([np.arange(3)], meta)
    assert tensor.device == meta and tensor.shape == (3,)


@pytest.mark.parametrize(("name", "waits"), [("cpu", 0), ("cuda:0", 1), ("xpu:0", 1), ("mps:0", 1)])
def test_every_accelerator_is_waited_for(name: str, waits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards measured times of GPUs of other makers against ending before the work does."""
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    synchronize(torch.device(name))
    assert len(waited) == waits
