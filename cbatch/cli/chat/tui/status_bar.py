"""The line between transcript and input: the sessions on the left, the engine on the right."""

from __future__ import annotations

from prompt_toolkit.utils import get_cwidth

from cbatch.cli.chat.background_run import BackgroundRun
from cbatch.cli.chat.controller import ALMOST_FULL, ChatController
from cbatch.cli.chat.markdown.lines import Fragment
from cbatch.cli.chat.session.session import Session
from cbatch.cli.chat.stats import ChatStats
from cbatch.cli.common.console import safe


class StatusBar:
    """Renders the bar anew whenever the screen is drawn."""

    def __init__(self, controller: ChatController, stats: ChatStats, background: BackgroundRun) -> None:
        self._controller, self._stats, self._background = controller, stats, background

    def render(self, width: int) -> list[Fragment]:
        """The bar for a screen of `width` cells."""
        right = _fitting(self._engine(), width // 2)
        left = self._sessions(width - get_cwidth(right) - 1)
        used = sum(get_cwidth(text) for _, text in left)
        return [*left, ("class:bar", " " * max(width - used - get_cwidth(right), 0)), ("class:bar", right)]

    def _engine(self) -> list[str]:
        """What the engine does, the most important part first."""
        client = self._controller.client_of(self._controller.current)
        engine = client.engine
        if engine is None:
            return ["loading the model", *([safe(detail)] if (detail := self._stats.loading_detail) else [])]
        if engine.failure is not None:
            return ["the engine has failed"]
        if self._background.progress:
            return self._background.progress
        load = engine.stats()
        if not (load.num_running or load.num_waiting):
            return [safe(engine.loaded.name)]
        waiting = [f"{load.num_waiting} waiting"] if load.num_waiting else []
        speed = f"{self._stats.tokens_per_s:,.0f} tok/s"
        return [f"{load.num_running} running", *waiting, speed, f"KV {load.cache_used:.0%}"]

    def _sessions(self, width: int) -> list[Fragment]:
        """The session names with their marks; if not all fit, those around the current one."""
        sessions, current = self._controller.sessions, self._controller.current
        shares = [self._controller.context_share(session) for session in sessions]
        labels = [
            _label(number, session, share, is_current=session is current)
            for number, (session, share) in enumerate(zip(sessions, shares, strict=True), 1)
        ]
        sizes = [get_cwidth(label) for label in labels]
        place = first = last = sessions.index(current)
        used = sizes[place]
        while True:
            if last + 1 < len(labels) and used + sizes[last + 1] <= width - 4:
                last += 1
                used += sizes[last]
            elif first > 0 and used + sizes[first - 1] <= width - 4:
                first -= 1
                used += sizes[first]
            else:
                break
        before, after = "< " if first else "", " >" if last + 1 < len(labels) else ""
        if used + len(before) + len(after) > width:
            return [("class:bar.current", _cut(labels[place], width))]
        shown = [
            (_style(share, is_current=number == place), label)
            for number, (share, label) in enumerate(zip(shares, labels, strict=True))
        ][first : last + 1]
        return [("class:bar", before), *shown, ("class:bar", after)]


def _label(number: int, session: Session, share: float, *, is_current: bool) -> str:
    """` 1 main… ` while a reply is on its way, ` 1 main* ` if something is unread, `[1 main 12%]` if it is current.

    share: how full its context is, from 0 to 1
    """
    mark = "…" if session.is_busy else "*" if session.is_unread else ""
    full = f" {share:.0%}" if share else ""
    label = f"{number} {safe(session.name)}{mark}{full}"
    return f"[{label}]" if is_current else f" {label} "


def _style(share: float, *, is_current: bool) -> str:
    if share >= ALMOST_FULL:
        return "class:bar.full"
    return "class:bar.current" if is_current else "class:bar"


def _fitting(parts: list[str], width: int) -> str:
    """As many parts as fit into `width` cells, with a blank on each side; none is cut, but for a first one of words."""
    shown = ""
    for part in parts:
        longer = f"{shown}, {part}" if shown else part
        if get_cwidth(longer) + 2 > width:
            break
        shown = longer
    if not shown and not any(character.isdigit() for character in parts[0]):
        shown = _cut(parts[0], width - 2)
    return f" {shown} " if shown else ""


def _cut(text: str, width: int) -> str:
    """As much of a text as fits into `width` cells."""
    text = text[: max(width, 0)]
    while get_cwidth(text) > max(width, 0):
        text = text[:-1]
    return text
