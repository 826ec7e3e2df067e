"""Loads engines in the background, and requests replies from them.

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
from datetime import date
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

from cbatch.base.errors import RequestError, invalid_row
from cbatch.base.params import DEFAULT_PARAMS, SamplingParams
from cbatch.base.units import format_count
from cbatch.cli.chat.session.session import Attachment, Message, Turn, as_plain_text
from cbatch.cli.common.exits import UserError

if TYPE_CHECKING:
    from cbatch.api import Engine
    from cbatch.base.request import Request
    from cbatch.engine.streams import Received, RequestGroup
    from cbatch.requests.output_processor import StreamEvent

PRIORITY = -(2**64)
"""Replies run before every row of a batch in the background."""

SPARE_TOKENS = 32
"""Left free beside a text that is cut to fit: for its name, and for what says that it was cut."""

MOST_CHARACTERS = 16
"""Of a token, as far as texts that are cut are concerned: no more are encoded, which bounds time and memory."""

MOST_COUNTED = 200_000
"""Characters of a text whose tokens are counted: of megabytes, counting takes seconds and gigabytes."""

CHAT_DEFAULTS: dict[str, Any] = {"temperature": 0.7, "top_p": 0.95, "min_p": 0.05}
"""How replies are sampled if the model's files say nothing: small models repeat themselves without end if greedy."""

T = TypeVar("T")

Post = Callable[[Callable[[], None]], None]
"""Runs a callback on the front end's thread."""


@dataclass(eq=False, slots=True, kw_only=True)
class ReplyRequest:
    """A request for one reply: the conversation, how to sample, and whom to tell.

    message_groups: what `Session.message_groups` gives; all groups but the last may be dropped
    params:         sampling parameters that differ from the model's defaults
    template_kwargs: variables for the chat template, beside the client's
    reply_prefix:   the beginning of the reply, if it is continued
    may_trim:       whether the oldest turns may be dropped if the context is too small
    on_start:       called on the front end's thread with the prompt's number of tokens, and of turns dropped for it
    on_event:       called there for every token, with the time when it came (`monotonic` clock)
    """

    client: EngineClient
    system_messages: list[Message]
    message_groups: list[list[Message]]
    params: dict[str, Any]
    seed: int
    template_kwargs: Mapping[str, Any]
    tools: Sequence[Mapping[str, Any]]
    reply_prefix: str
    may_trim: bool
    on_start: Callable[[int, int], None]
    on_event: Callable[[StreamEvent, float], None]
    is_cancelled: bool = False
    group: RequestGroup | None = None
    encoded: Request | None = None


class EngineClient:
    """Opens an engine and submits requests to it; `engine` is None until it is ready.

    post: runs something on the front end's thread, once `start` was called; for other threads
    """

    def __init__(
        self,
        open_engine: Callable[[], Engine],
        *,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.engine: Engine | None = None
        self.template_kwargs = template_kwargs or {}
        self.post: Post = lambda callback: None
        self._open_engine = open_engine
        self._jobs: queue.SimpleQueue[ReplyRequest | Callable[[Engine], None] | None] = queue.SimpleQueue()
        self._is_unloaded = False

    def start(self, post: Post, on_open: Callable[[BaseException | None], None]) -> None:
        """Starts to load the engine.

        on_open: called by `post` with None when the engine is ready, or with what kept it from opening
        """
        self.post = post
        threading.Thread(target=self._run, args=(on_open,), name="cbatch-client", daemon=True).start()

    def beside(
        self, open_engine: Callable[[], Engine], on_open: Callable[[BaseException | None], None]
    ) -> EngineClient:
        """A client of another engine for the same front end, which begins to load it."""
        other = EngineClient(open_engine, template_kwargs=self.template_kwargs)
        other.start(self.post, on_open)
        return other

    def require_engine(self) -> Engine:
        """The engine. Raises UserError while it is loaded."""
        if self.engine is None:
            raise UserError("The model is still loading.")
        return self.engine

    def unload(self) -> None:
        """Closes the engine and ends the client's thread; also if the engine is still to open."""
        self._is_unloaded = True
        self._jobs.put(None)
        if self.engine is not None:
            self.engine.close()

    def submit(self, request: ReplyRequest) -> None:
        self._jobs.put(request)

    def compute(self, function: Callable[[Engine], T], on_result: Callable[[T], None]) -> None:
        """Calls a function of the engine once that is there. `on_result`: called on the front end's thread"""
        self._jobs.put(lambda engine: self.post(partial(on_result, function(engine))))

    def cancel(self, request: ReplyRequest) -> None:
        """Stops a request, whose callbacks are not called any more."""
        request.is_cancelled = True
        if request.group is not None:
            request.group.close()

    @property
    def failure(self) -> BaseException | None:
        """Why the engine failed for good, if it did."""
        return self.engine.failure if self.engine is not None else None

    def params(self, params: dict[str, Any]) -> SamplingParams:
        """Effective sampling parameters; the model's own defaults are known only once it is loaded."""
        loaded = self.engine.loaded if self.engine is not None else None
        defaults, max_tokens = (loaded.defaults, loaded.max_tokens) if loaded else (DEFAULT_PARAMS, None)
        return replace(defaults, max_tokens=max_tokens).merged({**self.chat_params, **params})

    @property
    def chat_params(self) -> dict[str, Any]:
        """The sampling parameters that a chat has beside the defaults of `cbatch run`."""
        loaded = self.engine.loaded if self.engine is not None else None
        sampling = loaded.sampling if loaded else {}
        own = (loaded.defaults if loaded else DEFAULT_PARAMS).merged(sampling)
        unset = {name: one for name, one in CHAT_DEFAULTS.items() if own.greedy and not own.asks_for([name])}
        return {"loop_guard": True, **sampling, **unset}

    def _run(self, on_open: Callable[[BaseException | None], None]) -> None:
        failure: BaseException | None = None
        try:
            self.engine = self._open_engine()
        except BaseException as error:  # ends the chat with a sentence, not this thread with a traceback
            failure = error
        engine = self.engine
        if self._is_unloaded:
            if engine is not None:
                engine.close()
            return
        self.post(partial(on_open, failure))
        while (job := self._jobs.get()) is not None:
            if not isinstance(job, ReplyRequest):
                with suppress(BaseException):  # a number that is missing harms nobody
                    job(engine)  # type: ignore[arg-type]
            elif engine is None:
                self._fail(job, f"The model could not be loaded: {failure}")
            elif not job.is_cancelled:
                try:
                    self._submit_to_engine(job, engine)
                except BaseException as error:  # a message that breaks something must not end the chat
                    known = isinstance(error, RequestError)
                    self._fail(job, error if known else f"The message cannot be encoded: {error!r}")

    def _submit_to_engine(self, request: ReplyRequest, engine: Engine) -> None:
        from cbatch.engine.streams import RequestGroup

        encoded, num_dropped = self._encode(request, engine, self.params(request.params))
        self._tell(request, partial(request.on_start, len(encoded.prompt_ids), num_dropped))
        group = request.group = RequestGroup(engine.thread)

        def report(received: Received, when: float) -> None:  # makes the text, on the front end's thread
            if (event := group.read(received)) is not None:
                request.on_event(event, when)

        def on_event(received: Received) -> None:
            when = time.monotonic()
            self._tell(request, lambda: report(received, when))

        request.encoded = encoded
        group.submit(encoded, on_event)
        if request.is_cancelled:  # before there was a group to close
            group.close()

    def _encode(self, request: ReplyRequest, engine: Engine, params: SamplingParams) -> tuple[Request, int]:
        """The request as token ids. Drops as few of the oldest turns as necessary, if that is allowed: how many."""
        from cbatch.base.chat_template_options import TemplateOptions, effort_variables

        if request.reply_prefix and params.constraint is not None:
            raise invalid_row("A constrained reply cannot be continued; /retry starts it again.")
        kwargs, tokenizer = {**self.template_kwargs, **request.template_kwargs}, engine.tokenizer
        if params.reasoning_effort is not None and tokenizer is not None:
            kwargs |= effort_variables(params.reasoning_effort, tokenizer.template_source)
        template = TemplateOptions(kwargs=kwargs, today=date.today())

        def encoded(num_dropped: int) -> Request:
            messages = [*request.system_messages, *chain.from_iterable(request.message_groups[num_dropped:])]
            made = conversation(engine, messages)
            made.params, made.seed, made.priority = params, request.seed, PRIORITY
            if made.text is not None:
                made.text += request.reply_prefix
            else:
                made.template, made.answer, made.tools = template, request.reply_prefix, request.tools
            return engine.core.input_processor().encode(made)

        def fits(num_dropped: int) -> bool:
            """Whether there is room for a reply."""
            try:
                room = engine.limits.sequence.max_new_tokens(len(encoded(num_dropped).prompt_ids))
            except RequestError as error:
                if error.code != "prompt_too_long":
                    raise
                return False
            return room >= reply_room(engine, params)

        num_dropped, num_droppable = 0, len(request.message_groups) - 1
        if request.may_trim and num_droppable and not fits(0):
            num_dropped = 1 + bisect_left(range(1, num_droppable), True, key=fits)
        whole = encoded(num_dropped)
        engine.core.max_new_tokens(whole.prompt_ids, params)
        return whole, num_dropped

    def _fail(self, request: ReplyRequest, error: BaseException | str) -> None:
        from cbatch.requests.output_processor import StreamEvent

        error = error if isinstance(error, RequestError) else RequestError("internal_error", str(error))
        event = StreamEvent(finish_reason="error", error=error)
        self._tell(request, partial(request.on_event, event, time.monotonic()))

    def _tell(self, request: ReplyRequest, callback: Callable[[], None]) -> None:
        """Checks on the front end's thread, which is the one that cancels, whether anybody waits."""
        self.post(lambda: None if request.is_cancelled else callback())


def conversation(engine: Engine, messages: Sequence[Message]) -> Request:
    """A request with messages, or with their text for a model that takes none. Raises RequestError."""
    from cbatch.base.request import Request, RequestDefaults
    from cbatch.requests.rows import fill_row

    made = Request()
    if not takes_messages(engine):
        made.text = as_plain_text(messages)
        return made
    fill_row(made, {"messages": [*messages]})
    engine.core.input_processor(RequestDefaults(media_root="/")).take_pictures(made)
    parts = chain.from_iterable(one["content"] for one in messages if isinstance(one["content"], list))
    digests = (part["digest"] for part in parts if part["type"] != "text")
    for picture, digest in zip(made.pictures, digests, strict=True):
        if picture.digest() != digest:
            raise picture.invalid("has changed since it was attached; once it is back, /retry asks again")
    return made


def prompt_length(engine: Engine, messages: Sequence[Message]) -> int:
    """The tokens of a conversation as the model gets it."""
    from cbatch.requests.input_processor import encoded_ids

    request = conversation(engine, messages)
    engine.core.input_processor().set_image_texts(request)
    return len(encoded_ids(request, engine.tokenizer))


def num_tokens(engine: Engine, file: Attachment) -> int:
    """The tokens of what is attached; of a very long text, by those of its beginning."""
    if file.digest:
        messages = (Turn("", attachments=attached).user_message() for attached in ([file], []))
        with_picture, without = (prompt_length(engine, [one]) for one in messages)
        return with_picture - without
    beginning = file.text[:MOST_COUNTED]
    return len(engine.encode(beginning, raw=True)) * len(file.text) // max(len(beginning), 1)


def reply_room(engine: Engine, params: SamplingParams) -> int:
    """Tokens that a prompt leaves for its reply: `max_tokens`, or a quarter of the context if that is less."""
    quarter = engine.limits.max_model_len // 4
    return min(params.max_tokens or quarter, quarter)


def room_beside(engine: Engine, messages: Sequence[Message], params: SamplingParams) -> int:
    """Tokens of a text that fit into a conversation beside its other messages and a reply."""
    used = prompt_length(engine, messages) + reply_room(engine, params) + SPARE_TOKENS
    return max(engine.limits.sequence.longest - used, 0)


def fitted(engine: Engine, text: str, room: int) -> tuple[str, int]:
    """A text of at most `room` tokens, from whose middle lines are left out, and the characters left out.

    Nothing of it if there is no room for anything.
    """
    if room <= 0:
        return "", len(text)

    def taken(part: Callable[[int], str]) -> str:
        size = MOST_CHARACTERS * room
        while size and (count := len(engine.encode(part(size), raw=True))) > room // 2:
            size = min(size, len(part(size))) * room // 2 * 49 // 50 // count
        return part(size)

    if len(text) <= MOST_CHARACTERS * room and len(engine.encode(text, raw=True)) <= room:
        return text, 0
    beginning, end = taken(lambda size: text[:size]), taken(lambda size: text[len(text) - size :] if size else "")
    beginning = beginning[: beginning.rfind("\n") + 1] or beginning
    end = end[end.find("\n") + 1 :] or end
    left_out = len(text) - len(beginning) - len(end)
    return f"{beginning}\n[{format_count(left_out, 'character')} left out]\n\n{end}", left_out


def takes_messages(engine: Engine) -> bool:
    """Whether the model is given messages: also without a tokenizer, where the engine says that it cannot."""
    return engine.tokenizer is None or bool(engine.tokenizer.chat_template)
