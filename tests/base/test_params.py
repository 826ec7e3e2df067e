"""Values sampling parameters take and hold, for programs and type checkers: mypy reads this module, too.

A wrong type has a comment that tells mypy to expect an error; mypy reports the comment if there is none.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import FrozenInstanceError, replace
from types import MappingProxyType
from typing import Any, assert_type, get_type_hints

import pytest

from cbatch import RequestError, SamplingParams
from cbatch.base.params import PARAMS
from cbatch.sample.sampler import FILTERS


class Words(Sequence[str]):
    """A sequence that is neither a list nor a tuple."""

    def __getitem__(self, index: Any) -> Any:
        return ("a", "b")[index]

    def __len__(self) -> int:
        return 2


def test_one_value_or_a_sequence_becomes_a_tuple() -> None:
    """Guards code that writes lists, as everybody does, and code that reads tuples."""
    words: Sequence[str] = Words()
    for params in (SamplingParams(stop="a"), SamplingParams(stop=["a"]), SamplingParams(stop=("a",))):
        assert params.stop == ("a",) and params == SamplingParams(stop=["a"]) and {params} == {SamplingParams(stop="a")}
    assert SamplingParams(stop=words, bad_words=words, choice=words).choice == ("a", "b")
    assert SamplingParams(stop_token_ids=1).stop_token_ids == SamplingParams(stop_token_ids=[1]).stop_token_ids == (1,)
    assert SamplingParams(allowed_token_ids=range(3)).allowed_token_ids == (0, 1, 2)
    assert SamplingParams(bad_words=["x"], choice=["a", "b"]).bad_words == ("x",)
    assert_type(SamplingParams().stop, tuple[str, ...])
    assert_type(SamplingParams().bad_words, tuple[str, ...])
    assert_type(SamplingParams().stop_token_ids, tuple[int, ...])
    assert_type(SamplingParams().allowed_token_ids, tuple[int, ...] | None)
    assert_type(SamplingParams().choice, tuple[str, ...] | None)


def test_a_bias_is_a_mapping_or_pairs() -> None:
    """Guards the keys of JSON, which are strings, and mappings that are no dictionaries."""
    counts: dict[int, int] = {5: 1}
    frozen: Mapping[int, float] = MappingProxyType({5: 1.0})
    for params in (
        SamplingParams(logit_bias={5: 1.0}),
        SamplingParams(logit_bias={"5": 1}),
        SamplingParams(logit_bias=counts),
        SamplingParams(logit_bias=frozen),
        SamplingParams(logit_bias=[(5, 1.0)]),
    ):
        assert params.logit_bias == ((5, 1.0),)
    assert_type(SamplingParams().logit_bias, tuple[tuple[int, float], ...])


def test_a_response_format_is_kept_as_text() -> None:
    """Guards mappings, which have no hash, and one that JSON cannot hold."""
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    params = SamplingParams(response_format=schema)
    assert params == SamplingParams(response_format=MappingProxyType(schema)) and hash(params)
    assert params == SamplingParams(response_format=params.response_format)
    assert_type(params.response_format, str | None)
    with pytest.raises(RequestError, match=r"^response_format must be an object that can be written as JSON"):
        SamplingParams(response_format={"type": object()})


def test_a_copy_takes_what_the_constructor_takes() -> None:
    """Guards `replace` and `merged`, and that parameters do not change."""
    params = SamplingParams(stop="a", logit_bias={5: 1.0})
    assert replace(params, stop=["b"], max_tokens=3).stop == params.merged({"stop": "b"}).stop == ("b",)
    assert replace(params).logit_bias == params.logit_bias
    with pytest.raises(FrozenInstanceError):
        params.stop = ("b",)  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        params.n = 2  # type: ignore[misc]


def test_wrong_types_are_refused_in_both_ways() -> None:
    """Guards users with a type checker, who see an error at once, and those without one."""
    wrong: list[Callable[[], SamplingParams]] = [
        lambda: SamplingParams(stop=5),  # type: ignore[arg-type]
        lambda: SamplingParams(stop=[5]),  # type: ignore[list-item]
        lambda: SamplingParams(stop_token_ids="5"),  # type: ignore[arg-type]
        lambda: SamplingParams(stop_token_ids=b"5"),
        lambda: SamplingParams(bad_words={"a"}),  # type: ignore[arg-type]
        lambda: SamplingParams(allowed_token_ids=[1.0]),  # type: ignore[list-item]
        lambda: SamplingParams(choice="yes"),
        lambda: SamplingParams(choice=[]),
        lambda: SamplingParams(logit_bias={5: "1"}),  # type: ignore[arg-type]
        lambda: SamplingParams(logit_bias="5"),  # type: ignore[arg-type]
        lambda: SamplingParams(response_format=["json_object"]),  # type: ignore[arg-type]
        lambda: SamplingParams(temperature="1"),  # type: ignore[arg-type]
    ]
    for make in wrong:
        with pytest.raises(RequestError, match=" must be ") as caught:
            make()
        assert caught.value.code == "invalid_row"
    with pytest.raises(RequestError, match="no sampling parameter 'max_token'; did you mean 'max_tokens'"):
        SamplingParams(max_token=5)  # type: ignore[call-arg]


def test_names_of_other_libraries_are_understood() -> None:
    """Guards programs of transformers and OpenAI: the same parameter by another name is understood."""
    make: Any = SamplingParams
    assert make(max_new_tokens=5, repeat_penalty=1.5) == SamplingParams(max_tokens=5, repetition_penalty=1.5)
    with pytest.raises(RequestError, match="max_new_tokens is 5, but another name of it is 6"):
        make(max_tokens=6, max_new_tokens=5)
    with pytest.raises(RequestError, match="guided_json'; params as a mapping take the names of OpenAI"):
        make(guided_json={})


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("max_token", "; did you mean 'max_tokens'?"),
        ("stopp", "; did you mean 'stop'?"),
        ("tpo_p", "; did you mean 'top_p'?"),
        ("colour", "."),
        ("x" * 1000, "."),
        (5, "."),
    ],
)
def test_an_unknown_name_is_refused(name: Any, advice: str) -> None:
    """Guards a misspelt parameter, even one set to nothing: it would be lost, or be a TypeError without advice."""
    for value in (3, None):
        with pytest.raises(RequestError, match=r"^There is no sampling parameter ") as caught:
            SamplingParams().merged({"temperature": 0.5, name: value})
        assert caught.value.code == "unknown_parameter" and str(caught.value).endswith(advice)
        assert len(str(caught.value)) < 120 and ("did you mean" in str(caught.value)) == (advice != ".")


def test_the_types_can_be_read_at_run_time() -> None:
    """Guards tools that resolve the annotations of a dataclass."""
    assert get_type_hints(SamplingParams).keys() >= {"stop", "logit_bias", "max_tokens"}


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"max_tokens": 0}, "max_tokens must be a whole number of at least 1, not 0."),
        ({"max_tokens": -1, "echo": True}, "max_tokens must be a whole number of at least 0, not -1."),
        ({"max_tokens": 0, "echo": True, "n": 2}, "n must be 1 if max_tokens is 0: nothing is generated."),
        ({"top_p": 0}, "top_p must be a number above 0 and at most 1, not 0."),
        ({"choice": ["a"], "regex": "b"}, "regex and choice cannot be combined."),
    ],
)
def test_sentences(given: dict[str, Any], sentence: str) -> None:
    """Guards what users read, also where a parameter's range depends on others."""
    with pytest.raises(RequestError) as caught:
        SamplingParams(**given)
    assert str(caught.value) == sentence


def test_each_parameter_says_what_it_does() -> None:
    """Guards help and the documentation of the class, which are made of the fields; filters act where they say."""
    for name, info in PARAMS.items():
        assert info.help and f"    {name}: {info.help}" in str(SamplingParams.__doc__)
    assert {name for name, info in PARAMS.items() if info.filters} == {*FILTERS}


def test_response_format_takes_a_class_of_pydantic() -> None:
    """Guards the form that Python programs hold, and errors that say what was given."""
    pydantic = pytest.importorskip("pydantic", reason="pydantic is not installed")
    person = pydantic.create_model("Person", name=(str, ...))
    constraint = SamplingParams(response_format=person, pretty_json=True).constraint
    assert constraint is not None and constraint.pretty and json.loads(constraint.source)["required"] == ["name"]
    wrong_ones: list[tuple[Any, str]] = [(5, "not 5"), ({"type": "object", "properties": {}}, "guided_json")]
    for wrong, said in wrong_ones:
        with pytest.raises(RequestError, match=said):
            SamplingParams(response_format=wrong)
