"""Parameters of OpenAI, vLLM, ollama and transformers: understood as ours, or refused with what to do instead.

Their lists: https://platform.openai.com/docs/api-reference, `sampling_params.py` and the `protocol.py` files of vLLM,
`api/types.go` of ollama, and `GenerationConfig` of transformers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

from cbatch.base.errors import RequestError
from cbatch.base.params import PARAM_NAMES
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

ALIASES = {
    "max_completion_tokens": "max_tokens",
    "max_new_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "num_return_sequences": "n",
    "stop_strings": "stop",
    "repeat_penalty": "repetition_penalty",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
"""Other names of sampling parameters, whose values mean the same."""

IGNORED = frozenset(
    "model user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_options "
    "prompt_cache_retention prediction stream_options stream_interval request_id session_id "
    "guided_decoding_backend".split()
)
"""Fields of a body that do not change an answer. In a row of cbatch's own form these are columns like any other."""

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""Values of `reasoning_effort`, and apart from the first of ollama's `think`."""

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


class Refusal(NamedTuple):
    """A parameter of others that has no meaning here.

    why:       a sentence that says what it is and what to do instead
    nothing:   values that ask for nothing, beside null
    may_pass:  tells from the value and all fields whether it asks for nothing
    """

    why: str
    nothing: tuple[Any, ...] = ()
    may_pass: Callable[[Any, Mapping[str, Any]], bool] = lambda value, fields: False


_JSON_OBJECT = {"response_format": {"type": "json_object"}}

_RUNTIME = (
    "it configures ollama's runtime; the engine has options of its own (cbatch run --help; in Python EngineConfig)"
)
_TOKEN_IDS = "a run adds token ids by --token-ids; in Python they are Completion.token_ids"
_CUT = "a prompt is never cut; shorten it before"
_ADAPTERS = "lora names one of the adapters that --lora NAME=PATH (in Python lora={name: path}) has loaded"
_REPEATS = "use repetition_penalty or frequency_penalty"
_CUTOFF = "there is no sampling by cutoffs; use top_p or min_p"
_BEAMS = "there is no beam search; n gives several outputs"
_MIROSTAT = "there is no mirostat sampling; use top_p or min_p"
_MEDIA = "models take text only"

REFUSED: dict[str, Refusal] = {
    # OpenAI
    "best_of": Refusal("all outputs are returned; n says how many", (1,), lambda v, fields: v == fields.get("n")),
    "suffix": Refusal("text is only generated at the end; put the suffix into the prompt", ("",)),
    "functions": Refusal("it was replaced by tools", ([],)),
    "function_call": Refusal("it was replaced by tool_choice", ("none", "auto")),
    "modalities": Refusal(_MEDIA, (["text"],)),
    "audio": Refusal(_MEDIA),
    "verbosity": Refusal("say in the messages how long an answer should be", ("medium",)),
    "web_search_options": Refusal("there is no search of the web"),
    "moderation": Refusal("nothing is moderated"),
    "instructions": Refusal("give them as system, or as a system message"),
    "input": Refusal("give messages or a prompt"),
    "truncation": Refusal(_CUT, ("disabled",)),
    "stream": Refusal("a batch gives whole answers; from Python, engine.stream streams", (False,)),
    # vLLM
    **dict.fromkeys(["use_beam_search", "early_stopping"], Refusal(_BEAMS, (False,))),
    **dict.fromkeys(["beam_width", "length_penalty", "num_beams", "num_beam_groups"], Refusal(_BEAMS, (1,))),
    "include_stop_str_in_output": Refusal("text ends before a stop string; stop_reason says which it was", (False,)),
    "spaces_between_special_tokens": Refusal("text is as the tokenizer decodes it", (True,)),
    "detokenize": Refusal(f"results always have text; {_TOKEN_IDS}", (True,)),
    "truncate_prompt_tokens": Refusal(_CUT),
    "prompt_embeds": Refusal("a prompt is text or token ids"),
    "multi_modal_data": Refusal(_MEDIA, ({},)),
    "multi_modal_uuids": Refusal(_MEDIA, ({},)),
    "lora_request": Refusal(_ADAPTERS),
    "prompt_adapter_request": Refusal("there are no prompt adapters; lora names a LoRA adapter"),
    "truncation_side": Refusal(_CUT, ("left", "right")),
    "logits_processors": Refusal("there are logit_bias, bad_words and allowed_token_ids instead", ([],)),
    "logprob_token_ids": Refusal("logprobs gives the likeliest tokens; choice scores between a few texts", ([],)),
    "prompt_logprob_token_ids": Refusal("prompt_logprobs gives the likeliest tokens", ([],)),
    "prompt_logprob_start": Refusal("prompt_logprobs covers the whole prompt", (0,)),
    "flat_logprobs": Refusal("log-probabilities have one form, OpenAI's", (False,)),
    **dict.fromkeys(["return_token_ids", "return_tokens_as_token_ids"], Refusal(_TOKEN_IDS, (False,))),
    "return_token_offsets": Refusal("offsets of tokens are not reported", (False,)),
    "return_prompt_text": Refusal("echo begins the text with the prompt", (False,)),
    "return_mm_kwargs": Refusal(_MEDIA, (True, False)),
    "media_io_kwargs": Refusal(_MEDIA, ({},)),
    "mm_processor_kwargs": Refusal(_MEDIA, ({},)),
    "routed_experts_prompt_start": Refusal("the routing of experts is not reported", (0,)),
    "thinking_token_budget": Refusal("reasoning has no limit of its own; max_tokens bounds it with the answer", (-1,)),
    "include_reasoning": Refusal("reasoning stands in a field of its own; leave that out when you read it", (True,)),
    "repetition_detection": Refusal("repetition does not end an output; use frequency_penalty or max_tokens"),
    "watermarking": Refusal("outputs have no watermark", (False,)),
    "trace_decode_token_ids": Refusal("tokens are sampled; prompt_logprobs scores given ones", ([],)),
    "skip_reading_prefix_cache": Refusal(
        "--no-prefix-cache (in Python prefix_cache=False) turns the cache off for all requests", (False,)
    ),
    "cache_salt": Refusal(
        "nobody else's prompts are in the cache; --no-prefix-cache (in Python prefix_cache=False) turns it off"
    ),
    **dict.fromkeys(["kv_transfer_params", "ec_transfer_params"], Refusal("a request stays on one engine", ({},))),
    **dict.fromkeys(["extra_args", "vllm_xargs"], Refusal("it is for plugins of vLLM", ({},))),
    "output_kind": Refusal("engine.stream gives what is new, engine.generate all of it"),
    "structural_tag": Refusal("use grammar, or tools with tool_choice"),
    "guided_whitespace_pattern": Refusal("the blanks between parts of JSON are fixed; use grammar to choose them"),
    "chat_template": Refusal("a template never comes from a row; the model's own is used"),
    "documents": Refusal("chat templates get no documents; write them into a message", ([],)),
    "add_special_tokens": Refusal(
        "special tokens come from the chat template or the tokenizer; prompt_token_ids says them exactly",
        (),
        lambda value, fields: value is ("messages" not in fields),
    ),
    # ollama
    "template": Refusal("a template never comes from a row; the model's own is used", ("",)),
    "keep_alive": Refusal("the model stays loaded until the run or the program ends"),
    "truncate": Refusal(_CUT, (False,)),
    "shift": Refusal("a context is never shifted: an output ends where it is full", (False,)),
    "context": Refusal("give the earlier turns as messages", ([],)),
    "images": Refusal(_MEDIA, ([],)),
    "num_ctx": Refusal("the context is the model's own; --kv-cache-memory (in Python kv_cache_memory) sizes the cache"),
    "num_keep": Refusal("a context is never shifted: an output ends where it is full", (0,)),
    "repeat_last_n": Refusal("repetition_penalty counts all tokens of prompt and output", (-1,)),
    "penalize_newline": Refusal("penalties count line breaks like all tokens", (True,)),
    "mirostat": Refusal(_MIROSTAT, (0,)),
    "mirostat_tau": Refusal(_MIROSTAT, (), lambda value, fields: not fields.get("mirostat")),
    "mirostat_eta": Refusal(_MIROSTAT, (), lambda value, fields: not fields.get("mirostat")),
    "typical_p": Refusal("there is no typical sampling; use top_p or min_p", (1,)),
    "tfs_z": Refusal("there is no tail-free sampling; use top_p or min_p", (1,)),
    **dict.fromkeys(
        "num_batch num_gpu main_gpu num_thread numa low_vram f16_kv use_mmap use_mlock draft_num_predict".split(),
        Refusal(_RUNTIME),
    ),
    "logits_all": Refusal("logprobs and prompt_logprobs report probabilities", (False,)),
    "vocab_only": Refusal(_RUNTIME, (False,)),
    "embedding_only": Refusal("there are no embeddings", (False,)),
    # transformers
    "do_sample": Refusal(
        "a temperature above 0 samples, and 0 does not: give temperature",
        (),
        lambda value, fields: isinstance(heat := fields.get("temperature"), int | float) and value is (heat > 0),
    ),
    "max_length": Refusal("max_tokens bounds the output, without the prompt"),
    "min_length": Refusal("min_tokens counts the output, without the prompt", (0,)),
    "max_time": Refusal("an output has no time limit; max_tokens bounds it"),
    "diversity_penalty": Refusal(_BEAMS, (0,)),
    "penalty_alpha": Refusal("there is no contrastive search", (0,)),
    "dola_layers": Refusal("layers are not contrasted"),
    "guidance_scale": Refusal("there is no guidance by a second prompt", (1,)),
    **dict.fromkeys(["epsilon_cutoff", "eta_cutoff"], Refusal(_CUTOFF, (0,))),
    **dict.fromkeys(["no_repeat_ngram_size", "encoder_no_repeat_ngram_size"], Refusal(_REPEATS, (0,))),
    "encoder_repetition_penalty": Refusal(_REPEATS, (1,)),
    "exponential_decay_length_penalty": Refusal("use max_tokens, or logit_bias for the end token"),
    "eos_token_id": Refusal("stop_token_ids adds end tokens; ignore_eos ignores the model's own"),
    "forced_bos_token_id": Refusal("end the prompt with that token"),
    "forced_eos_token_id": Refusal("an output that is cut off has no end token"),
    "suppress_tokens": Refusal("use logit_bias or bad_words", ([],)),
    "begin_suppress_tokens": Refusal("use logit_bias or bad_words, for the whole output", ([],)),
    "bad_words_ids": Refusal("bad_words takes them as texts", ([],)),
    "force_words_ids": Refusal("use regex or grammar", ([],)),
    "sequence_bias": Refusal("logit_bias takes single tokens, and bad_words texts", ({}, [])),
    "token_healing": Refusal("a prompt is used as it is tokenized", (False,)),
    "watermarking_config": Refusal("outputs have no watermark"),
}
"""All messages read “NAME is not available: WHY.”"""


def _json_schema(name: str, value: Any) -> dict[str, Any]:
    """vLLM: a schema as an object, as JSON text, or as a class of pydantic."""
    schema = value.model_json_schema() if hasattr(value, "model_json_schema") else value
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError):
            raise _wrong(f"{name} is not valid JSON") from None
    if not isinstance(schema, Mapping | bool):
        raise _wrong(f"{name} must be a JSON schema, not {json_type(schema)}")
    schema = dict(schema) if isinstance(schema, Mapping) else schema
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}


def _structured_outputs(name: str, value: Any) -> dict[str, Any]:
    """vLLM: an object with one of `json`, `regex`, `choice`, `grammar` and `json_object`."""
    if not isinstance(value, Mapping):
        raise _wrong(f"{name} must be an object, not {json_type(value)}")
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
            raise _wrong(f"{name}.{key} is not available: it has json, json_object, regex, choice and grammar")
    return made


def _object_of(known: Sequence[str], name: str, value: Any) -> dict[str, Any]:
    """Parameters by name: `options` of ollama, and `extra_body` of the `openai` package."""
    if not isinstance(value, Mapping):
        raise _wrong(f"{name} must be an object of parameters, not {json_type(value)}")
    made = translate(value)
    check_known(made, known)
    return made


def _variable(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, bool):
        raise _wrong(f"{name} must be true or false, not {json_type(value)}")
    return {"chat_template_kwargs": {"enable_thinking": value}}


def _effort(name: str, value: Any) -> dict[str, Any]:
    if value not in EFFORTS:
        raise _wrong(f"{name} must be one of {', '.join(EFFORTS)}")
    kwargs: dict[str, Any] = {"enable_thinking": value != "none"}
    return {"chat_template_kwargs": kwargs if value == "none" else {"reasoning_effort": value, **kwargs}}


def _reasoning(name: str, value: Any) -> dict[str, Any]:
    """OpenAI's Responses API: an object with `effort`."""
    if not isinstance(value, Mapping):
        raise _wrong(f"{name} must be an object with effort, not {json_type(value)}")
    for key, given in value.items():
        if key != "effort" and given is not None:
            raise _wrong(f"{name}.{key} is not available: it has effort")
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
    "reasoning": _reasoning,
    "extra_body": partial(_object_of, (*PARAM_NAMES, *TEMPLATE_FIELDS)),
}
"""Names whose values have another form than ours, and what makes sampling parameters and template fields of them."""

UNDERSTOOD = frozenset([*PARAM_NAMES, *ALIASES, *READERS, *TEMPLATE_FIELDS, "top_logprobs"])

_OPTION_NAMES = frozenset([*PARAM_NAMES, *ALIASES, *REFUSED, "num_predict"])
_CLEAR_OPTIONS = frozenset(name for name in _OPTION_NAMES if "_" in name) | {"temperature"}

COLUMN_NAMES: dict[str, Callable[[Any], bool]] = {
    "format": lambda v: v == "json" or (isinstance(v, dict) and not _SCHEMA_KEYS.isdisjoint(v)),
    "options": lambda v: (
        isinstance(v, dict) and bool(v) and (not _CLEAR_OPTIONS.isdisjoint(v) or _OPTION_NAMES.issuperset(v))
    ),
    "think": lambda v: isinstance(v, bool) or (isinstance(v, str) and v in EFFORTS),
    "reasoning_effort": lambda v: isinstance(v, str),
    "reasoning": lambda v: isinstance(v, dict) and not _REASONING_KEYS.isdisjoint(v),
    "instructions": lambda v: False,
    "input": lambda v: False,
    "truncation": lambda v: v in ("auto", "disabled"),
    "truncate": lambda v: isinstance(v, bool),
    "shift": lambda v: isinstance(v, bool),
    "template": lambda v: isinstance(v, str) and "{{" in v,
    "context": lambda v: _is_list_of(v, int),
    "images": lambda v: _is_list_of(v, str),
    "documents": lambda v: _is_list_of(v, dict),
    "functions": lambda v: _is_list_of(v, dict),
    "audio": lambda v: isinstance(v, dict) and "voice" in v,
    "modalities": lambda v: _is_list_of(v, str),
    "suffix": lambda v: isinstance(v, str),
    "stream": lambda v: isinstance(v, bool),
    "verbosity": lambda v: v in ("low", "medium", "high"),
    "moderation": lambda v: isinstance(v, dict),
    "watermarking": lambda v: isinstance(v, bool),
    "extra_args": lambda v: isinstance(v, dict),
    "numa": lambda v: isinstance(v, bool),
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
        if (refusal := REFUSED.get(name)) is not None:
            asks = value is not None and value not in refusal.nothing and not refusal.may_pass(value, fields)
            if asks and not carries_refused:
                raise _wrong(f"{name} is not available: {refusal.why}")
        elif name in READERS or name in ALIASES:
            if value is not None:
                read = READERS.get(name)
                _add(made, name, {ALIASES[name]: value} if read is None else read(name, value))
        elif name == "logprobs":
            _add(made, name, {"logprobs": _logprobs(value, fields.get("top_logprobs"))})
        elif name != "top_logprobs":
            _add(made, name, {name: value})
    if fields.get("top_logprobs") and fields.get("logprobs") in (None, False):
        raise _wrong("top_logprobs needs logprobs to be true")
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
    """Advice about a name that is no parameter, as the end of a sentence."""
    if name in TOOL_FIELDS:
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
    """Adds what a parameter means. Raises RequestError if another name of it says something else."""
    for meant, value in given.items():
        if value is None:
            made.setdefault(meant, None)
        elif meant == "chat_template_kwargs" and isinstance(value, Mapping) and made.get(meant) is not None:
            _add_variables(made, name, value)
        elif made.get(meant) is not None and made[meant] != value:
            raise _wrong(f"{name} is {_shown(value)}, but another name of it is {_shown(made[meant])}")
        else:
            made[meant] = dict(value) if meant == "chat_template_kwargs" and isinstance(value, Mapping) else value


def _add_variables(made: dict[str, Any], name: str, variables: Mapping[str, Any]) -> None:
    before = made["chat_template_kwargs"]
    if not isinstance(before, Mapping):
        raise _wrong("chat_template_kwargs must be an object of variables for the template")
    for variable, value in variables.items():
        if variable in before and before[variable] != value:
            raise _wrong(f"{name} sets {variable} to {_shown(value)}, but it is {_shown(before[variable])} elsewhere")
    made["chat_template_kwargs"] = {**before, **variables}


def _logprobs(value: Any, top: Any) -> Any:
    """OpenAI's chat has a boolean, and the number of alternatives in `top_logprobs`; elsewhere it is that number."""
    if value is True:
        return 0 if top is None else top
    if value not in (None, False) and top is not None and value != top:
        raise _wrong(f"logprobs is {_shown(value)} and top_logprobs {_shown(top)}; give one of them")
    return value


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is kind for item in value)


def _shown(value: Any) -> str:
    return repr(value)[:60]


def _wrong(message: str) -> RequestError:
    return RequestError("invalid_row", message)
