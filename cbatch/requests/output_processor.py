"""Turns the token events of a request into what its caller reads: text, reasoning, tool calls, log-probabilities."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from cbatch.base.errors import RequestError, as_error
from cbatch.base.outputs import FinishReason, TokenEvent, TokenLogprobs
from cbatch.base.request import Request
from cbatch.model.pooling import Pooling
from cbatch.requests import columns
from cbatch.requests.completion import Choice, Classification, Completion, Score, Timing, TokenLogprob, Usage
from cbatch.requests.embeddings import nine_digits
from cbatch.text.replies.declaration import ReplyFormat
from cbatch.text.replies.stream import Ending, OutputStream, ParsedDelta
from cbatch.text.tokenizer import ChatTokenizer


@dataclass(slots=True)
class StreamEvent:
    """News of a request. The last event of each output has a `finish_reason`.

    index:         number of the prompt in the call
    sample_index:  number of the output among several for one prompt (`n`)
    text:          new text, which may be empty: what could still become a stop string, a tag or the rest of a character
                   is held back. All of them joined are the text of the choice
    reasoning:     new reasoning, from between the model's think tags. If the model does not close tags that its chat
                   template opened, the text of the last event is all of it once more, since it is the answer
    token_id:      the new token; None in an event that only ends an output
    finish_reason: `stop`, `length`, `tool_calls` or `error`; None while the output goes on
    error:         why the request failed
    logprobs:      of this token, if asked for
    raw:           the new text as the model wrote it, with tags and tool calls
    completion:    the whole result, in the last event of the request
    """

    index: int = 0
    sample_index: int = 0
    text: str = ""
    reasoning: str = ""
    token_id: int | None = None
    finish_reason: FinishReason | None = None
    error: RequestError | None = None
    logprobs: TokenLogprob | None = None
    raw: str = ""
    completion: Completion | None = None


@dataclass(slots=True)
class Output:
    """One output of a request, as far as it has come.

    texts: its text, in pieces, if the engine made it to find stop strings
    pooled: see `TokenEvent`
    parts: takes its text apart as it comes; None until somebody reads the output as a stream
    prompt_logprobs: of the prompt's tokens from the first that is scored on; None if it gives none
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | None = None
    closed: bool = False
    prompt_logprobs: Sequence[TokenLogprobs] | None = None
    pooled: Any = None
    parts: _OutputParts | None = None


class _OutputParts:
    """Makes the text of an output from its tokens, and takes it apart."""

    def __init__(self, request: Request, tokenizer: ChatTokenizer | None, stop_ids: Container[int]) -> None:
        """stop_ids: tokens that end the output and are not part of its text"""
        self._stop_ids = stop_ids
        self._detokenizer = None
        if tokenizer is not None and not request.params.stop:  # else the engine makes the text, to find stop strings
            self._detokenizer = tokenizer.detokenizer(request.prompt_ids, request.params, request.tags)
        self._echo = ""  # the prompt's text, if the output begins with it
        if request.params.echo and tokenizer is not None:
            skip = request.params.skip_special_tokens
            self._echo = tokenizer.decode(request.prompt_ids, skip_special_tokens=skip)
        self._stream = OutputStream(ReplyFormat("none"))
        if tokenizer is not None and request.is_reply:
            is_thinking, tools, prefix = request.opens_thinking, request.tools, request.prefix
            self._stream = OutputStream(tokenizer.reply_format, is_thinking=is_thinking, tools=tools, prefix=prefix)

    def take(
        self, token_ids: Sequence[int], raw: str, finish_reason: FinishReason | None
    ) -> tuple[str, ParsedDelta, Ending]:
        """The text of further tokens as the model wrote it, what it adds to each part, and what its end says.

        raw: their text, if the engine has made it
        """
        if self._detokenizer is not None:
            if finish_reason == "stop" and token_ids and token_ids[-1] in self._stop_ids:
                token_ids = token_ids[:-1]
            raw = self._detokenizer.push_all(token_ids)
            if finish_reason is not None and finish_reason != "error":
                raw += self._detokenizer.flush()
        new, echo, self._echo = self._stream.push(raw), self._echo, ""
        if finish_reason is None:
            return raw, ParsedDelta(echo + new.text, new.reasoning), Ending()
        end = self._stream.finish(finish_reason)
        reasoning = "" if end.is_all_text else new.reasoning + end.delta.reasoning
        return raw, ParsedDelta(echo + new.text + end.delta.text, reasoning), end


class OutputProcessor:
    """Collects the events of one request, all of its `n` outputs, and makes its completion.

    `take` is quick and may run on the engine's thread. `read` and `completion` make text, and belong to the thread that
    reads the result: call `read` for each event, `completion` at the end, or both.
    """

    def __init__(
        self,
        request: Request,
        tokenizer: ChatTokenizer | None,
        eos_ids: frozenset[int],
        pooling: Callable[[], Pooling] = Pooling,
    ) -> None:
        """
        tokenizer: None for a model that has none; such a request gets token ids only
        eos_ids:   the model's own end tokens
        pooling:   how the model's hidden states become an embedding
        """
        self.request = request
        self._tokenizer, self._pooling = tokenizer, pooling
        self._new_parts = partial(_OutputParts, request, tokenizer, request.ends(eos_ids))
        self.outputs = [Output() for _ in range(request.num_outputs)]
        self._error: tuple[int, RequestError] | None = None
        self._cached_tokens = 0
        self._num_known = 0
        self._num_unfinished = self._num_unread = request.num_outputs
        self._taken_at = time.monotonic()
        self._first_token_at: float | None = None
        self._finished_at: float | None = None

    @property
    def is_finished(self) -> bool:
        """Whether all outputs have ended."""
        return self._num_unfinished == 0

    @property
    def has_failed(self) -> bool:
        return self._error is not None

    @property
    def is_read(self) -> bool:
        """Whether `read` has given the completion."""
        return self._num_unread == 0

    def take(self, event: TokenEvent) -> None:
        """Adds an event to the output that it belongs to."""
        output = self.outputs[event.sample_index]
        if event.token_id is not None:
            output.token_ids.append(event.token_id)
            self._num_known += event.is_known
            if self._first_token_at is None and not event.is_known:
                self._first_token_at = time.monotonic()
        if event.text:
            output.texts.append(event.text)
        if event.logprobs is not None:
            output.logprobs.append(event.logprobs)
        if event.prompt_logprobs is not None:
            output.prompt_logprobs = event.prompt_logprobs
        if event.error is not None:
            self.fail(event.error, event.sample_index)
        elif event.sample_index == 0:
            self._cached_tokens = event.cached_tokens
        if event.finish_reason is not None:
            output.finish_reason, output.stop_reason = event.finish_reason, event.stop_reason
            output.closed, output.pooled = event.closed, event.pooled
            self._num_unfinished -= 1
            if self._num_unfinished == 0:
                self._finished_at = time.monotonic()

    def fail(self, error: RequestError, sample_index: int = 0) -> None:
        """Makes the request fail. If several outputs fail, the error of the first one counts."""
        if self._error is None or sample_index < self._error[0]:
            self._error = sample_index, error

    def read(self, event: TokenEvent) -> StreamEvent:
        """The addition of an event to its output. Takes each event once, in their order, after `take`.

        The request fails if the text of an output cannot be made; the caller cancels it then. After the event with
        the completion, further events of the request are not read.
        """
        output = self.outputs[event.sample_index]
        finish_reason, error = event.finish_reason, event.error
        raw, new, end = "", ParsedDelta(), Ending()
        try:
            if error is None:
                output.parts = output.parts or self._new_parts()
                token_ids = [] if event.token_id is None else [event.token_id]
                raw, new, end = output.parts.take(token_ids, event.text, finish_reason)
        except BaseException as raised:
            finish_reason, error = "error", _text_error(raised)
            self.fail(error, event.sample_index)
        if end.calls and finish_reason == "stop":
            finish_reason = "tool_calls"
        if finish_reason is not None:
            self._num_unread = 0 if error is not None else self._num_unread - 1
        return StreamEvent(
            self.request.index,
            event.sample_index,
            new.text,
            new.reasoning,
            event.token_id,
            finish_reason,
            error,
            self._logprob(event.logprobs) if event.logprobs is not None else None,
            raw,
            self.completion() if self.is_read else None,
        )

    def completion(self) -> Completion:
        """The result, once all outputs have ended."""
        request = self.request
        choices, embeddings = list[Choice](), None
        if request.embed is not None and self._error is None:
            try:
                pooling, size = self._pooling(), request.embed.dimensions
                embeddings = [pooling.embedding(output.pooled, size) for output in self.outputs]
            except BaseException as raised:
                self.fail(_text_error(raised))
        of_output = self._classified if request.labels else self._scored if request.tails else self._generated
        wanted = len(self.outputs) if embeddings is None else 0
        for number in range(wanted if self._error is None else 0):
            try:
                choices += of_output(number)
            except BaseException as raised:
                self.fail(_text_error(raised), number)
                break
        thought = [self._tokenizer.num_thought(one.token_ids) for one in choices if one.reasoning and self._tokenizer]
        num_tokens = sum(len(one.token_ids) for one in self.outputs)
        usage = Usage(request.num_prompt_tokens, num_tokens, self._cached_tokens, sum(thought))
        finished_at = time.monotonic() if self._finished_at is None else self._finished_at  # failed before its end
        timing = Timing(self._taken_at, self._first_token_at, finished_at)
        if self._error is not None:
            return Completion(request, usage=usage, error=request.located(self._error[1]), timing=timing)
        scores = None
        if request.tails:
            choices.sort(key=lambda one: (-round(one.score.rank, 5) if one.score else 0.0, one.index))
        elif (found := self.outputs[0].prompt_logprobs) is not None:  # nothing comes before the first token
            scores = [self._token(request.prompt_ids[0], None), *map(self._logprob, found)]
        completion = Completion(
            request,
            choices=choices,
            usage=usage,
            prompt_logprobs=scores,
            has_text=self._tokenizer is not None and embeddings is None,
            embeddings=embeddings,
            timing=timing,
        )
        completion.continued_tokens, completion.reused = self._num_known, Usage(0, self._num_known)
        completion.request_columns = columns.of_request(request, self._tokenizer)
        if request.dropped_tokens:
            completion.request_columns[columns.DROPPED] = request.dropped_tokens
        return completion

    def _scored(self, number: int) -> Iterator[Choice]:
        """The continuations that an output has scored: they differ in their last tokens."""
        request, found = self.request, self.outputs[number].prompt_logprobs or ()
        members = request.tails[number].members
        shared, ends = found[: len(found) - len(members)], found[len(found) - len(members) :]
        for member, last in zip(members, ends, strict=True):
            scored, then, tokens = [*shared, last], request.continuations[member], list[TokenLogprob]()
            if request.params.logprobs is not None:
                tokens = list(map(self._logprob, scored))
            is_greedy = all(one.is_likeliest for one in scored)
            score = Score(math.fsum(one.logprob for one in scored), len(scored), is_greedy, tokens)
            yield Choice(index=member, text=self._shown(then), score=score)

    def _classified(self, number: int) -> Iterator[Choice]:
        then, pooling = self.request.continuations[number], self._pooling()
        logits = pooling.embedding(self.outputs[number].pooled)
        score = Classification(pooling.labels, nine_digits(pooling.scores(logits)), nine_digits(logits.tolist()))
        yield Choice(index=number, text=self._shown(then), score=score)

    def _shown(self, then: str | Sequence[int] | None) -> str:
        if isinstance(then, str):
            return then
        return self._tokenizer.decode(then) if then is not None and self._tokenizer is not None else ""

    def _generated(self, number: int) -> Iterator[Choice]:
        request, output = self.request, self.outputs[number]
        texts, ending = "".join(output.texts), output.finish_reason or "error"
        _, whole, end = self._new_parts().take(output.token_ids, texts, ending)
        calls = end.calls[: request.max_calls]
        has_calls = bool(calls) and output.finish_reason == "stop"
        yield Choice(
            index=number,
            text=whole.text,
            reasoning=whole.reasoning or None,
            tool_calls=tuple(replace(call, id=_call_id(request.key, number, at)) for at, call in enumerate(calls)),
            finish_reason="tool_calls" if has_calls else ending,
            stop_reason=output.stop_reason,
            closed=output.closed,
            note=end.note,
            token_ids=output.token_ids,
            logprobs=[self._logprob(one) for one in output.logprobs] if request.params.logprobs is not None else None,
        )

    def _logprob(self, one: TokenLogprobs) -> TokenLogprob:
        top = tuple(self._token(token_id, logprob) for token_id, logprob in one.top)
        return self._token(one.token_id, one.logprob)._replace(top=top, is_likeliest=one.is_likeliest)

    def _token(self, token_id: int, logprob: float | None) -> TokenLogprob:
        if self._tokenizer is None:
            return TokenLogprob(f"token_id:{token_id}", token_id, logprob)
        data = self._tokenizer.token_bytes(token_id)
        is_hidden = self.request.params.skip_special_tokens and token_id in self._tokenizer.special_ids
        return TokenLogprob(data.decode("utf-8", "replace"), token_id, logprob, data, in_text=not is_hidden)


def _text_error(raised: BaseException) -> RequestError:
    if isinstance(raised, RequestError):
        return raised
    return RequestError("internal_error", f"The output cannot be turned into text: {as_error(raised)!r}")


def _call_id(key: str, sample_index: int, number: int) -> str:
    """An id of nine letters and digits, because Mistral's templates take no others."""
    return hashlib.blake2b(f"{key}/{sample_index}/{number}".encode()).hexdigest()[:9]
