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
SEED = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
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
