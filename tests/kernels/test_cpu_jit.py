"""Guards the cache of compiled kernels: what it cannot use is compiled again, and nothing else happens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba import typeof
from numba.core.caching import FunctionCache

from cbatch.kernels.cpu import jit

pytestmark = pytest.mark.kernels


@jit.entry
def add_up(numbers: Any, total: Any) -> None:
    for number in numbers:
        total[0] += number


def call(dtype: type) -> float:
    total = np.zeros(1, dtype)
    add_up(np.arange(5, dtype=dtype), total)
    return float(total[0])


def test_damaged_and_foreign_code_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a cut-off file, and against code for other types under the same name."""
    compiled: Any = add_up
    assert call(np.float32) == 10
    cache = compiled._cache
    wanted = tuple(typeof(np.zeros(1, np.float32)) for _ in range(2))
    context = compiled.targetctx
    assert cache.load_overload(wanted, context) is not None
    other = tuple(typeof(np.zeros(1, np.float64)) for _ in range(2))
    load = FunctionCache._load_overload
    with monkeypatch.context() as patch:
        patch.setattr(FunctionCache, "_load_overload", lambda self, sig, *args: load(self, wanted, *args))
        assert cache.load_overload(other, context) is None
    Path(cache._cache_file._index_path).write_bytes(b"")
    assert cache.load_overload(wanted, context) is None
    assert call(np.float64) == 10
    assert cache.load_overload(other, context) is not None, "nothing is kept after a file was damaged"
