"""The options of a run, in a hidden file beside its output, so that resuming and verifying it need none of them again.

They are kept as they are typed, by their keys in the configuration file. Files are named by their whole paths.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from cbatch.base.errors import ConfigError, os_errors_as
from cbatch.base.option import Option
from cbatch.batch.forms import is_remote
from cbatch.cli.common.configured_command import ConfiguredCommand, option_keys

_NOT_KEPT = {
    *"output resume overwrite retry_errors recompute_changed continue_truncated max_errors max_truncated".split(),
    *"check estimate trace preset help help_all".split(),
}
"""Options that are for one start of a run."""

_TAKEN, _GIVEN = f"{__name__}.taken", f"{__name__}.given"
"""Keys of a context's `meta`: what was taken from the file, and what the file of this run will hold."""


def saved_path(output: str) -> Path | None:
    """Where the options of a run lie; None for an output that is not a local file."""
    if output == "-" or is_remote(output):
        return None
    try:
        path = Path(output).resolve()
    except (OSError, RuntimeError):  # a loop of links, which the run refuses
        return None
    is_short = len(os.fsencode(path.name)) < 200  # else it would be too long for a file system
    return (
        path.with_name(f".{path.name}.cbatch-options") if is_short and (path.is_file() or not path.exists()) else None
    )


class SavedOptionsCommand(ConfiguredCommand):
    """Takes the options that are not given from the file beside an output, if there is one."""

    output, input = "output", "input"
    """Names of the parameters that name the files of a run."""
    needs = "resume"
    """The flag without which nothing is taken."""
    refuses = ""
    """A flag with which nothing is taken."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if ctx.parent is None or ctx.resilient_parsing:  # /run in a chat has a model already
            return super().parse_args(ctx, args)
        typed = self._typed(ctx, args)
        taken = list(self._taken(typed))
        ctx.meta[_TAKEN] = taken
        merged = [*taken, *args]
        typed = self._typed(ctx, merged)
        rest = super().parse_args(ctx, merged)
        ctx.meta[_GIVEN] = {
            key: ctx.params[option.name] if option.is_flag else option.consume_value(ctx, typed)[0]
            for key, option in option_keys(self).items()
            if option.name is not None
            and key not in _NOT_KEPT
            and ctx.get_parameter_source(option.name) is not ParameterSource.DEFAULT
            and option.name in ctx.params
        }
        return rest

    def _typed(self, ctx: click.Context, args: list[str]) -> dict[str, Any]:
        parsed = self.make_parser(ctx).parse_args(list(args))[0]
        return {name: value for name, value in parsed.items() if repr(value) != "Sentinel.UNSET"}

    def _taken(self, typed: Mapping[str, Any]) -> Iterator[str]:
        """What would have to be typed before the words that were. Raises ConfigError if the file is damaged."""
        output = typed.get(self.output)
        if output is None or (path := saved_path(output)) is None:
            return
        if (self.needs and not typed.get(self.needs)) or typed.get(self.refuses):
            return
        if self.input in typed and not _has_rows(Path(output)):  # a new run of another input
            return
        try:
            with os_errors_as(ConfigError, f"Cannot read {path}"):
                text = path.read_text()
        except ConfigError:
            if not path.exists():
                return
            raise
        keys = option_keys(self)
        try:
            saved = json.loads(text)
            source, given = str(saved["input"]), dict(saved["options"])
        except (ValueError, KeyError, TypeError):
            raise ConfigError(
                f"{path}, which holds the options of the run, is damaged; remove it, and give them again."
            ) from None
        if self.input not in typed and source != "-":
            yield source if self.input not in keys else f"--{self.input}={source}"
        for key, value in given.items():
            option = keys.get(key)
            if option is not None and option.name not in typed:
                yield from _words(option, value)


def _words(option: click.Option, value: Any) -> Iterator[str]:
    name = next(name for name in option.opts if name.startswith("--"))
    if option.is_flag:
        yield name if value else next(iter(option.secondary_opts), name)
    else:
        for one in value if isinstance(value, list) else [value]:
            yield f"{name}={one}"


def _has_rows(output: Path) -> bool:
    from cbatch.batch.tables.table_writer import journal_of

    for path in (output, journal_of(output.resolve())):
        with suppress(OSError):
            if path.stat().st_size:
                return True
    return False


def taken_options() -> str:
    """What was taken from the file, as it would be typed; empty for nothing."""
    return shlex.join(click.get_current_context().meta.get(_TAKEN, ()))


def save_options(source: str, output: str) -> None:
    """Writes the options of the command that runs now. Raises ConfigError if that cannot be done."""
    ctx = click.get_current_context()
    if (path := saved_path(output)) is None:
        return
    keys = option_keys(ctx.command)
    options = {key: _kept(keys[key], value) for key, value in ctx.meta[_GIVEN].items()}
    name = source if source == "-" or is_remote(source) else os.path.abspath(source)  # noqa: PTH100 (keeps links)
    partial, text = path.with_name(f"{path.name}.new"), json.dumps({"input": name, "options": options}, indent=1) + "\n"
    with os_errors_as(ConfigError, f"Cannot write {path}"):
        if not path.is_file() or path.read_text() != text:
            partial.write_text(text)
            partial.replace(path)


def _kept(option: click.Option, value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_with_whole_path(option, str(one)) for one in value]
    return value if option.is_flag else _with_whole_path(option, str(value))


def _with_whole_path(option: click.Option, text: str) -> str:
    about: Option | None = getattr(option, "about", None)
    kind = option.metavar or ""
    if not (about is not None and about.is_file) and not any(word in kind for word in ("FILE", "DIR", "PATH", "CHECK")):
        return text
    name, equals, path = text.partition("=") if kind in ("NAME=PATH", "CHECK") else ("", "", text)
    at, path = ("@", path[1:]) if path.startswith("@") else ("", path)
    return f"{name}{equals}{at}{os.path.abspath(path)}" if path and os.path.exists(path) else text  # noqa: PTH100, PTH110
