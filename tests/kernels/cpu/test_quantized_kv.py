"""Caches that hold keys and values in 8 bits: what is written, what is read, and that flaws stay visible."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.cpu.test_attention import AROUND_A_SPAN
from tests.kernels.operands import keys_as_rows
from tests.kernels.ops.test_paged_attention import (
    CHUNKS,
    DECODES,
    MIXED,
    OPTIONS,
    Step,
    build_step,
    for_heads,
)
from triptych_kernels.attend_options import AttendOptions
from triptych_kernels.cpu.attention import serves
from triptych_kernels.cpu.library import forced_isa, usable_isas, use_threads
from triptych_kernels.cpu.program import record
from triptych_kernels.kv_scales import LARGEST_ELEMENT
from triptych_kernels.ops import paged_attention, write_kv

# Queries and weights are rounded to 15 bits of the largest, or with the result to bfloat16.
TOLERANCE = {torch.float32: {"rtol": 2e-3, "atol": 2e-3}, torch.bfloat16: {"rtol": 2**-6, "atol": 2**-7}}
QUANTIZED = tuple(LARGEST_ELEMENT)
NAN, INF = float("nan"), float("inf")


@dataclass(frozen=True)
class Implementation:
    name: str
    isa: str

    def serves(self, cache_dtype: torch.dtype) -> bool:
        return self.name == "torch" or cache_dtype == torch.int8


@pytest.fixture(params=["torch", *usable_isas()])
def implementation(request: pytest.FixtureRequest) -> Iterator[Implementation]:
    is_plain = request.param == "torch"
    with forced_isa("" if is_plain else request.param):
        yield Implementation("torch" if is_plain else "cpu", request.param)
        use_threads(1)


def empty_cache(
    num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype
) -> list[Tensor]:
    """Blocks and scales whose content shows where nothing is written."""
    blocks = torch.full((num_blocks, 2, num_kv_heads, block_size, head_dim), 99.0).to(dtype)
    return [blocks, torch.full(blocks.shape[:4], 777.0)]


def quantize(vectors: Tensor, cache_dtype: torch.dtype, impl: str) -> tuple[Tensor, Tensor]:
    """Elements [n, head_dim] and scales [n] of vectors [n, head_dim], as they stand in a cache."""
    blocks, scales = empty_cache(1, 1, len(vectors), vectors.shape[1], cache_dtype)
    key = vectors[:, None]
    write_kv(key, key, blocks, torch.arange(len(vectors)), kv_scales=scales, impl=impl)
    same = [
        half.view(torch.uint8) if half.dtype not in (torch.float32,) else half for half in (blocks, scales)
    ]
    if impl == "cpu" and serves(blocks):
        same[0] = keys_as_rows(same[0])
    for tensor in same:
        torch.testing.assert_close(tensor[:, 0], tensor[:, 1], rtol=0, atol=0, equal_nan=True)
    return blocks[0, 1, 0], scales[0, 1, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cache_dtype", QUANTIZED)
@pytest.mark.parametrize(
    ("num_tokens", "block_size", "head_dim"), [(0, 4, 8), (17, 1, 33), (60, 16, 64), (40, 5, 96)]
)
def test_writes_what_the_reference_writes_to_the_bit(
    implementation: Implementation,
    num_tokens: int,
    block_size: int,
    head_dim: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
) -> None:
    torch.manual_seed(0)
    packed = (torch.randn(num_tokens, 6, head_dim) * torch.logspace(-3, 3, 6)[:, None]).to(dtype)
    key, value = packed[:, 1:4], packed[:, 3:]  # views, as the packed projection gives them
    num_blocks = 3 + num_tokens // block_size
    slot_mapping = torch.randperm((num_blocks - 1) * block_size)[:num_tokens] + block_size
    slot_mapping[::4] = -1
    found, expected = (empty_cache(num_blocks, 3, block_size, head_dim, cache_dtype) for _ in range(2))
    write_kv(key, value, expected[0], slot_mapping, kv_scales=expected[1], impl="reference")
    write_kv(key, value, found[0], slot_mapping, kv_scales=found[1], impl=implementation.name)
    if implementation.name == "cpu" and dtype != torch.float16 and serves(found[0]):
        found[0] = keys_as_rows(found[0])
    assert torch.equal(found[0].view(torch.uint8), expected[0].view(torch.uint8))
    assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize(
    ("cache_dtype", "largest_error"), [(torch.int8, 0.5 / 127), (torch.float8_e4m3fn, 16 / 448)]
)
def test_no_element_is_off_by_more_than_half_a_step(
    implementation: Implementation, cache_dtype: torch.dtype, largest_error: float
) -> None:
    torch.manual_seed(0)
    vectors = torch.randn(200, 80) * torch.logspace(-30, 30, 200)[:, None]
    elements, scales = quantize(vectors, cache_dtype, implementation.name)
    error = (elements.double() * scales.double()[:, None] - vectors).abs().amax(dim=-1)
    assert (error <= vectors.double().abs().amax(dim=-1) * largest_error * 1.0001).all()
    assert (elements.float().abs().amax(dim=-1) == LARGEST_ELEMENT[cache_dtype]).all()


def test_ties_go_to_even(implementation: Implementation) -> None:
    vectors = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5, *range(20)]])
    elements, scales = quantize(vectors, torch.int8, implementation.name)
    assert scales.item() == 1.0
    assert elements[0].tolist() == [127, 0, 2, 2, 0, -2, -2, 126, *range(20)]


@pytest.mark.parametrize("cache_dtype", QUANTIZED)
@pytest.mark.parametrize("place", [0, 7, 16, 36])
def test_zeros_stay_zeros_and_what_is_not_finite_has_no_scale(
    implementation: Implementation, cache_dtype: torch.dtype, place: int
) -> None:
    tiny = torch.finfo(torch.float32).smallest_normal
    vectors = torch.ones(6, 37)
    vectors[0] = 0.0
    vectors[1], vectors[2, place] = tiny * 2**-22, -tiny  # the first scale is 0, the second has few bits
    for row, flaw in ((3, NAN), (4, INF), (5, -INF)):
        vectors[row, place] = flaw
    elements, scales = quantize(vectors, cache_dtype, implementation.name)
    assert scales.isnan().tolist() == [False] * 3 + [True] * 3
    assert not elements[[0, 1, 3, 4, 5]].float().any()
    assert not scales[:2].any()
    assert (elements[2] != 0).sum() == 36


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("cache_dtype", QUANTIZED)
@pytest.mark.parametrize("rows", [DECODES, CHUNKS, MIXED], ids=["decodes", "chunks", "mixed"])
@pytest.mark.parametrize("options", [{}, OPTIONS["window"], OPTIONS["all"]], ids=["plain", "window", "all"])
def test_attends_like_the_reference(
    implementation: Implementation,
    rows: list[tuple[int, int]],
    options: dict[str, Any],
    cache_dtype: torch.dtype,
    dtype: torch.dtype,
) -> None:
    if not implementation.serves(cache_dtype):
        pytest.skip("the native kernels leave it to plain torch")
    step = build_step(rows, dtype=dtype, cache_dtype=cache_dtype)
    options = for_heads(options)
    expected = step.attend(impl="reference", **options)
    found = step.attend(impl=implementation.name, **options)
    torch.testing.assert_close(found, expected, **TOLERANCE[dtype])


def assert_reads_what_it_means(step: Step, **options: Any) -> None:
    exact = step.in_float64().attend(impl="torch", **options)
    found = step.attend(impl="cpu", **options)
    torch.testing.assert_close(found.double(), exact, **TOLERANCE[step.query.dtype])


@pytest.mark.parametrize("head_dim", [1, 24, 64, 80, 96, 128, 256, 700])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_every_head_size(each_isa: None, head_dim: int, dtype: torch.dtype) -> None:
    step = build_step(AROUND_A_SPAN, block_size=16, head_dim=head_dim, dtype=dtype, cache_dtype=torch.int8)
    step.query *= (8 / head_dim) ** 0.5  # scores of the same size in heads of every size
    assert_reads_what_it_means(step)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "block_size"),
    [(1, 1, 1), (9, 3, 33), (7, 1, 16), (4, 2, 64), (100, 1, 256)],
)
@pytest.mark.parametrize("options", [{}, {"window": 40}, {"window": 300}, OPTIONS["all"]])
def test_every_grouping_block_size_and_options(
    each_isa: None, num_heads: int, num_kv_heads: int, block_size: int, options: dict[str, Any]
) -> None:
    rows = [*AROUND_A_SPAN, (40, 300)]
    step = build_step(
        rows, num_heads=num_heads, num_kv_heads=num_kv_heads, block_size=block_size, cache_dtype=torch.int8
    )
    assert_reads_what_it_means(step, **for_heads(options, num_heads))


def test_the_largest_sums_fit_their_integers(each_isa: None) -> None:
    step = build_step([(1, 256), (3, 256)], head_dim=256, block_size=16, cache_dtype=torch.int8)
    step.query.fill_(0.01)
    assert step.kv_scales is not None
    step.kv_cache.fill_(127)
    step.kv_scales.fill_(2 / 127)
    torch.testing.assert_close(step.attend(impl="cpu"), torch.full_like(step.query, 2.0), rtol=1e-4, atol=0)


def test_vectors_of_very_different_size_share_a_step(each_isa: None) -> None:
    step = build_step(AROUND_A_SPAN, head_dim=64, cache_dtype=torch.int8)
    assert step.kv_scales is not None
    step.kv_scales *= torch.logspace(-6, 0, step.kv_scales.shape[-1])
    assert_reads_what_it_means(step)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("options", [{}, {"window": 300}, OPTIONS["all"]])
def test_a_query_has_the_same_bits_in_any_batch_and_chunk(
    each_isa: None, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    rows = [(90, 600), (1, 257), (70, 530), (1, 900)]
    step = build_step(
        rows, block_size=16, head_dim=80, num_heads=6, num_kv_heads=2, dtype=dtype, cache_dtype=torch.int8
    )
    options = for_heads(options, 6)
    together = step.attend(impl="cpu", **options)
    starts = torch.tensor((0, *step.query_lens)).cumsum(0).tolist()
    for row, (query_len, seq_len) in enumerate(rows):
        own = together[starts[row] : starts[row + 1]]
        for num_threads in (1, 2, 40):
            use_threads(num_threads)
            assert torch.equal(step.attend([row], impl="cpu", **options), own)
        for first, length in ((0, 1), (query_len - 1, 1), (query_len // 2, query_len // 3)):
            if length == 0:
                continue
            chunk = replace(
                step,
                query=step.query[starts[row] + first : starts[row] + first + length],
                block_tables=step.block_tables[row : row + 1],
                query_lens=(length,),
                seq_lens=(seq_len - query_len + first + length,),
            )
            assert torch.equal(chunk.attend(impl="cpu", **options), own[first : first + length])


@pytest.mark.parametrize("half", [0, 1], ids=["key", "value"])
@pytest.mark.parametrize("flaw", [NAN, INF])
@pytest.mark.parametrize("num_keys", [1, 37, 300])
def test_a_flawed_key_or_value_affects_only_those_that_see_it(
    implementation: Implementation, half: int, flaw: float, num_keys: int
) -> None:
    torch.manual_seed(0)
    key_value = torch.randn(2, num_keys + 1, 2, 24)
    key_value[half, num_keys - 1, 0, 5] = flaw
    blocks, scales = empty_cache(num_keys // 16 + 2, 2, 16, 24, torch.int8)
    slots = torch.arange(num_keys + 1) + 16
    write_kv(*key_value, blocks, slots, kv_scales=scales, impl=implementation.name)  # type: ignore[misc]
    if implementation.name == "cpu":
        blocks = keys_as_rows(blocks)
    tables = torch.arange(1, len(blocks), dtype=torch.int32)[None].repeat(3, 1)

    def attend(seq_len: int, window: int = 0) -> Tensor:
        step = Step(torch.randn(1, 4, 24), blocks, tables[:1], (1,), (seq_len,), scales)
        return step.attend(impl=implementation.name, window=window)

    seen = attend(num_keys)
    assert seen[:, :2].isnan().all(), "of the head with the flaw"
    assert not seen[:, 2:].isnan().any()
    assert attend(num_keys + 1)[:, :2].isnan().all()
    assert not attend(num_keys + 1, window=1).isnan().any()
    if num_keys > 1:
        assert not attend(num_keys - 1).isnan().any()


@pytest.mark.parametrize("flaw", [NAN, INF])
def test_a_flawed_query_shows(each_isa: None, flaw: float) -> None:
    step = build_step([(1, 40), (2, 50)], head_dim=24, cache_dtype=torch.int8)
    step.query[1, 2, 20] = flaw
    out = step.attend(impl="cpu")
    assert out[1, 2].isnan().all()
    assert out.isnan().sum() == 24


def test_a_recorded_step_writes_and_reads_its_scales(each_isa: None) -> None:
    torch.manual_seed(0)
    caches = [empty_cache(4, 2, 16, 24, torch.int8) for _ in range(2)]
    query, key, value = (torch.randn(5, heads, 24) for heads in (4, 2, 2))
    layout = torch.tensor([[1, 2]]).int(), torch.tensor([0, 5]).int(), torch.tensor([5]).int()
    slots = torch.arange(16, 21)

    def attend(
        query: Tensor, key: Tensor, value: Tensor, slots: Tensor, *layout: Tensor, cache: list[Tensor]
    ) -> Tensor:
        write_kv(key, value, cache[0], slots, kv_scales=cache[1])
        return paged_attention(query, cache[0], *layout, AttendOptions(0.3), kv_scales=cache[1])  # type: ignore[misc]

    program = record(
        lambda recording: (
            attend(
                *(recording.input(tensor, count="tokens") for tensor in (query, key, value, slots)),
                *(recording.input(tensor, count="rows") for tensor in layout),
                cache=caches[0],
            ),
        )
    )
    program.run({"tokens": 5, "rows": 1})
    assert torch.equal(program.outputs[0][:5], attend(query, key, value, slots, *layout, cache=caches[1]))
    assert all(torch.equal(*tensors) for tensors in zip(*caches, strict=True))


def test_wrong_scales_are_named() -> None:
    key, slots = torch.ones(2, 1, 4), torch.tensor([4, 5])
    blocks, scales = empty_cache(3, 1, 4, 4, torch.int8)
    with pytest.raises(ValueError, match=r"kv_cache of torch\.int8 needs kv_scales"):
        write_kv(key, key, blocks, slots)
    with pytest.raises(
        ValueError, match=r"kv_scales \[3, 2, 1, 4\] were given, but kv_cache of torch\.float32"
    ):
        write_kv(key, key, blocks.float(), slots, kv_scales=scales)
    step = build_step([(1, 3)], cache_dtype=torch.int8)
    assert step.kv_scales is not None
    for wrong in (
        step.kv_scales[:1],
        step.kv_scales.double(),
        step.kv_scales.transpose(2, 3).contiguous().mT,
    ):
        with pytest.raises(ValueError, match=r"kv_scales .* do not fit kv_cache \[2, 2, 2, 4, 8\]"):
            replace(step, kv_scales=wrong).attend()
