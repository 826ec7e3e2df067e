"""OpenVINO GenAI's continuous batching, on a model that optimum-cli exports."""
# mypy: disable-error-code="import-not-found, import-untyped"

from __future__ import annotations

import importlib.util
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scripts.benchmarks.peers.work import Peer, PeerJob, PeerResult, PeerWork, make_once

WEIGHTS = {"bfloat16": "fp16", "float32": "fp32"}
"""In files; where they are computed with in bfloat16, they are converted when they are loaded."""

INT4 = ["--sym", "--group-size", "128", "--group-size-fallback", "adjust", "--ratio", "1.0"]
"""All matrices but the embedding and the head, which get int8."""

LIMIT = "ONEDNN_MAX_CPU_ISA"
"""The environment variable that hides instructions from it. It says that it can bfloat16 all the same, and fails."""

HINTS = {"bfloat16": "bf16", "float32": "f32"}
"""The types it computes in: float32 where the processor has no instructions for bfloat16, which it refuses then."""


def prepare(job: PeerJob) -> None:
    def export(target: Path) -> None:
        if importlib.util.find_spec("optimum.intel") is None:
            raise ImportError("optimum-intel exports the model.")
        command = [sys.executable, "-m", "optimum.commands.optimum_cli", "export", "openvino", "-m", str(job.model)]
        command += ["--task", "text-generation-with-past"]
        command += ["--weight-format", job.weights or WEIGHTS[job.dtype], *(INT4 if job.weights == "int4" else [])]
        subprocess.run([*command, "--disable-convert-tokenizer", str(target)], check=True)

    make_once(job.converted("openvino"), export)


@contextmanager
def session(job: PeerJob) -> Iterator[Callable[[PeerWork], PeerResult]]:
    import openvino
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.max_num_batched_tokens = job.max_batch_tokens
    scheduler.max_num_seqs = job.max_seqs
    scheduler.cache_size = job.cache_gib
    scheduler.dynamic_split_fuse = True
    scheduler.enable_prefix_caching = job.prefix_cache
    can = openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    hidden = not any(name in os.environ.get(LIMIT, "BF16").upper() for name in ("BF16", "FP16", "AMX"))
    hint = HINTS[job.dtype] if HINTS[job.dtype].upper() in can and not hidden else "f32"
    settings = {"INFERENCE_PRECISION_HINT": hint, "INFERENCE_NUM_THREADS": job.threads}
    pipeline = openvino_genai.ContinuousBatchingPipeline(job.converted("openvino"), scheduler, "CPU", settings)
    ids = itertools.count()
    yield lambda work: generate(pipeline, work, ids)


def generate(pipeline: Any, work: PeerWork, ids: Iterator[int]) -> PeerResult:
    import numpy as np
    import openvino

    handles = []
    for prompt, length in zip(work.prompts, work.lengths, strict=True):
        tokens = openvino.Tensor(np.array([prompt], dtype=np.int64))
        handles.append(pipeline.add_request(next(ids), tokens, greedy(length)))
    steps = 0
    while pipeline.has_non_finished_requests():
        pipeline.step()
        steps += 1
    return PeerResult([list(handle.read_all()[0].generated_ids) for handle in handles], steps)


def greedy(length: int) -> Any:
    import openvino_genai

    config = openvino_genai.GenerationConfig()
    config.do_sample = False
    config.max_new_tokens = length
    config.ignore_eos = True
    config.set_eos_token_id(0)  # there has to be one, even where it is ignored
    return config


PEER = Peer(
    "OpenVINO GenAI",
    ("openvino_genai", "openvino"),
    "pip install torch openvino-genai optimum-intel nncf",
    session,
    prepare,
)
