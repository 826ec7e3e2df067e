"""Guards how tests run with a GPU, on a machine without one.

`pytest -p tests.support.faked_gpu -m "not gpu"` shows more, and takes as long as the suite.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cbatch.runtime.device import choose_device
from tests import conftest

TESTS = Path(__file__).parent


def test_tests_of_a_gpu_share_a_worker(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Guards a GPU against two processes that compile and allocate at once, and `-m gpu` against missing tests."""
    monkeypatch.setattr(conftest, "HAS_GPU", True)

    def item_of(module: str, *marks: pytest.MarkDecorator) -> pytest.Item:
        parent = pytest.Module.from_parent(request.session, path=TESTS / module)
        item = pytest.Function.from_parent(parent, name="test", callobj=lambda: None)
        for mark in marks:
            item.add_marker(mark)
        return item

    on_gpu = [
        item_of("engine/test_cuda_graphs.py"),  # takes its device from tests/support/device.py
        item_of("runtime/test_device.py", pytest.mark.xdist_group("gpu")),
        item_of("runtime/test_device.py", pytest.mark.gpu),
    ]
    other = item_of("runtime/test_device.py")
    config: Any = SimpleNamespace(option=SimpleNamespace(markexpr="exhaustive"))
    conftest.pytest_collection_modifyitems(config, [other, *on_gpu])
    groups = [[mark.args[0] for mark in item.iter_markers("xdist_group")] for item in (*on_gpu, other)]
    assert [set(names) for names in groups] == [{"gpu"}, {"gpu"}, {"gpu"}, {"test_device"}]
    assert all(item.get_closest_marker("gpu") and not item.get_closest_marker("skip") for item in on_gpu)
    assert not other.get_closest_marker("gpu")


def test_auto_is_the_cpu() -> None:
    """Guards everything that tests promise of float32 on a CPU, on machines where `auto` would be a GPU."""
    assert choose_device("auto").type == "cpu"


def test_no_test_looks_for_a_gpu_by_itself() -> None:
    """Guards the tests that would take a GPU without being grouped: they ask `tests/support/device.py`."""
    allowed = {TESTS / "support" / "device.py", TESTS / "runtime" / "test_device.py", Path(__file__)}
    others = [path for path in TESTS.rglob("*.py") if path not in allowed]
    assert [path.name for path in others if re.search(r"cuda\.is_available\(\)", path.read_text())] == []
