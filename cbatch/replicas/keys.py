"""Keys of the lines of an input, made by all replicas together, for a run that resumes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from cbatch.base.errors import CbatchError, EngineError, RequestError
from cbatch.batch.lines import Line, RowOptions
from cbatch.replicas.dispatcher import MAX_DEATHS
from cbatch.replicas.supervisor import IDLE_SECONDS, Job, Life, SharedState

PIECE_LINES, PIECE_BYTES = 256, 2**20
"""Lines of a piece, and the bytes after which it ends earlier."""

PIECES_AHEAD = 2
"""Pieces that are read for each replica."""


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

    def keyed(self, pieces: Iterable[list[Line]]) -> Iterator[tuple[Line, str]]:
        """The lines in their order with their keys; reads some pieces ahead. An empty piece only tries the options.

        Raises RequestError if the options' defaults are wrong, and EngineError if no replica is left.
        """
        shared, source, ahead = self._shared, map(_Piece, pieces), deque[_Piece]()
        shared.begin(self)
        try:
            while True:
                for piece in islice(source, max(PIECES_AHEAD * max(shared.num_alive, 1) - len(ahead), 0)):
                    ahead.append(piece)
                    with shared.changed:
                        self._waiting.append(piece)
                        shared.changed.notify_all()
                if not ahead:
                    return
                piece = ahead.popleft()
                with shared.changed:
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
