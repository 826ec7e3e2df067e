"""Output for people: notices, progress, and text that is safe to show in a terminal."""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress

from cbatch.cli.common.exits import ReaderGone

_BIDI = "\u061c\u200e\u200f\u2028\u2029\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
"""Characters that change the direction of text, or end a line invisibly."""

_WITHOUT_BIDI = dict.fromkeys(map(ord, _BIDI))

_CONTROL = re.compile(rf"[\x00-\x08\x0b-\x1f\x7f-\x9f{_BIDI}]")
"""Control characters and those of _BIDI, except tabs and line ends."""


def without_bidi(text: str) -> str:
    """Removes the characters that change the direction of text."""
    return text.translate(_WITHOUT_BIDI)


def safe(text: str) -> str:
    """Removes control characters, so that no text of a model or a file can control the terminal."""
    return _CONTROL.sub("", text)


def safe_json(data: bytes) -> bytes:
    """Escapes control characters in lines of JSON, which keep their meaning."""
    return _CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", data.decode()).encode()


def notice(text: str) -> None:
    """Prints one line on stderr. Does not raise if nobody can read it: a message must never end a run."""
    if sys.stderr is not None:
        with suppress(OSError), _without_bar():
            print(f"cbatch: {safe(' '.join(text.splitlines()))}", file=sys.stderr, flush=True)


def _without_bar() -> AbstractContextManager[object]:
    """Removes the progress bar, if there is one, and puts it back."""
    if "tqdm" not in sys.modules:
        return nullcontext()
    from tqdm import tqdm

    bar: AbstractContextManager[object] = tqdm.external_write_mode(file=sys.stderr)
    return bar


def emit(text: str) -> None:
    """Prints text on stdout. Raises ReaderGone if nobody reads it."""
    try:
        print(text, flush=True)
    except BrokenPipeError as error:
        raise ReaderGone from error


class Progress:
    """Shows progress: a tqdm bar on a terminal, else a line every ten seconds, or nothing if `quiet`."""

    BAR_SECONDS, LINE_SECONDS = 0.2, 10.0

    def __init__(self, total: int | None, *, quiet: bool, state: Callable[[], tuple[int, str]]) -> None:
        """`state` returns the number of rows that are done, and the text that follows it."""
        self._state = state
        self._of_total = f"/{total:,}" if total else ""
        has_bar = sys.stderr is not None and sys.stderr.isatty() and not quiet
        self._interval = self.BAR_SECONDS if has_bar else self.LINE_SECONDS
        self._next = math.inf if quiet else time.monotonic() + self._interval
        self._bar = None
        if has_bar:
            from tqdm import tqdm

            form = "{n_fmt} rows{postfix}"
            if total:
                form = "{percentage:3.0f}%|{bar:6}| {n_fmt}/{total_fmt} rows{postfix}"
            self._bar = tqdm(total=total, bar_format=form, dynamic_ncols=True, file=sys.stderr, leave=False)

    def tick(self) -> None:
        """Shows the state if it is time to. Call it often."""
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
