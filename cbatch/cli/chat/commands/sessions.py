"""Commands for the open sessions."""

from __future__ import annotations

from cbatch.base.units import format_count
from cbatch.cli.chat.commands.registry import CommandContext, command
from cbatch.cli.common.exits import UserError


@command("new", "[NAME]")
def do_new(context: CommandContext, name: str) -> None:
    """open a session

    It has the settings that the chat began with, or that /set all has changed.
    Example: /new recipes
    """
    context.controller.new_session(name or None)


@command("switch", "NAME|NUMBER", "session")
def do_switch(context: CommandContext, name: str) -> None:
    """go to a session

    Alt-1 to Alt-9 and Alt-Left, Alt-Right do so, too. What you have typed stays in the session you leave.
    Example: /switch 2
    """
    context.controller.switch(context.controller.find(name))


@command("list")
def do_list(context: CommandContext, _: str) -> None:
    """list the open sessions

    For each one: its number, its name, how long it is, how full its context is, and what it does.
    """
    lines = []
    for number, session in enumerate(context.controller.sessions, start=1):
        state = "replying" if session.is_busy else "unread" if session.is_unread else ""
        share = context.controller.context_share(session)
        title = session.title if session.turns else "empty"
        turns = format_count(len(session.turns), "turn")
        lines.append(f"{number:>2} {session.name:<12} {turns:>8} {share:>4.0%} {state:<9} {title}".rstrip())
    context.show(*lines)


@command("rename", "NAME")
def do_rename(context: CommandContext, name: str) -> None:
    """rename this session

    Example: /rename recipes
    """
    context.controller.rename(context.session, name)


@command("close", "[NAME|NUMBER]", "session")
def do_close(context: CommandContext, name: str) -> None:
    """close a session, or this one

    It stays on disk unless the chat was started with --no-history; /load opens it again.
    Example: /close 2
    """
    context.controller.close(context.controller.find(name) if name else context.session)


@command("fork", "[NAME]")
def do_fork(context: CommandContext, name: str) -> None:
    """go on in a copy

    Opens a session that continues from this point. What both have in common is not computed again.
    Example: /fork other-ending
    """
    before = context.session
    context.controller.fork(before, name or None)
    context.session.add_notice(f"forked from {before.name}")


@command("all", "TEXT")
def do_all(context: CommandContext, text: str) -> None:
    """ask every session

    Sends one message to all open sessions. /compare shows their replies side by side.
    Example: /all Summarize what you know in one sentence.
    """
    refused = []
    for session in list(context.controller.sessions):
        try:
            context.controller.send(session, text)
        except UserError as error:
            refused.append(f"not sent to {session.name}: {error}")
    if refused:
        raise UserError("\n".join(refused))


@command("compare", "[NAME …|off]", "session")
def do_compare(context: CommandContext, names: str) -> None:
    """show sessions side by side

    Without names it shows all open sessions; one name stands beside this session. What you type still goes to the
    current one, and /all asks them all.
    Esc or /compare off goes back.
    Example: /compare main 3
    """
    if names == "off":
        context.ui.compare([])
        return
    named = [context.controller.find(name) for name in names.split()]
    if len(named) == 1:
        named.insert(0, context.session)
    sessions = list(dict.fromkeys(named)) or list(context.controller.sessions)
    if len(sessions) < 2:
        raise UserError("There is nothing to compare with; /new opens another session, /fork a copy of this one.")
    context.ui.compare(sessions)


@command("exit")
def do_exit(context: CommandContext, _: str) -> None:
    """leave (also /quit)

    Sessions are saved while you chat, so there is nothing to save first.
    """
    context.ui.exit()
