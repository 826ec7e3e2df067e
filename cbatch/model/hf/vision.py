"""Images, by a model's own processor and vision tower in transformers.

The processor says which tokens stand for an image in a prompt, and the tower what is embedded in place of those of them
that are placeholders. The language model of the tower's network has no layers, so that its weights are not read.
"""

from __future__ import annotations

import inspect
import re
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
from cbatch.base.model_files import model_folder, read_json_object
from cbatch.base.request import ImageTexts
from cbatch.media.decoding import decode_video
from cbatch.media.pictures import NO_IMAGES, Kind, Video
from cbatch.model.config import UnsupportedConfig, read_model_config
from cbatch.model.config_classes import levels
from cbatch.model.families import read_program
from cbatch.model.ops.all import AddImage, Program, Rotary
from cbatch.text.loading import silence_libraries

_OF_TEXT = "input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids"
"""Results of processors that need not concern the network."""

_BLANK, _MARK = np.zeros((64, 64, 3), np.uint8), "\ue000"

_PLAIN = frozenset(["attention_mask", "inputs_embeds", "logits_to_keep", "position_ids", "return_dict"])
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
    kind: Kind = "image"

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.inputs.values())


class Vision:
    """The processor and the vision tower of a model, which are loaded when they are first needed."""

    def __init__(self, source: str, revision: str | None, device: torch.device, dtype: torch.dtype) -> None:
        self._source, self._revision, self._device, self._dtype = source, revision, device, dtype
        self._lock, self._refused = Lock(), dict[Kind, str]()
        self._checked = set[tuple[Kind, int]]()
        """Kinds and numbers of rows of images for which the network's call of its language model was found in order."""

    @cached_property
    def _config(self) -> Any:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(self._source, revision=self._revision, trust_remote_code=False)
        return getattr(config, "thinker_config", config)  # the part that writes, of a model that speaks

    @cached_property
    def _processor(self) -> Any:
        silence_libraries()
        return load_processor(self._config.model_type, self._source, self._revision)

    def marker(self, kind: Kind) -> str:
        """The token that a chat template writes for one. Raises RequestError if the model takes none after all."""
        from transformers import AutoVideoProcessor

        if kind in self._refused:
            raise invalid_row(self._refused[kind])
        try:
            processor, given = self._processor, {"revision": self._revision, "trust_remote_code": False}
            token = getattr(processor, f"{kind}_placeholder_token", None) or getattr(processor, f"{kind}_token", None)
            if kind == "video" and token is not None and processor.video_processor in (None, processor.image_processor):
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
        if self._config.model_type in ("gemma3", "gemma4_unified"):
            return "all"
        of_text = self._config.get_text_config()
        return "windows" if getattr(of_text, "use_bidirectional_attention", None) == "vision" else None

    @cached_property
    def context(self) -> tuple[ImageTexts, ProcessedImage]:
        """The processor's texts around images; and a blank image beside another one, without a text if that is the same
        as alone.

        Raises RequestError if the text of an image depends on what stands around it.
        """
        of_text = self._config.get_text_config()
        if getattr(of_text, "cross_attention_layers", None):
            raise self._unsupported("layers of its language model attend to them")
        if len(sections := (getattr(of_text, "rope_parameters", None) or {}).get("mrope_section") or ()) not in (0, 3):
            raise self._unsupported(f"its tokens have {len(sections)} positions each")
        one, two = (self._process_images([_BLANK] * count, around=_MARK) for count in (1, 2))
        (before, own, *after), (start, both, *end) = one.text.split(_MARK), two.text.split(_MARK)
        half = both[: len(both) // 2]
        if after != [""] or end != [""] or start != before or both != half * 2:
            raise self._unsupported("the text of one depends on what stands around it")
        pairs = [(torch.cat([x, x]), two.inputs[n]) for n, x in one.inputs.items() if n not in _OF_TEXT]  # in any order
        if own == half and all(torch.equal(*(x.flatten().sort()[0] for x in pair)) for pair in pairs):
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

    def _process(self, kind: Kind, text: str, **given: Any) -> ProcessedImage:
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
        return ProcessedImage(self.numbered(recorder.text, 0), int(is_placeholder.sum()), inputs, kind)

    def numbered(self, text: str, number: int) -> str:
        """The text of an image, which may say how many stand before it in its conversation."""
        begin, end = (getattr(self._processor, f"image_id_{side}_token", "") for side in ("start", "end"))
        return re.sub(rf"({re.escape(begin)})\d+({re.escape(end)})", rf"\g<1>{number}\g<2>", text) if begin else text

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

    def _unsupported(self, problem: str, kind: Kind = "image") -> RequestError:
        self._refused[kind] = f"{kind}s of models of the type {self._config.model_type} are not supported: {problem}"
        return invalid_row(self._refused[kind])

    def _problem(self, image: ProcessedImage, called: dict[str, Any]) -> str:
        """Says what of a call of the language model the engine would not do; empty if all is well."""
        levels, positions, program = called.get("deepstack_visual_embeds"), called.get("position_ids"), self._program
        extra = {name for name, one in called.items() if one is not None and one is not False} - _PLAIN
        if program is None or len(levels or ()) == sum(isinstance(one, AddImage) for one in program.operations):
            extra -= _LEVELS
        ids, of_text = image.inputs["input_ids"][0], self._config.get_text_config()
        is_beside = ids >= getattr(of_text, "vocab_size_per_layer_input", torch.inf)  # as Gemma 3n embeds some
        is_placeholder = self._is_placeholder(ids)
        if self._config.model_type == "gemma4" or is_beside[is_placeholder].all():
            extra.discard("per_layer_inputs")  # which are those of padding
        if extra:
            return f"its language model takes {sorted(extra)[0]}, too"
        run = (is_placeholder.diff(prepend=is_placeholder[:1]) != 0).cumsum(0)
        is_filled = ~called["inputs_embeds"][0].isnan().any(-1).cpu()
        if not torch.equal(is_filled | is_beside, is_placeholder | is_beside):
            return "other tokens are replaced than those of its images, or something is added to them"
        if positions is not None:
            known = self.positions(ids.tolist(), [image])
            wanted = torch.arange(len(is_placeholder)) if known is None else torch.from_numpy(known)
            if not torch.equal(positions[..., 0, :].cpu().reshape(-1, len(run))[-3:].squeeze(0), wanted):
                return "its tokens have other positions"
            if known is not None and program is not None and not self._turns_alike(program.rotaries[0], positions):
                return "its positions turn other parts of heads"
        same, earlier = (run[:, None] == run) & is_placeholder, torch.ones(len(run), len(run)).tril() > 0
        for name, mask in masks.items() if isinstance(masks := called.get("attention_mask"), dict) else [("", masks)]:
            has_window, is_seen = name == "sliding_attention", earlier
            if mask is not None and mask.ndim == 4:
                is_seen = (mask if mask.dtype == torch.bool else mask >= 0)[0, 0].cpu()
            two_way = self.two_way == "all" or (self.two_way == "windows" and has_window)
            pairs, window = (~earlier | same, of_text.sliding_window) if has_window else (~earlier, len(run))
            wanted = (earlier | same if two_way else earlier).triu(1 - window)
            if not torch.equal(is_seen & pairs, wanted & pairs):
                return "its tokens see others of later places, or beyond a window"
        return ""

    def _turns_alike(self, rotary: Rotary, positions: Tensor) -> bool:
        """Whether each frequency is turned by the same of positions [3, 1, T] as in the network's language model."""
        theirs = self._tower.get_decoder().rotary_emb(positions.float(), positions)[0][0].cpu()
        ours = rotary.tables(positions[:, 0].cpu())[0] if rotary.axes else torch.empty(0, 1)
        pairs = theirs[:, : ours.shape[1]], theirs[:, ::2]  # of numbers far apart, or of neighbours
        return any(one.shape == ours.shape and torch.allclose(one, ours, atol=1e-3) for one in pairs)

    @cached_property
    def _program(self) -> Program | None:
        """The program that computes the language model, if transformers does not."""
        with suppress(UnsupportedConfig):
            return read_program(read_model_config(model_folder(self._source, self._revision, ["config.json"])))
        return None

    @cached_property
    def _skeleton(self) -> Any:
        """The network without memory."""
        from transformers import AutoModelForImageTextToText

        with torch.device("meta"):
            return AutoModelForImageTextToText.from_config(self._small_config()).base_model

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
        parts = filter(None, (decoder, network.get_output_embeddings()))
        of_text = {id(one) for part in parts for one in part.parameters()}
        names = {name for name, one in network.named_parameters() if id(one) not in of_text}
        modules = {name.rpartition(".")[0] for name in report["unexpected_keys"]}  # of scales, if they are quantized
        unread = {*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"]), *modules}
        if lacking := sorted(names & (unread | {f"{module}.weight" for module in modules})):
            found = f"{len(lacking)} weights of its vision tower, such as {lacking[0]}"
            raise self._unsupported(f"its files do not have {found}, as plain numbers of their shape")
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
        text.num_hidden_layers, text.vocab_size, text.pad_token_id = 0, 1, 0
        for one in (config, text):
            if hasattr(one, "quantization_config"):  # which files have for the language model only
                del one.quantization_config
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


def load_processor(kind: str, source: str, revision: str | None = None) -> Any:
    """The processor of a model of a type, of the class that its files name, if they name one."""
    files = "processor_config.json", "preprocessor_config.json", "tokenizer_config.json"
    named = [read_json_object(model_folder(source, revision, files) / file).get("processor_class") for file in files]
    found = processor_class(kind, next(filter(None, named), ""))
    return found.from_pretrained(source, revision=revision, trust_remote_code=False)


def processor_class(kind: str, name: str = "") -> Any:
    """A processor's class, by its name or the type of models. It takes no videos, which need torchvision, if it can."""
    import transformers
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    found = getattr(transformers, name, None) or getattr(transformers, PROCESSOR_MAPPING_NAMES.get(kind, ""), None)
    if found is None or kind == "smolvlm":
        return found or transformers.AutoProcessor
    names, mixin = found.get_attributes(), transformers.ProcessorMixin
    others = [name for name in names if name != "video_processor"]

    def init(self: Any, *arguments: Any, **options: Any) -> None:
        given = {**dict(zip(names, arguments, strict=False)), **options, "video_processor": None}
        mixin.__init__(self, **{name: one for name, one in given.items() if name != "video_processor"})

    def stand_in(self: Any, name: str) -> Any:  # for a processor of videos, which some ask for settings
        return self.image_processor if name == "video_processor" else object.__getattribute__(self, name)

    def loaded(cls: Any, *arguments: Any, **options: Any) -> list[Any]:
        parts = list(found._get_arguments_from_pretrained.__func__(cls, *arguments, **options))
        if others != names:
            parts.insert(names.index("video_processor"), None)
        return parts

    base = type("WithoutVideos", (mixin,), {"__init__": init, "__getattr__": stand_in})  # whose `init` `found` calls
    own = {"get_attributes": classmethod(lambda cls: others), "_get_arguments_from_pretrained": classmethod(loaded)}
    return type(found.__name__, (found, base), own)


def vision_of(source: str, revision: str | None, device: torch.device, dtype: torch.dtype) -> Vision | str:
    """The images of a model, or why it takes none."""
    config = read_model_config(model_folder(source, revision, ["config.json"]))
    has_tower = any("vision_config" in level for level in levels(config))
    return Vision(source, revision, device, dtype) if has_tower else NO_IMAGES
