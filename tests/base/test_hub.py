"""Looking for a model on the hub: with a network that is closed, silent, or answers, and with the cache."""

from __future__ import annotations

import json
import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from cbatch.base import hub, model_files
from cbatch.base.errors import ModelNotFound
from cbatch.base.hub import can_connect, check_hub_model, reachable_source
from cbatch.model.load_plan import LoadPlan
from cbatch.model.loader import load_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CLOSED = "http://127.0.0.1:9"


class FakeHub(ThreadingHTTPServer):
    """Answers requests for a model's description with a status."""

    daemon_threads = True

    def __init__(self) -> None:
        self.status, self.error_code, self.paths = 200, "", list[str]()
        super().__init__(("127.0.0.1", 0), FakeHubRequest)
        self.url = f"http://127.0.0.1:{self.server_port}"


class FakeHubRequest(BaseHTTPRequestHandler):
    server: FakeHub

    def do_GET(self) -> None:
        self.server.paths.append(self.path)
        body = json.dumps({"id": "me/tiny", "sha": COMMIT}).encode()
        self.send_response(self.server.status)
        self.send_header("X-Error-Code", self.server.error_code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Prints nothing."""


@pytest.fixture
def fake_hub() -> Iterator[FakeHub]:
    with FakeHub() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and no network."""
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    # Newer versions of the library fetch a list of programs once a day, which would count as a request.
    programs = tmp_path / "programs.json"
    programs.write_text('{"standardEnvVars": [], "harnesses": {}}')
    monkeypatch.setattr("huggingface_hub.constants.AGENT_HARNESSES_PATH", str(programs), raising=False)
    use_endpoint(monkeypatch, CLOSED)
    return tmp_path


def use_endpoint(monkeypatch: pytest.MonkeyPatch, url: str, *, offline: bool = False) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)


def add_snapshot(cache: Path, model: Path) -> Path:
    """Puts a model folder into the cache as me/tiny."""
    repository = cache / "models--me--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    return Path(shutil.copytree(model, repository / "snapshots" / COMMIT))


def test_a_model_in_the_cache_loads_without_a_network(cache: Path, model_folder: Path) -> None:
    """Guards users on a train: what was downloaded loads, and nothing tries to reach the hub a second time."""
    folder = add_snapshot(cache, model_folder)
    check_hub_model("me/tiny", None)
    assert reachable_source("me/tiny", None) == str(folder)
    loaded = load_model(LoadPlan("me/tiny", dtype="float32", fast=False))
    assert loaded.name == "me/tiny" and loaded.tokenizer is not None
    for revision in (None, COMMIT):
        assert model_files.model_folder("me/tiny", revision, ["config.json", "no_such_file.json"]) == folder
    assert model_files.read_json_object(folder / "no_such_file.json") == {}
    with pytest.raises(OSError):
        model_files.model_folder("me/no-such-model", None)


def test_weights_are_the_files_that_transformers_loads(tmp_path: Path) -> None:
    """Guards against other exports of the weights that lie beside them."""
    index = tmp_path / model_files.WEIGHTS_INDEX
    assert model_files.weight_files(tmp_path) == []
    index.write_text(json.dumps({"weight_map": {"a": "2.safetensors", "b": "1.safetensors"}}))
    assert model_files.weight_files(tmp_path) == [tmp_path / "1.safetensors", tmp_path / "2.safetensors"]
    (tmp_path / "model.safetensors").touch()
    assert model_files.weight_files(tmp_path) == [tmp_path / "model.safetensors"]


@pytest.mark.parametrize("is_cached", [True, False])
def test_a_network_that_swallows_everything(
    is_cached: bool, cache: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the time until the sentence: one connection is tried, for a limited time, however often it is retried."""
    if is_cached:
        add_snapshot(cache, model_folder)
    waiting, tried = threading.Event(), []

    def swallow(address: tuple[str, int], timeout: float) -> None:
        tried.append((address, timeout))
        waiting.wait(30)
        raise OSError

    monkeypatch.setattr("socket.create_connection", swallow)
    monkeypatch.setattr(hub, "CONNECT_TIMEOUT_S", 0.02)
    monkeypatch.setattr(hub, "CACHED_TIMEOUT_S", 0.01)
    if is_cached:
        assert reachable_source("me/tiny", None).startswith(str(cache))
    else:
        with pytest.raises(ModelNotFound, match=r"me/tiny is not in the local cache and .* cannot be reached; check"):
            reachable_source("me/tiny", None)
    waiting.set()
    assert tried == [(("127.0.0.1", 9), 0.01 if is_cached else 0.02)]


def test_a_server_that_never_answers(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the limit of the first answer: one request, and no retries, to a server that only listens."""
    monkeypatch.setattr(hub, "ANSWER_TIMEOUT_S", 0.05)
    num_accepted = 0
    with socket.create_server(("127.0.0.1", 0)) as server:
        use_endpoint(monkeypatch, f"http://127.0.0.1:{server.getsockname()[1]}")
        with pytest.raises(ModelNotFound, match="cannot be reached"):
            check_hub_model("me/tiny", None)
        server.setblocking(False)
        with suppress(BlockingIOError):
            while True:
                server.accept()[0].close()
                num_accepted += 1
    assert num_accepted == 2  # whether it listens, and the request


@pytest.mark.parametrize(
    ("status", "error_code", "sentence"),
    [
        (404, "RepoNotFound", "has no model me/tiny, or it is private; check the name"),
        (404, "RevisionNotFound", "me/tiny has no revision None"),
        (404, "", "answers with HTTP status 404; check the name, the network and HF_ENDPOINT"),
        (403, "GatedRepo", None),
        (429, "", None),
        (503, "", None),
    ],
)
@pytest.mark.usefixtures("cache")
def test_what_the_hub_answers(
    status: int, error_code: str, sentence: str | None, fake_hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards what is said of a wrong name; a hub that is busy, and a gated model, are left to the download."""
    use_endpoint(monkeypatch, fake_hub.url)
    fake_hub.status, fake_hub.error_code = status, error_code
    if sentence is None:
        assert reachable_source("me/tiny", None) == "me/tiny"
    else:
        with pytest.raises(ModelNotFound, match=sentence):
            reachable_source("me/tiny", None)


def test_what_needs_no_network(
    cache: Path, fake_hub: FakeHub, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a look at the hub for a folder, a path, a commit in the cache, and in offline mode."""
    use_endpoint(monkeypatch, fake_hub.url)
    folder = add_snapshot(cache, model_folder)
    for path in (str(model_folder), "./nowhere", "/no/such/model"):
        check_hub_model(path, None)
        assert reachable_source(path, None) == path
    check_hub_model("me/tiny", None)
    assert reachable_source("me/tiny", COMMIT) == str(folder)
    use_endpoint(monkeypatch, fake_hub.url, offline=True)
    assert reachable_source("me/tiny", None) == str(folder)
    with pytest.raises(ModelNotFound, match="HF_HUB_OFFLINE is set; check the name, or unset HF_HUB_OFFLINE"):
        reachable_source("me/other", None)
    with pytest.raises(ModelNotFound, match="a hub id cannot have this name"):
        reachable_source("no such/model", None)
    (folder / "model.safetensors").unlink()  # a download that was cut off
    with pytest.raises(ModelNotFound):
        reachable_source("me/tiny", None)
    assert fake_hub.paths == []


def test_a_proxy_is_what_has_to_be_reached(cache: Path, fake_hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards networks whose only way out is a proxy; an endpoint without a host cannot be reached."""
    assert not can_connect("http://hub.invalid", 5) and not can_connect("http://", 5) and not can_connect("http://[", 5)
    monkeypatch.setenv("http_proxy", fake_hub.url)
    assert can_connect("http://hub.invalid", 5)
    monkeypatch.setenv("http_proxy", fake_hub.url.removeprefix("http://"))
    assert can_connect("http://hub.invalid", 5)
    monkeypatch.setenv("no_proxy", "hub.invalid")
    assert not can_connect("http://hub.invalid", 5)
