"""Messages on machines whose GPU, driver, torch or compiler is not as it should be. All of them are faked."""

from __future__ import annotations

import logging
import sysconfig
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cbatch.attention.registry import check_attention, has_fast_path, select_attention
from cbatch.base.errors import ConfigError
from cbatch.runtime import device as devices
from cbatch.runtime import triton_setup
from cbatch.runtime.device import choose_device, describe_gpus
from cbatch.runtime.kv_cache import LayerShape
from cbatch.runtime.triton_setup import triton_problem
from cbatch.sample.sampler import Sampler
from tests.support.gpu_machine import Gpu, Machine

GPU = torch.device("cuda", 0)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def chosen(machine: Machine, name: str, caplog: pytest.LogCaptureFixture) -> tuple[str, str]:
    """The device that a name gives, and what is said: a warning, or the text of a ConfigError. torch says nothing."""
    machine.install()
    caplog.clear()
    with caplog.at_level(logging.WARNING, "cbatch"), warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            device = str(choose_device(name))
        except ConfigError as error:
            return "", str(error)
    return device, " | ".join(record.getMessage() for record in caplog.records)


OLD = "The NVIDIA driver on your system is too old (found version 12040). Please update your GPU driver."
DRIVER_535 = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024\n"
TO_BE_UPDATED = (
    "torch 2.11.0+cu130 needs an NVIDIA driver of version 580 or newer, and this machine has NVIDIA driver 535.183.01; "
    "update the driver, or install a build for CUDA 12: pip install --force-reinstall torch --index-url "
    "https://download.pytorch.org/whl/cu126"
)
CPU_BUILD = (
    "torch 2.11.0+cpu is a build without CUDA, and this machine has NVIDIA driver 580.95.05; install a build with "
    "CUDA: pip install --force-reinstall torch"
)
IN_A_CONTAINER = (
    "this machine has NVIDIA driver 580.95.05, but no GPU is in /dev; if this is a container, start it with --gpus all"
)


QUIET: list[tuple[dict[str, Any], str]] = [
    ({"driver": None, "nodes": ()}, "this machine has no NVIDIA driver"),
    (
        {"driver": None, "nodes": (), "cuda": None},
        "torch 2.11.0+cpu is a build without CUDA, and this machine has no NVIDIA driver",
    ),
    (
        {"environment": {"CUDA_VISIBLE_DEVICES": "-1"}},
        "CUDA_VISIBLE_DEVICES=-1 hides all GPUs of this machine; unset it",
    ),
    ({"nodes": (), "cuda": None}, CPU_BUILD),
]
"""Where no GPU is expected: laptops, build servers, tests and containers for CPUs."""


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"driver": DRIVER_535, "start_error": OLD}, TO_BE_UPDATED),
        (
            {"driver": "changed", "start_error": OLD},
            "torch 2.11.0+cu130 needs an NVIDIA driver of version 580 or newer, and this machine has an NVIDIA driver "
            "of unknown version; update the driver",
        ),
        ({"cuda": None}, CPU_BUILD),
        (
            {"cuda": None, "driver": DRIVER_535},
            "torch 2.11.0+cpu is a build without CUDA, and this machine has NVIDIA driver 535.183.01; install a build "
            "with CUDA: pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu126",
        ),
        ({"nodes": ()}, IN_A_CONTAINER),
        (
            {"environment": {"CUDA_VISIBLE_DEVICES": "3"}},
            "CUDA_VISIBLE_DEVICES=3 hides all GPUs of this machine; unset it",
        ),
        (
            {
                "start_error": "Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before "
                "calling NumCudaDevices() that might have already set an error? Error 802: system not yet initialized"
            },
            "torch 2.11.0+cu130 cannot start CUDA on NVIDIA driver 580.95.05 (Error 802: system not yet initialized); "
            "start the service nvidia-fabricmanager",
        ),
        (
            {"start_error": "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU."},
            "torch 2.11.0+cu130 cannot start CUDA on NVIDIA driver 580.95.05 (Found no NVIDIA driver on your system); "
            "libcuda.so.1 is missing: in a container, NVIDIA_DRIVER_CAPABILITIES must name compute",
        ),
        (
            {"start_error": "No CUDA GPUs are available"},
            "torch 2.11.0+cu130 cannot start CUDA on NVIDIA driver 580.95.05 (No CUDA GPUs are available); "
            "nvidia-smi may say more",
        ),
        *QUIET,
    ],
)
def test_a_gpu_that_cannot_be_used_is_explained(
    given: dict[str, Any], reason: str, machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards a machine with a GPU against quietly taking its CPU, and others against a line on stderr."""
    machine.gpus = ()
    for name, value in given.items():
        setattr(machine, name, value)
    warning = "" if (given, reason) in QUIET else f"The CPU is used: {reason}. (--device cpu hides this line.)"
    assert chosen(machine, "auto", caplog) == ("cpu", warning)
    for name in ("cuda", "cuda:1"):
        assert chosen(machine, name, caplog) == ("", f"Device {name!r} cannot be used: {reason}.")
    assert chosen(machine, "cpu", caplog) == ("cpu", "")


@pytest.mark.parametrize("default", ["cpu", "auto", "", "cuda", "gpu", "cuda:7"])
def test_the_environment_names_the_default(default: str, machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    """Guards CBATCH_DEVICE, which says what `auto` is and nothing else; all tests rely on it."""
    machine.environment = {"CBATCH_DEVICE": default}
    device, said = chosen(machine, "auto", caplog)
    if default in ("gpu", "cuda:7"):  # the environment is wrong, and not the command
        assert said.startswith("CBATCH_DEVICE: ") and repr(default) in said
    else:
        assert (device, said) == ("cpu" if default == "cpu" else "cuda:0", "")
    assert chosen(machine, "cuda", caplog) == ("cuda:0", "") and chosen(machine, "cpu", caplog) == ("cpu", "")


@pytest.mark.xdist_group("gpu")  # if there is one, it is used
def test_this_machine_says_nothing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Guards the most common case, with nothing faked: whatever works is used without a word."""
    monkeypatch.delenv("CBATCH_DEVICE", raising=False)
    with caplog.at_level(logging.DEBUG, "cbatch"), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert caplog.records == []
    assert triton_problem(torch.device("cpu")) is None


@pytest.mark.parametrize(
    ("capability", "architectures", "expected"),
    [
        ((9, 0), ["sm_75", "sm_90"], True),
        ((8, 9), ["sm_75", "sm_80", "sm_86", "sm_90"], True),
        ((7, 0), ["sm_75", "sm_80"], False),
        ((12, 0), ["sm_80", "sm_90"], False),
        ((12, 0), ["sm_80", "compute_90"], True),
        ((8, 0), ["sm_86", "sm_90"], False),
        ((9, 0), ["sm_90a"], True),
        ((12, 1), ["sm_120a"], False),
        ((10, 3), ["sm_100f"], True),
        ((9, 0), [], True),
        ((9, 0), ["all"], True),
    ],
)
def test_which_gpus_a_build_serves(
    capability: tuple[int, int],
    architectures: list[str],
    expected: bool,
    machine: Machine,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Guards GPUs that torch finds and has no kernels for: every operation would end with `no kernel image`."""
    machine.gpus, machine.architectures = [Gpu("NVIDIA X", capability)], architectures
    device, said = chosen(machine, "auto", caplog)
    assert device == ("cuda:0" if expected else "cpu") and (said == "") == expected
    if not expected:
        number = f"{capability[0]}.{capability[1]}"
        start = f"torch 2.11.0+cu130 has no kernels for NVIDIA X (compute capability {number}), only for "
        assert f"{start}{' '.join(architectures)}; find a build for it" in said
        assert start in chosen(machine, "cuda", caplog)[1]


def test_a_gpu_that_fails_is_passed_over(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    """Guards a machine with several GPUs: the next one is used, and the numbers in messages are those of torch."""
    busy = "CUDA error: CUDA-capable device(s) is/are busy or unavailable\nCUDA kernel errors might be ..."
    machine.gpus = [Gpu(error=busy), Gpu(), Gpu()]
    problem = "cuda:0 fails (CUDA error: CUDA-capable device(s) is/are busy or unavailable)"
    assert chosen(machine, "auto", caplog) == ("cuda:1", f"Device cuda:1 is used: {problem}.")
    assert chosen(machine, "cuda", caplog) == ("", f"Device 'cuda' cannot be used: {problem}.")
    assert chosen(machine, "cuda:2", caplog) == ("cuda:2", "")
    reason = "torch finds only cuda:0 to cuda:2"
    assert chosen(machine, "cuda:3", caplog) == ("", f"Device 'cuda:3' cannot be used: {reason}.")


@pytest.mark.parametrize("name", ["gpu", "cuda:x", "tpu", "meta", "vulkan"])
def test_unknown_devices_are_refused(name: str, machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    """Guards typing errors, and kinds of devices that torch knows and nobody has tried."""
    said = chosen(machine, name, caplog)[1]
    assert repr(name) in said and said.endswith("; use auto, cpu, cuda, cuda:N, xpu or mps.")


def test_gpus_of_other_makers(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    """Guards the order of `auto`, and that Apple's GPU, which nobody has tested, is used only if it is named."""
    machine.gpus, machine.driver, machine.nodes = (), None, ()
    machine.xpus, machine.has_mps = [Gpu("Intel Arc B580")], True
    assert chosen(machine, "auto", caplog) == ("xpu:0", "")
    assert chosen(machine, "mps", caplog) == ("mps:0", "")
    machine.xpus = ()
    assert chosen(machine, "auto", caplog) == ("cpu", "")
    machine.has_mps = False
    for name, maker in (("xpu", "Intel"), ("mps", "Apple")):
        reason = f"torch 2.11.0+cu130 finds no {maker} GPU"
        assert chosen(machine, name, caplog) == ("", f"Device {name!r} cannot be used: {reason}.")


def test_rocm_is_cuda_to_torch_only(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    """Guards AMD GPUs, which torch calls cuda, against kernels and graphs that are for NVIDIA."""
    machine.cuda, machine.hip, machine.driver, machine.nodes = None, "6.4.43482", None, ()
    machine.gpus = [Gpu("AMD Instinct MI300X", (9, 4))]
    assert chosen(machine, "auto", caplog) == ("cuda:0", "")
    assert not devices.is_nvidia(GPU) and devices.is_accelerator(GPU) and devices.has_bfloat16(GPU)
    for device, maker in ((GPU, "AMD"), (torch.device("xpu:0"), "Intel"), (torch.device("mps:0"), "Apple")):
        said = f"The Triton kernels here are for NVIDIA GPUs, and {device} is one of {maker}."
        assert triton_problem(device) == said
    machine.gpus, machine.nodes = (), ("kfd",)
    assert chosen(machine, "auto", caplog)[1] == (
        "The CPU is used: torch 2.11.0+rocm6.4 is a build for ROCm and finds no AMD GPU; your user must be in the "
        "groups render and video. (--device cpu hides this line.)"
    )


def test_rocm_gets_nothing_that_is_for_nvidia(machine: Machine) -> None:
    """Guards AMD GPUs against kernels that are compiled for others, in each place that chooses them."""
    machine.cuda, machine.hip = None, "6.4.43482"
    machine.install()
    assert not has_fast_path("auto", GPU, 16) and not Sampler(GPU).uses_kernel
    assert select_attention("auto", GPU, [LayerShape(2, 64, 64)], 16, torch.float16).name == "reference"
    assert devices.pins_memory(GPU) and devices.samples_on(GPU)
    with pytest.raises(ConfigError, match="attention backend triton runs on an NVIDIA GPU, not on cuda:0; choose auto"):
        check_attention("triton", GPU, 16)
    machine.cuda, machine.hip = "13.0", None
    machine.install()
    assert has_fast_path("auto", GPU, 24)
    check_attention("triton", GPU, 16)


def test_gpus_are_described(machine: Machine) -> None:
    """Guards bug reports, also of machines where a device cannot even be asked for its name."""
    machine.gpus = [Gpu(), Gpu("NVIDIA GeForce RTX 4090", (8, 9), total_memory=24 * 2**30)]
    machine.xpus = [Gpu("Intel Arc B580", total_memory=12 * 2**30)]
    machine.install()
    assert describe_gpus() == {
        "driver": "NVIDIA 580.95.05",
        "cuda:0": "NVIDIA H100 (compute capability 9.0), 80 GiB",
        "cuda:1": "NVIDIA GeForce RTX 4090 (compute capability 8.9), 24 GiB",
        "xpu:0": "Intel Arc B580, 12 GiB",
    }
    machine.patch.setattr(torch.cuda, "get_device_properties", lambda device: 1 / 0)
    assert describe_gpus()["cuda:0"] == "fails (ZeroDivisionError: division by zero)"
    machine.gpus, machine.start_error, machine.xpus = (), OLD, ()
    machine.install()
    assert describe_gpus()["cuda"].startswith("not used: torch 2.11.0+cu130 needs an NVIDIA driver of version 580")
    machine.environment = {"CUDA_VISIBLE_DEVICES": "-1"}
    machine.install()
    assert describe_gpus() == {"driver": "NVIDIA 580.95.05"}


@pytest.fixture
def build_tools(machine: Machine) -> Path:
    """A machine that has all that Triton needs; its programs are in `bin`, its headers in `include`."""
    machine.install()
    folder, patch = machine.folder, machine.patch
    for path in ("bin/gcc", "include/Python.h", "sbin/ldconfig"):
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).touch(mode=0o755)
    patch.setattr(triton_setup, "LDCONFIG", folder / "sbin" / "ldconfig")
    driver = folder / "triton" / "backends" / "nvidia" / "driver.py"
    driver.parent.mkdir(parents=True)
    driver.write_text('name="cuda_utils"')
    package = SimpleNamespace(origin=str(folder / "triton" / "__init__.py"))
    patch.setattr(triton_setup, "find_spec", lambda name: package)
    patch.setattr(sysconfig, "get_paths", lambda scheme: {"include": str(folder / "include")})
    patch.setenv("PATH", str(folder / "bin"))
    patch.setenv("HOME", str(folder))
    for name in ("CC", "CPATH", "C_INCLUDE_PATH", "TRITON_CACHE_DIR", "TRITON_HOME", "TRITON_INTERPRET"):
        patch.delenv(name, raising=False)
    assert triton_problem(GPU) is None
    return folder


def test_triton_needs_a_compiler(build_tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards images without gcc, where the first launch ends with an error that names no package."""
    (build_tools / "bin" / "gcc").rename(build_tools / "bin" / "clang")
    assert triton_problem(GPU) is None
    (build_tools / "bin" / "clang").rename(build_tools / "bin" / "tcc")
    assert triton_problem(GPU) == (
        "Triton compiles its launcher with a C compiler, and finds neither gcc nor clang (apt install gcc)."
    )
    monkeypatch.setenv("CC", "tcc")
    assert triton_problem(GPU) is None
    monkeypatch.setenv("CC", "ccache gcc")  # Triton takes it for the name of one program
    assert triton_problem(GPU) == (
        "Triton compiles its launcher with CC=ccache gcc, which is no program; unset CC, or name a C compiler."
    )


def test_triton_needs_the_headers_of_python(build_tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a Python without its -dev package, where the first launch ends with the output of gcc."""
    (build_tools / "include" / "Python.h").rename(build_tools / "Python.h")
    version = ".".join(sysconfig.get_python_version().split(".")[:2])
    assert triton_problem(GPU) == (
        f"Triton compiles its launcher with the C headers of Python {version}, and there is no "
        f"{build_tools}/include/Python.h (apt install python{version}-dev)."
    )
    monkeypatch.setenv("CPATH", f"/nowhere:{build_tools}")
    assert triton_problem(GPU) is None


def test_triton_needs_no_compiler_for_what_it_has_compiled(build_tools: Path) -> None:
    """Guards images that were filled where there was a compiler; with Triton 3.6 they need launchers of kernels too."""
    (build_tools / "bin" / "gcc").unlink()
    assert triton_problem(GPU) is not None
    compiled = build_tools / ".triton" / "cache" / "KEY" / "cuda_utils.cpython-311-x86_64-linux-gnu.so"
    compiled.parent.mkdir(parents=True)
    compiled.touch()
    assert triton_problem(GPU) is None
    driver = build_tools / "triton" / "backends" / "nvidia" / "driver.py"
    driver.write_text('name="cuda_utils", name="__triton_launcher"')
    assert str(triton_problem(GPU)).startswith("Triton compiles its launcher with a C compiler")
    compiled.with_name("__triton_launcher.cpython-311-x86_64-linux-gnu.so").touch()
    assert triton_problem(GPU) is None


def test_triton_needs_a_cache(build_tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards containers with a home that cannot be written."""
    cache = build_tools / "version" / "cache"  # below a file
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    assert triton_problem(GPU) == (
        f"Triton cannot write to its cache {cache}; set TRITON_CACHE_DIR to a folder that is writable."
    )
    monkeypatch.delenv("TRITON_CACHE_DIR")
    monkeypatch.setenv("TRITON_HOME", str(build_tools / "version"))
    assert str(build_tools / "version" / ".triton" / "cache") in str(triton_problem(GPU))
    monkeypatch.delenv("TRITON_HOME")
    monkeypatch.setattr(triton_setup.os, "access", lambda folder, mode: folder != build_tools)
    assert str(build_tools / ".triton" / "cache") in str(triton_problem(GPU))


def test_triton_needs_its_package_and_libcuda(build_tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards torch without Triton, and systems that keep libraries elsewhere, such as NixOS."""
    monkeypatch.setattr(triton_setup, "LDCONFIG", build_tools / "nowhere")
    assert triton_problem(GPU) == (
        f"Triton finds libcuda.so.1 by {build_tools}/nowhere, which is not there; "
        "set TRITON_LIBCUDA_PATH to its folder."
    )
    monkeypatch.setenv("TRITON_LIBCUDA_PATH", "/run/opengl-driver/lib")
    assert triton_problem(GPU) is None
    monkeypatch.setattr(triton_setup, "find_spec", lambda name: None)
    assert triton_problem(GPU) == "Triton is not installed (pip install triton)."
