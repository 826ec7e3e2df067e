"""Loads the engine in the background and requests replies from it.

Three threads meet here. The front end's thread alone changes sessions. The client's thread loads the engine, turns
conversations into token ids and submits them. Events arise on the engine's thread. The last two tell the front end
something by posting a callback that runs on its own thread.
"""

from __future__ import annotations

import queue
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from cbatch.cli.chat.session.prompt import encode
from cbatch.cli.chat.session.session import Message
from cbatch.engine import RequestError, SamplingParams, TokenEvent

if TYPE_CHECKING:
    from cbatch.engine import Engine, EngineThread, OutputDetokenizer, OutputParser, RequestHandle, StepTracer

PRIORITY = -(2**64)
"""Replies run before every row of a batch in the background."""

Post = Callable[[Callable[[], None]], None]


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A conversation as the engine gets it.

    num_dropped:    how many of its oldest turns were dropped to make it fit
    opens_thinking: whether it ends with an open think tag
    """

    token_ids: list[int]
    num_dropped: int
    opens_thinking: bool


@dataclass(eq=False, slots=True)
class ReplyRequest:
    """A request for one reply: the conversation, how to sample, and whom to tell.

    message_groups: what `Session.message_groups` gives; all groups but the last may be dropped
    params:         sampling parameters that differ from the model's defaults
    reply_prefix:   the beginning of the reply, if it is continued
    may_trim:       whether the oldest turns may be dropped if the context is too small
    on_start:       called on the front end's thread once the prompt is encoded
    on_event:       called there for every token, with the time when it came (`monotonic` clock)
    grammar:        the compiled constraint of the reply; held here so that the engine finds it in its cache
    """

    system_messages: list[Message]
    message_groups: list[list[Message]]
    params: dict[str, Any]
    seed: int
    reply_prefix: str
    may_trim: bool
    on_start: Callable[[EncodedPrompt], None]
    on_event: Callable[[TokenEvent, float], None]
    is_cancelled: bool = False
    grammar: object = None
    handle: RequestHandle | None = None

    def messages(self, num_dropped: int) -> list[Message]:
        """The conversation without its oldest turns."""
        return [*self.system_messages, *chain.from_iterable(self.message_groups[num_dropped:])]


class EngineClient:
    """Opens an engine and submits requests to it. `engine_thread` is None until the engine is ready."""

    def __init__(self, open_engine: Callable[[], Engine], trace: StepTracer | None = None) -> None:
        """`trace` records some of the engine's steps; it is complete after `close`."""
        self.engine_thread: EngineThread | None = None
        self._open_engine, self._trace = open_engine, trace
        self._requests: queue.SimpleQueue[ReplyRequest] = queue.SimpleQueue()
        self._post: Post = lambda callback: None

    def start(self, post: Post, on_open: Callable[[BaseException | None], None]) -> None:
        """Starts to load the engine.

        post:    runs a callback on the front end's thread
        on_open: called there with None when the engine is ready, or with what kept it from opening
        """
        self._post = post
        threading.Thread(target=self._run, args=(on_open,), name="cbatch-client", daemon=True).start()

    def close(self) -> None:
        """Stops the engine if a trace must be written; otherwise nobody has to wait for the step in flight."""
        if self.engine_thread is not None and self._trace is not None:
            self.engine_thread.close()

    def submit(self, request: ReplyRequest) -> None:
        self._requests.put(request)

    def cancel(self, request: ReplyRequest) -> None:
        """Stops a request, whose callbacks are not called any more."""
        request.is_cancelled = True
        if request.handle is not None and self.engine_thread is not None:
            self.engine_thread.cancel(request.handle)

    @property
    def failure(self) -> Exception | None:
        """Why the engine failed for good, if it did."""
        return self.engine_thread.failure if self.engine_thread is not None else None

    @property
    def output_parser(self) -> OutputParser | None:
        """How to read replies; None while the model loads, or if it has no tokenizer."""
        if self.engine_thread is None or self.engine_thread.engine.tokenizer is None:
            return None
        return self.engine_thread.engine.tokenizer.output_parser

    def params(self, params: dict[str, Any]) -> SamplingParams:
        """Effective sampling parameters; the model's own defaults are known only once it is loaded."""
        if self.engine_thread is None:
            return SamplingParams(max_tokens=None).merged(params)
        loaded = self.engine_thread.engine.loaded
        return replace(loaded.defaults, max_tokens=loaded.max_tokens).merged(params)

    def _run(self, on_open: Callable[[BaseException | None], None]) -> None:
        try:
            engine = self._open_engine()
            from cbatch.engine import EngineThread

            self.engine_thread = EngineThread(engine, self._trace)
        except BaseException as error:  # ends the chat with a sentence, not this thread with a traceback
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
                self._fail(request, error)
            except Exception as error:  # a message that breaks something must not end the chat
                self._fail(request, RequestError("internal_error", f"The message cannot be encoded: {error!r}"))

    def _submit_to_engine(self, request: ReplyRequest, engine_thread: EngineThread) -> None:
        params = self.params(request.params)
        if request.reply_prefix and params.constraint is not None:
            raise RequestError("invalid_row", "A constrained reply cannot be continued; /retry starts it again.")
        request.grammar = engine_thread.engine.compile(params)
        prompt = self._encode(request, engine_thread.engine, params)
        self._post_unless_cancelled(request, partial(request.on_start, prompt))

        tags = self.output_parser.think_tags or () if self.output_parser is not None else ()
        detokenizer = engine_thread.engine.detokenizer(prompt.token_ids, params, tags)

        def on_event(event: TokenEvent) -> None:
            self._post_unless_cancelled(request, partial(self._report, request, detokenizer, event, time.monotonic()))

        request.handle = engine_thread.submit(
            prompt.token_ids, params, on_event, seed=request.seed, priority=PRIORITY, tags=tags
        )
        if request.is_cancelled:  # before there was a handle to cancel
            engine_thread.cancel(request.handle)

    def _report(self, request: ReplyRequest, detokenizer: OutputDetokenizer, event: TokenEvent, when: float) -> None:
        """Hands on an event with its text, which is made here, on the front end's thread."""
        try:
            event = event._replace(text=detokenizer.update(event))
        except RequestError as error:
            self.cancel(request)
            event = TokenEvent(event.request_id, None, finish_reason="error", error=error)
        request.on_event(event, when)

    def _encode(self, request: ReplyRequest, engine: Engine, params: SamplingParams) -> EncodedPrompt:
        """Drops as few of the oldest turns as necessary, if that is allowed."""

        def encoded(num_dropped: int) -> list[int]:
            return encode(engine, request.messages(num_dropped), request.reply_prefix)

        num_dropped, prompt_ids = 0, encoded(0)
        num_droppable = len(request.message_groups) - 1
        if request.may_trim and num_droppable and not _fits(engine, prompt_ids, params):
            counts = range(1, num_droppable)
            num_dropped = 1 + bisect_left(counts, True, key=lambda count: _fits(engine, encoded(count), params))
            prompt_ids = encoded(num_dropped)
        engine.max_new_tokens(prompt_ids, params)
        tokenizer = engine.tokenizer
        thinks = tokenizer is not None and not request.reply_prefix and tokenizer.opens_thinking(prompt_ids)
        return EncodedPrompt(prompt_ids, num_dropped, thinks)

    def _fail(self, request: ReplyRequest, error: RequestError) -> None:
        event = TokenEvent(None, None, finish_reason="error", error=error)
        self._post_unless_cancelled(request, partial(request.on_event, event, time.monotonic()))

    def _post_unless_cancelled(self, request: ReplyRequest, callback: Callable[[], None]) -> None:
        """Checks on the front end's thread, which is the one that cancels."""
        self._post(lambda: None if request.is_cancelled else callback())


def _fits(engine: Engine, prompt_ids: Sequence[int], params: SamplingParams) -> bool:
    """Whether a prompt leaves room for a reply of `max_tokens`, or of a quarter of the context if that is less."""
    quarter = engine.limits.max_model_len // 4
    try:
        return engine.limits.sequence.max_new_tokens(len(prompt_ids)) >= min(params.max_tokens or quarter, quarter)
    except RequestError:
        return False
