"""The settings of a model as its `config.json` would have them, from the metadata of a GGUF file.

Sizes that a file claims are compared with the shapes of its tensors first, because a program is made of them.
"""

from __future__ import annotations

import cbatch.model.formats.gguf_architectures.declared as _declarations  # noqa: F401  # which registers them
from cbatch.base.errors import ModelError
from cbatch.model.formats.gguf_architectures.architecture import (
    Architecture,
    Config,
    declared_architectures,
    find_architecture,
)
from cbatch.model.formats.gguf_architectures.metadata import Metadata
from cbatch.model.formats.gguf_file import GgufFile

_MAX_LAYERS = 1024

__all__ = ["Config", "architecture_of", "read_config"]


def architecture_of(file: GgufFile) -> Architecture:
    """Raises ModelError for an architecture that has no fast path here."""
    found = find_architecture(Metadata(file))
    if found is None:
        known = ", ".join(declared_architectures())
        raise ModelError(
            f"GGUF models of the architecture {file.architecture[:80]!r} are not read, but those of {known} are."
        )
    return found


def read_config(file: GgufFile) -> Config:
    """The config of a file's model. Raises ModelError if it is not known, or does not fit the tensors."""
    architecture, data = architecture_of(file), Metadata(file)
    vocabulary, hidden = _two(data)
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


def _two(data: Metadata) -> tuple[int, int]:
    shape = data.shape("token_embd.weight")
    if len(shape) != 2:
        raise data.refused(f"is damaged: its embedding has the shape {shape}")
    return shape[0], shape[1]


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
