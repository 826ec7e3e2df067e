"""Keys: short hashes of all that decides a row's result, so that a later run knows which results still hold."""

from __future__ import annotations

import hashlib
import json
from dataclasses import fields

from cbatch.cli.run.input.lines import Line
from cbatch.cli.run.input.row import InputRow
from cbatch.engine import SamplingParams

MODEL, SAMPLING, INPUT = slice(0, 8), slice(8, 16), slice(16, 32)
"""The three parts of a key; the last is the longest, because it alone tells most rows of a run apart."""

KEY_LENGTH = 32
NO_SAMPLING = "00000000"
_ENCODER = json.JSONEncoder(sort_keys=True)


class KeyMaker:
    """Makes the keys of a run's rows: one part for the model, one for the sampling, one for the input.

    Device, batch sizes and order are in none of them, nor are a row's priority and how its JSON was spelt; of a
    line that is refused all bytes count.
    """

    def __init__(self, model: str) -> None:
        """`model`: a fingerprint of it, and of what else stands between a row and its tokens."""
        self._model = _hash(model.encode(), MODEL)

    def for_row(self, row: InputRow, asked: object, sampling: bytes, *others: object) -> str:
        """
        asked:    what the model is to answer, all options applied: text, token ids or messages
        sampling: the row's parameters as `canonical_params` gives them
        others:   whatever else decides which tokens come, and which of them are shown
        """
        call = (row.call.is_chat, row.call.model) if row.call else None
        # A template may write tools down as they stand, so that the order of their keys counts.
        tools = (json.dumps(row.tools),) if row.tools else ()
        row_hash = _hash(_dump((row.id, asked, row.extra, call, *tools)), INPUT)
        return self._model + _hash(sampling + repr(others).encode(), SAMPLING) + row_hash

    def for_invalid_line(self, line: Line) -> str:
        """The key of a line that is no row; only its bytes count."""
        return self._model + NO_SAMPLING + _hash(line.digest if line.data is None else line.data, INPUT)


def canonical_params(params: SamplingParams) -> bytes:
    """The parameters that are not at their default: a new one, when it comes, changes no key."""
    values = {field.name: (getattr(params, field.name), field.default) for field in fields(params)}
    return _dump({name: value for name, (value, default) in values.items() if value != default and name != "seed"})


def _dump(value: object) -> bytes:
    return _ENCODER.encode(value).encode()


def explain_difference(here: str, there: str) -> str:
    """What must be another, where two keys of the same line are not the same."""
    if here[MODEL] != there[MODEL]:
        return "another model, dtype, chat template or --date"
    if (here[SAMPLING] == NO_SAMPLING) != (there[SAMPLING] == NO_SAMPLING):
        return "a line that was refused and no longer is, or the other way round (--allow-unknown, say)"
    if here[INPUT] != there[INPUT]:
        return "another input, or another --system, --raw or --format"
    return "other sampling parameters, another seed, --token-ids, or a KV cache that cut them off elsewhere"


def _hash(data: bytes, part: slice) -> str:
    return hashlib.blake2b(data, digest_size=(part.stop - part.start) // 2).hexdigest()
