"""Stand-ins for flash-attn 2.8.3, FlashAttention 3 (3.0.0b1) and flashinfer 0.7.2, where no GPU is.

Signatures are those of the packages; `test_attention_backends.py` compares calls where one is installed. What they
compute comes from the tensors, tables and starts that they are given, so a wrong one shows; and they refuse what the
packages' C++ refuses of it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from importlib.machinery import ModuleSpec
from inspect import signature
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from triptych_kernels.attend_options import AttendOptions
from triptych_kernels.reference.attention import paged_attention


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """As it was made."""

    module: str
    name: str
    """Qualified within the module."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    bound: dict[str, Any]
    """By the names of the parameters."""


class Calls(list[Call]):
    """In order."""

    def noted(self, module: ModuleType, function: Callable[..., Any], name: str = "") -> Callable[..., Any]:
        """The function, whose calls are appended here."""
        name = name or function.__name__

        @wraps(function)
        def note(*args: Any, **kwargs: Any) -> Any:
            bound = signature(function).bind(*args, **kwargs).arguments
            self.append(Call(module.__name__, name, args, kwargs, bound))
            return function(*args, **kwargs)

        return note

    def of(self, name: str) -> list[Call]:
        return [call for call in self if call.name == name]


def install(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Let Python import the stand-ins instead of the packages; returns what they will be asked."""
    calls = Calls()
    for module in (_flash_attn(calls), _flash_attn_interface(calls), _flashinfer(calls)):
        module.__spec__ = ModuleSpec(module.__name__, None)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    # which CPUs would have to write, and no test reads
    monkeypatch.setattr("triptych_services.worker.attention.flashinfer._WORKSPACE_BYTES", 1 << 10)
    return calls


def attend_pages(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    options: AttendOptions,
) -> Tensor:
    """By definition; keys and values [num_blocks, block_size, num_kv_heads, head_dim]."""
    cache = torch.stack([keys, values], dim=1).transpose(2, 3)
    return paged_attention(
        query,
        cache,
        tables,
        query_starts,
        seq_lens,
        options,
        kv_scales=None,
        query_lens_list=(),
        seq_lens_list=(),
    )


def _check(query: Tensor, keys: Tensor, values: Tensor, tables: Tensor, *counts: Tensor) -> None:
    assert query.dtype == keys.dtype == values.dtype
    assert query.stride(-1) == keys.stride(-1) == values.stride(-1) == tables.stride(-1) == 1
    assert keys.shape == values.shape
    assert query.shape[-1] == keys.shape[-1]
    assert query.shape[-2] % keys.shape[2] == 0
    assert all(tensor.dtype == torch.int32 and tensor.is_contiguous() for tensor in counts)
    assert tables.dtype == torch.int32


def _window(window_size: tuple[int, int]) -> int:
    """Keys that a query sees: those before its own that are counted, and its own; 0: all."""
    left, right = window_size
    assert right == (-1 if left == -1 else 0)
    return left + 1


def _flash_attn(calls: Calls) -> ModuleType:
    module = ModuleType("flash_attn")

    def flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        alibi_slopes=None,
        deterministic=False,
        return_attn_probs=False,
        block_table=None,
    ):
        assert k.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256"
        _check(q, k, v, block_table, cu_seqlens_q, cu_seqlens_k)
        query_lens, seq_lens = cu_seqlens_q.diff(), cu_seqlens_k.diff()
        assert cu_seqlens_k[0] == 0
        assert len(block_table) == len(query_lens) == len(seq_lens)
        assert int(query_lens.max()) == max_seqlen_q
        assert int(seq_lens.max()) == max_seqlen_k
        assert causal
        options = AttendOptions(
            softmax_scale, window=_window(window_size), soft_cap=softcap, alibi=alibi_slopes
        )
        return attend_pages(q, k, v, block_table, cu_seqlens_q, seq_lens, options)

    def flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        k=None,
        v=None,
        rotary_cos=None,
        rotary_sin=None,
        cache_seqlens=None,
        cache_batch_idx=None,
        cache_leftpad=None,
        block_table=None,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        rotary_interleaved=True,
        alibi_slopes=None,
        num_splits=0,
        return_softmax_lse=False,
    ):
        assert k_cache.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256"
        _check(q, k_cache, v_cache, block_table, cache_seqlens)
        num_rows, num_queries = q.shape[:2]
        assert (num_rows, num_queries) == (len(cache_seqlens), 1)
        starts = torch.arange(num_rows + 1, dtype=torch.int32)
        options = AttendOptions(
            softmax_scale, window=_window(window_size), soft_cap=softcap, alibi=alibi_slopes
        )
        attended = attend_pages(q[:, 0], k_cache, v_cache, block_table, starts, cache_seqlens, options)
        return attended[:, None]

    for function in (flash_attn_varlen_func, flash_attn_with_kvcache):
        setattr(module, function.__name__, calls.noted(module, function))
    return module


def _flash_attn_interface(calls: Calls) -> ModuleType:
    module = ModuleType("flash_attn_interface")

    def flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        k=None,
        v=None,
        qv=None,
        rotary_cos=None,
        rotary_sin=None,
        cache_seqlens=None,
        cache_batch_idx=None,
        cache_leftpad=None,
        page_table=None,
        cu_seqlens_q=None,
        cu_seqlens_k_new=None,
        max_seqlen_q=None,
        rotary_seqlens=None,
        q_descale=None,
        k_descale=None,
        v_descale=None,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        attention_chunk=0,
        softcap=0.0,
        rotary_interleaved=True,
        scheduler_metadata=None,
        num_splits=0,
        pack_gqa=None,
        sm_margin=0,
        return_softmax_lse=False,
    ):
        _check(q, k_cache, v_cache, page_table, cache_seqlens, cu_seqlens_q)
        assert int(cu_seqlens_q.diff().max()) == max_seqlen_q
        assert causal
        options = AttendOptions(softmax_scale, window=_window(window_size), soft_cap=softcap)
        return attend_pages(q, k_cache, v_cache, page_table, cu_seqlens_q, cache_seqlens, options)

    module.flash_attn_with_kvcache = calls.noted(module, flash_attn_with_kvcache)
    return module


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    query_starts: Tensor
    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor
    page_size: int
    sizes: tuple[int, int, int]
    options: AttendOptions
    dtypes: tuple[torch.dtype, torch.dtype]


class _Wrapper:
    """Base of both wrappers."""

    def __init__(self, workspace: Tensor, kv_layout: str) -> None:
        assert workspace.dtype == torch.uint8
        assert kv_layout == "HND"
        self.workspace = workspace
        self.plan_made: _Plan | None = None

    def attend(self, q: Tensor, paged_kv_cache: Tensor, out: Tensor) -> Tensor:
        plan = self.plan_made
        assert plan is not None, "plan info is not initialized"
        _, two, num_kv_heads, page_size, head_dim = paged_kv_cache.shape
        assert two == 2
        assert (q.shape[1], num_kv_heads, head_dim) == plan.sizes
        assert page_size == plan.page_size
        assert (q.dtype, paged_kv_cache.dtype) == plan.dtypes
        assert q.shape[0] == int(plan.query_starts[-1])
        assert q.stride(-1) == 1
        assert (out.shape, out.dtype) == (q.shape, q.dtype)
        assert out.is_contiguous()
        num_pages = plan.indptr.diff()
        seq_lens = (num_pages - 1) * page_size + plan.last_page_len
        assert ((plan.last_page_len >= 1) & (plan.last_page_len <= page_size)).all()
        assert len(plan.indices) == int(plan.indptr[-1])
        tables = torch.zeros(len(num_pages), int(num_pages.max()), dtype=torch.int32)
        for row, (start, end) in enumerate(zip(plan.indptr.tolist(), plan.indptr[1:].tolist(), strict=False)):
            tables[row, : end - start] = plan.indices[start:end]
        keys, values = paged_kv_cache.transpose(2, 3).unbind(1)
        out.copy_(attend_pages(q, keys, values, tables, plan.query_starts, seq_lens, plan.options))
        return out


def _host(*tensors: Tensor) -> list[Tensor]:
    """As copied by a plan."""
    assert all(tensor.dtype == torch.int32 and tensor.device.type == "cpu" for tensor in tensors)
    return [tensor.clone() for tensor in tensors]


def _flashinfer(calls: Calls) -> ModuleType:
    module = ModuleType("flashinfer")

    class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
        def __init__(
            self,
            float_workspace_buffer,
            kv_layout="NHD",
            use_cuda_graph=False,
            use_tensor_cores=False,
            paged_kv_indptr_buffer=None,
            paged_kv_indices_buffer=None,
            paged_kv_last_page_len_buffer=None,
            backend="auto",
            jit_args=None,
        ):
            super().__init__(float_workspace_buffer, kv_layout)

        def plan(
            self,
            indptr,
            indices,
            last_page_len,
            num_qo_heads,
            num_kv_heads,
            head_dim,
            page_size,
            *,
            pos_encoding_mode="NONE",
            window_left=-1,
            window_right=0,
            logits_soft_cap=None,
            q_data_type="float16",
            kv_data_type=None,
            o_data_type=None,
            data_type=None,
            sm_scale=None,
            rope_scale=None,
            rope_theta=None,
            non_blocking=True,
            block_tables=None,
            seq_lens=None,
            fixed_split_size=None,
            disable_split_kv=False,
            q_len_per_req=1,
            is_causal=None,
        ):
            self.plan_made = _Plan(
                torch.arange(len(last_page_len) + 1, dtype=torch.int32),
                *_host(indptr, indices, last_page_len),
                page_size,
                (num_qo_heads, num_kv_heads, head_dim),
                AttendOptions(sm_scale, window=window_left + 1, soft_cap=logits_soft_cap or 0.0),
                (q_data_type, kv_data_type),
            )

        def run(
            self,
            q,
            paged_kv_cache,
            *args,
            q_scale=None,
            k_scale=None,
            v_scale=None,
            out=None,
            lse=None,
            return_lse=False,
            enable_pdl=None,
            window_left=None,
            sinks=None,
            q_len_per_req=None,
            skip_softmax_threshold_scale_factor=None,
            kv_cache_sf=None,
        ):
            return self.attend(q, paged_kv_cache, out)

    class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
        def __init__(
            self,
            float_workspace_buffer,
            kv_layout="NHD",
            use_cuda_graph=False,
            qo_indptr_buf=None,
            paged_kv_indptr_buf=None,
            paged_kv_indices_buf=None,
            paged_kv_last_page_len_buf=None,
            custom_mask_buf=None,
            mask_indptr_buf=None,
            backend="auto",
            jit_args=None,
            jit_kwargs=None,
            variant_owns_mask=False,
        ):
            super().__init__(float_workspace_buffer, kv_layout)

        def plan(
            self,
            qo_indptr,
            paged_kv_indptr,
            paged_kv_indices,
            paged_kv_last_page_len,
            num_qo_heads,
            num_kv_heads,
            head_dim_qk,
            page_size,
            head_dim_vo=None,
            custom_mask=None,
            packed_custom_mask=None,
            causal=False,
            pos_encoding_mode="NONE",
            use_fp16_qk_reduction=False,
            sm_scale=None,
            window_left=-1,
            logits_soft_cap=None,
            rope_scale=None,
            rope_theta=None,
            q_data_type="float16",
            kv_data_type=None,
            o_data_type=None,
            non_blocking=True,
            prefix_len_ptr=None,
            token_pos_in_items_ptr=None,
            token_pos_in_items_len=0,
            max_item_len_ptr=None,
            seq_lens=None,
            seq_lens_q=None,
            block_tables=None,
            max_token_per_sequence=None,
            max_sequence_kv=None,
            fixed_split_size=None,
            disable_split_kv=False,
            uniform_q_len=None,
        ):
            assert causal
            self.plan_made = _Plan(
                *_host(qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len),
                page_size,
                (num_qo_heads, num_kv_heads, head_dim_qk),
                AttendOptions(sm_scale, window=window_left + 1, soft_cap=logits_soft_cap or 0.0),
                (q_data_type, kv_data_type),
            )

        def run(
            self,
            q,
            paged_kv_cache,
            *args,
            q_scale=None,
            k_scale=None,
            v_scale=None,
            out=None,
            lse=None,
            return_lse=False,
            lse_base="log2",
            lse_layout="NH",
            enable_pdl=None,
            window_left=None,
            sinks=None,
            kv_cache_sf=None,
            skip_softmax_threshold_scale_factor=None,
            use_fp16_softmax=None,
            uses_spcompress=None,
        ):
            return self.attend(q, paged_kv_cache, out)

    for wrapper in (BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper):
        for name in ("__init__", "plan", "run"):
            function = getattr(wrapper, name)
            setattr(wrapper, name, calls.noted(module, function, f"{wrapper.__name__}.{name}"))
        setattr(module, wrapper.__name__, wrapper)
    return module
