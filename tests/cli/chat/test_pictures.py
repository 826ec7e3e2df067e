"""Pictures that go with messages of a chat: how they are named, what the model gets, and what becomes of the files."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cbatch.api import Engine
from cbatch.base.config import EngineConfig
from cbatch.base.errors import RequestError
from cbatch.base.request import Request, RequestDefaults
from cbatch.batch.lines import MAX_LINE_BYTES
from cbatch.cli.chat.commands.registry import FrontEnd, execute_line
from cbatch.cli.chat.controller import ChatController, Variant
from cbatch.cli.chat.pictures import graphics_of, leading_pictures, read_attachment, thumbnail
from cbatch.cli.chat.screen import Transcript
from cbatch.cli.chat.session.export import to_markdown, to_row
from cbatch.cli.chat.session.store import SessionStore, read_session, to_json
from cbatch.cli.common.exits import UserError
from cbatch.media.pictures import NO_IMAGES
from cbatch.requests.rows import fill_row
from tests.support.chat_harness import ChatHarness, reply_of
from tests.support.chat_terminal import Chat
from tests.support.fork_server import ForkServer
from tests.support.model_folder import SPECIAL, make_tokenizer
from tests.support.tiny_models import draw_weights

Image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<image>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
)
PARTS = "<image> <fake_token_around_image> <global-img> <row_1_col_1>".split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Idefics 3 with its processor."""
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration, Idefics3Processor
    from transformers.models.idefics3 import Idefics3ImageProcessorPil

    path, tokenizer = tmp_path_factory.mktemp("idefics3"), make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [*SPECIAL[1:], *PARTS]})
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Idefics3Config(
        text_config={"model_type": "llama", "vocab_size": len(tokenizer), **sizes, "head_dim": 16, "eos_token_id": 2},
        vision_config={**sizes, "image_size": 32, "patch_size": 8},
        scale_factor=2,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
    )
    network = Idefics3ForConditionalGeneration(config)
    draw_weights(network)
    network.save_pretrained(path)
    pixels = Idefics3ImageProcessorPil(size={"longest_edge": 32}, max_image_size={"longest_edge": 32})
    made = Idefics3Processor(image_processor=pixels, tokenizer=tokenizer, image_seq_len=4, chat_template=TEMPLATE)
    made.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def harness(folder: Path) -> Iterator[ChatHarness]:
    made = ChatHarness(Engine(EngineConfig(model=str(folder), dtype="float32", device="cpu")))
    yield made
    made.engine.close()


def save_picture(path: Path, seed: int = 0, size: tuple[int, int] = (640, 480)) -> Path:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
    Image.fromarray(pixels).save(path, "PNG")
    return path


def front_end(controller: ChatController, tmp_path: Path) -> FrontEnd:
    return FrontEnd(controller, SessionStore(tmp_path / "state"))


@pytest.mark.parametrize(
    "form",
    ["{path}", "{path} ", "'{path}'", '"{path}"', "{escaped}", "file://{url}", "file://localhost{url} {path}"],
)
def test_pictures_that_are_dropped(form: str, tmp_path: Path) -> None:
    """Guards what terminals write for dropped files; text behind them is the message; other paths stay."""
    path = save_picture(tmp_path / ("a b.png" if "{path}" not in form or form[0] in "'\"" else "ab.png"))
    typed = form.format(path=path, escaped=str(path).replace(" ", "\\ "), url=path.as_uri().removeprefix("file://"))
    found, rest = leading_pictures(typed)
    assert set(found) == {path} and rest == ""
    assert leading_pictures(f"{typed}  What is this? ")[1] == "What is this? "
    (tmp_path / "notes.txt").write_text("P5 is no picture\n")
    for other in (f"{tmp_path}/notes.txt", f"{tmp_path}/none.png", path.name, "file://[", "/read x", "it's"):
        assert leading_pictures(other) == ([], other)


def test_what_the_model_gets(harness: ChatHarness, tmp_path: Path) -> None:
    """Guards a turn with a picture: the prompt of the row with the same messages; another picture, another reply."""
    controller = harness.make(params={"max_tokens": 6, "temperature": 0.0, "ignore_eos": True})
    chat = front_end(controller, tmp_path)
    first, second = (save_picture(tmp_path / f"{seed} b.png", seed) for seed in (1, 2))
    replies = []
    for path in (first, second):
        controller.new_session()
        execute_line(chat, f"'{path}' What is this?")
        harness.settle(controller)
        replies.append(reply_of(controller.current))
    assert not replies[0].error and replies[0].text != replies[1].text
    assert harness.ask(controller, "And now?") and reply_of(controller.current).cached_tokens >= 16
    row = to_row(controller.current, {}, as_messages=True)
    parts = row["messages"][0]["content"]
    assert [part["type"] for part in parts] == ["image", "text"] and parts[0]["path"] == str(second)
    request = Request()
    fill_row(request, row)
    processor = harness.engine.core.input_processor(RequestDefaults(media_root="/"))
    assert len(processor.encode(processor.request(request)).prompt_ids) == reply_of(controller.current).prompt_tokens
    (turn, *_) = controller.current.turns
    harness.until(lambda: turn.attachments[0].num_tokens is not None)
    assert re.fullmatch(r"2 b\.png, 640 × 480, [\d.]+ KiB, \d+ tokens", turn.attachments[0].label)
    shown = "".join(text for line in Transcript().turn(turn, 80) for _, text in line)
    assert f"+ {turn.attachments[0].label}" in shown
    assert f"![2 b.png]({second.as_uri()})\n\nWhat is this?" in to_markdown(controller.current, "m")


@pytest.mark.parametrize("start", [b"\0\0\0 ftypisom", b"\x1aE\xdf\xa3", b"RIFF1234AVI "])
def test_videos_are_attached_as_such(start: bytes, harness: ChatHarness, tmp_path: Path) -> None:
    """Guards videos against being sent as pictures, or as text; a model that takes none says so."""
    controller = harness.make(params={"max_tokens": 3})
    chat, path = front_end(controller, tmp_path), tmp_path / "clip.bin"
    path.write_bytes(start + bytes(100))
    execute_line(chat, f"{path} What happens?")
    harness.settle(controller)
    (turn,) = controller.current.turns
    assert turn.attachments[0].text.startswith("video, ")
    assert [part["type"] for part in turn.user_message()["content"]] == ["video", "text"]
    assert reply_of(controller.current).error == "this model takes no videos"
    file = tmp_path / "s.json"
    file.write_text(json.dumps(to_json(controller.current)))
    (saved,) = read_session(file).turns
    assert saved.user_message() == turn.user_message()
    path.write_bytes(start)
    controller.retry(controller.current, [Variant()])
    harness.settle(controller)
    assert "video 1 of message 1" in reply_of(controller.current).error
    assert "has changed since it was attached" in reply_of(controller.current).error


def test_a_picture_that_is_gone_or_has_changed(harness: ChatHarness, tmp_path: Path) -> None:
    """Guards saved sessions: the next turn says what has become of a picture, loses nothing, and /retry goes on."""
    controller = harness.make(params={"max_tokens": 3})
    chat, path = front_end(controller, tmp_path), save_picture(tmp_path / "cat.png")
    execute_line(chat, f"/attach {path}")
    assert [one.name for one in controller.current.attached] == [str(path)]
    execute_line(chat, "What is this?")
    harness.settle(controller)
    file = tmp_path / "s.json"
    file.write_text(json.dumps(to_json(controller.current)))
    controller.open_saved(read_session(file))
    before = path.read_bytes()
    for spoil, problem in ((lambda: save_picture(path, 7), "has changed since"), (path.unlink, "No such file")):
        spoil()
        harness.ask(controller, "And now?")
        assert problem in reply_of(controller.current).error and "cat.png" in reply_of(controller.current).error
    path.write_bytes(before)
    controller.retry(controller.current, [Variant()])
    harness.settle(controller)
    assert not reply_of(controller.current).error and reply_of(controller.current).num_tokens
    copy = controller.fork(controller.current)
    assert copy.turns[0].attachments[0].digest == controller.sessions[0].turns[0].attachments[0].digest
    with pytest.raises(UserError, match="No text"):
        controller.current.attached = [read_attachment(path)]
        execute_line(chat, "/fit")
    execute_line(chat, "/detach all")
    assert controller.current.attached == []


def test_what_cannot_be_attached(tmp_path: Path) -> None:
    """Guards `/attach` of a picture for a model without images, and of damage, against a late error."""
    engine = SimpleNamespace(loaded=SimpleNamespace(vision=NO_IMAGES, name="tiny"), tokenizer=None)
    controller = ChatController(SimpleNamespace(engine=engine))  # type: ignore[arg-type]
    chat = front_end(controller, tmp_path)
    with pytest.raises(UserError, match="tiny takes no images"):
        execute_line(chat, f"/attach {save_picture(tmp_path / 'cat.png')}")
    (tmp_path / "bad.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    (tmp_path / "photo.heic").write_bytes(b"\0\0\0\x18ftypheic" + bytes(16))
    for name in ("bad.png", "photo.heic"):
        with pytest.raises(RequestError, match=f"{name} cannot be decoded: it is none of PNG"):
            execute_line(chat, f"/attach {tmp_path}/{name}")
    assert controller.current.attached == []


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"TERM": "xterm-256color"}, ""),
        ({"TERM": "xterm-kitty"}, "kitty"),
        ({"TERM": "xterm-256color", "KITTY_WINDOW_ID": "1"}, "kitty"),
        ({"TERM": "tmux-256color", "KITTY_WINDOW_ID": "1"}, ""),
        ({"TERM": "xterm-kitty", "TMUX": "x"}, ""),
        ({"TERM": "xterm-256color", "TERM_PROGRAM": "iTerm.app"}, "iterm"),
    ],
)
def test_which_terminals_show_pictures(environment: dict[str, str], expected: str) -> None:
    """Guards terminals that know no graphics, and those inside of tmux, against a screen full of base64."""
    assert graphics_of(environment) == expected


@pytest.mark.parametrize("graphics", ["kitty", "iterm"])
def test_a_thumbnail(graphics: str, tmp_path: Path) -> None:
    """Guards the sequences against more than a terminal takes at once, and against a picture that fills the screen."""
    drawn = thumbnail(read_attachment(save_picture(tmp_path / "cat.png")), graphics)
    assert drawn.startswith("\x1b7") and drawn.endswith("\x1b8"), "the cursor stays"
    if graphics == "kitty":
        chunks = re.findall(r"\x1b_G([^;]*);([^\x1b]*)\x1b\\", drawn)
        assert all(len(data) <= 4096 and "q=2" in head for head, data in chunks)
        assert [head[-3:] for head, _ in chunks] == [*["m=1"] * (len(chunks) - 1), "m=0"]
        data = "".join(data for _, data in chunks)
    else:
        data = drawn.partition(":")[2].partition("\x07")[0]
    assert Image.open(io.BytesIO(base64.b64decode(data))).size == (267, 200)


@pytest.mark.slow
def test_a_picture_on_the_screen(runs: ForkServer, folder: Path, tmp_path: Path) -> None:
    """Guards a picture that is dropped while a message is typed; its thumbnail is there until the message is sent."""
    path = save_picture(tmp_path / "cat.png")
    env = {"KITTY_WINDOW_ID": "1", "TMUX": "", "TERM_PROGRAM": ""}
    with Chat(runs, tmp_path / "state", "-m", folder, "--max-tokens", 3, env=env) as chat:
        chat.wait("KV cache:")
        chat.send(f"Look: \x1b[200~{path} \x1b[201~", "+ 1 cat.png, 640 × 480", "main> Look:")
        chat.until(lambda: b"\x1b_Ga=T" in chat.raw, "no thumbnail")
        assert b"\x1b_Ga=d" not in chat.raw
        chat.send("well\r", "> Look: well", "+ cat.png, 640 × 480", gone="+ 1")
        chat.until(lambda: b"\x1b_Ga=d" in chat.raw, "it stays")
    with Chat(runs, tmp_path / "state", "-m", folder, "--attach", path, env=env) as chat:
        chat.wait("+ 1 cat.png, 640 × 480", " tokens")
        chat.until(lambda: b"\x1b_Ga=T" in chat.raw, "no thumbnail")


@pytest.mark.slow
def test_a_question_about_a_picture(runs: ForkServer, folder: Path, tmp_path: Path) -> None:
    """Guards `cbatch chat --attach FILE QUESTION`, and the picture on stdin, however large: the same reply."""
    path, options = tmp_path / "cat.bmp", ["-m", folder, "--json", "--max-tokens", 4, "--temperature", 0]
    Image.open(save_picture(tmp_path / "cat.png")).resize((2600, 2200)).save(path)
    assert path.stat().st_size > MAX_LINE_BYTES
    found: list[dict[str, Any]] = []
    for number, (stdin, more) in enumerate([("/dev/null", ["--attach", path]), (path, []), ("/dev/null", [])]):
        out = tmp_path / f"out{number}"
        out.touch()
        run = runs.start(
            "chat", *options, *more, "What is this?", stdin=str(stdin), stdout=str(out), stderr="/dev/null"
        )
        assert run.code() == 0
        found.append(json.loads(out.read_text()))
    assert found[0] == found[1] and found[0]["usage"]["prompt_tokens"] > found[2]["usage"]["prompt_tokens"]
