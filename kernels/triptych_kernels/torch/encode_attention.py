"""Attention over whole texts in plain torch, text by text."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from triptych_kernels.attend_options import AttendOptions


def encode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    options: AttendOptions,
    *,
    seq_lens_list: tuple[int, ...],
) -> Tensor:
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    first = 0
    for length in seq_lens_list:
        tokens = slice(first, first + length)
        own_query, own_key, own_value = (x[tokens].transpose(0, 1)[None] for x in (query, key, value))
        positions = torch.arange(length, device=query.device)
        distances = positions - positions[:, None]
        mask = None
        if options.window:
            mask = distances.abs() < options.window
        if (bias := options.distance_bias) is not None:
            scores = bias[:, distances + bias.shape[1] // 2].to(query.dtype)
            mask = scores if mask is None else scores.masked_fill(~mask, -torch.inf)
        attended = scaled_dot_product_attention(
            own_query,
            own_key,
            own_value,
            attn_mask=mask,
            scale=options.scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        out[tokens] = attended[0].transpose(0, 1)
        first += length
    return out
