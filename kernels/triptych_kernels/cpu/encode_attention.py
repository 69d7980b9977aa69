"""Attention over whole texts by the native kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from triptych_kernels.attend_options import AttendOptions
from triptych_kernels.cpu.dtypes import DTYPES
from triptych_kernels.cpu.launch import launch


def encode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    options: AttendOptions,
    *,
    seq_lens_list: tuple[int, ...] | None,
) -> Tensor:
    bias = options.distance_bias
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    launch(
        "encode_attention", seq_lens, query, dtype=DTYPES[query.dtype],
        query=query, query_stride=query.stride(0), query_head_stride=query.stride(1),
        key=key, key_stride=key.stride(0), key_head_stride=key.stride(1),
        value=value, value_stride=value.stride(0), value_head_stride=value.stride(1),
        query_starts=query_starts, out=out,
        num_heads=query.shape[1], num_kv_heads=key.shape[1], head_dim=query.shape[2],
        scale=options.scale, window=options.window,
        distance_bias=bias, num_distances=0 if bias is None else bias.shape[1],
    )  # fmt: skip
    return out
