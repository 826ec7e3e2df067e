"""Imports go downward, front ends use the engine from outside, and help opens without torch."""

from __future__ import annotations

import ast
import logging.config
import re
import subprocess
import sys
from pathlib import Path

import pytest
from importlinter.cli import lint_imports

import cbatch
from tests.support.tiny_models import make_engine, make_network

PACKAGE = Path(cbatch.__file__).parent
ROOT = Path(__file__).parents[1]

ENGINE_ATTRIBUTES = ("config", "device", "loaded", "on_step", "tokenizer")
"""Attributes of an engine that are for everybody; the others it keeps for itself and for tests."""


def test_imports_go_downward(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards the architecture: the import contract in pyproject.toml holds, and every folder has its floor in it."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(logging.config, "dictConfig", lambda settings: None)  # it would silence all loggers there are
    assert lint_imports(no_cache=True) == 0, capsys.readouterr().out


def test_front_ends_use_the_engine_from_outside() -> None:
    """Guards the seam: commands read an engine's limits, stats and steps, never its scheduler, blocks or runner."""
    inner = {name for name in vars(make_engine(make_network("llama"))) if name not in ENGINE_ATTRIBUTES}
    assert {"scheduler", "runner", "_requests"} <= inner
    for path in (PACKAGE / "cli").rglob("*.py"):
        nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)]
        engines = [node for node in nodes if ast.unparse(node.value).split(".")[-1] in ("engine", "_engine")]
        inside = sorted(node.attr for node in engines if node.attr in inner)
        assert not inside, f"{path.relative_to(PACKAGE)} uses {inside} of an engine"


def test_public_names_exist() -> None:
    """Guards the lazy export table against a name that leads nowhere."""
    for name in cbatch.__all__:
        assert getattr(cbatch, name) is not None
    assert dir(cbatch) == sorted(cbatch.__all__), "a notebook completes what dir() says"
    with pytest.raises(AttributeError, match="no_such_name"):
        cbatch.no_such_name  # noqa: B018


LIGHT = """
import sys
from cbatch.cli.main import run_command

def check(what, code=0):
    late = {"markdown_it", "numpy", "pygments.lexers", "tokenizers", "torch", "transformers"}
    heavy = late & set(sys.modules)
    assert not heavy and code == 0, f"{what} loads {heavy} and returns {code}"

for arguments in "--help", "run -h", "verify -h", "chat -h", "bench -h", "info --help", "--version":
    check(arguments, run_command(arguments.split()))
import cbatch.cli.chat.command, cbatch.cli.chat.terminal, cbatch.cli.chat.controller
check("a chat")
"""


def test_help_and_a_chat_open_before_heavy_imports() -> None:
    """Guards the time of help, and that to a chat's first key: torch and the model load while the user types."""
    done = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Usage: cbatch") == 6


@pytest.mark.slow
def test_imports_take_no_needless_time() -> None:
    """Guards the time to the first token: full collections while torch is imported, and over it ever after.

    Kernels on disk need nothing of what numba compiles arrays with.
    """
    code = (
        "import gc, sys; enable = gc.enable; arrays = {'numba.np.arrayobj', 'numba.cpython.unicode'}; "
        "gc.enable = lambda: (print(gc.get_stats()[2]['collections'], gc.get_freeze_count() > 10**5), enable(), "
        "print(__import__('cbatch.api') and arrays & set(sys.modules))); "
        "from cbatch.cli.main import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code, "info", "-m", "./none"], capture_output=True, text=True)
    assert done.stdout.splitlines()[-2:] == ["0 True", "set()"], done.stderr


def test_one_module_knows_what_devices_are_called() -> None:
    """Guards GPUs of other makers: `cuda` may be one of AMD, and what is not a CPU need not be `cuda`."""
    compared = re.compile(r"""\.type\s*(?:[!=]=|(?:not )?in)[^\n]*["']cuda["']""")
    found = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if compared.search(path.read_text())}
    assert found == {"runtime/device.py"}
