"""Everything worth knowing of a GPU that is at hand for half an hour, in three calls of less than ten minutes.

    python -m scripts.gpu.first_half_hour FOLDER --part 1     (then 2, then 3; or `--part all` for half an hour at once)

The most valuable comes first: whether the kernels are right, then how fast they are. Each stage is a process with a
limit of its own, after which it is killed; the others follow. A stage begins only if its whole limit is left of the
call, so a call ends by itself.

FOLDER gets `log.txt`, `state.json` with all figures, and `page.md` for docs/gpu.md, all rewritten after each stage. A
call goes on after what it finds there; if it finds nothing, it leaves the stages of the calls before it to them.
`--again NAME` runs a stage once more, and `--again failed` all that failed or were killed. `--rehearse` runs small
sizes of everything on a CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from scripts.gpu import page, suite

CALL_S = 570
"""Seconds of a call. A borrowed machine ends one after 600."""

PROBE_S = 60
"""Seconds within which torch has to find the GPU."""

PACKAGES = {
    "nothing can run": "torch numpy triton transformers tokenizers safetensors numba click jinja2 psutil tqdm",
    "no tests": "pytest",
    "no tests of drawn cases": "hypothesis",
    "no tests of GGUF files and adapters": "gguf",
    "no comparison of adapters with PEFT": "peft",
}
"""The losses without packages. All of it is said before anything runs."""


@dataclass(frozen=True)
class Stage:
    """A process that tests or measures something.

    part:    the call that is meant to run it; 4: whichever has time left
    limit_s: when it is killed
    command: `{out}` stands for the beginning of the names of files; it may leave results as `{out}.json`
    """

    name: str
    part: int
    limit_s: float
    command: tuple[str, ...]


def make_stages(*, rehearse: bool) -> list[Stage]:
    """All stages, the most valuable first."""

    def tests(part: int, limit_s: float, *folders: str) -> Stage:
        command = suite.command(folders, on_gpu=not rehearse, few=rehearse)
        return Stage(f"tests: {', '.join(folders)}", part, limit_s, tuple(command))

    def bench(name: str, part: int, limit_s: float, options: str) -> Stage:
        options += " --tiny --device cpu" * rehearse
        command = sys.executable, "-m", "scripts.bench_gpu", *options.split(), "--out", "{out}"
        return Stage(name, part, limit_s, command)

    few, checked = "--requests 256 --peer-requests 0", "model" if rehearse else "checks,model"
    return [
        bench("checks", 1, 120, "--only checks"),
        tests(1, 150, "kernels", "attention"),
        bench("attention", 1, 60, "--only attention"),
        bench("yardstick", 1, 100, "--only yardstick --shapes 0.6B"),
        *([] if rehearse else [tests(1, 100, "runtime", "sample")]),  # all of them need a GPU
        bench("8B", 2, 210, "--only model --shapes 8B"),
        bench("load", 2, 320, "--load"),
        tests(3, 130, "engine"),
        bench("int4", 3, 120, f"--only {checked} --shapes 8B --quantize int4 {few}"),
        bench("0.6B", 3, 110, "--only model --shapes 0.6B"),
        bench("sweep", 3, 80, "--sweep"),
        tests(3, 100, "model"),
        bench("deterministic", 4, 90, "--deterministic --shapes 0.6B"),
        bench("fp8", 4, 120, f"--only {checked} --shapes 8B --quantize fp8 --activations fp8 {few}"),
    ]


class Folder:
    """The state so far: `state["stages"]` has the entry of each stage that was begun.

    An entry has its `status` (begun, done, failed, or killed), the `device`, `seconds`, a `reason` unless it is done,
    and `results`, by parts.
    """

    def __init__(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._state = path / "state.json"
        self.state: dict[str, Any] = {"machines": [], "stages": {}}
        if self._state.exists():
            self.state = json.loads(self._state.read_text())
        self.end_begun()

    def end_begun(self) -> None:
        """Marks a stage that a call has begun and not ended, with the results that it left."""
        for entry in self.state["stages"].values():
            if entry["status"] == "begun":
                entry |= {"status": "killed", "reason": "the call ended while it ran", "results": self.take_results()}

    def forget(self, names: Collection[str]) -> None:
        """Lets stages be due again: by their names, and all that were not done if `failed` is among these."""
        for name, entry in [*self.state["stages"].items()]:
            if name in names or ("failed" in names and entry["status"] != "done"):
                del self.state["stages"][name]

    def save(self, stages: Sequence[Stage]) -> None:
        new = self.path / "state.new"
        new.write_text(json.dumps(self.state, indent=1) + "\n")
        new.replace(self._state)
        (self.path / "page.md").write_text(page.markdown(self.state, [stage.name for stage in stages]))

    def take_results(self) -> dict[str, Any]:
        """The output of the stage that ran last, which may be half a file."""
        path = self.path / "current.json"
        results: dict[str, Any] = {}
        if path.exists():
            with contextlib.suppress(ValueError):
                results = json.loads(path.read_text())
            path.unlink()
        path.with_suffix(".log").unlink(missing_ok=True)
        return results

    def due(self, stages: Sequence[Stage], part: int) -> list[Stage]:
        """Stages that no call has begun."""
        first = 1 if self.state["stages"] else part
        return [stage for stage in stages if stage.part >= first and stage.name not in self.state["stages"]]

    def run(self, stage: Stage, device: str) -> dict[str, Any]:
        """Runs a stage to its end, or to its limit, and returns its entry."""
        began = time.monotonic()
        environment = os.environ | {"PYTHONPATH": suite.path_of_imports(), "PYTHONUNBUFFERED": "1"}
        command = [word.replace("{out}", str(self.path.resolve() / "current")) for word in stage.command]
        entry: dict[str, Any] = {"status": "done", "device": device}
        with (self.path / "log.txt").open("a+") as log:
            print(f"\n=== {stage.name}: {' '.join(command)}", file=log, flush=True)
            begin = log.tell()
            process = subprocess.Popen(
                command, cwd=suite.ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            try:
                if status := process.wait(stage.limit_s):
                    entry |= {"status": "failed", "reason": f"it ended with status {status}"}
            except subprocess.TimeoutExpired:
                entry |= {"status": "killed", "reason": f"it was killed after {stage.limit_s:g} s"}
            finally:
                kill(process)
            log.seek(begin)
            output = log.read()
        results = self.take_results() or page.test_results(output)
        return entry | {"seconds": round(time.monotonic() - began), "results": results, "end": output[-1500:]}


def kill(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and all that it has started. One that hangs in the driver may outlive that."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(10)


def run_call(folder: Folder, stages: Sequence[Stage], part: int, call_s: float, device: str) -> Iterator[str]:
    """Runs the stages that are due and fit in this call, and yields lines for whoever waits."""
    end = time.monotonic() + call_s
    for stage in folder.due(stages, part):
        if stage.limit_s > end - time.monotonic():
            continue
        folder.state["stages"][stage.name] = {"status": "begun", "device": device, "results": {}}
        folder.save(stages)
        yield f"{stage.name} ..."
        try:
            entry = folder.state["stages"][stage.name] = folder.run(stage, device)
        except (SystemExit, KeyboardInterrupt):
            folder.end_begun()
            folder.save(stages)
            raise
        tail = entry.pop("end")
        folder.save(stages)
        yield f"{stage.name}: {entry.get('reason', 'done')} ({entry['seconds']} s)"
        if entry["status"] != "done":
            yield re.sub(r"(?m)^", "    ", tail.strip())
    left = [stage.name for stage in folder.due(stages, 1)]
    yield f"left for other calls: {', '.join(left) or 'nothing'}"


def missing_packages() -> list[str]:
    """A sentence for each loss."""
    found = []
    for loss, names in PACKAGES.items():
        if missing := [name for name in names.split() if find_spec(name) is None]:
            found.append(f"missing: {', '.join(missing)}; {loss}")
    return found


def versions() -> str:
    shown = [f"Python {sys.version.partition(' ')[0]}"]
    for name in ("torch", "triton", "transformers", "numba", "pytest"):
        with contextlib.suppress(PackageNotFoundError):
            shown.append(f"{name} {version(name)}")
    return ", ".join(shown)


def describe() -> None:
    """Prints the device as JSON, and why Triton cannot launch kernels there if so."""
    import torch

    from cbatch.runtime.device import describe_gpus
    from cbatch.runtime.triton_setup import triton_problem

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    name, chip = "CPU", None
    if device.type == "cuda":
        name, chip = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    about = {"device": name, "compute capability": chip, "Triton": triton_problem(device) or "can launch kernels"}
    print(json.dumps(about | describe_gpus()))


def probe() -> dict[str, Any]:
    """The lines that `describe` prints, by a process that may hang or die. Raises RuntimeError if it does."""
    code = "from scripts.gpu.first_half_hour import describe; describe()"
    environment = os.environ | {"PYTHONPATH": suite.path_of_imports()}
    command = [sys.executable, "-c", code]
    try:
        done = subprocess.run(
            command, cwd=suite.ROOT, env=environment, timeout=PROBE_S, capture_output=True, text=True, check=False
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"torch does not find a device within {PROBE_S} s.") from None
    if done.returncode:
        raise RuntimeError(f"torch does not find a device: {done.stderr.strip()[-1500:]}")
    about: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return about


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, usage="%(prog)s FOLDER [options]"
    )
    add = parser.add_argument
    add("folder", type=Path, metavar="FOLDER", help="where results go, and what this call goes on from")
    add("--part", choices=("1", "2", "3", "all"), default="all", help="which of the three calls this is (%(default)s)")
    add("--again", action="append", default=[], metavar="NAME", help="run a stage once more; failed: all not done")
    add("--rehearse", action="store_true", help="use a CPU and small sizes")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    stages = make_stages(rehearse=options.rehearse)
    if unknown := sorted({*options.again} - {"failed", *(stage.name for stage in stages)}):
        names = ", ".join(stage.name for stage in stages)
        print(f"There is no stage {unknown[0]!r}; choose from failed, {names}.", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # else the stage would outlive this process
    began = time.monotonic()
    for line in [versions(), *missing_packages()]:
        print(line, flush=True)
    try:
        about = probe()
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 2
    for name, value in about.items():
        print(f"{name}: {value}", flush=True)
    compiler = next(filter(None, map(shutil.which, ("gcc", "clang", "cc"))), "none")
    print(f"C compiler: {compiler}; processors: {len(os.sched_getaffinity(0))}", flush=True)
    if about["device"] == "CPU" and not options.rehearse:
        print("There is no CUDA device here; --rehearse tries the command without one.", file=sys.stderr)
        return 2
    folder = Folder(options.folder)
    folder.state["machines"].append({"versions": versions(), "missing": missing_packages()} | about)
    folder.forget(options.again)
    known = set(folder.state["stages"])
    call_s = 3 * CALL_S if options.part == "all" else CALL_S
    part = 1 if options.part == "all" or options.again else int(options.part)
    for line in run_call(folder, stages, part, call_s - (time.monotonic() - began), about["device"]):
        print(f"[{time.monotonic() - began:4.0f} s] {line}", flush=True)
    print(f"{folder.path}: page.md, state.json, log.txt", flush=True)
    ran = folder.state["stages"].keys() - known
    return int(any(folder.state["stages"][name]["status"] != "done" for name in ran))


if __name__ == "__main__":
    sys.exit(main())
