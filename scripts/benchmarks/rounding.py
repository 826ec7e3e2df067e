"""Losses by quantized weights, activations and KV caches, beside the roundings of llama.cpp.

    python -m scripts.benchmarks rounding

Logits are compared with those of the same weights in float32 by transformers: the Kullback-Leibler divergence in nats,
how often the most probable token is the same, and for the demo model the perplexity of its held-out conversations.
Random models get random tokens; their divergence is far larger than a trained model's, since nothing was trained to be
robust, but it compares roundings. Q8_0 and Q4_0 round weights to 8 and 4 bits in blocks of 32, and rows to int8 in
blocks of 32; with Q4_0 the head is Q8_0. They are done in float32 here, in the layers of transformers. So are the
roundings of keys and values: to Q8_0, and to `--kv-dtype u8`, which has one scale for each token and head; and those of
weights to FP8 with a scale for each row, without and with `--activations fp8`, which only GPUs have.

    python -m scripts.benchmarks rounding --shape demo --python llama.cpp=PYTHON

also reads the demo model from GGUF files, which llama.cpp makes in many formats. Of its folders in the formats of other
tools, each number is rounded to the nearest here; the tools choose better ones, by what activations have shown.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cbatch.api import Engine
from cbatch.attention.cpu import CpuAttention
from cbatch.base.model_files import read_json_object
from cbatch.base.quantization import Quantization
from cbatch.kernels.quantized_matrix import rounded_rows
from cbatch.model.cpu import CpuModel
from cbatch.model.formats.gguf import GgufModel
from cbatch.model.load_plan import DEMO_MODEL, LoadPlan
from cbatch.model.loader import load_fast_model
from cbatch.model.tensor_files import Tensors
from cbatch.runtime.batch import RaggedBatch
from cbatch.runtime.cpu import num_threads
from cbatch.runtime.kv_cache import U8, KVCache, as_numbers, as_stored
from scripts.benchmarks.harness import Report, at_least_one
from scripts.benchmarks.models import RandomTensors, make_network
from scripts.benchmarks.peers.process import call, interpreter
from scripts.benchmarks.peers.work import PeerJob, PeerWork
from scripts.benchmarks.shapes import SHAPES, Config
from tests.support.programs import SavedModel
from tests.support.quantized_folders import (
    Encoder,
    awq,
    awq_settings,
    compressed,
    compressed_settings,
    fp8,
    fp8_settings,
    gptq,
    gptq_settings,
    whole_int8,
    write_folder,
)

ROUNDINGS: dict[str, tuple[Quantization | None, torch.dtype | None]] = {
    "bfloat16": (None, None),
    "bfloat16, KV u8": (None, U8),
    "int8, activations bf16": (Quantization("int8", "bf16"), None),
    "int8, activations int8": (Quantization("int8", "int8"), None),
    "int8, activations int8, KV u8": (Quantization("int8", "int8"), U8),
    "int4, activations bf16": (Quantization("int4", "bf16"), None),
    "int4, activations int8": (Quantization("int4", "int8"), None),
}
"""Weights and the type of the KV cache, as our kernels have them."""

GGUF_FORMATS = (
    "Q8_0", "Q6_K", "Q5_K_M", "Q5_1", "Q5_0", "Q4_K_M", "Q4_1", "Q4_0", "IQ4_NL", "IQ4_XS", "Q3_K_M", "Q2_K",
)  # fmt: skip

_SCHEME = {"num_bits": 8, "group_size": None}
FOLDERS: dict[str, tuple[dict[str, Any], Encoder]] = {
    "AWQ": (awq_settings(64), awq(64)),
    "GPTQ": (gptq_settings(4, 64), gptq(4, 64)),
    "GPTQ in another order": (gptq_settings(4, 64, desc_act=True), gptq(4, 64, act_order=True)),
    "GPTQ, 8 bits": (gptq_settings(8, 64), gptq(8, 64)),
    "w4a16": (compressed_settings(group_size=64), compressed(4, 64)),
    "w4a16, zero points": (compressed_settings(group_size=64, symmetric=False), compressed(4, 64, symmetric=False)),
    "w4a16, columns": (compressed_settings(strategy="channel", group_size=None), compressed(4, -1)),
    "w8a16": (compressed_settings(num_bits=8, group_size=64), compressed(8, 64)),
    "w8a8": (compressed_settings("int-quantized", strategy="channel", **_SCHEME), whole_int8()),
    "FP8, rows": (
        compressed_settings("float-quantized", strategy="channel", type="float", **_SCHEME), fp8(None, "weight_scale")
    ),
    "FP8, blocks": (fp8_settings(), fp8()),
}  # fmt: skip
"""Settings, and what packs a matrix. Rows of 704 numbers have groups of 64; 128 does not divide them."""

_BLOCK = 32


def _in_blocks(x: Tensor) -> Tensor:
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % _BLOCK)).view(*x.shape[:-1], -1, _BLOCK)


def _as_before(blocks: Tensor, x: Tensor) -> Tensor:
    return blocks.flatten(-2)[..., : x.shape[-1]]


def rounded_to_q8_0(x: Tensor) -> Tensor:
    blocks = _in_blocks(x)
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    inverse = torch.where(scale == 0, 0, 1 / scale)
    return _as_before((blocks * inverse).round() * scale.half().float(), x)


def rounded_to_q4_0(x: Tensor) -> Tensor:
    blocks = _in_blocks(x)
    scale = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True)) / -8
    inverse = torch.where(scale == 0, 0, 1 / scale)
    integers = (blocks * inverse + 8.5).floor().clamp(0, 15) - 8
    return _as_before(integers * scale.half().float(), x)


def rounded_to_u8(x: Tensor) -> Tensor:
    """x [..., dim], a scale for each dim numbers."""
    return as_numbers(as_stored(x, U8))


@contextmanager
def rounded_like_llama_cpp(network: Any, weights: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """The network with rounded weights and rows in its linears, and a rounded embedding."""
    head = network.get_output_embeddings()
    linears = [module for module in network.modules() if isinstance(module, torch.nn.Linear)]
    kept, hooks = [], []
    for module in linears:
        kept.append((module, module.weight))
        rounding = rounded_to_q8_0 if module is head else weights
        module.weight = torch.nn.Parameter(rounding(module.weight), requires_grad=False)
        hooks.append(module.register_forward_pre_hook(lambda _, args: (rounded_to_q8_0(args[0]), *args[1:])))
    embedding = network.get_input_embeddings()
    kept.append((embedding, embedding.weight))
    embedding.weight = torch.nn.Parameter(rounded_to_q8_0(embedding.weight), requires_grad=False)
    try:
        yield
    finally:
        for module, weight in kept:
            module.weight = weight
        for hook in hooks:
            hook.remove()


def rounded_to_e4m3(x: Tensor) -> Tensor:
    """x [..., depth], a scale for each depth numbers."""
    codes, scales = rounded_rows(x.flatten(0, -2))
    return (codes.float() * scales).view_as(x)


@contextmanager
def rounded_to_float8(network: Any, *, activations: bool) -> Iterator[None]:
    """The network with weights in FP8, but for embedding and head, and rows that are multiplied with them if wanted."""
    head = network.get_output_embeddings()
    linears = [each for each in network.modules() if isinstance(each, torch.nn.Linear) and each is not head]
    kept, hooks = [module.weight for module in linears], []
    for module in linears:
        module.weight = torch.nn.Parameter(rounded_to_e4m3(module.weight), requires_grad=False)
        if activations:
            hooks.append(module.register_forward_pre_hook(lambda _, args: (rounded_to_e4m3(args[0]), *args[1:])))
    try:
        yield
    finally:
        for module, weight in zip(linears, kept, strict=True):
            module.weight = weight
        for hook in hooks:
            hook.remove()


@contextmanager
def rounded_kv(network: Any, rounding: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """The network with rounded keys and values."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        return sdpa_attention_forward(module, query, rounding(key), rounding(value), *args, **kwargs)

    network.set_attn_implementation("sdpa")
    AttentionInterface.register("sdpa", attend)
    try:
        yield
    finally:
        AttentionInterface.register("sdpa", sdpa_attention_forward)


def logits_of_network(network: Any, sequences: Sequence[list[int]]) -> list[Tensor]:
    with torch.inference_mode():
        return [network(torch.tensor([ids])).logits[0].float() for ids in sequences]


def logits_of_model(
    model: CpuModel, sequences: Sequence[list[int]], kv_dtype: torch.dtype | None = None
) -> list[Tensor]:
    attention, found = CpuAttention(kv_dtype), []
    dtype = kv_dtype or model.dtype
    for ids in sequences:
        count = len(ids)
        blocks = -(-count // 16)
        shapes = [attention.block_shapes(layer, 16, dtype) for layer in model.layers]
        kv_cache = KVCache(shapes, blocks, 16, dtype, model.device)
        every, table = np.arange(count), np.arange(blocks, dtype=np.int32)[None]
        batch = RaggedBatch(np.array(ids), every, every, every, table, [0], [count], model.device)
        found.append(model.forward(batch, kv_cache, attention).values.clone())
    return found


def compare(found: list[Tensor], expected: list[Tensor], sequences: Sequence[list[int]]) -> dict[str, float]:
    divergence, same, surprise, count = 0.0, 0, 0.0, 0
    for one, other, ids in zip(found, expected, sequences, strict=True):
        right, mine = other.double().log_softmax(-1), one.double().log_softmax(-1)
        divergence += float((right.exp() * (right - mine)).sum())
        same += int((mine.argmax(-1) == right.argmax(-1)).sum())
        surprise -= float(mine[:-1].gather(1, torch.tensor(ids[1:])[:, None]).sum())
        count += len(ids)
    tokens = count - len(sequences)
    return {"divergence": divergence / count, "same": same / count, "perplexity": float(np.exp(surprise / tokens))}


def demo_sequences(count: int) -> list[list[int]]:
    """So many of the demo model's held-out conversations, with their right answers."""
    from scripts.demo.data import held_out

    cases = [case for case in held_out(20) if not case.words]
    with Engine(device="cpu") as engine:
        chosen = cases[:: max(1, len(cases) // count)][:count]
        return [list(engine.encode({"messages": case.messages}, answer=case.answer)) for case in chosen]


def gguf_models(interpreters: dict[str, str], report: Report) -> Iterator[tuple[str, CpuModel]]:
    """The demo model from a GGUF file in each format."""
    with TemporaryDirectory() as folder:
        (Path(folder) / "model").symlink_to(DEMO_MODEL)
        for name in GGUF_FORMATS:
            job = PeerJob(folder, "bfloat16", num_threads(), 1, 16, PeerWork([[1]], [1]), name)
            reply = call("llama.cpp", "prepare", [job], interpreters)
            if "error" in reply:
                report.note(f"{name}: {reply['error']}")
                continue
            found = GgufModel([job.gguf])
            model = found.load(LoadPlan())
            assert isinstance(model, CpuModel)
            stored, held = (8 * size / model.num_parameters for size in (job.gguf.stat().st_size, model.weight_bytes))
            yield f"GGUF {name}, {stored:.1f} bits, {held:.1f} in memory", model


def folder_models() -> Iterator[tuple[str, CpuModel]]:
    """The demo model from a folder in each format."""
    config = read_json_object(DEMO_MODEL / "config.json")
    tensors = Tensors(DEMO_MODEL)
    saved = SavedModel(None, config, {name: tensors[name] for name in tensors})
    for name, (settings, encode) in FOLDERS.items():
        with TemporaryDirectory() as folder:
            write_folder(Path(folder) / "model", saved, settings, encode)
            model = load_fast_model(LoadPlan(f"{folder}/model"))
            assert isinstance(model, CpuModel)
            stored = 8 * Tensors(Path(folder) / "model").num_bytes / model.num_parameters
            yield f"{name}, {stored:.1f} bits, {8 * model.weight_bytes / model.num_parameters:.1f} in memory", model


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--shape", choices=["demo", *sorted(SHAPES)], action="append", help="model (demo, 135m and 0.6B)")
    add("--layers", type=at_least_one, default=8, help="of random models (%(default)s)")
    add("--tokens", type=at_least_one, default=512, help="of random models (%(default)s)")
    add("--conversations", type=at_least_one, default=200, help="of the demo model (%(default)s)")
    add("--python", type=interpreter, action="append", default=[], metavar="NAME=PATH", help="interpreter of llama.cpp")


def run(options: argparse.Namespace, report: Report) -> int:
    for shape in options.shape or ("demo", "135m", "0.6B"):
        config, tensors, sequences = _case(shape, options)
        network = make_network(config, {name: tensors[name].float() for name in tensors}, torch.float32, _CPU)
        expected = logits_of_network(network, sequences)
        found = {}
        for name, weights in (("Q8_0 of llama.cpp", rounded_to_q8_0), ("Q4_0 of llama.cpp", rounded_to_q4_0)):
            with rounded_like_llama_cpp(network, weights):
                found[name] = compare(logits_of_network(network, sequences), expected, sequences)
        for name, rounding in (("KV Q8_0 of llama.cpp", rounded_to_q8_0), ("KV u8", rounded_to_u8)):
            with rounded_kv(network, rounding):
                found[f"float32, {name}"] = compare(logits_of_network(network, sequences), expected, sequences)
        for name, activations in (("FP8, rows", False), ("FP8, rows, activations fp8", True)):
            with rounded_to_float8(network, activations=activations):
                found[f"float32, {name}"] = compare(logits_of_network(network, sequences), expected, sequences)
        for name, (quantize, kv_dtype) in ROUNDINGS.items():
            model = CpuModel(config, tensors, torch.bfloat16, quantize=quantize)
            found[name] = compare(logits_of_model(model, sequences, kv_dtype), expected, sequences)
        if shape == "demo":
            for name, model in folder_models():
                found[name] = compare(logits_of_model(model, sequences), expected, sequences)
        if shape == "demo" and options.python:
            for name, model in gguf_models(dict(options.python), report):
                found[name] = compare(logits_of_model(model, sequences), expected, sequences)
        report.figures[shape] = found
        table = [["rounding", "divergence", "same token", "perplexity"]]
        for name, figures in found.items():
            table.append(
                [name, f"{figures['divergence']:.5f}", f"{figures['same']:.2%}", f"{figures['perplexity']:.4f}"]
            )
        report.line(f"{shape}: perplexity in float32 {compare(expected, expected, sequences)['perplexity']:.4f}")
        report.table(table)
        report.line()
    return 0


_CPU = torch.device("cpu")


def _case(shape: str, options: argparse.Namespace) -> tuple[Config, Any, list[list[int]]]:
    """Config, weights by name, and sequences of token ids."""
    if shape == "demo":
        return read_json_object(DEMO_MODEL / "config.json"), Tensors(DEMO_MODEL), demo_sequences(options.conversations)
    config = SHAPES[shape] | {"num_hidden_layers": options.layers}
    ids = np.random.default_rng(0).integers(1, config["vocab_size"], options.tokens).tolist()
    return config, RandomTensors(config, _CPU, torch.bfloat16), [ids]
