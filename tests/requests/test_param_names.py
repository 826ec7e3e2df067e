"""Names of OpenAI, vLLM, ollama and transformers: understood as ours or refused, and never carried away silently."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cbatch.base.errors import RequestError
from cbatch.base.params import SamplingParams
from cbatch.base.request import Request
from cbatch.base.spelling import one_edit_apart, shortened
from cbatch.batch.lines import Line, RowOptions, parse_line
from cbatch.requests import param_names
from cbatch.requests.param_names import COLUMN_NAMES, READERS, REFUSED, REST_OF_CONTEXT, is_param, own_params
from cbatch.requests.rows import set_defaults

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
UNREAD = ("guided_decoding_backend", "do_sample", "truncation_side")
"""Names that stay columns: they only agree with the others."""
TOLD = {"chat_template_kwargs", "add_generation_prompt", "continue_final_message"}
OF_SCHEMA = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}

VLLM_PARAMS = (
    "n best_of presence_penalty frequency_penalty repetition_penalty temperature top_p top_k min_p seed stop "
    "stop_token_ids ignore_eos max_tokens min_tokens logprobs prompt_logprobs prompt_logprob_token_ids "
    "prompt_logprob_start logprob_token_ids flat_logprobs detokenize skip_special_tokens spaces_between_special_tokens "
    "include_stop_str_in_output output_kind structured_outputs guided_decoding logit_bias allowed_token_ids extra_args "
    "bad_words skip_reading_prefix_cache thinking_token_budget repetition_detection routed_experts_prompt_start "
    "trace_decode_token_ids logits_processors truncate_prompt_tokens use_beam_search length_penalty early_stopping "
    "beam_width watermarking prompt_embeds multi_modal_data multi_modal_uuids lora_request prompt_adapter_request"
).split()
VLLM_FIELDS = (
    "reasoning_effort include_reasoning truncation_side echo add_generation_prompt continue_final_message "
    "add_special_tokens documents chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs guided_json "
    "guided_regex guided_choice guided_grammar structural_tag guided_whitespace_pattern return_tokens_as_token_ids "
    "return_token_ids return_token_offsets return_prompt_text return_mm_kwargs cache_salt kv_transfer_params "
    "ec_transfer_params vllm_xargs max_completion_tokens top_logprobs response_format stream"
).split()
OPENAI_FIELDS = (
    "audio function_call functions modalities moderation verbosity web_search_options suffix reasoning instructions "
    "truncation input extra_body"
).split()
OLLAMA_FIELDS = "format options think template context images keep_alive truncate shift".split()
OLLAMA_OPTIONS = (
    "num_keep seed num_predict top_k top_p min_p typical_p tfs_z repeat_last_n temperature repeat_penalty "
    "presence_penalty frequency_penalty mirostat mirostat_tau mirostat_eta penalize_newline stop numa num_ctx "
    "num_batch num_gpu main_gpu low_vram f16_kv logits_all vocab_only use_mmap use_mlock num_thread"
).split()
TRANSFORMERS_PARAMS = (
    "max_length max_new_tokens min_length min_new_tokens early_stopping max_time stop_strings do_sample num_beams "
    "num_beam_groups diversity_penalty penalty_alpha dola_layers guidance_scale temperature top_k top_p min_p "
    "typical_p epsilon_cutoff eta_cutoff repetition_penalty encoder_repetition_penalty length_penalty "
    "no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids force_words_ids exponential_decay_length_penalty "
    "suppress_tokens begin_suppress_tokens forced_bos_token_id forced_eos_token_id sequence_bias token_healing "
    "watermarking_config num_return_sequences eos_token_id"
).split()


def parse(fields: dict[str, Any], **options: bool) -> Request:
    return parse_line(Line(0, json.dumps({"prompt": "a", **fields}).encode()), RowOptions(**options))


def message(fields: dict[str, Any]) -> str:
    error = parse(fields).error
    assert error is not None and error.code == "invalid_row"
    return str(error)


@pytest.mark.parametrize(
    "name",
    [*VLLM_PARAMS, *VLLM_FIELDS, *OPENAI_FIELDS, *OLLAMA_FIELDS, *OLLAMA_OPTIONS, *TRANSFORMERS_PARAMS],
)
def test_every_name_of_theirs_is_known(name: str) -> None:
    """Guards against a parameter of vLLM, OpenAI, ollama or transformers that would pass as a column of a row."""
    assert name in param_names.UNDERSTOOD or name in REFUSED
    assert not {name} & param_names.IGNORED


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"max_completion_tokens": 5}, {"max_tokens": 5}),
        ({"max_new_tokens": 5, "max_tokens": 5}, {"max_tokens": 5}),
        ({"num_predict": 5}, {"max_tokens": 5}),
        ({"min_new_tokens": 2, "num_return_sequences": 2}, {"min_tokens": 2, "n": 2}),
        ({"stop_strings": ["a", "b"]}, {"stop": ["a", "b"]}),
        ({"extra_body": {"top_k": 5, "guided_choice": ["a"]}}, {"top_k": 5, "choice": ["a"]}),
        ({"num_predict": -1}, {"max_tokens": REST_OF_CONTEXT}),
        ({"repeat_penalty": 1.5}, {"repetition_penalty": 1.5}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
        ({"guided_grammar": 'start: "a"'}, {"grammar": 'start: "a"'}),
        ({"guided_json": SCHEMA}, {"response_format": OF_SCHEMA}),
        ({"guided_json": json.dumps(SCHEMA)}, {"response_format": OF_SCHEMA}),
        ({"guided_json": None, "guided_decoding_backend": "auto"}, {}),
        ({"structured_outputs": {"json": SCHEMA}}, {"response_format": OF_SCHEMA}),
        ({"structured_outputs": {"json_object": True, "regex": None}}, {"response_format": {"type": "json_object"}}),
        ({"structured_outputs": {"regex": "a", "disable_any_whitespace": False}}, {"regex": "a"}),
        ({"guided_decoding": {"choice": ["a"], "backend": "xgrammar"}}, {"choice": ["a"]}),
        ({"format": "json"}, {"response_format": {"type": "json_object"}}),
        ({"format": SCHEMA}, {"response_format": OF_SCHEMA}),
        (
            {"options": {"num_predict": 3, "temperature": 0.5, "top_k": 2}},
            {"max_tokens": 3, "temperature": 0.5, "top_k": 2},
        ),
        ({"options": {"stop": ["x"], "seed": 1, "mirostat": 0, "mirostat_tau": 5.0}}, {"stop": ["x"], "seed": 1}),
        ({"logprobs": True, "top_logprobs": 3}, {"logprobs": 3}),
        ({"logprobs": True}, {"logprobs": 0}),
        ({"logprobs": 2, "top_logprobs": 2}, {"logprobs": 2}),
        ({"do_sample": True, "temperature": 0.5}, {"temperature": 0.5}),
        ({"do_sample": False, "temperature": 0}, {"temperature": 0}),
        ({"chat_template_kwargs": {"a": 1}}, {"chat_template_kwargs": {"a": 1}}),
        ({"enable_thinking": False}, {"chat_template_kwargs": {"enable_thinking": False}}),
        (
            {"chat_template_kwargs": {"a": [1], "enable_thinking": True}, "think": True},
            {"chat_template_kwargs": {"a": [1], "enable_thinking": True}},
        ),
        ({"think": "low"}, {"reasoning_effort": "low"}),
        ({"reasoning": {"effort": "low", "summary": None}}, {"reasoning_effort": "low"}),
        ({"thinking_token_budget": 7}, {"thinking_budget": 7}),
        ({"thinking_token_budget": -1}, {}),
        ({"truncate_prompt_tokens": 7, "truncation_side": "left"}, {"truncate_prompt": "left:7"}),
        ({"truncate_prompt_tokens": -1}, {"truncate_prompt": "left"}),
        ({"truncation_side": "right"}, {}),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 7}},
            {"thinking_budget": 7, "chat_template_kwargs": {"enable_thinking": True}},
        ),
        ({"thinking": {"type": "disabled"}}, {"chat_template_kwargs": {"enable_thinking": False}}),
        ({"extra_body": {"chat_template_kwargs": {"a": 1}}}, {"chat_template_kwargs": {"a": 1}}),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none"}),
        ({"add_generation_prompt": False}, {"add_generation_prompt": False}),
        (
            {"continue_final_message": True, "add_generation_prompt": False},
            {"continue_final_message": True, "add_generation_prompt": False},
        ),
    ],
)
def test_other_names_are_understood(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    """Guards names of theirs, also those for chat templates, in a row and from Python, and that values are valid."""
    row = parse(theirs)
    assert row.error is None and row.given | row.given_template == ours and not row.given.keys() & TOLD
    assert row.extra == {name: theirs[name] for name in UNREAD if name in theirs}
    assert own_params({name: value for name, value in theirs.items() if name not in row.extra}) == (
        row.given,
        row.given_template,
    )
    SamplingParams().merged(row.given)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_is_not_available_says_so(name: str) -> None:
    """Guards each refusal, with advice, from Python, in a body and in a row; and what asks for nothing, as files do."""
    others = {"mirostat": 2} if name.startswith("mirostat_") else {}
    asked = {"template": "{{ .Prompt }}", "add_special_tokens": "x"}.get(name, {"stream": True}.get(name, [{}]))
    assert "--" not in REFUSED[name] or "in Python" in REFUSED[name]
    with pytest.raises(RequestError, match=f"^{name} is not available: ") as caught:
        own_params({name: asked, **others})
    assert len(str(caught.value)) < 150 and not str(caught.value).endswith(".")
    call = {"custom_id": "c", "url": "/v1/chat/completions"}
    body = {"messages": [{"role": "user", "content": "a"}], name: asked, **others}
    refused = parse_line(Line(0, json.dumps(call | {"body": body}).encode())).error
    assert refused is not None and f"{name} is not available" in str(refused)
    if name not in COLUMN_NAMES:
        assert f"{name} is not available" in message({name: asked, **others})
        assert parse({name: asked}, allow_unknown=True).extra == {name: asked}
    for nothing in (None, *param_names.NOTHING[name]):
        assert own_params({name: nothing}) == ({}, {})
        row = parse({name: nothing})
        assert row.error is None and row.given == {} and row.extra == {name: nothing}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_tokens": 3, "num_predict": 4}, "num_predict is 4, but another name of it is 3"),
        ({"guided_json": SCHEMA, "response_format": {"type": "json_object"}}, "another name of it is"),
        ({"enable_thinking": True, "think": False}, "think sets enable_thinking to False, but it is True elsewhere"),
        ({"truncate_prompt_tokens": 5, "truncation_side": "right"}, "truncation_side is not available"),
        ({"enable_thinking": 1}, "enable_thinking must be true or false, not a number"),
        ({"reasoning_effort": "very"}, "reasoning_effort must be one of none"),
        ({"think": "low", "reasoning_effort": "high"}, "reasoning_effort is 'high', but another name of it is 'low'"),
        ({"thinking": {"type": "adaptive"}}, "thinking must be an object of type, which is enabled or disabled"),
        ({"thinking": {"type": "enabled", "budget": 5}}, "and budget_tokens"),
        ({"thinking_budget": 5, "thinking_token_budget": 6}, "another name of it is 5"),
        ({"chat_template_kwargs": 1, "think": True}, "chat_template_kwargs must be an object"),
        ({"guided_json": "{"}, "guided_json is not valid JSON"),
        ({"guided_json": 3}, "guided_json must be a JSON schema, not a number"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag is not available"),
        ({"structured_outputs": {"whitespace_pattern": "x"}}, "structured_outputs.whitespace_pattern"),
        ({"options": {"num_ctx": 4096}}, "num_ctx is not available"),
        ({"options": {"repeat_penalty": 1.1, "repeat_last_n": 64}}, "repeat_last_n is not available"),
        ({"top_logprobs": 2}, "top_logprobs needs logprobs"),
        ({"logprobs": 2, "top_logprobs": 3}, "give one of them"),
        ({"best_of": 3, "n": 2}, "n says how many"),
        ({"reasoning": {"effort": "low", "summary": "auto"}}, "reasoning.summary is not available"),
        ({"reasoning": {"effort": "very"}}, "reasoning.effort must be one of none"),
        ({"extra_body": [1]}, "extra_body must be an object of parameters"),
        ({"extra_body": {"num_ctx": 3}}, "num_ctx is not available"),
        ({"do_sample": True}, "give temperature"),
        ({"do_sample": False, "temperature": 0.5}, "give temperature"),
    ],
)
def test_contradictions_and_wrong_values_are_named(fields: dict[str, Any], expected: str) -> None:
    """Guards against taking one of two values, and against values that would be ignored."""
    assert expected in message(fields) and message(fields).startswith("line 1: ")


MISSPELT = (
    "stopp=stop stopStrings=stop stop_sequences=stop temp=temperature Temperature=temperature temprature=temperature "
    "maxTokens=max_tokens max-tokens=max_tokens maxOutputTokens=max_output_tokens n_predict=max_tokens topP=top_p "
    "top-k=top_k minP=min_p numPredict=num_predict chatTemplateKwargs=chat_template_kwargs "
    "enable_thinkng=enable_thinking"
).split()


@pytest.mark.parametrize(("name", "meant"), [*(pair.split("=") for pair in MISSPELT), ("Stop", "stop")])
def test_misspelt_names_are_refused_with_a_hint(name: str, meant: str) -> None:
    """Guards names that nobody has, in a row, in a body, in ollama's options and from Python; Stop may be a column."""
    value = 1 if name != "Stop" else ["END"]
    error = parse({name: value}).error
    assert error is not None and error.code == "unknown_parameter" and f"did you mean {meant!r}" in str(error)
    assert parse({name: value}, allow_unknown=True).extra == {name: value}
    body = {"prompt": "a", name: value}
    error = parse_line(Line(0, json.dumps({"url": "/v1/completions", "body": body}).encode())).error
    assert error is not None and error.code == "unknown_parameter"
    for params in {name: value}, {"options": {"top_k": 3, name: value}}:
        with pytest.raises(RequestError, match="There is no sampling parameter") as caught:
            own_params(params)
        assert caught.value.code == "unknown_parameter"
    for other in "enable_thinking", "label", "tools":
        assert "line 1: There is no" in str(parse({"options": {"top_k": 3, other: True}}).error)


@pytest.mark.parametrize("name", param_names.ROW_FIELDS)
def test_fields_of_a_row_are_no_parameters(name: str) -> None:
    """Guards Python's params and --param: they say where a field belongs instead."""
    with pytest.raises(RequestError, match=f"no sampling parameter '{name}': it is a field of a row") as caught:
        own_params({name: 1})
    assert caught.value.code == "unknown_parameter"
    assert ("engine.chat" in str(caught.value)) == ("tool" in name or name == "system")


def test_params_of_a_call_come_under_those_of_a_row() -> None:
    """Guards a prompt's own parameters, constraints and template variables against those of `params`."""
    row = parse({"choice": ["a"], "think": True, "temperature": 0.5})
    params = {"guided_regex": "b", "temperature": 1, "num_predict": 3}
    set_defaults(
        row, {**params, "chat_template_kwargs": {"a": 1, "enable_thinking": False}, "continue_final_message": True}
    )
    assert row.error is None and row.given == {"choice": ["a"], "temperature": 0.5, "max_tokens": 3}
    assert row.given_template == {
        "chat_template_kwargs": {"a": 1, "enable_thinking": True},
        "continue_final_message": True,
    }
    set_defaults(row, {"num_ctx": 3})
    assert row.error is not None and "num_ctx is not available" in str(row.error)


@pytest.mark.parametrize(
    "columns",
    [
        {"options": ["A", "B"]},
        {"options": {"A": "Paris", "B": "Rome"}},
        {"options": {"stop": "left", "go": "right"}},
        {"format": "markdown", "template": "Q: {q}", "context": "Some text.", "think": "Let me see"},
        {"format": {"width": 3}, "context": ["a", "b"], "documents": ["a"], "images": 3, "stream": "live"},
        {"model": "m", "user": "u", "metadata": {"a": 1}, "store": True, "request_id": "r", "prediction": "yes"},
        {"suffix": None, "audio": "a.wav", "verbosity": 3, "functions": "sin", "modalities": [], "moderation": "ok"},
        {"step": 1, "shop": 2, "need": 3, "Stop": 4, "ID": 5, "thing": 6, "option": 7, "systems": 8, "formats": 9},
        {"reasoning": "Because.", "instructions": "Be brief.", "input": "Text", "truncation": 3, "shift": "night"},
        {"reasoning": {"steps": 3}, "input": ["a"], "truncate": "yes"},
        {"seeds": 1, "label": 2, "url": "u", "method": "m"},
    ],
)
def test_columns_stay_columns(columns: dict[str, Any]) -> None:
    """Guards data sets whose columns have everyday names that are also parameters, or resemble short ones."""
    row = parse(columns)
    assert row.error is None and row.extra == columns and row.given == {} and row.given_template == {}


@settings(max_examples=300, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(sorted([*READERS, *REFUSED, *param_names.UNDERSTOOD])),
        st.recursive(
            st.none() | st.booleans() | st.integers(-3, 3) | st.floats(-2, 2) | st.text(max_size=3),
            lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
            max_leaves=4,
        ),
        max_size=4,
    )
)
def test_no_value_breaks_a_row_or_is_lost(fields: dict[str, Any]) -> None:
    """Guards every reader against values of any type; and each parameter is understood, refused or a column."""
    row = parse(fields)
    assert row.error is None or row.error.code in ("invalid_row", "unknown_parameter")
    for name, value in fields.items():
        is_column = name in REFUSED or not is_param(name, value)
        assert (name in row.extra) == is_column or row.error is not None


@settings(deadline=None)
@given(st.text("ab_", max_size=6), st.text("ab_", max_size=6))
def test_names_one_edit_apart_share_a_shortened_one(one: str, other: str) -> None:
    """Guards misspelt parameters: the look into a set that comes before the comparison misses none."""
    if one_edit_apart(one, other):
        assert not shortened(one).isdisjoint(shortened(other))


def test_many_columns_and_long_names_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the time that columns take: 100,000 held up a run for half a minute; and memory against long names."""
    compared: list[str] = []
    monkeypatch.setattr(param_names, "similar_name", lambda name, known: compared.append(name))
    row = parse({"x" * 100_000: 1, **{f"column{n}": 0 for n in range(5000)}})
    assert row.error is None and len(row.extra) == 5001 and len(compared) < 10
    assert max(map(len, param_names.UNDERSTOOD)) < param_names.MAX_NAME > max(map(len, compared), default=0)
