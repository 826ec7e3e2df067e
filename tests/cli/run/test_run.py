"""`cbatch run` from the outside: rows in, rows out, exit codes, and sentences instead of tracebacks."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from cbatch.batch.writer import FileWriter
from cbatch.cli.main import run_command
from cbatch.engine import thread as engine_thread
from tests.support.command import Command
from tests.support.fork_server import ForkServer
from tests.support.model_folder import save_model
from tests.support.rows import read_rows, write_rows

ROWS = [
    {"id": "a", "prompt": "hello", "max_tokens": 6},
    {"prompt": "hello", "temperatur": 1},
    {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "label": "kept"},
    {"prompt_token_ids": [5, 6, 7], "max_tokens": 9},
    {"prompt": "x " * 400},
    {"prompt": "sampled", "temperature": 1.0, "seed": 5, "max_tokens": 40},
]


def test_one_row_out_for_each_row_in(command: Command) -> None:
    """Guards the shape of output rows, error rows beside good ones, extra columns, order, exit code 1, and the end."""
    code, rows = command.answer(["\n", *ROWS, "{bad\n"])
    assert code == 1
    assert [row["index"] for row in rows] == [1, 2, 3, 4, 5, 6, 7]
    codes = [row.get("error", {}).get("code") for row in rows]
    assert codes == [None, "unknown_parameter", None, None, "prompt_too_long", None, "invalid_json"]
    assert all(row["error"]["message"].startswith(f"line {row['index'] + 1}") for row in rows if "error" in row)
    assert rows[0]["id"] == "a" and rows[1]["id"] is None and rows[2]["extra"] == {"label": "kept"}
    assert rows[0]["finish_reason"] == "length" and rows[0]["usage"]["completion_tokens"] == 6
    usage = {"prompt_tokens": 3, "completion_tokens": 9, "total_tokens": 12}
    assert isinstance(rows[0]["text"], str) and rows[3]["usage"] == usage
    ended, first_error, tokens, speed, limit = command.said().splitlines()[-5:]
    assert ended == (
        "cbatch: 7 rows: 0 ok, 4 cut off at max_tokens, "
        "3 failed (invalid_json 1, prompt_too_long 1, unknown_parameter 1)"
    )
    assert first_error.startswith("cbatch: the first error: line 3: ")
    assert tokens.endswith("output tokens") and "tokens/s" in speed and limit.startswith("cbatch: limited by ")


def test_defaults_come_from_options_and_the_environment(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards row over option over CBATCH_RUN_*, where a repeatable option is a JSON list, and exit code 0."""
    rows = [{"prompt": "a"}, {"prompt": "a", "max_tokens": 2}]
    monkeypatch.setenv("CBATCH_RUN_MAX_TOKENS", "3")
    monkeypatch.setenv("CBATCH_RUN_STOP", '["no such text"]')
    for options, limit in ((("--max-tokens", "4"), 4), ((), 3)):
        code, made = command.answer(rows, "--token-ids", *options)
        assert code == 0 and [len(row["token_ids"]) for row in made] == [limit, 2]
        assert made[1]["token_ids"] == made[0]["token_ids"][:2]
    monkeypatch.setenv("CBATCH_RUN_STOP", "not json")
    assert command.answer(rows)[0] == 2


BREAKERS = [
    '{"prompt": "a", "temperature": 1%s}\n' % ("0" * 400),
    '{"prompt": "a", "top_p": 1%s}\n' % ("0" * 400),
    '{"prompt": "a", "temperature": 1, "top_k": 100000000000000000000}\n',
    '{"prompt": "a", "stop_token_ids": [999999], "min_tokens": 1}\n',
    '{"prompt": "\\ue0f0999\\ue0f1 <|im_end|>", "max_tokens": 2}\n',
    '{"prompt": "a", "column": %s}\n' % ("[" * 985 + "]" * 985),
    '{"prompt": "\\ud800", "column": %s}\n' % ("[" * 700 + "]" * 700),
    '{"prompt": "\\ufffd", "raw": true, "max_tokens": 3}\n',
    '{"prompt_token_ids": [99999999999999999999]}\n',
    '{"prompt": "a", "seed": -9223372036854775808, "temperature": 1, "max_tokens": 2}\n',
]


def test_no_row_can_end_the_run(command: Command) -> None:
    """Guards good rows: each of these bad ones once broke the reader, the engine or the writer."""
    good = {"prompt": "fine", "max_tokens": 2}
    code, rows = command.answer([row for breaker in BREAKERS for row in (breaker, good)])
    assert code == 1 and len(rows) == 2 * len(BREAKERS)
    assert all("text" in row for row in rows[1::2])
    assert not any(row.get("error", {}).get("code") == "internal_error" for row in rows)


def test_stop_strings_and_plain_text_input(command: Command, tmp_path: Path) -> None:
    """Guards --format text, --raw and --stop together."""
    _, (full,) = command.answer(["hello {x\n"], "--format", "text", "--raw", "--max-tokens", "30")
    stop = full["text"][3:5]
    _, (cut,) = command.answer(["hello {x\n"], "--format", "text", "--raw", "--max-tokens", "30", "--stop", stop)
    assert cut["text"] == full["text"][: full["text"].index(stop)]
    assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", stop)


def test_max_errors_writes_held_rows(command: Command) -> None:
    """Guards finished rows that wait for one that will not come."""
    rows = [{"prompt": "long", "max_tokens": 200}, {"prompt": ""}, {"prompt": "a", "max_tokens": 1}, {"prompt": ""}]
    command.write(rows)
    assert command("-o", "-", "--max-errors", "2") == 3
    assert json.loads(command.printed.readouterr().out.splitlines()[-1])["index"] == 3


@pytest.mark.slow
def test_closed_streams(tmp_path: Path) -> None:
    """Guards programs that start it without stdin, stdout or stderr: no traceback, no message among the data."""
    source, out = write_rows(tmp_path / "in.jsonl", ROWS[:1]), tmp_path / "out.jsonl"
    command = f"{sys.executable} -m cbatch run --max-tokens 2"
    for tail, code in ((f"{source} -o {out} >&- 2>&-", 0), (f"<{source} 2>&-", 0), ("<&-", 2)):
        done = subprocess.run(f"{command} {tail}", shell=True, capture_output=True, text=True)
        assert done.returncode == code and "Traceback" not in done.stderr
        assert all(line.startswith('{"index": 0') for line in done.stdout.splitlines())
    assert len(read_rows(out)) == 1


def test_check_runs_nothing_and_reports(command: Command, tmp_path: Path) -> None:
    """Guards --check: bad rows are named, prompts counted in tokens, shared beginnings found, no output written."""
    same = {"prompt_token_ids": list(range(10, 50)), "max_tokens": 5}
    assert command.answer([*ROWS, same, same], "--check", "--block-size", "16", "-q") == (1, [])
    report = command.report()
    assert (report["rows"], report["bad_rows"]) == (8, 2)
    assert report["errors"] == {"unknown_parameter": 1, "prompt_too_long": 1}
    assert [error["index"] for error in report["first_errors"]] == [1, 4]
    assert report["prompt_tokens"]["max"] == 40 and report["max_new_tokens"]["total"] == 6 + 3 + 9 + 40 + 5 + 5
    assert report["shared_prefix_tokens"] == 32 and report["kv_cache"]["longest_row_tokens"] >= 45
    assert command.answer(ROWS[:1], "--check", "-q") == (0, []) and not (tmp_path / "out.jsonl").exists()
    assert command.report()["bad_rows"] == 0


def test_check_notices_doubled_ids(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards results that could not be told apart (1 and 1.0 are two ids), and memory and report against many ids."""
    ids: list[Any] = ["a", None, "b", "a", 1, None, "a", 1.0, "1"]
    rows = [{"prompt": "x", **({"id": name} if name is not None else {})} for name in ids]
    assert command.answer([*rows, {"prompt": 3, "custom_id": "b"}], "--check", "-q") == (1, [])
    report = command.report()
    assert report["doubled_ids"] == 3 and report["bad_rows"] == 1
    assert report["first_doubled_ids"] == [
        {"id": "a", "index": 3, "first_index": 0},
        {"id": "a", "index": 6, "first_index": 0},
        {"id": "b", "index": 9, "first_index": 2},
    ]
    assert command.answer(rows, "--check", "-q") == (0, []) and command.report()["doubled_ids"] == 2
    long = [{"id": "x" * 100_000, **row} for row in ({"prompt": "a"}, {"prompt": ""})]
    assert command.answer(long, "--check", "-q")[0] == 1
    report = command.report()
    assert len(json.dumps(report)) < 3000 and report["first_doubled_ids"][0]["id"] == report["first_errors"][0]["id"]
    monkeypatch.setattr("cbatch.cli.run.check.MAX_IDS", 2)
    command.answer([{"prompt": "x", "id": name} for name in "abccab"], "--check", "-q")
    assert [one["index"] for one in command.report()["first_doubled_ids"]] == [4, 5]


def test_check_estimates_what_a_run_takes(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards --estimate: on rows that all fit in the trial, it is what the run then does; bad rows do not count."""
    rows = [{"prompt_token_ids": [5, 6, number], "max_tokens": 4 + number, "ignore_eos": True} for number in range(20)]
    options = ("--check", "--estimate", "--max-seqs", "5")
    assert command.answer([*rows, {"prompt": 3}], *options)[0] == 1
    captured = command.printed.readouterr()
    estimate = json.loads(captured.out)["estimate"]
    total = sum(4 + number for number in range(20))
    assert estimate["output_tokens"] == {"least": total, "likely": total, "most": total}
    assert estimate["trial"]["ended"] == estimate["trial"]["rows"] == 20  # four times the slots
    assert "cbatch: estimate: " in captured.err and "cbatch: held back by " in captured.err
    monkeypatch.setattr("cbatch.cli.run.estimate.TRIAL_SECONDS", 0.0)
    assert command.answer(rows, *options, "-q") == (0, [])
    captured = command.printed.readouterr()
    assert json.loads(captured.out)["estimate"]["seconds"]["likely"] >= 0 and not captured.err
    assert command.answer([{"prompt": 3}], *options, "-q") == (1, [])
    assert command.report()["estimate"] is None


def test_template_kwargs(command: Command) -> None:
    """Guards --template-kwargs for all rows, beside what a row says itself; and its check before the model loads."""
    rows: list[dict[str, Any]] = [{"prompt": "x"}, {"prompt": "x", "think": True, "seed": 1}]
    _, (off, on) = command.answer(rows, "--template-kwargs", '{"enable_thinking": false}')
    _, said = command.answer([{"prompt": "x", "enable_thinking": False}, rows[1]])
    assert [off["key"], on["key"]] == [row["key"] for row in said]
    for wrong in "{", "[1]", '{"messages": []}':
        assert command("--template-kwargs", wrong) == 2


def test_other_names_of_parameters_as_options(command: Command) -> None:
    """Guards --param with names of vLLM and ollama, and with names that are not available or misspelt."""
    _, (row,) = command.answer(ROWS[:1], "--param", "num_predict=3", "--param", 'guided_choice=["yes"]')
    assert row["text"] == "yes"[: len(row["text"])]
    wrong = ("temp=1", "num_ctx=4", "seed=1", "n=", "think=true", 'options={"top_k": 1, "tpo_p": 1}')
    said = ("'temperature'", "num_ctx is not available", "--seed", "not valid JSON", "--template-kwargs", "'top_p'")
    for param, message in zip(wrong, said, strict=True):
        assert command.answer(ROWS[:1], "--param", param)[0] == 2
        assert message in " ".join(command.said().split())


def test_timings_and_verbose(command: Command) -> None:
    """Guards rows against times unless --timings is given; -v prints each error."""
    _, (row,) = command.answer(ROWS[:1], "--timings")
    assert 0 < row["ttft_s"] <= row["elapsed_s"] and row["cached_tokens"] == 0
    code, (row,) = command.answer(ROWS[1:2], "-v")
    assert code == 1 and not {"ttft_s", "elapsed_s", "cached_tokens"} & row.keys()
    error = command.said()
    assert "cbatch: line 1: unknown parameter 'temperatur'" in error and "cbatch: attention: cpu" in error


@pytest.mark.parametrize("arguments", [[], ["-o", "missing/out.jsonl"], ["-m", "./nowhere"]])
def test_stats_are_written_however_it_ends(
    arguments: list[str], command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards programs that read --stats, even after a run that was refused."""
    monkeypatch.chdir(command.folder)
    command.write(ROWS[:1])
    code, stats = command(*arguments), command.figures()
    assert (code, stats["rows"]) == ((2, 0) if arguments else (0, 1))
    assert stats.keys() >= {"rows_kept", "errors", "cached_tokens", "load_s", "elapsed_s", "steps", "tpot_s"}


def test_stats_go_to_stdout_if_rows_do_not(command: Command) -> None:
    """Guards --stats -, its figures against digits that no clock has, words against “1 rows”, and rows against both."""
    code, rows = command.answer(ROWS[:1], "--stats", "-", "--timings")
    shown = command.printed.readouterr()
    stats = json.loads(shown.out)
    assert code == 0 and stats["rows"] == 1 and "cbatch: 1 row: 0 ok, 1 cut off at max_tokens, 0 failed" in shown.err
    times = [stats["load_s"], stats["elapsed_s"], *stats["ttft_s"].values(), rows[0]["ttft_s"], rows[0]["elapsed_s"]]
    assert all(value > 0 and value == round(value, 6) for value in times)
    for arguments in (["-o", "-"], ["--check", "--overwrite"]):
        assert command("--stats", "-", *arguments) == 2
        assert "--stats - writes to stdout, where other output goes" in command.said()


def test_a_model_without_tokenizer_takes_token_ids(command: Command, tmp_path: Path) -> None:
    """Guards token ids on a model without a tokenizer: text is null, other forms are error rows."""
    command.model = save_model(tmp_path / "bare", tokenizer=False)
    rows = [{"prompt_token_ids": [5, 6], "max_tokens": 2}, {"prompt": "a"}, {"prompt_token_ids": [5], "stop": "x"}]
    code, (first, second, third) = command.answer(rows, "--token-ids")
    assert code == 1 and first["text"] is None and len(first["token_ids"]) == 2
    assert "no tokenizer" in second["error"]["message"] and "stop needs a tokenizer" in third["error"]["message"]


def test_generation_config_gives_the_defaults(command: Command, tmp_path: Path) -> None:
    """Guards that only keys in the file count: do_sample decides, and top_k 50 is not invented."""
    rows = [{"prompt": "a", "id": n, "max_tokens": 8} for n in range(4)]
    for number, settings in enumerate([{"temperature": 0.9}, {"do_sample": True}]):
        command.model = save_model(tmp_path / f"{number}", generation=settings)
        _, made = command.answer(rows)
        assert (len({row["text"] for row in made}) > 1) == ("do_sample" in settings)


def failing_step(monkeypatch: pytest.MonkeyPatch, number: int, failures: list[Exception]) -> None:
    """Lets the step of a number fail, as often as there are failures."""
    step = engine_thread.SteppingEngine.step

    def failing(self: engine_thread.SteppingEngine) -> Any:
        if self.stats().num_steps == number and failures:
            raise failures.pop()
        return step(self)

    monkeypatch.setattr(engine_thread.SteppingEngine, "step", failing)


def test_a_failing_engine_is_exit_3_and_keeps_what_is_done(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards finished rows against a crash in a later step, even if they are written slowly; and against hanging."""
    write = FileWriter.write

    def slow(self: FileWriter, rows: Any) -> Any:
        time.sleep(0.05)
        return write(self, rows)

    monkeypatch.setattr(FileWriter, "write", slow)
    failing_step(monkeypatch, 30, [RuntimeError("the device is on fire") for _ in range(99)])  # short rows take less
    rows = [{"prompt": "a", "max_tokens": 2}] * 6 + [{"prompt": "b", "max_tokens": 90, "ignore_eos": True}]
    code, made = command.answer(rows)
    assert code == 3 and sorted(row["index"] for row in made) == [0, 1, 2, 3, 4, 5]
    assert "on fire" in command.said()


def test_a_failed_step_is_reported_and_costs_no_row(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a run against one step that fails: the same rows, exit code 0, and a note in the summary."""
    rows = [{"id": n, "prompt": f"row {n}", "temperature": 1.0, "max_tokens": 9} for n in range(5)]
    expected, failures = command.answer(rows), [RuntimeError("a hiccup")]
    failing_step(monkeypatch, 4, failures)
    assert command.answer(rows) == expected and not failures
    assert "1 retried (RuntimeError: a hiccup)" in command.said()


def test_code_of_a_model_is_never_run(command: Command, tmp_path: Path) -> None:
    """Guards against remote code: not run, and not asked about."""
    command.model = shutil.copytree(command.model, tmp_path / "remote")
    config = json.loads((command.model / "config.json").read_text())
    config |= {"model_type": "unheard-of", "auto_map": {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}}
    (command.model / "config.json").write_text(json.dumps(config))
    marker = tmp_path / "marker"
    (command.model / "evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass C: pass\nclass M: pass\n")
    assert command.answer(["y"] * 5, "--format", "text") == (2, []) and not marker.exists()
    said = command.printed.readouterr()
    assert said.out == "" and said.err.startswith("cbatch: Cannot load") and "Traceback" not in said.err


def test_missing_weights_are_not_invented(command: Command, tmp_path: Path) -> None:
    """Guards against a truncated download that answers with random text."""
    folder = shutil.copytree(command.model, tmp_path / "torn")
    weights = load_file(folder / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert run_command(["info", "-m", str(folder)]) == 2
    assert "1 of its weights are not in its files, such as lm_head.weight" in command.said()


@pytest.mark.slow
def test_the_command_in_a_pipeline(runs: ForkServer, command: Command) -> None:
    """Guards stdin to stdout: data only on stdout, no bars or codes on a stderr that is not a terminal."""
    command.write(ROWS)
    out, err = command.folder / "stdout", command.folder / "stderr"
    files = {"stdin": str(command.source), "stdout": str(out), "stderr": str(err)}
    assert runs.start("run", "-m", command.model, **files).code() == 1
    assert [row["index"] for row in read_rows(out)] == list(range(len(ROWS)))
    said = err.read_bytes()
    assert b"6 rows: 0 ok, 4 cut off at max_tokens, 2 failed" in said and b"\x1b" not in said and b"\r" not in said


@pytest.mark.slow
def test_stdin_may_not_be_the_output(runs: ForkServer, command: Command) -> None:
    """Guards the input of `cbatch run -o f --overwrite < f`."""
    command.write(ROWS[:1])
    before = command.source.read_bytes()
    assert runs.start("run", "-o", command.source, "--overwrite", stdin=str(command.source)).code() == 2
    assert command.source.read_bytes() == before


def test_what_a_user_gets_wrong_in_rows_is_told(command: Command, tmp_path: Path) -> None:
    """Guards a misspelt keyword, a broken line of OpenAI's form, Latin-1 and semicolons."""
    schema = {"type": "object", "propertis": {"a": {}}}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    request = '{"custom_id": "b", "method": "POST", "url": "/v1/chat/comp'
    rows = [
        *({"prompt": text, "response_format": form, "max_tokens": 9} for text in "ab"),
        request,
        '{"custom_id": "ours", "prompt": "a',
    ]
    _, (_, _, broken, ours) = command.answer(rows)
    said = command.said()
    assert said.count("no keyword 'propertis', so it constrains nothing (did you mean 'properties'?)") == 1
    assert broken["custom_id"] == "b" and broken["error"]["code"] == "invalid_json" and "response" in broken
    assert ours["error"]["code"] == "invalid_json" and "custom_id" not in ours
    command.source.write_bytes('{"prompt": "café"}\n'.encode("latin-1"))
    assert command("--overwrite") == 1
    said = command.said()
    assert "perhaps Latin-1): iconv -f LATIN1 -t UTF-8" in said and "the first error: line 1" in said
    table = tmp_path / "in.csv"
    table.write_text('prompt;"a, b"\nhi;2\n')
    command.source = table
    assert command("--overwrite", "--max-tokens", "1") == 0 and command.rows()[0]["extra"]["a, b"] == "2"
