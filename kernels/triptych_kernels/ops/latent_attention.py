"""Contracts of multi-head latent attention: one vector per token, shared by all heads, is key and value.

    vector of a token   [ latent: latent_dim | rope key: rope_dim ]
    key                 all of it
    value               its first value_dim elements, the latent

Queries are mapped into the space of the vectors before, and what they attend to is mapped to the heads' values
afterwards (`head_linear`), so a cache holds nothing for each head.

The native kernel gives a query the same bits in any batch, however its prompt is cut into chunks, and with any number
of threads. The Triton kernel gives it the same bits in any batch.

Source: DeepSeek-V2, arXiv:2405.04434, section 2.1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from triptych_kernels.ops.attention import check_layout, check_lengths
from triptych_kernels.registry import find_impl

__all__ = ["latent_attention", "write_latent"]

_CACHE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def latent_attention(
    query: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    value_dim: int,
    query_lens_list: tuple[int, ...] | None = None,
    seq_lens_list: tuple[int, ...] | None = None,
    impl: str | None = None,
) -> Tensor:
    """Attend from each row's queries to its vectors up to and including the query's own position.

        score = scale * query . vector
        out = sum over vectors of softmax(scores) * vector[:value_dim]

    Query i of a row with query length q and sequence length n has position p = n - q + i and sees the vectors 0..p.
    Cache content past a row's end, and in block 0, has no influence, NaN included.

    Args:
        query: [num_tokens, num_heads, width], may be a view of a larger tensor, the last axis dense. The tokens of a
            row are contiguous, and rows follow each other.
        kv_cache: [num_blocks, block_size, width], contiguous, of 16 or 32 bits. This step's vectors must have been
            written.
        block_tables: [num_rows, max_blocks] int32, a row's blocks in order. Entries past its last are not read.
        query_starts: [num_rows + 1] int32, a row's first token; ends with num_tokens.
        seq_lens: [num_rows] int32, vectors per row.
        scale: Factor of the products, above 0.
        value_dim: Elements of a value, 1 to width.
        query_lens_list, seq_lens_list: As of `paged_attention`.
    Returns:
        [num_tokens, num_heads, value_dim], a new tensor of the query's dtype.
    Raises:
        ValueError: Shapes, dtypes, devices or lengths disagree; names both.
    """
    _check_operands(query, kv_cache, scale, value_dim)
    check_layout("latent_attention", block_tables, query_starts, seq_lens)
    if query.device.type != "meta":
        if query_lens_list is None:
            query_lens_list = tuple(query_starts.diff().tolist())
        if seq_lens_list is None:
            seq_lens_list = tuple(seq_lens.tolist())
        max_keys = block_tables.shape[1] * kv_cache.shape[1]
        check_lengths(
            "latent_attention", query_lens_list, seq_lens_list, len(seq_lens), query.shape[0], max_keys
        )
    out: Tensor = find_impl("latent_attention", query, impl)(
        query,
        kv_cache,
        block_tables,
        query_starts,
        seq_lens,
        scale,
        value_dim,
        query_lens_list=query_lens_list,
        seq_lens_list=seq_lens_list,
    )
    return out


def _check_operands(query: Tensor, kv_cache: Tensor, scale: float, value_dim: int) -> None:
    _check_cache("latent_attention", kv_cache)
    width = kv_cache.shape[2]
    if query.ndim != 3 or query.shape[2] != width or query.stride(2) != 1:
        raise ValueError(
            f"latent_attention: query {list(query.shape)} with strides {query.stride()} does not fit kv_cache "
            f"{list(kv_cache.shape)}; it must be [num_tokens, num_heads, width], the last axis dense"
        )
    if not 1 <= value_dim <= width or not scale > 0.0:
        raise ValueError(
            f"latent_attention: value_dim {value_dim} must be 1 to {width}, and scale {scale} positive"
        )


def _check_cache(op: str, kv_cache: Tensor) -> None:
    if kv_cache.ndim != 3 or kv_cache.dtype not in _CACHE_DTYPES or not kv_cache.is_contiguous():
        raise ValueError(
            f"{op}: kv_cache {list(kv_cache.shape)} {kv_cache.dtype} must be a contiguous "
            f"[num_blocks, block_size, width] of {', '.join(map(str, _CACHE_DTYPES))}"
        )


def write_latent(
    latent: Tensor,
    rope_key: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    *,
    impl: str | None = None,
) -> None:
    """Write this step's vectors into the paged cache, in place, rounded to its dtype.

    Args:
        latent: [num_tokens, latent_dim], may be a view of a larger tensor, the last axis dense.
        rope_key: [num_tokens, rope_dim] like latent, of its dtype.
        kv_cache: [num_blocks, block_size, latent_dim + rope_dim], contiguous.
        slot_mapping: [num_tokens] int64, block_id * block_size + offset; -1 skips the token. Slots other than -1 are
            distinct, which is not checked.
    Raises:
        ValueError: Shapes, dtypes or strides disagree; names both.
    """
    _check_cache("write_latent", kv_cache)
    is_vector = latent.ndim == rope_key.ndim == 2 and latent.shape[0] == rope_key.shape[0]
    if not is_vector or latent.shape[1] + rope_key.shape[1] != kv_cache.shape[2]:
        raise ValueError(
            f"write_latent: latent {list(latent.shape)} and rope_key {list(rope_key.shape)} do not fit kv_cache "
            f"{list(kv_cache.shape)}; they must be [num_tokens, …], together as wide as it is"
        )
    if latent.dtype != rope_key.dtype or latent.stride(1) != 1 or rope_key.stride(1) != 1:
        raise ValueError(
            f"write_latent: latent {latent.dtype} with strides {latent.stride()} and rope_key {rope_key.dtype} with "
            f"{rope_key.stride()} must be of one dtype, their last axes dense"
        )
    if slot_mapping.shape != latent.shape[:1]:
        raise ValueError(
            f"write_latent: slot_mapping {list(slot_mapping.shape)} does not fit latent {list(latent.shape)}; it must "
            "be [num_tokens]"
        )
    find_impl("write_latent", latent, impl)(latent, rope_key, kv_cache, slot_mapping)
