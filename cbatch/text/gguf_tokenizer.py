"""The tokenizer of a GGUF file, from the metadata that llama.cpp reads it from.

A file has tokens, their types and scores or merges, and a name for how text is split into words (`tokenizer.ggml.pre`).
What the name stands for is not in the file: the patterns are those of the models' own `tokenizer.json`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from cbatch.base.errors import ModelError
from cbatch.text.backend import TextTokenizer, TokenizerBackend
from cbatch.text.patterns import BY_NAME

VERSION = 1
"""Of how merges are made of scores: another number makes them anew."""

_TOKENS = "tokenizer.ggml.tokens"
_CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 3, 4, 5, 6
_MAX_TOKEN_CHARACTERS = 2**12
_MAX_MERGED_CHARACTERS = 256
"""A longer piece of a vocabulary without merges is not cut into all of its pairs."""

_UNSPLIT = frozenset(("gemma4", "sarvam-moe", "granite-embed-multi-311m"))
"""Those whose tokens are texts, with a character for spaces, as SentencePiece's, but have merges."""

_NORMALIZES = frozenset(("qwen2", "deepseek-r1-qwen", "qwen35", "mpt", "olmo"))
"""Those whose texts are composed first (NFC)."""

_BEGINS = frozenset(
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano tekken chameleon".split()
)
"""Those whose texts begin with BOS if the file does not say it."""

_IGNORES_MERGES = _BEGINS - {"chameleon"} | {"youtu", "minicpm5", "granite-embed-multi-97m"}
"""Those that take a word as it is if it is a token."""

_END_TOKENS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>",
    "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>",
    "<|tool_response>", "<｜end▁of▁sentence｜>", "<|flush|>", "<|calls|>",
)  # fmt: skip
"""Tokens that end an output in every model that has them, which files do not always name."""

_OF_IMAGES = frozenset("<image> <|image_pad|> <image_soft_token> <start_of_image> <end_of_image>".split())
"""Tokens that are special in their models, which files do not always say."""

_NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


class Pairs(NamedTuple):
    """Merges, by the numbers of the tokens that they merge, the best ones first."""

    first: NDArray[np.uint32]
    second: NDArray[np.uint32]


Keep = Callable[[int, Callable[[], Pairs]], Pairs]
"""Gives the pairs that were kept, or makes and keeps them. They are at most as many as the number says."""


def with_tokens(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The same metadata with the tokens as a list, which is read more than once; an array of a file decodes them."""
    return {**metadata, _TOKENS: _tokens(metadata)}


def tokenizer_of(metadata: Mapping[str, Any], vocab_size: int, keep: Keep | None = None) -> TextTokenizer | None:
    """The tokenizer of a GGUF file's metadata; None if it has none.

    keep: for merges that are made of scores, which takes a while

    Raises ModelError if it is damaged, or of a kind that is not read.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind is None or kind in ("none", "no_vocab"):
        return None
    tokens = _tokens(metadata)
    _check(all(isinstance(token, str) for token in tokens), "its tokens are not texts")
    _check(0 < len(tokens) <= vocab_size, f"it has {len(tokens)} tokens for an embedding of {vocab_size}")
    _check(max(map(len, tokens)) <= _MAX_TOKEN_CHARACTERS, "one of its tokens is too long")
    types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    _check(isinstance(types, list) and len(types) == len(tokens), "not all of its tokens have a type")
    name = str(metadata.get("tokenizer.ggml.pre", "default"))
    kind = "gemma4" if kind == "gpt2" and name in _UNSPLIT else kind
    # Files of Gemma have real spaces in tokens of spaces only, many of which are user-defined.
    is_old = kind == "llama" and str(metadata.get("general.architecture", "")).startswith("gemma")
    if is_gemma := is_old or kind == "gemma4":
        tokens = ["▁" * len(token) if token.strip(" ") == "" else token for token in tokens]
    try:
        if kind == "gpt2":
            backend = _byte_level(metadata, tokens, name)
        elif kind in ("llama", "gemma4"):
            backend = _sentence_pieces(metadata, tokens, types, keep, is_gemma=is_gemma)
        else:
            raise ModelError(f"The GGUF file has a tokenizer of the kind {str(kind)[:40]!r}, which is not read.")
        for number in (_CONTROL, _USER_DEFINED):
            its = [token for token, its_type in zip(tokens, types, strict=True) if its_type == number and token]
            special = frozenset(its) if number == _CONTROL else _OF_IMAGES
            # A token of spaces only stands for those of a normalized text.
            added = [AddedToken(one, normalized=one.strip("▁") == "", special=one in special) for one in its]
            backend.add_tokens(added)
        begins = kind in ("llama", "gemma4") or name in _BEGINS
        bos = _adds_specials(backend, metadata, tokens, begins=begins)
    except ModelError:
        raise
    except Exception as error:  # tokenizers raises plain Exception
        raise _damaged(str(error).splitlines()[0][:200] if str(error) else "it cannot be built") from error
    _check(backend.get_vocab_size() <= vocab_size, "it has more tokens than the embedding")
    places = {name: _token(metadata, key, tokens) for name, key in _NAMED.items()}
    special_tokens = {name: tokens[place] for name, place in places.items() if place is not None}
    template = metadata.get("tokenizer.chat_template")
    _check(template is None or isinstance(template, str), "its chat template is not a text")
    return TextTokenizer(TokenizerBackend(backend), bos, template, special_tokens)


def end_ids(metadata: Mapping[str, Any]) -> list[int]:
    """Tokens that end an output: those that the file names, and those that do so in every model."""
    tokens = _tokens(metadata)
    named = {number for key in ("eos", "eot", "eom") if (number := _token(metadata, key, tokens)) is not None}
    found = {token: number for number, token in enumerate(tokens) if token in _END_TOKENS}
    types = metadata.get("tokenizer.ggml.token_type")
    if isinstance(types, list) and len(types) == len(tokens):
        found = {token: number for token, number in found.items() if types[number] in (_CONTROL, _USER_DEFINED)}
    # In GPT-OSS and Solar Open, this one only ends a message.
    if {"<|return|>", "<|call|>"} <= found.keys() or {"<|flush|>", "<|calls|>"} <= found.keys():
        named.discard(found.pop("<|end|>", -1))
    return sorted(named.union(found.values()))


def _tokens(metadata: Mapping[str, Any]) -> list[Any]:
    given = metadata.get(_TOKENS)
    return list(given) if isinstance(given, Sequence) and not isinstance(given, str) else []


def _damaged(why: str) -> ModelError:
    return ModelError(f"The tokenizer of the GGUF file is damaged: {why}.")


def _check(is_right: bool, why: str) -> None:
    if not is_right:
        raise _damaged(why)


def _token(metadata: Mapping[str, Any], key: str, tokens: Sequence[str]) -> int | None:
    number = metadata.get(f"tokenizer.ggml.{key}_token_id")
    return number if type(number) is int and 0 <= number < len(tokens) else None


def _byte_level(metadata: Mapping[str, Any], tokens: list[str], name: str) -> Tokenizer:
    words = BY_NAME.get(name)
    if words is None:
        how = f"in a way that is called {name[:40]!r}, which is not known"
        raise ModelError(f"The tokenizer of the GGUF file splits text {how}.")
    merges = _merges(metadata.get("tokenizer.ggml.merges") or ())
    backend = Tokenizer(BPE(_vocabulary(tokens), merges, ignore_merges=name in _IGNORES_MERGES))
    if name in _NORMALIZES:
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False) for pattern in words]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentence_pieces(
    metadata: Mapping[str, Any], tokens: list[str], types: Sequence[int], keep: Keep | None, *, is_gemma: bool
) -> Tokenizer:
    """SentencePiece's BPE: spaces are a character, and unknown characters become bytes.

    The scores in files of Gemma are not the order of its merges, which is the order of its tokens.
    """
    given = metadata.get("tokenizer.ggml.merges")
    has_prefix = metadata.get("tokenizer.ggml.add_space_prefix", not (is_gemma and given)) is not False
    scores = metadata.get("tokenizer.ggml.scores", [0.0] * len(tokens) if is_gemma and given else None)
    _check(isinstance(scores, list) and len(scores) == len(tokens), "not all of its tokens have a score")
    if is_gemma:
        scores = [-float(number) for number in range(len(tokens))]
    unknown = _token(metadata, "unknown", tokens)
    vocabulary = _vocabulary(tokens)
    if given:
        merges = _merges(given)
    else:
        make = partial(_merges_of, vocabulary, tokens, types, scores)
        pairs = keep(sum(map(len, tokens)), make) if keep else make()
        merges = list(zip(*(map(tokens.__getitem__, numbers.tolist()) for numbers in pairs), strict=True))
    unknown_token = None if unknown is None else tokens[unknown]
    backend = Tokenizer(BPE(vocabulary, merges, unk_token=unknown_token, fuse_unk=True, byte_fallback=True))
    prepend, strip = ([normalizers.Prepend("▁")], [decoders.Strip(" ", 1, 0)]) if has_prefix else ([], [])
    backend.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return backend


def _vocabulary(tokens: Sequence[str]) -> dict[str, int]:
    """Of equal tokens the first one counts."""
    return dict(zip(reversed(tokens), reversed(range(len(tokens))), strict=True))


def _merges(given: Iterable[Any]) -> list[tuple[str, str]]:
    """Pairs with a space between them. A piece may begin with one."""
    texts = list(given)
    _check(all(isinstance(merge, str) for merge in texts), "its merges are not texts")
    places = [merge.find(" ", 1) for merge in texts]
    merges = [(merge[:place], merge[place + 1 :]) for merge, place in zip(texts, places, strict=True)]
    _check(min(places, default=1) > 0 and all(second for _, second in merges), "one of its merges is not a pair")
    return merges


def _merges_of(vocabulary: dict[str, int], tokens: list[str], types: Sequence[int], scores: Sequence[Any]) -> Pairs:
    """The merges that a vocabulary with scores stands for: every pair of tokens that is a token, the best one first."""
    found: list[tuple[float, int, int]] = []
    get = vocabulary.get
    for token, kind, score in zip(tokens, types, scores, strict=True):
        if kind in (_CONTROL, _BYTE, _UNUSED) or not 2 <= len(token) <= _MAX_MERGED_CHARACTERS:
            continue
        for place in range(1, len(token)):
            first = get(token[:place])
            if first is not None and (second := get(token[place:])) is not None:
                found.append((-float(score), first, second))
    found.sort()
    pairs = np.array([pair[1:] for pair in found], np.uint32).reshape(-1, 2)
    return Pairs(pairs[:, 0], pairs[:, 1])


def _adds_specials(backend: Tokenizer, metadata: Mapping[str, Any], tokens: list[str], *, begins: bool) -> int | None:
    """Makes texts begin and end with the tokens that the file asks for; the one that they begin with, if any.

    begins: with BOS, if the file does not say it
    """
    bos, eos = (_token(metadata, key, tokens) for key in ("bos", "eos"))
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token", begins) is True
    adds_eos = metadata.get("tokenizer.ggml.add_eos_token", False) is True
    first = {tokens[bos]: bos} if adds_bos and bos is not None else {}
    last = {tokens[eos]: eos} if adds_eos and eos is not None else {}
    if first or last:
        pieces = [*(f"{token}:0" for token in first), "$A", *(f"{token}:0" for token in last)]
        backend.post_processor = processors.TemplateProcessing(single=pieces, special_tokens=[*(first | last).items()])
    return bos
