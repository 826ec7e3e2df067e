"""Guards the arrays of a step, on the host and on the device."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from cbatch.base.request import Request
from cbatch.runtime.batch import DeviceTokens, InFlightTokens, RaggedBatch
from cbatch.runtime.transfer import pack, synchronize, to_device, unpack
from cbatch.schedule.output import ScheduledChunk, SchedulerOutput
from cbatch.schedule.sequence import TokenSequence

CPU = torch.device("cpu")


def make_chunk(number: int, known: int, start: int, stop: int, *, has_placeholder: bool = False) -> ScheduledChunk:
    """A chunk of a request whose known tokens are 100 * number, 100 * number + 1, ..."""
    sequence = TokenSequence(number, [100 * number + place for place in range(known)], Request(max_new_tokens=9))
    sequence.num_output_placeholders = int(has_placeholder)
    return ScheduledChunk(
        sequence, start, stop, stop == sequence.num_tokens, [3 * number, 3 * number + 1, 3 * number + 2]
    )


def test_tokens_that_only_the_device_knows_get_their_places() -> None:
    """Guards overlapped steps: tokens of the previous step reach their rows, on a CPU and on another device."""
    chunks = [
        make_chunk(1, 6, 6, 7, has_placeholder=True),
        make_chunk(2, 9, 2, 5),
        make_chunk(3, 3, 3, 4, has_placeholder=True),
    ]
    in_flight = InFlightTokens(torch.tensor([7, 8, 9]), {chunks[2].sequence: 0, chunks[0].sequence: 2})
    batch = RaggedBatch.build(SchedulerOutput(chunks), 4, CPU, in_flight_tokens=in_flight)
    assert batch.ids.tolist() == batch.input_ids.tolist() == [9, 202, 203, 204, 7] and batch.device_tokens is None
    device_tokens = DeviceTokens(in_flight.tokens, np.array([0, 4]), np.array([2, 0]))
    elsewhere = replace(batch, ids=np.array([0, 202, 203, 204, 0]), device_tokens=device_tokens)
    assert elsewhere.input_ids.tolist() == [9, 202, 203, 204, 7]


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


@pytest.mark.parametrize(("name", "waits"), [("cpu", 0), ("cuda:0", 1), ("xpu:0", 1), ("mps:0", 1)])
def test_every_accelerator_is_waited_for(name: str, waits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards measured times of GPUs of other makers against ending before the work does."""
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    synchronize(torch.device(name))
    assert len(waited) == waits
