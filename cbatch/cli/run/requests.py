"""A row on its way through a run: from a line to a request, and from what came of it to a row of output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import date
from functools import lru_cache
from typing import Any

from cbatch.cli.run.input import openai_batch
from cbatch.cli.run.input.jsonl import parse_line
from cbatch.cli.run.input.lines import Line
from cbatch.cli.run.input.row import InputRow
from cbatch.cli.run.output.row_keys import KeyMaker, canonical_params
from cbatch.cli.run.results import chat_logprobs, prompt_logprobs_fields, text_completion_logprobs, tool_call_fields
from cbatch.engine import FIXED_DATE, Completion, Engine, Prompt, RequestError, SamplingParams, derive_seed


@dataclass(frozen=True, slots=True, kw_only=True)
class RowOptions:
    """How lines become requests, and results rows of output.

    params:     what a row does not say itself
    has_max_tokens: whether those have a limit that was asked for; if not, OpenAI Batch requests have none
    seed:       of the run; a row's own seed is derived from it and the row's id or index
    system:     system message of conversations that have none
    today:      the date, for chat templates that write it down
    raw:        prompts are plain text to continue
    as_text:    each line is a prompt, not JSON
    token_ids:  results have the token ids of the output
    timings:    results have what depends on the moment, too
    """

    params: SamplingParams
    has_max_tokens: bool = False
    seed: int = 0
    system: str | None = None
    today: date = FIXED_DATE
    raw: bool = False
    is_text: bool = False
    allow_unknown: bool = False
    token_ids: bool = False
    timings: bool = False


@dataclass(slots=True)
class RowRequest:
    """One row with what decides its result, and what has come of it so far.

    failed_sample: which of its outputs the error is of
    asked:      what the model is to answer: text, token ids or messages
    prompt_ids: that as token ids, where those are known already
    tags:       special tokens that tell the parts of an answer apart
    echo:       what stands before each output in its text
    grammar:    the form of its output, compiled: held here, so that the engine finds it when the row's turn comes
    is_thinking: the prompt leaves the model thinking
    is_lost: the engine broke down under it, so it is not finished, and has no row of output
    taken, first, last: when it was taken in, when its first token came and when it ended; clock of `monotonic`
    """

    row: InputRow
    params: SamplingParams
    seed: int = 0
    key: str = ""
    error: RequestError | None = None
    failed_sample: int = 0
    asked: Prompt = ""
    prompt_ids: list[int] | None = None
    prompt_tokens: int = 0
    tags: tuple[str, ...] = ()
    echo: str = ""
    grammar: object = None
    is_thinking: bool = False
    completion: Completion = field(default_factory=Completion)
    is_lost: bool = False
    taken: float = 0.0
    first: float | None = None
    last: float = 0.0

    def release_prompt(self, prompt_ids: list[int]) -> None:
        """Forgets the prompt but for its length, now that the engine has it, or keeps it to tell its scores."""
        self.asked, self.prompt_tokens = "", len(prompt_ids)
        self.prompt_ids = prompt_ids if self.params.prompt_logprobs is not None else None


class RequestBuilder:
    """Makes jobs of lines and prompts of jobs, for one run on one engine."""

    def __init__(self, engine: Engine, options: RowOptions) -> None:
        self._engine = engine
        self._options = options
        tokenizer = engine.tokenizer
        self._has_template = tokenizer is not None and bool(tokenizer.chat_template)
        self._takes_tools = tokenizer is not None and tokenizer.takes_tools
        self._openai_params = options.params if options.has_max_tokens else replace(options.params, max_tokens=None)
        clock = options.today.isoformat() if tokenizer is not None and tokenizer.template_has_clock else ""
        self._keys = KeyMaker(engine.fingerprint + clock)

    def build(self, line: Line) -> RowRequest:
        """What a line asks for. Whatever is wrong with it stands in its `error`."""
        options = self._options
        try:
            row = parse_line(line, is_text=options.is_text, allow_unknown=options.allow_unknown)
            if row.error is None:
                return self._build_row(row)
            error = row.error
        except RequestError as refused:
            error = row.invalid(str(refused), refused.code)
        except Exception as unforeseen:  # a line that breaks in a way nobody foresaw harms no other
            row = InputRow(line.index)
            error = row.invalid(f"the row cannot be read: {unforeseen!r}", "internal_error")
        return RowRequest(row, options.params, key=self._keys.for_invalid_line(line), error=error)

    def encode(self, request: RowRequest) -> list[int] | None:
        """Token ids of a job's prompt; None where it has none, and then the job's `error` says why."""
        if request.error is None and request.prompt_ids is None:
            try:
                request.grammar = self._engine.compile(request.params)
                if request.params.bad_words and self._engine.tokenizer is not None:
                    self._engine.tokenizer.bad_word_ids(
                        request.params.bad_words
                    )  # here, and not on the engine's thread
                request.prompt_ids = self._engine.encode(request.asked, raw=True, today=self._options.today)
                self._set_output_format(request)
            except RequestError as error:
                self.fail(request, error)
            except Exception as unforeseen:  # one prompt that breaks something harms no other
                self.fail(request, RequestError("internal_error", f"the prompt cannot be encoded: {unforeseen!r}"))
        return request.prompt_ids

    def _set_output_format(self, request: RowRequest) -> None:
        """Says how the output of a conversation is to be read; that of a plain text has no parts."""
        tokenizer = self._engine.tokenizer
        if request.params.echo and tokenizer is not None and request.prompt_ids:
            request.echo = tokenizer.decode(request.prompt_ids, skip_special_tokens=request.params.skip_special_tokens)
        if tokenizer is not None and isinstance(request.asked, Mapping) and request.prompt_ids:
            form = tokenizer.output_parser
            request.tags = form.special_tags if request.row.tools else form.think_tags or ()
            request.is_thinking = tokenizer.opens_thinking(request.prompt_ids)

    def fail(self, request: RowRequest, error: RequestError, sample_index: int = 0) -> None:
        """Makes an error what comes of a job, with its row's place; of several outputs that fail, the first one's."""
        if request.error is None or sample_index < request.failed_sample:
            request.error, request.failed_sample = request.row.invalid(str(error), error.code), sample_index

    def _build_row(self, row: InputRow) -> RowRequest:
        params, sampling = self._sampling(row)
        kind, name = ("id", row.id) if row.id is not None else ("index", row.index)
        seed = derive_seed(self._options.seed, kind, name) if params.seed is None else params.seed
        request = RowRequest(row, params, seed, asked=self._prompt(row))
        limit = self._limit_of_cache(request)
        request.key = self._keys.for_row(row, request.asked, sampling, seed, self._options.token_ids, limit)
        return request

    def _limit_of_cache(self, request: RowRequest) -> int | None:
        """After how many tokens the cache would cut off the row's output, where the context would not."""
        room = self._engine.scheduler.room
        if not room.cache_is_small or (prompt_ids := self.encode(request)) is None:
            return None
        return room.limit_of_cache(len(prompt_ids), request.params.max_tokens)

    def _prompt(self, row: InputRow) -> Prompt:
        """The row's prompt with the options that concern it: text to continue, token ids, or messages."""
        if row.prompt_token_ids is not None:
            return row.prompt_token_ids
        messages = row.messages
        if row.tools and not self._has_template:
            raise RequestError("invalid_row", "tools go through a chat template, and this model has none")
        if row.tools and self._options.raw:
            raise RequestError("invalid_row", "tools go through the chat template, and --raw leaves that out")
        if row.tools and not self._takes_tools:
            raise RequestError("invalid_row", "this model's chat template takes no tools")
        if row.prompt is not None:
            if row.raw or self._options.raw or not self._has_template:
                return row.prompt
            messages = [{"role": "user", "content": row.prompt}]
        assert messages is not None
        system = self._options.system
        if system is not None and not any(message["role"] == "system" for message in messages):
            messages = [{"role": "system", "content": system}, *messages]
        return {"messages": messages} | ({"tools": row.tools} if row.tools else {})

    def _sampling(self, row: InputRow) -> tuple[SamplingParams, bytes]:
        """A row's effective parameters, and how they are spelt in its key; most rows of a run have the same."""
        base = self._openai_params if row.call else self._options.params
        given = tuple((name, type(value), value) for name, value in row.params.items())
        try:
            params, spelling = _merge_params(base, given)
        except TypeError:  # a list, of stop strings say, has no hash
            params, spelling = _merge_params.__wrapped__(base, given)
        is_text_call = row.call is not None and not row.call.is_chat
        if is_text_call and params.echo and params.logprobs is not None and params.prompt_logprobs is None:
            params = replace(params, prompt_logprobs=params.logprobs)  # this API scores what it echoes
        return params, spelling

    def result(self, request: RowRequest) -> dict[str, Any]:
        """The row of output for a finished job."""
        choices = request.completion.choices
        usage = {
            "prompt_tokens": request.prompt_tokens,
            "completion_tokens": sum(len(choice.token_ids) for choice in choices),
        }
        fields = self._openai_row(request, usage) if request.row.call else self._plain_row(request, usage)
        if request.row.extra:
            fields["extra"] = request.row.extra
        if self._options.timings:
            first = request.first - request.taken if request.first is not None else None
            fields |= {
                "cached_tokens": request.completion.cached_tokens,
                "ttft_s": first,
                "elapsed_s": request.last - request.taken,
            }
        return fields

    def _plain_row(self, request: RowRequest, usage: dict[str, int]) -> dict[str, Any]:
        fields: dict[str, Any] = {"index": request.row.index, "id": request.row.id}
        if request.error is not None:
            return fields | {"error": _error_fields(request.error), "key": request.key}
        choices = [self._choice(request, number) for number in range(request.params.n)]
        for choice, done in zip(choices, request.completion.choices, strict=True):
            if request.params.logprobs is not None:
                choice["logprobs"] = {"content": chat_logprobs(done.logprobs, self._token_bytes)}
        fields |= choices[0]
        if len(choices) > 1:
            fields["choices"] = [{"index": number, **choice} for number, choice in enumerate(choices)]
        if (scores := self._prompt_scores(request)) is not None:
            fields["prompt_logprobs"] = scores
        return fields | {"usage": usage, "key": request.key}

    def _choice(self, request: RowRequest, number: int) -> dict[str, Any]:
        """What one output says, and how it ended."""
        done = request.completion.choices[number]
        fields: dict[str, Any] = {"text": None, "finish_reason": done.finish_reason}
        if (tokenizer := self._engine.tokenizer) is not None:
            fields["text"] = done.text
            if request.tags:
                form = tokenizer.output_parser
                answer = form.parse(done.text, is_thinking=request.is_thinking, tools=request.row.tools)
                fields["text"] = answer.text
                if answer.reasoning is not None:
                    fields["reasoning"] = answer.reasoning
                if answer.tool_calls:
                    fields["tool_calls"] = tool_call_fields(answer.tool_calls, request.key, number)
                    fields["finish_reason"] = "tool_calls" if done.finish_reason == "stop" else done.finish_reason
            fields["text"] = request.echo + fields["text"]
        if done.stop_reason is not None:
            fields["stop_reason"] = done.stop_reason
        if self._options.token_ids:
            fields["token_ids"] = done.token_ids
        return fields

    def _openai_row(self, request: RowRequest, usage: dict[str, int]) -> dict[str, Any]:
        call = request.row.call
        assert call is not None
        if request.error is not None:
            return openai_batch.result_line(request.row, request.key, None, _error_fields(request.error))
        choices = []
        for number in range(request.params.n):
            fields = self._choice(request, number)
            logprobs = self._api_logprobs(request, request.completion.choices[number])
            choice = openai_batch.choice(call.is_chat, number, fields, logprobs)
            choices.append(choice | ({"token_ids": fields["token_ids"]} if self._options.token_ids else {}))
        body = openai_batch.response_body(call, request.key, choices, usage)
        if (scores := self._prompt_scores(request)) is not None and (call.is_chat or not request.params.echo):
            body["prompt_logprobs"] = scores
        return openai_batch.result_line(request.row, request.key, body, None)

    def _prompt_scores(self, request: RowRequest) -> dict[str, Any] | None:
        """Log-probabilities of the prompt, where they were asked for."""
        scores = request.completion.prompt_logprobs
        return (
            prompt_logprobs_fields(request.prompt_ids[0], scores, self._token_bytes)
            if scores is not None and request.prompt_ids
            else None
        )

    def _api_logprobs(self, request: RowRequest, done: Completion) -> dict[str, Any] | None:
        if request.params.logprobs is None:
            return None
        assert request.row.call is not None
        if request.row.call.is_chat:
            return {"content": chat_logprobs(done.logprobs, self._token_bytes), "refusal": None}
        tokenizer = self._engine.tokenizer
        hidden = tokenizer.special_ids if tokenizer is not None and request.params.skip_special_tokens else ()
        scores = request.completion.prompt_logprobs
        if scores is None or not request.params.echo or not request.prompt_ids:
            return text_completion_logprobs(None, done.logprobs, self._token_bytes, hidden)
        return text_completion_logprobs(request.prompt_ids[0], [*scores, *done.logprobs], self._token_bytes, hidden)

    def _token_bytes(self, token_id: int) -> bytes | None:
        return self._engine.tokenizer.token_bytes(token_id) if self._engine.tokenizer is not None else None


@lru_cache(maxsize=256)
def _merge_params(base: SamplingParams, given: tuple[tuple[str, type, Any], ...]) -> tuple[SamplingParams, bytes]:
    """`given` has the types of the values, because true and 1.0 are no whole number but equal to one."""
    params = base.merged({name: value for name, _, value in given})
    return params, canonical_params(params)


def _error_fields(error: RequestError) -> dict[str, str]:
    return {"code": error.code, "message": str(error)}
