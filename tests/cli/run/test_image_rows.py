"""`cbatch run` on rows with images: replicas, resuming, reports and figures."""

from __future__ import annotations

import base64
import os
import re
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

from cbatch.api import Engine
from cbatch.base.config import EngineConfig
from cbatch.cli.common import loading
from tests.support.command import Command
from tests.support.image_model import save_image_model, save_picture
from tests.support.in_process_replicas import InProcessLauncher


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_image_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def command(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    monkeypatch.chdir(tmp_path)
    made = Command(tmp_path, model, rows(tmp_path))
    made.printed = capfd
    made.options += ("--max-tokens", "4", "-q")
    return made


def rows(folder: Path) -> list[Any]:
    """Rows with one of three pictures each, some with its bytes, and one without."""
    for number in range(3):
        save_picture(folder / f"{number}.png", number)
    data = base64.b64encode((folder / "0.png").read_bytes()).decode()
    names = ["0.png", "1.png", f"data:image/png;base64,{data}", "2.png", "1.png"]
    parts = [[{"type": "image_url", "image_url": {"url": name}}, {"type": "text", "text": "?"}] for name in names]
    return [{"messages": [{"role": "user", "content": part}]} for part in (*parts, "no picture")]


def test_pictures_that_cannot_be_used_harm_no_other_row(command: Command) -> None:
    """Guards a folder of a user: a sentence for each bad picture that names it, and good rows as if they were alone."""
    folder, whole = Path("photos"), Path("0.png").read_bytes()
    folder.mkdir()
    files = {
        "cut.png": whole[:2000],
        "half.png": whole[: len(whole) // 2],
        "empty.png": b"",
        "notes.png": b"no picture",
    }
    files |= {"flipped.png": whole[:100] + bytes([255 - whole[100]]) + whole[101:], "drawing.png": b"<svg/>"}
    for name, data in files.items():
        (folder / name).write_bytes(data)
    os.mkfifo(folder / "pipe.png")
    (folder / "out.png").symlink_to(Path("/etc/passwd"))
    names = [
        *(f"photos/{name}" for name in (*files, "pipe.png", "out.png", "missing.png")),
        "photos",
        "data:image/png;base64,A",
    ]
    good = [{**row, "id": number} for number, row in enumerate(rows(Path()))]
    bad = [{"messages": [{"role": "user", "content": [
        {"type": "image", "path": "0.png"}, {"type": "image", "path": name}]}]} for name in names]  # fmt: skip

    def without_place(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{**row, "index": 0, "check": ""} for row in found if "error" not in row]

    code, alone = command.answer(good)
    assert code == 0 and len(alone) == len(good)
    code, found = command.answer([row for pair in zip_longest(bad, good) for row in pair if row])
    assert code == 1 and without_place(found) == without_place(alone)
    errors = [row["error"] for row in found if "error" in row]
    for name, error in zip(names, errors, strict=True):
        assert error["code"] == "invalid_row", error
        assert re.match(
            rf"line \d+: image 2 of message 1 \({name[:21]}\) cannot be (decoded|read|used): .", error["message"]
        )


def test_replicas_give_the_same_bytes(command: Command, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards rows with images on their way to other processes: they travel as paths and bytes."""
    assert command() == 0
    whole = command.data
    with Engine(str(model), dtype="float32", device="cpu") as engine:

        def make(options: Any, config: EngineConfig) -> InProcessLauncher:
            return InProcessLauncher(engine, options.wanted, deaths={1: 1})

        monkeypatch.setattr(loading, "make_launcher", make)
        assert command("--replicas", "2", "--overwrite") == 0 and command.data == whole
        assert engine.stats().num_images >= 5


def test_a_picture_that_changed_is_run_again(command: Command) -> None:
    """Guards keys: a row depends on the contents of its pictures, and not on where they are or when they changed."""
    assert command() == 0
    before = command.rows()
    Path("1.png").touch()
    assert command("--resume") == 0 and command.figures()["rows_kept"] == 6
    assert command.figures()["images"] == {"given": 0, "encoded": 0, "seconds": 0.0}
    save_picture(Path("1.png"), 9)
    assert command("--resume") == 2
    assert command("--resume", "--recompute-changed") == 0
    assert (command.figures()["rows"], command.figures()["rows_kept"]) == (2, 4)
    after = command.rows()
    assert [one["key"] != other["key"] for one, other in zip(before, after, strict=True)] == [
        index in (1, 4) for index in range(6)
    ]
    Path("1.png").unlink()
    assert command("--resume", "--recompute-changed") == 1
    assert [row["index"] for row in command.rows() if "error" in row] == [1, 4]


def test_reports_and_figures_count_images(command: Command) -> None:
    """Guards the tokens of images in --check and its estimate, images in --stats, and the time in --timings."""
    assert command("--check", "--estimate") == 0
    report = command.report()
    assert report["prompt_tokens"]["total"] > 5 * 16 and report["prompt_tokens"]["max"] > 30
    assert report["estimate"]["trial"]["rows"] == 6
    assert command("--timings", "--overwrite", "--no-prefix-cache") == 0
    images, shown = command.figures()["images"], [row.get("images_s", 0) for row in command.rows()]
    assert (images["given"], images["encoded"]) == (5, 3) and images["seconds"] > 0
    assert sum(shown) == pytest.approx(images["seconds"], abs=1e-4) and shown[5] == 0
    assert command("--media-cache", "much", "--overwrite") == 2
