"""llama.cpp through llama-cpp-python: one unified KV cache, and a loop that batches continuously around it."""
# mypy: disable-error-code="import-not-found, import-untyped"

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scripts.benchmarks.peers.work import Peer, PeerJob, PeerResult, PeerWork, make_once

PADDING = 256
"""llama.cpp makes contexts of multiples of this many tokens."""

FAMILIES = {"llama": "llama", "qwen3": "qwen3", "qwen3_moe": "qwen3moe", "gemma3_text": "gemma3"}
"""The names that llama.cpp has for model types."""


QUANTIZED = {"int8": "Q8_0", "int4": "Q4_0"}
"""Names of its mixtures of formats; any other is taken as it is."""


def prepare(job: PeerJob) -> None:
    import gguf  # noqa: F401  a missing package is to be told before a model is converted
    import llama_cpp

    whole = replace(job, weights="")
    make_once(whole.gguf, lambda target: write_gguf(whole, target))
    if job.weights:

        def quantize(target: Path) -> None:
            settings = llama_cpp.llama_model_quantize_default_params()
            settings.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{QUANTIZED.get(job.weights, job.weights)}")
            names = str(whole.gguf).encode(), str(target).encode()
            if llama_cpp.llama_model_quantize(*names, settings) != 0:
                raise RuntimeError(f"llama.cpp could not quantize the model to {job.weights}.")

        make_once(job.gguf, quantize)


def write_gguf(job: PeerJob, target: Path) -> None:
    """Converts the model: names of its own, and what its families expect to lie in another way."""
    import gguf

    config = job.model_config
    family = FAMILIES.get(config["model_type"])
    if family is None:
        raise NotImplementedError(f"no conversion of {config['model_type']} for llama.cpp is written")
    as_bfloat16 = job.dtype == "bfloat16"
    kinds = gguf.GGMLQuantizationType
    writer = gguf.GGUFWriter(str(target), family)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(rope_theta(config))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16 if as_bfloat16 else gguf.LlamaFileType.ALL_F32)
    if family == "gemma3":
        writer.add_sliding_window(config["sliding_window"])
    if family == "qwen3moe":
        writer.add_expert_count(config.get("num_experts") or config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[family.upper()], config["num_hidden_layers"])
    for name, bits in with_stacked_experts(read_bfloat16(job.model / "model.safetensors")):
        if family == "llama":
            bits = reorder(name, bits, config)
        floats = bits.astype("uint32") << 16
        is_offset = family == "gemma3" and name.endswith("norm.weight")
        name = names.get_name(name, try_suffixes=(".weight",)) or name
        if as_bfloat16 and bits.ndim > 1 and "ffn_gate_inp" not in name:
            writer.add_tensor(name, bits.view("uint8"), raw_dtype=kinds.BF16)
        else:
            writer.add_tensor(name, floats.view("float32") + (1 if is_offset else 0))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def rope_theta(config: dict[str, Any]) -> float:
    """That of layers without a window, if there are two kinds."""
    parameters = config["rope_parameters"]
    return float(parameters.get("full_attention", parameters)["rope_theta"])


def with_stacked_experts(tensors: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """The same tensors, with those of all experts of a layer in one."""
    import numpy as np

    experts: dict[str, dict[int, Any]] = {}
    for name, bits in tensors:
        layer, is_expert, rest = name.partition(".experts.")
        if is_expert:
            number, _, rest = rest.partition(".")
            experts.setdefault(f"{layer}.experts.{rest}", {})[int(number)] = bits
        else:
            yield name, bits
    for name, parts in experts.items():
        yield name, np.stack([parts[number] for number in range(len(parts))])


def read_bfloat16(file: Path) -> Iterator[tuple[str, Any]]:
    """Names and bits of the tensors of a safetensors file, as uint16: numpy has no bfloat16."""
    import numpy as np

    content = np.memmap(file, dtype=np.uint8, mode="r")
    start = 8 + int(content[:8].view("<u8")[0])
    header = json.loads(bytes(content[8:start]))
    header.pop("__metadata__", None)
    for name, entry in header.items():
        first, end = entry["data_offsets"]
        yield name, np.array(content[start + first : start + end]).view("<u2").reshape(entry["shape"])


def reorder(name: str, bits: Any, config: dict[str, Any]) -> Any:
    """Rotary embedding turns value i of a head with i + half in transformers, with its neighbour in a GGUF Llama."""
    if not name.endswith(("q_proj.weight", "k_proj.weight")):
        return bits
    halves = bits.reshape(-1, 2, config["head_dim"] // 2, config["hidden_size"])
    return halves.swapaxes(1, 2).reshape(bits.shape)


@dataclass
class Context:
    """A loaded model with its cache, and the batch that is handed to it in each step."""

    handle: Any
    batch: Any
    max_seqs: int
    max_batch_tokens: int
    vocabulary: int


@dataclass(eq=False)
class Request:
    """A request: all its tokens that are known, how many of them are computed, and its sequence in the cache."""

    known: list[int]
    goal: int
    computed: int = 0
    slot: int = 0


@contextmanager
def session(job: PeerJob) -> Iterator[Callable[[PeerWork], PeerResult]]:
    import llama_cpp

    llama_cpp.llama_backend_init()
    settings = llama_cpp.llama_model_default_params()
    model = llama_cpp.llama_model_load_from_file(str(job.gguf).encode(), settings)
    sizes = llama_cpp.llama_context_default_params()
    sizes.n_ctx = -(-job.most_tokens // PADDING) * PADDING
    sizes.n_batch = sizes.n_ubatch = job.max_batch_tokens
    sizes.n_seq_max = job.max_seqs
    sizes.n_threads = sizes.n_threads_batch = job.threads
    sizes.kv_unified = True
    if job.dtype == "float32":
        sizes.type_k = sizes.type_v = llama_cpp.GGML_TYPE_F32
    handle = llama_cpp.llama_init_from_model(model, sizes)
    if not handle:
        raise RuntimeError("llama.cpp could not make a context.")
    batch = llama_cpp.llama_batch_init(job.max_batch_tokens, 0, 1)
    context = Context(handle, batch, job.max_seqs, job.max_batch_tokens, job.model_config["vocab_size"])
    yield lambda work: generate(context, work)


def generate(context: Context, work: PeerWork) -> PeerResult:
    """Steps over all running requests until none is left; finished requests make room for waiting ones."""
    import llama_cpp

    requests = [Request(list(prompt), total) for prompt, total in zip(work.prompts, work.totals, strict=True)]
    waiting, running = deque(requests), list[Request]()
    free = list(range(context.max_seqs))
    memory = llama_cpp.llama_get_memory(context.handle)
    steps = 0
    while waiting or running:
        while waiting and free:
            running.append(waiting.popleft())
            running[-1].slot = free.pop()
        ends = fill(context, running)
        if llama_cpp.llama_decode(context.handle, context.batch) != 0:
            raise RuntimeError("llama.cpp could not compute a step.")
        steps += 1
        for request, place in ends:
            request.known.append(likeliest(context, place))
            if len(request.known) == request.goal:
                llama_cpp.llama_memory_seq_rm(memory, request.slot, -1, -1)
                free.append(request.slot)
                running.remove(request)
    outputs = [request.known[len(prompt) :] for request, prompt in zip(requests, work.prompts, strict=True)]
    return PeerResult(outputs, steps)


def fill(context: Context, running: list[Request]) -> list[tuple[Request, int]]:
    """Puts the next tokens into the batch, as many as fit. Returns the requests that get an output, and its place.

    The oldest come first. Only the youngest are not through their prompts, so one token of each decoding request is in
    every step, and prompts take what is left.
    """
    batch, place = context.batch, 0
    ends = []
    for request in running:
        end = min(len(request.known), request.computed + context.max_batch_tokens - place)
        for position in range(request.computed, end):
            batch.token[place] = request.known[position]
            batch.pos[place] = position
            batch.n_seq_id[place] = 1
            batch.seq_id[place][0] = request.slot
            batch.logits[place] = position + 1 == len(request.known)
            place += 1
        if end > request.computed and end == len(request.known):
            ends.append((request, place - 1))
        request.computed = end
    batch.n_tokens = place
    return ends


def likeliest(context: Context, place: int) -> int:
    import llama_cpp
    import numpy as np

    logits = llama_cpp.llama_get_logits_ith(context.handle, place)
    return int(np.ctypeslib.as_array(logits, shape=(context.vocabulary,)).argmax())


PEER = Peer("llama.cpp", ("llama_cpp", "gguf"), "pip install llama-cpp-python gguf", session, prepare)
