"""Groups whose processes are threads of this one, joined by gloo."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import torch

from cbatch.runtime.process_group import ProcessGroup

T = TypeVar("T")


def together(size: int, run: Callable[[ProcessGroup], T], timeout_s: float = 60.0) -> list[T]:
    """The results of `run` in each process of a group. Raises what the first of them raises."""
    with TemporaryDirectory() as folder:
        store, groups = str(Path(folder, "store")), list[ProcessGroup]()

        def run_one(rank: int) -> T:
            groups.append(group := ProcessGroup(store, rank, size, torch.device("cpu")))
            return run(group)

        executor = ThreadPoolExecutor(size)
        futures = [executor.submit(run_one, rank) for rank in range(size)]
        ended, rest = wait(futures, timeout_s, FIRST_EXCEPTION)
        if rest:
            for group in groups:  # those that wait for others
                group.abort()
        executor.shutdown(wait=False)
        for future in ended:
            future.result()
        assert not rest, f"{len(rest)} of {size} processes wait for ever"
        return [future.result() for future in futures]
