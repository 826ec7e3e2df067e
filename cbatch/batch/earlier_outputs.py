"""Earlier outputs of an engine for the requests of a batch: whole ones from a cache, and beginnings from a journal."""

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
from cbatch.batch.answer_cache import AnswerCache, CacheConfig
from cbatch.batch.row import Row
from cbatch.batch.token_journal import TokenJournal, TokenJournalConfig, TokenRecord
from cbatch.engine.stepping_engine import SteppingEngine
from cbatch.requests.output_processor import OutputProcessor
from cbatch.requests.recorded_outputs import content_key, events_of, record

_log = logging.getLogger("cbatch")


class CachedOutputs:
    """Gives outputs of an engine that a cache has, and keeps others there. One a batch; any thread may use it."""

    def __init__(self, engine: SteppingEngine, config: CacheConfig) -> None:
        """Raises ConfigError if the cache cannot be used, or not for this model."""
        self._model, self._limits = _fingerprint(engine, "A cache"), engine.scheduler.sequence_limits
        self._cache = AnswerCache(config)
        self._waiting: dict[bytes, list[Row]] = {}
        """For each request that is being computed: the rows that wait for its outputs."""
        self._lock = threading.Lock()

    def replay(self, outputs: OutputProcessor) -> bool:
        """Gives a request the outputs that it had the last time; returns whether there were any."""
        if (data := self._cache.get(self._key(outputs.request))) is None:
            return False
        try:
            events = list(events_of(data))
            is_whole = {event.sample_index for event in events} == set(range(outputs.request.num_outputs))
        except (ValueError, KeyError, TypeError):
            is_whole = False
        for event in events if is_whole else ():  # else it is computed, and replaced
            outputs.take(event)
        return is_whole

    def keep(self, computed: list[OutputProcessor]) -> None:
        """Keeps the outputs of requests that have ended."""
        records = {self._key(outputs.request): record(outputs) for outputs in computed}
        self._cache.put({key: data for key, data in records.items() if data is not None})

    def defer(self, row: Row) -> bool:
        """Takes a row if a request like its own is being computed; else, its own is from now on."""
        key = self._key(row.request)
        with self._lock:
            if not self._cache.is_open:
                return False
            if key in self._waiting:
                self._waiting[key].append(row)
                return True
            self._waiting[key] = []
            return False

    def settle(self, request: Request) -> list[Row]:
        """A request has ended, whatever came of it. Gives the rows that waited for it."""
        with self._lock:
            return self._waiting.pop(self._key(request), [])

    def close(self) -> None:
        self._cache.close()

    def _key(self, request: Request) -> bytes:
        return content_key(self._model, self._limits, request)


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
        self._model = _fingerprint(engine, "A journal of tokens")
        self._limits = None if engine.model.short_context is None else engine.scheduler.sequence_limits
        """Set if the positions of a request depend on how long it may become."""
        writes = config.interval_s is not None
        self._interval_s = config.interval_s if config.interval_s is not None else math.inf
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
        if outputs := self._journal.known(request.index, self._key(request)):
            known = [outputs.get(number, KnownOutput()) for number in range(request.params.n)]
            request.known = max(known, request.known, key=lambda one: sum(len(output.token_ids) for output in one))
        elif all(record.row_key != request.key for record in row.values()):
            self._changed.add(request.index)

    def follow(self, row: Row) -> None:
        """Journals what the row's request gets from now on."""
        request = row.request
        if not _can_go_on(request):
            return
        followed = _Followed(row.outputs, [0] * request.params.n)
        if request.index in self._journal.unfinished:
            followed.key = self._key(request)
            for number, known in self._journal.known(request.index, followed.key).items():
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
        self._journal.append(record for one in followed for record in self._new_records(one))

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
    """False if something of the prompt is wanted: its log-probabilities, which come with the first token."""
    return request.params.prompt_logprobs is None and not request.is_pooled


def _fingerprint(engine: SteppingEngine, what: str) -> str:
    if not engine.loaded.fingerprint:
        raise ConfigError(f"{what} needs a model of a folder or the hub: others have no fingerprint.")
    return engine.fingerprint
