"""The tokenizer of a model: in this process if it is known to work on any text, else in one of its own.

That one bounds time and memory for each text, and may crash without harm.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from cbatch.base.errors import ModelError, RequestError, reason_of
from cbatch.base.model_files import check_files, model_folder
from cbatch.isolate.child import Limits
from cbatch.isolate.sandbox import Sandbox
from cbatch.isolate.worker import WorkerFailed
from cbatch.text.backend import (
    EncodedText,
    TextStream,
    TextTokenizer,
    TokenizerBackend,
    TokenizerFailed,
    printable,
)
from cbatch.text.loading import load_here
from cbatch.text.ordinary import is_ordinary, is_ordinary_file

LIMITS = Limits(memory=1 << 30, cpu_seconds=5, cpu_seconds_per_mb=2.0)
"""For one text, for loading the tokenizer, and for the trial of each part. Ordinary tokenizers take half a second for a
million characters.
"""

MAX_ANSWER_BYTES = 1 << 30

_MAX_IDS, _MAX_ADDED, _LAST_ID = 300_000, 1000, 2**32 - 1

_TEXTS = (
    "", "a", " ", "    ", "\n", " \n\t\r\n ", "\x00", "\u0301", "e\u0301 \u0301a", "\ufffd", "\u200d\u200b\ufeff",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467", "日本語のテキスト", "אבג", "Hello, world! It's 12345.678 o'clock.\n",
    "x\u0300\u0301\u0302" * 20, "İßŒﬁ½①", "<|im_start|>user\n<s>[INST]</s>", "a" * 2000, " " * 2000, "ab" * 1000,
    "aA1 .\n" * 300, "1" * 500, "\n" * 500, "." * 500, "é" * 500, "日" * 500,
    "".join(map(chr, range(1, 0x250))),
)  # fmt: skip

VOCABULARIES = ("tokenizer.json", "vocab*", "merges.txt", "*.model", "*.tiktoken")
SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")


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
    check_files(folder)
    if is_ordinary_file(folder / "tokenizer.json"):
        tokenizer = load_here(source, revision)
        if is_ordinary(tokenizer.backend.tokenizer):
            return tokenizer
    backend = WorkerBackend(source, revision)
    info = backend.info
    return TextTokenizer(backend, info["bos_id"], info["chat_template"], info["special_tokens"])


class WorkerBackend(TokenizerBackend):
    """A tokenizer in another process, which is started again when it has ended. Thread-safe.

    info: what it says of the tokenizer: `bos_id`, `chat_template` and `special_tokens`
    """

    def __init__(self, source: str, revision: str | None) -> None:
        """Loads the tokenizer of a model there, and tries all of its parts.

        Raises ModelError, with one sentence, if it cannot be loaded or a part fails.
        """
        self.sandbox = Sandbox(f"{__name__}:TokenizerServer", source, revision, limits=LIMITS)
        self.ask = partial(_ask, self.sandbox)
        try:
            self.info: dict[str, Any] = self.ask("info")
            if "error" in self.info:
                raise ModelError(self.info["error"])
            self.ask("try_out")
        except TokenizerFailed as failed:
            self.sandbox.close()
            raise ModelError(
                f"The tokenizer of {source} cannot be used ({printable(failed.reason)}); take its files from the "
                "original model."
            ) from failed
        except RequestError as error:
            raise ModelError(str(error)) from error
        self._added = {number: AddedToken(content, special=special) for number, content, special in self.info["added"]}
        self.decoder = self.info["decoder"]
        self.id_to_token = lru_cache(1 << 16)(partial(self.ask, "id_to_token"))
        self.token_to_id = lru_cache(1 << 10)(partial(self.ask, "token_to_id"))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> EncodedText:
        return EncodedText(*self.ask("encoded", text, add_special_tokens))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return str(self.ask("decode", list(ids), skip_special_tokens))

    def stream(self, context: Sequence[int]) -> TextStream:
        return _WorkerStream(self, context)

    def get_added_tokens_decoder(self) -> Mapping[int, AddedToken]:
        return self._added

    def to_str(self) -> str:
        return str(self.ask("to_str"))


def _ask(sandbox: Sandbox, method: str, *arguments: Any) -> Any:
    """Calls a method of `TokenizerServer`. Raises TokenizerFailed, and RequestError if no process can be started."""
    try:
        return sandbox.call(method, *arguments, max_bytes=MAX_ANSWER_BYTES)
    except WorkerFailed as failed:
        raise TokenizerFailed(str(failed)) from failed
    except OSError as error:
        sentence = f"The process for the tokenizer cannot be started: {reason_of(error)}."
        raise RequestError("internal_error", sentence) from error


class _WorkerStream(TextStream):
    """A stream whose text another process makes. That one keeps nothing of it, so that a new process can go on."""

    def __init__(self, backend: WorkerBackend, context: Sequence[int]) -> None:
        self._backend, self._ask = backend, backend.ask
        self.context, self.undecoded = list(context), []

    def push(self, token_ids: Sequence[int]) -> str:
        text, self.context, self.undecoded = self._ask("push", self.context, self.undecoded, list(token_ids))
        return str(text)


class TokenizerServer:
    """The server in the other process: a tokenizer, which the first call loads, with the methods of its backend."""

    def __init__(self, source: str, revision: str | None) -> None:
        self._source, self._revision = source, revision

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

    def try_out(self) -> None:
        """Encodes texts, with and without special tokens, decodes them as they come, and decodes every token alone.

        Raises TokenizerFailed if a part panics. Errors of the library are those of the texts that raise them.
        """
        backend = self._tokenizer.backend
        added = backend.get_added_tokens_decoder()
        names = [token.content for token in added.values()][:_MAX_ADDED]
        for text in (*_TEXTS, *(f"a{name} b" for name in names), " ".join(names)):
            for special in (False, True):
                with _library_errors():
                    ids = backend.encode(text, add_special_tokens=special).ids
                    stream = backend.stream(ids[:2])
                    stream.push(ids[2:])
                    stream.flush()
        for token_id in (*range(min(backend.tokenizer.get_vocab_size(), _MAX_IDS)), *added, _LAST_ID):
            with _library_errors():
                backend.decode([token_id], skip_special_tokens=False)

    def encoded(self, text: str, add_special_tokens: bool) -> list[Any]:
        encoded = self._tokenizer.backend.encode(text, add_special_tokens=add_special_tokens)
        return [encoded.ids, encoded.offsets]

    def push(self, context: Sequence[int], undecoded: Sequence[int], token_ids: Sequence[int]) -> list[Any]:
        """The text that tokens add to a stream, and its state after them."""
        stream = self._tokenizer.backend.stream(context)
        stream.push(undecoded)
        return [stream.push(token_ids), stream.context, stream.undecoded]


@contextmanager
def _library_errors() -> Iterator[None]:
    """Passes over errors of the library, but not TokenizerFailed."""
    try:
        yield
    except TokenizerFailed:
        raise
    except Exception:
        pass
