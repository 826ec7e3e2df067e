"""Runs the tests that run on a GPU, without what the whole suite needs beside pytest."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("attention", "engine", "kernels", "model", "runtime", "sample")
TIMEOUT_S = 450
ON_GPU = re.compile(r"\bDEVICE\b|mark\.gpu\b|cuda_model\b")


def modules() -> list[str]:
    """The modules with tests that run on a GPU. Others may need packages that a borrowed machine does not have."""
    paths = (path for folder in FOLDERS for path in (ROOT / "tests" / folder).rglob("test_*.py"))
    return sorted(str(path.relative_to(ROOT)) for path in paths if ON_GPU.search(path.read_text()))


def test_lines(*, on_gpu: bool, few: bool) -> Iterator[str]:
    """Failures, reasons of skipped tests, the slowest ones, and the summary. Raises RuntimeError if a test fails.

    on_gpu: without a GPU the kernels' tests run instead, in Triton's interpreter
    few:    run the tests of one module, to try the script
    """
    if find_spec("pytest") is None:
        raise RuntimeError("The tests need pytest; see docs/gpu.md for machines without a network.")
    chosen = [path for path in modules() if not few or "triton_layer" in path]
    options = "-o addopts= -p no:cacheprovider -q -rfEs --tb=short --durations=10 --color=no".split()
    command = [sys.executable, "-m", "pytest", *options, "-m", "gpu" if on_gpu else "kernels", *chosen]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=os.environ | {"PYTHONPATH": path_of_imports()}, timeout=TIMEOUT_S,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        yield from lines_of((error.stdout or b"").decode(errors="replace"))
        raise RuntimeError(f"The tests were not finished after {TIMEOUT_S} s.") from None
    yield from lines_of(done.stdout)
    if done.returncode:
        raise RuntimeError(f"pytest ended with exit code {done.returncode}.")


def path_of_imports() -> str:
    """So that the tests import what this process does."""
    return os.pathsep.join([str(ROOT), *filter(None, sys.path)])


def lines_of(output: str) -> list[str]:
    """The lines without those that show the progress only."""
    return [line for line in output.splitlines() if line.strip() and not re.fullmatch(r"[.sxXFE]+ +\[ *\d+%\]", line)]
