"""Whole runs: all requests at once through the engine, and through transformers' own continuous batching."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

import torch

from cbatch.cli.bench.peers import PEERS, PeerError, PeerSetup, generate_continuous, run_peer
from cbatch.cli.bench.roofline import DeviceRates, ModelCost, roofline_bound
from cbatch.cli.bench.workload import LengthDistribution, Workload, synthetic_workload
from cbatch.engine import Engine, EngineConfig, SamplingParams
from cbatch.engine.models.loader import LoadedModel


@dataclass(frozen=True, slots=True)
class Run:
    """Output tokens per second of a run, and the share of the floor's speed that it reached; 0 if there is no floor."""

    what: str
    tokens_per_s: float
    share: float = 0.0
    error: str = ""

    def __str__(self) -> str:
        if self.error:
            return f"{self.what}: {self.error}"
        share = f", {self.share:.0%} of the floor" if self.share else ""
        return f"{self.what}: {self.tokens_per_s:,.0f} output tokens/s{share}"


def work_of(requests: int, low: int, high: int, vocabulary: int, context: int) -> Workload:
    lengths = LengthDistribution(low, high, "uniform")
    return synthetic_workload(requests, lengths, lengths, vocabulary, context, seed=0)


def run_engine(
    what: str,
    loaded: LoadedModel,
    work: Workload,
    max_seqs: int,
    max_batch_tokens: int,
    rates: DeviceRates,
    graphs: bool,
) -> Run:
    config = EngineConfig(
        device=str(rates_device(loaded)),
        max_seqs=max_seqs,
        max_batch_tokens=max_batch_tokens,
        prefix_cache=False,
        cuda_graphs=graphs,
    )
    params = [SamplingParams(max_tokens=length, ignore_eos=True) for length in work.output_lengths]
    with Engine(config, loaded=loaded) as engine:
        engine.generate(work.prompts[:8], SamplingParams(max_tokens=8, ignore_eos=True))  # compiles the kernels
        engine.core.synchronize()
        start = time.perf_counter()
        outputs = engine.generate(work.prompts, params)
        elapsed = time.perf_counter() - start
        share = roofline_bound(work, ModelCost.of(engine), rates).reached(elapsed)
    tokens = sum(len(output.token_ids) for output in outputs)
    if tokens != work.output_tokens:
        return Run(what, 0.0, error=f"{tokens} tokens came out, and {work.output_tokens} were asked for")
    return Run(f"{what}, {engine.stats().num_steps} steps", tokens / elapsed, share)


def rates_device(loaded: LoadedModel) -> torch.device:
    return loaded.fast_model.device if loaded.fast_model is not None else torch.device("cpu")


def free(device: torch.device) -> None:
    """Gives memory that nobody holds any more back to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def runs(
    name: str,
    loaded: LoadedModel,
    work: Workload,
    peer_rows: int,
    max_seqs: int,
    max_batch_tokens: int,
    rates: DeviceRates,
) -> Iterator[Run]:
    """All of the work; then its first requests, and the same requests by transformers."""
    yield run_engine(f"{name}, {len(work.prompts)} requests", loaded, work, max_seqs, max_batch_tokens, rates, True)
    few = Workload(work.prompts[:peer_rows], work.output_lengths[:peer_rows], work.source)
    yield run_engine(f"{name}, {peer_rows} requests", loaded, few, max_seqs, max_batch_tokens, rates, True)
    yield run_engine(f"{name}, {peer_rows} requests, no graphs", loaded, few, max_seqs, max_batch_tokens, rates, False)
    ways = ["transformers-cb"]
    if find_spec("flash_attn"):
        PEERS["with flash attention"] = partial(generate_continuous, attention="paged|flash_attention_2")
        ways.append("with flash attention")
    for way in ways if peer_rows else ():
        what = f"{name}, {peer_rows} requests, transformers' continuous batching"
        try:
            peer = run_peer(way, PeerSetup(loaded.network, few, min(max_seqs, peer_rows), max_batch_tokens))
        except PeerError as error:
            yield Run(f"{what} ({way})", 0.0, error=str(error))
        else:
            yield Run(f"{what} ({peer.attention})", few.output_tokens / peer.elapsed_s)
