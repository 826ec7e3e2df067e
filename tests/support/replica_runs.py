"""Batches on replicas of this machine, killed at random moments, as `cbatch run` runs them into a file.

`forked_replicas` start in a quarter of a second, since they are forked from a process that has imported everything.
"""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from cbatch.base.config import EngineConfig
from cbatch.base.request import RequestDefaults
from cbatch.batch.driver import BatchDriver
from cbatch.batch.lines import RowOptions, read_lines
from cbatch.batch.row import Row
from cbatch.batch.writer import FileWriter, run_stream
from cbatch.isolate import child, worker
from cbatch.isolate.worker import Worker
from cbatch.replicas.local import LocalLauncher, find_places

CONFIG = EngineConfig(device="cpu", dtype="float32", max_seqs=4)
OPTIONS = RowOptions(RequestDefaults(seed=5))

ROWS_BETWEEN_KILLS, ROWS_OF_KILL = 10, 26
"""Rows that finish between two kills, and those that a batch needs for each of its kills."""

_WORDS = "lamp river seven Anna blue small house seventeen tomorrow green boat".split()


class RowCounter:
    def __init__(self) -> None:
        self.rows = 0


class KillableLauncher(LocalLauncher):
    """Knows the process of each replica.

    num_starts: lives that have begun
    """

    def __init__(self, num_replicas: int) -> None:
        super().__init__(find_places(CONFIG, num_replicas))
        self.living: dict[int, Worker] = {}
        self.num_starts = 0

    def start(self, number: int, config: EngineConfig) -> Worker:
        connection = super().start(number, config)
        self.living[number] = connection
        self.num_starts += 1
        return connection

    def send(self, number: int, signum: int) -> bool:
        """Sends a signal to a replica as somebody else would. False if it is not there at the moment."""
        connection = self.living.get(number)
        if connection is None or not connection.is_running():
            return False
        os.kill(connection.pid, signum)
        while signum == signal.SIGKILL and connection.is_running():
            time.sleep(0.001)  # until it can be killed no second time
        return True


def write_rows(path: Path, count: int, seed: int = 0) -> None:
    """Rows of many kinds: greedy and sampled, with a common beginning, several outputs, or an error."""
    chance = random.Random(seed)
    with path.open("w") as file:
        for number in range(count):
            text = " ".join(chance.choices(_WORDS, k=chance.randint(1, 4)))
            system = {"role": "system", "content": f"You are clerk {number % 3} of a large office."}
            row: dict[str, object] = {"messages": [system] * (number % 2) + [{"role": "user", "content": text}]}
            row |= {"id": f"row {number}", "max_tokens": chance.randint(1, 5), "ignore_eos": number % 4 == 0}
            row |= {"temperature": 1.2} if number % 3 else {}
            row |= {"n": 2} if number % 10 == 5 else {"logprobs": 2} if number % 10 == 6 else {}
            file.write((json.dumps(row) if number % 20 != 7 else '{"prompt": ') + "\n")


def run_to_file(
    driver: BatchDriver,
    source: Path,
    output: Path,
    *,
    counter: RowCounter | None = None,
    resume: bool = False,
    stop_at: int | None = None,
) -> None:
    """Runs a batch into a file in the order of the input. Raises as `run_stream` does.

    stop_at: number of rows after which the run is interrupted, before twice as many are finished
    """
    counter = counter or RowCounter()
    with FileWriter(output, input_order=True) as writer, source.open("rb") as lines:
        kept: Container[int] = ()
        if resume:
            kept = writer.resume(writer.journal(), read_lines(lines), lambda some: driver.keyed(OPTIONS, some))
            lines.seek(0)
        else:
            writer.start()
        stream = driver.open(OPTIONS, window=stop_at and stop_at // 2)

        def on_rows(rows: Sequence[Row]) -> None:
            counter.rows += len(rows)
            if stop_at is not None and counter.rows >= stop_at:
                stream.interrupt(signal.SIGINT)

        run_stream(stream, writer, read_lines(lines), on_rows, kept=kept)


@contextmanager
def killing(
    launcher: KillableLauncher,
    counter: RowCounter,
    kills: int,
    chance: random.Random,
    state: Callable[[int], str] = str,
) -> Iterator[Counter[str]]:
    """Kills replicas at random moments while the block runs; counts the kills by the state of the replica.

    state: of the replica of a number; its number if nothing is given
    """
    done, is_over = Counter[str](), threading.Event()

    def kill() -> None:
        next_at = chance.randint(1, ROWS_BETWEEN_KILLS)
        while done.total() < kills and not is_over.is_set():
            if counter.rows < next_at:
                time.sleep(0.001)
                continue
            time.sleep(chance.uniform(0, 0.02))
            numbers = chance.sample(range(launcher.num_replicas), launcher.num_replicas)
            before = {number: state(number) for number in numbers}
            killed = next((number for number in numbers if launcher.send(number, signal.SIGKILL)), None)
            if killed is not None:
                done[before[killed]] += 1
                next_at = counter.rows + ROWS_BETWEEN_KILLS

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    try:
        yield done
    finally:
        is_over.set()
        thread.join()


class ForkedProcess(subprocess.Popen[bytes]):
    """Forks this process instead of starting Python, and goes on with the module that the command names."""

    def __init__(self, command: Sequence[str], *, pass_fds: Sequence[int], env: Mapping[str, str], **_: Any) -> None:
        _, module, arguments = json.loads(command[-1])
        assert module == child.__name__
        self.args, self.returncode, self.stdin, self.stderr = command, None, None, None
        self._waitpid_lock = threading.Lock()
        self._child_created = True
        reading, writing = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _go_on(arguments, writing, pass_fds, env)
        os.close(writing)
        while os.getpgid(self.pid) != self.pid:  # a process that was started has its group at once
            time.sleep(0.0005)
        self.stdout = os.fdopen(reading, "rb")


def _go_on(arguments: list[Any], output: int, kept: Sequence[int], env: Mapping[str, str]) -> NoReturn:
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
            if int(name) > 2 and int(name) not in kept:
                with suppress(OSError):  # that of the listing
                    os.close(int(name))
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        logging.getLogger().handlers.clear()
        os.environ.clear()
        os.environ.update(env)
        child.main(*arguments)
    finally:
        os._exit(1)


@contextmanager
def forked_replicas() -> Iterator[None]:
    """Lets a LocalLauncher fork. Import and compile what replicas need before, for example by an engine."""
    names = {name: getattr(subprocess, name) for name in ("DEVNULL", "PIPE", "STDOUT")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "subprocess", SimpleNamespace(Popen=ForkedProcess, **names))
        yield
