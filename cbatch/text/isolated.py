"""The tokenizer of a model: in this process if it is known to work on any text, else in one of its own.

That one bounds time and memory for each text, and may crash without harm.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, lru_cache, partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from cbatch.base.errors import ModelError, RequestError
from cbatch.base.model_files import model_folder
from cbatch.base.units import format_bytes
from cbatch.isolate.child import Limits
from cbatch.isolate.sandbox import Sandbox
from cbatch.isolate.worker import WorkerFailed
from cbatch.text.backend import (
    AddedToken,
    Encoded,
    LocalBackend,
    TextStream,
    TextTokenizer,
    TokenizerFailed,
    call,
    printable,
)
from cbatch.text.loading import load_here
from cbatch.text.ordinary import is_ordinary, is_ordinary_file

LIMITS = Limits(memory=1 << 30, cpu_seconds=5, cpu_seconds_per_mb=2.0)
"""For one text, for loading the tokenizer, and for the trial of each part. Ordinary tokenizers take half a second for a
million characters.
"""

MAX_ANSWER_BYTES = 1 << 30
MAX_STREAMS = 1024

FORGOTTEN = None
"""The answer of a stream that the process does not have, or not as far."""

PARTS = {
    "normalizer": "its normalizer does not work",
    "pre_tokenizer": "its pre_tokenizer does not work",
    "model": "it cannot encode texts",
    "post_processor": "it cannot add special tokens to texts",
    "decoder": "its decoder does not work",
}
"""In the order in which a text goes through them, and what is said of one that fails."""

_MAX_IDS, _LAST_ID = 300_000, 2**32 - 1
_NUM_SEQUENCES, _SEQUENCE_LENGTH = 200, 12

_TEXTS = (
    "", "a", " ", "    ", "\n", " \n\t\r\n ", "\x00", "\u0301", "e\u0301 \u0301a", "\ufffd", "\u200d\u200b\ufeff",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467", "日本語のテキスト", "אבג", "Hello, world! It's 12345.678 o'clock.\n",
    "x\u0300\u0301\u0302" * 20, "İßŒﬁ½①", "<|im_start|>user\n<s>[INST]</s>", "a" * 2000, " " * 2000, "ab" * 1000,
    "aA1 .\n" * 300, "1" * 500, "\n" * 500, "." * 500, "é" * 500, "日" * 500,
    "".join(map(chr, range(1, 0x250))),
)  # fmt: skip

VOCABULARIES = ("tokenizer.json", "vocab*", "merges.txt", "*.model", "*.tiktoken")
SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")

MAX_VOCABULARY_BYTES, MAX_SETTINGS_BYTES = 64 << 20, 8 << 20
"""Of a file. The largest of known models have half as much."""


def load_tokenizer(source: str, revision: str | None) -> TextTokenizer | None:
    """The tokenizer of a folder or a hub id; None if a folder has none. Raises ModelError, with one sentence."""
    folder = Path(source)
    if folder.is_dir():
        if not any(any(folder.glob(pattern)) for pattern in ("tokenizer*", *VOCABULARIES)):
            return None
    else:
        try:
            folder = model_folder(source, revision, ("config.json", "tokenizer*", *VOCABULARIES, *SETTINGS))
        except OSError as error:
            raise ModelError(f"Cannot load the tokenizer of {source}: {printable(str(error))}.") from error
    _check_sizes(folder)
    if is_ordinary_file(folder / "tokenizer.json"):
        tokenizer = load_here(source, revision)
        if is_ordinary(native(tokenizer).tokenizer):
            return tokenizer
    backend = WorkerBackend(source, revision)
    info = backend.info
    return TextTokenizer(backend, info["bos_id"], info["chat_template"], info["special_tokens"])


def native(tokenizer: TextTokenizer) -> LocalBackend:
    """The backend of a tokenizer of this process."""
    assert isinstance(tokenizer.backend, LocalBackend)
    return tokenizer.backend


def _check_sizes(folder: Path) -> None:
    """Raises ModelError for files that are larger than any of a model."""
    limits = [(VOCABULARIES, MAX_VOCABULARY_BYTES), (SETTINGS, MAX_SETTINGS_BYTES)]
    for patterns, limit in limits:
        for path in (path for pattern in patterns for path in folder.glob(pattern)):
            if path.is_file() and (size := path.stat().st_size) > limit:
                raise ModelError(
                    f"{path} has {format_bytes(size)}, which is more than a tokenizer may have: {format_bytes(limit)}."
                )


class EncodedText(NamedTuple):
    """See `Encoded`."""

    ids: list[int]
    offsets: Sequence[tuple[int, int]]


class WorkerBackend:
    """A `TokenizerBackend` in another process, which is started again when it has ended. Thread-safe.

    info: what it says of the tokenizer: `bos_id`, `chat_template` and `special_tokens`
    """

    def __init__(self, source: str, revision: str | None) -> None:
        """Loads the tokenizer of a model there, and tries all of its parts.

        Raises ModelError, with one sentence, if it cannot be loaded or a part fails.
        """
        self._source = source
        self._numbers = count()
        self.sandbox = Sandbox(f"{__name__}:TokenizerServer", source, revision, limits=LIMITS)
        self.info: dict[str, Any] = self._try("info", what="it cannot be loaded")
        if "error" in self.info:
            raise ModelError(self.info["error"])
        for part, what in PARTS.items():
            self._try("try_part", part, what=what)
        self._added = {number: AddedToken(content, special) for number, content, special in self.info["added"]}
        self.decoder = str(self.info["decoder"])
        self.ask = partial(_ask, self.sandbox)
        self.id_to_token = lru_cache(1 << 16)(partial(self.ask, "id_to_token"))
        self.token_to_id = lru_cache(1 << 10)(partial(self.ask, "token_to_id"))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Encoded:
        return EncodedText(*self.ask("encoded", text, add_special_tokens))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return str(self.ask("decode", list(ids), skip_special_tokens))

    def stream(self, context: Sequence[int]) -> TextStream:
        return _WorkerStream(self, next(self._numbers), list(context))

    def get_added_tokens_decoder(self) -> Mapping[int, AddedToken]:
        return self._added

    def to_str(self) -> str:
        return str(self.ask("to_str"))

    def _try(self, method: str, *arguments: Any, what: str) -> Any:
        try:
            return self.sandbox.call(method, *arguments, max_bytes=MAX_ANSWER_BYTES)
        except OSError as error:
            raise ModelError(f"The process for the tokenizer cannot be started: {error.strerror or error}.") from error
        except WorkerFailed as failed:
            self.sandbox.close()
            raise ModelError(
                f"The tokenizer of {self._source} cannot be used: {what} ({printable(str(failed))}); "
                "take its files from the original model."
            ) from failed


def _ask(sandbox: Sandbox, method: str, *arguments: Any) -> Any:
    """Calls a method of `TokenizerServer`. Raises TokenizerFailed if it cannot."""
    try:
        return sandbox.call(method, *arguments, max_bytes=MAX_ANSWER_BYTES)
    except WorkerFailed as failed:
        raise TokenizerFailed(str(failed)) from failed
    except OSError as error:  # it was loaded before, so it is the machine
        raise RequestError("internal_error", f"The model's tokenizer cannot be started: {error}.") from error


class _WorkerStream:
    """A `TextStream` of another process. It knows all tokens, so that a new process can go on."""

    def __init__(self, backend: WorkerBackend, number: int, context: list[int]) -> None:
        self._backend, self._number, self._context = backend, number, context
        self._tokens: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        text = self._ask("push", len(self._tokens), list(token_ids))
        self._tokens += token_ids
        return text

    def flush(self) -> str:
        text = self._ask("flush", len(self._tokens))
        self._tokens = []
        return text

    def _ask(self, method: str, *arguments: Any) -> str:
        """The answer of a method for this stream, whose tokens a new process gets first."""
        ask = partial(self._backend.ask, method, self._number, self._context, *arguments)
        text = ask()
        if text is FORGOTTEN and self._tokens:
            self._backend.ask("push", self._number, self._context, 0, self._tokens)
            text = ask()
        return text or ""


class TokenizerServer:
    """The server in the other process: a tokenizer, which the first call loads, and the texts in progress.

    It also has the methods of the tokenizer's backend.
    """

    def __init__(self, source: str, revision: str | None) -> None:
        self._source, self._revision = source, revision
        self._streams: OrderedDict[int, tuple[TextStream, int]] = OrderedDict()
        """By number: a stream, and how many tokens it has."""

    @cached_property
    def _tokenizer(self) -> TextTokenizer:
        return load_here(self._source, self._revision)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer.backend, name)

    def info(self) -> dict[str, Any]:
        """The tokenizer's description; or `error`, a sentence."""
        try:
            tokenizer = self._tokenizer
        except ModelError as error:
            return {"error": str(error)}
        added = tokenizer.backend.get_added_tokens_decoder()
        return {
            "bos_id": tokenizer.bos_id,
            "chat_template": tokenizer.chat_template,
            "special_tokens": {name: str(token) for name, token in tokenizer.special_tokens.items()},
            "added": [[number, token.content, token.special] for number, token in added.items()],
            "decoder": str(tokenizer.backend.decoder),
        }

    def try_part(self, part: str) -> None:
        try_part(part, native(self._tokenizer))

    def encoded(self, text: str, add_special_tokens: bool) -> list[Any]:
        encoded = self._tokenizer.backend.encode(text, add_special_tokens=add_special_tokens)
        return [encoded.ids, encoded.offsets]

    def push(self, number: int, context: Sequence[int], before: int, token_ids: Sequence[int]) -> str | None:
        """The text that tokens add to a stream with so many before them; FORGOTTEN if there is none like that."""
        stream, length = self._streams.pop(number, (None, 0))
        if length != before or (stream is None and before):
            return FORGOTTEN
        stream = stream or self._tokenizer.backend.stream(context)
        text = stream.push(token_ids)
        self._streams[number] = stream, before + len(token_ids)
        if len(self._streams) > MAX_STREAMS:
            self._streams.popitem(last=False)
        return text

    def flush(self, number: int, context: Sequence[int], before: int) -> str | None:
        """The end of the text of a stream."""
        stream, length = self._streams.pop(number, (None, 0))
        return FORGOTTEN if stream is None or length != before else stream.flush()


def try_part(part: str, backend: LocalBackend) -> None:
    """Raises TokenizerFailed if a part panics. Its own errors are those of the texts that raise them."""
    for attempt in _attempts(part, backend):
        try:
            attempt()
        except TokenizerFailed:
            raise
        except Exception:
            pass


def _attempts(part: str, backend: LocalBackend) -> Iterator[Callable[[], Any]]:
    tokenizer = backend.tokenizer
    if part == "decoder":
        yield from _decoding(backend)
        return
    added = [token.content for token in backend.get_added_tokens_decoder().values()][:1000]
    for text in (*_TEXTS, *(f"a{content} b" for content in added), " ".join(added)):
        match part:
            case "normalizer" if tokenizer.normalizer is not None:
                yield partial(call, tokenizer.normalizer.normalize_str, text)
            case "pre_tokenizer" if tokenizer.pre_tokenizer is not None:
                yield partial(call, tokenizer.pre_tokenizer.pre_tokenize_str, text)
            case "model" | "post_processor":
                yield partial(backend.encode, text, add_special_tokens=part == "post_processor")


def _decoding(backend: LocalBackend) -> Iterator[Callable[[], Any]]:
    """Every token alone, any tokens together, and tokens as they come."""
    size = min(backend.tokenizer.get_vocab_size(), _MAX_IDS)
    for token_id in (*range(size), *backend.get_added_tokens_decoder(), _LAST_ID):
        yield partial(backend.decode, [token_id], skip_special_tokens=False)
    choose = random.Random(0)
    for _ in range(_NUM_SEQUENCES):
        ids = [choose.randrange(size) for _ in range(choose.randrange(_SEQUENCE_LENGTH))]
        yield partial(backend.decode, ids, skip_special_tokens=choose.random() < 0.5)
        yield partial(_stream, backend, ids)
    for text in _TEXTS:
        ids = []
        with suppress(Exception):  # it has been found already
            ids = backend.encode(text, add_special_tokens=True).ids
        yield partial(_stream, backend, ids)


def _stream(backend: LocalBackend, ids: Sequence[int]) -> None:
    stream = backend.stream(ids[:2])
    for token_id in ids[2:]:
        stream.push([token_id])
    stream.flush()
