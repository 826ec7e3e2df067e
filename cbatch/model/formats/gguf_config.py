"""A GGUF file's model in the terms of transformers: its settings, and the names of its weights.

Sizes that a file claims are compared with the shapes of its tensors first, because a program is made of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial

from torch import Tensor

import cbatch.model.formats.gguf_architectures.declared as _declarations  # noqa: F401  # which registers them
from cbatch.base.errors import ModelError
from cbatch.base.model_files import InvalidFile
from cbatch.model.formats.gguf_architectures.architecture import (
    BEHIND,
    MAX_EXPERTS,
    Architecture,
    Config,
    Metadata,
    Order,
    Rule,
    Rules,
    architectures,
)
from cbatch.model.formats.gguf_file import GgufFile
from cbatch.model.formats.gguf_weights import GgufMatrix

_MAX_LAYERS = 1024

_NOT_WEIGHTS = re.compile(r"rope_freqs\.weight|rope_factors_(long|short)\.weight")
"""Tensors that the config is made of."""

_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(.+)")


def architecture_of(file: GgufFile) -> Architecture:
    """Raises ModelError for an architecture that has no fast path here."""
    data = Metadata(file)
    found = next((one for one in architectures.get(file.architecture, []) if one.when(data)), None)
    if found is None:
        known = ", ".join(sorted(architectures))
        raise ModelError(
            f"GGUF models of the architecture {file.architecture[:80]!r} are not read, but those of {known} are."
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
        "architectures": [architecture.name],
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "head_dim": data.whole("attention.key_length", hidden // heads if heads else 0),
        "num_key_value_heads": _kv_heads(data, layers, heads),
        "max_position_embeddings": data.whole("context_length"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "eos_token_id": None,
    }
    if data.has("attention.layer_norm_rms_epsilon"):
        config["rms_norm_eps"] = data.number("attention.layer_norm_rms_epsilon")
    if data.has("feed_forward_length"):
        config["intermediate_size"] = data.whole("feed_forward_length")
    _check_heads(data, config)
    return architecture.read(data, config)


def _num_layers(data: Metadata) -> int:
    """Without those that predict several tokens at once."""
    claimed = data.whole("block_count")
    numbers = {name.split(".")[1] for name in data.file.tensors if name.startswith("blk.")}
    if numbers != {str(number) for number in range(len(numbers))} or len(numbers) != claimed or claimed > _MAX_LAYERS:
        raise data.refused(f"claims to have {claimed} layers, and has tensors of {len(numbers)}")
    if data.num_layers < 1:
        raise data.refused(f"claims that none of its {claimed} layers is one of the model")
    return data.num_layers


def _kv_heads(data: Metadata, layers: int, heads: int) -> int:
    """Of the layers that have keys."""
    if not data.has("attention.head_count_kv"):
        return heads
    counts = set(data.wholes("attention.head_count_kv", layers))
    if len(counts - {0}) > 1:
        raise data.refused("has layers with different numbers of KV heads, which is not read")
    return max(counts)


def _check_heads(data: Metadata, config: Config) -> None:
    """Heads must be those of some layer's queries, so that nothing is made for more of them."""
    heads, head_dim = config["num_attention_heads"], config["head_dim"]
    names = [name for name in data.file.tensors if name.startswith("blk.") and name.endswith(".attn_output.weight")]
    if not names or heads < 1 or data.shape(names[0])[-1] != heads * head_dim:
        raise data.refused(f"claims to have {heads} heads of {head_dim}, and its tensors differ")
    if data.whole("attention.value_length", head_dim) != head_dim:
        raise data.refused("has values of another size than keys, which is not read")


def matrices_of(file: GgufFile, config: Config) -> dict[str, GgufMatrix]:
    """The weights of a model, by the names that transformers has for them.

    Raises InvalidFile for a tensor that models of its architecture do not have.
    """
    architecture = architecture_of(file)
    found: dict[str, GgufMatrix] = {}
    for name in file.tensors:
        match = _LAYER_TENSOR.fullmatch(name)
        if match is not None and int(match[1]) < config["num_hidden_layers"]:
            before = f"blk.{match[1]}.", f"model.layers.{match[1]}."
            found.update(_matrices(file, architecture, architecture.layer, config, match[2], *before))
        elif match is None and not _NOT_WEIGHTS.fullmatch(name):
            found.update(_matrices(file, architecture, architecture.model, config, name))
    return found


def _matrices(
    file: GgufFile, architecture: Architecture, rules: Rules, config: Config, name: str, theirs: str = "",
    ours: str = "",
) -> Iterator[tuple[str, GgufMatrix]]:  # fmt: skip
    """The weights of a tensor. theirs, ours: the beginnings of its name in the file, and of the weight's"""
    path = file.paths[0]
    stem, _, ending = name.rpartition(".")
    rule, suffix = (rules[name], "") if name in rules else (rules.get(stem), f".{ending}")
    if rule is BEHIND:
        return
    if rule is None:
        raise InvalidFile(f"{path} holds the tensor {theirs + name[:80]!r}, which is not read.")
    rule = Rule(rule) if isinstance(rule, str) else rule
    tensors = tuple(theirs + one for one in (name, *(part + suffix for part in rule.parts)))
    shape = _joined_shape(file, tensors)
    if "{}" in rule.name:
        if shape[0] > MAX_EXPERTS:
            raise InvalidFile(f"{path}: the tensor {tensors[0]!r} has the shape {shape}.")
        for number in range(shape[0]):
            yield ours + rule.name.format(number) + suffix, GgufMatrix(file, tensors, shape[1:], expert=number)
        return

    def order(of: Order | None, count: int) -> Tensor | None:
        found = None if of is None else of(config, count)
        if of is not None and found is None:
            raise InvalidFile(f"{path}: the tensor {tensors[0]!r} does not have the shape that its heads need.")
        return found

    is_norm = stem.endswith("_norm") and ending == "weight" and stem not in architecture.plain_norms
    are_vectors = ending == "bias" or len(shape) == 1
    rows = order(rule.rows, shape[-1 if are_vectors else -2])
    columns = None if are_vectors else order(rule.columns, shape[-1])
    shape = rule.shape(shape) if rule.shape is not None else shape
    yield (
        ours + rule.name + suffix,
        GgufMatrix(
            file,
            tensors,
            (*shape[:-2], *reversed(shape[-2:])) if rule.is_transposed else shape,
            is_transposed=rule.is_transposed,
            row_order=rows,
            columns=columns,
            offset=-architecture.norm_offset if is_norm else 0.0,
            combine=None if rule.combine is None else partial(rule.combine, config),
        ),
    )


def _joined_shape(file: GgufFile, tensors: tuple[str, ...]) -> tuple[int, ...]:
    """Of tensors whose rows follow each other."""
    shapes = [file.tensors[name].shape for name in tensors if name in file.tensors]
    first = shapes[0]
    if len(tensors) == 1:
        return first
    axis = len(first) - (1 if tensors[0].endswith(".bias") or len(first) == 1 else 2)
    others = [(len(shape), *shape[:axis], *shape[axis + 1 :]) for shape in shapes]
    if len(shapes) != len(tensors) or len(set(others)) != 1:
        raise InvalidFile(f"{file.paths[0]}: the tensors {', '.join(tensors)} do not fit each other.")
    return (*first[:axis], sum(shape[axis] for shape in shapes), *first[axis + 1 :])
