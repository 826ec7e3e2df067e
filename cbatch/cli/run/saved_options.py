"""The options of a run in its record (see `run_record`), so that resuming and verifying it need none of them again.

They are kept as they are typed, by the names of Click's parameters. Files are named by their whole paths.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from cbatch.batch.forms import is_remote, output_form, resolved, split_table
from cbatch.batch.run_record import read_record, record_path, write_record
from cbatch.cli.common.configured_command import ConfiguredCommand, about_of
from cbatch.cli.common.console import notice

_NOT_KEPT = {
    *"output resume overwrite retry_errors recompute_changed continue_truncated max_errors max_truncated".split(),
    *"check estimate help help_all".split(),
}
"""Options that are for one start of a run."""

_TAKEN, _GIVEN = f"{__name__}.taken", f"{__name__}.given"
"""Keys of a context's `meta`: the words that were taken from the record, and what was given, these words included."""


class SavedOptionsCommand(ConfiguredCommand):
    """Takes the options that are not given from the record of an output, if there is one."""

    input, resumes, ignores = "input", "resume", ""
    """Parameters: what names the input, the flag that is needed to take anything, and one that keeps it from that."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if ctx.parent is None or ctx.resilient_parsing:  # /run in a chat has a model already
            return super().parse_args(ctx, args)
        typed = self._typed(ctx, args)
        path = _recorded(typed.get("output", "-"))
        is_other = self.input in typed and path is not None and not _has_rows(path, typed)  # a new run
        if is_other or self.ignores in typed or (self.resumes and not typed.get(self.resumes)):
            path = None
        taken = ctx.meta[_TAKEN] = list(self._words(path, typed)) if path is not None else []
        ctx.meta[_GIVEN] = self._typed(ctx, [*taken, *args])
        return super().parse_args(ctx, [*taken, *args])

    def _typed(self, ctx: click.Context, args: list[str]) -> dict[str, Any]:
        parsed = self.make_parser(ctx).parse_args(list(args))[0]
        return {name: value for name, value in parsed.items() if isinstance(value, bool | str | list)}

    def _words(self, output: Path, typed: Mapping[str, Any]) -> Iterator[str]:
        """The words that would have to be typed, too. Raises ConfigError if the record cannot be read."""
        saved = read_record(output).get("options")
        if saved is None:
            return
        saved[self.input] = saved.pop("input", "-")
        for one in self.params:
            value = saved.get(one.name or "")
            if value in (None, "-") or one.name in typed:
                continue
            if isinstance(one, click.Argument):
                yield value
            elif isinstance(value, bool):
                yield max(one.opts, key=len) if value else one.secondary_opts[0]
            else:
                yield from (
                    f"{max(one.opts, key=len)}={each}" for each in (value if isinstance(value, list) else [value])
                )


def tell_taken_options() -> None:
    """Says what was taken from the record, as it would be typed."""
    if taken := click.get_current_context().meta.get(_TAKEN):
        notice(f"with the options of the earlier run: {shlex.join(taken)}")


def save_options(output: str) -> None:
    """Writes the options of the command that runs now. Raises ConfigError if that cannot be done."""
    ctx = click.get_current_context()
    if (path := _recorded(output)) is None:
        return
    given, kept = ctx.meta[_GIVEN], {}
    for one in ctx.command.params:
        if one.name in given and one.name not in _NOT_KEPT:
            value = given[one.name]
            kept[one.name] = [_whole(one, each) for each in value] if isinstance(value, list) else _whole(one, value)
    write_record(path, options=kept)


def _recorded(output: str) -> Path | None:
    """The file of an output, which a record lies beside; None if it is no file."""
    if output == "-":
        return None
    if is_remote(output):
        from cbatch.batch.remote import local_name

        output = local_name(output)
    path = resolved(output)
    return path if record_path(path) is not None and (path.is_file() or not path.exists()) else None


def _has_rows(output: Path, typed: Mapping[str, Any]) -> bool:
    from cbatch.batch.tables.table_writer import has_results, journal_of

    with suppress(OSError):
        form = typed.get("output_format") or output_form(str(output))
        return has_results(output, form) or has_results(journal_of(output), "jsonl")
    return False


def _whole(parameter: click.Parameter, value: Any) -> Any:
    """The value, with the whole path of a file that it names."""
    kind = parameter.metavar or ""
    is_file = isinstance(parameter, click.Argument) or about_of(parameter).is_file
    if not isinstance(value, str) or not (is_file or any(word in kind for word in ("FILE", "DIR", "PATH", "CHECK"))):
        return value
    name, equals, path = value.partition("=") if kind in ("NAME=PATH", "CHECK") else ("", "", value)
    at, path = ("@", path[1:]) if path.startswith("@") else ("", path)
    exists = bool(path) and os.path.exists(split_table(path)[0])  # noqa: PTH110
    return f"{name}{equals}{at}{os.path.abspath(path)}" if exists else value  # noqa: PTH100
