"""Figures of `/stats`: the engine's speed and load, and how fast replies reach the screen."""

from __future__ import annotations

import time
from collections import deque

from cbatch.base.units import format_count
from cbatch.cli.chat.controller import ChatController
from cbatch.cli.common.percentiles import percentiles

SPEED_SECONDS = 3.0
"""Time over which the speed is measured."""


class ChatStats:
    """Measures a chat. `tick` is to be called several times a second."""

    def __init__(self, controller: ChatController) -> None:
        self._controller = controller
        self._counts: deque[tuple[float, int]] = deque()
        self.first_tokens: deque[float] = deque(maxlen=1000)
        """Seconds from a message to the first token of its reply."""
        self.delays: deque[float] = deque(maxlen=10_000)
        """Seconds from a token in the engine to its text on the screen."""
        self.loading_detail = ""
        """How far loading is, if a library tells."""

    def tick(self) -> None:
        engines = [client.engine for client in self._controller.clients.values() if client.engine is not None]
        if engines:
            now = time.monotonic()
            self._counts.append((now, sum(engine.stats().num_tokens for engine in engines)))
            while now - self._counts[0][0] > SPEED_SECONDS:
                self._counts.popleft()

    @property
    def tokens_per_s(self) -> float:
        """Speed over the last seconds, all requests to all models together."""
        if len(self._counts) < 2:
            return 0.0
        (start, before), (end, after) = self._counts[0], self._counts[-1]
        return max(after - before, 0) / (end - start) if end > start else 0.0

    def lines(self) -> list[str]:
        engine = self._controller.client_of(self._controller.current).engine
        if engine is None:
            return ["loading the model"]
        if engine.failure is not None:
            return [f"the engine has failed: {engine.failure}"]
        stats, shown = engine.stats(), engine.core.describe()
        hits = stats.num_cached_tokens / max(stats.num_prompt_tokens, 1)
        about = ("model", "parameters", "context", "KV cache", "states", "batch")
        lines = [
            *(f"{name}: {shown[name]}" for name in about if name in shown),
            f"now: {stats.num_running} running, {stats.num_waiting} waiting, {self.tokens_per_s:,.0f} tokens/s, "
            f"KV cache {stats.cache_used:.0%} used",
            f"so far: {format_count(stats.num_tokens, 'token')} in {format_count(stats.num_steps, 'step')}, "
            f"{format_count(stats.num_preemptions, 'preemption')}",
            f"prefix cache: {stats.num_cached_tokens:,} of {stats.num_prompt_tokens:,} prompt tokens "
            f"were cached ({hits:.0%})",
        ]
        if stats.num_drafted_tokens:
            share = stats.num_accepted_tokens / stats.num_drafted_tokens
            lines.append(
                f"speculation: {stats.num_accepted_tokens:,} of {stats.num_drafted_tokens:,} drafted tokens "
                f"were right ({share:.0%})"
            )
        last = self._controller.current.last
        if last is not None and (reply := last.reply) is not None and reply.first_token_at is not None:
            seconds = reply.last_token_at - reply.first_token_at
            speed = f", then {(reply.num_tokens - 1) / seconds:,.0f} tokens/s" if seconds > 0 else ""
            first = f"the first after {1000 * (reply.first_token_at - reply.requested_at):,.0f} ms{speed}"
            prompt = f"{reply.prompt_tokens:,} prompt tokens, {reply.cached_tokens:,} of them cached"
            lines.append(f"last reply here: {format_count(reply.num_tokens, 'token')}, {first}; {prompt}")
        if self.first_tokens:
            lines.append(f"time to first token: {_percentiles(self.first_tokens)}")
        if self.delays:
            lines.append(
                f"from engine to screen: {_percentiles(self.delays)}, over {format_count(len(self.delays), 'token')}"
            )
        return lines


def _percentiles(seconds: deque[float]) -> str:
    return ", ".join(f"{name} {1000 * value:,.0f} ms" for name, value in percentiles(seconds).items())
