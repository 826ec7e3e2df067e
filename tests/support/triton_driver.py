"""A Triton driver for machines without a GPU: what a launch does on the host is real, the device is not there.

For processes that do not interpret kernels (TRITON_INTERPRET unset or 0). Tensors may be on the CPU or on torch's meta
device. Works with the drivers of Triton 3.6 to 3.9.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import driver
from triton.runtime.jit import JITFunction

_device_numbers = itertools.count(1000)
"""A number for each driver, because Triton keeps what it compiled by the number of the device."""


Choice = bool | Callable[[str, dict[str, str]], bool]
"""Of kernels: all, none, or by their names and `Compilation.arguments`."""


@dataclass(frozen=True)
class Compilation:
    """Triton's compilation for one launch.

    arguments: what the kernel is compiled for, by the names of its arguments and options: the value of a constant, else
               the type, marked if the kernel relies on a multiple of 16
    compiled:  the `CompiledKernel`; None if it was only recorded
    """

    kernel: str
    arguments: dict[str, str]
    compiled: Any

    def differences(self, other: Compilation) -> list[str]:
        """A sentence for each argument for which the other was compiled differently."""
        names = self.arguments.keys() | other.arguments.keys()
        found = [(name, self.arguments.get(name), other.arguments.get(name)) for name in sorted(names)]
        return [f"{self.kernel}: {name} is {new}, and was {old}" for name, new, old in found if new != old]


class StubDriver(DriverBase):  # type: ignore[misc]
    """Stands in for the driver of one GPU.

    launches:     how often each kernel was launched
    compilations: what was compiled, in order
    """

    def __init__(self, capability: int = 90, *, compiles: Choice = False, max_shared: int = 2**31) -> None:
        """capability: of the chip, such as 90; compiles: whether kernels are compiled, else only recorded;
        max_shared: bytes of shared memory that a program may use, else its launch raises OutOfResources
        """
        self.target = GPUTarget("cuda", capability, 32)
        self.compiles = compiles
        self.max_shared = max_shared
        self.launches: Counter[str] = Counter()
        self.compilations: list[Compilation] = []
        self.utils = self
        self._number = next(_device_numbers)

    def changes(self, begin: int) -> list[str]:
        """Why kernels were compiled after the first `begin` compilations, a sentence for each argument that changed."""
        found = []
        for number, later in enumerate(self.compilations[begin:], begin):
            earlier = [one for one in self.compilations[:number] if one.kernel == later.kernel]
            differences: list[list[str]] = [later.differences(one) for one in earlier]
            fewest = min(map(len, differences), default=0)
            found += next((one for one in differences if len(one) == fewest), [f"{later.kernel} is new"])
        return found

    # What `JITFunction.run` and `CompiledKernel` ask of a driver.

    @classmethod
    def is_active(cls) -> bool:
        return False

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return self._number

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> Any:
        raise NotImplementedError("There is no device to measure on.")

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError("No launcher is compiled.")

    def launcher_cls(self, source: Any, _metadata: Any) -> Callable[..., None]:
        return self.launcher(source.fn.__name__)

    # What `utils` of a driver has.

    def get_device_properties(self, _device: int) -> dict[str, int]:
        return {"max_shared_mem": self.max_shared}

    def load_binary(self, _name: str, _binary: bytes, _shared: int, _device: int) -> tuple[Any, Any, int, int, int]:
        """Module, function, registers, spilled words, most threads."""
        return object(), object(), 0, 0, 1024

    def unload_module(self, _module: object) -> None:
        """Does nothing."""

    def launcher(self, kernel: str) -> Callable[..., None]:
        launches = self.launches

        def launch(*_: Any) -> None:
            launches[kernel] += 1

        return launch


class _RecordedKernel:
    """Parts of a `CompiledKernel` for `JITFunction.run`."""

    function = packed_metadata = None

    def __init__(self, launch: Callable[..., None]) -> None:
        self.run = launch

    def launch_metadata(self, _grid: Any, _stream: int, *_: Any) -> None:
        return None


@contextmanager
def stub_driver(capability: int = 90, *, compiles: Choice = False, max_shared: int = 2**31) -> Iterator[StubDriver]:
    """Launches on a `StubDriver` within the block; its parameters are described there."""
    stub = StubDriver(capability, compiles=compiles, max_shared=max_shared)
    compile_really = JITFunction._do_compile

    def compile_or_record(
        kernel: Any, key: str, signature: Any, device: int, constants: Any, options: Any, attributes: Any, warmup: bool
    ) -> Any:
        arguments, chosen = _arguments(kernel, signature, constants, options, attributes), stub.compiles
        is_chosen = chosen if isinstance(chosen, bool) else chosen(kernel.__name__, arguments)
        if device != stub.get_current_device() or is_chosen:
            compiled = compile_really(kernel, key, signature, device, constants, options, attributes, warmup)
        else:
            assert kernel.cache_key  # found here, as by a compilation, with the globals that launches then compare
            compiled = kernel.device_caches[device][0][key] = _RecordedKernel(stub.launcher(kernel.__name__))
        stub.compilations.append(Compilation(kernel.__name__, arguments, compiled if is_chosen else None))
        return compiled

    before = driver._active
    driver.set_active(stub)
    try:
        with patch.object(JITFunction, "_do_compile", compile_or_record):
            yield stub
    finally:
        driver.set_active(before)


def _arguments(kernel: Any, signature: Any, constants: Any, options: Any, attributes: Any) -> dict[str, str]:
    """See `Compilation.arguments`."""
    found = {name: str(kind) for name, kind in signature.items()}
    for (place, *_), value in constants.items():
        found[kernel.arg_names[place]] = repr(value)
    for (place, *_), attribute in attributes.items():
        if attribute:
            found[kernel.arg_names[place]] += ", a multiple of 16"
    return found | {name: repr(value) for name, value in vars(options).items() if name.startswith("num_")}
