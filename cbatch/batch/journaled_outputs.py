"""Outputs so far of the requests of a batch, in a journal that a later run goes on from."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cbatch.base.errors import ConfigError
from cbatch.base.outputs import KnownOutput
from cbatch.base.request import Request
from cbatch.base.units import format_count
from cbatch.batch.row import Row
from cbatch.batch.token_journal import TokenJournal, TokenJournalConfig, TokenRecord
from cbatch.engine.stepping_engine import SteppingEngine
from cbatch.requests.output_processor import OutputProcessor
from cbatch.requests.recorded_outputs import content_key

_log = logging.getLogger("cbatch")


@dataclass(slots=True)
class _Followed:
    """A request of a row that is not finished.

    written: tokens of each output that are in the journal
    key:     empty until it is needed, since most requests are finished before their tokens are written
    """

    outputs: OutputProcessor
    written: list[int]
    key: str = ""


class JournaledOutputs:
    """Journals outputs of an engine, and lets requests go on with those of an earlier run. One a batch.

    `continue_` and `follow` may be called by any thread, the others by the thread that takes results.

    All requests of a row are followed until the row is finished, also those of tries and rounds of tools that are over.
    A later run asks for them again, and has their outputs at once.
    """

    def __init__(self, engine: SteppingEngine, config: TokenJournalConfig) -> None:
        """Raises ConfigError if the journal cannot be used, or not for this model."""
        if not engine.loaded.fingerprint:
            raise ConfigError("A journal of tokens needs a model of a folder or the hub: others have no fingerprint.")
        self._model = engine.fingerprint
        self._limits = None if engine.model.short_context is None else engine.scheduler.sequence_limits
        """Set if the positions of a request depend on how long it may become."""
        self._interval_s = config.interval_s if config.interval_s is not None else math.inf
        writes = config.interval_s is not None
        self._journal = TokenJournal(Path(config.path), self._model, resume=config.resume, writes=writes)
        self._due = time.monotonic() + self._interval_s
        self._rows: dict[int, list[_Followed]] = {}
        """The requests of each row, by the row's position."""
        self._changed: set[int] = set()
        """Rows that cannot go on, because they are other ones now."""
        self._lock = threading.Lock()

    def continue_(self, request: Request) -> None:
        """Gives a request the tokens that it had in the earlier run, if it had any."""
        row = self._journal.unfinished.get(request.index)
        if row is None or not _can_go_on(request):
            return
        outputs = row.requests.get(self._key(request))
        if outputs is not None:
            known = [outputs.get(number, KnownOutput()) for number in range(request.params.n)]
            request.known = max(known, request.known, key=lambda one: sum(len(output.token_ids) for output in one))
        elif row.key != request.key:
            self._changed.add(request.index)

    def follow(self, row: Row) -> None:
        """Journals what the row's request gets from now on."""
        request = row.request
        if not _can_go_on(request):
            return
        followed = _Followed(row.outputs, [0] * request.params.n)
        if (before := self._journal.unfinished.get(request.index)) is not None:
            followed.key = self._key(request)
            for number, known in before.requests.get(followed.key, {}).items():
                followed.written[number] = len(known.token_ids)
        with self._lock:
            self._rows.setdefault(row.position, []).append(followed)

    def forget(self, row: Row) -> None:
        """A row is finished."""
        with self._lock:
            self._rows.pop(row.position, None)
        self._journal.drop(row.index)

    def tick(self) -> None:
        """Writes if it is time to; called several times a second, after finished rows were written."""
        if (now := time.monotonic()) >= self._due:
            self._due = now + self._interval_s
            self._write()

    def close(self) -> None:
        """Writes what is not finished, and ends."""
        self._write()
        self._journal.close()
        if self._changed:
            answers = format_count(len(self._changed), "unfinished answer")
            _log.warning("%s began anew, because rows or options have changed.", answers)

    def _write(self) -> None:
        with self._lock:
            followed = [one for row in self._rows.values() for one in row]
        self._journal.append([record for one in followed for record in self._new_records(one)])

    def _new_records(self, followed: _Followed) -> Iterator[TokenRecord]:
        """The tokens of a request that are not in the journal; they count as written from now on."""
        request = followed.outputs.request
        for number, output in enumerate(followed.outputs.outputs):
            start, stop = followed.written[number], len(output.token_ids)
            if request.params.logprobs is not None:
                stop = min(stop, len(output.logprobs))  # of a token, the engine's thread adds the id first
            if stop <= start:
                continue
            followed.key = followed.key or self._key(request)
            followed.written[number] = stop
            new = KnownOutput(output.token_ids[start:stop], output.logprobs[start:stop])
            yield TokenRecord(request.index, request.key, followed.key, number, start, new)

    def _key(self, request: Request) -> str:
        return content_key(self._model, self._limits, request).hex()


def _can_go_on(request: Request) -> bool:
    """False if the log-probabilities of the prompt are wanted, which come with the first token."""
    return request.params.prompt_logprobs is None
