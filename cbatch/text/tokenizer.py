"""Turns text, or messages through the model's chat template, into token ids."""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache, partial
from itertools import chain
from typing import Any, Literal

from cbatch.base.chat_template_options import DEFAULT_TEMPLATE, TemplateOptions, check_variables
from cbatch.base.errors import RequestError, invalid_row
from cbatch.base.params import SamplingParams
from cbatch.base.request import ImageTexts
from cbatch.schedule.limits import too_long_for
from cbatch.text.backend import Encoded, TextTokenizer
from cbatch.text.detokenizer import IncrementalDetokenizer
from cbatch.text.earlier_calls import OBJECT, PROBE_TOOL, CallForm, call_forms, is_refusal, with_calls
from cbatch.text.replies.declaration import ReplyFormat
from cbatch.text.replies.formats import find_format, reply_formats
from cbatch.text.template_renderer import TemplateRenderer

Message = Mapping[str, Any]
"""`{"role": ..., "content": ...}` with text content, which a message with tool calls may lack."""

Prompt = str | Sequence[int] | Mapping[str, Sequence[Message]]
"""Text, token ids, or a conversation: `{"messages": [{"role": "user", "content": "Hi"}]}`, optionally with `tools`."""

CLOSING_SENTENCE = "\n\nI have thought for long enough, so I answer now."
"""The end of reasoning that its budget ends."""

ThinkingPlace = Literal["before", "inside", "after"]
"""Before its reasoning, which may not come; inside it; or past it."""

NUM_OPENING_TOKENS = 12
"""Last tokens among which a tag of reasoning is looked for; the longest take about half as many."""

CHARACTERS_PER_TOKEN, SPARE_CHARACTERS, SPARE_TOKENS = 6, 4096, 256
"""How much of a text is encoded first: enough that ordinary text has more tokens than the context."""


class ChatTokenizer:
    """A model's tokenizer and chat template; `templates` is a dictionary by name if the model has several.

    Special tokens that someone writes into a message stay text. Only those of the template itself are special.
    """

    def __init__(self, tokenizer: TextTokenizer, reply_format: str = "auto") -> None:
        """reply_format: the name of what the model writes (see `REPLY_FORMATS`); `auto`: what its template shows"""
        self._tokenizer = tokenizer
        self.chosen_format = "" if reply_format == "auto" else reply_format
        self.backend = tokenizer.backend
        self.templates = tokenizer.chat_template
        self.token_bytes = self.backend.bytes_of
        self.visible_tokens = lru_cache(maxsize=2)(self._visible_tokens)
        self.bad_word_ids = lru_cache(maxsize=256)(self._bad_word_ids)
        self._call_forms = lru_cache(maxsize=4)(self._find_call_forms)
        added = self.backend.get_added_tokens_decoder()
        eos = tokenizer.special_tokens.get("eos_token")
        self.eos_id = next((number for number, token in added.items() if token.content == eos), None)
        self.special_ids = frozenset(number for number, token in added.items() if token.special)
        self._special = sorted((added[number].content for number in self.special_ids), key=len, reverse=True)
        self._renderer = TemplateRenderer()

    @cached_property
    def _special_pattern(self) -> re.Pattern[str]:
        """Of special tokens, of which some models have thousands."""
        return re.compile("|".join(map(re.escape, self._special)) or r"(?!)")

    @property
    def chat_template(self) -> str | None:
        """The template's source; of several templates, the default one."""
        return self.templates.get("default") if isinstance(self.templates, dict) else self.templates

    def try_template(self) -> None:
        """Tries the chat template, so that one that never ends is found at the start. Raises ModelError."""
        if self.chat_template:
            self._renderer.try_out(self.chat_template)

    @property
    def template_source(self) -> str:
        """The source of all of the model's templates; empty if it has none."""
        return "\n".join(self.templates.values()) if isinstance(self.templates, dict) else self.templates or ""

    @cached_property
    def reply_format(self) -> ReplyFormat:
        """The form of the model's replies. All of its templates count, such as one of its own for tools."""
        if self.chosen_format:
            return reply_formats()[self.chosen_format]
        return find_format(self.template_source, self._special) if self.template_source else reply_formats()["none"]

    @cached_property
    def reasoning_end(self) -> Sequence[int]:
        """The tokens that close reasoning whose budget has ended, up to the answer; empty if the model has none."""
        reasoning = self.reply_format.reasoning
        text = "" if reasoning is None else CLOSING_SENTENCE + reasoning.closing_text
        return self.backend.encode(text, add_special_tokens=False).ids

    def _visible_tokens(self, *, with_calls: bool) -> tuple[str, ...]:
        """Special tokens that have to stay in the text of an output, since its reply format has them.

        Without calls it keeps their tags out of the text.
        """
        return tuple(sorted(set(self._special_pattern.findall(self.reply_format.markup(with_calls=with_calls)))))

    @property
    def first_id(self) -> int | None:
        """The token before the first of a text: BOS, or else EOS. None if the model names neither."""
        names = self._tokenizer.special_tokens
        name = names.get("bos_token") or names.get("eos_token")
        return self.backend.token_to_id(name) if name else None

    @property
    def takes_tools(self) -> bool:
        """Whether any of the model's templates mentions tools."""
        return "tools" in self.template_source

    @property
    def template_has_clock(self) -> bool:
        """Whether the template may write the date into the prompt."""
        return "strftime_now" in (self.chat_template or "")

    def encode(self, text: str, *, context: int | None = None) -> list[int]:
        """Token ids of plain text, with BOS if the tokenizer adds it, but never twice.

        context: refuses text that has far more tokens, before all of them are made

        Raises RequestError (`prompt_too_long`).
        """
        ids, bos = self._encode(text, context).ids, self._tokenizer.bos_id
        return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids

    def token_starts(self, text: str, most: int = 2**16) -> Sequence[int]:
        """The character at which each token of a text begins.  most: characters at once, since an encoding is large"""
        starts, begin = array("q"), 0
        longest = len(self._special[0]) if self._special else 0
        while begin < len(text):
            end = min(begin + most, len(text))
            if end < len(text):
                space = max(text.rfind(" ", begin + 1, end), text.rfind("\n", begin + 1, end))
                end = space if space > 0 else end
                specials = self._special_pattern.finditer(text, max(end - longest, begin + 1), end + longest)
                end = next((one.start() for one in specials if one.start() < end < one.end()), end)
            offsets = self.backend.encode(text[begin:end], add_special_tokens=False).offsets
            starts.extend(begin + start for start, _ in offsets)
            begin = end
        return starts

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template: TemplateOptions = DEFAULT_TEMPLATE,
        answer: str = "",
        images: ImageTexts | None = None,
        context: int | None = None,
    ) -> list[int]:
        """Token ids of a conversation through the chat template, up to the assistant's turn.

        tools:    functions that the model may call (see `check_tools`); a template without tools ignores them
        template: the date, further variables, and whether the last message is continued instead
        answer:   the beginning of the assistant's turn, which the model is to continue
        images:   the texts that stand for the images and videos of messages, which are parts without a text
        context:  see `encode`

        Raises RequestError: `template_error` if the template refuses the messages, and `prompt_too_long`.
        """
        if not self.chat_template:
            raise RequestError("template_error", "The model has no chat template; give a prompt, not messages.")
        if not isinstance(messages, list | tuple) or not all(isinstance(message, Mapping) for message in messages):
            raise invalid_row("Messages must be a list of objects, each with a role and content.")
        plain, final = with_calls(messages), messages[-1].get("content") if messages else None
        if images is not None:
            messages = [{**message, "content": _parts_of(message.get("content"))} for message in plain]
            plain = with_calls(messages)
        elif not plain or not all(isinstance(message.get("content"), str) for message in plain):
            raise invalid_row("Messages must be a list of at least one, each with text content.")
        if template.continue_final_message:
            if not isinstance(final, str):
                raise invalid_row("continue_final_message needs text content in the last message.")
            if answer:
                raise invalid_row("The last message or an answer can be continued, but not both.")
        others = [[dict(tool) for tool in tools or ()], dict(template.kwargs), answer]
        source, refused = self._template_for(tools), None
        has_calls = any(message.get("tool_calls") for message in plain)
        for form in self._call_forms(source) if has_calls else [OBJECT]:
            parts = [plain if form == OBJECT else with_calls(messages, form), *others]
            try:
                if any(self._special_pattern.search(text) for text in _strings(parts)):
                    return self._encode_with_text_specials(source, parts, template, context, images)
                text, is_begun = self._with_images(self._render(source, parts, template), images)
                return self._encode(text, context, add_special_tokens=not is_begun).ids
            except RequestError as error:
                if not is_refusal(error):
                    raise
                refused = refused or error
        assert refused is not None
        raise refused

    def detokenizer(
        self, prompt: Sequence[int], params: SamplingParams, tags: Sequence[str] = ()
    ) -> IncrementalDetokenizer:
        """Makes the text of an output that follows these prompt tokens.

        tags: special tokens that stay in the text in any case
        """
        hidden = self.special_ids if params.skip_special_tokens else frozenset()
        if tags:
            hidden -= {self.backend.token_to_id(tag) for tag in tags}
        return IncrementalDetokenizer(self.backend, prompt, params.stop, hidden)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence of tokens."""
        return str(self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def opens_thinking(self, prompt: Sequence[int], continued: str = "") -> bool:
        """Whether the template has opened the think tag of the answer, so that this begins as reasoning.

        continued: text at the end of the prompt that is the beginning of the answer
        """
        reasoning = self.reply_format.reasoning
        if reasoning is None or self.reply_format.headers:
            return False
        start = continued.strip()
        # No token is shorter than a byte.
        end = self.decode(prompt[-NUM_OPENING_TOKENS - len(continued.encode()) :], skip_special_tokens=False)
        return (end.rpartition(start)[0] if start else end).rstrip().endswith(reasoning.opening)

    def is_thinking_after(self, answer: str, *, opened: bool) -> bool:
        """Whether the model is inside its reasoning after the beginning of an answer.

        opened: the template has opened the think tag (see `opens_thinking`)
        """
        reasoning = self.reply_format.reasoning
        if reasoning is None:
            return False
        if self.reply_format.headers:
            return answer.rfind(reasoning.opening + self.reply_format.header_end) > answer.rfind(reasoning.closing)
        return (opened or answer.lstrip().startswith(reasoning.opening)) and reasoning.closing not in answer

    def thinking_place(self, token_ids: Sequence[int], opened: bool) -> ThinkingPlace:
        """Where an output stands that was not past its reasoning one token before.

        opened: it is known to be inside its reasoning, which the prompt or earlier tokens have opened; the latest
                tokens suffice then
        """
        made = self.reply_format
        if made.reasoning is None:
            return "after"
        if not opened:
            start = self.decode(token_ids[:NUM_OPENING_TOKENS], skip_special_tokens=False).lstrip()
            end = made.header_end or made.reasoning.opening
            opening, is_whole, _ = start.partition(end)
            if not is_whole:
                may_open = end.startswith(start) or (made.headers and len(token_ids) < NUM_OPENING_TOKENS)
                return "before" if may_open else "after"
            if (made.reasoning.opening not in opening) if made.headers else opening:
                return "after"
        end = self.decode(token_ids[-NUM_OPENING_TOKENS:], skip_special_tokens=False)
        return "after" if made.reasoning.closing in end else "inside"

    def num_thought(self, token_ids: Sequence[int]) -> int:
        """Tokens of an output with reasoning up to the end of the closing think tag; all, if it does not come."""
        tag = self.reply_format.reasoning.closing if self.reply_format.reasoning is not None else ""
        number, text_of = self.backend.token_to_id(tag), partial(self.decode, skip_special_tokens=False)
        most = list[Any](token_ids).index(number) + 1 if number in token_ids else len(token_ids)
        if tag not in text_of(token_ids[: most - 1]):  # else the model has spelt it in several tokens
            return most
        return 1 + bisect_left(range(1, most), True, key=lambda count: tag in text_of(token_ids[:count]))

    def _encode(self, text: str, context: int | None, *, add_special_tokens: bool = True) -> Encoded:
        """Encodes a text; first its beginning, if it is long for the context, since an encoding is large.

        What follows a text can change its last tokens, but not make a quarter of them disappear.
        """
        if context is not None:
            length = CHARACTERS_PER_TOKEN * context + SPARE_CHARACTERS
            while length < len(text):
                beginning = self.backend.encode(text[:length], add_special_tokens=add_special_tokens)
                if len(beginning.ids) > 1.25 * context + SPARE_TOKENS:
                    raise too_long_for(context, f"more than {context}")
                length *= 2
        return self.backend.encode(text, add_special_tokens=add_special_tokens)

    def _bad_word_ids(self, words: tuple[str, ...]) -> list[list[int]]:
        """Token sequences that spell these words, at the start of a text and after a space."""
        texts = [text for word in words for text in (word, f" {word}")]
        spelt = [tuple(self.backend.encode(text, add_special_tokens=False).ids) for text in texts]
        return [list(ids) for ids in dict.fromkeys(spelt) if ids]

    def _template_for(self, tools: object) -> str:
        template = self.templates
        if isinstance(template, dict):
            template = template["tool_use" if tools and "tool_use" in template else "default"]
        return template or ""

    def _find_call_forms(self, source: str) -> list[CallForm]:
        """The forms in which a template may take earlier tool calls. Raises RequestError if it cannot be run."""
        return call_forms(lambda messages: self._render(source, [messages, [PROBE_TOOL], {}, ""], DEFAULT_TEMPLATE))

    def _render(self, source: str, parts: list[Any], options: TemplateOptions) -> str:
        messages, tools, variables, answer = parts
        special_tokens = self._tokenizer.special_tokens
        check_variables(variables, frozenset(special_tokens))
        try:
            text = self._renderer.render(
                source,
                messages,
                tools=tools,
                special_tokens=special_tokens,
                today=options.today,
                variables=variables,
                add_generation_prompt=options.begins_new_message,
                continue_final_message=options.continue_final_message,
            )
            return text + str(answer)
        except OSError as error:
            raise RequestError("internal_error", f"The chat template cannot be rendered: {error}.") from error
        except Exception as error:  # a template is a program of the model's author and may raise anything
            raise RequestError("template_error", f"The chat template refused the messages: {error}") from error

    def _with_images(self, rendered: str, images: ImageTexts | None) -> tuple[str, bool]:
        """A rendered conversation with what stands for each image, and whether the tokenizer adds nothing to it.

        Raises RequestError if the template lacks some.
        """
        if images is None:
            return rendered, True
        parts, count = re.split(f"({'|'.join({*map(re.escape, images.markers)})})", rendered), len(images.texts)
        if parts[1::2] != list(images.markers):
            shown = f"{len(parts) // 2} of {count} images" if len(parts) // 2 != count else "images in another order"
            raise RequestError("template_error", f"The chat template shows {shown} of the conversation.")
        parts[1::2] = images.texts
        bos = self._tokenizer.special_tokens.get("bos_token")
        text = images.before + "".join(parts)
        return text, not images.has_bos or (bool(bos) and rendered.startswith(str(bos)))

    def _encode_with_text_specials(
        self, source: str, parts: list[Any], options: TemplateOptions, context: int | None, images: ImageTexts | None
    ) -> list[int]:
        """Encodes messages, tools, variables or the beginning of an answer with special tokens written in them.

        A separator, a private-use character that occurs nowhere in them, is inserted after the first character of each
        special token, so that the tokenizer does not recognize it. The tokens of the separators are then left out.
        """
        written = list(_strings(parts))
        characters = set().union(*written)
        separators = (chr(code) for code in range(0xE000, 0xF8FF) if chr(code) not in characters)
        separator = next((one for one in separators if not any(_escape(one) in text for text in written)), None)
        if separator is None:
            raise invalid_row("The messages hold every private-use character of Unicode.")
        hide = partial(self._special_pattern.sub, lambda match: match[0][0] + separator + match[0][1:])
        # A template that prints an object as Python does, or as JSON in ASCII, prints the separator as an escape.
        rendered = self._render(source, _map_strings(parts, hide), options).replace(_escape(separator), separator)
        rendered, is_begun = self._with_images(rendered, images)
        encoding = self._encode(rendered, context, add_special_tokens=not is_begun)
        pairs = zip(encoding.ids, encoding.offsets, strict=True)
        return [token for token, (start, stop) in pairs if rendered[start:stop] != separator]


def _parts_of(content: Any) -> Any:
    """The content of a message as a list of parts, as templates take it beside images."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _escape(separator: str) -> str:
    return f"\\u{ord(separator):04x}"


def _strings(value: Any) -> Iterator[str]:
    """Every string of a JSON value, and every key: people also write the keys of tools and arguments."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for item in value if isinstance(value, list) else chain(value, value.values()):
            yield from _strings(item)


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_map_strings(item, change) for item in value]
    if isinstance(value, dict):
        return {_map_strings(key, change): _map_strings(item, change) for key, item in value.items()}
    return value
