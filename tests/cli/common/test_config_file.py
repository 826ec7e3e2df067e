"""The configuration file and its presets: what counts before what, and the sentence for each thing that is wrong."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click
import pytest

from cbatch.cli.chat.background_run import parse_run_options
from cbatch.cli.common.configured_command import config_path, display_path
from cbatch.cli.main import cli, run_command


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that is read; it does not exist yet."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    path = tmp_path / "cbatch" / "config.toml"
    path.parent.mkdir()
    return path


def values_of(name: str, *arguments: str) -> dict[str, Any]:
    """Values of a command's options, as the program reads them."""
    root = cli.make_context("cbatch", [name])
    command = cli.get_command(root, name)
    assert command is not None
    return command.make_context(name, list(arguments), parent=root).params


def error_of(name: str, *arguments: str) -> str:
    """The sentence for a wrong file."""
    with pytest.raises(click.UsageError) as error:
        values_of(name, *arguments)
    assert error.value.exit_code == 2
    return error.value.format_message()


def test_each_source_counts_before_the_next(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the order: command line, environment, preset, a command's table, top level, built-in default."""
    assert values_of("run")["block_size"] == 16
    config.write_text("block-size = 17\n")
    assert values_of("run")["block_size"] == values_of("bench")["block_size"] == 17
    config.write_text("block_size = 17\n[run]\nblock_size = 18\n[preset.big]\nblock_size = 19\n")
    assert (values_of("run")["block_size"], values_of("bench")["block_size"]) == (18, 17)
    assert values_of("run", "--preset", "big")["block_size"] == 19
    monkeypatch.setenv("CBATCH_RUN_BLOCK_SIZE", "20")
    assert values_of("run", "--preset", "big")["block_size"] == 20
    assert values_of("run", "--preset", "big", "--block-size", "21")["block_size"] == 21


@pytest.mark.parametrize("name", ["chat", "run"])
def test_names_that_an_option_had_before(name: str, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards files, variables and command lines that say --tool: they mean --tools, everywhere."""
    assert values_of(name, "--tool", "a.py", "--tools", "b.py")["tools"] == ("a.py", "b.py")
    for key in ("tool", "tools"):
        config.write_text(f"[{name}]\n{key} = ['c.py']\n")
        assert values_of(name)["tools"] == ("c.py",)
        monkeypatch.setenv(f"CBATCH_{name}_{key}".upper(), '["d.py"]')
        assert values_of(name)["tools"] == ("d.py",)
        monkeypatch.delenv(f"CBATCH_{name}_{key}".upper())


def test_values_of_every_kind(config: Path) -> None:
    """Guards the way from TOML to Click: lists, tables, numbers, flags, dates, and `~`, which no shell expands here."""
    config.write_text(
        'stop = ["a", "b c"]\nparam = "echo=true"\nreplicas = 2\nprefix_cache = false\nmodel = "~/models/x"\n'
        'max_memory = {cpu = "30GiB"}\n[run]\ndate = 2025-03-04\ntarget_step_ms = 7.5\nresume = true\n'
        "[run.template-kwargs]\nenable_thinking = false\n[run.ray_resources]\nnum_gpus = 1\n[chat]\ncontinue = true\n"
    )
    values = values_of("run")
    assert values["stop"] == ("a", "b c") and values["param"] == {"echo": True} and values["replicas"] == 2
    assert values["prefix_cache"] is False and values["model"] == str(Path("~/models/x").expanduser())
    assert values["max_memory"] == {"cpu": "30GiB"} and values["template_kwargs"] == {"enable_thinking": False}
    assert values["ray_resources"] == {"num_gpus": 1} and str(values["date"]) == "2025-03-04"
    assert values["target_step_ms"] == 7.5 and values["resume"] is True
    assert values_of("chat")["continued"] is True


def test_presets(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards presets: options of the other command are left out, the environment names one, and so does a table."""
    config.write_text(
        '[preset.coder]\nsystem = "You write code."\ntemperature = 0.2\nauto_trim = true\ntimings = true\n'
        '[chat]\npreset = "coder"\n'
    )
    assert values_of("run")["system"] is None
    run, chat = values_of("run", "--preset", "coder"), values_of("chat")
    assert run["system"] == chat["system"] == "You write code." and run["temperature"] == 0.2
    assert run["timings"] and chat["auto_trim"] and "auto_trim" not in run and "preset" not in run
    monkeypatch.setenv("CBATCH_RUN_PRESET", "coder")
    assert values_of("run")["timings"] is True


def test_a_preset_that_does_not_exist(config: Path) -> None:
    """Guards people with a slip of the pen: they see the name they meant, and all there are."""
    assert "has no table such as [preset.coder]." in error_of("chat", "--preset", "coder")
    config.write_text("[preset.coder]\nseed = 1\n[preset.poet]\nseed = 2\n")
    sentence = error_of("run", "--preset", "codr")
    assert "There is no preset 'codr' in " in sentence and sentence.endswith("did you mean coder? It has coder, poet.")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"model = \n", r": Invalid value \(at line 1, column 9\)\.$"),
        (b"seed = 1\nsystem = '\xff'\n", r" is not valid UTF-8 \(line 2\)\.$"),
        (b"modle = 'x'\n", r": modle is not an option; did you mean model\?$"),
        (b"[caht]\nseed = 1\n", r": caht is not an option; did you mean chat\?$"),
        (b"[syste]\nseed = 1\n", r": syste is not an option\.$"),
        (b"caht = 1\n", r": caht is not an option; did you mean cache\?$"),
        (b"[bench]\ntop_p = 1\n", r": top_p in \[bench\] is not an option"),
        (b"[preset.x]\nrounds = 2\n", r": rounds in \[preset\.x\] is not an option"),
        (b"[chat]\ntemperature = 'warm'\n", r": temperature in \[chat\]: 'warm' is not a valid float\.$"),
        (b"max_tokens = 2.5\n", r": max_tokens: '2\.5' is not a valid integer\.$"),
        (b"dtype = 'float8'\n", r": dtype: 'float8' is not one of "),
        (b"model = true\n", r": model takes a value, not true or false\.$"),
        (b"model = ['a']\n", r": model takes one value, not a list\.$"),
        (b"device = {a = 1}\n", r": device takes one value, not a table\.$"),
        (b"stop = [1]\n", r": stop must be a string or a list of strings\.$"),
        (b"max_memory = {cpu = 2025-01-01}\n", r": max_memory holds a date or time"),
        (b"top_p = 1\ntop-p = 1\n", r": top-p is there twice"),
        (b"chat = 1\n", r": chat must be a table, \[chat\], not one value\.$"),
        (b"preset = 'coder'\n", r": preset holds the presets, as tables"),
        (b"[preset]\nx = 1\n", r": preset\.x must be a table, \[preset\.x\]"),
        (b"a = " + b"[" * 5000, r" is not valid TOML: "),
    ],
)
def test_what_is_wrong_is_a_sentence(config: Path, content: bytes, sentence: str) -> None:
    """Guards people against a typing error that is ignored, or a message that does not say where it is."""
    config.write_bytes(content)
    said = error_of("chat")
    assert said.startswith(display_path(config)) and re.search(sentence, said), said


def test_a_file_that_cannot_be_read(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards the exit code and the sentence of an unreadable file; the help opens in spite of it."""
    config.mkdir()
    assert run_command(["info"]) == 2
    assert "config.toml cannot be read: Is a directory." in capsys.readouterr().err
    assert run_command(["info", "--help"]) == 0


def test_a_value_that_is_overridden_is_not_read(config: Path) -> None:
    """Guards against an error about a value that does not count; other errors are not blamed on the file."""
    config.write_text("[run]\ntop_k = 'x'\n")
    assert values_of("run", "--top-k", "3")["top_k"] == 3
    assert "config.toml" not in error_of("run", "--top-k", "y")


def test_a_batch_in_a_chat_reads_the_file(config: Path) -> None:
    """Guards /run, which is read without the other commands: keys that it does not know may be theirs."""
    config.write_text("slo_tps = 3\n[run]\ntop_k = 5\n[chat]\nauto_trim = true\n[preset.x]\nauto_trim = true\n")
    assert parse_run_options("in.jsonl -o out.jsonl --preset x").sampling.params == {"top_k": 5}


def test_where_the_file_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Guards the path: XDG_CONFIG_HOME if it is absolute, else ~/.config, written with `~`."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for folder in ("relative", ""):
        monkeypatch.setenv("XDG_CONFIG_HOME", folder)
        assert config_path() == tmp_path / ".config" / "cbatch" / "config.toml"
    assert display_path(config_path()) == "~/.config/cbatch/config.toml"
    monkeypatch.setenv("XDG_CONFIG_HOME", "/etc/xdg")
    assert display_path(config_path()) == "/etc/xdg/cbatch/config.toml"


@pytest.mark.parametrize("name", ["run", "verify", "chat", "perplexity", "bench", "info"])
def test_help_tells_of_variables_and_the_file(
    name: str, config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards the help at 80 columns: how variables are named, where the file lies, and the order."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("XDG_CONFIG_HOME", "/etc/xdg")
    assert run_command([name, "--help"]) == 0
    shown = capsys.readouterr().out
    assert all(len(line) <= 80 for line in shown.splitlines())
    words = " ".join(shown.split())
    assert f"CBATCH_{name}_<OPTION>".upper() in words
    assert "CBATCH_MODEL" in words and "/etc/xdg/cbatch/config.toml" in words
    preset = "then the preset (--preset), " if name in ("run", "verify", "chat") else ""
    assert words.endswith(f"environment variable, {preset}then this file.")


@pytest.mark.parametrize("name", ["run", "chat", "perplexity"])
def test_short_help_names_every_option(
    name: str, config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards help that fits two screens of 80 columns, breaks no name, and explains every option with --help-all."""
    monkeypatch.setenv("COLUMNS", "80")
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    options = [one for one in command.params if isinstance(one, click.Option) and not one.hidden]
    shown = {}
    for flag in ("--help", "--help-all"):
        assert run_command([name, flag]) == 0
        shown[flag] = capsys.readouterr().out
    assert len(shown["--help"].splitlines()) < 60 and not re.search(r"--\S*-\n", shown["--help"])
    assert [one.name for one in options if max(one.opts, key=len) not in shown["--help"]] == []
    assert "\n  [" not in shown["--help-all"]  # arguments, which are no options
    explained = "".join(shown["--help-all"].split())
    assert all("".join((one.help or "").split())[:60] in explained for one in options)
