"""The table of transformers' configuration classes, and what is read by it."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import transformers
from transformers.models.llama import modeling_llama

from cbatch.model.config import ConfigReader, UnsupportedConfig
from cbatch.model.config_classes import PATH, class_of, text_config
from scripts import config_classes


def test_the_table_is_that_of_transformers() -> None:
    """Guards the shipped table against classes that have changed: it is made again from their source."""
    shipped = PATH.read_text(encoding="utf-8")
    found = config_classes.lines(config_classes.table())
    if f'"transformers": "{transformers.__version__}"' not in shipped:
        pytest.skip(f"The table is of another version than transformers {transformers.__version__}.")
    assert found == shipped, "run python -m scripts.config_classes"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("config.rms_norm_eps", "config.norm_epsilon"),
        ('getattr(config, "head_dim", ', 'getattr(config, "size_of_heads", '),
        ("config.num_key_value_heads", "config.num_kv_heads"),
    ],
)
def test_a_renamed_key_is_noticed(before: str, after: str) -> None:
    """Guards the making of the table: a key that modeling source reads by another name is seen."""
    source = inspect.getsource(modeling_llama)
    assert before in source
    name = after.replace('"', " ").replace(".", " ").replace(",", " ").split()[-1]
    assert (
        name in config_classes.keys_read(source.replace(before, after)).keys() - config_classes.keys_read(source).keys()
    )


def test_only_what_computes_counts() -> None:
    """Guards keys of training: what initialises weights, or checks a configuration, changes no result."""
    source = """
class Config:
    def __post_init__(self, **kwargs):
        self.inner = kwargs.pop("factor", 2) if "other" in kwargs else self.width
    def validate_width(self):
        return self.unused
class Model:
    def _init_weights(self, module):
        return self.config.spread
    def forward(self):
        return self.config.scale + getattr(self.config, "shift", 0)
"""
    found = {"factor": 2, "other": None, "width": None, "scale": None, "shift": 0, "config": None}
    assert config_classes.keys_read(source, of_self=True) == found


def test_a_reader_has_the_names_and_defaults_of_the_class() -> None:
    """Guards files that leave out what their class has, call keys otherwise, or name types of layers as older ones."""
    reader = ConfigReader({"model_type": "qwen3_moe", "num_experts": 7, "layer_types": ["attention"], "made_by": "me"})
    assert reader.get("num_local_experts") == reader.get("num_experts") == 7
    assert reader.get("rms_norm_eps") == 1e-6 and reader.get("mlp_only_layers", "no default") == "no default"
    with pytest.raises(UnsupportedConfig, match=r"says layer_types = \['full_attention'\], which"):
        reader.finish()
    reader.ignore("layer_types")
    reader.finish()
    with pytest.raises(UnsupportedConfig, match="type martian has no declaration"):
        ConfigReader({"model_type": "martian"})


OUTER = {"architectures": ["A"], "eos_token_id": 5, "vision_config": {"hidden_size": 3}, "made_by": "me"}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "llama", "hidden_size": 8}, {"model_type": "llama", "hidden_size": 8}),
        (  # the type of the part counts
            OUTER | {"model_type": "mistral3", "text_config": {"model_type": "ministral3", "hidden_size": 8}},
            {"model_type": "ministral3", "hidden_size": 8, "tie_word_embeddings": True, "wrapped_by": "mistral3"},
        ),
        (  # or the usual one
            OUTER | {"model_type": "llava", "text_config": {"hidden_size": 8, "tie_word_embeddings": True}},
            {"model_type": "llama", "hidden_size": 8, "tie_word_embeddings": True, "wrapped_by": "llava"},
        ),
        (  # whatever the part says, where the class does not ask
            OUTER | {"model_type": "qwen2_5_vl", "text_config": {"model_type": "qwen2", "hidden_size": 8}},
            {"model_type": "qwen2_5_vl_text", "hidden_size": 8, "tie_word_embeddings": False},
        ),
        (  # older files have both models side by side
            OUTER | {"model_type": "qwen2_5_vl", "hidden_size": 8, "tie_word_embeddings": True},
            {"model_type": "qwen2_5_vl_text", "hidden_size": 8, "tie_word_embeddings": True},
        ),
        (
            {"model_type": "qwen2_5_omni", "thinker_config": {"text_config": {"hidden_size": 8}}},
            {"model_type": "qwen2_5_omni_text", "hidden_size": 8},
        ),
        ({"model_type": "mistral3"}, {"model_type": "mistral", "hidden_size": 5120, "vocab_size": 131072}),
    ],
)
def test_the_settings_of_a_wrapped_model(config: dict[str, Any], expected: dict[str, Any]) -> None:
    """Guards models of text with pictures: the settings of their language model, and those outside that concern it."""
    found = text_config(config)
    assert {key: found.get(key) for key in expected} == expected
    if "architectures" in config:
        assert found["architectures"] == ["A"] and found["eos_token_id"] == 5


def test_types_under_other_names_have_a_class() -> None:
    """Guards files whose own code computes what a type of transformers does."""
    assert class_of("kimi_k2") == class_of("deepseek_v3") is not None
