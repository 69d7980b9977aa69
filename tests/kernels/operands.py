"""Operands of calls that tests make for every op: large ones without memory as models have them, and small ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from triptych_kernels.kv_scales import LARGEST_ELEMENT


@dataclass(frozen=True, slots=True)
class ModelCall:
    """A call of an op as a model makes it, with operands on the meta device.

    `tests/kernels/triton/test_compiles.py` compiles its kernels for Hopper. A launcher that waits for the device, by
    `.item()` or a shape read from a tensor, fails.
    """

    launch: Callable[[], object]
    """Launches one kernel or several."""
    is_memory_bound: bool = False
    """Whether its kernels do little but load and store, so that they must do so in whole vectors."""


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def meta_float32(*shape: int) -> Tensor:
    return meta(*shape, dtype=torch.float32)


def meta_int64(*shape: int) -> Tensor:
    return meta(*shape, dtype=torch.int64)


def meta_heads(num_heads: int, num_kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value of 256 tokens, views of the packed projection."""
    packed = meta(256, num_heads + 2 * num_kv_heads, head_dim)
    query, key, value = packed.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    return query, key, value


def meta_cache(num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Return a paged cache of bfloat16, or of 8 bits with its scales."""
    kv_cache = meta(64, 2, num_kv_heads, 16, head_dim, dtype=dtype)
    return kv_cache, None if dtype == torch.bfloat16 else meta_float32(*kv_cache.shape[:4])


def keys_as_rows(kv_cache: Tensor) -> Tensor:
    """Return a copy of a cache whose keys are words, as `cpu.attention` describes them, with keys as rows."""
    rows = kv_cache.clone()
    num_blocks, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    per_word = 4 // kv_cache.itemsize
    words = kv_cache[:, 0].reshape(num_blocks, num_kv_heads, head_dim // per_word, block_size, per_word)
    for word in range(head_dim // per_word):
        rows[:, 0, :, :, word * per_word : (word + 1) * per_word] = words[:, :, word]
    return rows


class SmallOperands:
    """Small operands of odd sizes on one device, drawn for each call, for `tests/gpu/small_launches.py`."""

    vocab_size = 1031
    block_size, num_blocks = 16, 12
    heads_of_query, heads_of_key, head_dim = 6, 2, 64

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    @property
    def kv_dtypes(self) -> tuple[torch.dtype, ...]:
        return (self.dtype, *LARGEST_ELEMENT)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device).to(self.dtype)

    def tensor(self, values: object) -> Tensor:
        return torch.tensor(values, device=self.device)

    def heads(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value of 9 tokens, views of the packed projection."""
        packed = self.normal(9, self.heads_of_query + 2 * self.heads_of_key, self.head_dim)
        query, key, value = packed.split((self.heads_of_query, self.heads_of_key, self.heads_of_key), dim=1)
        return query, key, value

    def cache(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Return a paged cache, with its scales if it has any."""
        shape = self.num_blocks, 2, self.heads_of_key, self.block_size, self.head_dim
        cache = self.normal(*shape).to(dtype)
        scales = torch.rand(cache.shape[:4], device=self.device) if dtype in LARGEST_ELEMENT else None
        return cache, scales

    def slots(self) -> Tensor:
        """Return the slots of 9 tokens, one of which is skipped."""
        slots = torch.randperm(self.num_blocks * self.block_size, device=self.device)[:9]
        slots[4] = -1
        return slots

    def rotary(self) -> tuple[Tensor, Tensor]:
        """Return positions of 9 tokens and a table of angles."""
        positions = torch.randint(100, (9,), device=self.device)
        return positions, torch.randn(100, self.head_dim, device=self.device)
