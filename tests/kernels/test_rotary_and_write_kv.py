"""rotary_and_write_kv: exactly rotary_embedding, then write_kv."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from triptych_kernels.cpu.library import forced_isa, usable_isas
from triptych_kernels.ops import rotary_and_write_kv, rotary_embedding, write_kv


@pytest.fixture(params=[*usable_isas(), "plain"], autouse=True)
def implementation(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test holds for each of them."""
    with forced_isa("" if request.param == "plain" else request.param):
        yield


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_tokens", [0, 1, 9])
def test_is_one_after_the_other(num_tokens: int, dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    packed = torch.randn(num_tokens, 10, 40).to(dtype)
    query, key, value = packed.split((6, 2, 2), dim=1)
    positions, cos_sin_cache = torch.randint(0, 30, (num_tokens,)), torch.randn(30, 40)
    slots = torch.randperm(16)[:num_tokens]
    slots[1::4] = -1
    kv_cache = (torch.randn(4, 2, 2, 4, 40) * 50).to(cache_dtype)
    kv_scales = torch.ones(4, 2, 2, 4) if cache_dtype == torch.int8 else None
    expected_cache = kv_cache.clone()
    expected_scales = None if kv_scales is None else kv_scales.clone()
    expected, rotated_key = rotary_embedding(query, key, positions, cos_sin_cache)
    write_kv(rotated_key, value, expected_cache, slots, kv_scales=expected_scales)
    operands = query, key, value, positions, cos_sin_cache, kv_cache, slots
    assert torch.equal(rotary_and_write_kv(*operands, kv_scales=kv_scales), expected)
    assert torch.equal(kv_cache, expected_cache)
    if kv_scales is not None:
        assert torch.equal(kv_scales, expected_scales)


def test_what_does_not_fit_is_named_as_its_own() -> None:
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
