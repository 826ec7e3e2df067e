"""Gets JSON that is valid for a schema, and one of a list of choices. Needs `pip install 'cbatch[structured]'`.

python examples/structured_output.py [MODEL]
"""

import json
import sys

from cbatch import Engine, SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {"capital": {"enum": ["London", "Paris", "Rome"]}, "letters": {"type": "integer"}},
    "required": ["capital", "letters"],
    "additionalProperties": False,
}
as_json = SamplingParams(
    max_tokens=60,
    response_format={"type": "json_schema", "json_schema": {"name": "capital", "schema": SCHEMA}},
)
one_of = SamplingParams(max_tokens=10, choice=["Paris", "London", "Rome"])

model = sys.argv[1] if len(sys.argv) > 1 else None  # None is the bundled demo model
with Engine(model) as engine:
    prompts = ["What is the capital of Italy? Answer as JSON.", "What is the capital of France?"]
    answer, choice = engine.generate(prompts, [as_json, one_of])
if answer.error is not None:
    sys.exit(str(answer.error))
print(json.loads(answer.text))
print(choice.text)
