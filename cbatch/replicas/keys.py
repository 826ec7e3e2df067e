"""Keys of the lines of an input, made by all replicas together, for a run that resumes."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass

from cbatch.base.errors import CbatchError, EngineError, RequestError
from cbatch.batch.lines import Line, RowOptions
from cbatch.replicas.dispatcher import MAX_DEATHS
from cbatch.replicas.supervisor import IDLE_SECONDS, Job, Life, SharedState

PIECE_LINES, PIECE_BYTES = 256, 2**20
"""Lines of a piece, and the bytes after which it ends earlier."""

PIECES_AHEAD = 2
"""Pieces that are read for each replica."""

POLL_SECONDS = 0.2


@dataclass(slots=True, eq=False)
class _Piece:
    """Lines whose keys one replica makes, or none to try the options. `keys` or `error` is set in the end."""

    lines: list[Line]
    deaths: int = 0
    keys: list[str] | None = None
    error: CbatchError | None = None


class KeyMaking(Job):
    """The job of the replicas while keys are made."""

    def __init__(self, shared: SharedState, options: RowOptions) -> None:
        self._shared = shared
        self._options = options
        self._waiting: deque[_Piece] = deque()
        self._given: dict[int, _Piece] = {}

    def keyed(self, lines: Iterable[Line]) -> Generator[tuple[Line, str]]:
        """The lines in their order with their keys; reads some pieces ahead.

        Raises RequestError if the options' defaults are wrong, and EngineError if no replica is left.
        """
        ahead: deque[_Piece] = deque()
        pieces = _pieces(lines)
        self._shared.begin(self)
        try:
            while True:
                while len(ahead) < PIECES_AHEAD * max(self._shared.num_alive, 1):
                    piece = next(pieces, None)
                    if piece is None:
                        break
                    ahead.append(piece)
                    self._put(piece)
                if not ahead:
                    return
                piece = ahead.popleft()
                yield from zip(piece.lines, self._wait_for(piece), strict=True)
        finally:
            self._shared.end(self)

    def check_options(self) -> None:
        """Raises as `keyed` does."""
        piece = _Piece([])
        self._shared.begin(self)
        try:
            self._put(piece)
            self._wait_for(piece)
        finally:
            self._shared.end(self)

    def _put(self, piece: _Piece) -> None:
        with self._shared.changed:
            self._waiting.append(piece)
            self._shared.changed.notify_all()

    def _wait_for(self, piece: _Piece) -> list[str]:
        with self._shared.changed:
            while True:
                error = piece.error or self._shared.failure
                if error is not None:
                    raise error
                if piece.keys is not None:
                    return piece.keys
                self._shared.changed.wait(POLL_SECONDS)

    # The threads of the supervisors.

    def serve(self, life: Life) -> None:
        with self._shared.changed:
            if not self._waiting:
                self._shared.changed.wait(IDLE_SECONDS)
            if not self._waiting:
                return
            piece = self._given[life.number] = self._waiting.popleft()
        try:
            piece.keys = life.call("keys", self._options, piece.lines)
        except RequestError as error:
            piece.error = error
        with self._shared.changed:
            del self._given[life.number]
            self._shared.changed.notify_all()

    def leave(self, life: Life) -> None:
        with self._shared.changed:
            piece = self._given.pop(life.number, None)
            if piece is None:
                return
            piece.deaths += 1
            if piece.deaths >= MAX_DEATHS:
                what = "the options of the batch"
                if piece.lines:
                    what = f"the keys of lines {piece.lines[0].index + 1} to {piece.lines[-1].index + 1}"
                piece.error = EngineError(f"Replicas died {MAX_DEATHS} times over {what}.")
            else:
                self._waiting.appendleft(piece)
            self._shared.changed.notify_all()


def _pieces(lines: Iterable[Line]) -> Iterator[_Piece]:
    piece, size = _Piece([]), 0
    for line in lines:
        piece.lines.append(line)
        size += len(line.data or b"")
        if len(piece.lines) == PIECE_LINES or size >= PIECE_BYTES:
            yield piece
            piece, size = _Piece([]), 0
    if piece.lines:
        yield piece
