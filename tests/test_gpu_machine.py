"""What the tests do on a machine with a GPU, on one without.

`pytest -p tests.support.faked_gpu -m "not gpu"` shows more, and takes as long as the suite.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from cbatch.runtime.device import choose_device
from tests import conftest
from tests.attention import test_triton_attention
from tests.engine import test_cuda_graphs
from tests.runtime import test_device
from tests.schedule import test_scheduler

TESTS = Path(__file__).parent


class Item:
    """As much of a collected test as the hook reads and writes."""

    def __init__(self, module: ModuleType, *marks: pytest.MarkDecorator) -> None:
        self.module = SimpleNamespace(obj=module)
        self.marks = [mark.mark for mark in marks]
        self.path = Path(str(module.__file__))

    def getparent(self, kind: Any) -> SimpleNamespace:
        return self.module

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return next((mark for mark in self.marks if mark.name == name), None)

    def add_marker(self, mark: Any) -> None:
        self.marks.append((getattr(pytest.mark, mark) if isinstance(mark, str) else mark).mark)

    def groups(self) -> set[str]:
        return {mark.args[0] for mark in self.marks if mark.name == "xdist_group"}


def test_tests_of_a_gpu_share_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a GPU against two processes that compile and allocate at once, and `-m gpu` against missing tests."""
    monkeypatch.setattr(conftest, "HAS_GPU", True)
    on_gpu = [
        Item(test_triton_attention),
        Item(test_cuda_graphs),
        Item(test_device, pytest.mark.xdist_group("gpu")),
        Item(test_scheduler, pytest.mark.gpu),
    ]
    others = [Item(test_device), Item(test_scheduler)]
    config = SimpleNamespace(option=SimpleNamespace(markexpr="exhaustive"))
    conftest.pytest_collection_modifyitems(config, [*others, *on_gpu])  # type: ignore[arg-type, list-item]
    assert [item.groups() for item in on_gpu] == [{"gpu"}] * 4
    assert all(item.get_closest_marker("gpu") and not item.get_closest_marker("skip") for item in on_gpu)
    assert [item.groups() for item in others] == [{"test_device"}, {"test_scheduler"}]
    assert not any(item.get_closest_marker("gpu") for item in others)


@pytest.mark.parametrize(
    ("has_gpu", "dist", "expected"),
    [(True, "worksteal", "loadgroup"), (True, "no", "no"), (False, "worksteal", "worksteal")],
)
def test_groups_count_with_a_gpu_only(has_gpu: bool, dist: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the groups, which mean nothing to work stealing, and the suite's time on machines without a GPU."""
    monkeypatch.setattr(conftest, "HAS_GPU", has_gpu)
    config = SimpleNamespace(option=SimpleNamespace(dist=dist))
    conftest.pytest_configure(config)  # type: ignore[arg-type]
    assert config.option.dist == expected


def test_auto_is_the_cpu() -> None:
    """Guards everything that tests promise of float32 on a CPU, on machines where `auto` would be a GPU."""
    assert choose_device("auto").type == "cpu"


def test_no_test_looks_for_a_gpu_by_itself() -> None:
    """Guards the tests that would take a GPU without being grouped: they ask `tests/support/device.py`."""
    allowed = {TESTS / "support" / "device.py", TESTS / "runtime" / "test_device.py", Path(__file__)}
    others = [path for path in TESTS.rglob("*.py") if path not in allowed]
    assert [path.name for path in others if re.search(r"cuda\.is_available\(\)", path.read_text())] == []
