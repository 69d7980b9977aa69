"""Multi-head latent attention by the native kernels; that of `paged_attention` computes it.

A token's vector lies as a row, as all implementations keep it: `cpu.attention` keeps keys in words, which a vector that
is a value too cannot be.
"""

from __future__ import annotations

import torch
from torch import Tensor

from triptych_kernels.cpu.dtypes import DTYPES
from triptych_kernels.cpu.launch import launch
from triptych_kernels.cpu.recording import NotRecordable
from triptych_kernels.torch.latent_attention import choose_keys as torch_choose_keys
from triptych_kernels.torch.latent_attention import chosen_attention as torch_chosen_attention
from triptych_kernels.torch.latent_attention import latent_attention as torch_latent_attention
from triptych_kernels.torch.latent_attention import write_latent as torch_write_latent


def serves(kv_cache: Tensor) -> bool:
    """Return whether the native kernels read such a cache. Plain torch serves float16, and pairs that are not whole."""
    return kv_cache.dtype in DTYPES and kv_cache.shape[-1] % (4 // kv_cache.itemsize) == 0


def latent_attention(
    query: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    scale: float,
    value_dim: int,
    *,
    query_lens_list: tuple[int, ...] | None,
    seq_lens_list: tuple[int, ...] | None,
) -> Tensor:
    """Attend by the native kernel, or by plain torch over a cache that it does not read, see `serves`.

    Raises:
        NotRecordable: Such a cache in a recording, which has no lists of lengths.
    """
    if not serves(kv_cache):
        if query_lens_list is None or seq_lens_list is None:
            raise NotRecordable(
                f"latent_attention: no native kernel reads a cache of {kv_cache.dtype} with vectors of "
                f"{kv_cache.shape[2]}"
            )
        return torch_latent_attention(
            query, kv_cache, block_tables, query_starts, seq_lens, scale, value_dim,
            query_lens_list=query_lens_list, seq_lens_list=seq_lens_list,
        )  # fmt: skip
    return _attend(query, kv_cache, block_tables, query_starts, seq_lens, scale, value_dim)


def chosen_attention(
    query: Tensor,
    vectors: Tensor,
    slots: Tensor,
    counts: Tensor,
    scale: float,
    value_dim: int,
) -> Tensor:
    """Attend by the native kernel, to which each query is a row of its own in blocks of one vector.

    Raises:
        NotRecordable: A cache that it does not read, in a recording.
    """
    if not serves(vectors):
        if query.device.type == "meta":
            raise NotRecordable(
                f"chosen_attention: no native kernel reads a cache of {vectors.dtype} with vectors of "
                f"{vectors.shape[-1]}"
            )
        return torch_chosen_attention(query, vectors, slots, counts, scale, value_dim)
    return _attend(query, vectors[:, None], slots, None, counts, scale, value_dim)


def _attend(
    query: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor | None,
    seq_lens: Tensor,
    scale: float,
    value_dim: int,
) -> Tensor:
    """Call the kernel.

    Args:
        query_starts: None: each row has one query.
    """
    block_size, width = kv_cache.shape[1:]
    out = torch.empty((*query.shape[:2], value_dim), dtype=query.dtype, device=query.device)
    launch(
        "paged_attention", seq_lens, query,
        dtype=DTYPES[query.dtype], cache_dtype=DTYPES[kv_cache.dtype],
        query=query, query_stride=query.stride(0), query_head_stride=query.stride(1),
        kv_cache=kv_cache, vector_stride=kv_cache.stride(0) // block_size, kv_scales=None,
        block_tables=block_tables, block_table_stride=block_tables.stride(0),
        query_starts=query_starts, seq_lens=seq_lens, out=out,
        num_heads=query.shape[1], num_kv_heads=1, head_dim=width, value_dim=value_dim, is_latent=True,
        block_size=block_size, scale=scale, window=0, chunk=0, soft_cap=0.0, sinks=None, alibi=None, stages=None,
    )  # fmt: skip
    return out


def choose_keys(
    query: Tensor,
    weights: Tensor,
    keys: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    max_keys: int,
    *,
    query_lens_list: tuple[int, ...] | None,
    seq_lens_list: tuple[int, ...] | None,
) -> tuple[Tensor, Tensor]:
    """Choose by the native kernel, or by plain torch from keys of a dtype that it does not read.

    Raises:
        NotRecordable: Such keys in a recording, which has no lists of lengths.
    """
    if keys.dtype not in DTYPES:
        if query_lens_list is None or seq_lens_list is None:
            raise NotRecordable(f"choose_keys: no native kernel reads keys of {keys.dtype}")
        return torch_choose_keys(
            query, weights, keys, block_tables, query_starts, seq_lens, max_keys,
            query_lens_list=query_lens_list, seq_lens_list=seq_lens_list,
        )  # fmt: skip
    slots = torch.empty((query.shape[0], max_keys), dtype=torch.int32, device=query.device)
    counts = torch.empty(query.shape[:1], dtype=torch.int32, device=query.device)
    launch(
        "choose_keys", seq_lens, query, dtype=DTYPES[query.dtype], cache_dtype=DTYPES[keys.dtype],
        query=query, query_stride=query.stride(0), query_head_stride=query.stride(1),
        weights=weights, weights_stride=weights.stride(0), keys=keys, key_stride=keys.stride(1),
        block_tables=block_tables, block_table_stride=block_tables.stride(0),
        query_starts=query_starts, seq_lens=seq_lens, slots=slots, counts=counts,
        num_heads=query.shape[1], head_dim=query.shape[2], block_size=keys.shape[1], max_keys=max_keys,
    )  # fmt: skip
    return slots, counts


def write_latent(latent: Tensor, rope_key: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    if latent.dtype not in DTYPES or not serves(kv_cache):
        torch_write_latent(latent, rope_key, kv_cache, slot_mapping)
        return
    launch(
        "write_latent", slot_mapping, dtype=DTYPES[latent.dtype], cache_dtype=DTYPES[kv_cache.dtype],
        latent=latent, latent_stride=latent.stride(0), rope_key=rope_key, rope_key_stride=rope_key.stride(0),
        kv_cache=kv_cache, slots=slot_mapping, latent_dim=latent.shape[1], rope_dim=rope_key.shape[1],
        width=kv_cache.shape[2],
    )  # fmt: skip
