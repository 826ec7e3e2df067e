"""Short stories about a named hero and a place, put together from sentences of our own."""

import random
from dataclasses import dataclass

from scripts.demo.skills.spelling import new_name
from scripts.demo.text import TEST, Forms, Turn, phrase
from scripts.demo.words import CITIES, HELD_OUT_CITIES, HELD_OUT_NAMES, NAMES

# place | preposition | scenes | friends | things found | troubles with their solutions
PLACE_LINES = """
the forest|in|The trees were tall and green;Soft moss covered the ground|an old owl;a shy deer;a small fox|a silver key;a golden nut;a tiny door in a tree|the path was lost under the leaves>the stars showed the way back to the path
the castle|in|The towers were high and grey;Flags moved in the wind|a tired knight;a kind cook;a little ghost|a dusty crown;a secret stair;a letter with a red seal|the great gate would not open>a song made the old gate swing open
the sea|by|The waves sang a quiet song;The water was blue and clear|a friendly whale;a wise crab;an old sailor|a pearl as big as an egg;a message in a bottle;a map on a shell|a storm pushed all the boats away>a light on the rocks brought the boats home
the mountains|in|Snow lay on the peaks;The air was cold and fresh|a grey goat;a brave eagle;a hungry bear|a blue crystal;a warm cave;a bell of ice|the bridge over the valley was broken>a strong rope became a new bridge
the garden|in|Roses grew along the wall;Bees hummed in the sun|a busy bee;a slow snail;a clever mouse|a seed that glowed;a hidden gate;a ring under a stone|all the flowers were dry and sad>a little stream was led to the flowers
the city|in|The streets were full of people;Lights shone in every window|a street musician;a grey cat;a baker with a big hat|a lost purse;a ticket for the last train;a red balloon|all the lights went out at once>hundreds of candles made the streets bright again
the desert|in|The sand was hot and golden;The sky had no clouds at all|a patient camel;a small snake;an old trader|a lamp of copper;a well of cool water;a map of the stars|there was no water left>a green bird showed the way to a spring
the farm|on|The hay smelled sweet;The hens were already awake|a proud hen;a lazy pig;a white horse|an egg of gold;a horseshoe of luck;a nest in the barn|the youngest lamb was missing>soft footprints in the mud led to the lamb
the moon|on|The ground was white and quiet;The stars were very near|a lonely robot;a moon rabbit;a sleepy star|a flag with no name;a stone that sang;a footprint|the rocket had no more fuel>moon dust turned out to be the best fuel
the village|in|Smoke rose from the chimneys;Children played at the well|a friendly farmer;an old teacher;a spotted dog|a box of old toys;a coin from far away;a book of songs|the bread for the feast was burned>all neighbours brought something to eat
the school|at|The bell rang and the halls were full;Chalk dust danced in the light|a kind teacher;a new child;a mouse from the attic|a secret room;a book without words;a drawing of a dragon|nobody could find the key to the music room>the key was hanging on a nail all the time
the river|by|The water ran fast and clear;Tall grass grew on the banks|a grey heron;a jumping fish;a fisher|a small boat;a smooth green stone;an old anchor|the boat began to sink>some wax and a leaf closed the hole
the cave|in|It was dark and water dripped from the roof;Every step made an echo|a gentle dragon;a blind fish;a group of bats|a chest of shells;a painting on the wall;a warm light|a rock closed the way out>many small hands moved the rock together
the island|on|Palm trees moved in the warm wind;The sand was white as milk|a talking turtle;a funny monkey;an old pirate|a chest full of letters;a drum;a cup of gold|the only boat was gone>a raft of wood was ready before the sunset
the market|at|The stalls were full of fruit;Everyone was talking at the same time|a seller of spices;a small dog;a woman with a green hat|a cup with a crack;a blue scarf;an old clock|a thief took the bag of a seller>the small dog ran after the thief and got the bag back
the snow|in|Everything was white and silent;Flakes fell slowly from the sky|a white fox;a snowman;an owl with bright eyes|a red sledge;a warm coat;a frozen flower|the way home was covered by snow>the white fox left a trail to follow
space|in|The stars were bright and the night had no end;A blue planet shone far below|a friendly alien;an old robot;a brave pilot|a letter from another world;a ball of light;a lost satellite|the ship lost its way between the stars>an old song on the radio pointed the way home
the park|in|Children flew kites on the grass;Ducks swam across the pond|a fat duck;an old gardener;a little squirrel|a lost kite;a bench with names;a wooden horse|a kite was stuck high in a tree>the squirrel climbed up and set the kite free
the zoo|at|The lions were still asleep;Parents and children walked along the paths|a playful monkey;a wise elephant;a shy penguin|the key to a cage;a pink egg;a colourful shell|the little penguin could not find its mother>the elephant lifted the penguin high until its mother saw it
the swamp|in|Fog hung over the dark water;Frogs sang in the mud|a big frog;a kind witch;a patient crane|a glass ball;a bridge of roots;a green lamp|the mud held both feet fast>the crane pulled with a strong rope
""".strip()  # fmt: skip
GENERIC = (
    "The sun was shining and the air was warm;It was a quiet and friendly place|an old man;a small dog;a curious child|"
    "a little box;a strange letter;a shiny coin|the way home was hard to find>a friendly voice called and showed the way home"
)
OTHER_PLACES = (
    "the kitchen;the museum;the train;the tower;the bakery;the hospital;the airport;the office;the attic;the theatre;"
    "the old house;the valley;the harbour;the palace;the tent;the hotel;the circus;the meadow;the station;the mill;the cellar"
).split(";")
HELD_OUT_PLACES = ("the lighthouse", "the library", "the submarine", "the greenhouse", "the volcano", "the cinema")
KINDS = (
    "girl;boy;cat;dog;robot;dragon;mouse;fox;princess;knight;wizard-like man;bear;rabbit;child;king;queen;pirate;farmer;"
    "baker;astronaut;horse;bird;teacher;frog;lion;elephant;owl;fish;sailor;painter"
).replace("wizard-like man", "giant").split(";")  # fmt: skip

STORY = Forms(
    np=("a {l}story about {h} {p}", "a {l}story with {h} {p}", "a {l}tale about {h} {p}"),
    do=("tell me a {l}story about {h} {p}", "tell a {l}story about {h} {p}", "write a {l}story about {h} {p}",
        "write me a {l}story about {h} {p}", "make up a {l}story about {h} {p}", "invent a {l}story with {h} {p}",
        "tell me a {l}tale of {h} {p}", "give me a {l}story about {h} {p}", "write a {l}story where {h} is {p}",
        "tell me a {l}story that happens {p} with {h} as the hero", "write a {l}story set {p} about {h}",
        "write a {l}story, the hero is {h}, the place is {p}", "create a {l}story about {h} {p}"),
    ask=("can you tell a {l}story about {h} {p}", "can you write a {l}story about {h} {p}"),
    raw=("{l}story about {h} {p}", "story: {h} {p}", "a {l}story about {h} {p}", "{l}story with {h} {p}"),
    held=("i'd love to hear a {l}story of {h} {p}", "what happened to {h} {p}? make it a {l}story",
          "my daughter wants a {l}story about {h} {p}"),
)  # fmt: skip
STORY_HERO = Forms(
    do=("tell me a {l}story about {h}", "write a {l}story about {h}", "tell a {l}story about {h}",
        "make up a {l}story about {h}", "write me a {l}story with {h}"),
    raw=("{l}story about {h}", "a {l}story about {h}"),
    held=("i'd love to hear a {l}story of {h}",),
)  # fmt: skip
STORY_ANY = Forms(
    do=("tell me a {l}story", "tell a {l}story", "write a {l}story", "make up a {l}story", "tell me another {l}story"),
    raw=("{l}story", "a {l}story please", "story time", "once upon a time"),
    held=("i'd love to hear a {l}story",),
)

OPENINGS = (
    "Once upon a time there was {k} {p}.", "One morning {k} woke up {p}.", "Long ago, {k} lived {p}.",
    "It was a bright day {p}, and {k} was ready for an adventure.", "{K} had always wanted to spend a day {p}.",
)  # fmt: skip
WISHES = (
    "{h} was curious and wanted to see everything.", "More than anything, {h} wished for a real friend.",
    "{h} had packed some bread and an apple.", "Today {h} wanted to be brave.",
)  # fmt: skip
MEETINGS = (
    "After a while {h} met {f}.", "Suddenly {f} came closer and said hello.", "There {h} saw {f} sitting all alone.",
    "Not far away, {f} was looking for help.",
)  # fmt: skip
TALKS = (
    '"Who are you?" asked {h}. "A friend," was the answer.', '"Come with me," said {h}, "together it is more fun."',
    '"Can you keep a secret?" whispered {tf}.', '"I have waited for you, {h}," said {tf} with a smile.',
)  # fmt: skip
FINDS = (
    "Together they found {o}.", "Then {h} noticed {o}.", "Right in front of them was {o}.",
    "Behind a corner {h} discovered {o}.",
)  # fmt: skip
TROUBLES = (
    "But then something went wrong: {t}.", "Soon there was a problem: {t}.", "Then came the hard part: {t}.",
)  # fmt: skip
FEELINGS = (
    "{h} was afraid, but only for a moment.", "{h} took a deep breath and began to think.",
    '"We must not give up," said {h}.',
    "Nobody knew what to do, but {h} stayed calm.",
)  # fmt: skip
SOLUTIONS = (
    "In the end {s}.", "After a long hour {s}.", "At last {s}.", "With a bit of luck {s}.",
)  # fmt: skip
THANKS = (
    "{Tf} danced with joy.", '"Thank you, {h}," said {tf}.', "Everyone cheered for {h}.", "{Tf} gave {h} a warm hug.",
)  # fmt: skip
EVENINGS = (
    "When the evening came, they shared some bread and told old tales.", "They laughed until the stars came out.",
    "Later they sat together and looked at the sky.", "That night there was music and cake for all.",
)  # fmt: skip
ENDINGS = (
    "From that day on, {h} and {tf} were best friends.", "And so {h} went home with a happy heart.",
    "{h} never forgot that day.", "And {h} learned that even a small hero can do great things.",
    "That is how {h} became the hero of the day.",
)  # fmt: skip
PLANS = {
    "short ": ((OPENINGS, MEETINGS, FINDS, ENDINGS), (OPENINGS, MEETINGS, TROUBLES, SOLUTIONS, ENDINGS)),
    "": (
        (OPENINGS, WISHES, MEETINGS, FINDS, TROUBLES, SOLUTIONS, ENDINGS),
        (OPENINGS, MEETINGS, TALKS, TROUBLES, FEELINGS, SOLUTIONS, ENDINGS),
    ),
    "long ": (
        (OPENINGS, WISHES, MEETINGS, TALKS, FINDS, TROUBLES, FEELINGS, SOLUTIONS, THANKS, EVENINGS, ENDINGS),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Place:
    """A place with what can be met, found and go wrong there."""

    where: str
    scenes: list[str]
    friends: list[str]
    things: list[str]
    troubles: list[str]


def read_place(line: str) -> Place:
    """Parse one line of the table."""
    name, preposition, *lists = line.split("|")
    return Place(f"{preposition} {name}", *(part.split(";") for part in lists))


PLACES = [read_place(line) for line in PLACE_LINES.splitlines()]


def pick_place(rng: random.Random, side: str) -> Place:
    """A known place, or another one with general events."""
    if rng.random() < (0.5 if side == TEST else 0.4):
        return rng.choice(PLACES)
    if side == TEST:
        name = rng.choice(HELD_OUT_PLACES + HELD_OUT_CITIES)
    else:
        # invented places teach to copy the word, whatever it is
        invented = "the " + new_name(rng).lower()
        name = rng.choice((rng.choice(OTHER_PLACES), rng.choice(CITIES), new_name(rng), invented, invented))
    preposition = rng.choice(("in", "in", "in", "at")) if name.startswith("the ") else "in"
    return read_place(f"{name}|{preposition}|{GENERIC}")


def the(phrase_with_article: str) -> str:
    """'an old owl' becomes 'the old owl'."""
    return "the " + phrase_with_article.split(" ", 1)[1]


def story_text(rng: random.Random, hero: str, intro: str, place: Place, length: str) -> str:
    """A story of the asked length."""
    friend, thing = rng.choice(place.friends), rng.choice(place.things)
    trouble, solution = rng.choice(place.troubles).split(">")
    fields = {"h": hero, "k": intro, "K": intro[0].upper() + intro[1:], "p": place.where, "f": friend, "tf": the(friend),
              "Tf": "The" + the(friend)[3:], "o": thing, "t": trouble, "s": solution}  # fmt: skip
    sentences = []
    for part in rng.choice(PLANS[length]):
        text = rng.choice(part)
        for name, value in fields.items():
            text = text.replace("{" + name + "}", value)
        sentences.append(text)
        if part is OPENINGS and length:
            sentences.append(rng.choice(place.scenes) + ".")
    return " ".join(sentences)


def hero_words(rng: random.Random, side: str) -> tuple[str, str, str]:
    """Name, the hero as asked for, and the hero as introduced in the story."""
    name = rng.choice(HELD_OUT_NAMES) if side == TEST else rng.choice(NAMES) if rng.random() < 0.4 else new_name(rng)
    if rng.random() < 0.5:
        return name, name, name
    kind = rng.choice(KINDS)
    article = "an" if kind[0] in "aeiou" else "a"
    link = rng.choice((f"{article} {kind} named {name}", f"{article} {kind} called {name}", f"{name} the {kind}"))
    return name, link, f"{article} {kind} named {name}"


def story(rng: random.Random, side: str) -> Turn:
    """A story as asked for: hero, place and length, some of them open."""
    length = rng.choice(("short ", "short ", "", "", "", "long "))
    place = pick_place(rng, side)
    name, asked, intro = hero_words(rng, side)
    fields = {"l": length if length or rng.random() < 0.5 else "little ", "h": asked, "p": place.where}
    kind = rng.random()
    forms = STORY if kind < 0.85 or side == TEST else STORY_HERO if kind < 0.95 else STORY_ANY
    if forms is not STORY:
        place = rng.choice(PLACES)
    if forms is STORY_ANY:
        name = rng.choice(NAMES)
        intro = name
    text = story_text(rng, name, intro, place, length)
    return Turn(phrase(rng, forms, side, fields), text, "stories", f"{name}|{place.where}")
