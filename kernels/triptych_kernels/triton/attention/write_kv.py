"""Writing keys and values into the paged cache, in its dtype or in 8 bits, in one launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from triptych_kernels.kv_scales import LARGEST_ELEMENT

_ELEMENTS = 1024  # of one program: 8 heads of 128, 16 bytes per thread of four warps in bfloat16


def write_kv(
    key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor, *, kv_scales: Tensor | None
) -> None:
    num_tokens, num_kv_heads, head_dim = key.shape
    if not key.numel():
        return
    dims_block = triton.next_power_of_2(head_dim)
    heads_block = max(min(_ELEMENTS // dims_block, triton.next_power_of_2(num_kv_heads)), 1)
    _write_kv[(num_tokens, 2, triton.cdiv(num_kv_heads, heads_block))](
        key, key.stride(0), key.stride(1), value, value.stride(0), value.stride(1),
        kv_cache, kv_scales, slot_mapping,
        NUM_KV_HEADS=num_kv_heads, BLOCK_SIZE=kv_cache.shape[3], HEAD_DIM=head_dim,
        LARGEST_ELEMENT=LARGEST_ELEMENT.get(kv_cache.dtype, 0.0), HEADS_BLOCK=heads_block, DIMS_BLOCK=dims_block,
        num_warps=max(heads_block * dims_block // 256, 1),
    )  # fmt: skip


@triton.jit
def _write_kv(
    key, key_stride_0, key_stride_1, value, value_stride_0, value_stride_1,
    kv_cache, kv_scales, slot_mapping,
    NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr,
    LARGEST_ELEMENT: tl.constexpr, HEADS_BLOCK: tl.constexpr, DIMS_BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    half = tl.program_id(1)  # 0: keys, 1: values
    heads = (tl.program_id(2) * HEADS_BLOCK + tl.arange(0, HEADS_BLOCK))[:, None].to(tl.int64)
    dims = tl.arange(0, DIMS_BLOCK)[None, :]
    inside = (heads < NUM_KV_HEADS) & (dims < HEAD_DIM)
    slot = tl.load(slot_mapping + token)
    if slot >= 0:
        if half == 0:
            vectors = tl.load(
                key + token * key_stride_0 + heads * key_stride_1 + dims, mask=inside, other=0.0
            )
        else:
            vectors = tl.load(
                value + token * value_stride_0 + heads * value_stride_1 + dims, mask=inside, other=0.0
            )
        numbers = vectors_in_cache(slot, half, heads, NUM_KV_HEADS, BLOCK_SIZE)
        if kv_scales is not None:
            scales = scales_of(largest_finite(vectors), LARGEST_ELEMENT)
            tl.store(kv_scales + numbers, scales, mask=heads < NUM_KV_HEADS)
            vectors = quantize(vectors, scales, LARGEST_ELEMENT)
        tl.store(kv_cache + numbers * HEAD_DIM + dims, vectors.to(kv_cache.dtype.element_ty), mask=inside)


@triton.jit
def vectors_in_cache(slot, half, heads, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Return the numbers of these heads' vectors, and of their scales, among all of the cache: int64 like `heads`."""
    return ((slot // BLOCK_SIZE * 2 + half) * NUM_KV_HEADS + heads) * BLOCK_SIZE + slot % BLOCK_SIZE


@triton.jit
def largest_finite(vectors):
    """Return the largest magnitude in each row, [rows, 1] float32; inf if the row has an element that is not finite."""
    sizes = tl.abs(vectors.to(tl.float32))
    # tl.max may drop a NaN
    return tl.max(tl.where(sizes < float("inf"), sizes, float("inf")), axis=1, keep_dims=True)


@triton.jit
def scales_of(largest, LARGEST_ELEMENT: tl.constexpr):
    """Return scales as `kv_scales` defines them, by `tl.div_rn`, since the quotient of `/` may be off by 2 ulp."""
    scales = tl.div_rn(largest, tl.full(largest.shape, LARGEST_ELEMENT, tl.float32))
    return tl.where(largest < float("inf"), scales, float("nan"))


@triton.jit
def quantize(vectors, scales, LARGEST_ELEMENT: tl.constexpr):
    """Return elements as `kv_scales` defines them, in float32; for int8 they are whole numbers."""
    has_elements = scales > 0.0  # neither 0 nor NaN
    elements = tl.div_rn(
        vectors.to(tl.float32), tl.where(has_elements, scales, 1.0).broadcast_to(vectors.shape)
    )
    elements = tl.minimum(tl.maximum(elements, -LARGEST_ELEMENT), LARGEST_ELEMENT)
    if LARGEST_ELEMENT == 127.0:
        # beyond 2^23 float32 has no fractions, so the sum is rounded to a whole number, ties to even
        elements = (elements + 12582912.0) - 12582912.0
    return tl.where(has_elements, elements, 0.0)
