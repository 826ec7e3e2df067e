"""Completions of requests, as Python objects and as the rows that `cbatch run` writes."""

from __future__ import annotations

import codecs
import html
import json
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import astuple, dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from cbatch.base.errors import RequestError
from cbatch.base.outputs import MIN_LOGPROB, FinishReason, ToolCall
from cbatch.base.request import ApiCall, Request
from cbatch.base.units import format_count
from cbatch.requests import columns
from cbatch.requests.embeddings import api_body, embeddings_in, row_fields
from cbatch.requests.responses import answer_of, response_of

SERVER_ERRORS = ("internal_error", "tokenizer_error", "nan_logits", "cancelled", "invalid_answer")
"""Codes of errors that are not the request's fault, for the OpenAI Batch API."""

MOST_SHOWN = 10
"""Completions of a list that its text shows."""


class TokenLogprob(NamedTuple):
    """A token and its log-probability, from the model's own distribution, before temperature and filters.

    token, token_id: its text, where parts of characters are U+FFFD, and its id
    logprob:  natural logarithm; None for the first token of a prompt, which nothing comes before
    data:     its bytes; None if the model has no tokenizer
    top:      the most likely tokens in its place, most likely first
    in_text:  False for a special token that the text leaves out
    is_likeliest: whether it is the first of `top`, however many are reported; None if that is not known
    """

    token: str
    token_id: int
    logprob: float | None
    data: bytes | None = None
    top: tuple[TokenLogprob, ...] = ()
    in_text: bool = True
    is_likeliest: bool | None = None

    def to_dict(self) -> dict[str, Any]:
        """The form of OpenAI's chat completions, without `top`."""
        return {
            "token": self.token,
            "logprob": _rounded(self.logprob),
            "bytes": list(self.data) if self.data is not None else None,
        }


@dataclass(frozen=True, slots=True)
class Usage:
    """Numbers of tokens of a request.

    prompt_tokens:     of its prompt; of these, `cached_tokens` were in the prefix cache
    completion_tokens: of all its outputs, end tokens included; `total_tokens` are both together
    reasoning_tokens:  of these, the reasoning, with the tag that closes it
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def __add__(self, other: Usage) -> Usage:
        return Usage(*map(operator.add, astuple(self), astuple(other)))

    def to_dict(self, *, is_openai: bool = False) -> dict[str, Any]:
        """The form in rows, or that of OpenAI's API. Cached tokens depend on what ran before, so they are not in it."""
        fields: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.total_tokens,
        }
        if self.reasoning_tokens:
            of_reasoning = {"reasoning_tokens": self.reasoning_tokens}
            fields |= {"completion_tokens_details": of_reasoning} if is_openai else of_reasoning
        return fields


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Choice:
    """One output of a request.

    index:         number of the output, from 0
    text:          without reasoning and tool calls; empty if the model has no tokenizer
    reasoning:     what the model wrote between its think tags; None if there was nothing
    tool_calls:    functions that the model asks for
    finish_reason: `stop`, `length`, `tool_calls`, or `error` (see `Completion.error`)
    stop_reason:   the stop string that ended the output, or `loop`
    closed:        whether its form is complete, although the tokens that it may have have run out
    note:          what is unusual about it, as a sentence: reasoning that the model did not close
    token_ids:     the generated tokens, with the end token
    logprobs:      of each of these tokens; None if not asked for
    score:         how likely the text is, or what a classification head says, if it was given and not generated
    """

    index: int = 0
    text: str = ""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: FinishReason = "stop"
    stop_reason: str | None = None
    closed: bool = False
    note: str | None = None
    token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprob] | None = None
    score: Score | Classification | None = None

    def to_message(self) -> dict[str, Any]:
        """The output as a message, with which its conversation goes on, in OpenAI's form with `reasoning`."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning is not None:
            message["reasoning"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [call.to_dict() for call in self.tool_calls]
        return message

    def __repr__(self) -> str:
        return _shown("Choice", self, index=self.index, tokens=len(self.token_ids))


@dataclass(frozen=True, slots=True)
class Timing:
    """When things happened: seconds of `time.monotonic`; None if they did not."""

    taken_at: float = 0.0
    first_token_at: float | None = None
    finished_at: float = 0.0


def _of_first_choice(name: str) -> Any:
    return property(lambda completion: getattr(completion.choices[0], name))


class Completion(Mapping[str, Any]):
    """The result of one request. As a mapping it is the row that `cbatch run` would write.

    So a list of them can be given to `pandas.DataFrame` or `datasets.Dataset.from_list`, and `dict(completion)` to
    `json.dumps`. Change a row from `to_dict` and not what the mapping holds. Completions with the same row are equal.

    choices:         the outputs, one unless `n` asks for more; one that is empty if there is an error. Continuations
                     that were scored, the likeliest first. The completion has `text`, `reasoning`, `tool_calls`,
                     `stop_reason`, `note`, `token_ids`, `logprobs` and `score` of the first
    prompt:          a text, token ids, or a mapping with `messages`; None if it could not be read, and of `from_row`
    usage:           numbers of tokens
    error:           why the request failed, or None
    prompt_logprobs: of each token of the prompt, if asked for
    index:           number of the prompt in the call, or of the line in the input
    id:              the `id` of the row, if it has one
    key:             hash of all that decides the result
    extra:           columns of the row that were carried along
    timing:          when it was taken, got its first token, and was finished
    images_s:        seconds in which the vision tower computed its images
    tool_messages:   what the model called before, and the results, as messages in OpenAI's form
    validation:      whether the answer is good (`valid`), the number of `tries`, the `errors` of those that were not,
                     and, if none was good, the `text` of the last; None if nothing was validated
    is_last_try:     whether another try would have given the same answer, so that there was none
    reused:          those tokens of `usage` that were not computed: a cache of answers or an earlier run had them
    continued_tokens: tokens of an earlier run, with which its outputs went on
    has_text:        False if the model has no tokenizer, or nothing was to be generated
    embeddings:      one of each text that was embedded, [dimensions] float32; None of other requests
    has_form:        whether its outputs were to have a form, such as a schema; not known of `from_row`
    request_columns: fields of its row that say something about the request (see `requests/columns.py`)
    """

    def __init__(
        self,
        request: Request | None = None,
        *,
        choices: Sequence[Choice] = (),
        usage: Usage | None = None,
        error: RequestError | None = None,
        prompt_logprobs: Sequence[TokenLogprob] | None = None,
        has_text: bool = True,
        embeddings: Sequence[Any] | None = None,
        timing: Timing | None = None,
    ) -> None:
        """
        request:  of which it is the result
        has_text: False if the model has no tokenizer; `text` is then null in the row
        """
        request = request or Request()
        self.index, self.id, self.extra, self.key = request.index, request.id, request.extra, request.key
        self.prompt = _question(request.first or request)
        self._call = request.call
        self._names_tool = request.choice is not None and request.choice.name is not None
        self.has_form = request.params.constraint is not None or request.choice is not None
        self._columns, self._params, self.has_text = request.columns, request.params, has_text
        self._embed, self.embeddings = request.embed, embeddings
        self.choices = tuple(choices) or (Choice(finish_reason="error" if embeddings is None else "stop"),)
        self.usage = usage or Usage()
        self.error = error
        if error is not None:  # whoever keeps the result shall not keep the frames, which hold the engine
            error.__traceback__ = error.__cause__ = error.__context__ = None
        self.prompt_logprobs = prompt_logprobs
        self.timing, self.images_s = timing or Timing(), request.images_s
        self.tool_messages: Sequence[Mapping[str, Any]] = ()
        self.validation: dict[str, Any] | None = None
        self.is_last_try = False
        self.reused = Usage()
        self.continued_tokens = 0
        self.request_columns: dict[str, Any] = {}
        self._fields: dict[str, Any] | None = None

    @classmethod
    def from_row(cls, fields: Mapping[str, Any]) -> Completion:
        """The completion that a row of `cbatch run` tells of; as a mapping, it is that row without its `check`.

        A row has token ids only if --token-ids asked for them, and none beside log-probabilities (-1 stands for them).
        """
        is_openai, extra = "custom_id" in fields, fields.get("extra", {})
        name = fields.get("custom_id" if is_openai else "id")
        request = Request(index=fields["index"], id=name, extra=extra, key=fields["key"])
        if (error := fields.get("error")) is not None:
            made = cls(request, error=RequestError(error["code"], error["message"]))
        else:
            body = answer_of(fields)
            usage, scores, embeddings = body["usage"], body.get("prompt_logprobs"), embeddings_in(fields)
            thought = (usage.get("completion_tokens_details") or usage).get("reasoning_tokens", 0)
            counts = usage["prompt_tokens"], usage.get("completion_tokens", 0), fields.get("cached_tokens", 0), thought
            made = cls(
                request,
                choices=[_choice_of(one) for one in body.get("choices", [fields])] if embeddings is None else (),
                embeddings=embeddings,
                usage=Usage(*counts),
                prompt_logprobs=_logprobs_of(scores["content"]) if scores is not None else None,
            )
        made.validation = fields.get("validation")
        made._fields = {name: value for name, value in fields.items() if name != "check"}
        return made

    @property
    def from_cache(self) -> bool:
        """Whether nothing of it was computed, because a cache of answers had all of it."""
        return 0 < self.reused.total_tokens == self.usage.total_tokens

    @property
    def outputs(self) -> tuple[Choice, ...]:
        """`choices`, as vLLM calls them."""
        return self.choices

    text: str = _of_first_choice("text")
    reasoning: str | None = _of_first_choice("reasoning")
    tool_calls: tuple[ToolCall, ...] = _of_first_choice("tool_calls")
    stop_reason: str | None = _of_first_choice("stop_reason")
    note: str | None = _of_first_choice("note")
    token_ids: Sequence[int] = _of_first_choice("token_ids")
    logprobs: Sequence[TokenLogprob] | None = _of_first_choice("logprobs")
    score: Score | Classification | None = _of_first_choice("score")

    @property
    def finish_reason(self) -> FinishReason:
        """That of the first output, or `length` if any was cut off."""
        return "length" if any(one.finish_reason == "length" for one in self.choices) else self.choices[0].finish_reason

    def raise_for_error(self) -> Completion:
        """Returns the completion itself. Raises a copy of its error if the request failed."""
        if self.error is not None:
            raise copy(self.error)  # which may get a traceback, and with it the frames of the caller
        return self

    def to_message(self) -> dict[str, Any]:
        """The first choice as a message (`Choice.to_message`). Raises a copy of its error if the request failed."""
        return self.raise_for_error().choices[0].to_message()

    def to_dict(self, *, timings: bool = False) -> dict[str, Any]:
        """The row that `cbatch run` writes for this request, in its own form or in that of the OpenAI Batch API.

        timings: add times and cached tokens, as --timings does, whatever the request asks for; those of `from_row` stay
                 as they are

        Each call makes a new one, which the caller may change.
        """
        if self._fields is not None:
            return deepcopy(self._fields)
        fields = self._openai_row(self._call) if self._call else self._plain_row()
        if self.tool_messages:
            fields["tool_messages"] = deepcopy(list(self.tool_messages))
        if self.validation is not None:
            fields["validation"] = deepcopy(self.validation)
        if self.extra:
            # Copying a text or a number deeply would take most of the time of a short row.
            fields["extra"] = {
                name: deepcopy(value) if isinstance(value, list | dict) else value for name, value in self.extra.items()
            }
        return fields | columns.of_row(self, ["timings"] if timings else self._columns)

    @cached_property
    def _mapping(self) -> dict[str, Any]:
        return self.to_dict()  # once: `dict(completion)` looks up each of its fields

    def __getitem__(self, name: str) -> Any:
        return self._mapping[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._mapping)

    def __len__(self) -> int:
        return len(self._mapping)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_mapping"}

    def __repr__(self) -> str:
        if self.error is not None:
            return f"Completion(error={self.error.code!r}, message={_shorten(str(self.error))!r})"
        tokens = f"{self.usage.prompt_tokens}+{self.usage.completion_tokens}"
        return _shown("Completion", self, choices=len(self.choices) > 1 and len(self.choices), tokens=tokens)

    def _repr_html_(self) -> str:
        if self.error is not None:
            return f"<p><b>{html.escape(self.error.code)}</b>: {html.escape(str(self.error))}</p>"
        rows = "".join(
            f"<tr><td>{choice.index}</td><td style='text-align:left'>{_html_of(choice)}</td>"
            f"<td>{choice.finish_reason}</td><td>{len(choice.token_ids) or ''}</td></tr>"
            for choice in self.choices
        )
        return f"<table><tr><th></th><th>text</th><th>finish_reason</th><th>tokens</th></tr>{rows}</table>"

    def _plain_row(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"index": self.index, "id": self.id}
        if self.error is not None:
            return fields | {"error": {"code": self.error.code, "message": str(self.error)}, "key": self.key}
        if self._embed is not None and self.embeddings is not None:
            fields |= row_fields(self._embed, self.embeddings)
            return fields | self.request_columns | {"usage": self.usage.to_dict(), "key": self.key}
        choices = list(map(self._choice_fields, self.choices))
        fields |= choices[0]
        if len(choices) > 1:
            pairs = zip(self.choices, choices, strict=True)
            fields["choices"] = [{"index": choice.index, **shown} for choice, shown in pairs]
            if self.score is None:
                fields["finish_reason"] = self.finish_reason
        if self.prompt_logprobs is not None:
            fields["prompt_logprobs"] = self._scores()
        return fields | self.request_columns | {"usage": self.usage.to_dict(), "key": self.key}

    def _openai_row(self, call: ApiCall) -> dict[str, Any]:
        """A result line of the OpenAI Batch API, with `index` and `key` in addition.

        https://platform.openai.com/docs/api-reference/batch
        """
        status, error, body = 200, None, dict[str, Any]()
        if self._embed is not None and self.embeddings is not None:
            body = api_body(self._embed, self.embeddings, call.model or "cbatch", self.usage.prompt_tokens)
            body |= self.request_columns
        elif self.error is None:
            # `created` is 0: the same row gives the same bytes.
            body = {
                "id": f"{'chatcmpl' if call.is_chat else 'cmpl'}-{self.key}",
                "object": "chat.completion" if call.is_chat else "text_completion",
                "created": 0,
                "model": call.model or "cbatch",
                "choices": [self._openai_choice(choice, is_chat=call.is_chat) for choice in self.choices],
                "usage": self.usage.to_dict(is_openai=True),
            }
            if self.prompt_logprobs is not None and (call.is_chat or not self._params.echo):
                body["prompt_logprobs"] = self._scores()
            body |= self.request_columns
            if self.score is not None:
                body = self._openai_scores(body) if call.top_n is None else self._ranking(body, call.top_n)
            if call.repeated:
                effective = {"temperature": self._params.temperature, "top_p": self._params.top_p}
                body = response_of(body, self.key, json.loads(call.repeated) | effective)
        else:
            error = {"code": self.error.code, "message": str(self.error)}
            status, kind = (500, "server_error") if self.error.code in SERVER_ERRORS else (400, "invalid_request_error")
            body = {"error": {"message": str(self.error), "type": kind, "param": None, "code": self.error.code}}
        return {
            "id": f"batch_req_{self.key}",
            "custom_id": self.id,
            "response": {"status_code": status, "request_id": f"req_{self.key}", "body": body},
            "error": error,
            "index": self.index,
            "key": self.key,
        }

    def _openai_scores(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The answer of vLLM's `/v1/score`, in the request's order: sums of log-probabilities, or scores of a head."""
        data = []
        for choice in sorted(self.choices, key=operator.attrgetter("index")):
            shown = self._choice_fields(choice)
            data.append({"index": choice.index, "object": "score", "score": shown.get("logprob"), **shown})
        shared = {name: value for name, value in body.items() if name != "choices"}
        return shared | {"id": f"score-{self.key}", "object": "list", "data": data}

    def _ranking(self, body: Mapping[str, Any], top_n: int) -> dict[str, Any]:
        """The answer of vLLM's `/v1/rerank`: the best documents first. top_n: how many; 0 for all"""
        results = []
        for choice in self.choices[: top_n or None]:
            shown = self._choice_fields(choice)
            document, score = {"text": shown.pop("text")}, shown.pop("score")
            results.append({"index": choice.index, "document": document, "relevance_score": score, **shown})
        shared = {name: value for name, value in body.items() if name not in ("choices", "object", "created")}
        return shared | {"id": f"rerank-{self.key}", "results": results}

    def _openai_choice(self, choice: Choice, *, is_chat: bool) -> dict[str, Any]:
        reason, logprobs = choice.finish_reason, self._openai_logprobs(choice, is_chat=is_chat)
        if reason == "tool_calls" and self._names_tool:
            reason = "stop"  # the API says so of a function that was named by tool_choice
        shown: dict[str, Any] = {"index": choice.index, "finish_reason": reason, "logprobs": logprobs}
        if is_chat:
            content = choice.text if self.has_text else None
            message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
            if choice.tool_calls:
                message |= {"content": content or None, "tool_calls": [call.to_dict() for call in choice.tool_calls]}
            if choice.reasoning is not None:
                message["reasoning"] = choice.reasoning
            if choice.note is not None:
                message["note"] = choice.note
            shown["message"] = message
        else:
            shown["text"] = choice.text if self.has_text else ""
        if choice.closed:
            shown["closed"] = True
        return shown | columns.of_output(choice, self._columns)

    def _choice_fields(self, choice: Choice) -> dict[str, Any]:
        if choice.score is not None:
            return {"text": choice.text if self.has_text else None, **choice.score.to_dict()}
        fields: dict[str, Any] = {
            "text": choice.text if self.has_text else None,
            "finish_reason": choice.finish_reason,
            **({"reasoning": choice.reasoning} if choice.reasoning is not None else {}),
            **({"tool_calls": [call.to_dict() for call in choice.tool_calls]} if choice.tool_calls else {}),
            **({"stop_reason": choice.stop_reason} if choice.stop_reason is not None else {}),
            **({"closed": True} if choice.closed else {}),
            **({"note": choice.note} if choice.note is not None else {}),
            **columns.of_output(choice, self._columns),
        }
        return fields | ({"logprobs": {"content": _tokens(choice.logprobs)}} if choice.logprobs is not None else {})

    def _scores(self) -> dict[str, Any]:
        scores = self.prompt_logprobs or ()
        total = math.fsum(max(one.logprob, MIN_LOGPROB) for one in scores if one.logprob is not None)
        return {"sum": round(total, 5), "content": _tokens(scores)}

    def _openai_logprobs(self, choice: Choice, *, is_chat: bool) -> dict[str, Any] | None:
        if choice.logprobs is None:
            return None
        if is_chat:
            return {"content": _tokens(choice.logprobs), "refusal": None}
        scored = [*((self.prompt_logprobs or ()) if self._params.echo else ()), *choice.logprobs]
        decoder, length, offsets = codecs.getincrementaldecoder("utf-8")("replace"), 0, []
        for one in scored:
            offsets.append(length)
            if one.in_text:
                length += len(one.token) if one.data is None else len(decoder.decode(one.data))
        return {
            "tokens": [_token_name(one) for one in scored],
            # The first token of a prompt has no log-probability. The API gives null for it, in both lists.
            "token_logprobs": [_rounded(one.logprob) for one in scored],
            "top_logprobs": [
                {_token_name(top): _rounded(top.logprob) for top in one.top} if one.logprob is not None else None
                for one in scored
            ],
            "text_offset": offsets,
        }


def failure_sentence(num_failed: int, total: int, unit: str, first: RequestError) -> str:
    return f"{num_failed:,} of {format_count(total, unit)} failed; the first: {first}"


class Completions(list[Completion]):
    """The results of several prompts, in their order."""

    def raise_for_errors(self) -> Completions:
        """Returns itself. Raises RequestError, with the code of the first error, if any has failed."""
        if errors := [one.error for one in self if one.error is not None]:
            raise RequestError(errors[0].code, failure_sentence(len(errors), len(self), "prompt", errors[0]))
        return self

    def __repr__(self) -> str:
        shown = [repr(one) for one in self[:MOST_SHOWN]]
        more = [f"… {len(self) - MOST_SHOWN:,} more"] if len(self) > MOST_SHOWN else []
        return f"[{', '.join(shown + more)}]"


@dataclass(frozen=True, slots=True)
class Score:
    """How likely the model finds a text.

    logprob:    sum of the log-probabilities of its tokens; nan if there is an error
    num_tokens: how many of them were scored
    is_greedy:  whether greedy sampling would have given these tokens
    tokens:     the tokens that were scored; of a row, only if log-probabilities are asked for
    error:      why it could not be scored, or None
    """

    logprob: float
    num_tokens: int = 0
    is_greedy: bool = False
    tokens: Sequence[TokenLogprob] = field(default=(), repr=False)
    error: RequestError | None = None

    @property
    def rank(self) -> float:
        """By which choices are sorted, the highest one first."""
        return self.logprob

    @property
    def mean(self) -> float:
        """The mean log-probability of a token; nan if there is an error."""
        return self.logprob / max(self.num_tokens, 1)

    @property
    def perplexity(self) -> float:
        """The exponential of the mean negative log-probability of a token; nan if there is an error."""
        return math.exp(-self.mean)

    def to_dict(self) -> dict[str, Any]:
        """The fields of a score row."""
        figures = {"logprob": round(self.logprob, 5), "mean_logprob": round(self.mean, 5)}
        details = {"logprobs": {"content": _tokens(self.tokens)}} if self.tokens else {}
        return figures | {"num_tokens": self.num_tokens, "is_greedy": self.is_greedy} | details


@dataclass(frozen=True, slots=True)
class Classification:
    """The findings of a model's classification head about a text.

    labels: their names, as in the model's config.json
    scores: of each label, behind the model's activation
    logits: of each label, as the head gives them
    """

    labels: Sequence[str]
    scores: Sequence[float]
    logits: Sequence[float]

    @property
    def label(self) -> str:
        """The likeliest label."""
        return self.labels[self.logits.index(max(self.logits))]

    @property
    def score(self) -> float:
        """The score of the likeliest label, or of the only one."""
        return self.scores[self.logits.index(max(self.logits))]

    @property
    def rank(self) -> float:
        """By which choices are sorted, the highest one first: texts with several labels keep their order."""
        return self.logits[0] if len(self.logits) == 1 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """The fields of a score row."""
        figures = {name: dict(zip(self.labels, getattr(self, name), strict=True)) for name in ("scores", "logits")}
        return {"label": self.label, "score": self.score, **figures}


def _question(request: Request) -> Any:
    messages = request.messages or ()
    if len(messages) == 1 and messages[0].get("role") == "user" and not request.tools:
        return messages[0].get("content")
    return request.prompt or None


def _choice_of(fields: Mapping[str, Any]) -> Choice:
    index = fields.get("index", 0) if "key" not in fields else 0
    if "mean_logprob" in fields:
        tokens = _logprobs_of(fields["logprobs"]["content"]) if "logprobs" in fields else ()
        score = Score(fields["logprob"], fields["num_tokens"], fields["is_greedy"], tokens)
        return Choice(index=index, text=fields["text"] or "", score=score)
    if "logits" in fields:
        logits = fields["logits"]
        found = Classification([*logits], [*fields["scores"].values()], [*logits.values()])
        return Choice(index=index, text=fields["text"] or "", score=found)
    message = fields.get("message", fields)
    calls = [(call["function"], call["id"]) for call in message.get("tool_calls", ())]
    logprobs = fields.get("logprobs")
    return Choice(
        index=index,
        text=message.get("content" if "message" in fields else "text") or "",
        reasoning=message.get("reasoning"),
        tool_calls=tuple(ToolCall(function["name"], function["arguments"], name) for function, name in calls),
        finish_reason=fields["finish_reason"],
        stop_reason=fields.get("stop_reason"),
        closed=fields.get("closed", False),
        note=message.get("note"),
        token_ids=fields.get("token_ids", ()),
        logprobs=_logprobs_of(logprobs["content"]) if logprobs is not None and "content" in logprobs else None,
    )


def _logprobs_of(content: Sequence[Mapping[str, Any]]) -> list[TokenLogprob]:
    return [
        TokenLogprob(
            one["token"],
            -1,
            one["logprob"],
            bytes(one["bytes"]) if one["bytes"] is not None else None,
            tuple(_logprobs_of(one.get("top_logprobs", ()))),
        )
        for one in content
    ]


def _tokens(logprobs: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    return [one.to_dict() | {"top_logprobs": [top.to_dict() for top in one.top]} for one in logprobs]


def _token_name(one: TokenLogprob) -> str:
    """The text of a token, or its bytes in OpenAI's notation if it is only a part of a character."""
    if one.data is None or "\ufffd" not in one.token:
        return one.token
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in one.data)


def _rounded(logprob: float | None) -> float | None:
    """Rounded to five places, because most further ones depend on which rows ran beside this one."""
    return round(max(logprob, MIN_LOGPROB), 5) if logprob is not None else None


def _shown(name: str, output: Choice | Completion, **others: Any) -> str:
    parts = {
        "text": repr(_shorten(output.text)),
        "reasoning": output.reasoning is not None and repr(_shorten(output.reasoning)),
        "tool_calls": output.tool_calls and [_shorten(str(call)) for call in output.tool_calls],
        "finish_reason": repr(output.finish_reason),
    }
    return f"{name}({', '.join(f'{name}={value}' for name, value in (parts | others).items() if value)})"


def _shorten(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:199]}…"


def _html_of(choice: Choice) -> str:
    parts = [f"<i>{html.escape(choice.reasoning)}</i>"] if choice.reasoning is not None else []
    parts += [html.escape(choice.text)] if choice.text else []
    parts += [f"<code>{html.escape(str(call))}</code>" for call in choice.tool_calls]
    return "<div style='white-space:pre-wrap'>" + "<br>".join(parts) + "</div>"
