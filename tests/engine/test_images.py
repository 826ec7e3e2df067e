"""Images of conversations: the tokens of transformers' `generate`, whatever else an engine does at the same time."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from shutil import copytree
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from cbatch.attention.reference import ReferenceAttention
from cbatch.base.config import EngineConfig
from cbatch.base.params import SamplingParams
from cbatch.engine.stepping_engine import SteppingEngine
from cbatch.media.pictures import Picture, Video
from cbatch.model.families import rotary
from cbatch.model.hf import vision
from cbatch.model.hf.vision import Vision
from cbatch.model.images import Images
from cbatch.model.load_plan import LoadPlan
from cbatch.model.loader import load_model
from cbatch.model.ops.device_kernel import by_torch
from cbatch.model.ops.embed import AddImage
from cbatch.runtime.batch import ImageRows
from tests.support.generation import generate
from tests.support.quantized_folders import change_tensors, fp8, nf4, nf4_settings
from tests.support.samples import sampled
from tests.support.vision_models import MAKERS, PACKAGES, Reference, message, picture, save_vision_model

pytest.importorskip("PIL", reason="images need Pillow")

REFUSED = {
    "ernie4_5_vl_moe": "its language model takes moe_mm_token_type_ids, too",
    "granite4_vision": "its language model takes deepstack_features, too",
    "hunyuan_vl": "its tokens have 4 positions each",
    "idefics2": "the text of one depends on what stands around it",
    "mllama": "layers of its language model attend to them",
    "molmo2": "other tokens are replaced than those of its images, or something is added to them",
    "paligemma": "the text of one depends on what stands around it",
}
KINDS = sorted(MAKERS.keys() - REFUSED.keys() - {"gemma3"})  # which has a test of its own
BY_TRANSFORMERS = {"aria", "cohere_compass", "deepseek_ocr2", "gemma3n", "mistral_large4"}
BY_PROGRAM = {"llama4", "minimax_m3_vl"}
"""Types whose language model only transformers computes, or only a program."""
VARIED = ["glm4v", "granite_docling", "idefics3", "internvl", "janus", "llava_next", "llava_onevision",
          "minicpmv4_6", "ovis2", "paddleocr_vl", "qwen2_vl", "qwen3_5", "qwen3_vl"]  # fmt: skip
"""Towers, tiles, positions of three axes, recurrent layers, prompts that begin otherwise with images; images that are
added to layers, are multiplied, are numbered, differ beside others, or replace tokens of several kinds."""

LENGTH = 12
FIRST, SECOND, SMALL = picture(1, 40, 70), picture(2, 40, 70), picture(3, 30, 30)
CHATS = {
    "one": [message("user", "hello ", FIRST, " what is it?")],
    "another of its size": [message("user", "hello ", SECOND, " what is it?")],
    "three": [message("user", FIRST, "what?", SMALL, SECOND, "and?")],
    "none": [message("user", "plain text alone")],
    "two turns": [message("user", SMALL, "one"), message("assistant", "yes"), message("user", "and ", SECOND)],
    "twice": [message("user", "the same: ", SMALL, SMALL)],
}
FOLDER = TemporaryDirectory(prefix="cbatch-vision-")


@cache
def folder_of(kind: str) -> Path:
    if missing := [name for name in PACKAGES.get(kind, ()) if find_spec(name) is None]:
        pytest.skip(f"the processor of {kind} needs {' and '.join(missing)}")
    return save_vision_model(Path(FOLDER.name) / kind, kind)


@cache
def expected(kind: str) -> list[list[int]]:
    """Tokens of `generate` after each of CHATS."""
    reference = Reference(folder_of(kind))
    return [reference.generate(messages, LENGTH) for messages in CHATS.values()]


def engine_of(kind: str, **config: Any) -> SteppingEngine:
    settings = {"device": "cpu", "dtype": "float32", "block_size": 16, "max_seqs": 4, "kv_blocks": 400, **config}
    return SteppingEngine(EngineConfig(model=str(folder_of(kind)), **settings))


def outputs_of(engine: SteppingEngine, names: Sequence[str] = tuple(CHATS), **params: Any) -> list[list[int]]:
    """Tokens of each output of conversations, which run side by side."""
    settings = SamplingParams(max_tokens=LENGTH, ignore_eos=True, **params)
    found = generate(engine, [{"messages": CHATS[name]} for name in names], settings)
    engine.scheduler.check_integrity()
    assert not any(one.error for one in found), found
    return [list(output.token_ids) for one in found for output in one.choices]


def num_images(kind: str) -> int:
    """Images in CHATS that differ for a type."""
    return 5 if kind == "llava_onevision" else 3  # two are alone in one conversation and beside others in another


def images_of(engine: SteppingEngine) -> Images:
    assert engine._images is not None
    return engine._images


@pytest.mark.parametrize("kind", sampled(KINDS, len(VARIED), keep=VARIED))
def test_tokens_of_generate(kind: str) -> None:
    """Guards every family: where images stand, what replaces them, and what other rows of the step have there.

    Afterwards the prompts lie in the cache, and neither these nor other pictures are encoded again.
    """
    with engine_of(kind, max_batch_tokens=17) as engine:
        assert outputs_of(engine) == expected(kind)
        known = engine.stats().num_cached_tokens
        assert images_of(engine).num_encoded == num_images(kind)
        assert outputs_of(engine) == expected(kind)
        assert images_of(engine).num_encoded == num_images(kind)
        assert engine.stats().num_cached_tokens >= known + 16 * len(CHATS)
    assert len({tuple(tokens) for tokens in expected(kind)}) == len(CHATS), "some picture changes nothing"


@pytest.mark.parametrize(
    "kind",
    sampled(
        sorted({*KINDS} - {"minicpmv4_6"}), 5, keep=["idefics3", "internvl", "llava_next", "paddleocr_vl", "qwen3_vl"]
    ),
)
def test_images_together(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards images of one shape that a GPU computes together, but for those of MiniCPM-V, which lie side by side."""
    sizes, compute = list[int](), Vision.features

    def features(self: Vision, images: Sequence[Any]) -> Any:
        sizes.append(len(images))
        return compute(self, images)

    monkeypatch.setattr(Vision, "features", features)
    with engine_of(kind, max_batch_tokens=2000) as engine:
        images_of(engine)._together_bytes = 1 << 28
        assert outputs_of(engine) == expected(kind)
    assert sum(sizes) == num_images(kind) and max(sizes) > 1


@pytest.mark.parametrize("tokens", [7, 16])
@pytest.mark.parametrize("kind", sampled(KINDS, 3, keep=["qwen2_vl", "qwen3_5", "qwen3_vl"]))
def test_chunks_of_other_sizes(kind: str, tokens: int) -> None:
    """Guards images that several steps share, or that begin with a step or a block, without the prefix cache."""
    with engine_of(kind, max_batch_tokens=tokens, prefix_cache=False) as engine:
        assert outputs_of(engine) == expected(kind)
        assert images_of(engine).num_encoded == num_images(kind) and not engine.stats().num_cached_tokens


@pytest.mark.parametrize("kind", sampled(sorted({*KINDS} - BY_PROGRAM), 2, keep=["idefics3", "qwen3_vl"]))
def test_models_that_transformers_computes(kind: str) -> None:
    """Guards the way beside the fast path: modules of the network give an image's rows in place of their own."""
    with engine_of(kind, attention="reference", max_batch_tokens=40) as engine:
        assert engine.loaded.fast_model is None
        assert outputs_of(engine) == expected(kind)


@pytest.mark.parametrize(("attention", "has_bfloat16"), [("auto", False), ("reference", False), ("auto", True)])
def test_towers_in_bfloat16(attention: str, has_bfloat16: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the speed of a processor that torch has no bfloat16 for: the tower runs in float32 beside such weights."""
    monkeypatch.setattr("cbatch.model.load_plan._cpu_has_bfloat16", lambda: has_bfloat16)
    with engine_of("idefics3", attention=attention, dtype="bfloat16") as engine:
        assert len({tuple(tokens) for tokens in outputs_of(engine)}) == len(CHATS)
        rows = next(iter(images_of(engine)._features._held.values()))[0]
        assert rows.dtype == (torch.bfloat16 if has_bfloat16 else torch.float32)


def shake(engine: SteppingEngine, patch: pytest.MonkeyPatch) -> None:
    """Preempts most running requests every few steps."""
    step = engine.step

    def shaken() -> Any:
        if engine.stats().num_steps % 4 == 3:
            while engine.shrink():
                pass
            while not engine.scheduler.grow():
                pass
        return step()

    patch.setattr(engine, "step", shaken)


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("kind", sampled(KINDS, 3, keep=["idefics3", "qwen3_5", "qwen3_vl"]))
def test_preempted_requests(kind: str, prefix_cache: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards requests that are computed again: their images come again, and their positions."""
    with engine_of(kind, max_batch_tokens=40, prefix_cache=prefix_cache) as engine:
        shake(engine, monkeypatch)
        assert outputs_of(engine) == expected(kind)
        assert engine.stats().num_preemptions > 5 and images_of(engine).num_encoded == num_images(kind)


def test_features_that_were_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a bounded cache: what was dropped from it is read, processed and encoded again."""
    monkeypatch.setattr("cbatch.model.images.INPUT_BYTES", 1)
    with engine_of("qwen2_vl", max_batch_tokens=17, prefix_cache=False, media_cache="0") as engine:
        assert outputs_of(engine) == expected("qwen2_vl")
        assert images_of(engine).num_encoded > 3


@pytest.mark.parametrize("kind", ["idefics3", "qwen3_vl"])
def test_a_slow_tower(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards other requests, and Ctrl-C, against a step that waits for all images that fit into it."""
    counts, features = list[int](), Vision.features

    def slow(*given: Any) -> Any:
        counts[-1] += 1
        time.sleep(0.01)
        return features(*given)

    begin_step = Images.begin_step
    monkeypatch.setattr(Vision, "features", slow)
    monkeypatch.setattr(Images, "begin_step", lambda *given: counts.append(0) or begin_step(*given))
    monkeypatch.setattr("cbatch.model.images.STEP_SECONDS", 0.005)
    with engine_of(kind) as engine:
        assert outputs_of(engine) == expected(kind)
        assert max(counts) == 1 and sum(counts) == images_of(engine).num_encoded >= 3


@pytest.mark.parametrize("kind", ["idefics3", "qwen3_5"])
def test_outputs_of_one_prompt(kind: str) -> None:
    """Guards `n`: outputs share the image's keys and values, and each goes on from the prompt's positions."""
    with engine_of(kind, max_batch_tokens=17) as engine:
        assert outputs_of(engine, n=2) == [tokens for tokens in expected(kind) for _ in range(2)]
        first, second = outputs_of(engine, ["one"], n=2, temperature=1.0, seed=3)
    with engine_of(kind, prefix_cache=False) as engine:
        assert outputs_of(engine, ["one"], n=2, temperature=1.0, seed=3) == [first, second] and first != second


def device_engine(kind: str, patch: pytest.MonkeyPatch, **config: Any) -> SteppingEngine:
    """An engine whose program runs operation by operation, by torch."""
    from cbatch.model.config import read_model_config
    from cbatch.model.cuda import CudaModel

    folder = folder_of(kind)
    loaded = load_model(LoadPlan(str(folder), dtype="float32"))
    tensors, cpu = load_file(folder / "model.safetensors"), torch.device("cpu")
    model = CudaModel(read_model_config(folder), tensors, torch.float32, cpu, by_torch())
    patch.setattr("cbatch.engine.fallback.select_attention", lambda *_: ReferenceAttention())
    settings = {"device": "cpu", "block_size": 16, "kv_blocks": 400, "max_seqs": 4, **config}
    return SteppingEngine(EngineConfig(**settings), replace(loaded, fast_model=model))


@pytest.mark.parametrize("kind", sampled(sorted({*KINDS} - BY_TRANSFORMERS), 2, keep=["qwen3_5", "qwen3_vl"]))
def test_programs_of_devices(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards programs that run operation by operation, as on a GPU: rows of images, axes of positions, levels."""
    pytest.importorskip("triton", reason="the model of a GPU is imported with its kernels")
    with device_engine(kind, monkeypatch, max_batch_tokens=17) as engine:
        assert outputs_of(engine) == expected(kind)
        assert images_of(engine).num_encoded == num_images(kind)


def test_several_processes() -> None:
    """Guards processes that share a model: each gets the rows of images and their positions."""
    with engine_of("qwen3_vl", max_batch_tokens=17, tensor_parallel=2) as engine:
        assert outputs_of(engine) == expected("qwen3_vl")


Fault = Callable[[pytest.MonkeyPatch], None]


def change_place(change: Callable[[Any], None]) -> Fault:
    """A change of a request after its images have their places."""
    place = Images.place

    def changed(self: Images, request: Any) -> None:
        place(self, request)
        change(request)

    return lambda patch: patch.setattr(Images, "place", changed)


def move_images(request: Any) -> None:
    request.images = [image._replace(places=image.places + 1) for image in request.images]


def move_axes(*axes: int) -> Fault:
    def move(request: Any) -> None:
        for image in request.images:
            request.positions[np.array(axes)[:, None], image.places] += 1

    return change_place(move)


def swap_axes(request: Any) -> None:
    request.positions = request.positions[[0, 2, 1]]


def move_text(request: Any) -> None:
    if request.positions is not None:
        request.positions[:, request.images[-1].places[-1] + 1 :] += 1


def take_tokens_for_content(request: Any) -> None:
    request.content_ids = []


def ignore_contents(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Picture, "digest", lambda self: "0" * 32)


def lose_features(patch: pytest.MonkeyPatch) -> None:
    """A request that is computed again has no images any more."""
    rows, furthest = Images.rows, dict[int, int]()

    def lost(self: Images, chunks: Sequence[Any]) -> ImageRows | None:
        for chunk in chunks:
            if chunk.start < furthest.get(id(chunk.sequence), 0):
                chunk.sequence.request.images = ()
            furthest[id(chunk.sequence)] = chunk.stop
        return rows(self, chunks)

    patch.setattr(Images, "rows", lost)


def begin_again(patch: pytest.MonkeyPatch) -> None:
    """Each step has the first rows of an image."""
    rows = Images.rows

    def first(self: Images, chunks: Sequence[Any]) -> ImageRows | None:
        found = rows(self, chunks)
        return None if found is None else found._replace(values=found.values[:1].repeat(len(found.values), 1))

    patch.setattr(Images, "rows", first)


def swap_levels(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("cbatch.model.families.decoder.AddImage", lambda number: AddImage(1 - number))


FAULTS: dict[str, tuple[Fault, str]] = {
    "images one token late": (change_place(move_images), "idefics3"),
    "positions one late": (move_axes(0, 1, 2), "qwen2_vl"),
    "rows one late": (move_axes(1), "qwen3_vl"),
    "columns one late": (move_axes(2), "glm4v"),
    "text one late": (change_place(move_text), "qwen3_5"),
    "contents ignored": (ignore_contents, "idefics3"),
    "prefixes of other images": (change_place(take_tokens_for_content), "idefics3"),
    "recurrent prefixes of other images": (change_place(take_tokens_for_content), "qwen3_5"),
    "lost when preempted": (lose_features, "qwen3_vl"),
    "first row again": (begin_again, "qwen2_vl"),
    "rows for columns": (change_place(swap_axes), "qwen3_vl"),
    "levels swapped": (swap_levels, "qwen3_vl"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the comparisons above: each of these faults changes tokens."""
    fault, kind = FAULTS[name]
    names = ["one", "another of its size"]
    wanted = [expected(kind)[list(CHATS).index(one)] for one in names]
    settings = {"max_batch_tokens": 17, "max_seqs": 2 if "lost" in name else 1, "prefix_cache": "lost" not in name}
    fault(monkeypatch)
    with engine_of(kind, **settings) as engine:
        shake(engine, monkeypatch)
        assert outputs_of(engine, names) != wanted


@pytest.mark.parametrize("kind", ["internvl", "qwen2_vl", "qwen3_5"])
def test_scores_of_answers(kind: str) -> None:
    """Guards score rows about images: log-probabilities of transformers, of one answer and of choices that share it."""
    answers, reference = ["yes", "yes, all", "no"], Reference(folder_of(kind))
    rows = [{"messages": CHATS[name], "choices": answers, "score": True} for name in ("three", "none", "two turns")]
    said = message("assistant", "yes, all")["content"][0]["text"]
    rows.append({"messages": [*CHATS["one"], {"role": "assistant", "content": said}], "score": True})
    with engine_of(kind, max_batch_tokens=17) as engine:
        found = generate(engine, rows, SamplingParams())
        engine.scheduler.check_integrity()
        assert not any(one.error for one in found), found
        scores = [
            {one["text"]: one["logprob"] for one in row.to_dict().get("choices", [row.to_dict()])} for row in found
        ]
    chats = [CHATS[name] for name in ("three", "none", "two turns")]
    wanted = [{answer: reference.score(chat, answer) for answer in answers} for chat in chats]
    for made, expected_scores in zip(scores, [*wanted, {said: reference.score(CHATS["one"], said)}], strict=True):
        assert made == pytest.approx(expected_scores, abs=2e-3)


def test_messages_that_are_continued_and_cut() -> None:
    """Guards texts beside images: the last message goes on, and the longest text of a prompt is cut to fit."""
    reference, long, text = (
        Reference(folder_of("qwen2_vl")),
        message("user", "short", FIRST, "text"),
        "0123456789" * 300,
    )
    long["content"][2]["text"] = text
    rows = [
        {"messages": [*CHATS["one"], {"role": "assistant", "content": "It is"}], "continue_final_message": True},
        {"messages": [long], "truncate_prompt": "left:200"},
        {"messages": [long], "truncate_prompt": "left"},
    ]
    with engine_of("qwen2_vl") as engine:
        found = generate(engine, rows, SamplingParams(max_tokens=4, ignore_eos=True))
        assert [one.error for one in found] == [None] * 3
    assert [one.usage.prompt_tokens for one in found[1:]] == [200, 2048 - 4]
    assert list(found[0].token_ids) == reference.generate(CHATS["one"], 4, "It is")
    long["content"][2]["text"] = text[found[1].to_dict()["dropped_prompt_tokens"] :]
    assert list(found[1].token_ids) == reference.generate([long], 4)


@pytest.mark.parametrize(("kind", "token"), [("idefics3", "<image>"), ("qwen2_vl", "<|image_pad|>")])
def test_placeholders_in_texts(kind: str, token: str) -> None:
    """Guards prompts that write the token of an image: it is text, and no image comes in its place."""
    chats = [message("user", text, SMALL, text) for text in (token, "x" * len(token))]
    with engine_of(kind) as engine:
        found = generate(engine, [{"messages": [one]} for one in chats], SamplingParams(max_tokens=2))
        first, second = (one.usage.prompt_tokens for one in found)
        assert first == second and not any(one.error for one in found)


def test_an_image_beside_a_video() -> None:
    """Guards an image that would be something else beside other images: it is alone beside a video."""
    picture, video = Picture(b"1", "image 1"), Video(b"2", "video 1")
    with engine_of("llava_onevision") as engine:
        named = images_of(engine)._named
        assert [name for _, name in named([picture, video])] == [picture.digest(), video.digest()]
        assert next(iter(named([picture, picture])))[1] != picture.digest()


@pytest.mark.parametrize("kind", REFUSED)
def test_types_that_are_refused(kind: str) -> None:
    """Guards types whose images would be something else than in transformers; text is answered."""
    with engine_of(kind) as engine:
        rows = [{"messages": CHATS[name]} for name in ("one", "none")]
        refused, answered = generate(engine, rows, SamplingParams(max_tokens=2))
        assert str(refused.error) == f"images of models of the type {kind} are not supported: {REFUSED[kind]}"
        assert len(answered.token_ids) == 2


def test_a_type_that_is_not_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the error of rows whose images a language model takes in ways that are not known; text is answered."""
    monkeypatch.setattr(vision, "_PLAIN", vision._PLAIN - {"attention_mask"})
    with engine_of("llava") as engine:
        for _ in range(2):  # the second time, the tower runs no more
            rows = [{"messages": CHATS[name]} for name in ("one", "none")]
            refused, answered = generate(engine, rows, SamplingParams(max_tokens=2))
            assert refused.error is not None and refused.error.code == "invalid_row"
            reason = "its language model takes attention_mask, too"
            assert str(refused.error) == f"images of models of the type llava are not supported: {reason}"
            assert len(answered.token_ids) == 2
        assert not images_of(engine).num_encoded


@pytest.mark.parametrize("kind", ["qwen2_5_omni", "qwen3_omni_moe"])
def test_models_that_speak(kind: str, tmp_path: Path) -> None:
    """Guards published files of such models: what writes is a part of them, with its tower and its levels."""
    folder = folder_of(f"{kind}_thinker")
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    save_file({f"thinker.{name}": tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "thinker_config": config}))
    settings = {"device": "cpu", "dtype": "float32", "kv_blocks": 400, "max_seqs": 4}
    with SteppingEngine(EngineConfig(model=str(tmp_path), **settings)) as engine:
        assert outputs_of(engine) == expected(f"{kind}_thinker")


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen3_vl", "glm4v"])
def test_parts_of_heads_that_positions_turn(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the comparison of a program's rotation by positions of three axes with that of the network."""
    axes = rotary._axes
    monkeypatch.setattr(rotary, "_axes", lambda *given: axes(*given)[::-1])
    with engine_of(kind) as engine:
        (refused,) = generate(engine, [{"messages": CHATS["one"]}], SamplingParams(max_tokens=2))
        assert str(refused.error).endswith("are not supported: its positions turn other parts of heads")


def test_levels_of_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the comparison of the layers that images are added to with those of the network."""
    monkeypatch.setattr("cbatch.model.config_classes.levels", lambda _: [])
    with engine_of("qwen3_vl") as engine:
        (refused,) = generate(engine, [{"messages": CHATS["one"]}], SamplingParams(max_tokens=2))
        assert str(refused.error).endswith("are not supported: its language model takes deepstack_visual_embeds, too")


@pytest.mark.parametrize("kind", ["qwen2_vl", "glm4v"])
def test_positions_of_the_network(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the comparison of positions with those that the network gives its own language model."""
    positions = Vision.positions
    monkeypatch.setattr(Vision, "positions", lambda *given: np.asarray(positions(*given))[[0, 2, 1]])
    with engine_of(kind) as engine:
        (refused,) = generate(engine, [{"messages": CHATS["one"]}], SamplingParams(max_tokens=2))
        assert str(refused.error).endswith("are not supported: its tokens have other positions")


@pytest.mark.parametrize("place", ["config", "text_config"])
def test_a_quantized_language_model(place: str, tmp_path: Path) -> None:
    """Guards checkpoints as they are published, whose language model is packed and whose tower is not."""
    quantized, numbers = (Path(copytree(folder_of("qwen2_vl"), tmp_path / name)) for name in ("packed", "numbers"))
    stored, plain = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for name, tensor in load_file(quantized / "model.safetensors").items():
        parts, plain[name] = {".weight": tensor}, tensor
        if name.endswith("_proj.weight") and "visual" not in name:
            parts, plain[name] = nf4(nested=False)(tensor)
        module = name.removesuffix(".weight")
        stored |= {(module + end if module != name else name): part.contiguous() for end, part in parts.items()}
    save_file(stored, quantized / "model.safetensors", {"format": "pt"})
    save_file({name: one.contiguous() for name, one in plain.items()}, numbers / "model.safetensors", {"format": "pt"})
    config = json.loads((quantized / "config.json").read_text())
    (config if place == "config" else config[place])["quantization_config"] = nf4_settings(nested=False)
    (quantized / "config.json").write_text(json.dumps(config))
    chats, reference = [CHATS["one"], CHATS["none"]], Reference(numbers)
    settings = EngineConfig(model=str(quantized), device="cpu", dtype="float32", kv_blocks=400, weight_cache=False)
    with SteppingEngine(settings) as engine:
        assert engine.loaded.path == "fast"
        found = generate(engine, [{"messages": one} for one in chats], SamplingParams(max_tokens=8, ignore_eos=True))
        assert [list(one.token_ids) for one in found] == [reference.generate(one, 8) for one in chats]


def pack_in_4_bits(tensors: dict[str, torch.Tensor], name: str) -> None:
    tensors |= {f"{name}.absmax": torch.ones(24), name: torch.zeros(tensors[name].numel() // 2, 1, dtype=torch.uint8)}


def pack_in_8_bits(tensors: dict[str, torch.Tensor], name: str) -> None:
    parts, _ = fp8()(tensors[name])
    tensors |= {name.removesuffix(".weight") + end: part.contiguous() for end, part in parts.items()}


@pytest.mark.parametrize("damage", [dict.pop, pack_in_4_bits, pack_in_8_bits])
def test_a_tower_that_cannot_be_read(damage: Callable[..., Any], tmp_path: Path) -> None:
    """Guards towers that are quantized, whose integers are no numbers; text is answered, and the files read once."""
    folder = Path(copytree(folder_of("llava"), tmp_path / "model"))
    change_tensors(
        folder, lambda tensors: damage(tensors, min(name for name in tensors if name.endswith("fc1.weight")))
    )
    with SteppingEngine(EngineConfig(model=str(folder), device="cpu", dtype="float32", kv_blocks=400)) as engine:
        for _ in range(2):
            rows = [{"messages": CHATS[name]} for name in ("one", "none")]
            refused, answered = generate(engine, rows, SamplingParams(max_tokens=2))
            reason = r"its files do not have 1 weights of its vision tower, such as .*fc1.weight, as plain numbers of"
            assert re.search(f"^images of models of the type llava are not supported: {reason}", str(refused.error))
            assert len(answered.token_ids) == 2
            (folder / "model.safetensors").unlink(missing_ok=True)


def test_a_package_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the row's error if a processor needs torchvision: it names that, and text is answered."""

    def load(*_: Any, **__: Any) -> None:
        raise ImportError("Lfm2VlImageProcessor requires the Torchvision library but it was not found.")

    with engine_of("idefics3") as engine:
        monkeypatch.setattr("cbatch.model.hf.vision.find_spec", lambda name: None)
        monkeypatch.setattr("transformers.Idefics3Processor.from_pretrained", load)
        rows = [{"messages": CHATS[name]} for name in ("one", "none")]
        refused, answered = generate(engine, rows, SamplingParams(max_tokens=2))
        assert refused.error is not None and refused.error.code == "invalid_row"
        assert str(refused.error).endswith("processor of images cannot be loaded: it needs the package torchvision.")
        assert len(answered.token_ids) == 2


def test_a_picture_that_a_processor_refuses() -> None:
    """Guards the rows beside a picture that only this model cannot take, and the words that say which it is."""
    rows = [{"messages": [message("user", "a", SMALL, picture(4, 1, 300))]}, {"messages": CHATS["one"]}]
    with engine_of("qwen2_vl") as engine:
        refused, answered = generate(engine, rows, SamplingParams(max_tokens=2))
    assert refused.error is not None and refused.error.code == "invalid_row"
    assert str(refused.error).startswith("image 2 of message 1 cannot be processed: ValueError: absolute aspect ratio")
    assert len(answered.token_ids) == 2
