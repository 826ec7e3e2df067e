"""Several tasks of asyncio share one engine: each prints its answer as it comes, and one stops reading early.

python examples/async_stream.py [MODEL]
"""

import asyncio
import sys

from cbatch import Engine, SamplingParams

QUESTIONS = {"Ann": "What is the capital of France?", "Ben": "Count from 3 to 9."}
params = SamplingParams(max_tokens=60)


async def ask(engine: Engine, name: str, question: str) -> str:
    answer = ""
    async for event in engine.astream(question, params):
        print(f"{name}: {event.text!r}")
        answer += event.text
    return answer


async def first_words(engine: Engine, question: str, count: int) -> str:
    """Reads a few events. Leaving the block cancels the rest."""
    words: list[str] = []
    async with engine.astream(question, params) as events:
        async for event in events:
            words.append(event.text)
            if len(words) == count:
                break
    return "".join(words)


async def main(engine: Engine) -> None:
    asked = [ask(engine, name, question) for name, question in QUESTIONS.items()]
    beginning = first_words(engine, "Tell me a short story about Mia in the forest.", 8)
    *answers, story = await asyncio.gather(*asked, beginning)
    for name, answer in zip(QUESTIONS, answers, strict=True):
        print(f"{name} got: {answer}")
    print(f"The story begins: {story}")
    done = await engine.agenerate("What is 2 plus 3?", params)  # the whole answer at once
    print(f"2 plus 3 is {done.text}")


model = sys.argv[1] if len(sys.argv) > 1 else None  # None is the bundled demo model
with Engine(model) as shared_engine:
    asyncio.run(main(shared_engine))
