"""Batch runs that are killed and resumed until they are done, and compared with a run that nothing disturbed."""

from __future__ import annotations

import json
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tests.support.fork_server import LARGE_WRITE, ForkServer, KillPoint, Run

Aim = KillPoint | Literal["a write", "any moment", "the ordering"]
"""A point that a run cannot miss, or what a kill from outside aims at and hits with luck."""

AIMS: tuple[Aim, ...] = ("a write", "any moment", "a write", "any moment", "any moment", "the ordering")
"""Aims of the kills of one batch when they are aimed from outside, one after the other."""


@dataclass
class KillCounts:
    """Kills so far: what they were aimed at, and what they hit.

    unfinished: kills after which there were tokens of unfinished answers
    """

    aims: Counter[str] = field(default_factory=Counter)
    torn: int = 0
    in_ordering: int = 0
    unfinished: int = 0
    batches: int = 0
    lost: int = 0
    doubled: int = 0
    changed: int = 0

    @property
    def kills(self) -> int:
        return self.aims.total()

    def __str__(self) -> str:
        aims = ", ".join(f"{name} {count}" for name, count in sorted(self.aims.items()))
        return (
            f"{self.kills} kills ({aims}) in {self.batches} runs, each after the first row and before the exit; "
            f"{self.torn} tore a line, {self.in_ordering} hit the final ordering, "
            f"{self.unfinished} left tokens of unfinished answers; "
            f"rows lost {self.lost}, doubled {self.doubled}, changed {self.changed}"
        )


class KillTest:
    """Runs a batch to its end over and over, with kills in between, and compares with an undisturbed run."""

    def __init__(
        self,
        server: ForkServer,
        folder: Path,
        model: Path,
        seed: int,
        large_row: int = 2 * LARGE_WRITE,
        options: Sequence[object] = (),
        most_tokens: int = 40,
    ) -> None:
        """
        large_row: bytes of a column in some rows; kills from outside hit the writing of a row of some megabytes
        options:   further ones of the command; what they keep in the folder `cache` is removed after each batch
        most_tokens: of an output
        """
        self._server = server
        self._folder = folder
        self._random = random.Random(seed)
        self._large_row, self._most_tokens = large_row, most_tokens
        self._source = folder / "in.jsonl"
        self._out = folder / "out.jsonl"
        self._sorting = folder / ".out.jsonl.cbatch-sorting"
        self._tokens = folder / "out.jsonl.tokens"
        self._left_behind: int | None = None
        self._write_rows()
        self._arguments = ["run", self._source, "-m", model, "--dtype", "float32", "--max-seqs", "6", "-q", *options]
        self.counts = KillCounts()
        run = self._start()
        while self._size() == 0 and not run.is_over():
            time.sleep(0.001)
        started = time.monotonic()
        assert run.code() == 1  # one row of the input is bad on purpose
        self._duration = time.monotonic() - started
        self._expected = self._out.read_bytes()

    def run_random(self, kills: int) -> KillCounts:
        """Batches whose kills are aimed from outside, until there were so many kills."""
        while self.counts.kills < kills:
            most = min(self._random.randint(1, len(AIMS)), kills - self.counts.kills)
            self.run_batch(AIMS[:most])
        return self.counts

    def run_batch(self, aims: Sequence[Aim]) -> None:
        """One batch, killed a few times and then left to finish."""
        self._out.unlink(missing_ok=True)
        shutil.rmtree(self._folder / "cache", ignore_errors=True)
        for aim in aims:
            if not self._kill_one(aim):
                break
        code = self._start().code()
        assert code == 1, f"the resumed run ended with {code}"
        assert not self._tokens.exists(), "tokens are left although all rows are finished"
        self.counts.batches += 1
        self._compare()

    def _kill_one(self, aim: Aim) -> bool:
        """Starts the command and has it killed. False if a kill from outside came too late."""
        before, self._left_behind = self._size(), self._stamp()
        if isinstance(aim, KillPoint):
            run = self._start(aim)
            assert run.code() == -signal.SIGKILL, f"the run never came to {aim}"
            self.counts.in_ordering += aim.name not in ("write", "rename")
        else:
            run = self._start()
            self._await(aim, before, run)
            run.send(signal.SIGKILL)
            if run.code() != -signal.SIGKILL:
                return False
            self.counts.in_ordering += self._is_sorting()
        self.counts.aims[aim.name if isinstance(aim, KillPoint) else aim] += 1
        self.counts.torn += self._size() > 0 and not self._out.read_bytes().endswith(b"\n")
        self.counts.unfinished += self._tokens.exists() and self._tokens.read_bytes().count(b"\n") > 1
        return True

    def _await(self, aim: str, before: int, run: Run) -> None:
        """Returns at the moment that is aimed at, or when the run has gone past it."""
        while self._size() <= before and not self._is_past(run):
            time.sleep(0.001)  # the first row of this run is not there yet
        if aim == "any moment":
            left = 1 - self._size() / len(self._expected)
            time.sleep(self._random.uniform(0, self._duration * left))
        elif aim == "the ordering":
            while not self._is_past(run):
                time.sleep(0.0005)
            time.sleep(self._random.uniform(0, 0.01))
        else:
            last = size = self._size()
            while not LARGE_WRITE <= size - last < self._large_row and not self._is_past(run):
                last, size = size, self._size()  # until a large row is being written

    def _is_past(self, run: Run) -> bool:
        return self._is_sorting() or run.is_over()

    def _is_sorting(self) -> bool:
        """Whether the final ordering has begun: rows are in its file, which no earlier kill has left behind."""
        return self._stamp() not in (None, self._left_behind)

    def _stamp(self) -> int | None:
        try:
            status = self._sorting.stat()
        except FileNotFoundError:
            return None
        return status.st_mtime_ns if status.st_size else None

    def _compare(self) -> None:
        """Counts what differs between the file and that of the undisturbed run, byte for byte."""
        found, expected = self._out.read_bytes().splitlines(), self._expected.splitlines()
        if found == expected:
            return
        seen = Counter(json.loads(line)["index"] for line in found)
        self.counts.lost += len(expected) - len(seen)
        self.counts.doubled += sum(count - 1 for count in seen.values())
        self.counts.changed += len(set(found) - set(expected))
        raise AssertionError(f"the output differs from that of an undisturbed run: {self.counts}")

    def _start(self, kill: KillPoint | None = None) -> Run:
        stderr = str(self._folder / "stderr")
        return self._server.start(*self._arguments, "-o", self._out, "--resume", stderr=stderr, kill=kill)

    def _size(self) -> int:
        try:
            return self._out.stat().st_size
        except FileNotFoundError:
            return 0

    def _write_rows(self) -> None:
        """Rows of all sorts: sampled ones, long ones before short ones, large ones, a bad one."""
        rows = []
        for number in range(36):
            row: dict[str, Any] = {"id": f"r{number}", "prompt": f"row {number}", "temperature": 1.0}
            row["max_tokens"] = self._random.randint(2, self._most_tokens)
            if number % 6 == 3:
                row["column"] = self._random.choice("abc") * self._large_row
            rows.append(json.dumps(row))
        rows[5] = '{"prompt": '
        self._source.write_text("\n".join(rows) + "\n")
