"""Writes docs/reference.md: every option of every command, and every sampling parameter, from where they are declared.

python -m scripts.reference
"""

from __future__ import annotations

import json
from pathlib import Path

import click

from cbatch.base.option import options_of
from cbatch.base.params import PARAMS, SamplingParams
from cbatch.cli.main import cli

PAGE = Path(__file__).parents[1] / "docs" / "reference.md"

SHARED = ("Sampling", "Model", "Engine", "Memory", "Replicas")
"""Groups of options that several commands have; they stand in the page once."""

BEGINNING = """\
# Reference

Every option of every command. Written by `python -m scripts.reference` from where they are declared; `--help` shows the
same.

Every option also reads an environment variable, `CBATCH_<COMMAND>_<OPTION>`: `CBATCH_RUN_MAX_TOKENS=200`. Options that
can be repeated take a JSON list: `CBATCH_RUN_STOP='["END"]'`. For all commands, the model also reads `CBATCH_MODEL`,
and `CBATCH_DEVICE` names the device that `--device auto` stands for. Defaults can also stand in a [configuration
file](configuration.md). In Python, the options of [Model](#model), [Engine](#engine) and [Memory](#memory) are the
fields of `EngineConfig`, with underscores.
"""


def write(commands: dict[str, click.Command]) -> str:
    """The page."""
    parts, shared = [BEGINNING], dict.fromkeys(SHARED, "")
    for name, command in commands.items():
        groups = grouped(command)
        own = [(group, options) for group, options in groups.items() if group not in SHARED]
        has = [f"[{group}](#{group.lower()})" for group in SHARED if group in groups]
        also = f"\n\nAlso those of {', '.join(has)}." if has else ""
        parts.append(f"## `cbatch {name}`\n\n" + "\n\n".join(table(group, options) for group, options in own) + also)
        for group in SHARED:
            if group in groups and not shared[group]:
                shared[group] = table("", groups[group])
    parts += [f"## {group}\n\n{text}" for group, text in shared.items() if text]
    parts.append(f"## Sampling parameters\n\n{parameters()}")
    return "\n\n".join(part.strip() for part in parts) + "\n"


def parameters() -> str:
    """The sampling parameters of a request."""
    lines = ["| field | type and range | default | meaning |", "|---|---|---|---|"]
    for name, one in options_of(SamplingParams).items():
        default = "" if one.default in (None, (), "") else f"`{json.dumps(one.default)}`"
        said = PARAMS[name]
        meaning = f"{said.help} {said.more}".replace(" (repeatable)", "").strip()
        lines.append(f"| `{name}` | {said.wanted} | {default} | {meaning} |")
    return "\n".join(lines)


def grouped(command: click.Command) -> dict[str, list[click.Option]]:
    groups: dict[str, list[click.Option]] = {}
    for option in command.params:
        if isinstance(option, click.Option) and not option.hidden:
            about = getattr(option, "about", None)
            groups.setdefault(about.group if about else "", []).append(option)
    return groups


def table(title: str, options: list[click.Option]) -> str:
    lines = [f"**{title}**\n"] if title else []
    lines += ["| option | default | meaning |", "|---|---|---|"]
    return "\n".join([*lines, *map(line, options)])


def line(option: click.Option) -> str:
    """A row of a table."""
    kind = option.type
    shown = (
        "|".join(kind.choices)
        if isinstance(kind, click.Choice)
        else "N"
        if kind.name.startswith(("int", "float"))
        else "TEXT"
    )
    value = "" if option.is_flag else f" {option.metavar or shown}"
    names = ", ".join([*option.opts, *option.secondary_opts])
    text, _, default = (option.help or "").removesuffix("].").partition(" [default: ")
    if default:
        text += "."
    elif option.show_default and not isinstance(option.default, bool | None):
        default = f"`{option.default}`"
    about = getattr(option, "about", None)
    more = about.more if about else ""
    cells = f"`{names}{value}`", default, " ".join([text, more]).strip()
    return f"| {' | '.join(cell.replace('|', '&#124;' if '`' not in cell else chr(92) + '|') for cell in cells)} |"


def commands() -> dict[str, click.Command]:
    context = click.Context(cli)
    found = {name: cli.get_command(context, name) for name in cli.list_commands(context)}
    return {name: command for name, command in found.items() if command is not None}


if __name__ == "__main__":
    PAGE.write_text(write(commands()), encoding="utf-8")
