"""The real command, started quickly and often, killed at random moments, and resumed until it is done.

A process that has imported everything forks itself for each run, which saves seconds of imports; what runs in the
fork is `cbatch.cli.main.main`, as in the installed command.
"""

from __future__ import annotations

import json
import os
import random
import re
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
BIG = 6_000_000
"""Bytes of a column in some rows, so that writing one takes long enough to be killed in the middle."""


TARGETS = ("a write", "any moment", "a write", "any moment", "any moment", "the ordering")
"""What the kills of one batch are aimed at, one after the other, as far as it comes to that."""


HANG_SECONDS = 120
"""Seconds after which a run counts as hanging."""


@dataclass
class Run:
    """One run of the command; it is waited for with `code`."""

    pid: int
    fork_server: ForkServer
    status: int | None = None

    def send(self, signum: int) -> None:
        """Returns when the process has it: of several that wait, the system would hand over the lowest number first."""
        os.kill(self.pid, signum)
        while not self.is_over() and signum in self._waiting():
            time.sleep(0.001)

    def _waiting(self) -> set[int]:
        """The signals sent to the process that it has not been given yet."""
        try:
            status = Path(f"/proc/{self.pid}/status").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return set()
        pending = re.search(r"^ShdPnd:\s*(\w+)$", status, re.MULTILINE)
        bits = int(pending[1], 16) if pending else 0
        return {number for number in range(1, 65) if bits >> (number - 1) & 1}

    def is_over(self) -> bool:
        """Whether the process has ended, waited for or not."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except (FileNotFoundError, ProcessLookupError):
            return True

    def code(self) -> int:
        """The exit code; negative is the signal that killed it."""
        if self.status is None:
            self.status = self.fork_server.wait(self.pid)
        return self.status

    def rss_mib(self) -> float:
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


class ForkServer:
    """Forks the command, one run or several at a time."""

    def __init__(self) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.kill_runs"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment,
        )
        self._ask({"do": "hello"})

    def start(
        self,
        *arguments: object,
        stdin: str = os.devnull,
        stdout: str = os.devnull,
        stderr: str = os.devnull,
        env: dict[str, str] | None = None,
    ) -> Run:
        """Starts `cbatch ARGUMENTS`; the streams are paths, of pipes perhaps. Opening one of those waits for a peer."""
        argv = [str(argument) for argument in arguments]
        return Run(self._ask({"do": "run", "argv": argv, "streams": [stdin, stdout, stderr], "env": env or {}}), self)

    def wait(self, pid: int) -> int:
        return os.waitstatus_to_exitcode(self._ask({"do": "wait", "pid": pid}))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)

    def _ask(self, order: dict[str, Any]) -> int:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(order), file=self._process.stdin, flush=True)
        if not select.select([self._process.stdout], [], [], HANG_SECONDS)[0]:
            self._process.kill()
            raise TimeoutError(f"no answer to {order}")
        return int(self._process.stdout.readline())


@contextmanager
def fork_server() -> Iterator[ForkServer]:
    made = ForkServer()
    try:
        yield made
    finally:
        made.close()


@dataclass
class KillCounts:
    """Kills so far: what they were aimed at, and what they hit."""

    targets: Counter[str] = field(default_factory=Counter)
    torn: int = 0
    in_ordering: int = 0
    campaigns: int = 0
    lost: int = 0
    doubled: int = 0
    changed: int = 0

    @property
    def kills(self) -> int:
        return self.targets.total()

    def __str__(self) -> str:
        targets = ", ".join(f"{name} {count}" for name, count in sorted(self.targets.items()))
        return (
            f"{self.kills} kills ({targets}) in {self.campaigns} runs, each after the first row and before the exit; "
            f"{self.torn} tore a line, {self.in_ordering} hit the final ordering; "
            f"rows lost {self.lost}, doubled {self.doubled}, changed {self.changed}"
        )


class KillTest:
    """Runs a batch to its end over and over, with kills in between, and compares with an undisturbed run."""

    def __init__(self, made: ForkServer, folder: Path, model: Path, seed: int) -> None:
        self._zygote = made
        self._folder = folder
        self._random = random.Random(seed)
        self._source = folder / "in.jsonl"
        self._out = folder / "out.jsonl"
        self._sorting = folder / ".out.jsonl.cbatch-sorting"
        self._left_behind: int | None = None
        self._write_rows()
        self._arguments = ["run", self._source, "-m", model, "--dtype", "float32", "--max-seqs", "6", "-q"]
        self.counts = KillCounts()
        run = self._start(self._out)
        while self._size() == 0 and not run.is_over():
            time.sleep(0.001)
        started = time.monotonic()
        assert run.code() == 1  # one row of the input is bad on purpose
        self._duration = time.monotonic() - started
        self._expected = self._out.read_bytes()

    def run(self, kills: int) -> KillCounts:
        while self.counts.kills < kills:
            self._campaign(kills - self.counts.kills)
        return self.counts

    def _campaign(self, most: int) -> None:
        """One batch, killed a few times and then left to finish."""
        self._out.unlink(missing_ok=True)
        for target in TARGETS[: min(self._random.randint(1, len(TARGETS)), most)]:
            if not self._kill_one(target):
                break
        code = self._start(self._out).code()
        assert code == 1, f"the resumed run ended with {code}"
        self.counts.campaigns += 1
        self._compare()

    def _kill_one(self, target: str) -> bool:
        """Starts the command and kills it. False where it was faster."""
        before, self._left_behind = self._size(), self._stamp()
        run = self._start(self._out)
        self._await(target, before, run)
        run.send(signal.SIGKILL)
        if run.code() != -signal.SIGKILL:
            return False
        self.counts.targets[target] += 1
        self.counts.torn += not self._out.read_bytes().endswith(b"\n")
        self.counts.in_ordering += self._is_sorting()
        return True

    def _await(self, target: str, before: int, run: Run) -> None:
        """Returns at the moment that is aimed at, or when the run has gone past it."""
        while self._size() <= before and not self._is_past(run):
            time.sleep(0.001)  # the first row of this run is not there yet
        if target == "any moment":
            left = 1 - self._size() / len(self._expected)
            time.sleep(self._random.uniform(0, self._duration * left))
        elif target == "the ordering":
            while not self._is_past(run):
                time.sleep(0.0005)
            time.sleep(self._random.uniform(0, 0.01))
        else:
            last = size = self._size()
            while not 2**16 <= size - last < BIG and not self._is_past(run):  # else a large row is being written
                last, size = size, self._size()

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
        seen = Counter(json.loads(line)["index"] for line in found)
        self.counts.lost += len(expected) - len(seen)
        self.counts.doubled += sum(count - 1 for count in seen.values())
        self.counts.changed += len(set(found) - set(expected))
        if self.counts.lost or self.counts.doubled or self.counts.changed or found != expected:
            raise AssertionError(f"the output differs from that of an undisturbed run: {self.counts}")

    def _start(self, out: Path) -> Run:
        return self._zygote.start(*self._arguments, "-o", out, "--resume", stderr=str(self._folder / "stderr"))

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
            row["max_tokens"] = self._random.randint(2, 120)
            if number % 6 == 3:
                row["column"] = self._random.choice("abc") * BIG
            rows.append(json.dumps(row))
        rows[5] = '{"prompt": '
        self._source.write_text("\n".join(rows) + "\n")


def serve() -> None:
    """What the zygote does: imports all that a run needs, then forks one for each order on stdin."""
    import transformers.models.llama.modeling_llama  # noqa: F401
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401

    from cbatch.cli.main import main

    for line in sys.stdin:
        order = json.loads(line)
        answer = 0
        if order["do"] == "wait":
            answer = os.waitpid(order["pid"], 0)[1]
        elif order["do"] == "run" and (answer := os.fork()) == 0:
            for stream, path in enumerate(order["streams"]):
                mode = os.O_RDONLY if stream == 0 else os.O_WRONLY
                os.dup2(os.open(path, mode | (os.O_CREAT if stream and path != os.devnull else 0), 0o666), stream)
            os.environ.update(order["env"])
            sys.argv = ["cbatch", *order["argv"]]
            main()
        print(answer, flush=True)


if __name__ == "__main__":
    serve()
