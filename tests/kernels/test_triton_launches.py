"""What launches do on the host, on a stub driver: they may compile nothing once an engine has started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the kernels for a GPU need Triton")

from triton.runtime.jit import JITFunction

from tests.support.triton_driver import stub_driver

pytestmark = pytest.mark.kernels


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
