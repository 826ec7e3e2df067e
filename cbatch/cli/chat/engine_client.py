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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from cbatch.base.errors import RequestError
from cbatch.base.outputs import TokenEvent
from cbatch.base.params import SamplingParams
from cbatch.cli.chat.session.prompt import as_plain_text, reply_request, takes_messages
from cbatch.cli.chat.session.session import Message

if TYPE_CHECKING:
    from cbatch.api import Engine
    from cbatch.base.request import Request
    from cbatch.requests.output_processor import OutputProcessor, StreamEvent

PRIORITY = -(2**64)
"""Replies run before every row of a batch in the background."""

MOST_COUNTED = 200_000
"""Characters of a text whose tokens are counted: of megabytes, counting takes seconds and gigabytes."""

Post = Callable[[Callable[[], None]], None]


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A conversation as the engine gets it.

    num_dropped: how many of its oldest turns were dropped to make it fit
    """

    token_ids: Sequence[int]
    num_dropped: int


@dataclass(eq=False, slots=True)
class ReplyRequest:
    """A request for one reply: the conversation, how to sample, and whom to tell.

    message_groups: what `Session.message_groups` gives; all groups but the last may be dropped
    params:         sampling parameters that differ from the model's defaults
    template_kwargs: variables for the chat template, beside the client's
    tools:          functions that the model may call, in OpenAI's form
    reply_prefix:   the beginning of the reply, if it is continued
    may_trim:       whether the oldest turns may be dropped if the context is too small
    on_start:       called on the front end's thread once the prompt is encoded
    on_event:       called there for every token, with the time when it came (`monotonic` clock)
    """

    system_messages: list[Message]
    message_groups: list[list[Message]]
    params: dict[str, Any]
    seed: int
    template_kwargs: Mapping[str, Any]
    tools: Sequence[Mapping[str, Any]]
    reply_prefix: str
    may_trim: bool
    on_start: Callable[[EncodedPrompt], None]
    on_event: Callable[[StreamEvent, float], None]
    is_cancelled: bool = False
    submitted: Request | None = None

    def messages(self, num_dropped: int) -> list[Message]:
        """The conversation without its oldest turns."""
        return [*self.system_messages, *chain.from_iterable(self.message_groups[num_dropped:])]


@dataclass(frozen=True, slots=True)
class CountRequest:
    """Asks for a number of tokens; `on_count` is called with it on the front end's thread."""

    count: Callable[[Engine], int]
    on_count: Callable[[int], None]


class EngineClient:
    """Opens an engine and submits requests to it. `engine` is None until it is ready."""

    def __init__(
        self,
        open_engine: Callable[[], Engine],
        *,
        template_kwargs: Mapping[str, Any] | None = None,
        closes_engine: bool = False,
    ) -> None:
        """
        template_kwargs: variables for the chat template
        closes_engine:   whether `close` waits for the step in flight, and so for the end of a trace
        """
        self.engine: Engine | None = None
        self.template_kwargs = template_kwargs or {}
        self._open_engine, self._closes_engine = open_engine, closes_engine
        self._requests: queue.SimpleQueue[ReplyRequest | CountRequest | None] = queue.SimpleQueue()
        self._post: Post = lambda callback: None
        self._is_unloaded = False

    def start(self, post: Post, on_open: Callable[[BaseException | None], None]) -> None:
        """Starts to load the engine.

        post:    runs a callback on the front end's thread
        on_open: called there with None when the engine is ready, or with what kept it from opening
        """
        self._post = post
        threading.Thread(target=self._run, args=(on_open,), name="cbatch-client", daemon=True).start()

    def beside(
        self, open_engine: Callable[[], Engine], on_open: Callable[[BaseException | None], None]
    ) -> EngineClient:
        """A client of another engine for the same front end, which begins to load it."""
        other = EngineClient(open_engine, template_kwargs=self.template_kwargs, closes_engine=self._closes_engine)
        other.start(self._post, on_open)
        return other

    def close(self) -> None:
        """Closes the engine if somebody needs that; a chat that ends does not wait for the step in flight."""
        if self.engine is not None and self._closes_engine:
            self.engine.close()

    def open_here(self, callbacks: queue.SimpleQueue[Callable[[], None]]) -> None:
        """Loads the engine while this thread runs the callbacks. Raises what keeps it from opening."""
        opened: list[BaseException | None] = []
        self.start(callbacks.put, opened.append)
        while not opened:
            callbacks.get()()
        if opened[0] is not None:
            raise opened[0]

    def unload(self) -> None:
        """Closes the engine and ends the client's thread; also if the engine is still to open."""
        self._is_unloaded = True
        self._requests.put(None)
        if self.engine is not None:
            self.engine.close()

    def submit(self, request: ReplyRequest) -> None:
        self._requests.put(request)

    def count_tokens(self, text: str, on_count: Callable[[int], None]) -> None:
        """Has the tokens of a text counted once the model is there; of a very long one, those of its beginning."""
        beginning = text[:MOST_COUNTED]

        def count(engine: Engine) -> int:
            return len(engine.encode(beginning, raw=True)) * len(text) // max(len(beginning), 1)

        self._requests.put(CountRequest(count, on_count))

    def count_prompt_tokens(self, messages: Sequence[Message], on_count: Callable[[int], None]) -> None:
        """The same for the prompt that `cbatch run` makes of a conversation."""

        def count(engine: Engine) -> int:
            if takes_messages(engine):
                return len(engine.encode({"messages": list(messages)}))
            return len(engine.encode(as_plain_text(messages), raw=True))

        self._requests.put(CountRequest(count, on_count))

    def cancel(self, request: ReplyRequest) -> None:
        """Stops a request, whose callbacks are not called any more."""
        request.is_cancelled = True
        if request.submitted is not None and self.engine is not None:
            self.engine.thread.cancel(request.submitted)

    def post(self, callback: Callable[[], None]) -> None:
        """Runs something on the front end's thread; for other threads."""
        self._post(callback)

    @property
    def failure(self) -> BaseException | None:
        """Why the engine failed for good, if it did."""
        return self.engine.failure if self.engine is not None else None

    def params(self, params: dict[str, Any]) -> SamplingParams:
        """Effective sampling parameters; the model's own defaults are known only once it is loaded."""
        if self.engine is None:
            return SamplingParams(max_tokens=None).merged(params)
        loaded = self.engine.loaded
        return replace(loaded.defaults, max_tokens=loaded.max_tokens).merged(params)

    def _run(self, on_open: Callable[[BaseException | None], None]) -> None:
        try:
            engine = self._open_engine()
        except BaseException as error:  # ends the chat with a sentence, not this thread with a traceback
            if self._is_unloaded:
                return
            self._post(partial(on_open, error))
            self._refuse_all(error)
            return
        self.engine = engine
        if self._is_unloaded:
            engine.close()
            return
        self._post(partial(on_open, None))
        while (request := self._requests.get()) is not None:
            if isinstance(request, CountRequest):
                with suppress(BaseException):  # a number that is missing harms nobody
                    self._post(partial(request.on_count, request.count(engine)))
                continue
            if request.is_cancelled:
                continue
            try:
                self._submit_to_engine(request, engine)
            except RequestError as error:
                self._fail(request, error)
            except BaseException as error:  # a message that breaks something must not end the chat
                self._fail(request, RequestError("internal_error", f"The message cannot be encoded: {error!r}"))

    def _refuse_all(self, error: BaseException) -> None:
        """Answers every request with what kept the engine from opening."""
        while (request := self._requests.get()) is not None:
            if isinstance(request, ReplyRequest) and not request.is_cancelled:
                self._fail(request, RequestError("internal_error", f"The model could not be loaded: {error}"))

    def _submit_to_engine(self, request: ReplyRequest, engine: Engine) -> None:

        encoded, num_dropped = self._encode(request, engine, self.params(request.params))
        prompt = EncodedPrompt(encoded.prompt_ids, num_dropped)
        self._post_unless_cancelled(request, partial(request.on_start, prompt))
        outputs = engine.core.output_processor(encoded)

        has_failed = False

        def on_event(event: TokenEvent) -> None:
            nonlocal has_failed
            if has_failed:
                return
            try:
                outputs.take(event)
            except BaseException as error:  # the engine ends the request, and says so by another event
                has_failed = True
                self._fail(request, RequestError("internal_error", f"The reply cannot be taken: {error!r}"))
                raise
            self._post_unless_cancelled(request, partial(self._report, request, outputs, event, time.monotonic()))

        request.submitted = encoded
        engine.thread.submit(encoded, on_event)
        if request.is_cancelled:  # before there was a request to cancel
            engine.thread.cancel(request.submitted)

    def _report(self, request: ReplyRequest, outputs: OutputProcessor, event: TokenEvent, when: float) -> None:
        """Hands on an event with its text, which is made here, on the front end's thread."""
        read = outputs.read(event)
        if read.error is not None and event.error is None:  # its text could not be made
            self.cancel(request)
        request.on_event(read, when)

    def _encode(self, request: ReplyRequest, engine: Engine, params: SamplingParams) -> tuple[Request, int]:
        """The request as token ids. Drops as few of the oldest turns as necessary, if that is allowed: how many."""
        if request.reply_prefix and params.constraint is not None:
            raise RequestError("invalid_row", "A constrained reply cannot be continued; /retry starts it again.")
        processor = engine.core.input_processor()
        variables = {**self.template_kwargs, **request.template_kwargs}

        def encoded(num_dropped: int) -> Request:
            messages = request.messages(num_dropped)
            asked = reply_request(engine, messages, request.reply_prefix, variables, request.tools)
            asked.params, asked.seed, asked.priority = params, request.seed, PRIORITY
            return processor.encode(asked)

        def fits(num_dropped: int) -> bool:
            try:
                return _fits(engine, encoded(num_dropped).prompt_ids, params)
            except RequestError as error:
                if error.code != "prompt_too_long":
                    raise
                return False

        num_dropped, num_droppable = 0, len(request.message_groups) - 1
        if request.may_trim and num_droppable and not fits(0):
            num_dropped = 1 + bisect_left(range(1, num_droppable), True, key=fits)
        whole = encoded(num_dropped)
        engine.core.max_new_tokens(whole.prompt_ids, params)
        return whole, num_dropped

    def _fail(self, request: ReplyRequest, error: RequestError) -> None:
        from cbatch.requests.output_processor import StreamEvent

        event = StreamEvent(finish_reason="error", error=error)
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
