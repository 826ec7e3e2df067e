"""Things the user tells and asks for later in the dialogue."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from scripts.demo.skills.slots import (
    ALL_KNOWN,
    CORRECT_FRAMES,
    CORRECT_FRAMES_HELD,
    OTHER_TELL,
    OTHER_TELL_HELD,
    RELATIVES,
    SECRET_TELL,
    SECRET_TELL_HELD,
    SECRETS,
    SLOTS,
    TELL_FRAMES,
    TELL_FRAMES_HELD,
    THINGS,
    recall_forms,
)
from scripts.demo.skills.spelling import WORD_MAKER, new_name
from scripts.demo.text import TEST, Forms, Turn, join_and, phrase
from scripts.demo.words import (
    CITIES,
    COLOURS,
    FOODS,
    HELD_OUT_CITIES,
    HELD_OUT_NAMES,
    HELD_OUT_PET_NAMES,
    HOBBIES,
    JOBS,
    NAMES,
    PET_NAMES,
    PETS,
)


@dataclass(frozen=True)
class Told:
    """A remembered item: what was typed, the echo and how to ask for it."""

    slot: str
    noun: str
    value: str
    tell: str
    echo: str
    ask: Forms


def slot_value(rng: random.Random, side: str, slot: str) -> str:
    """A value for a slot; names are unseen ones on the test side."""
    test = side == TEST
    if slot == "name":
        return rng.choice(HELD_OUT_NAMES) if test else rng.choice(NAMES) if rng.random() < 0.4 else new_name(rng)
    if slot == "city":
        return rng.choice(HELD_OUT_CITIES) if test else rng.choice(CITIES) if rng.random() < 0.6 else new_name(rng)
    if slot in ("age", "number"):
        return str(rng.randint(3, 99) if rng.random() < 0.8 or slot == "age" else rng.randint(100, 9999))
    choices = {"colour": COLOURS, "food": FOODS, "job": JOBS, "hobby": HOBBIES}[slot]
    return rng.choice(choices)


def other_told(rng: random.Random, side: str) -> Told:
    """A pet, a relative, a thing or a secret."""
    test = side == TEST
    kind = rng.random()
    if kind < 0.25:
        noun = rng.choice(SECRETS)
        value = str(rng.randint(10, 9999)) if rng.random() < 0.5 else WORD_MAKER.word(rng, side)
        tell = rng.choice(SECRET_TELL_HELD if test and rng.random() < 0.5 else SECRET_TELL)
        forms = recall_forms(noun, f"what is the {noun}", f"what was the {noun}", f"do you remember the {noun}")
        return Told(noun, noun, value, tell.replace("{n}", noun).replace("{v}", value), f"the {noun} is {value}", forms)
    noun = rng.choice(PETS) if kind < 0.6 else rng.choice(RELATIVES + THINGS)
    known, unseen = (PET_NAMES, HELD_OUT_PET_NAMES) if noun in PETS else (NAMES, HELD_OUT_NAMES)
    value = rng.choice(unseen) if test else rng.choice(known) if rng.random() < 0.4 else new_name(rng)
    tell = rng.choice(OTHER_TELL_HELD if test and rng.random() < 0.5 else OTHER_TELL)
    forms = Forms(
        np=(f"the name of my {noun}", f"my {noun}'s name"),
        ask=(f"what is my {noun} called", f"what is my {noun}'s name", f"how is my {noun} called",
             f"what is the name of my {noun}", f"do you remember the name of my {noun}", f"whats my {noun}'s name",
             f"do you know what my {noun} is called", f"what did i call my {noun}"),
        held=(f"i forgot, how do i call my {noun}?", f"say the name of my {noun} again"),
    )  # fmt: skip
    return Told(noun, f"{noun}'s name", value, tell.replace("{n}", noun).replace("{v}", value),
                f"your {noun} is called {value}", forms)  # fmt: skip


def told(rng: random.Random, side: str, slot_name: str) -> Told:
    """Draw a value for a slot ('other' for pets, relatives and secrets) and word it."""
    if slot_name == "other":
        return other_told(rng, side)
    slot, value = SLOTS[slot_name], slot_value(rng, side, slot_name)
    held = side == TEST and slot.tell_held and rng.random() < 0.5
    tell = rng.choice(slot.tell_held if held else slot.tell).replace("{v}", value)
    return Told(slot_name, slot.noun, value, tell, slot.echo.replace("{v}", value), slot.ask)


def sentence(text: str) -> str:
    """First letter in upper case, full stop at the end."""
    return text[0].upper() + text[1:] + "."


def typed(rng: random.Random, text: str) -> str:
    """How a statement is typed: case of 'I' and of the first letter vary."""
    if rng.random() < 0.6:
        text = text[0].upper() + text[1:]
        text = text.replace(" i ", " I ").replace(" i'm ", " I'm ").replace(" i've ", " I've ")
    return text


def tell_turn(rng: random.Random, side: str, items: list[Told], correcting: bool = False) -> Turn:
    """The user tells one or several things; the model confirms."""
    frames: tuple[str, ...] = TELL_FRAMES_HELD if side == TEST and rng.random() < 0.3 else TELL_FRAMES
    if correcting:
        frames = CORRECT_FRAMES_HELD if side == TEST and rng.random() < 0.5 else CORRECT_FRAMES
    tells = [item.tell.split(", ", 1)[-1] if at else item.tell for at, item in enumerate(items)]
    body = ". ".join(tells) if rng.random() < 0.3 else join_and(tells)
    text = typed(rng, rng.choice(frames).replace("{}", body))
    if rng.random() < 0.12 and not any(item.noun in SECRETS for item in items):
        text = text.lower()
    answer = "Got it: " + join_and([item.echo for item in items]) + "."
    if len(items) == 1 and items[0].slot == "name" and not correcting:
        answer = f"Nice to meet you, {items[0].value}!"
    return Turn(text, answer, "memory", one_word="Okay")


def recall_turn(rng: random.Random, side: str, item: Told) -> Turn:
    """The user asks for something told before."""
    return Turn(phrase(rng, item.ask, side, {}), sentence(item.echo), "memory", one_word=item.value)


def unknown_turn(rng: random.Random, side: str, slot_name: str) -> Turn:
    """The user asks for something never told."""
    item = told(rng, side, slot_name)
    article = "the" if item.noun in SECRETS else "your"
    answer = f"You have not told me {article} {item.noun} yet."
    return Turn(phrase(rng, item.ask, side, {}), answer, "memory", one_word="Unknown")


def everything_turn(rng: random.Random, side: str, items: list[Told]) -> Turn:
    """The user asks for all things told, answered in the order told."""
    return Turn(phrase(rng, ALL_KNOWN, side, {}), sentence(join_and([item.echo for item in items])), "memory")


SLOT_WEIGHTS = {"name": 5, "age": 2, "city": 3, "colour": 2, "number": 2, "food": 1, "job": 1, "hobby": 1, "other": 5}


class Memory:
    """Plays a dialogue in which the user tells things and asks for them later."""

    def __init__(self, rng: random.Random, side: str) -> None:
        self.rng, self.side = rng, side
        self.known: dict[str, Told] = {}

    def new_items(self) -> list[Told]:
        """One to three things not told before."""
        items: dict[str, Told] = {}
        for _ in range(self.rng.choice((1, 1, 1, 1, 2, 2, 3))):
            slot = self.rng.choices(list(SLOT_WEIGHTS), list(SLOT_WEIGHTS.values()))[0]
            item = told(self.rng, self.side, slot)
            if item.slot not in self.known:
                items[item.slot] = item
        return list(items.values())

    def correction(self) -> Turn:
        """Change one known value."""
        old = self.rng.choice(list(self.known.values()))
        slot = old.slot if old.slot in SLOT_WEIGHTS else "other"
        item = told(self.rng, self.side, slot)
        if slot == "other" and item.slot != old.slot:
            # the words of another drawn thing, put on the known noun
            value = item.value
            item = replace(
                old, value=value, tell=old.tell.replace(old.value, value), echo=old.echo.replace(old.value, value)
            )
        self.known[item.slot] = item
        return tell_turn(self.rng, self.side, [item], correcting=True)

    def ask_unknown(self) -> Turn | None:
        """Ask for a thing that was not told."""
        slot = self.rng.choice([name for name in SLOT_WEIGHTS if name not in self.known])
        if slot == "other" and any(name not in SLOT_WEIGHTS for name in self.known):
            return None
        return unknown_turn(self.rng, self.side, slot)

    def step(self) -> Turn | None:
        """One memory turn, or None for a turn of another skill."""
        chance = self.rng.random()
        if not self.known or (chance < 0.25 and len(self.known) < 5):
            items = self.new_items()
            self.known |= {item.slot: item for item in items}
            return tell_turn(self.rng, self.side, items) if items else None
        if chance < 0.6:
            return recall_turn(self.rng, self.side, self.rng.choice(list(self.known.values())))
        if chance < 0.68:
            return self.correction()
        if chance < 0.72 and 1 < len(self.known) < 4:
            return everything_turn(self.rng, self.side, list(self.known.values()))
        return self.ask_unknown() if chance < 0.76 else None

    def turns(self, count: int, filler: Callable[[], Turn]) -> list[Turn]:
        """A dialogue with other turns between, that ends with asking for something known."""
        turns: list[Turn] = []
        while len(turns) < count:
            if not turns and self.rng.random() < 0.3:
                turns.append(filler())
            turns.append(self.step() or filler())
        turns.append(recall_turn(self.rng, self.side, self.rng.choice(list(self.known.values()))))
        return turns
