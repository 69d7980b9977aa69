"""Copying whole blocks within a paged cache, one by one."""

from __future__ import annotations

from torch import Tensor


def copy_blocks(cache: Tensor, pairs: Tensor) -> None:
    for source, destination in pairs.tolist():
        cache[destination] = cache[source].clone()
