"""What the bar and `/stats` say: who is answering, how fast the engine is, what a batch underneath does."""

from __future__ import annotations

import time
from collections import deque

from prompt_toolkit.utils import get_cwidth

from cbatch.cli.chat.background_run import BackgroundRun
from cbatch.cli.chat.controller import ChatController
from cbatch.cli.chat.session.session import Reply, Session
from cbatch.cli.chat.tui.markup import Fragment
from cbatch.cli.common.console import safe
from cbatch.cli.common.loading import describe

SPEED_SECONDS = 3.0
"""Time over which the speed is measured."""


class Status:
    """Watches a room. `tick` is to be called several times a second."""

    def __init__(self, controller: ChatController, background: BackgroundRun) -> None:
        self._controller = controller
        self._background = background
        self._counts: deque[tuple[float, int]] = deque()
        self._first_tokens: deque[float] = deque(maxlen=1000)
        self._delays: deque[float] = deque(maxlen=10_000)
        self.loading = "loading the model"
        """What the bar says until the engine is there."""

    def tick(self) -> None:
        if (engine_thread := self._controller.client.engine_thread) is not None:
            now = time.monotonic()
            self._counts.append((now, engine_thread.num_tokens))
            while now - self._counts[0][0] > SPEED_SECONDS:
                self._counts.popleft()

    def count_first_token(self, seconds: float) -> None:
        """Time from a message to the first token of its answer."""
        self._first_tokens.append(seconds)

    def count_delay(self, seconds: float) -> None:
        """Time from a token in the engine to its text on the screen."""
        self._delays.append(seconds)

    @property
    def tokens_per_s(self) -> float:
        """Of all that the engine does, over the last seconds."""
        if len(self._counts) < 2:
            return 0.0
        (start, before), (end, after) = self._counts[0], self._counts[-1]
        return (after - before) / (end - start) if end > start else 0.0

    def bar(self, width: int) -> list[Fragment]:
        """One line: the sessions on the left, the engine on the right."""
        right = self._engine()
        if get_cwidth(right) > width // 2:
            right = _cut(right, width // 2)
        left = self._sessions(width - get_cwidth(right) - 1)
        used = sum(get_cwidth(text) for _, text in left)
        return [*left, ("class:bar", " " * max(width - used - get_cwidth(right), 0)), ("class:bar", right)]

    def lines(self) -> list[str]:
        """What `/stats` shows."""
        engine_thread = self._controller.client.engine_thread
        if engine_thread is None:
            return [self.loading]
        if engine_thread.failure is not None:
            return [f"the engine has failed: {engine_thread.failure}"]
        stats, shown = engine_thread.engine.stats(), describe(engine_thread.engine)
        hits = stats.num_cached_tokens / max(stats.num_prompt_tokens, 1)
        lines = [
            *(f"{name}: {shown[name]}" for name in ("model", "parameters", "context", "KV cache", "batch")),
            f"now: {stats.num_running} running, {stats.num_waiting} waiting, {self.tokens_per_s:,.0f} tokens/s, "
            f"KV cache {stats.cache_used:.0%} used",
            f"so far: {engine_thread.num_tokens:,} tokens in {stats.num_steps:,} steps, "
            f"{stats.num_preemptions:,} preemptions",
            f"prefix cache: {stats.num_cached_tokens:,} of {stats.num_prompt_tokens:,} prompt tokens "
            f"did not have to be computed ({hits:.0%})",
        ]
        last = self._controller.current.last
        if last is not None and last.reply is not None and last.reply.first_token_at is not None:
            lines.append(f"last answer here: {_figures(last.reply)}")
        if self._first_tokens:
            lines.append(f"first token: {_spread(self._first_tokens)}")
        if self._delays:
            lines.append(f"from engine to screen: {_spread(self._delays)}, over {len(self._delays):,} tokens")
        return lines

    def _engine(self) -> str:
        engine_thread = self._controller.client.engine_thread
        if engine_thread is None:
            return f" {safe(self.loading)} "
        if engine_thread.failure is not None:
            return " the engine has failed "
        if self._background.progress:
            return f" {self._background.progress} "
        stats = engine_thread.engine.stats()
        if not (stats.num_running or stats.num_waiting):
            return f" {safe(engine_thread.engine.loaded.name)} "
        waiting = f", {stats.num_waiting} waiting" if stats.num_waiting else ""
        return f" {stats.num_running} running{waiting}, {self.tokens_per_s:,.0f} tok/s, KV {stats.cache_used:.0%} "

    def _sessions(self, width: int) -> list[Fragment]:
        """The names with their marks; where not all fit, those around the current one."""
        controller = self._controller
        numbered = enumerate(controller.sessions, start=1)
        names = [(session is controller.current, _label(number, session)) for number, session in numbered]
        names = [(is_current, f"[{label.strip()}]" if is_current else label) for is_current, label in names]
        sizes = [get_cwidth(label) for _, label in names]
        first = last = controller.sessions.index(controller.current)
        used = sizes[first]
        while True:
            if last + 1 < len(names) and used + sizes[last + 1] <= width - 4:
                last += 1
                used += sizes[last]
            elif first > 0 and used + sizes[first - 1] <= width - 4:
                first -= 1
                used += sizes[first]
            else:
                break
        before, after = "< " if first else "", " >" if last + 1 < len(names) else ""
        if used + len(before) + len(after) > width:
            return [("class:bar.current", _cut(names[first][1], width))]
        shown: list[Fragment] = [
            ("class:bar.current" if is_current else "class:bar", label) for is_current, label in names[first : last + 1]
        ]
        return [("class:bar", before), *shown, ("class:bar", after)]


def _label(number: int, session: Session) -> str:
    """` 1 main…` while it streams, ` 1 main*` when something came unread."""
    return f" {number} {safe(session.name)}{'…' if session.is_busy else '*' if session.is_unread else ''} "


def _figures(reply: Reply) -> str:
    """What an answer took; its speed counts from its first token on."""
    assert reply.first_token_at is not None
    seconds, tokens = reply.last_token_at - reply.first_token_at, reply.num_tokens
    speed = f", then {(tokens - 1) / seconds:,.0f} tokens/s" if seconds > 0 else ""
    first = 1000 * (reply.first_token_at - reply.requested_at)
    prompt = f"{reply.prompt_tokens:,} prompt tokens, {reply.cached_tokens:,} of them cached"
    return f"{tokens:,} tokens, the first after {first:,.0f} ms{speed}; {prompt}"


def _cut(text: str, width: int) -> str:
    """As much of a text as fits into so many cells."""
    text = text[: max(width, 0)]
    while get_cwidth(text) > max(width, 0):
        text = text[:-1]
    return text


def _spread(seconds: deque[float]) -> str:
    ordered = sorted(seconds)
    ranks = ((rank, ordered[min(len(ordered) * rank // 100, len(ordered) - 1)]) for rank in (50, 90, 99))
    return ", ".join(f"p{rank} {1000 * value:,.0f} ms" for rank, value in ranks)
