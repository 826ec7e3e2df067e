"""Several threads share one engine: each submits a question to an EngineThread and waits for its answer.

python examples/threads.py [MODEL]
"""

import queue
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

from cbatch import Engine, EngineConfig, SamplingParams, TokenEvent
from cbatch.engine import EngineThread

QUESTIONS = [
    "What is the capital of France?",
    "What is 2 plus 3?",
    "Spell the word lamp.",
    "What is the opposite of hot?",
]


def answer(engine: Engine, engine_thread: EngineThread, question: str) -> str:
    """Submits a question and reads its events. The engine's thread only puts them into a queue; text is made here."""
    params = SamplingParams(max_tokens=40)
    token_ids = engine.encode(question)
    detokenizer = engine.detokenizer(token_ids, params)
    events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
    engine_thread.submit(token_ids, params, events.put)
    text, is_finished = "", False
    while not is_finished:
        event = events.get()
        text += detokenizer.update(event)
        is_finished = event.finish_reason is not None
    return text


model = sys.argv[1] if len(sys.argv) > 1 else None  # None is the bundled demo model
with Engine(EngineConfig(model=model)) as engine, closing(EngineThread(engine)) as engine_thread:
    with ThreadPoolExecutor(len(QUESTIONS)) as pool:
        answers = pool.map(lambda question: answer(engine, engine_thread, question), QUESTIONS)
    for question, text in zip(QUESTIONS, answers, strict=True):
        print(f"> {question}\n{text}")
