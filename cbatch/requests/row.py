"""An input row: what a line asks for, and the checks that all forms of rows share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cbatch.base.errors import RequestError
from cbatch.base.params import with_overrides
from cbatch.base.strict_json import json_type
from cbatch.requests.param_names import TEMPLATE_FIELDS, intended_name, own_params, translate
from cbatch.text.tool_calls import ToolChoice, check_tools

MAX_PRIORITY = 2**31
"""Leaves room for more urgent requests: those of a chat that runs rows in the background."""


@dataclass(frozen=True, slots=True)
class ApiCall:
    """What an OpenAI Batch request asks for: a chat or a text completion, of which model."""

    is_chat: bool
    model: str | None


@dataclass(slots=True)
class InputRow:
    """One input row. Exactly one of `messages`, `prompt` and `prompt_token_ids` is set, unless `error` is.

    index:  0-based number of the line in the input, or of the prompt in a call
    where:  where the row stands, for messages: “line 3”; empty if that goes without saying
    system: system message of a prompt that has none
    tools:  functions that the model may call
    choice: what the model must call; None if it need not call any
    tool_rounds: how often what the model calls is run; 0 gives the calls as the result
    tries:  how many tries earlier runs have given it
    validation: how its result is validated, for its key (`Validation.identity`)
    max_calls: most tool calls of an output that count; None for all
    template: fields of TEMPLATE_FIELDS that the row sets
    params: sampling parameters that the row sets
    extra:  other columns, which are copied to the result
    call:   set if the row is an OpenAI Batch request, so that its result has that form too
    """

    index: int
    where: str = ""
    id: str | int | float | None = None
    messages: list[dict[str, Any]] | None = None
    prompt: str | None = None
    prompt_token_ids: list[int] | None = None
    raw: bool = False
    system: str | None = None
    tools: list[dict[str, Any]] | None = None
    choice: ToolChoice | None = None
    tool_rounds: int = 0
    tries: int = 0
    validation: tuple[object, ...] = ()
    max_calls: int | None = None
    template: dict[str, Any] = field(default_factory=dict)
    params: dict[str, Any] = field(default_factory=dict)
    priority: int = 0
    extra: dict[str, Any] = field(default_factory=dict)
    call: ApiCall | None = None
    error: RequestError | None = None

    def invalid(self, message: str, code: str = "invalid_row") -> RequestError:
        """An error that says where the row stands."""
        return RequestError(code, f"{self.where}: {message}" if self.where else message)

    def located(self, error: RequestError) -> RequestError:
        """The same error, saying where the row stands."""
        return self.invalid(str(error), error.code) if self.where else error

    def set_params(self, fields: Mapping[str, Any], *, carries_refused: bool = False) -> None:
        """Sets sampling parameters and template fields by whatever names they have; null means not given.

        carries_refused: leave out what is not available here, instead of refusing it
        """
        try:
            made = translate(fields, carries_refused=carries_refused)
        except RequestError as error:
            raise self.located(error) from None
        self.template = {name: made.pop(name) for name in TEMPLATE_FIELDS if name in made}
        self.params = made

    def set_defaults(self, params: Mapping[str, Any]) -> None:
        """Sets sampling parameters that the row does not set itself. Does not raise, as the row's `error` says more."""
        try:
            given, template = own_params(params)
        except RequestError as error:
            self.error = self.error or self.located(error)
            return
        self.params = with_overrides(given, self.params)
        kwargs, own = template.get("chat_template_kwargs"), self.template.get("chat_template_kwargs")
        self.template = template | self.template
        if isinstance(kwargs, Mapping) and isinstance(own, Mapping):
            self.template["chat_template_kwargs"] = {**kwargs, **own}

    def set_tools(self, fields: Mapping[str, Any]) -> None:
        """Sets the tools that the model may call, unless `tool_choice` is `none`, and what it must call."""
        choice, asked = fields.get("tool_choice"), fields.get("tools")
        try:
            tools = check_tools(asked) if asked is not None else []
        except RequestError as error:
            raise self.located(error) from None
        self.tools = tools if tools and choice != "none" else None
        if choice not in (None, "auto", "none"):
            self.choice = self._tool_choice(choice, tools)
        if not self.typed_field(fields, "parallel_tool_calls", bool, True):
            self.max_calls = 1

    def _tool_choice(self, choice: Any, tools: Sequence[Mapping[str, Any]]) -> ToolChoice:
        kind = choice.get("type") if isinstance(choice, dict) else None
        if kind == "allowed_tools":
            raise self.invalid("tool_choice allowed_tools is not available: give only the tools that are allowed")
        function = choice.get("function") if kind == "function" else None
        name = function.get("name") if isinstance(function, dict) else None
        if choice != "required" and not isinstance(name, str):
            form = '{"type": "function", "function": {"name": ...}}'
            raise self.invalid(f"tool_choice must be auto, none, required or {form}")
        if not tools:
            raise self.invalid("tool_choice forces a call, but there are no tools")
        if name is not None and all(tool["function"]["name"] != name for tool in tools):
            raise self.invalid(f"tool_choice names {name!r}, which is not one of the tools")
        return ToolChoice(name)

    def set_messages(self, value: Any) -> None:
        if not isinstance(value, list) or not value:
            raise self.invalid("messages must be a list of at least one message")
        self.messages = []
        for number, message in enumerate(value, start=1):
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise self.invalid(f"message {number} must be an object with a role and content")
            content = message.get("content")
            has_calls = message["role"] == "assistant" and bool(message.get("tool_calls"))
            self.messages.append(
                {**message, "content": "" if content is None and has_calls else self._content(number, content)}
            )

    def set_prompt(self, value: Any) -> None:
        if value == "":
            raise self.invalid("prompt is empty")
        if not isinstance(value, str):
            has_ids = isinstance(value, list) and value and all(type(token) is int for token in value)
            hint = "; token ids go into prompt_token_ids" if has_ids else ""
            raise self.invalid(f"prompt must be a string, not {json_type(value)}{hint}")
        self.prompt = value

    def set_token_ids(self, value: Any) -> None:
        if not isinstance(value, list) or not value or any(type(token) is not int for token in value):
            raise self.invalid("prompt_token_ids must be a list of at least one whole number")
        self.prompt_token_ids = value

    def set_priority(self, fields: Mapping[str, Any]) -> None:
        self.priority = self.typed_field(fields, "priority", int, 0)
        if abs(self.priority) > MAX_PRIORITY:
            raise self.invalid(f"priority must be from -{MAX_PRIORITY} to {MAX_PRIORITY}")

    def typed_field(self, fields: Mapping[str, Any], name: str, wanted: type, default: Any) -> Any:
        """The value of a field, or the default if it is absent or null. Raises RequestError if it has another type."""
        value = fields.get(name)
        if value is None:
            return default
        if type(value) is not wanted:
            words = {bool: "true or false", int: "a whole number", str: "a string", dict: "an object"}[wanted]
            raise self.invalid(f"{name} must be {words}, not {json_type(value)}")
        return value

    def check_spelling(self, names: Iterable[str], known: Iterable[str]) -> None:
        """Refuses a column whose name resembles that of a parameter. Raises RequestError."""
        advice = " (--allow-unknown carries it along)" if self.where else ""
        for name in names:
            if (meant := intended_name(name, known)) is not None:
                raise self.invalid(
                    f"unknown parameter {name!r}; did you mean {meant!r}?{advice}",
                    "unknown_parameter",
                )

    def _content(self, number: int, value: Any) -> str:
        """The text of one message, with its text parts joined."""
        if isinstance(value, str):
            return value
        if not isinstance(value, list):
            raise self.invalid(f"content of message {number} must be text, not {json_type(value)}")
        for part in value:
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise self.invalid(f"message {number} has a content part that is not text")
        return "".join(part["text"] for part in value)


PROMPT_FIELDS = {
    "messages": InputRow.set_messages,
    "prompt": InputRow.set_prompt,
    "prompt_token_ids": InputRow.set_token_ids,
}
"""Fields that hold a prompt, and what reads them; a row has exactly one."""
