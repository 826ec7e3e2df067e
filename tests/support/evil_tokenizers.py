"""Tokenizers that break the tokenizers library, or try to: each is the demo model's with a change."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

from cbatch.model.load_plan import DEMO_MODEL

ORIGINAL = json.loads((DEMO_MODEL / "tokenizer.json").read_text())
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
A, B = {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}

RARE = "\ue123"
"""A character that no trial has."""

Change = Callable[[dict[str, Any]], object]


def part(**parts: Any) -> Change:
    return lambda tokenizer: tokenizer.update(parts)


def model(**settings: Any) -> Change:
    return lambda tokenizer: tokenizer["model"].update(settings)


def split(pattern: str) -> Change:
    return part(pre_tokenizer={"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False})


def replace(kind: str, content: str, **pattern: str) -> dict[str, Any]:
    return {"type": "Sequence", kind: [{"type": "Replace", "pattern": pattern, "content": content}]}


def template(single: list[Any], special: dict[str, Any] | None = None) -> Change:
    return part(
        post_processor={
            "type": "TemplateProcessing",
            "single": single,
            "pair": [A, B],
            "special_tokens": special or {},
        }
    )


def added(token_id: Any, content: Any) -> Change:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return lambda tokenizer: tokenizer["added_tokens"].append({"id": token_id, "content": content, **flags})


def precompiled(charsmap: str) -> Change:
    return part(normalizer={"type": "Precompiled", "precompiled_charsmap": charsmap})


def growing(kind: str, times: int, character: str = "a") -> dict[str, Any]:
    step = {"type": "Replace", "pattern": {"String": character}, "content": character * 100}
    return {"type": "Sequence", kind: [step] * times}


REFUSED: dict[str, Change] = {
    "Strip past the end": part(decoder={"type": "Strip", "content": "x", "start": 0, "stop": 5}),
    "Strip from both ends": part(
        decoder={"type": "Sequence", "decoders": [BYTE_LEVEL, {"type": "Strip", "content": "e", "start": 3, "stop": 3}]}
    ),
    "a prefix longer than tokens": model(continuing_subword_prefix="##abcdefghij"),
    "a prefix that cuts characters": model(continuing_subword_prefix="é"),
    "no charsmap": precompiled(""),
    "a short charsmap": precompiled("AAAA"),
    "a damaged charsmap": precompiled("CAAAAP////8AAAAA////"),
    "an empty charsmap": precompiled("AAAAAA=="),
    "Replace nothing": part(normalizer=replace("normalizers", "x", String="")),
    "Replace by an empty pattern": part(normalizer=replace("normalizers", "x", Regex="")),
    "Prepend nothing": part(normalizer={"type": "Prepend", "prepend": ""}),
    "chunks of no length": part(pre_tokenizer={"type": "FixedLength", "length": 0}),
    "a pattern without end": split(r"(a|a)*b|(.*)*\1x"),
    "a pattern too deep": split("(" * 3000 + ")" * 3000),
    "no pattern": split("("),
    "a token that is not there": template([{"SpecialToken": {"id": "X", "type_id": 0}}, A]),
    "a second text": template([B]),
    "a normalizer that grows": part(normalizer=growing("normalizers", 5)),
    "a decoder that grows": part(decoder=growing("decoders", 6)),
    "an id too large": added(10**30, "qqq"),
    "a negative id": added(-1, "qqq"),
    "an id that is text": added("5", "qqq"),
    "a merge of one": model(merges=["a"]),
    "a merge of three": model(merges=[["a", "b", "c"]]),
    "no vocabulary": model(type="Unigram", unk_id=0, vocab=[]),
    "an unknown part": part(normalizer={"type": "\x1b[31mEvil\x07"}),
    "an unknown model": model(type="Evil"),
    "not an object": lambda tokenizer: tokenizer.update(model=[1, 2]),
    "dropout of 7": model(dropout=7.0),
}
"""What ends with a sentence."""

WORKS: dict[str, Change] = {
    "as it was": lambda tokenizer: None,
    "chunks": part(pre_tokenizer={"type": "FixedLength", "length": 3}),
    "a quadratic pattern": split(r"(a+)+$"),
    "an empty pattern": split(""),
    "a pattern of a million": split(r"((a{1000}){1000})?"),
    "no decoder": part(decoder=None),
    "a decoder of speech": part(decoder={"type": "CTC", "pad_token": "", "word_delimiter_token": "", "cleanup": True}),
    "Replace in the decoder": part(decoder=replace("decoders", "x", String="")),
    "nothing but the text five times": template([A] * 5),
    "nothing": template([]),
    "an empty token": added(0, ""),
    "the largest id": added(2**32 - 1, "qqq"),
    "ids far outside": template(
        [{"SpecialToken": {"id": "X", "type_id": 0}}, A], {"X": {"id": "X", "ids": [4 * 10**9], "tokens": ["X"]}}
    ),
    "padding without end": part(
        padding={
            "strategy": {"Fixed": 10**9},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "x",
        }
    ),
    "no unknown token": part(model={"type": "WordLevel", "unk_token": "zz", "vocab": {"a": 0}}),
    "words without end": part(
        model={
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 10**9,
            "vocab": {"[UNK]": 0, "a": 1},
        }
    ),
    "one character that grows": part(normalizer=growing("normalizers", 5, RARE)),
}
"""What gives each row its outcome, which may be an error."""

CHANGES = REFUSED | WORKS


def write_folder(folder: Path, change: Change, *, weights: bool = False) -> Path:
    """The demo model's folder with another tokenizer. weights: whether a model can be made of it"""
    folder.mkdir(parents=True, exist_ok=True)
    for path in DEMO_MODEL.iterdir():
        if path.is_file() and path.name != "tokenizer.json" and (weights or path.suffix != ".safetensors"):
            shutil.copyfile(path, folder / path.name)
    tokenizer = deepcopy(ORIGINAL)
    change(tokenizer)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder
