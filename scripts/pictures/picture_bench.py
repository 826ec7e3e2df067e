"""Draws the pictures of the documentation, and an example of a report, from runs on this machine: docs/bench/.

    python -m scripts.pictures.picture_bench
    python -m scripts.pictures.picture_bench load step

Each picture is written twice, for light and for dark pages. If Chromium is installed, so is the report's
top. All of it takes about five minutes on two cores.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from scripts.pictures.look_at_page import look

FOLDER = Path(__file__).parents[2] / "docs" / "bench"

SCREEN_WIDTH = 1000
"""Pixels of the screens of the report."""

NAMES, AGES = ("Felix", "Zoe", "Milo", "Luna", "Hugo", "Clara", "Jonas", "Nora"), (20, 31, 42, 53)


@dataclass(frozen=True, slots=True)
class Drawing:
    """A bench and the files that are kept of it. `has_rows`: whether its work is `rows.jsonl`."""

    arguments: str
    keeps: tuple[str, ...]
    has_rows: bool = False


DRAWINGS = {
    "report": Drawing("--peer transformers-generate,transformers-cb --report report.html", ("timeline", "report.html")),
    "techniques": Drawing(
        "--ablate kv-cache,ragged,dynamic --peer transformers-generate,transformers-cb", ("utilisation", "speed")
    ),
    "step": Drawing(
        "--strategies continuous --rounds 1 --batch-size 6 --requests 24 --input-len 24:96 --output-len 32:96",
        ("step",),
    ),
    "speculation": Drawing("rows.jsonl --strategies continuous,drafts --batch-size 2", ("speculation",), has_rows=True),
    "users": Drawing(
        "--users 64 --rate 4 --duration 20s --think 1s --input-len 16:128 --output-len 16:128", ("users",)
    ),
    "load": Drawing(
        "--users 1,8,32,64,128,256,512 --rounds 3 --duration 5s --think 1s --input-len 16:128 --output-len 16:128 "
        "--max-seqs 128 --target-step-ms 18",
        ("load",),
    ),
    "skew": Drawing("--skew 0,0.25,0.5,0.75,1,1.25,1.5", ("skew",)),
}
"""By the words that name them on the command line."""


def rows() -> str:
    """Prompts that follow one template."""
    prompts = [f"Give me a JSON object with name {name} and age {age}." for name in NAMES for age in AGES]
    return "".join(f"{json.dumps({'prompt': prompt})}\n" for prompt in prompts)


def draw(drawing: Drawing, folder: Path) -> None:
    """Runs a bench in an empty folder and keeps the files."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        if drawing.has_rows:
            (place / "rows.jsonl").write_text(rows())
        command = ["cbatch", "bench", *drawing.arguments.split(), "--plot", "pictures"]
        print(" ".join(command), flush=True)
        subprocess.run(command, cwd=place, check=True, stdout=subprocess.DEVNULL)
        for kept in drawing.keeps:
            files = (
                [place / kept] if "." in kept else [place / "pictures" / f"{kept}{end}.svg" for end in ("", "-dark")]
            )
            for file in files:
                shutil.copy(file, folder)
                print(f"  {file.name}, {file.stat().st_size / 1000:,.0f} kB", flush=True)
                if file.suffix == ".html":
                    take_screens(folder / file.name)


def take_screens(page: Path) -> None:
    """Writes what stands at the top of a page, on a light and on a dark screen, beside it."""
    browser = shutil.which("chromium")
    if browser is None:
        print("  no screens of it: Chromium is not installed")
        return
    for dark in (False, True):
        target = page.with_name(f"{page.stem}{'-dark' if dark else ''}.png")
        problems = look(browser, page.read_text(), SCREEN_WIDTH, target, dark=dark, top=True)
        print("; ".join([f"  {target.name}, {target.stat().st_size / 1000:,.0f} kB", *problems]), flush=True)


def main(names: list[str]) -> None:
    unknown = [name for name in names if name not in DRAWINGS]
    if unknown:
        sys.exit(f"{', '.join(unknown)}: not among {', '.join(DRAWINGS)}")
    for name in names or DRAWINGS:
        draw(DRAWINGS[name], FOLDER)


if __name__ == "__main__":
    main(sys.argv[1:])
