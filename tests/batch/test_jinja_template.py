"""Prompts by Jinja: what a template sees, and that it reaches nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from cbatch.base.errors import ConfigError, RequestError
from cbatch.batch.templates import JinjaTemplate

PATH = Path("t.jinja")
ROW = {"city": "Oslo", "tags": ["a", "b"], "note": None, "two words": "x"}


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_template_sees_the_columns() -> None:
    """Guards loops, filters, columns that Jinja cannot name, and the newline at the end of a file."""
    PATH.write_text(
        "In {{ city | upper }}:{% for tag in tags %} {{ loop.index }}{{ tag }}{% endfor %} {{ row['two words'] }}\n"
    )
    template = JinjaTemplate(PATH)
    assert template.render(ROW) == "In OSLO: 1a 2b x"
    assert template.names == ["city", "tags"] and template.constant_behind == len(": ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{{ town }}", "'town' is undefined"),
        ("{{ note }}", "prints a column that is null"),
        ("{{ city.x.y }}", "no attribute 'x'"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ raise_exception('no ' + city) }}", "no Oslo"),
        ("{{ city.__class__.__mro__ }}", "unsafe"),
        ("{{ ''.format.__globals__ }}", "unsafe"),
        ("{% include 'x' %}", "no loader"),
    ],
)
def test_what_a_row_cannot_be_rendered_with(text: str, message: str) -> None:
    """Guards rows: whatever a template raises, also at the walls of its sandbox, is an error of that row."""
    PATH.write_text(text)
    with pytest.raises(RequestError, match=message) as raised:
        JinjaTemplate(PATH).render(ROW)
    assert raised.value.code == "template_error"


def test_a_file_that_is_no_template() -> None:
    """Guards the start of a run against a template with a mistake, and one that is not there."""
    PATH.write_text("a\n{% if %}")
    with pytest.raises(ConfigError, match=r"The template .*t.jinja, line 2 cannot be read: Expected an expression"):
        JinjaTemplate(PATH)
    with pytest.raises(ConfigError, match=r"Cannot read the template .*No such file"):
        JinjaTemplate(Path("none.jinja"))
