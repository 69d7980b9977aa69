"""latent_attention against float64, over a cache that is NaN wherever nothing was written."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from tests.kernels.operands import ModelCall, SmallOperands, meta
from tests.kernels.ops.implementations import Case, Implementation, cases_of, implementations_of
from triptych_kernels.cpu.library import use_threads
from triptych_kernels.cpu.program import record
from triptych_kernels.ops import latent_attention

SCALE = 0.2
# float32: sums of tens of products. 16 bits: the weights are rounded before the sum over values of size 1, then the
# result; float16 keeps three bits more.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}

case = cases_of("latent_attention")
implementation = implementations_of("latent_attention")


@dataclass
class Step:
    query: Tensor
    kv_cache: Tensor
    block_tables: Tensor
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    value_dim: int

    def attend(self, compute: Case | Implementation | str) -> Tensor:
        operands = (
            self.query,
            self.kv_cache,
            self.block_tables,
            torch.tensor((0, *self.query_lens)).cumsum(0).int(),
            torch.tensor(self.seq_lens, dtype=torch.int32),
        )
        lens = {"query_lens_list": self.query_lens, "seq_lens_list": self.seq_lens}
        if isinstance(compute, str):
            return latent_attention(*operands, scale=SCALE, value_dim=self.value_dim, **lens, impl=compute)
        operands = tuple(x.to(compute.device) for x in operands)
        out: Tensor = compute(latent_attention, *operands, scale=SCALE, value_dim=self.value_dim, **lens)
        return out.cpu()

    def row(self, row: int, *, last: int | None = None, earlier: int = 0) -> Step:
        """One row alone, or its last queries without those after them.

        Args:
            last: Number of queries; None: all.
            earlier: Number of queries that are left out behind them.
        """
        start, end = list(pairwise(torch.tensor((0, *self.query_lens)).cumsum(0).tolist()))[row]
        end -= earlier
        count = end - start if last is None else last
        own = self.query[end - count : end]
        seq_lens = (self.seq_lens[row] - earlier,)
        return Step(own, self.kv_cache, self.block_tables[row : row + 1], (count,), seq_lens, self.value_dim)


def build_step(
    rows: list[tuple[int, int]],
    *,
    block_size: int = 4,
    num_heads: int = 4,
    width: int = 24,
    value_dim: int = 16,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
) -> Step:
    """Rows of (query_len, seq_len) over shuffled blocks; block 0 and every position past a row's end are NaN."""
    torch.manual_seed(0)
    query_lens, seq_lens = zip(*rows, strict=True)
    num_blocks_of = [-(-seq_len // block_size) for seq_len in seq_lens]
    block_ids = iter((torch.randperm(sum(num_blocks_of)) + 1).tolist())
    kv_cache = torch.full((sum(num_blocks_of) + 1, block_size, width), torch.nan)
    block_tables = torch.zeros(len(rows), max(num_blocks_of) + 1, dtype=torch.int32)
    for row, (num_blocks, seq_len) in enumerate(zip(num_blocks_of, seq_lens, strict=True)):
        for index in range(num_blocks):
            block_tables[row, index] = block_id = next(block_ids)
            used = min(block_size, seq_len - index * block_size)
            kv_cache[block_id, :used] = torch.randn(used, width)
    query = torch.randn(sum(query_lens), num_heads, width).to(dtype)
    return Step(query, kv_cache.to(cache_dtype or dtype), block_tables, query_lens, seq_lens, value_dim)


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype
    tolerance = TOLERANCE[found.dtype]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


DECODES = [(1, 1), (1, 3), (1, 4), (1, 5), (1, 17), (1, 17), (1, 40)]
MIXED = [(5, 9), (1, 12), (1, 4), (6, 6), (1, 31), (2, 3), (17, 40)]
AROUND_A_SPAN = [(1, 255), (1, 256), (2, 257), (3, 520)]


@pytest.mark.parametrize("rows", [DECODES, MIXED], ids=["decodes", "mixed"])
def test_attends_like_the_reference(rows: list[tuple[int, int]], case: Case) -> None:
    step = build_step(rows, dtype=case.dtype)
    assert_close(step.attend(case), step.attend("reference"))


@pytest.mark.parametrize(
    ("num_heads", "width", "value_dim", "block_size"),
    [(1, 24, 24, 1), (3, 40, 33, 16), (13, 18, 1, 3), (16, 72, 64, 16), (40, 22, 10, 8)],
)
def test_any_number_of_heads_and_any_widths(
    num_heads: int, width: int, value_dim: int, block_size: int, case: Case
) -> None:
    step = build_step(
        [(1, 15), (1, 33), (3, 18)],
        block_size=block_size,
        num_heads=num_heads,
        width=width,
        value_dim=value_dim,
        dtype=case.dtype,
    )
    assert_close(step.attend(case), step.attend("reference"))


def test_the_widths_of_deepseek(case: Case) -> None:
    step = build_step([(1, 20), (2, 5)], num_heads=16, width=576, value_dim=512, dtype=case.dtype)
    step.query /= 8  # scores of size 1
    assert_close(step.attend(case), step.attend("reference"))


def test_long_rows_are_merged_from_parts(case: Case) -> None:
    step = build_step(AROUND_A_SPAN, block_size=16, dtype=case.dtype)
    # the reference is slow; plain torch, which is held against it above, computes in float32
    wide = replace(step, query=step.query.float(), kv_cache=step.kv_cache.float())
    assert_close(step.attend(case), wide.attend("torch").to(case.dtype))


def test_a_cache_of_another_dtype_is_read_in_that_of_the_query(implementation: Implementation) -> None:
    step = build_step(MIXED, dtype=torch.float32, cache_dtype=torch.bfloat16)
    assert_close(step.attend(implementation), step.attend("reference"))


def test_a_row_has_the_same_bits_alone_and_with_any_threads(implementation: Implementation) -> None:
    if not implementation.has_fixed_sums:
        pytest.skip("torch chooses its sums by the shape")
    is_native = bool(implementation.isa)
    for dtype in implementation.dtypes[: 2 if is_native else 1]:
        step = build_step([(5, 9), (1, 12), (17, 40), (1, 300)], num_heads=5, dtype=dtype)
        together = step.attend(implementation)
        start = 0
        for row, query_len in enumerate(step.query_lens):
            for num_threads in (1, 3) if is_native else (1,):
                use_threads(num_threads)
                alone = step.row(row).attend(implementation)
                assert torch.equal(together[start : start + query_len], alone)
            start += query_len


def test_a_prompt_has_the_same_bits_however_it_is_cut(implementation: Implementation) -> None:
    if not implementation.isa:
        pytest.skip("the native kernels promise it")
    for dtype in implementation.dtypes[:2]:
        step = build_step([(300, 300)], num_heads=5, dtype=dtype)
        whole = step.attend(implementation)
        for end, count in ((1, 1), (8, 3), (257, 5), (300, 44), (300, 1)):
            part = step.row(0, last=count, earlier=300 - end).attend(implementation)
            assert torch.equal(whole[end - count : end], part)


def test_queries_may_be_views(implementation: Implementation) -> None:
    step = build_step(MIXED)
    expected = step.attend(implementation)
    wider = torch.full((*step.query.shape[:2], 30), torch.nan)
    wider[..., 3:27] = step.query
    step.query = wider[..., 3:27]
    # torch multiplies a view by another routine on some CPUs, which rounds differently
    rtol, atol = (0, 0) if implementation.isa else (1e-5, 1e-6)
    torch.testing.assert_close(step.attend(implementation), expected, rtol=rtol, atol=atol)


def test_it_is_recorded(implementation: Implementation) -> None:
    if not implementation.isa:
        pytest.skip("only native kernels are recorded")
    step = build_step(MIXED)
    starts = torch.tensor((0, *step.query_lens)).cumsum(0).int()
    memory = step.query, step.block_tables, starts, torch.tensor(step.seq_lens, dtype=torch.int32)

    def forward(recording: object) -> tuple[Tensor, ...]:
        counts = "tokens", "requests", "starts", "requests"
        query, tables, own_starts, lens = (
            recording.input(x, count=count)
            for x, count in zip(memory, counts, strict=True)  # type: ignore[attr-defined]
        )
        return (
            latent_attention(
                query, step.kv_cache, tables, own_starts, lens, scale=SCALE, value_dim=step.value_dim
            ),
        )

    program = record(forward)
    counts = {"tokens": len(step.query), "requests": len(step.seq_lens), "starts": len(starts)}
    program.run(counts)
    assert torch.equal(program.outputs[0], step.attend(implementation))


def test_shapes_and_values_that_disagree_are_named() -> None:
    step = build_step([(2, 5), (1, 3)])
    query, cache, tables = step.query, step.kv_cache, step.block_tables
    starts, lens = torch.tensor([0, 2, 3]).int(), torch.tensor([5, 3]).int()

    def attend(**changed: object) -> Tensor:
        arguments = {"query": query, "kv_cache": cache, "block_tables": tables, "query_starts": starts}
        return latent_attention(
            **(arguments | {"seq_lens": lens, "scale": SCALE, "value_dim": 16} | changed)  # type: ignore[arg-type]
        )

    with pytest.raises(ValueError, match=r"query \[3, 4, 20\] with .* does not fit kv_cache \[4, 4, 24\]"):
        attend(query=query[..., :20])
    with pytest.raises(ValueError, match=r"kv_cache \[4, 24, 4\] .* must be a contiguous"):
        attend(kv_cache=cache.transpose(1, 2))
    with pytest.raises(ValueError, match=r"kv_cache .* torch\.int8 must be a contiguous"):
        attend(kv_cache=torch.zeros(4, 4, 24, dtype=torch.int8))
    with pytest.raises(ValueError, match="value_dim 25 must be 1 to 24"):
        attend(value_dim=25)
    with pytest.raises(ValueError, match="scale 0 positive"):
        attend(scale=0)
    with pytest.raises(ValueError, match="latent_attention: row 0 has 2 queries, 99 keys and blocks for 12"):
        attend(seq_lens=torch.tensor([99, 3]).int())
    with pytest.raises(ValueError, match=r"latent_attention: query_starts \[2\] must be one longer"):
        attend(query_starts=starts[:2])


def _model_call(num_heads: int, query_lens: tuple[int, ...]) -> object:
    """Attend over sequences of 8,192 tokens."""
    num_rows = len(query_lens)
    return latent_attention(
        meta(sum(query_lens), num_heads, 576),
        meta(64, 16, 576),
        meta(num_rows, 512, dtype=torch.int32),
        meta(num_rows + 1, dtype=torch.int32),
        meta(num_rows, dtype=torch.int32),
        scale=192**-0.5,
        value_dim=512,
        query_lens_list=query_lens,
        seq_lens_list=(8192,) * num_rows,
        impl="triton",
    )


MODEL_CALLS = {
    "16 heads": ModelCall(lambda: _model_call(16, (1,) * 64 + (700,))),
    "128 heads": ModelCall(lambda: _model_call(128, (1,) * 64 + (700,))),
}


def launch_small(draw: SmallOperands) -> None:
    for query_lens, seq_lens in (((1, 1, 1), (1, 17, 50)), ((20,), (20,)), ((1, 19, 1), (33, 40, 3))):
        latent_attention(
            draw.normal(sum(query_lens), 6, 80),
            draw.normal(draw.num_blocks, draw.block_size, 80),
            torch.randint(1, draw.num_blocks, (len(seq_lens), 4), device=draw.device).int(),
            draw.tensor([0, *query_lens]).cumsum(0).int(),
            draw.tensor(seq_lens).int(),
            scale=0.1,
            value_dim=64,
            query_lens_list=query_lens,
            seq_lens_list=seq_lens,
            impl="triton",
        )
