"""Commands for what a session tells the model, and how its replies are sampled."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from cbatch.base.chat_template_options import effort_variables
from cbatch.base.errors import RequestError
from cbatch.base.params import EFFORTS, PARAMS, SamplingParams, with_overrides
from cbatch.cli.chat.commands.registry import SETTABLE, FrontEnd, command, did_you_mean, parse_number, parse_parameter
from cbatch.cli.common.exits import UserError
from cbatch.cli.common.local_models import local_models

if TYPE_CHECKING:
    from cbatch.api import Engine

DEMO_NAME = "the bundled demo model"
"""The name of the model that has none."""

THINK_VARIABLES = ("enable_thinking", "thinking")
"""Variables by which chat templates turn thinking on and off."""


UNSET = {
    "max_tokens": "the rest of the context",
    "seed": "the chat's own, from --seed",
    "reasoning_effort": "as the template says",
}
"""The meaning of a parameter without a value."""


@command("system", "[TEXT|-]")
def do_system(chat: FrontEnd, text: str) -> None:
    """show or set the instruction

    The system message of this session, which the model sees before everything else; - removes it.
    Example: /system Answer in one sentence.
    """
    if text:
        chat.session.system = None if text == "-" else text
        chat.controller.save(chat.session)
    chat.show(f"system message: {chat.session.system or 'none'}")


@command("set", "[all] [NAME [VALUE]]", "parameter")
def do_set(chat: FrontEnd, text: str) -> None:
    """show or set parameters

    How replies of this session are sampled; the value `default` takes a parameter back. With `all` it holds for all
    open sessions and for new ones. `seed` makes a session repeat itself.
    Examples: /set temperature 0.7
              /set all max_tokens 200
              /set stop ["\\n\\n"]
    """
    words = text.split(maxsplit=1)
    for_all = words[:1] == ["all"]
    name, _, value = (" ".join(words[1:]) if for_all else text).partition(" ")
    value = value.strip()
    if value in ("", "default", "null"):
        if name and name not in SETTABLE:
            raise UserError(f"There is no parameter {name}; {did_you_mean(name, SETTABLE) or '/set lists them.'}")
        if value:
            _change(chat, {name: None}, for_all)
        _show(chat, [name] if name else SETTABLE, *([f"  {PARAMS[name].help}"] if name and not value else []))
        return
    made = SamplingParams().merged(given := parse_parameter(name, value))
    changes = {own: list(new) if isinstance(new := getattr(made, own), tuple) else new for own in given}
    _change(chat, changes, for_all)
    _show(chat, list(given))
    if made.constraint is not None:
        _check_form(chat, made)


def _check_form(chat: FrontEnd, params: SamplingParams) -> None:
    """Says so if no reply can have the form that was set, before a message is sent for it."""
    session = chat.session

    def find_problem(engine: Engine) -> str:
        try:
            engine.core.compile(params)
        except RequestError as error:
            return str(error)
        return ""

    def tell(problem: str) -> None:
        if problem:
            session.add_notice(problem, is_error=True, is_passing=True)

    chat.controller.client_of(session).compute(find_problem, tell)


def _change(chat: FrontEnd, changes: dict[str, Any], for_all: bool) -> None:
    """Sets parameters; None takes one back."""
    controller = chat.controller
    for session in controller.sessions if for_all else [chat.session]:
        if "seed" in changes:
            session.seed = changes["seed"]
        session.params = _changed(session.params, changes)
        controller.save(session)
    if for_all:
        controller.params = _changed(controller.params, changes)
        controller.seed = changes.get("seed", controller.seed)


def _changed(params: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    params = with_overrides(params, {name: value for name, value in changes.items() if name != "seed"})
    return {name: value for name, value in params.items() if value is not None}


def _show(chat: FrontEnd, names: Sequence[str], *more: str) -> None:
    session = chat.session
    client = chat.controller.client_of(session)
    params, in_chat = client.params(session.params), client.chat_params
    lines = []
    for name in names:
        value = session.seed if name == "seed" else getattr(params, name)
        is_default = session.seed is None if name == "seed" else name not in session.params
        shown = json.dumps(value, ensure_ascii=False)
        if value is None:
            shown = UNSET.get(name, "none")
        origin = "  (default of a chat)" if name in in_chat else "  (default)"
        lines.append(f"{name:<19} {shown}" + (origin if is_default else ""))
    chat.show(*lines, *more)


@command("think", "[on|off|N|LEVEL|show|hide]")
def do_think(chat: FrontEnd, what: str) -> None:
    """set how much models think

    `on` and `off` tell models that can think whether to do so, in this session. A number is the most tokens that they
    think before they answer. `low`, `medium` and `high` are for models whose chat template knows levels. `show` and
    `hide` unfold and fold what they think on the screen, as Ctrl-T does.
    Examples: /think off
              /think 500
    """
    session, client = chat.session, chat.controller.client_of(chat.session)
    if what in ("show", "hide"):
        chat.screen.show_reasoning(what == "show")
        return
    tokenizer = chat.engine.tokenizer
    template = (tokenizer.chat_template if tokenizer is not None else None) or ""
    variable = next((name for name in THINK_VARIABLES if name in template), None)
    changes: dict[str, Any] = {"thinking_budget": None, "reasoning_effort": None}
    if what.isdecimal():
        changes = parse_parameter("thinking_budget", what)
    elif what in EFFORTS and what != "none":
        effort_variables(what, template)
        changes = {"reasoning_effort": what}
    elif what not in ("", "on", "off"):
        raise UserError("Type /think on, off, show, hide, a number of tokens, or low, medium or high.")
    elif what and variable is None:
        raise UserError("The chat template of this model cannot turn thinking on or off.")
    if what:
        if variable is not None:
            session.template_kwargs = {**session.template_kwargs, variable: what != "off"}
        _change(chat, changes, for_all=False)
    variables, params = {**client.template_kwargs, **session.template_kwargs}, client.params(session.params)
    value = variables.get(variable or "")
    state = "as the model's template has it" if value is None else "on" if value else "off"
    level = f", {params.reasoning_effort}" if params.reasoning_effort is not None else ""
    budget = f", at most {params.thinking_budget:,} tokens" if params.thinking_budget is not None else ""
    chat.show(f"thinking: {state}{level}{budget}")


@command("stats")
def do_stats(chat: FrontEnd, _: str) -> None:
    """speed, memory and times

    What the engine does now and has done, and how fast the last reply was: its time to the first token, and tokens per
    second after that.
    """
    chat.show(*chat.stats.lines())


@command("model", "[NAME|NUMBER|close NAME]", "model")
def do_model(chat: FrontEnd, which: str) -> None:
    """list models; use another

    Lists the models that are loaded and those on this machine. With a name, a folder or a number of the list, replies
    of this session come from that model; it is loaded beside the others, so it needs memory of its own.
    `close` gives that memory back.
    Examples: /model Qwen/Qwen3-0.6B
              /model close Qwen/Qwen3-0.6B
    """
    controller, session = chat.controller, chat.session
    action, _, name = which.partition(" ")
    if not which:
        chat.listed_models = _known_models(controller.model_names)
        used = session.model or controller.model_names[0]
        lines = []
        for number, each in enumerate(chat.listed_models, start=1):
            state = ""
            if each in controller.model_names:
                is_ready = controller.client_for(each).engine is not None
                state = "  used here" if each == used else "  loaded" if is_ready else "  loading"
            lines.append(f"{number:>2}  {each or DEMO_NAME}{state}")
        chat.show(*lines)
    elif action == "close":
        if not name:
            raise UserError("Type /model close NAME.")
        controller.unload_model(_model_name(chat, name))
    else:
        chosen = _model_name(chat, which)
        controller.use_model(session, "" if chosen == controller.model_names[0] else chosen)
        is_ready = chat.controller.client_of(session).engine is not None
        later = "" if is_ready else ", as soon as it is loaded"
        chat.show(f"replies of this session come from {chosen or DEMO_NAME}{later}")


def _known_models(loaded: Sequence[str]) -> list[str]:
    """The models that `/model` numbers: those that are loaded, then the others on this machine."""
    return list(dict.fromkeys([*loaded, *(model.name for model in local_models())]))


def _model_name(chat: FrontEnd, which: str) -> str:
    """The name that a number of the last list stands for, or the name itself."""
    known = chat.listed_models or _known_models(chat.controller.model_names)
    if which.isdecimal():
        return known[parse_number(which, 1, len(known)) - 1]
    return "" if which == DEMO_NAME else which


@command("tools", "[allow NAME|ask NAME]")
def do_tools(chat: FrontEnd, which: str) -> None:
    """list what models may call

    The files and servers of --tools bring them. `allow` runs a tool without asking, `ask` asks before each call again.
    Example: /tools allow weather
    """
    toolbox = chat.controller.tools
    if not toolbox.tools:
        raise UserError("There are no tools; cbatch chat --tools FILE.py lets the model call the functions of a file.")
    action, _, name = which.partition(" ")
    if which:
        if action not in ("allow", "ask") or name not in toolbox.tools:
            raise UserError(f"Type /tools allow NAME or /tools ask NAME; there are {', '.join(toolbox.tools)}.")
        (toolbox.allowed.add if action == "allow" else toolbox.allowed.discard)(name)
    lines: dict[str, list[str]] = {}
    for tool in toolbox.tools.values():
        problem = f" has ended: {tool.server.problem}" if tool.server is not None and tool.server.problem else ""
        state = "runs" if tool.name in toolbox.allowed else "asks"
        line = f"  {tool.name:<16} {state}  {tool.description.strip().partition(chr(10))[0]}".rstrip()
        lines.setdefault(tool.source + problem, []).append(line)
    chat.show(*chain.from_iterable((source, *own) for source, own in lines.items()))
