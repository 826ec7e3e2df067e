"""Where pictures of rows come from, what may not be one, and which keys their rows have."""

from __future__ import annotations

import base64
import json
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from cbatch.base.errors import RequestError
from cbatch.base.params import SamplingParams
from cbatch.base.request import ImageTexts, Request, RequestDefaults
from cbatch.batch.lines import Line, parse_line
from cbatch.media import pictures
from cbatch.media.decoding import decode
from cbatch.media.pictures import NO_IMAGES, MediaSources, Picture
from cbatch.model.images import Images
from cbatch.requests.input_processor import InputProcessor, ModelInfo
from cbatch.requests.prompts import read_prompt
from cbatch.schedule.limits import SequenceLimits
from cbatch.text.loading import of_transformers
from cbatch.text.tokenizer import ChatTokenizer
from tests.support.model_folder import TEMPLATE, make_tokenizer

DATA = b"\x89PNG\r\n\x1a\n, or whatever a file begins with"
BASE64 = base64.b64encode(DATA).decode()
PLACE = "image 2 of message 1"


class Undecoded:
    """Stands for a model's images, and looks at none."""

    def texts(self, pictures: Sequence[Picture]) -> ImageTexts:
        return ImageTexts("<image>", ["<image>"] * len(pictures))


def inputs(folder: Path, *, takes_images: bool = True, **defaults: Any) -> InputProcessor:
    """Prepares rows whose images lie in a folder, for a model that exists only as a tokenizer."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    model = ModelInfo(
        tokenizer=ChatTokenizer(of_transformers(tokenizer)),
        default_params=SamplingParams(),
        limits=SequenceLimits(1024, 1024),
        fingerprint="model",
        compile=lambda params, tools, choice: None,
        images=cast(Images, Undecoded()) if takes_images else NO_IMAGES,
    )
    return InputProcessor(model, RequestDefaults(media_root=str(folder), **defaults))


def row(*parts: dict[str, Any], role: str = "user") -> Request:
    fields = {"messages": [{"role": role, "content": list(parts)}]}
    return parse_line(Line.of(0, json.dumps(fields).encode()))


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def image(path: str) -> dict[str, Any]:
    return {"type": "image", "path": path}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of images with one in it, and a file beside it."""
    (tmp_path / "secret.png").write_bytes(b"secret")
    root = tmp_path / "root"
    (root / "photos").mkdir(parents=True)
    (root / "photos" / "a cat.png").write_bytes(DATA)
    return root


def test_each_way_to_give_an_image_gives_its_bytes(folder: Path) -> None:
    """Guards the forms of OpenAI's APIs, of transformers and of tables: the same file, in its place among the texts."""
    path = folder / "photos" / "a cat.png"
    (folder / "link.png").symlink_to(path)
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{BASE64}", "detail": "low"}},
        {"type": "image_url", "image_url": "photos/a cat.png"},
        {"type": "image_url", "image_url": {"url": f"DATA:image/PNG;a=b;BASE64,{BASE64}"}},
        {"type": "input_image", "image_url": path.as_uri(), "detail": "auto"},
        {"type": "image", "image": "file://localhost" + path.as_uri().removeprefix("file://")},
        {"type": "image", "url": "photos/../link.png"},
        {"type": "image", "path": str(path)},
        {"type": "image", "image": BASE64},
        {"type": "image", "base64": BASE64},
        {"type": "image", "image": {"bytes": BASE64, "path": "gone.png"}},
        {"type": "image", "image": {"bytes": None, "path": "photos/a cat.png"}},
    ]
    made = inputs(folder).request(row(text("a"), *parts, text("b")))
    assert made.messages is not None
    content = made.messages[0]["content"]
    assert content == [text("a"), *([{"type": "image"}] * len(parts)), text("b")]
    assert [picture.read() for picture in made.pictures] == [DATA] * len(parts)
    assert len({picture.digest() for picture in made.pictures}) == 1
    names = [picture.name for picture in made.pictures]
    assert names[0] == "image 1 of message 1 (data:image/png;base64)" and names[-2].endswith("(gone.png)")
    assert names[1] == "image 2 of message 1 (photos/a cat.png)" and names[7] == "image 8 of message 1"


@pytest.mark.parametrize("role", ["user", "tool", "system"])
def test_roles_that_may_show_images(role: str, folder: Path) -> None:
    """Guards images in results of tools and in instructions."""
    assert len(inputs(folder).request(row(image("photos/a cat.png"), role=role)).pictures) == 1


def test_messages_without_images_are_texts_as_before(folder: Path) -> None:
    """Guards the keys of existing rows: parts of text alone are one text, also for a model that takes images."""
    made = inputs(folder).request(row(text("a"), text("b")))
    assert made.messages == [{"role": "user", "content": "ab"}] and not made.pictures
    plain = parse_line(Line.of(0, b'{"messages": [{"role": "user", "content": "ab"}]}'))
    assert inputs(folder, takes_images=False).request(plain).key == made.key


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"role": "assistant", "content": [image("a")]}, "has a part 'image', and its role is 'assistant'"),
        (
            {"role": "user", "content": [{"type": "input_audio"}]},
            "'input_audio': parts are text (a string), images, videos",
        ),
        ({"role": "user", "content": [{"type": "audio_url"}]}, "has a part 'audio_url'"),
        ({"role": "user", "content": [{"type": ["image"]}]}, "has a part ['image']"),
        ({"role": "user", "content": [{"type": "text", "text": None}]}, "has a part 'text'"),
        ({"role": "user", "content": ["a"]}, "has a part 'a string'"),
        ({"role": "user", "content": [{"type": "image"}]}, "image 1 of message 1 must have one of image_url, image"),
        ({"role": "user", "content": [image("a") | {"url": "b"}]}, "image 1 of message 1 must have one of"),
        ({"role": "user", "content": [image("")]}, "image 1 of message 1 must have one of"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "image 1 of message 1 must have"),
        ({"role": "user", "content": "a", "images": BASE64}, "images of message 1 must be a list, not a string"),
        ({"role": "user", "content": "a", "images": [3]}, "image 1 of message 1 must have one of image_url, image"),
        ({"role": "user", "content": [{"type": "image_embeds", "image_embeds": "a"}]}, "has a part 'image_embeds'"),
    ],
)
def test_other_parts_are_refused_by_name(message: dict[str, Any], reason: str) -> None:
    """Guards what a model would not see: nothing of a message is left out silently."""
    error = parse_line(Line.of(0, json.dumps({"messages": [message]}).encode())).error
    assert error is not None and error.code == "invalid_row" and reason in str(error), error


def test_images_of_ollama(folder: Path) -> None:
    """Guards rows made for ollama: images stand in front of the text of their message, also beside a prompt."""
    path = "photos/a cat.png"
    fields: list[dict[str, Any]] = [
        {"prompt": "a", "images": [path, BASE64]},
        {"messages": [{"role": "user", "content": "a", "images": [path, BASE64]}]},
        {"messages": [{"role": "user", "content": [image(BASE64), text("a")], "images": [path]}]},
        {"messages": [{"role": "user", "content": [image(path), image(BASE64), text("a")], "images": []}]},
    ]
    made = [inputs(folder).request(parse_line(Line.of(0, json.dumps(one).encode()))) for one in fields]
    assert len({one.key for one in made}) == 1 and not any(one.extra for one in made)
    assert [picture.read() for picture in made[0].pictures] == [DATA, DATA]
    for others in ({"prompt": "a", "raw": True}, {"prompt_token_ids": [1]}, {"messages": fields[3]["messages"]}):
        error = parse_line(Line.of(0, json.dumps({**others, "images": [path]}).encode())).error
        assert error is not None and "images is not available" in str(error)


def test_a_model_of_text_refuses_images(folder: Path) -> None:
    """Guards models of text: an image is no text that is missing."""
    with pytest.raises(RequestError, match=r"^line 1: this model takes no images$"):
        inputs(folder, takes_images=False).request(row(image("photos/a cat.png")))


OUTSIDE = "lies outside of the folder of images"
ESCAPES = {
    "../secret.png": OUTSIDE,
    "photos/../../secret.png": OUTSIDE,
    "/etc/passwd": OUTSIDE,
    "/dev/zero": OUTSIDE,
    "out.png": OUTSIDE,
    "up/secret.png": OUTSIDE,
    "up/missing.png": OUTSIDE,
    "file:///etc/passwd": OUTSIDE,
    "file:../secret.png": OUTSIDE,
    "file:%2e%2e%2fsecret.png": OUTSIDE,
    "FILE:%2E%2E/secret.png": OUTSIDE,
    "file:///etc%2fpasswd": OUTSIDE,
    "file://host/photos/a%20cat.png": "must be file:///",
    "file://[/a.png": "Invalid IPv6 URL",
    "file:photos/a%20cat.png?x": "must be file:///",
    "%2e%2e/secret.png": "No such file",
    "ftp://host/a.png": "there are URLs of file:, data:, http: and https:",
    "http://localhost/a.png": "--allow-remote-media",
    "HTTPS://localhost/a.png": "--allow-remote-media",
    "a\0b": "null byte",
    "missing.png": "No such file",
    "photos/a cat.png/x": "Not a directory",
    "photos": "it is not a file",
    ".": "it is not a file",
    "pipe": "it is not a file",
    "socket": "No such device",
    "loop": "symbolic links",
    "large.png": "it is larger than 256 MiB",
    "a" * 256 + ".png": "File name too long",
    "a/" * 1500 + "b.png": "",
    "a/" * 300 + "b.png": "No such file",
    "\udcff.png": "No such file",
    "data:,": "it must begin with data:image/",
    "data:text/html;base64,AAAA": "it must begin with data:image/",
    "data:image/png,AAAA": "it must begin with data:image/",
    "data:image/png;base64,AAA": "not base64",
    "data:image/png;base64,AA==AA==": "not base64",
    "data:image/png;base64,AA AA": "not base64",
    "data:image/png;base64,é": "",
    "data:image/png;base64,_-_-": "not base64",
}


@pytest.mark.parametrize("path", ESCAPES)
def test_what_is_no_image_below_the_root_is_refused(path: str, folder: Path) -> None:
    """Guards files that are none of the row's business, and those that block or never end; errors say which and why."""
    (folder / "out.png").symlink_to("../secret.png")
    (folder / "up").symlink_to("..")
    (folder / "loop").symlink_to("loop")
    os.mkfifo(folder / "pipe")
    with (folder / "large.png").open("wb") as file:
        file.truncate(pictures.MAX_BYTES + 1)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(os.path.relpath(folder / "socket"))
        with pytest.raises(RequestError) as failed:
            inputs(folder).request(row(text("a"), image("photos/a cat.png"), image(path)))
    assert failed.value.code == "invalid_row"
    assert str(failed.value).startswith(f"line 1: {PLACE} (") and ESCAPES[path] in str(failed.value), failed.value
    assert len(str(failed.value)) < 300 and str(failed.value).isprintable()


def test_names_of_other_encodings_are_reached_by_urls(folder: Path) -> None:
    """Guards files whose names are no UTF-8, which JSON cannot say."""
    Path(os.fsdecode(os.fsencode(folder) + b"/\xff.png")).write_bytes(DATA)
    assert MediaSources(str(folder)).picture("file:%ff.png", PLACE).read() == DATA


@pytest.mark.parametrize(
    "given", ["iVBORw0KGgo.", "a" * 301, {"bytes": "photos/a cat.png"}, {"bytes": 3}, {"path": ""}]
)
def test_what_is_no_base64_is_refused(given: Any) -> None:
    """Guards cells of tables that are cut, and objects of other kinds."""
    with pytest.raises(RequestError, match=f"^{PLACE} (cannot be used: it is not base64|must have a path)"):
        MediaSources().picture(given, PLACE)


@pytest.mark.parametrize("swapped", ["photos", "photos/a cat.png"])
def test_a_link_that_comes_later_is_not_followed(swapped: str, folder: Path) -> None:
    """Guards the time between the check of a path and the opening of its file."""
    outside = folder.parent / "outside"
    outside.mkdir()
    (outside / "a cat.png").write_bytes(b"secret")
    picture = MediaSources(str(folder)).picture("photos/a cat.png", PLACE)
    (folder / swapped).rename(folder / "before")
    (folder / swapped).symlink_to(outside if swapped == "photos" else outside / "a cat.png")
    for read in (picture.read, picture.digest):
        with pytest.raises(RequestError, match=r"^image 2 of message 1 \(photos/a cat.png\) cannot be read: "):
            read()


def test_keys_change_with_bytes_and_not_with_paths(folder: Path) -> None:
    """Guards --resume: a changed file is a changed row, and one that was moved is not."""
    make = partial(inputs(folder).request)
    path = folder / "photos" / "a cat.png"
    key = make(row(text("a"), image("photos/a cat.png"))).key
    (folder / "b.png").write_bytes(DATA)
    assert make(row(text("a"), image("b.png"))).key == key
    assert make(row(text("a"), {"type": "image", "base64": BASE64})).key == key
    assert make(row(image("b.png"), text("a"))).key != key, "the place counts"
    assert make(row(text("a"))).key != key
    (folder / "c.png").write_bytes(DATA + b"!")
    both = {make(row(image(first), image(second))).key for first, second in (("b.png", "c.png"), ("c.png", "b.png"))}
    assert len(both) == 2, "the order counts"
    status = path.stat()
    path.write_bytes(DATA[::-1])
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert make(row(text("a"), image("photos/a cat.png"))).key != key, "the size and the time are as before"


def test_files_are_read_once_for_their_digests(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the time of rows that show the same image."""
    reads = []
    monkeypatch.setattr(pictures, "_read", lambda path, read=pictures._read: reads.append(path) or read(path))
    picture = MediaSources(str(folder)).picture("photos/a cat.png", PLACE)
    assert len({picture.digest() for _ in range(3)}) == 1 and len(reads) == 1


def test_a_picture_stays_what_its_key_says(folder: Path) -> None:
    """Guards a file that is replaced during a run: its row must not have the key of one and the tokens of another."""
    made, path = inputs(folder).request(row(image("photos/a cat.png"))), folder / "photos" / "a cat.png"
    (picture,) = made.pictures
    before = picture.digest()
    assert picture.unchanged().source == DATA
    path.write_bytes(b"another")
    assert picture.digest() == before and inputs(folder).request(row(image("photos/a cat.png"))).key != made.key
    with pytest.raises(
        RequestError, match=r"^image 1 of message 1 \(photos/a cat.png\) has changed since it was read$"
    ):
        picture.unchanged()
    path.write_bytes(DATA)
    assert picture.unchanged().source == DATA


def test_lines_are_parsed_without_their_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards flat memory: a file is read when its row is prepared, and what a line holds is not kept twice."""
    monkeypatch.setattr(os, "open", None)
    parsed = row(image("photos/a cat.png"))
    monkeypatch.undo()
    assert parsed.error is None and not parsed.pictures
    made = inputs(folder).request(parsed)
    assert made.given_pictures == () and isinstance(made.pictures[0].source, Path)


def test_python_gives_bytes_paths_and_pixels(folder: Path) -> None:
    """Guards conversations of programs, whose images are objects."""
    pillow = pytest.importorskip("PIL.Image", reason="Pillow is not installed").new("RGB", (3, 2), (1, 2, 3))
    pixels = np.array(pillow)
    given = [DATA, folder / "photos" / "a cat.png", bytearray(DATA), pillow, pixels]
    forms: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": [*({"type": "image", "image": one} for one in given), text("a")]}]},
        {"messages": [{"role": "user", "content": "a", "images": given}]},
        {"prompt": "a", "images": given},
    ]
    for prompt in forms:
        made = inputs(folder).request(read_prompt(prompt, 0, {}))
        assert [picture.read() for picture in made.pictures[:3]] == [DATA] * 3
        assert decode(made.pictures[3]).tolist() == decode(made.pictures[4]).tolist() == pixels.tolist()
    floats = {"messages": [{"role": "user", "content": [{"type": "image", "image": pixels / 255}]}]}
    with pytest.raises(RequestError, match="image 1 of message 1 must have one of"):
        inputs(folder).request(read_prompt(floats, 0, {}))


@pytest.fixture
def server() -> Iterator[str]:
    """A web server with one image, one that is too large, one that never ends, and one behind a redirection."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            if self.path == "/moved.png":
                self.send_response(302)
                self.send_header("Location", "file:///etc/passwd")
                self.end_headers()
                return
            self.send_response(200 if self.path != "/missing.png" else 404)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(DATA * (10_000 if self.path == "/large.png" else 1))
                if self.path == "/slow.png":
                    stopped.wait(20)

        def log_message(self, *arguments: Any) -> None:
            pass

    stopped = threading.Event()
    serving = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    serving.daemon_threads = True
    threading.Thread(target=serving.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{serving.server_port}"
    stopped.set()
    serving.shutdown()
    serving.server_close()


def test_images_are_fetched_only_if_that_is_allowed(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards machines whose network rows must not use; and with leave, runs against large files and slow servers."""
    pytest.importorskip("aiohttp", reason="aiohttp is not installed")
    monkeypatch.setattr(pictures, "MAX_BYTES", 100_000)
    monkeypatch.setattr(pictures, "FETCH_SECONDS", 1)
    allowed = MediaSources(allow_remote=True)
    assert allowed.picture(f"{server}/a.png", PLACE) == Picture(DATA, f"{PLACE} ({server}/a.png)")
    reasons = {"large": "larger than", "missing": "no such file", "slow": "Timeout", "moved": ""}
    for name, reason in reasons.items():
        with pytest.raises(RequestError, match=f"^image 2 of message 1 .* cannot be used: .*{reason}"):
            allowed.picture(f"{server}/{name}.png", PLACE)
    with pytest.raises(RequestError, match="cannot be used: it lies on a web server"):
        MediaSources().picture(f"{server}/a.png", PLACE)
