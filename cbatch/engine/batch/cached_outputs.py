"""What an engine has generated before, for the requests of a batch."""

from __future__ import annotations

from cbatch.engine.base.errors import ConfigError
from cbatch.engine.batch.answer_cache import AnswerCache, CacheConfig
from cbatch.engine.requests.output_processor import OutputProcessor
from cbatch.engine.requests.recorded_outputs import content_key, events_of, record
from cbatch.engine.stepping_engine import SteppingEngine


class CachedOutputs:
    """Gives outputs of an engine that a cache has, and keeps others there."""

    def __init__(self, engine: SteppingEngine, config: CacheConfig) -> None:
        """Raises ConfigError if the cache cannot be used, or not for this model."""
        if not engine.loaded.fingerprint:
            raise ConfigError("A cache needs a model of a folder or the hub: one made in memory has no fingerprint.")
        self._engine, self._model = engine, engine.fingerprint
        self._cache = AnswerCache(config)

    def replay(self, outputs: OutputProcessor) -> bool:
        """Gives a request the outputs that it had the last time; returns whether there were any."""
        key = self._key(outputs)
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
        records = {self._key(outputs): record(outputs) for outputs in computed}
        self._cache.put({key: data for key, data in records.items() if data is not None})

    def close(self) -> None:
        self._cache.close()

    def _key(self, outputs: OutputProcessor) -> bytes:
        return content_key(self._model, self._engine.scheduler.sequence_limits, outputs.request)
