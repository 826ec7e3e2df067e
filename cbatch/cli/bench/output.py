"""What a bench has found: on the screen, in pictures, and on a page."""

from __future__ import annotations

import platform
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cbatch import __version__
from cbatch.cli.bench.render.tables import (
    Rows,
    cost_table,
    load_table,
    markdown_lines,
    memory_table,
    seconds,
    strategy_table,
    waste_table,
)
from cbatch.cli.bench.render.timeline import timeline
from cbatch.cli.common.console import emit, notice, safe
from cbatch.cli.common.loading import describe

if TYPE_CHECKING:
    from cbatch.cli.bench.recorder import RunRecord
    from cbatch.engine import Engine

SIDE_BY_SIDE = ("static batches", "continuous")
WIDTH = 100
"""Columns of the timeline where stdout is no terminal."""


def machine_and_model(engine: Engine) -> dict[str, Any]:
    """What all figures depend on: the machine and the model."""
    import torch
    import transformers

    shown = describe(engine)
    device = torch.cuda.get_device_name(engine.device) if engine.device.type == "cuda" else _processor()
    return {
        "machine": {
            "device": device,
            "threads": torch.get_num_threads(),
            "system": platform.platform(),
            "cbatch": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "model": f"{shown['model']}, {shown['parameters']}, {shown['dtype']}, attention {shown['attention']}",
    }


def _processor() -> str:
    """The processor's name as it calls itself, where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return name or platform.processor() or platform.machine()


def print_comparison(data: dict[str, Any], records: dict[str, RunRecord]) -> None:
    """Tables, and the timeline in characters."""
    work, floor = data["work"], data["roofline"]
    _head(data)
    emit(
        f"{work['requests']} requests ({safe(work['source'])}), {work['prompt_tokens']:,} prompt and "
        f"{work['output_tokens']:,} output tokens, {work['slots']} slots, median of {work['rounds']}"
    )
    _emit_table(strategy_table(data["strategies"]))
    emit(
        f"\nThe floor is {seconds(floor['floor_s'])}: this device copies {floor['copy_bytes_per_s'] / 1e9:,.0f} GB/s "
        f"and multiplies {floor['matrix_flops_per_s'] / 1e12:,.2f} TFLOP/s."
    )
    for sentence in floor["assumed"]:
        emit(sentence)
    _emit_table(waste_table(data["strategies"]))
    found = data.get("techniques", {})
    if "prompt_memory" in found:
        _emit_table(memory_table(found["prompt_memory"]))
    if "token_costs" in found:
        _emit_table(cost_table(found["token_costs"]))
    pair = {title: records[title] for title in SIDE_BY_SIDE if title in records}
    if pair:
        emit("")
        width = (
            shutil.get_terminal_size((WIDTH, 24)).columns if sys.stdout is not None and sys.stdout.isatty() else WIDTH
        )
        for line in timeline(pair, width):
            emit(line)


def print_load(data: dict[str, Any]) -> None:
    work = data["work"]
    _head(data)
    emit(
        f"prompts of {work['input_len']} and answers of {work['output_len']} tokens, {work['turns']} turns, "
        f"{work['think_s']:g} s of thinking; level: first token in {seconds(work['slo_ttft_s'])}, "
        f"{work['slo_tps']:g} tokens/s for each user"
    )
    _emit_table(load_table(data["points"] if "points" in data else [data["load"]]))
    if "capacity_users" in data:
        more = ", the most that were tried" if data["capacity_is_limit"] else ""
        emit(f"\nThe level holds for {data['capacity_users']:,} users at once{more}.")
    lag = max(one["worst_lag_s"] for one in data.get("points", [data.get("load")]))
    if lag > 0.1:
        emit(f"This program asked up to {seconds(lag)} too late: the load was less than it was to be.")


def write_pictures(data: dict[str, Any], records: dict[str, RunRecord], folder: Path | None) -> list[tuple[str, str]]:
    """Writes pictures into the folder, if there is one, and returns title and SVG of each."""
    from cbatch.cli.bench.load.measure import load_points
    from cbatch.cli.bench.render.plots import write_svgs

    run_metrics = {one["title"]: one for one in data.get("strategies", []) if "steps" in one}
    work = data["work"]
    objective = f"TTFT {seconds(work['slo_ttft_s'])}, {work['slo_tps']:g} tokens/s" if "slo_tps" in work else ""
    with tempfile.TemporaryDirectory() as spare:
        paths = write_svgs(folder or Path(spare), records, run_metrics, load_points(data), objective=objective)
        if folder is not None:
            notice(f"{len(paths)} pictures are in {safe(str(folder))}")
        return [(title, path.read_text(encoding="utf-8")) for title, path in paths.items()]


def write_report(path: Path, data: dict[str, Any], pictures: list[tuple[str, str]]) -> None:
    from cbatch.cli.bench.render.report import html_report

    chunks: dict[str, Any] = {"title": "cbatch bench", "model": data["model"], "machine": data["machine"]}
    chunks["work"] = data["work"]
    if "strategies" in data:
        chunks["strategies"] = {one["title"]: _shown(one) for one in data["strategies"]}
        chunks["roofline"] = {name: value for name, value in data["roofline"].items() if name != "assumed"}
        chunks |= data.get("techniques", {})
    if "points" in data:
        chunks["load"] = [_shown(one) for one in data["points"]]
    elif "load" in data:
        chunks["load"] = _shown(data["load"])
    path.write_text(html_report(chunks, pictures), encoding="utf-8")
    notice(f"the report is {safe(str(path))}")


def _shown(entry: dict[str, Any]) -> dict[str, Any]:
    """What of an entry people want to see."""
    hidden = ("strategy", "title", "elapsed_s_of_rounds", "first_error", "first_difference")
    return {name: value for name, value in entry.items() if name not in hidden}


def _head(data: dict[str, Any]) -> None:
    machine = data["machine"]
    emit(safe(data["model"]))
    emit(safe(f"{machine['device']}, {machine['threads']} threads, torch {machine['torch']}"))


def _emit_table(rows: Rows) -> None:
    emit("")
    for line in markdown_lines(rows):
        emit(line)
