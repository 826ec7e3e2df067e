"""Runs the tests that run on a GPU, without what the whole suite needs beside pytest."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("attention", "engine", "kernels", "model", "runtime", "sample")
TIMEOUT_S = 450
ON_GPU = re.compile(r"\bDEVICE\b|mark\.gpu\b|cuda_model\b")


def modules(folders: Sequence[str] = FOLDERS) -> list[str]:
    """The modules with tests that run on a GPU. Others may need packages that a borrowed machine does not have."""
    paths = (path for folder in folders for path in (ROOT / "tests" / folder).rglob("test_*.py"))
    return sorted(str(path.relative_to(ROOT)) for path in paths if ON_GPU.search(path.read_text()))


def test_lines(*, on_gpu: bool, few: bool) -> Iterator[str]:
    """Failures, reasons of skipped tests, the slowest ones, and the summary. Raises RuntimeError if a test fails.

    on_gpu: without a GPU the kernels' tests run instead, in Triton's interpreter
    few:    run the tests of one module, to try the script
    """
    if find_spec("pytest") is None:
        raise RuntimeError("The tests need pytest; see docs/gpu.md for machines without a network.")
    try:
        done = subprocess.run(
            command(on_gpu=on_gpu, few=few), cwd=ROOT, env=os.environ | {"PYTHONPATH": path_of_imports()},
            timeout=TIMEOUT_S, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        yield from lines_of((error.stdout or b"").decode(errors="replace"))
        raise RuntimeError(f"The tests were not finished after {TIMEOUT_S} s.") from None
    yield from lines_of(done.stdout)
    if done.returncode:
        raise RuntimeError(f"pytest ended with exit code {done.returncode}.")


def command(folders: Sequence[str] = FOLDERS, *, on_gpu: bool, few: bool) -> list[str]:
    """Runs pytest on these folders. A module that lacks a package, or a test that hangs, is named in what it prints.

    few: run the tests of one module, or only import those of folders that do not have it
    """
    chosen = modules(folders)
    options = "-o addopts= -o faulthandler_timeout=60 -p no:cacheprovider --continue-on-collection-errors".split()
    if few and not (mine := [path for path in chosen if "triton_layer" in path]):
        options.append("--collect-only")
    elif few:
        chosen = mine
    options += "-q -rfEs --tb=short --durations=10 --color=no -m".split()
    return [sys.executable, "-m", "pytest", *options, "gpu" if on_gpu else "kernels", *chosen]


def path_of_imports() -> str:
    """So that the tests import what this process does."""
    return os.pathsep.join([str(ROOT), *filter(None, sys.path)])


def lines_of(output: str) -> list[str]:
    """The lines without those that show the progress only."""
    return [line for line in output.splitlines() if line.strip() and not re.fullmatch(r"[.sxXFE]+ +\[ *\d+%\]", line)]
