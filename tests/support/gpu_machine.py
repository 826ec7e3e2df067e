"""Machines with and without GPUs, sound and broken ones, as torch and Linux describe them. No device computes."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from cbatch.runtime import device

ONES = torch.ones


class Gpu(NamedTuple):
    """A GPU as torch describes it. `error`: what is raised when it is used."""

    name: str = "NVIDIA H100"
    capability: tuple[int, int] = (9, 0)
    error: str = ""
    total_memory: int = 80 * 2**30


@dataclass
class Machine:
    """Facts of a machine and its torch. The default is a sound one: CUDA 13, a driver for it, and one H100."""

    folder: Path
    patch: pytest.MonkeyPatch
    gpus: Sequence[Gpu] = (Gpu(),)
    driver: str | None = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n"
    nodes: Sequence[str] = ("nvidia0", "nvidiactl")
    cuda: str | None = "13.0"
    hip: str | None = None
    start_error: str = ""
    architectures: Sequence[str] = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120")
    xpus: Sequence[Gpu] = ()
    has_mps: bool = False
    environment: dict[str, str] = field(default_factory=dict)

    def install(self) -> None:
        patch, version = self.patch, self.folder / "version"
        if self.driver is not None:
            version.write_text(self.driver)
        for node in self.nodes:
            (self.folder / node).touch()
        patch.setattr(device, "NVIDIA_DRIVER", version)
        patch.setattr(device, "DEVICES", self.folder)
        patch.setattr(device, "WSL_DRIVER", self.folder / "wsl")
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        patch.delenv("CBATCH_DEVICE", raising=False)
        for name, value in self.environment.items():
            patch.setenv(name, value)
        build = f"+cu{self.cuda.replace('.', '')}" if self.cuda else "+rocm6.4" if self.hip else "+cpu"
        patch.setattr(torch, "__version__", f"2.11.0{build}")
        patch.setattr(torch.version, "cuda", self.cuda)
        patch.setattr(torch.version, "hip", self.hip)
        works = bool(self.gpus) and not self.start_error
        self._fake(torch.cuda, self.gpus if works else (), works)
        patch.setattr(torch.cuda, "init", self._start)
        patch.setattr(torch.cuda, "get_device_capability", lambda device=None: self._gpu(device).capability)
        patch.setattr(torch.cuda, "get_device_name", lambda device=None: self._gpu(device).name)
        patch.setattr(torch.cuda, "get_arch_list", lambda: list(self.architectures))
        self._fake(torch.xpu, self.xpus, bool(self.xpus))
        self._fake(torch.mps, [Gpu("Apple M4")], self.has_mps)
        patch.setattr(torch, "ones", self._ones)

    def _fake(self, module: Any, gpus: Sequence[Gpu], is_available: bool) -> None:
        self.patch.setattr(module, "is_available", lambda: self._warn() or is_available)
        self.patch.setattr(module, "device_count", lambda: len(gpus))
        self.patch.setattr(module, "get_device_properties", lambda device: gpus[device.index], raising=False)

    def _warn(self) -> None:
        if self.start_error:
            warnings.warn(
                f"CUDA initialization: {self.start_error} (Triggered internally at CUDA.cpp:119.)", stacklevel=2
            )

    def _start(self) -> None:
        raise RuntimeError(self.start_error or "No CUDA GPUs are available")

    def _gpu(self, device: Any) -> Gpu:
        return self.gpus[torch.device(device).index or 0]

    def _ones(self, *sizes: int, device: torch.device | None = None, **options: Any) -> Any:
        if device is None or device.type == "cpu":
            return ONES(*sizes, **options)
        gpu = (self.xpus if device.type == "xpu" else self.gpus)[device.index] if device.type != "mps" else Gpu()
        if gpu.error:
            raise RuntimeError(gpu.error)
        return None
