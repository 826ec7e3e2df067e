"""Stands in for the package `flashinfer`: the part that cbatch calls, with its names, by plain torch.

Source: `flashinfer/prefill.py` of FlashInfer 0.6.9.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


class BatchPrefillWithPagedKVCacheWrapper:
    """Notes its plans; what it reads of them is checked as FlashInfer does, or relies on it."""

    made: list[BatchPrefillWithPagedKVCacheWrapper] = []  # noqa: RUF012 - emptied by `fake_flashinfer`

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        assert float_workspace_buffer.dtype == torch.uint8 and kv_layout == "HND"
        self.plans: list[dict[str, Any]] = []
        self.made.append(self)

    def plan(
        self, qo_indptr: Tensor, paged_kv_indptr: Tensor, paged_kv_indices: Tensor, paged_kv_last_page_len: Tensor,
        num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int, *, causal: bool = False,
        sm_scale: float | None = None, window_left: int = -1, logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16, kv_data_type: torch.dtype | None = None,
        disable_split_kv: bool = False,
    ) -> None:  # fmt: skip
        on_host = qo_indptr, paged_kv_indptr, paged_kv_last_page_len
        assert all(one.device.type == "cpu" and one.dtype == torch.int32 for one in on_host), "the host would wait"
        assert paged_kv_indices.dtype == torch.int32 and len(paged_kv_indices) == paged_kv_indptr[-1]
        assert causal and disable_split_kv
        assert paged_kv_last_page_len.min() >= 1 and paged_kv_last_page_len.max() <= page_size
        self.plans.append({name: value for name, value in locals().items() if name != "self"})

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, out: Tensor) -> Tensor:
        plan, (keys, values) = SimpleNamespace(**self.plans[-1]), paged_kv_cache
        assert keys.shape[1:] == values.shape[1:] == (plan.num_kv_heads, plan.page_size, plan.head_dim_qk)
        assert keys.stride() == values.stride() and q.dtype == plan.q_data_type and keys.dtype == plan.kv_data_type
        assert q.shape == out.shape == (plan.qo_indptr[-1], plan.num_qo_heads, plan.head_dim_qk)
        pages = plan.paged_kv_indptr.tolist()
        for one, last in enumerate(plan.paged_kv_last_page_len.tolist()):
            blocks = plan.paged_kv_indices[pages[one] : pages[one + 1]].long()
            length = (len(blocks) - 1) * plan.page_size + last
            rows = slice(*plan.qo_indptr[one : one + 2].tolist())
            k, v = (part[blocks].transpose(0, 1).flatten(1, 2)[:, :length].double() for part in (keys, values))
            out[rows] = _attended(q[rows].double(), k, v, plan).to(out.dtype)
        return out


def _attended(q: Tensor, k: Tensor, v: Tensor, plan: Any) -> Tensor:
    """q [n, heads, dim]; k, v [kv_heads, length, dim]"""
    group = q.shape[1] // len(k)
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    scores = torch.einsum("nhd,hld->hnl", q, k) * plan.sm_scale
    if plan.logits_soft_cap:
        scores = plan.logits_soft_cap * torch.tanh(scores / plan.logits_soft_cap)
    key = torch.arange(k.shape[1], device=q.device)
    position = key[-len(q) :, None]
    seen = key <= position
    if plan.window_left >= 0:
        seen &= key >= position - plan.window_left
    return torch.einsum("hnl,hld->nhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)
