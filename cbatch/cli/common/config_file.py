"""The configuration file: defaults for options, for all commands or one, and presets to choose by name.

Top-level keys are names of options and count for every command that has them. A table such as [chat] is for one
command, and [preset.NAME] is used with --preset NAME. Values become what would be typed on the command line, so that
Click converts and checks both alike.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import click

PRESET = "preset"
"""The table of presets."""

_PATH_METAVARS = ("ID_OR_DIR", "DIR", "FILE", "OUT", "OUT.jsonl")
"""Options that show one of these in their help take a path. A shell would expand its `~`."""


class ConfigFileError(click.UsageError):
    """The configuration file cannot be read, or holds what no command understands."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A value of the file for one option. `where` names the file, the key and its table, for messages."""

    value: Any
    where: str


@dataclass(frozen=True, slots=True)
class CommandConfig:
    """What the file says to one command, by the names of Click's parameters.

    presets: settings by the names of the presets
    """

    path: Path
    settings: Mapping[str, Setting]
    presets: Mapping[str, Mapping[str, Setting]]

    def preset(self, name: str) -> Mapping[str, Setting]:
        """The settings of a preset. Raises ConfigFileError if there is none of this name."""
        if name in self.presets:
            return self.presets[name]
        if not self.presets:
            raise ConfigFileError(
                f"There is no preset {name!r}: {display_path(self.path)} has no table such as [preset.{name}]."
            )
        raise ConfigFileError(
            f"There is no preset {name!r} in {display_path(self.path)}{_near_miss(name, self.presets)} "
            f"It has {', '.join(sorted(self.presets))}."
        )


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
    """The options of a command by their keys in the file: the long name, with underscores."""
    keys = {}
    for option in command.params:
        long = [name for name in option.opts if name.startswith("--")]
        if isinstance(option, click.Option) and long:
            keys[_as_key(long[0].removeprefix("--"))] = option
    return keys


def load_config(command: click.Command, commands: Iterable[click.Command] = ()) -> CommandConfig:
    """Reads what the file says to a command. It need not exist.

    commands: all commands; then each key has to be understood by one of them

    Raises ConfigFileError.
    """
    path = config_path()
    content = _read(path)
    if not content:
        return CommandConfig(path, {}, {})
    keys = {one.name or "": option_keys(one) for one in commands}
    own = {command.name or "": option_keys(command)}
    return _Reader(path, keys or own, is_strict=bool(keys)).read(content, command.name or "")


def _read(path: Path) -> dict[str, Any]:
    """The file's content; empty if there is no file."""
    shown = display_path(path)
    try:
        data = path.read_bytes()
        return tomllib.loads(data.decode("utf-8-sig"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise ConfigFileError(f"{shown} cannot be read: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigFileError(f"{shown} is not valid UTF-8 (line {line}).") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigFileError(f"{shown} is not valid TOML: {error}.") from error
    except RecursionError as error:
        raise ConfigFileError(f"{shown} is not valid TOML: it is nested too deeply.") from error


class _Reader:
    """Checks the keys of a file, all of them, and picks the settings of one command."""

    def __init__(self, path: Path, keys: Mapping[str, Mapping[str, click.Option]], *, is_strict: bool) -> None:
        """
        keys:      the options of each command
        is_strict: whether these are all commands, so that another key is wrong
        """
        self._path, self._shown, self._keys, self._is_strict = path, display_path(path), keys, is_strict
        # A preset is chosen in a table, because [preset.NAME] takes the name of its key.
        self._all = {key: None for options in keys.values() for key in options if key != PRESET}
        with_presets = [options for options in keys.values() if PRESET in options and not _has_choices(options[PRESET])]
        self._preset_keys = {key: None for options in with_presets for key in options if key != PRESET}

    def read(self, content: Mapping[str, Any], command: str) -> CommandConfig:
        tables = {name: content[name] for name in self._keys if name in content}
        shared = {name: value for name, value in content.items() if name not in tables and name != PRESET}
        options = self._keys[command]
        settings = self._settings(shared, "", self._all, options, others=[*self._keys, PRESET])
        for name, table in tables.items():
            self._check_table(name, table)
            settings |= self._settings(table, name, self._keys[name], options if name == command else {})
        presets = content.get(PRESET, {})
        if not isinstance(presets, dict):
            raise ConfigFileError(
                f"{self._shown}: preset holds the presets, as tables such as [preset.coder]; to choose one for every "
                "chat, write preset under [chat]."
            )
        for name, table in presets.items():
            self._check_table(f"{PRESET}.{name}", table)
        named = {
            name: self._settings(table, f"{PRESET}.{name}", self._preset_keys, options)
            for name, table in presets.items()
        }
        return CommandConfig(self._path, settings, named)

    def _settings(
        self,
        table: Mapping[str, Any],
        name: str,
        known: Mapping[str, object],
        options: Mapping[str, click.Option],
        others: Iterable[str] = (),
    ) -> dict[str, Setting]:
        """The settings in a table.

        known:   keys that may stand in it
        options: those of the command that is started; other keys are left out
        others:  names that may be meant by a wrong key
        """
        of_table = f" in [{name}]" if name else ""
        settings: dict[str, Setting] = {}
        for written, value in table.items():
            key = _as_key(written)
            where = f"{self._shown}: {written}{of_table}"
            if key not in known and self._is_strict:
                raise ConfigFileError(f"{where} is not an option{_near_miss(key, [*known, *others])}")
            if (option := options.get(key)) is None:
                continue
            if option.name in settings:
                raise ConfigFileError(f"{where} is there twice, with a dash and with an underscore.")
            settings[option.name or key] = Setting(_as_typed(option, value, where), where)
        return settings

    def _check_table(self, name: str, table: object) -> None:
        if not isinstance(table, dict):
            raise ConfigFileError(f"{self._shown}: {name} must be a table, [{name}], not one value.")


def _has_choices(option: click.Option) -> bool:
    """Whether an option takes one of a few words. The --preset of `bench` names an experiment, not a table."""
    return isinstance(option.type, click.Choice)


def _as_key(name: str) -> str:
    return name.replace("-", "_")


def _as_typed(option: click.Option, value: Any, where: str) -> Any:
    """The value as it would be typed on the command line, so that Click reads both alike."""
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
    return os.path.expanduser(text) if option.metavar in _PATH_METAVARS else text  # noqa: PTH111 (may be a hub id)


def _near_miss(name: str, known: Iterable[str]) -> str:
    found = get_close_matches(name, list(known), 1)
    return f"; did you mean {found[0]}?" if found else "."
