"""Attention over whole texts, one vector at a time in float64."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

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
    heads_per_kv_head = query.shape[1] // key.shape[1]
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    starts = query_starts.tolist()
    for start, end in pairwise(starts):
        for token in range(start, end):
            first, last = start, end
            if options.window:
                first, last = max(start, token - options.window + 1), min(end, token + options.window)
            for head in range(query.shape[1]):
                keys = key[first:last, head // heads_per_kv_head].double()
                values = value[first:last, head // heads_per_kv_head].double()
                scores = keys @ query[token, head].double() * options.scale
                if (bias := options.distance_bias) is not None:
                    distances = torch.arange(first, last) - token
                    scores += bias[head, distances + bias.shape[1] // 2]
                weights = torch.softmax(scores, dim=0)
                out[token, head] = weights @ values
    return out
