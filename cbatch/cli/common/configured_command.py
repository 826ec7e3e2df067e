"""A command whose options also come from the environment, a preset and the configuration file."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

import click
from click.core import ParameterSource

from cbatch.cli.common.config_file import (
    PRESET,
    CommandConfig,
    ConfigFileError,
    Setting,
    config_path,
    display_path,
    load_config,
    option_keys,
)

_CONFIG, _SETTINGS, _COMMAND_LINE = f"{__name__}.config", f"{__name__}.settings", f"{__name__}.command_line"
"""Keys of a context's `meta`: what the file says to the command, the settings that count, and what was typed."""


class ConfiguredCommand(click.Command):
    """Reads the configuration file, and shows it and every option's environment variable in the help.

    The command line comes first, then the environment, then a preset, then the file, then the option's own default.
    """

    def __init__(self, *arguments: Any, **attributes: Any) -> None:
        super().__init__(*arguments, **attributes)
        for key, option in option_keys(self).items():
            option.show_envvar = True
            if option.name != key and option.envvar is None:  # Click would name the variable after our name for it
                option.envvar = f"CBATCH_{self.name}_{key}".upper()

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Reads the file before the options. What is wrong in it counts only if nobody asks for help."""
        problem: ConfigFileError | None = None
        try:
            config = load_config(self, _commands(ctx))
        except ConfigFileError as error:
            problem, config = error, CommandConfig(config_path(), {}, {})
        ctx.meta[_CONFIG], ctx.meta[_SETTINGS] = config, {}
        ctx.meta[_COMMAND_LINE] = shlex.join([*ctx.command_path.split(), *args])
        _use(ctx, config.settings)
        try:
            rest = super().parse_args(ctx, args)
        except click.BadParameter as error:
            raise problem or _located(error, ctx) from error
        except ConfigFileError as error:  # no such preset
            raise problem or error from None
        if problem is not None and not ctx.resilient_parsing:
            raise problem
        return rest

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Shows options by the groups that their records give them."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            if (record := parameter.get_help_record(ctx)) is not None:
                groups.setdefault(getattr(parameter, "group", ""), []).append(record)
        for group, records in groups.items():
            with formatter.section(group or "Options"):
                formatter.write_dl(records)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Says where defaults can be written down, and which of them counts."""
        preset = "then the preset, " if any(option.callback is _use_preset for option in self.params) else ""
        formatter.write_paragraph()
        formatter.write_text(
            f"You can keep your own defaults in {display_path(config_path())}. What you type on the command line comes "
            f"first, then the environment variable, {preset}then this file."
        )


def command_line() -> str:
    """The command that runs now, as it was typed in a shell."""
    typed: str = click.get_current_context().meta[_COMMAND_LINE]
    return typed


def _commands(ctx: click.Context) -> list[click.Command]:
    """All commands of the program; none if a command is read by itself, as /run in a chat is."""
    root = ctx.find_root()
    if not isinstance(root.command, click.Group):
        return []
    found = (root.command.get_command(root, name) for name in root.command.list_commands(root))
    return [command for command in found if command is not None]


def _use(ctx: click.Context, settings: Mapping[str, Setting]) -> None:
    """Adds settings to the defaults of a context; they override those that are there."""
    merged = {**ctx.meta[_SETTINGS], **settings}
    ctx.meta[_SETTINGS] = merged
    ctx.default_map = {name: setting.value for name, setting in merged.items()}


def _use_preset(ctx: click.Context, parameter: click.Parameter, name: str | None) -> None:
    if name is not None and not ctx.resilient_parsing:
        config: CommandConfig = ctx.meta[_CONFIG]
        _use(ctx, config.preset(name))


def _located(error: click.BadParameter, ctx: click.Context) -> click.UsageError:
    """The error; if the value stands in the file, one that says where."""
    name = error.param.name if error.param is not None else None
    if name is None or ctx.get_parameter_source(name) is not ParameterSource.DEFAULT_MAP:
        return error
    return ConfigFileError(f"{ctx.meta[_SETTINGS][name].where}: {error.message}")


preset_option = click.option(
    f"--{PRESET}",
    metavar="NAME",
    is_eager=True,
    expose_value=False,
    callback=_use_preset,
    help="Take defaults from the table [preset.NAME] of the configuration file.",
)
