"""Images of GGUF models: tokens are those of transformers' `generate` with the model that the files were made of."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray

from cbatch.base import hub
from cbatch.base.config import EngineConfig
from cbatch.base.errors import ModelError
from cbatch.base.params import SamplingParams
from cbatch.cli.common.local_models import models_below
from cbatch.engine.stepping_engine import SteppingEngine
from cbatch.model.load_plan import LoadPlan
from cbatch.model.loader import load_model
from tests.support.generation import generate
from tests.support.mmproj_files import PROJECTORS, save_folder, write_text, write_tower
from tests.support.vision_models import Reference, message, picture

pytest.importorskip("PIL", reason="images need Pillow")

LENGTH = 12
CHATS = [
    [message("user", "hello ", picture(1, 40, 70), " what is it?")],
    [message("user", picture(3, 60, 60), "what?", picture(2, 40, 70), "and?")],
    [message("user", "plain text alone")],
]
FORMATS = {
    "gemma3": Kind.F16, "idefics3": Kind.Q8_0, "qwen2_5_vl": Kind.BF16, "qwen2_vl": Kind.F32, "qwen3_5": Kind.F16,
    "qwen3_vl": Kind.Q8_0,
}  # fmt: skip
Array = NDArray[Any]


def answers(path: Path) -> list[Any]:
    """Results of the conversations."""
    config = EngineConfig(
        model=str(path), device="cpu", dtype="float32", block_size=16, max_seqs=4, kv_blocks=400, max_batch_tokens=17
    )
    with SteppingEngine(config) as engine:
        params = SamplingParams(max_tokens=LENGTH, ignore_eos=True)
        return list(generate(engine, [{"messages": chat} for chat in CHATS], params))


def tokens(path: Path) -> list[list[int]]:
    found = answers(path)
    assert not any(one.error for one in found), found
    return [list(one.token_ids) for one in found]


def expected(folder: Path) -> list[list[int]]:
    reference = Reference(folder)
    return [reference.generate(chat, LENGTH) for chat in CHATS]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A GGUF model, whose folder `hf` beside it has a tower."""
    write_text(tmp_path / "model.gguf", save_folder(tmp_path / "hf", "idefics3"), monkeypatch)
    return tmp_path / "model.gguf"


@pytest.mark.parametrize("kind", PROJECTORS)
def test_tokens_of_generate(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards each projector: settings, names, joined and shifted tensors, formats, axes and levels of images.

    Older files, from before Qwen3-VL, call one part of a feed-forward layer by the name of another.
    """
    folder, path = save_folder(tmp_path / "hf", kind, FORMATS[kind]), tmp_path / "model.gguf"
    write_text(path, folder, monkeypatch)
    write_tower(tmp_path / "mmproj-model.gguf", folder, FORMATS[kind], is_older=kind in ("idefics3", "qwen2_5_vl"))
    assert tokens(path) == expected(folder)


def one_more(name: str, numbers: Array) -> Array:
    return numbers - 1 if "soft_emb_norm" in name else numbers


def queries_as_keys(name: str, numbers: Array) -> Array:
    return numbers[::-1] if ".attn_q." in name else numbers


def levels_alike(name: str, numbers: Array) -> Array:
    return numbers * 2 if "deepstack.0" in name else numbers


FAULTS: dict[str, tuple[Callable[[str, Array], Array] | None, dict[str, Any]]] = {
    "gemma3": (one_more, {}),
    "idefics3": (queries_as_keys, {}),
    "qwen2_5_vl": (None, {"clip.vision.n_wa_pattern": 1}),
    "qwen2_vl": (queries_as_keys, {}),
    "qwen3_vl": (levels_alike, {}),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_faults_are_seen(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the comparison above: a norm without its 1, other rows, other windows and other levels change tokens."""
    folder, path = save_folder(tmp_path / "hf", kind), tmp_path / "model.gguf"
    write_text(path, folder, monkeypatch)
    change, metadata = FAULTS[kind]
    write_tower(tmp_path / "mmproj-model.gguf", folder, change=change, metadata=metadata)
    found, wanted = tokens(path), expected(folder)
    assert found[:2] != wanted[:2] and found[2] == wanted[2]


def test_gemma_without_a_token_for_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards files of Gemma 3 whose vocabulary ends before that token: another one has its place."""
    folder, path = save_folder(tmp_path / "hf", "gemma3"), tmp_path / "model.gguf"
    write_text(path, folder, monkeypatch, without="<image_soft_token>")
    write_tower(tmp_path / "mmproj-model.gguf", folder)
    assert tokens(path) == expected(folder)


@pytest.mark.parametrize("kind", ["gemma3", "qwen2_vl"])
def test_tokens_of_images_in_texts(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards texts with the names of such tokens, which files may call user-defined: they stay text."""
    folder, path = save_folder(tmp_path / "hf", kind), tmp_path / "model.gguf"
    write_text(path, folder, monkeypatch, type_of_images=4)
    write_tower(tmp_path / "mmproj-model.gguf", folder)
    written = "<start_of_image> <image_soft_token>" if kind == "gemma3" else "<|image_pad|>"
    chats = [[message("user", text, picture(1, 40, 70))] for text in (written, "x" * len(written))]
    with SteppingEngine(EngineConfig(model=str(path), device="cpu", dtype="float32", kv_blocks=100)) as engine:
        found = list(generate(engine, [{"messages": chat} for chat in chats], SamplingParams(max_tokens=2)))
    assert not any(one.error for one in found), found
    assert found[0].usage.prompt_tokens == found[1].usage.prompt_tokens


def refusal(path: Path) -> str:
    """The error of a row with an image, beside which one without is answered."""
    first, second, third = answers(path)
    assert (
        str(first.error) == str(second.error) and first.error.code == "invalid_row" and len(third.token_ids) == LENGTH
    )
    return str(first.error)


def test_rows_that_are_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the errors of images without a tower, and with one that is not read, damaged, or of another model."""
    folder, tower = model.parent / "hf", model.parent / "mmproj-model.gguf"
    assert refusal(model).endswith("takes no images: no mmproj file lies beside its own")
    write_tower(tower, folder, metadata={"clip.projector_type": "ldpv2"})
    assert refusal(model).endswith("mmproj-model.gguf has the projector 'ldpv2', which is not read.")
    write_tower(tower, folder, metadata={"clip.vision.image_size": 2**30})
    assert refusal(model).endswith("claims to have other sizes than its tensors have.")
    write_tower(tower, folder, metadata={"clip.vision.patch_size": 0})
    assert refusal(model).endswith("claims to have other sizes than its tensors have.")
    write_tower(tower, save_folder(model.parent / "other", "qwen2_vl"))
    assert refusal(model).endswith("is the vision tower of another kind of model.")
    write_tower(tower, folder)
    tower.write_bytes(tower.read_bytes()[:-64])
    assert "is not within the file" in refusal(model)
    write_tower(tower, folder)
    other = model.with_name("without.gguf")
    write_text(other, folder, monkeypatch, without="<image>")
    assert refusal(other).endswith("is of a model that has the token <image>.")


def test_tensors_that_do_not_fit(model: Path) -> None:
    """Guards towers of a model of another size: an image's error names the weight."""
    tower = model.parent / "mmproj-model.gguf"

    def narrower(name: str, numbers: Array) -> Array:
        return numbers[:32] if name == "mm.model.fc.weight" else numbers

    write_tower(tower, model.parent / "hf", change=narrower)
    said = str(answers(model)[0].error)
    assert said.endswith(
        "mmproj-model.gguf is not of this model: model.connector.modality_projection.proj.weight does not fit it"
    )


def test_the_tower_is_part_of_the_fingerprint(model: Path) -> None:
    """Guards rows that are resumed: those of a model with another tower, or with none, are other rows."""
    tower, folder = model.parent / "mmproj-model.gguf", model.parent / "hf"
    found = [load_model(LoadPlan(str(model))).fingerprint]
    for stored in (Kind.F32, Kind.F16):
        write_tower(tower, folder, stored)
        found.append(load_model(LoadPlan(str(model))).fingerprint)
    assert len(set(found)) == 3


def test_which_file_is_read(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Guards several towers beside a model: the one that is called after it, then F16; and it is said."""
    names = ["mmproj-BF16.gguf", "mmproj-F16.gguf", "mmproj-F32.gguf", "gemma-3-4b-it.mmproj-f16.gguf"]
    assert hub.mmproj_names(names, "gemma-3-4b-it-Q4_K_M.gguf")[:2] == [names[3], names[1]]
    assert hub.mmproj_names(names, "gemma-3-12b-it-Q4_K_M.gguf")[0] == names[1]
    assert hub.mmproj_names(["a/mmproj.gguf", "b/mmproj.gguf", "mmproj.gguf"], "a/m.gguf") == [
        "a/mmproj.gguf",
        "mmproj.gguf",
    ]
    for name in names[:2]:
        write_tower(model.parent / name, model.parent / "hf")
    with caplog.at_level(logging.WARNING, "cbatch"):
        load_model(LoadPlan(str(model)))
    assert f"Of 2 mmproj files for one model, {model.parent / names[1]} is read." in caplog.text


def test_a_tower_is_no_model(model: Path) -> None:
    """Guards `-m` with the tower's file, advice to name a file, and lists of models: a tower is none."""
    tower = model.parent / "mmproj-model.gguf"
    write_tower(tower, model.parent / "hf")
    with pytest.raises(
        ModelError, match=r"mmproj-model\.gguf is the vision tower of a model \(mmproj\): name the model"
    ):
        load_model(LoadPlan(str(tower)))
    model.rename(model.with_name("text.gguf"))
    with pytest.raises(ModelError, match=r"name the one to load, such as .*text\.gguf"):
        load_model(LoadPlan(str(model.parent)))
    assert [one.place.name for one in models_below(model.parent) if one.kind == "gguf"] == ["text.gguf"]
