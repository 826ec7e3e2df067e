"""Guards the kernels for a GPU on machines without one: the interpreter takes what the compiler does not.

Launches on a stub driver may compile nothing once an engine has started.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the kernels for a GPU need Triton")

from triton.runtime.jit import JITFunction

from tests.support.triton_compiler import copies_in_flight, read_sizes
from tests.support.triton_driver import stub_driver

pytestmark = pytest.mark.kernels

ATTENTION = {
    "_combine_kernel", "_decode_kernel", "_prefill_kernel", "_prepare_heads_kernel", "_store_kv_kernel",
}  # fmt: skip
ALL = ATTENTION | {
    "_activate_kernel", "_choose_kernel", "_combine_experts_kernel", "_expert_linear_kernel", "_finish_logits_kernel",
    "_gate_kernel", "_norm_kernel", "_normalize_kernel", "_place_kernel", "_route_kernel", "_scan_kernel",
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


PTX = """
	.loc	1 11 16, function_name $L__info_string0, inlined_at 2 98 13
	ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
	@%p4 cp.async.ca.shared.global [ %r195 + 0 ], [ %rd28 + 0 ], 0x10, %r196;
	.loc	1 12 16
	@%p4 ld.global.L1::evict_last.b16 { %rs1 }, [ %rd1 + 0 ];
	.loc	1 40 16
	ld.global.b8 { %rs1 }, [ %rd1 + 0 ];
	.loc	2 11 16
	ld.global.b32 { %r1 }, [ %rd1 + 0 ];
	cp.async.wait_group 	3;
	cp.async.wait_group 	0;
	.file	1 "{here}"
	.file	2 "/elsewhere.py"
"""


def test_reads_of_a_function_are_found_in_its_assembly() -> None:
    """Guards the widths that the test above relies on: reads by copies and by loads, of one function's lines only."""
    function = SimpleNamespace(starting_line_number=10, raw_src=["", "", ""], fn=read_sizes)
    ptx = PTX.replace("{here}", inspect.getsourcefile(read_sizes) or "")
    assert read_sizes(ptx, function) == {16, 2}
    assert copies_in_flight(ptx) == 3


def _fill(out: Any, count: Any, start: Any) -> None:
    """A kernel that is never compiled."""


@pytest.mark.slow
def test_nothing_is_compiled_after_warm_up() -> None:
    """Guards against kernels that are compiled for a number of rows or tokens, or for an address, that changes from
    step to step: each costs a second of every request in flight.
    """
    command = [sys.executable, "-m", "tests.support.stubbed_steps"]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "0"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == 7
    assert not any(found.values()), found


def test_driver_says_why_a_kernel_is_compiled_again() -> None:
    """Guards the test above: it sees numbers that become 1 or multiples of 16, and addresses that are no longer any."""
    kernel = JITFunction(_fill, do_not_specialize=["start"])
    out = torch.zeros(64)
    with stub_driver() as stub:
        for rows, count, start in ((out, 3, 3), (out, 5, 1), (out, 1, 16), (out, 32, 3), (out[1:], 7, 3), (out, 9, 0)):
            kernel[(1,)](rows, count, start, enable_fp_fusion=True)
        assert stub.launches == {"_fill": 6}
        assert len(stub.compilations) == 4
        assert stub.changes(1) == [
            "_fill: count is 1, and was i32",
            "_fill: count is i32, a multiple of 16, and was i32",
            "_fill: out is *fp32, and was *fp32, a multiple of 16",
        ]
