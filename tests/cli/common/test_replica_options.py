"""Options that put engines into processes of their own: what they accept, and the messages for what makes no sense."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from cbatch.cli.common.options import make_options
from cbatch.cli.common.replica_options import ReplicaOptions
from cbatch.cli.main import run_command
from cbatch.cli.run.command import run
from cbatch.cli.run.options import RunOptions
from cbatch.replicas.driver import TIMEOUT_S


def options_of(*arguments: str) -> ReplicaOptions:
    return make_options(RunOptions, run.make_context("run", list(arguments)).params).replicas


def test_what_is_given() -> None:
    """Guards the record: without the options there are no replicas, and `auto` leaves their number open."""
    assert not options_of().are_given
    assert options_of("--replicas", "3", "--replica-timeout", "1.5") == ReplicaOptions(3, replica_timeout=1.5)
    auto = options_of("--replicas", "auto")
    assert auto.are_given and auto.replicas == "auto" and auto.wanted is None
    cluster = options_of("--ray", "head:6379", "--ray-resources", '{"num_gpus": 0.5, "big": 1}')
    assert cluster.are_given and cluster.wanted is None
    assert (cluster.ray, cluster.ray_resources) == ("head:6379", {"num_gpus": 0.5, "big": 1})
    assert options_of("--ray", "auto", "--replicas", "2").wanted == 2


def test_the_default_timeout_is_the_one_that_help_states() -> None:
    """Guards the help, which does not import what states the number."""
    (option,) = (one for one in run.params if one.name == "replica_timeout")
    assert isinstance(option, click.Option) and f"[default: {TIMEOUT_S:g}]" in str(option.help)


SENSELESS = [
    ("--replicas 0", "'0' is no number of at least 1, nor auto"),
    ("--replicas -2", "'-2' is no number"),
    ("--replicas two", "'two' is no number"),
    ("--ray http://head:1", "'http://head:1' is neither HOST:PORT nor auto"),
    ("--ray head", "'head' is neither HOST:PORT"),
    ("--ray auto --ray-resources {", "the value is not valid JSON: '{'"),
    ("--ray auto --ray-resources [1]", "'[1]' is no JSON object of numbers"),
    ('--ray auto --ray-resources {"num_gpus":true}', "is no JSON object of numbers"),
    ('--ray auto --ray-resources {"num_gpus":-1}', "is no JSON object of numbers"),
    ('--ray auto --ray-resources {"num_gpus":NaN}', "is no JSON object of numbers"),
    ('--replicas 2 --ray-resources {"num_gpus":1}', "--ray-resources needs --ray."),
    ("--replica-timeout 9", "--replica-timeout needs --replicas or --ray."),
    ("--replicas 2 --replica-timeout 0", "0.0 is not in the range x>0"),
    ("--replicas 2 --device-map auto", "it does not go with --replicas, which shares them out"),
    ("--replicas 2 --replica-timeout nan", "nan is no finite number"),
]
"""Options, of `run` and `chat`, and what is said of them."""


@pytest.mark.parametrize(
    ("line", "message"),
    [
        *((f"{command} {given}", said) for command in ("run", "chat") for given, said in SENSELESS),
    ],
)
def test_what_makes_no_sense_is_refused(
    line: str, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a message that comes after the model was loaded, and one that does not say what is wrong."""
    monkeypatch.chdir(tmp_path)
    assert run_command(line.split()) == 2
    assert message in capsys.readouterr().err and not list(tmp_path.iterdir())
