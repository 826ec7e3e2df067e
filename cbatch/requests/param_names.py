"""Parameters of OpenAI, vLLM, ollama and transformers: understood as ours, or refused with what to do instead.

Their lists: https://platform.openai.com/docs/api-reference, `sampling_params.py` and the `protocol.py` files of vLLM,
`api/types.go` of ollama, and `GenerationConfig` of transformers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

from cbatch.base.errors import RequestError, invalid_row
from cbatch.base.params import ALIASES, EFFORTS, PARAM_NAMES
from cbatch.base.spelling import shortened, similar_name
from cbatch.base.strict_json import json_type

REST_OF_CONTEXT = 2**31 - 1
"""As `max_tokens`, which is cut off where the context ends."""

MAX_NAME = 64
"""A longer name resembles no parameter."""

TEMPLATE_FIELDS = ("chat_template_kwargs", "add_generation_prompt", "continue_final_message")
"""Fields of a request that tell its chat template something (see `TemplateOptions`)."""

TOOL_FIELDS = ("tools", "tool_choice", "parallel_tool_calls")
ROW_FIELDS = ("messages", "prompt", "prompt_token_ids", "id", "custom_id", "raw", "system", "priority", *TOOL_FIELDS)
"""Fields of a row that are no parameters."""

IGNORED = frozenset(
    "model user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_options "
    "prompt_cache_retention prediction stream_options stream_interval request_id session_id "
    "guided_decoding_backend".split()
)
"""Fields of a body that do not change an answer. In a row of cbatch's own form these are columns like any other."""

_REASONING_KEYS = frozenset(["effort", "summary", "generate_summary"])
_SCHEMA_KEYS = frozenset("type properties items enum const anyOf oneOf allOf $ref $defs".split())

_MEANT = {
    "temp": "temperature",
    "stop": "stop",
    "stopp": "stop",
    "stops": "stop",
    "stopsequence": "stop",
    "stopsequences": "stop",
    "stopstrings": "stop",
    "npredict": "max_tokens",
    "numreturnsequences": "n",
}
"""Names that are no parameter anywhere here, without underscores, and what is meant by them."""


_JSON_OBJECT = {"response_format": {"type": "json_object"}}

_REASONS: dict[str, dict[str, list[Any]]] = {
    "all outputs are returned; n says how many": {"best_of": [1]},
    "text is only generated at the end; put the suffix into the prompt": {"suffix": [""]},
    "it was replaced by tools": {"functions": [[]]},
    "it was replaced by tool_choice": {"function_call": ["none", "auto"]},
    "models write text only": {"modalities": [["text"]], "audio": []},
    "images stand in messages, as parts of their content": {
        "images": [[]], "multi_modal_data": [{}], "multi_modal_uuids": [{}],
        "return_mm_kwargs": [True, False], "media_io_kwargs": [{}], "mm_processor_kwargs": [{}],
    },
    "say in the messages how long an answer should be": {"verbosity": ["medium"]},
    "there is no search of the web": {"web_search_options": []},
    "nothing is moderated": {"moderation": []},
    "give them as system, or as a system message": {"instructions": []},
    "give messages or a prompt": {"input": []},
    "a batch gives whole answers; from Python, engine.stream streams": {"stream": [False]},
    "truncate_prompt says the side of a prompt that is dropped, such as left or right:2000": {
        "truncation": ["disabled"], "truncation_side": ["left"], "truncate": [False],
    },
    "there is no beam search; n gives several outputs": {
        "use_beam_search": [False], "early_stopping": [False], "beam_width": [1], "length_penalty": [1],
        "num_beams": [1], "num_beam_groups": [1], "diversity_penalty": [0],
    },
    "text ends before a stop string; stop_reason says which it was": {"include_stop_str_in_output": [False]},
    "text is as the tokenizer decodes it": {"spaces_between_special_tokens": [True]},
    "results always have text; a run adds token ids by --token-ids; in Python they are Completion.token_ids": {
        "detokenize": [True],
    },
    "a run adds token ids by --token-ids; in Python they are Completion.token_ids": {
        "return_token_ids": [False], "return_tokens_as_token_ids": [False],
    },
    "a prompt is text or token ids": {"prompt_embeds": []},
    "lora names one of the adapters that --lora NAME=PATH (in Python lora={name: path}) has loaded": {
        "lora_request": [],
    },
    "there are no prompt adapters; lora names a LoRA adapter": {"prompt_adapter_request": []},
    "there are logit_bias, bad_words and allowed_token_ids instead": {"logits_processors": [[]]},
    "logprobs gives the likeliest tokens; choice scores between a few texts": {"logprob_token_ids": [[]]},
    "prompt_logprobs gives the likeliest tokens": {"prompt_logprob_token_ids": [[]]},
    "prompt_logprobs covers the whole prompt": {"prompt_logprob_start": [0]},
    "log-probabilities have one form, OpenAI's": {"flat_logprobs": [False]},
    "offsets of tokens are not reported": {"return_token_offsets": [False]},
    "echo begins the text with the prompt": {"return_prompt_text": [False]},
    "the routing of experts is not reported": {"routed_experts_prompt_start": [0]},
    "reasoning stands in a field of its own; leave that out when you read it": {"include_reasoning": [True]},
    "repetition does not end an output; use frequency_penalty or max_tokens": {"repetition_detection": []},
    "outputs have no watermark": {"watermarking": [False], "watermarking_config": []},
    "tokens are sampled; prompt_logprobs scores given ones": {"trace_decode_token_ids": [[]]},
    "--no-prefix-cache (in Python prefix_cache=False) turns the cache off for all requests": {
        "skip_reading_prefix_cache": [False],
    },
    "nobody else's prompts are in the cache; --no-prefix-cache (in Python prefix_cache=False) turns it off": {
        "cache_salt": [],
    },
    "a request stays on one engine": {"kv_transfer_params": [{}], "ec_transfer_params": [{}]},
    "it is for plugins of vLLM": {"extra_args": [{}], "vllm_xargs": [{}]},
    "engine.stream gives what is new, engine.generate all of it": {"output_kind": []},
    "use grammar, or tools with tool_choice": {"structural_tag": []},
    "the blanks between parts of JSON are fixed; use grammar to choose them": {"guided_whitespace_pattern": []},
    "a template never comes from a row; --chat-template (in Python Engine(chat_template=...)) gives another": {
        "chat_template": [], "template": [""],
    },
    "chat templates get no documents; write them into a message": {"documents": [[]]},
    "special tokens come from the chat template or the tokenizer; prompt_token_ids says them exactly": {
        "add_special_tokens": [],
    },
    "the model stays loaded until the run or the program ends": {"keep_alive": []},
    "a context is never shifted: an output ends where it is full": {"shift": [False], "num_keep": [0]},
    "give the earlier turns as messages": {"context": [[]]},
    "--max-model-len (in Python Engine(max_model_len=...)) sets the context of all requests": {"num_ctx": []},
    "repetition_penalty counts all tokens of prompt and output": {"repeat_last_n": [-1]},
    "penalties count line breaks like all tokens": {"penalize_newline": [True]},
    "there is no mirostat sampling; use top_p or min_p": {"mirostat": [0], "mirostat_tau": [], "mirostat_eta": []},
    "there is no typical sampling; use top_p or min_p": {"typical_p": [1]},
    "there is no tail-free sampling; use top_p or min_p": {"tfs_z": [1]},
    "it configures ollama's runtime; the engine has options of its own (cbatch run --help; in Python EngineConfig)": {
        "num_batch": [], "num_gpu": [], "main_gpu": [], "num_thread": [], "numa": [], "low_vram": [], "f16_kv": [],
        "use_mmap": [], "use_mlock": [], "draft_num_predict": [], "vocab_only": [False],
    },
    "logprobs and prompt_logprobs report probabilities": {"logits_all": [False]},
    "there are no embeddings": {"embedding_only": [False]},
    "a temperature above 0 samples, and 0 does not: give temperature": {"do_sample": []},
    "max_tokens bounds the output, without the prompt": {"max_length": []},
    "min_tokens counts the output, without the prompt": {"min_length": [0]},
    "an output has no time limit; max_tokens bounds it": {"max_time": []},
    "there is no contrastive search": {"penalty_alpha": [0]},
    "layers are not contrasted": {"dola_layers": []},
    "there is no guidance by a second prompt": {"guidance_scale": [1]},
    "there is no sampling by cutoffs; use top_p or min_p": {"epsilon_cutoff": [0], "eta_cutoff": [0]},
    "use repetition_penalty or frequency_penalty": {
        "no_repeat_ngram_size": [0], "encoder_no_repeat_ngram_size": [0], "encoder_repetition_penalty": [1],
    },
    "use max_tokens, or logit_bias for the end token": {"exponential_decay_length_penalty": []},
    "stop_token_ids adds end tokens; ignore_eos ignores the model's own": {"eos_token_id": []},
    "end the prompt with that token": {"forced_bos_token_id": []},
    "an output that is cut off has no end token": {"forced_eos_token_id": []},
    "use logit_bias or bad_words": {"suppress_tokens": [[]]},
    "use logit_bias or bad_words, for the whole output": {"begin_suppress_tokens": [[]]},
    "bad_words takes them as texts": {"bad_words_ids": [[]]},
    "use regex or grammar": {"force_words_ids": [[]]},
    "logit_bias takes single tokens, and bad_words texts": {"sequence_bias": [{}, []]},
    "a prompt is used as it is tokenized": {"token_healing": [False]},
}  # fmt: skip
"""Parameters of others that have no meaning here, by what their error says: “NAME is not available: REASON”.

Beside each stand the values that ask for nothing, apart from null.
"""

REFUSED = {name: reason for reason, names in _REASONS.items() for name in names}
NOTHING = {name: values for names in _REASONS.values() for name, values in names.items()}

_MAY_PASS: dict[str, Callable[[Any, Mapping[str, Any]], bool]] = {
    "best_of": lambda value, fields: value == fields.get("n"),
    "add_special_tokens": lambda value, fields: value is ("messages" not in fields),
    "truncation_side": lambda value, fields: value == "right" and fields.get("truncate_prompt_tokens") is None,
    "mirostat_tau": lambda value, fields: not fields.get("mirostat"),
    "mirostat_eta": lambda value, fields: not fields.get("mirostat"),
    "do_sample": lambda value, fields: (
        isinstance(heat := fields.get("temperature"), int | float) and value is (heat > 0)
    ),
}
"""Whether a value asks for nothing beside all other fields."""


def _json_schema(name: str, value: Any) -> dict[str, Any]:
    """vLLM: a schema as an object, as JSON text, or as a class of pydantic."""
    if hasattr(value, "model_json_schema"):
        return {"response_format": value}
    schema = value
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError):
            raise invalid_row(f"{name} is not valid JSON") from None
    if not isinstance(schema, Mapping | bool):
        raise invalid_row(f"{name} must be a JSON schema, not {json_type(schema)}")
    schema = dict(schema) if isinstance(schema, Mapping) else schema
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}


def _structured_outputs(name: str, value: Any) -> dict[str, Any]:
    """vLLM: an object with one of `json`, `regex`, `choice`, `grammar` and `json_object`."""
    if not isinstance(value, Mapping):
        raise invalid_row(f"{name} must be an object, not {json_type(value)}")
    made: dict[str, Any] = {}
    for key, given in value.items():
        if given in (None, False) or str(key).lstrip("_").startswith(("backend", "disable_fallback")):
            continue
        if key in ("regex", "choice", "grammar"):
            made[key] = given
        elif key == "json":
            made |= _json_schema(f"{name}.json", given)
        elif key == "json_object":
            made |= _JSON_OBJECT
        else:
            raise invalid_row(f"{name}.{key} is not available: it has json, json_object, regex, choice and grammar")
    return made


def _object_of(known: Sequence[str], name: str, value: Any) -> dict[str, Any]:
    """Parameters by name: `options` of ollama, and `extra_body` of the `openai` package."""
    if not isinstance(value, Mapping):
        raise invalid_row(f"{name} must be an object of parameters, not {json_type(value)}")
    made = translate(value)
    check_known(made, known)
    return made


def _variable(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, bool):
        raise invalid_row(f"{name} must be true or false, not {json_type(value)}")
    return {"chat_template_kwargs": {"enable_thinking": value}}


def _effort(name: str, value: Any) -> dict[str, Any]:
    if value not in EFFORTS:
        raise invalid_row(f"{name} must be one of {', '.join(EFFORTS)}")
    return {"reasoning_effort": value}


def _thinking(name: str, value: Any) -> dict[str, Any]:
    """Anthropic: an object of `type` and `budget_tokens`."""
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind not in ("enabled", "disabled") or value.keys() - {"type", "budget_tokens"}:
        raise invalid_row(f"{name} must be an object of type, which is enabled or disabled, and budget_tokens")
    return {**_variable(name, kind == "enabled"), "thinking_budget": value.get("budget_tokens")}


def _reasoning(name: str, value: Any) -> dict[str, Any]:
    """OpenAI's Responses API: an object with `effort`."""
    if not isinstance(value, Mapping):
        raise invalid_row(f"{name} must be an object with effort, not {json_type(value)}")
    for key, given in value.items():
        if key != "effort" and given is not None:
            raise invalid_row(f"{name}.{key} is not available: it has effort")
    effort = value.get("effort")
    return {} if effort is None else _effort(f"{name}.effort", effort)


READERS: dict[str, Callable[[str, Any], dict[str, Any]]] = {
    "num_predict": lambda name, value: {"max_tokens": REST_OF_CONTEXT if value in (-1, -2) else value},
    "guided_json": _json_schema,
    "structured_outputs": _structured_outputs,
    "guided_decoding": _structured_outputs,
    "format": lambda name, value: _JSON_OBJECT if value == "json" else _json_schema(name, value),
    "options": partial(_object_of, PARAM_NAMES),
    "think": lambda name, value: (
        _effort(name, value) if isinstance(value, str) else _variable("enable_thinking", value)
    ),
    "enable_thinking": _variable,
    "reasoning_effort": _effort,
    "thinking": _thinking,
    "truncate_prompt_tokens": lambda name, value: {"truncate_prompt": "left" if value == -1 else f"left:{value}"},
    "thinking_token_budget": lambda name, value: {"thinking_budget": None if value == -1 else value},
    "reasoning": _reasoning,
    "extra_body": partial(_object_of, (*PARAM_NAMES, *TEMPLATE_FIELDS)),
}
"""Names whose values have another form than ours, and what makes sampling parameters and template fields of them."""

UNDERSTOOD = frozenset([*PARAM_NAMES, *ALIASES, *READERS, *TEMPLATE_FIELDS, "top_logprobs"])

_OPTION_NAMES = frozenset([*PARAM_NAMES, *ALIASES, *REFUSED, "num_predict"])
_CLEAR_OPTIONS = frozenset(name for name in _OPTION_NAMES if "_" in name) | {"temperature"}


def _is_list_of(kind: type, value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is kind for item in value)


COLUMN_NAMES: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys("truncate shift stream watermarking numa".split(), lambda v: isinstance(v, bool)),
    **dict.fromkeys(["suffix", "reasoning_effort"], lambda v: isinstance(v, str)),
    **dict.fromkeys(["moderation", "extra_args"], lambda v: isinstance(v, dict)),
    **dict.fromkeys(["documents", "functions"], partial(_is_list_of, dict)),
    "images": lambda v: (
        isinstance(v, list) and bool(v) and all(type(one) is str or (type(one) is dict and "bytes" in one) for one in v)
    ),
    "modalities": partial(_is_list_of, str),
    **dict.fromkeys(["instructions", "input"], lambda v: False),
    "context": partial(_is_list_of, int),
    "format": lambda v: v == "json" or (isinstance(v, dict) and not _SCHEMA_KEYS.isdisjoint(v)),
    "options": lambda v: (
        isinstance(v, dict) and bool(v) and (not _CLEAR_OPTIONS.isdisjoint(v) or _OPTION_NAMES.issuperset(v))
    ),
    "think": lambda v: isinstance(v, bool) or (isinstance(v, str) and v in EFFORTS),
    "reasoning": lambda v: isinstance(v, dict) and not _REASONING_KEYS.isdisjoint(v),
    "thinking": lambda v: isinstance(v, dict) and not v.keys().isdisjoint(["type", "budget_tokens"]),
    "truncation": lambda v: v in ("auto", "disabled"),
    "template": lambda v: isinstance(v, str) and "{{" in v,
    "audio": lambda v: isinstance(v, dict) and "voice" in v,
    "verbosity": lambda v: v in ("low", "medium", "high"),
}
"""Everyday words. In a row of cbatch's own form, such a key is a column unless its value has the parameter's form."""


def is_param(name: str, value: Any) -> bool:
    """Whether a key of a row is a parameter, ours or another program's, and not a column of the row's own."""
    looks_right = COLUMN_NAMES.get(name)
    return looks_right(value) if looks_right is not None else name in UNDERSTOOD or name in REFUSED


def translate(fields: Mapping[str, Any], *, carries_refused: bool = False) -> dict[str, Any]:
    """The same parameters by the names of `SamplingParams` and of TEMPLATE_FIELDS. Unknown names are kept.

    carries_refused: leave out what is not available here, instead of refusing it

    Raises RequestError for a parameter that is not available here, a value that cannot be read, and two names of one
    parameter with different values.
    """
    made: dict[str, Any] = {}
    for name, value in fields.items():
        if name in REFUSED:
            may_pass = name in _MAY_PASS and _MAY_PASS[name](value, fields)
            asks = value is not None and value not in NOTHING[name] and not may_pass
            if asks and not carries_refused:
                raise invalid_row(f"{name} is not available: {REFUSED[name]}")
        elif name in READERS or name in ALIASES:
            if value is not None:
                read = READERS.get(name)
                _add(made, name, {ALIASES[name]: value} if read is None else read(name, value))
        elif name == "logprobs":
            _add(made, name, {"logprobs": _logprobs(value, fields.get("top_logprobs"))})
        elif name != "top_logprobs":
            _add(made, name, {name: value})
    if fields.get("top_logprobs") and fields.get("logprobs") in (None, False):
        raise invalid_row("top_logprobs needs logprobs to be true")
    return {name: value for name, value in made.items() if value is not None or name not in UNDERSTOOD}


def own_params(params: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Sampling parameters by the names of `SamplingParams`, and fields for the chat template.

    Raises RequestError as `translate`, and for names that are no parameter.
    """
    made = translate(params)
    check_known(made, [*PARAM_NAMES, *TEMPLATE_FIELDS])
    template = {name: made.pop(name) for name in TEMPLATE_FIELDS if name in made}
    return made, template


def check_known(names: Iterable[Any], known: Sequence[str]) -> None:
    """Raises RequestError (`unknown_parameter`), with what may have been meant, for a name that is not known."""
    for name in names:
        if name not in known:
            raise RequestError(
                "unknown_parameter", f"There is no sampling parameter {repr(name)[:60]}{_advice(name, known)}"
            )


def _advice(name: Any, known: Sequence[str]) -> str:
    if name in (*TOOL_FIELDS, "system"):
        return ": it is a field of a row, or an argument of engine.chat."
    if name in ROW_FIELDS:
        return ": it is a field of a row."
    meant = intended_name(name, known) if isinstance(name, str) else None
    return f"; did you mean {meant!r}?" if meant else "."


def intended_name(name: str, known: Iterable[str]) -> str | None:
    """The parameter that a misspelt name was meant to be; None if it resembles none.

    That is: another writing of it (`maxTokens`, `top-p`), what other programs call it, or one edit away from it.

    known: names of parameters; those of less than five letters are not taken for misspelt ones
    """
    return _intended(name, frozenset(known)) if len(name) <= MAX_NAME else None


@lru_cache(maxsize=4096)
def _intended(name: str, known: frozenset[str]) -> str | None:
    """Rows have the same columns over and over."""
    plain = _plain(name)
    if plain in _MEANT:
        return _MEANT[plain]
    by_plain, long, near = _spellings(known)
    same = next((other for other in by_plain.get(plain, ()) if other != name), None)
    return same if same is not None or near.isdisjoint(shortened(name)) else similar_name(name, long)


@lru_cache(maxsize=16)
def _spellings(known: frozenset[str]) -> tuple[Mapping[str, Sequence[str]], Sequence[str], frozenset[str]]:
    """Names with an underscore by what `_plain` makes of them, those of five letters and more, and these shortened."""
    by_plain: dict[str, list[str]] = {}
    for name in sorted(known):
        if "_" in name:
            by_plain.setdefault(_plain(name), []).append(name)
    long = [name for name in known if len(name) >= 5]
    return by_plain, long, frozenset[str]().union(*map(shortened, long))


def _plain(name: str) -> str:
    return name.lower().translate({ord(character): None for character in "_- "})


def _add(made: dict[str, Any], name: str, given: Mapping[str, Any]) -> None:
    for meant, value in given.items():
        if value is None:
            made.setdefault(meant, None)
        elif meant == "chat_template_kwargs" and isinstance(value, Mapping) and made.get(meant) is not None:
            _add_variables(made, name, value)
        elif made.get(meant) is not None and made[meant] != value:
            raise invalid_row(f"{name} is {_shown(value)}, but another name of it is {_shown(made[meant])}")
        else:
            made[meant] = dict(value) if meant == "chat_template_kwargs" and isinstance(value, Mapping) else value


def _add_variables(made: dict[str, Any], name: str, variables: Mapping[str, Any]) -> None:
    before = made["chat_template_kwargs"]
    if not isinstance(before, Mapping):
        raise invalid_row("chat_template_kwargs must be an object of variables for the template")
    for variable, value in variables.items():
        if variable in before and before[variable] != value:
            raise invalid_row(
                f"{name} sets {variable} to {_shown(value)}, but it is {_shown(before[variable])} elsewhere"
            )
    made["chat_template_kwargs"] = {**before, **variables}


def _logprobs(value: Any, top: Any) -> Any:
    """OpenAI's chat has a boolean, and the number of alternatives in `top_logprobs`; elsewhere it is that number."""
    if value is True:
        return 0 if top is None else top
    if value not in (None, False) and top is not None and value != top:
        raise invalid_row(f"logprobs is {_shown(value)} and top_logprobs {_shown(top)}; give one of them")
    return value


def _shown(value: Any) -> str:
    return repr(value)[:60]
