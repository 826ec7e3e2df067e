"""Keeps the documentation true: links, commands, Python blocks, and references that leave nothing out."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import click
import pytest

import cbatch
from cbatch import Completion, Engine
from cbatch.cli.chat.commands import files, sessions
from cbatch.cli.chat.commands.registry import ALIASES, COMMANDS
from cbatch.cli.main import cli
from cbatch.cli.run.stats import RunStats
from cbatch.engine.stats import EngineStats
from cbatch.requests import param_names, rows
from cbatch.schedule.limits import EngineLimits
from scripts import reference
from scripts.benchmarks.harness import BENCHMARKS

assert files and sessions  # they put themselves into the table

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
EXPECTED_OUTPUT = {"chat_tools": "this model's chat template takes no tools", "stream": "l-a-m-p"}
COMMAND_NAMES = cli.list_commands(click.Context(cli))
MAX_README_BYTES = 9000
RECORDS = "Choice Completion Score StreamEvent TemplateOptions TokenEvent TokenLogprob ToolCall Usage".split()
CODES_OF_PYTHON = {"cancelled"}
"""Error codes that never stand in a row."""

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_CODE = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_SOURCE = re.compile(r'(?:src|srcset)="([^"]+)"')
_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def text_without_blocks(page: Path) -> str:
    return _FENCE.sub("", page.read_text())


@cache
def sources(folder: str) -> str:
    """The text of all modules in a folder."""
    return "".join(path.read_text() for path in sorted((ROOT / folder).rglob("*.py")))


@cache
def words_of_the_package() -> frozenset[str]:
    return frozenset(re.findall(r"\w+", sources("cbatch")))


def blocks(page: Path, language: str) -> list[str]:
    return [body for kind, body in _FENCE.findall(page.read_text()) if kind == language]


def anchors(page: Path) -> set[str]:
    """Targets of links into a page, as GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", text_without_blocks(page), re.MULTILINE)
    made = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
    before = [made[:place].count(anchor) for place, anchor in enumerate(made)]
    return {f"{anchor}-{count}" if count else anchor for anchor, count in zip(made, before, strict=True)}


def command(name: str) -> click.Command:
    found = cli.get_command(click.Context(cli), name)
    assert found is not None
    return found


def options_of(name: str) -> set[str]:
    return {
        option for param in command(name).params for option in (*param.opts, *param.secondary_opts) if "--" in option
    }


def shell_commands(page: Path) -> Iterator[list[str]]:
    """Each simple command of the page's shell blocks, and of its code spans that begin with one of ours."""
    lines = [line for block in blocks(page, "sh") for line in block.replace("\\\n", " ").splitlines()]
    starts = tuple(f"cbatch {name}" for name in COMMAND_NAMES)
    spans = " ".join(text_without_blocks(page).split("\n"))
    lines += [span for span in _CODE.findall(spans) if span.startswith(starts)]
    for line in lines:
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if set(word) <= set(";|&"):
                if words:
                    yield words
                words = []
            else:
                words.append(word)


def section_of(page: Path, heading: str) -> str:
    """The text between a heading and the next one of any level."""
    pattern = rf"^##+ {re.escape(heading)}\n(.*?)(?=^##|\Z)"
    (section,) = re.findall(pattern, page.read_text(), re.DOTALL | re.MULTILINE)
    return section


def rows_of_tables(page: Path, heading: str = "") -> list[str]:
    """The code spans in the first cells of a page's tables: what it gives a meaning to.

    heading: only tables under this heading
    """
    text = section_of(page, heading) if heading else page.read_text()
    first_cells = re.findall(r"^\| (.*?) \|", text.replace(r"\|", "/"), re.MULTILINE)
    return [span for cell in first_cells for span in _CODE.findall(cell)]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    """Guards against links to files, pictures and headings that were moved or renamed."""
    text = text_without_blocks(page)
    for target in _LINK.findall(text) + _SOURCE.findall(text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        if anchor:
            assert anchor in anchors(linked), target


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_can_be_parsed(page: Path) -> None:
    """Guards against commands with options, modules or files that do not exist any more."""
    for words in shell_commands(page):
        if words[0] == "cbatch":
            arguments = words[1:]
            if arguments and arguments[0] in COMMAND_NAMES:
                if arguments[1:]:  # else it is a name
                    command(arguments[0]).make_context(arguments[0], arguments[1:])
            else:
                assert arguments in (["--version"], ["--help"]), words
        elif words[:2] == ["python", "-m"] and words[2].startswith("scripts"):
            path = ROOT.joinpath(*words[2].split("."))
            assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), words
            assert words[2] != "scripts.benchmarks" or words[3] in BENCHMARKS, words
        elif words[0] == "python" and words[1] != "-m":
            assert (ROOT / words[1]).is_file(), words


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_options_exist(page: Path) -> None:
    """Guards against text about an option that was renamed or dropped; those of scripts count, too."""
    known = set().union(*map(options_of, COMMAND_NAMES)) | {"--help", "--help-all", "--version"}
    spans = _CODE.findall(text_without_blocks(page))
    ours = [span for span in spans if not span.startswith(("pip", "git", "pytest", "pre-commit"))]
    options = {option for span in ours for option in _OPTION.findall(span)} - known
    assert {option for option in options if f'"{option}"' not in sources("scripts")} == set()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_paths_and_names_exist(page: Path) -> None:
    """Guards against text about files that were moved, and classes and functions that were renamed."""
    spans = _CODE.findall(text_without_blocks(page))
    paths = [span for span in spans if re.fullmatch(r"(cbatch|tests|scripts|docs|examples)/[\w./-]*", span)]
    assert [path for path in paths if "NAME" not in path and not (ROOT / path).exists()] == []
    names = [span for span in spans if re.fullmatch(r"[A-Z][a-z]+[A-Z]\w*(\.\w+)*|\w+\.\w+\(\)", span)]
    assert [name for name in names if not words_of_the_package().issuperset(name.removesuffix("()").split("."))] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_python_blocks_import_what_exists(page: Path) -> None:
    """Guards against examples that do not compile, or import names that are gone."""
    for node in [node for block in blocks(page, "python") for node in ast.walk(ast.parse(block))]:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("cbatch"):
            module = importlib.import_module(node.module)
            assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "docs" / "python.md"], ids=name_of)
def test_python_blocks_run(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against examples that raise, or print something else than the comment beside `print` says.

    They build on each other, as in a notebook.
    """
    names: dict[str, Any] = {}
    for block in blocks(page, "python"):
        exec(compile(block, name_of(page), "exec"), names)
        printed = capsys.readouterr().out.splitlines()
        for expected in re.findall(r"^ *print\(.*\)  # (.+)$", block, re.MULTILINE):
            assert expected in printed, block
            del printed[: printed.index(expected) + 1]
    names["engine"].close()


@pytest.mark.parametrize("path", EXAMPLES, ids=name_of)
def test_examples_run(path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against examples that raise, say nothing, or do not say what they are for."""
    assert ast.get_docstring(ast.parse(path.read_text()))
    if path.stem == "evaluation_harness":
        pytest.importorskip("lm_eval", reason="needs `pip install lm_eval`")
    monkeypatch.setattr(sys, "argv", [str(path)])
    runpy.run_path(str(path), run_name="__main__")
    assert EXPECTED_OUTPUT.get(path.stem, "Paris") in capsys.readouterr().out


def test_readme_is_short() -> None:
    """Guards the time it takes a stranger to read it."""
    assert len((ROOT / "README.md").read_bytes()) <= MAX_README_BYTES


def test_readme_says_how_to_run_it_and_its_tests() -> None:
    """Guards the two commands of a stranger, one of which continuous integration reads from there."""
    commands = "pip install . && cbatch run scripts/prompts.jsonl -o out.jsonl", "pip install '.[dev]' && pytest"
    assert set(commands) <= set((ROOT / "README.md").read_text().splitlines())


def test_the_reference_is_what_is_declared() -> None:
    """Guards against a new option that the reference lacks: `python -m scripts.reference` writes it."""
    assert reference.PAGE.read_text() == reference.write(reference.commands())


def test_every_field_of_a_row_is_documented() -> None:
    """Guards against a new parameter, or a field of a request, that the reference of rows leaves out."""
    page = ROOT / "docs" / "batch.md"
    documented = {*rows_of_tables(page), *rows_of_tables(reference.PAGE)}
    assert {*rows.KNOWN, *rows.ENVELOPE_FIELDS} - documented == set()
    refused = param_names.REFUSED.keys()  # whose error rows say what to do instead
    in_text = set(re.findall(r"\w+", " ".join(_CODE.findall(page.read_text()))))
    assert rows.API_FIELDS - refused - documented - in_text == set()


def test_every_error_code_is_documented() -> None:
    """Guards against an error code that a reader meets and does not find, and one among those of rows that is none."""
    codes = set(re.findall(r'\b(?:RequestError\(|wrong\([^",]+,)\s*"(\w+)"', sources("cbatch")))
    assert {"invalid_row", "internal_error"} | CODES_OF_PYTHON <= codes
    in_rows = set(rows_of_tables(ROOT / "docs" / "batch.md", "Error codes"))
    assert in_rows >= codes - CODES_OF_PYTHON and in_rows.isdisjoint(CODES_OF_PYTHON)
    assert set(rows_of_tables(ROOT / "docs" / "python.md", "Errors")) >= CODES_OF_PYTHON


@pytest.mark.parametrize(("page", "names"), [("batch", RunStats().as_dict()), ("chat", COMMANDS | ALIASES)])
def test_every_figure_and_chat_command_is_documented(page: str, names: dict[str, Any]) -> None:
    """Guards against a figure of `--stats` without an explanation, and a command that the chat's page leaves out."""
    documented = {span.split()[0].removeprefix("/") for span in rows_of_tables(ROOT / "docs" / f"{page}.md")}
    assert names.keys() - documented == set()


def test_every_thread_is_documented() -> None:
    """Guards against a thread that the architecture page does not know."""
    started = {name.rstrip("-") for name in re.findall(r'name=f?"(cbatch-[a-z-]+)', sources("cbatch"))}
    started |= set(re.findall(r'ThreadPoolExecutor\(\w+, "(cbatch-\w+)"', sources("cbatch")))
    documented = {name.removesuffix("-N") for name in rows_of_tables(ROOT / "docs" / "architecture.md")}
    assert {"cbatch-engine", "cbatch-cpu"} <= started
    assert started - documented == set()


def test_every_field_of_the_api_is_documented() -> None:
    """Guards against a public field, method, attribute or argument that no docstring describes."""
    with Engine() as engine:
        made = {type(one): vars(one).keys() for one in (engine, engine.core, Completion())}
    for record in (*(getattr(cbatch, name) for name in RECORDS), EngineLimits, EngineStats, *made):
        words = set(re.findall(r"\w+", " ".join(base.__doc__ or "" for base in record.__mro__[:-1])))
        routines = [
            value for value in vars(record).items() if inspect.isroutine(value[1]) or type(value[1]) is property
        ]
        own = {name for name, value in routines if inspect.getdoc(value)}
        public = {name for name in vars(record).keys() | made.get(record, set()) if not name.startswith("_")}
        assert public - words - own == set(), record
    for name in ("generate", "chat", "stream", "agenerate", "astream", "score", "map", "encode"):
        points = name in ("chat", "stream", "agenerate", "astream")  # to the docstring of `generate`
        text = f"{inspect.getdoc(getattr(Engine, name))} {inspect.getdoc(Engine.generate) if points else ''}"
        arguments = set(inspect.signature(getattr(Engine, name)).parameters) - {"self"}
        assert arguments <= set(re.findall(r"\w+", text)), name
