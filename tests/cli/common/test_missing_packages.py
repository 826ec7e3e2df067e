"""Packages of extras that are not installed: every command says so before it loads a model."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from cbatch.cli.main import run_command
from cbatch.extras import EXTRAS

NO_MODEL = ["-m", "/no/such/model"]
"""Whatever is told of this is told too late."""


@pytest.mark.parametrize(
    "line",
    [
        "llguidance: run {rows} --regex a+",
        "llguidance: run {rows} --json-schema {{}} --check",
        'llguidance: run {rows} --param \'choice=["a", "b"]\'',
        "llguidance: chat Hi --regex a+",
        "pyarrow: run {rows} -o {rows}.parquet",
        "pyarrow: run {rows} -o {rows}.csv.zst",
        "pyarrow: run {parquet}",
        "pyarrow: run {zstd}",
        "pyarrow: bench {parquet}",
        "jsonschema: run {rows} --validate json-schema={{}}",
        "mcp: run {rows} --tools {servers}",
        "matplotlib: bench --plot {rows}.pictures",
        "matplotlib: bench --users 3 --report {rows}.html",
        "fsspec: run {rows} --allow-remote-media",
        "ray: run {rows} -o {rows}.jsonl --ray auto",
    ],
)
def test_a_missing_package_is_told_at_the_start(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards runs that would load a model first, or answer every row with the same error."""
    package, _, command = line.partition(": ")
    rows, parquet, zstd = (tmp_path / name for name in ("rows.jsonl", "rows.parquet", "rows.csv.zst"))
    (servers := tmp_path / "servers.json").write_text('{"mcpServers": {}}')
    rows.write_text('{"prompt": "Hi"}\n')
    parquet.write_bytes(b"PAR1")
    zstd.write_bytes(b"\x28\xb5\x2f\xfd....")
    for name in (package, "compression.zstd"):  # which Python has from 3.14 on
        monkeypatch.setitem(sys.modules, name, None)
    if "cbatch.replicas.ray_cluster" in sys.modules:  # which has imported it
        monkeypatch.setattr("cbatch.replicas.ray_cluster.ray", None)
    arguments = shlex.split(command.format(rows=rows, parquet=parquet, zstd=zstd, servers=servers))
    assert run_command([*arguments, *NO_MODEL]) == 2
    told = capsys.readouterr().err
    assert f"{package}: pip install" in told and f"[{EXTRAS[package][0]}]'" in told and "model" not in told
