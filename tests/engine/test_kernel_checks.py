"""The checks of the kernels: they agree with what is right, and see every fault that is planted into one kernel.

Without a GPU, Triton's interpreter runs the kernels.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cbatch.attention.cpu import CpuAttention
from cbatch.base.errors import ModelError
from cbatch.base.quantization import STORED, Quantization
from cbatch.engine.cuda_graphs import Run
from cbatch.engine.kernel_checks import attention as attention_checks
from cbatch.engine.kernel_checks import cpu as cpu_checks
from cbatch.engine.kernel_checks import layer as layer_checks
from cbatch.engine.kernel_checks import whole_step as step_checks
from cbatch.engine.kernel_checks.attention import AttentionCall, AttentionChecks
from cbatch.engine.kernel_checks.kernel_check import KernelCheck, product_tolerance, run_check
from cbatch.engine.kernel_checks.layer import LayerChecks
from cbatch.engine.kernel_checks.sampling import check_sampling
from cbatch.engine.kernel_checks.whole_step import ExpectedSteps
from cbatch.engine.stepping_engine import SteppingEngine
from cbatch.kernels.cpu.matmul.formats import CPU_FORMATS
from cbatch.kernels.formats import FLOAT32
from cbatch.model.cpu import CpuModel
from cbatch.model.cuda import CudaModel
from cbatch.model.ops.device_kernel import KERNELS, by_torch
from cbatch.runtime.kv_cache import FP8, LayerShape, as_bytes
from cbatch.sample.sampler import Sampler
from scripts.benchmarks.models import in_float8
from tests.support.adapters import LINEARS, drawn_adapters
from tests.support.cuda_model import DEVICE, model_of
from tests.support.float8 import NO_FLOAT8
from tests.support.kernel_faults import replace_kernel
from tests.support.programs import saved_model
from tests.support.tiny_models import make_fast_engine, make_network

pytest.importorskip("triton", reason="the kernels for a GPU need Triton")

from cbatch.attention import triton as triton_attention
from cbatch.attention.triton import TritonAttention
from cbatch.kernels.triton.attention_decode import DecodeTuning
from cbatch.kernels.triton.sampling import sample_rows

pytestmark = pytest.mark.kernels
CPU = torch.device("cpu")
SHAPE = LayerShape(2, 12, 12)
CALLS = [AttentionCall(4, SHAPE, 0.3), AttentionCall(4, SHAPE, 0.3, window=9, softcap=20.0, has_sinks=True)]
CHUNKS = {
    "decode attention": [(0, 1), (16, 17), (30, 31)],
    "short chunk attention": [(0, 2), (20, 23), (8, 9)],
    "prefill attention": [(0, 5), (3, 14)],
}
# Long enough to be split by `SPLITTING`; merging the longest takes a second turn of 16 splits.
SPLITTING = DecodeTuning(split=8)
SPLIT_CALL = AttentionCall(2, LayerShape(1, 12, 12), 0.3)
LONG_CHUNKS = {"decode attention": [(0, 1), (263, 264)]}
CAPTURED_STEPS = [(39, 40), (263, 264), (0, 1)], [(39, 40), (262, 264), (0, 1), (39, 59)]
RECURRENT_STEPS = {"decode": [(1, 1)], "chunks": [(1, 0), (6, 4)]}
STEPS = [(0, 3), (0, 1)], [(3, 4), (1, 3)], [(4, 5), (3, 4)], [(5, 6), (4, 5)]


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_checks, "CHUNKS", CHUNKS)
    monkeypatch.setattr(attention_checks, "CAPTURED_STEPS", CAPTURED_STEPS)
    monkeypatch.setattr(step_checks, "steps_of", lambda _: STEPS)
    monkeypatch.setattr(layer_checks, "STEPS", RECURRENT_STEPS)


@pytest.fixture(scope="module")
def model() -> Any:
    return model_of(make_network("qwen3", num_hidden_layers=1, max_position_embeddings=16))


def wrong_of(checks: Any) -> list[str]:
    return [check.name for check in checks if not check.agrees]


def attention_errors(dtype: torch.dtype = torch.float32, calls: list[AttentionCall] = CALLS) -> list[KernelCheck]:
    return list(AttentionChecks(TritonAttention(DEVICE), 16, dtype, DEVICE, calls).run())


def plant(monkeypatch: pytest.MonkeyPatch, name: str, damage: Callable[..., None]) -> None:
    """Damages what a function of the attention has written; it gets the function's arguments."""
    right = getattr(triton_attention, name)

    def wrong(*arguments: Any, **keywords: Any) -> None:
        right(*arguments, **keywords)
        damage(*arguments)

    monkeypatch.setattr(triton_attention, name, wrong)


def test_attention_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards users of right kernels, and sees a wrong slot, a wrong row of 1%, and a row of NaN, each in its kernel."""
    checks = attention_errors()
    assert wrong_of(checks) == [] and len(checks) == 1 + 2 * len(CHUNKS)
    assert "window 9, softcap, sinks, heads of 12" in checks[-1].name
    damages: list[tuple[str, Callable[..., None], list[str]]] = [
        ("store_kv", lambda keys, *_: keys[:, 0, 0].nan_to_num_(1.0), ["cache write"]),
        ("attend_decode", lambda q, k, v, out, *_: out[-1].mul_(1.01), ["decode attention", "short chunk attention"]),
        (  # but no step of three decode rows
            "attend_prefill",
            lambda q, k, v, out, *_: out[2:-1].fill_(torch.nan) if len(out) > 3 else None,
            ["short chunk attention", "prefill attention"],
        ),
    ]
    for function, damage, found in damages:
        with monkeypatch.context() as patch:
            plant(patch, function, damage)
            checks = attention_errors(calls=CALLS[:1])
        assert [name.partition(" (")[0] for name in wrong_of(checks)] == found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_an_fp8_cache_may_be_one_step_off(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards right kernels that round the middle of two numbers elsewhere, and sees each of the wrong ones."""
    model = model_of(make_network("qwen3", num_hidden_layers=1), dtype)

    def more(keys: Tensor, by: int, places: int | None = 1) -> None:
        """Moves numbers of a cache to other numbers of FP8, away from 0."""
        as_bytes(keys)[(keys.float().abs() < 200).nonzero()[:places].unbind(1)] += by

    damages: list[tuple[Callable[[Tensor], None], bool]] = [
        (lambda keys: None, True),
        (lambda keys: more(keys, 1), True),
        (lambda keys: more(keys, 4), False),
        (lambda keys: more(keys, 1, None), False),
        (lambda keys: as_bytes(keys)[..., -1, :].fill_(0x7F), False),
        (lambda keys: as_bytes(keys)[..., 0, :].fill_(0), False),
    ]
    for damage, agrees in damages:

        def wrong(right: Any, *arguments: Any, damage: Callable[[Tensor], None] = damage) -> None:
            right(*arguments)
            damage(arguments[-2])

        with monkeypatch.context() as patch:
            replace_kernel(patch, "prepare_heads", wrong)
            (check,) = (one for one in LayerChecks(model, 16, FP8).run() if one.name == "prepare_heads")
            assert check.agrees is agrees


def lose_splits(number: int, lost: int | slice) -> Callable[..., None]:
    """Merges a sequence again without some of its splits."""

    def damage(*arguments: Any) -> None:
        out, parts, metadata = arguments[3:6]
        row, length, count, _, size, first = metadata.sequences[number].tolist()
        splits = -(-length // max(size, 1))
        mine = slice(first, first + splits * count)
        if splits and 0 <= row < row + count <= len(out) and 0 <= mine.start < mine.stop <= len(parts.sums):
            # Others are padding, which nobody has written.
            sums, results = (part[mine].unflatten(0, (splits, count)) for part in (parts.sums, parts.results))
            sums[lost] = -torch.inf
            out[row : row + count] = (torch.softmax(sums * math.log(2), 0)[..., None] * results).sum(0)

    return damage


@pytest.mark.slow
def test_small_faults_behind_long_pasts_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards what bfloat16 lets pass: rows behind long pasts are small beside that of a first token."""
    monkeypatch.setattr(attention_checks, "CHUNKS", LONG_CHUNKS)
    # The interpreter has no bfloat16, but its tolerance serves.
    monkeypatch.setitem(attention_checks.TOLERANCES, torch.float32, attention_checks.TOLERANCES[torch.bfloat16])
    checks = AttentionChecks(TritonAttention(DEVICE, SPLITTING), 16, torch.float32, DEVICE, [SPLIT_CALL])

    def error() -> float:
        *_, check = checks.run()
        return check.error / check.tolerance

    assert error() < 0.05
    for split in (0, -2, -1):
        with monkeypatch.context() as patch:
            plant(patch, "attend_decode", lose_splits(-1, split))
            assert error() > 1, split


WRITTEN = {
    "prepare_heads": ("query", "keys", "values"), "gate": ("target",), "finish_logits": ("logits",), "route": (None,),
    "embed_and_norm": ("residual", "out"), "add_and_norm": ("residual", "out"), "convolve": ("state", "out"),
    "gated_delta": ("state", "out"), "selective_scan": ("state", "out"),
}  # fmt: skip
"""The arguments that each kernel writes, if not only `out`; one returns what it has computed."""
CHECKED = {name: kernel for name, kernel in KERNELS.items() if kernel.triton}
FAMILY_OF = {
    "finish_logits": "gemma2", "normalize": "olmo2", "convolve": "lfm2", "gated_delta": "qwen3_5_text",
    "selective_scan": "granitemoehybrid", "gated_norm": "granitemoehybrid",
} | dict.fromkeys(("gate", "route", "expert_linear", "combine"), "afmoe")  # fmt: skip
"""A family that calls an operation; the others are called by every model."""


def model_for(name: str) -> Any:
    """A model that calls an operation."""
    if name in FAMILY_OF:
        return family_model(FAMILY_OF[name])
    ways = {"linear": "invariant", "float8_linear": "fp8", "quantized_linear": "int8", "look_up": "int8"}
    return tiny_model((ways | {"add_adapters": "adapted"}).get(name, "plain"))


@cache
def tiny_model(way: str) -> Any:
    """Embeddings that are the head have integers, too; activations of FP8 are rounded."""
    sizes: dict[str, Any] = {
        "num_hidden_layers": 1,
        "max_position_embeddings": 16,
        "tie_word_embeddings": way == "int8",
    }
    if way == "fp8":
        network = make_network("qwen3", hidden_size=64, intermediate_size=96, head_dim=16, **sizes)
        weights = network.config.to_dict(), in_float8(network.state_dict())
        return CudaModel(*weights, torch.float16, DEVICE, quantize=Quantization(STORED, "fp8"))
    network = make_network("qwen3", **sizes)
    quantize = Quantization("int8") if way == "int8" else None
    model = CudaModel(network.config.to_dict(), network.state_dict(), torch.float32, DEVICE, quantize=quantize)
    if way == "adapted":
        return model.with_adapters(drawn_adapters(network, LINEARS, LINEARS[1:]))
    return model.as_batch_invariant() if way == "invariant" else model


@cache
def family_model(family: str) -> Any:
    saved = saved_model(family)
    return CudaModel(saved.config, saved.tensors, torch.float32, DEVICE)


def test_right_layer_kernels_agree() -> None:
    """Guards the checks of a layer: every operation that some model calls has one."""
    seen = set()
    for each in {id(one): one for one in map(model_for, ("linear", *CHECKED))}.values():
        checks = list(LayerChecks(each, 16).run())
        assert wrong_of(checks) == []
        seen |= {check.name for check in checks}
    missing = {"float8_linear"} if NO_FLOAT8 else set()
    assert seen >= CHECKED.keys() - missing | {"output head"}


@pytest.mark.parametrize(
    ("name", "argument"),
    [(name, argument) for name in CHECKED for argument in WRITTEN.get(name, ("out",))],
)
def test_wrong_layer_kernels_are_seen(name: str, argument: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards each operation: one wrong number in any tensor that it writes."""
    if name == "float8_linear" and NO_FLOAT8:
        pytest.skip(NO_FLOAT8)

    def wrong(right: Any, *arguments: Any, **keywords: Any) -> Any:
        result = right(*arguments, **keywords)
        tensor = result.weights if argument is None else arguments[KERNELS[name].parameters.index(argument)]
        if tensor is not None:
            tensor[tensor.isfinite().nonzero()[-1].unbind()] += 0.5
        return result

    replace_kernel(monkeypatch, name, wrong)
    assert any(name in check.name and not check.agrees for check in LayerChecks(model_for(name), 16).run())


def test_whole_steps_have_adapters() -> None:
    """Guards the check of whole steps, also of captured ones: a model that forgets its adapters gives other logits."""
    plain, adapted = tiny_model("plain"), tiny_model("adapted")
    expected = ExpectedSteps.of(adapted.with_ops(by_torch()), 16)
    adapted, attention = adapted.with_ops(by_torch(heads_first=True)), TritonAttention(DEVICE)
    assert expected.check("a whole step", adapted, attention).agrees
    assert not expected.check("a whole step", plain.with_ops(adapted.ops), attention).agrees
    sampler = Sampler(DEVICE, kernel=True)
    assert expected.check_captured(adapted, attention, sampler, AT_ONCE).agrees
    assert not expected.check_captured(plain.with_ops(adapted.ops), attention, sampler, AT_ONCE).agrees


@pytest.mark.slow
def test_a_whole_step(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a model that calls right kernels wrongly, and one that is right."""
    expected = ExpectedSteps.of(model.with_ops(by_torch()), 16)
    assert expected.calls == (AttentionCall(4, LayerShape(2, 16, 16), 0.25),)
    assert expected.check("a whole step", model, TritonAttention(DEVICE)).agrees
    attend = TritonAttention.attend
    monkeypatch.setattr(TritonAttention, "attend", lambda *a, **options: attend(*a, **options | {"scale": 0.5}))
    check = expected.check("a whole step", model, TritonAttention(DEVICE))
    assert not check.agrees and check.reason.startswith("a whole step differs from torch by 0.")


AT_ONCE: Callable[[Run], Run] = lambda run: run  # noqa: E731 - a replay runs the step again
NEVER: Callable[[Run], Run] = lambda run: lambda: None  # noqa: E731 - it leaves what was there at the capture


def not_allowed(run: Run) -> Run:
    raise RuntimeError("operation not permitted when stream is capturing")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capture", "forgotten", "reason"),
    [
        (AT_ONCE, "", "a captured step differs from torch by "),
        (NEVER, "", "a captured step differs from torch by "),
        (AT_ONCE, "fill_words", "a captured step differs from torch by inf"),
        (not_allowed, "", "a captured step fails (operation not permitted when stream is capturing)."),
    ],
)
def test_captured_steps(
    capture: Callable[[Run], Run], forgotten: str, reason: str, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards replays that do not read their new inputs or sampling parameters, and a capture that fails."""
    expected = ExpectedSteps.of(model.with_ops(by_torch()), 16)
    if forgotten:
        monkeypatch.setattr(f"cbatch.engine.cuda_graphs._Shared.{forgotten}", lambda *_: None)
    plain, sampler = model.with_ops(by_torch(heads_first=True)), Sampler(DEVICE, kernel=True)
    check = expected.check_captured(plain, TritonAttention(DEVICE), sampler, capture)
    assert check.agrees is (capture is AT_ONCE and not forgotten) and check.reason.startswith(reason)


def without_second_turn(patch: pytest.MonkeyPatch) -> None:
    plant(patch, "attend_decode", lose_splits(1, slice(16, None)))


def without_reset(patch: pytest.MonkeyPatch) -> None:
    """The counter of splits is not zero again after a launch."""
    plant(patch, "attend_decode", lambda *arguments: arguments[5].arrivals(arguments[1].shape[1]).fill_(1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "capture", "agrees"),
    [
        (lambda _: None, AT_ONCE, True),
        (lambda _: None, NEVER, False),
        (without_second_turn, AT_ONCE, False),
        (without_reset, AT_ONCE, False),
    ],
)
def test_captured_attention(
    fault: Callable[[pytest.MonkeyPatch], None],
    capture: Callable[[Run], Run],
    agrees: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Guards the buffers of captured steps that are split, and the merging of their partial results."""
    fault(monkeypatch)
    attention = TritonAttention(DEVICE, SPLITTING)
    calls = [replace(SPLIT_CALL, window=9), SPLIT_CALL]
    check = AttentionChecks(attention, 16, torch.float32, DEVICE, calls).check_captured(capture)
    assert check.agrees is agrees and not check.failure


def test_tf32_is_no_fault() -> None:
    """Guards programs that allow TF32 against stepping down; the other types are not affected."""
    assert product_tolerance(torch.float32, 1e-3) == 1e-3
    products = torch.backends.cuda.matmul
    before = products.fp32_precision
    try:
        products.fp32_precision = "tf32"
        assert product_tolerance(torch.float32, 1e-3) == 1e-2 and product_tolerance(torch.float16, 1e-3) == 1e-3
    finally:
        products.fp32_precision = before


def test_right_sampling_agrees() -> None:
    """Guards users of the right kernel, and a row that is not a number, which has to be seen as such."""
    assert check_sampling(Sampler(DEVICE, kernel=True), 89).agrees
    sampler = Sampler(DEVICE, kernel=True)
    sampler._kernel = lambda logits, *rest: sample_rows(logits.nan_to_num(), *rest)
    check = check_sampling(sampler, 89)
    assert not check.agrees and check.reason == "sampling fails (a row that is not a number looks like one)."


class Forgetful(Sampler):
    """Leaves something out."""

    def __init__(self, forgotten: dict[str, Any]) -> None:
        super().__init__(CPU, kernel=False)
        self._forgotten = forgotten

    def sample(self, logits: Tensor, requests: Any, positions: Any, argmax: Any = None, masks: Any = None) -> Any:
        params = {key: value for key, value in self._forgotten.items() if hasattr(requests[0].params, key)}
        requests = [copy(request) for request in requests]
        for request in requests:
            request.request = replace(request.request, params=replace(request.params, **params))
        for name in {"masks", "positions"} & self._forgotten.keys():
            masks, positions = (None, positions) if name == "masks" else (masks, [9] * len(positions))
        return super().sample(logits, requests, positions, argmax, masks)


@pytest.mark.parametrize(
    ("forgotten", "agrees"),
    [
        ({}, True),
        ({"temperature": 0.0}, False),
        ({"top_k": 0}, False),
        ({"top_p": 1.0}, False),
        ({"min_p": 0.0}, False),
        ({"masks": None}, False),
        ({"positions": None}, False),
    ],
    ids=str,
)
def test_wrong_sampling_is_seen(forgotten: dict[str, Any], agrees: bool) -> None:
    """Guards each filter, the mask and the noise, and the reason that a user reads: nothing is rounded here."""
    check = check_sampling(Forgetful(forgotten), 300)
    assert check.agrees is agrees and re.search(r"than torch in \d+% of the rows\.$|another one\)\.$", check.reason)


def test_what_raises_is_a_sentence() -> None:
    """Guards the reason that a user reads: the kind of the error and its first line."""

    class OutOfResources(Exception):
        pass

    def fail() -> float:
        raise OutOfResources("out of resource: shared memory, Required: 131072, Hardware limit: 101376.\nReduce it.")

    check = run_check("decode attention", CPU, 0.1, fail)
    assert not check.agrees
    assert check.reason == (
        "decode attention fails (OutOfResources: out of resource: shared memory, Required: 131072, "
        "Hardware limit: 101376)."
    )


def test_a_lost_device_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against stepping down on a GPU on which nothing runs any more."""

    def fail(*_: Any) -> float:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr("cbatch.engine.kernel_checks.kernel_check.synchronize", fail)
    with pytest.raises(ModelError, match=r"illegal memory access.*start again with --attention reference"):
        run_check("decode attention", CPU, 0.1, fail)


@pytest.fixture
def cpu_engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[SteppingEngine]:
    monkeypatch.setattr(cpu_checks, "_WORKLOAD_BYTES", 2**10)
    with make_fast_engine(make_network("qwen3", hidden_size=64)) as engine:
        yield engine


@pytest.mark.slow
def test_right_kernels_of_a_cpu_agree(cpu_engine: SteppingEngine) -> None:
    """Guards `info --check` on a CPU: every kernel is there, and can be timed."""
    checks = list(cpu_engine.check_kernels())
    assert wrong_of(checks) == []
    assert [check.name.partition(" (")[0] for check in checks] == [
        *CHUNKS,
        "linear, one row",
        "linear, many rows",
        "a whole step, against transformers",
        "argmax",
        "sampling",
    ]
    for check in checks:
        if check.workload is not None:
            work = check.workload()
            work.run()
            assert (work.bytes_read > 0) != (work.flops > 0)


def test_products_are_compared_in_every_format(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the check of a model whose weights are in a format that only files have."""
    for kind in range(len(CPU_FORMATS)):
        dtype = torch.float32 if kind == FLOAT32 else torch.bfloat16
        right, wrong = (cpu_checks._Product(64, 96, dtype, kind, 1) for _ in range(2))
        assert all(right.check("", rows).agrees for rows in (1, 20))
        with monkeypatch.context() as patch:
            shift_packed(patch)
            assert not wrong.check("", 20).agrees, CPU_FORMATS[kind]


def shift_packed(patch: pytest.MonkeyPatch) -> None:
    for name in ("pack_weight", "pack_integers"):
        pack = getattr(cpu_checks, name)
        patch.setattr(cpu_checks, name, lambda *given, pack=pack: np.roll(pack(*given), 4))


def wrong_attention(patch: pytest.MonkeyPatch) -> None:
    attend = CpuAttention.attend
    patch.setattr(CpuAttention, "attend", lambda *arguments, **options: 1.1 * attend(*arguments, **options))


def wrong_steps(patch: pytest.MonkeyPatch) -> None:
    forward = CpuModel.forward

    def wrong(*arguments: Any) -> Any:
        logits = forward(*arguments)
        logits.values[:, 0] += 40.0
        return logits

    patch.setattr(CpuModel, "forward", wrong)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "found"),
    [
        (wrong_attention, [*CHUNKS]),
        (shift_packed, ["linear, one row", "linear, many rows"]),
        (wrong_steps, ["a whole step, against transformers", "argmax"]),
    ],
)
def test_wrong_kernels_of_a_cpu_are_seen(
    plant: Callable[[pytest.MonkeyPatch], None],
    found: list[str],
    cpu_engine: SteppingEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Guards each check of a CPU."""
    plant(monkeypatch)
    assert [name.partition(" (")[0] for name in wrong_of(cpu_engine.check_kernels())] == found
