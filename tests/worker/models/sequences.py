"""Models computed step by step over a paged cache of NaN, however the steps are cut, and compared with transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from triptych.checkpoint.architecture import ModelArchitecture
from triptych_kernels.state_batch import StateBatch
from triptych_services.worker.attention.base import AttentionBatch, KvCache
from triptych_services.worker.attention.paged import PagedAttention
from triptych_services.worker.layers.step_context import StepContext
from triptych_services.worker.models.base import CausalLM

BLOCK_SIZE = 4
STATE_INTERVAL = 8
"""Tokens of a page of recurrent state: a row is in the next page from then on, and what it leaves is a snapshot."""


class Sequences:
    """Token sequences and the paged cache of a model that computes them step by step."""

    def __init__(self, model: CausalLM, architecture: ModelArchitecture, lengths: Sequence[int]) -> None:
        self.model = model
        generator = torch.Generator().manual_seed(1)
        self.token_ids = [
            torch.randint(0, architecture.vocab_size, (length,), generator=generator) for length in lengths
        ]
        self.num_computed = [0] * len(lengths)
        num_blocks = [-(-length // BLOCK_SIZE) for length in lengths]
        blocks = iter((torch.randperm(sum(num_blocks), generator=generator) + 1).tolist())
        self.block_tables = torch.zeros(len(lengths), max(num_blocks), dtype=torch.int32)
        for row, count in enumerate(num_blocks):
            self.block_tables[row, :count] = torch.tensor([next(blocks) for _ in range(count)])
        self.kv_caches: list[KvCache] = []
        for layer in architecture.layers:
            if layer.kv_from >= 0:
                self.kv_caches.append(self.kv_caches[layer.kv_from])
                continue
            vectors = (2, layer.num_kv_heads, BLOCK_SIZE, layer.head_dim)
            if architecture.config:  # as `heads_of_layers` has it
                vectors = (2, architecture.num_kv_heads, BLOCK_SIZE, architecture.head_dim)
            if layer.latent is not None:
                vectors = (1, 1, BLOCK_SIZE, layer.latent.width)
            self.kv_caches.append(KvCache(torch.full((sum(num_blocks) + 1, *vectors), torch.nan)))
        self.interval = STATE_INTERVAL if any(layer.state for layer in architecture.layers) else max(lengths)
        num_pages = [-(-length // self.interval) for length in lengths]
        pages = torch.randperm(sum(num_pages), generator=generator) + 1
        self.page_tables = [own.tolist() for own in pages.split(num_pages)]
        self.state_pages = [
            torch.full((sum(num_pages) + 1, layer.state.page_elements), torch.nan) if layer.state else None
            for layer in architecture.layers
        ]

    def step(self, row_to_count: dict[int, int]) -> dict[int, Tensor]:
        """Compute the next tokens of some rows; row -> logits [count, vocab_size]."""
        rows = list(row_to_count)
        query_lens = tuple(row_to_count.values())
        starts = [self.num_computed[row] for row in rows]
        positions = [
            torch.arange(start, start + count) for start, count in zip(starts, query_lens, strict=True)
        ]
        slots = [
            self.block_tables[row].long()[place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE
            for row, place in zip(rows, positions, strict=True)
        ]
        seq_lens = tuple(start + count for start, count in zip(starts, query_lens, strict=True))
        batch = AttentionBatch(
            slot_mapping=torch.cat(slots),
            block_tables=self.block_tables[rows],
            query_starts=torch.tensor((0, *query_lens)).cumsum(0).int(),
            seq_lens=torch.tensor(seq_lens).int(),
            backend=PagedAttention(),
            max_query_len=max(query_lens),
            max_seq_len=max(seq_lens),
            query_lens_list=query_lens,
            seq_lens_list=seq_lens,
        )
        token_ids = torch.cat(
            [self.token_ids[row][place] for row, place in zip(rows, positions, strict=True)]
        )
        tables = [self.page_tables[row] for row in rows]
        read = [
            table[(start - 1) // self.interval] if start else 0
            for table, start in zip(tables, starts, strict=True)
        ]
        write = [table[(end - 1) // self.interval] for table, end in zip(tables, seq_lens, strict=True)]
        pages = (torch.tensor(each, dtype=torch.int32) for each in (read, write))
        state = StateBatch(*pages, query_starts=batch.query_starts, query_lens_list=query_lens)
        context = StepContext((batch,), self.kv_caches, state, state_pages=self.state_pages)
        hidden = self.model(token_ids, torch.cat(positions), context)
        for row, count in row_to_count.items():
            self.num_computed[row] += count
        return dict(zip(rows, self.model.compute_logits(hidden).split(query_lens), strict=True))

    def run(self, next_count: Any) -> list[Tensor]:
        """Step until every sequence is done; `next_count(row, remaining)` says how many tokens a row takes at most.

        No step goes beyond a page of recurrent state.
        """
        logits: list[list[Tensor]] = [[] for _ in self.token_ids]
        while True:
            remaining = [len(ids) - done for ids, done in zip(self.token_ids, self.num_computed, strict=True)]
            row_to_count = {
                row: min(next_count(row, left), self.interval - self.num_computed[row] % self.interval)
                for row, left in enumerate(remaining)
                if left
            }
            if not row_to_count:
                return [torch.cat(parts) for parts in logits]
            for row, part in self.step(row_to_count).items():
                logits[row].append(part)


def assert_equals_oracle(oracle: Any, sequences: Sequences, logits: list[Tensor]) -> None:
    for token_ids, ours in zip(sequences.token_ids, logits, strict=True):
        with torch.no_grad():
            expected = oracle(token_ids[None]).logits[0]
        # float32 through two layers, logits of size 10; sums in another order
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


CUTS = {
    "whole prompts": lambda row, left: left,
    "token by token": lambda row, left: 1,
    "chunks of 3": lambda row, left: min(3, left),
    "prompts beside decodes": lambda row, left: left if row % 2 else 1,
}
