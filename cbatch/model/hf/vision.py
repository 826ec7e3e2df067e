"""Images, by a model's own processor and vision tower in transformers.

The processor says which tokens stand for an image in a prompt, and the tower what is embedded in place of those of them
that are placeholders. The language model of the tower's network has no layers, so that its weights are not read.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property, partial
from importlib.util import find_spec
from threading import Lock
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cbatch.base.errors import ModelError, RequestError, first_sentence, invalid_row
from cbatch.base.model_files import model_folder
from cbatch.base.request import ImageTexts
from cbatch.media.decoding import decode_video
from cbatch.media.pictures import NO_IMAGES, Video
from cbatch.model.config import read_model_config
from cbatch.model.config_classes import levels
from cbatch.text.loading import silence_libraries

_OF_TEXT = "attention_mask", "token_type_ids", "mm_token_type_ids"
"""Results of processors that need not concern the network."""

_BLANK, _MARK = np.zeros((64, 64, 3), np.uint8), "\ue000"

_PLAIN = frozenset(["attention_mask", "inputs_embeds", "position_ids", "return_dict"])
_LEVELS = frozenset(["visual_pos_masks", "deepstack_visual_embeds"])
"""Arguments of language models, and those that add rows of images to hidden states (see `ImageRows`)."""


class ProcessedImage(NamedTuple):
    """An image as its model takes it.

    text:     what stands for it in a prompt, in place of the processor's token
    num_rows: how many of the tokens of that are placeholders, which the rows of its features replace
    inputs:   of the network, for that text
    kind:     as a chat template has it
    """

    text: str
    num_rows: int
    inputs: dict[str, Tensor]
    kind: Literal["image", "video"] = "image"

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.inputs.values())


class Vision:
    """The processor and the vision tower of a model, which are loaded when they are first needed."""

    def __init__(self, source: str, revision: str | None, device: torch.device, dtype: torch.dtype) -> None:
        self._source, self._revision, self._device, self._dtype = source, revision, device, dtype
        self._lock, self._refused = Lock(), dict[str, str]()
        self._checked = set[tuple[str, int]]()
        """Kinds and numbers of rows of images for which the network's call of its language model was found in order."""

    @cached_property
    def _config(self) -> Any:
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(self._source, revision=self._revision, trust_remote_code=False)

    @cached_property
    def _processor(self) -> Any:
        silence_libraries()
        kind = processor_class(self._config.model_type)
        return kind.from_pretrained(self._source, revision=self._revision, trust_remote_code=False)

    def marker(self, kind: Literal["image", "video"]) -> str:
        """The token that a chat template writes for one. Raises RequestError if the model takes none after all."""
        from transformers import AutoVideoProcessor

        if kind in self._refused:
            raise invalid_row(self._refused[kind])
        try:
            processor, given = self._processor, {"revision": self._revision, "trust_remote_code": False}
            token = getattr(processor, f"{kind}_placeholder_token", None) or getattr(processor, f"{kind}_token", None)
            if kind == "video" and token is not None and getattr(processor, "video_processor", None) is None:
                processor.video_processor = AutoVideoProcessor.from_pretrained(self._source, **given)
        except Exception as error:  # what is missing is named by errors of many kinds
            packages = [one for one in ("num2words", "torchvision") if one in str(error).lower() and not find_spec(one)]
            reason = f"it needs the package {packages[0]}." if packages else first_sentence(error)
            raise invalid_row(f"the model's processor of {kind}s cannot be loaded: {reason}") from error
        if token is None:
            raise invalid_row(f"this model takes no {kind}s")
        return str(token)

    @cached_property
    def placeholders(self) -> frozenset[int]:
        """The tokens that the rows of the features of images or videos replace."""
        others = *getattr(self._config, "visual_indicator_token_ids", ()), getattr(self._config, "video_token_id", None)
        return frozenset([self._config.image_token_id, *others]) - {None}

    @property
    def two_way(self) -> Literal["all", "windows"] | None:
        """In which layers tokens of an image see later ones of it, too: all, those with a window, or none."""
        if self._config.model_type == "gemma3":
            return "all"
        of_text = self._config.get_text_config()
        return "windows" if getattr(of_text, "use_bidirectional_attention", None) == "vision" else None

    @cached_property
    def context(self) -> tuple[ImageTexts, ProcessedImage]:
        """What the processor makes of prompts around images; and of a blank image beside another one, without a text if
        that is the same as alone.

        Raises RequestError if the text of an image depends on what stands around it.
        """
        one, two = (self._process_images([_BLANK] * count, around=_MARK) for count in (1, 2))
        (before, own, *after), (start, both, *end) = one.text.split(_MARK), two.text.split(_MARK)
        half = both[: len(both) // 2]
        if after != [""] or end != [""] or start != before or both != half * 2:
            raise self._unsupported("the text of one depends on what stands around it")
        pairs = [(one.inputs[name], two.inputs[name]) for name in one.inputs.keys() - {*_OF_TEXT, "input_ids"}]
        if own == half and all(torch.equal(torch.cat([a, a]).flatten(), b.flatten()) for a, b in pairs):
            half = ""
        has_bos = getattr(self._processor, "text_kwargs", {}).get("add_special_tokens", True)
        return ImageTexts((), (), before, has_bos), ProcessedImage(half, two.num_rows // 2, {})

    def process(self, pixels: NDArray[np.uint8], *, is_alone: bool = True) -> ProcessedImage:
        """An image [height, width, 3] as the model takes it. May be called by any thread.

        is_alone: whether no other of its conversation makes it something else
        """
        texts, other = self.context
        made = self._process_images([pixels] if is_alone else [pixels, _BLANK])
        behind, rows = ("", 0) if is_alone else (other.text, other.num_rows)
        text = made.text.removeprefix(texts.before).removesuffix(behind)
        return made._replace(text=text, num_rows=made.num_rows - rows)

    def _process_images(self, pixels: Sequence[NDArray[np.uint8]], around: str = "") -> ProcessedImage:
        from PIL import Image

        text, images = around + len(pixels) * self.marker("image") + around, [*map(Image.fromarray, pixels)]
        # A nested list would be pages of one image there.
        return self._process("image", text, images=images if hasattr(self._processor, "multi_page") else [images])

    def process_video(self, video: Video) -> ProcessedImage:
        """A video as the model takes it, of the frames that its processor chooses. May be called by any thread."""
        from transformers.video_utils import VideoMetadata

        text, processor = self.marker("video"), self._processor.video_processor
        settings = {name: getattr(processor, name, None) for name in processor.valid_kwargs.__annotations__}
        if not (settings.get("fps") or settings.get("num_frames")):
            settings["fps"] = 2  # as the code beside Qwen's models does
        sample = partial(processor.sample_frames, **settings)
        frames, about = decode_video(video, lambda about: sample(metadata=VideoMetadata(**about)))
        metadata = [VideoMetadata(**about)]
        return self._process("video", text, videos=[frames], video_metadata=metadata, do_sample_frames=False)

    def _process(self, kind: Literal["image", "video"], text: str, **given: Any) -> ProcessedImage:
        with self._lock:
            recorder = _Recorder(self._processor.tokenizer)
            self._processor.tokenizer = recorder
            try:
                made = self._processor(text=[text], add_special_tokens=False, return_tensors="pt", **given)
            finally:
                self._processor.tokenizer = recorder.tokenizer
        inputs = {name: one for name, one in made.items() if isinstance(one, Tensor)}
        is_placeholder = self._is_placeholder(inputs["input_ids"])
        if kind == "video" and "mm_token_type_ids" in inputs:  # which some tell by tokens around the marker
            inputs["mm_token_type_ids"] = 2 * is_placeholder.int()
        return ProcessedImage(recorder.text, int(is_placeholder.sum()), inputs, kind)

    def positions(self, token_ids: Sequence[int], images: Sequence[ProcessedImage]) -> NDArray[np.int64] | None:
        """[3, P] of a prompt's tokens, in time, rows and columns; None if the model only counts them."""
        if not hasattr(self._skeleton, "get_rope_index"):
            return None
        ids = torch.tensor([token_ids])
        types = self._is_placeholder(ids).int()
        types[types == 1] = torch.cat([torch.full([one.num_rows], 1 + (one.kind == "video")).int() for one in images])
        given = {"mm_token_type_ids": types, "attention_mask": torch.ones_like(ids)}
        for name in ("image_grid_thw", "video_grid_thw", "second_per_grid_ts"):
            if grids := [image.inputs[name] for image in images if name in image.inputs]:
                given[name] = torch.cat(grids)
        known = inspect.signature(self._skeleton.get_rope_index).parameters
        found, _ = self._skeleton.get_rope_index(ids, **{name: one for name, one in given.items() if name in known})
        return np.asarray(found[-3:, 0].numpy(), np.int64)

    def load(self) -> None:
        """Loads the tower now, if that works; else each image will say why not."""
        with suppress(Exception):
            _ = self._tower

    def unload(self) -> None:
        """Frees the tower."""
        self.__dict__.pop("_tower", None)

    def features(self, images: Sequence[ProcessedImage]) -> list[Tensor]:
        """[num_rows, columns] rows that replace the placeholders of each of several images (see `ImageRows`).

        They are what the network hands to its language model. Raises RequestError if it hands over more than is known.

        images: whose inputs have the same shapes
        """
        first = images[0]
        called = self._call(images)
        if (first.kind, first.num_rows) not in self._checked and (problem := self._problem(first, called)):
            raise self._unsupported(problem, first.kind)
        self._checked.add((first.kind, first.num_rows))
        is_placeholder = self._is_placeholder(torch.cat([image.inputs["input_ids"] for image in images]))
        own = called["inputs_embeds"][is_placeholder.to(self._device)]
        rows = torch.cat([own, *(called.get("deepstack_visual_embeds") or ())], -1)
        return [one[: first.num_rows].clone() for one in rows.chunk(len(images))]  # so that each can be freed

    def _call(self, images: Sequence[ProcessedImage]) -> dict[str, Any]:
        """The arguments that the language model gets for the texts of images."""
        inputs = {
            name: torch.cat([image.inputs[name] for image in images]).to(
                self._device, self._dtype if one.is_floating_point() else None
            )
            for name, one in images[0].inputs.items()
            if name not in _OF_TEXT or name in inspect.signature(self._tower.forward).parameters
        }
        try:
            with torch.inference_mode():
                self._tower(**inputs, use_cache=False)
        except _Reached as reached:
            return dict(reached.args[0])
        raise ModelError(f"Networks of the type {self._config.model_type} do not call their language model.")

    def _is_placeholder(self, token_ids: Tensor) -> Tensor:
        return torch.isin(token_ids, torch.tensor([*self.placeholders]))

    def _unsupported(self, problem: str, kind: str = "image") -> RequestError:
        self._refused[kind] = f"{kind}s of models of the type {self._config.model_type} are not supported: {problem}"
        return invalid_row(self._refused[kind])

    def _problem(self, image: ProcessedImage, called: dict[str, Any]) -> str:
        """Says what of a call of the language model the engine would not do; empty if all is well."""
        levels = called.get("deepstack_visual_embeds") or ()
        declared = getattr(self._config.vision_config, "deepstack_visual_indexes", None) or ()
        extra = {name for name, one in called.items() if one is not None and one is not False} - _PLAIN
        if len(levels) == len(declared):
            extra -= _LEVELS
        if self._config.model_type == "gemma4":  # computes them from tokens alone
            extra.discard("per_layer_inputs")
        if extra:
            return f"its language model takes {sorted(extra)[0]}, too"
        positions, is_placeholder = called.get("position_ids"), self._is_placeholder(image.inputs["input_ids"][0])
        run = (is_placeholder.diff(prepend=is_placeholder[:1]) != 0).cumsum(0)
        is_filled = ~called["inputs_embeds"][0].isnan().all(-1).cpu()
        if (is_filled & ~is_placeholder).any() or not is_filled.any():
            return "other tokens are replaced than those of its images"
        if positions is not None:
            known = self.positions(image.inputs["input_ids"][0].tolist(), [image])
            wanted = torch.arange(len(is_placeholder)) if known is None else torch.from_numpy(known)
            if not torch.equal(positions[..., 0, :].cpu().reshape(-1, len(run))[-3:].squeeze(0), wanted):
                return "its tokens have other positions"
        same = (run[:, None] == run) & is_placeholder
        masks = called.get("attention_mask")
        for name, mask in masks.items() if isinstance(masks, dict) else [("full_attention", masks)]:
            two_way = self.two_way == "all" or (self.two_way == "windows" and name == "sliding_attention")
            seen = torch.zeros_like(same) if mask is None or mask.ndim < 4 else mask[0, 0].cpu()
            is_seen = seen if seen.dtype == torch.bool else seen >= 0
            if not torch.equal(is_seen.triu(1), (same if two_way else torch.zeros_like(same)).triu(1)):
                return "its tokens see others of later places"
        return ""

    @cached_property
    def _skeleton(self) -> Any:
        """The network without memory."""
        from transformers import AutoModelForImageTextToText

        with torch.device("meta"):
            return AutoModelForImageTextToText.from_config(self._small_config()).model

    def _network(self, config: Any) -> tuple[Any, dict[str, Any]]:
        """The network of a config, and what transformers reports of its weights."""
        from transformers import AutoModelForImageTextToText

        found: tuple[Any, dict[str, Any]] = AutoModelForImageTextToText.from_pretrained(
            self._source, revision=self._revision, config=config, dtype=self._dtype, use_safetensors=True,
            ignore_mismatched_sizes=True, trust_remote_code=False, output_loading_info=True,
        )  # fmt: skip
        return found

    @cached_property
    def _tower(self) -> Any:
        silence_libraries()
        network, report = self._network(self._small_config())
        tower, decoder = network.base_model.to(self._device).eval(), network.get_decoder()
        of_text = {id(one) for part in (decoder, network.get_output_embeddings()) for one in part.parameters()}
        names = {name for name, one in network.named_parameters() if id(one) not in of_text}
        if lacking := sorted(names & set(report["missing_keys"])):
            problem = f"{len(lacking)} weights of its vision tower are not in its files, such as {lacking[0]}"
            raise ModelError(f"Cannot load {self._source}: {problem}.")
        network.config.get_text_config().pad_token_id = 0  # which some families embed in place of images
        for one in {network.get_input_embeddings(), *decoder.modules()}:
            if isinstance(one, torch.nn.Embedding):
                one.register_forward_pre_hook(lambda _, ids: (torch.zeros_like(ids[0]),))  # the one token that it has
                one.weight.data.fill_(torch.nan)
        decoder.register_forward_pre_hook(_reach, with_kwargs=True)
        return tower

    def _small_config(self) -> Any:
        """The config with a language model that has neither layers nor a vocabulary."""
        from copy import deepcopy

        config = deepcopy(self._config)
        text = config.get_text_config()
        text.num_hidden_layers, text.vocab_size, text.pad_token_id = 0, 1, None
        if hasattr(config, "quantization_config"):  # which files have for the language model only
            del config.quantization_config
        if getattr(text, "layer_types", None) is not None:
            text.layer_types = sorted(set(text.layer_types))  # which masks are made for
        return config


class _Reached(Exception):
    """A network has called its language model, with these arguments."""


def _reach(decoder: Any, _: Any, arguments: dict[str, Any]) -> None:
    """Ends the forward of the network of a language model, which is not there."""
    raise _Reached(arguments)


class _Recorder:
    """A tokenizer that keeps the text that it is given."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.text = tokenizer, ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def __call__(self, text: Any, **options: Any) -> Any:
        self.text = text if isinstance(text, str) else text[0]
        return self.tokenizer(text, **options)


def processor_class(kind: str) -> Any:
    """The class of the processor of models of a type. It takes no videos, which need torchvision, where it can."""
    import transformers
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    kind = "glm46v" if kind == "glm_ocr" else kind
    found = getattr(transformers, PROCESSOR_MAPPING_NAMES.get(kind, "AutoProcessor"))
    if kind not in PROCESSOR_MAPPING_NAMES or kind == "smolvlm":
        return found
    names, mixin = found.get_attributes(), transformers.ProcessorMixin
    others = [name for name in names if name != "video_processor"]

    def init(self: Any, *arguments: Any, **options: Any) -> None:
        given = {**dict(zip(names, arguments, strict=False)), **options, "video_processor": None}
        mixin.__init__(self, **{name: one for name, one in given.items() if name != "video_processor"})

    def loaded(cls: Any, *arguments: Any, **options: Any) -> list[Any]:
        parts = list(found._get_arguments_from_pretrained.__func__(cls, *arguments, **options))
        if others != names:
            parts.insert(names.index("video_processor"), None)
        return parts

    base = type("WithoutVideos", (mixin,), {"__init__": init})  # `init` of `found` calls that of `base`
    own = {"get_attributes": classmethod(lambda cls: others), "_get_arguments_from_pretrained": classmethod(loaded)}
    return type(found.__name__, (found, base), own)


def vision_of(source: str, revision: str | None, device: torch.device, dtype: torch.dtype) -> Vision | str:
    """The images of a model, or why it takes none."""
    config = read_model_config(model_folder(source, revision, ["config.json"]))
    has_tower = any("vision_config" in level for level in levels(config))
    return Vision(source, revision, device, dtype) if has_tower else NO_IMAGES
