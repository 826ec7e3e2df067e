"""A tokenizer from a folder's files is the one that transformers makes of them, or there is none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

from cbatch.base.errors import ModelError
from cbatch.model.load_plan import DEMO_MODEL
from cbatch.text.isolated import load_tokenizer
from cbatch.text.loading import (
    QWEN2_CLASSES,
    QWEN2_MODEL_TYPES,
    VERBATIM_CLASSES,
    VERBATIM_MODEL_TYPES,
    from_folder,
)
from cbatch.text.patterns import QWEN2
from cbatch.text.tokenizer import ChatTokenizer
from tests.support.samples import sampled

SPECIAL = ["<s>", "</s>", "<pad>"]
PLAIN_ADDED = AddedToken("<tool>", special=False, normalized=False)
TEXTS = [
    "",
    "hello world, I'm here's 123456",
    "  two  spaces\n\n\ttab \r\n",
    "<s>hello</s> <pad><tool>x</tool>< s>",
    "日本語 é e\u0301 \u00a0\u200d 👩‍👩‍👧 \U000f0000 ſ ﬁ",
    "<s><s>hello",
]
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
Settings = dict[str, Any]


def train(backend: Tokenizer, alphabet: list[str]) -> Tokenizer:
    special = [AddedToken(token, special=True) for token in SPECIAL]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(["hello world, I'm here", "two spaces", "日本語 é"] * 3, trainer)
    backend.add_tokens([PLAIN_ADDED])
    return backend


def byte_level(before: Any = None, normalizer: Any = None, model: Any = None) -> Tokenizer:
    backend = Tokenizer(model or models.BPE())
    backend.normalizer = normalizer
    step = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=before is None)
    backend.pre_tokenizer = pre_tokenizers.Sequence([before, step]) if before else step
    backend.decoder = decoders.ByteLevel()
    return train(backend, sorted(pre_tokenizers.ByteLevel.alphabet()))


def with_bos() -> Tokenizer:
    backend = byte_level()
    add = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    backend.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), add])
    return backend


def qwen2(pattern: str = QWEN2, **options: Any) -> Tokenizer:
    before = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    model = models.BPE(continuing_subword_prefix="", end_of_word_suffix="", **options)
    backend = byte_level(before, normalizers.NFC(), model)
    backend.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    return backend


def pieces() -> Tokenizer:
    """As Llama 2 has it: spaces as letters, and bytes for what is in no piece."""
    backend = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return train(backend, [f"<0x{byte:02X}>" for byte in range(256)])


def save(folder: Path, backend: Tokenizer, model_type: str, settings: Settings) -> Path:
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def listed(backend: Tokenizer) -> Settings:
    return {str(number): token.__getstate__() for number, token in backend.get_added_tokens_decoder().items()}


NAMED = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "chat_template": TEMPLATE}
OLD_STYLE = {"__type": "AddedToken", "content": "<s>", "lstrip": False, "normalized": False, "rstrip": False}
LIST = [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": "tools"}]
FLAGS = {"add_bos_token": True, "add_eos_token": True, "clean_up_tokenization_spaces": True, "legacy": True}
KINDS: dict[str, tuple[Callable[[], Tokenizer], str, str, Settings]] = {
    "no post-processor": (byte_level, "llama", "TokenizersBackend", NAMED | FLAGS),
    "BOS and EOS": (with_bos, "llama", "PreTrainedTokenizerFast", NAMED | {"chat_template": LIST}),
    "tokens listed": (with_bos, "mistral", "TokenizersBackend", NAMED | {"added_tokens_decoder": listed(with_bos())}),
    "old names": (byte_level, "llama", "PreTrainedTokenizerFast", NAMED | {"additional_special_tokens": ["</s>"]}),
    "tokens with flags": (byte_level, "olmo2", "TokenizersBackend", NAMED | {"bos_token": OLD_STYLE}),
    "nothing named": (byte_level, "granite", "TokenizersBackend", {}),
    "pieces": (pieces, "llama", "TokenizersBackend", NAMED),
    "Qwen": (qwen2, "qwen3", "Qwen2Tokenizer", NAMED | {"unk_token": None, "added_tokens_decoder": listed(qwen2())}),
}


def theirs_of(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)


def check_equal(folder: Path) -> None:
    theirs, ours = theirs_of(folder), from_folder(folder)
    assert ours is not None
    assert (ours.bos_id, ours.chat_template) == (theirs.bos_token_id, theirs.chat_template)
    assert ours.special_tokens == theirs.special_tokens_map
    assert listed(ours.backend.tokenizer) == listed(theirs.backend_tokenizer)
    for text in TEXTS:
        for special in (True, False):
            expected = theirs(text, add_special_tokens=special, return_offsets_mapping=True)
            found = ours.backend.encode(text, add_special_tokens=special)
            assert (found.ids, found.offsets) == (expected["input_ids"], expected["offset_mapping"])
        ids = ours.backend.encode(text).ids
        assert ours.backend.decode(ids) == theirs.backend_tokenizer.decode(ids)


@pytest.mark.parametrize("kind", ["the demo model", *KINDS])
def test_equals_what_transformers_makes(kind: str, tmp_path: Path) -> None:
    """Guards ids, offsets, special tokens and templates: what is read here must be what AutoTokenizer loads."""
    if kind in KINDS:
        make, model_type, name, settings = KINDS[kind]
        check_equal(save(tmp_path, make(), model_type, settings | {"tokenizer_class": name}))
    else:
        check_equal(DEMO_MODEL)


TYPES = [(kind, name) for kind in sorted(VERBATIM_MODEL_TYPES) for name in sorted(VERBATIM_CLASSES)]
TYPES += [(kind, name) for kind in sorted(QWEN2_MODEL_TYPES) for name in sorted(QWEN2_CLASSES)]


@pytest.mark.parametrize("kind", sampled(TYPES, 8, keep=[("qwen3", "Qwen2Tokenizer")]), ids=str)
def test_every_type_and_class_equals_too(kind: tuple[str, str], tmp_path: Path) -> None:
    """Guards the lists against a transformers that puts another class in place of the one that is named."""
    model_type, name = kind
    make = qwen2 if model_type in QWEN2_MODEL_TYPES else byte_level
    check_equal(save(tmp_path, make(), model_type, NAMED | {"unk_token": None, "tokenizer_class": name}))


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A folder that is read here."""
    return save(tmp_path, byte_level(), "llama", NAMED | {"tokenizer_class": "TokenizersBackend"})


@pytest.mark.parametrize("others", [{}, {"tool_use": "tools"}, {"default": "other", "rag": "documents"}])
@pytest.mark.parametrize("default", ["in a file\r\n{{ bos_token }}", None])
def test_templates_in_files(default: str | None, others: dict[str, str], plain: Path) -> None:
    """Guards models with several templates, and those that have one in a file and an older one in their settings."""
    if default is not None:
        (plain / "chat_template.jinja").write_bytes(default.encode())
    (plain / "additional_chat_templates").mkdir()
    for name, text in others.items():
        (plain / "additional_chat_templates" / f"{name}.jinja").write_text(text)
    check_equal(plain)


def truncating(backend: Tokenizer) -> None:
    backend.enable_truncation(3)


def padding(backend: Tokenizer) -> None:
    backend.enable_padding(length=9, pad_token="<pad>", pad_id=2)


OTHER_FLAGS = listed(byte_level()) | {"2": {"content": "<pad>", "lstrip": True, "special": True, "normalized": False}}
SETTINGS = "tokenizer_config.json"
ODD: dict[str, tuple[str, Any]] = {
    "a class that is rebuilt": (SETTINGS, {"tokenizer_class": "LlamaTokenizer"}),
    "no class": (SETTINGS, {"tokenizer_class": None}),
    "another type of model": ("config.json", {"model_type": "gpt2"}),
    "a type with a class of its own": ("config.json", {"model_type": "qwen2"}),
    "an unknown key": (SETTINGS, {"fix_mistral_regex": True}),
    "a token that is new": (SETTINGS, {"pad_token": "<new>"}),
    "a new token in a list": (SETTINGS, {"additional_special_tokens": ["<new>"]}),
    "a token that is not special": (SETTINGS, {"pad_token": "<tool>"}),
    "a new token with a name of its own": (SETTINGS, {"image_token": "<image>"}),
    "tokens by names": (SETTINGS, {"extra_special_tokens": {"image_token": "<tool>"}}),
    "tokens listed with other flags": (SETTINGS, {"added_tokens_decoder": OTHER_FLAGS}),
    "older file of special tokens": ("special_tokens_map.json", {"unk_token": "<new>"}),
    "older file of added tokens": ("added_tokens.json", {"<new>": 401}),
    "a tekken.json": ("tekken.json", {}),
    "special tokens are split": (SETTINGS, {"split_special_tokens": True}),
    "prefix space": (SETTINGS, {"add_prefix_space": True}),
    "truncation": ("tokenizer.json", truncating),
    "padding": ("tokenizer.json", padding),
}
"""Keys that a file gets, or what happens to a tokenizer."""


@pytest.mark.parametrize("name", ODD)
def test_odd_folders_are_left_to_transformers(name: str, plain: Path) -> None:
    """Guards every condition: what this module does not know comes from AutoTokenizer, as before."""
    assert from_folder(plain) is not None
    file, change = plain / ODD[name][0], ODD[name][1]
    if callable(change):
        backend = Tokenizer.from_file(str(file))
        change(backend)
        backend.save(str(file))
    else:
        settings = (json.loads(file.read_text()) if file.exists() else {}) | change
        file.write_text(json.dumps({key: value for key, value in settings.items() if value is not None}, default=str))
    assert from_folder(plain) is None
    found, theirs = load_tokenizer(str(plain), None), theirs_of(plain)
    assert found is not None
    loaded = ChatTokenizer(found)
    for text in TEXTS[:-1]:  # BOS twice is what is put right above
        assert loaded.encode(text) == theirs(text)["input_ids"]


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (lambda: qwen2(r"\p{N}{1,3}|[^\p{N}]+"), {"unk_token": None}),
        (lambda: qwen2(ignore_merges=True), {"unk_token": None}),
        (lambda: qwen2(byte_fallback=True), {"unk_token": None}),
        (byte_level, {"unk_token": None}),
        (qwen2, {}),
    ],
)
def test_a_qwen_that_is_built_otherwise(make: Callable[[], Tokenizer], settings: Settings, tmp_path: Path) -> None:
    """Guards models of Qwen's types which Qwen2Tokenizer changes, also by a token that the folder does not name."""
    assert (
        from_folder(save(tmp_path, make(), "qwen2", NAMED | settings | {"tokenizer_class": "Qwen2Tokenizer"})) is None
    )


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "{}"),
        ("tokenizer.json", '{"version'),
        (SETTINGS, "{"),
        (SETTINGS, '{"tokenizer_class": "TokenizersBackend", "bos_token": 5}'),
    ],
)
def test_broken_files_are_said(name: str, content: str, plain: Path) -> None:
    """Guards the error message if a tokenizer cannot be loaded at all."""
    (plain / name).write_text(content)
    with pytest.raises(ModelError, match=r"^Cannot load the tokenizer of .*\.$"):
        load_tokenizer(str(plain), None)
