"""Rotary position embedding of queries and keys."""

from __future__ import annotations

from torch import Tensor

from triptych_kernels.registry import find_impl


def rotary_embedding(
    query: Tensor, key: Tensor, positions: Tensor, cos_sin_cache: Tensor, *, impl: str | None = None
) -> tuple[Tensor, Tensor]:
    """Rotate each head's two halves against each other by the angle of the token's position.

        out[i]           = x[i] * cos[p, i]           - x[i + half] * sin[p, i]        0 <= i < half
        out[i + half]    = x[i + half] * cos[p, i]    + x[i] * sin[p, i]

    Computed in float32 and rounded once to the dtype of the input.

    Args:
        query: [num_tokens, num_heads, head_dim], a view of something larger if need be; the last axis is dense.
        key: [num_tokens, num_kv_heads, head_dim], likewise, of the query's dtype.
        positions: [num_tokens] int64, each below max_position; not checked, the device is not waited for.
        cos_sin_cache: [max_position, head_dim] float32, contiguous: half = head_dim / 2 cosines, then as many sines.
    Returns:
        New tensors like query and key.
    Raises:
        ValueError: shapes, dtypes or strides disagree; names both.
    Source: RoFormer, arXiv:2104.09864; halves instead of pairs as in GPT-NeoX and Hugging Face's Llama.
    """
    check_rotary("rotary_embedding", query, key, positions, cos_sin_cache)
    rotated: tuple[Tensor, Tensor] = find_impl("rotary_embedding", query, impl)(
        query, key, positions, cos_sin_cache
    )
    return rotated


def check_rotary(op: str, query: Tensor, key: Tensor, positions: Tensor, cos_sin_cache: Tensor) -> None:
    """What `rotary_embedding`, and what is fused with it, asks of shapes, dtypes and strides.

    Raises:
        ValueError: they disagree; names both.
    """
    if query.ndim != 3 or key.ndim != 3 or query.shape[::2] != key.shape[::2]:
        raise ValueError(
            f"{op}: query {list(query.shape)} and key {list(key.shape)} must be "
            "[num_tokens, heads, head_dim] with equal num_tokens and head_dim"
        )
    if key.dtype != query.dtype or query.stride(2) != 1 or key.stride(2) != 1:
        raise ValueError(
            f"{op}: query {query.dtype} with strides {query.stride()} and key {key.dtype} with "
            f"{key.stride()} must be of one dtype, their last axes dense"
        )
    if positions.shape != query.shape[:1]:
        raise ValueError(
            f"{op}: positions {list(positions.shape)} do not fit "
            f"query {list(query.shape)}; they must be [num_tokens]"
        )
    if cos_sin_cache.ndim != 2 or cos_sin_cache.shape[1] != query.shape[2] or query.shape[2] % 2:
        raise ValueError(
            f"{op}: cos_sin_cache {list(cos_sin_cache.shape)} does not fit "
            f"query {list(query.shape)}; it must be [max_position, head_dim], head_dim even"
        )
