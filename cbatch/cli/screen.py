"""What people see on stderr: notices, progress, and text made safe for a terminal."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def safe(text: str) -> str:
    """Text without control characters, so that nothing from a model or file can steer the terminal."""
    return _CONTROL.sub("", text)


def notice(text: str) -> None:
    """One line on stderr."""
    print(f"cbatch: {safe(text)}", file=sys.stderr, flush=True)


class Progress:
    """Rows done so far: a tqdm bar on a terminal, a plain line every ten seconds elsewhere, or nothing."""

    INTERVAL = 10.0

    def __init__(self, total: int | None, *, quiet: bool, describe: Callable[[], str]) -> None:
        """`describe` gives what stands behind the count: speed, running and waiting rows, cache use."""
        self._describe = describe
        self._total = total
        self._done = 0
        self._next_line = time.monotonic() + self.INTERVAL
        self._quiet = quiet
        self._bar = None
        if sys.stderr.isatty() and not quiet:
            from tqdm import tqdm

            self._bar = tqdm(total=total, unit="row", dynamic_ncols=True, file=sys.stderr, leave=False)

    def advance(self, rows: int) -> None:
        """Counts finished rows; call it with 0 now and then, to keep the display alive."""
        self._done += rows
        if self._bar is not None:
            self._bar.update(rows)
            self._bar.set_postfix_str(self._describe(), refresh=rows == 0)
        elif not self._quiet and time.monotonic() >= self._next_line:
            self._next_line += self.INTERVAL
            notice(f"{self._done}{f'/{self._total}' if self._total else ''} rows, {self._describe()}")

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
