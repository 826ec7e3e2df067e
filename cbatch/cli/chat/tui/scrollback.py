"""Prints conversations when the chat ends, so that they stay in the terminal's own scrollback."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TextIO

from prompt_toolkit import print_formatted_text
from prompt_toolkit.formatted_text import FormattedText
from prompt_toolkit.output import create_output

from cbatch.cli.chat.markdown.lines import StyledLine
from cbatch.cli.chat.session.session import Session
from cbatch.cli.chat.tui.style import STYLE
from cbatch.cli.chat.tui.transcript import Transcript
from cbatch.cli.common.console import safe


def print_conversations(sessions: Iterable[Session], stream: TextIO) -> None:
    """Prints what was said in this chat. Lines of code are not broken, so that they can be selected whole."""
    output = create_output(stdout=stream)
    for session in sessions:
        for line in conversation_lines(session, output.get_size().columns):
            print_formatted_text(FormattedText(line), output=output, style=STYLE)


def conversation_lines(session: Session, width: int) -> Iterator[StyledLine]:
    """The turns of a session that this chat has added, under its name; nothing if there are none."""
    turns = [turn for turn in session.turns if any(reply.requested_at for reply in turn.replies)]
    if not turns:
        return
    transcript = Transcript(breaks_code=False)
    name = f"── {safe(session.name)} "
    yield [("class:fence", name + "─" * max(min(width, 60) - len(name), 0))]
    for turn in turns:
        yield from transcript.turn(turn, width)
