"""What works out, beside the generation, how rows go on whose answers are not their end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from cbatch.base.errors import RequestError, as_error
from cbatch.base.request import Request
from cbatch.requests.completion import Completion
from cbatch.requests.input_processor import InputProcessor

Ask = Callable[[int, Request | Completion, float], None]
"""Goes on with a row: takes its position, its next request or its result, and when the row was taken."""


class RoundLoop:
    """One for each batch. `take` belongs to the thread that reads results; `_next` runs on threads of their own.

    After `close`, rows stay unfinished.
    """

    _problem = "its answer cannot be taken further"
    """What is said of a row if `_next` breaks."""

    def __init__(self, inputs: InputProcessor, ask: Ask, name: str, num_threads: int) -> None:
        """name: of the threads, of which so many work at the same time"""
        self._inputs, self._ask = inputs, ask
        self._threads = ThreadPoolExecutor(num_threads, name)
        self._is_closed = threading.Event()

    def take(self, position: int, request: Request, completion: Completion) -> bool:
        """Takes an answer that may not be the end of its row, and returns True; others are left as the row's result."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends what runs."""
        self._is_closed.set()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _start(self, position: int, request: Request, completion: Completion) -> None:
        if not self._is_closed.is_set():
            self._threads.submit(self._run, position, request, completion)

    def _run(self, position: int, request: Request, completion: Completion) -> None:
        error: RequestError | None = None
        try:
            following = self._next(position, request, completion)
        except RequestError as raised:
            error = raised
        except BaseException as raised:  # a row that breaks something still ends
            unforeseen = as_error(raised)
            error = request.invalid(f"{self._problem}: {unforeseen!r}", "internal_error")
        if error is not None:
            following = Completion(request, error=error, timing=completion.timing)
        if not self._is_closed.is_set():
            self._ask(position, following, completion.timing.taken_at)

    def _next(self, position: int, request: Request, completion: Completion) -> Request | Completion:
        """What follows on an answer: the row's next request, or its result. A RequestError is a result, too."""
        raise NotImplementedError
