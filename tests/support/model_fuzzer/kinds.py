"""Damaged models: the files of a whole model of each format, and how each area of them is changed."""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf import GGMLQuantizationType

from tests.support.adapters import draw_adapter, save_adapter
from tests.support.architectures import make_architecture
from tests.support.gguf_files import byte_level_metadata, gguf_model, write_model
from tests.support.model_folder import TEMPLATE, make_tokenizer
from tests.support.model_fuzzer.documents import ODD, Generator, damaged_document, damaged_text, pick, to_bytes
from tests.support.model_fuzzer.gguf_damage import damaged_gguf
from tests.support.model_fuzzer.template_damage import random_template
from tests.support.model_fuzzer.tokenizer_damage import damaged_tokenizer
from tests.support.model_fuzzer.weight_damage import WEIGHTS, Folder, damaged_weights, split_weights
from tests.support.quantized_folders import (
    Encoder,
    awq,
    awq_settings,
    compressed,
    compressed_settings,
    fp8,
    fp8_settings,
    gptq,
    gptq_settings,
    modelopt_settings,
    mxfp4,
    nvfp4,
    tiny_model,
    whole_int8,
    write_folder,
)

FORMATS: dict[str, tuple[dict[str, Any], Encoder, str]] = {
    "awq": (awq_settings(32), awq(32), "qwen3"),
    "gptq": (gptq_settings(4, 32, desc_act=True), gptq(4, 32, act_order=True), "llama"),
    "w4a16": (compressed_settings(group_size=32, symmetric=False), compressed(4, 32, symmetric=False), "qwen3"),
    "w8a8": (compressed_settings("int-quantized", strategy="channel", num_bits=8), whole_int8(), "qwen2"),
    "fp8": (fp8_settings((32, 32)), fp8((32, 32)), "qwen3"),
    "mxfp4": ({"quant_method": "mxfp4"}, mxfp4, "gpt_oss"),
    "nvfp4": (modelopt_settings(), nvfp4(), "qwen3"),
}
"""Folders of quantized weights: their settings, how matrices are packed, and the model's type."""

AREAS = (
    "config", "generation", "tokenizer", "tokenizer settings", "template", "index", "weights", "files", *FORMATS,
    "gguf", "lora", "packed weights",
)  # fmt: skip

_SIZES = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16, "num_hidden_layers": 1}
_ROPE: list[Any] = [
    {"rope_type": kind, "factor": 2.0, "rope_theta": 1e4} for kind in ("linear", "dynamic", "yarn", "x")
]

_CONFIG_KEYS: dict[str, list[Any]] = {
    "architectures": [5, ["NoSuchForCausalLM"], ["Qwen3ForCausalLM"], ["T5Model"]], "auto_map": [{"AutoConfig": "a.B"}],
    "model_type": ["qwen3", "gpt2", "t5", "mamba", "nothing", "gemma3", "mixtral", "llava", "whisper", "qwen3_moe"],
    "num_hidden_layers": [0, -1, 2, 10**6, 10**30], "head_dim": [0, 10**9, 17, None], "hidden_size": [0, 63, 10**9],
    "num_attention_heads": [0, 3, 5, 64, 10**9], "num_key_value_heads": [0, 3, 8, 10**9], "vocab_size": [0, 1, 285,
    10**9],
    "max_position_embeddings": [0, -1, 1, 2**40, 10**30], "sliding_window": [0, -1, 1, 2**40],
    "use_sliding_window": [True],
    "layer_types": [["full_attention"], ["sliding_attention"], ["x"], ["full_attention"] * 10_000],
    "rope_scaling": _ROPE, "rope_parameters": _ROPE, "rope_theta": [0, -1, 1e30], "rms_norm_eps": [0, -1, 1e30],
    "text_config": [{}, {"model_type": "llama"}, {"text_config": {}}], "quantization_config": [{},
    {"quant_method": "awq"},
    {"quant_method": "bitsandbytes"}, {"quant_method": "gptq", "bits": 4}], "eos_token_id": [-1, 286, 10**30, [],
    [[1]]],
    "hidden_act": ["gelu", "relu", "x", "__class__"], "dtype": ["float16", "bfloat16", "float8", "int32", "x"],
    "tie_word_embeddings": [True], "attention_bias": [True], "is_encoder_decoder": [True], "intermediate_size": [0,
    10**9],
    "attn_implementation": ["flash_attention_9"], "_attn_implementation": ["x"], "num_experts": [0, 10**9],
    "id2label": [5],
    "pad_token_id": [10**9], "transformers_version": ["9" * 999], "mlp_bias": [True], "pruned_heads": [{"0": [0]}],
}  # fmt: skip

_GENERATION_KEYS: dict[str, list[Any]] = {
    "temperature": [0, -1, 1e308, "hot"], "do_sample": [True, "yes"], "top_p": [0, 2, -1], "top_k": [-1, 10**30, 0.5],
    "min_p": [2, -1], "repetition_penalty": [0, -1, 1e308], "max_new_tokens": [0, -1, 1, 10**30],
    "min_new_tokens": [-1, 99],
    "stop_strings": ["x", [""], [1], ["a"] * 10_000, ["\x1b"]], "eos_token_id": [-1, 10**30, [1, 2], [None], "2", True],
    "suppress_tokens": [[1], "x"], "num_beams": [4, "x"], "bad_words_ids": [[[1]]], "sequence_bias": [[1]],
    "typical_p": [0.5], "cache_implementation": ["x"], "penalty_alpha": [9], "num_return_sequences": [9],
}  # fmt: skip

_SETTINGS_KEYS: dict[str, list[Any]] = {
    "tokenizer_class": ["LlamaTokenizer", "GPT2Tokenizer", "BertTokenizer", "NoSuchTokenizer", "Qwen2Tokenizer"],
    "chat_template": [5, [{"name": "default", "template": "x"}], [{"name": 1}], {"default": "x"}, ""],
    "bos_token": ["<|no|>", {"__type": "AddedToken", "content": "a"}, {"content": 5}], "add_bos_token": [True, "x"],
    "eos_token": ["a", "", None], "additional_special_tokens": [["a", "b"], "a", [5]], "model_max_length": [0, -1, "x"],
    "added_tokens_decoder": [{"0": {"content": "x"}}, {"x": 5}, {"999": {"content": "y", "special": True}},
                             {str(10**30): {"content": "z"}}], "add_prefix_space": [True], "auto_map": [{"a": "b.C"}],
    "extra_special_tokens": [{"a": "b"}, ["c"]], "clean_up_tokenization_spaces": [True], "legacy": [False],
    "split_special_tokens": [True], "unk_token": ["<unk>"], "sp_model_kwargs": [{"alpha": 1}],
    "vocab_file": ["/dev/zero"],
}  # fmt: skip

_FURTHER_FILES = (
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template.json", "tekken.json",
    "additional_chat_templates/other.jinja", "additional_chat_templates", "model.safetensors.index.json",
    "tokenizer.model", "preprocessor_config.json", "x.gguf", "model-00001-of-00002.safetensors", "chat_template.jinja",
    "processor_config.json", "pytorch_model.bin", "custom_generate", "\x1b[31m.json", "tokenizer.json",
)  # fmt: skip


class Special(Enum):
    """Stand-ins for a file."""

    NOTHING = "nothing"
    FOLDER = "a folder"
    PIPE = "a pipe that nobody writes to"
    ZERO = "a link to /dev/zero"
    TERMINAL = "a link to /dev/tty"
    LOOP = "a link to itself"
    DANGLING = "a link to nothing"
    SPARSE = "200 GB of zeros"


Files = dict[str, "bytes | Special"]


class Damaged(NamedTuple):
    """A damaged model: the whole one that it is made of, and files that are other ones."""

    base: str
    files: Files

    def words(self, whole: WholeModels) -> str:
        """The differences from the whole model, for people."""
        return "; ".join(f"{name!a} {_difference(whole, self.base, name, one)}" for name, one in self.files.items())


def _difference(whole: WholeModels, base: str, name: str, content: bytes | Special) -> str:
    if isinstance(content, Special):
        return f"is {content.value}"
    path = whole.path(base) / name
    before = path.read_bytes() if path.is_file() else b""
    same = (number for number, pair in enumerate(zip(before, content, strict=False)) if pair[0] != pair[1])
    place = next(same, min(len(before), len(content)))
    around = slice(max(place - 30, 0), place + 30)
    return f"at {place} of {len(content)} bytes: {content[around]!r} instead of {before[around]!r}"


class WholeModels:
    """The models that are damaged, each a folder in `folder`, made when it is needed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._made: set[str] = set()
        self._weights: dict[str, Folder] = {}

    def path(self, base: str) -> Path:
        path = self.folder / base
        if base not in self._made:
            self._made.add(base)
            self._make(base, path)
        return path

    def content(self, base: str, name: str) -> bytes:
        return (self.path(base) / name).read_bytes()

    def document(self, base: str, name: str) -> Any:
        return json.loads(self.content(base, name))

    def weights(self, base: str) -> Folder:
        if base not in self._weights:
            self._weights[base] = Folder.read(self.path(base))
        return self._weights[base]

    def _make(self, base: str, path: Path) -> None:
        if base == "gguf":
            path.mkdir()
            metadata = byte_level_metadata()
            saved = gguf_model("llama", vocab_size=len(metadata["tokenizer.ggml.tokens"]))
            write_model(path / "model.gguf", saved, GGMLQuantizationType.Q8_0, metadata)
            shutil.rmtree(path / "model.gguf.reference")
        elif base in FORMATS:
            settings, encode, kind = FORMATS[base]
            sizes = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16}
            write_folder(path, tiny_model(kind, **sizes), settings, encode)
            shutil.rmtree(path.with_name(base + "-reference"))
        else:
            self._make_plain(path)

    def _make_plain(self, path: Path) -> None:
        tokenizer = make_tokenizer()
        network = make_architecture(
            "llama", vocab_size=len(tokenizer), max_position_embeddings=256, eos_token_id=2, **_SIZES
        )
        network.save_pretrained(path)
        tokenizer.save_pretrained(path)
        (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, "temperature": 0.7, "top_p": 0.9}))
        save_adapter(path / "adapter", draw_adapter(network))


def damaged_model(whole: WholeModels, area: str, seed: int, number: int) -> Damaged:
    """The model of that number in an area; the same for the same seed."""
    generator = np.random.default_rng([seed, zlib.crc32(area.encode()), number])
    base = area if area in (*FORMATS, "gguf") else "plain"
    files = _weights(whole, generator, area) if area in FORMATS else _DAMAGES[area](whole, generator)
    return Damaged(base, files)


Damage = Callable[[WholeModels, Generator], Files]


def _document(name: str, extra: dict[str, list[Any]] | None = None) -> Damage:
    return lambda whole, generator: {name: damaged_document(whole.document("plain", name), generator, extra)}


def _special(names: Sequence[str], generator: Generator) -> Files:
    return {pick(generator, names): pick(generator, list(Special))}


def _template(whole: WholeModels, generator: Generator) -> Files:
    template = random_template(generator, TEMPLATE)
    if generator.random() < 0.8:
        return {"chat_template.jinja": template.encode("utf-8", "surrogatepass")}
    settings = whole.document("plain", "tokenizer_config.json") | {"chat_template": template}
    return {"chat_template.jinja": Special.NOTHING, "tokenizer_config.json": to_bytes(settings)}


def _index(whole: WholeModels, generator: Generator) -> Files:
    folder, part = whole.weights("plain"), "model-00001-of-00001.safetensors"
    files = folder.files()
    if generator.random() < 0.3:
        split_weights(files, folder, generator)
    else:
        files[part] = files.pop(WEIGHTS)
        index = {"metadata": {"total_size": len(folder.data)}, "weight_map": dict.fromkeys(folder.names, part)}
        files["model.safetensors.index.json"] = damaged_document(index, generator)
    return {WEIGHTS: Special.NOTHING, **files}


def _weights(whole: WholeModels, generator: Generator, base: str = "plain") -> Files:
    return {WEIGHTS: Special.NOTHING, **damaged_weights(whole.weights(base), generator)}


def _files(whole: WholeModels, generator: Generator) -> Files:
    """A file is something else, or there is one more."""
    own = [path.name for path in sorted(whole.path("plain").iterdir()) if path.is_file()]
    names = own if generator.random() < 0.6 else _FURTHER_FILES
    if generator.random() < 0.7:
        return _special(names, generator)
    return {pick(generator, names): to_bytes(pick(generator, ODD))}


_LORA_KEYS: dict[str, list[Any]] = {
    "r": [0, -1, 10**30, 5, 4.0, True], "lora_alpha": [0, 1e308, "x", 10**30, 10**400], "rank_pattern": [{"(": 4},
    {"(a|aa)+$": 4}, {"q_proj": 3}, {"q_proj": "x"}, [1]], "alpha_pattern": [{"(x+x+)+y": 4}, {"q_proj": None}, "x"],
    "use_rslora": [True, "x", []], "peft_type": ["IA3", 5], "bias": ["all", 5], "use_dora": [True],
    "modules_to_save": [["lm_head"]], "target_modules": ["(((", 5], "init_lora_weights": [[], {}, "pissa", 10**30],
}  # fmt: skip


def _lora(whole: WholeModels, generator: Generator) -> Files:
    name, weights = "adapter/adapter_config.json", "adapter/adapter_model.safetensors"
    match int(generator.integers(4)):
        case 0 | 1:
            return _document(name, _LORA_KEYS)(whole, generator)
        case 2:
            return _special([name, weights], generator)
        case _:
            folder = Folder.of({"a": 1}, whole.content("plain", weights))
            files = damaged_weights(folder, generator)
            return {f"adapter/adapter_{each}": one for each, one in files.items() if each.endswith(WEIGHTS)}


PACKED = "cache/cbatch/weights"
"""Where runs keep packed weights, in a model's folder."""


def _packed(whole: WholeModels, generator: Generator) -> Files:
    """Of the files that the first run with the whole model has left."""
    names = sorted(f"{PACKED}/{path.name}" for path in (whole.path("plain") / PACKED).iterdir())
    if generator.random() < 0.3:
        return _special(names, generator)
    name = pick(generator, names)
    return {name: damaged_text(whole.content("plain", name), generator)}


_DAMAGES: dict[str, Damage] = {
    "config": _document("config.json", _CONFIG_KEYS),
    "generation": _document("generation_config.json", _GENERATION_KEYS),
    "tokenizer": lambda whole, generator: {
        "tokenizer.json": damaged_tokenizer(whole.document("plain", "tokenizer.json"), generator)
    },
    "tokenizer settings": _document("tokenizer_config.json", _SETTINGS_KEYS),
    "template": _template,
    "index": _index,
    "weights": _weights,
    "files": _files,
    "gguf": lambda whole, generator: {"model.gguf": damaged_gguf(whole.path("gguf") / "model.gguf", generator)},
    "lora": _lora,
    "packed weights": _packed,
}


def write_damaged(whole: WholeModels, damaged: Damaged, folder: Path) -> None:
    """Makes the folder. Files that are whole are links to those of the whole model."""
    base = whole.path(damaged.base)
    shutil.copytree(base, folder, copy_function=os.link)
    for name, content in damaged.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        _write(path, content)


def _write(path: Path, content: bytes | Special) -> None:
    match content:
        case bytes():
            path.write_bytes(content)
            path.chmod(0o600)
        case Special.FOLDER:
            path.mkdir()
        case Special.PIPE:
            os.mkfifo(path)
        case Special.ZERO | Special.TERMINAL:
            path.symlink_to("/dev/zero" if content is Special.ZERO else "/dev/tty")
        case Special.LOOP:
            path.symlink_to(path.name)
        case Special.DANGLING:
            path.symlink_to("nothing")
        case Special.SPARSE:
            with path.open("wb") as file:
                file.truncate(200 * 10**9)
