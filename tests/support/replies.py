"""A reply in each format, as models of the family write it, and the part of a chat template that shows the format."""

from __future__ import annotations

from typing import Any, NamedTuple

from cbatch.base.outputs import ToolCall
from tests.support.tool_calls import tool

LOOK_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "place": {"type": "string", "maxLength": 8},
        "floor": {"type": "integer", "minimum": 0, "maximum": 99},
        "deep": {"type": "boolean"},
    },
    "required": ["place"],
}
LOOK_TOOLS = [tool("look", LOOK_SCHEMA), tool("now", {"type": "object", "properties": {}})]
ARGUMENTS = '{"place": "a b", "floor": 3, "deep": true}'
CALLS = (ToolCall("look", ARGUMENTS), ToolCall("now", "{}"))


class Reply(NamedTuple):
    """A reply of a model: reasoning, the text `So.`, and CALLS, as far as the format has them.

    shown:     a part of the template
    reasoning: of the written reply; None if it has none
    """

    shown: str
    written: str
    reasoning: str | None = "hm"
    text: str = "So."
    calls: tuple[ToolCall, ...] = CALLS


def _objects(name: str = "name", arguments: str = "arguments") -> str:
    return f'[{{"{name}": "look", "{arguments}": {ARGUMENTS}}}, {{"{name}": "now", "{arguments}": {{}}}}]'


def _tagged(opening: str, parameter: str, closing: str) -> tuple[str, str]:
    """Two calls whose arguments stand between tags, with the places NAME, KEY and VALUE."""
    values = (("place", "a b"), ("floor", "3"), ("deep", "true"))
    written = "".join(parameter.replace("KEY", key).replace("VALUE", value) for key, value in values)
    return opening.replace("NAME", "look") + written + closing, opening.replace("NAME", "now") + closing


def _both(opening: str, closing: str, first: str, second: str) -> str:
    return f"{opening}{first}{closing}\n{opening}{second}{closing}"


_THOUGHT = "<think>\nhm\n</think>\n\nSo.\n"
_JSON = (f'{{"name": "look", "arguments": {ARGUMENTS}}}', '{"name": "now", "arguments": {}}')
_XML = _tagged("<function=NAME>\n", "<parameter=KEY>\nVALUE\n</parameter>\n", "</function>")
_SEED = _tagged("<function=NAME>\n", "<parameter=KEY>VALUE</parameter>\n", "</function>")
_GLM = _tagged("NAME\n", "<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n", "")
_INVOKE = _tagged('<invoke name="NAME">\n', '<parameter name="KEY">VALUE</parameter>\n', "</invoke>\n")
_HY = [part.replace(">", ":opensource>") for part in ("<tool_call>", "</tool_call>\n", "<tool_sep>\n")]
_HUNYUAN = _tagged(
    f"{_HY[0]}NAME{_HY[2]}",
    "<arg_key:opensource>KEY</arg_key:opensource>\n<arg_value:opensource>VALUE</arg_value:opensource>\n",
    _HY[1],
)
_MARK = "]<]minimax[>["
_M3 = _tagged(f'{_MARK}<invoke name="NAME">', f"{_MARK}<KEY>VALUE{_MARK}</KEY>", f"{_MARK}</invoke>\n")


def _dsml(block: str) -> str:
    look, now = (
        '<｜DSML｜invoke name="look">\n<｜DSML｜parameter name="place" string="true">a b</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="floor" string="false">3</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="deep" string="false">true</｜DSML｜parameter>\n</｜DSML｜invoke>\n',
        '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n',
    )
    return f"{_THOUGHT}\n<｜DSML｜{block}>\n{look}{now}</｜DSML｜{block}>"


def _deepseek(before: str, behind: str) -> str:
    calls = "".join(
        f"<｜tool▁call▁begin｜>{before.replace('NAME', name)}{given}{behind}<｜tool▁call▁end｜>"
        for name, given in (("look", ARGUMENTS), ("now", "{}"))
    )
    return f"{_THOUGHT}<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>"


def _k3(key: str, kind: str, value: str) -> str:
    return f'<|open|>argument key="{key}" type="{kind}"<|sep|>{value}<|close|>argument<|sep|>'


_PYTHON = "[look(place='a b', floor=3, deep=True), now()]"
_GEMMA = '<|tool_call>call:look{place:<|"|>a b<|"|>,floor:3,deep:true}<tool_call|><|tool_call>call:now{}<tool_call|>'
_ATEM = [
    f"<|start|>assistant to={name}<|message|><atem:function_calls>\n{call}</atem:function_calls><|eom|>"
    for name, call in zip(
        ("look", "now"),
        _tagged(
            '<atem:invoke name="NAME">\n', '<atem:parameter name="KEY">VALUE</atem:parameter>\n', "</atem:invoke>\n"
        ),
        strict=True,
    )
]

REPLIES = {
    "qwen3": Reply(
        "{{ c.split('</think>') }}<tool_call>{{ call | tojson }}</tool_call>",
        _THOUGHT + _both("<tool_call>\n", "\n</tool_call>", *_JSON),
    ),
    "qwen3-coder": Reply(
        "<think></think><tool_call>\n<function={{ name }}>",
        _THOUGHT + _both("<tool_call>\n", "\n</tool_call>", *_XML),
    ),
    "seed": Reply(
        "<seed:think>{{ r }}</seed:think><seed:tool_call><function=",
        "<seed:think>hm</seed:think>\nSo.\n\n" + _both("<seed:tool_call>\n", "\n</seed:tool_call>", *_SEED),
    ),
    "minicpm5": Reply(
        """<think></think>{{ '<function name="' + name + '">' }}""",
        _THOUGHT + "\n".join(_tagged('<function name="NAME">', '<param name="KEY">VALUE</param>', "</function>")),
    ),
    "glm": Reply(
        "<think></think><tool_call>{{ name }}<arg_key>", _THOUGHT + _both("<tool_call>", "</tool_call>", *_GLM)
    ),
    "hunyuan": Reply(
        "{% set t = ':opensource' %}{{ '<tool_sep{}>'.format(t) }}",
        "<think:opensource>hm</think:opensource>So.<tool_calls:opensource>\n"
        + "".join(_HUNYUAN)
        + "</tool_calls:opensource>",
    ),
    "minimax-m1": Reply(
        """<think></think>{{ '<tool_calls>\\n{"name": "' }}""",
        _THOUGHT + "<tool_calls>\n" + "\n".join(_JSON) + "\n</tool_calls>",
    ),
    "minimax-m2": Reply(
        "<think></think><minimax:tool_call>",
        f"{_THOUGHT}<minimax:tool_call>\n{''.join(_INVOKE)}</minimax:tool_call>",
    ),
    "minimax-m3": Reply(
        f"<mm:think></mm:think>{_MARK}",
        f"<mm:think>hm</mm:think>So.{_MARK}<tool_call>\n{''.join(_M3)}{_MARK}</tool_call>",
    ),
    "mistral": Reply(
        "[THINK][/THINK][TOOL_CALLS]{{ name }}[ARGS]",
        f"[THINK]hm[/THINK]So.[TOOL_CALLS]look[ARGS]{ARGUMENTS}[TOOL_CALLS]now[ARGS]{{}}",
    ),
    "mistral-ids": Reply(
        "[TOOL_CALLS]{{ name }}[CALL_ID]{{ id }}[ARGS]",
        f"So.[TOOL_CALLS]look[CALL_ID]aB3dE6gH9[ARGS]{ARGUMENTS}[TOOL_CALLS]now[CALL_ID]123456789[ARGS]{{}}",
        None,
    ),
    "mistral-bare": Reply(
        "{{ '[TOOL_CALLS]' + call.name + arguments }}", f"So.[TOOL_CALLS]look{ARGUMENTS}[TOOL_CALLS]now{{}}", None
    ),
    "mistral-list": Reply("[TOOL_CALLS] [{% for c in calls %}", f"So.[TOOL_CALLS] {_objects()}", None),
    "llama": Reply(
        """{{ '{"name": "' + n + '", "parameters": ' }}""",
        f'{{"name": "look", "parameters": {ARGUMENTS}}}',
        None,
        "",
        CALLS[:1],
    ),
    "llama4": Reply("as [func_name1(params_name1=params_value1)]", _PYTHON, None, ""),
    "lfm2": Reply("<think></think><|tool_call_start|>", f"{_THOUGHT}<|tool_call_start|>{_PYTHON}<|tool_call_end|>"),
    "deepseek-r1": Reply(
        "<think></think><｜tool▁sep｜>{{ name }}```json", _deepseek("function<｜tool▁sep｜>NAME\n```json\n", "\n```")
    ),
    "deepseek-v3.1": Reply("<think></think><｜tool▁sep｜>", _deepseek("NAME<｜tool▁sep｜>", "")),
    "deepseek-v3.2": Reply("<think></think>{% set t = '｜DSML｜' %}", _dsml("function_calls")),
    "deepseek-v4": Reply("<think></think>{% set t = '｜DSML｜' %}tool_calls>", _dsml("tool_calls")),
    "kimi-k2": Reply(
        "<think></think><|tool_calls_section_begin|>",
        f"{_THOUGHT}<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>"
        f"{ARGUMENTS}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{{}}"
        "<|tool_call_end|><|tool_calls_section_end|>",
    ),
    "kimi-k3": Reply(
        "{{ '<|open|>' + tag }}{{ '<|close|>' + tag }}",
        "<|open|>think<|sep|>hm<|close|>think<|sep|><|open|>response<|sep|>So.<|close|>response<|sep|>"
        '<|open|>tools<|sep|><|open|>call tool="look" index="1"<|sep|>'
        + _k3("place", "string", "a b")
        + _k3("floor", "number", "3")
        + _k3("deep", "boolean", "true")
        + '<|close|>call<|sep|><|open|>call tool="now" index="2"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>'
        "<|close|>message<|sep|>",
    ),
    "kimi-vl": Reply("◁think▷◁/think▷", "◁think▷hm◁/think▷So.", calls=()),
    "granite3": Reply(
        "<think></think><|tool_call|>", f"<think>hm</think>\n<response>So.</response>\n<|tool_call|>{_objects()}"
    ),
    "phi4": Reply("<|tool_call|><|/tool_call|>", f"So.<|tool_call|>{_objects()}<|/tool_call|>", None),
    "command-a": Reply(
        "<|START_THINKING|><|END_THINKING|><|START_ACTION|>",
        "<|START_THINKING|>hm<|END_THINKING|><|START_RESPONSE|>So.<|END_RESPONSE|><|START_ACTION|>"
        f"{_objects('tool_name', 'parameters')}<|END_ACTION|>",
    ),
    "command-r": Reply(
        'write Action: with ```json and "tool_name"',
        f"So.\nAction:\n```json\n{_objects('tool_name', 'parameters')}\n```",
        None,
    ),
    "gemma4": Reply("<|channel>thought{{ r }}<channel|><|tool_call>", f"<|channel>thought\nhm\n<channel|>So.{_GEMMA}"),
    "nemotron": Reply("<think></think><TOOLCALL>[", f"{_THOUGHT}<TOOLCALL>{_objects()}</TOOLCALL>"),
    "functionary-v3.1": Reply(
        "<function={{ n }}>", f"So.<function=look>{ARGUMENTS}</function><function=now>{{}}</function>", None
    ),
    "functionary-v3.2": Reply(">>>all\n{{ c }}>>>", f"all\nSo.>>>look\n{ARGUMENTS}>>>now\n{{}}", None),
    "firefunction": Reply("functools[{{ c }}]", f"So. functools{_objects()}", None),
    "apertus": Reply(
        "<|inner_prefix|><|inner_suffix|><|tools_prefix|>",
        "<|inner_prefix|>hm<|inner_suffix|>So."
        f'<|tools_prefix|>[{{"look": {ARGUMENTS}}}, {{"now": {{}}}}]<|tools_suffix|>',
    ),
    "apriel": Reply(
        "[BEGIN FINAL RESPONSE]<tool_calls>[",
        "Here are my reasoning steps:\nhm\n[BEGIN FINAL RESPONSE]\nSo.\n[END FINAL RESPONSE]\n"
        f"<tool_calls>{_objects()}</tool_calls>",
    ),
    "gigachat": Reply("<|function_call|>", f"So.<|function_call|>{_JSON[0]}", None, calls=CALLS[:1]),
    "gigachat3": Reply(
        "function call{{ role_sep }}",
        f"So.<|message_sep|>\n\nfunction call<|role_sep|>\n{_JSON[0]}",
        None,
        calls=CALLS[:1],
    ),
    "solar": Reply(
        "<|think|>{{ r }}<|end|><|tool_call:begin|>",
        "<|think|>hm<|end|><|begin|>assistant<|content|>So.<|end|><|begin|>assistant<|tool_calls|>"
        f"<|tool_call:begin|>1<|tool_call:name|>look<|tool_call:args|>{ARGUMENTS}<|tool_call:end|>"
        "<|tool_call:begin|>2<|tool_call:name|>now<|tool_call:args|>{}<|tool_call:end|><|calls|>",
    ),
    "muse": Reply(
        "<atem:function_calls>",
        " to=self<|message|>hm<|eom|><|start|>assistant to=user<|message|>So.<|eom|>" + "".join(_ATEM),
    ),
    "harmony": Reply(
        "<|channel|>analysis<|message|>",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>So.<|end|>"
        f"<|start|>assistant<|channel|>commentary to=functions.look <|constrain|>json<|message|>{ARGUMENTS}<|call|>"
        "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|>",
    ),
    "think": Reply("<think></think>", "<think>\nhm\n</think>\n\nSo.", calls=()),
    "none": Reply("{{ messages }}", "So.", None, calls=()),
}
"""By the names of the formats."""
