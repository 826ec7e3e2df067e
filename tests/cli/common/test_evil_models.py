"""The real command with models that are none: one sentence, exit code 2, and neither minutes nor gigabytes."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

import pytest

from tests.support.evil_configs import EVIL, LATER, write_evil
from tests.support.fork_server import ForkServer
from tests.support.rows import write_rows
from tests.support.samples import sampled

MOST_BYTES, MOST_SECONDS = 500 * 2**20, 15
"""Memory beyond what the process has when it starts, and time on a machine that is busy."""

CASES = [
    ("config: num_hidden_layers = 1000000", ("run", "--check")),
    ("config: num_hidden_layers = 1000", ("info",)),
    ("config: vocab_size = 1000000", ("run",)),
    ("config: architectures = 5", ("chat", "hello")),
    ("config: hidden_act = 'no-such'", ("chat", "hello")),
    ("config: num_attention_heads = 0", ("bench", "--rows", "2")),
    ("config deep", ("info", "--json")),
    ("config zero", ("run",)),
    ("tokenizer pipe", ("run",)),
    ("weights pipe", ("run", "--check")),
    ("index list", ("run",)),
    ("generation_config: max_new_tokens = -1", ("run",)),
    ("no settings", ("run",)),
]


@pytest.mark.parametrize("case", sampled(CASES, 6), ids=lambda case: case[0])
def test_a_model_that_is_none_is_refused(
    case: tuple[str, tuple[str, ...]], runs: ForkServer, model_folder: Path, tmp_path: Path
) -> None:
    """Guards each command against what a model's folder may hold, also if only transformers sees that it is wrong."""
    name, command = case
    folder = write_evil((EVIL | LATER)[name], model_folder, tmp_path / "model")
    rows = [write_rows(tmp_path / "in.jsonl", [{"prompt": "hello"}])] if command[0] == "run" else []
    start, stderr = time.monotonic(), tmp_path / "stderr"
    run = runs.start(*command, *rows, "-m", folder, stderr=str(stderr))
    has = int(Path(f"/proc/{run.pid}/statm").read_text().split()[0]) * resource.getpagesize()
    resource.prlimit(run.pid, resource.RLIMIT_AS, (has + MOST_BYTES,) * 2)
    assert run.code() == 2, stderr.read_text()
    (sentence,) = stderr.read_text().splitlines()
    assert sentence.startswith("cbatch: ") and sentence.isprintable() and len(sentence) < 500
    assert time.monotonic() - start < MOST_SECONDS


@pytest.mark.parametrize("name", ["x" * 10_000, "/dev/zero", "pipe", "pipe.gguf", "/dev/zero.gguf"], ids=ascii)
def test_a_name_that_is_no_folder_is_refused(name: str, runs: ForkServer, tmp_path: Path) -> None:
    """Guards `-m` with a pipe, a device, or more characters than a path has."""
    if name.startswith("pipe"):
        name = str(tmp_path / name)
        os.mkfifo(name)
    stderr = tmp_path / "stderr"
    run = runs.start("chat", "hello", "-m", name, stderr=str(stderr))
    assert run.code() == 2, stderr.read_text()
    assert len(stderr.read_text().splitlines()) == 1
