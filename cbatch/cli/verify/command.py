"""`cbatch verify`: the command and its options."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from cbatch.base.option import options_of
from cbatch.batch.forms import unit_of
from cbatch.cli.common.configured_command import preset_option
from cbatch.cli.common.console import emit, notice
from cbatch.cli.common.loading import open_engine
from cbatch.cli.common.options import engine_options, record_options, sampling_options
from cbatch.cli.run.command import open_input
from cbatch.cli.run.options import RunOptions
from cbatch.cli.run.saved_options import SavedOptionsCommand, tell_taken_options
from cbatch.cli.verify.options import ROW_OPTIONS, VerifyOptions

if TYPE_CHECKING:
    from cbatch.cli.verify.offline import FileReport
    from cbatch.cli.verify.report import Report


class _VerifyCommand(SavedOptionsCommand):
    input, resumes, ignores = "prompts", "", "offline"


@click.command("verify", cls=_VerifyCommand)
@click.argument("output", metavar="OUT")
@record_options(VerifyOptions)
@record_options(
    RunOptions, *(options_of(RunOptions).keys() - ROW_OPTIONS), verbose={"help": "Print more about the engine."}
)
@sampling_options()
@engine_options("prefix_cache")
@preset_option
def verify(**values: Any) -> Literal[0, 1, 2]:
    """Run a sample of the rows of OUT again, alone and together, and say which of them differ and where first.

    OUT is what cbatch run wrote, in any form. The options of that run lie beside it; if OUT was moved, give them: rows
    that were made with others are counted, and not run. A report goes to stdout as JSON. The exit code is 0 if all rows
    are equal, 1 if some differ or are damaged, and 2 if some cannot be compared.
    """
    from cbatch.batch.journal import StoredRows
    from cbatch.batch.tables.table_writer import open_results

    options = VerifyOptions.from_values(values)
    options.check_usage()
    run = options.run
    if not run.quiet:
        tell_taken_options()
    report: Report | FileReport
    if options.offline:  # which makes no prompts
        run = replace(run, template=".", constant_template=True)
    with StoredRows(open_results(Path(run.output), run.output_form), run.output) as stored:
        source = open_input(run) if options.prompts is not None else None
        if source is None or options.offline:
            from cbatch.cli.verify.offline import check_file

            report = check_file(run.output, stored, unit_of(run.input_form), source)
        else:
            with open_engine(run.engine, quiet=run.quiet, verbose=run.verbose) as engine:
                from cbatch.batch.engine_driver import EngineDriver
                from cbatch.cli.verify.verification import verify_rows

                report = verify_rows(EngineDriver(engine.thread), options, source, stored)
    for sentence in () if run.quiet else report.sentences():
        notice(sentence)
    emit(json.dumps(report.as_dict(), indent=2, ensure_ascii=False))
    return report.exit_code
