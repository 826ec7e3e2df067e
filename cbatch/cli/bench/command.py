"""`cbatch bench`: no batching, static batches and continuous batching side by side; or load with many users."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, Protocol, TypeVar

import click
from click.core import ParameterSource

from cbatch.batch.forms import INPUT_FORMS
from cbatch.cli.bench.options import ABLATIONS, PEERS, STRATEGIES, BenchOptions, parse_skews, parse_users
from cbatch.cli.common.configured_command import ConfiguredCommand
from cbatch.cli.common.console import emit, notice
from cbatch.cli.common.options import NameListOption, engine_options, make_options, replica_options

PRESETS: dict[str, dict[str, Any]] = {
    "article": {"requests": 8, "input_len": "8:128", "output_len": "32", "batch_size": 4},
    "skewed": {"skew": (1.0,), "requests": 384, "batch_size": 16, "strategies": ["static", "continuous"]},
}
"""Values of options. article: eight users who get 32 tokens each, with half as many slots."""

SKEWED_WORK = {"requests": 192, "input_len": "24", "output_len": "32", "speculate": "off"}
"""Values of options for lengths that are skewed. Drafts would make the number of steps depend on the model's text."""

UNASKED = (ParameterSource.DEFAULT, ParameterSource.DEFAULT_MAP)
"""Where values come from that a preset overrides: the built-in defaults and the configuration file."""


def _names(ctx: click.Context, option: click.Parameter, value: str) -> list[str]:
    """The names in a list with commas, each once."""
    return list(dict.fromkeys(name.strip() for name in value.split(",") if name.strip()))


option = partial(click.option, show_default=True)
name_list = partial(click.option, cls=NameListOption, callback=_names, metavar="LIST")


@click.command("bench", cls=ConfiguredCommand)
@click.argument("prompts", metavar="[PROMPTS.jsonl]", required=False)
@click.option("--format", type=click.Choice(INPUT_FORMS), help="Form of PROMPTS [default: by its ending, else jsonl].")
@name_list(
    "--strategies",
    names=STRATEGIES,
    default="none,static,continuous",
    show_default=True,
    help="Strategies to compare.",
)
@name_list(
    "--ablate",
    names=ABLATIONS,
    default="",
    help=f"Switch off techniques, one at a time: {','.join(ABLATIONS)}.",
)
@name_list("--peer", names=PEERS, default="", help=f"Compare with transformers too: {','.join(PEERS)}.")
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
@click.option(
    "--skew",
    callback=parse_skews,
    metavar="S[,S…]",
    help="Spread lengths around a mean instead: 0 makes all equal, 1 is usual, 2 heavy-tailed. Several: measure the "
    "gain of continuous over static batches as a curve.",
)
@click.option(
    "--preset",
    type=click.Choice(list(PRESETS)),
    help="The articles' experiment: 8 users, 32 tokens each; or skewed lengths.",
)
@click.option(
    "--rounds",
    type=click.IntRange(1),
    default=3,
    help="Runs of everything, by turns; the median counts [default: 3; of a load 1].",
)
@option("--seed", type=int, default=7, help="Seed of synthetic prompts and users.")
@click.option(
    "--users",
    callback=parse_users,
    metavar="N[,N…]",
    help="Measure load with this many users, instead of strategies. Several: measure a curve. With --find-capacity: "
    "the most to try [default then: 1,024].",
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
@engine_options(max_seqs={"help": "Most requests that run at once; only with --users or --find-capacity."})
@replica_options
def bench(**values: Any) -> Literal[0]:
    """Measure what continuous batching gives on this machine and model, with your prompts or synthetic ones.

    Every strategy does the same work on the same model with the same kernels and slots. Padding and idle slots are
    real tokens in the same steps, so that only the strategy differs.
    """
    given = click.get_current_context().get_parameter_source
    values |= {name: value for name, value in _other_defaults(values).items() if given(name) in UNASKED}
    options = make_options(BenchOptions, values)
    options.check()
    _measure(options)
    return 0


def _other_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """What holds instead of the usual defaults, for options that nobody has set."""
    found = dict(PRESETS.get(values["preset"] or "", {}))
    if values["skew"] or "skew" in found:
        found = SKEWED_WORK | found
    if values["users"] or values["find_capacity"]:
        found["rounds"] = 1
    return found


def _measure(options: BenchOptions) -> None:
    """Measures, and shows and writes what was found."""
    from cbatch.cli.bench import output
    from cbatch.cli.bench.compare import measure_comparison
    from cbatch.cli.bench.load.measure import measure_load
    from cbatch.cli.bench.render import skew_report
    from cbatch.cli.bench.skew.curve import measure_skew

    on_progress = (lambda text: None) if options.is_silent else notice
    if options.is_curve:
        _show(options, measure_skew(options, on_progress), skew_report.print_report, skew_report.write_files)
    else:
        measure = measure_load if options.is_load else measure_comparison
        _show(options, measure(options, on_progress), output.print_report, output.write_files)


class _Report(Protocol):
    def to_json(self) -> dict[str, Any]: ...


Report = TypeVar("Report", bound=_Report)


def _show(
    options: BenchOptions, report: Report, print_report: Callable[[Report], None], write_files: Callable[[Report], None]
) -> None:
    if options.json:
        emit(json.dumps(report.to_json(), indent=2))
    else:
        print_report(report)
    write_files(report)
