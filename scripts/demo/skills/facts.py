"""Small facts: capitals, opposites, animals, colours, planets."""

import random

from scripts.demo.text import Forms, Turn, fact, ordinal
from scripts.demo.words import ANIMALS, CAPITALS, LEGS, OPPOSITES, PLANETS, THING_COLOURS, TRIVIA

CAPITAL = Forms(
    np=("the capital of {x}", "the capital city of {x}", "the capital of {x}", "{x}'s capital", "the capital for {x}"),
    do=("name the capital of {x}", "name {x}'s capital city"),
    ask=("which city is the capital of {x}", "what city is the capital of {x}", "what is {x}'s capital city",
         "which city is {x}'s capital", "what is the capital called in {x}",
         "how is the capital of {x} called", "what is the name of the capital of {x}", "which city is capital in {x}",
         "in {x}, what is the capital", "what is the capital city in {x}", "do you know {x}'s capital",
         "which capital belongs to {x}", "{x}'s government is in which city", "where does the government of {x} sit",
         "what capital do you find in {x}",
         "if i go to the capital of {x}, in which city am i", "what do they call the capital of {x}",
         "what city do you call the capital of {x}", "what capital city does {x} have"),
    raw=("capital of {x}", "capital of {x}?", "{x} capital", "capital city of {x}?", "capital: {x}", "{x}: capital?",
         "the capital of {x} is",
         "the capital of {x} is?", "the capital of {x} is called?", "i forgot the capital of {x}", "{x}, its capital?",
         "i look for the capital of {x}", "i need the capital of {x} for school", "{x} capital city",
         "{x}. what is the capital?"),
    held=("the government of {x} sits in which capital?", "{x} has which capital?", "which capital does {x} have?",
          "as capital, {x} has which city?"),
)  # fmt: skip


COUNTRY = Forms(
    np=("the country whose capital is {y}", "the country of which {y} is the capital"),
    ask=("{y} is the capital of which country", "which country has the capital {y}",
         "of which country is {y} the capital", "what country is {y} the capital of", "whose capital is {y}",
         "{y} is the capital of what country", "which country is {y} the capital of"),
    held=("{y} is whose capital?",),
)  # fmt: skip


OPPOSITE = Forms(
    np=("the opposite of {x}", "the opposite of {x}", "the antonym of {x}", "the contrary of {x}"),
    do=("name the opposite of {x}",),
    ask=("what word is the opposite of {x}", "which word means the opposite of {x}", "{x} is the opposite of what",
         "what is opposite to {x}", "what is the contrary of {x}", "what is the opposite word of {x}",
         "which word is the contrary of {x}", "which opposite does {x} have", "it is not {x}, so what is it",
         "what is it if it is not {x} but the opposite", "what is not {x} but the opposite",
         "what is the other end of {x}",
         "if something is not {x}, what is it", "how do you say the opposite of {x}"),
    raw=("opposite of {x}", "{x} opposite", "opposite: {x}", "the opposite of {x} is", "the opposite of {x} is?",
         "{x}, the opposite?", "opposite word for {x}"),
    held=("{x} has which opposite?", "if it is not {x}, it is its opposite, namely?"),
)  # fmt: skip


SOUND = Forms(
    np=("the sound of a {x}", "the sound a {x} makes", "the noise a {x} makes"),
    ask=("what sound does a {x} make", "what does a {x} say", "what noise does a {x} make", "how does a {x} sound",
         "which sound does a {x} make", "how does a {x} go", "what sound do {x}s make", "what is the sound of a {x}",
         "i hear a {x}, what sound is it", "which sound would a {x} make", "if there is a {x}, what do i hear",
         "what sounds do {x}s make", "which noise does the {x} make", "what does the {x} say",
         "how do you write the sound of a {x}", "what noise comes from a {x}", "what do {x}s say",
         "what do you hear from a {x}"),
    raw=("{x} sound", "{x} says what?", "sound of a {x}?"),
    held=("a {x} makes which sound?", "if i meet a {x}, what sound will it make?"),
)  # fmt: skip


BABY = Forms(
    np=("the baby of a {x}", "a baby {x}", "the young of a {x}", "the name for a baby {x}"),
    ask=("what is a baby {x} called", "what do you call a baby {x}", "how is a baby {x} called",
         "what is the young of a {x} called", "what is the name of a baby {x}", "what do we call a young {x}",
         "what is a young {x} called", "how do people call the baby of a {x}", "a baby {x} is called what",
         "what do people call a little {x}",
         "what is the word for a young {x}", "how do you call the baby of a {x}", "what are baby {x}s called",
         "what is the child of a {x} called", "which word means a baby {x}"),
    raw=("baby {x}", "baby {x}?", "baby of a {x}?"),
    held=("the little one of a {x} is called what?", "a {x} has a baby, what do people call it?"),
)  # fmt: skip


LEG = Forms(
    np=("the number of legs of a {x}", "the number of legs a {x} has"),
    ask=("how many legs does a {x} have", "how many legs has a {x}", "how many legs are on a {x}",
         "a {x} has how many legs", "how many legs do {x}s have", "how many legs does the {x} have",
         "how many legs does a {x} use to walk", "a {x} walks on how many legs",
         "if i count the legs of a {x}, how many are there",
         "what is the number of legs of a {x}", "how many feet does a {x} have", "how many legs can you see on a {x}"),
    raw=("{x} legs", "legs of a {x}?", "number of legs of a {x}"),
    held=("on how many legs does a {x} walk?", "if i count the legs of a {x}, what do i get?"),
)  # fmt: skip


COLOUR = Forms(
    np=("the colour of {x}", "the color of {x}", "the usual colour of {x}"),
    do=("name the colour of {x}",),
    ask=("what colour is {x}", "what color is {x}", "which colour is {x}", "which color does {x} have",
         "what colour does {x} have", "{x} has which colour",
         "what is the usual color of {x}", "which colour do you need to paint {x}", "{x} is which colour",
         "if you see {x}, what colour is it", "of what colour is {x}", "what colour would you give {x}",
         "what colour do you see on {x}", "what colour should {x} have",
         "which colour do people give {x}", "what color would {x} be", "what is the colour of {x}"),
    raw=("colour of {x}", "color of {x}?", "{x} color?", "{x} colour"),
    held=("in which colour would you paint {x}?", "{x} is of what colour?", "if i look at {x}, which colour do i see?"),
)  # fmt: skip


PLANET = Forms(
    np=("the {n} planet", "the {n} planet from the sun", "planet number {d}", "the {n} planet of the solar system"),
    do=("name the {n} planet",),
    ask=("which planet is the {n} from the sun", "which planet is number {d}", "what planet is {n} from the sun",
         "which planet is {n}",
         "what is the {n} planet called", "from the sun, which planet is number {d}",
         "starting at the sun, what is the {n} planet", "which one is the {n} planet",
         "what is the name of the {n} planet"),
    raw=("{n} planet", "{n} planet from the sun?", "planet {d}"),
    held=("counting from the sun, which planet is the {n}?",),
)  # fmt: skip


def animal_fact(rng: random.Random, side: str) -> Turn:
    """Sound, baby or number of legs of an animal."""
    animal = rng.choice(tuple(ANIMALS))
    sound, baby, _ = ANIMALS[animal]
    kind = rng.randrange(3)
    if kind == 0:
        return fact(rng, side, SOUND, sound, "facts", x=animal)
    if kind == 1:
        return fact(rng, side, BABY, baby, "facts", x=animal)
    legs = {name: entry[2] for name, entry in ANIMALS.items()} | LEGS
    animal = rng.choice(tuple(legs))
    return fact(rng, side, LEG, str(legs[animal]), "facts", x=animal)


def trivia(rng: random.Random, side: str) -> Turn:
    """Single facts with wordings of their own."""
    answer, wordings, held = rng.choice(TRIVIA)
    asks = tuple(text for text in wordings if text.split()[0] in ("how", "what", "which", "on"))
    others = tuple(text for text in wordings if text not in asks)
    forms = Forms(ask=asks, raw=others + tuple(f"{text}?" for text in wordings), held=held)
    return fact(rng, side, forms, answer, "facts")


def facts(rng: random.Random, side: str) -> Turn:
    """Capitals, opposites, animals, colours, planets and single facts."""
    kind = rng.random()
    if kind < 0.3:
        country = rng.choice(tuple(CAPITALS))
        return fact(rng, side, CAPITAL, CAPITALS[country], "facts", x=country)
    if kind < 0.37:
        country = rng.choice([name for name in CAPITALS if name != "the USA"])
        return fact(rng, side, COUNTRY, country.removeprefix("the "), "facts", y=CAPITALS[country])
    if kind < 0.52:
        pair = rng.choice(OPPOSITES)
        x, y = rng.sample(pair, 2)
        return fact(rng, side, OPPOSITE, y, "facts", x=f'"{x}"' if rng.random() < 0.15 else x)
    if kind < 0.7:
        return animal_fact(rng, side)
    if kind < 0.8:
        thing = rng.choice(tuple(THING_COLOURS))
        return fact(rng, side, COLOUR, THING_COLOURS[thing], "facts", x=thing)
    if kind < 0.85:
        at = rng.randrange(8)
        return fact(rng, side, PLANET, PLANETS[at], "facts", n=ordinal(rng, at), d=str(at + 1))
    return trivia(rng, side)
