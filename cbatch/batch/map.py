"""Results of rows from Python, one after the other, with the journal of `cbatch run` behind them if there is a path."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

from cbatch.base.errors import ConfigError, RunFailed
from cbatch.batch.engine_driver import EngineDriver, EngineStream
from cbatch.batch.lines import Line, RowOptions, taken_twice
from cbatch.batch.resume import Keyed, ResumePlan
from cbatch.batch.row import Row
from cbatch.batch.templates import JinjaTemplate, PromptTemplate, RowTemplate, lines_of
from cbatch.batch.writer import FileWriter
from cbatch.engine.thread import EngineThread
from cbatch.requests.completion import Completion
from cbatch.requests.prompts import is_table


def map_rows(
    engine_thread: EngineThread,
    options: RowOptions,
    rows: Iterable[object],
    *,
    template: str | os.PathLike[str] | RowTemplate | None,
    path: str | os.PathLike[str] | None,
    resume: bool,
    ordered: bool,
    window: int | None,
) -> tuple[Generator[Completion], Callable[[], None]]:
    """The result of each row, as `Engine.map` describes it, and what ends them early, from any thread.

    options: of all rows; a template adds that they have columns
    """
    kind = type(rows).__name__
    if isinstance(rows, str | bytes | Mapping):
        raise ConfigError(f"rows must be an iterable of rows, not one {kind}; put it into a list.")
    if is_table(rows):
        raise ConfigError(f"Iterating over a {kind} gives its columns; give its rows, such as to_dict('records').")
    if not hasattr(rows, "__iter__") and not hasattr(rows, "__getitem__"):
        raise ConfigError(f"rows must be an iterable of rows, not {kind}.")
    if not isinstance(template, str | os.PathLike | None) and not callable(template):
        raise ConfigError(f"template must be a text, a path or a function of the row, not {type(template).__name__}.")
    if not isinstance(path, str | os.PathLike | None):
        raise ConfigError(f"path must be the path of a file, not {type(path).__name__}.")
    if resume and path is None:
        raise ConfigError("resume needs the path of the file that is to be continued.")
    if window is not None and (type(window) is not int or window < 1):
        raise ConfigError(f"window must be a whole number of at least 1, or None, not {window!r}.")
    if isinstance(template, os.PathLike):
        template = JinjaTemplate(Path(template))
    elif isinstance(template, str):
        template = PromptTemplate(template)
    unit = "item" if path is None else "line"  # a file has the bytes of `cbatch run`
    options = replace(options, has_columns=template is not None, unit=unit)
    driver, lines = EngineDriver(engine_thread), lines_of(rows, template, unit)
    stream = driver.open(options, window=4 * driver.limits.max_seqs if window is None else window)
    results = _results(stream, lines, ordered=ordered)
    if path is not None:
        keyed = partial(driver.keyed, options)
        results = _results_in_file(stream, lines, Path(path), keyed, resume=resume, ordered=ordered)
    return results, partial(stream.interrupt, 0)


class MapWriter(FileWriter):
    """The journal of a map, whose messages use the words of Python."""

    resume_with = "resume=True"
    if_not_empty = "resume=True continues it"
    if_changed = "Give another path, or remove the file to start again"
    if_damaged = (
        "Remove damaged lines, which cbatch verify --offline lists, and their rows run again; or remove the file to "
        "start again"
    )


def _results_in_file(
    stream: EngineStream, lines: Iterator[Line], path: Path, keyed: Keyed, *, resume: bool, ordered: bool
) -> Generator[Completion]:
    with MapWriter(path, input_order=True) as output:
        if not (resume and output.has_content):
            output.check_empty()
            output.start()
            yield from _results(stream, lines, output, ordered=ordered)
            return
        first, again = taken_twice(lines)
        plan = output.resume(output.journal(), first, keyed)
        yield from _results(stream, again(), output, plan, ordered=ordered)


def _results(
    stream: EngineStream,
    lines: Iterator[Line],
    output: MapWriter | None = None,
    plan: ResumePlan | None = None,
    *,
    ordered: bool,
) -> Generator[Completion]:
    """Yields all results, in order or as they finish. A row is in the output before its result is given."""
    held: dict[int, Row] = {}
    """Finished rows by their index."""
    kept = output.kept_rows() if output is not None and plan is not None else iter(())
    kept_row = next(kept, None)
    """The next row that an earlier run has left."""
    num_given = 0

    def take(rows: list[Row]) -> None:
        if output is not None:
            output.write(rows)
        held.update((row.index, row) for row in rows)

    with closing(stream.finished(lines, plan or ResumePlan())) as finished:
        try:
            for rows in finished:
                take(rows)
                if output is not None and stream.has_given_all:  # before the consumer may leave
                    output.finish(lambda: None)
                while True:  # the window moves on when results are taken
                    index = num_given if ordered else kept_row[0] if kept_row is not None else next(iter(held), -1)
                    if kept_row is not None and kept_row[0] == index:
                        result = Completion.from_row(json.loads(kept_row[1]))
                        kept_row = next(kept, None)
                    elif (row := held.pop(index, None)) is not None and row.completion is not None:
                        result = row.completion
                        stream.window.release([row.position])
                    else:
                        break
                    num_given += 1
                    yield result
        except RunFailed:
            raise
        except BaseException:  # the consumer leaves: what is finished by now need not be computed again
            take(stream.finished_by_now())
            raise
