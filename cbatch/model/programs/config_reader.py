"""Reads a config.json for a declaration, and notes which of its keys have been understood."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NEUTRAL = frozenset(
    {
        "architectures", "model_type", "transformers_version", "dtype", "torch_dtype", "_name_or_path", "auto_map",
        "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id", "unk_token_id",
        "id2label", "label2id", "problem_type", "num_labels", "finetuning_task", "task_specific_params",
        "initializer_range", "initializer_factor", "init_std", "embedding_initializer_range", "init_method",
        "use_cache", "pretraining_tp", "return_dict", "output_attentions", "output_hidden_states", "torchscript",
        "is_decoder", "is_encoder_decoder", "add_cross_attention", "chunk_size_feed_forward", "gradient_checkpointing",
        "attention_dropout", "hidden_dropout", "embd_pdrop", "resid_pdrop", "attn_pdrop", "embedding_dropout",
        "hidden_dropout_prob", "residual_dropout", "dropout", "resid_dropout", "embed_dropout", "classifier_dropout",
        "output_router_logits", "router_aux_loss_coef", "aux_loss_alpha", "seq_aux", "router_jitter_noise",
        "router_z_loss_coef", "_attn_implementation", "attn_implementation", "_attn_implementation_autoset",
        "unsloth_fixed", "unsloth_version", "use_mrope", "rope_interleaved", "cross_attention_hidden_size",
        "tokenizer_class", "prefix", "tie_encoder_decoder", "language", "quantization",
    }
)  # fmt: skip
"""Keys that change nothing of what a model gives in a forward pass, in any family."""


class UnsupportedConfig(Exception):
    """Why the fast path does not support a model."""


class ConfigReader:
    """The keys of a config.json."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values
        self.kind = str(values.get("model_type"))
        self._read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        """A value that must be there. Raises UnsupportedConfig if it is not, or is null."""
        value = self.get(key)
        if value is None:
            raise UnsupportedConfig(f"its config.json has no {key}")
        return value

    def get(self, key: str, default: Any = None) -> Any:
        """A value, or what the class of the config has if the key is absent."""
        self._read.add(key)
        return self.values.get(key, default)

    def first(self, *keys: str) -> Any:
        """The value of the first key that is there: configurations have several names for one thing.

        Raises UnsupportedConfig if all are absent or null.
        """
        found = [value for value in map(self.get, keys) if value is not None]
        if not found:
            raise UnsupportedConfig(f"its config.json has no {keys[0]}")
        return found[0]

    def expect(self, key: str, *accepted: Any) -> Any:
        """A value of which only some are understood; the first of them if the key is absent.

        Raises UnsupportedConfig for another one.
        """
        value = self.get(key, accepted[0])
        if value not in accepted:
            raise UnsupportedConfig(f"its {key} is {value}")
        return value

    def ignore(self, *keys: str) -> None:
        """Notes keys that change nothing here."""
        self._read.update(keys)

    def unread(self) -> dict[str, Any]:
        """What nobody has read and may matter: values other than null, false and nothing."""
        others = self.values.keys() - self._read - NEUTRAL
        return {key: value for key in sorted(others) if (value := self.values[key]) not in (None, False, "", [], {})}
