"""Everything that uses private names of other packages, each with a test in tests/engine/test_compat.py.

A library is imported only by the function that needs it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

NO_REFERENCE_COUNTS = {"_nrt": False}
"""An option of numba's compilers, private as of 0.68: kernels do not count references to arrays.

Without it the threads of a step compete for the counters of the arrays that they share.
"""


def keep_compiled(
    compiled: Any,
    function: Callable[..., Any],
    version: str,
    *,
    on_miss: Callable[[], None],
    on_error: Callable[[Exception], None],
) -> None:
    """Keeps the machine code of a numba dispatcher or callback on disk, as `cache=True` does, with three differences.

    Code of another `version` is not used; numba only asks whether the function's own file has changed, but a kernel
    inlines functions of many files. A damaged file, or code that another process saved under the same name, counts as
    missing. Errors while saving go to `on_error`. If no folder can be written, nothing is kept.

    Private as of numba 0.68: `FunctionCache._index_key`, and the attribute `_cache` of dispatchers and callbacks.
    """
    from numba.core.caching import FunctionCache, NullCache

    class CodeCache(FunctionCache):  # type: ignore[misc]
        def _index_key(self, *args: Any) -> tuple[Any, ...]:
            return (*super()._index_key(*args), version)

        def load_overload(self, signature: Any, *args: Any) -> Any:
            found = None
            try:
                found = super().load_overload(signature, *args)
            except Exception:  # a truncated file: nothing could be saved beside it either
                with suppress(OSError):
                    self.flush()
            # Two processes that save at the same moment may write code under each other's names.
            if found is not None and tuple(found.signature.args) != tuple(getattr(signature, "args", signature)):
                found = None
            if found is None:
                on_miss()
            return found

        def save_overload(self, *args: Any) -> None:
            try:
                super().save_overload(*args)
            except Exception as error:
                on_error(error)

    try:
        compiled._cache = CodeCache(function)
    except RuntimeError:
        compiled._cache = NullCache()


def new_callback(function: Callable[..., None], signature: Any) -> Any:
    """A numba callback, not compiled yet; `compile` makes its `address`.

    `numba.cfunc` compiles at once, before a cache can be set, and ignores NO_REFERENCE_COUNTS. Private as of
    numba 0.68: the class `CFunc` and `sigutils.normalize_signature`.
    """
    from numba.core import sigutils
    from numba.core.ccallback import CFunc

    arguments, result = sigutils.normalize_signature(signature)
    return CFunc(function, (arguments, result), locals={}, options={"nopython": True, **NO_REFERENCE_COUNTS})
