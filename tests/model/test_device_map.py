"""Models that are larger than their device: spread by accelerate, here over CPU memory and disk."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

from cbatch.base.config import EngineConfig
from cbatch.base.errors import ConfigError, ModelError
from cbatch.base.params import SamplingParams
from cbatch.engine.stepping_engine import SteppingEngine
from cbatch.model import device_map as device_maps
from cbatch.model.device_map import choose_device_map
from cbatch.model.hf.attention_calls import MaskPattern, pattern_of, probe_mask
from cbatch.model.hf.placement import CPU_MEMORY, DISK, Place, Placement
from cbatch.runtime.memory import DeviceMemory
from tests.support.generation import generate
from tests.support.tiny_models import generate_alone, make_engine, make_network, make_prompts

pytest.importorskip("accelerate", reason="models are spread by accelerate")

CPU, GPUS = torch.device("cpu"), [torch.device("cuda", 0), torch.device("cuda", 1)]
SHARED = make_prompts([21])[0]
PROMPTS = [SHARED + prompt for prompt in make_prompts([1, 9, 4], seed=1)] + make_prompts([5, 40], seed=2)
LENGTHS = [8, 6, 9, 7, 5]


def config(folder: Path, **options: Any) -> EngineConfig:
    """Four requests at once, in chunks of at most 16 tokens."""
    settings: dict[str, Any] = {"device": "cpu", "dtype": "float32", "device_map": "auto", "block_size": 4}
    settings |= {"kv_blocks": 64, "max_seqs": 4, "max_batch_tokens": 16}
    return EngineConfig(model=str(folder), **settings | options)


def saved(folder: Path, family: str, **overrides: Any) -> Any:
    network = make_network(family, num_hidden_layers=4, **overrides)
    network.save_pretrained(folder)
    return network


def sizes(network: Any) -> dict[str, int]:
    """Bytes of the weights in each layer, and of the others together under an empty name."""
    found: dict[str, int] = {}
    for name, parameter in network.named_parameters():
        layer = re.search(r"\.(\d+)\.", name)
        key = layer[1] if layer else ""
        found[key] = found.get(key, 0) + parameter.numel() * parameter.element_size()
    return found


@pytest.mark.parametrize(
    ("family", "overrides", "share", "run_ahead"),
    [
        pytest.param("llama", {"tie_word_embeddings": True}, 0.6, True, id="tied weights"),
        pytest.param("gemma2", {"tie_word_embeddings": True}, 0.0, False, id="windows, all on disk"),
        pytest.param("mixtral", {}, 0.6, False, id="experts, rewritten"),
    ],
)
def test_tokens_are_those_of_transformers(
    family: str, overrides: dict[str, Any], share: float, run_ahead: bool, tmp_path: Path
) -> None:
    """Guards everything a step does over weights that come and go: chunks, company, the prefix cache, tied weights."""
    folder, scratch = tmp_path / "model", tmp_path / "scratch"
    scratch.mkdir()
    network = saved(folder, family, **overrides)
    total = sum(sizes(network).values())
    limit = int(share * total)
    options = {"max_memory": {"cpu": limit}, "offload_folder": str(scratch), "run_ahead": run_ahead}
    with SteppingEngine(config(folder, **options)) as engine:
        assert list(scratch.iterdir()) == [], "rewritten weights stay behind if the program is killed"
        resident = [one for one in engine.loaded.network.parameters() if not one.is_meta]
        held = sum(one.numel() * one.element_size() for one in resident)
        assert held <= limit and bool(held) == bool(share)
        done = generate(engine, PROMPTS, [SamplingParams(max_tokens=length) for length in LENGTHS])
        assert engine.stats().num_cached_tokens >= len(SHARED) // 4 * 4
        assert engine.model.weight_bytes == total
        assert (CPU_MEMORY in str(engine.loaded.placement)) == bool(share)
    expected = generate_alone(network, PROMPTS, LENGTHS)
    assert [completion.token_ids for completion in done] == expected
    with make_engine(network, max_seqs=4, max_batch_tokens=16) as whole:
        alike = generate(whole, PROMPTS, [SamplingParams(max_tokens=length) for length in LENGTHS])
    assert [completion.token_ids for completion in alike] == expected


def test_what_lies_where_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Guards the notice, the lines of `info`, and the bytes in it: those of the weights that are not in memory."""
    network = saved(tmp_path, "llama")
    with SteppingEngine(config(tmp_path, max_memory={"cpu": sum(sizes(network).values()) * 6 // 10})) as engine:
        placement, shown = engine.loaded.placement, engine.describe()
    assert placement is not None
    memory, disk = placement.places
    assert (memory.name, disk.name) == (CPU_MEMORY, DISK)
    assert (
        memory.layers | disk.layers == set(range(4)) and memory.layers and disk.layers and "embed_tokens" in str(memory)
    )
    assert disk.read_bytes == sum(sizes(network).values()) - memory.weight_bytes
    assert memory.read_bytes == 0
    assert shown["placement"] == str(placement) and shown["step cost"] == placement.cost
    assert f"The model is spread: {placement}. {placement.cost}" in caplog.messages


def test_sentences_on_places() -> None:
    """Guards the bytes that are read, and the names of layers."""
    gpu = Place("cuda:0", {0, 1, 2, 5}, {"embed_tokens": None}, 10 * 2**30)
    memory = Place(CPU_MEMORY, {3}, {}, 2**30, read_bytes=2**30)
    disk = Place(DISK, {4, 6}, {"norm": None, "lm_head": None}, 2**31, read_bytes=2**31)
    assert str(Placement([gpu, memory, disk])) == (
        "embed_tokens, layers 0-2, 5 on cuda:0 (10.0 GiB); layer 3 in CPU memory (1.0 GiB); "
        "norm, lm_head, layers 4, 6 on disk (2.0 GiB)"
    )
    sentence = "A step reads up to 1.0 GiB from CPU memory and 2.0 GiB from disk, for all sequences together."
    assert Placement([gpu, memory, disk]).cost == sentence
    assert Placement([gpu]).cost == ""


def test_a_model_that_fits_is_not_spread(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Guards the fast path of everybody who gives the option without need. Stored bfloat16 counts as it will be."""
    network = make_network("llama", hidden_size=64, head_dim=16)
    network.to(torch.bfloat16).save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": null}')
    stored = sum(sizes(network).values())
    with SteppingEngine(config(tmp_path, max_memory={"cpu": 2 * stored}, block_size=16)) as engine:
        assert engine.loaded.fast_model is not None and engine.loaded.placement is None
    assert sum("--device-map is not needed" in message for message in caplog.messages) == 1
    with SteppingEngine(config(tmp_path, max_memory={"cpu": 2 * stored - 1}, block_size=16)) as engine:
        assert engine.loaded.fast_model is None and engine.loaded.placement is not None


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"device_map": "balanced"}, "no device map 'balanced'"),
        ({"quantize": "int8"}, "no quantized weights"),
        ({"max_memory": ["1GiB"]}, "how much each device may hold"),
        ({"max_memory": {"gpu": "1GiB"}}, "no device 'gpu'"),
        ({"max_memory": {"cpu": "some"}}, "'some' is not an amount"),
        ({"max_memory": {"cpu": True}}, "True is not an amount"),
        ({"max_memory": {"cpu": -1}}, "'-1' is not an amount"),
        ({"device_map": "none", "max_memory": {}}, "--max-memory is only for --device-map auto"),
        ({"device_map": "none", "offload_folder": "/tmp"}, "--offload-folder is only for --device-map auto"),
    ],
)
def test_options_that_cannot_be_met(options: dict[str, Any], sentence: str) -> None:
    """Guards a user against waiting for a large model first."""
    with pytest.raises(ConfigError, match=sentence):
        EngineConfig(**{"device_map": "auto"} | options)


def test_places_that_cannot_hold_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against tracebacks of a folder that cannot be written, and of a disk that fills while weights are written.

    What was written is removed.
    """
    saved(tmp_path / "model", "mixtral")
    (tmp_path / "file").touch()
    for wrong in ("file", "missing"):
        with pytest.raises(ConfigError, match=f"--offload-folder .*{wrong} cannot be used: N.*writable"):
            SteppingEngine(config(tmp_path / "model", max_memory={"cpu": 0}, offload_folder=str(tmp_path / wrong)))

    def fill(_: Any, path: str) -> None:
        Path(path).write_bytes(b"part")
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    (tmp_path / "full").mkdir()
    monkeypatch.setattr("transformers.integrations.accelerate.save_file", fill)
    with pytest.raises(ModelError, match=r"the disk of .*full is full.*--offload-folder"):
        SteppingEngine(config(tmp_path / "model", max_memory={"cpu": 0}, offload_folder=str(tmp_path / "full")))
    assert list((tmp_path / "full").iterdir()) == []


def chosen(device: str, **options: Any) -> Any:
    return choose_device_map(EngineConfig(device=device, device_map="auto", **options), torch.device(device))


def test_limits_of_several_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards what accelerate is told: GPUs by their numbers, room for the cache, and no device that was excluded."""
    monkeypatch.setattr(device_maps, "device_memory", lambda one: DeviceMemory(str(one), "90%", lambda: 1000))
    monkeypatch.setattr(device_maps, "usable_gpus", lambda name, device: GPUS if device.type == "cuda" else [])
    assert chosen("cuda:0").max_memory == {0: 800, 1: 800, "cpu": 800}
    assert chosen("cuda:0", max_memory={"cuda:1": "50%", "cpu": 7}).max_memory == {0: 800, 1: 500, "cpu": 7}
    assert chosen("cpu").max_memory == {"cpu": 800}
    without_first = chosen("cuda:0", max_memory={"cuda:0": 0, "cpu": 0})
    assert without_first.max_memory == {1: 800, "cpu": 0} and without_first.device == GPUS[1]
    for device, limits, sentence in (
        ("cuda:0", {"cuda:7": 1}, "names cuda:7, which is not used: .* cuda:0, cuda:1, cpu and the disk"),
        ("cuda:0", {"cuda:0": 0, "cuda:1": 0}, "leaves no GPU"),
        ("mps", None, "not from mps"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            chosen(device, max_memory=limits)
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(ConfigError, match=r"needs accelerate: pip install .*\[device-map\]'"):
        chosen("cpu")


def test_a_mask_keeps_its_pattern_on_another_device() -> None:
    """Guards models on several GPUs: a hook copies the probe's mask to each, and a copy without pattern is refused."""
    mask = probe_mask(q_length=4, kv_length=4, mask_function=lambda b, h, query, key: key <= query)
    assert pattern_of(mask.to("meta").to("meta", non_blocking=True)) == MaskPattern()
    for changed in (mask & mask, mask.to(torch.float32), mask.clone()):
        with pytest.raises(ModelError, match="masks of its own"):
            pattern_of(changed)
