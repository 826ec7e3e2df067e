"""Earlier outputs of an engine, for the requests of a batch."""

from __future__ import annotations

import threading

from cbatch.base.errors import ConfigError
from cbatch.base.request import Request
from cbatch.batch.answer_cache import AnswerCache, CacheConfig
from cbatch.batch.row import Row
from cbatch.engine.stepping_engine import SteppingEngine
from cbatch.requests.output_processor import OutputProcessor
from cbatch.requests.recorded_outputs import content_key, events_of, record


class CachedOutputs:
    """Gives outputs of an engine that a cache has, and keeps others there. One a batch; any thread may use it."""

    def __init__(self, engine: SteppingEngine, config: CacheConfig) -> None:
        """Raises ConfigError if the cache cannot be used, or not for this model."""
        if not engine.loaded.fingerprint:
            raise ConfigError("A cache needs a model of a folder or the hub: one made in memory has no fingerprint.")
        self._engine, self._model = engine, engine.fingerprint
        self._cache = AnswerCache(config)
        self._waiting: dict[bytes, list[Row]] = {}
        """For each request that is being computed: the rows that wait for its outputs."""
        self._lock = threading.Lock()

    def replay(self, outputs: OutputProcessor) -> bool:
        """Gives a request the outputs that it had the last time; returns whether there were any."""
        key = self._key(outputs.request)
        if (data := self._cache.get(key)) is None:
            return False
        try:
            events = list(events_of(data))
            is_whole = {event.sample_index for event in events} == set(range(outputs.request.params.n))
        except (ValueError, KeyError, TypeError):
            is_whole = False
        if not is_whole:
            self._cache.remove(key)
            return False
        for event in events:
            outputs.take(event)
        return True

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
        return content_key(self._model, self._engine.scheduler.sequence_limits, request)
