"""A chat in which the model may call a function: runs what it calls, and lets it answer with the results.

python examples/chat_tools.py [MODEL]

Needs a model whose chat template takes tools, such as Qwen/Qwen3-0.6B. That of the bundled demo model takes none, so
the call is refused.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

from cbatch import Completion, Engine, RequestError, SamplingParams

TEMPERATURES = {"Paris": 18, "Oslo": 7}


def temperature(city: str) -> str:
    """The temperature in a city right now."""
    return f"{TEMPERATURES[city]} degrees"


FUNCTIONS: dict[str, Callable[..., str]] = {"temperature": temperature}
TOOLS = list(FUNCTIONS.values())
params = SamplingParams(max_tokens=500)


def run_call(name: str, arguments: str) -> str:
    """The result of a call. The model may have got the name or the arguments wrong; then it is told."""
    try:
        return FUNCTIONS[name](**json.loads(arguments))
    except (KeyError, TypeError, ValueError) as error:
        return f"The call failed: {error!r}"


def answer(engine: Engine, question: str) -> Completion:
    """The model's answer, once it calls no more functions or has done so three times in a row."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    for _ in range(3):
        completion = engine.chat(messages, params, tools=TOOLS)
        if not completion.tool_calls:
            return completion
        messages.append(completion.to_message())
        for call in completion.tool_calls:
            result = run_call(call.name, call.arguments)
            print(f"{call} gives {result}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return engine.chat(messages, params, tools=TOOLS, tool_choice="none")


model = sys.argv[1] if len(sys.argv) > 1 else None  # None is the bundled demo model
with Engine(model) as shared_engine:
    try:
        done = answer(shared_engine, "How warm is it in Paris?").raise_for_error()
        print(done.text)
    except RequestError as error:
        print(f"No answer: {error}")
