"""Guards the choice of an instruction set, and whole models by each, in processes that begin with it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from cbatch.kernels.cpu.instruction_sets import CHOSEN, FEATURES, INSTRUCTION_SETS, VARIABLE
from tests.support.samples import sampled

pytestmark = pytest.mark.kernels

MODEL = """
import torch
from cbatch.attention.cpu import CpuAttention
from cbatch.base.quantization import Quantization
from cbatch.model.cpu import CpuModel
from cbatch.runtime.kv_cache import U8
from tests.support.programs import expected_logits, logits_in_chunks, saved_model, typical_error

saved, expected = saved_model("llama"), expected_logits("llama")
for quantize, kv_dtype, most in ((Quantization("int8"), U8, 0.1), (None, U8, 0.1)):
    model = CpuModel(saved.config, saved.tensors, torch.bfloat16, quantize=quantize)
    found = logits_in_chunks(model, CpuAttention(kv_dtype))
    assert torch.equal(found, logits_in_chunks(model, CpuAttention(kv_dtype), chunks=[0, 16, 60]))
    assert typical_error(found, expected) < most, typical_error(found, expected)
"""

CHOICE = f"""
from cbatch.kernels.cpu.instruction_sets import CHOSEN, FEATURES
from numba.core import config
assert CHOSEN.name == "generic" and not FEATURES & {{"avx2", "avx512f", "avxvnni", "fma"}}
assert {"avx2" in FEATURES} == ("-avx2" in config.CPU_FEATURES)
"""


def run(code: str, name: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=os.environ | {VARIABLE: name}, capture_output=True, text=True)


def test_hidden_features() -> None:
    """Guards what a set hides: neither our kernels nor LLVM use what better sets have."""
    done = run(CHOICE, "Generic")
    assert done.returncode == 0, done.stderr


def test_unknown_sets_are_refused() -> None:
    """Guards misspelt names, and those of other processors: they get a sentence that lists what there is."""
    done = run("import cbatch.kernels.cpu.instruction_sets", "avx9")
    assert f"{VARIABLE} is 'avx9', but this processor has " in done.stderr and CHOSEN.name in done.stderr


@pytest.mark.parametrize("name", sampled([each.name for each in INSTRUCTION_SETS], 1, keep=["avx2"]))
def test_models_compute_the_same_by_each(name: str) -> None:
    """Guards whole models: near float32 by every set, with the same bits however a prompt is cut."""
    if not next(each for each in INSTRUCTION_SETS if each.name == name).needs <= FEATURES:
        pytest.skip(f"this processor does not have {name}")
    done = run(MODEL, name)
    assert done.returncode == 0, done.stderr
