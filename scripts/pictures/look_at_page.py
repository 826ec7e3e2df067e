"""Opens a page in Chromium at three widths, on a light and on a dark screen, and says what is wider than the screen.

    python -m scripts.pictures.look_at_page docs/bench/report.html -o screens

Writes a picture of each into a folder: of all of the page, or of its top (`--top`). `--open` unfolds the details.
Fails if anything outside of a box that scrolls reaches beyond the screen.
"""

from __future__ import annotations

import argparse
import html
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

WIDTHS = (1280, 800, 400)
TOP_HEIGHT = 900
"""Pixels of a page's top."""

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--virtual-time-budget=3000",
)

FRAME = """<!DOCTYPE html><meta name="color-scheme" content="light dark"><style>body {{ margin: 0 }}
iframe {{ width: {width}px; height: {height}px; border: 0; display: block }} pre {{ display: none }}</style>
<iframe srcdoc="{page}"></iframe><pre></pre><script>
document.querySelector("iframe").onload = event => {{
  const page = event.target.contentDocument, wide = [];
  for (const one of page.body.querySelectorAll("*")) {{
    const box = one.getBoundingClientRect();
    if (!one.closest(".wide *") && box.width && (box.right > {width} + 0.5 || box.left < -0.5))
      wide.push(one.tagName + " " + one.textContent.slice(0, 40));
  }}
  document.querySelector("pre").textContent = JSON.stringify({{
    height: page.documentElement.scrollHeight, width: page.documentElement.scrollWidth, wide: wide,
    dark: event.target.contentWindow.matchMedia("(prefers-color-scheme: dark)").matches }});
}}</script>
"""
"""A frame is as wide as one wants, unlike the window of a browser. What is found in it is the text of `pre`."""


def run_browser(browser: str, *arguments: str, dark: bool) -> str:
    """Runs Chromium once, with settings of its own, and returns what it prints."""
    with tempfile.TemporaryDirectory() as profile:
        scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
        command = [browser, *FLAGS, scheme, f"--user-data-dir={profile}", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


def look(browser: str, page: str, width: int, target: Path, *, dark: bool, top: bool) -> list[str]:
    """Writes a picture of the page and returns what is wrong with it."""
    with tempfile.TemporaryDirectory() as folder:
        frame = Path(folder) / "frame.html"
        frame.write_text(FRAME.format(width=width, height=TOP_HEIGHT, page=html.escape(page)))
        printed = run_browser(browser, "--dump-dom", f"file://{frame}", dark=dark)
        match = re.search(r"<pre>(.*?)</pre>", printed, re.DOTALL)
        assert match is not None and match[1], "the page was not loaded"
        found = json.loads(html.unescape(match[1]))
        height = TOP_HEIGHT if top else found["height"]
        frame.write_text(FRAME.format(width=width, height=height, page=html.escape(page)))
        shot = f"--screenshot={target.resolve()}"
        run_browser(browser, shot, f"--window-size={max(width, 500)},{height}", f"file://{frame}", dark=dark)
    problems = [f"wider than the screen: {words}" for words in found["wide"]]
    if found["width"] > width:
        problems.append(f"the page is {found['width']} pixels wide and scrolls")
    if found["dark"] is not dark:
        problems.append(f"the screen is {'light' if dark else 'dark'}")
    return problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", type=Path)
    parser.add_argument("-o", "--output", type=Path, default=Path("screens"))
    parser.add_argument("--top", action="store_true")
    parser.add_argument("--open", action="store_true")
    options = parser.parse_args()
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("Chromium is not installed: apt-get install chromium")
    options.output.mkdir(parents=True, exist_ok=True)
    page = options.page.read_text()
    if options.open:
        page = page.replace("<details>", "<details open>")
    count = 0
    for width in WIDTHS:
        for dark in (False, True):
            name = f"{options.page.stem}-{width}{'-dark' if dark else ''}.png"
            problems = look(browser, page, width, options.output / name, dark=dark, top=options.top)
            print(f"{name}: {'; '.join(problems) or 'fits'}", flush=True)
            count += len(problems)
    sys.exit(1 if count else 0)


if __name__ == "__main__":
    main()
