"""Runs inputs of very heavy rows, and prints how much memory and time each of them takes.

    python -m scripts.stress.heavy_rows [--case NAME]... [--form json]

The memory is what all processes of the run take at most, beyond that of a run of one short row. Exits with 1 if an
input takes more than `--limit` MiB or `--seconds`, or a row of it has no row of output. Further options go to the run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil

MB = 1_000_000
POLL_SECONDS = 0.02

Rows = Callable[[], Iterator[str]]


def row(**fields: Any) -> str:
    return json.dumps({"prompt": "Hi"} | fields)


def repeated(line: str, times: int) -> Rows:
    return lambda: (line for _ in range(times))


def text(size: int) -> str:
    words = "The quick brown fox jumps over the lazy dog, and 27 cats (all grey) look on. "
    return (words * (size // len(words) + 1))[:size]


def messages(count: int) -> str:
    return json.dumps({"messages": [{"role": "user", "content": "a"}] * count})


def tool(size: int) -> dict[str, Any]:
    place = {"type": "string", "description": text(size)}
    parameters = {"type": "object", "properties": {"place": place}}
    return {"type": "function", "function": {"name": "look", "parameters": parameters}}


def small_schema(count: int) -> dict[str, Any]:
    properties = {f"p{number}": {"type": "string"} for number in range(count)}
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": "look", "parameters": parameters}}


CASES: dict[str, Rows] = {
    "1 short row": repeated(row(), 1),
    "6 rows of 15 MB of prompt": repeated(row(prompt=text(15 * MB)), 6),
    "6 rows of 15 MB of one letter": repeated(row(prompt="a" * 15 * MB), 6),
    "6 rows of 5 M characters of three bytes": repeated(json.dumps({"prompt": "漢" * 5 * MB}, ensure_ascii=False), 6),
    "3 rows of 500,000 messages": repeated(messages(480_000), 3),
    "6 rows of 20,000 messages": repeated(messages(20_000), 6),
    "40 rows of 15 MB of brackets": repeated("[" * 15 * MB, 40),
    "40 rows of 15 MB of small lists": repeated('{"prompt": "Hi", "x": [' + "[]," * 5 * MB + "[]]}", 40),
    "10,000 rows of 1 MB": repeated(row(prompt=text(MB)), 10_000),
    "2,000 rows of 1 MB of extra": repeated(row(note=text(MB)), 2_000),
    "200 rows of 100,000 small lists": repeated(row(x=[[]] * 100_000), 200),
    "200 rows of 90,000 small objects": repeated(row(x=[{"a": 1}] * 90_000), 200),
    "40 rows of 1,900,000 numbers": repeated(row(x=[number % 90_000 for number in range(1_900_000)]), 40),
    "40 rows of 290,000 names": repeated(row(x={f"n{number}": 0 for number in range(290_000)}), 40),
    "10 rows of 100,000 columns": repeated(row(**{f"column{number}": 0 for number in range(100_000)}), 10),
    "1 row of 15 MB of extra": repeated(row(note=text(15 * MB)), 1),
    "40 rows of 15 MB of extra": repeated(row(note=text(15 * MB)), 40),
    "40 rows of 15 MB of extra outside of ASCII": repeated(
        json.dumps({"prompt": "Hi", "note": "漢" * 5 * MB}, ensure_ascii=False), 40
    ),
    "40 rows with an id of 15 MB": repeated(row(id=text(15 * MB)), 40),
    "10 rows of 2,000,000 token ids": repeated(json.dumps({"prompt_token_ids": [300] * 1_990_000}), 10),
    "10 rows of 100 tools of 10 kB": repeated(row(tools=[tool(10_000)] * 100), 10),
    "10 rows of 14 tools of 1 MB": repeated(row(tools=[tool(MB)] * 14), 10),
    "10 rows of 300,000 stop strings": repeated(row(stop=[f"stop {number}" for number in range(300_000)]), 10),
    "10 rows of 300,000 bad words": repeated(row(bad_words=[f"word {number}" for number in range(300_000)]), 10),
    "10 rows of a regex of 1 MB": repeated(row(regex="(a|b)" * 200_000), 10),
    "10 rows of a JSON schema of 1 MB": repeated(row(json_schema=small_schema(20_000)["function"]["parameters"]), 10),
    "100 rows with a schema of 20,000 properties": repeated(row(tools=[small_schema(20_000)]), 100),
}


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of a run.

    mib:     at most, of all its processes
    codes:   number of rows by their error, or `ok`
    """

    seconds: float
    mib: float
    status: int
    codes: Counter[str]


def run(rows: Rows, output: Path, options: list[str], form: str) -> Cost:
    """Runs the rows, which come through a pipe because there may be many gigabytes of them."""
    output.unlink(missing_ok=True)
    command = [sys.executable, "-m", "cbatch", "run", "--format", form, "-o", str(output), "--max-tokens", "2", "-q"]
    started, most = time.monotonic(), 0
    process = subprocess.Popen([*command, *options], stdin=subprocess.PIPE)
    assert process.stdin is not None
    threading.Thread(target=write, args=(process.stdin, rows, form), daemon=True).start()
    while process.poll() is None:
        most = max(most, resident(process.pid))
        time.sleep(POLL_SECONDS)
    return Cost(time.monotonic() - started, most / 2**20, process.returncode, outcomes(output))


def write(file: IO[bytes], rows: Rows, form: str) -> None:
    before, between, after = (b"[", b",", b"]") if form == "json" else (b"", b"\n", b"\n")
    with suppress(BrokenPipeError), file:
        for number, line in enumerate(rows()):
            file.write((between if number else before) + line.encode())
        file.write(after)


def resident(pid: int) -> int:
    """Bytes of memory that a process, and all that it has started, have in RAM."""
    found = 0
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for one in (process, *process.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                found += one.memory_info().rss
    return found


def outcomes(output: Path) -> Counter[str]:
    codes: Counter[str] = Counter()
    if output.exists():
        with output.open("rb") as file:
            for line in file:
                error = json.loads(line).get("error")
                codes[error["code"] if error else "ok"] += 1
    return codes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=list(CASES), metavar="NAME", help="all by default")
    parser.add_argument("--form", choices=["jsonl", "json"], default="jsonl", help="of the input (%(default)s)")
    parser.add_argument("--limit", type=float, default=700, help="MiB beyond those of one short row (%(default)s)")
    parser.add_argument("--seconds", type=float, default=300, help="for each input (%(default)s)")
    parser.add_argument("--list", action="store_true", help="print the names of the inputs")
    arguments, options = parser.parse_known_args()
    if arguments.list:
        print(*CASES, sep="\n")
        return
    violations, base = 0, 0.0
    print(f"| {'input':45} | MiB beyond | seconds | rows |\n|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in ["1 short row", *(arguments.case or list(CASES)[1:])]:
            cost = run(CASES[name], Path(folder, "out.jsonl"), options, arguments.form)
            base = base or cost.mib
            is_over = cost.mib - base > arguments.limit or cost.seconds > arguments.seconds
            violations += is_over or cost.status not in (0, 1) or cost.codes.total() != sum(1 for _ in CASES[name]())
            codes = ", ".join(f"{number:,} {code}" for code, number in cost.codes.items()) or f"exit {cost.status}"
            print(f"| {name:45} | {cost.mib - base:,.0f} | {cost.seconds:.1f} | {codes} |", flush=True)
    print(f"one short row takes {base:,.0f} MiB; violations: {violations}")
    sys.exit(1 if violations else 0)


if __name__ == "__main__":
    main()
