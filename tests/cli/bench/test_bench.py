"""The bench: tokens of strategies counted by hand, times on a simulated clock, and the command as people use it."""

from __future__ import annotations

import gzip
import json
import random
import weakref
from dataclasses import replace
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from cbatch.api import Engine
from cbatch.base.config import EngineConfig
from cbatch.base.errors import ConfigError
from cbatch.cli.bench import comparison, recorder
from cbatch.cli.bench.comparison import MeasuredRun, compare_outputs, median_run, run_figures
from cbatch.cli.bench.recorder import RunRecord, RunRecorder, count_drafts
from cbatch.cli.bench.strategies import ABLATIONS, STRATEGIES, Experiment
from cbatch.cli.bench.workload import (
    LengthDistribution,
    Workload,
    open_prompts,
    read_workload,
    synthetic_workload,
)
from cbatch.cli.main import run_command
from tests.support.tiny_models import generate_alone, loaded, make_engine, make_network, make_prompts

ALL = STRATEGIES | ABLATIONS


@cache
def network() -> Any:
    return make_network("llama")


MIXED = Workload(make_prompts([5, 40, 3, 17, 2, 25, 9]), [9, 4, 18, 1, 25, 7, 12], "by hand")


def measure(name: str, work: Workload) -> RunRecord:
    config = EngineConfig(block_size=4, device="cpu", max_batch_tokens=16)
    return Experiment(loaded(network()), config, work, 3).measure(ALL[name])


@cache
def mixed(name: str) -> RunRecord:
    return measure(name, MIXED)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_every_strategy_gives_what_generate_gives(name: str) -> None:
    """Guards the comparison: the same tokens whatever is switched off, and all work is accounted for."""
    work, record = MIXED, mixed(name)
    assert record.outputs == generate_alone(network(), work.prompts, work.output_lengths)
    assert [request.wanted for request in record.requests] == work.output_lengths
    assert max(step.useful_slots for step in record.steps) <= 3
    assert all((request.first or 1e99) <= (request.last or 0) for request in record.requests)
    if name not in ("static", "kv-cache", "ragged"):
        # The first token of a row comes with its prompt, and the last one is computed no more.
        assert record.tokens("prefill") == work.prompt_tokens
        assert record.tokens("decode") == work.output_tokens - len(work.output_lengths)
        assert record.tokens("padding", "idle") == 0


def test_a_static_batch_waits_for_its_slowest() -> None:
    """Guards the counts, done by hand: outputs of 8, 50 and 18 tokens are 150 slot-steps, of which 74 are wasted.

    Prompts are padded to the longest: 18 tokens, of which 4 are padding.
    """
    work = Workload(make_prompts([6, 2, 6]), [8, 50, 18], "by hand")
    record = measure("static", work)
    figures = run_figures(record, work)
    assert sum(len(request.tokens) for request in record.requests) == 150
    assert figures["wasted_output_share"] == 74 / 150 and figures["padded_token_share"] == 4 / 18
    assert (record.tokens("prefill"), record.tokens("padding")) == (14, 4)
    assert (record.tokens("decode"), record.tokens("idle")) == (7 + 49 + 17, 74)
    useful = sum(step.useful_slots for step in record.steps)
    assert figures["idle_slot_share"] == pytest.approx(1 - useful / (3 * len(record.steps)))


@pytest.mark.slow
def test_what_each_technique_saves() -> None:
    """Guards the ablations: each switches off what it says, and nothing else."""
    work, records = MIXED, {name: mixed(name) for name in ALL}
    computed = {name: run_figures(record, work)["tokens_computed"] for name, record in records.items()}
    recomputed = sum(
        sum(range(len(prompt), len(prompt) + length))
        for prompt, length in zip(work.prompts, work.output_lengths, strict=True)
    )
    assert computed["kv-cache"] == recomputed > 5 * computed["continuous"]
    assert max(step.tokens("prefill") for step in records["chunked-prefill"].steps) >= 40
    assert max(step.tokens("prefill") for step in records["continuous"].steps) <= 16
    assert records["ragged"].tokens("padding") > work.prompt_tokens and records["dynamic"].tokens("padding") == 0
    assert len(records["dynamic"].steps) > len(records["continuous"].steps)
    assert sum(step.useful_slots for step in records["none"].steps) == len(records["none"].steps)


def test_times_are_those_of_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards all times, on a clock that moves one second whenever it is read."""
    ticks = count()
    monkeypatch.setattr("cbatch.engine.loop.clock", lambda: float(next(ticks)))
    engine = make_engine(network(), max_batch_tokens=64)
    monkeypatch.setattr(recorder, "clock", lambda: float(next(ticks)))
    recording = RunRecorder(engine, [2, 1], 2)
    for index, prompt in enumerate(make_prompts([5, 6])):
        recording.add(index, prompt, [2, 1][index])
    recording.run()
    record = recording.finish()
    # Began at 0; a step looks at the clock at its start, around the model, and at its end.
    assert [(step.start, step.model_s, step.end) for step in record.steps] == [(1, 1, 4), (5, 1, 8)]
    assert [(request.first, request.last) for request in record.requests] == [(4, 8), (4, 4)] and record.elapsed_s == 9
    work = Workload(make_prompts([5, 6]), [2, 1], "by hand")
    found = run_figures(record, work)
    assert found["tpot_s"] == {"p50": 4.0, "p90": 4.0, "p99": 4.0} and found["model_s"] == 2
    assert found["output_tokens_per_s"] == 3 / 9 and found["outside_model_share"] == 1 - 2 / 6
    assert engine.on_step is None


def test_differences_are_found() -> None:
    """Guards the comparison of outputs against missing a token that differs, and the median of rounds."""
    outputs = [[1, 2, 3], [4], [5, 6]]
    assert compare_outputs(outputs, outputs) == {"equal_rows_share": 1.0, "first_difference": None}
    difference = compare_outputs(outputs, [[1, 2, 3], [4], [5, 7]])
    assert difference == {"equal_rows_share": 1 - 1 / 3, "first_difference": {"row": 2, "token": 1}}
    runs = [MeasuredRun([], {"elapsed_s": seconds}) for seconds in (2.0, 1.0, 2.0)]
    assert median_run(runs) is runs[0]


@pytest.mark.parametrize("distribution", ["fixed", "uniform", "lognormal", "loguniform"])
def test_lengths_keep_to_their_ends(distribution: Any) -> None:
    """Guards synthetic lengths: within the range, spread over it, and the same for the same seed."""
    draw = LengthDistribution(8, 256, distribution).sampler(random.Random(1))
    lengths = [draw() for _ in range(2000)]
    assert min(lengths) >= 8 and max(lengths) <= 256
    middle = {"fixed": 256, "uniform": 132, "lognormal": 27, "loguniform": 45}[distribution]
    assert abs(sorted(lengths)[1000] - middle) < 0.15 * middle
    make = lambda seed: synthetic_workload(5, LengthDistribution(4, 9), LengthDistribution(2, 6), 50, 100, seed)  # noqa: E731
    assert make(1) == make(1) != make(2)


@pytest.mark.slow
def test_the_command_speaks_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards the contract of --json, with prompts from a file whose outputs end by themselves.

    transformers loads no second copy of the model, and the cache of the engine that read the prompts is freed: it
    would count as memory of the strategies, and a GPU has no room for both.
    """
    rows = [{"prompt": "hello"}, {"messages": [{"role": "user", "content": "world"}], "max_tokens": 3}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows * 3))
    caches: list[Any] = []
    opened, measured = comparison.open_engine, comparison.turns

    def watch(*arguments: Any, **options: Any) -> Any:
        engine = opened(*arguments, **options)
        caches.append(weakref.ref(engine.core.runner.kv_cache))
        return engine

    def check(*arguments: Any) -> Any:
        assert caches[0]() is None
        return measured(*arguments)

    monkeypatch.setattr(comparison, "open_engine", watch)
    monkeypatch.setattr(comparison, "turns", check)
    monkeypatch.setattr("cbatch.model.loader.load_network", lambda plan: pytest.fail("transformers loads the model"))
    options = ["--json", "--rounds", "1", "--batch-size", "2", "--ablate", "dynamic", "--dtype", "float32"]
    assert run_command(["bench", str(tmp_path / "in.jsonl"), *options]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["machine"]["device"] and data["work"]["requests"] == 6 and data["work"]["slots"] == 2
    assert [one["strategy"] for one in data["strategies"]] == ["none", "static", "continuous", "drafts", "no-dynamic"]
    for one in data["strategies"]:
        assert one["elapsed_s"] > 0 and one["steps"] > 0 and one["equal_rows_share"] == 1.0
        assert one["ttft_s"].keys() == one["tpot_s"].keys() == {"p50", "p90", "p99"}
    assert data["gain"]["measured"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--strategies", "none,quick"], "quick is not"),
        (["--ablate", "all"], "all is not"),
        (["--peer", "vllm"], "vllm is not"),
        (["--users", "3", "--duration", "60"], "is not a duration"),
        (["missing.jsonl", "--users", "3"], "users ask synthetic questions"),
        (["--users", "3", "--ablate", "ragged"], "go with strategies"),
        (["--users", "3", "--slo-tps", "nan"], "nan is no finite number"),
        (["--max-seqs", "3"], "--batch-size sets"),
        (["--strategies", "none,drafts", "--speculate", "off"], "which --speculate off forbids"),
        (["--report", "no/such.html"], "Cannot write no/such.html"),
        (["--kv-blocks", "6", "--input-len", "8:40", "--output-len", "9"], "does not hold a static batch"),
        *((["--input-len", text], "not a range") for text in ("x", "9:3", "0:4", "1:2:3")),
        (["--output-len", "4000"], "context holds"),
        (["missing.jsonl"], "No such file"),
        (["--skew", "5"], "5.0 is not in the range 0<=x<=4"),
        (["--skew", "nan"], "nan is no finite number"),
        (["--skew", "1", "--input-len", "3:9"], "as one number each"),
        (["--skew", "1", "--users", "3"], "--skew goes with strategies, not with users"),
        (["--users", "3", "--plot", "p"], "There is no picture of one number of users"),
        (["--skew", "1", "rows.jsonl"], "The rows of a file have lengths of their own"),
        (["--skew", "3", "--output-len", "300"], "The longest request has"),
        (["--users", "1,x"], "'1,x' is no number of users, nor a list such as 1,8,32"),
        (["--users", "1,2", "--find-capacity"], "--find-capacity takes one number of --users"),
    ],
)
def test_usage_errors(
    arguments: list[str], message: str, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards usage errors: a sentence and exit code 2."""
    assert run_command(["bench", *arguments, "-m", str(model_folder)]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_everything_at_once(model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards the command as people use it: tables, a peer, pictures and the page."""
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    options = ["--rounds", "1", "--requests", "4", "--batch-size", "2", "--input-len", "8:40", "--output-len", "2:9"]
    options += ["--ablate", "kv-cache,chunked-prefill,ragged,dynamic", "--peer", "transformers-generate"]
    options += ["--plot", str(tmp_path / "plots"), "--report", str(tmp_path / "r.html"), "--dtype", "float32"]
    assert run_command(["bench", *options, "-m", str(model_folder)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    words = "static batches", "transformers-generate", "without KV cache", "The roofline allows"
    assert all(one in shown for one in words)
    assert shown.count("100%") >= 8
    plots = {path.name for path in (tmp_path / "plots").iterdir()}
    assert plots == {f"{name}{end}.svg" for name in ("timeline", "speed") for end in ("", "-dark")}
    assert 2 * (tmp_path / "r.html").read_text().count("<img") == len(plots)


def test_prompts_in_other_forms(model_folder: Path, tmp_path: Path) -> None:
    """Guards files of prompts as `cbatch run` reads them: compressed, arrays and tables; a mistake names the remedy."""
    rows = [{"prompt": "hello", "max_tokens": 2}, {"prompt": "world", "max_tokens": 3}]
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    (tmp_path / "b.csv").write_text("prompt,max_tokens\nhello,2\nworld,3\n")
    (tmp_path / "c.jsonl").write_text(json.dumps(rows))
    with Engine(EngineConfig(model=str(model_folder))) as engine:
        works = [read_workload(str(tmp_path / name), engine) for name in ("a.jsonl.gz", "b.csv")]
        works.append(read_workload(str(tmp_path / "c.jsonl"), engine, "json"))
    assert len({(str(work.prompts), str(work.output_lengths)) for work in works}) == 1 and len(works[0].prompts) == 2
    remedy = pytest.raises(ConfigError, match=r"c\.jsonl cannot be read: it is a JSON array: --format json reads one")
    with remedy, open_prompts(str(tmp_path / "c.jsonl")):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("search", [[], ["--find-capacity"]])
def test_load_is_measured(search: list[str], model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards the other half: users who arrive, ask and think, and the search for the most of them."""
    options = ["--users", "2", "--rate", "50", "--duration", "800ms", "--think", "20ms", "--slo-tps", "1", "--json"]
    lengths = ["--input-len", "20", "--output-len", "2:5", "--turns", "3", "--dtype", "float32"]
    assert run_command(["bench", *options, *lengths, *search, "-m", str(model_folder)]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["work"]["slo_ttft_s"] == 0.5
    if search:
        assert data["capacity_users"] <= 2 and data["points"][0]["users"] == 1
    else:
        assert data["load"]["users"] == 2 and data["load"]["answers"] > 2 and data["load"]["errors"] == 0
        assert data["load"]["cached_tokens"] > 0


DRAFTED = Workload([[1, 2, 3], [4, 5, 6, 7, 0, 1], [2, 4]], [30, 12, 24], "by hand")


@cache
def repeating() -> Any:
    """Of so few tokens that its outputs repeat themselves."""
    return make_network("llama", vocab_size=8)


def drafting() -> Experiment:
    config = EngineConfig(device="cpu", block_size=4, max_batch_tokens=64, speculate=4)
    return Experiment(loaded(repeating()), config, DRAFTED, 3)


@pytest.mark.parametrize("name", ["static", "drafts"])
def test_drafted_tokens_are_accounted_for(name: str) -> None:
    """Guards the counts: a chunk with a draft is output and no prompt, and it gives one token and those accepted."""
    record = drafting().measure(replace(ALL[name], has_drafts=True))
    drafted, accepted = count_drafts(record.steps)
    assert record.outputs == generate_alone(repeating(), DRAFTED.prompts, DRAFTED.output_lengths)
    assert 0 < accepted < drafted
    assert record.tokens("prefill") == DRAFTED.prompt_tokens
    chunks = [chunk for step in record.steps for chunk in step.chunks if chunk.kind == "decode"]
    for index, request in enumerate(record.requests):
        own = [chunk for chunk in chunks if chunk.request == index]
        assert all(chunk.tokens == 1 + chunk.drafted for chunk in own)
        assert 1 + sum(1 + chunk.accepted for chunk in own) >= request.wanted
        if name != "static":  # where requests run on past their ends
            assert 1 + sum(1 + chunk.accepted for chunk in own) == request.wanted == len(request.tokens)
    figures = run_figures(record, DRAFTED)
    assert (figures["drafted_tokens"], figures["accepted_tokens"]) == (drafted, accepted)


def test_drafts_are_a_row_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards the comparison of strategies, which drafts would blur: only their own row has some."""
    repeating().save_pretrained(tmp_path)
    options = ["--speculate", "6", "--rounds", "1"]
    options += ["--requests", "3", "--input-len", "9:20", "--output-len", "60", "-m", str(tmp_path)]
    assert run_command(["bench", "--json", *options]) == 0
    found = {one["strategy"]: one for one in json.loads(capsys.readouterr().out)["strategies"]}
    with_drafts, without = found.pop("drafts"), found["continuous"]
    assert 0 < with_drafts["accepted_tokens"] <= with_drafts["drafted_tokens"]
    assert with_drafts["steps"] < without["steps"] and with_drafts["equal_rows_share"] == 1.0
    assert list(found) == ["none", "static", "continuous"]
    assert not any(one["drafted_tokens"] for one in found.values())
