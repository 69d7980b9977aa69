"""Rotary position embedding, one angle at a time in float64."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_embedding(
    query: Tensor, key: Tensor, positions: Tensor, cos_sin_cache: Tensor
) -> tuple[Tensor, Tensor]:
    half = query.shape[2] // 2
    rotated = []
    for x in (query, key):
        out = torch.empty_like(x)
        for token, position in enumerate(positions.tolist()):
            for i in range(half):
                cos = cos_sin_cache[position, i].item()
                sin = cos_sin_cache[position, half + i].item()
                first, second = x[token, :, i].double(), x[token, :, i + half].double()
                out[token, :, i] = first * cos - second * sin
                out[token, :, i + half] = second * cos + first * sin
        rotated.append(out)
    return rotated[0], rotated[1]
