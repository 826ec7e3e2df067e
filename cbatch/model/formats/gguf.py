"""Loads a model of a GGUF file: its program, its weights in the engine's packed formats, and its tokenizer."""

from __future__ import annotations

import hashlib
import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from cbatch.base.errors import ModelError, os_errors_as
from cbatch.base.model_files import sample_pieces
from cbatch.model.config import UnsupportedConfig
from cbatch.model.families import read_program
from cbatch.model.formats.gguf_architectures.architecture import Config
from cbatch.model.formats.gguf_blocks import BF16, F16, FLOATS, block_name
from cbatch.model.formats.gguf_config import matrices_of, read_config
from cbatch.model.formats.gguf_file import GgufFile, read_gguf
from cbatch.model.load_plan import LoadPlan
from cbatch.model.packed_file import Arrays, PackedFile, Sizes, WeightCache
from cbatch.model.program_model import check_weights
from cbatch.model.stored import StoredWeights
from cbatch.runtime.memory import is_out_of_memory
from cbatch.text.backend import TextTokenizer
from cbatch.text.gguf_tokenizer import VERSION, Pairs, end_ids, tokenizer_of, with_tokens

if TYPE_CHECKING:
    from cbatch.model.cpu import CpuModel
    from cbatch.model.cuda import CudaModel

_LEAST_CHARACTERS = 2**19
"""Of all tokens. Merges of fewer are made about as fast as they are read."""
_log = logging.getLogger("cbatch")


class GgufModel:
    """A model in GGUF files, whose weights have not been read yet.

    config:      as its config.json would be
    fingerprint: see `fingerprint_of`
    """

    def __init__(self, paths: Sequence[Path], cache: WeightCache | None = None) -> None:
        """Raises ModelError, with one sentence, for files that are damaged or hold a model that is not read.

        cache: where merges are kept. The tokenizer is read when it is asked for
        """
        self._cache = cache
        with os_errors_as(ModelError, f"Cannot read {paths[0]}"):
            self.file = file = read_gguf(paths)
        if file.architecture == "clip":
            raise ModelError(f"{paths[0]} is the vision tower of a model (mmproj): name the model's own file instead.")
        self.config: Config = read_config(file)
        try:
            self._program = read_program(self.config)
            self._weights = StoredWeights(matrices_of(file, self.config, self._program), file)
            check_weights(self._program, self._weights)
        except UnsupportedConfig as error:
            raise ModelError(f"Cannot load {paths[0]}: {error}.") from error
        self._metadata = with_tokens(file.metadata)
        self.config["eos_token_id"] = end_ids(self._metadata)
        self.fingerprint = fingerprint_of(file)

    @cached_property
    def tokenizer(self) -> TextTokenizer | None:
        """None if the file has none. Raises ModelError if it is damaged, or of a kind that is not read."""
        return tokenizer_of(self._metadata, self.config["vocab_size"], self._kept)

    def _kept(self, most: int, make: Callable[[], Pairs]) -> Pairs:
        """Merges beside packed weights, if these are kept."""

        def fill(arrays: Arrays) -> None:
            for name, numbers in (made := make())._asdict().items():
                arrays[name][: len(numbers)] = numbers
            arrays["count"][0] = len(made.first)

        if self._cache is None or most < min(self._cache.least_bytes, _LEAST_CHARACTERS):
            return make()
        headers = hashlib.blake2b(b"".join(self.file.headers), digest_size=16).hexdigest()
        pairs = dict.fromkeys(Pairs._fields, (most, np.dtype(np.uint32)))
        sizes: Sizes = {"count": (1, np.dtype(np.int64)), **pairs}
        try:
            arrays = PackedFile(self._cache, {"merges": VERSION, "headers": headers}).arrays(sizes, fill)
        except OSError as error:
            _log.info("The merges of a tokenizer are not kept: %s.", error)
            return make()
        return Pairs(*(arrays[name][: arrays["count"][0]] for name in Pairs._fields))

    @property
    def sampling(self) -> dict[str, Any]:
        """The values of the file's `general.sampling` keys, by their names there."""
        begin = "general.sampling."
        given = {key.removeprefix(begin): value for key, value in self._metadata.items() if key.startswith(begin)}
        return {key: float(f"{one:.6g}") if isinstance(one, float) else one for key, one in given.items()}  # float32

    @property
    def pooling(self) -> str | None:
        """How hidden states become an embedding (`Pooling.mode`), if the file says so."""
        kind: Any = self._metadata.get(f"{self._metadata.get('general.architecture')}.pooling_type")
        return {1: "mean", 2: "cls", 3: "lasttoken"}.get(kind)

    @property
    def is_quantized(self) -> bool:
        """Whether some of its matrices are kept as integers."""
        return any(tensor.type not in FLOATS for tensor in self.file.tensors.values())

    @property
    def dtype(self) -> torch.dtype:
        """That of the matrices; bfloat16 for what stands beside integers."""
        types = {tensor.type for tensor in self.file.tensors.values()}
        if self.is_quantized or BF16 in types:
            return torch.bfloat16
        return torch.float16 if F16 in types else torch.float32

    @property
    def description(self) -> str:
        """The formats in the file, for people."""
        counts = Counter(block_name(tensor.type) for tensor in self.file.tensors.values())
        formats = ", ".join(f"{count} {name}" for name, count in counts.most_common())
        numbers = sum(math.prod(tensor.shape) for tensor in self.file.tensors.values())
        return f"GGUF with {8 * self.file.num_bytes / max(1, numbers):.2f} bits a weight (tensors: {formats})"

    def load(self, plan: LoadPlan) -> CpuModel | CudaModel:
        """The model, ready to run. Raises ModelError or ConfigError if it cannot be.

        On a GPU, and in bfloat16 on a CPU, matrices keep the integers of the file; else they become numbers.
        """
        source, identity = self.file.paths[0], lambda: self.fingerprint
        dtype, quantize = plan.formats(self.dtype, is_quantized=self.is_quantized)
        try:
            model = plan.fast_model(self.config, self._weights, dtype, quantize, self.file.paths, identity)
        except (UnsupportedConfig, ImportError) as error:
            raise ModelError(f"Cannot load {source}: {error}.") from error
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise ModelError(f"Cannot load {source}: its weights do not fit into memory.") from error
        if self.is_quantized:
            self._weights.finish("GGUF", "the file", model, quantize)
        else:
            self.file.drop_pages()
        return model


def fingerprint_of(file: GgufFile, before: str = "") -> str:
    """A hash of the headers and of samples of every tensor, behind that of a file `before`: 32 hexadecimal digits."""
    digest = hashlib.blake2b(before.encode(), digest_size=16)
    for header in file.headers:
        digest.update(hashlib.blake2b(header).digest())
    for name in sorted(file.tensors):
        data = file.tensors[name].data.reshape(-1)
        for start, stop in sample_pieces(len(data)):
            digest.update(data[start:stop].tobytes())
    return digest.hexdigest()
