"""Completes several prompts together: a text, a conversation, and one that asks for two answers.

python examples/generate.py [MODEL]
"""

import sys

from cbatch import Engine, EngineConfig, SamplingParams

PROMPTS = [
    "What is the capital of France?",
    {
        "messages": [
            {"role": "system", "content": "Answer in UPPER CASE."},
            {"role": "user", "content": "What is the opposite of hot?"},
        ]
    },
    "Tell me a short story about Mia in the forest.",
]

greedy = SamplingParams(max_tokens=60)
sampled = SamplingParams(max_tokens=60, temperature=0.8, n=2, seed=1)

model = sys.argv[1] if len(sys.argv) > 1 else None  # None is the bundled demo model
with Engine(EngineConfig(model=model)) as engine:
    for prompt, completion in zip(PROMPTS, engine.generate(PROMPTS, [greedy, greedy, sampled]), strict=True):
        question = prompt if isinstance(prompt, str) else prompt["messages"][-1]["content"]
        print(f"> {question}")
        for choice in completion.choices:
            print(f"{choice.text}  [{choice.finish_reason}, {len(choice.token_ids)} tokens]")
