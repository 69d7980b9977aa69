"""rotary_and_write_kv: rotary_embedding, then write_kv."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.operands import (
    ModelCall,
    SmallOperands,
    meta_cache,
    meta_float32,
    meta_heads,
    meta_int64,
)
from tests.kernels.ops.implementations import Case, Implementation, cases_of, implementations_of
from tests.kernels.ops.test_rotary_embedding import TOLERANCE
from triptych_kernels.kv_scales import LARGEST_ELEMENT
from triptych_kernels.ops import rotary_and_write_kv, rotary_embedding, write_kv

SLOTS = [11, 4, -1, 0, 5]

case = cases_of("rotary_and_write_kv")
implementation = implementations_of("rotary_and_write_kv")


def _operands(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    num_tokens: int = len(SLOTS),
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return query, key and value, views as projected; positions, angles, slots."""
    torch.manual_seed(0)
    packed = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim).to(device, dtype)
    query, key, value = packed.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    angles = torch.rand(20, head_dim // 2) * 6
    positions = torch.tensor([19, 0, 7, 7, 1])[:num_tokens].to(device)
    cos_sin_cache = torch.cat((angles.cos(), angles.sin()), dim=-1).to(device)
    return query, key, value, positions, cos_sin_cache, torch.tensor(SLOTS)[:num_tokens].to(device)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"),
    [(1, 1, 2), (9, 3, 64), (20, 20, 80), (6, 2, 96), (14, 2, 128), (3, 1, 256)],
)
def test_rotates_and_writes_like_the_references(
    num_heads: int, num_kv_heads: int, head_dim: int, case: Case
) -> None:
    *operands, slots = _operands(num_heads, num_kv_heads, head_dim, case.device, case.dtype)
    kv_cache = torch.randn(3, 2, num_kv_heads, 4, head_dim).to(case.device, case.dtype)
    expected_cache = case.implementation.rows_of(kv_cache, case.dtype)
    before = [operand.clone() for operand in operands]
    expected = rotary_and_write_kv(*operands, expected_cache, slots, impl="reference")
    rotated = case(rotary_and_write_kv, *operands, kv_cache, slots)
    torch.testing.assert_close(rotated, expected, **TOLERANCE[case.dtype])
    kv_cache = case.implementation.rows_of(kv_cache, case.dtype)
    torch.testing.assert_close(kv_cache[:, 0], expected_cache[:, 0], **TOLERANCE[case.dtype])
    assert torch.equal(kv_cache[:, 1], expected_cache[:, 1])
    assert all(torch.equal(operand, copy) for operand, copy in zip(operands, before, strict=True))


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (64, 16), (80, 32), (128, 96)])
def test_the_first_elements_are_rotated_and_the_rest_copied(
    head_dim: int, rotary_dim: int, interleaved: bool, case: Case
) -> None:
    *operands, angles, slots = _operands(6, 2, head_dim, case.device, case.dtype)
    operands.append(torch.cat([half[:, : rotary_dim // 2] for half in angles.chunk(2, dim=1)], dim=1))
    kv_cache = torch.randn(3, 2, 2, 4, head_dim).to(case.device, case.dtype)
    expected_cache = case.implementation.rows_of(kv_cache, case.dtype)
    options = {"interleaved": interleaved}
    expected = rotary_and_write_kv(*operands, expected_cache, slots, **options, impl="reference")
    rotated = case(rotary_and_write_kv, *operands, kv_cache, slots, **options)
    torch.testing.assert_close(rotated, expected, **TOLERANCE[case.dtype])
    kv_cache = case.implementation.rows_of(kv_cache, case.dtype)
    torch.testing.assert_close(kv_cache, expected_cache, **TOLERANCE[case.dtype])


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_on_a_cpu_it_is_one_op_after_the_other(num_tokens: int, cache_dtype: torch.dtype, case: Case) -> None:
    if case.implementation.is_triton:
        pytest.skip("Triton fuses the two, and may round otherwise")
    *operands, slots = _operands(6, 2, 40, case.device, case.dtype, num_tokens)
    query, key, value, positions, cos_sin_cache = operands
    kv_cache = (torch.randn(4, 2, 2, 4, 40) * 50).to(cache_dtype)
    kv_scales = torch.ones(4, 2, 2, 4) if cache_dtype == torch.int8 else None
    expected_cache = kv_cache.clone()
    expected_scales = None if kv_scales is None else kv_scales.clone()
    expected, rotated_key = rotary_embedding(query, key, positions, cos_sin_cache)
    write_kv(rotated_key, value, expected_cache, slots, kv_scales=expected_scales)
    assert torch.equal(case(rotary_and_write_kv, *operands, kv_cache, slots, kv_scales=kv_scales), expected)
    assert torch.equal(kv_cache, expected_cache)
    if kv_scales is not None:
        assert torch.equal(kv_scales, expected_scales)


@pytest.mark.parametrize("cache_dtype", LARGEST_ELEMENT, ids=str)
@pytest.mark.parametrize("head_dim", [80, 128])
def test_rotated_keys_are_quantized(
    head_dim: int, cache_dtype: torch.dtype, implementation: Implementation
) -> None:
    device = implementation.device
    *operands, slots = _operands(4, 2, head_dim, device)
    exact_cache = torch.zeros(3, 2, 2, 4, head_dim, device=device)
    implementation(rotary_and_write_kv, *operands, exact_cache, slots)
    exact_cache = implementation.rows_of(exact_cache, operands[0].dtype)
    kv_cache = torch.zeros(3, 2, 2, 4, head_dim, device=device).to(cache_dtype)
    kv_scales = torch.full((3, 2, 2, 4), 9.0, device=device)
    implementation(rotary_and_write_kv, *operands, kv_cache, slots, kv_scales=kv_scales)
    # the result of write_kv for the rotated keys, which its own tests check
    written = [0, 1, 3, 4]
    blocks, offsets = slots[written] // 4, slots[written] % 4
    rotated_key, same_value = exact_cache[blocks, 0, :, offsets], exact_cache[blocks, 1, :, offsets]
    expected_cache, expected_scales = torch.zeros_like(kv_cache), torch.full_like(kv_scales, 9.0)
    implementation(
        write_kv, rotated_key, same_value, expected_cache, slots[written], kv_scales=expected_scales
    )
    assert torch.equal(kv_scales, expected_scales)
    assert torch.equal(kv_cache.view(torch.uint8), expected_cache.view(torch.uint8))


def test_a_key_that_is_not_finite_has_scale_nan(implementation: Implementation) -> None:
    device = implementation.device
    query, key, value, positions, cos_sin_cache, slots = _operands(2, 2, 64, device)
    key[0, 0, 40], value[1, 1, 3] = torch.nan, torch.inf
    kv_cache = torch.ones(3, 2, 2, 4, 64, dtype=torch.int8, device=device)
    kv_scales = torch.zeros(3, 2, 2, 4, device=device)
    operands = query, key, value, positions, cos_sin_cache, kv_cache, slots
    implementation(rotary_and_write_kv, *operands, kv_scales=kv_scales)
    assert kv_scales.isnan().nonzero().tolist() == [[1, 1, 1, 0], [2, 0, 0, 3]]
    kv_cache = implementation.rows_of(kv_cache, key.dtype)
    assert not kv_cache[2, 0, 0, 3].any()
    assert not kv_cache[1, 1, 1, 0].any()


def test_no_tokens_write_nothing(implementation: Implementation) -> None:
    device = implementation.device
    *operands, slots = _operands(2, 1, 64, device, num_tokens=0)
    kv_cache = torch.zeros(3, 2, 1, 4, 64, device=device)
    rotated = implementation(rotary_and_write_kv, *operands, kv_cache, slots)
    assert list(rotated.shape) == [0, 2, 64]
    assert not kv_cache.any()


def test_errors_name_this_op() -> None:
    query, key, positions = torch.ones(2, 3, 8), torch.ones(2, 1, 8), torch.zeros(2, dtype=torch.int64)
    angles, kv_cache = torch.ones(4, 8), torch.ones(3, 2, 1, 4, 8)
    with pytest.raises(
        ValueError, match=r"rotary_and_write_kv: positions \[1\] do not fit query \[2, 3, 8\]"
    ):
        rotary_and_write_kv(query, key, key, positions[:1], angles, kv_cache, positions)
    with pytest.raises(ValueError, match=r"rotary_and_write_kv: slot_mapping \[1\] does not fit key"):
        rotary_and_write_kv(query, key, key, positions, angles, kv_cache, positions[:1])
    with pytest.raises(ValueError, match=r"rotary_and_write_kv: kv_cache of torch.int8 needs kv_scales"):
        rotary_and_write_kv(query, key, key, positions, angles, kv_cache.to(torch.int8), positions)


def _model_call(
    num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype = torch.bfloat16
) -> object:
    heads = meta_heads(num_heads, num_kv_heads, head_dim)
    kv_cache, kv_scales = meta_cache(num_kv_heads, head_dim, dtype)
    operands = *heads, meta_int64(256), meta_float32(8192, head_dim), kv_cache, meta_int64(256)
    return rotary_and_write_kv(*operands, kv_scales=kv_scales, impl="triton")


MODEL_CALLS = {
    "heads of 64": ModelCall(lambda: _model_call(9, 3, 64), is_memory_bound=True),
    "heads of 80": ModelCall(lambda: _model_call(32, 32, 80), is_memory_bound=True),
    "heads of 128": ModelCall(lambda: _model_call(32, 8, 128), is_memory_bound=True),
    "int8": ModelCall(lambda: _model_call(32, 8, 128, torch.int8), is_memory_bound=True),
    "float8": ModelCall(lambda: _model_call(32, 8, 128, torch.float8_e4m3fn), is_memory_bound=True),
}


def launch_small(draw: SmallOperands) -> None:
    for dtype in draw.kv_dtypes:
        query, key, value = draw.heads()
        cache, scales = draw.cache(dtype)
        positions, angles = draw.rotary()
        slots = draw.slots()
        rotary_and_write_kv(
            query, key, value, positions, angles, cache, slots, kv_scales=scales, impl="triton"
        )
