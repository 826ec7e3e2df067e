"""Faults that tests plant in threads, and work that must not hang."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from cbatch.engine.stepping_engine import SteppingEngine

TIMEOUT_S = 60


class Panic(BaseException):
    """A panic of native code: no Exception."""


class Fault:
    """Replaces a method; the call with this number, and all later ones if `always`, raise."""

    def __init__(
        self, patch: pytest.MonkeyPatch, owner: type, name: str, error: BaseException, at: int = 1, always: bool = False
    ) -> None:
        original, calls = getattr(owner, name), iter(range(1, 10**9))

        def broken(*arguments: Any, **options: Any) -> Any:
            number = next(calls)
            if number == at or (always and number > at):
                raise error
            return original(*arguments, **options)

        patch.setattr(owner, name, broken)


@contextmanager
def slow_steps(seconds: float = 0.01) -> Iterator[None]:
    """Every engine of this process takes so much longer for a step: long answers last until others did their part."""
    step = SteppingEngine.step

    def slow(engine: SteppingEngine) -> Any:
        time.sleep(seconds)
        return step(engine)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SteppingEngine, "step", slow)
        yield


def in_time(work: Callable[[], Any]) -> Any:
    """Result or error of work, on a thread of its own, so that one that hangs is a failure."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(TIMEOUT_S)
    assert results, "it hangs"
    return results[0]


def wait_until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it does not come"
        time.sleep(0.002)
