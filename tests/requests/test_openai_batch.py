"""The OpenAI Batch API's form: its files run unchanged, and the types of the `openai` package accept the results."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from cbatch.api import Engine
from cbatch.base.errors import RequestError
from cbatch.base.params import SamplingParams
from cbatch.base.request import Request, RequestDefaults
from cbatch.batch.line_processor import LineProcessor
from cbatch.batch.lines import Line, RowOptions, parse_line
from cbatch.requests.completion import Completion
from tests.support.command import Command


def call(body: Any, url: str = "/v1/chat/completions", **others: Any) -> dict[str, Any]:
    return {"custom_id": "c-1", "method": "POST", "url": url, "body": body, **others}


def chat(**body: Any) -> dict[str, Any]:
    return call({"model": "gpt-4o-mini", "messages": [{"role": "user", "content": "hi"}], **body})


def text(prompt: Any, **body: Any) -> dict[str, Any]:
    return call({"model": "gpt-3.5-turbo-instruct", "prompt": prompt, **body}, "/v1/completions")


def parse(fields: dict[str, Any], **options: bool) -> Request:
    return parse_line(Line(0, json.dumps(fields).encode()), RowOptions(**options))


EVERYTHING = chat(
    max_completion_tokens=4,
    temperature=1.0,
    top_p=0.9,
    seed=5,
    stop=None,
    n=1,
    logprobs=False,
    top_logprobs=None,
    presence_penalty=0,
    frequency_penalty=0.0,
    logit_bias={},
    response_format={"type": "text"},
    tools=[],
    stream=False,
    user="me",
    metadata={"a": "b"},
    store=False,
    service_tier="auto",
    modalities=["text"],
    parallel_tool_calls=True,
)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> list[dict[str, Any]]:
    """The rows of a run, which resumes give again as they are."""
    rows = [
        EVERYTHING,
        text("two", max_tokens=5),
        text([65, 66, 67], max_tokens=5),
        chat(max_tokens=9, stop=["a", "e"]),
        chat(stream=True),
        chat(temperature=7000),
        call([], custom_id="odd"),
        chat(max_tokens=3, n=2, temperature=1, logprobs=True, top_logprobs=2),
        text("two", max_tokens=2, n=2, logprobs=2, temperature=1),
        text("é😀 hi", max_tokens=0, echo=True, logprobs=1),
    ]
    command = Command(tmp_path_factory.mktemp("openai"), model_folder, rows)
    assert command("-q") == 1
    written = command.data
    for option, kept, again in ((), 10, 0), (("--retry-errors",), 7, 3):
        assert command("-q", "--resume", *option) == 1 and command.data == written
        counts = command.figures()
        assert (counts["rows_kept"], counts["errors_kept"], counts["errors"]) == (kept, 3 - again, again)
    return command.rows()


def test_results_have_the_shape_of_the_batch_api(results: list[dict[str, Any]]) -> None:
    """Guards programs that read result files: ids, status, index and key; errors as we and as the API write them."""
    assert [row["index"] for row in results] == list(range(10))
    assert [row["custom_id"] for row in results] == ["c-1"] * 6 + ["odd"] + ["c-1"] * 3
    assert [row["index"] for row in results if row["error"]] == [4, 5, 6]
    for row in results:
        response, error = row["response"], row["error"]
        assert row["id"] == f"batch_req_{row['key']}" and response["request_id"] == f"req_{row['key']}"
        assert response["status_code"] == (400 if error else 200)
        if error:
            assert error.keys() == {"code", "message"}
            assert response["body"] == {"error": {**error, "type": "invalid_request_error", "param": None}}


def test_what_is_not_the_fault_of_a_request_has_another_status() -> None:
    """Guards clients that send a request again only if the server failed."""
    row = parse(chat())
    for code, status, kind in (("nan_logits", 500, "server_error"), ("prompt_too_long", 400, "invalid_request_error")):
        line = Completion(row, error=RequestError(code, "so")).to_dict()
        assert line["response"]["status_code"] == status and line["response"]["body"]["error"]["type"] == kind


def test_bodies_are_what_the_openai_package_reads(results: list[dict[str, Any]]) -> None:
    """Guards every field of a body against the package's own types, strictly."""
    from openai.types import Completion
    from openai.types.chat import ChatCompletion

    bodies = [copy.deepcopy(row["response"]["body"]) for row in results if not row["error"]]
    # The first token of an echo has nulls, as from the API. The types forbid them; the package does not validate.
    echoed = bodies[-1]["choices"][0]["logprobs"]
    assert echoed["token_logprobs"][0] is echoed["top_logprobs"][0] is None
    echoed.update({name: values[1:] for name, values in echoed.items()})
    for body in bodies:
        kind = ChatCompletion if body["object"] == "chat.completion" else Completion
        read = kind.model_validate(body, strict=True)
        assert read.usage is not None
        assert read.usage.total_tokens == read.usage.prompt_tokens + read.usage.completion_tokens
        assert not set(body) - set(kind.model_fields), "a field that the package does not know"
    of_chat, of_text = "chat.completion", "text_completion"
    kinds = [of_chat, of_text, of_text, of_chat, of_chat, of_text, of_text]
    assert [body["object"] for body in bodies] == kinds
    assert bodies[0]["model"] == "gpt-4o-mini" and bodies[0]["created"] == 0
    assert bodies[0]["choices"][0]["finish_reason"] == "length" and bodies[0]["usage"]["completion_tokens"] == 4
    assert bodies[2]["usage"]["prompt_tokens"] == 3
    assert len({body["id"] for body in bodies}) == len(bodies)


def test_choices_and_logprobs_of_bodies(results: list[dict[str, Any]]) -> None:
    """Guards n, both forms of logprobs, offsets in characters, the scoring of a prompt by echo with max_tokens 0."""
    chatted, told, scored = (row["response"]["body"] for row in results[-3:])
    assert [choice["index"] for choice in chatted["choices"]] == [0, 1] and chatted["usage"]["completion_tokens"] == 6
    for choice in chatted["choices"]:
        content = choice["logprobs"]["content"]
        assert len(content) == 3 and all(len(one["top_logprobs"]) == 2 for one in content)
        assert all(bytes(one["bytes"]).decode(errors="replace") == one["token"] for one in content)
    for choice in told["choices"]:
        assert choice["logprobs"]["tokens"] and len(choice["logprobs"]["token_logprobs"]) == 2
    (choice,) = scored["choices"]
    logprobs = choice["logprobs"]
    assert choice["text"] == "é😀 hi" and logprobs["tokens"][:3] == ["<|bos|>", "bytes:\\xc3", "bytes:\\xa9"]
    assert logprobs["text_offset"] == [0, 0, 0, 1, 1, 1, 1, 2, 3, 4]
    assert logprobs["token_logprobs"][0] is None and all(value < 0 for value in logprobs["token_logprobs"][1:])
    assert logprobs["top_logprobs"][0] is None and all(len(top) == 1 for top in logprobs["top_logprobs"][1:])
    assert scored["usage"]["completion_tokens"] == 0 and choice["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("row", "options", "name", "expected"),
    [
        (chat(), {"logprobs": 2}, "logprobs", 2),
        (chat(logprobs=False), {"logprobs": 2}, "logprobs", None),
        (chat(logprobs=True, top_logprobs=1), {"logprobs": 2}, "logprobs", 1),
        ({"prompt": "a"}, {}, "max_tokens", SamplingParams().max_tokens),
        (chat(), {}, "max_tokens", None),
        ({"prompt": "a"}, {"max_tokens": 7}, "max_tokens", 7),
        (chat(), {"max_tokens": 7}, "max_tokens", 7),
    ],
)
def test_bodies_and_options(row: Any, options: Any, name: str, expected: int | None, engine: Engine) -> None:
    """Guards `logprobs: false` against --logprobs, and the API's default of max_tokens: the rest of the context."""
    builder = LineProcessor(engine.core.input_processor(RequestDefaults(params=options)))
    assert getattr(builder.process(Line(0, json.dumps(row).encode())).params, name) == expected


def test_bodies_become_rows() -> None:
    """Guards prompts, roles and parameters of a body."""
    row = parse(EVERYTHING)
    assert row.error is None and row.messages == [{"role": "user", "content": "hi"}]
    asked = {"max_tokens": 4, "temperature": 1.0, "top_p": 0.9, "seed": 5}
    nothing = SamplingParams().merged(row.given) == SamplingParams().merged(asked)
    assert nothing and row.given["logprobs"] is False
    assert parse(chat(logprobs=True)).given["logprobs"] == 0
    assert parse(chat(logprobs=True, top_logprobs=4)).given["logprobs"] == 4
    developer = parse(chat(messages=[{"role": "developer", "content": "be brief"}]))
    assert developer.messages == [{"role": "system", "content": "be brief"}]
    assert (parse(text("a")).prompt, parse(text("a")).raw) == ("a", True)
    assert parse(text(["a"])).prompt == "a"
    assert parse(text([[1, 2]])).prompt_ids == parse(text([1, 2])).prompt_ids == [1, 2]
    assert parse(chat(verbosity="medium", whim="low", model=5) | {"note": 1}).extra == {"note": 1, "whim": "low"}
    assert row.extra == {}, "bookkeeping of the API is no column"
    assert parse(chat(reasoning_effort="low")).given == {"reasoning_effort": "low"}
    assert parse({"prompt": "a", "body": "of a mail"}).extra == {"body": "of a mail"}
    assert parse({"prompt": "a", "url": "x", "method": "m"}).extra == {"url": "x", "method": "m"}
    assert parse(chat(max_tokens=None, max_completion_tokens=3)).given == {"max_tokens": 3}
    assert parse(chat(max_completion_tokens=3, max_tokens=None)).given == {"max_tokens": 3}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            call({}, "/v1/moderations"),
            "not /v1/moderations",
        ),
        (call({}, url=3), "not a number"),  # type: ignore[arg-type]
        (chat() | {"method": "GET"}, "method must be POST"),
        (chat() | {"custom_id": 3}, "custom_id must be a string"),
        (call("x"), "body must be an object, not a string"),
        (call({}), "messages must be a list"),
        (text("a", chat_template_kwargs={"a": 1}), "chat_template_kwargs is a field of /v1/chat/completions"),
        (chat(logprobs=3), "logprobs must be true or false"),
        (text("a", top_logprobs=3), "top_logprobs is a field of /v1/chat/completions"),
        (text(["a", "b"]), "one prompt"),
        (text(None), "prompt must be a string, not null"),
        (chat() | {"prompt": "a"}, "both body and prompt"),
        (chat(prompt="a"), "this url takes messages, not prompt"),
        ({"custom_id": "x", "method": "POST", "url": "/v1/completions"}, "body must be an object, not null"),
        (chat(max_tokens=3, max_completion_tokens=4), "max_completion_tokens is 4, but another name of it is 3"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], message: str) -> None:
    """Guards against answering something else than what was asked."""
    row = parse(fields)
    assert row.error is not None and row.error.code == "invalid_row" and message in str(row.error)
    assert row.call is not None and row.id == (fields["custom_id"] if isinstance(fields["custom_id"], str) else None)
