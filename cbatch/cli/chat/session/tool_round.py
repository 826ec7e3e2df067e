"""What a model called before it replied: the calls of each round, and what they gave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

UseState = Literal["asking", "running", "done"]
"""Waiting for the user to allow it, running, or with its result."""

REFUSED = "The user does not allow this call."
CANCELLED = "The user stopped this call."


@dataclass(eq=False, slots=True)
class ToolUse:
    """One call of a tool.

    arguments: JSON, as the model wrote it
    result:    what the model is told, once the call is done
    """

    name: str
    arguments: str
    state: UseState = "asking"
    result: str = ""

    def finish(self, result: str) -> None:
        self.state, self.result = "done", result

    def __str__(self) -> str:
        return f"{self.name}({self.arguments})"


@dataclass(eq=False, slots=True)
class ToolRound:
    """A reply that called tools, and their results; the model replies again after it.

    text: what the model wrote beside the calls
    """

    text: str
    uses: list[ToolUse] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return all(use.state == "done" for use in self.uses)

    def cancel(self) -> None:
        for use in self.uses:
            if use.state != "done":
                use.finish(CANCELLED)


def round_messages(rounds: Sequence[ToolRound]) -> list[dict[str, Any]]:
    """What the model is shown of its calls and their results."""
    messages: list[dict[str, Any]] = []
    number = 0
    for each in rounds:
        calls, results = [], []
        for use in each.uses:
            number += 1
            name = f"{number:09}"  # nine letters or digits, which some templates insist on
            function = {"name": use.name, "arguments": use.arguments}
            calls.append({"id": name, "type": "function", "function": function})
            results.append({"role": "tool", "tool_call_id": name, "name": use.name, "content": use.result})
        messages += [{"role": "assistant", "content": each.text, "tool_calls": calls}, *results]
    return messages
