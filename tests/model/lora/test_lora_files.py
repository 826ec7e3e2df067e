"""Adapters in PEFT's folders: their scales, their identity, and sentences about what is not served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from cbatch.base.errors import ModelError
from cbatch.model.lora_files import Adapter, read_adapters
from tests.support.adapters import save_adapter

Q = "base_model.model.model.layers.0.self_attn.q_proj"
K = "base_model.model.model.layers.0.self_attn.k_proj"


def tensors(rank: int = 4) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        f"{module}.lora_{half}.weight": torch.randn(shape, generator=generator)
        for module in (Q, K)
        for half, shape in (("A", (rank, 6)), ("B", (8, rank)))
    }


def read(folder: Path) -> Adapter:
    (adapter,) = read_adapters({"sql": str(folder)})
    return adapter


@pytest.mark.parametrize(
    ("settings", "scales"),
    [
        ({"lora_alpha": 8}, (2.0, 2.0)),
        ({"lora_alpha": 8, "use_rslora": True}, (4.0, 4.0)),
        ({"lora_alpha": 8, "alpha_pattern": {"k_proj": 1}}, (2.0, 0.25)),
        ({"lora_alpha": 8, "alpha_pattern": {r"model.layers.0.self_attn.[qv]_proj": 12}}, (3.0, 2.0)),
        ({"r": 9, "rank_pattern": {"_proj": 9, "q_proj": 4, "self_attn.k_proj": 4}}, (2.0, 2.0)),
    ],
)
def test_scales(tmp_path: Path, settings: dict[str, Any], scales: tuple[float, float]) -> None:
    """Guards alpha over rank, its root, and patterns, which fit whole parts of a name at its end."""
    given = tensors()
    adapter = read(save_adapter(tmp_path, given, **settings))
    for module, scale in zip((Q, K), scales, strict=True):
        found = adapter.modules[module.removeprefix("base_model.model.")]
        assert torch.equal(found.down, given[f"{module}.lora_A.weight"])
        assert torch.equal(found.up, scale * given[f"{module}.lora_B.weight"])


def test_the_fingerprint_is_that_of_what_is_added(tmp_path: Path) -> None:
    """Guards keys of rows: another scale or number changes them; name, folder, dropout and file order do not."""
    given = tensors()
    same = [
        save_adapter(tmp_path / "a", given),
        save_adapter(tmp_path / "b", dict(reversed(given.items())), lora_dropout=0.5),
    ]
    first, second = read_adapters({"one": str(same[0]), "two": str(same[1])})
    assert first.fingerprint() == second.fingerprint() and len(first.fingerprint()) == 32
    assert first.num_parameters == 2 * 4 * (6 + 8)
    changed = given | {f"{Q}.lora_B.weight": given[f"{Q}.lora_B.weight"].clone()}
    changed[f"{Q}.lora_B.weight"][7, 3] += 1e-6
    for number, other in enumerate(
        (save_adapter(tmp_path / "c", given, lora_alpha=9), save_adapter(tmp_path / "d", changed))
    ):
        assert read(other).fingerprint() != first.fingerprint(), number


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"peft_type": "IA3"}, "it is of type 'IA3', not LORA"),
        ({"use_dora": True}, "it is a DoRA adapter, which also scales the model's own weights"),
        ({"bias": "lora_only"}, "it has biases of its own (bias = 'lora_only')"),
        ({"lora_bias": True}, "its matrices have biases (lora_bias)"),
        ({"modules_to_save": ["lm_head"]}, "it replaces whole modules (modules_to_save)"),
        ({"trainable_token_indices": [1]}, "it has embeddings of its own (trainable_token_indices)"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "it adapts parameters that are not linears"),
        ({"init_lora_weights": "pissa"}, "its training changed the model's own weights (init_lora_weights = 'pissa')"),
        ({"new_idea": {"a": 1}}, "its adapter_config.json says new_idea = \"{'a': 1}\", which is not known here"),
        ({"r": 5}, "model.layers.0.self_attn.k_proj has ranks 4 and 4, and its adapter_config.json says 5"),
    ],
)
def test_settings_that_ask_for_more(tmp_path: Path, settings: dict[str, Any], reason: str) -> None:
    """Guards against an adapter of which only a part would be computed."""
    with pytest.raises(ModelError) as raised:
        read(save_adapter(tmp_path, tensors(), **settings))
    assert str(raised.value).startswith(f"The LoRA adapter sql cannot be used: {reason}")
    assert str(raised.value).endswith(".") and not str(raised.value).endswith("..")


@pytest.mark.parametrize(
    "settings",
    [
        {"r": 10**30}, {"r": "4"}, {"lora_alpha": "x"}, {"lora_alpha": float("nan")}, {"use_rslora": "x"},
        {"rank_pattern": [4]}, {"rank_pattern": {"q_proj": -1}}, {"rank_pattern": {"(a+)+$": 4}},
        {"alpha_pattern": {".*.*.*.*.*b": 4}}, {"alpha_pattern": {"(": 4}}, {"alpha_pattern": {"q": "x"}}, {"bias": 5},
        {"alpha_pattern": {r"(\w+)*!": 4}}, {"alpha_pattern": {"a" * 100_000: 4}}, {"lora_alpha": 10**400},
        {"peft_type": []},
    ],
    ids=lambda settings: str(settings)[:40],
)  # fmt: skip
def test_settings_that_cannot_be(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Guards against errors of other kinds, and patterns that never end, from an adapter that means harm."""
    with pytest.raises(ModelError, match=r"^The LoRA adapter sql cannot be used: [^\n]*\.$") as raised:
        read(save_adapter(tmp_path, tensors(), **settings))
    assert len(str(raised.value)) < 400 + len(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "tensor", "reason"),
    [
        (f"{Q}.lora_magnitude_vector", torch.ones(8), "it has more than matrices of linears"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", torch.ones(4, 8), "it has embeddings"),
        ("base_model.model.lm_head.weight", torch.ones(4, 8), "it has more than matrices of linears"),
        (f"{Q}.lora_B.weight", torch.ones(8, 3), "model.layers.0.self_attn.q_proj has ranks 4 and 3"),
        (f"{Q}.lora_A.weight", torch.ones(4, 6, 1), f"{Q}.lora_A.weight is no matrix of numbers"),
        (f"{Q}.lora_A.weight", torch.ones(4, 6, dtype=torch.int64), f"{Q}.lora_A.weight is no matrix of numbers"),
        ("base_model.model.model.layers.0.mlp.up_proj.lora_A.weight", torch.ones(4, 8), "has only one of its two"),
        ("base_model.model.model.layers.0.mlp.experts.3.up_proj.lora_A.weight", torch.ones(4, 8), "it adapts experts"),
    ],
)
def test_tensors_that_are_more(tmp_path: Path, name: str, tensor: torch.Tensor, reason: str) -> None:
    """Guards against tensors that are left out, and matrices that do not fit together."""
    with pytest.raises(ModelError, match=r"^The LoRA adapter sql cannot be used: ") as raised:
        read(save_adapter(tmp_path, tensors() | {name: tensor}))
    assert reason in str(raised.value)


def test_folders_that_hold_no_adapter(tmp_path: Path) -> None:
    """Guards pickled weights, damaged files, and folders that are not there."""
    folder = save_adapter(tmp_path / "a", tensors())
    weights = folder / "adapter_model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[: len(data) // 2])
    with pytest.raises(ModelError, match=r"^The LoRA adapter sql cannot be used: .*a cannot be read"):
        read(folder)
    (folder / "adapter_config.json").write_text("[]")
    with pytest.raises(ModelError, match="is not a JSON object"):
        read(folder)
    weights.unlink()
    (folder / "adapter_model.bin").write_bytes(b"pickled")
    with pytest.raises(ModelError, match=r"has no adapter_model\.safetensors\. Other formats may hold code"):
        read(folder)
    (folder / "adapter_config.json").unlink()
    with pytest.raises(ModelError, match=r"has no adapter_config\.json, as PEFT writes it"):
        read(folder)
    with pytest.raises(ModelError, match="there is no folder"):
        read(tmp_path / "nowhere")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": "many"}))
    weights.write_bytes(data)
    with pytest.raises(ModelError, match=r"r must be a whole number from 1 to 65536, not 'many'"):
        read(folder)
