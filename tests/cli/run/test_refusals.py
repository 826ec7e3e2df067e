"""Refusals of `cbatch run`: exit code 2 and one sentence, with every file as it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from cbatch.cli.main import run_command
from tests.support.command import Command

AT_THE_START = [
    ("nowhere.jsonl", "No such file"),
    ("in.jsonl -o full.jsonl", "not empty"),
    ("in.jsonl -o in.jsonl", "is the input"),
    ("in.jsonl -o no/such/folder.jsonl", "Cannot write"),
    ("in.jsonl -o .", "a file is needed"),
    ("in.jsonl --stats in.jsonl", "--stats in.jsonl is the input;"),
    ("in.jsonl --stats no/such/file", "Cannot write no/such"),
    ("in.jsonl --top-p 7", "--top-p must be"),
    ("in.jsonl --system \udcff", "not valid UTF-8"),
    ("in.jsonl --frobnicate", "No such option"),
    ("in.jsonl --param topp=1", "no sampling parameter 'topp'"),
    ("in.jsonl --param top_p=x", "not valid JSON"),
    ('in.jsonl --json-schema {"items":{"type":"strng"}}', "no type 'strng' (did you mean 'string'?)."),
    ("in.jsonl --target-step-ms 0", "nor auto or none"),
    ("in.jsonl --media-root nowhere", "--media-root nowhere: there is no such folder."),
    ("in.jsonl --estimate", "--estimate needs --check"),
    ("in.jsonl --check --estimate --replicas 2", "on one engine"),
    ("in.jsonl --resume -o -", "--resume needs an output file"),
    ("in.jsonl --resume -o /dev/null", "a pipe cannot be read again"),
    ("in.jsonl --resume --overwrite", "give one of them"),
    ("in.jsonl --retry-errors", "--retry-errors needs --resume"),
    ("in.jsonl --recompute-changed", "--recompute-changed needs --resume"),
    ("in.jsonl -o - --journal-tokens", "--journal-tokens needs an output file"),
    ("in.jsonl -o out.jsonl --journal-tokens --replicas 2", "does not go with --replicas"),
    ("in.jsonl -o out.jsonl --continue-truncated --max-tokens 9", "--continue-truncated needs --resume"),
    ("in.jsonl -o out.jsonl --continue-truncated --resume", "--continue-truncated needs --max-tokens"),
    ("in.jsonl --tries 2", "--tries and --tell-error need --validate"),
    ("in.jsonl --validate regex=a --tell-error", "--tell-error needs --tries"),
    ("in.jsonl --validate schema.json", "is no check; give json-schema=FILE"),
    ("in.jsonl --validate regex=a --validate-timeout 0", "--validate-timeout"),
    ("in.jsonl --cache in.jsonl", "Cannot use"),
    ("in.jsonl --cache cache --cache-size 50%", "is an amount such as 4GiB"),
    ("in.jsonl --cache cache --ray auto", "--cache is a folder of this machine"),
    ("in.jsonl --lora sql", "'sql' is not NAME=PATH"),
    ("in.jsonl --lora a=b --lora a=c", "two adapters have the name a"),
    ("in.jsonl --tools tools.py -o out.jsonl", "tools.py defines no public function"),
    ("in.jsonl -o out.jsonl --journal-tokens --journal-interval nan", "nan is no finite number"),
    ("in.csv --template {tixt}", "in.csv has no column 'tixt', which the template needs"),
    ("in.csv", "in.csv has no column 'prompt'"),
    ("in.csv --template {}", "plain names of columns in braces"),
    ("in.csv --template none.jinja", "--template @none.jinja"),
    ("in.csv --template @none.jinja", "Cannot read the template none.jinja"),
    ("in.csv --template full.jsonl", "--template @full.jsonl"),
    ("in.csv --template {{text}}", "such as {text}; in a .jinja file in two."),
    ("in.csv --template {text} --template {id}", "--template is given twice"),
    ("in.csv --template {text} --shard 9/8", "--shard takes K/N"),
    ("in.csv --template {text} --output-format json -o -", "--output-format json needs an output file"),
    ("in.csv --template {text} -o out.parquet.gz", "a parquet file is compressed inside"),
    ("in.csv --template {text} -o in.csv --overwrite", "in.csv is the input"),
]
BY_THE_MODEL = [
    ("in.jsonl -m empty", "no config.json"),
    ("in.jsonl -m broken", "config.json is not valid JSON"),
    ("in.jsonl -m ./nowhere", "no model folder"),
    ("in.jsonl -m no-such/model", "no-such/model"),
    ("in.jsonl --attention magic", "no attention backend"),
    ("in.jsonl --kv-cache-memory lots", "not an amount of memory"),
    ("in.jsonl --kv-cache-memory 99999GiB", "are free"),
    ("in.jsonl --device cuda:99", "'cuda:99' cannot be used"),
    ("in.jsonl --lora sql=./nowhere", "The LoRA adapter sql cannot be used: there is no folder ./nowhere."),
]


@pytest.mark.parametrize(
    ("line", "message", "loads"), [*((*one, False) for one in AT_THE_START), *((*one, True) for one in BY_THE_MODEL)]
)
def test_refusals_are_sentences(
    line: str, message: str, loads: bool, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards files against being written, and users against 10,000 error rows, or loading a model for nothing."""
    monkeypatch.chdir(command.folder)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")  # of tools.py, in the process that tries it
    if not loads:
        monkeypatch.setattr("cbatch.cli.run.command._load", lambda *_: pytest.fail("a model was loaded"))
    if "parquet" in line:
        pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
    Path("empty").mkdir()
    Path("broken").mkdir()
    files = {
        "in.jsonl": '{"prompt": "a"}\n', "in.csv": "id,text\n1,a\n", "full.jsonl": "precious\n",
        "broken/config.json": "{nonsense", "broken/model.safetensors": "garbage", "tools.py": "x = 1\n",
    }  # fmt: skip
    for name, content in files.items():
        Path(name).write_text(content)
    assert run_command(["run", "-m", str(command.model), *line.split()]) == 2
    error = command.said()
    assert message in error and "Traceback" not in error
    Path("stats.json").unlink(missing_ok=True)
    assert {str(path): path.read_text() for path in Path().rglob("*") if path.is_file()} == files
