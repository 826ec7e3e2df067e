"""Which devices there are, what each of them can do, and which one is used.

Other modules ask here instead of looking at `device.type`: torch calls AMD GPUs `cuda` too.
"""

from __future__ import annotations

import logging
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from cbatch.base.config import DEVICE_VARIABLE
from cbatch.base.errors import ConfigError, in_short
from cbatch.runtime.gpu_absence import Absence, nvidia_driver, why_no_cuda

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
    """Why there are no devices of a kind; None if there are."""
    with _without_warnings():
        if torch.get_device_module(kind).is_available():
            return None
        if kind == "cuda":
            return why_no_cuda()
    return Absence(f"torch {torch.__version__} finds no {'Intel' if kind == 'xpu' else 'Apple'} GPU", True)


def _count(kind: str) -> int:
    with _without_warnings():
        return int(torch.get_device_module(kind).device_count())


def _device_problem(device: torch.device) -> str | None:
    """Why a device cannot be used although there are devices of its kind."""
    if device.index >= (count := _count(device.type)):
        return f"torch finds only {device.type}:0" + (f" to {device.type}:{count - 1}" if count > 1 else "")
    with _without_warnings():
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


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Hides torch's warnings about devices, which take many lines; what they say is said here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class DeviceProbe:
    """What a process that does not import torch asks another one."""

    def devices(self, name: str) -> tuple[str, int, bool]:
        """The devices that `name` means: their kind and number, and whether they are AMD's. Raises ConfigError."""
        device = choose_device(name)
        return device.type, torch.get_device_module(device).device_count(), torch.version.hip is not None
