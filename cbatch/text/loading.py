"""Loads tokenizers into this process: straight from a model's files if their meaning is certain, or by transformers.

Importing transformers takes longer than anything else before the first token, and for most folders it then only reads
`tokenizer.json`. What else it may do depends on the class that the folder names, the model's type, and keys and files
of older versions. The simple cases are known here; the others are left to transformers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.models import BPE
from tokenizers.normalizers import NFC
from tokenizers.pre_tokenizers import ByteLevel, Split
from tokenizers.pre_tokenizers import Sequence as PreTokenizers

from cbatch.base.errors import CbatchError, ModelError, as_error
from cbatch.base.model_files import read_json_object
from cbatch.text.backend import Encoded, TextTokenizer, TokenizerBackend, printable
from cbatch.text.patterns import QWEN2

VERBATIM_CLASSES = frozenset(("TokenizersBackend", "PreTrainedTokenizerFast"))
"""Classes of transformers that use `tokenizer.json` as it is: the new and the old name of one class."""

VERBATIM_MODEL_TYPES = frozenset(("granite", "llama", "mistral", "olmo2", "smollm3"))
"""Model types for which transformers never replaces these two classes by another."""

QWEN2_CLASSES = VERBATIM_CLASSES | {"Qwen2Tokenizer", "Qwen2TokenizerFast"}
QWEN2_MODEL_TYPES = frozenset(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"))
"""For these, transformers may use Qwen2Tokenizer whatever the folder says. It builds all but the vocabulary itself."""

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
LISTED_TOKENS = ("additional_special_tokens", "extra_special_tokens")
MUST_BE_OFF = ("add_prefix_space", "split_special_tokens", "model_specific_special_tokens")

IGNORED_KEYS = frozenset(
    "add_bos_token add_eos_token backend clean_up_tokenization_spaces errors is_local legacy local_files_only "
    "model_input_names model_max_length name_or_path padding_side processor_class sp_model_kwargs "
    "spaces_between_special_tokens special_tokens_map_file tokenizer_class tokenizer_file truncation_side "
    "use_default_system_prompt".split()
)
"""Keys of `tokenizer_config.json` that change neither tokens nor templates if there is a `tokenizer.json`."""

KNOWN_KEYS = IGNORED_KEYS.union(NAMED_TOKENS, LISTED_TOKENS, MUST_BE_OFF, ("added_tokens_decoder", "chat_template"))


def load_here(source: str, revision: str | None) -> TextTokenizer:
    """The tokenizer of a folder or a hub id, whatever it is. Raises ModelError."""
    try:
        return from_folder(Path(source)) or _from_transformers(source, revision)
    except CbatchError:
        raise
    except BaseException as raised:  # a panic of the library, too
        reason = printable(str(as_error(raised))) or type(raised).__name__
        raise ModelError(f"Cannot load the tokenizer of {source}: {reason}.") from raised


def silence_libraries() -> None:
    """Hides the warnings and progress bars of transformers, accelerate and the hub; their errors are still raised.

    Called just before they are used, because importing transformers takes long.
    """
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    for name in ("huggingface_hub", "accelerate"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _from_transformers(source: str, revision: str | None) -> TextTokenizer:
    from transformers import AutoTokenizer

    silence_libraries()
    original: Any = AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=False)
    if not getattr(original, "is_fast", False):
        raise ModelError(f"The tokenizer of {source} has no tokenizer.json, which is needed for streaming text.")
    return of_transformers(original)


def of_transformers(fast: Any) -> TextTokenizer:
    """A fast tokenizer of transformers, which may do more to a text than the library's own in it."""

    def encode(text: str, *, add_special_tokens: bool) -> Encoded:
        encoded: Encoded = fast(text, add_special_tokens=add_special_tokens).encodings[0]
        return encoded

    backend = TokenizerBackend(fast.backend_tokenizer, encode)
    return TextTokenizer(backend, fast.bos_token_id, fast.chat_template, fast.special_tokens_map)


def from_folder(folder: Path) -> TextTokenizer | None:
    """The tokenizer that transformers would make of a model folder.

    None if that is not certain, or if something is wrong with the settings; then transformers reports it.
    Raises ModelError if the library cannot read `tokenizer.json`.
    """
    backend: Tokenizer | None = None
    is_read = False
    try:
        config, settings = (read_json_object(folder / name) for name in ("config.json", "tokenizer_config.json"))
        if not _is_known(folder, settings):
            return None
        template = _chat_template(folder, settings.get("chat_template"))
        special_tokens = {name: _content(settings[name]) for name in NAMED_TOKENS if settings.get(name) is not None}
        is_read = True
        backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
        kind, name = config.get("model_type"), settings.get("tokenizer_class")
        is_verbatim = kind in VERBATIM_MODEL_TYPES and name in VERBATIM_CLASSES
        is_qwen2 = kind in QWEN2_MODEL_TYPES and name in QWEN2_CLASSES and _is_qwen2(settings, backend)
        has_all = _has_all_special_tokens(settings, special_tokens.values(), backend)
        if not (is_verbatim or is_qwen2) or not has_all:
            return None
    except Exception as error:  # the files may hold values of any type, and the library raises plain Exception
        if is_read and backend is None:
            raise ModelError(f"Cannot load the tokenizer of {folder}: {printable(str(error))}.") from error
        return None
    bos = special_tokens.get("bos_token")
    bos_id = None if bos is None else backend.token_to_id(bos)
    return TextTokenizer(TokenizerBackend(backend), bos_id, template, special_tokens)


def _content(token: Any) -> str:
    if isinstance(token, dict) and token.get("__type") == "AddedToken":
        token = token["content"]
    if not isinstance(token, str):
        raise TypeError("a special token must be text")
    return token


def _is_known(folder: Path, settings: dict[str, Any]) -> bool:
    if not KNOWN_KEYS.issuperset(settings) or any(settings.get(key) for key in MUST_BE_OFF):
        return False
    # These older files count if the tokens are not listed; a tekken.json would take precedence over tokenizer.json.
    older_files = (folder / name for name in ("special_tokens_map.json", "added_tokens.json"))
    older = "added_tokens_decoder" not in settings and any(path.exists() for path in older_files)
    return not older and not any(folder.glob("*tekken*.json"))


def _is_qwen2(settings: dict[str, Any], backend: Tokenizer) -> bool:
    """Whether Qwen2Tokenizer would build this tokenizer from the same vocabulary and merges."""
    model = backend.model
    if not isinstance(model, BPE) or model.dropout is not None or model.unk_token is not None:
        return False
    affixes = model.continuing_subword_prefix or model.end_of_word_suffix
    if affixes or model.fuse_unk or model.byte_fallback or model.ignore_merges:
        return False
    split = Split(Regex(QWEN2), behavior="isolated", invert=False)
    expected = PreTokenizers([split, ByteLevel(add_prefix_space=False, use_regex=False)])
    return (
        _as_json(backend.normalizer) == _as_json(NFC())
        and _as_json(backend.pre_tokenizer) == _as_json(expected)
        and _as_json(backend.decoder).startswith('{"type":"ByteLevel"')
        # Qwen2Tokenizer has defaults of its own for tokens that the folder does not name.
        and {"eos_token", "pad_token", "unk_token"} <= settings.keys()
    )


def _as_json(part: Any) -> str:
    """A part of a tokenizer as JSON, without the start of offsets, which only post-processors look at."""
    return "" if part is None else part.__getstate__().decode().replace('"trim_offsets":false', '"trim_offsets":true')


def _has_all_special_tokens(settings: dict[str, Any], tokens: Iterable[str], backend: Tokenizer) -> bool:
    """Whether all tokens that the settings name are special tokens already, and nothing is truncated or padded."""
    added = backend.get_added_tokens_decoder()
    listed = settings.get("added_tokens_decoder")
    if listed is not None and {int(number): AddedToken(**token).__getstate__() for number, token in listed.items()} != {
        number: token.__getstate__() for number, token in added.items()
    }:
        return False
    listed_tokens = {_content(token) for key in LISTED_TOKENS for token in settings.get(key) or ()}
    special = {token.content for token in added.values() if token.special}
    return listed_tokens.union(tokens) <= special and backend.truncation is None and backend.padding is None


def _chat_template(folder: Path, configured: Any) -> str | dict[str, str] | None:
    """Templates in files of their own; without such files, those of `tokenizer_config.json`."""
    paths = {path.name.removesuffix(".jinja"): path for path in (folder / "additional_chat_templates").glob("*.jinja")}
    default = folder / "chat_template.jinja"
    if default.is_file():
        paths = {"default": default} | paths
    if paths:
        found = {name: path.read_text(encoding="utf-8") for name, path in paths.items()}
        return found["default"] if found.keys() == {"default"} else found
    if isinstance(configured, list):
        return {entry["name"]: str(entry["template"]) for entry in configured}
    if not isinstance(configured, str | None):
        raise TypeError("a chat template must be text")
    return configured
