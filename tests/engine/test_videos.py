"""Videos of conversations: the tokens of transformers' `generate`, and what is said of those that cannot be used."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from cbatch.base.config import EngineConfig
from cbatch.base.params import SamplingParams
from cbatch.engine.stepping_engine import SteppingEngine
from cbatch.media.pictures import Video
from cbatch.model.hf import vision
from cbatch.model.hf.vision import ProcessedImage, Vision
from tests.support.generation import generate
from tests.support.samples import sampled
from tests.support.vision_models import (
    PACKAGES,
    VIDEOS,
    Reference,
    animation,
    clip,
    frames,
    message,
    picture,
    save_vision_model,
)

LENGTH = 8
FIRST, SECOND, SHORT, IMAGE = clip(1, 16), clip(2, 16), clip(3, 5, 32, 32), picture(1, 40, 70)
CHATS = {
    "one": [message("user", "see ", FIRST, " what?")],
    "another of its size": [message("user", "see ", SECOND, " what?")],
    "two": [
        message("user", "see ", FIRST, "what?"),
        message("assistant", "yes"),
        message("user", SHORT, FIRST, "and?"),
    ],
    "with an image": [message("user", IMAGE, "see ", SHORT, " what?"), message("user", IMAGE, "and?")],
}
LEFT_OUT = {kind: ["with an image"] for kind in VIDEOS if kind.startswith("glm")}
LEFT_OUT |= {"smolvlm": ["with an image", "two"]}
"""Conversations for which transformers is no reference: it takes no images and videos of these types together, and
SmolVLM's processor says of each video that it has as many frames as the longest of the conversation."""

FOLDER = TemporaryDirectory(prefix="cbatch-videos-")
needs_torchvision = pytest.mark.skipif(find_spec("torchvision") is None, reason="processors of videos need torchvision")


@cache
def folder_of(kind: str) -> Path:
    if missing := [name for name in PACKAGES.get(kind, ()) if find_spec(name) is None]:
        pytest.skip(f"the processor of {kind} needs {' and '.join(missing)}")
    folder = save_vision_model(Path(FOLDER.name) / kind, kind)
    if find_spec("torchvision") is not None and kind in VIDEOS:
        VIDEOS[kind]().save_pretrained(folder)
    return folder


def chats_of(kind: str) -> list[str]:
    return [name for name in CHATS if name not in LEFT_OUT.get(kind, ())]


@cache
def expected(kind: str) -> list[list[int]]:
    """Tokens of `generate` after each of a type's conversations."""
    reference = Reference(folder_of(kind))
    return [reference.generate(CHATS[name], LENGTH) for name in chats_of(kind)]


def engine_of(kind: str, **config: Any) -> SteppingEngine:
    settings = {"device": "cpu", "dtype": "float32", "block_size": 16, "max_seqs": 4, "kv_blocks": 400, **config}
    return SteppingEngine(EngineConfig(model=str(folder_of(kind)), **settings))


def answers(engine: SteppingEngine, chats: Sequence[Any]) -> list[Any]:
    found = generate(engine, [{"messages": one} for one in chats], SamplingParams(max_tokens=LENGTH, ignore_eos=True))
    engine.scheduler.check_integrity()
    return found


def outputs_of(engine: SteppingEngine, kind: str) -> list[list[int]]:
    found = answers(engine, [CHATS[name] for name in chats_of(kind)])
    assert not any(one.error for one in found), found
    return [list(one.token_ids) for one in found]


@needs_torchvision
@pytest.mark.parametrize("kind", sampled(sorted(VIDEOS), 4, keep=["internvl", "qwen2_5_vl", "qwen3_vl", "qwen3_5"]))
def test_tokens_of_generate(kind: str) -> None:
    """Guards each family: which frames it takes, what stands for them, their positions, and the cache behind them."""
    with engine_of(kind, max_batch_tokens=7, prefix_cache=False) as engine:
        assert outputs_of(engine, kind) == expected(kind)
    with engine_of(kind, max_batch_tokens=40) as engine:
        assert outputs_of(engine, kind) == expected(kind)
        known = engine.stats()
        assert known.num_encoded_images == 4 - len(LEFT_OUT.get(kind, ()))
        assert outputs_of(engine, kind) == expected(kind)
        again = engine.stats()
        assert again.num_encoded_images == known.num_encoded_images
        assert again.num_cached_tokens >= known.num_cached_tokens + 16 * len(chats_of(kind))
    assert len({tuple(tokens) for tokens in expected(kind)}) == len(chats_of(kind)), "some video changes nothing"


@needs_torchvision
@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_frames_of_a_row(kind: str, tmp_path: Path) -> None:
    """Guards videos that a row gives as frames: each is taken, and so many are shown in a second as the row says."""
    pixels = frames(1, 6)
    for number, one in enumerate(pixels):
        Image.fromarray(one).save(tmp_path / f"{number}.png")

    def asked(**part: Any) -> list[dict[str, Any]]:
        text = {"type": "text", "text": "what?"}
        return [{"role": "user", "content": [{"type": "video", **part}, text]}]

    whole = b64encode(animation(pixels, duration=250)).decode()  # of which the processors take all
    names = [f"{number}.png" for number in range(6)]
    chats = [asked(base64=whole), *(asked(video=names, fps=fps) for fps in (4, 0.4)), asked(video=names[::-1], fps=4)]
    with engine_of(kind, media_root=str(tmp_path)) as engine:
        found = answers(engine, chats)
    assert not any(one.error for one in found), found
    clip_tokens, *tokens = (list(one.token_ids) for one in found)
    assert tokens[0] == clip_tokens and clip_tokens not in tokens[1:]


@needs_torchvision
def test_inputs_that_were_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards bounded memory: what was dropped is decoded, processed and encoded again."""
    monkeypatch.setattr("cbatch.model.images.INPUT_BYTES", 1)
    with engine_of("qwen3_vl", max_batch_tokens=17, prefix_cache=False, media_cache="0") as engine:
        assert outputs_of(engine, "qwen3_vl") == expected("qwen3_vl")
        assert engine.stats().num_encoded_images > 4


Fault = Callable[[pytest.MonkeyPatch], None]


def change_frames(change: Callable[[Any, dict[str, Any]], Any]) -> Fault:
    decode = vision.decode_video

    def changed(*given: Any) -> Any:
        pixels, about = decode(*given)
        return change(pixels, about), about

    return lambda patch: patch.setattr(vision, "decode_video", changed)


def take_others(patch: pytest.MonkeyPatch) -> None:
    """The first frames instead of those that the processor chooses."""
    decode = vision.decode_video
    patch.setattr(vision, "decode_video", lambda video, sample: decode(video, lambda one: range(len(sample(one)))))


def slower(times: int) -> Fault:
    def change(pixels: Any, about: dict[str, Any]) -> Any:
        about["fps"] /= times
        return pixels

    return change_frames(change)


FAULTS: dict[str, tuple[Fault, str]] = {
    "frames out of order": (change_frames(lambda pixels, _: pixels[::-1].copy()), "internvl"),
    "other frames": (take_others, "qwen2_vl"),
    "times of a slower video": (slower(2), "qwen3_vl"),
    "steps of a slower video": (slower(8), "qwen2_5_vl"),
    "contents ignored": (lambda patch: patch.setattr(Video, "digest", lambda self: "0" * 32), "qwen3_5"),
}


@needs_torchvision
@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the comparisons above: each of these faults changes tokens."""
    fault, kind = FAULTS[name]
    fault(monkeypatch)
    with engine_of(kind) as engine:
        found = answers(engine, [CHATS[one] for one in chats_of(kind)])
        assert [list(one.token_ids) for one in found] != expected(kind)


def change_inputs(image: ProcessedImage) -> ProcessedImage:
    return image._replace(inputs={**image.inputs, "pixel_values_of_another": image.inputs["pixel_values"]})


def change_embeddings(called: dict[str, Any]) -> dict[str, Any]:
    called["inputs_embeds"] = called["inputs_embeds"].nan_to_num(1.0)
    return called


@pytest.mark.parametrize(
    ("method", "change", "problem"),
    [
        ("_process", change_inputs, "its language model takes pixel_values_of_another, too"),
        (
            "_call",
            change_embeddings,
            "other tokens are replaced than those of its images, or something is added to them",
        ),
    ],
)
def test_networks_that_are_not_understood(
    method: str, change: Callable[[Any], Any], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards types of which rows would be lost: pixels that the network ignores, and rows outside of placeholders."""
    original = getattr(Vision, method)
    monkeypatch.setattr(Vision, method, lambda *given, **named: change(original(*given, **named)))
    with engine_of("internvl") as engine:
        (refused,) = answers(engine, [[message("user", IMAGE, "what?")]])
        assert str(refused.error) == f"images of models of the type internvl are not supported: {problem}"


def test_a_model_without_videos() -> None:
    """Guards the error of a row with a video for a model that takes images only; its images are answered."""
    with engine_of("llava") as engine:
        refused, answered = answers(engine, [CHATS["one"], [message("user", IMAGE, "what?")]])
        assert str(refused.error) == "this model takes no videos" and refused.error.code == "invalid_row"
        assert len(answered.token_ids) == LENGTH


def test_torchvision_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the error of a row with a video if torchvision is missing: it names that, and images are answered."""

    def load(*_: Any, **__: Any) -> None:
        raise ImportError("AutoVideoProcessor requires the Torchvision library but it was not found.")

    monkeypatch.setattr("cbatch.model.hf.vision.find_spec", lambda name: None)
    monkeypatch.setattr("transformers.AutoVideoProcessor", SimpleNamespace(from_pretrained=load))
    with engine_of("qwen2_vl") as engine:
        refused, answered = answers(engine, [CHATS["one"], [message("user", IMAGE, "what?")]])
        reason = "the model's processor of videos cannot be loaded: it needs the package torchvision."
        assert str(refused.error) == reason and refused.error.code == "invalid_row"
        assert len(answered.token_ids) == LENGTH
