"""write_latent, which copies."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.operands import ModelCall, SmallOperands, meta, meta_int64
from tests.kernels.ops.implementations import Case, cases_of
from triptych_kernels.ops import write_latent

case = cases_of("write_latent")


@pytest.mark.parametrize(
    ("latent_dim", "rope_dim", "behind"), [(16, 8, 0), (33, 3, 4), (1, 1, 0), (512, 64, 128)]
)
@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_writes_the_vectors_of_its_slots_alone(
    latent_dim: int, rope_dim: int, behind: int, cache_dtype: torch.dtype, case: Case
) -> None:
    """And leaves what is behind a vector."""
    torch.manual_seed(0)
    packed = torch.randn(5, latent_dim + rope_dim + 3)  # views with gaps between the rows
    if case.implementation.is_interpreted:
        packed = packed.bfloat16()  # the interpreter cuts bits off where a device rounds
    packed = packed.to(case.dtype)
    latent, rope_key = packed[:, 3 : 3 + latent_dim], packed[:, 3 + latent_dim :]
    slots = torch.tensor([7, 0, -1, 11, 4])
    cache = torch.randn(3, 4, latent_dim + rope_dim + behind).to(cache_dtype)
    expected = cache.clone()
    write_latent(latent, rope_key, expected, slots, impl="reference")
    found = cache.clone().to(case.device)
    case(write_latent, latent.to(case.device), rope_key.to(case.device), found, slots.to(case.device))
    assert torch.equal(found.cpu(), expected)
    assert not torch.equal(expected, cache)


def test_shapes_that_disagree_are_named() -> None:
    latent, rope_key, cache = torch.ones(2, 6), torch.ones(2, 2), torch.zeros(3, 4, 8)
    slots = torch.tensor([4, 5])
    with pytest.raises(ValueError, match=r"kv_cache \[3, 8, 4\] torch\.float32 must be a contiguous"):
        write_latent(latent, rope_key, cache.transpose(1, 2), slots)
    with pytest.raises(ValueError, match=r"kv_cache \[3, 4, 8\] torch\.int8 must be a contiguous"):
        write_latent(latent, rope_key, cache.to(torch.int8), slots)
    with pytest.raises(
        ValueError, match=r"latent \[2, 6\] and rope_key \[2, 3\] do not fit kv_cache \[3, 4, 8\]"
    ):
        write_latent(latent, torch.ones(2, 3), cache, slots)
    with pytest.raises(ValueError, match=r"must be of one dtype"):
        write_latent(latent, rope_key.bfloat16(), cache, slots)
    with pytest.raises(ValueError, match=r"slot_mapping \[1\] does not fit latent \[2, 6\]"):
        write_latent(latent, rope_key, cache, slots[:1])


MODEL_CALLS = {
    "deepseek": ModelCall(
        lambda: write_latent(
            meta(256, 576)[:, :512], meta(256, 64), meta(64, 16, 576), meta_int64(256), impl="triton"
        ),
        is_memory_bound=True,
    )
}


def launch_small(draw: SmallOperands) -> None:
    cache = draw.normal(draw.num_blocks, draw.block_size, 80)
    write_latent(draw.normal(9, 64), draw.normal(9, 16), cache, draw.slots(), impl="triton")
