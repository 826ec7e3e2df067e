"""Limits of the inner loops of kernels: instructions and bytes for each number, and which matrix unit they must use.

A number is what the loop is for: a weight of a product, a number of a key or a value in decode steps, a score in
prompts, a number of a state or of a row, a token of the vocabulary, an expert of a router. A limit is a tenth more than
what was measured, which `--parts budgets` of `compile_matrix` prints. Kernels without products are measured as a whole,
with what they do once and all branches, unless the loop is most of their work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from cbatch.kernels.formats import FORMATS, INT4, ON_GPU
from scripts.gpu import launches
from scripts.gpu.launches import Case

if TYPE_CHECKING:
    from scripts.gpu.compiled_code import InnerLoop

BUDGET_CHIPS = (80, 86, 89, 90, 100, 120)
_MARGIN = 1.1

MEASURED: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "decode": ((3.52, 4.44, 4.44, 3.51, 3.38, 4.33), (2.03, 2.06, 2.06, 2.03, 2.03, 2.06)),
    "decode, FP8 cache": ((6.55, 7.58, 5.8, 4.82, 4.66, 5.8), (1.03, 1.06, 1.06, 1.03, 1.03, 1.06)),
    "prefill": ((27.12, 26.69, 26.69, 17.88, 17.5, 29.38), (4.25, 4.25, 4.25, 4.12, 4.12, 4.25)),
    "prefill, FP8 cache": ((32.38, 33, 29.5, 20.06, 18.91, 29.38), (2.25, 2.25, 2.25, 2.12, 2.12, 2.25)),
    "int8, 8 rows": ((3.66, 3.72, 3.72, 3.7, 3.55, 3.58), (1.31, 1.31, 1.31, 1.31, 1.31, 1.31)),
    "int8, 16 rows": ((4.35, 4.29, 4.29, 4.53, 4.48, 3.98), (1.56, 1.56, 1.56, 1.56, 1.56, 1.56)),
    "int8, 300 rows": ((11.44, 11.44, 11.44, 7.16, 7.25, 11.38), (5.25, 5.25, 5.25, 3.12, 3.12, 5.25)),
    "int4, 8 rows": ((3.03, 3.09, 3.09, 3.06, 2.93, 2.86), (0.81, 0.81, 0.81, 0.81, 0.81, 0.81)),
    "int4, 16 rows": ((3.7, 3.73, 3.73, 3.77, 3.88, 3.51), (1.06, 1.06, 1.06, 1.06, 1.06, 1.06)),
    "int4, 300 rows": ((11.25, 11.25, 11.25, 7.03, 7.12, 11.25), (4.75, 4.75, 4.75, 2.62, 2.62, 4.75)),
    "int4_zeros, 8 rows": ((4.12, 4.18, 4.18, 3.96, 3.64, 3.74), (0.88, 0.88, 0.88, 0.88, 0.88, 0.88)),
    "int4_zeros, 16 rows": ((5.35, 5.54, 5.54, 5.15, 5.46, 4.8), (1.12, 1.12, 1.12, 1.12, 1.12, 1.12)),
    "int4_zeros, 300 rows": ((12.62, 12.62, 12.62, 8.44, 7.91, 12), (5, 5, 5, 2.75, 2.75, 5)),
    "mxfp4, 8 rows": ((4.27, 4.26, 4.26, 4.24, 4.12, 4.09), (0.81, 0.81, 0.81, 0.81, 0.81, 0.81)),
    "mxfp4, 16 rows": ((4.86, 4.94, 4.94, 4.94, 4.99, 4.71), (1.06, 1.06, 1.06, 1.06, 1.06, 1.06)),
    "mxfp4, 300 rows": ((12.5, 12.5, 12.5, 8.41, 8.5, 12.56), (4.75, 4.75, 4.75, 2.62, 2.62, 4.75)),
    "nvfp4, 8 rows": ((5.22, 5.48, 5.48, 5.49, 5.2, 5.24), (1.12, 1.12, 1.12, 1.12, 1.12, 1.12)),
    "nvfp4, 16 rows": ((6.65, 6.72, 6.72, 6.56, 6.96, 6.5), (1.62, 1.62, 1.62, 1.62, 1.62, 1.62)),
    "nvfp4, 300 rows": ((12.81, 12.81, 12.81, 8.62, 8.72, 13.19), (5, 5, 5, 2.75, 2.75, 5)),
    "fp8, 8 rows": ((5.68, 5.65, 3.91, 3.77, 3.67, 3.82), (1.38, 1.38, 1.38, 1.38, 1.38, 1.38)),
    "fp8, 16 rows": ((6.27, 6.27, 4.51, 4.45, 4.66, 4.43), (1.62, 1.62, 1.62, 1.62, 1.62, 1.62)),
    "fp8, 300 rows": ((14.75, 14.75, 11.5, 6.44, 6.56, 10.25), (5.5, 5.5, 5.5, 3.25, 3.25, 5.5)),
    "experts, int4": ((3.42, 3.45, 3.45, 3.41, 3.33, 3.16), (0.81, 0.81, 0.81, 0.81, 0.81, 0.81)),
    "numbers": ((4.5, 4, 4, 3.25, 3.91, 3.31), (4, 4, 4, 4, 4, 4)),
    "embedding, int4": ((9, 9, 9, 9.5, 9.5, 10.5), (1.25, 1.25, 1.25, 1.25, 1.25, 1.25)),
    "gate": ((22, 22, 22, 22, 21, 21), (4, 4, 4, 4, 4, 4)),
    "norm": ((11.5, 11.5, 11.5, 12, 12, 13.5), (6.5, 6.5, 6.5, 6.5, 6.5, 6.5)),
    "delta rule, prompts": ((8.55, 8.56, 8.56, 2.28, 2.46, 9.12), (0.34, 0.34, 0.34, 0.17, 0.17, 0.34)),
    "scan, prompts": ((4.47, 4.46, 4.46, 1.67, 1.8, 4.62), (0.3, 0.3, 0.3, 0.15, 0.15, 0.3)),
    "heads": ((7.33, 7.33, 7.33, 8, 8, 8), (3, 3, 3, 3, 3, 3)),
    "heads, norms": ((11.67, 11.67, 11.67, 12, 11.67, 12), (6.33, 6.33, 6.33, 6.33, 6.33, 6.33)),
    "heads, FP8 cache": ((11.67, 11.33, 7.67, 8, 8, 8.33), (3, 3, 3, 3, 3, 3)),
    "store": ((4.5, 4.5, 4.5, 4.5, 4.5, 4.5), (2.5, 2.5, 2.5, 2.5, 2.5, 2.5)),
    "store, FP8 cache": ((18.5, 17.5, 6.5, 6.5, 6.5, 6.5), (2.5, 2.5, 2.5, 2.5, 2.5, 2.5)),
    "merge": ((9.38, 9.56, 9.56, 10.12, 10.38, 10.12), (5.25, 5.25, 5.25, 5.25, 5.25, 5.25)),
    "sampling, all tokens": ((72, 73.25, 73.25, 72, 64, 74.5), (9.88, 9.88, 9.88, 9.88, 9.88, 9.88)),
    "sampling, filters": ((136.88, 137, 137, 136.75, 129.25, 139.25), (9, 9, 9, 9, 9, 9)),
    "logits": ((22, 22, 22, 22, 20, 21), (8, 8, 8, 8, 8, 8)),
    "gate of heads": ((22, 22, 22, 23, 22, 23), (4, 4, 4, 4, 4, 4)),
    "norm of groups": ((34, 34, 34, 36, 32, 36), (8, 8, 8, 8, 8, 8)),
    "rows in FP8": ((48, 47, 36, 37, 31, 38), (4, 4, 4, 4, 4, 4)),
    "route": ((272, 272, 272, 272, 212, 276), (8, 8, 8, 8, 8, 8)),
    "place": ((15, 15.5, 15.5, 16, 16, 16), (4.5, 4.5, 4.5, 4.5, 4.5, 4.5)),
    "experts, few rows": ((2.12, 1.86, 1.86, 2.03, 1.94, 1.53), (2.5, 2.5, 2.5, 2.5, 2.5, 2.5)),
    "experts, many rows": ((4.97, 4.97, 4.97, 3.69, 3.88, 4.56), (4, 4, 4, 4, 4, 4)),
    "experts, sums": ((4.5, 4.62, 4.62, 4.75, 4.12, 4.88), (3.5, 3.5, 3.5, 3.5, 3.5, 3.5)),
    "adapters, down": ((7.62, 7.62, 7.62, 7.12, 7.25, 6.5), (4, 4, 4, 4, 4, 4)),
    "adapters, up": ((9, 9.5, 9.5, 9.12, 9.12, 8.5), (6, 6, 6, 6, 6, 6)),
    "convolution, tokens": ((196, 200, 200, 204, 204, 208), (66, 66, 66, 66, 66, 66)),
    "convolution, prompts": ((63.5, 66, 66, 63, 64, 62.5), (15.75, 15.75, 15.75, 15.75, 15.75, 15.75)),
    "delta rule, tokens": ((11.97, 11.97, 11.97, 11.94, 12.22, 12.97), (0.5, 0.5, 0.5, 0.5, 0.5, 0.5)),
    "delta rule, inverses": ((109, 109, 111, 113, 109, 114), (22, 22, 22, 22, 22, 22)),
    "scan, tokens": ((10.09, 10.06, 10.06, 9.84, 9.62, 10.44), (0.69, 0.69, 0.69, 0.69, 0.69, 0.69)),
}  # fmt: skip
"""Instructions and bytes of a number for each of BUDGET_CHIPS, when the kernel was last changed."""


class Cost(NamedTuple):
    """Of a number: instructions of a thread, and bytes that are read."""

    instructions: float
    read: float
    unit: str

    def __str__(self) -> str:
        return f"{self.instructions:.2f}, {self.read:.2f}" + f", {self.unit}" * bool(self.unit)


class Budget(NamedTuple):
    """The budget of a kernel.

    launch:   launches it for a case and a type
    numbers:  that a program handles in a round, by the names of constants whose values are multiplied
    factor:   by which that is multiplied further
    is_wide:  its tiles are for the matrix units of 9.0 and 10.0 that read shared memory; None if it has no products
    only:     the launch is the first with these values of constants
    any_loop: its loop is measured instead of the whole, although that has no products
    """

    name: str
    kernel: str
    launch: Callable[[Case, Any], None]
    numbers: str
    factor: int = 1
    is_wide: bool | None = False
    only: str = ""
    any_loop: bool = False

    def is_for(self, kernel: str, arguments: Mapping[str, str]) -> bool:
        wanted = (one.partition("=") for one in self.only.split())
        return kernel == self.kernel and all(arguments[name].partition(",")[0] == value for name, _, value in wanted)

    def measured(self, loop: InnerLoop, arguments: Mapping[str, str], warps: int) -> Cost:
        numbers = float(self.factor)
        for names in self.numbers.split():
            numbers *= sum(int(arguments.get(name, name)) for name in names.split("+"))
        threads = 32 * warps
        return Cost(loop.instructions * threads / numbers, loop.read * threads / numbers, loop.unit)

    def faults(self, capability: int, cost: Cost) -> list[str]:
        found, place = [], BUDGET_CHIPS.index(capability)
        for what, amount, measured in zip(("instructions", "bytes"), cost[:2], MEASURED[self.name], strict=True):
            if amount > (limit := measured[place] * _MARGIN):
                found.append(f"takes {amount:.2f} {what} for each number, and may take {limit:.2f}")
        unit = self.unit(capability)
        if cost.unit != unit:
            found.append(f"has {cost.unit or 'no matrix unit'} in its inner loop instead of {unit or 'none'}")
        return found

    def unit(self, capability: int) -> str:
        """The instruction of matrix units that it must have."""
        if self.is_wide is None:
            return ""
        return {90: "HGMMA", 100: "UTCHMMA"}.get(capability, "HMMA") if self.is_wide else "HMMA"


def _attention(kv_dtype: str) -> Callable[[Case, Any], None]:
    def launch(case: Case, dtype: Any) -> None:
        launches.attend(case._replace(kv_dtype=kv_dtype), dtype, 32, 8, 128)

    return launch


def _product(kind: int, rows: int) -> Callable[[Case, Any], None]:
    def launch(case: Case, dtype: Any) -> None:
        launches.multiply(case, dtype, kind, 4096, 4096, (rows,))

    return launch


def _heads(case: Case, dtype: Any) -> None:
    launches.launch_attention(case._replace(head_size=128, group=4), dtype)


def _heads8(case: Case, dtype: Any) -> None:
    _heads(case._replace(kv_dtype="fp8"), dtype)


def _experts(kind: int) -> Callable[[Case, Any], None]:
    def launch(case: Case, dtype: Any) -> None:
        launches.multiply_experts(case, dtype, kind, 3)

    return launch


BUDGETS = (
    Budget("decode", "_decode_kernel", _attention("auto"), "TOKENS KEY_TILE+VALUE_TILE"),
    Budget("decode, FP8 cache", "_decode_kernel", _attention("fp8"), "TOKENS KEY_TILE+VALUE_TILE"),
    Budget("prefill", "_prefill_kernel", _attention("auto"), "ROWS TOKENS", is_wide=True),
    Budget("prefill, FP8 cache", "_prefill_kernel", _attention("fp8"), "ROWS TOKENS", is_wide=True),
    *(
        Budget(f"{FORMATS[kind]}, {rows} rows", "_linear_kernel", _product(kind, rows), "WIDTH STEP", 64, rows > 16)
        for kind in ON_GPU
        for rows in (8, 16, 300)
    ),
    Budget("experts, int4", "_expert_linear_kernel", _experts(INT4), "WIDTH STEP", 64),
    Budget("numbers", "_linear_kernel", launches.launch_deterministic, "WIDTH STEP", is_wide=True),
    Budget("embedding, int4", "_look_up_kernel", _product(INT4, 8), "PARTS", 64, is_wide=None),
    Budget("gate", "_activate_kernel", launches.launch_rest, "BLOCK", is_wide=None),
    Budget("norm", "_norm_kernel", launches.launch_rest, "BLOCK", is_wide=None),
    Budget("delta rule, prompts", "_gated_delta_tile_kernel", launches.launch_recurrence, "TILE KEY_DIM WIDTH"),
    Budget("scan, prompts", "_selective_scan_tile_kernel", launches.launch_recurrence, "TILE STATE_SIZE WIDTH"),
    Budget("heads", "_prepare_heads_kernel", _heads, "GROUP+2 DIM", is_wide=None, only="query_weight=None"),
    Budget("heads, norms", "_prepare_heads_kernel", _heads, "GROUP+2 DIM", is_wide=None, only="query_weight=*fp32"),
    Budget("heads, FP8 cache", "_prepare_heads_kernel", _heads8, "GROUP+2 DIM", is_wide=None, only="query_weight=None"),
    Budget("store", "_store_kv_kernel", _attention("auto"), "HEADS KEY_DIM+VALUE_DIM", is_wide=None),
    Budget("store, FP8 cache", "_store_kv_kernel", _attention("fp8"), "HEADS KEY_DIM+VALUE_DIM", is_wide=None),
    Budget("merge", "_combine_kernel", _attention("auto"), "CHUNK VALUE_TILE", is_wide=None, any_loop=True),
    Budget("sampling, all tokens", "_scan_kernel", launches.launch_rest, "CHUNK BLOCK", is_wide=None),
    Budget("sampling, filters", "_choose_kernel", launches.launch_rest, "GROUP BLOCK", is_wide=None, any_loop=True),
    Budget("logits", "_finish_logits_kernel", launches.launch_families, "BLOCK", is_wide=None),
    Budget("gate of heads", "_gate_kernel", launches.launch_families, "BLOCK", is_wide=None),
    Budget("norm of groups", "_normalize_kernel", launches.launch_recurrence, "BLOCK", is_wide=None),
    Budget("rows in FP8", "_round_rows_kernel", launches.launch_quantized, "BLOCK", is_wide=None),
    Budget("route", "_route_kernel", launches.launch_families, "TILE", is_wide=None, only="TOP_K=8"),
    Budget("place", "_place_kernel", launches.launch_families, "BLOCK TILE", is_wide=None, only="TILE=128"),
    Budget("experts, few rows", "_expert_linear_kernel", launches.launch_families, "WIDTH STEP", only="ROWS=16"),
    Budget(
        "experts, many rows",
        "_expert_linear_kernel",
        launches.launch_families,
        "WIDTH STEP",
        only="ROWS=128",
        is_wide=True,
    ),
    Budget("experts, sums", "_combine_experts_kernel", launches.launch_families, "TOP_K BLOCK", is_wide=None),
    Budget("adapters, down", "_shrink_kernel", launches.add_adapters, "WIDTH STEP"),
    Budget("adapters, up", "_expand_kernel", launches.add_adapters, "TILE STEP"),
    Budget("convolution, tokens", "_keep_window_kernel", launches.launch_recurrence, "BLOCK", is_wide=None),
    Budget("convolution, prompts", "_convolve_kernel", launches.launch_recurrence, "ROWS BLOCK", is_wide=None),
    Budget(
        "delta rule, tokens",
        "_gated_delta_kernel",
        launches.launch_recurrence,
        "LENGTH_TILE WIDTH",
        is_wide=None,
        any_loop=True,
    ),
    Budget("delta rule, inverses", "_invert_kernel", launches.launch_recurrence, "TILE TILE"),
    Budget(
        "scan, tokens",
        "_selective_scan_kernel",
        launches.launch_recurrence,
        "LENGTH_TILE WIDTH",
        is_wide=None,
        any_loop=True,
    ),
)
