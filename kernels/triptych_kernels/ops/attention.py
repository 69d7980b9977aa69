"""Contracts of attention over the paged cache, of rotary embeddings and of writing the cache.

Attention of a query to the keys that it sees, without options (`AttendOptions` has the whole formula):

    score = scale * query . key
    out = sum over keys of softmax(scores) * value

In a cache of int8 or float8_e4m3fn a key is its elements times its scale, and so is a value. A scale of NaN makes the
outputs of all queries that see its key NaN.

The native kernel gives a query the same bits in any batch, however its prompt is cut into chunks, and with any number
of threads. The Triton kernels give it the same bits in any batch.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from triptych_kernels.attend_options import AttendOptions
from triptych_kernels.kv_scales import check_kv_scales
from triptych_kernels.registry import find_impl

__all__ = ["paged_attention", "rotary_and_write_kv", "rotary_embedding", "write_kv"]


def paged_attention(
    query: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    options: AttendOptions,
    *,
    kv_scales: Tensor | None = None,
    query_lens_list: tuple[int, ...] | None = None,
    seq_lens_list: tuple[int, ...] | None = None,
    impl: str | None = None,
) -> Tensor:
    """Attend from each row's queries to its keys up to and including the query's own position.

    Query i of a row with query length q and sequence length n has position p = n - q + i and sees the keys first..p,
    where first is 0 or follows from the window and the chunk. Query head h reads key head
    h // (num_heads // num_kv_heads). Cache content past a row's end, before the first key that one of its queries sees,
    and in block 0 has no influence, NaN included.

    Args:
        query: [num_tokens, num_heads, head_dim], may be a view of a larger tensor, the last axis dense. The tokens of
            a row are contiguous, and rows follow each other.
        kv_cache: [num_blocks, 2, num_kv_heads, block_size, head_dim], contiguous. This step's keys and values must
            have been written, by the same implementation: how a block's keys lie is its own choice (`cpu.attention`).
        block_tables: [num_rows, max_blocks] int32, a row's blocks in order. Entries past its last are not read.
        query_starts: [num_rows + 1] int32, a row's first token; ends with num_tokens.
        seq_lens: [num_rows] int32, keys per row.
        options: The layer's; `is_causal` must be true.
        kv_scales: [num_blocks, 2, num_kv_heads, block_size] float32, contiguous, as `write_kv` left them. Required if
            kv_cache is int8 or float8_e4m3fn, else None.
        query_lens_list: [num_rows] differences of query_starts, each >= 1; None means that they are read from the
            tensor, for which the host waits.
        seq_lens_list: [num_rows] values of seq_lens, or None as above. For a step of single queries that a CUDA graph
            records, these are upper bounds for all its replays.
    Returns:
        [num_tokens, num_heads, head_dim], a new tensor of the query's dtype.
    Raises:
        ValueError: Shapes, dtypes, devices or lengths disagree; names both. A recording has no lengths yet, so the
            caller that fills its inputs must check them. Or the options are not causal.
    Source: PagedAttention, arXiv:2309.06180; grouped queries, arXiv:2305.13245.
    """
    _check_operands(query, kv_cache, block_tables, query_starts, seq_lens, kv_scales)
    _check_options(options, query)
    if query.device.type != "meta":
        if query_lens_list is None:
            query_lens_list = tuple(query_starts.diff().tolist())
        if seq_lens_list is None:
            seq_lens_list = tuple(seq_lens.tolist())
        max_keys = block_tables.shape[1] * kv_cache.shape[3]
        check_lengths(
            "paged_attention", query_lens_list, seq_lens_list, len(seq_lens), query.shape[0], max_keys
        )
    lens = {"query_lens_list": query_lens_list, "seq_lens_list": seq_lens_list}
    operands = query, kv_cache, block_tables, query_starts, seq_lens, options
    out: Tensor = find_impl("paged_attention", query, impl)(*operands, kv_scales=kv_scales, **lens)
    return out


def _check_operands(
    query: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    kv_scales: Tensor | None,
) -> None:
    if kv_cache.ndim != 5 or kv_cache.shape[1] != 2 or not kv_cache.is_contiguous():
        raise ValueError(
            f"paged_attention: kv_cache {list(kv_cache.shape)} must be a contiguous "
            "[num_blocks, 2, num_kv_heads, block_size, head_dim]"
        )
    _, _, num_kv_heads, _, head_dim = kv_cache.shape
    if query.ndim != 3 or query.shape[2] != head_dim or query.shape[1] % num_kv_heads or query.stride(2) != 1:
        raise ValueError(
            f"paged_attention: query {list(query.shape)} with strides {query.stride()} does not fit kv_cache "
            f"{list(kv_cache.shape)}; it must be [num_tokens, a multiple of num_kv_heads, head_dim], the last "
            "axis dense"
        )
    check_kv_scales("paged_attention", kv_cache, kv_scales)
    check_layout("paged_attention", block_tables, query_starts, seq_lens)


def _check_options(options: AttendOptions, query: Tensor) -> None:
    if not options.is_causal:
        raise ValueError("paged_attention: is_causal is False; a paged cache is attended to causally only")
    if options.latent_dim:
        raise ValueError(
            f"paged_attention: latent_dim {options.latent_dim} is computed by latent_attention only"
        )
    if options.distance_bias is not None:
        raise ValueError("paged_attention: distance_bias is computed by encode_attention only")
    for name, per_head in (("sinks", options.sinks), ("alibi", options.alibi)):
        if per_head is None:
            continue
        if len(per_head) != query.shape[1]:
            raise ValueError(
                f"paged_attention: {name} {list(per_head.shape)} do not fit query {list(query.shape)}; there must be "
                "one for each head"
            )
        if query.device.type != "meta" and per_head.device != query.device:
            raise ValueError(
                f"paged_attention: {name} on {per_head.device} and query on {query.device} must be on one device"
            )


def check_layout(op: str, block_tables: Tensor, query_starts: Tensor, seq_lens: Tensor) -> None:
    """Check the tensors that say where the queries and keys of each row lie.

    Raises:
        ValueError: Shapes, strides or dtypes disagree; names both.
    """
    num_rows = len(seq_lens)
    if seq_lens.shape != (num_rows,) or query_starts.shape != (num_rows + 1,):
        raise ValueError(
            f"{op}: query_starts {list(query_starts.shape)} must be one longer than seq_lens "
            f"{list(seq_lens.shape)}"
        )
    if block_tables.ndim != 2 or block_tables.shape[0] != num_rows or block_tables.stride(1) != 1:
        raise ValueError(
            f"{op}: block_tables {list(block_tables.shape)} with strides {block_tables.stride()} "
            f"must be [num_rows = {num_rows}, max_blocks], the last axis dense"
        )
    dtypes = block_tables.dtype, query_starts.dtype, seq_lens.dtype
    if dtypes != (torch.int32,) * 3:
        raise ValueError(
            f"{op}: block_tables, query_starts and seq_lens are {dtypes}; they must be torch.int32"
        )


@lru_cache(maxsize=4)  # asked once per layer with the same step
def check_lengths(
    op: str,
    query_lens: tuple[int, ...],
    seq_lens: tuple[int, ...],
    num_rows: int,
    num_tokens: int,
    capacity: int,
) -> None:
    """Check the lengths of each row.

    Args:
        num_tokens: Number of queries of all rows.
        capacity: Number of keys that a row's blocks hold.
    Raises:
        ValueError: They disagree, or are out of range; names both.
    """
    if not len(query_lens) == len(seq_lens) == num_rows:
        raise ValueError(
            f"{op}: query_lens_list has {len(query_lens)} rows and seq_lens_list {len(seq_lens)}, but "
            f"seq_lens has {num_rows}"
        )
    for row, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        if not 1 <= query_len <= seq_len <= capacity:
            raise ValueError(
                f"{op}: row {row} has {query_len} queries, {seq_len} keys and blocks for "
                f"{capacity}; 1 <= queries <= keys <= blocks must hold"
            )
    if sum(query_lens) != num_tokens:
        raise ValueError(
            f"{op}: query_lens_list sums to {sum(query_lens)}, but there are {num_tokens} queries"
        )


def rotary_embedding(
    query: Tensor,
    key: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    *,
    interleaved: bool = False,
    impl: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Rotate pairs of each head's elements by the angles of the token's position.

        out[a]    = x[a] * cos[p, i]    - x[b] * sin[p, i]        0 <= i < half = rotary_dim / 2
        out[b]    = x[b] * cos[p, i]    + x[a] * sin[p, i]

        halves         a = i        b = i + half
        interleaved    a = 2 * i    b = 2 * i + 1

    Elements from rotary_dim on are copied. Computed in float32 and rounded once to the dtype of the input.

    Args:
        query: [num_tokens, num_heads, head_dim], may be a view of a larger tensor, the last axis dense.
        key: [num_tokens, num_kv_heads, head_dim] like query, of its dtype; there may be no heads.
        positions: [num_tokens] int64, each below max_position. Not checked, since that would wait for the device.
        cos_sin_cache: [max_position, rotary_dim] float32, contiguous: half cosines, then as many sines; rotary_dim is
            head_dim or smaller.
        interleaved: Whether neighbours are rotated against each other, and not the two halves.
    Returns:
        New tensors like query and key.
    Raises:
        ValueError: Shapes, dtypes or strides disagree; names both.
    Source: RoFormer, arXiv:2104.09864, interleaved; halves as in GPT-NeoX and Hugging Face's Llama.
    """
    _check_rotary("rotary_embedding", query, key, positions, cos_sin_cache)
    rotated: tuple[Tensor, Tensor] = find_impl("rotary_embedding", query, impl)(
        query, key, positions, cos_sin_cache, interleaved=interleaved
    )
    return rotated


def _check_rotary(op: str, query: Tensor, key: Tensor, positions: Tensor, cos_sin_cache: Tensor) -> None:
    """Check the shapes, dtypes and strides of `rotary_embedding` and of ops that fuse it.

    Raises:
        ValueError: They disagree; names both.
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
    head_dim = query.shape[2]
    if (
        cos_sin_cache.ndim != 2
        or cos_sin_cache.shape[1] > head_dim
        or cos_sin_cache.shape[1] % 2
        or head_dim % 2
    ):
        raise ValueError(
            f"{op}: cos_sin_cache {list(cos_sin_cache.shape)} does not fit query {list(query.shape)}; "
            "it must be [max_position, rotary_dim], rotary_dim at most head_dim, both even"
        )


def write_kv(
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    *,
    kv_scales: Tensor | None = None,
    impl: str | None = None,
) -> None:
    """Write this step's keys and values into the paged cache, in place.

    Args:
        key: [num_tokens, num_kv_heads, head_dim], rounded to the dtype of the cache or quantized as the module
            `kv_scales` defines. It may be a view of a larger tensor, the last axis dense.
        value: [num_tokens, num_kv_heads, head_dim] like key, of its dtype.
        kv_cache: [num_blocks, 2, num_kv_heads, block_size, head_dim], contiguous; keys at 0 of the second axis,
            values at 1. The native kernels keep a block's keys in another order (`cpu.attention`).
        slot_mapping: [num_tokens] int64, block_id * block_size + offset; -1 skips the token. Slots other than -1 are
            distinct, which is not checked.
        kv_scales: [num_blocks, 2, num_kv_heads, block_size] float32, contiguous, written with the elements. Required
            if kv_cache is int8 or float8_e4m3fn, else None.
    Raises:
        ValueError: Shapes, dtypes or strides disagree; names both.
    Source: PagedAttention, arXiv:2309.06180, section 4.
    """
    _check_write_kv("write_kv", key, value, kv_cache, slot_mapping, kv_scales)
    find_impl("write_kv", key, impl)(key, value, kv_cache, slot_mapping, kv_scales=kv_scales)


def _check_write_kv(
    op: str, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor, kv_scales: Tensor | None
) -> None:
    """Check the shapes, dtypes and strides of `write_kv` and of ops that fuse it.

    Raises:
        ValueError: They disagree; names both.
    """
    if kv_cache.ndim != 5 or kv_cache.shape[1] != 2 or not kv_cache.is_contiguous():
        raise ValueError(
            f"{op}: kv_cache {list(kv_cache.shape)} must be a contiguous "
            "[num_blocks, 2, num_kv_heads, block_size, head_dim]"
        )
    if key.ndim != 3 or key.shape[1:] != (kv_cache.shape[2], kv_cache.shape[4]):
        raise ValueError(
            f"{op}: key {list(key.shape)} does not fit kv_cache {list(kv_cache.shape)}; "
            "it must be [num_tokens, num_kv_heads, head_dim]"
        )
    if value.shape != key.shape or value.dtype != key.dtype:
        raise ValueError(
            f"{op}: value {list(value.shape)} {value.dtype} is not like key {list(key.shape)} {key.dtype}"
        )
    if key.stride(2) != 1 or value.stride(2) != 1:
        raise ValueError(
            f"{op}: the last axes of key and value must be dense, their strides are {key.stride()} and "
            f"{value.stride()}"
        )
    if slot_mapping.shape != key.shape[:1]:
        raise ValueError(
            f"{op}: slot_mapping {list(slot_mapping.shape)} does not fit "
            f"key {list(key.shape)}; it must be [num_tokens]"
        )
    check_kv_scales(op, kv_cache, kv_scales)


def rotary_and_write_kv(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    *,
    kv_scales: Tensor | None = None,
    interleaved: bool = False,
    impl: str | None = None,
) -> Tensor:
    """Rotate queries and keys to their positions and write the rotated keys and the values into the cache.

    This is `rotary_embedding`, then `write_kv`, and takes the arguments of both.

    Args:
        query: [num_tokens, num_heads, head_dim], may be a view of a larger tensor, the last axis dense.
        key: [num_tokens, num_kv_heads, head_dim] like query, of its dtype. The rotated key is rounded to that dtype
            before it is rounded to the dtype of the cache or quantized.
        value: [num_tokens, num_kv_heads, head_dim] like key.
        positions: [num_tokens] int64, each below max_position. Not checked, since that would wait for the device.
        cos_sin_cache: [max_position, rotary_dim] float32, contiguous: rotary_dim / 2 cosines, then as many sines.
        kv_cache: [num_blocks, 2, num_kv_heads, block_size, head_dim], contiguous, written in place.
        slot_mapping: [num_tokens] int64, distinct; -1 leaves this token's key and value unwritten.
        kv_scales: [num_blocks, 2, num_kv_heads, block_size] float32, contiguous, written with the elements. Required
            if kv_cache is int8 or float8_e4m3fn, else None.
        interleaved: Whether neighbours are rotated against each other, and not the two halves.
    Returns:
        The rotated queries of all tokens, a new tensor like query.
    Raises:
        ValueError: Shapes, dtypes or strides disagree; names both.
    """
    _check_rotary("rotary_and_write_kv", query, key, positions, cos_sin_cache)
    _check_write_kv("rotary_and_write_kv", key, value, kv_cache, slot_mapping, kv_scales)
    rotated: Tensor = find_impl("rotary_and_write_kv", query, impl)(
        query, key, value, positions, cos_sin_cache, kv_cache, slot_mapping,
        kv_scales=kv_scales, interleaved=interleaved,
    )  # fmt: skip
    return rotated
