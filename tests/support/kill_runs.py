"""Batch runs that are killed and resumed until they are done, and compared with a run that nothing disturbed."""

from __future__ import annotations

import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tests.support.command import Command
from tests.support.fork_server import LARGE_WRITE, ForkServer, KillPoint, Run

Aim = KillPoint | Literal["any moment"]
"""A point at which the run kills itself, or a moment at which it is killed from outside."""


@dataclass
class KillCounts:
    """Kills so far: what they were aimed at, and what they left.

    unfinished: kills after which there were tokens of unfinished answers
    """

    aims: Counter[str] = field(default_factory=Counter)
    torn: int = 0
    in_ordering: int = 0
    unfinished: int = 0
    batches: int = 0

    def __str__(self) -> str:
        aims = ", ".join(f"{name} {count}" for name, count in sorted(self.aims.items()))
        return (
            f"{self.aims.total()} kills ({aims}) in {self.batches} runs; {self.torn} tore a line, {self.in_ordering} "
            f"hit the final ordering, {self.unfinished} left tokens of unfinished answers; no row was lost or changed"
        )


class KillTest:
    """Runs a batch to its end over and over, with kills in between, and compares with an undisturbed run."""

    def __init__(
        self,
        server: ForkServer,
        folder: Path,
        model: Path,
        seed: int,
        options: Sequence[object] = (),
        most_tokens: int = 40,
    ) -> None:
        """
        options: further ones of the command; what they keep in the folder `cache` is removed after each batch
        most_tokens: of an output
        """
        self._server = server
        self._random = random.Random(seed)
        self._command = Command(folder, model, self._rows(most_tokens))
        self._command.options += ("--max-seqs", "6", "-q", "--resume", *options)
        self._tokens = folder / "out.jsonl.tokens"
        self.counts = KillCounts()
        run = self._start()
        self._await_rows(0, run)
        started = time.monotonic()
        assert run.code() == 1  # one row of the input is bad on purpose
        self._duration = time.monotonic() - started
        self._expected = self._command.data

    def run_batch(self, aims: Sequence[Aim]) -> None:
        """One batch, killed a few times and then left to finish."""
        self._command.out.unlink(missing_ok=True)
        shutil.rmtree(self._command.folder / "cache", ignore_errors=True)
        for aim in aims:
            if not self._kill_one(aim):
                break
        code = self._start().code()
        assert code == 1, f"the resumed run ended with {code}"
        assert not self._tokens.exists(), "tokens are left although all rows are finished"
        self.counts.batches += 1
        found, expected = self._command.lines(), self._expected.splitlines(keepends=True)
        others = len(set(found) - set(expected))
        assert found == expected, f"{len(found)} rows for {len(expected)}, {others} of them others, after {self.counts}"

    def _kill_one(self, aim: Aim) -> bool:
        """Starts the command and has it killed. False if the run ended before."""
        before = self._size()
        if isinstance(aim, KillPoint):
            run = self._start(aim)
        else:
            run = self._start()
            self._await_rows(before, run)
            time.sleep(self._random.uniform(0, self._duration * (1 - self._size() / len(self._expected))))
            run.send(signal.SIGKILL)
        if run.code() != -signal.SIGKILL:
            return False
        self.counts.aims[aim.name if isinstance(aim, KillPoint) else aim] += 1
        self.counts.in_ordering += isinstance(aim, KillPoint) and aim.name not in ("write", "rename")
        self.counts.torn += self._size() > 0 and not self._command.data.endswith(b"\n")
        self.counts.unfinished += self._tokens.exists() and self._tokens.read_bytes().count(b"\n") > 1
        return True

    def _await_rows(self, before: int, run: Run) -> None:
        """Returns when the first row of this run is there, or the run is over."""
        while self._size() <= before and not run.is_over():
            time.sleep(0.001)

    def _start(self, kill: KillPoint | None = None) -> Run:
        return self._server.start(*self._command.words(), stderr=str(self._command.folder / "stderr"), kill=kill)

    def _size(self) -> int:
        return self._command.out.stat().st_size if self._command.out.exists() else 0

    def _rows(self, most_tokens: int) -> list[Any]:
        """Rows of all sorts: sampled ones, long ones before short ones, large ones, a bad one."""
        rows: list[Any] = []
        for number in range(36):
            row: dict[str, Any] = {"id": f"r{number}", "prompt": f"row {number}", "temperature": 1.0}
            row["max_tokens"] = self._random.randint(2, most_tokens)
            if number % 6 == 3:
                row["column"] = self._random.choice("abc") * 2 * LARGE_WRITE
            rows.append(row)
        rows[5] = '{"prompt": '
        return rows
