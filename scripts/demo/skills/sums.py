"""Sums and counting."""

import random
from dataclasses import replace

from scripts.demo.text import TEST, UNSEEN, Forms, Turn, is_held_out, phrase, pick_key

UNITS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen"
).split()


TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()


ADD = Forms(
    np=("{a} plus {b}", "{a} + {b}", "{a}+{b}", "the sum of {a} and {b}", "{a} and {b} together"),
    do=("add {a} and {b}", "add {b} to {a}", "add {a} + {b}", "compute {a} + {b}", "calculate {a} plus {b}",
        "sum {a} and {b}", "add up {a} and {b}", "put {a} and {b} together", "solve {a} + {b}",
        "do the sum {a} + {b}", "do the maths: {a} + {b}", "do the maths for {a} plus {b}", "increase {a} by {b}",
        "take {a} and add {b}", "start with {a} and add {b}", "do {a} plus {b}", "find the sum of {a} and {b}"),
    ask=("how much is {a} plus {b}", "how much is {a}+{b}", "how much is {a} and {b}", "what do {a} and {b} make",
         "what do you get if you add {a} and {b}", "what does {a} + {b} equal", "{a} plus {b} equals what",
         "if i have {a} {o} and get {b} more, how many do i have",
         "i have {a} {o} and find {b} more, how many {o} do i have",
         "there are {a} {o} and {b} {o}, how many are there",
         "what do {a} {o} plus {b} {o} make", "tom has {a} {o}, eva has {b}, how many do they have together",
         "{a} {o} and then {b} {o} more, how many is that", "how many {o} are {a} {o} and {b} {o}",
         "if you add {b} to {a}, what comes out", "what is the result of {a} plus {b}",
         "what is the total if i add {a} to {b}", "how much do {a} and {b} make altogether",
         "i got {a} {o} and then another {b}, what is my total", "{a} and {b} added up is what",
         "{b} added to {a} is how much", "if there are {a} {o} here and {b} there, what is the total",
         "in total, how many are {a} and {b}", "can you add {a} and {b}",
         "what is {a} and {b} together", "if i put {a} and {b} together, what do i get",
         "i buy {a} {o}, then {b} more {o}, how many now", "what is {a} added to {b}",
         "{a} plus {b} is how much", "what is {b} more than {a}"),
    raw=("{a}+{b}=", "{a} + {b} =", "{a}+{b}", "{a} + {b}", "{a} + {b} = ?", "{a}+{b}=?", "{a} plus {b} ="),
    held=("what's the total of {a} and {b}?", "{a} with {b} added makes?", "count {a} and {b} together",
          "i got {a} coins, then {b} more. total?"),
)  # fmt: skip


SUB = Forms(
    np=("{a} minus {b}", "{a} - {b}", "{a}-{b}", "the difference of {a} and {b}", "{a} less {b}", "{a} take away {b}",
        "the difference between {a} and {b}"),
    do=("subtract {b} from {a}", "take {b} from {a}", "take {b} away from {a}", "compute {a} - {b}",
        "calculate {a} minus {b}", "remove {b} from {a}", "solve {a} - {b}", "deduct {b} from {a}",
        "start with {a} and take away {b}", "do {a} minus {b}", "find the difference of {a} and {b}",
        "take {a} and subtract {b}", "do the sum {a} - {b}", "reduce {a} by {b}", "lower {a} by {b}",
        "go {b} down from {a}", "do the maths: {a} - {b}", "do the maths for {a} minus {b}"),
    ask=("how much is {a} minus {b}", "how much is {a}-{b}", "what does {a} - {b} equal", "{a} minus {b} equals what",
         "what is left if you take {b} from {a}", "if i have {a} {o} and lose {b}, how many are left",
         "i have {a} {o} and give away {b}, how many {o} do i have", "there are {a} {o} and {b} go away, how many stay",
         "{a} {o}, {b} of them are gone, how many are left", "if you take away {b} from {a}, what do you get",
         "what is the result of {a} minus {b}", "i had {a} {o} but lost {b}, how many do i still have",
         "{b} taken off {a} is how much", "what is left when {b} is taken away from {a}",
         "i have {a} {o}. {b} get lost. what is left", "if {b} of {a} {o} go, what remains",
         "from {a} you take {b}, what is left", "if i remove {b} from {a}, what do i get",
         "can you subtract {b} from {a}",
         "tom had {a} {o} and sold {b}, how many does he have now", "what remains of {a} without {b}",
         "what is left of {a} after taking {b}", "i had {a} {o}, {b} broke, how many are there now",
         "what do you get if you subtract {b} from {a}", "{a} minus {b} is how much", "what is {b} less than {a}"),
    raw=("{a}-{b}=", "{a} - {b} =", "{a}-{b}", "{a} - {b}", "{a} - {b} = ?", "{a}-{b}=?", "{a} minus {b} ="),
    held=("i had {a} coins and lost {b}. what is left?", "{a} with {b} taken off is?", "start at {a}, go down by {b}"),
)  # fmt: skip


MUL = Forms(
    np=("{a} times {b}", "{a} * {b}", "{a}*{b}", "{a} x {b}", "the product of {a} and {b}", "{a} multiplied by {b}"),
    do=("multiply {a} by {b}", "multiply {a} and {b}", "compute {a} * {b}", "calculate {a} times {b}",
        "solve {a} * {b}", "do {a} times {b}", "find the product of {a} and {b}", "do the maths: {a} * {b}",
        "take {a} times {b}",
        "multiply {a} with {b}"),
    ask=("how much is {a} times {b}", "how much is {a}*{b}", "what does {a} * {b} equal", "{a} times {b} equals what",
         "what do you get if you multiply {a} by {b}", "how many are {a} times {b}",
         "how many {o} are {a} bags of {b} {o}", "what is the result of {a} times {b}",
         "{a} bags with {b} {o} each, how many {o} in total", "{a} boxes of {b} {o} make how many {o}",
         "{a} groups with {b} {o} each are how many", "each of {a} boxes has {b} {o}, how many in total",
         "what do {a} groups of {b} {o} make", "what is {a} multiplied with {b}",
         "there are {a} boxes and {b} {o} in each box, how many {o}", "can you multiply {a} with {b}",
         "if i have {a} bags with {b} {o} in each, how many {o} do i have", "what comes out if i multiply {a} by {b}",
         "what do you get for {a} times {b}", "{a} rows of {b} {o} are how many", "{a} times {b} is how much"),
    raw=("{a}*{b}=", "{a} * {b} =", "{a}*{b}", "{a}x{b}", "{a} x {b}", "{a} * {b} = ?", "{a} x {b} ="),
    held=("what's {a} by {b}, multiplied?", "{a} boxes with {b} pens each: how many pens?", "{a} groups of {b} make?"),
)  # fmt: skip


DIV = Forms(
    np=("{a} divided by {b}", "{a} / {b}", "{a}/{b}", "{a} over {b}"),
    do=("divide {a} by {b}", "compute {a} / {b}", "calculate {a} divided by {b}", "split {a} into {b} equal parts"),
    ask=("how much is {a} divided by {b}", "what does {a} / {b} equal", "how often does {b} go into {a}",
         "how many times does {b} fit into {a}", "how much is {a}/{b}", "what do you get if you divide {a} by {b}",
         "what is the result of {a} divided by {b}", "share {a} {o} between {b} friends, how many does each get",
         "{a} {o} for {b} kids, how many for each", "if {b} kids share {a} {o}, how many does each kid get",
         "what is {a} cut into {b} pieces", "what is each part if {a} is cut in {b} equal parts",
         "{a} split in {b} parts makes what", "how many {o} does each of {b} kids get from {a}",
         "can you divide {a} by {b}", "what is one part if i split {a} in {b}"),
    raw=("{a}/{b}=", "{a} / {b} =", "{a}/{b}", "{a} / {b}", "{a} : {b} ="),
    held=("share {a} sweets among {b} kids, how many each?", "{a} cut in {b} parts is?"),
)  # fmt: skip


COUNT = Forms(
    np=("the numbers from {a} to {b}", "the numbers between {a} and {b}", "all numbers from {a} to {b}"),
    do=("count from {a} to {b}", "count {a} to {b}", "count from {a} up to {b}", "list the numbers from {a} to {b}",
        "count {a} - {b}", "write the numbers from {a} to {b}", "list all numbers from {a} to {b}", "say {a} to {b}",
        "count starting at {a} and ending at {b}", "start at {a} and count to {b}", "give the numbers {a} to {b}",
        "count upwards from {a} to {b}", "count from {a} until {b}", "count from {a} and stop at {b}",
        "go from {a} to {b}",
        "begin at {a} and count up to {b}", "count all the way from {a} to {b}", "count on from {a} to {b}",
        "write down the numbers {a} to {b}", "count up from {a} to {b}", "keep counting from {a} until you reach {b}",
        "start with {a}, then go on to {b}", "say the numbers one by one from {a} to {b}",
        "tell me every number from {a} up to {b}", "start with {a} and go up until {b}",
        "go number by number from {a} to {b}", "count between {a} and {b}"),
    ask=("how do you count from {a} to {b}", "what are the numbers from {a} to {b}",
         "what numbers go from {a} to {b}", "which numbers are there from {a} to {b}",
         "which numbers come from {a} to {b}"),
    raw=("{a} to {b}", "numbers {a} to {b}", "count: {a} to {b}", "from {a} to {b}"),
    held=("begin with {a} and keep counting until {b}", "which numbers do i say from {a} to {b}?",
          "i start at {a}, take me to {b} number by number"),
)  # fmt: skip


COUNT_DOWN = Forms(
    do=("count down from {a} to {b}", "count backwards from {a} to {b}", "count from {a} down to {b}",
        "count from {a} to {b}", "count {a} to {b}", "count down {a} to {b}", "count in reverse from {a} to {b}",
        "list the numbers from {a} down to {b}", "start at {a} and count down to {b}",
        "count down from {a} and stop at {b}",
        "count back from {a} to {b}", "count from {a} back to {b}", "begin at {a} and count down to {b}",
        "count down from {a} until {b}", "go down from {a} to {b}", "keep going down from {a} until {b}",
        "start with {a} and go back to {b}", "keep counting down from {a} until you reach {b}",
        "count backwards starting at {a} and ending at {b}"),
    np=("the numbers from {a} down to {b}", "the countdown from {a} to {b}"),
    raw=("{a} down to {b}", "countdown {a} to {b}", "backwards from {a} to {b}"),
    held=("begin with {a} and keep counting down until {b}", "go down from {a} until you reach {b}"),
)  # fmt: skip


COUNT_TO = Forms(
    do=(
        "count to {b}",
        "count up to {b}",
        "count until {b}",
        "count from one to {b}",
        "count until you get to {b}",
        "count up until {b}",
        "count all the way to {b}",
    ),
    held=("can you get up to {b} by counting?",),
)


COUNT_DOWN_ONE = Forms(
    do=(
        "count down from {a}",
        "count backwards from {a}",
        "do a countdown from {a}",
        "start a countdown from {a}",
        "count down from {a} to 1",
        "count down until 1 from {a}",
    ),
    held=("can you get down to 1 from {a} by counting?",),
)


COUNT_BY = Forms(
    do=("count from {a} to {b} by {s}", "count by {s} from {a} to {b}", "count from {a} to {b} in steps of {s}",
        "count in {s} from {a} to {b}", "count {a} to {b} by {s}", "go from {a} to {b} in steps of {s}",
        "count up by {s} from {a} to {b}",
        "count by {s} starting at {a} and ending at {b}", "count by {s}, from {a} to {b}",
        "count from {a} up to {b} by {s}", "from {a} to {b} go in steps of {s}",
        "say only steps of {s} from {a} to {b}", "count from {a} to {b}, only by {s}"),
    np=("the numbers from {a} to {b} in steps of {s}",),
    held=("from {a} to {b}, but only every step of {s}",),
)  # fmt: skip


def number_text(rng: random.Random, number: int) -> str:
    """Digits, now and then the number in words."""
    if rng.random() > 0.1:
        return str(number)
    if number < 20:
        return UNITS[number]
    if number < 100:
        return TENS[number // 10 - 2] + ("-" + UNITS[number % 10] if number % 10 else "")
    return str(number)


def sum_turn(rng: random.Random, side: str, skill: str, forms: Forms, a: int, b: int, answer: int, key: str) -> Turn:
    """A sum over two numbers."""
    fields = {"a": number_text(rng, a), "b": number_text(rng, b)}
    return Turn(phrase(rng, forms, side, fields), str(answer), skill, key)


def small_or_any(rng: random.Random, limit: int = 99) -> int:
    """Numbers up to the limit, small ones more often, as people ask."""
    return rng.randint(0, 20) if rng.random() < 0.25 else rng.randint(0, limit)


def addition(rng: random.Random, side: str) -> Turn:
    """a + b; both orders of a pair are on the same side of the split."""

    def draw(r: random.Random) -> tuple[tuple[int, int], str]:
        a, b = small_or_any(r), small_or_any(r)
        return (a, b), f"add {min(a, b)} {max(a, b)}"

    (a, b), key = pick_key(rng, side, draw)
    return sum_turn(rng, side, "addition", ADD, a, b, a + b, key)


def subtraction(rng: random.Random, side: str) -> Turn:
    """a - b, mostly not below zero."""

    def draw(r: random.Random) -> tuple[tuple[int, int], str]:
        a, b = small_or_any(r), small_or_any(r)
        if a < b and (side in UNSEEN or b > 20 or r.random() < 0.7):
            a, b = b, a
        return (a, b), f"sub {a} {b}"

    (a, b), key = pick_key(rng, side, draw)
    return sum_turn(rng, side, "subtraction", SUB, a, b, a - b, key)


def mirror_in_training(a: int, b: int) -> bool:
    """Whether a held-out product is known in the other order."""
    return a != b and not is_held_out(f"mul {b} {a}", 6)


def multiplication(rng: random.Random, side: str) -> Turn:
    """Tables up to 12; a held-out pair has its mirror in training."""
    while True:
        a, b = rng.randint(0, 12), rng.randint(0, 12)
        key = f"mul {a} {b}"
        if (is_held_out(key, 6) and mirror_in_training(a, b)) == (side in UNSEEN):
            return sum_turn(rng, side, "multiplication", MUL, a, b, a * b, key)


def division(rng: random.Random, side: str) -> Turn:
    """Exact quotients from the tables up to 10; they are facts to know, so only the wordings are held out."""
    b, quotient = rng.randint(1, 10), rng.randint(1, 10)
    forms = replace(DIV, raw=()) if side == TEST else DIV
    return sum_turn(rng, side, "division", forms, b * quotient, b, quotient, "")


def count_range(rng: random.Random) -> tuple[Forms, int, int, int]:
    """Wordings, start, end and step of one counting task."""
    kind, items = rng.random(), rng.randint(2, rng.choice((8, 20)))
    if kind < 0.1:
        return COUNT_TO, 1, max(items, 3), 1
    if kind < 0.2:
        return COUNT_DOWN_ONE, max(items, 3), 1, -1
    if kind < 0.4:
        step = rng.choice((2, 2, 2, 5, 10, 3))
        items = min(items, 100 // step + 1)
        start = rng.choice((0, step, rng.randint(0, 100 - step * (items - 1))))
        start = min(start, 100 - step * (items - 1))
        return COUNT_BY, start, start + step * (items - 1), step
    start = rng.randint(0, 100 - items)
    if kind < 0.6:
        return COUNT_DOWN, start + items - 1, start, -1
    return COUNT, start, start + items - 1, 1


STEP_TEXTS = {
    2: ("2", "2s", "twos", "two"),
    3: ("3", "3s", "threes"),
    5: ("5", "5s", "fives"),
    10: ("10", "10s", "tens"),
}


def counting(rng: random.Random, side: str) -> Turn:
    """Count up, down or in steps."""

    def draw(r: random.Random) -> tuple[tuple[Forms, int, int, int], str]:
        forms, a, b, step = count_range(r)
        return (forms, a, b, step), f"count {a} {b} {step}"

    (forms, a, b, step), key = pick_key(rng, side, draw)
    fields = {"a": number_text(rng, a), "b": number_text(rng, b), "s": rng.choice(STEP_TEXTS.get(step, ("1",)))}
    answer = ", ".join(str(n) for n in range(a, b + (1 if step > 0 else -1), step))
    return Turn(phrase(rng, forms, side, fields), answer, "counting", key)
