"""paged_attention against float64, over a cache that is NaN wherever nothing was written."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from tests.kernels.operands import ModelCall, SmallOperands, meta, meta_cache, meta_float32
from triptych_kernels.attend_options import AttendOptions
from triptych_kernels.cpu.attention import keys_in_words, serves
from triptych_kernels.cpu.library import isa
from triptych_kernels.kv_scales import LARGEST_ELEMENT
from triptych_kernels.ops import paged_attention, write_kv
from triptych_kernels.torch import attention as torch_implementation

SCALE = 0.3


@pytest.fixture(params=["cpu", "torch"], autouse=True)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test holds for each of them."""
    if request.param == "cpu" and not isa():
        pytest.skip("no native kernels were built for this processor")
    monkeypatch.setattr(Step, "implementation", request.param)


# float32: sums of tens of products. bfloat16 keeps 8 bits, and the weights are rounded before the sum over
# values of size 1, then the result: 2^-8 each.
TOLERANCE = {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, torch.bfloat16: {"rtol": 2**-7, "atol": 2**-7}}


@dataclass
class Step:
    query: Tensor
    kv_cache: Tensor
    """With keys as rows, as the reference writes them."""
    block_tables: Tensor
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    kv_scales: Tensor | None = None
    implementation: ClassVar[str] = "torch"

    def in_float64(self) -> Step:
        """The same with all that stands in the cache spelt out: what it means."""
        cache = self.kv_cache.double()
        if self.kv_scales is not None:
            cache = cache * self.kv_scales.double()[..., None]
        return Step(self.query.double(), cache, self.block_tables, self.query_lens, self.seq_lens)

    def cache_of(self, impl: str) -> Tensor:
        """The cache as an implementation keeps it."""
        return keys_in_words(self.kv_cache) if impl == "cpu" and serves(self.kv_cache) else self.kv_cache

    def attend(
        self,
        rows: list[int] | None = None,
        impl: str | None = None,
        **options: Any,
    ) -> Tensor:
        """The result for some rows, in that order, computed in one call.

        Args:
            options: `AttendOptions` besides the scale.
        """
        rows = list(range(len(self.query_lens))) if rows is None else rows
        starts = torch.tensor((0, *self.query_lens)).cumsum(0).tolist()
        query = torch.cat([self.query[starts[row] : starts[row + 1]] for row in rows])
        query_lens = tuple(self.query_lens[row] for row in rows)
        seq_lens = tuple(self.seq_lens[row] for row in rows)
        impl = impl or self.implementation
        return paged_attention(
            query,
            self.cache_of(impl),
            self.block_tables[rows],
            torch.tensor((0, *query_lens)).cumsum(0).int(),
            torch.tensor(seq_lens, dtype=torch.int32),
            AttendOptions(SCALE, **options),
            kv_scales=self.kv_scales,
            query_lens_list=query_lens,
            seq_lens_list=seq_lens,
            impl=impl,
        )


def build_step(
    rows: list[tuple[int, int]],
    *,
    block_size: int = 4,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 8,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
) -> Step:
    """Rows of (query_len, seq_len) over shuffled blocks; block 0 and every position past a row's end are NaN, in a
    cache of 8 bits by their scales."""
    torch.manual_seed(0)
    query_lens, seq_lens = zip(*rows, strict=True)
    num_blocks_of = [-(-seq_len // block_size) for seq_len in seq_lens]
    block_ids = iter((torch.randperm(sum(num_blocks_of)) + 1).tolist())
    kv_cache = torch.full((sum(num_blocks_of) + 1, 2, num_kv_heads, block_size, head_dim), torch.nan)
    block_tables = torch.zeros(len(rows), max(num_blocks_of) + 1, dtype=torch.int32)
    for row, (num_blocks, seq_len) in enumerate(zip(num_blocks_of, seq_lens, strict=True)):
        for index in range(num_blocks):
            block_tables[row, index] = block_id = next(block_ids)
            used = min(block_size, seq_len - index * block_size)
            kv_cache[block_id, :, :, :used] = torch.randn(2, num_kv_heads, used, head_dim)
    query = torch.randn(sum(query_lens), num_heads, head_dim).to(dtype)
    cache, scales = stored(kv_cache, cache_dtype or dtype)
    return Step(query, cache, block_tables, query_lens, seq_lens, scales)


def stored(kv_cache: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """A cache in another precision, and its scales if it then has any."""
    if dtype not in LARGEST_ELEMENT:
        return kv_cache.to(dtype), None
    cache, scales = torch.empty_like(kv_cache, dtype=dtype), torch.empty(kv_cache.shape[:4])
    num_slots = kv_cache.shape[0] * kv_cache.shape[3]
    key, value = kv_cache.permute(1, 0, 3, 2, 4).reshape(2, num_slots, *kv_cache.shape[2::2])
    write_kv(key, value, cache, torch.arange(num_slots), kv_scales=scales, impl="torch")
    return cache, scales


def per_head(*values: float) -> Callable[[int], Tensor]:
    """The values in turn, for as many heads as there are."""
    return lambda num_heads: torch.tensor(values).repeat(-(-num_heads // len(values)))[:num_heads]


SINKS, ALIBI = per_head(0.5, -torch.inf, 2.0, 60.0, -3.0), per_head(0.25, 0.0, 0.03, -0.1)
OPTIONS: dict[str, dict[str, Any]] = {
    "window of 1": {"window": 1},
    "window": {"window": 5},
    "long window": {"window": 30},
    "chunk": {"chunk": 6},
    "chunk of 1": {"chunk": 1},
    "window in chunks": {"window": 4, "chunk": 6},
    "cap": {"soft_cap": 0.7},
    "sinks": {"sinks": SINKS},
    "alibi": {"alibi": ALIBI},
    "sinks in windows": {"sinks": SINKS, "window": 3},
    "all": {"window": 9, "chunk": 12, "soft_cap": 1.5, "sinks": SINKS, "alibi": ALIBI},
}
"""`AttendOptions` besides the scale; tensors as functions of the number of heads."""


def for_heads(options: dict[str, Any], num_heads: int = 4) -> dict[str, Any]:
    return {name: value(num_heads) if callable(value) else value for name, value in options.items()}


DECODES = [(1, 1), (1, 3), (1, 4), (1, 5), (1, 16), (1, 17), (1, 17), (1, 40)]
PROMPTS = [(1, 1), (3, 3), (4, 4), (5, 5), (17, 17)]
CHUNKS = [(2, 5), (4, 8), (5, 9), (7, 30), (2, 2)]
MIXED = [(5, 9), (1, 12), (1, 4), (6, 6), (1, 31), (2, 3)]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "rows", [DECODES, PROMPTS, CHUNKS, MIXED], ids=["decodes", "prompts", "chunks", "mixed"]
)
def test_attends_like_the_reference(rows: list[tuple[int, int]], dtype: torch.dtype) -> None:
    step = build_step(rows, dtype=dtype)
    torch.testing.assert_close(step.attend(), step.attend(impl="reference"), **TOLERANCE[dtype])


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (4, 4), (6, 1), (9, 3)])
@pytest.mark.parametrize("block_size", [1, 16])
def test_any_grouping_of_heads_and_any_block_size(num_heads: int, num_kv_heads: int, block_size: int) -> None:
    step = build_step(
        [(1, 15), (1, 16), (1, 17), (3, 18)],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        block_size=block_size,
    )
    torch.testing.assert_close(step.attend(), step.attend(impl="reference"), **TOLERANCE[torch.float32])


def test_a_cache_of_another_dtype_is_read_in_that_of_the_query() -> None:
    step = build_step(MIXED, dtype=torch.float32, cache_dtype=torch.bfloat16)
    torch.testing.assert_close(step.attend(), step.attend(impl="reference"), **TOLERANCE[torch.float32])


def test_long_chunks_are_cut_without_a_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    step = build_step([(13, 20), (9, 9)])
    whole = step.attend()
    monkeypatch.setattr(torch_implementation, "MAX_CHUNK_QUERIES", 5)
    torch.testing.assert_close(step.attend(), whole, **TOLERANCE[torch.float32])
    torch.testing.assert_close(whole, step.attend(impl="reference"), **TOLERANCE[torch.float32])


@pytest.mark.parametrize("tile_pages", [1, 7, 1000])
def test_decodes_of_very_different_length_share_a_step(
    tile_pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    page_bytes = 2 * 2 * 4 * 8 * 4
    monkeypatch.setattr(torch_implementation, "TILE_BYTES", tile_pages * page_bytes)
    monkeypatch.setattr(torch_implementation, "SLACK_PAGES", 2)
    torch_implementation.plan_step.cache_clear()
    step = build_step([(1, 90), (1, 1), (1, 33), (1, 2), (1, 31), (1, 64), (1, 8)])
    torch.testing.assert_close(step.attend(), step.attend(impl="reference"), **TOLERANCE[torch.float32])


def test_padding_of_a_tile_is_bounded() -> None:
    rows = [(1, length) for length in (1, 2, 3, 500, 510, 2000, 2001, 8000)]
    plan = torch_implementation.plan_step(
        (1,) * len(rows), tuple(seq_len for _, seq_len in rows), 16, 1 << 20, torch.device("cpu")
    )
    lens_by_tile = [[rows[row][1] for row in tile.rows.tolist()] for tile in plan.decode_tiles]
    assert sorted(length for lens in lens_by_tile for length in lens) == [length for _, length in rows]
    for lens in lens_by_tile:
        own_pages = sum(-(-length // 16) for length in lens)
        assert len(lens) * -(-max(lens) // 16) <= own_pages * 1.25 + torch_implementation.SLACK_PAGES
    assert len(lens_by_tile) < len(rows)


@pytest.mark.parametrize("options", [{}, OPTIONS["all"]], ids=["plain", "options"])
@pytest.mark.parametrize("rows", [DECODES, MIXED], ids=["decodes", "mixed"])
def test_a_row_does_not_depend_on_its_batch(rows: list[tuple[int, int]], options: dict[str, Any]) -> None:
    step, options = build_step(rows), for_heads(options)
    together = step.attend(**options)
    alone = torch.cat([step.attend(rows=[row], **options) for row in range(len(rows))])
    torch.testing.assert_close(together, alone, rtol=1e-6, atol=1e-6)


def test_the_last_query_of_a_chunk_equals_a_decode() -> None:
    step = build_step([(6, 11)])
    decode = Step(step.query[5:], step.kv_cache, step.block_tables, (1,), (11,))
    torch.testing.assert_close(step.attend()[5:], decode.attend(), rtol=1e-6, atol=1e-6)


def test_lengths_and_shapes_that_disagree_are_named() -> None:
    step = build_step([(2, 5), (1, 3)])
    with pytest.raises(ValueError, match="row 1 has 4 queries, 3 keys"):
        Step(step.query, step.kv_cache, step.block_tables, (2, 4), (5, 3)).attend(impl="torch", rows=[0, 1])
    with pytest.raises(ValueError, match="row 0 has 2 queries, 99 keys and blocks for 12"):
        Step(step.query, step.kv_cache, step.block_tables, (2, 1), (99, 3)).attend()
    with pytest.raises(ValueError, match="row 0 has 0 queries"):
        Step(step.query, step.kv_cache, step.block_tables, (0, 3), (5, 3)).attend()
    with pytest.raises(
        ValueError, match=r"query \[3, 3, 8\] with .* does not fit kv_cache \[4, 2, 2, 4, 8\]"
    ):
        Step(step.query[:, :3], step.kv_cache, step.block_tables, (2, 1), (5, 3)).attend()
    with pytest.raises(ValueError, match="must be a contiguous"):
        Step(step.query, step.kv_cache.transpose(2, 3), step.block_tables, (2, 1), (5, 3)).attend()
    with pytest.raises(ValueError, match=r"block_tables \[1, 3\] with .* must be \[num_rows = 2"):
        attend(step, block_tables=step.block_tables[:1])
    with pytest.raises(ValueError, match=r"query_starts \[2\] must be one longer than seq_lens \[2\]"):
        attend(step, query_starts=torch.tensor([0, 3], dtype=torch.int32))
    with pytest.raises(ValueError, match=r"are \(torch.int64, torch.int32, torch.int32\); they must be"):
        attend(step, block_tables=step.block_tables.long())
    with pytest.raises(ValueError, match="query_lens_list sums to 2, but there are 3 queries"):
        attend(step, query_lens_list=(1, 1), seq_lens_list=(5, 3))
    with pytest.raises(
        ValueError, match="query_lens_list has 2 rows and seq_lens_list 1, but seq_lens has 2"
    ):
        attend(step, query_lens_list=(2, 1), seq_lens_list=(5,))


def attend(step: Step, **changed: object) -> Tensor:
    """Two rows of 2 and 1 queries, 5 and 3 keys, but for what is changed."""
    arguments = {
        "query": step.query,
        "kv_cache": step.cache_of(Step.implementation),
        "block_tables": step.block_tables,
        "query_starts": torch.tensor([0, 2, 3], dtype=torch.int32),
        "seq_lens": torch.tensor([5, 3], dtype=torch.int32),
        "options": AttendOptions(SCALE),
        "impl": Step.implementation,
    }
    return paged_attention(**(arguments | changed))  # type: ignore[arg-type]


def test_unknown_lengths_are_read_from_the_tensors() -> None:
    step = build_step([(2, 5), (1, 3)])
    assert torch.equal(attend(step), step.attend())
    with pytest.raises(ValueError, match="row 1 has 1 queries, 99 keys and blocks for 12"):
        attend(step, seq_lens=torch.tensor([5, 99], dtype=torch.int32))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options_equal_the_reference(options: dict[str, Any], dtype: torch.dtype) -> None:
    step = build_step(MIXED, dtype=dtype)
    options = for_heads(options)
    expected = step.attend(impl="reference", **options)
    assert not torch.equal(expected, step.attend(impl="reference"))
    torch.testing.assert_close(step.attend(**options), expected, **TOLERANCE[dtype])


def test_what_options_mean() -> None:
    """One key has a score of 3, so that all can be computed by hand."""
    step = build_step([(1, 1)], num_heads=1, num_kv_heads=1)
    step.query[:] = step.kv_cache[1, 0, :, 0] * (3 / SCALE / step.kv_cache[1, 0, :, 0].square().sum())
    value = step.kv_cache[1, 1, :, 0]
    for options, score in (
        ({}, 3.0),
        ({"soft_cap": 2.0}, 2 * math.tanh(1.5)),
        ({"alibi": torch.ones(1)}, 3.0),
    ):
        weight = math.exp(score) / (math.exp(1.0) + math.exp(score))
        found = step.attend(sinks=torch.ones(1), **options)
        torch.testing.assert_close(found[0], value * weight, **TOLERANCE[torch.float32])


def test_options_out_of_their_range_are_named() -> None:
    step = build_step([(1, 3)])
    for options, message in (
        ({"window": -1}, "window -1 must be 0 or positive"),
        ({"chunk": -2}, "chunk -2 must be 0 or positive"),
        ({"soft_cap": math.nan}, "soft_cap nan must be 0 or positive"),
        ({"is_causal": False}, "is_causal is False"),
        ({"latent_dim": 4}, "latent_dim 4 is computed by latent_attention only"),
        ({"sinks": torch.ones(3)}, r"sinks \[3\] do not fit query \[1, 4, 8\]"),
        (
            {"alibi": torch.ones(4).double()},
            r"alibi \[4\] of torch\.float64 must be a contiguous \[num_heads\]",
        ),
        ({"sinks": torch.ones(8)[::2]}, r"sinks \[4\] of torch\.float32 must be a contiguous"),
        ({"sinks": torch.ones(4, device="meta")}, "sinks on meta and query on cpu must be on one device"),
    ):
        with pytest.raises(ValueError, match=message):
            step.attend(**options)


@pytest.mark.parametrize(
    "options", [{"window": 4}, {"chunk": 24}, {"window": 4, "chunk": 7, "soft_cap": 3.0}]
)
def test_pages_that_all_queries_have_left_behind_may_be_gone(options: dict[str, Any]) -> None:
    step = build_step([(1, 31), (3, 30)])
    expected = step.attend(**options)
    step.block_tables[:, :6] = 0  # keys 0..23; the earliest query stands at 27
    assert torch.equal(step.attend(**options), expected)


_MIXED_LENS = (1,) * 64 + (700,)


def _model_call(
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    group: int = 4,
    **options: Any,
) -> object:
    """Attend from queries, views of the packed projection, to sequences of 8,192 keys."""
    num_rows, num_heads = len(_MIXED_LENS), group * num_kv_heads
    query = meta(sum(_MIXED_LENS), num_heads + 2 * num_kv_heads, head_dim)[:, :num_heads]
    kv_cache, kv_scales = meta_cache(num_kv_heads, head_dim, dtype)
    return paged_attention(
        query,
        kv_cache,
        meta(num_rows, 512, dtype=torch.int32),
        meta(num_rows + 1, dtype=torch.int32),
        meta(num_rows, dtype=torch.int32),
        AttendOptions(head_dim**-0.5, **options),
        kv_scales=kv_scales,
        query_lens_list=_MIXED_LENS,
        seq_lens_list=(8192,) * num_rows,
        impl="triton",
    )


MODEL_CALLS = {
    "heads of 64": ModelCall(lambda: _model_call(3, 64, group=3)),
    "heads of 80": ModelCall(lambda: _model_call(32, 80, group=1)),
    "heads of 96": ModelCall(lambda: _model_call(8, 96)),
    "heads of 128": ModelCall(lambda: _model_call(8, 128)),
    "heads of 256, window": ModelCall(lambda: _model_call(4, 256, group=2, window=4096)),
    "heads of 256, window, cap": ModelCall(lambda: _model_call(4, 256, group=2, window=4096, soft_cap=50.0)),
    "heads of 64, window, sinks": ModelCall(
        lambda: _model_call(8, 64, group=8, window=128, sinks=meta_float32(64))
    ),
    "heads of 128, chunk": ModelCall(lambda: _model_call(8, 128, group=5, chunk=8192)),
    "heads of 128, alibi": ModelCall(lambda: _model_call(8, 128, alibi=meta_float32(32))),
    "int8": ModelCall(lambda: _model_call(8, 128, torch.int8)),
    "float8, heads of 256, window": ModelCall(
        lambda: _model_call(4, 256, torch.float8_e4m3fn, group=2, window=4096)
    ),
}


def launch_small(draw: SmallOperands) -> None:
    num_heads, head_dim = draw.heads_of_query, draw.head_dim
    per_head = torch.rand(2, num_heads, device=draw.device)
    every = AttendOptions(
        head_dim**-0.5, window=20, chunk=24, soft_cap=9.0, sinks=per_head[0], alibi=per_head[1]
    )
    steps = (((1, 1, 1), (1, 17, 50)), ((20,), (20,)), ((1, 19, 1), (33, 40, 3)))
    for dtype, options, (query_lens, seq_lens) in product(
        draw.kv_dtypes, (AttendOptions(head_dim**-0.5), every), steps
    ):
        cache, scales = draw.cache(dtype)
        packed = draw.normal(sum(query_lens), num_heads + 2 * draw.heads_of_key, head_dim)
        paged_attention(
            packed[:, :num_heads],
            cache,
            torch.randint(1, draw.num_blocks, (len(seq_lens), 4), device=draw.device).int(),
            draw.tensor([0, *query_lens]).cumsum(0).int(),
            draw.tensor(seq_lens).int(),
            options,
            kv_scales=scales,
            query_lens_list=query_lens,
            seq_lens_list=seq_lens,
            impl="triton",
        )
