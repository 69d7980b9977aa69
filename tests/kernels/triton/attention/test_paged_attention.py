"""The Triton paged_attention against float64, over a cache that is NaN wherever nothing was written."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.poison import poisoned_allocations
from triptych_kernels.attend_options import AttendOptions
from triptych_kernels.ops import paged_attention
from triptych_kernels.triton.attention import decode as paged_attention_decode
from triptych_kernels.triton.attention import prefill as paged_attention_prefill
from triptych_kernels.triton.attention.paged_attention import paged_attention as triton_paged_attention

# numpy's, of rows of a tile that have no query and are not stored
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

SCALE = 0.2

# float32: sums of hundreds of products. Of the others the weights are rounded before the sum over values of size 1,
# then the result: 2^-11 and 2^-8 each.
TOLERANCE: dict[torch.dtype, dict[str, Any]] = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.float16: {"rtol": 2**-9, "atol": 2**-9},
    torch.bfloat16: {"rtol": 2**-6, "atol": 2**-6},
}


@dataclass(frozen=True, slots=True)
class Step:
    query: Tensor
    kv_cache: Tensor
    kv_scales: Tensor | None
    block_tables: Tensor
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]

    def attend(
        self, impl: str = "triton", *, seq_lens_list: tuple[int, ...] | None = None, **options: Any
    ) -> Tensor:
        """The result; every allocation of the launcher holds NaN at first.

        Args:
            options: `AttendOptions` besides the scale.
        """
        with poisoned_allocations():
            return paged_attention(
                *self.operands(),
                AttendOptions(SCALE, **{name: self.on_device(value) for name, value in options.items()}),
                kv_scales=self.kv_scales,
                impl=impl,
                query_lens_list=self.query_lens,
                seq_lens_list=seq_lens_list or self.seq_lens,
            )

    def on_device(self, value: Any) -> Any:
        return value.to(self.query.device) if isinstance(value, Tensor) else value

    def operands(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        starts = torch.tensor((0, *self.query_lens)).cumsum(0).int()
        seq_lens = torch.tensor(self.seq_lens, dtype=torch.int32)
        device = self.query.device
        return self.query, self.kv_cache, self.block_tables, starts.to(device), seq_lens.to(device)

    def alone(self, row: int) -> Step:
        """The same row in a step of its own."""
        start = sum(self.query_lens[:row])
        return replace(
            self,
            query=self.query[start : start + self.query_lens[row]],
            block_tables=self.block_tables[row : row + 1],
            query_lens=self.query_lens[row : row + 1],
            seq_lens=self.seq_lens[row : row + 1],
        )

    def on_cpu(self) -> Step:
        return replace(
            self,
            query=self.query.cpu(),
            kv_cache=self.kv_cache.cpu(),
            kv_scales=None if self.kv_scales is None else self.kv_scales.cpu(),
            block_tables=self.block_tables.cpu(),
        )

    def assert_attends_like_the_reference(self, **options: Any) -> None:
        expected = self.on_cpu().attend("reference", **options)  # which asks for every key by itself
        torch.testing.assert_close(
            self.attend(**options).cpu(), expected, **TOLERANCE[self.query.dtype], equal_nan=True
        )


def build_step(
    rows: list[tuple[int, int]],
    dtype: torch.dtype,
    device: torch.device,
    *,
    block_size: int = 16,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    cache_dtype: torch.dtype | None = None,
) -> Step:
    """Rows of (query_len, seq_len) over shuffled blocks, and queries that are views of something larger."""
    torch.manual_seed(0)
    query_lens, seq_lens = zip(*rows, strict=True)
    num_blocks_of = [-(-seq_len // block_size) for seq_len in seq_lens]
    block_ids = iter((torch.randperm(sum(num_blocks_of)) + 1).tolist())
    # entries past a row's last block lead outside the cache
    block_tables = torch.full((len(rows), max(num_blocks_of) + 1), 2**30, dtype=torch.int32)
    shape = (sum(num_blocks_of) + 1, 2, num_kv_heads, block_size, head_dim)
    elements = torch.full(shape, torch.nan)
    scales = torch.full(shape[:4], torch.nan)
    for row, (num_blocks, seq_len) in enumerate(zip(num_blocks_of, seq_lens, strict=True)):
        for index in range(num_blocks):
            block_tables[row, index] = block_id = next(block_ids)
            used = min(block_size, seq_len - index * block_size)
            elements[block_id, :, :, :used] = torch.randn(2, num_kv_heads, used, head_dim)
            scales[block_id, :, :, :used] = torch.rand(2, num_kv_heads, used) + 0.5
    query = torch.randn(sum(query_lens), num_heads + 2 * num_kv_heads, head_dim)[:, :num_heads]
    quantized = cache_dtype in (torch.int8, torch.float8_e4m3fn)
    if cache_dtype == torch.int8:
        elements, scales = elements.nan_to_num(127 / 40) * 40, scales / 40
    return Step(
        query.to(device=device, dtype=dtype),
        elements.to(cache_dtype or dtype).to(device),
        scales.to(device) if quantized else None,
        block_tables.to(device),
        query_lens,
        seq_lens,
    )


SINKS, ALIBI = torch.tensor([0.5, -torch.inf, 60.0, -3.0]), torch.tensor([0.25, 0.0, 0.03, -0.1])
OPTIONS: dict[str, dict[str, Any]] = {
    "chunk": {"chunk": 40},
    "window in chunks": {"window": 20, "chunk": 65},
    "cap": {"soft_cap": 1.5},
    "sinks": {"sinks": SINKS},
    "alibi": {"alibi": ALIBI},
    "sinks in windows": {"sinks": SINKS, "window": 33},
    "all": {"window": 50, "chunk": 70, "soft_cap": 3.0, "sinks": SINKS, "alibi": ALIBI},
}
"""`AttendOptions` besides the scale, for 4 heads."""
DECODES = [(1, 1), (1, 15), (1, 16), (1, 17), (1, 130)]
CHUNKS = [(2, 2), (5, 9), (40, 40), (33, 90), (7, 64)]
MIXED = [(1, 40), (5, 9), (1, 1), (35, 100), (1, 129), (1, 16), (2, 130)]
ROWS = {"decodes": DECODES, "chunks": CHUNKS, "mixed": MIXED}


@pytest.fixture
def half_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of most models, if the device computes it; tiles are cut for it."""
    return torch.float16 if device.type == "cpu" else torch.bfloat16


@pytest.fixture
def many_sms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough multiprocessors that a row is cut at every 256 keys."""
    monkeypatch.setattr(paged_attention_decode, "num_sms", lambda device: 8)


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_attends_like_the_reference(
    rows: list[tuple[int, int]], dtype: torch.dtype, device: torch.device
) -> None:
    build_step(rows, dtype, device).assert_attends_like_the_reference()


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 2), (6, 2), (8, 1), (20, 1)])
def test_any_grouping_of_heads(
    num_heads: int, num_kv_heads: int, dtype: torch.dtype, device: torch.device
) -> None:
    step = build_step(
        [(1, 40), (30, 50), (1, 3)], dtype, device, num_heads=num_heads, num_kv_heads=num_kv_heads
    )
    step.assert_attends_like_the_reference()


@pytest.mark.parametrize("head_dim", [8, 80, 96, 128, 256])
def test_any_size_of_head(head_dim: int, half_dtype: torch.dtype, device: torch.device) -> None:
    build_step(
        [(1, 70), (20, 70), (1, 3)], half_dtype, device, head_dim=head_dim
    ).assert_attends_like_the_reference()


@pytest.mark.parametrize("block_size", [32, 64, 128])
def test_any_size_of_block(block_size: int, half_dtype: torch.dtype, device: torch.device) -> None:
    step = build_step(
        [(1, 200), (20, 150), (1, block_size)], half_dtype, device, num_kv_heads=1, block_size=block_size
    )
    step.assert_attends_like_the_reference()


@pytest.mark.parametrize("window", [1, 16, 65])
def test_windows(window: int, half_dtype: torch.dtype, device: torch.device) -> None:
    step = build_step([*MIXED, (40, 200)], half_dtype, device, num_heads=3, num_kv_heads=1)
    step.assert_attends_like_the_reference(window=window)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options(options: dict[str, Any], half_dtype: torch.dtype, device: torch.device) -> None:
    step = build_step([*MIXED, (40, 200), (1, 600)], half_dtype, device)
    step.assert_attends_like_the_reference(**options)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_scores_of_any_size_are_capped(scale: float, device: torch.device) -> None:
    step = build_step([(1, 70), (20, 70)], torch.float32, device)
    step.query.mul_(scale)
    step.assert_attends_like_the_reference(soft_cap=30.0)


def test_what_stands_before_all_windows_has_no_influence(
    half_dtype: torch.dtype, device: torch.device
) -> None:
    step = build_step([(1, 200), (20, 200)], half_dtype, device)
    expected = step.attend(window=32)
    step.kv_cache[step.block_tables[:, : (200 - 20 - 32) // 16].long()] = torch.nan
    step.block_tables[:, : (200 - 20 - 32) // 16] = 0
    assert torch.equal(step.attend(window=32), expected)


@pytest.mark.parametrize("cache_dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize(("options", "head_dim"), [({}, 64), ({"window": 33}, 80), (OPTIONS["all"], 64)])
def test_8_bit_caches(
    cache_dtype: torch.dtype,
    options: dict[str, Any],
    head_dim: int,
    half_dtype: torch.dtype,
    device: torch.device,
) -> None:
    step = build_step(
        [*MIXED, (1, 200)], half_dtype, device, num_kv_heads=1, cache_dtype=cache_dtype, head_dim=head_dim
    )
    step.assert_attends_like_the_reference(**options)


@pytest.mark.thorough
@pytest.mark.parametrize("half", [0, 1], ids=["key", "value"])
def test_a_scale_of_nan_is_seen_by_those_who_attend_to_it(
    half: int, half_dtype: torch.dtype, device: torch.device, many_sms: None
) -> None:
    step = build_step([(20, 40), (1, 270), (1, 270)], half_dtype, device, cache_dtype=torch.int8)
    assert step.kv_scales is not None
    for row, position in ((0, 30), (1, 20)):
        step.kv_scales[step.block_tables[row, position // 16], half, 1, position % 16] = torch.nan
    step.assert_attends_like_the_reference()
    unseen = step.attend(window=8)[20:]  # the decodes have left it behind
    assert not unseen.isnan().any()
    seen = step.attend()[:, 2:]  # by the query heads of the second key head
    assert seen[10:21].isnan().all()
    assert not seen[:10].isnan().any()
    assert not seen[21:].isnan().any()


def test_a_cache_of_another_dtype_is_read_like_the_query(device: torch.device) -> None:
    step = build_step(MIXED, torch.float32, device, cache_dtype=torch.float16)
    step.assert_attends_like_the_reference()


@pytest.mark.parametrize(
    "options", [{}, {"window": 257}, {"chunk": 450}, {"sinks": SINKS[2:], "alibi": ALIBI[2:]}]
)
def test_splits_leave_no_seam(
    options: dict[str, Any], half_dtype: torch.dtype, device: torch.device, many_sms: None
) -> None:
    step = build_step(
        [(1, 255), (1, 256), (1, 257), (1, 512), (1, 513), (1, 700)],
        half_dtype,
        device,
        num_heads=2,
        num_kv_heads=1,
    )
    step.assert_attends_like_the_reference(**options)


def test_splits_of_long_rows_do_not_exceed_the_device(
    half_dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged_attention_decode, "num_sms", lambda device: 3)
    build_step([(1, 1700), (1, 30)], half_dtype, device, num_kv_heads=1).assert_attends_like_the_reference()


@pytest.mark.parametrize("options", [{}, {"window": 300}, OPTIONS["all"]])
def test_a_row_has_the_same_bits_in_any_batch(
    options: dict[str, Any], half_dtype: torch.dtype, device: torch.device, many_sms: None
) -> None:
    step = build_step(
        [(1, 600), (30, 90), (1, 257), (1, 31), (5, 300), (1, 256)], half_dtype, device, num_kv_heads=1
    )
    alone = [step.alone(row).attend(**options) for row in range(len(step.seq_lens))]
    assert torch.equal(step.attend(**options), torch.cat(alone))


LONG_CHUNKS = [(3, 200), (1, 150), (40, 130), (2, 64), (5, 7)]
"""Chunks of 1 to 4 parts of 64 keys; the first tiles of the third row have fewer parts than the last."""


@pytest.fixture
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_attention_prefill, "PART_KEYS", 64)


@pytest.fixture(params=[1 << 28, 1], ids=["at once", "in rounds"])
def rounds(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough memory for the sums of all parts, and for those of one."""
    monkeypatch.setattr(paged_attention_prefill, "MAX_STATE_BYTES", request.param)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": 70},
        {"window": 3},
        {"chunk": 100},
        {"sinks": SINKS, "alibi": ALIBI},
        OPTIONS["all"],
        pytest.param({"window": 129}, marks=pytest.mark.slow),
    ],
)
def test_parts_leave_no_seam(
    options: dict[str, Any],
    half_dtype: torch.dtype,
    device: torch.device,
    short_parts: None,
    rounds: None,
) -> None:
    step = build_step(LONG_CHUNKS, half_dtype, device)
    step.assert_attends_like_the_reference(**options)


@pytest.mark.parametrize("cache_dtype", [None, torch.int8])
def test_parts_of_other_caches_leave_no_seam(
    cache_dtype: torch.dtype | None, device: torch.device, short_parts: None
) -> None:
    step = build_step(
        [(2, 200), (20, 70)],
        torch.float32,
        device,
        num_heads=3,
        num_kv_heads=1,
        cache_dtype=cache_dtype,
        head_dim=80,
    )
    step.assert_attends_like_the_reference()


@pytest.mark.thorough
@pytest.mark.parametrize("window", [pytest.param(0, marks=pytest.mark.slow), 70])
def test_a_query_after_many_parts_has_the_same_bits_in_any_batch(
    window: int,
    half_dtype: torch.dtype,
    device: torch.device,
    short_parts: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = build_step(LONG_CHUNKS, half_dtype, device)
    together = step.attend(window=window)
    alone = [step.alone(row).attend(window=window) for row in range(len(step.seq_lens))]
    assert torch.equal(torch.cat(alone), together)
    for num_bytes in (1, 3 << 20):  # rounds of one part and of some
        monkeypatch.setattr(paged_attention_prefill, "MAX_STATE_BYTES", num_bytes)
        assert torch.equal(step.attend(window=window), together)


def test_rows_of_one_part_are_not_folded(
    half_dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged_attention_prefill, "_fold_parts", None)
    build_step([(20, 300), (1, 40)], half_dtype, device).assert_attends_like_the_reference()


@pytest.mark.thorough
@pytest.mark.parametrize("options", [{}, {"soft_cap": 3.0, "sinks": SINKS, "alibi": ALIBI}])
def test_a_flaw_in_one_part_reaches_all_that_see_it(
    options: dict[str, Any], half_dtype: torch.dtype, device: torch.device, short_parts: None
) -> None:
    step = build_step([(3, 200), (3, 200)], half_dtype, device)
    step.kv_cache[step.block_tables[0, 5], 0, 1, 2] = torch.nan
    assert step.attend(**options)[:3, 2:].isnan().all()
    step.assert_attends_like_the_reference(**options)


def test_lengths_of_decodes_are_read_from_tensors_alone(
    half_dtype: torch.dtype, device: torch.device, many_sms: None
) -> None:
    step = build_step([(1, 600), (1, 31), (1, 257)], half_dtype, device, num_kv_heads=1)
    capacity = step.block_tables.shape[1] * 16
    assert torch.equal(step.attend(seq_lens_list=(capacity,) * 3), step.attend())


def test_chunks_give_what_the_whole_prompt_gives(half_dtype: torch.dtype, device: torch.device) -> None:
    whole = build_step([(150, 150)], half_dtype, device, num_kv_heads=1)
    bounds = (0, 1, 70, 134, 150)
    chunks = [
        replace(whole, query=whole.query[start:end], query_lens=(end - start,), seq_lens=(end,)).attend()
        for start, end in pairwise(bounds)
    ]
    torch.testing.assert_close(torch.cat(chunks), whole.attend(), **TOLERANCE[half_dtype])


def test_what_the_kernels_do_not_cover_is_named(device: torch.device) -> None:
    with pytest.raises(ValueError, match="head_dim is at most 256"):
        build_step([(1, 3)], torch.float32, device, head_dim=320).attend()
    step = build_step([(1, 3)], torch.float32, device)
    lens: dict[str, Any] = {"query_lens_list": (1,), "seq_lens_list": (3,)}
    with pytest.raises(ValueError, match=r"scale 0\.0 must be positive"):
        triton_paged_attention(*step.operands(), AttendOptions(0.0), kv_scales=None, **lens)
