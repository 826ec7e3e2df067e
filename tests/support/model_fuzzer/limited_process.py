"""Runs the command for `runs`, in processes whose time and memory are limited.

One process has imported everything. It forks another one, which runs the command for each order. When that one dies or
is killed, or when a run leaves a thread behind, the first one forks the next.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

from tests.support.fork_server import preload
from tests.support.model_fuzzer import quick_children

CPU_SECONDS, MEMORY = 25, 3 * 2**30
"""For a run; memory is address space beyond what the process has before."""

MOST_RUNS = 200
"""Of one process."""

LEFT_THREADS = 99
"""Exit code of a process that cannot be used again."""


def main(child_seconds: float) -> None:
    answers, own_errors = os.fdopen(os.dup(1), "w", buffering=1), os.fdopen(os.dup(2), "w")
    streams = [os.memfd_create(name) for name in ("output", "errors")]
    for number, stream in enumerate(streams, 1):
        os.dup2(stream, number)
    sys.excepthook = lambda kind, error, trace: traceback.print_exception(kind, error, trace, file=own_errors)
    _prepare(child_seconds)
    while line := _read_line():
        order = json.loads(line)
        if order["do"] == "warm up":
            _say(answers, _run(order, streams))
            continue
        _serve(answers, streams)
        return


def _prepare(child_seconds: float) -> None:
    preload()
    from cbatch.cli.main import hide_warnings
    from cbatch.model import packed_file
    from cbatch.text import isolated, template_renderer

    hide_warnings()
    packed_file.LEAST_BYTES = 0
    isolated.LIMITS = isolated.LIMITS._replace(cpu_seconds=child_seconds)
    template_renderer.LIMITS = template_renderer.LIMITS._replace(cpu_seconds=child_seconds)


def _serve(answers: Any, streams: list[int]) -> None:
    while True:
        child = os.fork()
        if child == 0:
            _take_orders(answers, streams)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status == 0:
            return
        if status != LEFT_THREADS:
            _say(answers, {"code": status, "seconds": 0.0, "bytes": 0} | _written(streams))


def _take_orders(answers: Any, streams: list[int]) -> NoReturn:
    quick_children.install()
    size = next(int(line.split()[1]) * 1024 for line in _status() if line.startswith("VmSize"))
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _say(answers, {"pid": os.getpid()})
    for _ in range(MOST_RUNS):
        line = _read_line()
        if not line:
            os._exit(0)
        limit = int(time.process_time()) + CPU_SECONDS
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
        _say(answers, _run(json.loads(line), streams))
        if threading.active_count() > 1:
            break
    os._exit(LEFT_THREADS)


def _run(order: dict[str, Any], streams: list[int]) -> dict[str, Any]:
    from cbatch.cli.main import run_command

    for stream in streams:
        os.ftruncate(stream, 0)
        os.lseek(stream, 0, os.SEEK_SET)
    os.environ.update(order["env"])
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak of memory
    start, cpu = time.monotonic(), time.process_time()
    try:
        code = run_command(order["argv"])
    except BaseException:  # as Python would end
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    logging.getLogger("cbatch").handlers.clear()
    spent = {"seconds": time.monotonic() - start, "cpu": time.process_time() - cpu}
    return {"code": code, "bytes": _peak()} | spent | _written(streams)


def _peak() -> int:
    own = next(int(line.split()[1]) * 1024 for line in _status() if line.startswith("VmHWM"))
    return max(own, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)


def _status() -> list[str]:
    return Path("/proc/self/status").read_text().splitlines()


def _written(streams: list[int]) -> dict[str, str]:
    sizes = [os.fstat(stream).st_size for stream in streams]
    pairs = zip(("output", "errors"), streams, sizes, strict=True)
    return {name: os.pread(stream, min(size, 10**6), 0).decode("latin-1") for name, stream, size in pairs}


def _read_line() -> bytes:
    """A line of stdin, read byte by byte: what another process is to read must not be in a buffer of this one."""
    line = bytearray()
    while (byte := os.read(0, 1)) not in (b"", b"\n"):
        line += byte
    return bytes(line)


def _say(answers: Any, answer: dict[str, Any]) -> None:
    print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main(float(sys.argv[1]))
