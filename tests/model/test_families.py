"""Every family that has a program gives what transformers gives, and every wrong operation is seen."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING

from cbatch.attention.base import AttentionBackend
from cbatch.attention.cpu import CpuAttention
from cbatch.attention.reference import ReferenceAttention
from cbatch.base.config import EngineConfig
from cbatch.base.params import SamplingParams
from cbatch.base.quantization import Quantization
from cbatch.base.request import EmbedOptions, Request, ScoredTail
from cbatch.engine.stepping_engine import SteppingEngine
from cbatch.kernels.cpu.program import run_step
from cbatch.kernels.formats import GROUP
from cbatch.model.config import UnsupportedConfig
from cbatch.model.config_classes import class_of
from cbatch.model.cpu import CpuModel
from cbatch.model.cuda import CudaModel
from cbatch.model.families import read_program
from cbatch.model.formats.quantized import without_quantization
from cbatch.model.ops import linear
from cbatch.model.ops.all import Program
from cbatch.model.ops.device_kernel import DeviceOps, by_torch
from scripts.config_classes import defaults
from tests.support.architectures import CLASSES, VARIANTS, WITHOUT_CAUSAL_CLASS, make_architecture
from tests.support.cuda_model import engine_around
from tests.support.declared import declared_kinds
from tests.support.generation import generate
from tests.support.model_checks import LENGTHS, PARAMS, PROMPTS, TRUNK, is_greedy_output
from tests.support.program_faults import FAULTS, forgotten
from tests.support.programs import (
    BLOCK_SIZE,
    PROMPT,
    SavedModel,
    as_files,
    error_of,
    expected_logits,
    logits_in_chunks,
    reconfigured,
    saved_model,
    typical_error,
)
from tests.support.samples import sampled
from tests.support.tiny_models import loaded

pytestmark = pytest.mark.kernels

CONFIGS = Path(__file__).parents[1] / "data" / "configs"
UNSEEN = [("gemma4", "Linear.factor"), ("gemma4_text", "Linear.factor"), ("lfm2_moe", "Route.choice_bias")]
"""Settings that change nothing there: a norm follows the linear, and the bias chooses the same experts."""
KINDS = [*(kind for kind in declared_kinds() if kind in CLASSES | WITHOUT_CAUSAL_CLASS), *VARIANTS]


def describe(program: Program) -> str:
    """All of a program but the orders of rows and columns."""
    shown = replace(program, name="")
    return re.sub(r"tensor\(.*?\)", "", repr(shown), flags=re.DOTALL)


def cpu_model(kind: str, dtype: torch.dtype = torch.float32, *, quantize: Quantization | None = None) -> CpuModel:
    saved = saved_model(kind)
    return CpuModel(saved.config, saved.tensors, dtype, quantize=quantize)


def run_with_preemption(engine: SteppingEngine) -> list[list[int]]:
    """Outputs for PROMPTS, of which the last ones come later and go first."""
    outputs: list[list[int]] = [[] for _ in PROMPTS]
    places, late, step = {}, 4, 0
    for place in range(late):
        places[engine.add(PROMPTS[place], PARAMS[place], priority=1)] = place
    while engine.has_work:
        if step == 14:
            places |= {engine.add(PROMPTS[place], PARAMS[place]): place for place in range(late, len(PROMPTS))}
        for event in engine.step():
            if event.request_id is not None and event.token_id is not None:
                outputs[places[event.request_id]].append(event.token_id)
        step += 1
    return outputs


@pytest.mark.slow
@pytest.mark.parametrize("kind", sampled(KINDS, 45, keep=["llama", "gemma2", "gpt_oss", "deepseek_v3", "qwen3_5_text"]))
def test_equals_generate(kind: str) -> None:
    """Guards every declaration, token for token in float32: chunks, shared prefixes, and rows that give way."""
    model, network = cpu_model(kind), saved_model(kind).network
    config = EngineConfig(block_size=BLOCK_SIZE, kv_blocks=9, max_seqs=6, max_batch_tokens=16, device="cpu")
    engine = SteppingEngine(config, loaded(network, fast_model=model))
    outputs = run_with_preemption(engine)
    assert [len(output) for output in outputs] == LENGTHS
    pairs = zip(PROMPTS, outputs, strict=True)
    assert all(is_greedy_output(network, prompt, output) for prompt, output in pairs)
    assert engine.scheduler.num_preemptions > 0, "nothing was preempted"
    assert engine.scheduler.num_cached_tokens >= len(TRUNK) // BLOCK_SIZE * BLOCK_SIZE, "no blocks were shared"
    assert model.num_parameters <= sum(parameter.numel() for parameter in network.parameters()) + 64


@pytest.mark.slow
@pytest.mark.parametrize("kind", sampled(KINDS, 12, keep=["gemma2", "gpt2", "cohere", "qwen3_5_text"]))
def test_hidden_states(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards what embeddings are made of, on the CPU and by the operations of a device: the states after the last norm,
    without the factors of the head, whatever chunks a text came in.
    """
    saved, prompts = saved_model(kind), [list(range(1, 21)), [5, 4, 3]]
    decoder = getattr(saved.network, "model", None) or saved.network.get_decoder()
    with torch.no_grad():
        right = [decoder(input_ids=torch.tensor([ids]), use_cache=False)[0][0].mean(0) for ids in prompts]
    on_device = CudaModel(saved.config, saved.tensors, torch.float32, torch.device("cpu"), by_torch())
    sizes: dict[str, Any] = {"block_size": BLOCK_SIZE, "kv_blocks": 9, "max_seqs": 6, "max_batch_tokens": 8}
    config = EngineConfig(device="cpu", **sizes)
    for engine in (
        SteppingEngine(config, loaded(saved.network, fast_model=cpu_model(kind))),
        engine_around(monkeypatch, on_device, ReferenceAttention(), **sizes | {"max_batch_tokens": 70}),
    ):
        tails = [ScoredTail(ids, 1, (), ()) for ids in prompts]
        engine.add_request(Request(tails=tails, embed=EmbedOptions(inputs=prompts)))
        events = {event.sample_index: event for _ in range(9) if engine.has_work for event in engine.step()}
        for place, wanted in enumerate(right):
            assert (wanted - torch.from_numpy(events[place].pooled)).abs().max() < 1e-4 * wanted.abs().max()


@pytest.mark.parametrize(
    ("name", "kind"), [("kimi_k2", "deepseek_v3"), ("mimo", "qwen2"), ("exaone4_5_text", "exaone4")]
)
def test_other_names_for_a_class(name: str, kind: str) -> None:
    """Guards types of which transformers has no class: the logits of the one that theirs equals."""
    saved, draft = saved_model(kind), {"model.mtp_layers.0.input_proj.weight": torch.zeros(64, 128)}
    tensors = {**saved.tensors, **(draft if name == "mimo" else {})}
    settings = {"attention_bias": True, "num_nextn_predict_layers": 1} if name == "mimo" else {}
    model = CpuModel(saved.config | settings | {"model_type": name}, tensors, torch.float32)
    assert error_of(logits_in_chunks(model, CpuAttention()), expected_logits(kind)) < 2e-4


@pytest.mark.parametrize(
    "name",
    ["nvidia--NVIDIA-Nemotron-3-Super-120B-A12B-FP8", "nvidia--NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16",
     "nvidia--Nemotron-H-56B-Base-8K", "XiaomiMiMo--MiMo-V2-Flash", "XiaomiMiMo--MiMo-7B-Base",
     "moonshotai--Kimi-K2-Instruct", "allenai--Olmo-3.1-32B-Instruct"],
)  # fmt: skip
def test_published_settings_have_a_program(name: str) -> None:
    """Guards keys that authors write and transformers does not, and models of more experts than others have."""
    config = json.loads((CONFIGS / f"{name}.json").read_text(encoding="utf-8"))
    assert read_program(without_quantization(config)).kind == config["model_type"]


def test_older_files_of_olmo_scale_full_attention_only() -> None:
    """Guards OLMo 3 as it is published: one scaling for all layers, of which windows take nothing."""
    config = saved_model("olmo3, stretched full attention").config
    older = {key: value for key, value in config.items() if key != "rope_parameters"}
    older |= {"rope_theta": 5e5, "rope_scaling": config["rope_parameters"]["full_attention"]}
    assert read_program(older).rotaries == read_program(config).rotaries
    assert len(set(read_program(older).rotaries)) == 2


@pytest.mark.parametrize("name", sampled(FAULTS, 12))
def test_wrong_operations_are_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the comparison with transformers: each of these mistakes in a program changes its logits."""
    kind, plant = FAULTS[name]
    expected = expected_logits(kind)
    assert error_of(logits_in_chunks(cpu_model(kind), CpuAttention()), expected) < 2e-4
    monkeypatch.setattr("cbatch.model.program_model.read_program", lambda config: plant(read_program(config)))
    monkeypatch.setattr("cbatch.model.program_model.check_weights", lambda *_: 0)
    assert error_of(logits_in_chunks(cpu_model(kind), CpuAttention()), expected) > 5e-4


@pytest.mark.parametrize("kind", sampled(KINDS, 7, keep=["gemma2", "gpt_oss", "minimax_m2", "granitemoehybrid"]))
def test_what_is_forgotten_is_seen(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards everything that an operation may have, in every family that has it: its logits change without it."""
    expected, program = expected_logits(kind), read_program(saved_model(kind).config)
    monkeypatch.setattr("cbatch.model.program_model.check_weights", lambda *_: 0)
    for name, wrong in forgotten(program):
        if (kind, name) in UNSEEN:
            continue
        monkeypatch.setattr("cbatch.model.program_model.read_program", lambda _, wrong=wrong: wrong)
        assert error_of(logits_in_chunks(cpu_model(kind), CpuAttention()), expected) > 5e-4, name


@pytest.mark.parametrize(
    "kind",
    sampled(["gemma3_text", "starcoder2", "phi3", "qwen3_moe", "gpt_oss", "deepseek_v2"], 3, keep=["gpt_oss"]),
)
def test_rounded_weights_are_near_float32(kind: str) -> None:
    """Guards the other kinds of weights, with rounding as all that they may differ by."""
    expected = expected_logits(kind)
    assert typical_error(logits_in_chunks(cpu_model(kind, torch.bfloat16), CpuAttention()), expected) < 0.1
    for weights, activations, tolerance in (("int8", "int8", 0.2), ("int8", "bf16", 0.15), ("int4", "int8", 0.8)):
        rounded = cpu_model(kind, torch.bfloat16, quantize=Quantization(weights, activations))
        error = typical_error(logits_in_chunks(rounded, CpuAttention()), expected)
        assert error < tolerance


def test_outliers_round_no_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards int8 activations of a model whose norms make a few channels 30 times as large: beside float32 with the
    same weights, log-probabilities are far nearer than with all numbers of a group in the same bytes.
    """
    network = make_architecture("llama", hidden_size=256, intermediate_size=256).bfloat16()
    with torch.no_grad():
        for name, weight in network.named_parameters():
            if "layernorm" in name:
                weight[[5, 77, 140]] *= 30
    config, tensors = as_files(network)
    exact = CudaModel(config, tensors, torch.float32, torch.device("cpu"), by_torch(), quantize=Quantization("int4"))
    multiply = linear.multiply

    def multiply_bytes(ops: DeviceOps, source: Tensor, *rest: Any) -> None:
        groups = source.unflatten(1, (-1, GROUP))
        unit = groups.abs().amax(2, keepdim=True) / 127
        multiply(ops, ((groups / unit).round() * unit).flatten(1), *rest)

    def log_probs(model: CpuModel | CudaModel, attention: AttentionBackend) -> Tensor:
        return logits_in_chunks(model, attention)[:-1].log_softmax(1).gather(1, torch.tensor(PROMPT[1:])[:, None])

    expected = log_probs(exact, ReferenceAttention())
    found = log_probs(CpuModel(config, tensors, torch.bfloat16, quantize=Quantization("int4")), CpuAttention())
    monkeypatch.setattr(linear, "multiply", multiply_bytes)
    in_bytes = log_probs(exact, ReferenceAttention())
    assert (found - expected).abs().mean() < (in_bytes - expected).abs().mean() / 2.5


@pytest.mark.parametrize("kind", sampled(["llama", "qwen3_moe", "gpt_oss", "gemma2", "stablelm"], 3, keep=["gpt_oss"]))
def test_company_changes_no_bit(kind: str) -> None:
    """Guards rows whose experts others use too: the same log-probabilities alone, in a batch and in small steps."""
    model = cpu_model(kind, torch.bfloat16)
    params = SamplingParams(max_tokens=5, logprobs=3)

    def run(prompts: list[list[int]], tokens: int) -> list[object]:
        config = EngineConfig(
            block_size=BLOCK_SIZE, kv_blocks=60, max_batch_tokens=tokens, device="cpu", prefix_cache=False
        )
        engine = SteppingEngine(config, loaded(None, fast_model=model))
        return [output.logprobs for output in generate(engine, prompts, params)]

    batched = run(PROMPTS[:5], 512)
    assert run(PROMPTS[:5], 9) == batched
    assert [run([prompt], 512)[0] for prompt in PROMPTS[:5]] == batched


def test_one_step_is_compiled_for_all_models() -> None:
    """Guards the first start with another kind of model: only its experts or recurrent layers are compiled anew."""
    cpu_model("llama")
    compiled = len(run_step.signatures)  # type: ignore[attr-defined]
    for kind in ("qwen3_moe", "qwen3_5_text"):
        cpu_model(kind)
    assert len(run_step.signatures) == compiled  # type: ignore[attr-defined]


@pytest.mark.slow
def test_transformers_stays_out(tmp_path: Path) -> None:
    """Guards the seconds that importing transformers takes: loading a model of a declared family, and a tokenizer."""
    for kind in [kind for kind in KINDS if kind in CLASSES][::6]:
        saved = saved_model(kind)
        saved.network.save_pretrained(tmp_path / kind)
    code = (
        "import sys, torch; from pathlib import Path; "
        "from cbatch.model.load_plan import DEMO_MODEL, LoadPlan; from cbatch.model.loader import load_model; "
        "from cbatch.text.isolated import load_tokenizer; "
        "assert load_tokenizer(str(DEMO_MODEL), None).backend.encode('hi').ids; "
        "folders = [str(path) for path in Path(sys.argv[1]).iterdir()]; "
        "paths = {load_model(LoadPlan(one, dtype='float32')).path for one in folders}; "
        "heavy = {'transformers', 'huggingface_hub', 'accelerate'} & set(sys.modules); "
        "sys.exit(f'loads {heavy} for {paths}' if heavy or paths != {'fast'} else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_unknown_keys_send_a_model_to_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards settings that a declaration does not know: those that transformers reads count, others change nothing."""
    config, known = saved_model("gemma2").config, class_of("gemma2")
    assert known is not None
    assert read_program(config | {"new_scale": 3.0}).kind == "gemma2"
    newer = known._replace(read=known.read | {"new_scale"}, defaults={**known.defaults, "new_scale": 2.0})
    monkeypatch.setattr("cbatch.model.config.class_of", lambda _: newer)
    assert read_program(config | {"new_scale": 2.0}).kind == "gemma2"
    with pytest.raises(UnsupportedConfig, match="says new_scale = 3"):
        read_program(config | {"new_scale": 3.0})


@pytest.mark.parametrize("kind", KINDS)
def test_defaults_are_those_of_the_class(kind: str) -> None:
    """Guards what a declaration takes for keys that a file leaves out: the program stays the same without them."""
    config = saved_model(kind).config
    text = config.get("text_config", config)
    has = defaults(CONFIG_MAPPING[text["model_type"]])
    shorter = {key: value for key, value in text.items() if key not in has or has[key] != value}
    shorter = config | {"text_config": shorter} if "text_config" in config else shorter
    assert describe(read_program(shorter)) == describe(read_program(config))


def test_stacks_of_experts_may_be_transposed() -> None:
    """Guards Qwen 3 VL as published, whose experts are [depth, columns], and not as transformers saves them."""
    kind = "qwen3_vl_moe_text"
    saved, expected = saved_model(kind), expected_logits(kind)
    tensors = {name: one.mT.contiguous() if ".experts." in name else one for name, one in saved.tensors.items()}
    model = CpuModel(saved.config, tensors, torch.float32)
    assert error_of(logits_in_chunks(model, CpuAttention()), expected) < 2e-4


def test_contexts_end_where_an_index_chooses(caplog: pytest.LogCaptureFixture) -> None:
    """Guards DeepSeek V3.2 and GLM 5 in texts of more tokens than their index chooses, of which people are told."""
    assert not read_program(saved_model("deepseek_v32").config).notes
    for kind in ("deepseek_v32", "glm_moe_dsa"):
        saved = saved_model(kind)
        model = CpuModel(saved.config | {"index_topk": 24}, saved.tensors, torch.float32)
        assert model.max_model_len == 24 and "A text has 24 tokens at most" in caplog.text


def test_step_as_published() -> None:
    """Guards Step 3.7's own names of settings, and lists that go on for the layers that predict more tokens."""
    saved = saved_model("step3p5").config
    rope = saved["rope_parameters"]
    taken = ("rope_parameters", "per_layer_config", "n_routed_experts", "num_experts_per_tok", "num_key_value_heads",
             "num_sliding_attention_heads", "share_expert_dim", "mlp_layer_types", "layer_types")  # fmt: skip
    published = {key: value for key, value in saved.items() if key not in taken} | {
        "moe_num_experts": saved["n_routed_experts"], "moe_top_k": saved["num_experts_per_tok"],
        "num_attention_groups": saved["num_key_value_heads"], "share_expert_dims": saved["share_expert_dim"],
        "attention_other_setting": {"num_attention_heads": 6}, "moe_layers_enum": "1", "num_nextn_predict_layers": 1,
        "layer_types": [*saved["layer_types"], "sliding_attention"], "swiglu_limits": [*saved["swiglu_limits"], 0.0],
        "rope_theta": [rope["sliding_attention"]["rope_theta"], rope["full_attention"]["rope_theta"], 1e3],
        "partial_rotary_factors": [1.0, 0.5, 1.0],
    }  # fmt: skip
    found, expected = read_program(published), read_program(saved)
    assert describe(replace(found, spare=())) == describe(replace(expected, spare=()))
    assert re.fullmatch("|".join(found.spare), "model.layers.2.eh_proj.weight")


def longrope_model(switch: int) -> SavedModel:
    """A Phi-3 whose frequencies are others in texts of more tokens than `switch`."""
    config = saved_model("phi3").config
    width = config["hidden_size"] // config["num_attention_heads"] // 2
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "attention_factor": 1.2, "partial_rotary_factor": 1.0}
    rope |= {"short_factor": [1.0 + i / 8 for i in range(width)], "long_factor": [2.0 + i for i in range(width)]}
    rope["original_max_position_embeddings"] = switch
    settings = {"rope_parameters": rope, "original_max_position_embeddings": switch, "max_position_embeddings": 160}
    return reconfigured(saved_model("phi3"), settings)


@pytest.mark.parametrize("interpreter", ["cpu", "torch"])
def test_longrope_beyond_its_switch(interpreter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards requests that may become long: other frequencies from the first token on, and no blocks of short ones."""
    saved, always_long = longrope_model(40), longrope_model(1)
    if interpreter == "cpu":
        model: Any = CpuModel(saved.config, saved.tensors, torch.float32)
        config = EngineConfig(block_size=BLOCK_SIZE, kv_blocks=40, device="cpu")
        engine = SteppingEngine(config, loaded(None, fast_model=model))
    else:
        model = CudaModel(saved.config, saved.tensors, torch.float32, torch.device("cpu"), by_torch())
        engine = engine_around(monkeypatch, model, ReferenceAttention(), block_size=BLOCK_SIZE, kv_blocks=40)
    assert model.max_model_len == 160 and model.short_context == 40
    long, short, later = TRUNK + PROMPTS[2], TRUNK[:33], TRUNK + PROMPTS[2][:30]
    cases = [(long, 8, saved), (short, 7, saved), (later, 8, saved), (short, 7, saved), (short, 8, always_long)]
    shared = []
    for prompt, length, expected in cases:  # the others' beginnings are in the cache
        before = engine.scheduler.num_cached_tokens
        (output,) = generate(engine, [prompt], SamplingParams(max_tokens=length))
        assert is_greedy_output(expected.network, prompt, list(output.token_ids))
        shared.append(engine.scheduler.num_cached_tokens - before)
    assert shared == [0, 0, 64, 32, 32], "beginnings are shared by those of one kind only"
