"""The same work with the same weights in memory, done by transformers itself.

This module needs torch and transformers only, so that other interpreters can import it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from cbatch.cli.bench.workload import Outputs, Workload

PAGE_SIZE = 256
"""Tokens in a page of transformers' own paged cache: its default."""

Generate = Callable[[Workload], Outputs]
"""Does work greedily, to the wanted lengths."""


class PeerError(Exception):
    """A peer did not get through; the message says why in a sentence."""


@dataclass(frozen=True, slots=True)
class PeerMetrics:
    """Figures of a peer, named as in `--json`. `attention` is transformers' name of the backend it used."""

    elapsed_s: float
    output_tokens_per_s: float
    attention: str


@dataclass(frozen=True, slots=True)
class PeerSetup:
    """The task of a peer: a transformers model in memory, the work, and the limits of our own runs.

    network:          the model, on which no engine may run meanwhile
    slots:            most requests at once
    max_batch_tokens: most tokens in a step, if the peer has steps
    """

    network: Any
    work: Workload
    slots: int
    max_batch_tokens: int
    clock: Callable[[], float] = time.perf_counter

    def now(self) -> float:
        """Seconds, once the device has finished its work."""
        if self.network.device.type != "cpu":
            torch.accelerator.synchronize(self.network.device)
        return self.clock()


@contextmanager
def static_batches(setup: PeerSetup) -> Iterator[Generate]:
    """`generate` on batches of `slots` requests in order, padded on the left, until the longest output is complete.

    Outputs are cut to their wanted lengths afterwards.
    """
    _set_attention(setup.network, "sdpa", "eager")

    def generate(work: Workload) -> Outputs:
        outputs: Outputs = []
        for batch in work.batches(setup.slots):
            lengths = [work.output_lengths[index] for index in batch]
            full = _generate_batch(setup.network, [work.prompts[index] for index in batch], max(lengths))
            outputs += [tokens[:length] for tokens, length in zip(full, lengths, strict=True)]
        return outputs

    yield generate


def _generate_batch(network: Any, prompts: list[list[int]], length: int) -> list[list[int]]:
    """`length` tokens for each prompt, greedily, past any end token."""
    rows = [torch.tensor(prompt) for prompt in prompts]
    ids = pad_sequence(rows, batch_first=True, padding_side="left")
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side="left")
    full = network.generate(
        ids.to(network.device),
        attention_mask=mask.to(network.device),
        generation_config=_greedy(max_new_tokens=length, pad_token_id=0),  # without an end token no request ends early
    )
    tokens: list[list[int]] = full[:, ids.shape[1] :].tolist()
    return tokens


@contextmanager
def continuous(setup: PeerSetup, attention: str = "") -> Iterator[Generate]:
    """transformers' own continuous batching, with the same limits on requests and tokens in a step as ours.

    attention: its name in transformers; sdpa by default

    Its cache is large enough for all slots and, as in our runs, shares no prefixes.
    """
    from transformers import ContinuousBatchingConfig

    work, network = setup.work, setup.network
    _set_attention(network, attention or _paged_sdpa(), "paged|eager")
    longest = max(len(prompt) + length for prompt, length in zip(work.prompts, work.output_lengths, strict=True))
    known = {entry.name for entry in fields(ContinuousBatchingConfig)}
    sizes = {
        "page_size" if "page_size" in known else "block_size": PAGE_SIZE,
        "num_blocks": setup.slots * (-(-longest // PAGE_SIZE) + 1),
        "max_batch_tokens": setup.max_batch_tokens,
        "max_requests_per_batch": setup.slots,
        "safety_margin": 0.0,
        "allow_block_sharing": False,
        "auto_switch_to_flash": False,
    }
    config = ContinuousBatchingConfig(**{name: value for name, value in sizes.items() if name in known})
    with network.continuous_batching_context_manager(
        generation_config=_greedy(eos_token_id=-1), continuous_batching_config=config
    ) as manager:
        try:
            yield lambda work: _drain(manager, work)
        except BaseException:
            manager.stop(hard_stop=True)  # otherwise the manager generates what is left before it ends
            raise


def _drain(manager: Any, work: Workload) -> Outputs:
    """Submits all requests and waits for all outputs."""
    pending = {
        manager.add_request(prompt, max_new_tokens=length): index
        for index, (prompt, length) in enumerate(zip(work.prompts, work.output_lengths, strict=True))
    }
    outputs: list[list[int]] = [[] for _ in pending]
    while pending:
        result = manager.get_result(timeout=1)
        if result is None:
            if not manager.is_running():
                raise RuntimeError("its thread ended early")
        elif result.error is not None:
            raise RuntimeError(result.error)
        elif result.is_finished():
            outputs[pending.pop(result.request_id)] = list(result.generated_tokens)
    return outputs


def _paged_sdpa() -> str:
    """The name of sdpa over pages in this version of transformers; older ones call it just `sdpa`."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return "paged|sdpa" if "paged|sdpa" in ALL_ATTENTION_FUNCTIONS.valid_keys() else "sdpa"


def _set_attention(network: Any, name: str, fallback: str) -> None:
    """Sets an attention backend, or the fallback: some families support only eager attention."""
    try:
        network.set_attn_implementation(name)
    except ValueError:
        network.set_attn_implementation(fallback)


def _greedy(**options: Any) -> Any:
    from transformers import GenerationConfig

    return GenerationConfig(do_sample=False, **options)


PEERS: dict[str, Callable[[PeerSetup], AbstractContextManager[Generate]]] = {
    "transformers-generate": static_batches,
    "transformers-cb": continuous,
}


def run_peer(name: str, setup: PeerSetup) -> tuple[Outputs, PeerMetrics]:
    """Does the work with one of PEERS after a warm-up, and leaves the model as it was. Raises PeerError."""
    work = setup.work
    try:
        with _borrowed(setup.network), PEERS[name](setup) as generate:
            generate(work.warmup)
            start = setup.now()
            outputs = generate(work)
            elapsed = setup.now() - start
            attention = setup.network.config._attn_implementation
    except Exception as error:  # a peer that does not work here is a line of the table, not the end of the bench
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        sentence = (lines or [type(error).__name__])[0].partition(". ")[0].rstrip(".")
        raise PeerError(f"not available here: {sentence}.") from error
    for index, (tokens, wanted) in enumerate(zip(outputs, work.output_lengths, strict=True)):
        if len(tokens) != wanted:
            raise PeerError(f"not comparable: request {index} got {len(tokens)} tokens and wanted {wanted}.")
    return outputs, PeerMetrics(elapsed, work.output_tokens / max(elapsed, 1e-9), attention)


@contextmanager
def _borrowed(network: Any) -> Iterator[None]:
    """Takes away a model's own sampling defaults, which would be mixed into what peers ask for, and restores them.

    Restores its attention backend too. Silences transformers' logger meanwhile; errors are still raised.
    """
    from transformers import GenerationConfig

    attention, defaults = network.config._attn_implementation, network.generation_config
    logger = logging.getLogger("ContinuousBatchingLogger")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    network.generation_config = GenerationConfig()
    try:
        yield
    finally:
        logger.setLevel(level)
        network.generation_config = defaults
        network.set_attn_implementation(attention)
