"""Tokenizers with parts of other tokenizers, with arguments at their edges, and with odd vocabularies."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from tests.support.model_fuzzer.documents import Generator, damaged_document, pick, to_bytes

_SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}
_NORMALIZERS: list[Any] = [
    {"type": "NFC"}, {"type": "NFKD"}, {"type": "Lowercase"}, {"type": "StripAccents"}, {"type": "Nmt"},
    {"type": "Strip", "strip_left": True, "strip_right": True}, {"type": "Prepend", "prepend": ""},
    {"type": "Prepend", "prepend": "▁" * 10_000}, {"type": "ByteLevel"}, {"type": "NoSuchPart"},
    {"type": "Replace", "pattern": {"String": ""}, "content": "xx"}, {"type": "Sequence", "normalizers": []},
    {"type": "Replace", "pattern": {"Regex": "(a|b|ab)*c"}, "content": "x"},
    {"type": "Replace", "pattern": {"Regex": ""}, "content": "y" * 1000},
    {"type": "Replace", "pattern": {"Regex": "("}, "content": ""}, {"type": "Precompiled", "precompiled_charsmap": ""},
    {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
    {"type": "Precompiled", "precompiled_charsmap": "/////////////////////w=="},
    {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None,
     "lowercase": True},
]  # fmt: skip
_PRE_TOKENIZERS: list[Any] = [
    {"type": "Whitespace"}, {"type": "WhitespaceSplit"}, {"type": "BertPreTokenizer"}, {"type": "UnicodeScripts"},
    {"type": "Punctuation", "behavior": "Removed"}, {"type": "Digits", "individual_digits": True},
    {"type": "CharDelimiterSplit", "delimiter": "e"}, {"type": "FixedLength", "length": 0},
    {"type": "FixedLength", "length": 3}, {"type": "FixedLength", "length": 2**63},
    {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
    {"type": "Metaspace", "replacement": "", "prepend_scheme": "first", "split": False},
    {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": False},
    _SPLIT | {"pattern": {"Regex": ""}}, _SPLIT | {"pattern": {"String": ""}}, _SPLIT | {"pattern": {"Regex": "(?=)"}},
    _SPLIT | {"pattern": {"Regex": "(x+x+)+y"}}, _SPLIT | {"pattern": {"Regex": "(" * 3000 + ")" * 3000}},
    _SPLIT | {"pattern": {"Regex": "."}, "behavior": "MergedWithNext", "invert": True},
    {"type": "Sequence", "pretokenizers": [{"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                                            "use_regex": True}] * 50},
    {"type": "Delimiter"}, {"type": "NoSuchPart"},
]  # fmt: skip
_DECODERS: list[Any] = [
    {"type": "Strip", "content": " ", "start": 5, "stop": 5}, {"type": "Strip", "content": "a", "start": 10**9,
    "stop": 0},
    {"type": "Strip", "content": "Ġ", "start": 1, "stop": 2}, {"type": "ByteFallback"}, {"type": "Fuse"},
    {"type": "Replace", "pattern": {"Regex": "("}, "content": ""}, {"type": "Replace", "pattern": {"String": ""},
    "content": "\x1b[31m"}, {"type": "WordPiece", "prefix": "##", "cleanup": True}, {"type": "WordPiece", "prefix": "",
    "cleanup": True}, {"type": "BPEDecoder", "suffix": ""}, {"type": "CTC", "pad_token": "", "word_delimiter_token": "",
    "cleanup": True}, {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
    {"type": "Sequence", "decoders": []}, {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True,
    "use_regex": True}, {"type": "NoSuchPart"},
    {"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 3, "stop": 3}]},
]  # fmt: skip
_PROCESSORS: list[Any] = [
    {"type": "BertProcessing", "sep": ["x", 10**9], "cls": ["y", -1]}, {"type": "BertProcessing", "sep": ["x", 2**31],
    "cls": ["y", 5]}, {"type": "RobertaProcessing", "sep": ["x", 1], "cls": ["y", 99999], "trim_offsets": True,
    "add_prefix_space": True}, {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    {"type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": {}},
    {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 3, "pair": [],
     "special_tokens": {}},
    {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "z", "type_id": 0}}], "pair": [],
     "special_tokens": {"z": {"id": "z", "ids": [4_000_000_000], "tokens": ["z"]}}},
    {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "gone", "type_id": 0}}], "pair": [],
     "special_tokens": {}},
    {"type": "Sequence", "processors": []}, {"type": "NoSuchPart"},
]  # fmt: skip
_VOCABULARY = {"a": 0, "b": 1, "hello": 2, "world": 3, "<unk>": 4, "##x": 5, "▁": 6}
_MODELS: list[Any] = [
    {"type": "WordLevel", "vocab": _VOCABULARY, "unk_token": "<unk>"},
    {"type": "WordLevel", "vocab": _VOCABULARY, "unk_token": "gone"}, {"type": "WordLevel", "vocab": {},
    "unk_token": ""},
    {"type": "WordPiece", "vocab": _VOCABULARY, "unk_token": "<unk>", "continuing_subword_prefix": "##",
     "max_input_chars_per_word": 0},
    {"type": "WordPiece", "vocab": _VOCABULARY, "unk_token": "gone", "continuing_subword_prefix": "",
     "max_input_chars_per_word": 2**63},
    {"type": "Unigram", "vocab": [], "unk_id": 0}, {"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": 9},
    {"type": "Unigram", "vocab": [["<unk>", 0.0], ["", -1.0], ["a", 1e308]], "unk_id": 0, "byte_fallback": True},
    {"type": "Unigram", "vocab": [["a", -1.0], ["b", -2.0]], "unk_id": None},
    {"type": "BPE", "vocab": {}, "merges": []}, {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]},
    {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]], "unk_token": "gone", "fuse_unk": True},
    {"type": "BPE", "vocab": {"a": 0}, "merges": [], "dropout": 2.0},
    {"type": "BPE", "vocab": {"a": 0}, "merges": [], "continuing_subword_prefix": "é", "end_of_word_suffix": "é"},
    {"type": "NoSuchModel"},
]  # fmt: skip
_PARTS = {
    "normalizer": _NORMALIZERS, "pre_tokenizer": _PRE_TOKENIZERS, "decoder": _DECODERS, "post_processor": _PROCESSORS,
    "model": _MODELS,
}  # fmt: skip
_LIMITS: list[Any] = [
    ("truncation", {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 5}),
    ("truncation", {"direction": "Right", "max_length": 0, "strategy": "LongestFirst", "stride": 0}),
    ("padding", {"strategy": {"Fixed": 10**7}, "direction": "Left", "pad_to_multiple_of": None, "pad_id": 0,
                 "pad_type_id": 0, "pad_token": "x"}),
    ("padding", {"strategy": "BatchLongest", "direction": "Left", "pad_to_multiple_of": 0, "pad_id": 0,
                 "pad_type_id": 0, "pad_token": "x"}),
]  # fmt: skip


_PIECES = ("unk_token", "continuing_subword_prefix", "end_of_word_suffix")
_SWITCHES = ("dropout", "byte_fallback", "fuse_unk", "ignore_merges")


def damaged_tokenizer(document: dict[str, Any], generator: Generator) -> bytes:
    """The bytes of a damaged tokenizer.json."""
    changed = deepcopy(document)
    match int(generator.integers(8)):
        case 0 | 1 | 2 | 3:
            for _ in range(int(generator.integers(1, 3))):
                name = pick(generator, list(_PARTS))
                changed[name] = pick(generator, _PARTS[name])
        case 4:
            _change_vocabulary(changed, generator)
        case 5:
            changed.update([pick(generator, _LIMITS)])
        case 6:
            part = pick(generator, ["normalizer", "pre_tokenizer", "decoder", "post_processor", "added_tokens"])
            inner = changed[part] if changed[part] is not None else pick(generator, _NORMALIZERS)
            changed[part] = "here"
            return to_bytes(changed).replace(b'"here"', damaged_document(inner, generator))
        case _:
            return damaged_document(document, generator)
    return to_bytes(changed)


def _change_vocabulary(document: dict[str, Any], generator: Generator) -> None:
    model, tokens = document["model"], document["added_tokens"]
    vocabulary, merges, added = model["vocab"], model["merges"], tokens[int(generator.integers(len(tokens)))]
    token = pick(generator, list(vocabulary))
    pairs = [["a", "b"], "a b", "a", [], ["a"], ["", ""], ["a", "b", "c"], [token, token], None]
    changes: list[tuple[Any, str, list[Any]]] = [
        (vocabulary, token, [-1, 0, 1, 2**31, 2**32 - 1, 2**32, 10**30, 0.5, "1", None]),
        (added, "content", ["", " ", "e", token, "\x1b[31m", "x" * 100_000, "<|bos|>"]),
        (added, "id", [5, 285, 286, 999, 2**31, 2**32 - 1, -1, 10**30, None]),
        (model, pick(generator, _PIECES), ["", "gone", "a", "Ġ", "é" * 1000]),
        (model, pick(generator, _SWITCHES), [True, 1.0, -1.0, 0.5, "x", None]),
    ]
    place, key, values = changes[int(generator.integers(len(changes)))]
    match int(generator.integers(5)):
        case 0:
            del vocabulary[token]
        case 1:
            merges.insert(int(generator.integers(len(merges) + 1)), pick(generator, pairs))
        case _:
            place[key] = pick(generator, values)
