"""`cbatch bench`: no batching, static batches and continuous batching side by side; or load with many users."""

from __future__ import annotations

import json
from functools import partial
from typing import Any, Literal

import click
from click.core import ParameterSource

from cbatch.cli.bench.options import BenchOptions
from cbatch.cli.common.configured_command import ConfiguredCommand
from cbatch.cli.common.console import emit, notice
from cbatch.cli.common.options import engine_options, make_options, model_options, replica_options

ARTICLE = {"requests": 8, "input_len": "8:128", "output_len": "32", "batch_size": 4}
"""Eight users who get 32 tokens each, with half as many slots."""


UNASKED = (ParameterSource.DEFAULT, ParameterSource.DEFAULT_MAP)
"""Where values come from that a preset overrides: the built-in defaults and the configuration file."""


def _names(ctx: click.Context, option: click.Parameter, value: str) -> list[str]:
    """The names in a list with commas, each once."""
    return list(dict.fromkeys(name.strip() for name in value.split(",") if name.strip()))


option = partial(click.option, show_default=True)


@click.command("bench", cls=ConfiguredCommand)
@click.argument("prompts", metavar="[PROMPTS.jsonl]", required=False)
@option(
    "--strategies", default="none,static,continuous", callback=_names, metavar="LIST", help="Strategies to compare."
)
@click.option(
    "--ablate",
    default="",
    callback=_names,
    metavar="LIST",
    help="Switch off techniques, one at a time: kv-cache,chunked-prefill,ragged,dynamic,speculation.",
)
@click.option(
    "--peer",
    default="",
    callback=_names,
    metavar="LIST",
    help="Compare with transformers too: transformers-generate,transformers-cb.",
)
@option("--batch-size", type=click.IntRange(1), default=8, help="Slots of every strategy.")
@option("--requests", type=click.IntRange(1), default=32, help="Synthetic requests.")
@option("--input-len", default="16:256", metavar="LO:HI", help="Prompt lengths in tokens.")
@option("--output-len", default="8:256", metavar="LO:HI", help="Output lengths in tokens.")
@option(
    "--distribution",
    type=click.Choice(["loguniform", "lognormal", "uniform", "fixed"]),
    default="loguniform",
    help="How lengths are spread between LO and HI.",
)
@click.option("--preset", type=click.Choice(["article"]), help="The articles' experiment: 8 users, 32 tokens each.")
@option("--rounds", type=click.IntRange(1), default=3, help="Runs of every strategy, by turns; the median counts.")
@option("--seed", type=int, default=7, help="Seed of synthetic prompts and users.")
@click.option(
    "--users",
    type=click.IntRange(1),
    help="Measure load with this many users, instead of strategies; with --find-capacity, the most to try "
    "[default then: 1,024].",
)
@option("--rate", type=click.FloatRange(0, min_open=True), default=4.0, help="Users who arrive in a second.")
@option(
    "--duration",
    default="60s",
    metavar="TIME",
    help="Duration of the load; with --find-capacity, of each probe (20s at most).",
)
@option("--think", default="2s", metavar="TIME", help="Mean pause of a user between turns.")
@option("--turns", type=click.IntRange(1), default=1, help="Questions in a conversation.")
@option("--slo-ttft", default="500ms", metavar="TIME", help="SLO: time to the first token.")
@option("--slo-tps", type=click.FloatRange(0), default=50.0, help="SLO: tokens a second for each user.")
@click.option("--find-capacity", is_flag=True, help="Search for the most users, up to --users, for whom the SLO holds.")
@click.option("--plot", metavar="DIR", help="Write pictures to this folder (SVG; needs cbatch[plot]).")
@click.option("--report", metavar="FILE", help="Write one HTML page with tables and pictures (needs cbatch[plot]).")
@click.option("--json", is_flag=True, help="Print one JSON object to stdout.")
@click.option("-q", "--quiet", is_flag=True, help="Show no progress.")
@model_options
@engine_options(max_seqs="Most requests that run at once; only with --users or --find-capacity.")
@replica_options
def bench(**values: Any) -> Literal[0]:
    """Measure what continuous batching gives on this machine and model, with your prompts or synthetic ones.

    Every strategy does the same work on the same model with the same kernels and slots. Padding and idle slots are
    real tokens in the same steps, so that only the strategy differs.
    """
    given = click.get_current_context().get_parameter_source
    if values["preset"] == "article":
        values |= {name: value for name, value in ARTICLE.items() if given(name) in UNASKED}
    options = make_options(BenchOptions, values)
    options.check()
    from cbatch.cli.bench import output
    from cbatch.cli.bench.compare import measure_comparison
    from cbatch.cli.bench.load.generator import measure_load

    measure = measure_load if options.is_load else measure_comparison
    report = measure(options, (lambda text: None) if options.is_silent else notice)
    if options.json:
        emit(json.dumps(report.to_json(), indent=2))
    else:
        output.print_report(report)
    output.write_files(report)
    return 0
