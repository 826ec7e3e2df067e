"""`cbatch convert`: results from one form into another."""

from __future__ import annotations

import heapq
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

import click

from cbatch.base.errors import ConfigError
from cbatch.base.units import format_count
from cbatch.batch.forms import OUTPUT_FORMS, OutputForm, compression, output_form, resolved, split_table
from cbatch.cli.common.configured_command import ConfiguredCommand
from cbatch.cli.common.console import notice

_FORM = click.Choice(OUTPUT_FORMS)


@click.command("convert", cls=ConfiguredCommand)
@click.argument("sources", metavar="IN...", nargs=-1, required=True)
@click.argument("target", metavar="OUT")
@click.option("--from", "source_form", type=_FORM, help="Form of IN [default: by its ending].")
@click.option("--to", "target_form", type=_FORM, help="Form of OUT [default: by its ending].")
@click.option(
    "--expand",
    is_flag=True,
    help="In a table, make the properties of JSON answers columns [default: as in IN].",
)
@click.option("--overwrite", is_flag=True, help="Replace OUT if it is not empty.")
@click.option("-q", "--quiet", is_flag=True, help="Print only errors on stderr.")
def convert(
    sources: tuple[str, ...],
    target: str,
    source_form: OutputForm | None,
    target_form: OutputForm | None,
    expand: bool,
    overwrite: bool,
    quiet: bool,
) -> Literal[0, 1]:
    """Write the results in IN, which cbatch run has made, to OUT in another form.

    JSON Lines, CSV, TSV, JSON arrays, Parquet, workbooks and databases, by their endings. The rows stay the same to
    the byte, so cbatch verify and --resume take OUT instead of IN. They come in the order of the input, also those of
    several files, such as the outputs of shards. The exit code is 1 if an IN ends with a torn row, which is left out.
    """
    from cbatch.batch.journal import StoredRows
    from cbatch.batch.row import Row
    from cbatch.batch.run_record import read_record, write_record
    from cbatch.batch.tables.table_writer import TableWriter, is_same_output, open_results

    path, form, kind = resolved(target), target_form or output_form(target, "--to"), compression(target)
    if target == "-":
        raise ConfigError("cbatch convert writes a file; name one.")
    with ExitStack() as opened:
        files = dict[str, StoredRows]()
        for source in sources:
            read = resolved(source)
            if is_same_output(path, read):
                raise ConfigError(f"{target} is the input; choose another file for the output.")
            read_form = source_form or output_form(source, "--from")
            stored = opened.enter_context(StoredRows(open_results(read, read_form), source))
            files[source] = stored
            if stored.journal.damaged:
                raise ConfigError(f"{source} has {stored.journal.damage()}; cbatch run --resume repairs it.")
            expand = expand or _has_properties(source, read_form)
        output = opened.enter_context(TableWriter(path, form, kind, expand=() if expand else None))
        output.if_not_empty = "--overwrite replaces it"
        if not overwrite:
            output.check_empty()
        output.start()
        try:
            before = -1
            for position, (index, row) in enumerate(heapq.merge(*(stored.in_order() for stored in files.values()))):
                if index == before:
                    raise ConfigError(f"Row {index + 1} is in several of the files; each may be in one.")
                output.write([Row(position, index, row)])
                before = index
            output.finish(lambda: None)
        except BaseException:
            output.start()  # without rows, so that nothing stays beside OUT
            raise
    if record := read_record(resolved(sources[0])):
        for name in ("output_format", *["shard"] * (len(sources) > 1)):
            record.get("options", {}).pop(name, None)
        write_record(path, **record)
    if not quiet:
        notice(f"{target}: {format_count(sum(map(len, files.values())), 'row')}")
    torn = [source for source, stored in files.items() if stored.journal.torn]
    for source in torn:
        notice(f"{source} ends with a torn row, which is left out: a run has ended there, or is writing it")
    return 1 if torn else 0


def _has_properties(name: str, form: OutputForm) -> bool:
    """Whether a table of results has properties of answers, which come right behind the answer's text."""
    from cbatch.batch.tables.table_writer import result_rows

    if form == "jsonl" or form == "npy":
        return False
    with Path(split_table(name)[0]).open("rb") as file:
        names = list(next((row.columns for row in result_rows(file, name, form)), ()))
    return "text" in names and names[names.index("text") + 1] != "finish_reason"
