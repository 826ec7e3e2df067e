"""Results as a table: made of the journal once all rows are finished, by an atomic replace."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from cbatch.base.errors import ConfigError
from cbatch.batch.forms import READ_ERRORS, Compression, OutputForm, check_output, decompressed
from cbatch.batch.journal import Journal
from cbatch.batch.lines import Line
from cbatch.batch.resume import KEEP, Keyed, ResumePlan, Resuming, plan_resume
from cbatch.batch.tables.columns import TableLayout, is_result
from cbatch.batch.tables.csv_table import CsvTable, write_text
from cbatch.batch.tables.parquet_table import ParquetTable, write_parquet
from cbatch.batch.token_journal import token_journal_of
from cbatch.batch.writer import FileWriter, require_file


def read_keys(path: Path, name: str, form: OutputForm) -> Journal:
    """A journal that knows which rows a table holds, and not where. Raises ConfigError if it is no table of results."""
    journal = Journal()
    try:
        with path.open("rb") as file:
            if form == "jsonl":
                return Journal.read(decompressed(file), name)
            delimiter = "\t" if form == "tsv" else ","
            table = ParquetTable(file, name) if form == "parquet" else CsvTable(decompressed(file), name, delimiter)
            for row in table.rows():
                columns = row.columns
                if not is_result(columns):
                    raise ConfigError(f"{name} is not a table of results; --overwrite replaces it.")
                journal.append(int(columns["index"]), 0)
                journal.keys += bytes.fromhex(columns["key"])
                journal.failed.append(bool(columns.get("error_code")))
    except READ_ERRORS as error:
        raise ConfigError(f"{name} cannot be read: {error}.") from error
    return journal


JOURNAL_ENDING = ".journal.jsonl"


class TableWriter(FileWriter):
    """Appends rows to a journal beside the table, and makes the table of it at the end.

    The journal is removed then, unless it has error rows, which --retry-errors may run again.
    """

    _completes = "make the table of"

    def __init__(
        self,
        path: Path,
        form: OutputForm,
        compression: Compression | None = None,
        *,
        input_order: bool = True,
        types: Mapping[str, Any] | None = None,
    ) -> None:
        """
        types: types of the input's columns as pyarrow has them, by their names; those of others follow their values

        Raises ConfigError if the files cannot be written, another run writes them, or an extra is not installed.
        """
        check_output(form, compression)
        require_file(path)
        self._table_path = path.resolve()
        self._form, self._compression, self._types = form, compression, types or {}
        self._is_complete = False
        super().__init__(journal_of(self._table_path), input_order=input_order)
        self._name = self._place = str(self._path if path.is_symlink() else journal_of(path))
        self._final_name = str(path)
        self.tokens_path = token_journal_of(self._table_path)

    @property
    def has_content(self) -> bool:
        return self._has_journal or (self._table_path.is_file() and self._table_path.stat().st_size > 0)

    def journal(self) -> Journal:
        """Reads the journal; or the keys of the table, if the journal was removed because all rows are good."""
        return super().journal() if self._has_journal else read_keys(self._table_path, self._final_name, self._form)

    def resume(self, journal: Journal, lines: Iterator[Line], keyed: Keyed, how: Resuming = KEEP) -> ResumePlan:
        """The same for a finished table whose journal was removed, if all its rows fit: nothing can be added to it."""
        if self._has_journal:
            return super().resume(journal, lines, keyed, how)
        plan = plan_resume(journal, lines, keyed, how._replace(max_tokens=None))
        if journal.damaged:
            problem = f"It has {journal.damage()}"
        elif not plan.fits:
            problem = f"It holds rows that do not fit this run: {plan}"
        elif plan.rows < len(journal.indices):
            problem = "It holds error rows"
        elif next(lines, None) is not None:
            problem = "The input has rows that it does not hold"
        else:
            self._is_complete = True
            return plan
        raise ConfigError(
            f"{self._final_name} is finished, and its journal, which a run could continue, is gone. {problem}. "
            "The file is left as it is; --overwrite starts again."
        )

    def finish(self, raise_if_interrupted: Callable[[], None]) -> None:
        if self._is_complete:
            self.drop_tokens()
        else:
            super().finish(raise_if_interrupted)

    def _complete(self, raise_if_interrupted: Callable[[], None]) -> None:
        rows = partial(self._ordered_rows, raise_if_interrupted)
        layout = TableLayout()
        for row in rows():
            layout.add(json.loads(row))
        columns = layout.columns()
        like = self._table_path if self._table_path.exists() else self._path
        with self._replacing(self._table_path, like.stat()) as target:
            if self._form == "parquet":
                write_parquet(target, columns, rows, self._types)
            else:
                write_text(target, self._form, self._compression, columns, rows)
        if layout.errors:
            self.note = f"{self._name} stays beside the table: --resume --retry-errors runs its error rows again"
        else:
            self._path.unlink()


def journal_of(table: Path) -> Path:
    """Where the rows of a table are kept until it is made."""
    return table.with_name(table.name + JOURNAL_ENDING)
