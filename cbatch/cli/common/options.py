"""Options that several commands share, and the records that they become."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem

from cbatch.base.chat_template_options import TemplateOptions
from cbatch.base.config import EngineConfig
from cbatch.base.errors import ConfigError, RequestError, reason_of
from cbatch.base.option import Option, option, options_of, parse_json
from cbatch.base.params import PARAM_NAMES, PARAMS, SamplingParams
from cbatch.cli.common.configured_command import about_of
from cbatch.cli.common.replica_options import ReplicaOptions
from cbatch.extras import require_package
from cbatch.requests.param_names import own_params
from cbatch.sample.structured.json_schema import schema_faults

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Command = TypeVar("Command", bound=Callable[..., Any])
Options = TypeVar("Options", bound="DataclassInstance")


class JsonListOption(click.Option):
    """A repeatable option whose environment variable holds a JSON list. (Click would split it at white space.)"""

    def value_from_envvar(self, ctx: click.Context) -> Any:
        text = self.resolve_envvar_value(ctx)
        if text is None:
            return None
        try:
            values = json.loads(text)
        except (ValueError, RecursionError):
            values = None
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise click.BadParameter(f"the environment variable must hold a JSON list of strings, not {text!r}.", ctx)
        return tuple(values)


def _complete_model(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The models on this machine, and folders."""
    from cbatch.cli.common.local_models import local_models

    names = [model.name for model in local_models()]
    fitting = [name for name in names if name.lower().startswith(incomplete.lower())]
    return [CompletionItem(incomplete, type="dir"), *map(CompletionItem, fitting)]


def _complete_names(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Of a list of choices with commas between them, the last one: those that it lacks."""
    before, comma, last = incomplete.rpartition(",")
    left = [name for name in about_of(parameter).choices if name not in before.split(",")]
    return [f"{before}{comma}{name}" for name in left if name.startswith(last)]


class FiniteRange(click.FloatRange):
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        return number if math.isfinite(number) else self.fail(f"{value} is no finite number.", param, ctx)


def _parse_params(texts: tuple[str, ...]) -> dict[str, Any]:
    """Parameters of `NAME=JSON` texts. `seed` is refused: it has an option of its own, for the whole run."""
    given = {}
    for text in texts:
        name, _, value = text.partition("=")
        own_params({name: None})  # a name that is none is told before its value
        given[name] = parse_json(value, f" of {name}")
    params, template = own_params(given)
    if "seed" in params:
        raise ValueError("there is no sampling parameter 'seed'; --seed is the seed of all.")
    if template:
        raise ValueError(f"{next(iter(template))} is no sampling parameter; see --template-kwargs.")
    return params


def _parse_json_schema(text: str) -> dict[str, Any]:
    """The `response_format` of a JSON schema, which is the text itself or in a file."""
    if not text.lstrip().startswith("{"):
        path = text
        try:
            text = Path(path).read_text()
        except (OSError, ValueError) as error:
            raise ValueError(f"cannot read {path!r}: {reason_of(error)}.") from None
    schema = parse_json(text)
    if not isinstance(schema, dict):
        raise ValueError("a JSON schema is an object.")
    try:  # before a model is loaded for it
        wrong = next((sentence for is_type, sentence in schema_faults(schema) if is_type), None)
    except RecursionError:
        wrong = "it is nested too deeply."
    if wrong is not None:
        raise ValueError(wrong)
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def _parse_lora(texts: tuple[str, ...]) -> dict[str, str]:
    places: dict[str, str] = {}
    for text in texts:
        name, _, place = text.partition("=")
        if not (name and place):
            raise ValueError(f"{text!r} is not NAME=PATH, such as sql=adapters/sql.")
        if name in places:
            raise ValueError(f"two adapters have the name {name}.")
        places[name] = place
    return places


def click_option(one: Option, **changes: Any) -> click.Option:
    """An option of a command, as a field of a record says it.

    changes: attributes of Click's that are different for this command
    """
    names = list(one.names or ("--" + one.name.replace("_", "-"),))
    given: dict[str, Any] = {"default": one.default, "metavar": one.metavar}
    shown = None if "default" in changes else one.shown
    if one.kinds == (bool,):
        given["is_flag"] = True
        if one.default is not False:
            names[-1] += names[-1].replace("--", "/--no-")
            shown = shown or ("on" if one.default else None)
    elif one.choices and one.parse is None:
        given["type"] = click.Choice(one.choices)
    elif one.parse is not None:
        given |= {
            "callback": _reader(one.parse, one.default),
            "default": one.default if isinstance(one.default, str) else None,
        }
        if one.choices:
            given["shell_complete"] = _complete_names
    elif one.kinds in ((int,), (float,)):
        kind: Any = one.kinds[0]
        if one.low is not None or one.high is not None:
            ranged: Any = click.IntRange if kind is int else FiniteRange
            kind = ranged(one.low, one.high, min_open=one.above)
        given["type"] = kind
    if one.many:
        given |= {"multiple": True, "cls": JsonListOption}
    if one.name == "model":
        given |= {"shell_complete": _complete_model, "envvar": ["CBATCH_MODEL"]}
    help = one.help
    if shown is None and "default" not in changes:
        given["show_default"] = one.default is not None and one.default is not False and not one.many
    elif shown:
        help = f"{help.removesuffix('.')} [default: {shown}]."
    given |= {"help": help} | changes
    made: click.Option = given.pop("cls", click.Option)([*names, one.name], **given)
    made.about = one  # type: ignore[attr-defined]
    return made


def _reader(parse: Callable[[Any], Any], default: Any) -> Callable[[click.Context, click.Parameter, Any], Any]:

    def read(ctx: click.Context, parameter: click.Parameter, value: Any) -> Any:
        if value in (None, ()):
            return default
        try:
            return parse(value)
        except (ValueError, RequestError) as error:
            raise click.BadParameter(str(error), ctx, parameter) from None

    return read


def record_options(
    record: type, *skipped: str, is_unset: bool = False, **changes: Mapping[str, Any]
) -> Callable[[Command], Command]:
    """Adds the options of a record to a command.

    skipped:  fields that this command has not
    is_unset: whether an option that is not given is None, instead of the field's default
    changes:  attributes of Click's, for a field, that are different for this command
    """

    def add(command: Command) -> Command:
        for name, one in reversed(options_of(record).items()):
            if name not in skipped:
                one = replace(one, default=None) if is_unset else one
                made = click_option(one, **changes.get(name, {}))
                vars(command).setdefault("__click_params__", []).append(made)  # as Click's own decorators do
        return command

    return add


template_kwargs_option = partial(
    option,
    make=dict,
    help="Variables for the chat template, such as '{\"enable_thinking\": false}'.",
    group="Prompts and tools",
    metavar="JSON",
    parse=lambda text: dict(TemplateOptions(kwargs=parse_json(text)).kwargs),
)
tools_option = partial(
    option,
    (),
    "Let the model call the tools in FILE: Python functions, commands, MCP servers (repeatable).",
    group="Prompts and tools",
    names=("--tools", "--tool"),
    metavar="FILE",
)
"""Make the fields of a command's record for them."""

replica_options = record_options(ReplicaOptions)


engine_options = partial(record_options, EngineConfig)
"""Adds the engine's options to a command; see `record_options`."""


lora_option = click.option(
    "--lora",
    multiple=True,
    cls=JsonListOption,
    callback=_reader(_parse_lora, {}),
    metavar="NAME=PATH",
    help="Load a LoRA adapter of PEFT, which requests ask for by its name (repeatable).",
)

SAMPLING_FIELDS = [name for name, param in PARAMS.items() if param.is_option]
RUN_ONLY_PARAMS = [name for name, param in PARAMS.items() if param.only_in_run]

_sampling = partial(option, group="Sampling")


@dataclass(frozen=True, slots=True)
class _OtherParams:
    """Options that set sampling parameters under another name."""

    json_schema: dict[str, Any] | None = _sampling(
        None, "Make every output JSON that fits this schema.", metavar="FILE|JSON", parse=_parse_json_schema
    )
    param: dict[str, Any] = _sampling(
        make=dict,
        help="Set any other sampling parameter, such as stop_token_ids=[5] (repeatable).",
        metavar="NAME=JSON",
        many=True,
        parse=_parse_params,
    )


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """The options of `sampling_options`. `params` holds the sampling parameters that were given, without `seed`."""

    system: str | None = _sampling(None, "System message for conversations that have none.", metavar="TEXT")
    seed: int = _sampling(0, "Seed of all randomness.")
    params: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> SamplingOptions:
        # An empty tuple of stop strings means that none was given.
        given = {name: values[name] for name in SAMPLING_FIELDS if values[name] not in (None, ())}
        if values["json_schema"] is not None:
            given["response_format"] = values["json_schema"]
        return cls(values["system"], values["seed"], values["param"] | given)

    def check(self) -> None:
        """Raises ConfigError for what would be wrong for every row or turn, and if a package for it is missing."""
        try:
            (self.system or "").encode()
        except UnicodeEncodeError as error:
            raise ConfigError("--system is not valid UTF-8.") from error
        try:
            params = SamplingParams().merged(self.params)
        except RequestError as error:
            name, _, rest = str(error).partition(" ")
            given = f"--{name.replace('_', '-')}" if name in SAMPLING_FIELDS else f"--param {name}="
            raise ConfigError(f"{given} {rest}" if name in PARAM_NAMES else str(error)) from error
        if params.constraint is not None:
            require_package("llguidance")

    def check_for_chat(self) -> None:
        """Raises ConfigError also for what a chat cannot show."""
        self.check()
        for name in RUN_ONLY_PARAMS:
            if self.params.get(name) is not None:
                advice = "; in a chat, /retry N gives several answers" if name == "n" else ""
                raise ConfigError(f"--{name.replace('_', '-')} is for cbatch run{advice}.")


def sampling_options(*, in_chat: bool = False) -> Callable[[Command], Command]:
    """Adds the sampling options to a command. A chat refuses some of them (`check_for_chat`); its help hides these.

    A parameter that is not given is None, so that it comes from the model.
    """
    others = PARAMS.keys() - SAMPLING_FIELDS
    hidden = {name: {"hidden": True} for name in RUN_ONLY_PARAMS if in_chat}
    parts = (
        record_options(SamplingOptions),
        record_options(SamplingParams, *others, is_unset=True, **hidden),
        record_options(_OtherParams),
    )
    return lambda command: reduce(lambda made, add: add(made), reversed(parts), command)


def engine_config(values: Mapping[str, Any]) -> EngineConfig:
    """The engine's configuration, from the options of `engine_options`, and `lora_option` if the command has it."""
    return EngineConfig(**{name: values[name] for name in options_of(EngineConfig)}, lora=values.get("lora") or None)


def make_options(record: type[Options], values: Mapping[str, Any]) -> Options:
    """Makes a command's record of options from Click's values.

    Its field `engine` is an EngineConfig, `sampling` a SamplingOptions, `replicas` a ReplicaOptions; every other field
    has the name of an option.
    """
    shared: dict[str, Callable[[Mapping[str, Any]], Any]] = {
        "engine": engine_config,
        "sampling": SamplingOptions.from_values,
        "replicas": lambda values: ReplicaOptions(*(values[name] for name in options_of(ReplicaOptions))),
    }
    names = [field.name for field in fields(record)]
    return record(**{name: shared[name](values) if name in shared else values[name] for name in names})


def check_distinct_file(option: str, name: str, others: Mapping[str, str | None]) -> None:
    """Raises ConfigError if an option names a file that another option names already.

    name:   the file that `option` names
    others: the other files; each key says what the file is (“the input”). None and `-` are no files
    """
    path = Path(name)
    for what, other_name in others.items():
        if other_name in (None, "-"):
            continue
        other = Path(other_name)
        if os.path.realpath(path) == os.path.realpath(other) or (
            path.is_file() and other.is_file() and path.samefile(other)
        ):
            raise ConfigError(f"{option} {path} is {what}; choose another file.")
