"""`cbatch run --check`: reports what an input holds and needs, without running it."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from cbatch.api import Engine
from cbatch.base.errors import RequestError
from cbatch.batch.line_processor import LineProcessor
from cbatch.batch.lines import Line
from cbatch.cli.run.estimate import RowSample, SampledRow
from cbatch.requests.completion import Completion

MAX_SHOWN, MAX_ID_CHARACTERS = 20, 200
MAX_BLOCKS = 1_000_000
"""Most prompt prefixes that are remembered; they take some 100 MiB."""

MAX_IDS = 1_000_000
"""Most ids that are remembered, by their hashes; they take some 100 MiB, too."""


class InputCheck:
    """Reads and tokenizes rows, and counts errors, tokens and shared prefixes."""

    def __init__(self, engine: Engine, processor: LineProcessor, sample: RowSample | None = None) -> None:
        """`sample`: gets the good rows"""
        self._engine, self._processor, self._sample = engine, processor, sample
        self.rows = self.doubled_ids = self._shared_tokens = 0
        self.errors: Counter[str] = Counter()
        self._shown: list[dict[str, Any]] = []
        self._prompts = array("q")
        self._outputs = array("q")
        self._seen: set[int] = set()
        self._first_index: dict[int, int] = {}
        """Index of the first row with an id, by the id's hash."""
        self._doubled: list[dict[str, Any]] = []

    def report(self, lines: Iterator[Line], on_progress: Callable[[], None]) -> dict[str, Any]:
        """Checks all lines and returns the report."""
        for line in lines:
            self.rows += 1
            self._check_line(line)
            on_progress()
        limits = self._engine.limits
        per_token, capacity = limits.kv_bytes_per_token, limits.cache_tokens
        longest = max((p + o for p, o in zip(self._prompts, self._outputs, strict=True)), default=0)
        every = sum(self._prompts) + sum(self._outputs)
        return {
            "rows": self.rows,
            "bad_rows": self.errors.total(),
            "errors": dict(self.errors),
            "first_errors": self._shown,
            "doubled_ids": self.doubled_ids,
            "first_doubled_ids": self._doubled,
            "prompt_tokens": _spread(self._prompts),
            "max_new_tokens": _spread(self._outputs),
            "shared_prefix_tokens": self._shared_tokens,
            "shared_prefix_share": self._shared_tokens / max(sum(self._prompts), 1),
            "kv_cache": {
                "bytes_per_token": per_token,
                "capacity_tokens": capacity,
                "longest_row_tokens": longest,
                "longest_row_bytes": longest * per_token,
                "mean_rows_that_fit": capacity * len(self._prompts) / every if every else None,
                "max_seqs": limits.max_seqs,
            },
        }

    def _check_line(self, line: Line) -> None:
        request = self._processor.process(line)
        self._note_id(line.index, request.id)
        if isinstance(request, Completion):
            self._count_error(request.index, request.id, request.error)
            return
        try:
            limit = self._engine.core.max_new_tokens(request.prompt_ids, request.params)
            self._outputs.append(request.params.n * limit)
            self._prompts.append(len(request.prompt_ids))
            shared = self._count_shared(request.prompt_ids)
            self._shared_tokens += shared
            if self._sample is not None:
                caches = self._engine.core.config.prefix_cache
                self._sample.offer(SampledRow(request.without_source(), limit, shared if caches else 0))
        except RequestError as error:
            self._count_error(request.index, request.id, request.located(error))

    def _count_error(self, index: int, name: str | int | float | None, error: RequestError | None) -> None:
        assert error is not None
        self.errors[error.code] += 1
        if len(self._shown) < MAX_SHOWN:
            self._shown.append({"index": index, "id": _short(name), "code": error.code, "message": str(error)})

    def _note_id(self, index: int, name: str | int | float | None) -> None:
        """Counts rows that have the id of an earlier one: two such rows cannot be told apart by it."""
        if name is None:
            return
        key = hash((type(name), name))  # 1 and 1.0 are two ids
        first = self._first_index.get(key)
        if first is not None:
            self.doubled_ids += 1
            if len(self._doubled) < MAX_SHOWN:
                self._doubled.append({"id": _short(name), "index": index, "first_index": first})
        elif len(self._first_index) < MAX_IDS:
            self._first_index[key] = index

    def _count_shared(self, prompt_ids: Sequence[int]) -> int:
        """Number of tokens at the beginning of a prompt that an earlier prompt shares, in whole blocks."""
        size = self._engine.limits.block_size
        shared, before = 0, 0
        for start in range(0, len(prompt_ids) - size + 1, size):
            before = hash((before, *prompt_ids[start : start + size]))
            if before in self._seen:
                shared += size
            elif len(self._seen) < MAX_BLOCKS:
                self._seen.add(before)
        return shared


def _short(name: str | int | float | None) -> str | int | float | None:
    """An id as a report shows it, since it may have megabytes."""
    is_long = isinstance(name, str) and len(name) > MAX_ID_CHARACTERS
    return f"{str(name)[:MAX_ID_CHARACTERS]}…" if is_long else name


def _spread(values: array[int]) -> dict[str, float | None]:
    """Total, minimum, maximum and percentiles of whole numbers."""
    import numpy as np

    ranks = {"min": 0, "p50": 50, "p90": 90, "p99": 99, "max": 100}
    found = np.percentile(values, list(ranks.values()), method="nearest").tolist() if values else [None] * len(ranks)
    return {"total": sum(values), **dict(zip(ranks, found, strict=True))}
