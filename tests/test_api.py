"""The Python API as its users meet it: names of other libraries, wrong arguments, what a notebook shows."""

from __future__ import annotations

import asyncio
import queue
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from cbatch.api import Engine
from cbatch.base.config import EngineConfig
from cbatch.base.errors import ConfigError, RequestError
from cbatch.base.outputs import ToolCall
from cbatch.base.params import SamplingParams
from cbatch.model.load_plan import DEMO_MODEL
from cbatch.requests.completion import Choice, Completion

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"temprature": 1}, "There is no sampling parameter 'temprature'; did you mean 'temperature'?"),
        ({"max_tokens": 0}, "max_tokens must be a whole number of at least 1, not 0."),
        ({"stream": True}, "stream is not available: a batch gives whole answers; from Python, engine.stream streams"),
        ({"params": {}, "sampling_params": {}}, "params and sampling_params are two names of one argument."),
        (
            {"system": "Be brief."},
            "'system': it is a field of a row, or an argument of engine.chat",
        ),
        ({"params": SamplingParams(), "enable_thinking": False}, "chat_template_kwargs is no field of SamplingParams"),
        ({"params": 5, "max_tokens": 3}, "params must be SamplingParams, a mapping, or a list of these, not int."),
    ],
)
def test_wrong_names_of_a_call_get_one_hint(engine: Engine, options: dict[str, Any], sentence: str) -> None:
    """Guards a TypeError of Python, which names no alternative, and a parameter that is dropped in silence."""
    with pytest.raises(RequestError, match=re.escape(sentence)):
        engine.generate("Hi", **options)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"n_gpu_layers": 30}, 'no option \'n_gpu_layers\': use device="cuda", or device_map="auto"'),
        ({"trust_remote_code": True}, "no option 'trust_remote_code': code that comes with a model is never run."),
        ({"max_seq": 3}, "no option 'max_seq': did you mean max_seqs?"),
        ({"cuda_graph": False}, "no option 'cuda_graph': did you mean cuda_graphs?"),
        ({"colour": 3}, "no option 'colour': help(cbatch.EngineConfig) describes those it has."),
        ({"max_seqs": 3, "max_num_seqs": 4}, "max_num_seqs is another name of max_seqs, which is given, too."),
        ({"model": "a", "model_path": "b"}, "model_path is another name of model, which is given, too."),
        ({"max_model_len": 10**6}, "max_model_len is 1,000,000; it can be at most the model's own, 1,024."),
        ({"chat_template": __file__.replace("test_api", "__init__")}, "/__init__.py' holds no chat template, which is"),
        ({"chat_template": "{% if %}"}, "The chat template is no Jinja template: line 1: Expected an expression"),
        ({"chat_template": "no/such.jinja"}, "Cannot read the chat template 'no/such.jinja': No such file"),
    ],
)
def test_wrong_options_get_one_hint(options: dict[str, Any], sentence: str) -> None:
    """Guards a list of thirty options where one sentence says what to write."""
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        Engine(**options)


def test_options_by_the_names_of_other_libraries(tmp_path: Path) -> None:
    """Guards programs of vLLM and llama-cpp-python: what exists here by another name works."""
    template = tmp_path / "tools.jinja"
    template.write_text("{% if tools %}T{{ tools[0].function.name }} {% endif %}{{ messages[0].content }}")
    given: Any = {"model_path": DEMO_MODEL, "n_ctx": 100, "max_num_seqs": 3, "trust_remote_code": False}
    made = Engine(**given, n_threads=1, dtype=torch.float32, chat_template=template)
    with made as engine, Engine(dtype="fp32", max_seqs=3) as other:
        assert engine.limits.max_model_len == engine.n_ctx == 100 and engine.limits.max_seqs == 3
        assert engine.config.threads == 1 and engine.config.dtype == other.config.dtype == "float32"
        assert engine.limits.cache_tokens < other.limits.cache_tokens
        cut = engine.generate("Tell me a story.", max_tokens=None, ignore_eos=True)
        assert cut.usage.total_tokens == 100 and cut.finish_reason == "length"
        long = engine.generate(["lamp " * 99])[0].error
        assert long is not None and "the model's context of 100 leaves no room" in str(long)
        assert engine.generate("Hi").key[:8] != other.generate("Hi").key[:8]
        tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
        ids = engine.encode({"messages": [{"role": "user", "content": "Hi"}], "tools": [tool]})
        assert engine.decode(ids) == "Tlook Hi" and engine.chat("Hi", tools=[tool], max_tokens=3).error is None


def test_a_chat_template_of_ones_own_changes_keys() -> None:
    """Guards resuming with another template: results of the first would be kept as if they were of the second."""
    texts = ("{{ messages[0].content }}", "{{ messages[0].content }}!")
    keys = []
    for text in (*texts, texts[0]):
        with Engine(chat_template=text) as engine:
            keys.append(engine.generate("Hi", max_tokens=1).key)
    assert keys[0] != keys[1] and keys[0] == keys[2]


WITH_TOOLS = (
    "{% if tools %}{{ tools | tojson }} {% endif %}{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}\n{% endfor %}"
)


def look_up(word: str, languages: list[str], most: int = 3) -> str:
    """Looks up a word."""
    return word


def strange(thing: object) -> None: ...


def test_results_and_functions_go_into_a_conversation() -> None:
    """Guards chats with tools: what the model said and called goes back as it is, and functions need no schema."""
    said = Choice(text="Let me see.", tool_calls=(ToolCall("look_up", '{"word": "lamp"}', "c1"),))
    answer = Completion(choices=[said])
    user, result = {"role": "user", "content": "Hi"}, {"role": "tool", "tool_call_id": "c1", "content": "light"}
    call = {"id": "c1", "type": "function", "function": {"name": "look_up", "arguments": '{"word": "lamp"}'}}
    message = {"role": "assistant", "content": "Let me see.", "tool_calls": [call]}
    assert answer.to_message() == said.to_message() == message
    function = {"name": "look_up", "description": "Looks up a word.", "parameters": {
        "type": "object",
        "properties": {
            "word": {"type": "string"},
            "languages": {"type": "array", "items": {"type": "string"}},
            "most": {"type": "integer"},
        },
        "required": ["word", "languages"],
        "additionalProperties": False,
    }}  # fmt: skip
    spelt = [{"type": "function", "function": function}]
    objects: Any = [message | {"tool_calls": said.tool_calls}]
    with Engine(chat_template=WITH_TOOLS) as engine:
        expected = engine.chat([user, message, result], max_tokens=3, tools=spelt)
        assert expected.error is None
        for what in (answer, said, *objects):
            assert engine.chat([user, what, result], max_tokens=3, tools=[look_up]) == expected
        row = {"messages": [user, answer, result], "tools": [look_up], "max_tokens": 3}
        assert engine.generate(row) == expected and list(engine.map([row])) == [expected]
        assert not [one.error for one in engine.map([[user, answer, result]], params={"max_tokens": 3}) if one.error]
        with pytest.raises(RequestError, match=r"this function cannot be a tool: .* has no JSON schema"):
            engine.chat("Hi", tools=[strange])
        failed = engine.chat([user, Completion(error=RequestError("template_error", "Too bad."))])
        assert str(failed.error) == "message 2 is a completion that failed: Too bad."


GOOD, BAD = "What is 2 plus 3?", {"prompt": "Hi", "max_tokens": -1}
WRONG = "max_tokens must be a whole number of at least 1, not -1."


def test_prompts_that_fail_are_hard_to_miss(engine: Engine, caplog: pytest.LogCaptureFixture, capsys: Any) -> None:
    """Guards loops over texts: an error row has an empty text, which looks like an answer."""
    results = engine.generate([GOOD, BAD, BAD], max_tokens=2, progress=True)
    said = f"2 of 3 prompts failed; the first: {WRONG}"
    assert [record.getMessage() for record in caplog.records] == [said] and "failed=2" in capsys.readouterr().err
    with pytest.raises(RequestError, match=re.escape(said)) as caught:
        results.raise_for_errors()
    assert caught.value.code == "invalid_row"
    assert results[:1] == engine.generate([GOOD], max_tokens=2).raise_for_errors() and len(caplog.records) == 1
    asyncio.run(engine.agenerate(BAD))
    mapped = list(engine.map([GOOD, BAD, 5], params={"max_tokens": 2}, progress=True))
    assert [record.getMessage() for record in caplog.records[1:]] == [
        f"1 of 1 prompt failed; the first: {WRONG}",
        f"2 of 3 rows failed; the first: item 1: {WRONG}",
    ]
    assert "failed=2" in capsys.readouterr().err and str(mapped[2].error).startswith("item 2: a prompt must be")


def test_arguments_that_are_wrong_for_all_raise_at_the_call(engine: Engine) -> None:
    """Guards asyncio: a stream that is made and never read says nothing, and so would its errors."""
    calls: list[Any] = [engine.generate, engine.stream, engine.astream, engine.chat]
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"params": {"max_tokens": -1}}, WRONG),
        ({"params": {"lora": "no"}}, "there is no LoRA adapter 'no'"),
        ({"seed": "x"}, "seed must be a whole number or None"),
        ({"params": {"chat_template_kwargs": {"messages": []}}}, "chat_template_kwargs cannot set messages"),
    ]
    for options, sentence in wrong:
        for call in calls:
            with pytest.raises(RequestError, match=re.escape(sentence)):
                call("Hi", **options)
    for fields, sentence in (
        ({"tool_choice": "some"}, "tool_choice must be auto"),
        ({"tools": [{}]}, "Tool 1 must be"),
    ):
        with pytest.raises(RequestError, match=sentence):
            engine.chat("Hi", **fields)


def test_everything_has_a_form_for_asyncio(engine: Engine) -> None:
    """Guards programs of asyncio: chats, scores and maps give there what they give elsewhere."""
    conversation, params = [{"role": "user", "content": GOOD}], {"max_tokens": 3}

    async def main() -> list[Any]:
        mapped = [one async for one in engine.amap([GOOD, "Hi"], params=params)]
        with pytest.raises(ConfigError, match="window must be"):
            engine.amap([GOOD], window=0)
        several = await engine.achat([conversation], params)
        return [await engine.achat(conversation, params), list(several), await engine.ascore(GOOD, " 5"), mapped]

    alone, mapped = engine.chat(conversation, params), list(engine.map([GOOD, "Hi"], **params))
    assert asyncio.run(main()) == [alone, [alone], engine.score(GOOD, " 5"), mapped]


def test_seed_none_takes_a_new_one_at_each_call(engine: Engine) -> None:
    """Guards loops that want several texts for a prompt: the default seed gives one text for ever."""
    texts = [engine.generate("Hi", seed=None, temperature=5, max_tokens=20).text for _ in range(3)]
    same = {engine.generate("Hi", temperature=5, max_tokens=20).text for _ in range(3)}
    assert len(set(texts)) == 3 and len(same) == 1
    assert "text for ever" in str(Engine.generate.__doc__)


def test_what_people_write_first_works(engine: Engine) -> None:
    """Guards first lines in a notebook: names of OpenAI's API in a chat, and lists where one prompt is meant."""
    messages = [{"role": "user", "content": "Hi"}]
    expected = engine.chat([{"role": "system", "content": "Be brief."}, *messages], max_tokens=3)
    assert engine.chat(messages=messages, system="Be brief.", max_tokens=3) == expected  # type: ignore[call-overload]
    with engine.map([GOOD, "Hi"], max_tokens=1) as results:
        assert next(results).usage.completion_tokens == 1
    with pytest.raises(RequestError, match="encode takes one prompt"):
        engine.encode(["a", "b"])  # type: ignore[arg-type]


def test_a_map_that_is_cancelled_ends(engine: Engine) -> None:
    """Guards a task whose rows come from a queue that stays empty: it would never end."""
    rows: queue.SimpleQueue[str] = queue.SimpleQueue()

    async def read() -> None:
        rows.put(GOOD)
        async for done in engine.amap(iter(rows.get, "end")):
            assert done.error is None
            taken.set()

    async def main() -> None:
        task = asyncio.create_task(read())
        await taken.wait()
        task.cancel()
        await asyncio.wait([task], timeout=10)
        assert task.cancelled()
        rows.put("end")

    taken = asyncio.Event()
    asyncio.run(main())


def test_results_say_what_is_inside(engine: Engine) -> None:
    """Guards shells and notebooks: the last value of a cell is shown, which must not be pages of tokens."""
    params = SamplingParams(max_tokens=40, logprobs=20, ignore_eos=True)
    results = engine.generate([GOOD] * 30, params)
    assert len(repr(results)) < 5000 and repr(results).endswith("… 20 more]") and len(repr(results[0].choices[0])) < 300
    assert repr(params) == "SamplingParams(max_tokens=40, ignore_eos=True, logprobs=20)"
    assert repr(EngineConfig(max_seqs=3, chat_template="{{" * 99)).startswith("EngineConfig(chat_template='{{{{")
    assert max(len(repr(one)) for one in (engine.loaded, engine.config, engine, engine.map([]))) < 300
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": GOOD}]
    ids = engine.encode(GOOD)
    prompts: list[Any] = [GOOD, ids, {"messages": messages}, {"messages": messages[1:]}]
    assert [one.prompt for one in engine.generate(prompts, max_tokens=1)] == [GOOD, ids, {"messages": messages}, GOOD]
    (done,) = engine.map([{"word": "lamp"}], template="Spell {word}.", params={"max_tokens": 9})
    assert done.prompt == "Spell lamp." and engine.decode(done.token_ids) == done.text


SHELL = """
import sys, time
started = time.perf_counter()
import cbatch
assert {"Engine", "Completion", "SamplingParams"} <= set(dir(cbatch)) and time.perf_counter() - started < 1
assert not {"torch", "numpy", "transformers"} & set(sys.modules)
import pydoc, rlcompleter
shown, completer = pydoc.plain(pydoc.render_doc(cbatch)), rlcompleter.Completer({"cbatch": cbatch})
overview = shown[: shown.index("PACKAGE CONTENTS")]
for name in cbatch.__all__:
    assert name == "__version__" or (name in overview and f"{name} = " in shown or f"class {name}" in shown), name
    assert name.startswith("_") or completer.complete(f"cbatch.{name}", 0).startswith(f"cbatch.{name}"), name
"""


@pytest.mark.slow
def test_a_shell_shows_the_public_names() -> None:
    """Guards `dir`, completion by tab and `help` of names that are imported late, and that the import stays quick."""
    subprocess.run([sys.executable, "-c", SHELL], check=True)


@pytest.mark.slow
def test_an_editable_install_is_found_by_type_checkers(tmp_path: Path) -> None:
    """Guards `pip install -e`: mypy and editors follow a path, and not the import hook of setuptools."""
    pytest.importorskip("setuptools", "77", reason="setuptools of at least 77 is not installed")
    for name in ("pyproject.toml", "README.md", "LICENSE", "cbatch/__init__.py", "cbatch/py.typed"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    build = "import setuptools.build_meta as build; build.build_editable('.')"
    subprocess.run([sys.executable, "-c", build], cwd=tmp_path, check=True, capture_output=True)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        (path,) = [name for name in wheel.namelist() if name.endswith(".pth")]
        assert Path(wheel.read(path).decode().strip()).samefile(tmp_path)
