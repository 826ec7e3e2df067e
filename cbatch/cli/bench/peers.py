"""The same work with the same weights in memory, done by transformers itself, which is imported when it is to work."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from cbatch.base.errors import first_line
from cbatch.cli.bench.workload import Outputs, Workload
from cbatch.runtime.transfer import synchronize

PAGE_SIZE = 256
"""Tokens in a page of transformers' own paged cache: its default."""

Generate = Callable[[Workload], Outputs]
"""Does work greedily, to the wanted lengths."""


class PeerError(Exception):
    """A peer did not get through; the message says why in a sentence."""


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

    def set_attention(self, name: str, fallback: str) -> None:
        """Sets an attention backend, or the fallback: some families support only eager attention."""
        try:
            self.network.set_attn_implementation(name)
        except ValueError:
            self.network.set_attn_implementation(fallback)

    def now(self) -> float:
        """Seconds, once the device has finished its work."""
        synchronize(self.network.device)
        return time.perf_counter()


@contextmanager
def static_batches(setup: PeerSetup) -> Iterator[Generate]:
    """`generate` on batches of `slots` requests in order, padded on the left, until the longest output is complete.

    Outputs are cut to their wanted lengths afterwards.
    """
    from transformers import GenerationConfig

    setup.set_attention("sdpa", "eager")
    device = setup.network.device

    def generate(work: Workload) -> Outputs:
        outputs: Outputs = []
        for batch in work.batches(setup.slots):
            lengths = [work.output_lengths[index] for index in batch]
            rows = [torch.tensor(work.prompts[index]) for index in batch]
            ids = pad_sequence(rows, batch_first=True, padding_side="left")
            mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side="left")
            # Without an end token no request ends early.
            greedy = GenerationConfig(do_sample=False, max_new_tokens=max(lengths), pad_token_id=0)
            full = setup.network.generate(ids.to(device), attention_mask=mask.to(device), generation_config=greedy)
            made = full[:, ids.shape[1] :].tolist()
            outputs += [tokens[:length] for tokens, length in zip(made, lengths, strict=True)]
        return outputs

    yield generate


@contextmanager
def continuous(setup: PeerSetup, attention: str = "") -> Iterator[Generate]:
    """transformers' own continuous batching, with the same limits on requests and tokens in a step as ours.

    attention: its name in transformers; sdpa by default

    Its cache is large enough for all slots and, as in our runs, shares no prefixes.
    """
    from transformers import ContinuousBatchingConfig, GenerationConfig
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    work = setup.work
    sdpa = "paged|sdpa" if "paged|sdpa" in ALL_ATTENTION_FUNCTIONS.valid_keys() else "sdpa"  # the former up to 5.22
    setup.set_attention(attention or sdpa, "paged|eager")
    longest = max(len(prompt) + length for prompt, length in zip(work.prompts, work.output_lengths, strict=True))
    known = {entry.name for entry in fields(ContinuousBatchingConfig)}  # 5.17 has other names than later versions
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
    greedy = GenerationConfig(do_sample=False, eos_token_id=-1)
    with setup.network.continuous_batching_context_manager(
        generation_config=greedy, continuous_batching_config=config
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


PEERS: dict[str, Callable[[PeerSetup], AbstractContextManager[Generate]]] = {
    "transformers-generate": static_batches,
    "transformers-cb": continuous,
}


def run_peer(name: str, setup: PeerSetup) -> tuple[Outputs, dict[str, Any]]:
    """Does the work with one of PEERS after a warm-up, and leaves the model as it was. Raises PeerError.

    Returns the outputs and the figures of `--json`; `attention` is transformers' name of the backend it used.
    Meanwhile the model has no sampling defaults, which would be mixed in, and transformers' logger is silent.
    """
    from transformers import GenerationConfig

    work, network = setup.work, setup.network
    attention, defaults = network.config._attn_implementation, network.generation_config
    logger = logging.getLogger("ContinuousBatchingLogger")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    network.generation_config = GenerationConfig()
    try:
        with PEERS[name](setup) as generate:
            generate(work.warmup)
            start = setup.now()
            outputs = generate(work)
            elapsed = setup.now() - start
            used = network.config._attn_implementation
    except Exception as error:  # a peer that does not work here is a line of the table, not the end of the bench
        sentence = first_line(error).partition(". ")[0].rstrip(".")
        raise PeerError(f"not available here: {sentence}.") from error
    finally:
        logger.setLevel(level)
        network.generation_config = defaults
        network.set_attn_implementation(attention)
    for index, (tokens, wanted) in enumerate(zip(outputs, work.output_lengths, strict=True)):
        if len(tokens) != wanted:
            raise PeerError(f"not comparable: request {index} got {len(tokens)} tokens and wanted {wanted}.")
    speed = work.output_tokens / max(elapsed, 1e-9)
    return outputs, {"elapsed_s": elapsed, "output_tokens_per_s": speed, "attention": used}
