"""Processes that compute every step together: sums and gatherings of tensors over them, by NCCL or gloo."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from cbatch.runtime.device import is_cuda

_CONNECT, _TIMEOUT = timedelta(minutes=2), timedelta(minutes=30)
"""How long a process waits for the others to come, and then for what they compute: they may be stopped, as by Ctrl-Z.
Whoever has started them notices at once if one dies.
"""


class ProcessGroup:
    """One of `size` processes, whose number is `rank`; the first has number 0.

    All processes call the same methods in the same order, with tensors of the same shapes. On a GPU nothing waits for
    the device, so that a CUDA graph may hold the calls.
    """

    def __init__(self, store: str, rank: int, size: int, device: torch.device) -> None:
        """store: a file by which the processes find each other; there is none yet"""
        distributed: Any = import_module("torch.distributed")

        self.rank, self.size, self.device = rank, size, device
        common = distributed.FileStore(store, size), rank, size
        if is_cuda(device):
            options = distributed.ProcessGroupNCCL.Options()
            options._timeout = _TIMEOUT
            self._backend = distributed.ProcessGroupNCCL(*common, options)
        else:
            options = distributed.ProcessGroupGloo._Options()
            options._timeout = _CONNECT
            options._devices = [distributed.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
            self._backend = distributed.ProcessGroupGloo(*common, options)
            self._backend._set_default_timeout(_TIMEOUT)

    def all_reduce(self, part: Tensor) -> None:
        """Sums the parts of all processes, in place."""
        self._backend.allreduce([part]).wait()

    def all_gather(self, part: Tensor) -> Tensor:
        """The parts of all processes [size, *shape]."""
        parts = part.new_empty(self.size * len(part), *part.shape[1:])
        self._backend._allgather_base(parts, part.contiguous()).wait()
        return parts.view(self.size, *part.shape)

    def broadcast(self, tensor: Tensor) -> None:
        """Overwrites the tensor of every process with that of the first."""
        self._backend.broadcast([tensor]).wait()

    def smallest(self, *numbers: int) -> list[int]:
        """The smallest of the numbers that each process gives, place by place."""
        tensor = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        return self.all_gather(tensor).amin(dim=0).tolist()

    def gather_columns(self, part: Tensor, widths: Sequence[int], out: Tensor) -> None:
        """out [R, columns] = the columns of all processes side by side.  part: [R, own columns], widths: of each"""
        widest = max(widths)
        if part.shape[1] < widest:
            part = torch.nn.functional.pad(part, (0, widest - part.shape[1]))
        parts = self.all_gather(part)
        for target, found, width in zip(torch.split(out, list(widths), dim=1), parts, widths, strict=True):
            target.copy_(found[:, :width])

    def abort(self) -> None:
        """Ends what waits for a process that is gone. Nothing can be computed together any more."""
        self._backend.abort()
