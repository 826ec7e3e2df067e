"""Goals of the GPU path, and whether a run of the script reaches them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from scripts.gpu.load import SLO_TARGET, Served, Steady
from scripts.gpu.runs import Run
from scripts.gpu.speed import Line

Found = tuple[bool, str]
"""Whether a goal is reached, and the figure that decides."""


@dataclass(frozen=True, slots=True)
class Goal:
    """A goal and the function that finds it in what was measured; None if it was not measured.

    measured_by: options of the script that measure it
    """

    text: str
    measured_by: str
    find: Callable[[Sequence[Any]], Found | None]


@dataclass(frozen=True, slots=True)
class GoalResult:
    """is_reached: None if it was not measured"""

    goal: str
    is_reached: bool | None
    figure: str

    def __str__(self) -> str:
        reached = {True: "reached", False: "NOT reached", None: "not measured"}[self.is_reached]
        return f"goal {reached}: {self.goal} ({self.figure})"


def decode_attention(lines: Sequence[Any]) -> Found | None:
    found = [line for line in lines if isinstance(line, Line) and line.kind == "decode attention" and line.rows == 256]
    if not found:
        return None
    return min(line.share for line in found) >= 0.85, ", ".join(f"{line.share:.1%}" for line in found)


def whole_run(shape: str, least: float) -> Callable[[Sequence[Any]], Found | None]:
    def find(lines: Sequence[Any]) -> Found | None:
        runs = [line for line in lines if isinstance(line, Run) and (line.shape, line.requests) == (shape, 512)]
        found = [run for run in runs if run.by == "cbatch" and not run.error]
        return (found[0].share >= least, f"{found[0].share:.1%}") if found else None

    return find


def idle(lines: Sequence[Any]) -> Found | None:
    found = [line for line in lines if isinstance(line, Steady) and line.rows == 256 and line.overlapped]
    shares = [line.idle_share for line in found if line.idle_share is not None]
    return (max(shares) <= 0.01, ", ".join(f"{share:.2%}" for share in shares)) if shares else None


def users(lines: Sequence[Any]) -> Found | None:
    found = [line for line in lines if isinstance(line, Served) and (line.shape, line.users) == ("8B", 128)]
    if not found:
        return None
    one = found[0]
    if one.error or one.ttft_p99_s is None or not one.tpot_p99_s:
        return False, one.error or "no user finished an answer"
    is_reached = one.ttft_p99_s < SLO_TARGET.ttft_s and 1 / one.tpot_p99_s >= SLO_TARGET.tps
    return is_reached, f"{1e3 * one.ttft_p99_s:,.0f} ms, {1 / one.tpot_p99_s:,.0f} tokens/s"


GOALS = (
    Goal("decode attention reads 256 ragged sequences at 85% of the copy rate", "--only attention", decode_attention),
    Goal("512 requests on the 8B shape reach 75% of the floor", "--only model", whole_run("8B", 0.75)),
    Goal("512 requests on the 0.6B shape reach 70% of the floor", "--only model", whole_run("0.6B", 0.70)),
    Goal("the device is idle for at most 1% of the time between steps of 256 rows", "--load", idle),
    Goal("128 users on the 8B shape get a first token within 500 ms (p99) and 50 tokens/s each (p99)", "--load", users),
)


def check_goals(lines: Sequence[Any]) -> Iterator[GoalResult]:
    """Each goal, with what these lines of results say about it."""
    for goal in GOALS:
        found = goal.find(lines)
        yield GoalResult(goal.text, *(found or (None, f"measured by {goal.measured_by}")))
