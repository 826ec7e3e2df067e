"""GPUs that are not served by `torch.cuda`, on a machine without them: tensors that say so and compute on the CPU.

It raises for what such a GPU refuses: operations with tensors of the host, pinned memory, and float64 on Apple's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

CPU = torch.device("cpu")

PROPERTIES = "device dtype shape ndim layout requires_grad is_cuda is_cpu is_leaf is_nested".split()
METHODS = "size dim stride numel element_size is_floating_point __len__".split()
PLAIN = {getattr(Tensor, name).__get__ for name in PROPERTIES} | {getattr(Tensor, name) for name in METHODS}
"""All a tensor answers by itself."""

COPIES = {Tensor.to, Tensor.cpu, Tensor.copy_, Tensor.__setitem__}


class DeviceTensor(Tensor):
    """A tensor of another device; `values` has its numbers, on the CPU."""

    values: Tensor

    @staticmethod
    def __new__(cls, values: Tensor, device: torch.device) -> DeviceTensor:
        made: DeviceTensor = Tensor._make_wrapper_subclass(
            cls, values.size(), strides=values.stride(), dtype=values.dtype, device=device
        )
        made.values = values
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"{func} was not called by a function of torch")


class OtherDevice(TorchFunctionMode):
    """The device to be entered by `with`.

    used: names of the functions that were called with its tensors
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.device = torch.device(name)
        self.used: set[str] = set()

    def place(self, network: nn.Module) -> Any:
        """Moves a network to the device; `nn.Module.to` cannot."""
        for module in network.modules():
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None:
                        tensors[name] = DeviceTensor(tensor.detach(), self.device)  # type: ignore[assignment]
        return network

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        is_here = any(isinstance(tensor, DeviceTensor) for tensor in tensors)
        target = CPU if func is Tensor.cpu else self._target(args, kwargs) or (self.device if is_here else CPU)
        if (not is_here and target == CPU) or func in PLAIN:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if is_here and func not in COPIES and any(not isinstance(one, DeviceTensor) and one.dim() for one in tensors):
            raise RuntimeError(f"{func.__name__}: Expected all tensors to be on the same device")
        if func in (Tensor.numpy, Tensor.pin_memory) or kwargs.get("pin_memory"):
            raise TypeError(f"{func.__name__} does not work on {self.device}")
        self.used.add(func.__name__)
        here = pytree.tree_map(_on_cpu, (args, kwargs))
        result = func(*here[0], **here[1])
        if args and isinstance(args[0], DeviceTensor) and result is args[0].values:  # in place, or nothing to do
            return args[0] if target != CPU else result
        return result if target == CPU else pytree.tree_map(self._wrap, result)

    def _target(self, args: Any, kwargs: Any) -> torch.device | None:
        """The device that a call names."""
        named = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.device)]
        named += [torch.device(one) for one in (kwargs.get("device"),) if isinstance(one, str)]
        return named[0] if named else None

    def _wrap(self, result: Any) -> Any:
        if not isinstance(result, Tensor):
            return result
        if self.device.type == "mps" and result.dtype == torch.float64:
            raise TypeError(
                "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64."
            )
        return DeviceTensor(result, self.device)


def _on_cpu(one: Any) -> Any:
    if isinstance(one, DeviceTensor):
        return one.values
    return CPU if isinstance(one, torch.device) else one
