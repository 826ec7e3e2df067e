"""Reads a model's config.json and generation_config.json.

Both are checked before anything is made of them: a size that no model comes near costs minutes or gigabytes before its
weights are compared with it, and a wrong type fails anywhere. What only some families have is left to them: they read
a config.json by a `ConfigReader`, which notes what they have understood of it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from cbatch.base.model_files import MODELOPT_FILE, InvalidFile, read_json_object
from cbatch.model.config_classes import LAYER_TYPES, class_of
from cbatch.model.config_classes import UnsupportedConfig as UnsupportedConfig

_MOST_SHOWN, _LONGEST = 60, 2**14
"""Characters of a value that a sentence repeats, and numbers of a list that layers have one each of."""

_PATTERN = re.compile(r"[^*+?{}]{0,256}(?:[^*+?{})][*+?][^*+?{}]{0,256}){0,2}")
"""Repeats two characters or sets, and no groups: others take time without end on a name of a hundred characters."""


class Kind(NamedTuple):
    """A kind of value in words, and the test of one."""

    words: str
    accepts: Callable[[Any], bool]


FLAG = Kind("true or false", lambda value: isinstance(value, int) and value in (0, 1))
TEXT = Kind("a text of at most 256 characters", lambda value: isinstance(value, str) and len(value) <= 256)
OBJECT = Kind("an object", lambda value: isinstance(value, dict))


def whole(least: int, most: int, *, listed: bool = False) -> Kind:
    """A whole number. listed: or a list of them, of which layers have one each"""

    def is_one(value: Any) -> bool:
        return type(value) is int and least <= value <= most

    def accepts(value: Any) -> bool:
        if listed and isinstance(value, list):
            return len(value) <= _LONGEST and all(map(is_one, value))
        return is_one(value)

    return Kind(f"a whole number from {least} to {most}{', or a list of them' if listed else ''}", accepts)


def number(least: float, most: float) -> Kind:
    words = f"a number from {_plain(least)} to {_plain(most)}"
    return Kind(words, lambda value: type(value) in (int, float) and least <= value <= most)


def listed(longest: int, kind: Kind, plural: str) -> Kind:
    """A list of values of a kind. plural: what they are called"""
    return Kind(
        f"a list of at most {longest} {plural}",
        lambda value: isinstance(value, list) and len(value) <= longest and all(map(kind.accepts, value)),
    )


def patterns(kind: Kind) -> Kind:
    """An object with a value for each pattern of names, which are regular expressions with few repetitions."""
    return Kind(
        f"an object that has {kind.words} for each pattern, which repeats two characters at most",
        lambda value: (
            isinstance(value, dict)
            and all(_PATTERN.fullmatch(name) and kind.accepts(one) for name, one in value.items())
        ),
    )


def either(first: Kind, second: Kind) -> Kind:
    return Kind(f"{first.words}, or {second.words}", lambda value: first.accepts(value) or second.accepts(value))


FINITE = Kind("a number", lambda value: type(value) in (int, float) and abs(value) < math.inf)


def check_settings(settings: Mapping[str, Any], kinds: Mapping[str, Kind], path: Path, inside: str = "") -> None:
    """Raises InvalidFile for the first setting that is not of its kind; null is what is not there.

    inside: the names of the objects that hold the settings, such as `text_config.`
    """
    for name, value in settings.items():
        if value is not None and name in kinds and not kinds[name].accepts(value):
            raise InvalidFile(f"{path}: {inside}{name} must be {kinds[name].words}, not {shown(value)}.")


def shown(value: Any) -> str:
    """A value for a sentence, cut where it is long."""
    if isinstance(value, int) and value.bit_length() > 200:
        return "a number of more than 60 digits"
    if isinstance(value, str | list) and len(value) > _MOST_SHOWN:
        text = repr(value[:_MOST_SHOWN])[:_MOST_SHOWN]
        return f"{text}… ({len(value)} {'characters' if isinstance(value, str) else 'values'})"
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


def _plain(value: float) -> str:
    return f"{value:.0f}" if value == int(value) and abs(value) < 10**12 else f"{value:g}"


_LAYERS, _HEADS, _EXPERTS, _COLUMNS, _VOCABULARY = 2**10, 2**14, 2**15, 2**20, 2**24
_TOKENS, _WINDOW = 2**31 - 1, 2**20
_TOKEN_IDS = whole(-(2**31), 2**31 - 1, listed=True)
_POSITIONS = number(1, _TOKENS)
"""Some files have them as 4096.0."""
_EPSILON, _BASE = number(0, 1), number(1e-3, 1e15)
_BASES = Kind(
    f"{_BASE.words}, or a list of them",
    lambda value: all(map(_BASE.accepts, value)) if isinstance(value, list) and value else _BASE.accepts(value),
)


def _named(kind: Kind, names: str) -> dict[str, Kind]:
    return dict.fromkeys(names.split(), kind)


_FIELDS: dict[str, Kind] = {
    **_named(whole(1, _LAYERS), "num_hidden_layers n_layer n_layers num_layers"),
    **_named(whole(1, _COLUMNS), "hidden_size n_embd d_model"),
    **_named(whole(1, _VOCABULARY), "vocab_size"),
    **_named(whole(1, _HEADS, listed=True), "num_attention_heads n_head n_heads num_heads"),
    **_named(whole(1, _HEADS, listed=True), "num_key_value_heads num_kv_heads multi_query_group_num"),
    **_named(whole(0, 2**16), "head_dim kv_channels qk_nope_head_dim qk_rope_head_dim v_head_dim global_head_dim"),
    **_named(
        whole(0, _VOCABULARY, listed=True),
        "intermediate_size moe_intermediate_size shared_expert_intermediate_size n_inner ffn_dim d_ff ffn_hidden_size",
    ),
    **_named(
        whole(0, _EXPERTS, listed=True),
        "num_experts num_local_experts n_routed_experts moe_num_experts n_shared_experts num_experts_per_tok "
        "num_experts_per_token moe_top_k moe_topk moe_k",
    ),
    **_named(_POSITIONS, "max_position_embeddings n_positions original_max_position_embeddings"),
    **_named(
        whole(0, _WINDOW, listed=True), "sliding_window sliding_window_size attention_chunk_size attention_window"
    ),
    **_named(_BASES, "rope_theta"),
    **_named(_BASE, "rotary_emb_base rope_local_base_freq global_rope_theta local_rope_theta"),
    **_named(number(0, 16), "partial_rotary_factor rotary_pct rope_pct"),
    **_named(
        _EPSILON, "rms_norm_eps layer_norm_eps layer_norm_epsilon norm_eps norm_epsilon layernorm_epsilon rms_eps"
    ),
    **_named(listed(_LAYERS, TEXT, "names"), "layer_types layers_block_type mlp_layer_types block_types"),
    **_named(listed(64, TEXT, "names"), "architectures"),
    **_named(TEXT, "model_type hidden_act hidden_activation activation_function tokenizer_class"),
    **_named(either(TEXT, OBJECT), "dtype torch_dtype"),
    **_named(_TOKEN_IDS, "bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id decoder_start_token_id"),
    **_named(FLAG, "tie_word_embeddings is_encoder_decoder is_decoder use_sliding_window"),
    **_named(OBJECT, "rope_scaling rope_parameters quantization_config text_config vision_config audio_config"),
    **_named(OBJECT, "id2label label2id auto_map"),
    **_named(whole(0, 2**17), "num_labels"),
}
"""Settings of a text model, under all their names, and what they may be. The most is far beyond any model there is."""

_ROPE: dict[str, Kind] = {
    **_named(TEXT, "rope_type type"),
    **_named(_BASE, "rope_theta"),
    **_named(_POSITIONS, "original_max_position_embeddings"),
    **_named(number(0, 16), "partial_rotary_factor"),
    **_named(number(1e-6, 1e9), "factor low_freq_factor high_freq_factor beta_fast beta_slow"),
    **_named(number(-1e9, 1e9), "attention_factor mscale mscale_all_dim"),
    **_named(listed(2**14, FINITE, "numbers"), "long_factor short_factor mrope_section"),
}

_TEXT_PARTS = frozenset(("text_config", "llm_config", "language_config", "thinker_config", "decoder_config"))
"""Objects within a config.json that hold the settings of a text model."""

_COUNTS = {
    re.compile(r".*(layers|blocks|depth|passes|loops|cycles|codebooks)"): _LAYERS,
    re.compile(r".*(heads|experts|groups)"): _EXPERTS,
}
"""Names of settings, in parts of models too, after whose numbers modules are made one by one."""

_UNBOUNDED = frozenset(("model_max_length", "max_length"))
"""Settings of tokenizers that some files have as 10**30."""

_LONG = frozenset(("id2label", "label2id", "quantization_config"))
_MOST_SETTINGS = 20_000
"""Real files have some hundreds. transformers copies them several times, and looks at each."""


def read_model_config(folder: Path) -> dict[str, Any]:
    """The config.json of a folder; empty if there is none. Raises InvalidFile if it is damaged or cannot be true.

    What ModelOpt says beside it of quantized weights counts as its own.
    """
    path = folder / "config.json"
    config = read_json_object(path)
    if config and not config.get("quantization_config") and (beside := read_json_object(folder / MODELOPT_FILE)):
        config["quantization_config"] = beside
    check_model_config(config, path)
    return config


def check_model_config(config: Mapping[str, Any], path: Path) -> None:
    """Raises InvalidFile for a setting of another type than all models have it, or of an impossible size."""
    _check_part(config, path, "")
    for count, (name, value) in enumerate(_settings(config)):
        if count >= _MOST_SETTINGS:
            raise InvalidFile(f"{path} has more than {_MOST_SETTINGS} settings.")
        if isinstance(value, int) and abs(value) >= 2**63 and name not in _UNBOUNDED:
            raise InvalidFile(f"{path}: {shown(name)} is {shown(value)}, which no setting of a model is.")


def _check_part(part: Mapping[str, Any], path: Path, inside: str, *, is_text: bool = True) -> None:
    if is_text:
        check_settings(part, _FIELDS, path, inside)
    for name, value in part.items():
        if name in ("rope_scaling", "rope_parameters") and isinstance(value, dict):
            check_settings(value, _ROPE, path, f"{inside}{name}.")
            for kind, settings in value.items():  # by the types of layers
                if isinstance(settings, dict):
                    check_settings(settings, _ROPE, path, f"{inside}{name}.{kind}.")
        elif isinstance(value, dict) and name.endswith("_config") and name != "quantization_config":
            _check_part(value, path, f"{inside}{name}.", is_text=name in _TEXT_PARTS)
        elif isinstance(value, int):
            most = next((most for names, most in _COUNTS.items() if names.fullmatch(name)), value)
            if value > most:
                raise InvalidFile(f"{path}: {inside}{name} must be at most {most}, not {shown(value)}.")


def _settings(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """All settings that are neither lists nor objects, each with the name of the innermost one that holds it.

    Without those of which a large model has many: labels, and how each of its matrices is quantized.
    """
    left: list[tuple[str, Any]] = [("", config)]
    while left:
        name, value = left.pop()
        if isinstance(value, dict):
            left += (item for item in value.items() if item[0] not in _LONG)
        elif isinstance(value, list):
            left += ((name, one) for one in value)
            yield name, None
        else:
            yield name, value


_GENERATION: dict[str, Kind] = {
    **_named(FLAG, "do_sample"),
    **_named(number(0, 1000), "temperature"),
    **_named(number(0, 1), "top_p min_p typical_p"),
    **_named(whole(-1, _TOKENS), "top_k"),
    **_named(number(0.01, 100), "repetition_penalty"),
    **_named(whole(0, _TOKENS), "min_new_tokens max_length min_length no_repeat_ngram_size"),
    **_named(whole(1, _TOKENS), "max_new_tokens num_beams"),
    **_named(either(TEXT, listed(1024, TEXT, "names")), "stop_strings"),
    **_named(_TOKEN_IDS, "bos_token_id eos_token_id pad_token_id decoder_start_token_id"),
}
"""Settings of a generation_config.json that the engine or transformers uses, and what they may be."""


def read_generation_config(folder: Path) -> dict[str, Any]:
    """The generation_config.json of a folder; empty if there is none. Raises InvalidFile for a wrong setting."""
    path = folder / "generation_config.json"
    settings = read_json_object(path)
    check_settings(settings, _GENERATION, path)
    return settings


class ConfigReader:
    """The keys of a config.json, by the names and with the defaults that their class in transformers has.

    is_wrapped: they are those of the language model in a larger one
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        """Raises UnsupportedConfig for a type that is not in the table of classes."""
        self.kind = str(values.get("model_type"))
        found = class_of(self.kind)
        if found is None:
            raise UnsupportedConfig(f"its model type {self.kind} has no declaration")
        self.is_wrapped = "wrapped_by" in values
        self._class, self._read = found, set[str]()
        self._values = {found.names.get(key, key): value for key, value in values.items()}
        types = found.names.get("layer_types", "layer_types")
        if isinstance(given := self._values.get(types), list):
            self._values[types] = [LAYER_TYPES.get(one, one) for one in given]

    def __getitem__(self, key: str) -> Any:
        """A value that must be there, or have a default. Raises UnsupportedConfig if it is not, or is null."""
        value = self.get(key)
        if value is None:
            raise UnsupportedConfig(f"its config.json has no {key}")
        return value

    def get(self, key: str, default: Any = None) -> Any:
        """A value, or what the class has if the key is absent. default: of keys for which the class has none"""
        key = self._class.names.get(key, key)
        self._read.add(key)
        if key in self._values:
            return self._values[key]
        known = self._class.defaults.get(key)
        return default if known is None else known

    def default(self, key: str) -> Any:
        """The value that the class has if a key is absent."""
        return self._class.defaults.get(key)

    def flag(self, key: str, default: bool = False) -> bool:
        return bool(self.get(key, default))

    def whole(self, key: str, default: int | None = None) -> int:
        """A whole number. Raises UnsupportedConfig if it is absent and there is no default."""
        return int(self[key] if default is None else self.get(key, default))

    def number(self, key: str, default: float | None = None) -> float:
        """A number. Raises UnsupportedConfig if it is absent and there is no default."""
        return float(self[key] if default is None else self.get(key, default))

    def first(self, *keys: str) -> Any:
        """The value of the first key that is there: files have several names for one thing.

        Raises UnsupportedConfig if all are absent or null.
        """
        found = [value for value in map(self.get, keys) if value is not None]
        if not found:
            raise UnsupportedConfig(f"its config.json has no {keys[0]}")
        return found[0]

    def expect(self, key: str, *accepted: Any) -> Any:
        """A value of which only some are understood; the first of them if the key is absent and has no default.

        Raises UnsupportedConfig for another one.
        """
        value = self.get(key, accepted[0])
        if value not in accepted:
            raise UnsupportedConfig(f"its {key} is {value}")
        return value

    def ignore(self, *keys: str) -> None:
        """Notes keys that transformers reads and that change nothing here."""
        self._read.update(self._class.names.get(key, key) for key in keys)

    def finish(self) -> None:
        """Raises UnsupportedConfig for a key that transformers reads, and that nobody has read here.

        Unless it has the default of its class.
        """
        for key in self._class.changed(self._values):
            if key not in self._read:
                said = f"its config.json says {key} = {shown(self._values[key])}"
                raise UnsupportedConfig(f"{said}, which its declaration does not know")
