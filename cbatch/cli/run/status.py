"""How far a run is, for other programs: in a file that is rewritten, and on stderr when a signal asks for it."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType
from typing import Any, Self

from cbatch.base.errors import ConfigError, os_errors_as
from cbatch.cli.common.console import notice, print_line

INTERVAL_S = 1.0

Figures = Callable[[], dict[str, Any]]


class RunStatus(AbstractContextManager["RunStatus"]):
    """Within its context, SIGUSR1 asks for the figures; without rows to run yet, it asks for those to come.

    The state is `loading` until the first row can run, then `running`, and `ended` however the run ends.
    """

    def __init__(self, path: str | None) -> None:
        """Raises ConfigError if the file cannot be written."""
        self._path = Path(path) if path is not None else None
        self._due = 0.0
        self._is_asked = False
        self._figures: dict[str, Any] = {}
        with os_errors_as(ConfigError, f"Cannot write {path}"):
            self._write("loading")

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGUSR1, self._ask)
        return self

    def __exit__(self, *error: object) -> None:
        signal.signal(signal.SIGUSR1, self._before)
        self._try_to_write("ended")

    def show(self, figures: Figures, *, is_last: bool = False) -> None:
        """Takes the figures, if it is time to or somebody waits for them. Call it often."""
        is_due = self._path is not None and (is_last or time.monotonic() >= self._due)
        if not (is_due or self._is_asked):
            return
        self._figures = figures()
        if self._is_asked:
            self._is_asked = False
            print_line(self._text("running"))
        if is_due:
            self._due = time.monotonic() + INTERVAL_S
            self._try_to_write("running")

    def _ask(self, signum: int, frame: FrameType | None) -> None:
        self._is_asked = True

    def _text(self, state: str) -> str:
        return json.dumps({"state": state, **self._figures})

    def _try_to_write(self, state: str) -> None:
        try:
            self._write(state)
        except OSError as error:  # a full disk, which ends the run elsewhere if it has to
            notice(f"Cannot write {self._path}: {error.strerror}.")
            self._path = None

    def _write(self, state: str) -> None:
        if self._path is not None:
            new = self._path.with_name(f".{self._path.name}.new")
            new.write_text(self._text(state) + "\n")
            new.replace(self._path)
