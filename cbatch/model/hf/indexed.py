"""Sparse attention with an index of its own, as in DeepSeek V3.2: another small attention chooses the keys of a token.

In transformers, a module called indexer keeps keys of its own in the cache (`update_indexer`), and returns for each
token the positions that its attention may see. Here these keys are one more paged tensor. In a step, an indexer is
called once for each sequence, with a view of its pages; everything around it runs on the ragged row. The positions
reach `paged_attention` as its keyword `indices`.
(DeepSeek-AI, 2025, https://arxiv.org/abs/2512.02556.)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cbatch.attention.reference import Sequence
from cbatch.base.errors import ModelError
from cbatch.model.hf.attention_calls import AttentionProbe, current_pass
from cbatch.model.hf.recurrent import modules_that_ask, replace_forward, taken

INDEXED_LAYERS = frozenset({"indexed_attention"})
"""Types of layers in which an indexer chooses."""


class IndexView(NamedTuple):
    """The cache as an indexer sees it: the pages of one sequence, in which it stores its new keys first."""

    cache: Tensor
    sequence: Sequence
    slots: Tensor

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        """All keys [1, stop, dim] of the sequence, given those of its chunk [1, n, dim]."""
        tokens = self.cache.flatten(0, 1)
        tokens.index_copy_(0, self.slots[self.sequence.rows], indexer_key_states[0, :, None].to(tokens.dtype))
        gathered = self.cache[self.sequence.blocks].flatten(0, 1)[: self.sequence.stop, 0]
        return gathered[None].to(indexer_key_states.dtype)


def serve_indexers(network: Any, config: Any, device: torch.device) -> None:
    """Makes the indexers of a network run sequence by sequence. Raises ModelError if it has none that can be served."""
    ids = torch.arange(4, device=device)[None] % config.vocab_size
    cache = network(input_ids=ids, use_cache=True).past_key_values
    inputs = {"input_ids": ids[:, :1], "past_key_values": cache, "use_cache": True}
    found = modules_that_ask(network, cache, inputs, ("update_indexer",))
    if not found:
        raise ModelError("its sparse attention has no indexer that can be served")
    for number, (module, parameter) in enumerate(found.items()):
        _serve(module, parameter, number)


def _serve(module: Any, parameter: str, number: int) -> None:
    """number: of the indexer among those of the network"""
    if "attention_mask" not in inspect.signature(module.forward).parameters:
        raise ModelError("its sparse attention has an indexer that takes no mask")

    def run(current: Any, original: Callable[..., Any], given: dict[str, Any], tokens: int) -> Any:
        if isinstance(current, AttentionProbe):
            return original(**given | {parameter: current})
        device = next(value.device for value in given.values() if isinstance(value, Tensor))
        metadata, chosen = current.metadata_on(device), []
        cache = current.kv_cache.keys[len(current.windows) + number]
        for sequence in metadata.sequences:
            part = {name: taken(value, sequence.rows, tokens) for name, value in given.items()}
            keys = torch.arange(sequence.stop, device=device)
            view = IndexView(cache, sequence, metadata.slots)
            part |= {parameter: view, "attention_mask": (keys <= keys[sequence.start :, None])[None]}
            chosen.append(original(**part))
        most = max(one.shape[-1] for one in chosen)  # -1 where a token has fewer
        return torch.cat([nn.functional.pad(one, (0, most - one.shape[-1]), value=-1) for one in chosen], dim=1)

    replace_forward(module, current_pass, run)
