"""Contracts of multi-head latent attention: one vector per token, shared by all heads, is key and value.

    vector of a token   [ latent: latent_dim | rope key: rope_dim ]
    key                 all of it
    value               its first value_dim elements, the latent

Queries are mapped into the space of the vectors before, and what they attend to is mapped to the heads' values
afterwards (`head_linear`), so a cache holds nothing for each head.

A model may have keys of a second kind beside the vectors, by which each token chooses the vectors that it attends to:
`choose_keys` lists their slots, `chosen_attention` attends to them.

The native kernel gives a query the same bits in any batch, however its prompt is cut into chunks, and with any number
of threads. The Triton kernel gives it the same bits in any batch.

Sources: DeepSeek-V2, arXiv:2405.04434, section 2.1; the choice, DeepSeek-V3.2, arXiv:2512.02556, section 2.1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from triptych_kernels.ops.attention import check_layout, check_lengths
from triptych_kernels.registry import find_impl

__all__ = ["choose_keys", "chosen_attention", "latent_attention", "write_latent"]

_CACHE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MAX_SLOTS = 2**31  # they are numbered in 32 bits


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
    _check_cache("latent_attention", kv_cache)
    _check_query("latent_attention", query, kv_cache, scale, value_dim)
    check_layout("latent_attention", block_tables, query_starts, seq_lens)
    if query.device.type != "meta":
        if query_lens_list is None:
            query_lens_list = tuple(query_starts.diff().tolist())
        if seq_lens_list is None:
            seq_lens_list = tuple(seq_lens.tolist())
        max_keys = block_tables.shape[1] * kv_cache.shape[1]
        num_rows, num_tokens = len(seq_lens), query.shape[0]
        check_lengths("latent_attention", query_lens_list, seq_lens_list, num_rows, num_tokens, max_keys)
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


def _check_query(op: str, query: Tensor, vectors: Tensor, scale: float, value_dim: int) -> None:
    width = vectors.shape[-1]
    if query.ndim != 3 or query.shape[2] != width or query.stride(2) != 1:
        raise ValueError(
            f"{op}: query {list(query.shape)} with strides {query.stride()} does not fit "
            f"{'kv_cache' if vectors.ndim == 3 else 'vectors'} {list(vectors.shape)}; it must be [num_tokens, "
            "num_heads, width], the last axis dense"
        )
    if not 1 <= value_dim <= width or not scale > 0.0:
        raise ValueError(f"{op}: value_dim {value_dim} must be 1 to {width}, and scale {scale} positive")


def _check_cache(op: str, kv_cache: Tensor) -> None:
    if kv_cache.ndim != 3 or kv_cache.dtype not in _CACHE_DTYPES or not kv_cache.is_contiguous():
        raise ValueError(
            f"{op}: kv_cache {list(kv_cache.shape)} {kv_cache.dtype} must be a contiguous "
            f"[num_blocks, block_size, width] of {', '.join(map(str, _CACHE_DTYPES))}"
        )


def choose_keys(
    query: Tensor,
    weights: Tensor,
    keys: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    *,
    max_keys: int,
    query_lens_list: tuple[int, ...] | None = None,
    seq_lens_list: tuple[int, ...] | None = None,
    impl: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose for each query the `max_keys` keys with the highest scores, of those up to its own position.

        score = sum over heads of weight * max(query . key, 0)

    Of equal scores the earlier key's is the higher one, and NaN is the lowest. A query that sees no more keys has all
    of them. Positions, and what has no influence, are those of `latent_attention`.

    Args:
        query: [num_tokens, num_heads, head_dim], may be a view of a larger tensor, the last axis dense. The tokens of a
            row are contiguous, and rows follow each other.
        weights: [num_tokens, num_heads] float32, likewise.
        keys: [num_blocks, block_size, head_dim] of 16 or 32 bits, may be a part of the vectors of a contiguous cache.
            This step's must have been written.
        block_tables, query_starts, seq_lens, query_lens_list, seq_lens_list: As of `latent_attention`.
        max_keys: At least 1.
    Returns:
        The slots, [num_tokens, max_keys] int32, block_id * block_size + offset of each chosen key, in the order of the
        keys; and how many of them count, [num_tokens] int32. The others are undefined.
    Raises:
        ValueError: Shapes, dtypes, devices or lengths disagree; names both.
    """
    _check_choice(query, weights, keys, max_keys)
    check_layout("choose_keys", block_tables, query_starts, seq_lens)
    if query.device.type != "meta":
        if query_lens_list is None:
            query_lens_list = tuple(query_starts.diff().tolist())
        if seq_lens_list is None:
            seq_lens_list = tuple(seq_lens.tolist())
        num_keys = block_tables.shape[1] * keys.shape[1]
        check_lengths("choose_keys", query_lens_list, seq_lens_list, len(seq_lens), query.shape[0], num_keys)
    slots, counts = find_impl("choose_keys", query, impl)(
        query,
        weights,
        keys,
        block_tables,
        query_starts,
        seq_lens,
        max_keys,
        query_lens_list=query_lens_list,
        seq_lens_list=seq_lens_list,
    )
    return slots, counts


def _check_choice(query: Tensor, weights: Tensor, keys: Tensor, max_keys: int) -> None:
    is_cache = keys.ndim == 3 and keys.dtype in _CACHE_DTYPES and keys.stride(2) == 1
    if not is_cache or keys.stride(0) != keys.shape[1] * keys.stride(1) or max_keys < 1:
        raise ValueError(
            f"choose_keys: keys {list(keys.shape)} {keys.dtype} with strides {keys.stride()} must be [num_blocks, "
            f"block_size, head_dim] of {', '.join(map(str, _CACHE_DTYPES))}, all keys equally far apart, and max_keys "
            f"{max_keys} at least 1"
        )
    if keys.shape[0] * keys.shape[1] >= _MAX_SLOTS:
        raise ValueError(f"choose_keys: keys {list(keys.shape)} must be fewer than {_MAX_SLOTS}")
    if query.ndim != 3 or query.shape[2] != keys.shape[2] or query.stride(2) != 1:
        raise ValueError(
            f"choose_keys: query {list(query.shape)} with strides {query.stride()} does not fit keys "
            f"{list(keys.shape)}; it must be [num_tokens, num_heads, head_dim], the last axis dense"
        )
    is_dense = weights.ndim == 2 and weights.stride(1) == 1
    if weights.shape != query.shape[:2] or weights.dtype != torch.float32 or not is_dense:
        raise ValueError(
            f"choose_keys: weights {list(weights.shape)} {weights.dtype} do not fit query {list(query.shape)}; they "
            "must be [num_tokens, num_heads] of torch.float32, the last axis dense"
        )


def chosen_attention(
    query: Tensor,
    vectors: Tensor,
    slots: Tensor,
    counts: Tensor,
    *,
    scale: float,
    value_dim: int,
    impl: str | None = None,
) -> Tensor:
    """Attend from each query to vectors of its own, as `latent_attention` does to those up to its position.

    A query with the slots of all of these, in their order, has the bits that `latent_attention` gives it.

    Args:
        query: [num_tokens, num_heads, width], may be a view of a larger tensor, the last axis dense.
        vectors: [num_slots, width] of 16 or 32 bits, may be the first elements of those of a cache.
        slots: [num_tokens, max_keys] int32, the vectors of each query, which are not checked.
        counts: [num_tokens] int32, how many of them count, 1 to max_keys.
        scale, value_dim: As of `latent_attention`.
    Returns:
        [num_tokens, num_heads, value_dim], a new tensor of the query's dtype.
    Raises:
        ValueError: Shapes or dtypes disagree; names both.
    """
    if vectors.ndim != 2 or vectors.dtype not in _CACHE_DTYPES or vectors.stride(1) != 1:
        raise ValueError(
            f"chosen_attention: vectors {list(vectors.shape)} {vectors.dtype} with strides {vectors.stride()} must be "
            f"[num_slots, width] of {', '.join(map(str, _CACHE_DTYPES))}, the last axis dense"
        )
    _check_query("chosen_attention", query, vectors, scale, value_dim)
    num_tokens = query.shape[:1]
    if slots.ndim != 2 or slots.shape[:1] != num_tokens or counts.shape != num_tokens:
        raise ValueError(
            f"chosen_attention: slots {list(slots.shape)} and counts {list(counts.shape)} do not fit query "
            f"{list(query.shape)}; they must be [num_tokens, max_keys] and [num_tokens]"
        )
    if slots.dtype != torch.int32 or counts.dtype != torch.int32 or slots.stride(1) != 1:
        raise ValueError(
            f"chosen_attention: slots {slots.dtype} with strides {slots.stride()} and counts {counts.dtype} must be "
            "torch.int32, the last axis of slots dense"
        )
    out: Tensor = find_impl("chosen_attention", query, impl)(query, vectors, slots, counts, scale, value_dim)
    return out


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
        kv_cache: [num_blocks, block_size, width], contiguous. Elements behind the first latent_dim + rope_dim stay.
        slot_mapping: [num_tokens] int64, block_id * block_size + offset; -1 skips the token. Slots other than -1 are
            distinct, which is not checked.
    Raises:
        ValueError: Shapes, dtypes or strides disagree; names both.
    """
    _check_cache("write_latent", kv_cache)
    is_vector = latent.ndim == rope_key.ndim == 2 and latent.shape[0] == rope_key.shape[0]
    if not is_vector or latent.shape[1] + rope_key.shape[1] > kv_cache.shape[2]:
        raise ValueError(
            f"write_latent: latent {list(latent.shape)} and rope_key {list(rope_key.shape)} do not fit kv_cache "
            f"{list(kv_cache.shape)}; they must be [num_tokens, …], together at most as wide as it is"
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
