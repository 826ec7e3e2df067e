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


def sequence(kind: str, *steps: dict[str, Any]) -> Change:
    return part(**{kind: {"type": "Sequence", f"{kind}s": steps}})


def replaced(content: str, **pattern: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def template(single: list[Any], special: dict[str, Any] | None = None) -> Change:
    made = {"type": "TemplateProcessing", "single": single, "pair": [A, B], "special_tokens": special or {}}
    return part(post_processor=made)


def added(token_id: Any, content: Any) -> Change:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return lambda tokenizer: tokenizer["added_tokens"].append({"id": token_id, "content": content, **flags})


def precompiled(charsmap: str) -> Change:
    return part(normalizer={"type": "Precompiled", "precompiled_charsmap": charsmap})


def growing(kind: str, times: int, character: str = "a") -> Change:
    return sequence(kind, *[replaced(character * 100, String=character)] * times)


REFUSED: dict[str, Change] = {
    "Strip past the end": part(decoder={"type": "Strip", "content": "x", "start": 0, "stop": 5}),
    "Strip from both ends": sequence("decoder", BYTE_LEVEL, {"type": "Strip", "content": "e", "start": 3, "stop": 3}),
    "a prefix longer than tokens": model(continuing_subword_prefix="##abcdefghij"),
    "a prefix that cuts characters": model(continuing_subword_prefix="é"),
    "no charsmap": precompiled(""),
    "a short charsmap": precompiled("AAAA"),
    "a damaged charsmap": precompiled("CAAAAP////8AAAAA////"),
    "an empty charsmap": precompiled("AAAAAA=="),
    "Replace nothing": sequence("normalizer", replaced("x", String="")),
    "Replace by an empty pattern": sequence("normalizer", replaced("x", Regex="")),
    "Prepend nothing": part(normalizer={"type": "Prepend", "prepend": ""}),
    "chunks of no length": part(pre_tokenizer={"type": "FixedLength", "length": 0}),
    "a pattern without end": split(r"(a|a)*b|(.*)*\1x"),
    "a pattern too deep": split("(" * 3000 + ")" * 3000),
    "no pattern": split("("),
    "a token that is not there": template([{"SpecialToken": {"id": "X", "type_id": 0}}, A]),
    "a second text": template([B]),
    "a normalizer that grows": growing("normalizer", 5),
    "a decoder that grows": growing("decoder", 6),
    "an id too large": added(10**30, "qqq"),
    "a negative id": added(-1, "qqq"),
    "an id that is text": added("5", "qqq"),
    "a merge of one": model(merges=["a"]),
    "a merge of three": model(merges=[["a", "b", "c"]]),
    "no vocabulary": model(type="Unigram", unk_id=0, vocab=[]),
    "an unknown part": part(normalizer={"type": "\x1b[31mEvil\x07"}),
    "not an object": lambda tokenizer: tokenizer.update(model=[1, 2]),
    "dropout of 7": model(dropout=7.0),
}
"""Each ends with a sentence."""

GROWS = growing("normalizer", 5, RARE)
"""Works on every text without the rare character."""


def write_folder(folder: Path, change: Change) -> Path:
    """The demo model's folder with another tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in DEMO_MODEL.iterdir():
        if path.is_file() and path.name != "tokenizer.json" and path.suffix != ".safetensors":
            shutil.copyfile(path, folder / path.name)
    tokenizer = deepcopy(ORIGINAL)
    change(tokenizer)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder
