"""Whether numba can compile the kernels of a CPU here, and whether compiled code in a folder may be run."""

from __future__ import annotations

import logging
import os
import stat
import warnings
from functools import cache
from pathlib import Path

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


def why_not_trusted(folder: Path, source: Path) -> str | None:
    """Why others could have put files into a folder, as a clause; None if they could not.

    source: a file of the program, whose owner can change what runs in any case

    Raises OSError if the folder cannot be looked at.
    """
    owners = {os.geteuid(), 0, source.stat().st_uid}
    for one in (folder, folder.parent):
        status = one.stat()
        if status.st_uid not in owners:
            return f"{one} belongs to another user"
        is_sticky = one is not folder and status.st_mode & stat.S_ISVTX  # others cannot replace what is in it
        is_open_to_group = status.st_mode & stat.S_IWGRP and not _is_private_group(status.st_gid)
        if (is_open_to_group or status.st_mode & stat.S_IWOTH) and not is_sticky:
            return f"other users may write to {one}"
    return None


def _is_private_group(number: int) -> bool:
    """Whether a group is the one that many systems make for this user alone, and let new files be writable for."""
    import grp
    import pwd

    if number != os.getegid():
        return False
    try:
        return grp.getgrgid(number).gr_name == pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # a container, whose users have no names
        return True
