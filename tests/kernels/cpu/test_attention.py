"""The native kernel where it differs from plain torch: spans, panels, tiles and pieces, on every instruction set."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.ops.test_paged_attention import (
    ALIBI,
    SCALE,
    SINKS,
    TOLERANCE,
    Step,
    build_step,
    for_heads,
)
from triptych_kernels.attend_options import AttendOptions
from triptych_kernels.cpu.attention import paged_attention as native_paged_attention
from triptych_kernels.cpu.library import forced_isa, use_threads
from triptych_kernels.cpu.program import record
from triptych_kernels.cpu.recording import NotRecordable
from triptych_kernels.ops import paged_attention
from triptych_kernels.registry import find_impl
from triptych_kernels.torch.attention import paged_attention as torch_paged_attention

pytestmark = pytest.mark.usefixtures("each_isa")

AROUND_A_SPAN = [(1, 1), (1, 15), (1, 33), (1, 255), (1, 256), (1, 257), (3, 258), (1, 600)]
"""Queries and keys of each row; a span is 256 keys."""


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill memory with NaN, so that values that a kernel does not write show."""
    empty = torch.empty

    def empty_with_nan(*args: object, **kwargs: object) -> Tensor:
        tensor: Tensor = empty(*args, **kwargs)  # type: ignore[call-overload]
        return tensor.fill_(torch.nan) if tensor.is_floating_point() and not tensor.is_meta else tensor

    monkeypatch.setattr(torch, "empty", empty_with_nan)


OPTIONS: dict[str, dict[str, Any]] = {
    "window": {"window": 40},
    "window of a span": {"window": 256},
    "window beyond a span": {"window": 300},
    "chunk": {"chunk": 100},
    "chunk beyond a span": {"chunk": 270},
    "cap": {"soft_cap": 50.0},
    "small cap": {"soft_cap": 0.5},
    "sinks": {"sinks": SINKS},
    "alibi": {"alibi": ALIBI},
    "sinks in windows": {"window": 70, "sinks": SINKS},
    "all": {"window": 300, "chunk": 270, "soft_cap": 4.0, "sinks": SINKS, "alibi": ALIBI},
}
"""As in test_paged_attention, of rows with several spans."""


def assert_equals_reference(step: Step, tolerance: dict[str, float], **options: Any) -> None:
    """The reference is slow; plain torch in float64, which test_paged_attention holds against it, is not."""
    exact = step.in_float64().attend(impl="torch", **options)
    out = step.attend(impl="cpu", **options)
    assert out.dtype == step.query.dtype
    torch.testing.assert_close(out.double(), exact, **tolerance)


@pytest.mark.parametrize("head_dim", [1, 8, 24, 33, 64, 80, 96, 128, 200, 256, 264])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_every_head_size_equals_the_reference(head_dim: int, dtype: torch.dtype) -> None:
    step = build_step(AROUND_A_SPAN, block_size=16, head_dim=head_dim, dtype=dtype)
    assert_equals_reference(step, TOLERANCE[dtype])


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (9, 3), (7, 1), (26, 2), (100, 1)])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_every_grouping_of_heads_equals_the_reference(
    num_heads: int, num_kv_heads: int, dtype: torch.dtype
) -> None:
    step = build_step(
        [*AROUND_A_SPAN, (40, 300)], num_heads=num_heads, num_kv_heads=num_kv_heads, dtype=dtype
    )
    assert_equals_reference(step, TOLERANCE[dtype])


@pytest.mark.parametrize("cache_dtype", TOLERANCE)
@pytest.mark.parametrize("window", [0, 40, 300])
@pytest.mark.parametrize("block_size", [1, 3, 8, 16, 33, 48, 64, 256])
def test_every_block_size_equals_the_reference(
    block_size: int, window: int, cache_dtype: torch.dtype
) -> None:
    rows = [*AROUND_A_SPAN, (40, 300)]
    step = build_step(rows, block_size=block_size, head_dim=16, cache_dtype=cache_dtype)
    assert_equals_reference(step, TOLERANCE[torch.float32], window=window)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("cache_dtype", TOLERANCE)
def test_query_and_cache_may_differ_in_precision(dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    step = build_step(AROUND_A_SPAN, head_dim=64, dtype=dtype, cache_dtype=cache_dtype)
    assert_equals_reference(step, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options_equal_the_reference(options: dict[str, Any], dtype: torch.dtype) -> None:
    step = build_step([*AROUND_A_SPAN, (90, 700)], num_heads=6, head_dim=16, dtype=dtype)
    assert_equals_reference(step, TOLERANCE[dtype], **for_heads(options, 6))


@pytest.mark.parametrize("scale", [1e-4, 1e-2, 1.0, 1e2, 1e30])
def test_scores_of_any_size_are_capped(scale: float) -> None:
    step = build_step([*AROUND_A_SPAN, (90, 700)], head_dim=16)
    step.query *= scale
    assert_equals_reference(step, TOLERANCE[torch.float32], soft_cap=30.0)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("cache_dtype", "flawed"),
    [(None, "query"), (None, "key"), (torch.int8, "query"), (torch.int8, "scale")],
)
@pytest.mark.parametrize("options", [{}, OPTIONS["all"]], ids=["plain", "options"])
def test_nan_shows_wherever_it_is_seen(
    options: dict[str, Any], flawed: str, cache_dtype: torch.dtype | None, dtype: torch.dtype
) -> None:
    rows = [(1, 40), (3, 258)]
    step = build_step(rows, block_size=16, head_dim=24, dtype=dtype, cache_dtype=cache_dtype)
    block = step.block_tables[1, 0]
    if flawed == "query":
        step.query[2, 1, 5] = torch.nan
    elif flawed == "key":
        step.kv_cache[block, 0, 1, 3, 5] = torch.nan
    else:
        assert step.kv_scales is not None
        step.kv_scales[block, 0, 1, 3] = torch.nan
    options = for_heads(options)
    expected = step.attend(impl="reference", **options).isnan()
    assert expected.any()
    assert torch.equal(step.attend(impl="cpu", **options).isnan(), expected)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("options", [{}, {"window": 70}, {"window": 300}, {"chunk": 100}, OPTIONS["all"]])
def test_a_query_has_the_same_bits_in_any_batch_and_chunk(
    dtype: torch.dtype, options: dict[str, Any]
) -> None:
    rows = [(600, 600), (1, 257), (70, 530), (1, 1400), (1, 5)]
    step = build_step(rows, block_size=16, head_dim=80, num_heads=6, num_kv_heads=2, dtype=dtype)
    options = for_heads(options, 6)
    together = step.attend(impl="cpu", **options)
    start = 0
    for row, (query_len, seq_len) in enumerate(rows):
        own = together[start : start + query_len]
        for num_threads in (1, 2, 40):
            use_threads(num_threads)
            assert torch.equal(step.attend([row], impl="cpu", **options), own)
        for first, length in (
            (0, 1),
            (query_len - 1, 1),
            (query_len // 2, 37),
            (query_len // 3, query_len // 2),
        ):
            length = min(length, query_len - first)
            if length < 1:
                continue
            chunk = Step(
                step.query[start + first : start + first + length],
                step.kv_cache,
                step.block_tables[row : row + 1],
                (length,),
                (seq_len - query_len + first + length,),
            )
            assert torch.equal(chunk.attend(impl="cpu", **options), own[first : first + length])
        start += query_len


def test_bfloat16_is_as_close_to_the_truth_as_plain_torch() -> None:
    step = build_step([(64, 400), (1, 900)], head_dim=64, block_size=16, dtype=torch.bfloat16)
    exact = step.in_float64().attend(impl="torch")
    own, plain = (
        (step.attend(impl=impl).double() - exact).square().mean().sqrt() for impl in ("cpu", "torch")
    )
    assert own <= 1.1 * plain


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_scores_that_lie_far_apart_neither_overflow_nor_vanish(dtype: torch.dtype) -> None:
    step = build_step(AROUND_A_SPAN, head_dim=64, dtype=dtype)
    step.query *= 300
    # a score of 10,000 is a float32 to 1e-3: equal up to what that does to the weights
    tolerance = {torch.float32: {"rtol": 2e-3, "atol": 2e-3}, torch.bfloat16: {"rtol": 2**-6, "atol": 2**-6}}
    assert_equals_reference(step, tolerance[dtype])


def test_queries_may_be_views_of_packed_projections() -> None:
    step = build_step(AROUND_A_SPAN, head_dim=16)
    expected = step.attend(impl="cpu")
    packed = torch.full((len(step.query), 9, 20), torch.nan)
    packed[:, 3:7, 2:18] = step.query
    starts = torch.tensor((0, *step.query_lens)).cumsum(0).int()
    lens = torch.tensor(step.seq_lens, dtype=torch.int32)
    out = paged_attention(
        packed[:, 3:7, 2:18],
        step.cache_of("cpu"),
        step.block_tables,
        starts,
        lens,
        AttendOptions(SCALE),
        impl="cpu",
    )
    assert torch.equal(out, expected)


@pytest.mark.parametrize("options", [{}, OPTIONS["all"]], ids=["plain", "options"])
def test_a_recorded_step_serves_steps_of_any_size(options: dict[str, Any]) -> None:
    options = for_heads(options)
    step = build_step([*AROUND_A_SPAN, (40, 300)], head_dim=16)
    query = torch.zeros(200, 4, 16)
    block_tables = torch.zeros(20, step.block_tables.shape[1] + 3, dtype=torch.int32)
    query_starts, seq_lens = (torch.zeros(size, dtype=torch.int32) for size in (21, 20))
    kv_cache = step.cache_of("cpu")
    program = record(
        lambda recording: (
            paged_attention(
                recording.input(query, count="tokens"),
                kv_cache,
                recording.input(block_tables, count="sequences"),
                recording.input(query_starts, count="sequences"),
                recording.input(seq_lens, count="sequences"),
                AttendOptions(SCALE, **options),
            ),
        )
    )
    for rows in ([8, 0, 3], [2], [7, 6, 5, 8]):
        lens = [step.query_lens[row] for row in rows]
        starts = torch.tensor((0, *step.query_lens)).cumsum(0).tolist()
        query[: sum(lens)] = torch.cat([step.query[starts[row] : starts[row + 1]] for row in rows])
        block_tables[: len(rows), : step.block_tables.shape[1]] = step.block_tables[rows]
        query_starts[: len(rows) + 1] = torch.tensor([0, *lens]).cumsum(0)
        seq_lens[: len(rows)] = torch.tensor([step.seq_lens[row] for row in rows])
        program.run({"tokens": sum(lens), "sequences": len(rows)})
        assert torch.equal(program.outputs[0][: sum(lens)], step.attend(rows, impl="cpu", **options))


def test_what_no_kernel_is_made_for_is_left_to_plain_torch() -> None:
    assert find_impl("paged_attention", torch.empty(1)) is native_paged_attention
    half = torch.empty(1, dtype=torch.float16)
    assert find_impl("paged_attention", half) is torch_paged_attention
    step = build_step([(1, 9)], cache_dtype=torch.float16)
    torch.testing.assert_close(step.attend(impl="cpu"), step.attend(impl="torch"), rtol=0, atol=0)


def test_a_cache_that_no_kernel_reads_is_not_recordable() -> None:
    step = build_step([(1, 9)], cache_dtype=torch.float16)
    query, layout = step.query, (step.block_tables, torch.tensor([0, 1]).int(), torch.tensor([9]).int())
    with pytest.raises(NotRecordable, match=r"no native kernel reads a cache of torch\.float16"):
        record(
            lambda recording: (
                paged_attention(
                    recording.input(query, count="tokens"),
                    step.kv_cache,
                    *(recording.input(tensor, count="sequences") for tensor in layout),
                    AttendOptions(SCALE),
                ),
            )
        )


def test_without_a_build_plain_torch_serves() -> None:
    with forced_isa(""):
        assert find_impl("paged_attention", torch.empty(1)) is torch_paged_attention
