"""Keys: short hashes of all that decides a row's result, so that a later run knows which results still hold."""

from __future__ import annotations

import hashlib
import json
from dataclasses import fields

from cbatch.cli.lines import Line
from cbatch.cli.row import Row
from cbatch.engine import SamplingParams

PART = 8
"""Hexadecimal digits of each of a key's three parts."""

KEY_LENGTH = 3 * PART
WHAT_DIFFERS = ("another model, dtype or chat template", "other sampling parameters or another seed", "another input")
"""What it means that the first, second or third part of a key is not the same."""


_ENCODER = json.JSONEncoder(sort_keys=True)


class KeyMaker:
    """Makes the keys of a run's rows: one part for the model, one for the sampling, one for the input.

    Device, batch sizes and order are in none of them, nor are a row's priority and how its JSON was spelt.
    """

    def __init__(self, fingerprint: str, reading: dict[str, object]) -> None:
        """`reading`: options that decide what becomes of an input line, such as the system message."""
        self._model = _hash(fingerprint.encode())
        self._reading = hashlib.blake2b(_dump(reading), digest_size=PART // 2)

    def of_row(self, row: Row, sampling: bytes, seed: int) -> str:
        """`sampling`: the row's parameters as `spelt` gives them."""
        call = (row.call.is_chat, row.call.model) if row.call else None
        asked = (row.id, row.messages, row.prompt, row.prompt_token_ids, row.raw, row.extra, call)
        return self._model + _hash(b"%b%d" % (sampling, seed)) + self._of_input(_dump(asked))

    def of_refused(self, line: Line) -> str:
        """The key of a line that is no row; only its bytes count."""
        return self._model + "0" * PART + self._of_input(line.digest if line.data is None else line.data)

    def _of_input(self, data: bytes) -> str:
        digest = self._reading.copy()
        digest.update(data)
        return digest.hexdigest()


def spelt(params: SamplingParams) -> bytes:
    """The parameters that are not at their default: a new one, when it comes, changes no key."""
    values = {field.name: (getattr(params, field.name), field.default) for field in fields(params)}
    return _dump({name: value for name, (value, default) in values.items() if value != default and name != "seed"})


def _dump(value: object) -> bytes:
    return _ENCODER.encode(value).encode()


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=PART // 2).hexdigest()
