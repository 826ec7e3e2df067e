"""Whether what lies in a folder may be run: compiled code must come from nobody but this user."""

from __future__ import annotations

import os
import stat
from pathlib import Path


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
        if _others_may_write(status) and not is_sticky:
            return f"other users may write to {one}"
    return None


def _others_may_write(status: os.stat_result) -> bool:
    is_open_to_group = status.st_mode & stat.S_IWGRP and not _is_private_group(status.st_gid)
    return bool(is_open_to_group or status.st_mode & stat.S_IWOTH)


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
