"""Input and output of `cbatch run` that lie elsewhere: on a web server, and in a bucket."""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from cbatch.batch.remote import RemoteOutput
from cbatch.cli.main import run_command
from tests.support.command import Command

ROWS = [
    {"id": number, "prompt_token_ids": [1, 2, number + 3], "max_tokens": 4 if number else -4} for number in range(6)
]

BUCKET = "prompts"


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    levels = {name: logging.getLogger(name).level for name in ("gcsfs", "s3fs", "fsspec", "asyncio")}
    yield
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


class Pages(BaseHTTPRequestHandler):
    """Serves rows, half of them, and a page, by the name of the file."""

    def do_HEAD(self) -> None:
        self._answer(sends=False)

    def do_GET(self) -> None:
        self._answer(sends=True)

    def _answer(self, *, sends: bool) -> None:
        name = self.path.partition("?")[0]
        data = b"".join(json.dumps(row).encode() + b"\n" for row in ROWS)
        if name == "/page":
            data = b"\n<!DOCTYPE HTML>\n<html lang=en></html>"
        self.send_response(404 if name == "/none.jsonl" else 200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if sends:
            with suppress(OSError):
                self.wfile.write(data[: len(data) // 2] if name == "/half.jsonl" else data)
        self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    pytest.importorskip("aiohttp", reason="https needs aiohttp")
    with ThreadingHTTPServer(("127.0.0.1", 0), Pages) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A file system with one bucket, on a server of this process."""
    moto: Any = pytest.importorskip("moto.server", reason="a bucket of this machine needs moto")
    s3fs: Any = pytest.importorskip("s3fs", reason="s3 needs s3fs")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    s3fs.S3FileSystem.clear_instance_cache()
    system = s3fs.S3FileSystem(use_listings_cache=False)
    system.mkdir(BUCKET)
    yield system
    system.rm(BUCKET, recursive=True)  # servers of one process have the same buckets
    s3fs.S3FileSystem.clear_instance_cache()
    server.stop()


def test_rows_from_a_web_server(command: Command, server: str) -> None:
    """Guards the form by the address without what a signed one adds, and a second reading for `--resume`."""
    address = f"{server}/in.jsonl?signature=a.csv"
    assert run_command(["run", address, *command.words()[2:]]) == 1
    assert f"fetching {address}" in command.said()
    assert [row["id"] for row in command.rows()] == list(range(6))
    command.out.write_bytes(b"".join(command.lines()[:4]))
    assert run_command(["run", address, *command.words("--resume", "-q")[2:]]) == 1
    assert command.counts() == (4, 2)
    assert not command.said()


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("none.jsonl", "there is no such file"),
        ("half.jsonl", "Cannot read"),
        ("page", "it is a web page: use the address of the file itself"),
    ],
)
def test_what_a_web_server_does_not_give(command: Command, server: str, name: str, problem: str) -> None:
    """Guards half a file, or an error page, from being taken for the input."""
    assert run_command(["run", f"{server}/{name}", *command.words()[2:]]) == 2
    said = command.said()
    assert problem in said and f"{server}/{name}" in said
    assert not command.out.exists()


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["zz://a/b.jsonl"], "Cannot use zz://a/b.jsonl"),
        (["-o", "https://a/b.jsonl"], "a web server takes no files"),
    ],
)
def test_addresses_that_cannot_be_used(command: Command, words: list[str], problem: str) -> None:
    """Guards a sentence before a model is loaded."""
    command.write(ROWS)
    assert run_command(["run", *([str(command.source)] if words[0] == "-o" else []), *words]) == 2
    assert problem in command.said()


def test_a_bucket(command: Command, bucket: Any, whole: bytes, tmp_path: Path) -> None:
    """Guards the bytes in the bucket, that nothing is left beside, and that rows there are not overwritten."""
    command.write(ROWS)
    bucket.put_file(str(command.source), f"{BUCKET}/in.jsonl")
    words = ["run", f"s3://{BUCKET}/in.jsonl", "-o", f"s3://{BUCKET}/out.jsonl", *command.words()[4:]]
    assert run_command(words) == 1
    assert bucket.cat_file(f"{BUCKET}/out.jsonl") == whole
    assert not [path for path in (tmp_path / "state").rglob("*") if path.is_file()]
    assert run_command(words) == 2
    assert f"s3://{BUCKET}/out.jsonl exists and is not empty; --resume continues it" in command.said()
    assert run_command([*words, "--overwrite"]) == 1


def test_going_on_with_a_bucket(command: Command, bucket: Any, whole: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards rows of an upload that failed, which the next run takes from the local file; and of the bucket."""
    command.write(ROWS)
    address = f"s3://{BUCKET}/out.jsonl"
    words = ["run", str(command.source), "-o", address, *command.words()[4:]]
    with monkeypatch.context() as patch:
        patch.setattr("s3fs.S3FileSystem.put_file", lambda *_: (_ for _ in ()).throw(PermissionError("Forbidden")))
        assert run_command(words) == 3
    local = RemoteOutput(address).path
    assert f"its rows are in {local}, and --resume uploads them" in command.said()
    assert not bucket.exists(address) and local.read_bytes() == whole
    assert run_command(words) == 2
    assert run_command(["run", "--resume", "-o", address]) == 1
    assert bucket.cat_file(address) == whole and command.counts() == (6, 0)
    bucket.pipe_file(address, b"".join(whole.splitlines(keepends=True)[:3]))
    assert run_command([*words, "--resume"]) == 1
    assert bucket.cat_file(address) == whole and command.counts() == (3, 3)


def test_a_database_in_a_bucket(command: Command, bucket: Any, tmp_path: Path) -> None:
    """Guards the other tables of a database that is fetched, gets the answers, and goes back."""
    local, address = tmp_path / "a.db", f"s3://{BUCKET}/a.db"
    with closing(sqlite3.connect(local)) as database:
        database.execute("CREATE TABLE asked (prompt TEXT)")
        database.execute("INSERT INTO asked VALUES ('hello')")
        database.commit()
    bucket.put_file(str(local), address)
    words = ["run", f"{address}#asked", "-o", f"{address}#said", *command.words()[4:]]
    assert run_command(words) == 2 and "--resume continues it" in command.said()
    for option in ("--resume", "--overwrite"):
        assert run_command([*words, option]) == 0
        bucket.get_file(address, str(local))
        with closing(sqlite3.connect(local)) as database:
            found = database.execute("SELECT asked.prompt FROM said, asked WHERE said.text != ''").fetchall()
        assert found == [("hello",)]
