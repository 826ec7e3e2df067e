"""Runs tests of the CPU's kernels on an emulated 64-bit ARM, once for each of its instruction sets.

    python -m scripts.emulated_arm FOLDER [PYTEST_ARGUMENT ...]

The first time, which needs root, the folder gets Debian for ARM, and this environment's packages for it (1.5 GB).
Without Debian's packages `qemu-user-static` and `debootstrap` nothing is run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from shutil import which

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).parents[1]

RELEASE, PYTHON = "bookworm", "3.11"
DEBIAN_PACKAGES = "python3,libgomp1,libstdc++6"

TORCH = "2.10.0"
"""The last one whose build for ARM does not need CUDA."""

PROCESSORS = {"neon": "neoverse-n1", "neon-dotprod": "neoverse-n1", "neon-i8mm": "max,sve=off"}
"""By instruction set. The first has more, because torch needs it."""

TESTS = (
    "tests/kernels/test_work_queue.py",
    "tests/kernels/test_cpu_linear.py",
    "tests/kernels/test_cpu_quantized.py",
    "tests/attention/test_cpu_attention.py",
    "tests/attention/test_u8_cache.py",
    "tests/model/test_cpu_model.py",
)


def pinned_requirements() -> list[str]:
    """The packages that the project and its tests need on an ARM, in this environment's versions."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    found: dict[str, str] = {}
    waiting = [*project["dependencies"], "pytest", "hypothesis"]
    while waiting:
        one = Requirement(waiting.pop())
        name = canonicalize_name(one.name)
        if name in found or (one.marker and not one.marker.evaluate({"platform_machine": "aarch64", "extra": ""})):
            continue
        try:
            found[name] = TORCH if name == "torch" else version(name)
        except PackageNotFoundError:
            continue
        waiting += requires(name) or ()
    return [f"{name}=={number}" for name, number in sorted(found.items())]


def prepare(folder: Path) -> None:
    """Unpacks a system and packages, unless they are there."""
    root, site = folder / "root", folder / "site"
    if not (root / "usr/bin/python3").exists():
        options = ["--arch=arm64", "--foreign", "--variant=minbase", f"--include={DEBIAN_PACKAGES}"]
        subprocess.run(["debootstrap", *options, RELEASE, str(root)], check=True)
        for package in sorted((root / "var/cache/apt/archives").glob("*.deb")):  # nothing of them is run
            subprocess.run(["dpkg-deb", "-x", str(package), str(root)], check=True)
    if not (site / "torch").exists():
        platforms = [f"--platform=manylinux_2_{number}_aarch64" for number in (28, 17)]
        options = ["--no-deps", "--only-binary=:all:", f"--python-version={PYTHON}", *platforms, f"--target={site}"]
        subprocess.run([sys.executable, "-m", "pip", "install", *options, *pinned_requirements()], check=True)


def run(folder: Path, name: str, arguments: list[str]) -> int:
    """Runs tests on a processor that has an instruction set; returns the exit code of pytest."""
    root = folder / "root"
    environment = os.environ | {
        "PYTHONHOME": str(root / "usr"),
        "PYTHONPATH": f"{REPOSITORY}:{folder / 'site'}",
        "PYTHONDONTWRITEBYTECODE": "1",
        "CBATCH_CPU": name,
        "NUMBA_CACHE_DIR": str(folder / f"cache-{name}"),
    }
    emulator = ["qemu-aarch64-static", "-cpu", PROCESSORS[name], "-L", str(root), str(root / f"usr/bin/python{PYTHON}")]
    tests = [*emulator, "-m", "pytest", "-o", "addopts=", "-q", "-rs", *arguments]
    return subprocess.run(tests, cwd=REPOSITORY, env=environment, check=False).returncode


def main(arguments: list[str]) -> int:
    if not arguments:
        print(__doc__)
        return 2
    missing = [program for program in ("qemu-aarch64-static", "debootstrap", "dpkg-deb") if which(program) is None]
    if missing:
        print(f"Nothing is run: {', '.join(missing)} cannot be found.")
        return 0
    folder = Path(arguments[0]).resolve()
    prepare(folder)
    codes = {name: run(folder, name, arguments[1:] or list(TESTS)) for name in PROCESSORS}
    print(", ".join(f"{name}: {'failed' if code else 'passed'}" for name, code in codes.items()))
    return max(codes.values())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
