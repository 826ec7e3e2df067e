"""Commands whose options also come from the environment, a preset and the configuration file.

Top-level keys of the file are names of options and count for every command that has them. A table such as [chat] is
for one command, and [preset.NAME] is used with --preset NAME. Values become what would be typed on the command line,
so that Click converts and checks both alike.
"""

from __future__ import annotations

import json
import os
import shlex
import textwrap
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from cbatch.base.errors import reason_of
from cbatch.base.option import Option

PRESET = "preset"
"""The table of presets."""


class ConfigFileError(click.UsageError):
    """The configuration file cannot be read, or holds what no command understands."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A value of the file for one option. `where` names the file, the key and its table, for messages."""

    value: Any
    where: str


Settings = Mapping[str, Setting]
"""Settings for one command, by the names of Click's parameters."""


def config_path() -> Path:
    """Where the file lies, whether it exists or not. XDG's standard ignores a relative XDG_CONFIG_HOME."""
    folder = os.environ.get("XDG_CONFIG_HOME", "")
    if not Path(folder).is_absolute():
        folder = os.path.expanduser("~/.config")  # noqa: PTH111 (Path.expanduser raises if there is no home)
    return Path(folder, "cbatch", "config.toml")


def display_path(path: Path) -> str:
    """A path as people write it: with `~` for their home."""
    home = os.path.expanduser("~")  # noqa: PTH111
    return f"~/{path.relative_to(home)}" if path.is_relative_to(home) else str(path)


def option_keys(command: click.Command) -> dict[str, click.Option]:
    """The options of a command by their keys in the file: their long names, with underscores."""
    options = [option for option in command.params if isinstance(option, click.Option)]
    return {_as_key(name[2:]): option for option in options for name in option.opts if name.startswith("--")}


def about_of(parameter: click.Parameter) -> Option:
    """The description of an option that `record_options` has made; an empty one of any other parameter."""
    found: Option = getattr(parameter, "about", Option(help=""))
    return found


def _content(path: Path) -> dict[str, Any]:
    """The tables of the file; none if it does not exist. Raises ConfigFileError."""
    shown = display_path(path)
    try:
        return tomllib.loads(path.read_bytes().decode("utf-8-sig"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise ConfigFileError(f"{shown} cannot be read: {reason_of(error)}.") from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigFileError(f"{shown} is not valid UTF-8 (line {line}).") from error
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise ConfigFileError(f"{shown} is not valid TOML: {reason}.") from error


def load_config(command: click.Command, root: click.Context) -> tuple[Settings, Mapping[str, Settings]]:
    """The settings of a command in the file, which need not exist; and the presets there, by their names.

    root: of a group, one of whose commands has to understand each key; or of a command that is read by itself, as /run
          in a chat is

    Raises ConfigFileError.
    """
    path = config_path()
    shown, content = display_path(path), _content(path)
    if not content:
        return {}, {}
    commands: list[click.Command] = []
    if isinstance(group := root.command, click.Group):  # whose commands are imported for this
        commands = [one for name in group.list_commands(root) if (one := group.get_command(root, name)) is not None]
    keys = {one.name or "": option_keys(one) for one in commands or [command]}
    own = keys[command.name or ""]

    def settings_in(
        table: Any, name: str, known: Iterable[str], options: Mapping[str, click.Option] = own, *others: str
    ) -> dict[str, Setting]:
        """The settings in a table.

        known:   keys that may stand in it
        options: those that count; other keys are left out
        others:  names that may be meant by a wrong key
        """
        if not isinstance(table, dict):
            raise ConfigFileError(f"{shown}: {name} must be a table, [{name}], not one value.")
        settings: dict[str, Setting] = {}
        for written, value in table.items():
            key, where = _as_key(written), f"{shown}: {written}" + (f" in [{name}]" if name else "")
            if commands and key not in known:
                meant = others if others and isinstance(value, dict) else known  # a table is meant for a table
                raise ConfigFileError(f"{where} is not an option{_near_miss(key, meant)}")
            if (option := options.get(key)) is None:
                continue
            if option.name in settings:
                raise ConfigFileError(f"{where} is there twice, with a dash and with an underscore.")
            settings[option.name or key] = Setting(_as_typed(option, value, where), where)
        return settings

    # A preset is chosen in a table, because [preset.NAME] takes the name of its key.
    shared = {key: None for options in keys.values() for key in options if key != PRESET}
    settings = settings_in(
        {name: value for name, value in content.items() if name not in keys and name != PRESET},
        "", shared, own, *keys, PRESET,
    )  # fmt: skip
    for name in filter(content.__contains__, keys):
        settings |= settings_in(content[name], name, keys[name], own if keys[name] is own else {})
    presets = content.get(PRESET, {})
    if not isinstance(presets, dict):
        raise ConfigFileError(
            f"{shown}: preset holds the presets, as tables such as [preset.coder]; to choose one for every chat, write "
            "preset under [chat]."
        )
    # The --preset of `bench` names an experiment, not a table.
    takers = [one for one in keys.values() if PRESET in one and not isinstance(one[PRESET].type, click.Choice)]
    in_presets = {key: None for options in takers for key in options if key != PRESET}
    return settings, {name: settings_in(table, f"{PRESET}.{name}", in_presets) for name, table in presets.items()}


def _as_key(name: str) -> str:
    return name.replace("-", "_")


def _as_typed(option: click.Option, value: Any, where: str) -> Any:
    if option.multiple:
        values = value if isinstance(value, list) else [value]
        if not all(isinstance(one, str) for one in values):
            raise ConfigFileError(f"{where} must be a string or a list of strings.")
        return tuple(values)
    if option.metavar == "JSON" and isinstance(value, dict):
        try:
            return json.dumps(value)
        except TypeError:
            raise ConfigFileError(f"{where} holds a date or time, which JSON does not have.") from None
    if isinstance(value, dict | list):
        raise ConfigFileError(f"{where} takes one value, not a {'table' if isinstance(value, dict) else 'list'}.")
    if isinstance(value, bool):
        if not option.is_flag:
            raise ConfigFileError(f"{where} takes a value, not true or false.")
        return value
    text = str(value)
    return os.path.expanduser(text) if about_of(option).is_file else text  # noqa: PTH111 (may be a hub id)


def _near_miss(name: str, known: Iterable[str]) -> str:
    found = get_close_matches(name, list(known), 1)
    return f"; did you mean {found[0]}?" if found else "."


_PRESETS, _SETTINGS, _COMMAND_LINE, _SHOWS_ALL = (
    f"{__name__}.{name}" for name in ("presets", "settings", "command_line", "shows_all")
)
"""Keys of a context's `meta`: the presets of the file, the settings that count, what was typed, and --help-all."""


_TOPICS = {
    "Prompts and tools": "Input",
    "Resuming": "Output",
    "seed": "Sampling",
    **dict.fromkeys(("Validated and cached answers", "regex", "close_forms", "pretty_json", "json_schema"), "Forms"),
    **dict.fromkeys(("Model", "Memory", ""), "Engine"),
    **dict.fromkeys(("Replicas", "tensor_parallel", "device_map", "max_memory", "offload_folder"), "Scale"),
    **dict.fromkeys(("Reports", "timings", "max_errors", "max_truncated"), "Diagnosis"),
}
"""Topics of the short help, in its order, by the names of options, or of groups that are called otherwise there."""


class ConfiguredCommand(click.Command):
    """Reads the configuration file, and says in the help where it and the environment variables are.

    The command line comes first, then the environment, then a preset, then the file, then the option's own default.
    """

    def __init__(self, *arguments: Any, main: Sequence[str] = (), **attributes: Any) -> None:
        """`main`: the options that the help explains, if it only names the others; --help-all explains all then"""
        super().__init__(*arguments, **attributes)
        self._main = main
        for key, option in reversed(option_keys(self).items()):
            # Click would name it after our name for the option. What all commands read, such as CBATCH_MODEL, is last.
            option.envvar = [f"CBATCH_{self.name}_{key}".upper(), *(option.envvar or ())]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Reads the file before the options. What is wrong in it counts only if nobody asks for help."""
        problem: ConfigFileError | None = None
        ctx.meta[_PRESETS], ctx.meta[_SETTINGS] = {}, {}
        ctx.meta[_COMMAND_LINE] = shlex.join([*ctx.command_path.split(), *args])
        try:
            settings, ctx.meta[_PRESETS] = load_config(self, ctx.find_root())
            _use(ctx, settings)
        except ConfigFileError as error:
            problem = error
        typed = list(args)
        try:
            rest = super().parse_args(ctx, args)
        except click.BadParameter as error:
            name = error.param.name if error.param is not None else None
            if problem is None and name and ctx.get_parameter_source(name) is ParameterSource.DEFAULT_MAP:
                problem = ConfigFileError(f"{ctx.meta[_SETTINGS][name].where}: {error.message}")
            raise problem or error from error
        except ConfigFileError as error:  # no such preset
            raise problem or error from None
        if problem is not None and not ctx.resilient_parsing:
            raise problem
        given = [option.name for option in self.make_parser(ctx).parse_args(typed)[2]]
        if given.count("template") > 1 and not ctx.resilient_parsing:  # the last one would hide a mistake
            raise click.UsageError("--template is given twice; give one of them.", ctx)
        return rest

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        *parameters, help_option = super().get_params(ctx)
        return [*parameters, *([_help_all] if self._main else []), help_option]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if self._main and not ctx.meta.get(_SHOWS_ALL):
            self._format_overview(ctx, formatter)
            return
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            if isinstance(parameter, click.Option) and (record := parameter.get_help_record(ctx)) is not None:
                groups.setdefault(about_of(parameter).group, []).append(record)
        for group, records in groups.items():
            with formatter.section(group or "Options"):
                formatter.write_dl(records)

    def _format_overview(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        options = {one.name: one for one in self.params if isinstance(one, click.Option) and not one.hidden}
        with formatter.section("Most used"):
            formatter.write_dl([record for name in self._main if (record := options.pop(name).get_help_record(ctx))])
        topics: dict[str, list[str]] = {}
        for name, one in options.items():
            group = about_of(one).group
            if name != PRESET:
                topics.setdefault(_TOPICS.get(name or "", _TOPICS.get(group, group)), []).append(max(one.opts, key=len))
        order = list(dict.fromkeys(_TOPICS.values()))
        width = formatter.width - 13
        with formatter.section("Others, which --help-all explains"):
            for topic in sorted(topics, key=lambda topic: order.index(topic) if topic in order else -1):
                names = textwrap.fill(" ".join(topics[topic]), width, break_on_hyphens=False)
                formatter.write_dl([(topic.ljust(9), "\b\n" + names)])  # as it is: Click would break at hyphens

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Says where defaults can be written down, and which of them counts."""
        preset = "then the preset (--preset), " if any(option.callback is _use_preset for option in self.params) else ""
        model = ", and --model also CBATCH_MODEL" if "model" in option_keys(self) else ""
        formatter.write_paragraph()
        formatter.write_text(
            f"Every option also reads CBATCH_{(self.name or '').upper()}_<OPTION>{model}. Defaults can stand in "
            f"{display_path(config_path())}. The command line comes first, then the environment variable, {preset}then "
            "this file."
        )


def _show_all(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        ctx.meta[_SHOWS_ALL] = True
        click.echo(ctx.get_help())
        ctx.exit()


_help_all = click.Option(
    ["--help-all"], is_flag=True, is_eager=True, expose_value=False, callback=_show_all, help="Explain every option."
)


def command_line() -> str:
    """The command that runs now, as it was typed in a shell."""
    typed: str = click.get_current_context().meta[_COMMAND_LINE]
    return typed


def _use(ctx: click.Context, settings: Settings) -> None:
    ctx.meta[_SETTINGS] |= settings
    ctx.default_map = {name: setting.value for name, setting in ctx.meta[_SETTINGS].items()}


def _use_preset(ctx: click.Context, parameter: click.Parameter, name: str | None) -> None:
    if name is None or ctx.resilient_parsing:
        return
    presets: Mapping[str, Settings] = ctx.meta[_PRESETS]
    if name not in presets:
        shown = display_path(config_path())
        where = f": {shown} has no table such as [preset.{name}]."
        if presets:
            where = f" in {shown}{_near_miss(name, presets)} It has {', '.join(sorted(presets))}."
        raise ConfigFileError(f"There is no preset {name!r}{where}")
    _use(ctx, presets[name])


preset_option = click.option(
    f"--{PRESET}",
    metavar="NAME",
    is_eager=True,
    expose_value=False,
    callback=_use_preset,
    help="Take defaults from the table [preset.NAME] of the configuration file.",
)
