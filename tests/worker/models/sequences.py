"""Models computed step by step over a paged cache of NaN, however the steps are cut, and compared with transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from triptych.checkpoint.architecture import ModelArchitecture
from triptych_services.worker.attention.base import AttentionBatch, KvCache
from triptych_services.worker.attention.paged import PagedAttention
from triptych_services.worker.layers.step_context import StepContext
from triptych_services.worker.models.base import CausalLM

BLOCK_SIZE = 4


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
        shape = (sum(num_blocks) + 1, 2, architecture.num_kv_heads, BLOCK_SIZE, architecture.head_dim)
        self.kv_caches = [KvCache(torch.full(shape, torch.nan)) for _ in range(architecture.num_layers)]

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
        hidden = self.model(token_ids, torch.cat(positions), StepContext((batch,), self.kv_caches))
        for row, count in row_to_count.items():
            self.num_computed[row] += count
        return dict(zip(rows, self.model.compute_logits(hidden).split(query_lens), strict=True))

    def run(self, next_count: Any) -> list[Tensor]:
        """Step until every sequence is done; `next_count(row, remaining)` says how many tokens a row takes."""
        logits: list[list[Tensor]] = [[] for _ in self.token_ids]
        while True:
            remaining = [len(ids) - done for ids, done in zip(self.token_ids, self.num_computed, strict=True)]
            row_to_count = {row: next_count(row, left) for row, left in enumerate(remaining) if left}
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
