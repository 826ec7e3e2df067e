"""Turns the replies of systems into a table for people."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import Any

HEAD = ["system", "output tokens/s", "min – max", "of the floor", "steps", "first tokens as cbatch", "cbatch is"]
OURS = "cbatch"
DISTURBED = 0.1
"""Cores that other processes may use before a run counts as disturbed."""


@dataclass
class System:
    """A system, and what came of its runs.

    versions: of its packages
    runs:     one for each round: `seconds`, `output_tokens`, and if known `steps` and how many cores other processes
              used meanwhile (`cores_elsewhere`)
    first_tokens: of each request, in the last round
    error:        why there is nothing to compare; empty if there is
    """

    name: str
    title: str
    versions: dict[str, str] = field(default_factory=dict)
    runs: list[dict[str, Any]] = field(default_factory=list)
    first_tokens: list[int] = field(default_factory=list)
    error: str = ""

    def take(self, reply: dict[str, Any], install: str, lengths: list[int]) -> None:
        """Adds a reply of a worker; `lengths` are the tokens that each request was to get."""
        if "missing" in reply:
            self.error = f"not installed ({reply['missing'].rstrip('.')}): {install}"
        elif "error" in reply:
            self.error = f"failed: {reply['error']}"
        elif "versions" in reply:
            self.versions = reply["versions"]
        else:
            outputs = reply["outputs"]
            self.error = difference([len(tokens) for tokens in outputs], lengths)
            self.first_tokens = [tokens[0] for tokens in outputs if tokens]
            tokens = sum(map(len, outputs))
            known = {name: reply.get(name) for name in ("seconds", "steps", "cores_elsewhere")}
            self.runs.append(known | {"output_tokens": tokens})

    @property
    def speeds(self) -> list[float]:
        """Output tokens a second, of each run."""
        return [run["output_tokens"] / run["seconds"] for run in self.runs]

    @property
    def speed(self) -> float | None:
        """The median; None if not all of the work was done."""
        return median(self.speeds) if self.runs and not self.error else None


def difference(given: list[int], wanted: list[int]) -> str:
    """A sentence on the first request that got another number of tokens; empty if there is none."""
    for number, (got, asked) in enumerate(zip(given, wanted, strict=True), 1):
        if got != asked:
            return f"not comparable: request {number} got {got:,} of {asked:,} tokens"
    return ""


def ratio(system: System, ours: System | None) -> float | None:
    """How many times as fast as a system cbatch is; None where either has no speed, and for cbatch itself."""
    if ours is None or ours is system or ours.speed is None or system.speed is None:
        return None
    return ours.speed / system.speed


def table(systems: list[System], floor: float | None) -> list[list[str]]:
    """Head and lines, the fastest first; those with nothing to compare come last and say why.

    floor: output tokens/s at best, for a line of its own
    """
    ours = next((system for system in systems if system.name == OURS), None)
    lines = [HEAD]
    if floor is not None:
        lines.append(["floor of this machine", f"{floor:,.0f}", "", "100%", "", "", ""])
    return lines + [line_of(system, ours, floor) for system in sorted(systems, key=lambda one: -(one.speed or 0))]


def line_of(system: System, ours: System | None, floor: float | None) -> list[str]:
    speed, times = system.speed, ratio(system, ours)
    if speed is None:
        return [system.title, "–", "", "", "", "", system.error or "no round was finished"]
    steps = sorted({run["steps"] for run in system.runs} - {None})
    equal = ""
    if times is not None and ours is not None:
        same = sum(one == other for one, other in zip(system.first_tokens, ours.first_tokens, strict=True))
        equal = f"{same} of {len(ours.first_tokens)}"
    return [
        system.title,
        f"{speed:,.1f}",
        f"{min(system.speeds):,.1f} – {max(system.speeds):,.1f}",
        f"{speed / floor:.1%}" if floor else "",
        " – ".join(f"{number:,}" for number in steps[:: max(len(steps) - 1, 1)]),
        equal,
        f"{times:.2f} x as fast" if times is not None else "",
    ]


def summary(compared: dict[str, list[System]]) -> list[list[str]]:
    """Head, and a line for each model: output tokens/s of cbatch, and of each other system with the ratio."""
    systems = next(iter(compared.values()))
    lines = [["model", *(system.title for system in systems)]]
    for name, found in compared.items():
        ours = next((system for system in found if system.name == OURS), None)
        cells = [name]
        for system in found:
            times = ratio(system, ours)
            speed = "–" if system.speed is None else f"{system.speed:,.1f}"
            cells.append(speed if times is None else f"{speed} ({times:.2f} x)")
        lines.append(cells)
    return lines


def disturbance(systems: list[System]) -> list[str]:
    """A sentence if runs were not alone on the machine."""
    taken = [run["cores_elsewhere"] or 0.0 for system in systems for run in system.runs]
    disturbed = [cores for cores in taken if cores > DISTURBED]
    if not disturbed:
        return []
    runs = f"{len(disturbed)} of {len(taken)} runs"
    return [f"Disturbed: during {runs} something else took more than {DISTURBED} cores, up to {max(disturbed):.1f}."]
