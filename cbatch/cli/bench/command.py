"""`cbatch bench`: no batching, static batches and continuous batching side by side; or load with many users."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

import click
from click.core import ParameterSource

from cbatch.cli.bench.options import PRESETS, SKEWED_WORK, BenchOptions
from cbatch.cli.common.configured_command import ConfiguredCommand
from cbatch.cli.common.console import emit, notice
from cbatch.cli.common.options import engine_options, make_options, record_options

UNASKED = (ParameterSource.DEFAULT, ParameterSource.DEFAULT_MAP)
"""Where values come from that a preset overrides: the built-in defaults and the configuration file."""


@click.command("bench", cls=ConfiguredCommand)
@click.argument("prompts", metavar="[PROMPTS.jsonl]", required=False)
@record_options(BenchOptions)
@engine_options(max_seqs={"help": "Most requests that run at once; only with --users or --find-capacity."})
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
    """The defaults of a preset or a kind of work, for options that nobody has set."""
    found = dict(PRESETS.get(values["preset"] or "", {}))
    if values["speculate"] == "off" and "strategies" not in found:
        found["strategies"] = [name for name in values["strategies"] if name != "drafts"]
    if values["skew"] is not None or "skew" in found:
        found = SKEWED_WORK | found
    if values["users"] or values["find_capacity"]:
        found["rounds"] = 1
    return found


def _measure(options: BenchOptions) -> None:
    from cbatch.cli.bench import comparison, load

    kind = load if options.is_load else comparison
    page = kind.measure(options, (lambda text: None) if options.is_silent else notice)
    if options.json:
        emit(json.dumps(page.data, indent=2))
    else:
        page.print()
    page.write(options.plot, options.report)
