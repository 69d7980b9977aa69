"""rotary_embedding against float64 and against what a rotation must keep."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from triptych_kernels.cpu.library import forced_isa, usable_isas
from triptych_kernels.ops import rotary_embedding

# computed in float32 and rounded once; the two products may cancel, so the tolerance is absolute. What float32 leaves
# uncertain can turn a bfloat16 into its neighbour, up to 2^-7 away.
TOLERANCE = {torch.float32: {"rtol": 0.0, "atol": 2e-6}, torch.bfloat16: {"rtol": 2**-7, "atol": 1e-6}}


@pytest.fixture(params=[*usable_isas(), "plain"], autouse=True)
def implementation(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test holds for each of them."""
    with forced_isa("" if request.param == "plain" else request.param):
        yield


def table(num_positions: int, head_dim: int) -> Tensor:
    angles = torch.outer(
        torch.arange(num_positions).float(), 100.0 ** -(torch.arange(head_dim // 2) / head_dim)
    )
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "num_kv_heads", "head_dim"),
    [(0, 1, 1, 4), (1, 1, 1, 2), (5, 6, 2, 8), (17, 3, 1, 64), (70, 9, 3, 80), (3, 2, 1, 256)],
)
def test_rotates_like_the_reference(
    num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    packed = torch.randn(num_tokens, num_heads + num_kv_heads, head_dim).to(dtype)
    query, key = packed[:, :num_heads], packed[:, num_heads:]  # views, as the packed projection gives them
    positions = torch.randint(0, 33, (num_tokens,))
    rotated = rotary_embedding(query, key, positions, table(33, head_dim))
    expected = rotary_embedding(query, key, positions, table(33, head_dim), impl="reference")
    for out, wanted in zip(rotated, expected, strict=True):
        assert out.dtype == dtype
        assert out.is_contiguous()
        torch.testing.assert_close(out, wanted, **TOLERANCE[dtype])


def test_products_of_query_and_key_depend_on_their_distance_alone() -> None:
    torch.manual_seed(1)
    query, key = torch.randn(1, 1, 16), torch.randn(1, 1, 16)
    products = []
    for offset in (0, 5, 20):
        rotated_query, _ = rotary_embedding(query, key, torch.tensor([offset + 7]), table(40, 16))
        _, rotated_key = rotary_embedding(query, key, torch.tensor([offset]), table(40, 16))
        products.append((rotated_query * rotated_key).sum().item())
    assert products[1] == pytest.approx(products[0], abs=1e-4)
    assert products[2] == pytest.approx(products[0], abs=1e-4)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_token_comes_out_the_same_whatever_is_beside_it(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    query, key = torch.randn(50, 9, 64).to(dtype), torch.randn(50, 3, 64).to(dtype)
    positions = torch.randint(0, 33, (50,))
    together = rotary_embedding(query, key, positions, table(33, 64))
    for token in (0, 20, 21, 49):
        own = slice(token, token + 1)
        alone = rotary_embedding(query[own], key[own], positions[own], table(33, 64))
        assert torch.equal(alone[0], together[0][own])
        assert torch.equal(alone[1], together[1][own])


def test_position_zero_changes_nothing() -> None:
    query, key = torch.randn(2, 3, 8), torch.randn(2, 1, 8)
    rotated = rotary_embedding(query, key, torch.zeros(2, dtype=torch.int64), table(4, 8))
    assert torch.equal(rotated[0], query)
    assert torch.equal(rotated[1], key)


def test_shapes_that_disagree_are_named() -> None:
    query, key, positions = torch.ones(2, 3, 8), torch.ones(2, 1, 8), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"query \[2, 3, 8\] and key \[1, 1, 8\]"):
        rotary_embedding(query, key[:1], positions, table(4, 8))
    with pytest.raises(ValueError, match=r"positions \[1\] do not fit query \[2, 3, 8\]"):
        rotary_embedding(query, key, positions[:1], table(4, 8))
    with pytest.raises(ValueError, match=r"cos_sin_cache \[4, 6\] does not fit query \[2, 3, 8\]"):
        rotary_embedding(query, key, positions, table(4, 6))
    with pytest.raises(ValueError, match="must be of one dtype, their last axes dense"):
        rotary_embedding(query, key.bfloat16(), positions, table(4, 8))
    with pytest.raises(ValueError, match="must be of one dtype, their last axes dense"):
        rotary_embedding(query.transpose(1, 2).contiguous().transpose(1, 2), key, positions, table(4, 8))
