"""What people see on stderr: notices, progress, and text made safe for a terminal."""

from __future__ import annotations

import math
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
    """How far a run is: a tqdm bar on a terminal, a plain line every ten seconds elsewhere, or nothing."""

    BAR_SECONDS, LINE_SECONDS = 0.2, 10.0

    def __init__(self, total: int | None, *, quiet: bool, state: Callable[[], tuple[int, str]]) -> None:
        """`state` gives how many of the `total` rows are done, and what is to stand behind that."""
        self._state = state
        self._of_total = f"/{total:,}" if total else ""
        self._interval = self.BAR_SECONDS if sys.stderr.isatty() else self.LINE_SECONDS
        self._next = math.inf if quiet else time.monotonic() + self._interval
        self._bar = None
        if sys.stderr.isatty() and not quiet:
            from tqdm import tqdm

            form = "{n_fmt} rows{postfix}"
            if total:
                form = "{percentage:3.0f}%|{bar:6}| {n_fmt}/{total_fmt} rows{postfix}"
            self._bar = tqdm(total=total, bar_format=form, dynamic_ncols=True, file=sys.stderr, leave=False)

    def tick(self) -> None:
        """Shows the state when it is time to; to be called often."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + self._interval
        done, text = self._state()
        if self._bar is not None:
            self._bar.n = done
            self._bar.set_postfix_str(text)
        else:
            notice(f"{done:,}{self._of_total} rows, {text}")

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
