"""Models that transformers computes: those that would be silently wrong are refused at load, with the reason.

Sparse attention with an index is served sequence by sequence, over pages of its own.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers import masking_utils

from cbatch.attention.reference import ReferenceAttention
from cbatch.base.errors import ConfigError, ModelError
from cbatch.base.params import SamplingParams
from cbatch.engine.kernel_checks.made_up_steps import ragged_batch
from cbatch.model.hf.adapter import TransformersModel
from cbatch.model.hf.attention_calls import MaskPattern, pattern_of, placeholder_mask, probe_mask
from cbatch.model.hf.self_check import check_ragged
from cbatch.runtime.batch import RaggedBatch
from cbatch.runtime.kv_cache import KVCache, LayerShape
from tests.support.architectures import make_architecture
from tests.support.generation import generate
from tests.support.tiny_models import COMMON, draw_weights, generate_alone, make_engine, make_network, make_prompts

OF_ITS_OWN = "attention masks of its own"


def make_family(family: str, **extra: Any) -> Any:
    config = getattr(transformers, family + "Config")(**COMMON | extra)
    head = "LMHeadModel" if family == "Bert" else "ForCausalLM"
    network = getattr(transformers, family.removesuffix("Text") + head)(config).eval()
    draw_weights(network)
    return network


@pytest.mark.parametrize(
    ("family", "extra", "reason"),
    [
        ("Bloom", {"n_layer": 2, "n_head": 4}, "would be silently wrong"),  # its attention is built in
        ("Bert", {"is_decoder": False}, "encoder|not supported"),
        ("Electra", {"is_decoder": False, "architectures": ["ElectraForCausalLM"], "embedding_size": 48}, OF_ITS_OWN),
        ("Gemma3Text", {"use_bidirectional_attention": True, "head_dim": 16}, OF_ITS_OWN),
        ("Llama4Text", {"attn_temperature_tuning": True, "head_dim": 16}, "scales attention by the index"),
    ],
)
def test_refused_at_load(family: str, extra: dict[str, Any], reason: str) -> None:
    """Guards against text that is silently wrong; Electra is an encoder that is named a decoder."""
    network = make_family(family, **extra)
    with pytest.raises(ModelError, match=reason):
        make_engine(network)


class MixesTokens(torch.nn.Module):
    """A layer that mixes neighbouring tokens outside of attention, as token shift and short convolutions do."""

    def __init__(self, inner: torch.nn.Module, strength: float) -> None:
        super().__init__()
        self.inner = inner
        self.strength = strength

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(hidden)
        out[:, 1:] += self.strength * out[:, :-1].clone()
        return out


def mix_tokens(network: Any, strength: float = 0.1) -> None:
    network.model.layers[0].mlp = MixesTokens(network.model.layers[0].mlp, strength)


def give_more(network: Any) -> None:
    layer = network.model.layers[0].self_attn
    forward = layer.forward
    layer.forward = lambda *args, **kwargs: forward(*args, position_bias=torch.zeros(1), **kwargs)


def replace_mask(change: Any) -> Any:
    def plant(network: Any) -> None:
        layer = network.model.layers[1].self_attn
        forward = layer.forward
        layer.forward = lambda *args, attention_mask, **kwargs: forward(
            *args, attention_mask=change(attention_mask), **kwargs
        )

    return plant


FAULTS: dict[str, tuple[str, Any, str]] = {
    "what no list names": ("llama", mix_tokens, "mixes tokens outside attention"),
    "a keyword that may change the result": ("llama", give_more, "position_bias"),
    "a window that only the config knows": (
        "llama",
        lambda network: setattr(network.config, "layer_types", ["sliding_attention", "full_attention"]),
        r"layers \[0\] differ from its config",
    ),
    "a mask made of the one it was given": ("llama", replace_mask(lambda mask: mask[:, :, 1:] | True), OF_ITS_OWN),
    "a mask of its own": ("llama", replace_mask(lambda mask: torch.zeros(1, 1, 4, 4)), OF_ITS_OWN),
    "fewer positions than its config says": (
        "gpt2", lambda network: setattr(network.transformer, "wpe", torch.nn.Embedding(150, 48)), "self-check fails"
    ),
    "NaN": ("llama", lambda network: network.lm_head.weight.data[3].fill_(float("nan")), "differs from its own by nan"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_what_would_be_wrong_is_refused(name: str) -> None:
    """Guards against the next architecture: the checks are of what a model does, not of what it is called."""
    family, plant, reason = FAULTS[name]
    network = make_network(family)
    check_ragged(TransformersModel(make_network(family)))
    plant(network)
    with pytest.raises(ModelError, match=reason):
        make_engine(network)


def test_a_window_that_only_the_call_knows_changes_nothing() -> None:
    """Guards the reverse: the mask is what counts in transformers too, but for flash attention."""
    network = make_network("llama")
    expected = generate_alone(network, make_prompts([20]), [8])
    layer = network.model.layers[1].self_attn
    forward = layer.forward
    layer.forward = lambda *args, **kwargs: forward(*args, sliding_window=4, **kwargs)
    outputs = generate(make_engine(network), make_prompts([20]), SamplingParams(max_tokens=8))
    assert [output.token_ids for output in outputs] == expected


def chunked(chunk: int) -> Any:
    return masking_utils.chunked_causal_mask_function(chunk, torch.zeros(1, dtype=torch.long))


@pytest.mark.parametrize(
    ("mask_function", "local_size", "pattern"),
    [
        (masking_utils.causal_mask_function, None, MaskPattern()),
        (masking_utils.sliding_window_causal_mask_function(4096), 4096, MaskPattern(window=4096)),
        (masking_utils.sliding_window_causal_mask_function(4097), 4096, None),
        (masking_utils.sliding_window_causal_mask_function(3), None, None),
        (masking_utils.causal_mask_function, 4096, None),
        (chunked(8192), 8192, MaskPattern(chunk=8192)),
        (masking_utils.bidirectional_mask_function, None, None),
        (masking_utils.sliding_window_bidirectional_mask_function(12), 12, None),
    ],
)
def test_reach_of_masks(mask_function: Any, local_size: int | None, pattern: MaskPattern | None) -> None:
    """Guards what a layer is taken to see: exactly its mask, far beyond the few tokens of the probe."""
    mask = probe_mask(
        q_length=4, kv_length=4, mask_function=mask_function, local_size=local_size, allow_is_causal_skip=True
    )
    if pattern is None:
        with pytest.raises(ModelError, match="mask"):
            pattern_of(mask)
    else:
        assert pattern_of(mask) == pattern


@pytest.mark.parametrize(("block", "pattern"), [([-1] * 4, MaskPattern(window=12)), ([-1, 0, 0, -1], None)])
def test_reach_of_a_mask_that_looks_at_tokens(block: list[int], pattern: MaskPattern | None) -> None:
    """Guards models of text and pictures: text alone is causal, and tokens that see what follows are not."""
    overlay = masking_utils.blockwise_overlay(torch.tensor([block]))
    mask_function = masking_utils.or_masks(masking_utils.sliding_window_causal_mask_function(12), overlay)
    mask = probe_mask(q_length=4, kv_length=4, mask_function=mask_function, local_size=12)
    assert mask.pattern == pattern


LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 6, "long_factor": [4.0] * 6}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
LIMITED: dict[str, tuple[str, dict[str, Any], int]] = {
    "longrope": ("Phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 40}, 40),
    "dynamic": ("Llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": 40}, 40),
    "chunks": ("Llama4Text", {"attention_chunk_size": 40, "attn_temperature_tuning": False, "head_dim": 16}, 40),
}


@pytest.mark.parametrize("kind", LIMITED)
def test_served_up_to_where_it_would_be_wrong(kind: str) -> None:
    """Guards models that are right up to some length: equal to `generate` until there, and refusing what is longer."""
    family, extra, limit = LIMITED[kind]
    network = make_family(family, **extra)
    prompts, lengths = make_prompts([30, 3, 39, 17]), [10, 30, 1, 12]
    engine = make_engine(network, max_batch_tokens=16)
    assert engine.model.max_model_len == limit
    outputs = generate(engine, prompts, [SamplingParams(max_tokens=length) for length in lengths])
    assert [output.token_ids for output in outputs] == generate_alone(network, prompts, lengths)
    (long,) = generate(engine, make_prompts([40]), SamplingParams(max_tokens=1))
    assert long.error is not None and long.error.code == "prompt_too_long"


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_self_check_sees_positions_that_depend_on_the_batch(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the limit above if a config spells it differently: a long text must not change what others get."""
    family, extra, _ = LIMITED[kind]
    monkeypatch.setattr("cbatch.model.hf.adapter.max_model_len", lambda config: 120)
    with pytest.raises(ModelError, match="depends on the longest text"):
        make_engine(make_family(family, **extra))


def test_a_model_that_attends_more_or_less_often_than_before_is_stopped() -> None:
    """Guards the caches of the calls, which only their order tells apart."""
    network = make_network("llama")
    engine = make_engine(network)
    engine.add([1, 2, 3], SamplingParams(max_tokens=2))
    layers = network.model.layers
    for wrong, what in (([layers[0]], "called attention 1 times"), ([*layers, layers[0]], "more than 2 times")):
        network.model.layers = torch.nn.ModuleList(wrong)
        network.config.num_hidden_layers = len(wrong)
        with pytest.raises(ModelError, match=what):
            engine.step()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_passes_the_self_check(dtype: torch.dtype) -> None:
    """Guards against refusing good models for rounding, and against a tolerance that lets everything pass."""
    make_engine(make_network("mixtral").to(dtype))
    faulty = make_network("llama").to(dtype)
    mix_tokens(faulty, strength=0.5)
    with pytest.raises(ModelError, match="mixes tokens outside attention"):
        make_engine(faulty)


@pytest.fixture(scope="module")
def network() -> Any:
    return make_architecture("deepseek_v32")


def test_keys_of_indexers_are_counted_and_cached(network: Any) -> None:
    """Guards memory and prefixes: an indexer's keys are paged like the others, so a shared prefix has them."""
    with make_engine(network) as engine:
        assert engine.attention == "reference"
        assert [layer.value_dim for layer in engine.model.layers].count(0) == 2
        [prompt] = make_prompts([40])
        params = SamplingParams(max_tokens=8)
        first, second = (generate(engine, [prompt], params)[0] for _ in range(2))
        assert second.usage.cached_tokens > 30 and list(first.token_ids) == list(second.token_ids)


def test_other_backends_are_refused_by_name(network: Any) -> None:
    """Guards a user who names a backend: it must not be replaced in silence."""
    with pytest.raises(ConfigError, match="sparse attention"):
        make_engine(network, attention="cpu", block_size=16)


def test_chosen_positions_are_all_that_a_token_sees() -> None:
    """Guards `attend_to`: positions that were not chosen, -1, and chosen ones that come later do not count."""
    generator = torch.Generator().manual_seed(0)
    attention, block_size = ReferenceAttention(), 4
    batch: RaggedBatch = ragged_batch([(0, 6), (0, 3)], block_size, torch.device("cpu"))
    shapes = [attention.block_shapes(LayerShape(1, 8, 8), block_size, torch.float32)]
    cache = KVCache(shapes, 16, block_size, torch.float32, torch.device("cpu"))
    query, key, value = (torch.randn(9, 1, 8, generator=generator) for _ in range(3))
    metadata = attention.prepare(batch, block_size)
    attention.store_kv(cache.keys[0], cache.values[0], key, value, metadata)
    indices = torch.tensor([[0, 5], [0, 5], [2, -1], [1, 3], [4, 0], [5, 2], [0, 1], [1, 2], [2, 2]])
    out = attention.attend_to(indices, query, cache.keys[0], cache.values[0], metadata, scale=1.0)
    for row, (first, position) in enumerate([*((0, p) for p in range(6)), *((6, p) for p in range(3))]):
        seen = sorted({place for place in indices[row].tolist() if 0 <= place <= position})
        keys, values = key[first:, 0][seen], value[first:, 0][seen]
        expected = torch.softmax(query[row, 0] @ keys.T, dim=-1) @ values
        torch.testing.assert_close(out[row, 0], expected)


def test_a_placeholder_for_masks_takes_no_memory() -> None:
    """Guards long steps: a mask that nobody reads must not take a byte for each pair of tokens."""
    mask = placeholder_mask(q_length=100_000, kv_length=100_000)
    assert mask.shape == (1, 1, 100_000, 100_000) and mask.untyped_storage().nbytes() == 1
