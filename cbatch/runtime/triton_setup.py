"""The needs of Triton for launching kernels, in sentences for users if something is missing."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import torch

from cbatch.runtime.device import gpu_name, is_accelerator, is_nvidia

LDCONFIG = Path("/sbin/ldconfig")
"""The program by which Triton finds libcuda. Tests put their own in place."""

LAUNCHER = "__triton_launcher"
"""The name of what Triton 3.6 compiles for each kernel."""


def triton_problem(device: torch.device) -> str | None:
    """Why Triton cannot launch kernels on a device, in a sentence; None on a CPU, and if nothing is known.

    At the first launch on a machine, Triton compiles C code against the headers of Python, and keeps the result in its
    cache (`triton/runtime/build.py` and `triton/backends/nvidia/driver.py`, read in versions 3.6 and 3.9). Here it is
    not imported, and nothing is compiled: what else may go wrong is seen when a kernel is launched.
    """
    if not is_accelerator(device):
        return None
    if not is_nvidia(device):
        maker = {"cuda": "AMD", "xpu": "Intel", "mps": "Apple"}.get(device.type, "another maker")
        return f"The Triton kernels here are for NVIDIA GPUs, and {device} is one of {maker}."
    if find_spec("triton") is None:
        return "Triton is not installed (pip install triton)."
    if torch.cuda.get_device_capability(device) < (7, 0):
        return f"Triton needs a GPU of compute capability 7.0 or higher, and {device} is {gpu_name(device)}."
    if os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on"):
        return None
    if problem := _cache_problem():
        return problem
    if not (os.environ.get("TRITON_LIBCUDA_PATH") or LDCONFIG.exists()):
        return f"Triton finds libcuda.so.1 by {LDCONFIG}, which is not there; set TRITON_LIBCUDA_PATH to its folder."
    return _compiler_problem()


def _triton_cache() -> Path:
    # Path.expanduser raises if there is no home; Triton takes the tilde for a folder then.
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")  # noqa: PTH111
    return Path(os.environ.get("TRITON_CACHE_DIR") or Path(home, ".triton", "cache"))


def _cache_problem() -> str | None:
    cache = _triton_cache()
    there = next((folder for folder in (cache, *cache.absolute().parents) if folder.exists()), cache)
    if there.is_dir() and os.access(there, os.W_OK | os.X_OK):
        return None
    return f"Triton cannot write to its cache {cache}; set TRITON_CACHE_DIR to a folder that is writable."


def _has_compiled() -> bool:
    """Whether Triton has compiled what it launches kernels by before, perhaps where this image was made.

    If it compiles a launcher for each kernel, as 3.6 does, those that a model needs may be among those that are there;
    the checks find those that are not.
    """
    cache = _triton_cache()
    if not any(cache.glob("*/cuda_utils*.so")):
        return False
    return any(cache.glob(f"*/{LAUNCHER}*.so")) or not _compiles_launchers()


def _compiles_launchers() -> bool:
    """Whether this Triton compiles a launcher for each kernel; its driver says so, and no number of a version does."""
    package = find_spec("triton")
    if package is None or package.origin is None:
        return False
    driver = Path(package.origin).parent / "backends" / "nvidia" / "driver.py"
    return driver.is_file() and LAUNCHER in driver.read_text("utf-8")


def _compiler_problem() -> str | None:
    if _has_compiled():
        return None
    named = os.environ.get("CC")
    if named is not None and shutil.which(named) is None:
        return f"Triton compiles its launcher with CC={named}, which is no program; unset CC, or name a C compiler."
    if named is None and not (shutil.which("gcc") or shutil.which("clang")):
        return "Triton compiles its launcher with a C compiler, and finds neither gcc nor clang (apt install gcc)."
    scheme = sysconfig.get_default_scheme()
    own = sysconfig.get_paths(scheme="posix_prefix" if scheme == "posix_local" else scheme)["include"]
    others = (os.environ.get(name, "") for name in ("CPATH", "C_INCLUDE_PATH"))
    folders = [own, *(folder for paths in others for folder in paths.split(os.pathsep) if folder)]
    if any(Path(folder, "Python.h").exists() for folder in folders):
        return None
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return (
        f"Triton compiles its launcher with the C headers of Python {version}, and there is no {own}/Python.h "
        f"(apt install python{version}-dev)."
    )
