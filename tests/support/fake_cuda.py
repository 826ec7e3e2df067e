"""A CUDA device without CUDA, and an error for whatever a GPU would wait for, or may not have done yet.

While a `FakeCuda` is active, `torch.cuda` says that there is a GPU. Operations on its tensors compute shapes only; a
launch of a Triton kernel is noted and computes nothing; a copy to the host brings made-up numbers. What fails:

- an operation or a launch with tensors of different devices, which CUDA refuses or reads from a wrong address;
- where waiting is forbidden, everything that makes the host wait for the device, except an event's `synchronize` within
  `HostCopy.get`: reading a number, boolean masks as indices, copies from or to memory that is not pinned, and so on.

A fault is raised, and once more at the end of the `with` block, because an engine survives some errors.

A `DeferredDevice` has numbers, and is as late as a GPU may be: operations, copies and launches of kernels (in Triton's
interpreter) are queued by stream. Waiting for an event does what its stream was given before the event, and what that
had to wait for on other streams; nothing else, or else all that other streams have (`others_first`). Until then
results are poisoned: NaN, or the number 1, which is wrong and yet a place in every table, since the interpreter reads
memory without a check. Freed memory is poisoned in the order of the stream that it was made on. Memory of the host is
read and written only when the copy is done; if it was overwritten before, that is a fault.
So a program that reads, writes, frees or reuses too early gets other tokens there, or an error.
"""

from __future__ import annotations

import operator
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, NoReturn, Self
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cbatch.engine import fallback
from cbatch.runtime.transfer import HostCopy

CUDA = torch.device("cuda:0")
aten = torch.ops.aten

Work = Callable[[], object]

WAITING = frozenset(
    "_local_scalar_dense item is_nonzero nonzero nonzero_numpy argwhere masked_select unique unique_dim _unique2 "
    "unique_consecutive equal allclose bincount multinomial one_hot".split()
)
"""Operations that wait for a GPU, because the host needs a number: a value, or the size of the result."""

COPIES = frozenset(("to", "_to_copy", "copy_"))


class DeviceFault(AssertionError):
    """Something that is wrong on a GPU."""


class HiddenWait(DeviceFault):
    """The host waits for the device where it must not."""


class DeviceMix(DeviceFault):
    """One operation gets tensors of the host and of the device."""


class HostMemoryReused(DeviceFault):
    """The host wrote into memory that a copy had still to read."""


class Memory:
    """A block of device memory, which its tensor and all views of it share."""

    def __init__(self, device: FakeCuda, values: Tensor) -> None:
        self.device, self.values = device, values
        self.num_bytes = values.untyped_storage().nbytes()
        self.stream, self.graph = device.current_stream, device.capturing
        device.took(self)

    def __del__(self) -> None:
        self.device.freed(self)


class DeviceTensor(Tensor):
    """A tensor on `cuda:0`.

    blank:   a tensor of the same shape and strides on torch's meta device; views share its storage
    numbers: another one on the CPU, if the device computes; else `blank` itself
    """

    blank: Tensor
    numbers: Tensor
    memory: Memory

    @staticmethod
    def __new__(cls, meta: Tensor, values: Tensor, memory: Memory) -> DeviceTensor:
        made: DeviceTensor = Tensor._make_wrapper_subclass(
            cls, meta.size(), strides=meta.stride(), storage_offset=meta.storage_offset(), dtype=meta.dtype,
            device=CUDA,
        )  # fmt: skip
        made.blank, made.numbers, made.memory = meta, values, memory
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return _FUNCTIONS.get(func, func)(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = next(leaf for leaf in _leaves([*args, *(kwargs or {}).values()]) if isinstance(leaf, DeviceTensor))
        return found.memory.device.dispatch(func, args, kwargs or {})

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"DeviceTensor({list(self.shape)}, {self.dtype})"


class Mark:
    """A place in a stream."""

    is_reached = False


class Stream:
    """Stands for `torch.cuda.Stream`: work in order. `queue`: what is still to be done, if the device computes.

    `cuda_stream` is one of 32 in turn, as torch gives them.
    """

    def __init__(self, device: FakeCuda) -> None:
        self.owner, self.device, self.cuda_stream = device, CUDA, 1 + len(device.streams) % 32
        self.queue: deque[Work] = deque()
        device.streams.append(self)

    def put(self, work: Work) -> None:
        if self.owner.computes:
            self.queue.append(work)

    def mark(self) -> Mark:
        mark = Mark()
        self.put(lambda: setattr(mark, "is_reached", True))
        return mark

    def run_until(self, mark: Mark | None = None) -> None:
        """Does all work, or that before a place."""
        while self.queue and not (mark and mark.is_reached):
            self.queue.popleft()()

    def synchronize(self) -> None:
        self.owner.wait_for("a stream")

    def wait_event(self, event: Event) -> None:
        if event.place is not None:
            stream, mark = event.place
            self.put(lambda: stream.run_until(mark))

    def wait_stream(self, other: Stream) -> None:
        event = Event(self.owner)
        event.record(other)
        self.wait_event(event)


class Event:
    """Stands for `torch.cuda.Event`: a place in a stream, once it is recorded."""

    place: tuple[Stream, Mark] | None = None

    def __init__(self, device: FakeCuda) -> None:
        self.owner = device

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self.owner.current_stream
        self.place = stream, stream.mark()

    def synchronize(self) -> None:
        self.owner.check_event_wait()
        if self.place is not None:
            stream, mark = self.place
            with self.owner.computing():
                for other in self.owner.streams if self.owner.others_first else ():
                    if other is not stream:
                        other.run_until()
                stream.run_until(mark)


class Graph:
    """Stands for `torch.cuda.CUDAGraph`: what was launched during a capture, to be queued again by each replay."""

    def __init__(self, device: FakeCuda) -> None:
        self.owner = device
        self.work: list[Work] = []

    def pool(self) -> Graph:
        return self

    def replay(self) -> None:
        for work in self.work:
            self.owner.enqueue(work)

    def reset(self) -> None:
        """Frees what the graph holds."""


class FakeCuda(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A device to be entered by `with`, which is `cuda:0` from then on; one at a time.

    launches:  how often each Triton kernel was launched
    faults:    what was raised
    allocated, peak: bytes, as if memory were given out by the byte
    """

    # As torch's FakeTensorMode: then torch does not look for a driver when a tensor is made on `cuda`.
    _mode_key = torch._C._TorchDispatchModeKey.FAKE

    computes = False
    multiprocessors = 132

    def __init__(
        self, *, memory_bytes: int = 80 * 2**30, capability: tuple[int, int] = (9, 0), others_first: bool = False
    ) -> None:
        """others_first: when the host waits for a stream, all others run ahead as far as they can"""
        super().__init__()  # type: ignore[no-untyped-call]
        self.memory_bytes, self.capability, self.others_first = memory_bytes, capability, others_first
        self.launches: Counter[str] = Counter()
        self.faults: list[DeviceFault] = []
        self.allocated = self.peak = 0
        self.streams: list[Stream] = []
        self.default_stream = self.current_stream = Stream(self)
        self.capturing: Graph | None = None
        self._may_wait = True
        self._in_host_copy = False
        self._computing = False
        self._outcomes: dict[Any, tuple[Callable[..., Any], list[int | Tensor]]] = {}
        """By operation and shapes: the kind of result, and arguments that it returns, by number, or tensors like it."""
        self._pinned: dict[int, Tensor] = {}
        self._made_up = 0
        self._stack = ExitStack()

    # Memory and work.

    def allocate(self, blank: Tensor) -> Tensor:
        """Memory for the values of a tensor."""
        if not self.computes:
            return blank
        made = torch.empty_strided(blank.size(), blank.stride(), dtype=blank.dtype)
        poison(made)
        if self.capturing is not None:  # each replay begins with garbage again
            self.enqueue(lambda: poison(made))
        return made

    def took(self, memory: Memory) -> None:
        if self.allocated + memory.num_bytes > self.memory_bytes:
            memory.num_bytes = 0
            raise torch.OutOfMemoryError("The fake device is out of memory.")
        self.allocated += memory.num_bytes
        self.peak = max(self.peak, self.allocated)

    def freed(self, memory: Memory) -> None:
        self.allocated -= memory.num_bytes
        values = memory.values
        if memory.graph is None:
            memory.stream.put(lambda: poison(values))
        elif memory.graph is self.capturing:
            self.enqueue(lambda: poison(values))

    def enqueue(self, work: Work) -> None:
        """Adds work on the values of tensors to the current stream, or to the graph that is captured."""
        if self.capturing is None:
            self.current_stream.put(work)
        elif self.computes:
            self.capturing.work.append(work)

    def copy_to_device(self, target: Tensor, source: Tensor) -> None:
        """Enqueues a copy from pinned memory to the values of a tensor."""
        if not self.computes:
            return
        seen = source.clone()

        def copy() -> None:
            if not torch.equal(_bytes(seen), _bytes(source)):
                self.fail(HostMemoryReused("The host overwrote memory before its copy to the device was done."))
            target.copy_(source)

        self.enqueue(copy)

    def copy_to_host(self, target: Tensor, source: Tensor) -> None:
        """Enqueues a copy to pinned memory."""
        if self.computes:
            poison(target)
            self.enqueue(lambda: target.copy_(source))
        else:
            self._made_up = (self._made_up + 7) % 31  # small numbers, which are ids of tokens in any model
            target.fill_(0 if target.dtype == torch.uint8 else self._made_up)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Operations are done on the CPU."""
        before, self._computing = self._computing, True
        try:
            with torch.inference_mode(False), torch.no_grad():
                yield
        finally:
            self._computing = before

    # Waiting.

    def fail(self, fault: DeviceFault) -> NoReturn:
        self.faults.append(fault)
        raise fault

    def wait_for(self, what: str) -> None:
        """The host waits until all work is done. Fails where it must not wait."""
        if self.capturing is not None:
            self.fail(HiddenWait(f"The host waits for {what} during a capture."))
        if not self._may_wait:
            self.fail(HiddenWait(f"The host waits for {what}."))
        with self.computing():
            for stream in self.streams:
                stream.run_until()

    def check_event_wait(self) -> None:
        """The host waits for an event. Fails where it must not."""
        if self.capturing is not None or not (self._may_wait or self._in_host_copy):
            self.fail(HiddenWait("The host waits for an event."))

    @contextmanager
    def no_waits(self) -> Iterator[None]:
        """The host may wait only within `HostCopy.get`."""
        before, self._may_wait = self._may_wait, False
        try:
            yield
        finally:
            self._may_wait = before

    # Operations.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.dispatch(func, args, kwargs or {})

    def dispatch(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if self._computing:
            return func(*args, **kwargs)
        leaves = _leaves([*args, *kwargs.values()])
        there = [leaf for leaf in leaves if type(leaf) is DeviceTensor]
        kinds = [leaf.type for leaf in leaves if isinstance(leaf, torch.device)]
        name = func._overloadpacket.__name__
        with torch.inference_mode(False), torch.no_grad():
            if name == "_has_compatible_shallow_copy_type":  # asked by Module.to
                return False
            if name == "copy_" and there:
                return self._copy_into(*args, **kwargs)
            if name in COPIES and kinds and (kinds[0] == "cuda") != bool(there):
                return self._copy(func, args, kwargs)
            if not there and "cuda" not in kinds:
                return self._on_host(func, name, args, kwargs)
            if "cpu" in kinds:  # such as empty_like(..., device="cpu")
                return self._on_host(func, name, _mapped(_blank, args), _mapped(_blank, kwargs))
            if name in WAITING or _sizes_by_value(func, name, args, kwargs):
                self.wait_for(f"{name} of {there}")
                return self._compute_now(func, args, kwargs)
            self._check_devices(func, name, leaves, there)
            return self._compute(func, there, args, kwargs)

    def _compute_now(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Result for a host that has waited for an operation."""
        if not self.computes and func is aten._local_scalar_dense.default:
            return args[0].dtype.is_floating_point and 0.0  # made up, and False for a comparison
        assert self.computes, f"{func} needs a device that computes."
        with self.computing():
            found = func(*mapped_numbers(args), **mapped_numbers(kwargs))
        return DeviceTensor(found.to("meta"), found, Memory(self, found)) if isinstance(found, Tensor) else found

    def _check_devices(self, func: Any, name: str, leaves: Sequence[Any], there: Sequence[Tensor]) -> None:
        takes_numbers = torch.Tag.pointwise in func.tags or name.startswith(("index_put", "masked_fill", "fill"))
        for leaf in leaves:
            on_host = isinstance(leaf, Tensor) and not isinstance(leaf, DeviceTensor)
            if on_host and not (leaf.dim() == 0 and takes_numbers):
                self.fail(DeviceMix(f"{func} gets a tensor on the host, {_described(leaf)}, and {list(there)}."))

    def _on_host(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        if name in ("pin_memory", "_pin_memory"):
            return self.pin(args[0].clone())
        if name == "is_pinned":
            return self.is_pinned(args[0])
        if not kwargs.get("pin_memory"):
            return func(*args, **kwargs)
        return self.pin(func(*args, **kwargs | {"pin_memory": False}))

    def pin(self, tensor: Tensor) -> Tensor:
        """Memory of the host that the device can copy from and to."""
        self._pinned[tensor.untyped_storage().data_ptr()] = tensor  # kept, so that no other memory has its address
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.numel() == 0 or tensor.untyped_storage().data_ptr() in self._pinned

    def _copy(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
        """A copy of a tensor from the host to the device, or back."""
        source = args[0]
        named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
        dtype = named.get("dtype") or source.dtype
        meta = torch.empty_like(_blank(source), dtype=dtype, device="meta")
        if isinstance(source, DeviceTensor):
            target = torch.empty_strided(meta.size(), meta.stride(), dtype=dtype)
        else:
            target = self._make(meta)
        return self._copy_into(target, source, bool(named.get("non_blocking")))

    def _copy_into(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if isinstance(target, DeviceTensor) and isinstance(source, DeviceTensor):
            pair = target, source
            return self._compute(aten.copy_.default, pair, pair, {})  # type: ignore[no-any-return]
        to_device = isinstance(target, DeviceTensor)
        host = source if to_device else target
        what = f"a copy {'from' if to_device else 'to'} {_described(host)} of the host"
        if not non_blocking:
            what += ", which is to block"
        elif not self.is_pinned(host):
            what += ", which is not pinned"
        elif to_device and not (source.is_contiguous() and source.dtype == target.dtype):
            what += ", which torch converts first, into memory that is not pinned"
        elif not to_device and not (target.is_contiguous() and source.dtype == target.dtype):
            what += ", which torch converts after it has arrived"
        elif self.capturing is not None:
            self.fail(DeviceFault(f"A graph would read the host's memory when it is replayed: {what}."))
        else:
            (self.copy_to_device if to_device else self.copy_to_host)(_numbers(target), _numbers(source))
            return target
        self.wait_for(what)
        if self.computes:
            _numbers(target).copy_(_numbers(source))
        return target

    def _compute(self, func: Any, inputs: Sequence[DeviceTensor], args: Any, kwargs: dict[str, Any]) -> Any:
        """An operation. inputs: the tensors on the device in its arguments"""
        numbers, named = mapped_numbers(args), mapped_numbers(kwargs)
        key = func, *kwargs, *map(_key, _leaves([*args, *kwargs.values()]))
        outcome = self._outcomes.get(key)
        if outcome is None:
            found = func(*_mapped(_blank, args), **_mapped(_blank, kwargs))
            blanks, kind = _leaves([found]), type(found) if isinstance(found, tuple | list) else next
            owners = {tensor.blank.untyped_storage()._cdata: tensor.memory for tensor in inputs}
            memories = [owners.get(blank.untyped_storage()._cdata) for blank in blanks]
            if None not in memories and not func._schema.is_mutable:
                views = _leaves([func(*numbers, **named)]) if self.computes else blanks
                return kind(map(DeviceTensor, blanks, views, memories))  # type: ignore[arg-type]
            given = {id(tensor.blank): place for place, tensor in enumerate(inputs)}
            outcome = self._outcomes[key] = kind, [given.get(id(blank), blank) for blank in blanks]
        made = [inputs[one] if isinstance(one, int) else self._make(one) for one in outcome[1]]
        if self.computes and not func._overloadpacket.__name__.startswith(("empty", "new_empty")):
            fresh = [] if func._schema.is_mutable else [tensor.numbers for tensor in made]
            self.enqueue(_work(func, numbers, named, fresh))
        return outcome[0](iter(made))

    def _make(self, meta: Tensor) -> DeviceTensor:
        """A tensor like another one, in memory of its own."""
        blank = torch.empty_strided(meta.size(), meta.stride(), dtype=meta.dtype, device="meta")
        values = self.allocate(blank)
        return DeviceTensor(blank, values, Memory(self, values))

    def launch(self, kernel: Any, run: Callable[..., object], args: Any, kwargs: dict[str, Any]) -> None:
        """A launch of a Triton kernel."""
        for tensor in _leaves([*args, *kwargs.values()]):
            if isinstance(tensor, Tensor) and not isinstance(tensor, DeviceTensor):
                self.fail(DeviceMix(f"The kernel {kernel.__name__} gets {_described(tensor)} on the host."))
        self.launches[kernel.__name__] += 1
        if self.computes:
            args, kwargs = mapped_numbers(args), mapped_numbers(kwargs)
            self.enqueue(lambda: run(kernel, *args, **kwargs))

    # torch.cuda.

    def __enter__(self) -> Self:
        torch._C._ensureCUDADeviceGuardSet()  # builds of torch with CUDA ask the driver otherwise
        self._stack.enter_context(_only_lift_cpu_tensors())
        for name, stand_in in self._stand_ins().items():
            self._stack.enter_context(patch.object(torch.cuda, name, stand_in))
        self._stack.enter_context(patch.object(torch, "Generator", _Generator))
        self._stack.enter_context(patch.object(HostCopy, "get", self._host_copy_get(HostCopy.get)))
        # They wait for the device to compare its numbers.
        if not self.computes:
            self._stack.enter_context(patch.object(fallback, "is_accelerator", lambda _: False))
        self._stack.enter_context(self._triton())
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._stack.close()
        if self.faults and (error[0] is None or not issubclass(error[0], DeviceFault)):
            raise self.faults[0]

    def _host_copy_get(self, get: Callable[[HostCopy], Any]) -> Callable[[HostCopy], Any]:
        def get_and_wait(copy: HostCopy) -> Any:
            self._in_host_copy = True
            try:
                return get(copy)
            finally:
                self._in_host_copy = False

        return get_and_wait

    @contextmanager
    def _triton(self) -> Iterator[None]:
        try:
            from triton.runtime.interpreter import InterpretedFunction
        except ImportError:
            yield
            return
        run = InterpretedFunction.run
        with patch.object(InterpretedFunction, "run", lambda kernel, *a, **k: self.launch(kernel, run, a, k)):
            yield

    def _stand_ins(self) -> dict[str, Any]:
        """Stand-ins for functions and classes of `torch.cuda`."""
        major, minor = self.capability
        properties = SimpleNamespace(
            name="Fake GPU",
            major=major,
            minor=minor,
            total_memory=self.memory_bytes,
            multi_processor_count=self.multiprocessors,
            shared_memory_per_multiprocessor=228 * 1024,
            max_threads_per_multi_processor=2048,
            warp_size=32,
        )

        def use(stream: Stream) -> None:
            self.current_stream = stream

        @contextmanager
        def on_stream(stream: Stream | None) -> Iterator[None]:
            before = self.current_stream
            use(stream or before)
            try:
                yield
            finally:
                use(before)

        @contextmanager
        def capture(
            graph: Graph, pool: object = None, stream: Stream | None = None, *_: Any, **__: Any
        ) -> Iterator[None]:
            self.wait_for("a capture, before which torch waits")
            with on_stream(stream or Stream(self)):
                self.capturing = graph
                try:
                    yield
                finally:
                    self.capturing = None

        def bound(kind: type[Any]) -> type[Any]:
            """The class without its argument."""
            return type(kind.__name__, (kind,), {"__init__": lambda made, *_, **__: kind.__init__(made, self)})

        def reset_peak(*_: Any) -> None:
            self.peak = self.allocated

        return {
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "is_bf16_supported": lambda *_: major >= 8,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "set_device": lambda _: None,
            "device": lambda _: nullcontext(),
            "get_device_properties": lambda *_: properties,
            "get_device_capability": lambda *_: self.capability,
            "get_arch_list": lambda: [f"sm_{major}{minor}"],
            "get_device_name": lambda *_: properties.name,
            "mem_get_info": lambda *_: (self.memory_bytes - self.allocated, self.memory_bytes),
            "memory_allocated": lambda *_: self.allocated,
            "memory_reserved": lambda *_: self.allocated,
            "max_memory_allocated": lambda *_: self.peak,
            "reset_peak_memory_stats": reset_peak,
            "empty_cache": lambda: None,
            "synchronize": lambda *_: self.wait_for("the whole device"),
            "current_stream": lambda *_: self.current_stream,
            "default_stream": lambda *_: self.default_stream,
            "set_stream": use,
            "stream": on_stream,
            "Stream": bound(Stream),
            "Event": bound(Event),
            "CUDAGraph": bound(Graph),
            "graph": capture,
            "graph_pool_handle": object,
            "is_current_stream_capturing": lambda: self.capturing is not None,
        }


class DeferredDevice(FakeCuda):  # type: ignore[no-untyped-call]
    """See the module."""

    computes = True
    multiprocessors = 2  # since the interpreter runs one program after the other


@contextmanager
def _only_lift_cpu_tensors() -> Iterator[None]:
    """Lets `torch.tensor(..., device="cuda")` make its tensor on the host first, and then move it."""
    before = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        yield
    finally:
        torch._C._set_only_lift_cpu_tensors(before)


class _Generator(torch.Generator):
    """Stands for a generator on any device."""

    def __new__(cls, device: object = None) -> Self:
        return super().__new__(cls)


def _key(leaf: Any) -> Any:
    """All of an argument that the shapes of the results depend on."""
    if isinstance(leaf, DeviceTensor):
        return leaf.blank.size(), leaf.blank.stride(), leaf.dtype
    return (leaf.size(), leaf.dtype) if isinstance(leaf, Tensor) else (type(leaf), leaf)


def _leaves(values: Sequence[Any]) -> list[Any]:
    """Leaves of nested lists and tuples."""
    found = []
    for value in values:
        found += _leaves(value) if isinstance(value, tuple | list) else [value]
    return found


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """A nested value with all leaves changed."""
    if isinstance(value, dict):
        return {name: _mapped(change, one) for name, one in value.items()}
    if not isinstance(value, tuple | list):
        return change(value)
    changed = [_mapped(change, one) for one in value]
    return value._make(changed) if hasattr(value, "_make") else tuple(changed) if isinstance(value, tuple) else changed


def mapped_numbers(value: Any) -> Any:
    """A nested value with the tensors that hold the numbers of those on the device."""
    return _mapped(_numbers, value)


def _blank(leaf: Any) -> Any:
    if isinstance(leaf, DeviceTensor):
        return leaf.blank
    if isinstance(leaf, torch.Generator):
        return None
    return torch.device("meta") if isinstance(leaf, torch.device) and leaf.type == "cuda" else leaf


def _numbers(leaf: Any) -> Any:
    if isinstance(leaf, DeviceTensor):
        return leaf.numbers
    return torch.device("cpu") if isinstance(leaf, torch.device) and leaf.type == "cuda" else leaf


def _work(func: Any, args: Any, kwargs: dict[str, Any], targets: Sequence[Tensor]) -> Work:
    """Runs an operation, and puts what it returns where it belongs; without targets it writes in place."""

    def work() -> None:
        found = ON_CPU.get(func, func)(*args, **kwargs)
        for target, value in zip(targets, _leaves([found]) if targets else (), strict=True):
            target.copy_(value)

    return work


def _mm(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    return left.to(dtype) @ right.to(dtype)


def _mm_out(left: Tensor, right: Tensor, dtype: torch.dtype, *, out: Tensor) -> Tensor:
    return out.copy_(_mm(left, right, dtype))


def _histc(counted: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return torch.histc(counted.float(), *args, **kwargs).to(counted.dtype)


ON_CPU: dict[Any, Callable[..., Any]] = {aten.mm.dtype: _mm, aten.mm.dtype_out: _mm_out, aten.histc.default: _histc}
"""For operations that torch does not have on a CPU, or not for these types."""


def _sizes_by_value(func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether the host needs values of a tensor on the device to know the size of something."""
    if name.startswith(("index", "_index_put", "_unsafe_index")) and isinstance(args[1], list | tuple):
        return any(isinstance(one, Tensor) and one.dtype in (torch.bool, torch.uint8) for one in args[1])
    if name == "repeat_interleave":
        repeats = args[0] if len(args) == 1 else args[1]
        return isinstance(repeats, Tensor) and kwargs.get("output_size") is None
    return name == "where" and len(args) == 1


def poison(values: Tensor) -> None:
    """Overwrites a tensor with what nobody can have wanted."""
    if values.is_floating_point():
        values.fill_(torch.nan)
    else:
        values.fill_(0 if values.dtype == torch.uint8 else 1)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _described(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _indexed(tensor: Tensor, index: Any) -> tuple[Tensor, list[Tensor | None]]:
    """A view by all ints, slices and Nones of an index, and the tensors that are left, one for each dimension.

    Written here because torch's own function asks for a driver when it is given a tensor on `cuda`.
    """
    items = list(index) if isinstance(index, tuple) else [index]
    view, left, dim = tensor, list[Tensor | None](), 0
    for number, item in enumerate(items):
        if item is None:
            view = view.unsqueeze(dim)
            dim += 1
        elif item is Ellipsis:
            dim = view.dim() - sum(_width(one) for one in items[number + 1 :])
        elif isinstance(item, slice):
            view = aten.slice.Tensor(view, dim, item.start, item.stop, item.step or 1)
            dim += 1
        elif np.ndim(item) > 0:
            there = item if isinstance(item, DeviceTensor) else torch.as_tensor(item).to(CUDA)  # which waits
            left += [None] * (dim - len(left)) + [there]
            dim += _width(item)
        else:
            view = aten.select.int(view, dim, item.item() if isinstance(item, Tensor) else operator.index(item))
    return view, left


def _width(item: Any) -> int:
    """Dimensions that a part of an index takes."""
    if item is None or item is Ellipsis:
        return 0
    return np.ndim(item) if getattr(item, "dtype", None) in (torch.bool, np.bool_) else 1


def _getitem(tensor: Tensor, index: Any) -> Tensor:
    if not isinstance(tensor, DeviceTensor):
        raise DeviceMix(f"A tensor on the host is indexed with {index}.")
    view, left = _indexed(tensor, index)
    return aten.index.Tensor(view, left) if left else view


def _setitem(tensor: Tensor, index: Any, value: Any) -> None:
    view, left = _indexed(tensor, index)
    if len(left) == 1 and (mask := left[0]) is not None and mask.dtype == torch.bool and not isinstance(value, Tensor):
        view.masked_fill_(mask, value)
    elif left:
        value = value if isinstance(value, Tensor) else torch.full((), value, dtype=tensor.dtype, device=CUDA)
        aten.index_put_.default(view, left, value)
    elif isinstance(value, Tensor):
        aten.copy_.default(view, value)
    else:
        aten.fill_.Scalar(view, value)


def _numpy(tensor: Tensor, *_: Any, **__: Any) -> Any:
    raise TypeError(f"{tensor} is on cuda:0 and cannot be an array of numpy.")


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    Tensor.__getitem__: _getitem,
    Tensor.__setitem__: _setitem,
    Tensor.copy_: aten.copy_.default,
    Tensor.contiguous: aten.contiguous.default,
    Tensor.__invert__: aten.bitwise_not.default,
    Tensor.__bool__: lambda tensor: bool(tensor.item()),
    Tensor.__int__: lambda tensor: int(tensor.item()),
    Tensor.__index__: lambda tensor: int(tensor.item()),
    Tensor.__float__: lambda tensor: float(tensor.item()),
    Tensor.tolist: lambda tensor: tensor.cpu().tolist(),
    Tensor.numpy: _numpy,
    Tensor.__array__: _numpy,
    Tensor.nonzero: aten.nonzero.default,
    torch.nonzero: aten.nonzero.default,
}
"""Functions that torch does not pass on to a mode, or for which it asks for a driver first."""
