"""The interface of attention backends: a layer's keys and values, and the layout of one step's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from triptych_kernels.attend_options import AttendOptions


@dataclass(frozen=True, slots=True, eq=False)
class KvCache:
    """Pages of one layer: keys and values, states, or both. Only the layer and its ops read or write the tensors."""

    blocks: Tensor
    """[num_blocks, 2 (key, value), num_kv_heads, block_size, head_dim], contiguous. How a block's keys lie is up to the
    implementation of the ops: `AttentionBackend.writer`. Of latent attention: [num_blocks, 1, 1, block_size, width].
    Empty if the layer has no attention."""
    scales: Tensor | None = None
    """[num_blocks, 2, num_kv_heads, block_size] float32 if the blocks hold 8 bits, else None: docs/adr/0007."""
    group: int = 0
    """Number of the layer's KV group, which holds blocks of its own in these tensors: docs/adr/0087."""
    state: Tensor | None = None
    """[num_state_blocks, page elements] float32, pages of the layer's recurrent states; None: it has none."""
    guesses: Tensor | None = None
    """[num_slots, guesses of a row, kept elements] float32, what guessed tokens would change of the states; None: there
    are no states, or no row guesses."""

    @property
    def device(self) -> torch.device:
        return self.blocks.device


def keeps_guesses(kv_caches: Sequence[KvCache]) -> bool:
    """Return whether rows may guess in a model with states."""
    return any(cache.guesses is not None for cache in kv_caches)


@dataclass(frozen=True, slots=True, eq=False)
class AttentionBatch:
    """The layout of one step's tokens, the same for every layer of a KV group.

    Row r owns the tokens `query_starts[r]:query_starts[r + 1]` of the step, which are the last
    `query_lens_list[r]` of the `seq_lens_list[r]` positions of its sequence.

        step's tokens   a a a a b c c          three rows, query_starts [0, 4, 5, 7]
        their positions 0 1 2 3 9 6 7          seq_lens [4, 10, 8]

    A backend may keep what it derives from a batch for the layers that follow, and recognises the batch by its
    identity: each step is another object. The only exception is a decode that a graph records: its tensors change
    while the object stays.

    Tensors are on the rank's device. The numbers and tuples hold the same values for code that loops on the host, which
    then need not wait for the device. They have their defaults while a program is recorded, since no step is known.
    """

    slot_mapping: Tensor
    """[num_tokens] int64, block_id * block_size + offset; -1 if the token's key and value are not written."""
    block_tables: Tensor
    """[num_rows, max_blocks] int32, padded with 0, the null block; max_blocks covers `max_seq_len`."""
    query_starts: Tensor
    """[num_rows + 1] int32."""
    seq_lens: Tensor
    """[num_rows] int32, number of keys, this step's tokens included."""
    backend: AttentionBackend
    """The backend of all layers."""
    max_query_len: int = 0
    max_seq_len: int = 0
    query_lens_list: tuple[int, ...] = ()
    seq_lens_list: tuple[int, ...] = ()


class AttentionBackend(Protocol):
    """Attention to the keys and values in the cache. One object serves all layers, so it can prepare a step once."""

    name: str
    """Name as in `ResolvedConfig.attention_backend`; auto: the device's own kernels."""
    in_graphs: bool
    """Whether a CUDA graph may record it in a step of decodes. It then allocates by the batch's lists, which are upper
    bounds, reads nothing back, and serves all lengths up to these bounds when it is replayed."""

    writer: str | None
    """Implementation of the ops that writes the cache as `attend` reads it; None: the device's own."""

    supported: frozenset[str]
    """Names of the `AttendOptions` besides `scale` that `attend` computes. A worker does not start with a model that
    needs others: `layers.attention.check_layers`."""

    def attend(
        self, query: Tensor, kv_cache: KvCache, batch: AttentionBatch, options: AttendOptions
    ) -> Tensor:
        """Attend from each query to the keys of its row, up to its own position.

        Args:
            query: [num_tokens, num_heads, head_dim], rotated.
            options: The layer's, of which those in use are among `supported`.

        Returns:
            [num_tokens, num_heads, head_dim] of the same dtype; [num_tokens, num_heads, latent_dim] if the options
            have one.
        """
        ...
