"""What attention works on: a layer's keys and values, and whose the tokens of one step are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class KvCache:
    """One layer's paged keys and values. Models hand it on; the attention layer alone looks inside."""

    blocks: Tensor
    """[num_blocks, 2 (key, value), num_kv_heads, block_size, head_dim], contiguous."""
    scales: Tensor | None = None
    """[num_blocks, 2, num_kv_heads, block_size] float32, where the blocks hold 8 bits: docs/adr/0007."""

    @property
    def device(self) -> torch.device:
        return self.blocks.device


@dataclass(frozen=True, slots=True, eq=False)
class AttentionBatch:
    """The layout of one step's tokens, the same for every layer.

    Row r owns the tokens `query_starts[r]:query_starts[r + 1]` of the step, which are the last
    `query_lens_list[r]` of the `seq_lens_list[r]` positions of its sequence.

        step's tokens   a a a a b c c          three rows, query_starts [0, 4, 5, 7]
        their positions 0 1 2 3 9 6 7          seq_lens [4, 10, 8]

    A backend may keep what it made of a batch for the layers that follow, and knows the batch by its identity: another
    step is another object. The one exception are decodes that a graph records, whose tensors change under it.

    Tensors are on the rank's device; the numbers and tuples say the same to code that loops on the host without
    waiting for the device. Where a program is recorded no step is known: they keep their defaults.
    """

    slot_mapping: Tensor
    """[num_tokens] int64, block_id * block_size + offset; -1: this token's key and value are not written."""
    block_tables: Tensor
    """[num_rows, max_blocks] int32, padded with 0, the null block; max_blocks covers `max_seq_len`."""
    query_starts: Tensor
    """[num_rows + 1] int32."""
    seq_lens: Tensor
    """[num_rows] int32, length of the keys and values, this step's tokens included."""
    backend: AttentionBackend
    """Attends, in every layer."""
    max_query_len: int = 0
    max_seq_len: int = 0
    query_lens_list: tuple[int, ...] = ()
    seq_lens_list: tuple[int, ...] = ()


class AttentionBackend(Protocol):
    """Attends to what already stands in the cache; one for all layers, so that it can prepare a step once."""

    name: str
    """As `ResolvedConfig.attention_backend` says it; auto: whatever the device's own kernels are."""
    in_graphs: bool
    """Whether a CUDA graph may record it in a step of decodes: it then allocates by the bounds that the batch's
    lists are, reads back nothing, and serves any lengths up to them when it is replayed."""

    def attend(
        self, query: Tensor, kv_cache: KvCache, batch: AttentionBatch, scale: float, window: int = 0
    ) -> Tensor:
        """Causal attention of each query to its row's keys up to its own position.

        Args:
            query: [num_tokens, num_heads, head_dim], rotated.
            scale: of the products of queries and keys.
            window: keys that a query sees at most, its own included; 0: all.
        Returns:
            [num_tokens, num_heads, head_dim] of the same dtype.
        """
        ...
