"""Stands for CUDA graphs where there is no GPU: a replay runs the captured function again, and checks that it may."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime.interpreter import GridExecutor

from cbatch.engine.cuda_graphs import Run


class Repeater:
    """Captures by noting every launch. A replay launches all again, and fails if one is different.

    So no number from the host and no address can change between capture and replay, as in a graph. Memory that is
    allocated in a replay holds NaN or large integers, as memory that other graphs have used since.
    """

    def __init__(self) -> None:
        self.captured = self.replayed = 0
        self.poisoned: Sequence[Tensor] = ()
        """Tensors that hold no results any more when the next replay begins."""

    def __call__(self, run: Run) -> Run:
        self.captured += 1
        with _launches() as captured:
            run()

        def replay() -> None:
            self.replayed += 1
            for tensor in self.poisoned:
                _poison(tensor)
            with _launches() as launched:
                run()
            assert launched == captured, "a replay cannot launch anything else than what was captured"

        return replay


class _Launches(TorchDispatchMode):
    """Notes torch's operations; memory is described by its address, or by its turn if it was allocated meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[object] = []
        self._allocated: dict[int, int] = {}
        self._held: list[Tensor] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.note(str(function), args, kwargs)
        result = function(*args, **kwargs)
        known = {_address(one) for one in _tensors((args, kwargs))}
        for tensor in _tensors(result):
            if _address(tensor) not in known | set(self._allocated):
                self._allocated[_address(tensor)] = len(self._held)
                self._held.append(tensor)
                if "empty" in str(function):
                    _poison(tensor)
        return result

    def note(self, name: str, *arguments: object) -> None:
        self.noted.append((name, self._describe(arguments)))

    def _describe(self, value: object) -> object:
        if isinstance(value, Tensor):
            address = _address(value)
            place = ("allocated", self._allocated[address]) if address in self._allocated else ("fixed", address)
            return (*place, value.storage_offset(), tuple(value.shape), value.stride(), value.dtype)
        if isinstance(value, tuple | list):
            return tuple(self._describe(one) for one in value)
        if isinstance(value, dict):
            return tuple((key, self._describe(one)) for key, one in sorted(value.items()))
        return repr(value)


@contextmanager
def _launches() -> Iterator[list[object]]:
    """Notes the operations of torch and the kernels of Triton that are launched."""
    mode, launch = _Launches(), GridExecutor.__call__

    def noting(executor: Any, *args: Any, **kwargs: Any) -> None:
        mode.note(executor.fn.__name__, executor.grid, args, kwargs)
        with _disable_current_modes():
            launch(executor, *args, **kwargs)

    with patch.object(GridExecutor, "__call__", noting), mode:
        yield mode.noted


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for one in value:
            yield from _tensors(one)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _poison(tensor: Tensor) -> None:
    with _disable_current_modes():
        tensor.fill_(torch.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max // 2)
