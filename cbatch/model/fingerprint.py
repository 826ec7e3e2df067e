"""A short hash of what a model is: its config, its tokenizer, and samples of every tensor."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from cbatch.base.model_files import open_regular, read_header, read_json_object, tensors_of_header, weight_files

NAMES_AND_VERSIONS = ("_name_or_path", "name_or_path", "transformers_version", "tokenizer_file")
"""Keys of a model's JSON files that say where it came from, not what it is."""

TOKENIZER_FILES = ("tokenizer.json", "added_tokens.json", "vocab*", "merges.txt", "*.model")
SAMPLES, SAMPLE_BYTES = 8, 16


def fingerprint(folder: Path) -> str:
    """A hash of the model in a folder, 32 hexadecimal digits.

    Only a few bytes of each tensor are read, at even distances, so that large models take no longer. Names, paths and
    times do not count. Raises ModelError for weights that are not safetensors files.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name in ("config.json", "tokenizer_config.json", "special_tokens_map.json"):
        settings = read_json_object(folder / name)
        kept = {key: value for key, value in settings.items() if key not in NAMES_AND_VERSIONS}
        digest.update(json.dumps(kept, sort_keys=True).encode())
    for path in sorted(path for pattern in TOKENIZER_FILES for path in folder.glob(pattern) if path.is_file()):
        with open_regular(path) as opened:
            digest.update(hashlib.file_digest(opened, hashlib.blake2b).digest())
    for path in weight_files(folder) or sorted(folder.glob("*.safetensors")):
        for sample in _samples(path):
            digest.update(sample)
    return digest.hexdigest()


def _samples(path: Path) -> Iterator[bytes]:
    """The header of a safetensors file (https://huggingface.co/docs/safetensors), then a few bytes of each tensor."""
    with open_regular(path) as file:
        header = read_header(file, path)
        yield header
        for tensor in tensors_of_header(header, path).values():
            start, stop = tensor.start, tensor.stop
            last = max(stop - SAMPLE_BYTES, start)  # the first sample is at the tensor's beginning, the last at its end
            for place in sorted({start + (last - start) * number // (SAMPLES - 1) for number in range(SAMPLES)}):
                file.seek(place)
                yield file.read(min(SAMPLE_BYTES, stop - place))
