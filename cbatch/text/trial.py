"""Tries each part of a tokenizer with texts and tokens that reach its edges."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from cbatch.text.backend import LocalBackend, TokenizerFailed, call

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
    for text in _texts(backend):
        match part:
            case "normalizer" if tokenizer.normalizer is not None:
                yield partial(call, tokenizer.normalizer.normalize_str, text)
            case "pre_tokenizer" if tokenizer.pre_tokenizer is not None:
                yield partial(call, tokenizer.pre_tokenizer.pre_tokenize_str, text)
            case "model" | "post_processor":
                yield partial(backend.encode, text, add_special_tokens=part == "post_processor")


def _texts(backend: LocalBackend) -> Iterator[str]:
    yield from _TEXTS
    added = [token.content for token in backend.get_added_tokens_decoder().values()][:1000]
    for content in added:
        yield f"a{content} b"
    yield " ".join(added)


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
