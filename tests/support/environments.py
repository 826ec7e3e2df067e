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


def _folders(mode: int = 0o777, owner: int | None = None) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        for name in ("cache", "cache/cbatch", "cache/cbatch/weights", "numba"):
            (folder / name).mkdir()
            (folder / name).chmod(mode)
            if owner is not None:
                os.chown(folder / name, owner, owner)

    return make


def _files(folder: Path) -> None:
    for name in ("cache", "numba"):
        (folder / name).write_text("")


_CACHES = {"XDG_CACHE_HOME": "{folder}/cache", "NUMBA_CACHE_DIR": "{folder}/numba"}
_HUGE = "1" + "0" * 30


def _each(pairs: str | Sequence[str], *codes: int, prefix: str = "") -> list[Case]:
    """A case for each NAME=VALUE, of which a text has several."""
    made = [pair.partition("=")[::2] for pair in (pairs.split() if isinstance(pairs, str) else pairs)]
    return [Case(f"{prefix}{name}={value[:20]}", {prefix + name: value}, codes=codes) for name, value in made]


_THREADS = [
    case
    for name in ("NUMBA_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
    for case in _each(f"{name}=0 {name}=-1 {name}=1000000000 {name}=many {name}=", 0, 2)
]

_LISTS = [
    Case(f"CBATCH_RUN_PARAM, {name}", {"CBATCH_RUN_PARAM": text}, codes=(2,))
    for name, text in {
        "nested deeply": nested(50_000),
        "a value nested deeply": json.dumps(["logit_bias=" + nested(30_000)]),
        "a value nested 500 times": json.dumps(["stop=" + nested(500)]),
        "50,000 numbers": "[" + "1," * 50_000 + "1]",
        "a number of 10,000 digits": json.dumps(["top_k=" + "9" * 10_000]),
        "a huge exponent": json.dumps(["temperature=1e999"]),
        "not a number": json.dumps(["temperature=NaN"]),
        "no JSON": "top_k=5",
        "control characters": "\x1b[2J\x07",
    }.items()
]

_WRONG_OPTIONS = (
    f"MAX_SEQS=many MAX_SEQS=0 MAX_TOKENS=1e3 KV_BLOCKS={_HUGE} BLOCK_SIZE={_HUGE} KV_CACHE_MEMORY=lots "
    f"KV_CACHE_MEMORY=1e400GiB WINDOW=-1 DEVICE=toaster DEVICE=cuda:99 MODEL=\x01 QUIET=perhaps REPLICAS={_HUGE} "
    f"REPLICAS=x SEED=x TEMPERATURE=nan DATE=someday FORMAT=xml SHARD=9/3 ATTENTION=none STOP={nested(50_000)} "
    f"TEMPLATE_KWARGS={nested(50_000)} SYSTEM=\udcff\udcfe"
)
_OPTIONS = [
    *_each(_WRONG_OPTIONS, 2, prefix="CBATCH_RUN_"),
    *_each(f"MAX_SEQS={_HUGE} MAX_BATCH_TOKENS={_HUGE}", 0, 2, prefix="CBATCH_RUN_"),
    *_each(['TEMPLATE_KWARGS={"a":' + nested(900) + "}"], 0, 1, 2, prefix="CBATCH_RUN_"),
]

_LIMITS = [
    Case("no memory to lock", limits={"MEMLOCK": 0}),
    Case("no core files", limits={"CORE": 0}),
    Case("no new processes and threads", limits={"NPROC": 1}, codes=(0, 3)),
    *(Case(f"{number} files", limits={"NOFILE": number}, codes=(0, 2, 3)) for number in (8, 12, 20, 40)),
    *(
        Case(f"{number} MiB of address space", limits={"AS": number << 20}, codes=(0, 2, 3))
        for number in (300, 700, 1200, 2000, 3000)
    ),
    *(
        Case(f"files of {number} bytes", limits={"FSIZE": number}, options=("-o", "out.jsonl"), codes=(3,))
        for number in (0, 100)
    ),
    *(Case(f"a stack of {number} KiB", limits={"STACK": number << 10}, codes=(0, 2, 3)) for number in (256, 1024)),
]

_STREAMS = [
    Case("stdin closed", closed=(0,)),
    Case("stdout closed", closed=(1,), codes=(2,)),
    Case("stderr closed", closed=(2,)),
    Case("stdin and stdout closed", closed=(0, 1), codes=(2,)),
    Case("all streams closed", closed=(0, 1, 2), codes=(2,)),
]

_HARMLESS = (
    "CUDA_VISIBLE_DEVICES=a,b;-7 NUMBA_THREADING_LAYER=none NUMBA_OPT=nine LANG=C LC_ALL=xx_YY.nonsense LC_ALL=POSIX "
    f"TERM= TERM={'x' * 300} COLUMNS=0 COLUMNS=-5 COLUMNS=wide LINES=0 TMPDIR=/nothing/here TMPDIR=/proc "
    "PYTHONIOENCODING=ascii PYTHONUTF8=0 PYTHONOPTIMIZE=2 PYTHONHASHSEED=1 PYTHONWARNINGS=error PYTHONDEVMODE=1 "
    "PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 PYTHONINTMAXSTRDIGITS=640 HF_HOME=/dev/null "
    "TRITON_CACHE_DIR=/dev/null TZ=Nowhere/Atlantis"
)
_VARIABLES = [
    *_each(_HARMLESS, 0),
    *_each("CBATCH_DEVICE=toaster NUMBA_DISABLE_JIT=1", 2),
    *_each("TORCH_LOGS=nonsense", 0, 3),
]

CASES = [
    Case("nothing odd"),
    *_THREADS,
    *_LISTS,
    *_OPTIONS,
    *_LIMITS,
    *_STREAMS,
    *_VARIABLES,
    Case("LC_ALL=C without UTF-8 mode", {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}),
    Case("no HOME", {"HOME": None, "XDG_CACHE_HOME": None, "XDG_CONFIG_HOME": None}),
    Case("HOME=/dev/null/x", {"HOME": "/dev/null/x", "XDG_CACHE_HOME": None, "XDG_CONFIG_HOME": None}),
    Case("caches open to all", _CACHES, prepare=_folders()),
    Case("caches of others", _CACHES, prepare=_folders(0o755, 65534)),
    Case("caches that are files", _CACHES, prepare=_files),
    Case("caches that cannot be made", {"XDG_CACHE_HOME": "relative", "NUMBA_CACHE_DIR": "/proc/nothing"}),
    Case("the working folder is gone", cwd_is_gone=True, codes=(2,)),
]


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
