"""One thread: tiny models are slower on more, and the suite shares two cores with whatever else runs.

All tests run on the CPU, whatever there is, except those that are about a GPU. On a machine with one, those are marked
`gpu` and run in one worker, with bounded memory; without one, they run in Triton's interpreter if they can.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from tests.support import triton_interpreter as interpreter
from tests.support.device import DEVICE, HAS_GPU, bound_memory
from tests.support.fork_server import ForkServer

if TYPE_CHECKING:
    from cbatch.api import Engine
    from tests.support.command import Command

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["CBATCH_DEVICE"] = "cpu"
if not HAS_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton
torch.set_num_threads(1)

GPU_GROUP = "gpu"

bound_memory_once = cache(bound_memory)


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # until all modules are imported, which leaves little garbage
    if HAS_GPU and getattr(config.option, "dist", "no") != "no":
        config.option.dist = "loadgroup"  # tests of a group run in the same worker


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what is exhaustive unless it is asked for. Marks what runs on a GPU, or skips it without one."""
    if "exhaustive" not in config.option.markexpr:
        drop = [item for item in items if item.get_closest_marker("exhaustive")]
        config.hook.pytest_deselected(items=drop)
        items[:] = [item for item in items if not item.get_closest_marker("exhaustive")]
    for item in items:
        if not HAS_GPU:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a GPU, and torch finds no CUDA device"))
        elif runs_on_gpu(item):
            item.add_marker("gpu")
            item.add_marker(pytest.mark.xdist_group(GPU_GROUP))
        else:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))  # so that a module's fixtures are made once


def pytest_collection_finish() -> None:
    gc.enable()
    gc.freeze()  # tests that look for garbage need not look through what all modules have made
    if "triton.runtime.interpreter" in sys.modules:
        interpreter.prepare()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # else Triton reports what is frozen as leaked


def runs_on_gpu(item: pytest.Item) -> bool:
    """Whether a test uses the GPU if there is one: its marks say so, or its module has the name of that device."""
    group = item.get_closest_marker("xdist_group")
    if item.get_closest_marker("gpu") or (group is not None and group.args == (GPU_GROUP,)):
        return True
    module = item.getparent(pytest.Module)
    names = vars(module.obj).values() if module is not None else ()
    return any(value is DEVICE or getattr(value, "__module__", "") == "tests.support.cuda_model" for value in names)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if HAS_GPU and item.get_closest_marker("gpu"):
        bound_memory_once()


@pytest.fixture(scope="session", autouse=True)
def no_configuration_file(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keeps the configuration file of whoever runs the tests out of them."""
    os.environ["XDG_CONFIG_HOME"] = str(tmp_path_factory.mktemp("config"))


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.support.model_folder import save_model

    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(model_folder: Path) -> Iterator[Engine]:
    """Runs four rows of the model folder at once."""
    from cbatch.api import Engine
    from tests.support.shared_engine import check_idle

    with Engine(str(model_folder), device="cpu", dtype="float32", max_seqs=4) as made:
        yield made
        check_idle(made)


@pytest.fixture
def command(model_folder: Path, tmp_path: Path) -> Command:
    """`cbatch run` on the model folder, in the folder of the test."""
    from tests.support.command import Command

    return Command(tmp_path, model_folder)


@pytest.fixture(scope="session")
def runs() -> Iterator[ForkServer]:
    """Starts the real command, in a process of its own, without the time that imports take."""
    with closing(ForkServer()) as server:
        yield server


@pytest.fixture
def placeless_products() -> Iterator[None]:
    """See `tests.support.triton_interpreter.placeless_products`."""
    with interpreter.placeless_products():
        yield
