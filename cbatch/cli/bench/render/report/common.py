"""What all reports say alike: when and how something was measured, and on which machine."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import datetime

from cbatch.cli.bench.render import tables, units
from cbatch.cli.bench.render.report.html import Detail, Table
from cbatch.cli.bench.results import Machine
from cbatch.cli.common.configured_command import command_line


@dataclass(frozen=True, slots=True)
class Occasion:
    """The command that measured, as it was typed, and the day in words."""

    command: str
    date: str

    @classmethod
    def now(cls) -> Occasion:
        """Today, and the command that runs now."""
        return cls(command_line(), f"{datetime.now():%d %B %Y}".lstrip("0"))


def setting(machine: Machine, model: str, occasion: Occasion) -> str:
    """Sentences that name the model, the machine and the day."""
    return (
        f"The model: {model}. Measured on {occasion.date} on {machine.device} with {machine.threads} threads, "
        f"cbatch {machine.cbatch}, torch {machine.torch}, by this command:"
    )


def machine_detail(machine: Machine, model: str) -> Detail:
    lines = [[name, str(value)] for name, value in ({"model": model} | asdict(machine)).items()]
    return Detail("Machine and versions", [Table([], lines, has_words=True)])


def html_table(table: tables.Table) -> Table | None:
    """A table of the terminal for a page; None if it has no lines."""
    if not table:
        return None
    head = list(table[0])
    return Table(head, [[line.get(name) or units.NOTHING for name in head] for line in table])
