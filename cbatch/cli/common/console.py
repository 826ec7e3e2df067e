"""Output for people: notices, progress, and text that is safe to show in a terminal."""

from __future__ import annotations

import io
import math
import re
import select
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING

from cbatch.base.errors import ReaderGone
from cbatch.base.units import format_count

if TYPE_CHECKING:
    from typing_extensions import Buffer

MOST_CHARACTERS = 1000
"""Of a notice. What a file holds may be part of one, and have any length."""

_BIDI = "\u061c\u200e\u200f\u2028\u2029\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
"""Characters that change the direction of text, or end a line invisibly."""

BAR_SECONDS, LINE_SECONDS = 0.2, 10.0
"""Time between two updates of a progress bar, and between two lines of progress."""

ProgressState = Callable[[], tuple[int, str]]
"""Returns the number of rows that are done, and the text that follows it in a display."""

Details = Callable[[], Sequence[str]]
"""Returns lines that belong under the progress; always as many."""


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
    """Prints one line on stderr, without the middle of a very long text.

    Does not raise if nobody can read it: a message must never end a run.
    """
    if sys.stderr is not None:
        with suppress(OSError), _without_bar():
            print(f"cbatch: {safe(' '.join(shortened(text).splitlines()))}", file=sys.stderr, flush=True)


def shortened(text: str) -> str:
    """A message without the middle of a very long value that it quotes."""
    if len(text) <= MOST_CHARACTERS:
        return text
    half = MOST_CHARACTERS // 2
    return f"{text[:half]} [...] {text[-half:]}"


def _without_bar() -> AbstractContextManager[object]:
    if "tqdm" not in sys.modules:
        return nullcontext()
    from tqdm import tqdm

    bar: AbstractContextManager[object] = tqdm.external_write_mode(file=sys.stderr)
    return bar


class OutputStream(io.FileIO):
    """Writes rows. On a terminal that may show a progress bar, they are not glued to the bar."""

    def write(self, data: Buffer, /) -> int:
        if not self.isatty():
            return super().write(data)
        view = memoryview(data)
        with _without_bar():  # until all is written: else the bar would come back in the middle of a line
            while view:
                select.select([], [self], [])  # somebody may have made the terminal non-blocking
                view = view[super().write(view) or 0 :]
        return memoryview(data).nbytes


def emit(text: str) -> None:
    """Prints text on stdout. Raises ReaderGone if nobody reads it."""
    try:
        print(text, flush=True)
    except BrokenPipeError as error:
        raise ReaderGone from error


@contextmanager
def show_progress(
    total: int | None, state: ProgressState, details: Details = tuple, *, quiet: bool, unit: str = "row"
) -> Iterator[Callable[[], None]]:
    """Shows progress: a tqdm bar on a terminal, else a line every ten seconds, or nothing if `quiet`.

    unit:    what is counted, if it is not rows
    details: lines for below the bar, or for the end of the line

    Yields a function that shows the state if it is time to. Call it often.
    """
    is_terminal = sys.stderr is not None and sys.stderr.isatty() and not quiet
    interval = BAR_SECONDS if is_terminal else LINE_SECONDS
    due = math.inf if quiet else time.monotonic() + interval
    with ExitStack() as opened:
        if is_terminal:
            from tqdm import tqdm

            form = "{percentage:3.0f}%|{bar:6}| {n_fmt}/{total_fmt} {unit}{postfix}"
            make = partial(tqdm, dynamic_ncols=True, file=sys.stderr, leave=False)
            bar = make(
                total=total, bar_format=form if total else "{n_fmt} {unit}{postfix}", unit=f"{unit}s", position=0
            )
            lines = [make(bar_format="{desc}", position=number) for number in range(1, len(details()) + 1)]
            for each in (bar, *lines):
                opened.enter_context(each)

        def tick() -> None:
            nonlocal due
            now = time.monotonic()
            if now < due:
                return
            due = now + interval
            done, text = state()
            if not is_terminal:
                rows = f"{done:,}/{format_count(total, unit)}" if total else format_count(done, unit)
                notice(f"{rows}, {'; '.join([text, *details()])}")
                return
            bar.n, bar.unit = done, unit if (total or done) == 1 else f"{unit}s"
            bar.set_postfix_str(text)
            for line, shown in zip(lines, details(), strict=True):
                line.set_description_str(safe(shown))

        yield tick
