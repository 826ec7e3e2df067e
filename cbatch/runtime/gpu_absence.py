"""Why torch finds no GPU, in sentences for users: no driver, an old one, a build without CUDA, or hidden GPUs."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

import torch

from cbatch.base.errors import in_short

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
WSL_DRIVER = Path("/usr/lib/wsl/lib/libcuda.so.1")
DEVICES = Path("/dev")
"""Where Linux shows its drivers and GPUs. Tests put their own in place."""

OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
"""The oldest NVIDIA driver for each major version of CUDA.

https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html
"""

INSTALL = "pip install --force-reinstall torch"
INSTALL_CUDA_12 = f"{INSTALL} --index-url https://download.pytorch.org/whl/cu126"

_NONE = ("", "-1", "NoDevFiles")
"""Values of CUDA_VISIBLE_DEVICES that hide all GPUs on purpose; the last one is Slurm's."""

_HINTS = {
    "Found no NVIDIA driver": "libcuda.so.1 is missing: in a container, NVIDIA_DRIVER_CAPABILITIES must name compute",
    "Error 802": "start the service nvidia-fabricmanager",
    "Error 803": "the driver and its libraries are of different versions, so restart the machine",
    "Error 804": "use a container for this driver, or update the driver",
    "CUDA unknown error": "load the module nvidia_uvm again, or restart the machine",
}
"""What to do about an error that CUDA gives when it starts, by a part of its text."""


class Absence(NamedTuple):
    """Why torch finds no device of a kind. It is expected if the machine has none, or if somebody has hidden it."""

    reason: str
    is_expected: bool


def nvidia_driver() -> str | None:
    """Version of the loaded NVIDIA driver, such as `570.86.15`; empty if it does not tell; None if there is none."""
    try:
        text = NVIDIA_DRIVER.read_text()
    except OSError:
        return "" if WSL_DRIVER.exists() else None
    found = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", text)
    return found[0] if found else ""


def why_no_cuda() -> Absence:
    """Why torch finds neither an NVIDIA nor an AMD GPU."""
    driver, build = nvidia_driver(), f"torch {torch.__version__}"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    is_hidden = visible is not None and visible.strip() in _NONE
    if torch.version.hip is not None and (DEVICES / "kfd").exists():
        fix = "your user must be in the groups render and video"
        return Absence(f"{build} is a build for ROCm and finds no AMD GPU; {fix}", is_hidden)
    if driver is None:
        start = "" if torch.version.cuda else f"{build} is a build without CUDA, and "
        return Absence(f"{start}this machine has no NVIDIA driver", True)
    has_devices = any(DEVICES.glob("nvidia[0-9]*")) or WSL_DRIVER.exists()
    if torch.version.cuda is None:
        install = INSTALL_CUDA_12 if 0 < _branch(driver) < OLDEST_DRIVER[13] else INSTALL
        fix = f"install a build with CUDA: {install}"
        return Absence(
            f"{build} is a build without CUDA, and this machine has {_named(driver)}; {fix}",
            is_hidden or not has_devices,
        )
    if not has_devices:
        fix = "if this is a container, start it with --gpus all"
        return Absence(f"this machine has {_named(driver)}, but no GPU is in /dev; {fix}", is_hidden)
    return Absence(_why_not_started(build, driver, visible), is_hidden)


def _why_not_started(build: str, driver: str, visible: str | None) -> str:
    """What is wrong if a driver and GPUs are there, and torch was built for CUDA."""
    major, branch, error = int(str(torch.version.cuda).partition(".")[0]), _branch(driver), _start_error()
    oldest = OLDEST_DRIVER.get(major, 0)
    if 0 < branch < oldest or "too old" in error:
        is_for_12 = major > 12 and branch >= OLDEST_DRIVER[12]
        also = f", or install a build for CUDA 12: {INSTALL_CUDA_12}" if is_for_12 else ""
        return (
            f"{build} needs an NVIDIA driver of version {oldest} or newer, and this machine has {_named(driver)}; "
            f"update the driver{also}"
        )
    if visible is not None and "No CUDA GPUs" in error:
        return f"CUDA_VISIBLE_DEVICES={visible} hides all GPUs of this machine; unset it"
    hint = next((hint for part, hint in _HINTS.items() if part in error), "nvidia-smi may say more")
    return f"{build} cannot start CUDA on {_named(driver)} ({error}); {hint}"


def _start_error() -> str:
    """What CUDA answers when torch starts it. `is_available` only warns of it, and only once in a process."""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except Exception as error:  # torch, the driver and the runtime each raise their own kinds
        return in_short(error)
    return "it finds no device"


def _branch(driver: str) -> int:
    """The first number of a driver's version; 0 if it is unknown."""
    return int(driver.partition(".")[0] or 0)


def _named(driver: str) -> str:
    return f"NVIDIA driver {driver}" if driver else "an NVIDIA driver of unknown version"
