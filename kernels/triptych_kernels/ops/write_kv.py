"""Writing keys and values into the paged cache."""

from __future__ import annotations

from torch import Tensor

from triptych_kernels.kv_scales import check_kv_scales
from triptych_kernels.registry import find_impl


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
        key: [num_tokens, num_kv_heads, head_dim], rounded to the dtype of the cache or quantized, see
            `kv_scales`; a view of something larger if need be, the last axis is dense.
        value: like key, of its dtype.
        kv_cache: [num_blocks, 2, num_kv_heads, block_size, head_dim], contiguous; keys at 0 of the second axis,
            values at 1.
        slot_mapping: [num_tokens] int64, block_id * block_size + offset; -1: the token is skipped.
            Slots other than -1 are distinct; not checked.
        kv_scales: [num_blocks, 2, num_kv_heads, block_size] float32, contiguous, written with the elements:
            required where kv_cache is int8 or float8_e4m3fn, which the module `kv_scales` defines; else None.
    Raises:
        ValueError: shapes, dtypes or strides disagree; names both.
    Source: PagedAttention, arXiv:2309.06180, section 4.
    """
    check_write_kv("write_kv", key, value, kv_cache, slot_mapping, kv_scales)
    find_impl("write_kv", key, impl)(key, value, kv_cache, slot_mapping, kv_scales=kv_scales)


def check_write_kv(
    op: str, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor, kv_scales: Tensor | None
) -> None:
    """What `write_kv`, and what is fused with it, asks of shapes, dtypes and strides.

    Raises:
        ValueError: they disagree; names both.
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
