"""Runs any causal language model of transformers that calls its AttentionInterface on ragged batches.

One attention function is registered under the name `cbatch`. No mask function is registered under that name, so
transformers builds no masks. A probe learns once which tokens a layer may see, from the mask functions that the model
itself asks for (see `attention_calls`).

Recurrent layers go on from the states in their slots (see `recurrent`).

Some models keep something else outside the keys and values seen here: sparse attention with an index of its own, or
position encodings that depend on the length of the whole text. They would run on a ragged batch and be silently wrong,
so `TransformersModel` refuses them: the probe looks at every call of the interface, and `self_check` compares small
ragged steps with the model's own forward.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from cbatch.attention.base import AttentionBackend
from cbatch.base.errors import ModelError
from cbatch.kernels.operands import AdapterRows
from cbatch.kernels.products import multiply_logits
from cbatch.model.base import DeviceInputs, HiddenStates, LinearCost
from cbatch.model.hf.attention_calls import (
    AttentionCalls,
    AttentionProbe,
    attending,
    paged_attention,
    placeholder_mask,
    probe_mask,
)
from cbatch.model.hf.facts import (
    RECURRENT_LAYERS,
    attention_kinds,
    check_config,
    check_patterns,
    chunk_multiple,
    linear_cost_of,
    max_model_len,
)
from cbatch.model.hf.indexed import INDEXED_LAYERS, serve_indexers
from cbatch.model.hf.placement import accept_host_rows, input_device, parameters_once
from cbatch.model.hf.recurrent import RecurrentStep, StateLayout, recurring, serve_modules
from cbatch.model.lora.device import ModuleAdapters
from cbatch.model.lora_files import Adapter
from cbatch.runtime.batch import ImageRows, Logits, PooledRows, RaggedBatch
from cbatch.runtime.device import has_bfloat16, samples_on
from cbatch.runtime.kv_cache import KVCache, LayerShape

ATTENTION_NAME = "cbatch"
PROBE_NAME = "cbatch_probe"
INDEXED_NAME = "cbatch_indexed"
"""Of models with an indexer, whose modules take masks apart before they reach the attention function."""


@dataclass(eq=False)
class _Shared:
    """State that all engines made of one network share.

    in_use: held while it runs: another engine changes its attention, to compare
    served: what the functions have given that have changed its modules
    """

    in_use: threading.Lock = field(default_factory=threading.Lock)
    served: dict[Callable[..., Any], Any] = field(default_factory=dict)


_networks: WeakKeyDictionary[nn.Module, _Shared] = WeakKeyDictionary()
_claiming = threading.Lock()


def _after_fork() -> None:
    for shared in _networks.values():  # the parent may hold their locks
        shared.in_use = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


class TransformersModel:
    """A transformers model, ready to run ragged batches over a paged cache. Its attributes are those of `Model`.

    Raises ModelError with the reason if the model would be wrong here.
    """

    has_own_threads = batch_invariant = False
    is_causal = True

    def __init__(self, network: Any) -> None:
        from transformers import AttentionInterface, AttentionMaskInterface

        for name in (ATTENTION_NAME, PROBE_NAME, INDEXED_NAME):
            AttentionInterface.register(name, paged_attention)
        AttentionMaskInterface.register(PROBE_NAME, probe_mask)
        AttentionMaskInterface.register(INDEXED_NAME, placeholder_mask)
        self._network, self.generates = network, not getattr(network, "only_embeds", False)
        parts = network.get_decoder(), getattr(network, "model", None)
        self.decoder = next((one for one in parts if one is not None and one is not network), None)
        with _claiming:
            self._shared = _networks.setdefault(network, _Shared())
        self.name = type(network).__name__
        self.config = network.config.get_text_config()
        self.kind: str = self.config.model_type
        self.dtype: torch.dtype = network.dtype
        self.device = input_device(network)
        parameters = list(parameters_once(network))
        self.num_parameters = sum(parameter.numel() for parameter in parameters)
        self.weight_bytes = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
        self._rows_on_host = accept_host_rows(network)
        self._is_emulated = self.dtype == torch.bfloat16 and not has_bfloat16(self.device)
        self.vocab_size: int = self.config.vocab_size
        self.max_model_len = max_model_len(self.config)
        self.short_context: int | None = None
        self._adapters: ModuleAdapters | None = None
        try:
            check_config(network.config, self.config)
            kinds = set(getattr(self.config, "layer_types", None) or ())
            self._attention_name = INDEXED_NAME if kinds & INDEXED_LAYERS else ATTENTION_NAME
            if kinds & INDEXED_LAYERS:
                self._served(serve_indexers)
            is_recurrent = kinds & RECURRENT_LAYERS
            self._recurrent: StateLayout = replace(self._served(serve_modules)) if is_recurrent else StateLayout()
            self.states, self.state_devices = self._recurrent.shapes, self._recurrent.devices
            self.chunk_multiple = chunk_multiple(self.config, self._recurrent)
            self.layers, self.windows, self.layer_devices = self._probe()
        except ModelError as error:
            raise ModelError(f"{self.name} is not supported: {error}.") from error
        except Exception as error:  # whatever a model's own code raises
            raise ModelError(f"{self.name} is not supported: it fails on a ragged batch ({error}).") from error

    def go_on_by_token(self) -> bool:
        """Gives its recurrent layers prompts that go on from a state token by token; False if that changes nothing."""
        if not self.states or self._recurrent.by_token:
            return False
        self._recurrent.by_token = True
        return True

    def with_adapters(self, adapters: Sequence[Adapter]) -> TransformersModel:
        """Tries all of them on a few tokens, so that no step fails later."""
        if self.states or len({self.device, *self.layer_devices}) > 1:
            raise ModelError(
                f"{self.name} takes no LoRA adapters here: models that transformers runs take them only if they are on "
                "one device and have no recurrent layers."
            )
        model = copy(self)
        model._adapters = ModuleAdapters(self._network, adapters)
        for number in range(len(adapters)):
            model._probe(np.full(4, number + 1))
        return model

    @property
    def linear_cost(self) -> LinearCost:
        return linear_cost_of(self._network, self.config)

    @cached_property
    def capturable(self) -> CapturableNetwork | None:
        """Its decoder and its head by themselves, if together they are the network; see `CapturableNetwork`."""
        has_index = len(self.layers) > len(self.windows)  # whose keys only the reference of attention serves
        if self._is_emulated or self.states or has_index or len({self.device, *self.layer_devices}) > 1:
            return None
        return CapturableNetwork.of(self, self._network)

    @torch.inference_mode()
    def forward(self, batch: RaggedBatch, kv_cache: KVCache, attention: AttentionBackend) -> Logits:
        """Logits [R, vocabulary] of the wanted rows, where they are sampled (`samples_on`).

        They are in the model's dtype, or in float32 if the sampling kernel cannot read that.
        """
        step = None
        if batch.states is not None:
            step = RecurrentStep.of(self._recurrent, batch.states, batch.starts, batch.stops)
        with self.checked(AttentionCalls(kv_cache, attention, batch, self.windows)), recurring(step):
            logits, sums = (
                (self._call(batch), None) if batch.pooled is None else self._call_pooling(batch, batch.pooled)
            )
        if self._is_emulated:
            logits = logits.float()
        return Logits(logits if samples_on(self.device) else logits.cpu(), sums=sums)

    @contextmanager
    def checked(self, step: AttentionCalls) -> Iterator[None]:
        """Raises ModelError if it calls attention more or less often than when it was loaded."""
        with self._shared.in_use, attending(step):
            yield
        if step.calls != len(self.windows):
            raise ModelError(
                f"it called attention {step.calls} times in a step, and {len(self.windows)} times when it was loaded"
            )

    def _call(self, batch: RaggedBatch) -> Tensor:
        adapting: AbstractContextManager[None] = nullcontext()
        if self._adapters is not None and batch.adapters is not None:
            adapting = self._adapters.applied(batch.adapters)
        positions, images = batch.position_ids[None], batch.images
        if images is not None and images.positions is not None:
            positions = positions.repeat(3, 1, 1)
            positions[:, 0, images.places] = torch.from_numpy(images.positions).to(positions.device)
        with adapting, self._showing(images):
            output = self._network(
                input_ids=batch.input_ids[None],
                position_ids=positions,
                use_cache=False,
                logits_to_keep=torch.from_numpy(batch.rows) if self._rows_on_host else batch.logit_rows,
            )
        logits: Tensor = output.logits[0]
        if logits.shape[0] == len(batch.rows):
            return logits
        return logits[batch.logit_rows]  # some families ignore logits_to_keep

    @contextmanager
    def _showing(self, images: ImageRows | None) -> Iterator[None]:
        """While images replace tokens of a step: what modules give for these is changed."""
        if images is None:
            yield
            return
        modules = [self._network.get_input_embeddings(), *getattr(self.decoder, "layers", ())]
        width = modules[0].weight.shape[-1]
        with ExitStack() as hooks:
            for level, module in enumerate(modules[: images.values.shape[1] // width]):
                rows = images.values[:, level * width : (level + 1) * width]
                hook = module.register_forward_hook(partial(_changed, images.places, rows, replaces=level == 0))
                hooks.callback(hook.remove)
            yield

    def _call_pooling(self, batch: RaggedBatch, pooled: PooledRows) -> tuple[Tensor, Tensor]:
        """The same, and sums of the hidden states after its decoder's last norm."""
        assert self.decoder is not None
        hidden = list[Tensor]()
        hook = self.decoder.register_forward_hook(lambda module, inputs, output: hidden.append(output[0][0]))
        try:
            logits = self._call(batch)
        finally:
            hook.remove()
        return logits, pooled.sums(self.device, lambda rows: hidden[0].to(self.device)[rows])

    def plain(self, token_ids: list[int], decoder: Any = None) -> Tensor:
        """Runs the network's own forward on one sequence, with its own attention.

        Logits [T, vocabulary], or the hidden states [T, hidden] of its decoder.
        """
        ids = torch.tensor([token_ids], device=self.device)
        with self._own_attention():
            output = (decoder or self._network)(input_ids=ids, use_cache=False)
        found: Tensor = (output.logits if decoder is None else output[0])[0]
        return found

    @contextmanager
    def _own_attention(self) -> Iterator[None]:
        """While the network computes as it does in transformers."""
        with self._shared.in_use:
            self._network.set_attn_implementation("eager")
            try:
                yield
            finally:
                self._network.set_attn_implementation(self._attention_name)

    def _served(self, serve: Callable[[Any, Any, torch.device], Any]) -> Any:
        """The result of a function that changes modules of the network, which is called once."""
        with _claiming:
            if serve not in self._shared.served:
                with self._own_attention(), torch.inference_mode():
                    self._shared.served[serve] = serve(self._network, self.config, self.device)
            return self._shared.served[serve]

    def _probe(self, adapters: Any = None) -> tuple[list[LayerShape], list[int | None], list[torch.device]]:
        """The shape of what each attention call stores, its window, and where it computes."""
        probe = AttentionProbe()
        four, table = np.arange(4), np.arange(4, dtype=np.int32)[None]
        batch = RaggedBatch(
            four % self.vocab_size, four, four, four[-1:], table, [0], [4], self.device, adapters=adapters
        )
        with self._shared.in_use, torch.inference_mode(), attending(probe):
            self._network.set_attn_implementation(PROBE_NAME)
            self._call(batch)
            self._network.set_attn_implementation(self._attention_name)
        layers = len(attention_kinds(self.config) or range(self.config.num_hidden_layers))
        if not self.states and len(probe.stored) < layers:
            raise ModelError(
                f"{len(probe.stored)} of its {layers} layers call attention that can be paged; "
                "the others (recurrent, convolutional, or with attention of their own) would be silently wrong"
            )
        check_patterns(self.config, probe.patterns)
        chunks = [pattern.chunk for pattern in probe.patterns if pattern.chunk]
        self.max_model_len = min([self.max_model_len, *chunks])  # within its first chunk a layer sees every token
        stored, windows = probe.stored + probe.indices, [pattern.window for pattern in probe.patterns]
        return [shape for shape, _ in stored], windows, [device for _, device in stored]


def _changed(places: NDArray[np.int64], rows: Tensor, module: Any, inputs: Any, output: Any, *, replaces: bool) -> Any:
    """The output of a module, [1, T, hidden size], with these rows at places of T, or with them added."""
    given = output if isinstance(output, Tensor) else output[0]
    changed, there = given.clone(), torch.from_numpy(places).to(given.device)
    changed[0, there] = rows.to(given) if replaces else given[0, there] + rows.to(given)
    return changed if isinstance(output, Tensor) else (changed, *output[1:])


_TOLERANCES = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 6e-2}
"""Most that rounding changes logits, as a share of their spread."""

_TRIAL_TOKENS = 4

Finish = Callable[[Tensor], Tensor]
"""The function from the head's product to logits."""


@dataclass(eq=False)
class CapturableNetwork:
    """Steps of a transformers model in two parts, as they are captured as CUDA graphs: a `CapturableModel`.

    The decoder and the output head are called by themselves. What a network does to its logits beside that, a factor
    or a softcap, is found by comparing both parts with the network's own forward. Whether the code of a model can be
    captured at all shows when it is tried: code that waits for the device cannot be (see `engine/cuda_graphs.py`).

    decoder: gives the hidden states [1, T, hidden] that the head takes
    head:    the output embedding
    """

    model: TransformersModel
    decoder: Any
    head: nn.Linear
    finish: Finish

    def __post_init__(self) -> None:
        self.device: torch.device = self.model.device
        self.vocab_size: int = self.model.vocab_size
        self.max_model_len: int = self.model.max_model_len

    @classmethod
    def of(cls, model: TransformersModel, network: Any) -> CapturableNetwork | None:
        """None if the two parts do not give what the network gives."""
        ids = list(range(_TRIAL_TOKENS))
        with torch.inference_mode():
            expected = model.plain(ids)
            try:
                decoder, head = network.get_decoder(), network.get_output_embeddings()
                if decoder is None or not isinstance(head, nn.Linear):
                    return None
                product = head(model.plain(ids, decoder))
            except Exception:  # whatever a network raises that has none, or a decoder that it calls otherwise
                return None
            softcap = getattr(model.config, "final_logit_softcapping", None)
            finish = _finish_of(product.float(), expected.float(), softcap, _TOLERANCES[product.dtype])
        return None if finish is None else cls(model, decoder, head, finish)

    def new_hidden_states(self, tokens: int) -> HiddenStates:
        """Everything is in `added`; there is no residual beside it."""
        added = torch.empty(tokens, self.head.in_features, dtype=self.model.dtype, device=self.device)
        return HiddenStates(added[:, :0].float(), added)

    @torch.inference_mode()
    def run_layers(self, inputs: DeviceInputs, out: HiddenStates | None = None) -> HiddenStates:
        cache, attention, metadata = inputs.kv_cache, inputs.attention, {self.device: inputs.metadata}
        with self.model.checked(AttentionCalls(cache, attention, None, self.model.windows, metadata)):
            hidden = self.decoder(
                input_ids=inputs.input_ids[None], position_ids=inputs.position_ids[None], use_cache=False
            )[0][0]
        out = self.new_hidden_states(len(inputs.input_ids)) if out is None else out
        out.added.copy_(hidden)
        return out

    @torch.inference_mode()
    def run_head(self, hidden: HiddenStates, rows: Tensor, out: Tensor | None = None) -> Tensor:
        chosen = hidden.added[rows]
        if self.head.bias is None:
            logits = self.finish(multiply_logits(chosen, self.head.weight))
        else:
            logits = self.finish(self.head(chosen).float())
        return logits if out is None else out.copy_(logits)

    def pool(self, hidden: HiddenStates, pooled: PooledRows | None) -> Tensor | None:
        return None if pooled is None else pooled.sums(self.device, lambda rows: hidden.added[rows])

    def adding(self, rows: AdapterRows) -> None:
        """Adapters are added to modules by hooks, which know their tokens on the host."""


def _finish_of(product: Tensor, expected: Tensor, softcap: float | None, tolerance: float) -> Finish | None:
    """The function from the head's product to logits [T, vocabulary], if it is a factor or a softcap; else None."""
    scale = float((product * expected).sum() / product.square().sum().clamp(min=1e-12))
    candidates: list[Finish] = [lambda logits: logits, lambda logits: logits * scale]
    if softcap:
        candidates.append(lambda logits: softcap * torch.tanh(logits / softcap))
    for finish in candidates:
        error = (finish(product) - expected).square().mean().sqrt() / expected.std().clamp(min=1e-12)
        if float(error) <= tolerance:
            return finish
    return None
