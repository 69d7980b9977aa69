"""write_kv: every token lands in its slot and nothing else changes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from triptych_kernels.cpu.library import forced_isa, usable_isas
from triptych_kernels.ops import write_kv


@pytest.fixture(params=[*usable_isas(), "plain"], autouse=True)
def implementation(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test holds for each of them."""
    with forced_isa("" if request.param == "plain" else request.param):
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [0, 1, 17, 300])
@pytest.mark.parametrize(("block_size", "head_dim"), [(1, 8), (16, 64), (16, 40)])
def test_writes_like_the_reference(
    num_tokens: int, block_size: int, head_dim: int, dtype: torch.dtype, cache_dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    num_blocks = 2 + 300 // block_size
    packed = torch.randn(num_tokens, 6, head_dim).to(dtype)
    key, value = packed[:, 1:4], packed[:, 3:]  # views, as the packed projection gives them
    kv_cache = torch.randn(num_blocks, 2, 3, block_size, head_dim).to(cache_dtype)
    slot_mapping = torch.randperm((num_blocks - 1) * block_size)[:num_tokens] + block_size
    slot_mapping[::4] = -1
    expected = kv_cache.clone()
    write_kv(key, value, expected, slot_mapping, impl="reference")
    write_kv(key, value, kv_cache, slot_mapping)
    assert torch.equal(kv_cache, expected)


def test_slot_minus_one_writes_nothing() -> None:
    kv_cache = torch.zeros(3, 2, 1, 4, 2)
    write_kv(torch.ones(3, 1, 2), torch.ones(3, 1, 2), kv_cache, torch.tensor([-1, -1, -1]))
    assert not kv_cache.any()


def test_a_token_stands_in_its_block_at_its_offset() -> None:
    kv_cache = torch.zeros(3, 2, 1, 4, 2)
    write_kv(torch.full((1, 1, 2), 5.0), torch.full((1, 1, 2), 7.0), kv_cache, torch.tensor([2 * 4 + 3]))
    assert kv_cache[2, 0, 0, 3].tolist() == [5.0, 5.0]
    assert kv_cache[2, 1, 0, 3].tolist() == [7.0, 7.0]
    assert kv_cache.sum() == 24.0


def test_shapes_that_disagree_are_named() -> None:
    key, kv_cache, slots = torch.ones(2, 1, 4), torch.zeros(3, 2, 1, 4, 4), torch.tensor([4, 5])
    with pytest.raises(ValueError, match=r"kv_cache \[3, 1, 4, 4\] must be a contiguous"):
        write_kv(key, key, kv_cache[:, 0], slots)
    with pytest.raises(ValueError, match=r"key \[2, 2, 2\] does not fit kv_cache \[3, 2, 1, 4, 4\]"):
        write_kv(key.view(2, 2, 2), key, kv_cache, slots)
    with pytest.raises(ValueError, match=r"value \[1, 1, 4\] torch.float32 is not like key \[2, 1, 4\]"):
        write_kv(key, key[:1], kv_cache, slots)
    with pytest.raises(ValueError, match=r"slot_mapping \[1\] does not fit key \[2, 1, 4\]"):
        write_kv(key, key, kv_cache, slots[:1])
    with pytest.raises(ValueError, match=r"value .* torch\.bfloat16 is not like key .* torch\.float32"):
        write_kv(key, key.bfloat16(), kv_cache, slots)
    with pytest.raises(ValueError, match="last axes of key and value must be dense"):
        write_kv(key, torch.ones(2, 1, 8)[:, :, ::2], kv_cache, slots)
