"""Guards the kernels for a GPU on machines without one: the interpreter takes what the compiler does not.

Launches on a stub driver may compile nothing once an engine has started.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="the kernels for a GPU need Triton")


pytestmark = pytest.mark.kernels

ATTENTION = {
    "_combine_kernel", "_decode_kernel", "_prefill_kernel", "_prepare_heads_kernel", "_store_kv_kernel",
}  # fmt: skip
ALL = ATTENTION | {
    "_activate_kernel", "_choose_kernel", "_combine_experts_kernel", "_expert_linear_kernel", "_finish_logits_kernel",
    "_expand_kernel", "_gate_kernel", "_norm_kernel", "_normalize_kernel", "_place_kernel", "_route_kernel",
    "_scan_kernel", "_shrink_kernel",
}  # fmt: skip
RECURRENCE = {
    "_convolve_kernel", "_gated_delta_kernel", "_gated_delta_tile_kernel",
    "_invert_kernel", "_normalize_kernel", "_keep_window_kernel", "_selective_scan_kernel",
    "_selective_scan_tile_kernel",
}  # fmt: skip
QUANTIZED = {"_look_up_kernel", "_linear_kernel", "_round_rows_kernel"}
EXPERTS = {"_expert_linear_kernel", "_place_kernel", "_route_kernel"}
WHOLE = pytest.mark.exhaustive


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chips", "heads", "group", "caches", "parts", "names"),
    [
        ("90", "128", "4", "fp8", "attention", ATTENTION),
        pytest.param("80", "128", "4", "auto", "quantized", QUANTIZED | EXPERTS, marks=WHOLE),
        pytest.param(
            "90", "128", "4", "auto,fp8", "attention,forms,rest,families,recurrence", ALL | RECURRENCE, marks=WHOLE
        ),
        pytest.param("86", "256", "8", "auto", "attention,recurrence", ATTENTION | RECURRENCE, marks=WHOLE),
    ],
)
def test_kernels_compile_and_fit(chips: str, heads: str, group: str, caches: str, parts: str, names: set[str]) -> None:
    """Guards launches up to machine code, and what that takes of a chip: kernels that need more shared memory than
    there is, spilled registers, narrow reads of the cache, attention that never reads ahead, FP fusion by default.
    """
    options = ["--arch", chips, "--heads", heads, "--groups", group, "--kv-dtypes", caches, "--parts", parts]
    options += ["--jobs", "1", "--json"]
    command = [sys.executable, "-m", "scripts.gpu.compile_matrix", *options]
    done = subprocess.run(command, capture_output=True, text=True)  # Triton keeps what it has compiled
    assert done.returncode == 0, done.stderr
    kernels = json.loads(done.stdout)
    assert {kernel["name"] for kernel in kernels} == names
    reads = {kernel["name"] for kernel in kernels if kernel["reads"]}
    assert reads == {"_decode_kernel", "_prefill_kernel"} & names


def test_launches_of_a_layer() -> None:
    """Guards the time of a decode step at batch 1, which follows the number of its launches: an added one is noticed,
    also behind a long past, whose attention is split.
    """
    code = "import json; from tests.support.stubbed_steps import CONFIGS, launches_of_a_layer as count\n"
    code += "print(json.dumps([count(CONFIGS['llama'], [99, 3999], [100, stop]) for stop in (4000, 4040)]))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "0"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    decode, mixed = json.loads(done.stdout)
    each = {"_norm_kernel": 2, "mm.out": 4, "_prepare_heads_kernel": 1, "_decode_kernel": 1, "_activate_kernel": 1}
    assert decode == each and sum(decode.values()) == 9
    assert mixed == each | {"_prefill_kernel": 1, "_combine_kernel": 1}


@pytest.mark.slow
def test_nothing_is_compiled_after_warm_up() -> None:
    """Guards against kernels that are compiled for a number of rows or tokens, or for an address, that changes from
    step to step: each costs a second of every request in flight.
    """
    command = [sys.executable, "-m", "tests.support.stubbed_steps"]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "0"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == 8
    assert not any(found.values()), found
