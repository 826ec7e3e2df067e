"""Text as it comes equals text decoded at the end, and stop strings are never half shown."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from cbatch.text.backend import TokenizerBackend
from cbatch.text.detokenizer import IncrementalDetokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """One token for each byte: every character beyond ASCII is split over tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|end|>"])
    return made


def stream_all(tokenizer: Tokenizer, ids: list[int], stop: tuple[str, ...] = ()) -> tuple[list[str], str | None]:
    special = {number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    stream = IncrementalDetokenizer(TokenizerBackend(tokenizer), stop=stop, hidden=special)
    deltas = []
    for token in ids:
        deltas.append(stream.push(token))
        if stream.stop_reason is not None:
            return deltas, stream.stop_reason
    return [*deltas, stream.flush()], None


TEXTS = ["plain", "héllo wörld", "日本語 text", "👩‍👩‍👧 family", "a\u0301 combining", " leading", "end\n\n", ""]


@pytest.mark.parametrize("text", TEXTS)
def test_deltas_add_up_to_the_text(tokenizer: Tokenizer, text: str) -> None:
    """Guards against characters that are torn, doubled or lost when they span tokens."""
    deltas, _ = stream_all(tokenizer, tokenizer.encode(text).ids)
    assert "".join(deltas) == text
    assert not any("\ufffd" in delta for delta in deltas)


@pytest.mark.parametrize("seed", range(30))
def test_random_tokens_equal_a_full_decode(tokenizer: Tokenizer, seed: int) -> None:
    """Guards against invalid bytes from a random model: the text is what decoding all tokens gives."""
    random_ = random.Random(seed)
    ids = [random_.randrange(257) for _ in range(random_.randrange(40))]
    deltas, _ = stream_all(tokenizer, ids)
    assert "".join(deltas) == tokenizer.decode(ids)


@pytest.mark.parametrize("seed", range(30))
def test_byte_fallback_never_raises(seed: int) -> None:
    """Guards the engine against tokenizers of the Llama 2 kind, whose stream fails on bytes that are no character.

    And workers, which begin each stream anew with its state.
    """
    words = ["▁", "▁the", "he", "llo", "é", "日"]
    vocabulary = [(f"<0x{byte:02X}>", -9.0) for byte in range(256)] + [(word, -1.0) for word in words]
    made = Tokenizer(models.Unigram(vocabulary, None, True))
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    random_ = random.Random(seed)
    ids = [random_.choice([random_.randrange(256), random_.randrange(256, 262)]) for _ in range(60)]
    deltas, _ = stream_all(made, ids)
    assert sum("the" in delta for delta in deltas) == ids.count(257)
    backend = TokenizerBackend(made)
    whole = anew = backend.stream([257])
    for token in ids:
        begun = backend.stream(anew.context)
        begun.push(anew.undecoded)
        expected, anew = whole.push([token]), begun
        assert anew.push([token]) == expected


def test_unfinished_character_is_shown_at_the_end(tokenizer: Tokenizer) -> None:
    """Guards against losing the tail of an output that was cut in the middle of a character."""
    ids = tokenizer.encode("ok 日").ids[:-1]
    deltas, _ = stream_all(tokenizer, ids)
    assert deltas[-1] == "\ufffd" and "".join(deltas).startswith("ok ")


@pytest.mark.parametrize(
    ("text", "stop", "shown", "reason"),
    [
        ("one two three", ("two",), "one ", "two"),
        ("ababac", ("abac",), "ab", "abac"),
        ("xyz", ("yz", "xyz"), "", "xyz"),
        ("no stop here", ("hero",), "no stop here", None),
        ("ends with sto", ("stop",), "ends with sto", None),
        ("日本語です", ("語",), "日本", "語"),
    ],
)
def test_stop_strings(tokenizer: Tokenizer, text: str, stop: tuple[str, ...], shown: str, reason: str | None) -> None:
    """Guards against a stop string, or a part of it, being shown; and against losing what only looked like one."""
    deltas, found = stream_all(tokenizer, tokenizer.encode(text).ids, stop)
    assert ("".join(deltas), found) == (shown, reason)


@pytest.mark.parametrize("prompt", ["prompt \ufffd", "日"])
def test_a_prompt_that_ends_in_no_character_stays_out(tokenizer: Tokenizer, prompt: str) -> None:
    """Guards the output against text of the prompt, if that ends inside a character or in U+FFFD."""
    before = tokenizer.encode(prompt).ids
    for cut in (len(before), len(before) - 1):
        stream = IncrementalDetokenizer(TokenizerBackend(tokenizer), before[:cut])
        text = "".join(stream.push(token) for token in tokenizer.encode("answer").ids)
        assert text + stream.flush() == "answer"


def test_stop_strings_wait_for_min_tokens(tokenizer: Tokenizer) -> None:
    """Guards min_tokens against a stop string that comes too early."""
    stream = IncrementalDetokenizer(TokenizerBackend(tokenizer), stop=("b",))
    early = "".join(stream.push(token, may_stop=False) for token in tokenizer.encode("abc").ids)
    assert early == "abc" and stream.stop_reason is None
    assert stream.push(tokenizer.encode("b").ids[0]) == "" and stream.stop_reason == "b"


def test_special_tokens_are_not_text(tokenizer: Tokenizer) -> None:
    """Guards against `<|end|>` in an answer."""
    ids = [*tokenizer.encode("a").ids, tokenizer.token_to_id("<|end|>"), *tokenizer.encode("b").ids]
    assert "".join(stream_all(tokenizer, ids)[0]) == "ab"


def test_a_tag_may_be_text_between_words() -> None:
    """Guards special tokens that a chat's answer is read by: they are there, and so is the space after them."""
    made = Tokenizer(models.WordLevel({"▁a": 0, "▁b": 1}, unk_token="▁a"))
    made.decoder = decoders.Metaspace()
    made.add_special_tokens(["</think>", "<|end|>"])
    ids = [0, made.token_to_id("</think>"), made.token_to_id("<|end|>"), 1]
    stream = IncrementalDetokenizer(TokenizerBackend(made), hidden={made.token_to_id("<|end|>")})
    text = "".join(map(stream.push, ids)) + stream.flush()
    assert text == made.decode([ids[0], ids[1], ids[3]], skip_special_tokens=False) and text.endswith("</think> b")
