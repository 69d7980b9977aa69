"""Writing the vectors of latent attention into the paged cache, in one launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


def write_latent(latent: Tensor, rope_key: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    num_tokens, latent_dim = latent.shape
    if not num_tokens:
        return
    block = max(triton.next_power_of_2(max(latent_dim, rope_key.shape[1])), 16)
    _write_latent[(num_tokens, 2)](
        latent, latent.stride(0), rope_key, rope_key.stride(0), kv_cache, slot_mapping, WIDTH=kv_cache.shape[2],
        LATENT_DIM=latent_dim, ROPE_DIM=rope_key.shape[1], BLOCK=block, num_warps=max(min(block // 256, 8), 1),
    )  # fmt: skip


@triton.jit
def _write_latent(
    latent, latent_stride, rope_key, rope_key_stride, kv_cache, slot_mapping, WIDTH: tl.constexpr,
    LATENT_DIM: tl.constexpr, ROPE_DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    dims = tl.arange(0, BLOCK)
    if slot >= 0:
        to = kv_cache + slot * WIDTH + dims
        if tl.program_id(1) == 0:
            values = tl.load(latent + token * latent_stride + dims, mask=dims < LATENT_DIM, other=0.0)
            tl.store(to, values.to(kv_cache.dtype.element_ty), mask=dims < LATENT_DIM)
        else:
            values = tl.load(rope_key + token * rope_key_stride + dims, mask=dims < ROPE_DIM, other=0.0)
            tl.store(to + LATENT_DIM, values.to(kv_cache.dtype.element_ty), mask=dims < ROPE_DIM)
