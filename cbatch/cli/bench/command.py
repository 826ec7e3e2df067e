"""`cbatch bench`: the same work one by one, in static batches and by continuous batching, side by side."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click
from click.core import ParameterSource

from cbatch.cli.common.console import emit, notice
from cbatch.cli.common.loading import open_engine
from cbatch.cli.common.options import engine_config, engine_options, model_options
from cbatch.engine import ConfigError

if TYPE_CHECKING:
    from cbatch.cli.bench.compare import OnProgress
    from cbatch.cli.bench.recorder import RunRecord
    from cbatch.cli.bench.strategies import Strategy
    from cbatch.cli.bench.workload import LengthDistribution, Workload
    from cbatch.engine import Engine

ARTICLE = {"requests": 8, "input_len": "8:128", "output_len": "32", "batch_size": 4}
"""Eight users who get 32 tokens each, with half as many slots."""


def _names(ctx: click.Context, option: click.Parameter, value: str) -> list[str]:
    """A list of names with commas between them, each once."""
    return list(dict.fromkeys(name.strip() for name in value.split(",") if name.strip()))


@click.command("bench")
@click.argument("prompts", metavar="[PROMPTS.jsonl]", required=False)
@click.option("--strategies", default="none,static,continuous", show_default=True, callback=_names, metavar="LIST")
@click.option("--ablate", default="", callback=_names, metavar="LIST", help="kv-cache,chunked-prefill,ragged,dynamic")
@click.option("--peer", default="", callback=_names, metavar="LIST", help="transformers-generate,transformers-cb")
@click.option("--batch-size", type=click.IntRange(1), default=8, show_default=True, help="Slots of every strategy.")
@click.option("--requests", type=click.IntRange(1), default=32, show_default=True, help="Rows of synthetic work.")
@click.option("--input-len", default="16:256", show_default=True, metavar="LO:HI", help="Tokens of prompts.")
@click.option("--output-len", default="8:256", show_default=True, metavar="LO:HI", help="Tokens of outputs.")
@click.option(
    "--distribution",
    type=click.Choice(["loguniform", "lognormal", "uniform", "fixed"]),
    default="loguniform",
    show_default=True,
    help="Of lengths between their ends.",
)
@click.option(
    "--preset", type=click.Choice(["article"]), help="The experiment of the articles: 8 users, 32 tokens each."
)
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, help="Alternating; medians count.")
@click.option("--seed", type=int, default=7, show_default=True, help="Of synthetic work.")
@click.option("--users", type=click.IntRange(1), help="Load: so many users at once, in place of the strategies.")
@click.option("--rate", type=click.FloatRange(0, min_open=True), default=4.0, show_default=True, help="Users a second.")
@click.option(
    "--duration",
    default="60s",
    show_default=True,
    metavar="TIME",
    help="Of the load; of each probe of a search, 20s at most.",
)
@click.option("--think", default="2s", show_default=True, metavar="TIME", help="Mean pause of a user between turns.")
@click.option("--turns", type=click.IntRange(1), default=1, show_default=True, help="Questions of one conversation.")
@click.option("--slo-ttft", default="500ms", show_default=True, metavar="TIME", help="Level: first token within this.")
@click.option(
    "--slo-tps", type=click.FloatRange(0), default=50.0, show_default=True, help="Level: tokens a second for each user."
)
@click.option(
    "--find-capacity", is_flag=True, help="Search for the most users, up to --users, that the level holds for."
)
@click.option("--plot", metavar="DIR", help="Write pictures there (SVG).")
@click.option("--report", metavar="FILE", help="Write one HTML page with tables and pictures.")
@click.option("--json", is_flag=True, help="One JSON object on stdout.")
@click.option("-q", "--quiet", is_flag=True, help="No progress.")
@model_options
@engine_options()
def bench(**options: Any) -> Literal[0]:
    """Measure what continuous batching gives, on this machine, this model, and your prompts or synthetic ones.

    Every strategy does the same work on the same model with the same kernels and slots. Padding and idle slots are
    real dummy tokens in the same steps, so that nothing but the strategy differs.
    """
    given = click.get_current_context().get_parameter_source
    if options["preset"] == "article":
        options |= {name: value for name, value in ARTICLE.items() if given(name) is ParameterSource.DEFAULT}
    strategies = _chosen(options)
    is_load = options["find_capacity"] or options["users"] is not None
    if is_load:
        _check_load(options)
    elif options["max_seqs"] is not None:
        raise ConfigError("--batch-size says how many slots there are; --max-seqs is for a load (--users).")
    _check_targets(options)
    on_progress: OnProgress = (lambda text: None) if options["quiet"] or options["json"] else notice
    if is_load:
        _serve(options, on_progress)
    else:
        _compare(strategies, options, on_progress)
    return 0


def _check_targets(options: dict[str, Any]) -> None:
    """Raises ConfigError before all the work where what it is for could not be written after it."""
    if not options["plot"] and not options["report"]:
        return
    from cbatch.cli.bench.render.style import require_matplotlib

    require_matplotlib()
    try:
        if options["plot"]:
            Path(options["plot"]).mkdir(parents=True, exist_ok=True)
        if options["report"]:
            Path(options["report"]).open("ab").close()
    except OSError as error:
        raise ConfigError(f"Cannot write {error.filename}: {error.strerror}.") from error


def _open(options: dict[str, Any]) -> Engine:
    return open_engine(engine_config(options), quiet=options["quiet"] or options["json"])


def _chosen(options: dict[str, Any]) -> dict[str, Strategy]:
    """The strategies that are asked for, by name."""
    from cbatch.cli.bench.peers import PEERS
    from cbatch.cli.bench.strategies import ABLATIONS, STRATEGIES

    for option, known in (("strategies", STRATEGIES), ("ablate", ABLATIONS), ("peer", PEERS)):
        wrong = [name for name in options[option] if name not in known]
        if wrong:
            raise ConfigError(f"--{option} is a list of {', '.join(known)}; {', '.join(wrong)} is not one of them.")
    if not options["strategies"]:
        raise ConfigError(f"--strategies is a list of {', '.join(STRATEGIES)}, and it is empty.")
    found = {name: STRATEGIES[name] for name in options["strategies"]}
    if options["ablate"]:
        found.setdefault("continuous", STRATEGIES["continuous"])
    return found | {f"no-{name}": ABLATIONS[name] for name in options["ablate"]}


def _lengths(options: dict[str, Any]) -> tuple[LengthDistribution, LengthDistribution]:
    """Of prompts and of outputs."""
    from cbatch.cli.bench.workload import LengthDistribution, parse_length_range

    inputs, outputs = (parse_length_range(options[name]) for name in ("input_len", "output_len"))
    return LengthDistribution(*inputs, options["distribution"]), LengthDistribution(*outputs, options["distribution"])


def _work(options: dict[str, Any], engine: Engine) -> Workload:
    from cbatch.cli.bench.workload import read_workload, synthetic_workload

    if options["prompts"] is not None:
        return read_workload(options["prompts"], engine)
    context = engine.scheduler.room.longest
    return synthetic_workload(
        options["requests"], *_lengths(options), engine.model.vocab_size, context, options["seed"]
    )


def _compare(strategies: dict[str, Strategy], options: dict[str, Any], on_progress: OnProgress) -> None:
    from cbatch.cli.bench.compare import DeviceProfile, compare, techniques
    from cbatch.cli.bench.output import machine_and_model, print_comparison
    from cbatch.cli.bench.strategies import Experiment

    with _open(options) as engine:
        data = machine_and_model(engine)
        work = _work(options, engine)
        device = DeviceProfile.of(engine)
        # The same cache for all, however many seats they have.
        config = replace(engine.config, kv_blocks=engine.block_pool.num_blocks, kv_cache_memory=None)
        experiment = Experiment(engine.loaded, config, work, options["batch_size"])
    found = compare(experiment, device, strategies, options["peer"], options["rounds"], on_progress)
    data["work"] = {
        "source": work.source,
        "requests": len(work.prompts),
        "prompt_tokens": work.prompt_tokens,
        "output_tokens": work.output_tokens,
        "slots": options["batch_size"],
        "rounds": options["rounds"],
    }
    data |= {"strategies": found.strategies, "roofline": found.roofline}
    if measured := techniques(experiment, device, options["ablate"], on_progress):
        data["techniques"] = measured
    if options["json"]:
        emit(json.dumps(data, indent=2))
    else:
        print_comparison(data, found.records)
    _keep(data, found.records, options)


def _check_load(options: dict[str, Any]) -> None:
    from cbatch.cli.bench.load.users import parse_duration

    if options["prompts"] is not None:
        raise ConfigError("Prompts of a file are for strategies; users ask synthetic questions (--input-len).")
    if options["ablate"] or options["peer"]:
        raise ConfigError("--ablate and --peer go with strategies, not with users.")
    if not all(math.isfinite(options[name]) for name in ("rate", "slo_tps")):
        raise ConfigError("--rate and --slo-tps must be numbers.")
    for name in ("duration", "think", "slo_ttft"):
        parse_duration(options[name])


def _serve(options: dict[str, Any], on_progress: OnProgress) -> None:
    from cbatch.cli.bench.load.measure import PROBE_S, serve
    from cbatch.cli.bench.load.users import SLO, Scenario, parse_duration
    from cbatch.cli.bench.output import machine_and_model, print_load

    inputs, outputs = _lengths(options)
    duration_s = parse_duration(options["duration"])
    slo = SLO(parse_duration(options["slo_ttft"]), options["slo_tps"])
    with _open(options) as engine:
        scenario = Scenario(
            users=options["users"] or 1024,
            rate=options["rate"],
            duration_s=min(PROBE_S, duration_s) if options["find_capacity"] else duration_s,
            think_s=parse_duration(options["think"]),
            inputs=inputs,
            outputs=outputs,
            vocabulary=engine.model.vocab_size,
            context=engine.scheduler.room.longest,
            turns=options["turns"],
            seed=options["seed"],
        )
        data = machine_and_model(engine)
        data |= serve(engine, scenario, slo, search=options["find_capacity"], on_progress=on_progress)
    data["work"] = {
        "rate": scenario.rate,
        "duration_s": scenario.duration_s,
        "think_s": scenario.think_s,
        "turns": scenario.turns,
        "input_len": options["input_len"],
        "output_len": options["output_len"],
        "slo_ttft_s": slo.ttft_s,
        "slo_tps": slo.tps,
    }
    if options["json"]:
        emit(json.dumps(data, indent=2))
    else:
        print_load(data)
    _keep(data, {}, options)


def _keep(data: dict[str, Any], records: dict[str, RunRecord], options: dict[str, Any]) -> None:
    """Pictures and the page, where they are asked for."""
    if not options["plot"] and not options["report"]:
        return
    from cbatch.cli.bench.output import write_pictures, write_report

    try:
        pictures = write_pictures(data, records, Path(options["plot"]) if options["plot"] else None)
        if options["report"]:
            write_report(Path(options["report"]), data, pictures)
    except OSError as error:
        raise ConfigError(f"Cannot write {error.filename}: {error.strerror}.") from error
