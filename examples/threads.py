"""Several threads share one engine: some wait for a whole answer, one reads its answer as it comes.

python examples/threads.py [MODEL]
"""

import sys
from concurrent.futures import ThreadPoolExecutor

from cbatch import Engine, SamplingParams

QUESTIONS = ["What is the capital of France?", "What is 2 plus 3?", "Spell the word lamp."]
params = SamplingParams(max_tokens=40)


def answer(engine: Engine, question: str) -> str:
    return engine.generate(question, params).text


def read_story(engine: Engine) -> str:
    return "|".join(event.text for event in engine.stream("Tell me a short story about Mia in the forest.", params))


model = sys.argv[1] if len(sys.argv) > 1 else None  # None is the bundled demo model
with Engine(model) as shared_engine, ThreadPoolExecutor() as pool:
    story = pool.submit(read_story, shared_engine)
    answers = pool.map(lambda question: answer(shared_engine, question), QUESTIONS)
    for question, text in zip(QUESTIONS, answers, strict=True):
        print(f"> {question}\n{text}")
    print(story.result())
