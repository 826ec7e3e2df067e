"""The benchmarks of unequal lengths and of single techniques: their figures, from end to end."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from cbatch import Engine, EngineConfig, SamplingParams
from cbatch.cli.bench.strategies import Experiment
from cbatch.cli.bench.workload import Workload
from scripts.benchmarks import techniques
from scripts.benchmarks.harness import main
from tests.support.tiny_models import loaded, make_network


@pytest.mark.slow
def test_the_curve(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards the experiment as people run it: a point for each skew, with all rounds."""
    sizes = ["--input-len", "5", "--output-len", "6", "--requests", "12", "--batch-size", "3", "--rounds", "2"]
    assert main(["skew", "--skews", "0", "1.5", *sizes, "--model", str(model_folder), "--json"]) == 0
    points = json.loads(capsys.readouterr().out)["points"]
    assert [point["skew"] for point in points] == [0, 1.5]
    for point in points:
        gain = point["gain"]
        assert len(point["gain_of_rounds"]) == 2 and gain["measured"] in point["gain_of_rounds"]
        factors = math.prod(gain[name] for name in ("slots", "padding", "tail", "step_time"))
        assert factors == pytest.approx(gain["measured"])
        assert point["static_s"] / point["continuous_s"] == pytest.approx(gain["measured"])
    assert points[0]["expected"]["by_steps"] == 1 < points[1]["expected"]["by_steps"]


@pytest.mark.slow
def test_memory_of_a_long_prompt() -> None:
    """Guards the table of chunks: memory grows with the chunk, also after larger steps, whose memory a model keeps."""
    with Engine(EngineConfig(device="cpu", max_batch_tokens=2048, kv_blocks=128)) as engine:
        engine.generate([[7] * 600, [8] * 600], {"max_tokens": 2})  # a larger step of another strategy
        found = techniques.prompt_memory(Experiment(engine.loaded, engine.config, Workload([], [], ""), 1), 1024)
    sizes = [(entry["prompt_tokens"], entry["tokens_a_step"]) for entry in found]
    assert sizes == [(1023, 64), (1023, 256), (1023, 1023)]
    small, middle, whole = (entry["peak_bytes"] for entry in found)
    assert whole > 1.8 * small and whole > 1.7 * middle, found


def test_the_time_of_a_token_is_that_of_a_step() -> None:
    """Guards the time of a token: steps of one token each are timed, so the engine may not draft."""
    config = EngineConfig(device="cpu", block_size=4, max_batch_tokens=64, speculate=4)
    experiment = Experiment(loaded(make_network("llama", vocab_size=8)), config, Workload([], [], ""), 1)
    with techniques._engine(experiment, 100, 100) as engine:
        engine.add([1] * 64, SamplingParams(max_tokens=20, ignore_eos=True))
        steps = [engine.step() for _ in range(20)]
    assert [len(events) for events in steps] == [1] * 20


@pytest.mark.slow
def test_techniques_are_measured(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards both tables, of a context that doubles twice."""
    assert main(["techniques", "--model", str(model_folder), "--kv-blocks", "20"]) == 0
    first = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line]
    assert first[0] == "tokens" and first[-4] == "context" and first[-2:] == ["64", "128"]
