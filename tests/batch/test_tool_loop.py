"""What ends a row whose model calls tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cbatch.batch.rounds import ToolLoop
from cbatch.cli.main import run_command
from tests.cli.run.test_output_formats import ROUNDS
from tests.support.model_folder import save_model

TOOLS = 'def add(a: int, b: int) -> int:\n    """Adds."""\n    return a + b\n'


def test_a_round_that_breaks_ends_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the run against waiting for ever for a row whose thread has raised."""

    def breaks(self: ToolLoop, call: Any) -> Any:
        raise ZeroDivisionError("as planted")

    monkeypatch.setattr(ToolLoop, "_result", breaks)
    (tmp_path / "tools.py").write_text(TOOLS)
    model = save_model(tmp_path / "model", context=1500)
    (model / "chat_template.jinja").write_text(ROUNDS)
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
    rows = [{"prompt": "a", "choice": [call]}, {"prompt": "b", "max_tokens": 2}]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["run", str(source), "-o", str(out), "-m", str(model), "--tools", str(tmp_path / "tools.py"), "-q"]
    assert run_command(command) == 1
    broken, whole = map(json.loads, out.read_text().splitlines())
    assert broken["error"]["code"] == "internal_error" and "as planted" in broken["error"]["message"]
    assert "error" not in whole
