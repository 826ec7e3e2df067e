"""Functions that compute a part of an operation on a device: torch, the meaning, or Triton where it is faster."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any, Generic, ParamSpec, TypeVar

import torch

from cbatch.kernels.triton.occupancy import device_limits

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class DeviceOps:
    """The choice of functions for the operations of a model on a device. Those without a kernel of Triton are torch's.

    Sums, norms, angles, gates and the residual stream are float32 whatever the other tensors are. Nothing waits for a
    device, except experts and recurrent layers by torch, whose steps cannot be captured as graphs.

    triton:      whether Triton's kernels compute what they can
    heads_first: whether a block of the cache is [kv_heads, block_size, head_dim]; else [block_size, kv_heads, head_dim]
    batch_invariant: whether the bits of a row do not depend on other rows, or on how many there are. Recurrences are
                 left out
    capability:  of the chip, 90 for 9.0
    without:     names of kernels whose place torch takes, because they failed their checks
    """

    triton: bool = False
    heads_first: bool = False
    batch_invariant: bool = False
    capability: int = 0
    without: frozenset[str] = frozenset()

    @property
    def wait(self) -> bool:
        """Whether torch waits for the device in the place of any of its kernels."""
        return any(KERNELS[name].waits for name in self.without)

    def call(self, kernel: DeviceKernel[Any, R], arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> R:
        result: R = kernel.function_for(self)(*arguments, **keywords)
        return result


def by_torch(*, heads_first: bool = False) -> DeviceOps:
    """Operations of torch alone, for any device."""
    return DeviceOps(heads_first=heads_first)


def by_triton(device: torch.device) -> DeviceOps:
    """Triton's kernels. Raises ImportError without Triton."""
    import_module("triton")
    return DeviceOps(triton=True, heads_first=True, capability=device_limits(device).capability)


@dataclass(frozen=True, slots=True, eq=False)
class DeviceKernel(Generic[P, R]):
    """A function over tensors. Called with a `DeviceOps` and its arguments, it runs by what these say.

    meaning:  the function by torch: the oracle of the kernel, and what replaces it
    triton:   where its kernel is, of the same arguments, as module:function; empty if it has none
    updates:  which of its arguments is read and written
    is_product: it multiplies matrices
    waits:    the function by torch waits for the device

    An argument called `weights` is not a part of the step; one called `state` is followed by a `Recurrence`. Either
    function may take `capability`, `batch_invariant` and `heads_first` in addition, by keyword.
    """

    name: str
    meaning: Callable[P, R]
    triton: str = ""
    updates: str = ""
    is_product: bool = False
    waits: bool = False
    _found: dict[tuple[Any, ...], Callable[..., R]] = field(default_factory=dict)

    def __call__(self, ops: DeviceOps, *arguments: P.args, **keywords: P.kwargs) -> R:
        return ops.call(self, arguments, keywords)

    def function_for(self, ops: DeviceOps) -> Callable[..., R]:
        """The function that computes it on such a device."""
        by_kernel = ops.triton and bool(self.triton) and self.name not in ops.without
        key = by_kernel, ops.heads_first, ops.batch_invariant, ops.capability
        if key not in self._found:
            function: Callable[..., R] = self.meaning
            if by_kernel:
                module, _, name = self.triton.partition(":")
                function = getattr(import_module(f"cbatch.kernels.triton.{module}"), name)
            wanted = inspect.signature(function).parameters
            given = {
                name: getattr(ops, name) for name in ("capability", "batch_invariant", "heads_first") if name in wanted
            }
            self._found[key] = partial(function, **given) if given else function
        return self._found[key]

    @property
    def parameters(self) -> list[str]:
        """The names of its arguments."""
        return list(inspect.signature(self.meaning).parameters)


KERNELS: dict[str, DeviceKernel[Any, Any]] = {}
"""All of them, by name."""


def device_kernel(
    triton: str = "", *, updates: str = "", is_product: bool = False, waits: bool = False
) -> Callable[[Callable[P, R]], DeviceKernel[P, R]]:
    """Makes a function of torch a `DeviceKernel`, whose fields these are."""

    def make(meaning: Callable[P, R]) -> DeviceKernel[P, R]:
        name = triton.partition(":")[2] or meaning.__name__
        kernel = DeviceKernel(name, meaning, triton, updates, is_product, waits)
        KERNELS[kernel.name] = kernel
        return kernel

    return make
