"""Records a short session of the real `cbatch chat` as an animated picture: docs/chat.svg.

    python -m scripts.pictures.picture_chat

What the picture shows is what the program drew, at the speed at which it did; pauses are shortened.
"""

from __future__ import annotations

import itertools
import re
import time
from html import escape
from pathlib import Path

from scripts.benchmarks.terminal import COLUMNS, ROWS, Terminal

PICTURE = Path(__file__).parents[2] / "docs" / "chat.svg"
WIDTH, HEIGHT, MARGIN = 8.4, 17.0, 12
MOST_SECONDS = 1.2
"""Longest time for which a frame is shown, except for the last one."""

FRAME_SECONDS = 0.1

COLOURS = {"cyan": "#56c8d8", "brightblack": "#8a8f98", "green": "#7ec97e", "brown": "#d8b25e", "red": "#e06c6c"}
BACKGROUND, FOREGROUND = "#1d2026", "#d7dae0"

WORDS = re.compile(r"\S+(?: \S+)*")

Cell = tuple[str, str, bool, bool]
Frame = list[list[Cell]]


def frame_of(terminal: Terminal) -> Frame:
    """The screen as runs of cells of the same kind: text, colour, bold, reverse."""
    rows = []
    for number in range(ROWS):
        line = terminal.screen.buffer[number]
        cells = [(line[x].data, line[x].fg, line[x].bold, line[x].reverse) for x in range(COLUMNS)]
        runs = itertools.groupby(cells, key=lambda cell: cell[1:])
        rows.append([("".join(cell[0] for cell in run), *kind) for kind, run in runs])
    return rows


def drawn(frame: Frame) -> str:
    parts = []
    for row, runs in enumerate(frame):
        column = 0
        for text, colour, bold, reverse in runs:
            x, y = MARGIN + column * WIDTH, MARGIN + row * HEIGHT
            column += len(text)
            fill = COLOURS.get(colour, FOREGROUND)
            if reverse:
                box = f'<rect x="{x:.1f}" y="{y:.1f}" width="{len(text) * WIDTH:.1f}" height="{HEIGHT}"'
                parts.append(f'{box} fill="{FOREGROUND}"/>')
                fill = BACKGROUND
            weight = ' font-weight="bold"' if bold else ""
            for words in WORDS.finditer(text):  # several blanks would be folded into one
                place = f'x="{x + words.start() * WIDTH:.1f}" y="{y + 13:.1f}"'
                length = f'textLength="{len(words[0]) * WIDTH:.1f}"'
                parts.append(f'<text {place} {length} fill="{fill}"{weight}>{escape(words[0])}</text>')
    return "".join(parts)


def animated(frames: list[tuple[Frame, float]]) -> str:
    """An animation that shows each frame for its seconds, in a loop. Viewers without animation show the last frame."""
    total = sum(seconds for _, seconds in frames)
    styles, groups, start = [], [], 0.0
    for number, (frame, seconds) in enumerate(frames):
        begin, end = 100 * start / total, 100 * (start + seconds) / total
        start += seconds
        steps = f"0%{{opacity:{int(number == 0)}}}{begin:.3f}%{{opacity:1}}{end:.3f}%{{opacity:0}}"
        styles.append(
            f"@keyframes f{number}{{{steps}}}#f{number}{{animation:f{number} {total:.2f}s step-end infinite}}"
        )
        is_last = number == len(frames) - 1
        groups.append(f'<g id="f{number}" opacity="{int(is_last)}">{drawn(frame)}</g>')
    width, height = COLUMNS * WIDTH + 2 * MARGIN, ROWS * HEIGHT + 2 * MARGIN
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}">'
        f"<style>text{{font:14px 'DejaVu Sans Mono',Menlo,Consolas,monospace;white-space:pre}}{''.join(styles)}</style>"
        f'<rect width="100%" height="100%" rx="8" fill="{BACKGROUND}"/>{"".join(groups)}</svg>\n'
    )


class Recorder:
    """Takes a frame whenever the screen has changed."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._taken: list[tuple[Frame, float]] = []

    def look(self, seconds: float) -> None:
        """Watches for a while."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            next_frame = time.monotonic() + FRAME_SECONDS
            while (left := next_frame - time.monotonic()) > 0:
                self._terminal.pump(left)
            frame = frame_of(self._terminal)
            if not self._taken or frame != self._taken[-1][0]:
                self._taken.append((frame, time.monotonic()))

    def type(self, line: str, seconds: float) -> None:
        self._terminal.send(line)
        self.look(0.6)
        self._terminal.send("\r")
        self.look(seconds)

    @property
    def frames(self) -> list[tuple[Frame, float]]:
        times = [when for _, when in self._taken]
        stays = [min(after - before, MOST_SECONDS) for before, after in itertools.pairwise(times)]
        return list(zip((frame for frame, _ in self._taken), [*stays, 4.0], strict=True))


def main() -> None:
    terminal = Terminal("--no-history", "-q")
    recorder = Recorder(terminal)
    terminal.wait("the bundled demo model")
    recorder.look(0.3)
    recorder.type("My name is Ada.", 0.8)
    recorder.type("/new stories", 0.4)
    recorder.type("Tell me a story about a cat named Tom.", 0.5)
    terminal.send("\x1b1")
    recorder.look(0.3)
    recorder.type("What is my name?", 1.0)
    terminal.send("\x1b2")
    recorder.look(1.5)
    recorder.type("/retry temperature=0.2,0.5,0.8", 2.5)
    for key in ("\x1b[C", "\x1b[C", "\r"):
        terminal.send(key)
        recorder.look(0.7)
    recorder.type("/compare", 0.5)
    recorder.type("/all Count from 3 to 9.", 2.0)
    terminal.close()
    PICTURE.write_text(animated(recorder.frames))
    print(f"{PICTURE}: {len(recorder.frames)} frames, {PICTURE.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
