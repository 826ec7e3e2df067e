"""Columns of tables and rows of programs that are images: `--template '{image:photo} Describe this.'`."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import pytest

from cbatch.base.errors import ConfigError
from cbatch.base.request import Request
from cbatch.batch.lines import RowOptions, parse_line
from cbatch.batch.tables.row_input import RowInput
from cbatch.batch.templates import PromptTemplate, lines_of
from cbatch.cli.run.options import RunOptions
from tests.media.test_pictures import inputs
from tests.support.command import Command

DATA = b"\x89PNG\r\n\x1a\n, or whatever a file begins with"
BASE64 = base64.b64encode(DATA).decode()
TEMPLATE = PromptTemplate("{q} {image:photo}{image:other}? {q}")
CONTENT = [
    {"type": "text", "text": "What "}, {"type": "image"}, {"type": "image"}, {"type": "text", "text": "? What"},
]  # fmt: skip

CELLS: dict[str, tuple[Any, Any]] = {
    "path": ("a.png", "a.png"),
    "url": (f"data:image/png;base64,{BASE64}", f"data:image/png;base64,{BASE64}"),
    "base64": (BASE64, None),
    "bytes": (DATA, None),
    "datasets": ({"bytes": DATA, "path": "b.png"}, {"bytes": None, "path": "b.png"}),
    "datasets by path": ({"bytes": None, "path": "a.png"}, {"bytes": None, "path": "a.png"}),
}
"""Cells, and what results repeat of them."""


def prepared(line: Any, folder: Path) -> Request:
    (folder / "a.png").write_bytes(DATA)
    row = inputs(folder).request(parse_line(line, RowOptions(has_columns=True, unit="row")))
    assert row.messages is not None and row.messages[0]["content"] == CONTENT
    assert [picture.read() for picture in row.pictures] == [DATA, DATA]
    return row


@pytest.mark.parametrize("name", CELLS)
def test_rows_of_programs(name: str, tmp_path: Path) -> None:
    """Guards each form of a cell: the image in its place, and no bytes of it in the results."""
    cell, kept = CELLS[name]
    (line,) = lines_of([{"q": "What", "photo": cell, "other": cell, "id": 5}], TEMPLATE)
    assert prepared(line, tmp_path).extra == {"q": "What", "photo": kept, "other": kept}


@pytest.mark.parametrize("name", CELLS)
def test_rows_of_parquet(name: str, tmp_path: Path) -> None:
    """Guards data sets of the hub, whose images are a struct of bytes and a path."""
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    import pyarrow

    cell, kept = CELLS[name]
    file = io.BytesIO()
    parquet.write_table(pyarrow.table({"q": ["What"], "photo": [cell], "other": [cell]}), file)
    file.seek(0)
    (line,) = RowInput(file, "in", "parquet", template=TEMPLATE).lines()
    assert prepared(line, tmp_path).extra == {"q": "What", "photo": kept, "other": kept}


@pytest.mark.parametrize("name", ["base64", "datasets", "path"])
def test_columns_prompt_and_images(name: str, tmp_path: Path) -> None:
    """Guards data sets with a list of images beside each prompt, without a template: results have no bytes of them."""
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    import pyarrow

    cell, kept = CELLS[name]
    file = io.BytesIO()
    parquet.write_table(pyarrow.table({"prompt": ["What"], "images": [[cell, cell]]}), file)
    file.seek(0)
    (line,) = RowInput(file, "in", "parquet").lines()
    (tmp_path / "a.png").write_bytes(DATA)
    row = inputs(tmp_path).request(parse_line(line, RowOptions(has_columns=True, unit="row")))
    assert [picture.read() for picture in row.pictures] == [DATA, DATA]
    assert row.extra == {"prompt": "What", "images": [kept, kept]}


def test_rows_of_csv_and_of_lines(tmp_path: Path) -> None:
    """Guards tables of text, whose images are paths or base64."""
    (line,) = RowInput(
        io.BytesIO(f"q,photo,other\nWhat,a.png,{BASE64}\n".encode()), "in", "csv", template=TEMPLATE
    ).lines()
    assert prepared(line, tmp_path).extra == {"q": "What", "photo": "a.png", "other": None}
    cells = {"q": "What", "photo": "a.png", "other": {"bytes": BASE64}}
    (line,) = RowInput(io.BytesIO(json.dumps(cells).encode()), "in", "jsonl", template=TEMPLATE).lines()
    assert prepared(line, tmp_path).extra["other"] == {"bytes": None}


def test_images_of_pillow_are_cells(tmp_path: Path) -> None:
    """Guards rows of `datasets`, which decodes images itself."""
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed").new("CMYK", (3, 2))
    (line,) = lines_of([{"photo": image}], PromptTemplate("{image:photo}"))
    row = inputs(tmp_path).request(parse_line(line, RowOptions(has_columns=True)))
    assert row.pictures[0].read().startswith(b"\x89PNG") and row.extra == {"photo": {"bytes": None, "path": None}}


def test_bad_cells_are_errors_of_their_rows(tmp_path: Path) -> None:
    """Guards tables with holes, and numbers that are no images."""
    reasons = {None: "the column 'photo' of the template is null", "": "image 1 of message 1 must have one of",
               3: "image 1 of message 1 must have one of"}  # fmt: skip
    for cell, reason in reasons.items():
        (line,) = lines_of([{"photo": cell}], PromptTemplate("{image:photo}"))
        error = parse_line(line, RowOptions(has_columns=True)).error
        assert error is not None and reason in str(error)


@pytest.mark.parametrize("text", ["{image:}", "{image:a.b}", "{image!r:a}", "{photo:a}", "{image:{a}}"])
def test_only_plain_names_are_images(text: str) -> None:
    """Guards templates against forms that reach into a value, and `{image}`, a column like any other."""
    if text == "{image:}":
        assert PromptTemplate(text).fields({"image": "a"}, {}) == {"prompt": "a"}
        return
    with pytest.raises(ConfigError, match="may have only plain names of columns in braces"):
        PromptTemplate(text)


def test_images_lie_beside_their_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards rows of somebody else, whose paths are meant from their file; stdin has the working folder."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "rows.jsonl").touch()
    monkeypatch.chdir(tmp_path)

    def root(**options: Any) -> Path:
        return Path(RunOptions(**options).row_options().defaults.media_root or "")

    assert root(input="data/rows.jsonl") == tmp_path / "data"
    assert root() == root(input="https://host/rows.jsonl") == tmp_path
    assert root(input="data/rows.jsonl", media_root=".") == tmp_path


def test_a_run_refuses_images_for_a_model_of_text(command: Command) -> None:
    """Guards runs of text models with rows of images: error rows, and the others are answered."""
    command.write([{"messages": [{"role": "user", "content": [{"type": "image", "path": "a.png"}]}]}, {"prompt": "Hi"}])
    assert command("--max-tokens", "2") == 1
    bad, good = command.rows()
    assert bad["error"] == {"code": "invalid_row", "message": "line 1: this model takes no images"} and "text" in good
