"""choose_keys against float64, over keys that are NaN wherever nothing was written."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from tests.kernels.ops.implementations import Case, Implementation, cases_of, implementations_of
from triptych_kernels.cpu.library import use_threads
from triptych_kernels.cpu.program import record
from triptych_kernels.ops import choose_keys

NEAR = 1e-5
"""Sums of tens of products in float32, of which each is exact or rounded once, differ by less in another order."""

case = cases_of("choose_keys")
implementation = implementations_of("choose_keys")


@dataclass
class Step:
    query: Tensor
    weights: Tensor
    keys: Tensor
    block_tables: Tensor
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    max_keys: int = 6

    @property
    def operands(self) -> tuple[Tensor, ...]:
        starts = torch.tensor((0, *self.query_lens)).cumsum(0).int()
        lens = torch.tensor(self.seq_lens, dtype=torch.int32)
        return self.query, self.weights, self.keys, self.block_tables, starts, lens

    def choose(self, compute: Case | Implementation | str) -> list[list[int]]:
        """Return the slots of each query."""
        if isinstance(compute, str):
            slots, counts = choose_keys(*self.operands, max_keys=self.max_keys, impl=compute)
        else:
            slots, counts = compute(choose_keys, *self.operands, max_keys=self.max_keys)
        return [own[:count].tolist() for own, count in zip(slots, counts.tolist(), strict=True)]

    def row(self, row: int, *, last: int, earlier: int = 0) -> Step:
        """The last queries of a row alone.

        Args:
            last: Their number.
            earlier: Number of queries that are left out behind them.
        """
        _, end = list(pairwise(torch.tensor((0, *self.query_lens)).cumsum(0).tolist()))[row]
        own = slice(end - earlier - last, end - earlier)
        return replace(
            self,
            query=self.query[own],
            weights=self.weights[own],
            block_tables=self.block_tables[row : row + 1],
            query_lens=(last,),
            seq_lens=(self.seq_lens[row] - earlier,),
        )

    def smallest_gap(self) -> float:
        """Return the least relative gap between the lowest chosen score and the highest other one, of all queries.

        Two scores of 0 count as apart: they are exactly 0 in any order of sums.
        """
        gaps = [1.0]
        starts = torch.tensor((0, *self.query_lens)).cumsum(0).tolist()
        block_size = self.keys.shape[1]
        for row, (start, end) in enumerate(pairwise(starts)):
            positions = torch.arange(self.seq_lens[row])
            blocks = self.block_tables[row].long()[positions // block_size]
            own = self.keys[blocks, positions % block_size].double()
            for token in range(start, end):
                num_seen = self.seq_lens[row] - (end - 1 - token)
                if num_seen <= self.max_keys:
                    continue
                products = (self.query[token].double() @ own[:num_seen].t()).relu()
                scores = (self.weights[token].double() @ products).sort(descending=True).values
                last, first = scores[self.max_keys - 1].item(), scores[self.max_keys].item()
                if last != 0.0 or first != 0.0:
                    gaps.append((last - first) / scores.abs().max().item())
        return min(gaps)


def build_step(
    rows: list[tuple[int, int]],
    *,
    block_size: int = 4,
    num_heads: int = 5,
    head_dim: int = 12,
    beside: int = 3,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
) -> Step:
    """Rows of (query_len, seq_len) over shuffled blocks; block 0 and every position past a row's end are NaN.

    Args:
        beside: Elements of a cached vector before its key.
    """
    torch.manual_seed(0)
    query_lens, seq_lens = zip(*rows, strict=True)
    num_blocks_of = [-(-seq_len // block_size) for seq_len in seq_lens]
    block_ids = iter((torch.randperm(sum(num_blocks_of)) + 1).tolist())
    cache = torch.full((sum(num_blocks_of) + 1, block_size, beside + head_dim), torch.nan)
    block_tables = torch.zeros(len(rows), max(num_blocks_of) + 1, dtype=torch.int32)
    for row, (num_blocks, seq_len) in enumerate(zip(num_blocks_of, seq_lens, strict=True)):
        for index in range(num_blocks):
            block_tables[row, index] = block_id = next(block_ids)
            used = min(block_size, seq_len - index * block_size)
            cache[block_id, :used, beside:] = torch.randn(used, head_dim)
    query = torch.randn(sum(query_lens), num_heads, head_dim).to(dtype)
    weights = torch.randn(sum(query_lens), num_heads)
    keys = cache.to(cache_dtype or dtype)[..., beside:]
    return Step(query, weights, keys, block_tables, query_lens, seq_lens)


ROWS = [(5, 9), (1, 12), (1, 4), (6, 6), (1, 31), (2, 3), (17, 40), (1, 7), (1, 6)]


def test_chooses_like_the_reference(case: Case) -> None:
    step = build_step(ROWS, dtype=case.dtype)
    assert step.smallest_gap() > NEAR
    assert step.choose(case) == step.choose("reference")


@pytest.mark.parametrize(
    ("num_heads", "head_dim", "block_size", "beside", "max_keys"),
    [(1, 5, 1, 0, 1), (13, 33, 3, 4, 9), (64, 128, 16, 576, 16), (24, 7, 8, 1, 40)],
)
def test_any_sizes(
    num_heads: int, head_dim: int, block_size: int, beside: int, max_keys: int, case: Case
) -> None:
    step = build_step(
        [(1, 15), (3, 33), (1, 40), (1, 41)],
        num_heads=num_heads, head_dim=head_dim, block_size=block_size, beside=beside, dtype=case.dtype,
    )  # fmt: skip
    step.max_keys = max_keys
    assert step.smallest_gap() > NEAR
    assert step.choose(case) == step.choose("reference")


def test_keys_of_another_dtype(case: Case) -> None:
    for cache_dtype in (torch.float32, torch.bfloat16, torch.float16):
        step = build_step(ROWS, dtype=case.dtype, cache_dtype=cache_dtype)
        assert step.smallest_gap() > NEAR
        assert step.choose(case) == step.choose("reference")


def test_of_equal_scores_the_earlier_ones_are_chosen(case: Case) -> None:
    """Small integers, of which every sum is exact, so that many scores are equal and many are 0."""
    step = build_step([(9, 70), (1, 33)], num_heads=2, head_dim=3, dtype=case.dtype)
    step.query.copy_(torch.randint(-1, 2, step.query.shape))
    step.weights.copy_(torch.randint(-1, 3, step.weights.shape))
    step.keys.copy_(torch.randint(-1, 2, step.keys.shape))
    step.max_keys = 17
    assert step.smallest_gap() == 0  # of others than 0, too
    assert step.choose(case) == step.choose("reference")


def test_nan_is_the_lowest_score(case: Case) -> None:
    step = build_step([(2, 12), (1, 9)], dtype=case.dtype)
    step.weights[1] = torch.nan
    found = step.choose(case)
    assert found == step.choose("reference")
    blocks = step.block_tables[0, :2].tolist()
    assert found[1] == [blocks[place // 4] * 4 + place % 4 for place in range(6)]


def test_more_scores_than_wait_at_a_time(implementation: Implementation) -> None:
    """Prompts of which the scores are computed in several groups, and rows in several chunks."""
    if not implementation.isa:
        pytest.skip("only native kernels compute them so")
    query_len, seq_len = 430, 10_300  # 4.4 million scores
    step = build_step([(1, 4100), (query_len, seq_len)], block_size=16, num_heads=1, head_dim=2, beside=0)
    step.query.copy_(torch.randint(1, 4, step.query.shape))
    step.keys.copy_(torch.randint(-9, 10, step.keys.shape))
    step.weights.fill_(1.0)
    step.max_keys = 50
    found = step.choose(implementation)
    positions = torch.arange(seq_len)
    slots = step.block_tables[1].long()[positions // 16] * 16 + positions % 16
    scores = (step.query[1:, 0] @ step.keys.flatten(0, 1)[slots].t()).relu()
    scores.masked_fill_(positions > positions[-query_len:, None], -torch.inf)
    best = scores.sort(dim=1, descending=True, stable=True).indices[:, :50].sort(dim=1).values
    assert found[1:] == slots[best].tolist()
    assert found[0] == step.row(0, last=1).choose("reference")[0]


def test_a_query_chooses_the_same_in_any_batch_and_cut(implementation: Implementation) -> None:
    if not implementation.has_fixed_sums:
        pytest.skip("torch chooses its sums by the shape")
    step = build_step(ROWS)
    whole = iter(step.choose(implementation))
    for row, query_len in enumerate(step.query_lens):
        own = [next(whole) for _ in range(query_len)]
        for earlier, expected in zip(reversed(range(query_len)), own, strict=True):
            assert step.row(row, last=1, earlier=earlier).choose(implementation) == [expected]
    use_threads(1)
    assert step.choose(implementation)[-1] == step.row(len(ROWS) - 1, last=1).choose(implementation)[0]


def test_it_is_recorded(implementation: Implementation) -> None:
    if not implementation.isa:
        pytest.skip("only native kernels are recorded")
    step = build_step(ROWS)
    query, weights, keys, tables, starts, lens = step.operands

    def forward(recording: object) -> tuple[Tensor, ...]:
        stand_ins = [
            recording.input(memory, count=count)  # type: ignore[attr-defined]
            for memory, count in (
                (query, "tokens"),
                (weights, "tokens"),
                (tables, "requests"),
                (starts, "starts"),
                (lens, "requests"),
            )
        ]
        return choose_keys(*stand_ins[:2], keys, *stand_ins[2:], max_keys=step.max_keys)

    program = record(forward)
    program.run({"tokens": len(query), "requests": len(lens), "starts": len(starts)})
    slots, counts = program.outputs
    found = [own[:count].tolist() for own, count in zip(slots, counts.tolist(), strict=True)]
    assert found == step.choose(implementation)


def test_shapes_and_values_that_disagree_are_named() -> None:
    step = build_step([(2, 5), (1, 3)])
    query, weights, keys, tables, starts, lens = step.operands

    def choose(**changed: object) -> object:
        arguments = {"query": query, "weights": weights, "keys": keys, "block_tables": tables}
        arguments |= {"query_starts": starts, "seq_lens": lens, "max_keys": 3}
        return choose_keys(**(arguments | changed))  # type: ignore[arg-type]

    with pytest.raises(ValueError, match=r"query \[3, 5, 11\] with .* does not fit keys \[4, 4, 12\]"):
        choose(query=query[..., :11])
    with pytest.raises(ValueError, match=r"weights \[3, 4\] .* do not fit query \[3, 5, 12\]"):
        choose(weights=weights[:, :4])
    with pytest.raises(ValueError, match=r"weights .* torch\.bfloat16 do not fit"):
        choose(weights=weights.bfloat16())
    with pytest.raises(ValueError, match=r"keys \[4, 4, 12\] torch\.int8 with .* must be"):
        choose(keys=torch.zeros(4, 4, 12, dtype=torch.int8))
    with pytest.raises(ValueError, match=r"keys \[4, 3, 12\] .* all keys equally far apart"):
        choose(keys=keys[:, :3])
    with pytest.raises(ValueError, match="max_keys 0 at least 1"):
        choose(max_keys=0)
    with pytest.raises(ValueError, match=r"keys \[134217728, 16, 1\] must be fewer than 2147483648"):
        choose(keys=torch.empty(2**27, 16, 1, device="meta"))
    with pytest.raises(ValueError, match="choose_keys: row 0 has 2 queries, 99 keys and blocks for 12"):
        choose(seq_lens=torch.tensor([99, 3]).int())
