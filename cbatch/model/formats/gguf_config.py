"""A GGUF file's model in the terms of transformers: its settings, and the names of its weights.

The program of the settings has sizes within bounds, and the tensors must have the shapes of its weights.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import partial

import torch
from torch import Tensor

from cbatch.base.errors import ModelError
from cbatch.base.model_files import InvalidFile
from cbatch.model.formats.gguf_architectures import architecture as known
from cbatch.model.formats.gguf_architectures import dense, experts, recurrent  # noqa: F401  # which registers them
from cbatch.model.formats.gguf_architectures.architecture import BEHIND, Architecture, Config, Metadata, Order, Rule
from cbatch.model.formats.gguf_architectures.names import NAMES
from cbatch.model.formats.gguf_file import GgufFile
from cbatch.model.formats.gguf_weights import GgufMatrix
from cbatch.model.ops.program import Program
from cbatch.model.stored import PlainTensor, StoredMatrix
from cbatch.model.weight import Weight

_EPSILONS = {
    "layer_norm_epsilon": ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon"),
    "layer_norm_rms_epsilon": ("rms_norm_eps", "layer_norm_epsilon", "norm_eps"),
}
"""The name of the norms' epsilon in files, and those that classes may have for it."""

_NOT_WEIGHTS = re.compile(r"rope_freqs\.weight|rope_factors_(long|short)\.weight")
"""Tensors that the config is made of."""

_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(.+)")


def architecture_of(file: GgufFile) -> Architecture:
    """Raises ModelError for an architecture that has no fast path here."""
    data = Metadata(file)
    found = next((one for one in known.architectures.get(file.architecture, []) if one.when(data)), None)
    if found is None:
        near = get_close_matches(file.architecture, known.architectures, 3, 0.5)
        others = f", but those of {', '.join(near)} are" if near else ""
        raise ModelError(
            f"GGUF models of the architecture {file.architecture[:80]!r} are not read{others}; "
            f"{len(known.architectures)} architectures are listed in docs/gguf.md."
        )
    return found


def read_config(file: GgufFile) -> Config:
    """The config of a file's model. Raises ModelError if it is not known, or does not fit the tensors."""
    architecture, data = architecture_of(file), Metadata(file)
    embedding = data.shape("token_embd.weight")
    if len(embedding) != 2:
        raise data.refused(f"is damaged: its embedding has the shape {embedding}")
    vocabulary, hidden = embedding
    layers = _num_layers(data)
    if data.whole("embedding_length") != hidden:
        raise data.refused("claims to have an embedding of another width than its tensors have")
    heads = data.whole("attention.head_count")
    config: Config = {
        "model_type": architecture.kind,
        "vocab_size": vocabulary, "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "head_dim": data.whole("attention.key_length", hidden // heads if heads else 0),
        "num_key_value_heads": _kv_heads(data, layers, heads),
        "max_position_embeddings": data.whole("context_length"),
        "tie_word_embeddings": "output.weight" not in file.tensors, "eos_token_id": None,
        "deepstack_levels": data.whole("n_deepstack_layers", 0),
        "attention_bias": bool(data.shapes("attn_q.bias")), "mlp_bias": bool(data.shapes("ffn_down.bias")),
    }  # fmt: skip
    for name, keys in _EPSILONS.items():
        if data.has(f"attention.{name}"):
            config |= dict.fromkeys(keys, data.number(f"attention.{name}"))
    if len(widths := set(data.wholes("feed_forward_length", layers) if data.has("feed_forward_length") else [])) == 1:
        config["intermediate_size"] = widths.pop()
    return architecture.read(data, config)


def _num_layers(data: Metadata) -> int:
    """Without those that predict several tokens at once."""
    claimed = data.whole("block_count")
    numbers = {name.split(".")[1] for name in data.file.tensors if name.startswith("blk.")}
    if numbers != {str(number) for number in range(len(numbers))} or len(numbers) != claimed:
        raise data.refused(f"claims to have {claimed} layers, and has tensors of {len(numbers)}")
    layers = claimed - data.whole("nextn_predict_layers", 0)
    if layers < 1:
        raise data.refused(f"claims that none of its {claimed} layers is one of the model")
    return layers


def _kv_heads(data: Metadata, layers: int, heads: int) -> int | list[int]:
    """Of the layers that have keys; one for each layer if they differ."""
    if not data.has("attention.head_count_kv"):
        return heads
    counts = data.wholes("attention.head_count_kv", layers)
    return counts if len({*counts} - {0}) > 1 else max(counts)


def matrices_of(file: GgufFile, config: Config, program: Program) -> dict[str, StoredMatrix]:
    """The weights of a model, by the names that its program has for them.

    Raises InvalidFile for a tensor that models of its architecture do not have.
    """
    architecture, weights = architecture_of(file), {weight.name: weight for weight in program.weights}
    layers = next(name.partition(".0.")[0] for name in weights if ".0." in name)
    made = architecture.made(Metadata(file), config)
    found: dict[str, StoredMatrix] = {name: PlainTensor(made, name) for name in made}
    for name in file.tensors:
        match = _LAYER_TENSOR.fullmatch(name)
        if match is not None and int(match[1]) < config["num_hidden_layers"]:
            before = f"blk.{match[1]}.", f"{layers}.{match[1]}."
            found.update(_matrices(file, architecture.layer, weights, config, match[2], *before))
        elif match is None and not _NOT_WEIGHTS.fullmatch(name):
            found.update(_matrices(file, {}, weights, config, name))
    return found


def _matrices(
    file: GgufFile, rules: known.Rules, weights: Mapping[str, Weight], config: Config, name: str, theirs: str = "",
    ours: str = "",
) -> Iterator[tuple[str, GgufMatrix]]:  # fmt: skip
    """The weights of a tensor. theirs, ours: the beginnings of its name in the file, and of the weight's"""
    path = file.paths[0]
    stem, _, ending = (name, "", "") if name in NAMES else name.rpartition(".")
    rule = rules.get(stem, Rule())
    if rule is BEHIND:
        return
    if stem not in NAMES:
        raise InvalidFile(f"{path} holds the tensor {theirs + name[:80]!r}, which is not read.")

    def named(tensor: str) -> str:
        """The weight that it is; without one, the name of which the program says that it is unknown."""
        ends = (f".{ending}", f"_{ending}", "", ".weight")
        found = [ours + one + end for one in NAMES[tensor].split() for end in ends]
        return next((one for one in found if one.format(0) in weights), found[0])

    tensors = tuple(theirs + part + name.removeprefix(stem) for part in (stem, *rule.parts))
    names = [named(stem)]
    if stem == "ffn_gate_up_exps" and names[0] not in weights:
        names = [named("ffn_gate_exps"), named("ffn_up_exps")]
    is_made = rule.combine is not None and bool(rule.parts)
    shape = _shapes(file, tensors)[0] if is_made else _joined_shape(file, tensors)
    if "{}" in names[0]:
        if shape[0] > known.MAX_EXPERTS:
            raise InvalidFile(f"{path}: the tensor {tensors[0]!r} has the shape {shape}.")
        share = shape[1] // len(names)
        for number in range(shape[0]):
            for part, one in enumerate(names):
                rows = None if len(names) == 1 else torch.arange(part * share, (part + 1) * share)
                matrix = GgufMatrix(file, tensors, (share, *shape[2:]), expert=number, row_order=rows)
                yield one.format(number), matrix
        return

    def order(of: Order | None, count: int) -> Tensor | None:
        found = None if of is None else of(config, count)
        if of is not None and found is None:
            raise InvalidFile(f"{path}: the tensor {tensors[0]!r} does not have the shape that its heads need.")
        return found

    are_vectors = ending == "bias" or len(shape) == 1
    rows = order(rule.rows, shape[-1 if are_vectors else -2])
    columns = None if are_vectors else order(rule.columns, shape[-1])
    weight, is_transposed, offset = weights.get(names[0]), False, 0.0
    if weight is not None:
        is_transposed, offset = weight.transpose, -weight.offset  # which the file has added already
        sizes, wanted = ([size for size in one if size > 1] for one in (shape, weight.shape))
        is_as_large = sum(math.prod(one) for one in _shapes(file, tensors)) == math.prod(weight.shape)
        if is_as_large and (is_made or len(weight.shape) == 1 or sizes == wanted):
            shape = weight.shape
    final = (*shape[:-2], *reversed(shape[-2:])) if is_transposed else shape
    combine = None if rule.combine is None else partial(rule.combine, config)
    matrix = GgufMatrix(
        file, tensors, final, is_transposed, row_order=rows, columns=columns, offset=offset, combine=combine
    )
    yield names[0], matrix


def _shapes(file: GgufFile, tensors: tuple[str, ...]) -> list[tuple[int, ...]]:
    """Of tensors that must be there."""
    missing = next((name for name in tensors if name not in file.tensors), None)
    if missing is not None:
        raise InvalidFile(f"{file.paths[0]} has no tensor {missing!r}.")
    return [file.tensors[name].shape for name in tensors]


def _joined_shape(file: GgufFile, tensors: tuple[str, ...]) -> tuple[int, ...]:
    """Of tensors whose rows follow each other."""
    shapes = _shapes(file, tensors)
    first = shapes[0]
    if len(tensors) == 1:
        return first
    axis = len(first) - (1 if tensors[0].endswith(".bias") or len(first) == 1 else 2)
    others = [(len(shape), *shape[:axis], *shape[axis + 1 :]) for shape in shapes]
    if len(set(others)) != 1:
        raise InvalidFile(f"{file.paths[0]}: the tensors {', '.join(tensors)} do not fit each other.")
    return (*first[:axis], sum(shape[axis] for shape in shapes), *first[axis + 1 :])
