"""Several threads share one engine: each submits a question to an EngineThread and waits for its answer.

python examples/threads.py [MODEL]
"""

import queue
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

from cbatch import Completion, Engine, EngineConfig, SamplingParams, TokenEvent
from cbatch.engine import EngineThread

QUESTIONS = [
    "What is the capital of France?",
    "What is 2 plus 3?",
    "Spell the word lamp.",
    "What is the opposite of hot?",
]


def answer(engine_thread: EngineThread, question: str) -> str:
    """Submits a question and waits for its last event. The engine's thread only puts the events into a queue."""
    events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
    engine_thread.submit(question, SamplingParams(max_tokens=40), events.put)
    completion = Completion()
    while completion.finish_reason is None:
        completion.take(events.get())
    return completion.text


model = sys.argv[1] if len(sys.argv) > 1 else None  # None is the bundled demo model
with Engine(EngineConfig(model=model)) as engine, closing(EngineThread(engine)) as engine_thread:
    with ThreadPoolExecutor(len(QUESTIONS)) as pool:
        answers = pool.map(lambda question: answer(engine_thread, question), QUESTIONS)
    for question, text in zip(QUESTIONS, answers, strict=True):
        print(f"> {question}\n{text}")
