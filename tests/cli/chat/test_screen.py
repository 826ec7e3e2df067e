"""How a session and its replies in Markdown are drawn: all of it fits, and nothing steers the terminal."""

from __future__ import annotations

import subprocess
import sys
import unicodedata
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prompt_toolkit.utils import get_cwidth

from cbatch.cli.chat.background_run import BackgroundRun
from cbatch.cli.chat.controller import ChatController
from cbatch.cli.chat.markdown.layout import PARSER, MarkdownLayout
from cbatch.cli.chat.markdown.lines import Fragment, StyledLine, wrap, wrap_plain
from cbatch.cli.chat.markdown.parser import find_code
from cbatch.cli.chat.screen import Transcript, TranscriptView, conversation_lines, status_bar, visible_lines
from cbatch.cli.chat.session.session import Reply, Session, Turn
from cbatch.cli.chat.stats import ChatStats

TEXT = st.text(st.one_of(st.characters(), st.sampled_from("  \n\n`*-#> \x1b\r\t日本👍\u200d\u0301")), max_size=200)


def texts(lines: list[StyledLine]) -> list[str]:
    return ["".join(text for _, text in line) for line in lines]


def transcript(session: Session, width: int) -> list[str]:
    return texts([line for chunk in Transcript().chunks(session, width) for line in chunk])


@given(TEXT, st.integers(2, 60))
def test_plain_text_loses_nothing_but_blanks(text: str, width: int) -> None:
    """Guards what the user typed against being swallowed by a wrap; no line is too wide, or steers the terminal."""
    lines = texts(wrap_plain(text, width))
    assert all(get_cwidth(line) <= width for line in lines)
    assert not any(unicodedata.category(character) == "Cc" for line in lines for character in line)
    shown = "".join("".join(lines).split())
    kept = (c for c in text if unicodedata.category(c) != "Cc" and c not in "\u061c\u200e\u200f\u2028\u2029")
    bidi = {chr(code) for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))}
    assert shown == "".join("".join(c for c in kept if c not in bidi).split())


def test_alternatives_stand_side_by_side_where_they_fit() -> None:
    """Guards `/retry N`: columns on a wide screen, one below the other on a narrow one."""
    session = Session("s")
    replies = [Reply(text, state="stop") for text in ("old", "one two", "three", "four")]
    session.items.append(Turn("q", replies, 1, first_compared=1))
    wide = transcript(session, 80)
    assert [line.split("│") for line in wide[2:4]] == [
        ["[1]".ljust(25), " [2]".ljust(26), " [3]".ljust(25)],
        ["one two".ljust(25), " three".ljust(26), " four".ljust(25)],
    ]
    narrow = transcript(session, 40)
    assert narrow[2:4] == ["[1]", "one two"] and "old" not in "".join(narrow)


def narrow_view(replies: int = 0, sessions: int = 1) -> tuple[TranscriptView, ChatController]:
    """A screen of 55 columns and 8 lines."""
    controller = ChatController(SimpleNamespace(engine=None))  # type: ignore[arg-type]
    for number in range(sessions):
        session = controller.new_session(f"n{number}") if number else controller.current
        texts_of = [f"reply {each} of {number}: " + "word " * 30 for each in range(replies + 1)]
        session.items.append(Turn("q", [Reply(text, state="stop") for text in texts_of], 1, int(replies > 1)))
    return TranscriptView(controller), controller


def drawn(view: TranscriptView) -> str:
    content = view.create_content(55, 8)
    return "\n".join(texts([[*content.get_line(number)] for number in range(content.line_count)]))  # type: ignore[misc]


def test_each_reply_can_be_seen_on_a_small_screen() -> None:
    """Guards `/retry` in a small window: Left and Right go to the reply that stands out, and hints take no lines."""
    view, controller = narrow_view(replies=4)
    turn = controller.current.last
    assert turn is not None and "/pick" not in drawn(view)
    for turn.chosen in (1, 2, 3, 4):
        view.follows_chosen = True
        assert f"[{turn.chosen}]\nreply {turn.chosen} of 0" in "\n".join(map(str.rstrip, drawn(view).split("\n")))


def test_each_session_can_be_compared_on_a_small_screen() -> None:
    """Guards `/compare` of more sessions than fit side by side: pages, which Left and Right turn, show all of them."""
    view, controller = narrow_view(replies=1, sessions=5)
    view.compared = list(controller.sessions)
    seen = ""
    for _ in range(3):
        page = drawn(view)
        assert all(get_cwidth(line) <= 55 for line in page.split("\n"))
        seen += page
        view.turn_page(1)
    assert all(session.name in seen for session in controller.sessions) and "reply 1 of 4" in seen.replace("\n", "")
    view.go_to(None)
    controller.switch_to(2)
    assert "n2 " in drawn(view) and "(2/3: Left, Right)" in drawn(view), "the current session is not among them"


def test_a_long_line_breaks_at_the_width() -> None:
    """Guards text of thousands of characters against lines that end early, where it is laid out in parts."""
    lines = texts(wrap_plain("word " * 3000, 100, first="> "))
    assert {len(line.rstrip()) for line in lines[:-1]} == {96}, "a word more does not fit"


@pytest.mark.parametrize(
    ("height", "top", "expected"), [(4, None, (6, 0)), (4, 2, (2, 4)), (40, 3, (0, 0)), (1, 99, (9, 0))]
)
def test_the_visible_part(height: int, top: int | None, expected: tuple[int, int]) -> None:
    """Guards scrolling: the end is followed unless the user has scrolled up, and every line can be reached."""
    chunks = [[[("", str(n))] for n in range(start, start + 2)] for start in range(0, 10, 2)]
    lines, start, end = visible_lines(chunks, height, top)
    assert (start, end - start) == expected and len(lines) == min(height, 10)
    assert texts(lines)[0] == str(start)


@pytest.mark.parametrize("width", [1, 5, 20, 80, 200])
@pytest.mark.parametrize("count", [1, 3, 40])
def test_the_bar_fits_and_shows_the_current_session(width: int, count: int) -> None:
    """Guards the bar at any width, with any number of sessions, and with names of wide characters."""
    client: Any = SimpleNamespace(engine=None)
    controller = ChatController(client)
    for number in range(count - 1):
        controller.new_session(f"日本{number}" if number % 2 else None)
    controller.switch(controller.sessions[count // 2])
    background = BackgroundRun()
    line = texts([status_bar(controller, ChatStats(controller), background, width)])[0]
    assert get_cwidth(line) <= width
    if width >= 20:
        assert f"[{count // 2 + 1} " in line


@pytest.mark.parametrize(("width", "shown"), [(80, " /models/1b/model-Q4.gguf"), (40, " …/1b/model-Q4.gguf"), (7, "")])
def test_the_bar_shows_the_end_of_a_long_path(width: int, shown: str) -> None:
    """Guards the name of a model in a file: the bar showed nothing of one longer than half of the screen."""
    stats, loaded = SimpleNamespace(num_running=0, num_waiting=0), SimpleNamespace(name="/models/1b/model-Q4.gguf")
    client: Any = SimpleNamespace(engine=SimpleNamespace(failure=None, loaded=loaded, stats=lambda: stats))
    controller = ChatController(client)
    line = texts([status_bar(controller, ChatStats(controller), BackgroundRun(), width)])[0]
    assert get_cwidth(line) <= width and line.rstrip().endswith(shown)


def test_code_is_printed_unbroken_at_the_end() -> None:
    """Guards code that is selected in the terminal after the chat: each of its lines is one line."""
    code = "x = 1  # " + "long " * 60
    answer = Reply(f"```python\n{code}\n```\n" + "word " * 60, state="stop", requested_at=1.0)
    loaded = Turn("before", [Reply("not from this chat", state="stop")])
    session = Session("s", items=[loaded, Turn("q", [answer])])
    lines = texts(list(conversation_lines(session, 80)))
    assert code.rstrip() in [line.rstrip() for line in lines] and "not from this chat" not in "".join(lines)
    assert max(len(line) for line in lines if "word" in line) <= 80


def test_what_libraries_print_does_not_reach_the_screen() -> None:
    """Guards the screen against output of Python, C libraries, child processes and progress bars."""
    code = """
import os, subprocess, sys
from cbatch.cli.common.stdout import capture_output
lines = []
with capture_output(lines.append) as terminal:
    os.write(2, b"from C\\n")
    print("from Python", file=sys.stderr)
    print("on stdout", flush=True)
    subprocess.run(["echo", "from a child"])
    os.write(2, b" 10%\\r 20%\\r\\n")
    terminal.write("the screen")
print(sorted(lines))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    shown = sorted(["from C", "from Python", "on stdout", "from a child", " 10%", " 20%"])
    assert (done.stdout, done.stderr) == (f"the screen{shown}\n", "")


PIECES = st.sampled_from(
    "# |## |- |  - |    |1. |10) |> |>|* |```|````|~~~|```python\n|```md\n|  ```|   ```\n|\n|\n\n|===|---|--|a|word |"
    "**|*|_|~~|`|[t](u)|![i](u)|[|](|<a:b>|$|\\(|\\)|\\[|\\]|$$|\n| b |--|--\n|\t|日本|：|👍|\x1b|\r|\u0301|&#10;|"
    '&#x202e;|&amp;|\\|x = \'y\'\n|"""|- [ ] |x '.split("|")
)
CELLS = st.sampled_from(["|", " | ", "|\n", "|-|-|\n"])
TEXT = st.lists(st.one_of(PIECES, CELLS, st.text(max_size=4)), max_size=40).map("".join)
LOW_LIMITS = {"layout.SMALL": 12, "layout.CODE_CHUNK": 16, "layout.LONG_LINE": 24, "lines.LONG_LINE": 24}


def shown(source: str, width: int = 60) -> list[str]:
    return texts(MarkdownLayout(width).lines(source))


def styled(source: str, style: str) -> list[str]:
    """The texts in a style."""
    fragments = (fragment for line in MarkdownLayout(60).lines(source) for fragment in line)
    return [text for names, text in fragments if any(f"{name}.".startswith(f"{style}.") for name in names.split())]


def check_growing(text: str, width: int, ends: list[int]) -> None:
    layout = MarkdownLayout(width)
    for end in sorted(ends):
        check_lines(layout.lines(text[:end], is_whole=False), width)
    lines = layout.lines(text)
    check_lines(lines, width)
    assert lines == MarkdownLayout(width).lines(text)


def check_lines(lines: list[StyledLine], width: int) -> None:
    assert all(get_cwidth(line) <= width for line in texts(lines))
    assert not any(unicodedata.category(character) == "Cc" for line in texts(lines) for character in line)


@settings(max_examples=100)
@given(TEXT, st.integers(2, 90), st.data())
def test_text_that_grows_is_laid_out_as_the_whole(text: str, width: int, data: st.DataObject) -> None:
    """Guards streaming: in whatever pieces a text comes, the result is the same, and no line is too wide."""
    check_growing(text, width, data.draw(st.lists(st.integers(0, len(text)), max_size=6)))


def test_an_empty_quote_between_blocks() -> None:
    """Guards the blank line below an empty quote, whose line belongs to the block that is finished."""
    check_growing("# a\n>\n# b\n", 60, [10])


def test_the_line_below_the_header_of_a_table_is_still_written() -> None:
    """Guards the paragraph above a line that is the header of a table only until the line below it is longer."""
    check_growing("**one\n| two** |\n|-|-|\n", 60, [18])


@settings(max_examples=60)
@given(TEXT, st.integers(2, 30), st.data())
def test_text_that_grows_beyond_the_limits(text: str, width: int, data: st.DataObject) -> None:
    """Guards blocks that are not parsed with every token: what was shown meanwhile leaves nothing behind."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in LOW_LIMITS.items():
            patch.setattr(f"cbatch.cli.chat.markdown.{name}", value)
        check_growing(text, width, data.draw(st.lists(st.integers(0, len(text)), max_size=6)))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("# One\n## Two ##\nThree\n=====\nFour\n---", ["One", "Two", "Three", "Four"]),
        ("#\n#no heading", ["#", "#no heading"]),
        ("\n\none\ntwo  \nthree\n\n\n\nfour\n\n", ["one", "two", "three", "", "four"]),
        ("one\n***\ntwo", ["one", "─" * 40, "two"]),
        ("- a\n  - b\n    - c\n* d\n+ e", ["- a", "  - b", "    - c", "* d", "+ e"]),
        ("7. a\n8. b\n   text\n\n   more\n9) c", ["7. a", "8. b", "   text", "", "   more", "9) c"]),
        ("1. a\n  - b\n\n- c\n\n- d", ["1. a", "  - b", "", "- c", "", "- d"]),
        ("- [ ] a\n- [x] b\n1. [X] c\n- [y] d", ["☐ a", "☑ b", "1. ☑ c", "- [y] d"]),
        ("-\n- \nx", ["- ", "- ", "x"]),
        ("> a\nlazy\n> > b\n>\n> - c", ["│ a", "│ lazy", "│ │ b", "│", "│ - c"]),
        ("<b>x</b>\n<!-- y -->\n&amp; &copy;", ["<b>x</b>", "<!-- y -->", "& ©"]),
        ("[a]: http://b\n[a]", ["[a]: http://b", "[a]"]),
        ("1986\\. \\*a\\* \\_ \\# \\a", ["1986. *a* _ # \\a"]),
        ("    code  x\n\n      y\ntext", ["code  x", "", "  y", "text"]),
        ("a\n-", ["a"]),
        # links, images, formulas, and stars and underscores that mean no emphasis
        ("[t](http://u) [http://a](http://a)", ["t (http://u) http://a"]),
        ("<http://a.b/c_d_e> <me@x.y> http://x.y/a_b_c", ["http://a.b/c_d_e me@x.y http://x.y/a_b_c"]),
        ("[中文](https://x.y/中文?a=%20)", ["中文 (https://x.y/中文?a=%20)"]),
        ("![an *image*](u.png)", ["[image: an image] (u.png)"]),
        ("2**3 and 4**5, a * b * c, snake_case_names", ["2**3 and 4**5, a * b * c, snake_case_names"]),
        ("a **bold that is open, and `code", ["a **bold that is open, and `code"]),
        ("$a_b_c * d * e$ and $$x_1 _y_$$", ["$a_b_c * d * e$ and $$x_1 _y_$$"]),
        ("\\(a_b_c *d*\\) and \\[x_1 _y_\\] and \\(", ["\\(a_b_c *d*\\) and \\[x_1 _y_\\] and \\("]),
        ("$5 and *6* $", ["$5 and 6 $"]),
        ("`` a`b `` &#x202e;&#9;x", ["a`b  x"]),
        # fences inside fences and lists: what follows is not code
        ("```md\n# x\n```py\na\n```\n# y\n```\n# z", ["```md", "# x", "```py", "a", "```", "# y", "```", "z"]),
        ("````\n```\n# a\n````\n# b", ["````", "```", "# a", "````", "b"]),
        ("```python\n```sh\n```\n# b", ["```python", "```sh", "```", "b"]),
        ("~~~\n```\n~~~\n# b", ["~~~", "```", "~~~", "b"]),
        ("1. a\n   ```\n   x\n    y\n\n   ```\n   - b\n2. c", ["1. a", "```", "x", " y", "", "```", "   - b", "2. c"]),
        ("- a\n  - b\n    ```\n    c\n    ```\n    d\n- e", ["- a", "  - b", "```", "c", "```", "    d", "- e"]),
        ("- ```\n  a\n  ```\n- b", ["- ", "```", "a", "```", "- b"]),
        ("- a\n  ```\n  b\nc", ["- a", "```", "b", "c"]),
        ("> ```md\n> ```py\n> a\n> ```\n> ```\n> # b", ["│ ```md", "│ ```py", "│ a", "│ ```", "│ ```", "│ b"]),
        ("```\n\ta\n  b", ["```", "    a", "  b"]),
        ("\\[\na\n- b\n\\]\n# c", ["\\[", "a", "- b", "\\]", "c"]),
        ("text\n$$\n+ b_1_\n$$", ["text", "$$", "+ b_1_", "$$"]),
    ],
)  # fmt: skip
def test_blocks_and_lines(source: str, expected: list[str]) -> None:
    """Guards what each kind of Markdown is shown as; markers, numbers and line ends are those of the source."""
    assert [line.rstrip() if line.startswith("│") else line for line in shown(source)] == expected


@pytest.mark.parametrize(
    ("source", "style", "expected"),
    [
        ("**a** b __c__", "class:strong", ["a", "c"]),
        ("*a* b _c_ ***d***", "class:emphasis", ["a", "c", "d"]),
        ("~~a~~ ~b~ ~~旧：~~新", "class:strike", ["a", "旧："]),
        ("`a` **`b`** ``c`", "class:code", ["a", "b"]),
        ("这是**重点**内容", "class:strong", ["重点"]),
        ("**重点：**内容，和**说明:**内容", "class:strong", ["重点：", "说明:"]),
        ("「**重点**」です。これは**「重要」**です", "class:strong", ["重点", "「重要」"]),
        ("他说**“重点”**是", "class:strong", ["“重点”"]),
        ("**중요**는 **(강조)**입니다", "class:strong", ["중요", "(강조)"]),
        ("**L**arge **L**anguage Donau**dampf**schiff", "class:strong", ["L", "L", "dampf"]),
        ("x**2 + y**2 and **z**", "class:strong", ["z"]),
        ("[t](http://u) <http://a> ![i](v)", "class:link", ["http://u", "http://a", "v"]),
        ("# a *b*", "class:heading", ["a ", "b"]),
        ("- a\n1. b", "class:marker", ["- ", "1. "]),
        ("> a\n> > b", "class:quote", ["│ ", "│ │ "]),
        ("```python\ndef f(): return 'a' + 1  # b\n```", "class:pygments.literal", ["'a'", "1"]),
        ("```python\ndef f(): return 'a' + 1  # b\n```", "class:pygments.keyword", ["def", "return"]),
        ("```python\nx = 1\nif not", "class:code", ["if not"]),
        ("```no-language\nif x\n```", "class:code", ["if x"]),
        ("```python\n~~~\n```\n~~~~ js\n```\n~~~~", "class:fence", ["```python", "```", "~~~~ js", "~~~~"]),
    ],
)
def test_styles(source: str, style: str, expected: list[str]) -> None:
    """Guards emphasis, also beside East Asian text, where CommonMark sees none, and the colours of code."""
    assert styled(source, style)[-len(expected) :] == expected


def test_text_and_code_are_broken_where_they_do_not_fit() -> None:
    """Guards words, which stay whole, items, which are indented, and code, which keeps its spaces and has no indent."""
    source = "# Title\n- a **bold** item that is long\n```python\nx  =  1  # long enough to be cut\n```"
    assert shown(source, 20) == [
        "Title", "- a bold item that ", "  is long", "```python", "x  =  1  # long enou", "gh to be cut", "```",
    ]  # fmt: skip


TABLE = "| Name | Size |\n|:-----|-----:|\n| **a** | 1 |\n| b c | 1,000 |\n"


@pytest.mark.parametrize(
    ("source", "width", "expected"),
    [
        (TABLE, 40, ["Name │  Size", "─────┼──────", "a    │     1", "b c  │ 1,000"]),
        ("|a|b|\n|:-:|-|\n|日本語|x|", 40, ["  a    │ b", "───────┼──", "日本語 │ x"]),
        (
            "a | b\n--|--\nfour words in here | x \\| y\nz",
            16,
            ["a        │ b", "─────────┼──────", "four     │ x | y", "words in │", "here     │", "z        │"],
        ),
        (TABLE, 9, ["Name: a", "Size: 1", "", "Name: b c", "Size:", "1,000"]),
        ("text\n| a | b |\n|---|---|\n| 1 |\n\nafter", 40, ["text", "a │ b", "──┼──", "1 │", "", "after"]),
        ("| a | b |\n|--", 40, ["| a | b |", "|--"]),
        ("| a | b |\n|--|--", 40, ["a │ b", "──┼──"]),
        ("- | a |\n  |---|\n  | 1 |\n- b", 40, ["- a", "  ─", "  1", "- b"]),
    ],
)
def test_tables(source: str, width: int, expected: list[str]) -> None:
    """Guards tables: alignment, wide characters, cells that are wrapped, and screens too narrow for columns."""
    assert [line.rstrip() for line in shown(source, width)] == [line.rstrip() for line in expected]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a\n```py\nx\n\n\ty  \n```\n~~~\nz\n~~~", ["x\n\n\ty  \n", "z\n"]),
        ("- a\n  ```\n  b\n   c\n  ```\n> ```\n> d\n> ```", ["b\n c\n", "d\n"]),
        ("```md\n```py\na\n```\n```\n```\nopen", ["```py\na\n```\n", "open"]),
        ("    indented\n\n`inline`", []),
    ],
)
def test_code_is_found(source: str, expected: list[str]) -> None:
    """Guards `/copy code`: all fenced blocks, exactly as they are written."""
    assert find_code(source) == expected


@pytest.mark.parametrize(
    ("start", "source"),
    [
        ("", "- **b** #\n"),
        ("```python\n", "x# = 'a'\n"),
        ("a | b\n--|--\n", "a | b\n"),
        ("> - ", "word "),
    ],
)
def test_the_time_of_a_reply_is_linear(source: str, start: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the screen against long lists, tables, code and lines, which would be laid out anew for each token."""
    parsed, wrapped, parse = list[int](), list[int](), PARSER.block.parse
    monkeypatch.setattr(PARSER.block, "parse", lambda text, *rest: (parsed.append(len(text)), parse(text, *rest)))

    def counted(fragments: Iterable[Fragment], width: int, *, at_words: bool = True) -> list[StyledLine]:
        line = list(fragments)
        wrapped.append(sum(len(text) for _, text in line))
        return wrap(line, width, at_words=at_words)

    for module in ("layout", "lines"):
        monkeypatch.setattr(f"cbatch.cli.chat.markdown.{module}.wrap", counted)
    text = start + "".join(source.replace("#", str(number)) for number in range(10_000 // len(source)))
    layout = MarkdownLayout(80)
    for end in range(0, len(text), 50):
        layout.lines(text[:end], is_whole=False)
    assert sum(parsed) < 100 * len(text) and sum(wrapped) < 100 * len(text)
    assert layout.lines(text) == MarkdownLayout(80).lines(text)
