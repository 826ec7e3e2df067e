"""Answers as a JSON object."""

import json
import random
from collections.abc import Callable, Sequence

from scripts.demo.skills.dates import calendar, numbers
from scripts.demo.skills.facts import facts
from scripts.demo.skills.spelling import WORD_MAKER, new_name, spelling
from scripts.demo.skills.sums import addition, multiplication, subtraction
from scripts.demo.text import TEST, Forms, Turn, phrase
from scripts.demo.words import ANIMALS, CAPITALS, CITIES, COLOURS, HELD_OUT_CITIES, HELD_OUT_NAMES, JOBS, NAMES, PETS

JSON_ASKS = (
    "{} answer as json.", "{} give the answer as json.", "answer as json: {}", "{} reply in json.", "in json: {}",
    "{} as json please.", "{} (json)", "reply with json only. {}", "{} answer with a json object.", "as json: {}",
    "{} respond in json.", "{} use json.", "use json to answer: {}", "answer in json: {}", "{} in json format, please.",
    "json answer: {}", "json please: {}", "{} i want json.", "{} as a json object please.", "give me json: {}",
    "{}, as json",
    "{} output json.", "please answer in json. {}", "{} json answer please.", "{} write json.",
    "i want the answer as json: {}",
    "only json: {}", "{} and answer in json", "with json: {}", "{} json.", "{} the answer in json please.",
    "{} i need json.", "write the answer as json: {}", "{} a json object please.", "send json. {}",
)  # fmt: skip


JSON_ASKS_HELD = ("{} i need the answer in json.", "write your answer as a json object: {}", "{} json output please")


JSON_MAKE = Forms(
    do=("give me a json object with {f}", "make a json object with {f}", "write json with {f}",
        "create a json object with {f}", "return a json object with {f}", "give me json with {f}",
        "turn this into json: {f}", "convert to json: {f}", "format as json: {f}", "write this as json: {f}",
        "produce a json object that has {f}", "make json: {f}", "make me json with {f}", "make me a json object: {f}",
        "put {f} into json", "put {f} in a json object", "give me some json, {f}", "generate a json object with {f}",
        "write a small json with {f}", "show me json with {f}", "turn {f} into json", "build a json object from {f}",
        "build json with {f}", "encode as json: {f}", "make json that holds {f}", "write a json object holding {f}",
        "convert {f} to a json object",
        "let me have a json object with {f}", "produce json: {f}", "give me an object in json with {f}",
        "write a json object with {f}", "put this in json: {f}"),
    np=("a json object with {f}", "the json object with {f}"),
    raw=("json: {f}", "{f} as json", "json with {f}", "{f} in json", "json object: {f}", "i want {f} as json",
         "i want json with {f}", "{f}. as json please", "{f} json please"),
    held=("{f} - i want that as json", "build me some json holding {f}", "encode {f} in a json object"),
)  # fmt: skip


JSON_DESCRIBE = Forms(
    do=("describe a {x} as json with keys {k}", "describe a {x} in json with the keys {k}",
        "give me json about a {x} with keys {k}", "make a json object about a {x} with the keys {k}",
        "write json for a {x} with {k}"),
    raw=("{x} as json with keys {k}", "json for a {x}, keys {k}"),
    held=("a {x} in json form, its keys are {k}",),
)  # fmt: skip


JSON_COUNTRY = Forms(
    do=("describe {x} as json with keys country and capital", "give me json about {x} with country and capital",
        "write {x} and its capital as json", "make a json object with the country {x} and its capital"),
    raw=("{x} and its capital as json", "json: {x} and its capital"),
    held=("the country {x} with its capital, in json form",),
)  # fmt: skip


Value = str | int


def json_pairs(rng: random.Random, side: str) -> list[tuple[str, Value]]:
    """Keys and values for one object."""
    name = rng.choice(HELD_OUT_NAMES if side == TEST else NAMES)
    if side != TEST and rng.random() < 0.4:
        name = new_name(rng)
    city = rng.choice(HELD_OUT_CITIES if side == TEST else CITIES)
    options: list[tuple[str, Value]] = [
        ("age", rng.randint(1, 99)), ("city", city), ("colour", rng.choice(COLOURS)), ("pet", rng.choice(PETS)),
        ("job", rng.choice(JOBS)), ("id", rng.randint(1, 9999)), ("score", rng.randint(0, 100)),
        ("word", WORD_MAKER.word(rng, side)), ("color", rng.choice(COLOURS)), ("size", rng.randint(1, 60)),
        ("title", WORD_MAKER.word(rng, side)), ("price", rng.randint(1, 500)), ("count", rng.randint(1, 30)),
    ]  # fmt: skip
    if side != TEST:
        options.append((WORD_MAKER.invent(rng), rng.choice((WORD_MAKER.word(rng, side), rng.randint(0, 999)))))
    picked = rng.sample(options, rng.choice((1, 1, 2, 2, 3)))
    return [("name", name), *picked] if rng.random() < 0.7 else picked


def pairs_text(rng: random.Random, pairs: Sequence[tuple[str, Value]]) -> str:
    """The pairs as a person would list them."""
    link = rng.choice((" {} ", " {} ", " {} ", "={}", ": {}", " = {}", ' "{}"', " is {}"))
    parts = []
    for key, value in pairs:
        quote_free = link.replace('"', "") if isinstance(value, int) else link
        parts.append((key + quote_free.replace("{}", str(value))).strip())
    if len(parts) > 1 and rng.random() < 0.6:
        return ", ".join(parts[:-1]) + " and " + parts[-1]
    return ", ".join(parts)


def json_answer(rng: random.Random, side: str) -> Turn:
    """Another skill's answer wrapped as {"answer": ...}."""
    base: Callable[[random.Random, str], Turn] = rng.choice(
        (addition, subtraction, multiplication, facts, calendar, numbers, spelling)
    )
    turn = base(rng, side)
    value: Value = int(turn.answer) if turn.answer.lstrip("-").isdigit() else turn.answer
    frame = rng.choice(JSON_ASKS_HELD if side == TEST else JSON_ASKS)
    if rng.random() < 0.5:
        frame = frame.replace("json", "JSON")
    text = frame.replace("{}", turn.user)
    if rng.random() < 0.6:
        text = text[0].upper() + text[1:]
    return Turn(text, json.dumps({"answer": value}), "JSON", turn.key)


def json_animal(rng: random.Random, side: str) -> Turn:
    """An animal's facts under asked keys."""
    animal = rng.choice(tuple(ANIMALS))
    sound, baby, legs = ANIMALS[animal]
    known: dict[str, Value] = {"name": animal, "sound": sound, "legs": legs, "baby": baby}
    keys = rng.sample(tuple(known), rng.choice((2, 2, 3)))
    text = phrase(rng, JSON_DESCRIBE, side, {"x": animal, "k": ", ".join(keys[:-1]) + " and " + keys[-1]})
    return Turn(text, json.dumps({key: known[key] for key in keys}), "JSON")


def json_object(rng: random.Random, side: str) -> Turn:
    """JSON of given values, of facts, or around another answer."""
    kind = rng.random()
    if kind < 0.3:
        return json_answer(rng, side)
    if kind < 0.4:
        return json_animal(rng, side)
    if kind < 0.47:
        country = rng.choice(tuple(name for name in CAPITALS if not name.startswith("the ")))
        answer = json.dumps({"country": country, "capital": CAPITALS[country]})
        return Turn(phrase(rng, JSON_COUNTRY, side, {"x": country}), answer, "JSON")
    pairs = json_pairs(rng, side)
    user = phrase(rng, JSON_MAKE, side, {"f": pairs_text(rng, pairs)})
    if rng.random() < 0.5:
        user = user.replace("json", "JSON")
    return Turn(user, json.dumps(dict(pairs)), "JSON")
