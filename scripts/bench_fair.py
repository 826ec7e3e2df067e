"""What a long prompt does to rows that decode, and to a short prompt behind it: `python scripts/bench_fair.py`.

Rows decode for a while; then a long prompt comes in, and short ones behind it. That is done without a target for steps,
with `auto` and with a fixed one, by turns, on a random model. `--tiny` tries the script itself.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent
sys.path[:0] = [str(ROOT), str(ROOT.parent)]

from fairness import Sizes, Target, run  # noqa: E402
from gpu.shapes import SHAPES, TINY, Config, RandomTensors, make_network  # noqa: E402
from peers.work import SHAPES as PEER_SHAPES  # noqa: E402

from cbatch.engine import LoadedModel, SamplingParams  # noqa: E402
from cbatch.engine.models.cpu import CpuModel  # noqa: E402

SMALL = {
    "num_hidden_layers": 6,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
"""A model for which a prompt of 32,768 tokens takes a minute or two on two cores."""

MODELS = SHAPES | {
    name: SHAPES["8B"] | shape | {"max_position_embeddings": 40960}
    for name, shape in {**PEER_SHAPES, "small": PEER_SHAPES["135m"] | SMALL}.items()
}


def load(config: Config, device: torch.device) -> LoadedModel:
    """A random model in bfloat16 on the fast path of the device."""
    tensors = RandomTensors(config, device, torch.bfloat16)
    if device.type == "cuda":
        from cbatch.engine.models.cuda import CudaModel  # which needs Triton

        decoder: Any = CudaModel(config, tensors, torch.bfloat16, device)
    else:
        decoder = CpuModel(config, tensors, torch.bfloat16)
    return LoadedModel(
        name="random",
        make_network=lambda: make_network(config, tensors, torch.bfloat16, device),
        tokenizer=None,
        defaults=SamplingParams(),
        eos_ids=frozenset(),
        decoder=decoder,
    )


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    add = parser.add_argument
    add("--model", choices=MODELS, default="135m", help="shape of the model (%(default)s)")
    add("--device", choices=["cpu", "cuda"], default="cpu", help="(%(default)s)")
    add("--rows", type=int, default=32, help="that decode (%(default)s)")
    add("--row-tokens", type=int, default=256, help="of the prompt of each (%(default)s)")
    add("--prompt-tokens", type=int, default=8000, help="of the long prompt (%(default)s)")
    add("--short-tokens", type=int, default=64, help="of the short ones (%(default)s)")
    add("--steady-steps", type=int, default=40, help="of each pause (%(default)s)")
    add("--budget", type=int, help="tokens of a step (512 on a CPU, 2048 on a GPU)")
    add("--fixed-ms", type=float, default=100.0, help="the fixed target (%(default)s)")
    add("--rounds", type=int, default=1, help="(%(default)s)")
    add("--tiny", action="store_true", help="small sizes, to try the script")
    add("--json", action="store_true", help="one JSON object on stdout")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("There is no CUDA device here.", file=sys.stderr)
        return 2
    device = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
    config: Config = MODELS[options.model]
    budget = options.budget or (512 if device.type == "cpu" else 2048)
    tokens = options.prompt_tokens, options.short_tokens
    sizes = Sizes(options.rows, options.row_tokens, *tokens, options.steady_steps, budget)
    if options.tiny:
        config, sizes = config | TINY, Sizes(2, 8, 200, 8, 8, 32)
    targets: list[Target] = [None, "auto", options.fixed_ms]
    found = run(load(config, device), sizes, targets, options.rounds, device)
    if options.json:
        data: dict[str, Any] = {
            "device": options.device,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
        }
        data |= {"model": options.model, "sizes": asdict(sizes), "found": [asdict(one) for one in found]}
        print(json.dumps(data, indent=1))
    else:
        shown = ", ".join(f"{name} {value:,}" for name, value in asdict(sizes).items())
        print(f"{options.model} on {options.device}, torch {torch.__version__}: {shown}", *found, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
