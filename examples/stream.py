"""Prints two answers side by side, token by token, and cancels whatever is unfinished after 60 events.

python examples/stream.py [MODEL]
"""

import sys
from itertools import islice

from cbatch import Engine, EngineConfig, SamplingParams

PROMPTS = ["Count from 3 to 9.", "Tell me a short story about Mia in the forest."]

model = sys.argv[1] if len(sys.argv) > 1 else None  # None is the bundled demo model
with Engine(EngineConfig(model=model)) as engine:
    events = engine.stream(PROMPTS, SamplingParams(max_tokens=200))
    for index, event in islice(events, 60):
        print(f"{index}: {event.text!r}" + (f"  ({event.finish_reason})" if event.finish_reason else ""))
    events.close()  # leaving the stream early cancels its requests
    print("anything left to do:", engine.has_work)
