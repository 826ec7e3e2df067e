"""Text as it comes equals text decoded at the end, and stop strings are never half shown."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
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


WORDS = ["▁", "▁the", "he", "llo", "é", "日"]
SPELT = Tokenizer(
    models.Unigram([*((f"<0x{n:02X}>", -9.0) for n in range(256)), *((word, -1.0) for word in WORDS)], None, True)
)
SPELT.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
"""Has bytes for what is no word."""


@example("👩‍👩‍👧 family a\u0301 combining\n\n")
@given(st.text(max_size=20))
def test_deltas_add_up_to_the_text(tokenizer: Tokenizer, text: str) -> None:
    """Guards against characters that are torn, doubled or lost when they span tokens, or when the output is cut."""
    ids = tokenizer.encode(text).ids
    deltas, _ = stream_all(tokenizer, ids)
    assert "".join(deltas) == text and not any("\ufffd" in delta for delta in deltas if "\ufffd" not in text)
    cut, _ = stream_all(tokenizer, ids[:-1])
    assert "".join(cut) == (text[:-1] + "\ufffd" * (text[-1:] > "\x7f"))


@given(st.lists(st.integers(0, 256), max_size=40))
def test_random_tokens_equal_a_full_decode(tokenizer: Tokenizer, ids: list[int]) -> None:
    """Guards against invalid bytes from a random model: the text is what decoding all tokens gives."""
    deltas, _ = stream_all(tokenizer, ids)
    assert "".join(deltas) == tokenizer.decode(ids)


@given(st.lists(st.integers(0, 255) | st.integers(256, 261), max_size=60))
def test_byte_fallback_never_raises(ids: list[int]) -> None:
    """Guards tokenizers of the Llama 2 kind, whose stream fails on bytes that are no character, here and in workers.

    Workers begin each stream anew with its state.
    """
    deltas, _ = stream_all(SPELT, ids)
    assert sum("the" in delta for delta in deltas) == ids.count(257)
    backend = TokenizerBackend(SPELT)
    whole = anew = backend.stream([257])
    for token in ids:
        begun = backend.stream(anew.context)
        begun.push(anew.undecoded)
        expected, anew = whole.push([token]), begun
        assert anew.push([token]) == expected


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


def test_a_tag_may_be_text_between_words() -> None:
    """Guards special tokens that a chat's answer is read by: they are there, and so is the space after them."""
    made = Tokenizer(models.WordLevel({"▁a": 0, "▁b": 1}, unk_token="▁a"))
    made.decoder = decoders.Metaspace()
    made.add_special_tokens(["</think>", "<|end|>"])
    ids = [0, made.token_to_id("</think>"), made.token_to_id("<|end|>"), 1]
    stream = IncrementalDetokenizer(TokenizerBackend(made), hidden={made.token_to_id("<|end|>")})
    text = "".join(map(stream.push, ids)) + stream.flush()
    assert text == made.decode([ids[0], ids[1], ids[3]], skip_special_tokens=False) and text.endswith("</think> b")
