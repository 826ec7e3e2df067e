"""Adapters in an engine: mixed in its steps, each request equals PEFT's merged model, on every path."""

from __future__ import annotations

import json
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from cbatch.attention.reference import ReferenceAttention
from cbatch.base.config import EngineConfig
from cbatch.base.errors import ConfigError, ModelError
from cbatch.base.params import SamplingParams
from cbatch.base.quantization import Quantization
from cbatch.engine.stepping_engine import SteppingEngine
from cbatch.model.cpu import CpuModel
from cbatch.model.loader import LoadedModel
from cbatch.model.lora import cpu as lora_on_cpu
from cbatch.model.ops.device_kernel import by_torch
from cbatch.schedule.sequence import TokenSequence
from tests.support.adapters import LINEARS, draw_adapter, merged_by_peft, save_adapter
from tests.support.generation import generate
from tests.support.gguf_files import gguf_model, write_model
from tests.support.model_checks import is_greedy_output
from tests.support.model_folder import save_model
from tests.support.programs import saved_model
from tests.support.quantized_folders import awq, awq_settings, tiny_model, write_folder
from tests.support.tiny_models import generate_alone, loaded, make_engine, make_prompts

pytestmark = pytest.mark.kernels

TARGETS: dict[str, tuple[str, ...]] = {
    "llama": LINEARS,
    "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    "gpt2": ("c_attn", "c_proj", "c_fc"),
    "gpt_neox": ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
    "cohere": LINEARS,
    "granite": LINEARS,
    "qwen3_moe": ("q_proj", "v_proj", "o_proj"),
    "lfm2": ("q_proj", "v_proj", "in_proj", "out_proj", "w1", "w2"),
}
"""Linears by themselves, several in one tensor, transposed, in another order, with factors, and in other layers."""

PROMPTS = make_prompts([41, 9], seed=8)
NAMES = ["", "first", "second"]
TOKENS = 10


@dataclass(frozen=True)
class Case:
    """A model, the folders of two adapters, and what it continues each prompt with, with each of NAMES."""

    network: Any
    config: dict[str, Any]
    tensors: Any
    lora: dict[str, str]
    expected: list[list[int]]

    def fast(self, dtype: torch.dtype = torch.float32, quantize: Quantization | None = None) -> LoadedModel:
        model = CpuModel(self.config, self.tensors, dtype, quantize=quantize)
        return replace(loaded(self.network), fast_model=model)

    def engine(self, model: LoadedModel, **settings: Any) -> SteppingEngine:
        config: dict[str, Any] = {"block_size": 16, "kv_blocks": 60, "max_seqs": 8, "device": "cpu"} | settings
        return SteppingEngine(EngineConfig(lora=self.lora, **config), model)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@cache
def make_case(kind: str, folder: Path) -> Case:
    saved, lora = saved_model(kind), {}
    network = deepcopy(saved.network)
    network.generation_config.eos_token_id = None  # which `generate` would avoid
    # The second has another rank and scale, and does without one of the linears.
    for seed, (name, rank, left_out) in enumerate((("first", 4, 0), ("second", 3, 1)), 1):
        tensors = draw_adapter(network, TARGETS[kind][left_out:], rank=rank, seed=seed)
        lora[name] = str(save_adapter(folder / f"{kind} {name}", tensors, use_rslora=bool(left_out)))
    networks = [network, *(merged_by_peft(network, Path(place)) for place in lora.values())]
    expected = [output for network in networks for output in generate_alone(network, PROMPTS, [TOKENS] * len(PROMPTS))]
    assert len({tuple(output) for output in expected}) == len(expected), "the adapters change nothing"
    return Case(network, saved.config, saved.tensors, lora, expected)


def run(engine: SteppingEngine, **params: Any) -> list[Any]:
    """Continues each prompt with each of NAMES, all at once."""
    asked = [SamplingParams(max_tokens=TOKENS, lora=name, **params) for name in NAMES for _ in PROMPTS]
    outputs = generate(engine, PROMPTS * len(NAMES), asked)
    engine.scheduler.check_integrity()
    assert not any(output.error for output in outputs)
    return outputs


def tokens_of(outputs: list[Any]) -> list[list[int]]:
    return [list(output.token_ids) for output in outputs]


@pytest.mark.parametrize("kind", TARGETS)
def test_mixed_adapters_equal_peft(kind: str, folder: Path) -> None:
    """Guards every way in which files store linears, beside requests without an adapter and with cached prompts."""
    case = make_case(kind, folder)
    engine = case.engine(case.fast())
    for _ in range(2):
        assert tokens_of(run(engine)) == case.expected
    assert engine.stats().num_cached_tokens >= 3 * 32


def test_small_steps_equal_peft(folder: Path) -> None:
    """Guards prompts in chunks, and drafts, which take several tokens of a request to a step."""
    case = make_case("llama", folder)
    assert tokens_of(run(case.engine(case.fast(), max_batch_tokens=7, speculate=3))) == case.expected


@pytest.mark.parametrize("kind", ["llama", "gpt2", "granite"])
def test_steps_by_torch_equal_peft(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the way of a GPU, operation by operation."""
    pytest.importorskip("triton", reason="a model for a GPU is imported with its kernels")
    from cbatch.model.cuda import CudaModel
    from tests.support.cuda_model import engine_around

    case = make_case(kind, folder)
    model = CudaModel(case.config, case.tensors, torch.float32, torch.device("cpu"), by_torch())
    settings: dict[str, Any] = {"block_size": 16, "kv_blocks": 60, "max_seqs": 8, "device": "cpu"}
    engine = engine_around(monkeypatch, model, ReferenceAttention(), lora=case.lora, **settings)
    assert tokens_of(run(engine)) == case.expected


@pytest.mark.parametrize("kind", ["llama", "phi3", "gpt2"])
def test_modules_of_transformers_equal_peft(kind: str, folder: Path) -> None:
    """Guards models without a program; and another engine over the same network, which has no adapters."""
    case = make_case(kind, folder)
    network = deepcopy(case.network)
    engine = make_engine(network, lora=case.lora, kv_blocks=200)
    assert tokens_of(run(engine)) == case.expected
    plain = generate(make_engine(network), PROMPTS, SamplingParams(max_tokens=TOKENS))
    assert tokens_of(plain) == case.expected[: len(PROMPTS)]


@pytest.mark.parametrize("form", ["float32", "bfloat16", "int8"])
def test_company_changes_no_bit(form: str, folder: Path) -> None:
    """Guards log-probabilities, to the last bit: alone, beside others, and in small steps."""
    case = make_case("llama", folder)
    quantize = Quantization("int8") if form == "int8" else None
    model = case.fast(torch.float32 if form == "float32" else torch.bfloat16, quantize)
    together = [output.logprobs for output in run(case.engine(model, prefix_cache=False), logprobs=3)]
    small = run(case.engine(model, prefix_cache=False, max_batch_tokens=9), logprobs=3)
    assert [output.logprobs for output in small] == together
    alone = case.engine(model, prefix_cache=False)
    for number, expected in enumerate(together):
        params = SamplingParams(max_tokens=TOKENS, lora=NAMES[number // len(PROMPTS)], logprobs=3)
        assert generate(alone, [PROMPTS[number % len(PROMPTS)]], params)[0].logprobs == expected
    plain = SteppingEngine(replace(alone.config, lora=None), model)
    outputs = generate(plain, PROMPTS, SamplingParams(max_tokens=TOKENS, logprobs=3))
    assert tokens_of(outputs) == [[one.token_id for one in logprobs] for logprobs in together[: len(PROMPTS)]]


@pytest.mark.slow
def test_captured_steps_equal_peft(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards graphs, which leave adapters out if their numbers are not filled, and keep those of the step before."""
    pytest.importorskip("triton", reason="a model for a GPU is imported with its kernels")
    from tests.engine.test_cuda_graphs import Repeated, engine_with_graphs
    from tests.support.cuda_model import model_of

    case, capture = make_case("llama", folder), Repeated()
    engine = engine_with_graphs(monkeypatch, model_of(case.network), capture, lora=case.lora, kv_blocks=60)
    outputs = run(engine)
    assert tokens_of(outputs) == case.expected and capture.replayed == engine.stats().num_steps
    plain = generate(engine, PROMPTS, SamplingParams(max_tokens=TOKENS))
    assert tokens_of(plain) == case.expected[: len(PROMPTS)]


@pytest.mark.slow
@pytest.mark.usefixtures("placeless_products")
def test_company_changes_no_bit_on_a_gpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards `--deterministic` with adapters: log-probabilities alone, and beside others in small steps."""
    pytest.importorskip("triton", reason="a model for a GPU is imported with its kernels")
    from cbatch.attention.triton import TritonAttention
    from tests.support.cuda_model import DEVICE, engine_around, model_of

    case = make_case("llama", folder)

    def results(asked: list[tuple[list[int], str]], **config: Any) -> list[Any]:
        attention = TritonAttention(DEVICE, batch_invariant=True)
        engine = engine_around(
            monkeypatch, model_of(case.network), attention, lora=case.lora, deterministic=True, **config
        )
        params = [SamplingParams(max_tokens=3, logprobs=1, lora=name) for _, name in asked]
        return [output.logprobs for output in generate(engine, [prompt for prompt, _ in asked], params)]

    asked = [(PROMPTS[1], name) for name in NAMES]
    assert results(asked, max_batch_tokens=7) == [found for one in asked for found in results([one])]


lora_groups = lora_on_cpu._groups


def swapped(groups: Iterable[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    return [(1 - adapter, first, stop) for adapter, first, stop in groups]


FAULTS: dict[str, tuple[Any, str, Any]] = {
    "cached blocks without their adapter": (TokenSequence, "cache_kind", property(lambda request: 0)),
    "adapters in another order": (lora_on_cpu, "_groups", lambda numbers: swapped(lora_groups(numbers))),
    "ups after gates instead of by turns": (lora_on_cpu, "interleaved", lambda both: both),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_seen(fault: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the comparison: each of these mistakes changes the outputs."""
    case = make_case("llama", folder)
    monkeypatch.setattr(*FAULTS[fault])
    engine = case.engine(case.fast())
    assert [tokens_of(run(engine)) for _ in range(2)] != [case.expected] * 2


def test_adapters_of_another_model_are_refused_before_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the minutes that a large model takes to load, and sentences that name what does not fit."""
    model = save_model(tmp_path / "model")
    network = saved_model("llama").network
    monkeypatch.setattr("cbatch.engine.loading.load_model", lambda *_, **__: pytest.fail("it is loaded"))

    def refusal(tensors: dict[str, torch.Tensor]) -> str:
        place = save_adapter(tmp_path / "adapter", tensors)
        with pytest.raises(ModelError, match=r"^The LoRA adapter sql cannot be used: ") as raised:
            SteppingEngine(EngineConfig(model=str(model), device="cpu", lora={"sql": str(place)}))
        return str(raised.value).partition(": ")[2]

    other = draw_adapter(network, ("q_proj",))
    assert refusal(other).startswith("it was made for another model: model.layers.0.self_attn.q_proj is 64 x 48 here")
    renamed = {name.replace("q_proj", "Wq"): tensor for name, tensor in other.items()}
    assert refusal(renamed) == (
        "it was made for another model: there is no linear model.layers.0.self_attn.Wq in a LlamaForCausalLM."
    )
    head = draw_adapter(network, ("lm_head",))
    assert refusal(head) == "it adapts the output head (lm_head), and only the linears of layers can be."
    embedding = {name.replace("lm_head", "model.embed_tokens"): tensor for name, tensor in head.items()}
    assert refusal(embedding).startswith("it adapts the embedding (model.embed_tokens)")


def test_models_of_transformers_refuse_what_does_not_fit(folder: Path, tmp_path: Path) -> None:
    """Guards the same for models without a program, which are compared once they are loaded."""
    case = make_case("llama", folder)
    with pytest.raises(ModelError, match=r"made for another model: model\.layers\.0\.mlp\.down_proj is 48 x 64 here"):
        make_engine(saved_small(), lora=case.lora)
    head = save_adapter(tmp_path / "head", draw_adapter(case.network, ("lm_head",)))
    with pytest.raises(ModelError, match=r"it adapts the output head \(lm_head\)"):
        make_engine(deepcopy(case.network), lora={"head": str(head)})
    with pytest.raises(ModelError, match=r"there is no transformer\.h\.0\.attn\.c_attn in a LlamaForCausalLM"):
        make_engine(deepcopy(case.network), lora=make_case("gpt2", folder).lora)


def saved_small() -> Any:
    from tests.support.tiny_models import make_network

    return make_network("llama")


def test_settings_of_an_engine(tmp_path: Path) -> None:
    """Guards options that are no names with folders, or that adapters do not go with."""
    for wrong in ({"a": ""}, {"": "b"}, {"a": 1}, ["a=b"]):
        with pytest.raises(ConfigError, match=r"^lora must give each adapter a name and a folder"):
            EngineConfig(lora=wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"takes no LoRA adapters; leave out --device-map\."):
        EngineConfig(lora={"a": "b"}, device_map="auto")


def test_peft_writes_what_is_read(folder: Path, tmp_path: Path) -> None:
    """Guards against keys of an adapter_config.json that a newer PEFT writes for plain adapters."""
    peft = pytest.importorskip("peft", reason="PEFT writes the folder")
    case = make_case("llama", folder)
    settings = peft.LoraConfig(
        r=4, target_modules=["q_proj", "down_proj"], rank_pattern={"down_proj": 2}, alpha_pattern={"q_proj": 5},
        use_rslora=True, init_lora_weights=False, task_type="CAUSAL_LM",
    )  # fmt: skip
    adapted = peft.get_peft_model(deepcopy(case.network), settings)
    adapted.save_pretrained(tmp_path)
    expected = generate_alone(adapted.merge_and_unload().eval(), PROMPTS, [TOKENS] * 2)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["use_rslora"]
    engine = replace(case, lora={"own": str(tmp_path)}).engine(case.fast())
    outputs = generate(engine, PROMPTS, SamplingParams(max_tokens=TOKENS, lora="own"))
    assert tokens_of(outputs) == expected != case.expected[:2]


def outputs_of(model: Path, lora: dict[str, str] | None, names: list[str], **config: Any) -> list[list[int]]:
    settings: dict[str, Any] = {"block_size": 16, "kv_blocks": 60, "device": "cpu"} | config
    engine = SteppingEngine(EngineConfig(model=str(model), lora=lora, **settings))
    asked = [SamplingParams(max_tokens=10, ignore_eos=True, lora=name) for name in names for _ in PROMPTS]
    outputs = generate(engine, PROMPTS * len(names), asked)
    assert not any(output.error for output in outputs)
    return [list(output.token_ids) for output in outputs]


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_gguf_files(kind: str, tmp_path: Path) -> None:
    """Guards rows that such files hold in another order, the integers, and adapters of another model."""
    path = tmp_path / "model.gguf"
    network = write_model(path, gguf_model(kind), Kind.Q8_0)
    place = save_adapter(tmp_path / "adapter", draw_adapter(network, seed=1))
    lora = {"own": str(place)}
    mixed = outputs_of(path, lora, ["", "own"], dtype="float32")
    for reference, outputs in ((network, mixed[:2]), (merged_by_peft(network, place), mixed[2:])):
        assert all(is_greedy_output(reference, prompt, output) for prompt, output in zip(PROMPTS, outputs, strict=True))
    kept = outputs_of(path, lora, ["", "own"])
    assert kept[:2] == outputs_of(path, None, [""]) and kept[2:] != kept[:2]
    other = save_adapter(tmp_path / "other", draw_adapter(tiny_model("qwen3").network, seed=1))
    with pytest.raises(ModelError, match="it was made for another model"):
        outputs_of(path, {"own": str(other)}, ["own"])


def test_quantized_checkpoints(tmp_path: Path) -> None:
    """Guards packed matrices of other programs: an adapter adds to their products, and leaves other rows alone."""
    saved = tiny_model()
    network = write_folder(tmp_path / "model", saved, awq_settings(), awq())
    place = save_adapter(tmp_path / "adapter", draw_adapter(network, seed=1))
    lora, merged = {"own": str(place)}, merged_by_peft(network, place)
    mixed = outputs_of(tmp_path / "model", lora, ["own"], dtype="float32")
    assert all(is_greedy_output(merged, prompt, output) for prompt, output in zip(PROMPTS, mixed, strict=True))
    kept = outputs_of(tmp_path / "model", lora, ["", "own"], weight_cache=False)
    assert kept[:2] == outputs_of(tmp_path / "model", None, [""], weight_cache=False) and kept[2:] != kept[:2]
