"""`cbatch bench`: no batching, static batches and continuous batching side by side; or load with many users."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click
from click.core import ParameterSource

from cbatch.cli.bench.options import BenchOptions
from cbatch.cli.common.console import emit, notice
from cbatch.cli.common.loading import open_engine
from cbatch.cli.common.options import engine_options, make_options, model_options
from cbatch.engine import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cbatch.cli.bench.compare import OnProgress
    from cbatch.cli.bench.load.results import Capacity, LoadResult
    from cbatch.cli.bench.load.scenario import Scenario
    from cbatch.cli.bench.output import Report
    from cbatch.cli.bench.recorder import RunRecord
    from cbatch.cli.bench.workload import Workload
    from cbatch.engine import Engine

ARTICLE = {"requests": 8, "input_len": "8:128", "output_len": "32", "batch_size": 4}
"""Eight users who get 32 tokens each, with half as many slots."""

MAX_PROBE_S = 20.0
"""The longest probe of a search, in seconds."""

DEFAULT_MAX_USERS = 1024


def _names(ctx: click.Context, option: click.Parameter, value: str) -> list[str]:
    """The names in a list with commas, each once."""
    return list(dict.fromkeys(name.strip() for name in value.split(",") if name.strip()))


@click.command("bench")
@click.argument("prompts", metavar="[PROMPTS.jsonl]", required=False)
@click.option(
    "--strategies",
    default="none,static,continuous",
    show_default=True,
    callback=_names,
    metavar="LIST",
    help="Strategies to compare.",
)
@click.option(
    "--ablate",
    default="",
    callback=_names,
    metavar="LIST",
    help="Switch off techniques, one at a time: kv-cache,chunked-prefill,ragged,dynamic.",
)
@click.option(
    "--peer",
    default="",
    callback=_names,
    metavar="LIST",
    help="Compare with transformers too: transformers-generate,transformers-cb.",
)
@click.option("--batch-size", type=click.IntRange(1), default=8, show_default=True, help="Slots of every strategy.")
@click.option("--requests", type=click.IntRange(1), default=32, show_default=True, help="Synthetic requests.")
@click.option("--input-len", default="16:256", show_default=True, metavar="LO:HI", help="Prompt lengths in tokens.")
@click.option("--output-len", default="8:256", show_default=True, metavar="LO:HI", help="Output lengths in tokens.")
@click.option(
    "--distribution",
    type=click.Choice(["loguniform", "lognormal", "uniform", "fixed"]),
    default="loguniform",
    show_default=True,
    help="Distribution of lengths over their range.",
)
@click.option("--preset", type=click.Choice(["article"]), help="The articles' experiment: 8 users, 32 tokens each.")
@click.option(
    "--rounds",
    type=click.IntRange(1),
    default=3,
    show_default=True,
    help="Runs of every strategy, by turns; the median counts.",
)
@click.option("--seed", type=int, default=7, show_default=True, help="Seed of synthetic prompts and users.")
@click.option("--users", type=click.IntRange(1), help="Measure load with this many users, instead of strategies.")
@click.option(
    "--rate",
    type=click.FloatRange(0, min_open=True),
    default=4.0,
    show_default=True,
    help="Users who arrive in a second.",
)
@click.option(
    "--duration",
    default="60s",
    show_default=True,
    metavar="TIME",
    help="Duration of the load; in a search, of each probe (20s at most).",
)
@click.option("--think", default="2s", show_default=True, metavar="TIME", help="Mean pause of a user between turns.")
@click.option("--turns", type=click.IntRange(1), default=1, show_default=True, help="Questions in a conversation.")
@click.option("--slo-ttft", default="500ms", show_default=True, metavar="TIME", help="SLO: time to the first token.")
@click.option(
    "--slo-tps", type=click.FloatRange(0), default=50.0, show_default=True, help="SLO: tokens a second for each user."
)
@click.option("--find-capacity", is_flag=True, help="Search for the most users, up to --users, for whom the SLO holds.")
@click.option("--plot", metavar="DIR", help="Write pictures to this folder (SVG).")
@click.option("--report", metavar="FILE", help="Write one HTML page with tables and pictures.")
@click.option("--json", is_flag=True, help="Print one JSON object to stdout.")
@click.option("-q", "--quiet", is_flag=True, help="Show no progress.")
@model_options
@engine_options()
def bench(**values: Any) -> Literal[0]:
    """Measure what continuous batching gives on this machine and model, with your prompts or synthetic ones.

    Every strategy does the same work on the same model with the same kernels and slots. Padding and idle slots are
    real tokens in the same steps, so that only the strategy differs.
    """
    given = click.get_current_context().get_parameter_source
    if values["preset"] == "article":
        values |= {name: value for name, value in ARTICLE.items() if given(name) is ParameterSource.DEFAULT}
    options = make_options(BenchOptions, values)
    options.check()
    on_progress: OnProgress = (lambda text: None) if options.is_silent else notice
    if options.is_load:
        _measure_load(options, on_progress)
    else:
        _compare(options, on_progress)
    return 0


def _workload(options: BenchOptions, engine: Engine) -> Workload:
    from cbatch.cli.bench.workload import read_workload, synthetic_workload

    if options.prompts is not None:
        return read_workload(options.prompts, engine)
    context = engine.limits.sequence.longest
    return synthetic_workload(options.requests, *options.lengths, engine.model.vocab_size, context, options.seed)


def _compare(options: BenchOptions, on_progress: OnProgress) -> None:
    from cbatch.cli.bench.compare import Contenders, DeviceProfile, compare, measure_techniques
    from cbatch.cli.bench.machine import Machine, describe_model
    from cbatch.cli.bench.output import print_comparison
    from cbatch.cli.bench.results import ComparisonReport, WorkSummary
    from cbatch.cli.bench.strategies import Experiment

    with open_engine(options.engine, quiet=options.is_silent) as engine:
        machine, model = Machine.of(engine), describe_model(engine)
        work = _workload(options, engine)
        device = DeviceProfile.of(engine)
        # All strategies get the same cache, however many sequences they run at once.
        config = replace(engine.config, kv_blocks=engine.limits.num_blocks, kv_cache_memory=None)
        experiment = Experiment(engine.loaded, config, work, options.batch_size)
    contenders = Contenders(options.chosen_strategies(), options.peer, options.rounds)
    comparison = compare(experiment, device, contenders, on_progress)
    report = ComparisonReport(
        machine=machine,
        model=model,
        work=WorkSummary(
            source=work.source,
            requests=len(work.prompts),
            prompt_tokens=work.prompt_tokens,
            output_tokens=work.output_tokens,
            slots=options.batch_size,
            rounds=options.rounds,
        ),
        strategies=comparison.results,
        roofline=comparison.roofline,
        techniques=measure_techniques(experiment, device.context, options.ablate, on_progress),
    )
    if options.json:
        emit(json.dumps(report.to_json(), indent=2))
    else:
        print_comparison(report, comparison.records)
    _write_files(report, comparison.records, options)


def _measure_load(options: BenchOptions, on_progress: OnProgress) -> None:
    from cbatch.cli.bench.load.results import LoadReport, LoadSettings
    from cbatch.cli.bench.load.scenario import Scenario, parse_duration
    from cbatch.cli.bench.machine import Machine, describe_model
    from cbatch.cli.bench.output import print_load

    inputs, outputs = options.lengths
    duration_s, slo = parse_duration(options.duration), options.slo
    with open_engine(options.engine, quiet=options.is_silent) as engine:
        scenario = Scenario(
            users=options.users or DEFAULT_MAX_USERS,
            rate=options.rate,
            duration_s=min(MAX_PROBE_S, duration_s) if options.find_capacity else duration_s,
            think_s=parse_duration(options.think),
            inputs=inputs,
            outputs=outputs,
            vocabulary=engine.model.vocab_size,
            context=engine.limits.sequence.longest,
            turns=options.turns,
            seed=options.seed,
        )
        machine, model = Machine.of(engine), describe_model(engine)
        found = _run_users(engine, scenario, options, on_progress)
    settings = LoadSettings(
        rate=scenario.rate,
        duration_s=scenario.duration_s,
        think_s=scenario.think_s,
        turns=scenario.turns,
        input_len=options.input_len,
        output_len=options.output_len,
        slo_ttft_s=slo.ttft_s,
        slo_tps=slo.tps,
    )
    report = LoadReport(machine, model, found, settings)
    if options.json:
        emit(json.dumps(report.to_json(), indent=2))
    else:
        print_load(report)
    _write_files(report, {}, options)


def _run_users(
    engine: Engine, scenario: Scenario, options: BenchOptions, on_progress: OnProgress
) -> LoadResult | Capacity:
    """Runs the load, or searches for the most users for whom the SLO holds."""
    from cbatch.cli.bench.load.capacity import find_capacity
    from cbatch.cli.bench.load.generator import run_load
    from cbatch.engine import EngineThread

    slo = options.slo
    with closing(EngineThread(engine)) as engine_thread:

        def probe(users: int) -> LoadResult:
            on_progress(f"{users} users")
            return run_load(engine_thread, scenario.probe(users, scenario.duration_s), slo)

        if options.find_capacity:
            return find_capacity(probe, most=scenario.users)
        on_progress(f"{scenario.users} users for {scenario.duration_s:g} s")
        return run_load(engine_thread, scenario, slo)


def _write_files(report: Report, records: Mapping[str, RunRecord], options: BenchOptions) -> None:
    """Writes the pictures and the page that were asked for."""
    if not options.plot and not options.report:
        return
    from cbatch.cli.bench.output import draw_pictures, write_page

    try:
        pictures = draw_pictures(report, records, Path(options.plot) if options.plot else None)
        if options.report:
            write_page(Path(options.report), report, pictures)
    except OSError as error:
        raise ConfigError(f"Cannot write {error.filename}: {error.strerror}.") from error
