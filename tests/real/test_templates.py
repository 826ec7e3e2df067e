"""Published chat templates: what they make of tool calls in earlier messages."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from cbatch.base.chat_template_options import TemplateOptions
from cbatch.base.errors import RequestError
from cbatch.text.loading import of_transformers
from cbatch.text.replies.declaration import Reasoning
from cbatch.text.replies.stream import OutputStream
from cbatch.text.tokenizer import ChatTokenizer
from scripts.real_model import TEMPLATES
from tests.support.model_folder import make_tokenizer
from tests.support.real_models import need
from tests.support.samples import sampled
from tests.support.tool_calls import ParsedOutput, streamed

pytestmark = pytest.mark.real

NAMES = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))

ARGUMENTS: list[dict[str, Any]] = [
    {"query": 'say "it\'s"', "place": "Zürich", "nested": {"ü": [1, 2.5, True, "x"], "sub": {"k": "v"}}},
    {},
]
RESULTS = ("RESULT-A", "RESULT-B")

REFUSALS = {
    # They use what the interpreter of llama.cpp has, and transformers has not.
    "Kimi-K2-Instruct": "access to attribute 'append' of 'list' object is unsafe",
    "Kimi-K2-Thinking": "access to attribute 'append' of 'list' object is unsafe",
    "llama-cpp-deepseek-r1": "generator is not JSON serializable",
    # They want the tools under another name, or a system message nowhere.
    "fireworks-ai-llama-3-firefunction-v2": "'functions' is undefined",
    "google-gemma-2-2b-it": "System role not supported",
}
"""The words of templates that refuse the conversation, in any form of it."""

OWN_NOTATION = ("MiniMax-M3", "google-gemma-4")
"""Templates that write nested objects in a notation of their own."""

SINGLE = ("GigaChat3", "meta-llama-Llama-3", "openai-gpt-oss")
"""Templates that show one call of a message."""

NOT_READ = {
    "LFM2.5-8B-A1B": "it writes text between single quotes without escaping those in it",
    "MiniMax-M3": "it does not tell numbers of no declared type from text",
}
"""Templates whose own calls are not read as they were, and why."""

END = re.compile(
    r"(?:<\|(?:START_OF_TURN_TOKEN|END_OF_TURN_TOKEN|eom_id|eot_id|im_end|call|end|end_of_msg|tool_response)\|?>"
    r"|<turn\|>|<SPECIAL_12>|<｜(?:hy_eos:opensource|end▁of▁sentence|Assistant)｜>|\n)+\Z"
)
"""Tokens that end a reply, and so are no part of its text."""

WITHOUT_CALLS = frozenset(
    "HuggingFaceTB-SmolLM3-3B LFM2-8B-A1B LFM2.5-Instruct deepseek-ai-DeepSeek-R1-Distill-Llama-8B "
    "ibm-granite-granite-3.3-2B-Instruct llama-cpp-rwkv-world microsoft-Phi-3.5-mini-instruct".split()
)
"""Templates that leave out the calls of earlier messages."""


def tool(name: str, properties: dict[str, Any]) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(properties)[:1]}
    return {"type": "function", "function": {"name": name, "description": "does", "parameters": schema}}


PLAIN = {"type": "string", "description": "it"}
NESTED = {"type": "object", "description": "it", "additionalProperties": {"type": "string"}}
TOOLS = [tool("look_up", {"query": PLAIN, "place": PLAIN, "nested": NESTED}), tool("now", {})]


def calls(*, as_text: bool, ids: tuple[str, ...]) -> list[dict[str, Any]]:
    texts = [json.dumps(one, ensure_ascii=False) if as_text else one for one in ARGUMENTS]
    functions = [{"name": name, "arguments": text} for name, text in zip(("look_up", "now"), texts, strict=True)]
    named: list[Any] = [{"id": name} for name in ids] or [{}, {}]
    return [{**one, "type": "function", "function": each} for one, each in zip(named, functions, strict=True)]


def conversation(
    *, as_text: bool = True, content: Any = "", ids: tuple[str, ...] = ("abcdefgh1", "abcdefgh2"), by: str = "id"
) -> list[dict[str, Any]]:
    """
    content: of the message with calls; ... for none
    by:      what results are named by: `id` or `name`
    """
    called: dict[str, Any] = {"role": "assistant", "content": content}
    if content is ...:
        del called["content"]
    names: list[dict[str, str]] = [{"name": name} for name in ("look_up", "now")]
    if by == "id":
        names = [{"tool_call_id": name} for name in ids]
    return [
        {"role": "system", "content": "SYSTEM"},
        {"role": "user", "content": "QUESTION"},
        {**called, "tool_calls": calls(as_text=as_text, ids=ids)},
        *({"role": "tool", **name, "content": text} for name, text in zip(names, RESULTS, strict=True)),
        {"role": "assistant", "content": "ANSWER"},
    ]


def tokenizer_of(name: str) -> ChatTokenizer:
    source = (need(TEMPLATES) / f"{name}.jinja").read_text()
    return ChatTokenizer(replace(of_transformers(make_tokenizer()), chat_template=source))


def rendered(tokenizer: ChatTokenizer, messages: list[dict[str, Any]], *, opens_reply: bool = True) -> str:
    template = TemplateOptions(add_generation_prompt=opens_reply)
    return tokenizer.decode(tokenizer.encode_chat(messages, tools=TOOLS, template=template), skip_special_tokens=False)


@pytest.mark.parametrize("name", sampled(NAMES, 12) if NAMES else ["none"])
def test_earlier_calls(name: str) -> None:
    """Guards arguments of earlier calls: each template shows them as they are, whatever form the row has."""
    tokenizer = tokenizer_of(name)
    if name in REFUSALS:
        with pytest.raises(RequestError, match=re.escape(REFUSALS[name])):
            rendered(tokenizer, conversation())
        return
    text = rendered(tokenizer, conversation())
    if name in WITHOUT_CALLS:
        assert "look_up" not in text.rpartition("QUESTION")[2]
        return
    shown = text.rpartition("QUESTION")[2]
    parts = ("look_up", *RESULTS, "ANSWER")
    places = [shown.index(part) for part in parts]
    assert places == sorted(places) and places[0] < shown.index("now") < places[2]
    if name.startswith(OWN_NOTATION):
        assert all(leaf in shown for leaf in ('say "it\'s"', "Zürich", "2.5", "true"))
    else:
        assert shows(shown, ARGUMENTS[0]), shown
    different = {
        "objects": conversation(as_text=False),
        "no content": conversation(content=None),
        "content missing": conversation(content=...),
        "by name": conversation(by="name"),
    }
    for what, messages in different.items():
        assert rendered(tokenizer, messages) == text, what
    others = [conversation(ids=("call_1", "call_2")), conversation(ids=(), by="name")]
    others.append([*others[0][:3], *others[0][4:2:-1], others[0][5]])
    for messages in others:
        shown = rendered(tokenizer, messages).rpartition("QUESTION")[2]
        assert [shown.index(part) for part in parts] == sorted(shown.index(part) for part in parts)


def shows(text: str, arguments: dict[str, Any]) -> bool:
    """Whether a text has arguments as a JSON object, or each of them after its name as text or as JSON."""
    decoder = json.JSONDecoder()
    for begin in (place.start() for place in re.finditer(r"\{", text)):
        try:
            if decoder.raw_decode(text, begin)[0] == arguments:
                return True
        except ValueError:
            continue
    for key, value in arguments.items():
        forms = {json.dumps(value, ensure_ascii=False), json.dumps(value, ensure_ascii=False, separators=(",", ":"))}
        after = text.partition(key)[2]
        if not any(form in after for form in ({value} if isinstance(value, str) else set()) | forms):
            return False
    return True


def reply_in(text: str, prompt: str, end: str, tags: Reasoning | None) -> tuple[str, bool]:
    """The part of a conversation that the model has written, and whether its prompt had opened the reasoning.

    end: what stands behind a reply of text

    A template may open a reply in another way than it shows earlier ones. Then it begins with the tag that differs.
    """
    differs = (at for at, (one, other) in enumerate(zip(text, prompt, strict=False)) if one != other)
    shared = text[: next(differs, len(prompt))]
    begin = len(shared) if shared == prompt else max(shared.rfind(end) for end in ">]\n") + 1
    reply = text[begin:].removeprefix("<|CHATBOT_TOKEN|>")
    # Behind its end, some templates repeat an instruction.
    reply = END.sub("", reply.removesuffix(end).partition("<|START_OF_TURN_TOKEN|>")[0])
    if tags is None:
        return reply, False
    return reply, reply.startswith(tags.closing) or (shared == prompt and prompt.rstrip().endswith(tags.opening))


@pytest.mark.parametrize("name", sampled(NAMES, 12, seed=1) if NAMES else ["none"])
def test_calls_are_read_as_they_were_written(name: str, request: pytest.FixtureRequest) -> None:
    """Guards the reader of each format against its template: what this shows of calls gives these calls, however cut.

    They give the same conversation again.
    """
    tokenizer = tokenizer_of(name)
    if name in REFUSALS or name in WITHOUT_CALLS or tokenizer.reply_format.calls is None:
        return
    if name in NOT_READ:
        request.applymarker(pytest.mark.xfail(strict=True, reason=NOT_READ[name]))
    called = calls(as_text=True, ids=("abcdefgh1", "abcdefgh2"))[: 1 if name.startswith(SINGLE) else 2]
    asked = conversation()[1:2]
    text = rendered(tokenizer, [*asked, {"role": "assistant", "tool_calls": called}], opens_reply=False)
    end = rendered(tokenizer, [*asked, {"role": "assistant", "content": "ANSWER"}], opens_reply=False)
    tags = tokenizer.reply_format.reasoning
    reply, is_thinking = reply_in(text, rendered(tokenizer, asked), end.rpartition("ANSWER")[2], tags)

    def read(*parts: str) -> ParsedOutput:
        return streamed(OutputStream(tokenizer.reply_format, is_thinking=is_thinking, tools=TOOLS), parts)

    whole = read(reply)
    found = [(call.name, json.loads(call.arguments)) for call in whole.tool_calls]
    assert found == [("look_up", ARGUMENTS[0]), ("now", {})][: len(called)]
    assert (whole.text.strip(), whole.reasoning) == ("", None)
    assert read(*reply) == whole and all(read(reply[:at], reply[at:]) == whole for at in range(len(reply)))
    again = [
        {"id": given["id"], "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for given, call in zip(called, whole.tool_calls, strict=True)
    ]
    message = {"role": "assistant", "content": whole.text, "tool_calls": again}
    assert rendered(tokenizer, [*asked, message], opens_reply=False) == text
