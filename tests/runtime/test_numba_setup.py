"""What keeps numba from compiling is said before a kernel needs it."""

from __future__ import annotations

import os
import subprocess
import sys

import numba
import pytest

from cbatch.base.errors import ConfigError
from cbatch.runtime.numba_setup import require_compiler


def test_a_compiler_that_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards NUMBA_DISABLE_JIT, with which kernels are Python functions that nobody can call by an address."""
    require_compiler()
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    with pytest.raises(ConfigError, match="NUMBA_DISABLE_JIT is set; unset it"):
        require_compiler()


def test_variables_that_numba_cannot_read() -> None:
    """Guards stderr against the traceback that numba prints for each of them, and the user against silence."""
    program = "from cbatch.runtime.numba_setup import prepare_numba; prepare_numba()"
    environment = os.environ | {"NUMBA_OPT": "nine"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stderr.startswith("numba ignores a variable: ") and "'NUMBA_OPT'" in done.stderr
    assert done.stderr.count("\n") == 1
