"""Parts of commands without a screen: what is typed after them, what Tab offers, how sizes are shown."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.utils import get_cwidth

from cbatch.base.errors import RequestError
from cbatch.base.params import PARAMS, SamplingParams
from cbatch.cli.chat.commands.registry import COMMANDS, CommandCompleter, FrontEnd
from cbatch.cli.chat.commands.sessions import parse_variants
from cbatch.cli.chat.controller import ChatController
from cbatch.cli.chat.engine_client import EngineClient
from cbatch.cli.chat.screen import _fitting
from cbatch.cli.chat.session.files import expand_names, one_name, quoted, split_names
from cbatch.cli.chat.session.session import Attachment, Reply, Session, Turn, compose, is_long_paste
from cbatch.cli.chat.session.store import SessionStore, read_session, to_json
from cbatch.cli.common.exits import UserError

CLIENT: Any = SimpleNamespace(engine=None)


@pytest.mark.parametrize(
    ("typed", "labels"),
    [
        ("", [""]),
        ("3", ["", "", ""]),
        ("temperature=0.2,0.7", ["temperature=0.2", "temperature=0.7"]),
        ("2 top_p=0.5", ["top_p=0.5", "top_p=0.5"]),
        ("2 temperature=0,1 top_p=0.5", ["temperature=0, top_p=0.5", "temperature=1, top_p=0.5"]),
        ('stop="a,b","c"', ['stop="a,b"', 'stop="c"']),
        ("model=a/b,./c", ["model=a/b", "model=./c"]),
    ],
)
def test_what_retry_understands(typed: str, labels: list[str]) -> None:
    """Guards `/retry` with a number, with settings, and with both."""
    variants = parse_variants(typed)
    assert [variant.label for variant in variants] == labels
    assert [variant.model for variant in variants if variant.model] == (["a/b", "./c"] if "model" in typed else [])


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("0", "number from 1 to 32"),
        ("temperature", "number from 1 to 32"),
        ("2 warm", "neither a number"),
        ("3 temperature=0,1", "as many as there are replies"),
        ("temperature=0,1 top_p=0.1,0.2,0.3", "as many as there are replies"),
        ("temperature=hot", "temperature must be"),
        ("temprature=1", "did you mean 'temperature'"),
        ("temperature=" + ",".join(["1"] * 40), "At most 32"),
    ],
)
def test_what_retry_refuses(typed: str, message: str) -> None:
    """Guards against a retry that is understood in another way than it was meant."""
    with pytest.raises(UserError, match=message):
        parse_variants(typed)


def test_a_message_with_files_and_pastes(tmp_path: Path) -> None:
    """Guards what the model sees: files by name between fences that hold, pastes in their place; and the saved file."""
    file = Attachment("notes.md", "```\ncode\n```\n")
    paste = Session("s").fold_paste("a\nb\n" * 10)
    assert paste.name == "[pasted 1: 20 lines]" and is_long_paste(paste.text) and not is_long_paste("a\nb")
    text = f"Before {paste.name} after"
    whole = compose(text, [file, paste])
    assert whole == f"File notes.md:\n````md\n{file.text}````\n\nBefore {paste.text} after"
    session = Session("s", items=[Turn(text, attachments=[file, paste])], draft="half", attached=[file], seed=5)
    session.template_kwargs = {"enable_thinking": False}
    path = tmp_path / "s.json"
    path.write_text(json.dumps(to_json(session)))
    found = read_session(path)
    assert found.turns[0].message == whole and (found.draft, found.seed) == ("half", 5)
    assert found.template_kwargs == {"enable_thinking": False} and found.attached[0].text == file.text
    assert session.title == "Before [pasted 1: 20 lines] after"
    assert Session("s", items=[Turn("word " * 30)]).title.endswith("word…")


@given(st.text(st.sampled_from("ab \\'\"*?[]()$éä日"), min_size=1, max_size=12))
def test_a_quoted_name_is_one_name(name: str) -> None:
    """Guards names with blanks and quotes: what Tab writes is read as the same name."""
    assert split_names(quoted(name)) == [name]
    assert one_name(quoted(name)) in (name, quoted(name))


def test_patterns_of_files(tmp_path: Path) -> None:
    """Guards `/read` of several files: patterns in order, a name that looks like a pattern, and one that fits none."""
    for name in ("b.py", "a.py", "x[1].txt", "one two.txt"):
        (tmp_path / name).write_text("")
    names = [path.name for path in expand_names(f"{tmp_path}/*.py {tmp_path}/x[1].txt")]
    assert names == ["a.py", "b.py", "x[1].txt"]
    assert [path.name for path in expand_names(f"{tmp_path}/one two.txt")] == ["one two.txt"]
    with pytest.raises(UserError, match=r"No file matches .*\*\.rs"):
        expand_names(f"{tmp_path}/*.rs")
    with pytest.raises(UserError, match="no closing quotation"):
        expand_names("'a")


def completions(store: SessionStore, line: str, *, about: bool = False) -> list[str]:
    """The lines that Tab makes of a line, or what it says about them."""
    completer = CommandCompleter(ChatController(CLIENT), store)
    found = list(completer.get_completions(Document(line), CompleteEvent()))
    if about:
        return [each.display_meta_text for each in found]
    return [line[: len(line) + each.start_position] + each.text for each in found]


def test_completion(tmp_path: Path) -> None:
    """Guards Tab in every kind of argument, above all files whose names have blanks."""
    (tmp_path / "my notes.txt").write_text("")
    (tmp_path / "my other.txt").write_text("")
    store = SessionStore(tmp_path / "state")
    escaped = [f"/read {tmp_path}/my\\ notes.txt", f"/read {tmp_path}/my\\ other.txt"]
    for typed in (f"/read {tmp_path}/my", f"/read {tmp_path}/my\\ ", f"/read {tmp_path}/my "):
        assert sorted(completions(store, typed)) == escaped, typed
    assert completions(store, f"/read {tmp_path}/my\\ notes.txt {tmp_path}/my\\ o") == [
        f"/read {tmp_path}/my\\ notes.txt {escaped[1].removeprefix('/read ')}"
    ]
    (tmp_path / "sub dir").mkdir()
    assert completions(store, f"/read {tmp_path}/sub") == [f"/read {tmp_path}/sub\\ dir/"]
    assert completions(store, "/set temp") == ["/set temperature"]
    assert completions(store, "/set temp", about=True) == [PARAMS["temperature"].help]
    assert completions(store, "/set all temp") == ["/set all temperature"]
    assert completions(store, "/switch m") == ["/switch main"]
    assert completions(store, "/help ke") == ["/help keys"]
    assert completions(store, "hello /re") == completions(store, "ada@") == []
    assert completions(store, f"look at @{tmp_path}/sub") == [f"look at @{tmp_path}/sub\\ dir/"]
    session = Session("main", items=[Turn("How do I feed a sourdough?", [Reply("Daily.", state="stop")])])
    store.save_later(session)
    store.wait()
    assert session.path is not None
    for typed in ("", "sour", session.path.stem[:4]):
        assert completions(store, f"/load {typed}") == [f"/load {session.path.stem}"]
    assert completions(store, "/load cake") == [] and completions(store, f"/load {tmp_path}/sub")


@given(
    st.lists(st.sampled_from(["run 12/24", "5,087 tok/s", "01:12 left", "loading the model"]), min_size=1), st.data()
)
def test_numbers_in_the_bar_are_never_cut(parts: list[str], data: st.DataObject) -> None:
    """Guards progress that ends in the middle of a number in a narrow window."""
    shown = _fitting(parts, width := data.draw(st.integers(0, 80)))
    assert get_cwidth(shown) <= max(width, 0)
    kept = shown.strip()
    assert not kept or ", ".join(parts).startswith(kept)
    if any(character.isdigit() for character in kept):
        assert kept in [", ".join(parts[:count]) for count in range(len(parts) + 1)]


def test_every_command_teaches() -> None:
    """Guards `/help`: each line fits its column, and each page says more than that line."""
    for name, command in COMMANDS.items():
        assert 0 < len(command.description) <= 29 and not command.description.endswith("."), name
        assert command.details, name
        assert not command.usage or "Example" in command.details, name
        for line in command.details.splitlines():
            if line.strip().startswith(("Example", "/")) and "/" in line:
                assert line.strip().partition("/")[2].split()[0] in COMMANDS, line


def test_thinking_is_turned_on_and_off() -> None:
    """Guards `/think`: it sets the variable that the model's template reads, and says so if there is none."""
    engine: Any = SimpleNamespace(tokenizer=SimpleNamespace(chat_template="{% if enable_thinking %}"), loaded=None)
    client = EngineClient(lambda: engine)
    client.engine = engine
    client.params = SamplingParams().merged  # type: ignore[method-assign]
    controller = ChatController(client)
    chat = FrontEnd(controller, None)  # type: ignore[arg-type]
    COMMANDS["think"].handler(chat, "off")
    assert controller.current.template_kwargs == {"enable_thinking": False}
    assert "thinking: off" in controller.current.items[-1].text
    engine.tokenizer.chat_template = "{{ messages }}"
    with pytest.raises(UserError, match="cannot turn thinking"):
        COMMANDS["think"].handler(chat, "on")


def test_thinking_has_a_budget_and_levels() -> None:
    """Guards `/think 500` and `/think low`: they are parameters of this session, and `on` takes them back."""
    engine: Any = SimpleNamespace(tokenizer=SimpleNamespace(chat_template="{{ enable_thinking }}"), loaded=None)
    client = EngineClient(lambda: engine)
    client.engine = engine
    client.params = SamplingParams().merged  # type: ignore[method-assign]
    controller = ChatController(client)
    chat = FrontEnd(controller, None)  # type: ignore[arg-type]

    def think(what: str) -> str:
        COMMANDS["think"].handler(chat, what)
        return controller.current.items[-1].text

    assert think("") == "thinking: as the model's template has it"
    think("off")
    assert think("500") == "thinking: on, at most 500 tokens" == think("")
    assert controller.current.params == {"thinking_budget": 500}
    with pytest.raises(RequestError, match="needs a chat template that has levels"):
        think("low")
    engine.tokenizer.chat_template += "{{ reasoning_effort }}"
    assert think("low") == "thinking: on, low, at most 500 tokens"
    assert think("off") == "thinking: off" and controller.current.params == {}
    with pytest.raises(UserError, match="a number of tokens"):
        think("hard")
