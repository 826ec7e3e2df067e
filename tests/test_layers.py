"""Imports go downward, front ends use the public names only, and help opens without torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import cbatch
import cbatch.engine

PACKAGE = Path(cbatch.__file__).parent

# Lowest first; a module imports only from rows above its own in this list.
LAYERS = [
    ["engine.errors"],
    ["engine.structured_source", "engine.structured_trial"],
    ["engine.params", "engine.threads", "engine.units", "engine.config", "engine.room"],
    ["engine.spans", "engine.trace_summary"],
    ["engine.tracing"],
    ["engine.request", "engine.fingerprint", "engine.forecast"],
    ["engine.blocks", "engine.plan", "engine.completion"],
    ["engine.admission"],
    ["engine.shares", "engine.pace"],
    ["engine.scheduler"],
    ["engine.cpu.memory", "engine.transfer", "engine.memory"],
    ["engine.batch", "engine.kv_pool"],
    ["engine.cpu.jit"],
    ["engine.cpu.numbers", "engine.cpu.board"],
    ["engine.cpu.tile", "engine.cpu.team", "engine.cpu.largest"],
    ["engine.cpu.linear", "engine.cpu.softmax", "engine.cpu.sampling"],
    ["engine.gpu.numbers"],
    ["engine.gpu.rows"],
    ["engine.gpu.sampling"],
    ["engine.cpu.pages"],
    ["engine.cpu.attention"],
    ["engine.cpu.decoder", "engine.cpu.tensors"],
    ["engine.attention.interface"],
    ["engine.gpu.metadata", "engine.gpu.tile", "engine.gpu.cache", "engine.gpu.layer"],
    ["engine.gpu.attention_decode", "engine.gpu.attention_prefill"],
    ["engine.attention.reference", "engine.attention.cpu", "engine.attention.triton"],
    ["engine.attention.select"],
    ["engine.tool_calls", "engine.tails"],
    ["engine.answer", "engine.detokenizer", "engine.sampler", "engine.processors", "engine.logprobs"],
    ["engine.chat_template", "engine.tokenizer_files"],
    ["engine.tokenizer", "engine.template_trial"],
    ["engine.structured_guide", "engine.together"],
    ["engine.structured"],
    ["engine.results"],
    ["engine.models.interface", "engine.models.family", "engine.dtypes"],
    ["engine.models.packing"],
    ["engine.models.decoder", "engine.models.gpu_decoder"],
    ["engine.models.files"],
    ["engine.loader"],
    ["engine.models.masks", "engine.models.linears"],
    ["engine.models.transformers"],
    ["engine.models.selfcheck"],
    ["engine.graphs"],
    ["engine.runner"],
    ["engine.loop", "engine.sizing"],
    ["engine.engine"],
    ["engine.driver"],
    ["cli.exits"],
    ["cli.answers", "cli.row", "cli.lines", "cli.screen", "cli.signals", "cli.options"],
    ["cli.keys", "cli.openai_batch", "cli.loading"],
    ["cli.jsonl", "cli.journal"],
    ["cli.job", "cli.output"],
    ["cli.tally", "cli.check"],
    ["cli.batch", "cli.ends"],
    ["cli.running"],
    ["cli.tracing"],
    ["cli.run", "cli.info"],
    ["cli.bench.work", "cli.bench.memory", "cli.bench.trace", "cli.bench.tables"],
    ["cli.bench.users", "cli.bench.strategies", "cli.bench.figures", "cli.bench.timeline", "cli.bench.report"],
    ["cli.bench.load", "cli.bench.roofline", "cli.bench.peers", "cli.bench.style", "cli.bench.costs"],
    ["cli.bench.step_plot", "cli.bench.compare"],
    ["cli.bench.plots"],
    ["cli.bench.serve"],
    ["cli.bench.show"],
    ["cli.bench.command"],
    ["cli.chat.session", "cli.chat.markup", "cli.chat.capture", "cli.chat.editor", "cli.chat.keys"],
    ["cli.chat.paths", "cli.chat.mailbox", "cli.chat.prompt"],
    ["cli.chat.client", "cli.chat.session_file", "cli.chat.session_list", "cli.chat.transcript"],
    ["cli.chat.store", "cli.chat.pane"],
    ["cli.chat.export", "cli.chat.background"],
    ["cli.chat.room"],
    ["cli.chat.status", "cli.chat.pipe"],
    ["cli.chat.desk"],
    ["cli.chat.commands", "cli.chat.file_commands"],
    ["cli.chat.complete"],
    ["cli.chat.terminal"],
    ["cli.chat.command"],
    ["cli.main"],
]
HEIGHT = {f"cbatch.{name}": height for height, names in enumerate(LAYERS) for name in names}


def imported_modules(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    sources = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    modules = {node.module for node in sources if node.module}
    modules |= {f"{node.module}.{alias.name}" for node in sources for alias in node.names} & HEIGHT.keys()
    return modules | {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}


def modules_below(folder: Path) -> dict[str, Path]:
    files = [path for path in folder.rglob("*.py") if path.name != "__init__.py"]
    return {".".join(["cbatch", *path.relative_to(PACKAGE).with_suffix("").parts]): path for path in files}


def test_imports_go_downward() -> None:
    """Guards the architecture: nothing below knows what is above it, and every module has its place."""
    modules = modules_below(PACKAGE / "engine") | modules_below(PACKAGE / "cli")
    assert modules.keys() == HEIGHT.keys()
    for name, path in modules.items():
        for used in imported_modules(path):
            if used.startswith("cbatch.") and used not in ("cbatch.engine", "cbatch.cli"):
                assert HEIGHT[used] < HEIGHT[name], f"{name} imports {used}"


def test_front_ends_use_public_names_only() -> None:
    """Guards the seam: the command line sees what `cbatch.engine` exports, nothing inside it."""
    for name, path in modules_below(PACKAGE / "cli").items():
        inside = [used for used in imported_modules(path) if used.startswith("cbatch.engine.")]
        assert not inside, f"{name} imports {inside}"


@pytest.mark.parametrize("module", [cbatch, cbatch.engine])
def test_public_names_exist(module: object) -> None:
    """Guards the lazy export table against a name that leads nowhere."""
    for name in module.__all__:  # type: ignore[attr-defined]
        assert getattr(module, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        module.no_such_name  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize(
    "arguments", [["--help"], ["run", "-h"], ["chat", "-h"], ["bench", "-h"], ["info", "--help"], ["--version"]]
)
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    """Guards the time that help takes: no torch, transformers, numpy or tokenizers for it."""
    code = (
        "import sys; from cbatch.cli.main import run_command; code = run_command(sys.argv[1:]); "
        "heavy = {'torch', 'transformers', 'numpy', 'tokenizers'} & set(sys.modules); "
        "sys.exit(f'loads {heavy}' if heavy else code)"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "cbatch" in done.stdout


def test_imports_are_not_searched_for_garbage() -> None:
    """Guards the time to the first token: full collections while torch is imported, and over it ever after."""
    code = (
        "import gc, sys; enable = gc.enable; "
        "gc.enable = lambda: (print(gc.get_stats()[2]['collections'], gc.get_freeze_count() > 10**5), enable()); "
        "from cbatch.cli.main import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code, "info", "-m", "./none"], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1:] == ["0 True"], done.stderr
