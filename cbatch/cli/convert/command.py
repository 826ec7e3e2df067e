"""`cbatch convert`: results from one form into another."""

from __future__ import annotations

from typing import Literal

import click

from cbatch.base.errors import ConfigError
from cbatch.base.units import format_count
from cbatch.batch.forms import OUTPUT_FORMS, OutputForm, compression, output_form, resolved
from cbatch.cli.common.configured_command import ConfiguredCommand
from cbatch.cli.common.console import notice

_FORM = click.Choice(OUTPUT_FORMS)


@click.command("convert", cls=ConfiguredCommand)
@click.argument("source", metavar="IN")
@click.argument("target", metavar="OUT")
@click.option("--from", "source_form", type=_FORM, help="Form of IN [default: by its ending].")
@click.option("--to", "target_form", type=_FORM, help="Form of OUT [default: by its ending].")
@click.option("--expand", is_flag=True, help="In a table, make the properties of JSON answers columns.")
@click.option("--overwrite", is_flag=True, help="Replace OUT if it is not empty.")
@click.option("-q", "--quiet", is_flag=True, help="Print only errors on stderr.")
def convert(
    source: str,
    target: str,
    source_form: OutputForm | None,
    target_form: OutputForm | None,
    expand: bool,
    overwrite: bool,
    quiet: bool,
) -> Literal[0, 1]:
    """Write the results in IN, which cbatch run has made, to OUT in another form.

    JSON Lines, CSV, TSV, JSON arrays, Parquet, workbooks and databases, by their endings. The rows stay the same to
    the byte, so cbatch verify and --resume take OUT instead of IN. They come in the order of the input. The exit code
    is 1 if IN ends with a torn row, which is left out.
    """
    from cbatch.batch.journal import StoredRows
    from cbatch.batch.row import Row
    from cbatch.batch.run_record import read_record, write_record
    from cbatch.batch.tables.table_writer import TableWriter, open_results

    path, read = resolved(target), resolved(source)
    form, kind = target_form or output_form(target), compression(target)
    if target == "-":
        raise ConfigError("cbatch convert writes a file; name one.")
    if path == read:
        raise ConfigError(f"{target} is the input; choose another file for the output.")
    with StoredRows(open_results(read, source_form or output_form(source)), source) as stored:
        if stored.journal.damaged:
            raise ConfigError(f"{source} has {stored.journal.damage()}; cbatch run --resume repairs it.")
        with TableWriter(path, form, kind, expand=() if expand else None) as output:
            output.if_not_empty = "--overwrite replaces it"
            if not overwrite:
                output.check_empty()
            output.start()
            try:
                for position, (index, row) in enumerate(stored.in_order()):
                    output.write([Row(position, index, row)])
                output.finish(lambda: None)
            except BaseException:
                output.start()  # without rows, so that nothing stays beside OUT
                raise
    if record := read_record(read):
        record.get("options", {}).pop("output_format", None)
        write_record(path, **record)
    if not quiet:
        notice(f"{target}: {format_count(len(stored), 'row')}")
    if stored.journal.torn:
        notice(f"{source} ends with a torn row, which is left out: a run has ended there, or is writing it")
    return 1 if stored.journal.torn else 0
