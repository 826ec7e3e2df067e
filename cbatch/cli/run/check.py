"""`cbatch run --check`: reports what an input holds and needs, without running it."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from cbatch.api import Engine
from cbatch.base.errors import RequestError
from cbatch.batch.line_processor import LineProcessor
from cbatch.batch.lines import Line, PromptFigures
from cbatch.cli.common.percentiles import OF_TIMES, percentiles
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
        self.rows = 0
        self.errors: Counter[str] = Counter()
        self._seen_prompts = PromptFigures()
        self._shown: list[dict[str, Any]] = []
        self._prompts, self._outputs, self._shared = array("q"), array("q"), array("q")
        self._seen: set[int] = set()
        """Hashes of prompts' beginnings."""
        self._first_index: dict[int, int] = {}
        """Index of the first row with an id, by the id's hash."""
        self._num_doubled = 0
        self._doubled: list[dict[str, Any]] = []

    def report(self, lines: Iterator[Line], on_progress: Callable[[], None]) -> dict[str, Any]:
        for line in lines:
            self.rows += 1
            self._check_line(line)
            on_progress()
        limits, prompts, shared = self._engine.limits, sum(self._prompts), sum(self._shared)
        longest = max(map(sum, zip(self._prompts, self._outputs, strict=True)), default=0)
        every = prompts + sum(self._outputs)
        return {
            "rows": self.rows,
            "bad_rows": self.errors.total(),
            "errors": dict(self.errors),
            "first_errors": self._shown,
            "doubled_ids": self._num_doubled,
            "first_doubled_ids": self._doubled,
            **self._seen_prompts.as_dict(),
            "prompt_tokens": _spread(self._prompts),
            "max_new_tokens": _spread(self._outputs),
            "shared_prefix_tokens": shared,
            "shared_prefix_share": shared / max(prompts, 1),
            "kv_cache": {
                "bytes_per_token": limits.kv_bytes_per_token,
                "capacity_tokens": limits.cache_tokens,
                "longest_row_tokens": longest,
                "longest_row_bytes": longest * limits.kv_bytes_per_token,
                "mean_rows_that_fit": limits.cache_tokens * len(self._prompts) / every if every else None,
                "max_seqs": limits.max_seqs,
            },
        }

    def _check_line(self, line: Line) -> None:
        request = self._processor.process(line)
        self._note_id(line.index, request.id)
        try:
            if isinstance(request, Completion):
                assert request.error is not None
                raise request.error
            try:
                core = self._engine.core
                limit = core.max_new_tokens(request.prompt_ids, request.params) if not request.is_pooled else 0
            except RequestError as error:
                raise request.located(error) from None
        except RequestError as error:
            self.errors[error.code] += 1
            if len(self._shown) < MAX_SHOWN:
                shown = {"index": request.index, "id": _short(request.id), "code": error.code, "message": str(error)}
                self._shown.append(shown)
            return
        self._seen_prompts.add(line, request.dropped_tokens)
        self._outputs.append(request.num_outputs * limit)
        self._prompts.append(request.num_prompt_tokens)
        self._shared.append(self._count_shared(request.prompt_ids))
        if self._sample is not None:
            shared = self._shared[-1] if self._engine.core.config.prefix_cache else 0
            self._sample.offer(SampledRow(request.without_source(), limit, shared))

    def _note_id(self, index: int, name: str | int | float | None) -> None:
        """Counts rows that have the id of an earlier one: two such rows cannot be told apart by it."""
        if name is None:
            return
        key = hash((type(name), name))  # 1 and 1.0 are two ids
        if (first := self._first_index.get(key)) is not None:
            self._num_doubled += 1
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
    return {"total": sum(values), **percentiles(values, {"min": 0, **OF_TIMES, "max": 100}, "nearest")}
