"""Options that several commands share: the records they become, and the messages for wrong ones."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import pytest

from cbatch.base import option
from cbatch.base.config import EngineConfig
from cbatch.base.errors import ConfigError
from cbatch.cli.bench.command import bench
from cbatch.cli.chat.command import chat
from cbatch.cli.common.options import SAMPLING_FIELDS, engine_config, make_options
from cbatch.cli.common.replica_options import ReplicaOptions
from cbatch.cli.main import run_command
from cbatch.cli.run.command import run
from cbatch.cli.run.options import RunOptions
from cbatch.cli.verify.command import verify

ENGINE_FIELDS = tuple(option.options_of(EngineConfig))
REPLICA_FIELDS = tuple(option.options_of(ReplicaOptions))


def options_of(command: click.Command, *arguments: str) -> dict[str, Any]:
    return command.make_context(command.name, list(arguments), auto_envvar_prefix=f"CBATCH_{command.name}").params


def test_every_engine_option_reaches_the_engine() -> None:
    """Guards against an engine option that changes nothing: each sets the field of its name."""
    texts = {name: name for name in ENGINE_FIELDS} | {"chat_template": "{{ messages }}"}
    numbers = {name: 10 + place for place, name in enumerate(ENGINE_FIELDS)}
    for command in (run, chat, bench):
        values = options_of(command)
        assert set(ENGINE_FIELDS) <= values.keys()
        for name in ENGINE_FIELDS:
            needed = {"device_map": "auto"} if name in ("max_memory", "offload_folder") else {}
            for value in (texts[name], numbers[name], not getattr(EngineConfig(), name), "auto", {"cpu": 1}):
                with suppress(ConfigError):
                    assert getattr(engine_config({**values, **needed, name: value}), name) == value
                    break
            else:
                pytest.fail(f"no value of {name} is accepted")


def test_every_option_is_a_field_of_its_record() -> None:
    """Guards against an option of `run` that nothing reads."""
    values = options_of(run, "--stop", "x", "--top-k", "3", "--param", "echo=true", "--kv-blocks", "9")
    options = make_options(RunOptions, values)
    assert options.sampling.params == {"stop": ("x",), "top_k": 3, "echo": True} and options.engine.kv_blocks == 9
    assert make_options(RunOptions, options_of(run)) == RunOptions()  # both state the defaults
    own = {field.name for field in fields(RunOptions)} - {"engine", "sampling", "replicas"}
    assert values.keys() == own | set(ENGINE_FIELDS) | set(REPLICA_FIELDS) | set(SAMPLING_FIELDS) | {
        "system",
        "seed",
        "param",
        "json_schema",
        "lora",
    }


def test_forms_have_options_of_their_own(tmp_path: Path) -> None:
    """Guards --regex, --json-schema as text and as a file, and --prompt-logprobs: the same as --param."""
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    for text in (json.dumps(schema), str(tmp_path / "schema.json")):
        made = make_options(RunOptions, options_of(run, "--json-schema", text, "--prompt-logprobs", "2"))
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        assert made.sampling.params == {"response_format": form, "prompt_logprobs": 2}
        made.sampling.check()
    made = make_options(RunOptions, options_of(chat, "--regex", "[a-z]+") | options_of(run, "--regex", "[a-z]+"))
    assert made.sampling.params == {"regex": "[a-z]+"}
    both = make_options(RunOptions, options_of(run, "--regex", "a", "--json-schema", "{}"))
    with pytest.raises(ConfigError, match="cannot be combined"):
        both.sampling.check()
    for text, message in (("{", "not valid JSON"), ("/nowhere.json", "No such file"), (str(tmp_path), "directory")):
        with pytest.raises(click.BadParameter, match=message):
            options_of(run, "--json-schema", text)


def test_no_quantization() -> None:
    """Guards --quantize none, which undoes a setting of a file or of the environment."""
    assert options_of(run, "--quantize", "none")["quantize"] is None
    assert options_of(run, "--quantize", "int4")["quantize"] == "int4"


def test_the_target_of_a_step() -> None:
    """Guards --target-step-ms: milliseconds, auto or none; the default of a chat is auto."""
    assert [options_of(command)["target_step_ms"] for command in (run, chat, bench)] == [None, "auto", None]
    for text, target in (("20", 20.0), ("0.5", 0.5), ("auto", "auto"), ("none", None)):
        assert options_of(chat, "--target-step-ms", text)["target_step_ms"] == target


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(("--target-step-ms", text) for text in ("0", "-1", "nan", "inf", "fast", "", "1e999")),
        *(("--speculate", text) for text in ("0", "-1", "2.5", "on", "")),
    ],
)
def test_a_wrong_value_is_named(name: str, text: str) -> None:
    """Guards the message for a value that is not a time, or no number of tokens."""
    with pytest.raises(click.BadParameter) as error:
        options_of(run, name, text)
    said = error.value.format_message()
    assert name in said
    assert name == "--speculate" or "is no number of milliseconds above 0, nor auto or none" in said


def test_help_tells_one_default_of_an_option() -> None:
    """Guards the help of a command whose default differs from that of the record: not both are shown."""
    for command in (run, chat, bench, verify):
        context = click.Context(command, info_name=command.name)
        records = [parameter.get_help_record(context) for parameter in command.params]
        assert [name for name, text in filter(None, records) if text.count("default:") > 1] == []


def test_a_misspelt_option_names_the_closest(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards the hint against three options by alphabet, of which the last but one is meant."""
    assert run_command(["run", "--temprature", "1"]) == 2
    assert capsys.readouterr().err == "cbatch: No such option '--temprature'. Did you mean '--temperature'?\n"
