"""The tools of a chat: which may run without asking, and the calls of replies that wait for them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from cbatch.cli.chat.engine_client import Post
from cbatch.cli.chat.session.session import REFUSED, Reply, ToolRound, ToolUse
from cbatch.tools.tool import MAX_TOOL_ROUNDS

if TYPE_CHECKING:
    from cbatch.base.outputs import ToolCall
    from cbatch.tools.tool import Tool


class ToolBox:
    """Asks about calls, runs them, and says when all calls of a reply are done.

    Tools run on threads of their own; everything else happens on the front end's thread.
    """

    def __init__(self, tools: Sequence[Tool] = (), *, allows_all: bool = False) -> None:
        """`allows_all`: whether no call is asked about"""
        self.tools = {tool.name: tool for tool in tools}
        self.allowed: set[str] = set(self.tools) if allows_all else set()
        """Names of the tools that run without asking."""
        self._threads = ThreadPoolExecutor(4, "cbatch-tool")
        self._open: dict[Reply, tuple[threading.Event, Post, Callable[[], None]]] = {}
        """Replies with calls that are not done: what ends their tools, and what `begin_round` got for them."""

    def offered_to(self, reply: Reply) -> list[dict[str, Any]]:
        """The tools as the model is told of them; nothing after MAX_TOOL_ROUNDS rounds of calls in one reply."""
        return [tool.schema for tool in self.tools.values()] if len(reply.rounds) < MAX_TOOL_ROUNDS else []

    def begin_round(self, reply: Reply, calls: Sequence[ToolCall], post: Post, on_done: Callable[[], None]) -> None:
        """Takes what a model has called, and runs what is allowed.

        post:    runs something on the front end's thread
        on_done: called there when all results are in the reply, unless it is stopped before
        """
        uses = [ToolUse(call.name, call.arguments) for call in calls]
        reply.rounds.append(ToolRound(reply.text, uses))  # the next text follows the results
        reply.text, reply.raw, reply.state = "", "", "calling"
        self._open[reply] = threading.Event(), post, on_done
        for use in uses:
            if use.name not in self.tools:
                self._finish(reply, use, f"There is no tool {use.name}.")
            elif use.name in self.allowed:
                self._run(reply, use)

    def answer(self, use: ToolUse, *, is_allowed: bool, always: bool = False) -> None:
        """The user's answer about a call; `always` counts for all calls of that tool, now and later."""
        if always:
            self.allowed.add(use.name)
        for reply in list(self._open):
            for other in reply.rounds[-1].uses:
                if other.state == "asking" and (other is use or (always and other.name == use.name)):
                    if is_allowed:
                        self._run(reply, other)
                    else:
                        self._finish(reply, other, REFUSED)

    def stop(self, reply: Reply) -> None:
        """Ends the calls of a reply, if there are any. What they give later is ignored."""
        if reply in self._open:
            self._open.pop(reply)[0].set()

    def _run(self, reply: Reply, use: ToolUse) -> None:
        use.state = "running"
        stopped, post, _ = self._open[reply]

        def run() -> None:
            result = self.tools[use.name].run(use.arguments, stopped)
            post(lambda: self._finish(reply, use, result))

        self._threads.submit(run)

    def _finish(self, reply: Reply, use: ToolUse, result: str) -> None:
        if reply in self._open and use in reply.rounds[-1].uses:  # else it was stopped, and may call something else
            use.finish(result)
            if all(each.state == "done" for each in reply.rounds[-1].uses):
                self._open.pop(reply)[2]()
