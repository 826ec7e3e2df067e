"""The real command, started quickly and often.

A process that has imported everything forks itself for each run, which saves seconds of imports; what runs in the
fork is `cbatch.cli.main.main`, as in the installed command.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).parents[2]

TIMEOUT_S = 120
"""Seconds after which a run counts as hanging."""

LARGE_WRITE = 2**16
"""Bytes from which on a write is one of those that a kill point counts."""


@dataclass(frozen=True)
class KillPoint:
    """Where a run kills itself, as SIGKILL from outside would at this very moment: in the `number`-th call of `name`.

    write:    a large write to a file, of which the first half is written
    pread:    reading a row to put it in its place in the ordered file
    replace:  putting the ordered file in the place of the first one; just before it
    after replace: the same, just after it
    rename:  putting a new file of tokens in place; just before it
    """

    name: Literal["write", "pread", "replace", "after replace", "rename"]
    number: int = 1


@dataclass
class Run:
    """One run of the command; it is waited for with `code`."""

    pid: int
    server: ForkServer
    status: int | None = None

    def send(self, signum: int) -> None:
        """Returns when the process has it: the system delivers several pending signals by number, not by time."""
        os.kill(self.pid, signum)
        while not self.is_over() and signum in self._pending():
            time.sleep(0.001)

    def _pending(self) -> set[int]:
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
        """The exit code; a negative one is the signal that killed it."""
        if self.status is None:
            self.status = self.server.wait(self.pid)
        return self.status

    def rss_mib(self) -> float:
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


class ForkServer:
    """Forks the command, one run or several at a time."""

    def __init__(self) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.fork_server"],
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
        kill: KillPoint | None = None,
    ) -> Run:
        """Starts `cbatch ARGUMENTS`; the streams are paths. Opening that of a pipe waits for the other end."""
        order = {
            "do": "run",
            "argv": [str(argument) for argument in arguments],
            "streams": [stdin, stdout, stderr],
            "env": env or {},
            "kill": asdict(kill) if kill is not None else None,
        }
        return Run(self._ask(order), self)

    def wait(self, pid: int) -> int:
        return os.waitstatus_to_exitcode(self._ask({"do": "wait", "pid": pid}))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)

    def _ask(self, order: dict[str, Any]) -> int:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(order), file=self._process.stdin, flush=True)
        if not select.select([self._process.stdout], [], [], TIMEOUT_S)[0]:
            self._process.kill()
            raise TimeoutError(f"no answer to {order}")
        return int(self._process.stdout.readline())


def arm(point: KillPoint) -> None:
    """Makes this process kill itself at a point."""
    name = point.name.removeprefix("after ")
    call, left = getattr(os, name), point.number

    def killing(*arguments: Any, **options: Any) -> Any:
        nonlocal left
        if name == "write" and len(arguments[1]) < LARGE_WRITE:
            return call(*arguments, **options)
        left -= 1
        if left == 0:
            if point.name == "write":
                call(arguments[0], arguments[1][: len(arguments[1]) // 2])
            elif point.name == "after replace":
                call(*arguments, **options)
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*arguments, **options)

    setattr(os, name, killing)


# What a run needs, so that no run has to import it.
PRELOADED = (
    "transformers.models.llama.modeling_llama",
    "transformers.models.auto.modeling_auto",
    "cbatch.batch.map",
    "cbatch.api",
    "cbatch.engine.thread",
    "cbatch.model.cpu",
    "cbatch.cli.run.batch_run",
    "cbatch.cli.chat.terminal",
)


def preload() -> None:
    """Imports all that a run needs, and lets transformers compile its patterns for the names of weights."""
    for name in PRELOADED:
        import_module(name)
    import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("llama")


def serve() -> None:
    """Runs the server: preloads, then forks a process for each order on stdin."""
    preload()
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
            if order["kill"] is not None:
                arm(KillPoint(**order["kill"]))
            sys.argv = ["cbatch", *order["argv"]]
            main()
        print(answer, flush=True)


if __name__ == "__main__":
    serve()
