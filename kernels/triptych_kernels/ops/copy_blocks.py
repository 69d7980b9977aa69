"""Copying whole blocks within a paged cache."""

from __future__ import annotations

import torch
from torch import Tensor

from triptych_kernels.registry import find_impl


def copy_blocks(cache: Tensor, pairs: Tensor, *, impl: str | None = None) -> None:
    """Copy blocks over others of the same cache, in place and bit by bit: a row that shares a block with others
    gets its own before it writes there.

    Args:
        cache: [num_blocks, ...], contiguous: keys and values of a layer, or their scales.
        pairs: [num_pairs, 2] int64, from which block to which, each below num_blocks. The blocks that are
            written are distinct, and none of them is read. Neither is checked, the device is not waited for.
    Raises:
        ValueError: shapes, dtypes or strides disagree; names them.
    Source: copy-on-write of shared blocks, PagedAttention, arXiv:2309.06180, section 4.4.
    """
    if cache.ndim < 2 or not cache.is_contiguous():
        raise ValueError(
            f"copy_blocks: cache {list(cache.shape)} with strides {cache.stride()} must be a contiguous "
            "[num_blocks, ...]"
        )
    if pairs.ndim != 2 or pairs.shape[1] != 2 or pairs.dtype != torch.int64:
        raise ValueError(f"copy_blocks: pairs {list(pairs.shape)} {pairs.dtype} must be int64 [num_pairs, 2]")
    find_impl("copy_blocks", cache, impl)(cache, pairs)
