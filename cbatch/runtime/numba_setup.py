"""Whether numba can compile the kernels of a CPU here."""

from __future__ import annotations

import logging
import warnings
from functools import cache

from cbatch.base.errors import ConfigError

_log = logging.getLogger("cbatch")


@cache
def prepare_numba() -> None:
    """Imports numba. Raises ConfigError if it refuses a variable; one that it cannot read is said in a line."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            import numba  # noqa: F401
        except ValueError as error:  # of a number of threads below 1
            reason = str(error).rstrip(".")
            raise ConfigError(
                f"numba, which compiles the kernels, refuses a variable that begins with NUMBA_: {reason}."
            ) from error
    for warning in caught:
        if "Environment variable" in str(warning.message):
            _log.warning("numba ignores a variable: %s", str(warning.message).splitlines()[0])


def require_compiler() -> None:
    """Raises ConfigError if the environment keeps numba from compiling the kernels of a CPU."""
    prepare_numba()
    import numba

    if numba.config.DISABLE_JIT:
        raise ConfigError("The kernels of a CPU cannot be compiled, because NUMBA_DISABLE_JIT is set; unset it.")
