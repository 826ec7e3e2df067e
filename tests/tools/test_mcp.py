"""Servers of the Model Context Protocol: what models get of their tools, and that none of their deaths ends a chat."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mcp", reason="servers of tools need the package mcp, which is not installed")

from cbatch.base.errors import ConfigError
from cbatch.tools import guard, mcp_servers
from cbatch.tools.tool import MAX_RESULT_CHARACTERS, Tool, load_tools
from tests.cli.chat.test_tools import CALL, ScriptedClient, make, tool_model
from tests.support import mcp_server
from tests.support.chat_harness import reply_of
from tests.support.chat_terminal import Chat
from tests.support.faults import wait_until
from tests.support.fork_server import ForkServer

SCRIPT = str(mcp_server.__file__)
OVER_STDIO = {"command": sys.executable, "args": [SCRIPT], "env": {"GIVEN": '${env:HOME}/${NO_SUCH:-a"b}'}}


def listing(folder: Path, key: str = "mcpServers", **servers: Any) -> Path:
    path = folder / "servers.json"
    path.write_text(json.dumps({key: servers, "inputs": []}))
    return path


def load(*paths: Path) -> dict[str, Tool]:
    return {tool.name: tool for tool in load_tools(paths)}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with one server, which tests share."""
    return listing(tmp_path_factory.mktemp("mcp"), **{"my server": OVER_STDIO})


@pytest.fixture
def tools(servers: Path) -> dict[str, Tool]:
    return load(servers)


def server_of(tools: dict[str, Tool]) -> mcp_servers.McpServer:
    found = tools["add"].server
    assert found is not None
    return found


def pid_of(tools: dict[str, Tool]) -> int:
    return int(tools["groups"].run("{}").split()[0])


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] != "Z" if Path("/proc/self").exists() else True


@contextmanager
def over_http(folder: Path, port: int = 0) -> Iterator[int]:
    """A server on a port of this machine, which is killed in the end."""
    path = folder / "port"
    path.unlink(missing_ok=True)
    with subprocess.Popen([sys.executable, SCRIPT, str(path), str(port)]) as process:
        wait_until(lambda: path.exists() and bool(path.read_text()))
        yield int(path.read_text())
        process.kill()


def check_calls(tools: dict[str, Tool]) -> None:
    schema = tools["add"].schema["function"]
    assert schema["description"].startswith("Adds.") and schema["parameters"]["required"] == ["a", "b"]
    assert tools["add"].run('{"a": 2, "b": 3}') == "5"
    assert tools["add"].run('{"a": 2}') == "Error: the argument 'b' is missing."
    assert tools["add"].run('{"a": "x", "b": 3}').startswith("Error: ")
    assert tools["what_fails"].run('{"why": "so"}') == "Error: Error executing tool what fails: so"
    assert tools["picture"].run("{}") == "Here it is.\n[image: image/png]"
    assert tools["structured"].run("") == '{"é": 5}'
    assert len(tools["long"].run("{}")) == MAX_RESULT_CHARACTERS + len("\n[the rest is cut off]")


def test_tools_of_a_process(tools: dict[str, Tool], servers: Path) -> None:
    """Guards what the model is told and gets, variables in settings, the process group that Ctrl-C does not reach."""
    check_calls(tools)
    assert tools["variable"].run('{"name": "GIVEN"}') == f'{os.environ["HOME"]}/a"b'
    assert tools["variable"].run('{"name": "PYTEST_CURRENT_TEST"}') == "none", "it gets no secrets of others"
    assert int(tools["groups"].run("{}").split()[1]) != os.getpgid(0)
    assert pid_of(load(servers)) == pid_of(tools), "a server that runs is not started twice"


def test_tools_of_an_address(tmp_path: Path) -> None:
    """Guards HTTP: the same results; while nobody listens, errors; after that, another session."""
    with over_http(tmp_path) as port:
        tools = load(listing(tmp_path, "servers", web={"type": "http", "url": f"http://127.0.0.1:{port}/mcp"}))
        check_calls(tools)
        assert tools["dies"].run("{}").startswith("Error: the server web has ended: ")
    assert tools["add"].run('{"a": 2, "b": 3}').startswith("Error: the server web has ended: ConnectError")
    with over_http(tmp_path, port):
        wait_until(lambda: tools["add"].run('{"a": 2, "b": 3}') == "5")
        assert server_of(tools).problem == ""


def test_a_server_that_dies_is_started_again(tools: dict[str, Tool]) -> None:
    """Guards deaths in the middle of a call and between calls: the model is told, and the next call finds a server."""
    before, others = pid_of(tools), list[str]()
    waiting = threading.Thread(target=lambda: others.append(tools["slow"].run("{}")))
    waiting.start()
    ended = "Error: the server my server has ended: the last words / killed by signal 9."
    assert tools["dies"].run("{}") == ended
    waiting.join()
    assert others == [ended], "calls that ran beside it end, too"
    after = pid_of(tools)
    assert after != before and server_of(tools).problem == ""
    os.kill(after, signal.SIGTERM)
    wait_until(lambda: server_of(tools).problem == "killed by signal 15")
    assert tools["add"].run('{"a": 2, "b": 3}') == "5"


def test_calls_end_in_time(tools: dict[str, Tool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards Ctrl-C and the limit: the call ends at once, and the server still serves."""
    cancelled = threading.Event()
    threading.Timer(0.1, cancelled.set).start()
    started = time.monotonic()
    assert tools["slow"].run("{}", cancelled) == "Error: cancelled." and time.monotonic() - started < 30
    monkeypatch.setattr(mcp_servers, "TIMEOUT_S", 0.2)
    assert tools["slow"].run("{}") == "Error: no result within 0.2 s."
    monkeypatch.undo()
    assert tools["add"].run('{"a": 2, "b": 3}') == "5"


def test_names_that_others_have(servers: Path, tmp_path: Path, tools: dict[str, Tool]) -> None:
    """Guards names: that of the server before one that another tool has, and only characters that models may use."""
    (tmp_path / "own.py").write_text("def add(a: int) -> int: ...\ndef other() -> None: ...\n")
    loaded = load(tmp_path / "own.py", servers)
    assert list(loaded)[:4] == ["add", "other", "my_server_add", "what_fails"]
    assert loaded["my_server_add"].run('{"a": 2, "b": 3}') == "5"
    with pytest.raises(ConfigError, match=r"servers\.json, server my server: there is another tool my_server_add"):
        load(servers, servers)


FAILURES = {
    "No such file or directory: /no/such": {"command": "/no/such"},
    "the reason / exit code 3": {"command": "sh", "args": ["-c", "echo the reason >&2; exit 3"]},
    "no answer within 0.3 s": {"command": "sleep", "args": ["1000"]},
    "ConnectError": {"url": "http://127.0.0.1:1/mcp"},
    "All connection attempts failed": {"url": "http://127.0.0.1:1/sse", "type": "sse"},
    "an object with a command or a url": {"args": []},
    "must be an object": 5,
    "args: 0: Input should be a valid string": {"command": "echo", "args": [5]},
    "there is no environment variable NO_SUCH": {"url": "http://x", "headers": {"Authorization": "Bearer ${NO_SUCH}"}},
}


@pytest.mark.parametrize("reason", FAILURES)
def test_servers_that_do_not_start(reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the start: the sentence says which server, and why, with its last words."""
    monkeypatch.setattr(mcp_servers, "TIMEOUT_S", 0.3 if "no answer" in reason else 60)
    with pytest.raises(ConfigError, match=rf"servers\.json, server one.*{re.escape(reason)}"):
        load(listing(tmp_path, one=FAILURES[reason], two={"command": "/no/such/thing", "disabled": True}))


def test_a_server_ends_with_the_program(tmp_path: Path) -> None:
    """Guards against servers that outlive a program that was killed, even one that does not read its stdin."""
    starts = f"import subprocess, sys; subprocess.Popen([sys.executable, {guard.__file__!r}, *sys.argv[1:]], "
    starts += "stdin=-1, stderr=-1, start_new_session=True); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", starts, "sh", "-c", "trap '' TERM; echo $$ > pid; sleep 1000; true"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=tmp_path,
    ) as program:  # fmt: skip
        path = tmp_path / "pid"
        wait_until(lambda: path.exists() and path.read_text().endswith("\n"))
        time.sleep(0.2)
        pid = int(path.read_text())
        assert is_alive(pid)
        program.kill()
    wait_until(lambda: not is_alive(pid))


def test_a_chat_goes_on(tools: dict[str, Tool]) -> None:
    """Guards a chat against a server that dies: its model is told, calls it again, and gets a result."""
    client: Any = ScriptedClient()
    controller = make(client, allows_all=True, tools=tools.values())
    controller.send(controller.current, "x")
    client.reply("", ("dies", {}))
    client.wait()
    client.reply("", ("add", {"a": 2, "b": 3}))
    client.wait()
    client.reply("done")
    told, found = reply_of(controller.current).uses
    assert told.result.startswith("Error: the server my server has ended") and found.result == "5"


@pytest.mark.slow
def test_servers_on_the_screen(runs: ForkServer, tmp_path: Path) -> None:
    """Guards a real chat: /tools says what a server brings, and that it has died; the next call starts it again."""
    start = f"echo $$ > {tmp_path / 'pid'}; exec {sys.executable} {SCRIPT}"
    path, model = listing(tmp_path, calc={"command": "sh", "args": ["-c", start]}), tool_model(tmp_path / "model")
    with Chat(runs, tmp_path, "-m", model, "--tools", path, "--param", f"regex={json.dumps(CALL)}") as chat:
        chat.say("How much is 2 and 3?", '⚙ add({"a": 2, "b": 3})', "Run it? y: yes")
        chat.send("a", "→ 5", gone="Run it?")
        chat.say("/tools", "server calc", "add runs Adds.", "what_fails asks Fails.")
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)

        def is_told() -> bool:
            chat.send("/tools\r")
            chat.pump(0.5)
            return "server calc has ended: killed by signal 9" in chat.text

        chat.until(is_told)
        chat.say("Again?", "Again?", "→ 5", gone="has ended")
        chat.send("\x03")
