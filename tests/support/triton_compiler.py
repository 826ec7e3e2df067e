"""Compiles Triton kernels for a GPU on a machine without one: what the interpreter accepts, the compiler may not.

`TRITON_INTERPRET=0 python -m tests.support.triton_compiler` launches what steps launch on a stub driver, and prints the
kernels' names.
"""

from __future__ import annotations

import torch

from tests.support.triton_driver import stub_driver


def attention() -> None:
    """A mixed step, plain, and with all that attention can be asked for."""
    from cbatch.engine.attention.triton import TritonAttention
    from cbatch.engine.kernels.triton.attention_metadata import build_metadata

    backend = TritonAttention(torch.device("cpu"))
    slots, tables = torch.zeros(11, dtype=torch.int64), torch.zeros(2, 64, dtype=torch.int32)
    metadata = build_metadata(slots, tables, [0, 999], [10, 1000], backend.decode.split)
    for dim, window, softcap in ((32, None, None), (48, 100, 30.0)):
        keys = torch.zeros(4, 2, 16, dim, dtype=torch.bfloat16)
        new, query = torch.zeros(11, 2, dim, dtype=torch.bfloat16), torch.zeros(11, 6, dim, dtype=torch.bfloat16)
        sinks = None if window is None else torch.zeros(6)
        backend.store_kv(keys, keys, new, new, metadata)
        backend.attend(query, keys, keys, metadata, scale=0.1, window=window, softcap=softcap, sinks=sinks)


def decoder() -> None:
    """A decode step of a model with norms of heads, and of one of odd sizes."""
    from tests.support.cuda_model import batch_of, kv_cache_of, logits_of, model_of, network_of
    from tests.support.tiny_models import make_prompts

    for name in ("qwen3, norms", "odd sizes"):
        model = model_of(network_of(name), torch.bfloat16)
        logits_of(model, batch_of(make_prompts([1])), kv_cache_of(model))


def sampling() -> None:
    """Rows of logits as the head leaves them, and as a model of transformers does."""
    from cbatch.engine.sampling.sampler import PARAM_WORDS, Sampler

    for dtype in (torch.float32, torch.bfloat16):
        Sampler(torch.device("cpu"), kernel=True).sample_on_device(
            torch.zeros(3, 1000, dtype=dtype), torch.zeros(3, PARAM_WORDS, dtype=torch.int32)
        )


if __name__ == "__main__":
    with stub_driver(compiles=True) as stub:
        attention()
        decoder()
        sampling()
    print(*stub.launches)
