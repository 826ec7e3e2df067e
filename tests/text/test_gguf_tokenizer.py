"""Tokenizers of GGUF files give what the Hugging Face tokenizer of the same vocabulary gives, and SentencePiece."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from typing import Any

import pytest
import sentencepiece
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GemmaTokenizer, GPT2Tokenizer, Qwen2Tokenizer

from cbatch.base.errors import ModelError
from cbatch.text.backend import TextTokenizer
from cbatch.text.gguf_tokenizer import end_ids, tokenizer_of
from cbatch.text.patterns import BY_NAME, CASED, GPT4O, LLAMA3, QWEN2, SEED
from tests.support.gguf_files import tokenizer_metadata

TEXTS = [
    "Hello, world! It's 12345 o'clock; WE'LL see.", "  two spaces,\ttabs\n\nand   lines  \n", "x", " ", "\n", "",
    "Größe, naïve café, Ångström, fiancée", "Cafe\u0301 and A\u030angstro\u0308m in pieces",
    "Привет, мир! Как дела?", "Γειά σου Κόσμε", "שלום עולם", "مرحبا بالعالم ١٢٣", "नमस्ते दुनिया १२३",
    "வணக்கம் உலகம்", "สวัสดีชาวโลก", "你好,世界。今天天气很好!", "こんにちは世界 カタカナ", "안녕하세요 세계",
    "ሰላም ልዑል", "Բարեւ աշխարհ", "გამარჯობა", "🙂👩‍👩‍👧‍👦🏳️‍🌈 ok", "def f(x):\n    return x ** 2  # comment",
    "a\u200bb\ufeffc\u00a0d", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 ﬁ ½ ㎏", "<|im_start|>user\nHi<|im_end|>", "<think>well</think> then",
    "1 22 333 4444 55555 3.14 1,000,000", "...---!!! (a)[b]{c} \\ / path/to//file", "ALLCAPS CamelCase snake_case's",
]  # fmt: skip
SPECIAL = [
    AddedToken("<|im_start|>", special=True, normalized=False),
    AddedToken("<|im_end|>", special=True, normalized=False),
]
ADDED = [
    AddedToken("<think>", special=False, normalized=False),
    AddedToken("</think>", special=False, normalized=False),
]


HARD = [
    "1 12 123 1234 12345 123456 1234567 1234abc 12345_6 3.14159 10,000,000 ٣٤٥٦٧ ½ x1234",
    "can't WON'T I'LL 'tis don’t",
    "a\r\nb\r\n\r\n  c\t\t\td\n\n\ne   ", "漢字とかな交じり文。中文，标点！“引号”…",
    "if(x<=3){return a[i]+b->c;} // ok", "…?!…",
    "한국어 텍스트 입니다", "สวัสดีครับ ภาษาไทย", "    indented\n        more", "XMLHttpRequest getURL iPhone15Pro",
    "~!@#$%^&*()_+{}|:\"<>?`", "\u3000全角 空白　。", "(what) [is] {this}.that,then!now?", "<sentinel:12> IMGIMGABCZ",
    "a b c d",
    "ǅ ǀ ƻ K Å ﬁ 𝔘 ꟃ", "naïve e\u0301 ÀÉÎ", " " * 40 + "x", "\n" * 5 + " " * 7,
]  # fmt: skip


def split_by(*patterns: str) -> Any:
    parts = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*parts, pre_tokenizers.ByteLevel(False, use_regex=False)])


DEEPSEEK = (
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
)
HAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
BLOOM_AS_PUBLISHED = " ?[^(\\s|[.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c])]+"
DIGITS = pre_tokenizers.Digits(individual_digits=True)
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
SPLITS: dict[str, Callable[[], Any]] = {
    "gpt-2": lambda: BYTES,
    "smollm": lambda: pre_tokenizers.Sequence([DIGITS, BYTES]),
    "llama-bpe": lambda: split_by(LLAMA3),
    "gpt-4o": lambda: split_by(GPT4O),
    "exaone4": lambda: BYTES,
    "glm4": lambda: split_by(LLAMA3),
    "stablelm2": lambda: split_by(QWEN2),
    "seed-coder": lambda: split_by(SEED),
    "deepseek-v3": lambda: split_by(r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", DEEPSEEK),
    "deepseek-coder": lambda: split_by("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", HAN, r"\p{N}"),
    "deepseek-llm": lambda: split_by(
        "[\r\n]", CASED, "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+", r"\s+$", HAN, r"\p{N}+"
    ),
    "falcon": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Punctuation("contiguous"), BYTES, pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated")]
    ),
    "bloom": lambda: split_by(BLOOM_AS_PUBLISHED),
    "viking": lambda: split_by(BLOOM_AS_PUBLISHED, r"\p{N}"),
    "superbpe": lambda: split_by(r"\p{N}+", r"(?=(\d{3})+(?!\d))"),
    "tiny_aya": lambda: split_by(r"\d{1,3}(?=(?:\d{3})*\b)", GPT4O),
    "kimi-k2": lambda: split_by(
        r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        rf"{CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]+"
        rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]*{CONTRACTIONS}?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "exaone-moe": lambda: split_by(
        CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?"
        r"|\s*[\r\n]|\s+(?!\S)|\s+"
    ),
    "bailingmoe2": lambda: split_by(
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
    ),
    "minicpm5": lambda: split_by(
        r"\p{N}{1,3}",
        CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "jais-2": lambda: split_by(
        CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s{512}(?!\S)"
        r"|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)|\s{1,2}(?!\S)|\s{1}"
    ),
    "youtu": lambda: split_by(
        "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
        "|[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", GPT4O.replace("{1,3}", "")
    ),
    "chameleon": lambda: split_by(
        "<sentinel:[0-9]+>", "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z", r"([\t\n]|    |  )", r"\p{N}",
        r"[\p{P}!-/:-@\[-`{-~]", r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    ),
    "laguna": lambda: split_by(r"[^\n]+|[\n]+", QWEN2),
}  # fmt: skip
"""How the models' own tokenizer.json cut texts into words, as far as they are known, or llama.cpp."""


def trained(split: Any, *, ignore_merges: bool = False) -> Tokenizer:
    """A byte-level tokenizer with a few hundred merges."""
    backend = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    backend.pre_tokenizer, backend.decoder = split, decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    backend.train_from_iterator(TEXTS * 3, trainer)
    backend.add_special_tokens(SPECIAL)
    backend.add_tokens(ADDED)
    return backend


def tokens_of(backend: Any) -> list[str]:
    return [token for token, _ in sorted(backend.get_vocab().items(), key=lambda pair: pair[1])]


def read(metadata: dict[str, Any]) -> TextTokenizer:
    found = tokenizer_of(metadata, len(metadata["tokenizer.ggml.tokens"]))
    assert found is not None
    return found


def compare(found: TextTokenizer, expected: Callable[[str], list[int]], texts: list[str] = TEXTS) -> None:
    for text in texts:
        assert found.backend.encode(text, add_special_tokens=False).ids == expected(text), text


BEGIN = "<｜begin▁of▁sentence｜>"


@pytest.mark.parametrize("name", SPLITS)
def test_byte_level_tokenizers(name: str) -> None:
    """Guards words, merges, decoding, and added tokens, also those like DeepSeek's, which no byte is spelled with."""
    backend = trained(SPLITS[name](), ignore_merges=name in ("llama-bpe", "minicpm5", "youtu"))
    backend.add_special_tokens([AddedToken(BEGIN, special=True, normalized=False)])
    backend.add_tokens([AddedToken("a  b", special=False, normalized=False)])
    found = read(tokenizer_metadata(backend, tokens_of(backend), name))
    for text in [*TEXTS, *HARD, f"{BEGIN}Hi a  b", f"x{BEGIN}"]:
        ids = backend.encode(text, add_special_tokens=False).ids
        assert found.backend.encode(text, add_special_tokens=False).ids == ids
        assert found.backend.decode(ids) == backend.decode(ids)
        assert found.backend.decode(ids, skip_special_tokens=False) == text, "composed, as only Qwen does"
    assert len(found.backend.encode(BEGIN).ids) == 1
    assert found.backend.get_added_tokens_decoder().keys() == backend.get_added_tokens_decoder().keys()


@pytest.mark.parametrize(("name", "kind"), [("qwen2", Qwen2Tokenizer), ("default", GPT2Tokenizer)])
def test_classes_of_transformers(name: str, kind: Any) -> None:
    """Guards the words and the composed characters of Qwen, and GPT-2's, against transformers' own classes."""
    backend = trained(pre_tokenizers.ByteLevel(add_prefix_space=False))
    metadata = tokenizer_metadata(backend, tokens_of(backend), name)
    base = {token: number for token, number in backend.get_vocab().items() if number < 900}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = kind(vocab=base, merges=merges)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer.add_tokens(ADDED)
    ids = {tokenizer.convert_tokens_to_ids(str(token)): str(token) for token in (*SPECIAL, *ADDED)}
    found = read(metadata)
    back = {number: found.backend.token_to_id(token) for number, token in ids.items()}
    compare(found, lambda text: [back.get(i, i) for i in tokenizer(text, add_special_tokens=False).input_ids])


@pytest.fixture(scope="module")
def pieces() -> Any:
    """A model of SentencePiece, as Llama 2 has one: BPE, bytes for unknown characters, and spaces in front."""
    target = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([text.replace("\n", " ") for text in TEXTS[:14]] * 3),
        model_writer=target, vocab_size=700,
        model_type="bpe", byte_fallback=True, character_coverage=0.98, normalization_rule_name="identity",
        remove_extra_whitespaces=False, user_defined_symbols=["<think>"], hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    return sentencepiece.SentencePieceProcessor(model_proto=target.getvalue())


def pieces_metadata(model: Any) -> dict[str, Any]:
    """The metadata that llama.cpp's converter writes for a model of SentencePiece."""
    count = model.get_piece_size()

    def kind(number: int) -> int:
        if model.is_unknown(number):
            return 2
        if model.is_control(number):
            return 3
        return 6 if model.is_byte(number) else 4 if model.id_to_piece(number) == "<think>" else 1

    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [model.id_to_piece(number) for number in range(count)],
        "tokenizer.ggml.scores": [model.get_score(number) for number in range(count)],
        "tokenizer.ggml.token_type": [kind(number) for number in range(count)],
        "tokenizer.ggml.bos_token_id": model.bos_id(),
        "tokenizer.ggml.eos_token_id": model.eos_id(),
        "tokenizer.ggml.unknown_token_id": model.unk_id(),
    }


PLAIN = [text for text in TEXTS if text and "<" not in text]


def test_sentence_pieces(pieces: Any) -> None:
    """Guards Llama 2 and Mistral: merges made of scores, bytes for characters that have no token, and spaces."""
    found = read(pieces_metadata(pieces))
    compare(found, pieces.encode, PLAIN)
    for text in PLAIN:
        assert found.backend.decode(pieces.encode(text)) == pieces.decode(pieces.encode(text))
    assert found.backend.encode("x").ids[0] == pieces.bos_id() == found.bos_id
    assert found.backend.encode("<think>", add_special_tokens=False).ids == [pieces.piece_to_id("<think>")]


@pytest.mark.parametrize("kind", [1, 4], ids=["ordinary", "user-defined, as llama.cpp's converter writes them"])
def test_gemma(kind: int, pieces: Any) -> None:
    """Guards Gemma: no space in front, spaces as themselves in tokens of spaces, and merges in the tokens' order."""
    metadata = pieces_metadata(pieces)
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    assert "▁▁" not in tokens
    at = types.index(1)
    tokens[at:at], types[at:at] = ["▁" * length for length in range(2, 6)], [kind] * 4
    spaced = [" " * len(token) if set(token) == {"▁"} else token for token in tokens]
    changed = {
        "general.architecture": "gemma3", "tokenizer.ggml.tokens": spaced, "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.scores": [-1000.0] * len(tokens),
    }  # fmt: skip
    vocabulary = {token: number for number, token in enumerate(tokens)}
    merges = sorted(
        (number, vocabulary[token[:place]], vocabulary[token[place:]], token[:place], token[place:])
        for number, token in enumerate(tokens)
        for place in range(1, len(token))
        if metadata["tokenizer.ggml.token_type"][number] in (1, 4)
        and token[:place] in vocabulary and token[place:] in vocabulary
    )  # fmt: skip
    expected = GemmaTokenizer(
        vocab=vocabulary, merges=[merge[3:] for merge in merges], unk_token="<unk>", bos_token="<s>", eos_token="</s>",
        pad_token="<s>", mask_token="<s>",
    )  # fmt: skip
    found = read(metadata | changed)
    compare(found, lambda text: expected(text, add_special_tokens=False).input_ids, PLAIN)
    for text in PLAIN:
        assert found.backend.decode(found.backend.encode(text).ids) == text


def test_ends_and_named_tokens() -> None:
    """Guards what ends an output: tokens that the file names, that every model ends with, and GPT-OSS's exception."""
    tokens = ["<s>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "word", "<|eot_id|>"]
    metadata = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [3, 3, 3, 3, 3, 1, 1],
                "tokenizer.ggml.eos_token_id": 5}  # fmt: skip
    assert end_ids(metadata) == [1, 3, 4, 5]
    assert end_ids(metadata | {"tokenizer.ggml.token_type": [3, 3, 3, 1, 3, 1, 1]}) == [1, 2, 4, 5]
    assert end_ids({"tokenizer.ggml.eos_token_id": -1}) == []
    named = {"tokenizer.ggml.eot_token_id": 0, "tokenizer.ggml.eom_token_id": 6}
    assert end_ids(metadata | named) == [0, 1, 3, 4, 5, 6], "all of them count"
    solar = ["<|end|>", "<|flush|>", "<|calls|>", "</s>", "word"]
    assert end_ids({"tokenizer.ggml.tokens": solar, "tokenizer.ggml.eos_token_id": 4}) == [1, 2, 4], (
        "a tag of HTML in Gemma"
    )


def test_texts_begin_and_end_as_the_file_says() -> None:
    """Guards BOS and EOS, which a file may ask for or not."""
    backend = trained(SPLITS["gpt-2"]())
    tokens = tokens_of(backend)
    first, last = tokens.index("<|im_start|>"), tokens.index("<|im_end|>")
    metadata = tokenizer_metadata(backend, tokens, "gpt-2") | {
        "tokenizer.ggml.bos_token_id": first, "tokenizer.ggml.eos_token_id": last
    }  # fmt: skip
    assert first not in read(metadata).backend.encode("Hi").ids and read(metadata).bos_id == first
    both = read(metadata | {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True})
    assert both.backend.encode("Hi").ids[0] == first and both.backend.encode("Hi").ids[-1] == last
    assert both.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}


def test_what_is_not_read() -> None:
    """Guards tokenizers of other kinds, and splits that nobody knows, against tokens that are almost right."""
    backend = trained(SPLITS["gpt-2"]())
    metadata = tokenizer_metadata(backend, tokens_of(backend), "gpt-2")
    assert tokenizer_of({}, 9) is None and tokenizer_of({"tokenizer.ggml.model": "none"}, 9) is None
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"tokenizer.ggml.model": "bert"}, "the kind 'bert', which is not read"),
        ({"tokenizer.ggml.pre": "new-model"}, "called 'new-model', which is not known"),
        ({"tokenizer.ggml.merges": ["ab"]}, "not a pair"),
        ({"tokenizer.ggml.merges": ["a zzzzz"]}, "is damaged"),
        ({"tokenizer.ggml.merges": [1]}, "merges are not texts"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "tokens are not texts"),
        ({"tokenizer.ggml.tokens": []}, "it has 0 tokens"),
        ({"tokenizer.ggml.token_type": [1]}, "have a type"),
        ({"tokenizer.ggml.model": "llama"}, "have a score"),
        ({"tokenizer.chat_template": 3}, "chat template is not a text"),
    ]
    for change, sentence in wrong:
        with pytest.raises(ModelError, match=sentence):
            tokenizer_of(metadata | change, len(metadata["tokenizer.ggml.tokens"]))


@pytest.mark.parametrize("name", BY_NAME)
def test_no_text_is_a_danger(name: str) -> None:
    """Guards each name's patterns against a misspelled one, and against a text that takes forever or is lost."""
    backend = trained(SPLITS["gpt-2"]())
    found = read(tokenizer_metadata(backend, tokens_of(backend), name))
    for text in ("1" * 20_000, " " * 20_000, "\n" * 20_000, "a b" * 7_000, "!" * 20_000, "Aa" * 10_000, "1a" * 10_000):
        started = time.process_time()
        words = found.backend.tokenizer.pre_tokenizer.pre_tokenize_str(text)
        assert sum(stop - start for _, (start, stop) in words) == len(text)
        assert time.process_time() - started < 2, "a second for a text of 20 kB would be quadratic"


def test_letters_are_not_composed() -> None:
    """Guards a class of letters against an editor that writes other characters for those that look the same."""
    assert {"\u1f7d", "\u2126", "\u212a"} <= set(CASED)


def test_splits_are_those_of_transformers() -> None:
    """Guards the table of patterns against that of transformers, in versions that have one."""
    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS as SPLITS_THERE
    except ImportError:
        pytest.skip("this version of transformers has no table of patterns for GGUF files")
    ours = {name: found[0] for name, found in BY_NAME.items() if len(found) == 1}
    shared = ours.keys() & SPLITS_THERE.keys()
    assert len(shared) > 10 and all(ours[name] == SPLITS_THERE[name] for name in shared)
