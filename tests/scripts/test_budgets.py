"""Guards the budgets of kernels: one that is exceeded is named, and a real kernel keeps to its own."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the kernels for a GPU need Triton")

import cbatch.kernels.triton
from cbatch.kernels.triton.attention_tile import early_launch
from scripts.gpu.budgets import BUDGET_CHIPS, BUDGETS, MEASURED
from scripts.gpu.compiled_code import waits_first

pytestmark = pytest.mark.kernels

# In a process that does not interpret kernels. Without PTX, weights are converted one by one.
SCRIPT = """
import json, sys
import triton.language as tl
from cbatch.kernels.triton import conversion
from scripts.gpu.budgets import BUDGETS
from scripts.gpu.compile_matrix import budgeted, sentences
from scripts.gpu.launches import Case

conversion.COMPILED = tl.constexpr(sys.argv[1] == "real")
budget = next(one for one in BUDGETS if one.name == "int4, 8 rows")
print(json.dumps(sentences([budgeted(Case(90, "bfloat16", "budgets"), budget)])))
"""


def sentences_of(kind: str) -> list[str]:
    command = [sys.executable, "-c", SCRIPT, kind]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "0"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: list[str] = json.loads(done.stdout)
    return found


def test_an_early_launch_that_does_not_wait_is_seen() -> None:
    """Guards kernels that are launched before the last one is done: what they read may not be written yet."""
    wait, load = "griddepcontrol.wait;\n", "ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [ %rd1 + 0 ];\n"
    assert waits_first(wait + load) and not waits_first(load + wait) and not waits_first(load)
    assert not waits_first("cp.async.cg.shared.global [ %r1 ], [ %rd1 ], 0x10;\n" + wait)
    assert early_launch(90) and early_launch(120) and not early_launch(89)


def test_a_slow_conversion_exceeds_its_budget() -> None:
    """Guards against limits that no kernel can exceed, and sentences that do not say which did."""
    assert sentences_of("real") == []
    (sentence, *_) = sentences_of("slow")
    assert sentence.startswith("_linear_kernel for H100 (int4, 8 rows) takes ")
    assert "instructions for each number, and may take 3." in sentence


def launched_kernels(path: Path) -> set[str]:
    """Functions of a module that it launches: those that it subscripts by a grid and calls."""
    nodes = [*ast.walk(ast.parse(path.read_text()))]
    functions = {node.name for node in nodes if isinstance(node, ast.FunctionDef) and node.decorator_list}
    called = (node.func.value for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript))
    return functions & {value.id for value in called if isinstance(value, ast.Name)}


def test_every_kernel_has_a_budget() -> None:
    """Guards kernels that nobody measures: each that is launched has a budget, with figures for every chip."""
    launched = set[str]().union(*map(launched_kernels, Path(cbatch.kernels.triton.__path__[0]).glob("*.py")))
    assert len(launched) > 20
    assert {budget.kernel for budget in BUDGETS} == launched
    for budget in BUDGETS:
        assert [len(figures) for figures in MEASURED[budget.name]] == [len(BUDGET_CHIPS)] * 2
    assert len({budget.name for budget in BUDGETS}) == len(BUDGETS)
