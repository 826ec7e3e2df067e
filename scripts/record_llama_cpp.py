"""Writes tests/data/llama_cpp_outputs.json: what llama.cpp makes of the files of `scripts.real_model`, greedily.

PYTHON scripts/record_llama_cpp.py [CACHE]

PYTHON is one of an environment that has the package llama-cpp-python; nothing of cbatch is needed there.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

OUTPUTS = Path(__file__).parents[1] / "tests" / "data" / "llama_cpp_outputs.json"

CHAT, BASE = "smollm2-135m-instruct", "gemma-3-270m"

PROMPTS = (
    (CHAT, "What is the capital of Japan?", False),
    (CHAT, "Write one sentence about the sea.", False),
    (CHAT, "Name three fruits.", False),
    (CHAT, "Tell me a story about a lamp.", False),
    (CHAT, "Once upon a time", True),
    (BASE, "The capital of France is", True),
    (BASE, "Water boils at a temperature of", True),
    (BASE, "Die Hauptstadt von Deutschland ist", True),
    (BASE, "def fibonacci(n):\n    ", True),
)
"""A model, what it is asked, and whether that is plain text instead of a message."""

NUM_TOKENS = 32


def outputs(cache: Path, model: str) -> list[dict[str, Any]]:
    from llama_cpp import Llama

    llama = Llama(str(cache / model / f"{model}.gguf"), n_ctx=512, n_threads=2, verbose=False)
    found = []
    for text, raw in ((text, raw) for name, text, raw in PROMPTS if name == model):
        prompt_ids = llama.tokenize(text.encode(), add_bos=model == BASE)
        if not raw:
            prompt_ids = llama.tokenize(_message(text).encode(), add_bos=False, special=True)
        llama.reset()
        token_ids: list[int] = []
        for token in llama.generate(prompt_ids, temp=0.0, repeat_penalty=1.0):
            if token == llama.token_eos() or len(token_ids) == NUM_TOKENS:
                break
            token_ids.append(token)
        found.append(
            {
                "model": model,
                "prompt": text,
                "raw": raw,
                "prompt_ids": prompt_ids,
                "token_ids": token_ids,
                "text": llama.detokenize(token_ids, prev_tokens=prompt_ids).decode(),
            }
        )
    return found


def _message(text: str) -> str:
    """As SmolLM2's chat template has it."""
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    turns = (("system", system), ("user", text))
    return "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns) + "<|im_start|>assistant\n"


def main() -> None:
    cache = Path(*sys.argv[1:2]) if sys.argv[1:] else Path.home() / ".cache" / "cbatch-real-models"
    rows = [json.dumps(row, ensure_ascii=False) for model in (CHAT, BASE) for row in outputs(cache, model)]
    lines = ",\n".join(rows)
    OUTPUTS.write_text(f'{{"llama-cpp-python": "{version("llama-cpp-python")}",\n"outputs": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
