"""Commands for messages, the replies to them, and the open sessions."""

from __future__ import annotations

import json
from typing import Any

from cbatch.base.units import format_count
from cbatch.cli.chat.commands.registry import FrontEnd, command, parse_number, parse_parameter
from cbatch.cli.chat.controller import RETRY_TEMPERATURE, Variant, oldest_turns
from cbatch.cli.common.exits import UserError

MOST_REPLIES = 32


@command("retry", "[N] [NAME=VALUE,…]")
def do_retry(chat: FrontEnd, arguments: str) -> None:
    """ask again, once or N times

    Asks for N more replies to the last message, computed in one batch, and shows them side by side. With a parameter
    and several values it gives one reply for each. A session that samples greedily uses temperature 0.7 here, because
    it would only repeat itself.
    Examples: /retry 3
              /retry temperature=0.2,0.7,1,1.3
              /retry 2 top_p=0.5 temperature=1
              /retry model=Qwen/Qwen3-0.6B,Qwen/Qwen3-1.7B
    """
    variants, session = parse_variants(arguments), chat.session
    chat.controller.retry(session, variants)
    lines = []
    is_greedy = chat.controller.client_of(session).params(session.params).greedy
    if is_greedy and not any("temperature" in each.params for each in variants):
        lines.append(f"sampled at temperature {RETRY_TEMPERATURE}; this session is greedy and would repeat itself")
    if len(variants) == 1 and session.last is not None:
        lines.append(f"/pick {session.last.fallback} goes back to the previous reply")
    if lines:
        chat.show(*lines)


def parse_variants(arguments: str) -> list[Variant]:
    """The request of a `/retry`. Raises UserError if it makes no sense."""
    words = arguments.split()
    count = parse_number(words.pop(0), 1, MOST_REPLIES) if words and "=" not in words[0] else None
    values = dict(_values(word) for word in words)
    lengths = {len(each) for each in values.values()} - {1}
    if len(lengths) > 1 or (count is not None and lengths - {count}):
        raise UserError("Give each parameter one value, or as many as there are replies.")
    number = count or (lengths.pop() if lengths else 1)
    if number > MOST_REPLIES:
        raise UserError(f"At most {MOST_REPLIES} replies stand side by side.")
    variants = []
    for index in range(number):
        chosen = {name: each[index % len(each)] for name, each in values.items()}
        label = ", ".join(f"{name}={value}" for name, value in chosen.items())
        model = chosen.pop("model", None)
        params: dict[str, Any] = {}
        for name, value in chosen.items():
            params |= parse_parameter(name, value)
        variants.append(Variant(params, label, model))
    return variants


def _values(word: str) -> tuple[str, list[str]]:
    """A parameter and its values, from `NAME=V1,V2`; a value may be JSON."""
    name, sign, text = word.partition("=")
    if not sign or not text:
        raise UserError(f"{word[:40]} is neither a number of replies nor NAME=VALUE, such as temperature=0.2,0.7.")
    try:
        return name, [json.dumps(value) for value in json.loads(f"[{text}]")]
    except (ValueError, RecursionError):
        return name, text.split(",")


@command("pick", "K")
def do_pick(chat: FrontEnd, number: str) -> None:
    """keep one of several replies

    K is the number above a reply. On an empty line its key does the same, and so do Left, Right and Enter.
    Example: /pick 2
    """
    chat.controller.pick(chat.session, parse_number(number, 0, 10**6))


@command("continue")
def do_continue(chat: FrontEnd, _: str) -> None:
    """resume a reply cut off

    It goes on as it began, with the limits max_tokens and min_tokens that the session has now.
    """
    chat.controller.continue_reply(chat.session)


@command("stop", "[all]")
def do_stop(chat: FrontEnd, which: str) -> None:
    """stop one reply, or all

    Esc and Ctrl-C stop the reply in this session, too. /continue resumes it.
    Example: /stop all
    """
    sessions = list(chat.controller.sessions) if which == "all" else [chat.session]
    stopped = [chat.controller.stop(session) for session in sessions]
    if not any(stopped):
        raise UserError("No reply is coming.")


@command("undo")
def do_undo(chat: FrontEnd, _: str) -> None:
    """take the last message back

    The message goes into the input line, with its files, and the replies to it are dropped.
    """
    chat.set_input(chat.controller.undo(chat.session))


@command("edit", "[N]")
def do_edit(chat: FrontEnd, which: str) -> None:
    """change a message

    Opens the last message in $EDITOR, and sends it again if you changed it. N takes the N-th last message, from which a
    copy of the session goes on; the session itself stays as it is.
    Example: /edit 3
    """
    session, turns = chat.session, chat.session.turns
    if not turns:
        raise UserError("There is no message yet.")
    turn = turns[-parse_number(which, 1, len(turns)) if which else -1]

    def ask(text: str) -> None:
        try:
            if turn is turns[-1]:
                chat.controller.replace(session, turn, text)
            else:
                chat.controller.branch(session, turn, text)
                chat.show(f"goes on from an earlier message of {session.name}")
        except UserError:
            chat.set_input(text)
            raise

    chat.open_editor(turn.text, ask)


@command("copy", "[N|code [N]]")
def do_copy(chat: FrontEnd, which: str) -> None:
    """copy a reply or its code

    Puts the last reply on the clipboard, or the N-th last one. `code` copies the last block of code of the last reply,
    `code N` its N-th block. The terminal must allow it (OSC 52); tmux does with `set -g set-clipboard on`.
    Examples: /copy
              /copy code 2
    """
    from cbatch.cli.chat.markdown.parser import find_code  # takes a tenth of a second, and the prompt waits

    replies = [turn.reply.text for turn in chat.session.turns if turn.reply is not None and turn.reply.text]
    if not replies:
        raise UserError("There is no reply yet.")
    words = which.split()
    if words[:1] == ["code"]:
        blocks = find_code(replies[-1])
        if not blocks:
            raise UserError("There is no block of code in the last reply.")
        text = blocks[parse_number(words[1], 1, len(blocks)) - 1 if len(words) > 1 else -1]
    else:
        text = replies[-parse_number(which, 1, len(replies)) if which else -1]
    chat.copy(text)
    chat.show(f"copied {format_count(len(text), 'character')}")


@command("find", "[TEXT]")
def do_find(chat: FrontEnd, text: str) -> None:
    """find text in this session

    Scrolls up to the next place that holds the text; /find alone goes on from there. Esc ends the search.
    Example: /find sourdough
    """
    chat.screen.find(text)


@command("trim", "[N]")
def do_trim(chat: FrontEnd, argument: str) -> None:
    """drop the oldest turns

    The model no longer sees the N oldest turns. Without N, as many are dropped as the reply to the last message needs.
    Example: /trim 4
    """
    wanted = parse_number(argument, 1, 10**6) if argument else None
    count = chat.controller.trim(chat.session, wanted)
    if wanted is not None:
        chat.show(f"the model no longer sees {oldest_turns(count)}" if count else "there is no older turn to drop")


@command("new", "[NAME]")
def do_new(chat: FrontEnd, name: str) -> None:
    """open a session

    It has the settings that the chat began with, or that /set all has changed.
    Example: /new recipes
    """
    chat.controller.new_session(name or None)


@command("switch", "NAME|NUMBER", "session")
def do_switch(chat: FrontEnd, name: str) -> None:
    """go to a session

    Alt-1 to Alt-9 and Alt-Left, Alt-Right do so, too. What you have typed stays in the session you leave.
    Example: /switch 2
    """
    chat.controller.switch(chat.controller.find(name))


@command("list")
def do_list(chat: FrontEnd, _: str) -> None:
    """list the open sessions

    For each one: its number, its name, how long it is, how full its context is, and what it does.
    """
    lines = []
    for number, session in enumerate(chat.controller.sessions, start=1):
        state = "replying" if session.is_busy else "unread" if session.is_unread else ""
        share = chat.controller.context_share(session)
        title = session.title if session.turns else "empty"
        turns = format_count(len(session.turns), "turn")
        lines.append(f"{number:>2} {session.name:<12} {turns:>8} {share:>4.0%} {state:<9} {title}".rstrip())
    chat.show(*lines)


@command("rename", "NAME")
def do_rename(chat: FrontEnd, name: str) -> None:
    """rename this session

    Example: /rename recipes
    """
    chat.controller.rename(chat.session, name)


@command("close", "[NAME|NUMBER]", "session")
def do_close(chat: FrontEnd, name: str) -> None:
    """close a session, or this one

    It stays on disk unless the chat was started with --no-history; /load opens it again.
    Example: /close 2
    """
    chat.controller.close(chat.controller.find(name) if name else chat.session)


@command("fork", "[NAME]")
def do_fork(chat: FrontEnd, name: str) -> None:
    """go on in a copy

    Opens a session that continues from the last complete reply. What both have in common is not computed again.
    Example: /fork other-ending
    """
    before = chat.session
    chat.controller.fork(before, name or None)
    chat.show(f"forked from {before.name}")


@command("all", "TEXT")
def do_all(chat: FrontEnd, text: str) -> None:
    """ask every session

    Sends one message to all open sessions. /compare shows their replies side by side.
    Example: /all Summarize what you know in one sentence.
    """
    for session in list(chat.controller.sessions):
        chat.controller.send(session, text)


@command("compare", "[NAME …|off]", "session")
def do_compare(chat: FrontEnd, names: str) -> None:
    """show sessions side by side

    Without names it shows all open sessions; one name stands beside this session. What you type still goes to the
    current one, and /all asks them all.
    Esc or /compare off goes back.
    Example: /compare main 3
    """
    if names == "off":
        chat.screen.compared = []
        return
    named = [chat.controller.find(name) for name in names.split()]
    if len(named) == 1:
        named.insert(0, chat.session)
    sessions = list(dict.fromkeys(named)) or list(chat.controller.sessions)
    if len(sessions) < 2:
        raise UserError("There is nothing to compare with; /new opens another session, /fork a copy of this one.")
    chat.screen.compared = sessions
    for session in sessions:  # old answers to commands would stand in the columns
        session.clear_passing_notices()


@command("exit")
def do_exit(chat: FrontEnd, _: str) -> None:
    """leave (also /quit)

    Sessions are saved while you chat, so there is nothing to save first.
    """
    chat.exit()
