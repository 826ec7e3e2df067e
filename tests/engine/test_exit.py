"""Programs that end, or fork, while their engine has work: they end at once and quietly."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

START = """
import asyncio, gc, json, multiprocessing, os, sys, threading, time
sys.modules["triton"] = None  # a CPU needs none, and at its end it would report what is frozen
from cbatch import Engine
from tests.support.fork_server import preload
preload()
gc.collect()
gc.freeze()  # at its end, a program collects what it has made, not the thousands of modules
programs = json.loads(sys.argv[2])
children = {}
for name, source in programs.items():
    if (child := os.fork()) == 0:  # spares each program the imports
        output = os.open(f"{sys.argv[3]}/{name}", os.O_CREAT | os.O_WRONLY)
        os.dup2(output, 1)
        os.dup2(output, 2)
        exec(source)
        break
    children[name] = child
else:
    print(json.dumps({name: os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for name, child in children.items()}))
"""

PREPARE = """
engine = Engine(sys.argv[1], device="cpu", kv_blocks=40)
forward = engine.core.runner.forward
engine.core.runner.forward = lambda batch: (time.sleep(0.3), forward(batch))[1]
LONG = {"max_tokens": 200, "ignore_eos": True}  # a minute
engine.generate("hello", {"max_tokens": 1})
"""

PROGRAMS = {
    "open stream, half a map, and generate on a daemon thread": """
stream = engine.stream(["hello", "world"], LONG)
next(stream)
results = engine.map(["hello"] * 100, params={"max_tokens": 2})
next(results)
threading.Thread(target=engine.generate, args=(["hello", "world"], LONG), daemon=True).start()
time.sleep(0.2)
""",
    "open stream in a cycle": """
stream = engine.stream(["hello", "world"], LONG)
next(stream)
cycle = [stream, engine]
cycle.append(cycle)
del stream, engine
""",
    "generate on a thread, closed by an exit handler": """
import atexit
threading.Thread(target=engine.generate, args=(["hello"], {"max_tokens": 5})).start()
atexit.register(engine.close)
""",
    "unfinished loop of asyncio": """
loop = asyncio.new_event_loop()
stream = engine.astream(["hello"], LONG)
loop.run_until_complete(anext(stream))
task = loop.create_task(engine.agenerate("hello", LONG))
loop.run_until_complete(asyncio.sleep(0.2))
task.cancel()
loop.run_until_complete(asyncio.wait([task]))
""",
    "forked children": """
stream = engine.stream("hello", {"max_tokens": 5, "ignore_eos": True})
next(stream)
if os.fork() == 0:
    sys.exit(0)  # with all that a program does at its end
assert os.wait()[1] == 0
def use():
    try:
        engine.generate("hello")
    except Exception as error:
        sys.exit(3 if "belongs to the process that made it" in str(error) else 4)
child = multiprocessing.get_context("fork").Process(target=use)
child.start()
child.join(20)
assert child.exitcode == 3, child.exitcode
assert len(list(stream)) == 4
""",
}


@pytest.mark.slow
def test_programs_end_quietly(model_folder: Path, tmp_path: Path) -> None:
    """Guards the end of a program, with whatever is unfinished then: code 0, no traceback, no hanging, no crash."""
    sources = {name: f"{PREPARE}{source}print('end', flush=True)" for name, source in PROGRAMS.items()}
    command = [sys.executable, "-c", START, str(model_folder), json.dumps(sources), str(tmp_path)]
    programs = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True, cwd=ROOT)
    try:
        codes = json.loads(programs.communicate(timeout=150)[0])
    finally:
        with suppress(ProcessLookupError):
            os.killpg(programs.pid, signal.SIGKILL)
    outputs = {name: (tmp_path / name).read_text() for name in PROGRAMS}
    assert codes == dict.fromkeys(PROGRAMS, 0), outputs
    assert outputs == dict.fromkeys(PROGRAMS, "end\n")
