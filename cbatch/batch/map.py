"""Results of rows from Python, one after the other, with the journal of `cbatch run` behind them if there is a path."""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path

from cbatch.base.errors import ConfigError, RunFailed
from cbatch.base.request import RequestDefaults
from cbatch.batch.answer_cache import CacheConfig
from cbatch.batch.engine_driver import EngineDriver
from cbatch.batch.journal import Journal
from cbatch.batch.lines import Line, LineSpool, RowOptions
from cbatch.batch.python_rows import RowTemplate, lines_of
from cbatch.batch.resume import ResumePlan
from cbatch.batch.row import Row
from cbatch.batch.templates import JinjaTemplate, PromptTemplate
from cbatch.batch.writer import FileWriter
from cbatch.engine.thread import EngineThread
from cbatch.requests.completion import Completion
from cbatch.requests.prompts import is_table
from cbatch.validation.validation import Validation


def map_rows(
    engine_thread: EngineThread,
    defaults: RequestDefaults,
    rows: Iterable[object],
    *,
    template: str | os.PathLike[str] | RowTemplate | None = None,
    path: str | os.PathLike[str] | None = None,
    resume: bool = False,
    ordered: bool = True,
    window: int | None = None,
    validation: Validation | None = None,
    cache: CacheConfig | None = None,
) -> Generator[Completion]:
    """Yields the result of each row, lazily and in bounded memory.

    rows:     texts, token ids, lists of messages, or dictionaries as the rows of a file; taken on a thread of their
              own, at most `window` rows ahead of the results that were taken
    template: makes the prompts: a text with {column} in it, the path of a Jinja template, or a function of the row.
              Columns other than `id` are data then, whatever their names; a row that the function returns is taken as
              it is
    path:     file that gets each result before it is yielded, as `cbatch run -o` writes it
    resume:   continue a file that an earlier call or `cbatch run` has left; its rows are not computed again
    ordered:  whether results come in the order of the rows, or as they finish
    window:   most rows between taking and yielding; None means four times the requests that run at once
    validation, cache: see `RowOptions`

    A row that is wrong has a result with an error. Leaving the iteration cancels what is in flight; `resume` continues
    there.

    Raises ConfigError for options that are wrong. While iterating: ConfigError if the file cannot be written, or
    holds rows that are in the way; EngineError if the engine fails; RunFailed if writing fails; and what `rows` raises,
    after the results of all rows before it.
    """
    _check_rows(rows)
    _check_options(template, path, resume=resume, window=window)
    if isinstance(template, os.PathLike):
        template = JinjaTemplate(Path(template))
    elif isinstance(template, str):
        template = PromptTemplate(template)
    options = RowOptions(defaults, has_columns=template is not None, validation=validation, cache=cache)
    driver = EngineDriver(engine_thread)
    row_map = RowMap(driver, options, ordered=ordered, window=4 * driver.limits.max_seqs if window is None else window)
    lines = lines_of(rows, template)
    return row_map.run(lines) if path is None else row_map.run_to_file(lines, Path(path), resume=resume)


def _check_rows(rows: Iterable[object]) -> None:
    """Raises ConfigError for what is no iterable of rows, or whose iteration would give something else."""
    kind = type(rows).__name__
    if isinstance(rows, str | bytes | Mapping):
        raise ConfigError(f"rows must be an iterable of rows, not one {kind}; put it into a list.")
    if is_table(rows):
        raise ConfigError(f"Iterating over a {kind} gives its columns; give its rows, such as to_dict('records').")
    if not hasattr(rows, "__iter__") and not hasattr(rows, "__getitem__"):
        raise ConfigError(f"rows must be an iterable of rows, not {kind}.")


def _check_options(template: object, path: object, *, resume: bool, window: object) -> None:
    """Raises ConfigError for a value that cannot be meant."""
    if not isinstance(template, str | os.PathLike | None) and not callable(template):
        raise ConfigError(f"template must be a text, a path or a function of the row, not {type(template).__name__}.")
    if not isinstance(path, str | os.PathLike | None):
        raise ConfigError(f"path must be the path of a file, not {type(path).__name__}.")
    if resume and path is None:
        raise ConfigError("resume needs the path of the file that is to be continued.")
    if window is not None and (type(window) is not int or window < 1):
        raise ConfigError(f"window must be a whole number of at least 1, or None, not {window!r}.")


class MapWriter(FileWriter):
    """The journal of a map, whose messages use the words of Python."""

    resume_with = "resume=True"
    if_not_empty = "resume=True continues it"
    if_changed = "Give another path, or remove the file to start again"
    if_damaged = (
        "Remove damaged lines, which cbatch verify --offline lists, and their rows run again; or remove the file to "
        "start again"
    )


class RowMap:
    """Gives the results of a stream's rows, in order or as they finish, and writes them before."""

    def __init__(self, driver: EngineDriver, options: RowOptions, *, ordered: bool, window: int) -> None:
        """Raises RequestError and ConfigError for options that are wrong."""
        self._driver, self._options = driver, options
        self._stream = driver.open(options, window=window)
        self._ordered = ordered
        self._next = 0
        """Number of results that have been given."""
        self._held: dict[int, Row] = {}
        """Finished rows by their index."""
        self._kept: Iterator[tuple[int, bytes]] = iter(())
        self._kept_row: tuple[int, bytes] | None = None
        """The next row that an earlier run has left."""

    def run(
        self, lines: Iterator[Line], output: FileWriter | None = None, plan: ResumePlan | None = None
    ) -> Generator[Completion]:
        """Yields all results. A row is in the output before its result is given."""
        with closing(self._stream.finished(lines, plan or ResumePlan())) as finished:
            try:
                for rows in finished:
                    self._take(rows, output)
                    if output is not None and self._stream.has_given_all:  # before the consumer may leave
                        output.finish(lambda: None)
                    yield from self._ready()
            except RunFailed:
                raise
            except BaseException:  # the consumer leaves: what is finished by now need not be computed again
                self._take(self._stream.finished_by_now(), output)
                raise

    def run_to_file(self, lines: Iterator[Line], path: Path, *, resume: bool) -> Generator[Completion]:
        """The same with the journal of `cbatch run` in a file, which is in order at the end."""
        with MapWriter(path, input_order=True) as output:
            if not (resume and output.has_content):
                output.check_empty()
                output.start(Journal())
                yield from self.run(lines, output)
                return
            spool = LineSpool(lines)
            plan = output.resume(output.journal(), spool, partial(self._driver.keyed, self._options))
            spool.rewind()
            self._kept = output.kept_rows()
            self._kept_row = next(self._kept, None)
            yield from self.run(spool, output, plan)

    def _take(self, rows: list[Row], output: FileWriter | None) -> None:
        """Writes finished rows, and holds their results until it is their turn."""
        if output is not None:
            output.write(rows)
            output.tick()
        self._held |= {row.index: row for row in rows}

    def _ready(self) -> Iterator[Completion]:
        """The results whose turn has come. The window moves on when they are taken."""
        while True:
            index = self._next_index()
            if self._kept_row is not None and self._kept_row[0] == index:
                result = Completion.from_row(json.loads(self._kept_row[1]))
                self._kept_row = next(self._kept, None)
            elif index in self._held:
                row = self._held.pop(index)
                assert row.completion is not None
                result = row.completion
                self._stream.release([row.position])
            else:
                return
            self._next += 1
            yield result

    def _next_index(self) -> int:
        """Index of the row whose result comes next: in order, or of any that is there, kept ones first."""
        if self._ordered:
            return self._next
        return self._kept_row[0] if self._kept_row is not None else next(iter(self._held), -1)
