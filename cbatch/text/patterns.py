"""How models split text into words before merges: regular expressions of their own `tokenizer.json`.

Each takes linear time, so that a text is no danger, whatever it is.
"""

from __future__ import annotations

_CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _words(letters: str = r"\p{L}", digits: str = r"\p{N}", others: str = r"\p{L}\p{N}", spaces: str = _SPACES) -> str:
    """Those of Llama 3 and Qwen: letters after one other character, digits, signs with line breaks, and spaces."""
    return rf"(?i:{_CONTRACTIONS})|[^\r\n\p{{L}}\p{{N}}]?{letters}+|{digits}| ?[^\s{others}]+[\r\n]*|{spaces}"


def _cased(digits: str, after: str = "", signs: str = r"[\r\n/]*", upper: str = _UPPER, lower: str = _LOWER) -> str:
    """Those of GPT-4o and Tekken, where a word ends before a capital. after: what may follow a word"""
    before = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{before}{upper}*{lower}+{after}|{before}{upper}+{lower}*{after}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+{signs}|{_SPACES}"
    )


QWEN2 = _words()
"""From https://huggingface.co/Qwen/Qwen3-0.6B."""
LLAMA3 = _words(digits=r"\p{N}{1,3}")
QWEN35 = _words(letters=r"[\p{L}\p{M}]", others=r"\p{L}\p{M}\p{N}")
MINICPM5 = _words(digits=r"\p{N}+")
JAIS2 = _words(
    digits=r"\p{N}{1,3}",
    spaces=r"\s*[\r\n]+|" + "".join(rf"\s{{{2**n}}}(?!\S)|" for n in range(9, 1, -1)) + r"\s{1,2}(?!\S)|\s{1}",
)
TEKKEN = _cased(r"\p{N}")
_AFTER = f"(?i:{_CONTRACTIONS})?"
GPT4O = _cased(r"\p{N}{1,3}", _AFTER)
YOUTU = _cased(r"\p{N}", _AFTER)
_NOT_HAN = r"&&[^\p{Han}]]"
KIMI = r"[\p{Han}]+|" + _cased(
    r"\p{N}{1,3}", _AFTER, r"[\r\n]*", _UPPER.replace("]", _NOT_HAN), _LOWER.replace("]", _NOT_HAN)
)  # fmt: skip
SEED = rf"(?i:{_CONTRACTIONS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
GPT2 = rf"{_CONTRACTIONS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"
GPT2_GROUPED = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
BAILING = CL100K.replace("{1,3}", "")
EXAONE_MOE = (
    rf"(?i:{_CONTRACTIONS})|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BLOOM = r" ?[^(\s|[.,!?…。，、।۔،])]+"
DEMO = r" ?\p{Ll}+|\p{Lu}+(?!\p{Ll})|\p{Lu}\p{Ll}+|\p{N}|\s|[^\s\p{L}\p{N}]+|\p{L}"

WORDS = (
    QWEN2, LLAMA3, QWEN35, MINICPM5, JAIS2, TEKKEN, GPT4O, YOUTU, KIMI, SEED, GPT2, GPT2_GROUPED, CL100K, BAILING,
    EXAONE_MOE, DEEPSEEK3, BLOOM, DEMO,
)  # fmt: skip

# Of DeepSeek's first models: letters that have a case, signs, and characters of Chinese and Korean.
CASED = (
    r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-"
    "ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+"
)
SIGNS, ASIAN = "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+", "[一-龥\u0800-一가-\ud7ff]+"
CJK = "[一-龥\u3040-ゟ゠-ヿ]+"
"""Of DeepSeek V3."""
YOUTU_CJK = f"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|{CJK}"
AFMOE_ASIAN = (
    "[一-鿿㐀-䶿\u8c48-\ufaff\u3040-ゟ゠-ヿ\uff65-ﾟ"
    "\u2f00-\u2fdfเ-\u0e7f\u0e80-\u0effក-\u17ffက-႟ꩠ-ꩿꧠ-\ua9ff가-\ud7afᄀ-ᇿ]+"
)
RIGHT_THREES = r"\p{N}+", r"^\p{N}{1,2}(?=(?:\p{N}{3})+$)", r"\p{N}{3}"
"""Digits by three from the right: each run of them, what is left at its beginning, and the others."""

_DIGIT, _THREE_DIGITS = r"\p{N}", r"\p{N}{1,3}"
_SPLITS: dict[tuple[str, ...], str] = {
    (GPT2,): "default gpt-2 gpt2 phi-2 mpt olmo jais exaone4 trillion granite-docling gigachat a.x-4.0 mellum "
    "modern-bert jina-v1-en jina-v2-es jina-v2-de jina-v2-code roberta-bpe",
    (_DIGIT, GPT2): "smollm refact starcoder codeshell command-r exaone minerva-7b mellum2",
    (LLAMA3,): "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano dbrx smaug-bpe glm4 "
    "chatglm-bpe",
    (QWEN2,): "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2",
    (QWEN35,): "qwen35",
    (r"[^\n]+|\n+", QWEN2): "laguna",
    (_THREE_DIGITS, MINICPM5): "minicpm5",
    (JAIS2,): "jais-2",
    (SEED,): "seed-coder",
    (TEKKEN,): "tekken",
    (GPT4O,): "gpt-4o llama4 kanana2 talkie minimax-m2 granite-embed-multi-97m",
    (YOUTU_CJK, YOUTU): "youtu",
    (KIMI,): "kimi-k2",
    (BAILING,): "bailingmoe bailingmoe2 llada-moe",
    (EXAONE_MOE,): "exaone-moe",
    (_THREE_DIGITS, CJK, DEEPSEEK3): "deepseek-v3 hunyuan-dense joyai-llm",
    (r"[\r\n]", CASED, SIGNS, r"\s+$", ASIAN, r"\p{N}+"): "deepseek-llm",
    (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", ASIAN, _DIGIT): "deepseek-coder",
    (*RIGHT_THREES, AFMOE_ASIAN, DEEPSEEK3): "afmoe",
    RIGHT_THREES: "superbpe",
    (r"(?<!\d)\d++\b", *RIGHT_THREES[1:], GPT4O): "tiny_aya cohere2moe",
    (r"[\p{P}$+<=>^~|`]+", GPT2, "[0-9][0-9][0-9]"): "falcon",
    (BLOOM,): "bloom poro-chat gpt3-finnish",
    (BLOOM, _DIGIT): "viking",
    ("<sentinel:[0-9]+>", "IMGIMG[A-I]{1,4}Z", r"[\t\n]|    |  ", _DIGIT, r"[\p{P}!-/:-@\[-`{-~]", GPT2): "chameleon",
}  # fmt: skip
BY_NAME = {name: words for words, names in _SPLITS.items() for name in names.split()}
"""Patterns that cut a text into words before merges, one after the other, and llama.cpp's names for them."""
