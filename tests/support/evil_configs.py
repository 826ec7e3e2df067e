"""Model folders whose settings no model can have, or whose files are none."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from cbatch.base.model_files import WEIGHTS_INDEX

Change = Callable[[Path], None]
"""Changes a model's folder."""

DEEP = b"[" * 100_000 + b"]" * 100_000


def settings(file: str = "config.json", **values: Any) -> Change:
    """Changes keys of a JSON file."""

    def change(folder: Path) -> None:
        path = folder / file
        kept = json.loads(path.read_text()) if path.is_file() else {}
        path.write_text(json.dumps(kept | values))

    return change


def content(file: str, data: bytes) -> Change:
    """Replaces a file."""
    return lambda folder: _replace(folder / file, lambda path: path.write_bytes(data))


def linked(file: str, target: str) -> Change:
    return lambda folder: _replace(folder / file, lambda path: path.symlink_to(target))


def pipe(file: str) -> Change:
    return lambda folder: _replace(folder / file, os.mkfifo)


def folder_instead(file: str) -> Change:
    return lambda folder: _replace(folder / file, Path.mkdir)


def socket_instead(file: str) -> Change:
    def make(path: Path) -> None:
        with closing(socket.socket(socket.AF_UNIX)) as server:
            server.bind(str(path))

    return lambda folder: _replace(folder / file, make)


def endless(file: str) -> Change:
    """A file that claims to have a terabyte."""

    def make(path: Path) -> None:
        path.touch()
        os.truncate(path, 2**40)

    return lambda folder: _replace(folder / file, make)


def _replace(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink(missing_ok=True)
    make(path)


def write_evil(change: Change, source: Path, folder: Path) -> Path:
    """A copy of a model's folder with a change; its files are links of the same content."""
    folder.mkdir()
    for path in source.iterdir():
        if path.suffix == ".json":
            (folder / path.name).write_bytes(path.read_bytes())
        else:
            os.link(path, folder / path.name)
    change(folder)
    return folder


def _changes(values: dict[str, list[Any]], file: str = "config.json") -> dict[str, Change]:
    """A change for each value of a key."""
    return {
        f"{file.removesuffix('.json')}: {key} = {ascii(value)[:24]}": settings(file, **{key: value})
        for key, each in values.items()
        for value in each
    }


_NAN, _INF = float("nan"), float("inf")
_COUNTS = [0, -1, 10**9, 10**30, 1.5, "2", True, {}, [None]]

EVIL: dict[str, Change] = _changes(
    {
        "num_hidden_layers": [*_COUNTS, 10**6, [2]],
        "n_layer": [-1, 10**6],
        "num_attention_heads": [*_COUNTS, [0, 2]],
        "num_key_value_heads": [*_COUNTS, [2, -1]],
        "hidden_size": [*_COUNTS, [2]],
        "vocab_size": [*_COUNTS, [2]],
        "head_dim": [-1, 10**9, 10**30, 0.5, "x", [1, 2]],
        "intermediate_size": [-1, 10**9, 10**30, "x", {}],
        "max_position_embeddings": [0, -1, 10**30, "long", [1], 0.5],
        "sliding_window": [-1, 10**9, 10**30, "x", [{}], 0.5],
        "num_experts": [-1, 10**9, "x"],
        "num_experts_per_tok": [-1, 10**9, "x"],
        "rope_theta": [0, -1.0, "x", _NAN, _INF, [], 10**400],
        "rope_scaling": [
            5, "linear", [], {"rope_type": 5}, {"type": "linear", "factor": "x"}, {"type": "linear", "factor": 0},
            {"factor": _NAN}, {"factor": 1e300}, {"long_factor": 5}, {"long_factor": [1.0] * 10**5},
            {"original_max_position_embeddings": -1}, {"short_factor": [_NAN]},
        ],
        "rope_parameters": [5, {"rope_theta": "x"}, {"full_attention": {"rope_theta": -1.0}}],
        "rms_norm_eps": [-1.0, "x", _NAN, [], 10**30],
        "partial_rotary_factor": [-1, "x", 10**9],
        "layer_types": [5, "full_attention", [5, 5], ["full_attention"] * 10**4, ["x" * 1000] * 2, [[]], {}],
        "architectures": [5, "Llama", [5], ["x" * 10**6], {}, [None]],
        "model_type": [5, "x" * 10**6, []],
        "eos_token_id": ["x", 0.5, [None], [10**30], {}, 10**30, [[1]], list(range(10**5))],
        "pad_token_id": [10**30, "x"],
        "tie_word_embeddings": ["x", 5, []],
        "hidden_act": [5, [], {}, "x" * 10**6],
        "dtype": [5, [], "x" * 10**6],
        "torch_dtype": [7],
        "quantization_config": [5, [], "x"],
        "text_config": [5, [], {"num_hidden_layers": 10**30}, {"hidden_size": -1}, {"rope_scaling": {"factor": "x"}}],
        "vision_config": [5, {"num_hidden_layers": 10**6}, {"num_experts": 10**9}],
        "id2label": [5],
        "num_labels": [10**9, -1],
        "is_encoder_decoder": [5],
        "auto_map": [5],
        "unknown": [10**30, [[[]]] * 10**5, 10**4000, {"a": [{"b": -(10**30)}]}],
        "num_nextn_predict_layers": [10**9],
    }
)  # fmt: skip
_FILES = {
    "config": "config.json", "weights": "model.safetensors", "tokenizer": "tokenizer.json",
    "tokenizer_config": "tokenizer_config.json", "special tokens": "special_tokens_map.json",
    "added tokens": "added_tokens.json", "vocab": "vocab.json", "merges": "merges.txt", "tekken": "tekken.json",
    "model": "tokenizer.model", "template": "chat_template.jinja", "template json": "chat_template.json",
    "processor": "processor_config.json", "adapter": "adapter_config.json", "generation": "generation_config.json",
}  # fmt: skip
EVIL |= {f"{name} pipe": pipe(file) for name, file in _FILES.items()}
EVIL |= {f"{name} zero": linked(file, "/dev/zero") for name, file in _FILES.items()}
EVIL |= {
    "many keys": settings(**{f"key{number}": number for number in range(10**5)}),
    "config deep": content("config.json", b'{"model_type": "llama", "x": ' + DEEP + b"}"),
    "config deep objects": content("config.json", b'{"x":' * 5000 + b"1" + b"}" * 5000),
    "config half deep": content("config.json", b'{"x":' * 500 + b"1" + b"}" * 500),
    "config empty": content("config.json", b""),
    "config list": content("config.json", b"[]"),
    "config null": content("config.json", b"null"),
    "config NUL": content("config.json", bytes(1000)),
    "config not UTF-8": content("config.json", b'{"a": "\xff"}'),
    "config UTF-16": content("config.json", '{"a": 1}'.encode("utf-16")),
    "config surrogate": content("config.json", b'{"model_type": "\\ud800"}'),
    "config torn": content("config.json", b'{"model_type": "llama",\n "a'),
    "config digits": content("config.json", b'{"vocab_size": ' + b"9" * 10**5 + b"}"),
    "config 1 TiB": endless("config.json"),
    "config folder": folder_instead("config.json"),
    "config stdin": linked("config.json", "/dev/tty"),
    "config proc": linked("config.json", "/proc/self/maps"),
    "weights folder": folder_instead("model.safetensors"),
    "weights socket": socket_instead("model.safetensors"),
    "tokenizer folder": folder_instead("tokenizer.json"),
    "tokenizer 1 TiB": endless("tokenizer.json"),
    "generation folder": folder_instead("generation_config.json"),
    "generation deep": content("generation_config.json", b'{"x": ' + DEEP + b"}"),
    "generation list": content("generation_config.json", b"[]"),
    "generation torn": content("generation_config.json", b"{"),
}
EVIL |= _changes(
    {
        "do_sample": ["x", 5, []],
        "temperature": ["x", -1, _NAN, _INF, [], 10**400, {}],
        "top_p": ["x", -1, 2, _NAN, []],
        "top_k": ["x", -7, 0.5, [], 10**30],
        "min_p": ["x", -1, 2],
        "repetition_penalty": ["x", -1, 0, _NAN, 10**400],
        "max_new_tokens": ["x", -1, 0, 0.5, 10**30, []],
        "min_new_tokens": ["x", -1, 10**30],
        "eos_token_id": ["x", 0.5, [None], {}, [[1]], 10**30],
        "stop_strings": [5, [5], {}, ["x" * 10**6]],
        "num_beams": ["x", 10**30, []],
        "max_length": ["x", 10**30],
    },
    "generation_config.json",
)
_INDICES: dict[str, bytes] = {
    "list": b"[]", "number": b"5", "map list": b'{"weight_map": []}', "map number": b'{"weight_map": 5}',
    "empty": b"{}", "names numbers": b'{"weight_map": {"a": 5}}', "names null": b'{"weight_map": {"a": null}}',
    "outside": b'{"weight_map": {"a": "../../x.safetensors"}}', "zero": b'{"weight_map": {"a": "/dev/zero"}}',
    "deep": DEEP, "torn": b'{"weight_map"',
    "long": b'{"weight_map": {"a": "' + b"x" * 10**6 + b'"}}', "control": b'{"weight_map": {"a": "\\u001b[2J"}}',
}  # fmt: skip


def _indexed(data: bytes) -> Change:
    def change(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
        (folder / WEIGHTS_INDEX).write_bytes(data)

    return change


EVIL |= {f"index {name}": _indexed(data) for name, data in _INDICES.items()}

LATER: dict[str, Change] = _changes(
    {
        "num_hidden_layers": [1000, 20],
        "num_attention_heads": [[2]],
        "hidden_size": [10**6],
        "vocab_size": [10**6, 7],
        "head_dim": [2**16],
        "intermediate_size": [2**24],
        "max_position_embeddings": [2**31 - 1],
        "rope_scaling": [{"rope_type": "nonsense"}],
        "architectures": [[], ["\x1b[2J"]],
        "model_type": ["no-such", "\x1b[2J", "../x", ""],
        "hidden_act": ["no-such"],
        "dtype": ["float1", {"": 5}],
        "quantization_config": [
            {"quant_method": 5}, {"quant_method": "no-such"}, {"quant_method": "fp8", "weight_block_size": 5},
            {"quant_method": "gptq", "bits": 10**30, "group_size": 10**30},
        ],
        "auto_map": [{"AutoConfig": "evil.Config"}],
        "pad_token_id": [-5, 10**6],
        "attention_dropout": ["x", -1],
        "id2label": [{"x": 5}],
    }
)  # fmt: skip
"""Faults that only the family of a model or its weights show, if they are faults at all."""
LATER |= {
    "no settings": content("config.json", b"{}"),
    "long key": settings(**{"k" * 10**6: 1}),
    "config itself": linked("config.json", "config.json"),
    "weights nowhere": linked("model.safetensors", "nowhere"),
    "weights 1 TiB": endless("model.safetensors"),
    "index missing": _indexed(b'{"weight_map": {"a": "x.safetensors"}}'),
    "stop": settings("generation_config.json", stop_strings=[""]),
}
