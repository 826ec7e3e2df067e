"""Runs `cbatch run` in hostile environments: each run ends as the exit codes say, with sentences and never a traceback.

    python -m scripts.stress.environments [--only WORD]... [--list]

Exits with 1 at the end if a run hung, or ended with something else than rows or a sentence. Needs Linux.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.support.environments import SAMPLE, Case, judge, nested, run_case


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
    *_each("OMP_NUM_THREADS=0 MKL_NUM_THREADS=0", 0, 2),
    *(
        case
        for name in ("NUMBA_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
        for case in _each(f"{name}=-1 {name}=1000000000 {name}=many {name}=", 0, 2)
    ),
]

_LISTS = [
    Case(f"CBATCH_RUN_PARAM, {name}", {"CBATCH_RUN_PARAM": text}, codes=(2,))
    for name, text in {
        "a value nested deeply": json.dumps(["logit_bias=" + nested(30_000)]),
        "a value nested 500 times": json.dumps(["stop=" + nested(500)]),
        "50,000 numbers": "[" + "1," * 50_000 + "1]",
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
        for number in (700, 1200, 2000, 3000)
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
]

_HARMLESS = (
    "CUDA_VISIBLE_DEVICES=a,b;-7 NUMBA_THREADING_LAYER=none NUMBA_OPT=nine LANG=C LC_ALL=xx_YY.nonsense LC_ALL=POSIX "
    f"TERM= TERM={'x' * 300} COLUMNS=0 COLUMNS=-5 COLUMNS=wide LINES=0 TMPDIR=/nothing/here TMPDIR=/proc "
    "PYTHONIOENCODING=ascii PYTHONUTF8=0 PYTHONOPTIMIZE=2 PYTHONHASHSEED=1 PYTHONDEVMODE=1 "
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
    *SAMPLE,
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
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], help="runs whose names have this word")
    parser.add_argument("--list", action="store_true", help="print the names of the runs")
    arguments = parser.parse_args()
    cases = [case for case in CASES if all(word in case.name for word in arguments.only)]
    if arguments.list:
        print(*(case.name for case in cases), sep="\n")
        return
    violations = 0
    for case in cases:
        with tempfile.TemporaryDirectory() as folder:
            outcome = run_case(case, Path(folder))
        problem = judge(case, outcome)
        violations += problem is not None
        print(f"{case.name}: exit {outcome.status} in {outcome.seconds:.1f} s", flush=True)
        print("".join(f"    {line}\n" for line in outcome.stderr.splitlines()), end="", flush=True)
        if problem is not None:
            print(f"  VIOLATION: {problem}", flush=True)
    print(f"{len(cases)} runs, violations: {violations}")
    sys.exit(1 if violations else 0)


if __name__ == "__main__":
    main()
