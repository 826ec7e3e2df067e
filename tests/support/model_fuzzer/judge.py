"""The rules for what a run may do, whatever model it is given."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

MOST_SECONDS, MOST_BYTES = 20.0, 2**30
MOST_SENTENCES, MOST_CHARACTERS = 4, 1100

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
_OF_PROGRAMS = re.compile(
    r"Traceback|panicked|RUST_BACKTRACE|thread '|Exception ignored|Warning:|core dumped|stack over"
)


@dataclass
class Outcome:
    """A run's result.

    code:  its exit code, a negative one the signal that ended it, None if it had to be stopped
    cpu:   seconds of the processor in its own process
    bytes: of memory at its peak, or of that of the largest of its children
    """

    code: int | None
    output: bytes
    errors: bytes
    seconds: float
    cpu: float
    bytes: int


def violations(outcome: Outcome, rows: int) -> list[str]:
    """Breaches of rules by a run with so many rows. Empty if it kept to the rules."""
    found = []
    if outcome.code is None:
        found.append(f"it did not end within {MOST_SECONDS:g} s")
    elif outcome.code not in (0, 1, 2):
        found.append(f"it ended with {outcome.code}: {outcome.errors[-300:].decode('utf-8', 'replace')}")
    if outcome.seconds > MOST_SECONDS:
        found.append(f"it took {outcome.seconds:.1f} s")
    if outcome.bytes > MOST_BYTES:
        found.append(f"it took {outcome.bytes / 2**20:.0f} MiB")
    found += _of_errors(outcome)
    found += _of_output(outcome, rows)
    return found


def _of_errors(outcome: Outcome) -> list[str]:
    try:
        text = outcome.errors.decode()
    except UnicodeDecodeError:
        return ["what it says is not UTF-8"]
    sentences = text.splitlines()
    found = []
    if match := _OF_PROGRAMS.search(text):
        found.append(f"it says {match[0]!r}: {text[:600]}")
    if match := _CONTROL.search(text):
        found.append(f"it says the control character {match[0]!r}")
    if outcome.code == 2 and not sentences:
        found.append("it was refused without a sentence")
    if len(sentences) > MOST_SENTENCES or any(len(sentence) > MOST_CHARACTERS for sentence in sentences):
        found.append(f"it says more than some sentences: {text[:300]}")
    if any(not sentence.startswith("cbatch: ") for sentence in sentences):
        found.append(f"it says what is not its own: {text[:300]}")
    return found


def _of_output(outcome: Outcome, rows: int) -> list[str]:
    if outcome.code not in (0, 1):
        return []
    if re.search(rb"[\x00-\x09\x0b-\x1f]", outcome.output):
        return ["a control character in its output"]
    try:
        found = [json.loads(line) for line in outcome.output.splitlines()]
    except ValueError:
        return [f"its output is not JSON: {outcome.output[:300]!r}"]
    failed = ["error" in row for row in found]
    if [row.get("index") for row in found] != list(range(rows)):
        return [f"it gave the rows {[row.get('index') for row in found]}"]
    if any(failed) != (outcome.code == 1):
        return [f"it ended with {outcome.code}, and {sum(failed)} rows are errors"]
    long = [
        row["error"]["message"] for row in found if "error" in row and len(row["error"]["message"]) > MOST_CHARACTERS
    ]
    return [f"an error of {len(long[0])} characters: {long[0][:200]}"] if long else []
