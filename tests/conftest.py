"""One thread: tiny models are slower on more, and the suite shares two cores with whatever else runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.fork_server import ForkServer, fork_server

os.environ["HF_HUB_OFFLINE"] = "1"
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a GPU, and torch finds no CUDA device"))


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.support.model_folder import save_model

    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def runs() -> Iterator[ForkServer]:
    """Starts the real command, in a process of its own, without the time that imports take."""
    with fork_server() as server:
        yield server
