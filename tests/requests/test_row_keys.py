"""Keys: the same for the same result, different for another one, and never shared by two rows."""

from __future__ import annotations

from cbatch.base.params import SamplingParams
from cbatch.base.request import Request
from cbatch.requests.row_keys import KEY_LENGTH, KeyMaker, canonical_params, explain_difference

MAKER = KeyMaker("model")


def key(name: str = "a", prompt: str = "hi", seed: int = 0) -> str:
    return MAKER.for_row(Request(id=name, text=prompt), canonical_params(SamplingParams()), seed)


def test_rows_do_not_share_a_key() -> None:
    """Guards ids that derive from keys, for rows with one seed: in 32 bits, two of these would collide."""
    keys = {MAKER.for_row(Request(id=f"{n}", text="hi"), b"", 42) for n in range(100_000)}
    assert len(keys) == 100_000 and all(len(key) == KEY_LENGTH for key in list(keys)[:5])
    assert len({key[:16] for key in keys}) == 1


def test_default_parameters_are_left_out() -> None:
    """Guards existing keys against new parameters; the seed goes into the key separately."""
    assert (
        canonical_params(SamplingParams()) == b"{}" == canonical_params(SamplingParams(seed=3, top_k=-1, temperature=0))
    )
    assert (
        canonical_params(SamplingParams(temperature=1))
        == canonical_params(SamplingParams(temperature=1.0))
        == b'{"temperature": 1.0}'
    )
    assert canonical_params(SamplingParams(allowed_token_ids=[7, 5, 7])) == b'{"allowed_token_ids": [5, 7]}'


def test_what_is_known_of_a_run_is_named() -> None:
    """Guards the message against naming all that may have changed, if it is known what has."""
    origin = {
        "model": {"dtype": "float32", "weights": "#1"},
        "sampling": {"--seed": "0"},
        "input": {"--system": "none"},
    }
    other = KeyMaker("other").for_row(Request(id="a", text="hi"), canonical_params(SamplingParams()), 0)
    then = {**origin, "model": {"dtype": "bfloat16", "weights": "#2"}}
    assert explain_difference(key(), other, origin, then) == "different dtype (bfloat16 then, float32 now), weights"
    then = {**origin, "sampling": {}}
    assert explain_difference(key(), key(seed=1), origin, then) == "different --seed (none then, 0 now)"
    assert "other parameters in the line" in explain_difference(key(), key(seed=1), origin, origin)
    assert "another id, prompt" in explain_difference(key(), key(prompt="ho"), origin, origin)
    assert "another model" in explain_difference(key(), other, origin, origin)
    assert "another seed" in explain_difference(key(), key(seed=1), origin, {})


def test_what_differs_is_named() -> None:
    """Guards the message that says why rows are not kept."""
    other = KeyMaker("other").for_row(Request(id="a", text="hi"), canonical_params(SamplingParams()), 0)
    refused = MAKER.for_invalid_row(b"{")
    assert "another model" in explain_difference(key(), other)
    assert (
        "another input"
        in explain_difference(key(), key(prompt="ho"))
        == explain_difference(refused, MAKER.for_invalid_row(b"["))
    )
    assert "a version of cbatch that read a column differently" in explain_difference(key(), key(prompt="ho"))
    assert "another seed" in explain_difference(key(), key(seed=1))
    assert "was refused" in explain_difference(key(), refused) == explain_difference(refused, key())
