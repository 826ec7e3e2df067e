"""Tells tokenizers that are known to work on any text from those that may break the library or never end.

A `tokenizer.json` is a program of a model's author, made of parts of the tokenizers library. Some parts panic for some
texts, and regular expressions may take forever. The ordinary ones, with sane arguments, are recognized here and run in
this process; all others run in one of their own (see `isolated`).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from cbatch.text.patterns import WORDS

MAX_PARSED_BYTES = 8 << 20
"""Of a file that is parsed here to look at it. Of larger ones, only what stands before the vocabulary is."""

MAX_QUOTES = 6_000_000
"""In a file: two for each token, and two or four for each merge. The largest of known models have half as many."""

_MAX_PARTS, _MAX_TEXT, _MAX_GROWTH = 32, 64, 64
_MAX_WORD_CHARACTERS = 1000
"""Of a word that WordPiece cuts up, in quadratic time."""

_RISKY_KEYS = (b"continuing_subword_prefix", b"precompiled_charsmap")
"""Keys that may not stand behind the vocabulary, because they can make loading panic."""

_HIDDEN_LETTER = re.compile(rb"(?<!\\)\\u00(?:[2-6]|7[0-9a-eA-E])")
"""A letter that is written as an escape, as in a key that is not to be found."""

_Part = Mapping[str, Any]


class _Unknown(Exception):
    """A tokenizer has something that is not known to work."""


def is_ordinary_file(path: Path) -> bool:
    """Whether loading a `tokenizer.json` can do no harm, and what it makes is probably ordinary."""
    try:
        data = path.read_bytes()
        _check(len(data) < MAX_QUOTES * 4 or data.count(b'"') <= MAX_QUOTES)
        _check_file(_skeleton(data))
    except Exception:  # whatever a file has that is none
        return False
    return True


def is_ordinary(tokenizer: Tokenizer) -> bool:
    """Whether a tokenizer works on any text and any tokens, as far as is known."""
    try:
        parts = [tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.decoder, tokenizer.post_processor]
        states = [None if part is None else json.loads(part.__getstate__()) for part in parts]
        _check_parts(*states)
    except Exception:  # a part of Python has no state
        return False
    return True


def _skeleton(data: bytes) -> Any:
    """The file without its vocabulary, if that is the end of it; else all of it, if it is small."""
    end = data.find(b'"vocab"')
    if 0 <= end <= MAX_PARSED_BYTES and not (
        any(data.find(key, end) >= 0 for key in _RISKY_KEYS)
        or (data.find(rb"\u00", end) >= 0 and _HIDDEN_LETTER.search(data, end) is not None)
    ):
        with suppress(ValueError):
            return json.loads(data[:end] + b'"vocab": {}}}')
    if len(data) > MAX_PARSED_BYTES:
        raise _Unknown
    return json.loads(data)


def _check(is_known: bool) -> None:
    if not is_known:
        raise _Unknown


def _check_file(file: Any) -> None:
    _check(isinstance(file, dict))
    model = file["model"]
    match model.get("type", "BPE" if "dropout" in model else None):
        case "BPE":
            _check(not model.get("continuing_subword_prefix"))
        case "WordPiece":
            _check(model["max_input_chars_per_word"] <= _MAX_WORD_CHARACTERS)
        case "Unigram":
            _check("unk_id" in model)
        case kind:
            _check(kind == "WordLevel")
    _check_parts(*(file.get(name) for name in ("normalizer", "pre_tokenizer", "decoder", "post_processor")))
    for token in file.get("added_tokens", ()):
        _check(isinstance(token["content"], str) and token["content"] != "" and 0 <= token["id"] < 2**32)


def _check_parts(normalizer: Any, pre_tokenizer: Any, decoder: Any, post_processor: Any) -> None:
    _check(_growth(_flat(normalizer, "normalizers", _NORMALIZERS)) <= _MAX_GROWTH)
    _flat(pre_tokenizer, "pretokenizers", _PRE_TOKENIZERS)
    _check(_growth(_flat(decoder, "decoders", _DECODERS)) <= _MAX_GROWTH)
    _flat(post_processor, "processors", _POST_PROCESSORS)


def _flat(part: Any, name: str, known: Mapping[str, Callable[[_Part], bool]]) -> list[_Part]:
    """The parts of which a part consists, each of which is known to work."""
    if part is None:
        return []
    if part["type"] == "Sequence":
        found = [inner for each in part[name] for inner in _flat(each, name, known)]
        _check(len(found) <= _MAX_PARTS)
        return found
    _check(known[part["type"]](part))
    return [part]


def _growth(parts: Iterable[_Part]) -> int:
    return math.prod(max(len(part["content"]), 1) for part in parts if part["type"] == "Replace")


def _replaces_text(part: _Part) -> bool:
    return _is_text(part["pattern"]["String"]) and len(part["content"]) <= _MAX_TEXT


def _splits(part: _Part) -> bool:
    pattern = part["pattern"]
    return _is_text(pattern["String"]) if "String" in pattern else is_known_pattern(pattern["Regex"])


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= _MAX_TEXT


def _has_template(part: _Part) -> bool:
    """Whether what is put around a text is the text, once, and tokens that are there."""
    pieces, known = part["single"], part["special_tokens"]
    texts = [piece["Sequence"]["id"] for piece in pieces if "Sequence" in piece]
    tokens = [piece["SpecialToken"]["id"] for piece in pieces if "SpecialToken" in piece]
    return len(pieces) <= _MAX_PARTS and texts == ["A"] and all(0 < len(known[one]["ids"]) <= 16 for one in tokens)


def _known(harmless: str, **checked: Callable[[_Part], bool]) -> dict[str, Callable[[_Part], bool]]:
    return dict.fromkeys(harmless.split(), lambda part: True) | checked


_NORMALIZERS = _known(
    "NFC NFD NFKC NFKD Lowercase StripAccents Strip BertNormalizer Nmt ByteLevel",
    Replace=_replaces_text, Prepend=lambda part: _is_text(part["prepend"]),
)  # fmt: skip
_PRE_TOKENIZERS = _known(
    "ByteLevel Metaspace Whitespace WhitespaceSplit Digits Punctuation BertPreTokenizer", Split=_splits
)
_DECODERS = _known(
    "ByteLevel Metaspace WordPiece BPEDecoder ByteFallback Fuse", Replace=_replaces_text,
    Strip=lambda part: part["stop"] == 0,  # others count from the end of tokens that may be shorter
)  # fmt: skip
_POST_PROCESSORS = _known("ByteLevel BertProcessing RobertaProcessing", TemplateProcessing=_has_template)


_KNOWN = frozenset(pattern.replace('\\"', '"') for pattern in WORDS)

_CHARACTER = r"(?:\\[pP]\{\^?\w+\}|\\[dDsSwWrnt]|[^\W_]| |\[\^?(?:[^][\\&^]|\\[pP]\{\^?\w+\}|\\.)+\])"
_SIMPLE = re.compile(rf"(?: \?|\\s\?)?(?:{_CHARACTER}|(?:{_CHARACTER}){{2,4}}|{_CHARACTER}(?:[+*]|\{{\d(?:,\d?)?\}}))")
"""Characters of one kind, perhaps after a space."""


def is_known_pattern(pattern: str) -> bool:
    """Whether a pattern of the tokenizers library takes linear time: one of a known model, or a simple one."""
    if len(pattern) > 1000:
        return False
    plain = pattern.replace("\r", r"\r").replace("\n", r"\n").replace('\\"', '"')
    return plain in _KNOWN or _SIMPLE.fullmatch(plain) is not None
