"""Hostile environments for the command: variables, limits, folders and streams that nobody should have."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]

TIMEOUT_S = 240
"""Seconds after which a run counts as hanging; without a cache, it compiles its kernels meanwhile."""

ROWS = 3

NOT_A_SENTENCE = re.compile(
    r"Traceback|panicked|core dumped|\w+(?:Error|Exception)\(|^\w*Error: |[\x00-\x08\x0b-\x1f]", re.M
)

NAMES = ("cbatch: ", "libgomp: ")
"""Beginnings of lines on stderr."""

MOST_STDERR = 2000
"""Characters of stderr that still are sentences."""


@dataclass(frozen=True)
class Case:
    """A run of a few rows.

    env:     variables; None removes one. `{folder}` stands for a folder of the run's own
    limits:  resource limits by their names without RLIMIT_
    prepare: called with that folder before the run
    closed:  streams that are closed
    codes:   exit codes that are right
    options: of `cbatch run`
    """

    name: str
    env: Mapping[str, str | None] = field(default_factory=dict)
    limits: Mapping[str, int] = field(default_factory=dict)
    prepare: Callable[[Path], None] | None = None
    closed: tuple[int, ...] = ()
    codes: Sequence[int] = (0,)
    options: tuple[str, ...] = ()
    cwd_is_gone: bool = False


@dataclass(frozen=True)
class Outcome:
    status: int | None
    stdout: str
    stderr: str
    seconds: float


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


SAMPLE = [
    Case("CBATCH_RUN_PARAM, nested deeply", {"CBATCH_RUN_PARAM": nested(50_000)}, codes=(2,)),
    Case("CBATCH_RUN_PARAM, a huge number", {"CBATCH_RUN_PARAM": json.dumps(["top_k=" + "9" * 10_000])}, codes=(2,)),
    Case("all streams closed", closed=(0, 1, 2), codes=(2,)),
    Case("300 MiB of address space", limits={"AS": 300 << 20}, codes=(0, 2, 3)),
    Case("no thread for kernels", {"NUMBA_NUM_THREADS": "0"}, codes=(0, 2)),
    Case("warnings are errors", {"PYTHONWARNINGS": "error"}),
    Case("the working folder is gone", cwd_is_gone=True, codes=(2,)),
]
"""A few, of those that no other test reaches; `scripts/stress/environments.py` runs many more."""


def run_case(case: Case, folder: Path, command: Sequence[str] = (sys.executable, "-m", "cbatch")) -> Outcome:
    """Runs some rows in an environment; `folder` is empty, and removed later."""
    folder = folder.resolve()
    rows, gone = folder / "rows.jsonl", folder / "gone"
    rows.write_text("".join(json.dumps({"prompt": f"Hi {number} é"}) + "\n" for number in range(ROWS)))
    gone.mkdir()
    if case.prepare is not None:
        case.prepare(folder)
    env = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    for name, value in case.env.items():
        env.pop(name, None)
        if value is not None:
            env[name] = value.replace("{folder}", str(folder))

    def set_up() -> None:
        if case.cwd_is_gone:
            os.chdir(gone)
            gone.rmdir()
        for name, most in case.limits.items():
            kind = getattr(resource, f"RLIMIT_{name}")
            resource.setrlimit(kind, (most, most))
        for stream in case.closed:
            os.close(stream)

    argv = [*command, "run", str(rows), *case.options]
    if "CBATCH_RUN_MAX_TOKENS" not in case.env:
        argv += ["--max-tokens", "2"]
    started = time.monotonic()
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, env=env, preexec_fn=set_up, cwd=folder
    )
    try:
        stdout, stderr = process.communicate(timeout=TIMEOUT_S)
        status: int | None = process.returncode
    except subprocess.TimeoutExpired:
        process.kill()
        stdout, stderr = process.communicate()
        status = None
    texts = [data.decode(errors="replace") for data in (stdout, stderr)]
    return Outcome(status, texts[0], texts[1], time.monotonic() - started)


def judge(case: Case, outcome: Outcome) -> str | None:
    """The fault of an outcome; None if it has none."""
    if outcome.status is None:
        return f"it has not ended after {TIMEOUT_S} s"
    if outcome.status not in case.codes:
        return f"it ended with {outcome.status}, and {case.codes} would be right"
    if found := NOT_A_SENTENCE.search(outcome.stderr):
        return f"{found[0]!r} is no sentence"
    for line in outcome.stderr.splitlines():
        if line and not line.startswith(NAMES):
            return f"{line!r} does not say who says it"
    if len(outcome.stderr) > MOST_STDERR:
        return f"it says {len(outcome.stderr):,} characters"
    if outcome.status in (2, 3) and 2 not in case.closed and not outcome.stderr.strip():
        return "it says nothing"
    if outcome.status == 0 and 1 not in case.closed:
        rows = [json.loads(line) for line in outcome.stdout.splitlines()]
        if len(rows) != ROWS or any("error" in row for row in rows):
            return f"it gave {len(rows)} rows"
    return None
