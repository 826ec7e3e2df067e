"""A private temporary folder that belongs to one run, and goes with it."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path


class RunFolder:
    """A new folder that only this user may open, below the folder for temporary files unless said otherwise.

    `close` removes it. A run that is killed leaves its folder behind, and the next one removes it: a run holds a lock
    on its folder, which the system releases when the process ends.
    """

    def __init__(self, purpose: str, parent: Path | None = None) -> None:
        """purpose: a part of its name. Raises OSError if the folder cannot be made."""
        prefix = f"cbatch-{purpose}-"
        parent = parent or Path(tempfile.gettempdir())
        for path in parent.glob(prefix + "*"):
            with suppress(OSError):
                _remove_if_left(path)
        self._lock: int | None = None
        while self._lock is None:
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
            with suppress(FileNotFoundError):
                self._lock = _lock(self.path)

    def close(self) -> None:
        """Removes the folder and what is in it. Files that are mapped stay readable for those that map them."""
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = None


def _lock(path: Path) -> int | None:
    """Locks a folder of this user; None if another process holds the lock, or has removed the folder meanwhile."""
    with ExitStack() as undo, suppress(BlockingIOError):
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        undo.callback(os.close, folder)
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(folder), path.lstat()) and os.fstat(folder).st_uid == os.geteuid():
            undo.pop_all()
            return folder
    return None


def _remove_if_left(path: Path) -> None:
    folder = _lock(path)
    if folder is not None:
        shutil.rmtree(path, ignore_errors=True)
        os.close(folder)
