"""Which devices there are, what each of them can do, which one is used, and why torch finds no GPU.

Other modules ask here instead of looking at `device.type`: torch calls AMD GPUs `cuda` too.
"""

from __future__ import annotations

import logging
import os
import re
import warnings
from pathlib import Path
from typing import NamedTuple

import torch

from cbatch.base.config import DEVICE_VARIABLE
from cbatch.base.errors import ConfigError, in_short

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
"""Advice on errors that CUDA gives when it starts, by a part of their text."""


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
    named = f"NVIDIA driver {driver}" if driver else "an NVIDIA driver of unknown version"
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
        reason = f"{build} is a build without CUDA, and this machine has {named}; {fix}"
        return Absence(reason, is_hidden or not has_devices)
    if not has_devices:
        fix = "if this is a container, start it with --gpus all"
        return Absence(f"this machine has {named}, but no GPU is in /dev; {fix}", is_hidden)
    return Absence(_why_not_started(build, driver, named, visible), is_hidden)


def _why_not_started(build: str, driver: str, named: str, visible: str | None) -> str:
    major, branch, error = int(str(torch.version.cuda).partition(".")[0]), _branch(driver), "it finds no device"
    try:  # `is_available` only warns of it, and only once in a process
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except Exception as raised:  # torch, the driver and the runtime each raise their own kinds
        error = in_short(raised)
    oldest = OLDEST_DRIVER.get(major, 0)
    if 0 < branch < oldest or "too old" in error:
        is_for_12 = major > 12 and branch >= OLDEST_DRIVER[12]
        also = f", or install a build for CUDA 12: {INSTALL_CUDA_12}" if is_for_12 else ""
        return (
            f"{build} needs an NVIDIA driver of version {oldest} or newer, and this machine has {named}; "
            f"update the driver{also}"
        )
    if visible is not None and "No CUDA GPUs" in error:
        return f"CUDA_VISIBLE_DEVICES={visible} hides all GPUs of this machine; unset it"
    hint = next((hint for part, hint in _HINTS.items() if part in error), "nvidia-smi may say more")
    return f"{build} cannot start CUDA on {named} ({error}); {hint}"


def _branch(driver: str) -> int:
    """The first number of a driver's version; 0 if it is unknown."""
    return int(driver.partition(".")[0] or 0)


_log = logging.getLogger("cbatch")


def is_nvidia(device: torch.device) -> bool:
    """Whether the device is an NVIDIA GPU. No other has Triton kernels and CUDA graphs here."""
    return device.type == "cuda" and torch.version.hip is None


def is_accelerator(device: torch.device) -> bool:
    """Whether the device computes while the host goes on."""
    return device.type != "cpu"


def is_cuda(device: torch.device) -> bool:
    """Whether `torch.cuda` serves the device: an NVIDIA GPU, or one of AMD under ROCm."""
    return device.type == "cuda"


def pins_memory(device: torch.device) -> bool:
    """Whether copies between the device and pinned memory of the host overlap with other work."""
    return is_cuda(device)


def samples_on(device: torch.device) -> bool:
    """Whether tokens are sampled on the device. On those that nobody has tested, the host samples as on a CPU.

    Sampling needs exact integers of 64 bits and sorts, which differ more among devices than a model's layers do, and
    the self-check of a model does not see it.
    """
    return is_cuda(device) or not is_accelerator(device)


def has_bfloat16(device: torch.device) -> bool:
    """Whether the device computes in bfloat16; torch emulates it on NVIDIA GPUs that do not."""
    return not is_nvidia(device) or torch.cuda.get_device_capability(device) >= (8, 0)


def choose_device(name: str) -> torch.device:
    """The device of that name; for `auto` the first CUDA device that works, then an Intel GPU, then the CPU.

    If the environment variable CBATCH_DEVICE names a device, `auto` is that one. A warning is logged if `auto` cannot
    use a GPU that the machine has. Apple's GPU must be asked for by name.

    Raises ConfigError, with the reason, for a device that cannot be used.
    """
    if name == "auto":
        default = os.environ.get(DEVICE_VARIABLE) or "auto"
        return _best_device() if default == "auto" else _named_device(default, f"{DEVICE_VARIABLE}: ")
    return _named_device(name)


def usable_gpus(name: str, device: torch.device) -> list[torch.device]:
    """The CUDA GPUs that one model may be spread over: all that work, or the one whose number was asked for.

    name, device: `choose_device(name)` is that device
    """
    if not is_cuda(device):
        return []
    if ":" in (name if name != "auto" else os.environ.get(DEVICE_VARIABLE, "")):
        return [device]
    gpus = [torch.device("cuda", number) for number in range(_count("cuda"))]
    return [gpu for gpu in gpus if gpu == device or _device_problem(gpu) is None]


def _named_device(name: str, where: str = "") -> torch.device:
    """where: what comes before the name in an error"""
    choices = "use auto, cpu, cuda, cuda:N, xpu or mps"
    try:
        asked = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"{where}There is no device {name!r}; {choices}.") from None
    if asked.type == "cpu":
        return asked
    if asked.type not in ("cuda", "xpu", "mps"):
        raise ConfigError(f"{where}Device {name!r} is not supported; {choices}.")
    device = torch.device(asked.type, asked.index or 0)
    absence = _absence(device.type)
    if problem := absence.reason if absence is not None else _device_problem(device):
        raise ConfigError(f"{where}Device {name!r} cannot be used: {problem}.")
    return device


def _best_device() -> torch.device:
    problems = []
    for kind in ("cuda", "xpu"):
        if absence := _absence(kind):
            problems += [] if absence.is_expected else [absence.reason]
            continue
        for number in range(_count(kind)):
            device = torch.device(kind, number)
            problem = _device_problem(device)
            if problem is None:
                if problems:
                    _log.warning("Device %s is used: %s.", device, "; ".join(problems))
                return device
            problems.append(problem)
    if problems:
        _log.warning("The CPU is used: %s. (--device cpu hides this line.)", "; ".join(problems))
    return torch.device("cpu")


def _absence(kind: str) -> Absence | None:
    with warnings.catch_warnings(action="ignore"):  # of many lines; what they say is said here
        if torch.get_device_module(kind).is_available():
            return None
        if kind == "cuda":
            return why_no_cuda()
    return Absence(f"torch {torch.__version__} finds no {'Intel' if kind == 'xpu' else 'Apple'} GPU", True)


def _count(kind: str) -> int:
    with warnings.catch_warnings(action="ignore"):
        return int(torch.get_device_module(kind).device_count())


def _device_problem(device: torch.device) -> str | None:
    if device.index >= (count := _count(device.type)):
        return f"torch finds only {device.type}:0" + (f" to {device.type}:{count - 1}" if count > 1 else "")
    with warnings.catch_warnings(action="ignore"):
        try:
            if is_nvidia(device) and not _has_code(device, torch.cuda.get_arch_list()):
                return (
                    f"torch {torch.__version__} has no kernels for {gpu_name(device)}, only for "
                    f"{' '.join(torch.cuda.get_arch_list())}; find a build for it at "
                    "https://pytorch.org/get-started/locally"
                )
            torch.ones(1, device=device)
        except Exception as error:  # whatever a driver raises when a device is used for the first time
            return f"{device} fails ({in_short(error)})"
    return None


def _has_code(device: torch.device, architectures: list[str]) -> bool:
    """Whether a GPU runs code for one of them: `sm_80` within its major version, `compute_80` on later ones too."""
    major, minor = torch.cuda.get_device_capability(device)
    for name in architectures:
        found = re.fullmatch(r"(sm|compute)_(\d+)([af]?)", name)
        if found is None:  # of a form that is not known yet
            return True
        code, own = int(found[2]), 10 * major + minor
        is_family = code // 10 == major or (found[1] == "compute" and not found[3])
        if code == own or (code < own and is_family and found[3] != "a"):
            return True
    return not architectures


def gpu_name(device: torch.device) -> str:
    """Name and compute capability of an NVIDIA GPU."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} (compute capability {major}.{minor})"


def describe_gpus() -> dict[str, str]:
    """The driver and each GPU, by names such as `driver` and `cuda:0`, or why there is none. Never raises."""
    shown = {}
    if (driver := nvidia_driver()) is not None:
        shown["driver"] = f"NVIDIA {driver}".rstrip()
    for kind in ("cuda", "xpu", "mps"):
        absence = _absence(kind)
        if absence is not None:
            shown |= {} if absence.is_expected else {kind: f"not used: {absence.reason}"}
        else:
            shown |= {f"{kind}:{number}": _describe(torch.device(kind, number)) for number in range(_count(kind))}
    return shown


def _describe(device: torch.device) -> str:
    try:
        if device.type == "mps":
            return "Apple GPU"
        properties = torch.get_device_module(device).get_device_properties(device)
        name = gpu_name(device) if is_nvidia(device) else properties.name
        return f"{name}, {properties.total_memory / 2**30:.0f} GiB"
    except Exception as error:  # a device that fails is what somebody wants to see here
        return f"fails ({in_short(error)})"


class DeviceProbe:
    """Facts that a process without torch asks another one for."""

    def devices(self, name: str) -> tuple[str, int, bool]:
        """The devices that `name` means: their kind and number, and whether they are AMD's. Raises ConfigError."""
        device = choose_device(name)
        return device.type, torch.get_device_module(device).device_count(), torch.version.hip is not None
