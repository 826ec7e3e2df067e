"""Loads the engine beside a front end that is there already, and asks it for answers.

Three threads meet here: the front end's, which alone changes sessions; the client's, which loads, turns
conversations into token ids and submits them; and the driver's, on which events arise. What the others have to say
to the front end they put into its mailbox.
"""

from __future__ import annotations

import queue
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from cbatch.cli.chat.session.prompt import encode
from cbatch.cli.chat.session.session import Message
from cbatch.engine import RequestError, SamplingParams, TokenEvent

if TYPE_CHECKING:
    from cbatch.engine import Engine, EngineThread, OutputParser, RequestHandle, StepTracer

PRIORITY = -(2**64)
"""Of answers: before every row of a batch that runs beside them."""

Post = Callable[[Callable[[], None]], None]


@dataclass(eq=False, slots=True)
class ReplyRequest:
    """One answer asked for: the conversation, how to sample, and where to report to.

    system_messages, history, question: messages that stay, turns of which the oldest may go, and the question
    so_far:   the beginning of the answer, where it goes on from that
    may_drop: whether the oldest turns may go where the context does not suffice
    on_start: told on the front end's thread how many tokens the prompt has, how many turns were dropped, and whether
              it leaves the model thinking
    on_event: told there of every token, and when it came (`monotonic`)
    grammar:  the form of the answer, compiled, where one is given
    """

    system_messages: list[Message]
    history: list[list[Message]]
    question: Message
    params: dict[str, Any]
    seed: int
    reply_prefix: str
    may_trim: bool
    on_start: Callable[[int, int, bool], None]
    on_event: Callable[[TokenEvent, float], None]
    is_cancelled: bool = False
    grammar: object = None
    ticket: RequestHandle | None = None

    def messages(self, dropped: int) -> list[Message]:
        history = (message for group in self.history[dropped:] for message in group)
        return [*self.system_messages, *history, self.question]


class EngineClient:
    """Submits calls to an engine that it opens itself. `engine_thread` is None until that is done."""

    def __init__(self, open_engine: Callable[[], Engine], trace: StepTracer | None = None) -> None:
        """`trace`: records some of the engine's steps; it is whole after `close`."""
        self.engine_thread: EngineThread | None = None
        self._open_engine, self._trace = open_engine, trace
        self._requests: queue.SimpleQueue[ReplyRequest] = queue.SimpleQueue()
        self._post: Post = lambda request: None

    def start(self, post: Post, on_open: Callable[[BaseException | None], None]) -> None:
        """Begins to load.

        post:    hands a function to the front end's thread
        on_open: told there that the engine is there, or why it is not
        """
        self._post = post
        threading.Thread(target=self._run, args=(on_open,), name="cbatch-client", daemon=True).start()

    def close(self) -> None:
        """Ends the driver where its trace has to be written down; else nobody need wait for the step in flight."""
        if self.engine_thread is not None and self._trace is not None:
            self.engine_thread.close()

    def submit(self, request: ReplyRequest) -> None:
        self._requests.put(request)

    def cancel(self, request: ReplyRequest) -> None:
        """No event of this request comes any more."""
        request.is_cancelled = True
        if request.ticket is not None and self.engine_thread is not None:
            self.engine_thread.cancel(request.ticket)

    @property
    def failure(self) -> Exception | None:
        """Why the engine has failed for good, if it has."""
        return self.engine_thread.failure if self.engine_thread is not None else None

    @property
    def form(self) -> OutputParser | None:
        """How answers are to be read; None while that is not known, or where the model takes no messages."""
        if self.engine_thread is None or self.engine_thread.engine.tokenizer is None:
            return None
        return self.engine_thread.engine.tokenizer.output_parser

    def params(self, params: dict[str, Any]) -> SamplingParams:
        """The effective sampling parameters of a session; the model's own stand only once it is loaded."""
        if self.engine_thread is None:
            return SamplingParams(max_tokens=None).merged(params)
        loaded = self.engine_thread.engine.loaded
        return replace(loaded.defaults, max_tokens=loaded.max_tokens).merged(params)

    def _run(self, on_open: Callable[[BaseException | None], None]) -> None:
        try:
            engine = self._open_engine()
            from cbatch.engine import EngineThread

            self.engine_thread = EngineThread(engine, self._trace)
        except BaseException as error:  # a sentence for the user, and the end of the chat; never a thread's traceback
            self._post(partial(on_open, error))
            return
        self._post(partial(on_open, None))
        while True:
            request = self._requests.get()
            if request.is_cancelled:
                continue
            try:
                self._submit_to_engine(request, self.engine_thread)
            except RequestError as error:
                self._refuse(request, error)
            except Exception as unforeseen:  # one answer that breaks something harms no other
                self._refuse(request, RequestError("internal_error", f"The message cannot be encoded: {unforeseen!r}"))

    def _submit_to_engine(self, request: ReplyRequest, engine_thread: EngineThread) -> None:
        params = self.params(request.params)
        if request.reply_prefix and params.constraint is not None:
            raise RequestError("invalid_row", "An answer of a given form cannot be continued; /retry begins it anew.")
        request.grammar = engine_thread.engine.compile(params)
        prompt_ids, dropped = self._encode(request, engine_thread.engine, params)
        tokenizer = engine_thread.engine.tokenizer
        thinks = tokenizer is not None and not request.reply_prefix and tokenizer.opens_thinking(prompt_ids)
        self._post(partial(_run_unless_cancelled, request, partial(request.on_start, len(prompt_ids), dropped, thinks)))

        def take(event: TokenEvent) -> None:
            self._post(partial(_run_unless_cancelled, request, partial(request.on_event, event, time.monotonic())))

        tags = self.form.think_tags or () if self.form is not None else ()
        request.ticket = engine_thread.submit(prompt_ids, params, take, seed=request.seed, priority=PRIORITY, tags=tags)
        if request.is_cancelled:  # in the meantime; whoever cancelled it saw no ticket
            engine_thread.cancel(request.ticket)

    def _encode(self, request: ReplyRequest, engine: Engine, params: SamplingParams) -> tuple[list[int], int]:
        """Token ids of the conversation, and how many of its oldest turns had to go for them to fit."""

        def encoded(dropped: int) -> list[int]:
            return encode(engine, request.messages(dropped), request.reply_prefix)

        dropped = 0
        prompt_ids = encoded(0)
        if request.may_trim and request.history and not _fits(engine, prompt_ids, params):
            choices = range(1, len(request.history))
            dropped = 1 + bisect_left(choices, True, key=lambda count: _fits(engine, encoded(count), params))
            prompt_ids = encoded(dropped)
        engine.max_new_tokens(prompt_ids, params)
        return prompt_ids, dropped

    def _refuse(self, request: ReplyRequest, error: RequestError) -> None:
        event = TokenEvent(None, None, finish_reason="error", error=error)
        self._post(partial(_run_unless_cancelled, request, partial(request.on_event, event, time.monotonic())))


def _fits(engine: Engine, prompt_ids: Sequence[int], params: SamplingParams) -> bool:
    """Whether a prompt leaves room for the answer that is asked for, or for one of a quarter of the context."""
    quarter = engine.model.max_model_len // 4
    try:
        return engine.limits.sequence.max_new_tokens(len(prompt_ids)) >= min(params.max_tokens or quarter, quarter)
    except RequestError:
        return False


def _run_unless_cancelled(request: ReplyRequest, report: Callable[[], None]) -> None:
    if not request.is_cancelled:
        report()
