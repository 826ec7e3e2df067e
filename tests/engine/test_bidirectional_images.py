"""Guards images whose tokens see each other: masks, chunks and the prefix cache."""

from __future__ import annotations

import base64
import io
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("PIL", reason="Pillow, which reads images, is not installed")

import transformers
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from cbatch.attention.base import AttentionBackend
from cbatch.attention.cpu import CpuAttention
from cbatch.attention.reference import ReferenceAttention, causal_mask
from cbatch.base.config import EngineConfig
from cbatch.base.params import SamplingParams
from cbatch.base.request import Request
from cbatch.engine.stepping_engine import SteppingEngine
from cbatch.model.hf.vision import Vision, processor_class
from cbatch.model.images import Images
from cbatch.runtime.batch import ImageRows, RaggedBatch
from cbatch.runtime.kv_cache import KVCache, LayerShape
from cbatch.schedule.output import ScheduledChunk
from cbatch.schedule.prefill_budget import PrefillBudget
from tests.support.attention_cases import AttentionCase, make_batch
from tests.support.tiny_models import draw_weights

pytestmark = pytest.mark.kernels

CPU = torch.device("cpu")
TOKENS, WINDOW, NEW = 36, 24, 12
"""Of an image, of the layers with a window, and generated."""

VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
TEXT = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2,
    "max_position_embeddings": 2048, "tie_word_embeddings": False,
}  # fmt: skip

TEMPLATE = (
    "{% for m in messages %}<turn>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}MARKER{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}"
    "</turn>\n{% endfor %}{% if add_generation_prompt %}<turn>model\n{% endif %}"
)


def make_tokenizer(**names: str) -> Any:
    """One of bytes, with special tokens under these names."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<pad>", "<bos>", "<eos>", "<turn>", "</turn>", *names.values(), *alphabet]
    backend = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, additional_special_tokens=["<turn>", "</turn>"], extra_special_tokens=names, **special
    )


def make_gemma3() -> tuple[Any, Any]:
    from transformers.models.gemma3 import Gemma3ImageProcessorPil

    tokenizer = make_tokenizer(
        boi_token="<start_of_image>", eoi_token="<end_of_image>", image_token="<image_soft_token>"
    )
    size = 8 * int(TOKENS**0.5)
    config = transformers.Gemma3Config(
        text_config={"vocab_size": len(tokenizer), "query_pre_attn_scalar": 16, **TEXT}, mm_tokens_per_image=TOKENS,
        vision_config={**VISION, "image_size": size, "patch_size": 8}, image_token_id=tokenizer.image_token_id,
        boi_token_index=tokenizer.boi_token_id, eoi_token_index=tokenizer.eoi_token_id, tie_word_embeddings=False,
    )  # fmt: skip
    pixels = Gemma3ImageProcessorPil(size={"height": size, "width": size}, image_seq_length=TOKENS)
    processor = transformers.Gemma3Processor(
        image_processor=pixels, tokenizer=tokenizer, image_seq_length=TOKENS,
        chat_template=TEMPLATE.replace("MARKER", "<start_of_image>"),
    )  # fmt: skip
    return transformers.Gemma3ForConditionalGeneration(config), processor


def make_gemma4(two_way: str | None = "vision", per_layer: int = 0) -> tuple[Any, Any]:
    """two_way, per_layer: None, and the width of embeddings of each layer, for small ones, whose images are causal"""
    from transformers.models.gemma4 import Gemma4ImageProcessorPil

    tokenizer = make_tokenizer(
        boi_token="<|image>", eoi_token="<image|>", image_token="<|image|>", audio_token="<|audio|>",
        boa_token="<|audio>", eoa_token="<audio|>",
    )  # fmt: skip
    text = {
        **TEXT, "vocab_size": len(tokenizer), "global_head_dim": 16, "use_bidirectional_attention": two_way,
        "hidden_size_per_layer_input": per_layer, "vocab_size_per_layer_input": len(tokenizer),
        "num_kv_shared_layers": 0,
    }  # fmt: skip
    vision = {"num_key_value_heads": 2, "head_dim": 16, "patch_size": 8, "pooling_kernel_size": 2}
    config = transformers.Gemma4Config(
        text_config=text, vision_config={**VISION, **vision, "position_embedding_size": 64}, audio_config=None,
        image_token_id=tokenizer.image_token_id, boi_token_id=tokenizer.boi_token_id,
        eoi_token_id=tokenizer.eoi_token_id, tie_word_embeddings=False,
    )  # fmt: skip
    processor = processor_class("gemma4")(
        transformers.Gemma4AudioFeatureExtractor(),
        Gemma4ImageProcessorPil(patch_size=8, max_soft_tokens=70, pooling_kernel_size=2), tokenizer, None,
        chat_template=TEMPLATE.replace("MARKER", "<|image|>"),
    )  # fmt: skip
    return transformers.Gemma4ForConditionalGeneration(config), processor


MAKERS: dict[str, Callable[..., tuple[Any, Any]]] = {"gemma3": make_gemma3, "gemma4": make_gemma4}


def image(seed: int) -> Image.Image:
    return Image.fromarray(np.random.RandomState(seed).randint(0, 255, (40, 50, 3), dtype=np.uint8))


CONVERSATIONS: list[list[str | int]] = [
    ["Hello ", 1, " what is it?"],
    [2, 1, " and ", 3, "?"],
    ["No image at all, but a text of some length."],
    ["Hello ", 1, " what is it?"],
    ["Hello ", 1, " what is that?"],
    ["x", 3, "y"],
    [1, 1],
]
"""Texts and numbers of images."""


def messages_of(parts: list[str | int]) -> list[dict[str, Any]]:
    content = [{"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in parts]
    return [{"role": "user", "content": content}]


class Model:
    """A folder of a tiny model, and what transformers generates with it."""

    def __init__(self, kind: str, folder: Path, **options: Any) -> None:
        network, processor = MAKERS[kind](**options)
        draw_weights(network, 3)
        network.generation_config.eos_token_id = 2
        network.save_pretrained(folder)
        processor.save_pretrained(folder)
        self.folder, self.expected = str(folder), list[tuple[list[int], list[int]]]()
        network = type(network).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        processor = processor_class(kind).from_pretrained(folder)
        for parts in CONVERSATIONS:
            text = processor.apply_chat_template(messages_of(parts), add_generation_prompt=True, tokenize=False)
            images = [image(part) for part in parts if isinstance(part, int)]
            inputs = processor(text=[text], images=images or None, return_tensors="pt", add_special_tokens=False)
            found = network.generate(**inputs, max_new_tokens=NEW, do_sample=False)[0].tolist()
            count = inputs["input_ids"].shape[1]
            self.expected.append((found[:count], found[count:]))

    def generate(self, **config: Any) -> tuple[list[tuple[list[int], list[int]]], dict[str, int]]:
        """The prompts and outputs of an engine, and some of its counts. A later request is more urgent."""
        limits = {"max_batch_tokens": 512, "max_seqs": 8, **config}
        with SteppingEngine(EngineConfig(model=self.folder, device="cpu", dtype="float32", **limits)) as engine:
            assert engine.loaded.fast_model is not None
            processor, params = engine.input_processor(), SamplingParams(max_tokens=NEW, temperature=0.0)
            requests = [processor.encode(processor.request(self._request(one), params)) for one in CONVERSATIONS]
            outputs, coming = dict[int, list[int]](), list(requests)
            while engine.has_work or coming:
                for request in coming[:2]:
                    request.priority = len(coming)
                    outputs[engine.add_request(request)] = []
                coming = coming[2:]
                for event in engine.step():
                    assert event.error is None, event.error
                    if event.token_id is not None:
                        outputs[event.request_id].append(event.token_id)
                engine.scheduler.check_integrity()
            stats = engine.stats()
        counts = {"cached": stats.num_cached_tokens, "preemptions": stats.num_preemptions}
        prompts = [list(request.prompt_ids) for request in requests]
        return list(zip(prompts, outputs.values(), strict=True)), counts

    @staticmethod
    def _request(parts: list[str | int]) -> Request:
        given, messages = list[tuple[str, str]](), messages_of(parts)
        for part in parts:
            if isinstance(part, int):
                image(part).save(data := io.BytesIO(), "PNG")
                given.append(("data:image/png;base64," + base64.b64encode(data.getvalue()).decode(), "image"))
        if not given:
            messages = [{"role": "user", "content": parts[0]}]
        return Request(messages=messages, given_pictures=given)


@pytest.fixture(scope="module", params=sorted(MAKERS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"max_batch_tokens": 100},
        {"max_batch_tokens": 41, "max_seqs": 3},
        {"max_batch_tokens": 7, "max_seqs": 4},
        {"max_batch_tokens": 50, "prefix_cache": False},
        {"max_batch_tokens": 64, "kv_blocks": 16},
    ],
    ids=str,
)
def test_tokens_are_those_of_transformers(model: Model, config: dict[str, Any]) -> None:
    """Guards masks with and without windows, wherever prompts are cut, also if an image is larger than a step."""
    found, counts = model.generate(**config)
    assert found == model.expected
    assert (counts["cached"] > 0) == config.get("prefix_cache", True) or "kv_blocks" in config
    assert counts["preemptions"] > 0 or "kv_blocks" not in config


def test_embeddings_of_each_layer_stay_those_of_tokens(tmp_path: Path) -> None:
    """Guards small models of Gemma 4: rows of images go into the residual stream only, and their masks are causal."""
    model = Model("gemma4", tmp_path, two_way=None, per_layer=8)
    assert model.generate(max_batch_tokens=50)[0] == model.expected


@pytest.mark.parametrize("wrong", [None, "other layers"])
def test_another_mask_gives_other_tokens(model: Model, wrong: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the test above against models whose masks do not matter: causal ones, or those of the other Gemma."""
    swapped = "windows" if "gemma3" in model.folder else "all"
    monkeypatch.setattr(Vision, "two_way", swapped if wrong else None)
    with pytest.raises(AssertionError, match="its tokens see others of later places"):
        model.generate()
    monkeypatch.setattr(Vision, "_problem", lambda *_: "")
    assert model.generate()[0] != model.expected


def test_a_chunk_that_ends_within_an_image_gives_other_tokens(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the test above against prompts that are never cut within an image."""
    monkeypatch.setattr(PrefillBudget, "allow_spans", lambda self, sequence, budget: budget)
    with pytest.raises(AssertionError):
        assert model.generate(max_batch_tokens=7, max_seqs=4)[0] == model.expected


def test_a_prefix_that_ends_within_an_image_is_taken_over(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the rest of an image whose beginning is cached: it sees all of the image, and is not cut."""
    borders, rows = dict[str, list[bool]](start=[], stop=[]), Images.rows

    def observed(self: Images, chunks: Sequence[ScheduledChunk]) -> ImageRows | None:
        for chunk in chunks:
            for name, found in borders.items():
                place = getattr(chunk, name)
                found.append(any(first < place < end for first, end in chunk.sequence.request.two_way_spans))
        return rows(self, chunks)

    monkeypatch.setattr(Images, "rows", observed)
    assert model.generate(max_batch_tokens=60)[0] == model.expected
    assert any(borders["start"]) and not any(borders["stop"])


CASES = {
    "plain": AttentionCase(LayerShape(2, 32, 32), group=2),
    "window": AttentionCase(LayerShape(2, 32, 32), group=2, window=21),
    "everything": AttentionCase(LayerShape(1, 64, 64), group=3, window=150, softcap=3.0),
}


def two_way_batches(case: AttentionCase, seed: int, *, only_in_windows: bool) -> list[RaggedBatch]:
    """Two steps of sequences with images, longer and shorter than windows and tiles; the second begins within some."""
    chooser = random.Random(seed)
    lengths, batches = [1, 40, 200, 330, 700], list[RaggedBatch]()
    blocks = list(range(sum(-(-length // case.block_size) for length in lengths)))
    chooser.shuffle(blocks)
    tables = [[blocks.pop() for _ in range(-(-length // case.block_size))] for length in lengths]
    spans = [(0, 0), (3, 30), (10, 170), (100, 330), (500, 640)]
    cuts = [0, 7, 40, 128, 560]  # what is before has been computed with all of the image, as far as it sees that
    for chunks in (
        [(one, 0, cut) for one, cut in enumerate(cuts) if cut],
        list(zip(range(5), cuts, lengths, strict=True)),
    ):
        batch, places, ends = make_batch(chunks, tables, case.block_size, CPU), list[int](), list[int]()
        for (one, start, stop), begin in zip(chunks, batch.counts.cumsum() - batch.counts, strict=True):
            inside = range(max(start, spans[one][0]), min(stop, spans[one][1]))
            places += [int(begin) + place - start for place in inside]
            ends += [min(spans[one][1], stop)] * len(inside)
        images = ImageRows(np.array(places), torch.empty(0), None, np.array(ends, np.int64), only_in_windows)
        batches.append(replace(batch, images=images))
    return batches


def attend(backend: AttentionBackend, case: AttentionCase, batches: list[RaggedBatch]) -> list[Tensor]:
    layer, generator = case.layer, torch.Generator().manual_seed(7)
    blocks = 1 + max(int(batch.tables.max()) for batch in batches)
    shapes = [backend.block_shapes(layer, case.block_size, torch.float32)]
    cache, found = KVCache(shapes, blocks, case.block_size, torch.float32, CPU), list[Tensor]()
    for batch in batches:
        query, key, value = (
            torch.randn(len(batch.ids), heads, dim, generator=generator)
            for heads, dim in (
                (layer.heads * case.group, layer.key_dim),
                (layer.heads, layer.key_dim),
                (layer.heads, layer.value_dim),
            )
        )
        metadata = backend.prepare(batch, case.block_size)
        backend.store_kv(cache.keys[0], cache.values[0], key, value, metadata)
        found.append(backend.attend(query, cache.keys[0], cache.values[0], metadata, **case.options))
    return found


@pytest.mark.parametrize("only_in_windows", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_cpu_kernels_attend_as_the_reference_does(name: str, only_in_windows: bool) -> None:
    """Guards limits of what rows see, at all borders of tiles, splits and tasks."""
    batches = two_way_batches(CASES[name], 1, only_in_windows=only_in_windows)
    both = [attend(one, CASES[name], batches) for one in (CpuAttention(), ReferenceAttention())]
    for ours, theirs in zip(*both, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", CASES)
def test_the_reference_sees_what_the_masks_of_transformers_allow(name: str) -> None:
    """Guards the reference against masks of its own: AND(window, OR(causal, image)) in Gemma 3."""
    case, stop, spans = CASES[name], 60, [(4, 34), (40, 55)]
    batch = make_batch([(0, 0, stop)], [list(range(4))], case.block_size, CPU)
    places = np.concatenate([np.arange(*span) for span in spans])
    ends = np.concatenate([np.full(span[1] - span[0], span[1]) for span in spans])
    batch = replace(batch, images=ImageRows(places, torch.empty(0), None, ends))
    (sequence,) = ReferenceAttention().prepare(batch, case.block_size).sequences
    mask = causal_mask(sequence, CPU, case.window)
    query, key = torch.arange(stop)[:, None], torch.arange(stop)
    image = sum(((query >= first) & (query < end) & (key >= first) & (key < end)) for first, end in spans).bool()
    expected = (key <= query) | image
    assert torch.equal(mask, expected & (key > query - (case.window or stop)))
