"""Writes finished rows: to a file that is a valid journal at every moment, or to a stream."""

from __future__ import annotations

import fcntl
import hashlib
import os
import select
import time
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Self

from cbatch.base.errors import (
    CbatchError,
    ConfigError,
    EngineError,
    Interrupted,
    ReaderGone,
    RunFailed,
    as_error,
    in_short,
    os_errors_as,
)
from cbatch.batch.driver import RowStream
from cbatch.batch.journal import SUPERSEDED, Journal, with_check
from cbatch.batch.lines import Line, checked_lines
from cbatch.batch.resume import KEEP, Keyed, ResumePlan, Resuming, plan_resume
from cbatch.batch.row import Row
from cbatch.batch.run_record import remove_record
from cbatch.batch.token_journal import is_token_journal, remove_token_journal, token_journal_of

SYNC_SECONDS = 0.5
"""Age at which rows that were written are synced to disk."""


class RowWriter:
    """Takes finished rows, and this one forgets them.

    Used as a context; leaving it early keeps what was finished, and nothing half done.
    """

    @property
    def resume_hint(self) -> str:
        """Says how to resume after a run that ended early; ends a message."""
        return ""

    stop_timeout_s: float | None = None
    """Seconds that an interrupted run waits until finished rows are written; None if nobody can block that."""

    note = ""
    """A sentence for people, once the run is finished."""

    def check_empty(self) -> None:
        """Raises ConfigError if the output holds rows of an earlier run."""

    def write(self, rows: Sequence[Row]) -> Iterable[int]:
        """Takes finished rows; called several times a second, also with none.

        Returns the positions of those that are out of memory now.
        """
        return [row.position for row in rows]

    def flush_held(self) -> None:
        """Writes the rows that are held back; the rows they wait for will not come."""

    def finish(self, raise_if_interrupted: Callable[[], None]) -> None:
        """Puts the rows in their final order, after all of them are written.

        raise_if_interrupted: called now and then; if it raises, the rows stay as they are
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass


class StreamWriter(RowWriter):
    """Writes each row to an unbuffered stream as soon as its turn has come, and closes the stream in the end.

    Raises ReaderGone if nobody reads it.
    """

    stop_timeout_s = 2.0

    def __init__(
        self, stream: IO[bytes], *, input_order: bool, changes: Iterable[Callable[[bytes], bytes]] = ()
    ) -> None:
        """`changes`: what each row goes through before it is written"""
        self._stream, self._input_order, self._changes = stream, input_order, list(changes)
        self._held: dict[int, bytes] = {}
        self._next = 0

    def write(self, rows: Sequence[Row]) -> Iterable[int]:
        if not self._input_order:
            self._write([row.data for row in rows])
            return [row.position for row in rows]
        self._held |= {row.position: row.data for row in rows}
        first = self._next
        while self._next in self._held:
            self._next += 1
        self._write([self._held.pop(position) for position in range(first, self._next)])
        return range(first, self._next)

    def flush_held(self) -> None:
        self._write([self._held.pop(position) for position in sorted(self._held)])

    def finish(self, raise_if_interrupted: Callable[[], None]) -> None:
        self._stream.flush()

    def __exit__(self, *error: object) -> None:
        self._stream.close()

    def _write(self, rows: list[bytes]) -> None:
        for change in self._changes:
            rows = list(map(change, rows))
        view = memoryview(b"".join(rows))
        try:
            while view:
                written = self._stream.write(view)
                if written is None:  # the pipe is full, and somebody made it non-blocking
                    select.select([], [self._stream], [])
                view = view[written or 0 :]
        except BrokenPipeError as error:
            raise ReaderGone from error
        except OSError as error:
            raise RunFailed(f"Cannot write the output: {error.strerror}.") from error


class FileWriter(RowWriter):
    """Appends rows to a file as they finish, and puts them in order at the end by an atomic replace.

    The file is locked from the beginning. Nothing in it changes before `start` or `resume`.
    """

    resume_with = "--resume"
    """The option that resumes this run, in the words of the caller."""
    if_not_empty = "--resume continues it, --overwrite replaces it"
    if_changed = (
        "--recompute-changed runs changed rows again and drops rows whose input line is gone; --overwrite starts again"
    )
    if_damaged = (
        "--recompute-changed removes damaged lines and runs their rows again; --overwrite starts again; "
        "cbatch verify --offline lists them"
    )
    _completes, _place = "order", "the file"
    """For messages: the work of `_complete`, and where finished rows are."""

    def __init__(self, path: Path, *, input_order: bool) -> None:
        """Raises ConfigError if the file cannot be written or put in order, or another run writes it."""
        require_file(path)
        self._name = self._final_name = str(path)
        self._path = path.resolve()
        encoded = os.fsencode(self._path.name)
        is_short = len(encoded) < 200  # else something added to it would make it too long
        stem = self._path.name if is_short else hashlib.blake2b(encoded, digest_size=16).hexdigest()
        self._ordered_path = self._path.with_name(f".{stem}.cbatch-sorting")
        self.tokens_path = token_journal_of(self._path)
        """Where tokens of rows that are not finished may lie. They are removed when all rows are."""
        self.final_path = self._path
        """Where the rows are in the end."""
        self._input_order = input_order
        self._journal = Journal()
        self._unsynced_since: float | None = None
        self._is_new = not self._path.exists()
        with os_errors_as(ConfigError, f"Cannot write {path}"):
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
            self._lock()
            with self._open_ordered():
                self._ordered_path.unlink()

    def _open_ordered(self) -> IO[bytes]:
        """Opens a new file for the ordered rows. Removes one that a killed run left; never follows a link."""
        self._ordered_path.unlink(missing_ok=True)
        return open(self._ordered_path, "xb", 2**20, opener=partial(os.open, mode=0o600))

    def _lock(self) -> None:
        with suppress(BlockingIOError):
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self._is_at_path(os.fstat(self._fd)):  # the other run may also just have replaced the file
                return
        os.close(self._fd)
        raise ConfigError(f"Another run is writing {self._name}.")

    @property
    def resume_hint(self) -> str:
        if self._has_journal:
            return f" Finished rows are in {self._place}; {self.resume_with} continues from there."
        does = "goes on with what was begun" if is_token_journal(self.tokens_path) else "starts again"
        return f" No row was finished; {self.resume_with} {does}."

    @property
    def has_content(self) -> bool:
        return self._has_journal

    @property
    def _has_journal(self) -> bool:
        return os.fstat(self._fd).st_size > 0

    def check_empty(self) -> None:
        if self.has_content:
            name = self._name if self._has_journal else self._final_name
            raise ConfigError(f"{name} exists and is not empty; {self.if_not_empty}.")
        if is_token_journal(self.tokens_path):
            raise ConfigError(f"{self.tokens_path} has unfinished answers of an earlier run; {self.if_not_empty}.")

    def journal(self) -> Journal:
        """Reads what an earlier run left in the file. Raises ConfigError if no run has written it."""
        with open(self._fd, "rb", closefd=False) as file:
            file.seek(0)
            return Journal.read(file, self._name)

    def start(self, journal: Journal | None = None) -> None:
        """Truncates the file after the journal's last whole row; the journal's rows count as written."""
        self._journal = journal = journal or Journal()
        journal.fd = self._fd
        os.ftruncate(self._fd, journal.end)
        os.fsync(self._fd)
        sync_folder(self._path.parent)

    def resume(self, journal: Journal, lines: Iterator[Line], keyed: Keyed, how: Resuming = KEEP) -> ResumePlan:
        """Starts where an earlier run ended, and returns which of its rows are kept.

        journal: what `journal` has read
        lines:   the input; read up to the last line that has a row in the journal
        keyed:   gives each line the key that this run gives it

        Raises ConfigError, and leaves the file as it is, if there are such rows and they are not to be dropped.
        """
        journal.fd = self._fd
        plan = self._plan(journal, lines, keyed, how, self._name)
        self._go_on(plan)
        return plan

    def _plan(self, journal: Journal, lines: Iterator[Line], keyed: Keyed, how: Resuming, name: str) -> ResumePlan:
        """The plan for the rows of a file with this name. Raises ConfigError as `resume` does."""
        if journal.damaged and not how.recompute_changed:
            raise ConfigError(f"{name} has {journal.damage()}. The file is left as it is. {self.if_damaged}.")
        plan = plan_resume(journal, lines, keyed, how)
        if not plan.fits and not how.recompute_changed:
            raise ConfigError(
                f"{name} holds rows that do not fit this run: {plan}. The file is left as it is. {self.if_changed}."
            )
        return plan

    def _go_on(self, plan: ResumePlan) -> None:
        journal = plan.journal
        self.start(journal)
        if plan.rewritten is None:
            return
        with plan.rewritten as rows:
            rows.seek(0)
            for number, data in zip(plan.rekeyed, rows, strict=True):
                index = journal.indices[number]
                journal.indices[number] = SUPERSEDED
                self._append([(index, data)])

    def kept_rows(self) -> Iterator[tuple[int, bytes]]:
        """The rows that `resume` has kept, as (index of the line, bytes of the row) in the order of the input."""
        for number in self._journal.rows(input_order=True):
            yield self._journal.indices[number], self._journal.row(number)

    def write(self, rows: Sequence[Row]) -> Iterable[int]:
        self._append([(row.index, row.data) for row in rows])
        if self._unsynced_since is not None and time.monotonic() - self._unsynced_since >= SYNC_SECONDS:
            self._sync()
        return [row.position for row in rows]

    def drop_tokens(self) -> None:
        """Removes the tokens of rows that an earlier run has not finished."""
        remove_token_journal(self.tokens_path)

    def finish(self, raise_if_interrupted: Callable[[], None]) -> None:
        self._sync()
        self._is_new = False
        status = os.fstat(self._fd)
        if status.st_size != self._journal.end:
            raise RunFailed(f"Another process wrote to {self._name} during the run; the file is left as it is.")
        if not self._is_at_path(status):
            raise RunFailed(f"{self._name} was removed or replaced during the run; its rows are lost.")
        try:
            self._complete(raise_if_interrupted)
        except OSError as error:
            raise self._failed(self._completes, error) from error
        finally:
            self._ordered_path.unlink(missing_ok=True)
        self.drop_tokens()

    def __exit__(self, *error: object) -> None:
        try:
            if self._is_new and not os.fstat(self._fd).st_size:
                self._path.unlink(missing_ok=True)
                if not self.has_content:
                    remove_record(self.final_path)
            else:
                self._sync()
        finally:
            os.close(self._fd)

    def _append(self, rows: Sequence[tuple[int, bytes]]) -> None:
        if not rows:
            return
        view = memoryview(b"".join(data for _, data in rows))
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError as error:
            raise self._failed("write", error) from error
        for index, data in rows:
            self._journal.append(index, len(data))
        self._unsynced_since = self._unsynced_since or time.monotonic()

    def _is_at_path(self, status: os.stat_result) -> bool:
        """Whether the open file, which has this status, is the one that has its name."""
        try:
            return os.path.samestat(status, self._path.stat())
        except FileNotFoundError:
            return False

    def _sync(self) -> None:
        if self._unsynced_since is None:
            return
        self._unsynced_since = None
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise self._failed("write", error) from error

    def _complete(self, raise_if_interrupted: Callable[[], None]) -> None:
        if not self._journal.is_in_order(input_order=self._input_order):
            with self._replacing(self._path, os.fstat(self._fd)) as target:
                target.writelines(self._ordered_rows(raise_if_interrupted))

    def _ordered_rows(self, raise_if_interrupted: Callable[[], None]) -> Iterator[bytes]:
        for number in self._journal.rows(input_order=self._input_order):
            raise_if_interrupted()
            row = self._journal.row(number)
            yield row if self._journal.has_check(number) else with_check(row)

    @contextmanager
    def _replacing(self, path: Path, like: os.stat_result) -> Iterator[IO[bytes]]:
        """A new file, with the permissions of another one, which replaces that at `path` once it is on disk."""
        with self._open_ordered() as target:
            yield target
            target.flush()
            os.fchmod(target.fileno(), like.st_mode & 0o777)
            os.fsync(target.fileno())
        self._ordered_path.replace(path)
        sync_folder(path.parent)

    def _failed(self, verb: str, error: OSError) -> RunFailed:
        return RunFailed(f"Cannot {verb} {self._name}: {error.strerror}.{self.resume_hint}")


def run_stream(
    stream: RowStream,
    output: RowWriter,
    lines: Iterable[Line],
    on_rows: Callable[[Sequence[Row]], None],
    *,
    kept: Container[int] = (),
    max_errors: int | None = None,
    max_truncated: int | None = None,
) -> None:
    """Runs until every line has a row of output. However it ends, finished rows are written.

    on_rows:    called with rows that were written and, now and then, with none
    kept:       indices of lines that have a row of output already
    max_errors: number of error rows that ends the run; `max_truncated`: of rows that were cut off

    Raises EngineError if the engine fails, RunFailed if the input or the output fails or there are so many such rows,
    ReaderGone if nobody reads the output any more, and Interrupted after `stream.interrupt`.
    """
    left = {"error": max_errors, "truncated row": max_truncated}

    def is_within_limits(row: Row) -> bool:
        kind = "error" if row.has_failed else "truncated row" if row.outcome.truncated else ""
        if (number := left.get(kind)) is None:
            return True
        left[kind] = number - 1
        return number > 0

    def raise_if_interrupted() -> None:
        if stream.signum is not None:
            output.flush_held()
            raise Interrupted(stream.signum, output.resume_hint)

    with closing(_finished(stream, output, checked_lines(lines), kept)) as finished:
        for rows in finished:
            rows = list(filter(is_within_limits, rows))
            stream.window.release(output.write(rows))
            on_rows(rows)
            for kind, most, option in (("error", max_errors, "errors"), ("truncated row", max_truncated, "truncated")):
                if most is not None and (left[kind] or 0) <= 0:
                    output.flush_held()
                    raise RunFailed(f"Stopped at {kind} {most:,}, as --max-{option} says.{output.resume_hint}")
    raise_if_interrupted()
    output.finish(raise_if_interrupted)


def _finished(
    stream: RowStream, output: RowWriter, lines: Iterable[Line], kept: Container[int]
) -> Generator[list[Row]]:
    """The stream's finished rows. If it fails, what was held back is written first."""
    try:
        yield from stream.finished(lines, kept)
    except GeneratorExit:
        raise
    except BaseException as raised:
        kind: type[CbatchError] = RunFailed
        reason = f"The run failed: {in_short(as_error(raised))}."  # a bug, or a library that panics
        if isinstance(raised, EngineError | RunFailed):
            kind, reason = type(raised), str(raised)
        output.flush_held()
        raise kind(reason + output.resume_hint) from raised


def require_file(path: Path) -> None:
    """Raises ConfigError for a folder, a device and the like."""
    if path.exists() and not path.is_file():
        raise ConfigError(f"Cannot write {str(path)!r}: a file is needed.")


def sync_folder(folder: Path) -> None:
    """Syncs the folder, so that a file's name is as durable as its content."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
