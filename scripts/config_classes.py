"""Reads transformers' configuration classes and modeling source, and writes the table that the package ships.

python -m scripts.config_classes      writes cbatch/model/config_classes.json

A key of a config.json changes what a model computes only if something reads it: the methods of the configuration class,
the modeling source of its type, or the code that all models share. The table says which keys these are, and what the
class has for those that a file leaves out. For models that wrap a language model it says where its settings are.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
from collections.abc import Iterator
from dataclasses import MISSING, fields
from functools import cache
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto import modeling_auto

from cbatch.model.config_classes import PATH
from cbatch.model.families import declarations

SHARED_SOURCE = ("masking_utils", "cache_utils", "modeling_rope_utils", "integrations.moe")
"""Modules that read settings of every model."""

SHARED_KEYS = ("tie_word_embeddings", "per_layer_config", "rope_theta", "rope_scaling", "partial_rotary_factor")
"""Keys that `PreTrainedConfig` reads itself."""

NEUTRAL = re.compile(
    r"_(name_or_path|output_attentions|(attn|experts)_implementation\w*)|.*(dropout|pdrop|layerdrop)(_.*)?|.*_token_id|.*_token_index|use_cache|return_dict|output_\w+|num_labels|"
    r"problem_type|(id2label|label2id)|\w*initializer_\w+|.*init_std|init_method|router_\w*(coef|noise)\w*|.*aux_loss\w*|"
    r"gradient_checkpointing|default_theta|number_of_conv_states|kv_sharing_modes|dtype|architectures|model_type|name_or_path|transformers_version|vision_config|"
    r"audio_config|is_encoder_decoder|is_decoder|add_cross_attention|chunk_size_feed_forward|classifier_\w+|summary_\w+"
)
"""Keys that are read, and change nothing of the logits in inference: of training, of outputs, of other inputs."""

NO_COMPUTATION = re.compile(r"_init_weights|validate_\w+|to_dict|to_diff_dict|get_mtp_config|__init_subclass__")
"""Functions that have no part in the logits."""

OTHER_HEADS = re.compile(r"\w+For(Sequence|Token|QuestionAnswering|Masked|Multiple)\w+")
"""Classes of models that are not run here."""

CONFIGS = re.compile(r"(\w+_)?config|cfg")
"""Names of a configuration in modeling source."""


class Reads(ast.NodeVisitor):
    """The keys that source reads of a configuration, with what it takes if they are absent, None if it does not say.

    of_self: in methods of the configuration itself
    """

    def __init__(self, *, of_self: bool = False) -> None:
        self.found: dict[str, Any] = {}
        self._of_self = of_self

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if not NO_COMPUTATION.fullmatch(node.name):
            self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        if not OTHER_HEADS.fullmatch(node.name):
            self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.ctx, ast.Load) and self._is_config(node.value):
            self.found.setdefault(node.attr)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        """Of `getattr(config, "key")`, `hasattr`, and of `kwargs.pop("key")`, which only configurations have."""
        name = getattr(node.func, "id", "")
        texts = [one.value for one in node.args[:2] if isinstance(one, ast.Constant) and isinstance(one.value, str)]
        is_read = name in ("getattr", "hasattr") and self._is_config(node.args[0])
        if isinstance(node.func, ast.Attribute) and node.func.attr in ("pop", "get", "setdefault") and self._of_self:
            is_read = getattr(node.func.value, "id", "") == "kwargs"
        if is_read and texts:
            default = node.args[-1].value if isinstance(node.args[-1], ast.Constant) else None
            known = self.found.setdefault(texts[0])
            self.found[texts[0]] = default if known is None and default != texts[0] else known
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        """Of `"key" in kwargs`."""
        if self._of_self and isinstance(node.left, ast.Constant) and isinstance(node.left.value, str):
            self.found.setdefault(node.left.value)
        self.generic_visit(node)

    def _is_config(self, node: ast.expr) -> bool:
        name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
        return bool(CONFIGS.fullmatch(name)) or (self._of_self and name == "self")


def keys_read(source: str, *, of_self: bool = False) -> dict[str, Any]:
    """The keys that a piece of Python reads of a configuration, with their defaults; see `Reads`."""
    reads = Reads(of_self=of_self)
    reads.visit(ast.parse(source))
    return reads.found


@cache
def _read_by_module(name: str) -> dict[str, Any]:
    try:
        module = importlib.import_module(f"transformers.{name}")
    except ImportError:  # a wrapper without modeling source of its own
        return {}
    return keys_read(inspect.getsource(module))


@cache
def _read_by_class(cls: type) -> dict[str, Any]:
    return keys_read(inspect.getsource(cls), of_self=True)


def _classes(cls: type[PreTrainedConfig]) -> Iterator[type]:
    """A configuration class and those above it, below the one that all have."""
    return (one for one in cls.__mro__ if issubclass(one, PreTrainedConfig) and one is not PreTrainedConfig)


def _joined(*reads: dict[str, Any]) -> dict[str, Any]:
    """All keys that change a result, each with the first of its defaults."""
    found: dict[str, Any] = {}
    for key, default in (item for one in reads for item in one.items()):
        if not NEUTRAL.fullmatch(key) and found.get(key) is None:
            found[key] = default
    return found


@cache
def shared_keys() -> dict[str, Any]:
    """The keys that code of all models reads, and their defaults."""
    found = _joined(dict.fromkeys(SHARED_KEYS), *map(_read_by_module, SHARED_SOURCE))
    return {key: default for key, default in found.items() if not callable(getattr(PreTrainedConfig, key, None))}


def read_keys(cls: type[PreTrainedConfig]) -> dict[str, Any]:
    """The keys that change what the models of a class compute, under the names that the class has for them."""
    network = getattr(transformers, str(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(cls.model_type)), None)
    modules = {one.__module__.replace(".configuration_", ".modeling_"): None for one in _classes(cls)}
    if network is not None:
        modules[network.__module__] = None
    own = {field.name for field in fields(cls)}
    by_module = (_read_by_module(name.removeprefix("transformers.")) for name in modules)
    found = _joined(*map(_read_by_class, _classes(cls)), *by_module, shared_keys())
    named = _joined(*({cls.attribute_map.get(key, key): default} for key, default in found.items()))
    return {key: default for key, default in named.items() if key in own or not key.startswith("_")}


_THETAS = {"rope_theta": "global", "rope_local_base_freq": "local"}


def defaults(cls: type[PreTrainedConfig]) -> dict[str, Any]:
    """The values of a class for the keys that a file leaves out."""
    shared = {field.name for field in fields(PreTrainedConfig)}
    found: dict[str, Any] = {}
    for field in fields(cls):
        if field.name in shared:
            continue
        if field.default is not MISSING:
            found[field.name] = field.default
        elif field.default_factory is not MISSING:
            found[field.name] = field.default_factory()
    theta = getattr(cls, "default_theta", None)
    thetas = theta if isinstance(theta, dict) else {"global": theta}
    found |= {key: thetas[kind] for key, kind in _THETAS.items() if kind in thetas and key not in found}
    return found


GENERATING = frozenset[str]().union(
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)
"""Types of models that continue a text."""


def entry(cls: type[PreTrainedConfig]) -> dict[str, Any]:
    """The row of a class in the table; see `cbatch.model.config_classes.ConfigClass`."""
    names, keys = cls.attribute_map, read_keys(cls)
    has = {names.get(key, key): value for key, value in defaults(cls).items()}
    absent = {key: default for key, default in keys.items() if default not in (None, shared_keys().get(key))}
    methods = {name for one in cls.__mro__ for name, value in vars(one).items() if callable(value)}
    usual = {key: default for key, default in (absent | has).items() if key in keys}
    found = {
        "defaults": dict(sorted(usual.items())),
        "read": sorted(keys.keys() - usual.keys() - methods - shared_keys().keys()),
        "names": dict(sorted(names.items())),
        "ends": has.get("eos_token_id"),
    }
    return {key: value for key, value in found.items() if value not in ({}, [], None)}


def _is_flat(cls: type[PreTrainedConfig]) -> bool:
    """Whether a class takes settings of its language model that lie beside those of the others."""
    probe = 77
    return getattr(cls(max_position_embeddings=probe).get_text_config(), "max_position_embeddings", 0) == probe


NOT_TEXT = frozenset(
    "blip blip-2 instructblip instructblipvideo florence2 diffusion_gemma shieldgemma2 pi0 gemma4_assistant "
    "gemma4_unified_assistant pix2struct vision-encoder-decoder moshi".split()
)
"""Wrappers that give no next token for text alone, or compute it from more than the text model's layers."""


def wrapper(kind: str) -> dict[str, Any] | None:
    """Where the models of a type have the settings of their language model; None if they wrap none.

    part: the keys that lead to them; text: their type, if they do not say one; fixed: whatever they say;
    settings: of files without that part; flat: which have them beside the others; tied: by default, at the outer level
    """
    cls, part = CONFIG_MAPPING[kind], []
    inner = cls
    while key := next((one for one in ("thinker_config", "text_config") if one in inner.sub_configs_defaults), None):
        spec = inner.sub_configs_defaults[key]
        part.append(key)
        is_fixed = issubclass(spec.config_class, PreTrainedConfig)
        inner = spec.config_class if is_fixed else CONFIG_MAPPING[spec.model_type]
    if not part or kind in NOT_TEXT or kind not in GENERATING:
        return None
    found = {
        "part": part,
        "text": spec.model_type,
        "fixed": is_fixed,
        "flat": part == ["text_config"] and _is_flat(cls),
        "tied": bool(defaults(cls).get("tie_word_embeddings")),
        "settings": {key: value for key, value in spec.init_kwargs.items() if not NEUTRAL.fullmatch(key)},
    }
    return {key: value for key, value in found.items() if value not in (False, {})}


def table() -> dict[str, Any]:
    """The whole table, for the types that are declared here, and those that wrap one of these."""
    kinds = [kind for kind in sorted(declarations) if kind in CONFIG_MAPPING]
    wrappers = {kind: found for kind in sorted(CONFIG_MAPPING) if (found := wrapper(kind)) is not None}
    return {
        "transformers": transformers.__version__,
        "shared": dict(sorted(shared_keys().items())),
        "classes": {kind: entry(CONFIG_MAPPING[kind]) for kind in kinds},
        "wrappers": wrappers,
    }


def lines(found: dict[str, Any]) -> str:
    """The table as JSON, with one line for each type."""
    parts = []
    for name, value in found.items():
        if name in ("classes", "wrappers"):
            inner = ",\n".join(f"  {json.dumps(kind)}: {json.dumps(one)}" for kind, one in value.items())
            parts.append(f"{json.dumps(name)}: {{\n{inner}\n }}")
        else:
            parts.append(f"{json.dumps(name)}: {json.dumps(value)}")
    return "{\n " + ",\n ".join(parts) + "\n}\n"


def main() -> None:
    PATH.write_text(lines(table()), encoding="utf-8")


if __name__ == "__main__":
    main()
