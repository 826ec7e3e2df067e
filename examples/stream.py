"""Prints two answers side by side, token by token, and leaves after 60 events.

python examples/stream.py [MODEL]
"""

import sys
from itertools import islice

from cbatch import Engine, SamplingParams

PROMPTS = ["Count from 3 to 9.", "Tell me a short story about Mia in the forest."]

model = sys.argv[1] if len(sys.argv) > 1 else None  # None is the bundled demo model
with Engine(model) as engine:
    with engine.stream(PROMPTS, SamplingParams(max_tokens=200)) as events:
        for event in islice(events, 60):
            print(f"{event.index}: {event.text!r}")
            if event.completion is not None:  # the last event of a prompt has its whole result
                print(f"{event.index} is finished: {event.completion.error or event.completion.text}")
    # Leaving the block has cancelled what was unfinished. The engine goes on.
    print(engine.generate("Spell the word lamp.", SamplingParams(max_tokens=20)).text)
