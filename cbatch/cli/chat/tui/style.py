"""Colours of the chat, by what they mean. Only the terminal's own 16 are used, so that its theme applies."""

from __future__ import annotations

from prompt_toolkit.styles import Style

STYLE = Style.from_dict(
    {
        "user": "ansicyan bold",
        "heading": "bold",
        "chosen": "bold reverse",
        "strong": "bold",
        "emphasis": "italic",
        "strike": "strike",
        "link": "ansiblue underline",
        "marker": "ansicyan",
        "code": "ansiyellow",
        "code.keyword": "ansimagenta",
        "code.string": "ansigreen",
        "code.comment": "italic ansibrightblack",
        "code.number": "ansicyan",
        "code.name": "ansiblue",
        "code.operator": "ansiyellow",
        "quote": "ansibrightblack",
        "table": "ansibrightblack",
        "fence": "ansibrightblack",
        "note": "ansibrightblack",
        "reasoning": "italic ansibrightblack",
        "tool": "ansimagenta",
        "error": "ansired",
        "found": "bg:ansiyellow ansiblack",
        "bar": "reverse",
        "bar.current": "reverse bold",
        "bar.full": "reverse bold ansired",
        "prompt": "ansigreen bold",
    }
)
