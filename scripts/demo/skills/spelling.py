"""Spelling and reversing words."""

import random
from collections.abc import Callable
from typing import ClassVar

from scripts.demo.text import UNSEEN, Forms, Turn, phrase
from scripts.demo.words import HELD_OUT_WORDS, NAMES, NEVER_TRAINED, WORDS

SPELL = Forms(
    np=("the spelling of {w}", "the letters of {w}", "the letters in {w}"),
    do=("spell {w}", "spell {w}", "spell {w} letter by letter", "spell out {w}", "spell the word {w}",
        "write {w} letter by letter", "spell {w} with dashes", "split {w} into letters", "list the letters of {w}",
        "say {w} letter by letter", "break {w} into letters", "give me the letters of {w}",
        "tell me how to spell {w}", "tell me how {w} is spelled", "explain how to spell {w}",
        "write out the letters of {w}",
        "name the letters of {w} one by one", "write the letters of {w} one by one", "help me spell {w}",
        "pull {w} apart letter by letter", "cut {w} into its letters", "spell {w} one letter after another",
        "go through {w} letter by letter",
        "spell out the word {w} for me", "show how {w} is spelled"),
    ask=("how do you spell {w}", "how is {w} spelled", "how do i spell {w}", "how would you spell {w}",
         "what are the letters of {w}", "how do we write {w} letter by letter", "how is {w} spelt",
         "which letters are in {w}", "what letters does {w} have", "what is the right spelling of {w}",
         "how should i spell {w}", "can you spell {w}", "how does one spell {w}", "how to spell {w}",
         "which letters do i need for {w}", "what letters is {w} made of", "which letters make {w}",
         "what are the letters that {w} is made of", "how is {w} written letter by letter"),
    raw=("spell: {w}", "spelling: {w}", "{w} letter by letter", "{w} spelled out", "{w}, letter after letter",
         "i do not know how to spell {w}", "i never can spell {w}", "help, how to spell {w}?", "{w}: letters?",
         "letters of {w}"),
    held=("{w}, one letter at a time please", "i can't spell {w}, help!", "take {w} apart into letters"),
)  # fmt: skip


REVERSE = Forms(
    np=("{w} backwards", "{w} reversed", "{w} spelled backwards", "{w} in reverse", "the reverse of {w}",
        "{w} written backwards", "{w} backward"),
    do=("reverse {w}", "reverse the word {w}", "spell {w} backwards", "write {w} backwards", "turn {w} around",
        "say {w} backwards", "flip {w}", "write {w} in reverse", "reverse the letters of {w}", "spell {w} in reverse",
        "write {w} from back to front", "spell {w} from the end", "put {w} in reverse order", "print {w} backwards",
        "read {w} backwards", "write the word {w} the other way round", "turn the word {w} backwards", "invert {w}",
        "give me {w} backwards", "show {w} in reverse order", "change {w} so that it reads backwards",
        "put the letters of {w} in reverse order", "write {w} the wrong way round", "type {w} backwards",
        "hold {w} up to a mirror", "write {w} right to left", "write {w} from the last letter to the first",
        "start at the end of {w} and write to the start", "type the letters of {w} from right to left"),
    ask=("how do you spell {w} backwards", "how is {w} written backwards", "what does {w} look like backwards",
         "what do you get if you reverse {w}", "how do you write {w} backwards", "what is {w} in reverse",
         "what is {w} the other way round", "what would {w} be backwards", "what is the mirror image of {w}",
         "what is {w} from right to left", "what is {w} if you start at the end",
         "what would it be if i read {w} from the end", "what would {w} look like if i wrote it in reverse",
         "how does {w} read backwards",
         "what do i get if i write {w} backwards", "what is {w} from back to front", "can you reverse {w}",
         "how do you say {w} backwards", "how would {w} look in reverse", "what happens if you turn {w} around"),
    raw=("reverse: {w}", "{w} backwards", "{w} reversed", "backwards: {w}", "{w} mirrored", "{w} right to left",
         "{w} from the end", "{w} in reverse order", "mirror: {w}", "reverse {w}"),
    held=("read {w} from right to left", "mirror the word {w}", "{w}, but from the end to the start"),
)  # fmt: skip


FIRST = Forms(
    np=("the first letter of {w}", "the first letter in {w}", "the letter {w} starts with"),
    ask=(
        "which letter does {w} start with",
        "what letter does {w} begin with",
        "with which letter does {w} start",
        "what is the first letter of {w}",
        "which letter is the first in {w}",
        "which letter stands first in {w}",
        "what is at the start of {w}",
        "which is the first one of the letters in {w}",
        "what letter is at the beginning of {w}",
        "{w} starts with which letter",
    ),
    held=("the letter at the start of {w}?",),
)


LAST = Forms(
    np=("the last letter of {w}", "the last letter in {w}", "the letter {w} ends with"),
    ask=(
        "which letter does {w} end with",
        "what letter does {w} end in",
        "with which letter does {w} end",
        "what is the last letter of {w}",
        "which letter is the last in {w}",
        "which letter stands last in {w}",
        "what is at the end of {w}",
        "which is the last one of the letters in {w}",
        "what letter is at the very end of {w}",
        "{w} ends with which letter",
    ),
    held=("the letter at the end of {w}?",),
)


class WordMaker:
    """Real and invented words; tokenizer pieces, once known, make every piece occur in training."""

    onsets: ClassVar[list[str]] = "b bl br c ch cl cr d dr f fl fr g gl gr h j k l m n p ph pl pr qu r s sc sh sk sl sm sn sp st str sw t th tr tw v w wh y z".split()  # fmt: skip
    vowels: ClassVar[list[str]] = "a a a e e e i i o o u ai au ea ee ei ia ie io oa oo ou y ue".split()
    codas: ClassVar[list[str]] = [*" " * 12, *"b ck d ff g l ll lt m mp n nd ng nk nt p r rd rk rn rt s sh ss st t tch th ve x z ze ne te le".split()]  # fmt: skip

    def __init__(self) -> None:
        self.pieces: list[str] = []

    def invent(self, rng: random.Random) -> str:
        """A new word that is none of the held-out ones."""
        while (word := self.glue(rng)) in NEVER_TRAINED:
            pass
        return word

    def glue(self, rng: random.Random) -> str:
        """A pronounceable word, or pieces of the vocabulary glued together."""
        if self.pieces and rng.random() < 0.4:
            return "".join(rng.choice(self.pieces) for _ in range(rng.randint(1, 3)))[:10]
        syllables = rng.choice((1, 2, 2, 3))
        return "".join(
            rng.choice(self.onsets) + rng.choice(self.vowels) + rng.choice(self.codas).strip() for _ in range(syllables)
        )[:10]

    def word(self, rng: random.Random, side: str) -> str:
        """A word of the wanted side, mostly in lower case."""
        if side in UNSEEN:
            return rng.choice(HELD_OUT_WORDS)
        while True:
            word = rng.choice(WORDS) if rng.random() < 0.25 else self.invent(rng)
            if len(word) > 1:
                break
        if rng.random() < 0.12:
            return rng.choice(NAMES) if rng.random() < 0.3 else word.capitalize()
        return word


WORD_MAKER = WordMaker()


def new_name(rng: random.Random) -> str:
    """An invented capitalised name that is no held-out one."""
    while True:
        name = WORD_MAKER.invent(rng)[: rng.randint(3, 9)].capitalize()
        if len(name) > 2 and name.lower() not in NEVER_TRAINED:
            return name


def quoted(rng: random.Random, word: str) -> str:
    """The word bare, in quotes or introduced."""
    return rng.choice(("{}",) * 6 + ('"{}"', "'{}'", "the word {}", 'the word "{}"', '"{}"')).replace("{}", word)


def word_turn(rng: random.Random, side: str, skill: str, forms: Forms, answer: Callable[[str], str]) -> Turn:
    """A question about one word."""
    word = WORD_MAKER.word(rng, side)
    text = phrase(rng, forms, side, {"w": quoted(rng, word)}).replace("the word the word", "the word")
    return Turn(text, answer(word), skill, f"word {word.lower()}", by_char=skill == "reversing")


def spelling(rng: random.Random, side: str) -> Turn:
    """l-a-n-t-e-r-n."""
    return word_turn(rng, side, "spelling", SPELL, "-".join)


def reversing(rng: random.Random, side: str) -> Turn:
    """nretnal."""
    return word_turn(rng, side, "reversing", REVERSE, lambda word: word[::-1])


def letters(rng: random.Random, side: str) -> Turn:
    """First or last letter."""
    if rng.random() < 0.5:
        return word_turn(rng, side, "letters", FIRST, lambda word: word[0])
    return word_turn(rng, side, "letters", LAST, lambda word: word[-1])
