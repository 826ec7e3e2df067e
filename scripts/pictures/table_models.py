"""Runs every causal architecture of the installed transformers in all scenarios, and writes docs/models.md.

python -m scripts.pictures.table_models [MODEL_TYPE ...]     with names it prints their lines and writes nothing
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers

from cbatch.engine.stepping_engine import SteppingEngine
from tests.support.architectures import CLASSES, NOT_BUILT_HERE
from tests.support.model_checks import (
    EQUAL,
    NOT_BUILT,
    REFUSED,
    CheckResult,
    check_model,
    compare_all_scenarios,
    table_row,
    unseen_faults,
)

DOCUMENT = Path(__file__).parents[2] / "docs" / "models.md"
INTRODUCTION = """# Models

Which causal language models of `transformers` run here. Written by `python -m scripts.pictures.table_models` with
transformers {version}, torch {torch}: {counts}.

A model needs no entry in a list: any causal language model of transformers runs whose layers go through its
`AttentionInterface`, or ask one of its caches for [recurrent states](recurrent.md). When the engine loads a model, it
looks at what the model does: it records what the layers store and may see, and compares small ragged steps with the
model's own forward (two sequences side by side in two chunks each, and one of them beside the last positions of the
context). A model that would be wrong here is refused, with the reason. Only safetensors weights and
[GGUF files](gguf.md) are read, and no code that comes with a model is run. All of that happens on the device of the
run, in the dtype of the run.

Types with a **fast path** have a [declaration](families.md): a CPU and an NVIDIA [GPU](gpu.md) compute them with
kernels of their own, and transformers is not imported. On a CPU that is about three times as fast as by the modules of
transformers; on a GPU it has not been measured. A model whose `config.json` says something that its declaration does
not know, or whose files hold other weights than it expects, is computed by transformers; `-v` and `cbatch info` say
why.

## What is checked before a model is loaded

A folder that means harm, or is merely damaged, is refused in one sentence, with exit code 2, before anything is made of
it:

- **Files.** What is no regular file (a pipe, a device, a socket, also by a link) is not opened. Files of settings have
  64 MiB and 100 levels of nesting at most, tokenizers 512 MiB. JSON that is wrong is named with its line and column.
- **Settings.** Those that models share, in `config.json` and the parts of it, in `generation_config.json` and in the
  `adapter_config.json` of [LoRA](lora.md), have a type and a range (`cbatch/model/config.py`): 1024 layers,
  2²⁰ columns, 2²⁴ tokens in the vocabulary, 2³¹ - 1 positions. null counts as absent, and unknown settings are left to
  the family of the model.
- **Weights.** On the fast path, the shapes of all tensors must be those that the settings ask for. For transformers,
  what the settings ask for may be twice what the files hold, since tied weights are stored once. Anything larger would
  be made at random.
- **Memory.** Weights are counted before they are made. If they need more than is free on the device, or within the
  limit of the container, the sentence has both figures. Packed weights that are mapped from a
  [file](cpu.md) are not counted.

## The table

For this table, a tiny random model of each type is built. Every window, chunk and threshold in it is shorter than the
prompts, and its weights are such that the first token of a prompt decides the output.

- **equal**: in float32 on a CPU, greedy output equals that of `generate`, token for token: with whole prompts, in
  chunks of 7 tokens, preempted, with shared prefixes, and while other requests come and go. At temperature 1, outputs
  in chunks of 7 tokens equal those of whole prompts. Faults planted in the engine (positions shifted by one, a block or
  a state of a neighbour, a window one token too wide, a state that is stale or lacks a token) are noticed in every one
  of them that has such a thing.
- **refused**: loading the model ends with this sentence.
- **not built**: no tiny model of this type could be made.

The result is that of the modules of transformers. On the fast path, each type was compared in the same way, and faults
were planted in every operation. Llama 4 runs there only.

Models of text with pictures or sound are run on text. Encoders (`bert` and its kin) are built as decoders; if
`is_decoder` is false, they are refused.

Two settings shorten the context, unless the model takes the fast path. A model with `longrope` runs up to
`original_max_position_embeddings`, where the encoding of all positions changes; one with chunked attention, up to the
end of its first chunk.

On the fast path, a request for which `longrope` matters is decided once: if its prompt and `max_tokens` together may go
past `original_max_position_embeddings`, it has the long factors from its first token on, else the short ones. Without
`max_tokens` it may use the whole context, so it has the long ones. Requests of both kinds run side by side and share no
cached prefixes.

The test suite checks every line of this table.

| model type | class | fast path | result | reason |
|---|---|---|---|---|
"""


def scenarios_and_faults(network: Any, engine: SteppingEngine) -> list[str]:
    return compare_all_scenarios(network, engine) + unseen_faults(network, engine)


def main() -> int:
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    results: dict[str, CheckResult] = {}
    for model_type in sys.argv[1:] or CLASSES:
        result = results[model_type] = check_model(model_type, scenarios_and_faults)
        if result.status == NOT_BUILT and model_type not in NOT_BUILT_HERE:
            result = results[model_type] = CheckResult("unknown", result.reason)
        print(f"{result.status:11} {model_type} {result.reason}", flush=True)
    if sys.argv[1:]:
        return 0
    counts = Counter(result.status for result in results.values())
    faulty = counts.keys() - {EQUAL, REFUSED, NOT_BUILT}
    if faulty:
        print(f"Not written: some are {', '.join(sorted(faulty))}.", file=sys.stderr)
        return 1
    told = ", ".join(f"{counts[word]} {word}" for word in (EQUAL, REFUSED, NOT_BUILT))
    head = INTRODUCTION.format(version=transformers.__version__, torch=torch.__version__, counts=told)
    rows = "".join(table_row(model_type, result) + "\n" for model_type, result in sorted(results.items()))
    DOCUMENT.write_text(head + rows, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
