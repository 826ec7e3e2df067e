"""Writes docs/reference.md: every option of every command, and every sampling parameter, from where they are declared.

python -m scripts.reference
"""

from __future__ import annotations

import json
from pathlib import Path

import click

from cbatch.base.option import options_of
from cbatch.base.params import PARAMS, SamplingParams
from cbatch.cli.common.configured_command import about_of
from cbatch.cli.common.options import SAMPLING_FIELDS
from cbatch.cli.main import cli

PAGE = Path(__file__).parents[1] / "docs" / "reference.md"

SHARED = ("Sampling", "Model", "Engine", "Memory", "Replicas")
"""Groups of options that several commands have; they stand in the page once."""

BEGINNING = """\
# Reference

Every option of every command. Written by `python -m scripts.reference` from where they are declared; `--help` (of
`run` and `chat`: `--help-all`) shows the same.

Every option also reads an environment variable, `CBATCH_<COMMAND>_<OPTION>`, and defaults can stand in a
[configuration file](configuration.md). In Python, the options of [Model](#model), [Engine](#engine) and
[Memory](#memory) are the fields of `EngineConfig`, with underscores.
"""

PARAMETERS = """\
## Sampling parameters

For rows, `--param`, `/set` in a chat, and Python. Some have an option of their own; `--stop` can be repeated.

| field, option | type and range | default | meaning |
|---|---|---|---|
"""


def write(commands: dict[str, click.Command]) -> str:
    """The page."""
    parts, shared = [BEGINNING], dict.fromkeys(SHARED, "")
    first = commands["run"]
    of_first = {line(option) for options in grouped(first).values() for option in options}
    for name, command in commands.items():
        groups = grouped(command)
        known = set() if command is first else of_first
        own = {group: options for group, options in groups.items() if group not in SHARED}
        same = [f"`{max(one.opts, key=len)}`" for options in own.values() for one in options if line(one) in known]
        text = table({group: [one for one in options if line(one) not in known] for group, options in own.items()})
        if same:
            text += f"\n\nAs in [`cbatch run`](#cbatch-run): {', '.join(same)}."
        if has := [f"[{group}](#{group.lower()})" for group in SHARED if group in groups]:
            text += f"\n\nAlso those of {', '.join(has)}."
        parts.append(f"## `cbatch {name}`\n\n{text}")
        for group in SHARED:
            if group in groups and not shared[group]:
                shared[group] = table({"": [one for one in groups[group] if one.name not in SAMPLING_FIELDS]})
    shared["Sampling"] += "\n\nAnd those of the [sampling parameters](#sampling-parameters)."
    parts += [f"## {group}\n\n{text}" for group, text in shared.items()]
    parts.append(PARAMETERS + parameters(grouped(first)["Sampling"]))
    return "\n\n".join(part.strip() for part in parts) + "\n"


def parameters(options: list[click.Option]) -> str:
    """The sampling parameters of a request, beside the options that set them."""
    names = {option.name: [*option.opts, *option.secondary_opts] for option in options}
    lines = []
    for name, one in options_of(SamplingParams).items():
        default = "" if one.default in (None, (), "") else f"`{json.dumps(one.default)}`"
        said = PARAMS[name]
        meaning = f"{said.help} {said.more}".replace(" (repeatable)", "").strip()
        own = [f"`{each}`" for each in (name, *(names[name] if name in SAMPLING_FIELDS else ()))]
        lines.append(f"| {', '.join(own)} | {said.wanted} | {default} | {meaning} |")
    return "\n".join(lines)


def grouped(command: click.Command) -> dict[str, list[click.Option]]:
    groups: dict[str, list[click.Option]] = {}
    for option in command.params:
        if isinstance(option, click.Option) and not option.hidden:
            groups.setdefault(about_of(option).group, []).append(option)
    return groups


def table(groups: dict[str, list[click.Option]]) -> str:
    """Options by the titles of their groups; those without one come first."""
    lines = ["| option | default | meaning |", "|---|---|---|"]
    for title in sorted(groups, key=bool):
        if title and groups[title]:
            lines.append(f"| **{title}** | | |")
        lines += map(line, groups[title])
    return "\n".join(lines)


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
    cells = f"`{names}{value}`", default, f"{text} {about_of(option).more}".strip()
    return f"| {' | '.join(cell.replace('|', '&#124;' if '`' not in cell else chr(92) + '|') for cell in cells)} |"


def commands() -> dict[str, click.Command]:
    context = click.Context(cli)
    found = {name: cli.get_command(context, name) for name in cli.list_commands(context)}
    return {name: command for name, command in found.items() if command is not None}


if __name__ == "__main__":
    PAGE.write_text(write(commands()), encoding="utf-8")
