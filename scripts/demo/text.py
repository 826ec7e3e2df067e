"""Turns a request into the many ways a person may type it."""

import random
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from scripts.demo.words import ORDINALS

T = TypeVar("T")

TRAIN = "train"
TEST = "test"
FRESH = "fresh"  # test operands in training wordings
UNSEEN = (TEST, FRESH)
DRILL = "drill"  # training, in the shortest wordings

NP_FRAMES = (
    "what is {}?", "what is {}?", "what's {}?", "whats {}?", "tell me {}.", "can you tell me {}?", "do you know {}?",
    "i want to know {}.", "{}?", "{}", "{}", "please tell me {}.", "give me {}.", "could you tell me what {} is?",
    "i'd like to know {}.", "hey, what is {}?", "say {}.", "so, what is {}?", "quick question: what is {}?",
    "i need {}.", "i need to know {}.", "tell me what {} is.", "do you know what {} is?", "now tell me {}.",
    "and what is {}?", "and {}?", "what would be {}?", "what was {} again?", "let me know {}.", "find {}.",
    "what is {} please?", "{}, please.", "ok, what is {}?", "hi, can you tell me {}?", "question: {}?",
    "can i have {}?",
    "i am looking for {}.", "just tell me {}.", "write {}.", "show me {}.", "what do you think is {}?",
    "will you tell me {}?", "please give me {}.", "i wonder what {} is.", "can you give me {}?", "my question is {}.",
    "could you give me {}?", "work out {}.", "next: {}", "hello! what is {}?",
)  # fmt: skip
NP_FRAMES_HELD = (
    "would you happen to know {}?", "any idea what {} is?", "remind me of {}.", "i forgot {}, can you help?",
    "my friend asked me for {}.", "how about {}?", "i'm curious about {}.", "for my homework i have to know {}.",
)  # fmt: skip
DO_FRAMES = (
    "{}.", "{}", "{}", "please {}.", "can you {}?", "could you {}?", "{} please.", "{} for me.", "i want you to {}.",
    "i'd like you to {}.", "hey, {}.", "now {}.", "ok, {}.", "go ahead and {}.", "will you {}?", "can you please {}?",
    "could you {} for me?", "let's see if you can {}.", "and now {}.", "next, {}.", "your task: {}.", "task: {}",
    "are you able to {}?", "hi, can you {}?", "{}, please!", "then {}.", "do this: {}.", "you should {}.",
    "i would like you to {}.", "just {}.", "hello, please {}.", "show me that you can {}.", "i want to see you {}.",
)  # fmt: skip
DO_FRAMES_HELD = (
    "would you be so kind and {}?", "i need you to {}.", "try to {}.", "do me a favour and {}.", "would you mind? {}.",
    "i bet you can not {}!",
)  # fmt: skip
ASK_FRAMES = (
    "{}?", "{}?", "{}?", "{}", "{}", "hey, {}?", "tell me, {}?", "quick question: {}?", "ok, {}?", "{}, please?",
    "so {}?", "i wonder, {}?", "hi! {}?", "question: {}?", "tell me {}.", "can you tell me {}?", "and {}?", "now, {}?",
    "do you know {}?", "please tell me {}.", "hello, {}?", "i want to know {}.", "next question: {}?", "{} please?",
)  # fmt: skip
ASK_FRAMES_HELD = (
    "one more thing: {}?", "my kid asks: {}?", "hmm, {}?", "let me ask you something, {}?", "{}? i forgot.",
)  # fmt: skip

LEADS = (
    "hey, ", "hi, ", "ok, ", "so, ", "well, ", "um, ", "please, ", "hello! ", "quick, ", "one question: ", "listen, ",
    "sorry, ", "good morning, ", "dear model, ", "can you help me? ", "i need help: ", "i was wondering, ",
    "just a test: ",
    "for school: ", "my teacher asks: ", "my sister wants to know: ", "i never know this: ", "help me please, ",
    "new question, ", "another one: ", "last question: ", "i have a question: ", "you know what? ", "let me think, ",
    "here is one: ", "this one is easy: ", "you surely know this: ", "tell me: ", "hey you, ", "i am not sure, ",
    "right, ",
    "a question for you: ", "my brother asked me, ", "we need to know, ", "now for something else: ", "easy one, ",
    "hmm ok, ",
)  # fmt: skip
TAILS = (
    " thanks", " thank you", " pls", " please", " quickly", " again", " now", " if you can", " for me", " i need it",
    " do you know?", " you know that?", " right now", " thx", ", my friend", ", buddy", " in short", ", and be quick",
    " i don't know", " i can not remember", ", can you?", ", will you?", ", ok?", " today", " then", ", right?",
)  # fmt: skip
OBJECTS = (
    "apples", "books", "cups", "pens", "cookies", "cards", "stones", "flowers", "cars", "birds", "balls", "stamps",
    "dollars",
    "sheep", "cats", "shoes", "plates", "chairs", "stickers", "lemons", "trees", "kids", "euros", "fish", "boxes",
)  # fmt: skip


@dataclass(frozen=True)
class Turn:
    """One question and its answer; key names the operands, for the split into training and held-out."""

    user: str
    answer: str
    skill: str
    key: str = ""
    by_char: bool = False
    one_word: str = ""


@dataclass(frozen=True)
class Forms:
    """Wordings of one request: noun phrases, commands, questions, and whole wordings only used in the test."""

    np: tuple[str, ...] = ()
    do: tuple[str, ...] = ()
    ask: tuple[str, ...] = ()
    raw: tuple[str, ...] = ()
    held: tuple[str, ...] = ()


def is_held_out(key: str, share: int = 10) -> bool:
    """Stable split: one key in `share` is kept for the test."""
    return zlib.crc32(key.encode()) % share == 0


def pick_key(rng: random.Random, side: str, draw: Callable[[random.Random], tuple[T, str]]) -> tuple[T, str]:
    """Draw operands until their key falls on the wanted side of the split."""
    while True:
        value, key = draw(rng)
        if is_held_out(key) == (side in UNSEEN):
            return value, key


def frame_text(rng: random.Random, forms: Forms, side: str) -> str:
    """Choose a wording and a sentence around it; the fields are still open."""
    if side == TEST and forms.held and rng.random() < 0.5:
        return rng.choice(forms.held)
    groups: list[tuple[tuple[str, ...], tuple[str, ...]]] = []
    if forms.np:
        groups += [(forms.np, NP_FRAMES_HELD if side == TEST else NP_FRAMES)] * len(forms.np)
    if forms.do:
        groups += [(forms.do, DO_FRAMES_HELD if side == TEST else DO_FRAMES)] * len(forms.do)
    if forms.ask:
        groups += [(forms.ask, ASK_FRAMES_HELD if side == TEST else ASK_FRAMES)] * len(forms.ask)
    # bare wordings have no frame to hold out: in the test they need held-out operands
    raw = tuple(body for body in forms.raw if side != TEST or re.search("{[bwf]}", body))
    if raw and side == DRILL:
        return rng.choice(raw)
    if raw:
        groups += [(raw, ("{}",))] * len(raw)
    bodies, frames = rng.choice(groups)
    # not str.format: the body keeps its own open fields
    return rng.choice(frames).replace("{}", rng.choice(bodies))


def mistype(rng: random.Random, text: str) -> str:
    """Swap, drop or double one letter of a longer word outside the open fields."""
    words = text.split(" ")
    spots = [i for i, word in enumerate(words) if len(word) > 3 and word.isalpha()]
    if not spots:
        return text
    spot = rng.choice(spots)
    word = words[spot]
    at = rng.randrange(1, len(word) - 1)
    words[spot] = rng.choice(
        (
            word[:at] + word[at + 1] + word[at] + word[at + 2 :],
            word[:at] + word[at + 1 :],
            word[:at] + word[at] + word[at:],
        )
    )
    return " ".join(words)


def decorate(rng: random.Random, text: str) -> str:
    """Vary case, end mark and typing errors as people do."""
    if rng.random() < 0.05:
        text = mistype(rng, text)
    if len(text) > 3 and text[-1] in "?." and rng.random() < 0.35:
        text = text[:-1]
    if rng.random() < 0.6:
        text = text[0].upper() + text[1:]
    if rng.random() < 0.5:
        text = text.replace("i'd", "I'd").replace("i'm", "I'm").replace(" i ", " I ")
    return "I" + text[1:] if text.startswith("i ") and rng.random() < 0.5 else text


def surround(rng: random.Random, text: str) -> str:
    """Put small words around a request now and then."""
    if rng.random() < 0.1:
        text = rng.choice(LEADS) + text
    if rng.random() < 0.08:
        text = text.rstrip("?.") + rng.choice(("", "", "?", ",", ".")) + rng.choice(TAILS)
    return text


def phrase(rng: random.Random, forms: Forms, side: str, fields: dict[str, str]) -> str:
    """One finished user message."""
    text = frame_text(rng, forms, side).replace("{o}", rng.choice(OBJECTS))
    text = decorate(rng, surround(rng, text) if side == TRAIN else text)
    for name, value in fields.items():
        text = text.replace("{" + name + "}", value)
    if rng.random() < 0.03:
        text = text.rstrip("?.") + rng.choice((" ", "!", "??", " ?", "...", " :)"))
    return text.strip() or "?"


def join_and(parts: Sequence[str]) -> str:
    """'a', 'a and b', 'a, b and c'."""
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


def fact(rng: random.Random, side: str, forms: Forms, answer: str, skill: str, **fields: str) -> Turn:
    """A fact in one of its wordings; names are typed in lower case now and then."""
    if rng.random() < 0.25:
        fields = {name: value.lower() for name, value in fields.items()}
    return Turn(phrase(rng, forms, side, fields), answer, skill)


def ordinal(rng: random.Random, index: int) -> str:
    """'third', sometimes '3rd'."""
    if rng.random() < 0.75:
        return ORDINALS[index]
    return str(index + 1) + {0: "st", 1: "nd", 2: "rd"}.get(index, "th")
