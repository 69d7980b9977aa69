"""Reference results in float64 on the CPU, from the operands on the device."""

from __future__ import annotations

import torch
from torch import Tensor


def float64(tensor: Tensor) -> Tensor:
    return tensor.cpu().to(torch.float64)


def relative_error(out: Tensor, expected: Tensor) -> float:
    """||out - expected|| / ||expected||; NaN if any element is, which passes no comparison."""
    return float((float64(out) - expected).norm() / expected.norm())


def paged_attention(
    query: Tensor,
    kv_cache: Tensor,
    kv_scales: Tensor | None,
    block_tables: Tensor,
    query_lens: list[int],
    seq_lens: list[int],
    *,
    window: int = 0,
) -> Tensor:
    """[num_tokens, num_heads, head_dim]; row by row, its pages gathered and all of its scores at once."""
    cache = float64(kv_cache.to(torch.float32))
    if kv_scales is not None:
        cache = cache * float64(kv_scales)[..., None]
    num_heads, head_dim = query.shape[1:]
    group, block_size = num_heads // cache.shape[2], cache.shape[3]
    outs, start = [], 0
    for row, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        blocks = block_tables[row, : -(-seq_len // block_size)].cpu().long()
        pages = cache[blocks]  # [blocks, 2, kv_heads, block_size, head_dim]
        keys, values = (
            pages.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :seq_len].repeat_interleave(group, dim=1)
        )
        queries = float64(query[start : start + query_len]).transpose(0, 1)  # [heads, queries, head_dim]
        scores = queries @ keys.transpose(1, 2) * head_dim**-0.5
        own = torch.arange(seq_len - query_len, seq_len)[:, None]
        other = torch.arange(seq_len)[None]
        hidden = other > own
        if window:
            hidden |= other <= own - window
        scores = scores.masked_fill(hidden, -torch.inf)
        outs.append((scores.softmax(-1) @ values).transpose(0, 1))
        start += query_len
    return torch.cat(outs)


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor) -> tuple[Tensor, Tensor]:
    total = float64(x) + float64(residual)
    scale = (total.square().mean(-1, keepdim=True) + eps).rsqrt()
    return total * scale * float64(weight), total


def rotate(x: Tensor, positions: Tensor, cos_sin_cache: Tensor) -> Tensor:
    """Halves rotated against each other, as in Llama."""
    cos, sin = float64(cos_sin_cache)[positions.cpu()][:, None].chunk(2, dim=-1)
    first, second = float64(x).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def silu_and_mul(x: Tensor) -> Tensor:
    gate, up = float64(x).chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def gelu_and_mul(x: Tensor) -> Tensor:
    """The gate by its approximation with tanh."""
    gate, up = float64(x).chunk(2, dim=-1)
    return torch.nn.functional.gelu(gate, approximate="tanh") * up
