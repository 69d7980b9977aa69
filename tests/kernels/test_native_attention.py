"""The native kernel where it differs from plain torch: spans, vector widths, groups of heads, instruction sets."""

from __future__ import annotations

import shutil

import pytest
import torch

from tests.kernels.test_paged_attention import TOLERANCE, build_step
from triptych_kernels import dispatch
from triptych_kernels.cpu import library
from triptych_kernels.cpu import paged_attention as native
from triptych_kernels.cpu.build import DIGEST, ISA_FLAGS
from triptych_kernels.torch.paged_attention import paged_attention as torch_paged_attention

CAN_BUILD = shutil.which("g++") is not None and bool(library._processor_flags() & {"avx2"})
pytestmark = pytest.mark.skipif(not CAN_BUILD, reason="no g++, or a processor that no kernel is made for")

AROUND_A_SPAN = [(1, 1), (1, 15), (1, 17), (1, 255), (1, 256), (1, 257), (1, 600)]


def test_where_there_is_a_compiler_the_kernels_are_built() -> None:
    assert library.isa() in ISA_FLAGS


@pytest.fixture(params=list(ISA_FLAGS))
def each_isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that this processor understands, not the widest alone."""
    widest = list(ISA_FLAGS).index(library.isa())
    if list(ISA_FLAGS).index(request.param) < widest:
        pytest.skip(f"this processor has no {request.param}")
    monkeypatch.setattr(native, "isa", lambda: request.param)


@pytest.mark.usefixtures("each_isa")
@pytest.mark.parametrize("head_dim", [8, 24, 64, 80, 96, 128, 200, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_head_size_equals_the_reference(head_dim: int, dtype: torch.dtype) -> None:
    step = build_step(AROUND_A_SPAN, block_size=16, head_dim=head_dim, dtype=dtype)
    torch.testing.assert_close(step.attend(impl="cpu"), step.attend(impl="reference"), **TOLERANCE[dtype])


@pytest.mark.usefixtures("each_isa")
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (9, 3), (7, 1), (16, 1), (17, 1), (40, 2)])
def test_every_grouping_of_heads_equals_the_reference(num_heads: int, num_kv_heads: int) -> None:
    step = build_step(AROUND_A_SPAN, head_dim=64, num_heads=num_heads, num_kv_heads=num_kv_heads)
    torch.testing.assert_close(
        step.attend(impl="cpu"), step.attend(impl="reference"), **TOLERANCE[torch.float32]
    )


@pytest.mark.parametrize("block_size", [1, 3, 16, 33, 256])
def test_every_block_size_equals_the_reference(block_size: int) -> None:
    step = build_step(AROUND_A_SPAN, block_size=block_size, head_dim=64)
    torch.testing.assert_close(
        step.attend(impl="cpu"), step.attend(impl="reference"), **TOLERANCE[torch.float32]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16])
def test_query_and_cache_may_differ_in_precision(dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    step = build_step(AROUND_A_SPAN, head_dim=64, dtype=dtype, cache_dtype=cache_dtype)
    torch.testing.assert_close(
        step.attend(impl="cpu"), step.attend(impl="reference"), **TOLERANCE[torch.bfloat16]
    )


def test_a_row_comes_out_the_same_bit_for_bit_whatever_is_beside_it() -> None:
    step = build_step(
        [*AROUND_A_SPAN, (5, 40), (3, 3)], block_size=16, head_dim=64, num_heads=9, num_kv_heads=3
    )
    together = step.attend(impl="cpu")
    for row in range(len(AROUND_A_SPAN)):
        assert torch.equal(step.attend([row], impl="cpu")[0], together[row])


def test_scores_that_lie_far_apart_neither_overflow_nor_vanish() -> None:
    step = build_step(AROUND_A_SPAN, head_dim=64)
    step.query *= 300
    torch.testing.assert_close(step.attend(impl="cpu"), step.attend(impl="reference"), rtol=1e-4, atol=1e-4)


def test_what_no_kernel_is_made_for_is_left_to_plain_torch() -> None:
    assert dispatch.find_impl("paged_attention", torch.empty(1)) is native.paged_attention
    half = torch.empty(1, dtype=torch.float16)
    assert dispatch.find_impl("paged_attention", half) is torch_paged_attention
    step = build_step([(1, 9)], head_dim=264)
    torch.testing.assert_close(
        step.attend(impl="cpu"), step.attend(impl="reference"), **TOLERANCE[torch.float32]
    )


def test_without_a_build_plain_torch_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "DIGEST", DIGEST.with_name("none"))
    library.isa.cache_clear()
    try:
        assert library.isa() == ""
        assert dispatch.find_impl("paged_attention", torch.empty(1)) is torch_paged_attention
    finally:
        library.isa.cache_clear()
