"""A GPU that is as late as a GPU may be: what it is given is done when somebody waits for it, and not before.

Operations, copies and launches of kernels (in Triton's interpreter) are queued by stream. Waiting for an event does
what its stream was given before the event, and what that had to wait for on other streams; nothing else, or else all
that other streams have (`others_first`), since streams have no order between them but by events. Until then
results are poisoned: NaN, or the number 1, which is wrong and yet a place in every table, since the interpreter reads
memory without a check. Freed memory is poisoned in the order of the stream that it was made on. Memory of the host is
read and written only when the copy is done; if it was overwritten before, that is a fault.

So a program that reads, writes, frees or reuses too early gets other tokens here, or an error.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

from tests.support.fake_cuda import (
    DeviceFault,
    DeviceTensor,
    Event,
    FakeCuda,
    Graph,
    Memory,
    Stream,
    Work,
    mapped_numbers,
)


class HostMemoryReused(DeviceFault):
    """The host wrote into memory that a copy had still to read."""


class _Mark:
    """A place in a stream."""

    is_reached = False


class DeferredStream(Stream):
    """Work in order.

    queue: what is still to be done
    """

    def __init__(self, device: DeferredDevice) -> None:
        super().__init__(device)
        self.queue: deque[Work] = deque()
        device.streams.append(self)

    def mark(self) -> _Mark:
        mark = _Mark()
        self.queue.append(lambda: setattr(mark, "is_reached", True))
        return mark

    def run_until(self, mark: _Mark) -> None:
        while not mark.is_reached:
            self.queue.popleft()()

    def wait_event(self, event: Event) -> None:
        assert isinstance(event, DeferredEvent)
        if event.place is not None:
            stream, mark = event.place
            self.queue.append(lambda: stream.run_until(mark))


class DeferredEvent(Event):
    """A place in a stream, once it is recorded."""

    place: tuple[DeferredStream, _Mark] | None = None

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self.owner.current_stream
        assert isinstance(stream, DeferredStream)
        self.place = stream, stream.mark()

    def synchronize(self) -> None:
        super().synchronize()
        if self.place is not None:
            stream, mark = self.place
            assert isinstance(self.owner, DeferredDevice)
            with self.owner.computing():
                self.owner.run_others(stream)
                stream.run_until(mark)

    def query(self) -> bool:
        return self.place is None or self.place[1].is_reached


class DeferredGraph(Graph):
    """What was launched during a capture, to be queued again by each replay."""

    def __init__(self, device: DeferredDevice) -> None:
        super().__init__(device)
        self.work: list[Work] = []

    def replay(self) -> None:
        super().replay()
        for work in self.work:
            self.owner.enqueue(work)


class DeferredDevice(FakeCuda):  # type: ignore[no-untyped-call]
    """See the module."""

    computes = True
    multiprocessors = 2  # since the interpreter runs one program after the other

    stream_class, event_class, graph_class = DeferredStream, DeferredEvent, DeferredGraph

    def __init__(self, *, others_first: bool = False, **options: Any) -> None:
        """others_first: when the host waits for a stream, all others run ahead as far as they can"""
        self.others_first = others_first
        self.streams: list[DeferredStream] = []
        super().__init__(**options)

    def run_others(self, stream: DeferredStream) -> None:
        for other in self.streams if self.others_first else ():
            while other is not stream and other.queue:
                other.queue.popleft()()

    def allocate(self, blank: Tensor) -> Tensor:
        made = torch.empty_strided(blank.size(), blank.stride(), dtype=blank.dtype)
        poison(made)
        if self.capturing is not None:  # each replay begins with garbage again
            self.enqueue(lambda: poison(made))
        return made

    def freed(self, memory: Memory) -> None:
        super().freed(memory)
        values, stream = memory.values, memory.stream
        assert isinstance(stream, DeferredStream)
        if memory.graph is None:
            stream.queue.append(lambda: poison(values))
        elif memory.graph is self.capturing:
            self.enqueue(lambda: poison(values))

    def enqueue(self, work: Work) -> None:
        if isinstance(self.capturing, DeferredGraph):
            self.capturing.work.append(work)
        else:
            assert isinstance(self.current_stream, DeferredStream)
            self.current_stream.queue.append(work)

    def copy_to_device(self, target: Tensor, source: Tensor) -> None:
        seen = source.clone()

        def copy() -> None:
            if not torch.equal(_bytes(seen), _bytes(source)):
                self.fail(HostMemoryReused("The host overwrote memory before its copy to the device was done."))
            target.copy_(source)

        self.enqueue(copy)

    def copy_to_host(self, target: Tensor, source: Tensor) -> None:
        poison(target)
        self.enqueue(lambda: target.copy_(source))

    def copy_now(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def finish(self) -> None:
        with self.computing():
            for stream in self.streams:
                while stream.queue:
                    stream.queue.popleft()()

    def compute_now(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        args, kwargs = mapped_numbers(args), mapped_numbers(kwargs)
        with self.computing():
            found = func(*args, **kwargs)
        if not isinstance(found, Tensor):
            return found
        return DeviceTensor(found.to("meta"), found, Memory(self, found))


def poison(values: Tensor) -> None:
    """Overwrites a tensor with what nobody can have wanted."""
    if values.is_floating_point():
        values.fill_(torch.nan)
    else:
        values.fill_(0 if values.dtype == torch.uint8 else 1)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)
