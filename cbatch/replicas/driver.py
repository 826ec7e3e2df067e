"""Runs the rows of batches on replicas: engines in processes of their own, on this machine or on others."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice
from time import monotonic

from cbatch.base.config import EngineConfig
from cbatch.base.errors import CbatchError, EngineError, RequestError
from cbatch.batch.driver import ReplicaStatus
from cbatch.batch.lines import Line, RowOptions
from cbatch.engine.stats import EngineStats, total_stats
from cbatch.replicas.connection import ReplicaLauncher
from cbatch.replicas.dispatcher import MAX_DEATHS
from cbatch.replicas.stream import ReplicaStream
from cbatch.replicas.supervisor import IDLE_SECONDS, Job, Life, SharedState, Supervisor

TIMEOUT_S, BACKOFF_S = 300.0, 1.0

CLOSE_SECONDS = 0.7
"""How long the end waits for replicas that do not die at once."""

PIECE_LINES, PIECE_BYTES = 256, 2**20
"""Lines of a piece, and the bytes after which it ends earlier."""

PIECES_AHEAD = 2
"""Pieces that are read for each replica."""


class ReplicaDriver(AbstractContextManager["ReplicaDriver"]):
    """A `BatchDriver` of replicas, which it starts, and starts anew when they die.

    info:   what the first replica that was ready says of itself; the others have the same model and limits
    load_s: seconds from its start to that
    """

    def __init__(
        self,
        launcher: ReplicaLauncher,
        config: EngineConfig,
        *,
        timeout_s: float | None = None,
        backoff_s: float = BACKOFF_S,
    ) -> None:
        """Waits until the first replica has loaded its model; the others may take longer.

        launcher:  is closed with the driver
        timeout_s: a replica that does not answer for so long, or makes no step, is killed; None: TIMEOUT_S
        backoff_s: how long a replica stays away after it has died; doubles each time that it finishes no row

        Raises what loading the model raises, and EngineError if no replica can be kept alive.
        """
        self.num_engines = launcher.num_replicas
        self._shared = SharedState(launcher, config, timeout_s or TIMEOUT_S, backoff_s)
        self._supervisors = [Supervisor(number, self._shared) for number in range(launcher.num_replicas)]
        try:
            for supervisor in self._supervisors:
                supervisor.thread.start()
            with self._shared.changed:
                self._shared.changed.wait_for(lambda: self._shared.info or self._shared.failure)
            if self._shared.failure is not None:
                raise self._shared.failure
            assert self._shared.info is not None
            self.info, self.load_s = self._shared.info, self._shared.load_s or 0.0
            self.limits = self.info.limits
        except BaseException:
            self.close()
            raise

    @property
    def model_parts(self) -> Mapping[str, str]:
        return self.info.parts

    @property
    def has_failed(self) -> bool:
        """Whether it runs no batch any more, for the reason that the last one has ended with."""
        return self._shared.failure is not None

    def stats(self) -> EngineStats:
        each = self.each()
        others = [one.stats for one in each if one.state != "running"]
        return total_stats([one.stats for one in each if one.state == "running"], others)

    def each(self) -> Sequence[ReplicaStatus]:
        return [supervisor.status() for supervisor in self._supervisors]

    def keyed(self, options: RowOptions, lines: Iterable[Line]) -> Iterator[tuple[Line, str]]:
        return KeyMaking(self._shared, options).keyed(in_pieces(lines))

    def open(self, options: RowOptions, *, window: int | None = None) -> ReplicaStream:
        list(KeyMaking(self._shared, options).keyed([[]]))  # which raises if they are wrong
        rows = window or 4 * self.limits.max_seqs * self.num_engines
        return ReplicaStream(self._shared, options, window=rows)

    def close(self) -> None:
        """Kills all replicas; a batch that still runs ends with EngineError. May be called twice."""
        self._shared.fail(EngineError("The replicas were closed before the last row was finished."))
        with self._shared.changed:
            self._shared.is_closing = True
            self._shared.changed.notify_all()
        killers = [threading.Thread(target=one.kill, daemon=True) for one in self._supervisors]
        for killer in killers:
            killer.start()
        deadline = monotonic() + CLOSE_SECONDS
        for ending in (*killers, *(supervisor.thread for supervisor in self._supervisors)):
            ending.join(max(deadline - monotonic(), 0.0))
        self._shared.launcher.close()

    def __exit__(self, *error: object) -> None:
        self.close()


@dataclass(slots=True, eq=False)
class _Piece:
    """Lines whose keys one replica makes, or none to try the options. `keys` or `error` is set in the end."""

    lines: list[Line]
    deaths: int = 0
    keys: list[str] | None = None
    error: CbatchError | None = None


class KeyMaking(Job):
    """The job of the replicas while they make keys, for a run that resumes."""

    def __init__(self, shared: SharedState, options: RowOptions) -> None:
        self._shared = shared
        self._options = options
        self._waiting: deque[_Piece] = deque()

    def keyed(self, pieces: Iterable[list[Line]]) -> Iterator[tuple[Line, str]]:
        """The lines in their order with their keys; reads some pieces ahead. An empty piece only tries the options.

        Raises RequestError if the options' defaults are wrong, and EngineError if no replica is left.
        """
        shared, source, ahead = self._shared, map(_Piece, pieces), deque[_Piece]()
        shared.begin(self)
        try:
            while True:
                new = list(islice(source, max(PIECES_AHEAD * max(shared.num_alive, 1) - len(ahead), 0)))
                ahead += new
                if not ahead:
                    return
                piece = ahead.popleft()
                with shared.changed:
                    self._waiting += new
                    shared.changed.notify_all()
                    while piece.keys is None:
                        if error := piece.error or shared.failure:
                            raise error
                        shared.changed.wait()
                yield from zip(piece.lines, piece.keys, strict=True)
        finally:
            shared.end(self)

    def run(self, life: Life) -> None:
        shared = self._shared
        while shared.job is self and not shared.is_closing:
            with shared.changed:
                if not self._waiting:
                    shared.changed.wait(IDLE_SECONDS)
                piece = self._waiting.popleft() if self._waiting else None
            if piece is not None:
                self._make(life, piece)

    def _make(self, life: Life, piece: _Piece) -> None:
        try:
            piece.keys = life.call("keys", self._options, piece.lines)
        except RequestError as error:
            piece.error = error
        except BaseException:
            piece.deaths += 1
            if piece.deaths < MAX_DEATHS:
                self._waiting.appendleft(piece)
            else:
                what = "the options of the batch"
                if piece.lines:
                    what = f"the keys of lines {piece.lines[0].index + 1} to {piece.lines[-1].index + 1}"
                piece.error = EngineError(f"Replicas died {MAX_DEATHS} times over {what}.")
            raise
        finally:
            with self._shared.changed:
                self._shared.changed.notify_all()


def in_pieces(lines: Iterable[Line]) -> Iterator[list[Line]]:
    """The lines in pieces for `keyed`."""
    piece, size = list[Line](), 0
    for line in lines:
        piece.append(line)
        size += len(line.data or b"")
        if len(piece) == PIECE_LINES or size >= PIECE_BYTES:
            yield piece
            piece, size = [], 0
    if piece:
        yield piece
