"""Days, months and the order of numbers."""

import random
from collections.abc import Sequence

from scripts.demo.text import Forms, Turn, fact, ordinal, phrase, pick_key
from scripts.demo.words import DAYS, MONTH_DAYS, MONTHS

DAY_STEP = {
    1: Forms(
        np=("the day after {x}", "the next day after {x}", "the day that follows {x}"),
        ask=("what day comes after {x}", "which day comes after {x}", "what comes after {x}", "which day follows {x}",
             "what day is after {x}", "what day is it after {x}", "if today is {x}, what day is tomorrow",
             "today is {x}, what is tomorrow", "what comes next after {x}", "which day is next after {x}",
         "if it is {x} today, what will tomorrow be", "when {x} is over, what day is next",
         "{x} ends, what day begins", "what follows {x}", "{x} and then which day", "{x} is before which day",
         "what day do i get after {x}", "what will be the day after {x}", "which weekday comes after {x}",
         "what day do we have after {x}", "when {x} is today, what is tomorrow", "what is the following day after {x}"),
        raw=("day after {x}", "after {x}?", "{x}, then?", "next day after {x}"),
        held=("{x} is over, which day is it now?", "{x} is followed by which day?"),
    ),
    -1: Forms(
        np=("the day before {x}", "the day just before {x}", "the day that comes before {x}"),
        ask=("what day comes before {x}", "which day comes before {x}", "what comes before {x}",
             "what day is before {x}", "which day is before {x}", "if today is {x}, what day was yesterday",
             "today is {x}, what was yesterday", "what day was it before {x}",
         "which weekday comes before {x}", "when {x} begins, which day has ended", "which day precedes {x}",
         "what precedes {x}", "which day was just over when {x} began", "{x} is after which day",
         "what day do we have before {x}", "when {x} is today, what was yesterday",
         "which day is the one before {x}", "what is the previous day of {x}"),
        raw=("day before {x}", "before {x}?", "what is before {x}"),
        held=("{x} has just begun, which day is over?", "{x} is preceded by which day?"),
    ),
}  # fmt: skip


MONTH_STEP = {
    1: Forms(
        np=("the month after {x}", "the next month after {x}", "the month that follows {x}"),
        ask=("what month comes after {x}", "which month comes after {x}", "what comes after {x}",
             "which month follows {x}", "what month is after {x}", "if it is {x} now, what is next month",
             "which month is next after {x}", "what month do we have after {x}", "which month will come after {x}",
             "what is the following month after {x}", "which month is right after {x}",
             "when {x} is over, what month is next", "{x} ends, what month begins", "what follows {x}",
             "{x} and then which month", "{x} is before which month", "what month comes next after {x}"),
        raw=("month after {x}", "after {x}?", "{x}, then?"),
        held=("{x} is over, which month is it now?", "{x} is followed by which month?"),
    ),
    -1: Forms(
        np=("the month before {x}", "the month just before {x}"),
        ask=("what month comes before {x}", "which month comes before {x}", "what comes before {x}",
             "what month is before {x}", "which month is before {x}", "if it is {x} now, what was last month",
             "what month do we have before {x}",
             "which month is the one before {x}", "what is the previous month of {x}",
             "which month is right before {x}", "when {x} begins, which month has ended", "which month precedes {x}",
             "what precedes {x}", "which month was just over when {x} began", "{x} is after which month"),
        raw=("month before {x}", "before {x}?"),
        held=("{x} has just begun, which month is over?", "{x} is preceded by which month?"),
    ),
}  # fmt: skip


NTH_MONTH = Forms(
    np=("the {n} month", "the {n} month of the year", "month number {d}", "the name of the {n} month"),
    do=("name the {n} month",),
    ask=(
        "which month is the {n}",
        "which month is number {d}",
        "what month is the {n} of the year",
        "what is the {n} month called",
        "which month is the {n} in the year",
        "what is the name of month number {d}",
        "what month do we call the {n}",
        "if i count the months, what is the {n}",
        "what is month {d} in the calendar",
        "what is month {d} called",
    ),
    raw=("{n} month", "month {d}", "{n} month of the year?"),
    held=("in the calendar, month {d} is called?", "counting the months, which is the {n}?"),
)


NTH_DAY = Forms(
    np=("the {n} day of the week", "day number {d} of the week", "the {n} weekday"),
    ask=(
        "which day is the {n} of the week",
        "from monday on, which day is the {n}",
        "if the week starts on monday, what is the {n} day",
        "what day is the {n} day of the week",
    ),
    raw=("{n} day of the week", "{n} day of the week?"),
    held=("a week starts on monday, so which day is the {n}?",),
)


MONTH_NUMBER = Forms(
    np=("the number of {x}", "the month number of {x}"),
    ask=(
        "what number is {x}",
        "which number does {x} have",
        "what number month is {x}",
        "which month number is {x}",
        "what is {x} as a month number",
        "month number of {x} is what",
    ),
    raw=("{x} month number", "{x} as a number"),
    held=("{x} is month number?",),
)


DAYS_IN_MONTH = Forms(
    np=("the number of days in {x}",),
    ask=(
        "how many days does {x} have",
        "how many days are in {x}",
        "how many days has {x}",
        "how long is {x}",
        "how many days does the month {x} have",
        "how many days can i count in {x}",
        "how many days does {x} last",
        "how long does {x} last",
        "what is the number of days in {x}",
    ),
    raw=("days in {x}", "days in {x}?", "{x} days"),
    held=("{x} lasts how many days?",),
)


NEXT_NUMBER = Forms(
    np=("the number after {a}", "the next number after {a}"),
    ask=(
        "what number comes after {a}",
        "what comes after {a}",
        "which number follows {a}",
        "what is after {a}",
        "what number is next after {a}",
        "which number is after {a}",
        "what is the next number after {a}",
        "what follows {a}",
        "which number do i get after {a}",
        "{a} is before which number",
    ),
    raw=("after {a}?", "number after {a}"),
    held=("{a} is followed by which number?",),
)


PREVIOUS_NUMBER = Forms(
    np=("the number before {a}", "the number just before {a}"),
    ask=(
        "what number comes before {a}",
        "what comes before {a}",
        "which number is before {a}",
        "what number is just before {a}",
        "what is the number before {a}",
        "what precedes {a}",
        "which number precedes {a}",
        "{a} is after which number",
        "what is before {a}",
    ),
    raw=("before {a}?", "number before {a}"),
    held=("{a} is preceded by which number?",),
)


BIGGER = Forms(
    np=("the bigger number, {a} or {b}", "the larger of {a} and {b}", "the maximum of {a} and {b}"),
    ask=("which is bigger, {a} or {b}", "what is larger, {a} or {b}", "which number is bigger, {a} or {b}",
         "which is more, {a} or {b}", "what is bigger: {a} or {b}", "which number is larger, {a} or {b}",
         "is {a} or {b} bigger", "is {a} bigger or {b}", "what number is the biggest, {a} or {b}",
         "which one is larger, {a} or {b}", "which is greater, {a} or {b}", "what is the greater of {a} and {b}",
         "of {a} and {b}, which is larger", "which one is the bigger one of {a} and {b}",
         "which of {a} and {b} is greater"),
    raw=("bigger: {a} or {b}", "max of {a} and {b}", "{a} or {b}, which is bigger?"),
    held=("between {a} and {b}, which one is the greater?",),
)  # fmt: skip


SMALLER = Forms(
    np=("the smaller number, {a} or {b}", "the smaller of {a} and {b}", "the minimum of {a} and {b}"),
    ask=("which is smaller, {a} or {b}", "what is less, {a} or {b}", "which number is smaller, {a} or {b}",
         "which is less, {a} or {b}", "what is smaller: {a} or {b}",
         "is {a} or {b} smaller", "is {a} smaller or {b}", "what number is the smallest, {a} or {b}",
         "which one is less, {a} or {b}", "what is the lesser of {a} and {b}", "of {a} and {b}, which is smaller",
         "which one is the smaller one of {a} and {b}", "which of {a} and {b} is less"),
    raw=("smaller: {a} or {b}", "min of {a} and {b}", "{a} or {b}, which is smaller?"),
    held=("between {a} and {b}, which one is the lesser?",),
)  # fmt: skip


PARITY = Forms(
    ask=(
        "is {a} even or odd",
        "is {a} odd or even",
        "is the number {a} even or odd",
        "is {a} an even or an odd number",
        "is {a} an odd or an even number",
        "what is {a}, odd or even",
        "do we call {a} even or odd",
        "how would you call {a}, even or odd",
        "would {a} be odd or even",
        "is {a} even",
        "is {a} odd",
    ),
    raw=("{a}: even or odd?", "even or odd: {a}", "{a} odd or even"),
    held=("would you call {a} odd or even?",),
)


def neighbour(rng: random.Random, side: str, names: Sequence[str], steps: dict[int, Forms]) -> Turn:
    """The name before or after another one."""
    at, step = rng.randrange(len(names)), rng.choice((1, -1))
    return fact(rng, side, steps[step], names[(at + step) % len(names)], "days and months", x=names[at])


def calendar(rng: random.Random, side: str) -> Turn:
    """Days and months."""
    kind = rng.random()
    at = rng.randrange(12)
    if kind < 0.3:
        return neighbour(rng, side, DAYS, DAY_STEP)
    if kind < 0.6:
        return neighbour(rng, side, MONTHS, MONTH_STEP)
    if kind < 0.75:
        return fact(rng, side, NTH_MONTH, MONTHS[at], "days and months", n=ordinal(rng, at), d=str(at + 1))
    if kind < 0.82:
        return fact(rng, side, NTH_DAY, DAYS[at % 7], "days and months", n=ordinal(rng, at % 7), d=str(at % 7 + 1))
    if kind < 0.91:
        return fact(rng, side, MONTH_NUMBER, str(at + 1), "days and months", x=MONTHS[at])
    return fact(rng, side, DAYS_IN_MONTH, str(MONTH_DAYS[at]), "days and months", x=MONTHS[at])


def numbers(rng: random.Random, side: str) -> Turn:
    """Next and previous number, bigger and smaller, even and odd."""

    def draw(r: random.Random) -> tuple[tuple[int, int], str]:
        a, b = r.sample(range(1, 100), 2)
        return (a, b), f"numbers {min(a, b)} {max(a, b)}"

    (a, b), key = pick_key(rng, side, draw)
    kind = rng.randrange(5)
    forms = (NEXT_NUMBER, PREVIOUS_NUMBER, BIGGER, SMALLER, PARITY)[kind]
    answer = (str(a + 1), str(a - 1), str(max(a, b)), str(min(a, b)), "odd" if a % 2 else "even")[kind]
    if kind in (0, 1, 4):
        key = ""
    return Turn(phrase(rng, forms, side, {"a": str(a), "b": str(b)}), answer, "numbers", key)
