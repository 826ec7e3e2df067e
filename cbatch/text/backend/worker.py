"""A tokenizer in a process of its own, which bounds its time and memory for each text, and may crash without harm."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import count
from typing import Any, NamedTuple

from cbatch.base.errors import ModelError, RequestError
from cbatch.text.backend.base import Encoded, TextStream, TokenizerFailed, printable
from cbatch.text.backend.trial import PARTS
from cbatch.text.worker_process import WorkerProcess

CPU_SECONDS = 5
"""For one text, if it is not long; and for loading the tokenizer, and for the trial of each part."""

MEMORY = 1 << 30
"""Bytes that the process may take."""

TOO_LARGE = "it takes too much memory"
FORGOTTEN = None
"""The answer of a stream that the process does not have, or not as far."""

MAX_ANSWER_BYTES = 1 << 30


class EncodedText(NamedTuple):
    """See `Encoded`."""

    ids: list[int]
    offsets: Sequence[tuple[int, int]]


class Added(NamedTuple):
    """See `AddedToken`."""

    content: str
    special: bool


class _Failed(Exception):
    """The process could not meet a request. The text says why, without a full stop."""


class WorkerBackend:
    """A `TokenizerBackend` in another process, which is started again when it has ended. Thread-safe.

    info: what it says of the tokenizer: `bos_id`, `chat_template` and `special_tokens`
    """

    def __init__(self, source: str, revision: str | None) -> None:
        """Loads the tokenizer of a model there, and tries all of its parts.

        Raises ModelError, with one sentence, if it cannot be loaded or a part fails.
        """
        self._source, self._revision = source, revision
        self._lock = threading.Lock()
        self._numbers = count()
        self._process: WorkerProcess | None = None
        with self._lock:
            self.info: dict[str, Any] = self._load()
            for part, what in PARTS.items():
                self._try("try_part", part, what=what)
        self._added = {number: Added(content, special) for number, content, special in self.info["added"]}
        self.id_to_token = lru_cache(1 << 16)(self._id_to_token)
        self.token_to_id = lru_cache(1 << 10)(self._token_to_id)

    @property
    def decoder(self) -> str:
        return str(self.info["decoder"])

    def encode(self, text: str, *, add_special_tokens: bool) -> Encoded:
        ids, offsets = self.ask("encode", text, add_special_tokens)
        return EncodedText(ids, offsets)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return str(self.ask("decode", list(ids), skip_special_tokens))

    def stream(self, context: Sequence[int]) -> TextStream:
        return _WorkerStream(self, next(self._numbers), list(context))

    def _id_to_token(self, token_id: int) -> str | None:
        token: str | None = self.ask("id_to_token", token_id)
        return token

    def _token_to_id(self, token: str) -> int | None:
        number: int | None = self.ask("token_to_id", token)
        return number

    def get_added_tokens_decoder(self) -> Mapping[int, Added]:
        return self._added

    def to_str(self) -> str:
        return str(self.ask("to_str"))

    def ask(self, method: str, *arguments: Any) -> Any:
        """Calls a method of `TokenizerServer`. Raises TokenizerFailed if it cannot."""
        try:
            with self._lock:
                if self._process is None or not self._process.is_running():
                    self._load()
                return self._ask(method, *arguments)
        except _Failed as failed:
            raise TokenizerFailed(str(failed)) from failed
        except (ModelError, OSError) as error:  # it was loaded before, so it is the machine
            raise RequestError("internal_error", f"The model's tokenizer cannot be started: {error}") from error

    def _load(self) -> Any:
        try:
            self._process = WorkerProcess("cbatch.text.tokenizer_child", CPU_SECONDS, MEMORY)
        except OSError as error:
            raise ModelError(f"The process for the tokenizer cannot be started: {error.strerror}.") from error
        info = self._try("load", self._source, self._revision, what="it cannot be loaded")
        if "error" in info:
            raise ModelError(info["error"])
        return info

    def _try(self, method: str, *arguments: Any, what: str) -> Any:
        try:
            return self._ask(method, *arguments)
        except _Failed as failed:
            raise ModelError(
                f"The tokenizer of {self._source} cannot be used: {what} ({printable(str(failed))}); "
                "take its files from the original model."
            ) from failed

    def _ask(self, method: str, *arguments: Any) -> Any:
        process = self._process
        assert process is not None
        answer = process.ask(json.dumps([method, arguments]).encode() + b"\n", MAX_ANSWER_BYTES)
        if answer is None:
            self._process = None
            raise _Failed(process.end(CPU_SECONDS, TOO_LARGE))
        worked, data = answer
        if not worked:
            raise _Failed(data.decode(errors="replace"))
        return json.loads(data)


class _WorkerStream:
    """A `TextStream` of another process. It knows all tokens, so that a new process can go on."""

    def __init__(self, backend: WorkerBackend, number: int, context: list[int]) -> None:
        self._backend, self._number, self._context = backend, number, context
        self._tokens: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        new = list(token_ids)
        text = self._push(len(self._tokens), new)
        if text is FORGOTTEN:
            self._repeat()
            text = self._push(len(self._tokens), new)
        self._tokens += new
        return text or ""

    def flush(self) -> str:
        text = self._flush()
        if text is FORGOTTEN and self._tokens:
            self._repeat()
            text = self._flush()
        self._tokens = []
        return text or ""

    def _push(self, before: int, token_ids: list[int]) -> str | None:
        text: str | None = self._backend.ask("push", self._number, self._context, before, token_ids)
        return text

    def _flush(self) -> str | None:
        text: str | None = self._backend.ask("flush", self._number, len(self._tokens))
        return text

    def _repeat(self) -> None:
        self._push(0, self._tokens)
