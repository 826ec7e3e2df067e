"""A shell command of the user's own, whose output goes with a message."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress

from cbatch.base.units import format_count
from cbatch.cli.chat.session.files import MAX_BYTES


class ShellCommand:
    """Runs a line in a shell that has no terminal, from now on. Raises OSError if there is none."""

    def __init__(self, line: str) -> None:
        self.line = line
        self._process = subprocess.Popen(
            line, shell=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip

    def output(self) -> tuple[str, str]:
        """Waits for the end. Returns the beginning of what it wrote, and what there is to say about that."""
        assert self._process.stdout is not None
        data = self._process.stdout.read(MAX_BYTES + 1)
        is_cut = len(data) > MAX_BYTES
        if is_cut:
            self.stop()
        code, text = self._process.wait(), data[:MAX_BYTES].decode(errors="replace")
        size = format_count(len(text.splitlines()), "line") if text else "no output"
        problem = f", cut off after {MAX_BYTES >> 20} MiB" if is_cut else ""
        problem = problem or (f", it ended with code {code}" if code > 0 else ", it was stopped" if code else "")
        return text, size + problem

    def stop(self) -> None:
        """Ends it with all that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
