"""Completes several prompts together: a text, a conversation, and one that asks for two answers.

python examples/generate.py [MODEL]
"""

import sys
from typing import Any

from cbatch import Engine, SamplingParams

PROMPTS: list[str | dict[str, Any]] = [
    "What is the capital of France?",
    {
        "messages": [
            {"role": "system", "content": "Answer in UPPER CASE."},
            {"role": "user", "content": "What is the opposite of hot?"},
        ]
    },
    {"prompt": "Tell me a short story about Mia in the forest.", "temperature": 0.8, "n": 2, "seed": 1},
]

model = sys.argv[1] if len(sys.argv) > 1 else None  # None is the bundled demo model
with Engine(model) as engine:
    completions = engine.generate(PROMPTS, SamplingParams(max_tokens=60))
for prompt, completion in zip(PROMPTS, completions, strict=True):
    print(f"> {prompt}")
    if completion.error is not None:  # a prompt that cannot be served does not stop the others
        print(completion.error)
        continue
    for choice in completion.choices:
        print(f"{choice.text}  [{choice.finish_reason}, {len(choice.token_ids)} tokens]")
