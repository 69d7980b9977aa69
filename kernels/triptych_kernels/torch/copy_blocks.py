"""Copying whole blocks within a paged cache in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def copy_blocks(cache: Tensor, pairs: Tensor) -> None:
    blocks = cache.flatten(1).view(torch.uint8)  # 8-bit floats have no index_copy_
    blocks.index_copy_(0, pairs[:, 1], blocks.index_select(0, pairs[:, 0]))
