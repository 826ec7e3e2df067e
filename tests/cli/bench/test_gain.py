"""The gain over static batches: its arithmetic against what engines do, its factors, and the lengths it comes of."""

from __future__ import annotations

import math
from statistics import pstdev
from typing import Any

import click
import pytest

from cbatch.base.config import EngineConfig
from cbatch.base.errors import ConfigError
from cbatch.cli.bench import command
from cbatch.cli.bench.gain import gain_of, gain_sentence
from cbatch.cli.bench.options import BenchOptions
from cbatch.cli.bench.strategies import STRATEGIES, Experiment
from cbatch.cli.bench.workload import LengthDistribution, Workload, skewed_lengths, synthetic_workload
from cbatch.cli.main import run_command
from scripts.benchmarks.expected_gain import count_continuous, count_static, expected_gain
from tests.support.bench_reports import WORK, continuous_record, static_record
from tests.support.tiny_models import VOCABULARY, loaded, make_network, make_prompts


@pytest.mark.parametrize("skew", [0, 0.5, 1, 2])
def test_skewed_lengths(skew: float) -> None:
    """Guards the curve: the same number of tokens at every skew, which is that of the logarithms."""
    lengths = skewed_lengths(1000, 200, skew)
    assert sum(lengths) == 200_000 and lengths == sorted(lengths) and lengths[0] >= 1
    assert pstdev(map(math.log, lengths)) == pytest.approx(skew, abs=0.1)
    assert len(set(lengths)) == 1 if skew == 0 else lengths[-1] > 200 * math.exp(2.5 * skew - skew**2 / 2)


def test_a_seed_changes_the_order_only() -> None:
    """Guards a curve that is heavy-tailed with every seed, and requests that do not fit the context."""
    lengths = LengthDistribution(20, 20, skew=1.0), LengthDistribution(30, 30, skew=1.0)
    one, other = (synthetic_workload(50, *lengths, VOCABULARY, 1000, seed) for seed in (1, 2))
    assert one.output_lengths != other.output_lengths
    assert sorted(one.output_lengths) == sorted(other.output_lengths) == skewed_lengths(50, 30, 1.0)
    assert sorted(map(len, one.prompts)) == skewed_lengths(50, 20, 1.0)
    with pytest.raises(ConfigError, match=r"The longest request has \d+ tokens; the model's context holds 60"):
        synthetic_workload(50, *lengths, VOCABULARY, 60, 1)


def test_counts_are_those_of_engines() -> None:
    """Guards the arithmetic against runs: steps and tokens of both strategies, padding and idle slots included."""
    work = Workload(make_prompts([5, 9, 3, 17, 2, 12, 9]), [9, 4, 18, 1, 25, 7, 12], "by hand")
    config = EngineConfig(device="cpu", block_size=4, max_batch_tokens=256, speculate="off")
    for count, name in ((count_static, "static"), (count_continuous, "continuous")):
        record = Experiment(loaded(make_network("llama")), config, work, 3).measure(STRATEGIES[name])
        tokens = record.tokens("prefill", "decode", "padding", "idle")
        assert count(work, 3) == (len(record.steps), tokens), name
    # By hand: batches of 18, 25 and 12 steps; slots that end after 9 + 7 + 12, 4 + 1 + 25 and 18 steps.
    assert (count_static(work, 3)[0], count_continuous(work, 3)[0]) == (55, 30)
    assert expected_gain(work, 3)["by_steps"] == 55 / 30


def test_factors_of_a_gain() -> None:
    """Guards each factor, by hand: two slots, outputs of 3, 2 and 1 tokens, and a step of 2 s, a quarter padding."""
    gain = gain_of(static_record(), continuous_record(), WORK)
    assert gain == {
        "measured": 8 / 6,
        "slots": 4 / 3,  # 6 tokens of output fill two slots for 3 steps
        "padding": 8 / 7.5,
        "tail": 1,
        "step_time": (7.5 / 4) / (6 / 3),
    }
    assert "1.33 × as fast as static batches: 1.33 by slots" in gain_sentence(gain)


def options_of(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> BenchOptions:
    """The options as the command has them when it begins to measure."""
    found: list[BenchOptions] = []
    monkeypatch.setattr(command, "_measure", found.append)
    assert run_command(["bench", *arguments]) == 0
    return found[0]


def test_defaults_of_experiments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards presets and skewed lengths: their own defaults, which what is typed overrides."""
    usual = options_of([], monkeypatch)
    assert (usual.skew, usual.requests, usual.rounds, usual.engine.speculate) == (None, 32, 3, "auto")
    skewed = options_of(["--preset", "skewed"], monkeypatch)
    assert (skewed.skew, skewed.requests, skewed.batch_size) == (1.0, 384, 16)
    assert (skewed.strategies, skewed.input_len, skewed.output_len) == (["static", "continuous"], "24", "32")
    assert options_of(["--speculate", "off"], monkeypatch).strategies == ["none", "static", "continuous"]
    other = options_of(["--preset", "skewed", "--skew", "0", "--output-len", "9"], monkeypatch)
    assert (other.skew, other.requests, other.output_len) == (0.0, 384, "9")
    assert options_of(["--preset", "article"], monkeypatch).output_len == "32"
    assert options_of(["--users", "4"], monkeypatch).rounds == 1
    assert options_of(["--users", "32,4,32", "--rounds", "2"], monkeypatch).users == (4, 32)


def test_lists_complete_in_a_shell() -> None:
    """Guards completion of names in lists: the last one, by what the list lacks, without torch."""

    def complete(option: str, typed: str) -> list[str]:
        parameter: Any = next(one for one in command.bench.params if option in one.opts)
        return [item.value for item in parameter.shell_complete(click.Context(command.bench), typed)]

    names = ["kv-cache", "chunked-prefill", "ragged", "dynamic"]
    assert complete("--ablate", "") == names
    assert complete("--ablate", "ragged,") == [f"ragged,{name}" for name in names if name != "ragged"]
    assert complete("--strategies", "static,con") == ["static,continuous"] and complete("--peer", "x") == []


def test_names_are_those_of_strategies() -> None:
    """Guards the names that a shell completes against those that there are."""
    from cbatch.cli.bench import options, peers, strategies

    known = strategies.STRATEGIES, strategies.ABLATIONS, peers.PEERS
    assert tuple(map(tuple, known)) == (options.STRATEGIES, options.ABLATIONS, options.PEERS)
