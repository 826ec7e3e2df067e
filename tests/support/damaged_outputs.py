"""Outputs of a small batch with random damage, which are resumed and compared with what nothing has disturbed."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from cbatch.api import Engine
from cbatch.base.errors import ConfigError
from cbatch.batch.answer_cache import FILE_NAME
from cbatch.batch.engine_driver import EngineDriver
from cbatch.batch.row import format_result
from cbatch.batch.tables.table_writer import open_results
from cbatch.cli.chat.background_run import parse_run_options
from cbatch.cli.common.console import show_progress
from cbatch.cli.run.batch_run import run_batch
from cbatch.cli.run.command import open_input, open_output
from cbatch.cli.run.options import RunOptions
from cbatch.cli.run.stats import RunStats
from tests.support.faults import slow_steps
from tests.support.model_folder import save_model
from tests.support.rows import write_rows

TEMPLATE = (
    "{% if tools %}{{ tools | length }} <tool_call>\n{% endif %}"
    "{% for m in messages %}"
    "{% if m.role not in ['system', 'user', 'assistant', 'tool'] %}{{ raise_exception('no such role') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content or m.tool_calls }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOL = {
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    "command": ["echo", "5"],
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'

USER = {"role": "user", "content": "hi"}
ROWS: list[Any] = [
    {"id": "a", "prompt": "hello", "max_tokens": 5},
    {"id": "é😀", "prompt": "mixed ünicode ✓", "temperature": 1.0, "max_tokens": 6, "note": ["😀", {"x": "ø"}]},
    {"prompt": "several", "temperature": 1.0, "max_tokens": 4, "n": 2},
    {"prompt": "x " * 400},
    {"custom_id": "c", "url": "/v1/completions", "body": {"prompt": "two", "max_tokens": 4}},
    {"custom_id": "d", "url": "/v1/chat/completions", "body": {"messages": [USER], "max_tokens": 3, "n": 2}},
    {"custom_id": "e", "url": "/v1/chat/completions", "body": {"messages": [{"role": "nobody", "content": "a"}]}},
    {"custom_id": "f", "url": "/v1/responses", "body": {"input": "hi", "max_output_tokens": 3, "metadata": {"a": "ø"}}},
    {"prompt": "last", "max_tokens": 8, "ignore_eos": True},
    "{bad",
]
"""Every form of row of output but those of tools and tries."""

CALLING: list[Any] = [
    {"id": "call", "prompt": "a", "choice": [CALL]},
    *({"prompt": f"try {number}", "temperature": 1.0, "max_tokens": 4, "note": "ø"} for number in range(5)),
    "{bad",
]
TRIES = ("--validate", "regex=(?s).*[aeiou].*|.*tool_call.*", "--tries", "2", "--max-tool-rounds", "1")

LONG: list[Any] = [
    *({"prompt": f"long {number}", "max_tokens": 150, "ignore_eos": True, "temperature": 1.0} for number in range(3)),
    *({"prompt": f"short {number}", "max_tokens": 2} for number in range(4)),
    "{bad",
]
JOURNAL = ("--journal-tokens", "--journal-interval", "0.001")


class Kind(NamedTuple):
    """A batch whose output is damaged.

    share:  of all damages: tools and checks of answers run in processes, which take long to start
    file:   what is damaged, in the folder of the batch
    resume: options beside --resume; among the rows may be some that --retry-errors has replaced
    """

    share: float
    file: str
    rows: list[Any] = ROWS
    options: Sequence[str] = ()
    resume: Sequence[str] = ()


KINDS = {
    "rows": Kind(0.55, "out.jsonl", options=["--token-ids"], resume=["--retry-errors"]),
    "table": Kind(0.2, "out.csv.journal.jsonl", resume=["--retry-errors"]),
    "tokens": Kind(0.15, "out.jsonl.tokens", LONG, JOURNAL),
    "tries": Kind(0.05, "out.jsonl", CALLING, ["--tools", "{folder}/tools.json", *TRIES]),
    "cache": Kind(0.05, f"cache/{FILE_NAME}", options=["--cache", "{folder}/cache"]),
}
"""Rows of all forms; the journal of a table; unfinished answers; rows of tools and tries; a cache of answers."""


def make_engine(folder: Path) -> Engine:
    """An engine on a small random model, whose template takes tools."""
    model = save_model(folder / "model", context=512)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    return Engine(str(model), device="cpu", dtype="float32", max_seqs=4)


class Damage(NamedTuple):
    """kind: what happened to the bytes; data: what they are now"""

    kind: str
    data: bytes


def damage(data: bytes, chance: random.Random) -> Damage:
    """Flips, cuts, doubles or inserts something at a random place; half of the places lie near the end of a line."""
    while True:
        place = chance.randrange(len(data))
        if chance.random() < 0.5:
            ends = [at for at, byte in enumerate(data) if byte == 0x0A] or [place]
            place = min(max(chance.choice(ends) + chance.randint(-40, 3), 0), len(data) - 1)
        stop = place + int(math.exp(chance.uniform(0, math.log(len(data) / 2))))
        kind = chance.choice(["flip", "cut", "double", "insert"])
        if (made := _damaged(kind, data, place, stop, chance)) != data:
            return Damage(kind, made)


def _damaged(kind: str, data: bytes, place: int, stop: int, chance: random.Random) -> bytes:
    before, span, after = data[:place], data[place:stop], data[stop:]
    if kind == "flip":
        byte = data[place] ^ 1 << chance.randrange(8) if chance.random() < 0.5 else chance.choice(b'\n\0"}{,: 0a')
        return before + bytes([byte]) + data[place + 1 :]
    if kind == "cut":
        return before + after
    if kind == "double":
        at = stop if chance.random() < 0.7 else chance.randrange(len(data))
        return data[:at] + span + data[at:]
    size = min(stop - place, 20)
    new = bytes(chance.choices(b'\n\r\0 "}{,:0aZ', k=size)) if chance.random() < 0.7 else chance.randbytes(size)
    return before + new + data[place:]


@dataclass
class DamageCounts:
    """Outcomes of damaged outputs.

    refused:    left as they were without --recompute-changed, and run to their end with it; of caches, without them
    resumed:    run to their end at once, because what was damaged was no whole row, or is only missing
    not_ours:   refused with either option, since nothing in them was left of a row; run to their end with --overwrite
    computed:   rows that were computed again
    differing:  outputs that were not the undisturbed one in the end, and how to make them
    """

    kinds: Counter[str] = field(default_factory=Counter)
    refused: int = 0
    resumed: int = 0
    not_ours: int = 0
    computed: int = 0
    differing: list[str] = field(default_factory=list)


class DamageTest:
    """One batch, whose output is damaged and resumed again and again."""

    def __init__(self, engine: Engine, folder: Path, kind: str, seed: int = 0) -> None:
        self.counts = DamageCounts()
        self._driver, self._kind, self._seed = EngineDriver(engine.thread), kind, seed
        folder.mkdir(exist_ok=True)
        made = KINDS[kind]
        self._source, self._out = folder / "in.jsonl", folder / ("out.csv" if kind == "table" else "out.jsonl")
        self._damaged, self._tokens = folder / made.file, folder / "out.jsonl.tokens"
        write_rows(self._source, [f"{row}\n" if isinstance(row, str) else row for row in made.rows])
        (folder / "tools.json").write_text(json.dumps(TOOL))
        self._options = [option.format(folder=folder) for option in made.options]
        self._run(self._parsed("--overwrite"))
        self._resume = self._parsed("--resume", *made.resume)
        self._recompute = self._parsed("--resume", *made.resume, "--recompute-changed")
        self.whole, self._finished_before = self._out.read_bytes(), b""
        if kind == "table":  # as if the run had been broken off before the table was made
            with open_results(self._out, "csv") as made_of:
                self._damaged.write_bytes(made_of.read())
        rows = self.whole if kind != "table" else self._damaged.read_bytes()
        self._rows = sorted(rows.splitlines(keepends=True), key=lambda row: int(json.loads(row)["index"]))
        self._left = self._broken_off() if kind == "tokens" else self._damaged.read_bytes()

    def damage_many(self, count: int) -> DamageCounts:
        """Each number of a damage gives the same damage again."""
        for number in range(count):
            self.damage_one(number)
        return self.counts

    def damage_one(self, number: int) -> None:
        chance = random.Random(f"{self._seed} {self._kind} {number}")
        if self._kind == "tokens":
            self._out.write_bytes(self._finished_before)
        else:
            self._out.unlink(missing_ok=True)
            self._tokens.unlink(missing_ok=True)
            for rest in ("-wal", "-shm"):  # of a cache
                self._damaged.with_name(f"{self._damaged.name}{rest}").unlink(missing_ok=True)
        made = damage(self._state(chance), chance)
        self._damaged.write_bytes(made.data)
        self.counts.kinds[made.kind] += 1
        if not self._finish(made.data) or self._out.read_bytes() != self.whole or self._tokens.exists():
            self.counts.differing.append(f"{self._kind}, seed {self._seed}, number {number}: {made.kind}")

    def _finish(self, damaged: bytes) -> bool:
        """Resumes, in the way that the refusals ask for. Returns whether a refused file was left as it was."""
        if self._succeeds(self._resume):
            self.counts.resumed += 1
            return True
        is_untouched = self._damaged.read_bytes() == damaged
        if self._kind == "cache":  # as the refusal says
            self._damaged.unlink()
        if self._succeeds(self._recompute):
            self.counts.refused += 1
            return is_untouched
        self.counts.not_ours += 1
        is_untouched = is_untouched and self._damaged.read_bytes() == damaged
        if self._kind == "tokens":
            self._tokens.unlink()
        self._run(self._parsed("--overwrite"))
        return is_untouched

    def _succeeds(self, options: RunOptions) -> bool:
        try:
            self.counts.computed += self._run(options).rows
        except ConfigError:
            return False
        return True

    def _parsed(self, *options: str) -> RunOptions:
        words = [str(self._source), "-o", str(self._out), "-q", *self._options, *options]
        return parse_run_options(" ".join(f"'{word}'" for word in words))

    def _run(self, options: RunOptions) -> RunStats:
        stats = RunStats()
        with closing(open_input(options)) as source, open_output(options, source) as output:
            run_batch(
                self._driver,
                options,
                source,
                output,
                stats,
                progress=lambda *state: show_progress(*state, quiet=True),
                while_running=lambda interrupt: nullcontext(),
            )
        return stats

    def _broken_off(self) -> bytes:
        """Tokens of answers that a run has left which ended at the bad row. Keeps the rows that were finished."""
        try:
            with slow_steps():
                self._run(self._parsed("--overwrite", "--window", "4", "--max-errors", "1"))
        except Exception as error:
            assert "Stopped at error 1" in str(error), error
        self._finished_before = self._out.read_bytes()
        return self._tokens.read_bytes()

    def _state(self, chance: random.Random) -> bytes:
        """Data to damage: a finished file, or one at some moment of a run."""
        if self._kind in ("tokens", "cache"):
            return self._left
        if self._kind == "rows" and chance.random() < 0.4:
            return self.whole
        rows = chance.sample(self._rows, chance.randint(2, len(self._rows)))
        if chance.random() < 0.3 and self._kind != "tries":
            rows.insert(0, _failed(rows[-1]))
        torn = chance.choice(self._rows)
        return b"".join(rows) + (torn[: chance.randrange(len(torn))] if chance.random() < 0.5 else b"")


def _failed(row: bytes) -> bytes:
    """A failed earlier try at a row, which the row has replaced since."""
    fields = json.loads(row)
    error = {"code": "internal_error", "message": "the device was away"}
    return format_result({"index": fields["index"], "id": None, "error": error, "key": fields["key"]})
