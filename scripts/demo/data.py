"""Makes the dialogues the demo model is trained and tested on; run it to look at some.

Everything is composed from our own templates and word lists with a seeded generator. Training and test
use different operands, words, names and wordings.
"""

import argparse
import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from scripts.demo.skills.dates import calendar, numbers
from scripts.demo.skills.facts import facts
from scripts.demo.skills.json_answers import json_object
from scripts.demo.skills.memory import SLOT_WEIGHTS, Memory, unknown_turn
from scripts.demo.skills.own_wording import OWN_WORDING
from scripts.demo.skills.spelling import letters, reversing, spelling
from scripts.demo.skills.stories import story
from scripts.demo.skills.styles import STYLES, asked_style, style_prompt, styled
from scripts.demo.skills.sums import addition, counting, division, multiplication, subtraction
from scripts.demo.skills.talk import out_of_scope, small_talk
from scripts.demo.text import DRILL, FRESH, TEST, TRAIN, Turn
from scripts.demo.words import NEVER_TRAINED

Skill = Callable[[random.Random, str], Turn]


SKILLS: dict[str, tuple[Skill, float]] = {
    "addition": (addition, 15),
    "subtraction": (subtraction, 13),
    "multiplication": (multiplication, 7),
    "division": (division, 3),
    "counting": (counting, 8),
    "spelling": (spelling, 8),
    "reversing": (reversing, 13),
    "letters": (letters, 2),
    "facts": (facts, 12),
    "days and months": (calendar, 5),
    "numbers": (numbers, 3),
    "JSON": (json_object, 9),
    "small talk": (small_talk, 5),
    "out of scope": (out_of_scope, 3),
    "stories": (story, 5),
}


ONE_WORD_SKILLS = (
    "addition", "subtraction", "multiplication", "division", "reversing", "letters", "facts", "days and months",
    "numbers", "small talk",
)  # fmt: skip


DRILLS = (
    ("addition", "subtraction", "addition", "subtraction", "multiplication", "division"),
    ("reversing", "reversing", "reversing", "spelling", "spelling", "letters"),
    ("facts", "days and months", "numbers", "multiplication"),
    ("counting", "counting", "spelling", "JSON"),
)
OPERAND_SKILLS = ("addition", "subtraction", "multiplication", "counting", "spelling", "reversing", "letters")
STYLE_SKILLS = (*ONE_WORD_SKILLS, "counting", "spelling", "out of scope")


@dataclass(frozen=True)
class Dialogue:
    """Turns under an optional system prompt."""

    turns: tuple[Turn, ...]
    system: str = ""

    def messages(self) -> list[dict[str, str]]:
        """All messages, the last answer included."""
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for turn in self.turns:
            messages.append({"role": "user", "content": turn.user})
            messages.append({"role": "assistant", "content": turn.answer})
        return messages


@dataclass(frozen=True)
class Case:
    """A test case: the model answers the last user message, exactly, or a story with certain words in it."""

    skill: str
    messages: list[dict[str, str]]
    answer: str
    words: tuple[str, ...] = ()
    key: str = ""


def single(rng: random.Random, side: str, names: Sequence[str] = ()) -> Turn:
    """One turn of a weighted random skill."""
    pool = list(names or SKILLS)
    name = rng.choices(pool, [SKILLS[skill][1] for skill in pool])[0]
    return SKILLS[name][0](rng, side)


def mixed(rng: random.Random, side: str, count: int) -> list[Turn]:
    """Unrelated turns, now and then with the style asked for in the message."""
    turns = []
    for _ in range(count):
        if rng.random() < 0.06:
            style = rng.choice(("upper", "upper", "pirate", "one word"))
            base = single(rng, side, ONE_WORD_SKILLS if style == "one word" else STYLE_SKILLS)
            turns.append(asked_style(rng, style, base))
        else:
            turns.append(single(rng, side))
    return turns


def style_dialogue(rng: random.Random, side: str, style: str, count: int) -> Dialogue:
    """All answers of a dialogue in the style of its system prompt."""
    fillers: tuple[str, ...] = ONE_WORD_SKILLS if style == "one word" else STYLE_SKILLS
    if style in ("upper", "pirate") and rng.random() < 0.06 and side == TRAIN:
        fillers = ("stories",)
    if rng.random() < 0.25 and fillers != ("stories",):
        turns = Memory(rng, side).turns(max(count, 2), lambda: single(rng, side, fillers))
        if style == "one word":
            # a list of everything has no one-word form
            turns = [turn for turn in turns if turn.one_word or turn.skill != "memory"]
    else:
        turns = [single(rng, side, fillers) for _ in range(count)]
    return Dialogue(tuple(styled(style, turn) for turn in turns), style_prompt(rng, side, style))


def drill(rng: random.Random) -> list[Turn]:
    """Many short questions of one kind: the exact skills need far more examples than the wordings do."""
    skills = rng.choices(DRILLS, (5, 5, 3, 3))[0]
    side = DRILL if rng.random() < 0.8 else TRAIN
    return [SKILLS[rng.choice(skills)][0](rng, side) for _ in range(rng.randint(4, 14))]


def dialogue(rng: random.Random) -> Dialogue:
    """One training dialogue."""
    count = rng.choice((1, 1, 2, 3, 4, 5, 6, 8)) if rng.random() < 0.97 else rng.randint(9, 20)
    kind = rng.random()
    if kind < 0.26:
        style = rng.choice(("upper", "one word", "pirate", "json"))
        return style_dialogue(rng, TRAIN, style, min(count, 5))
    if kind < 0.41:
        turns = Memory(rng, TRAIN).turns(max(count, 2), lambda: single(rng, TRAIN))
    elif kind < 0.43:
        turns = [unknown_turn(rng, TRAIN, rng.choice(list(SLOT_WEIGHTS))), *mixed(rng, TRAIN, count - 1)]
    elif kind < 0.68:
        turns = drill(rng)
    else:
        turns = mixed(rng, TRAIN, count)
    system = style_prompt(rng, TRAIN, "neutral") if rng.random() < 0.12 else ""
    return Dialogue(tuple(turns), system)


def training_dialogues(seed: int, count: int) -> Iterator[Dialogue]:
    """A reproducible chunk of training dialogues."""
    rng = random.Random(f"train {seed}")
    for _ in range(count):
        yield dialogue(rng)


def as_case(skill: str, made: Dialogue) -> Case:
    """Leave the last answer to the model."""
    last = made.turns[-1]
    words = tuple(last.key.split("|")) if last.skill == "stories" else ()
    return Case(skill, made.messages()[:-1], last.answer, words, last.key)


def test_skill(rng: random.Random, name: str, side: str) -> Dialogue:
    """A dialogue of one turn."""
    return Dialogue((SKILLS[name][0](rng, side),))


def test_memory(rng: random.Random) -> Dialogue:
    """A dialogue in which something is told and asked for."""
    return Dialogue(tuple(Memory(rng, TEST).turns(rng.randint(2, 7), lambda: single(rng, TEST))))


def test_style(rng: random.Random, style: str) -> Dialogue:
    """A dialogue with a style in its system prompt."""
    return style_dialogue(rng, TEST, style, rng.randint(1, 3))


def held_out(per_skill: int = 120, seed: int = 2024) -> list[Case]:
    """The test set: unseen operands, words, names and wordings."""
    rng = random.Random(f"test {seed}")
    makers: dict[str, Callable[[], Dialogue]] = {}
    for name in SKILLS:
        if name in OPERAND_SKILLS:
            makers[name] = partial(test_skill, rng, name, FRESH)
            makers[f"{name}, unseen wordings"] = partial(test_skill, rng, name, TEST)
        else:
            makers[name] = partial(test_skill, rng, name, TEST)
    makers["memory"] = partial(test_memory, rng)
    for style in STYLES:
        if style != "neutral":
            makers[f"system prompt: {style}"] = partial(test_style, rng, style)
    cases: list[Case] = []
    for name, make in makers.items():
        seen: set[str] = set()
        tries = 0
        while len(seen) < per_skill and tries < 60 * per_skill:
            tries += 1
            case = as_case(name, make())
            if (text := json.dumps(case.messages)) not in seen:
                seen.add(text)
                cases.append(case)
    return cases


def own_wording() -> list[Case]:
    """Questions written by hand, as people type them."""
    return [Case("own wording", [{"role": "user", "content": ask}], answer) for ask, answer in OWN_WORDING]


def normal(text: str) -> str:
    """Text without case, spaces at the ends and end marks."""
    return re.sub(r"[\s?.!]+$", "", text.strip().lower())


class Overlap:
    """Finds training dialogues that hold anything of the test set: a word, a name, operands or a question."""

    def __init__(self, cases: Sequence[Case]) -> None:
        self.keys = {case.key for case in cases if case.key}
        self.questions = {normal(case.messages[-1]["content"]) for case in cases if len(case.messages) == 1}

    def found(self, made: Dialogue) -> bool:
        """Whether a dialogue must not be trained on."""
        for turn in made.turns:
            text = turn.user if turn.by_char else f"{turn.user} {turn.answer}"
            words = re.findall(r"[a-z]+", text.lower())
            if turn.key in self.keys or normal(turn.user) in self.questions or not NEVER_TRAINED.isdisjoint(words):
                return True
        return False


def main() -> None:
    """Print dialogues or the test set as JSON Lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--test", action="store_true", help="print the held-out set instead of training dialogues")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.test:
        for case in held_out() + own_wording():
            print(json.dumps({"skill": case.skill, "messages": case.messages, "answer": case.answer}))
        return
    for made in training_dialogues(args.seed, args.count):
        print(json.dumps({"messages": made.messages()}))


if __name__ == "__main__":
    main()
