"""Guards the kernels for a GPU on machines without one: the interpreter takes what the compiler does not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.kernels]

pytest.importorskip("triton", reason="the kernels for a GPU need Triton")

EXPECTED = {
    "_choose_kernel", "_combine_kernel", "_decode_kernel", "_norm_kernel", "_prefill_kernel",
    "_rope_and_store_kv_kernel", "_scan_kernel", "_silu_and_mul_kernel", "_store_kv_kernel",
}  # fmt: skip


def test_kernels_compile(tmp_path: Path) -> None:
    """Guards what a launch compiles, up to machine code, for each kind of arguments that a step has."""
    settings = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.support.triton_compiler"]
    done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == EXPECTED
