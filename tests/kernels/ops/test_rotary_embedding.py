"""rotary_embedding against float64 and against what a rotation must keep."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.operands import ModelCall, SmallOperands, meta_float32, meta_heads, meta_int64
from tests.kernels.ops.implementations import Case, Implementation, cases_of, implementations_of
from triptych_kernels.ops import rotary_embedding

# Computed in float32 and rounded once. The two products may cancel, so the tolerance is absolute too. An error in
# float32 can turn a rounded element into its neighbour.
TOLERANCE = {
    torch.float32: {"rtol": 0.0, "atol": 2e-6},
    torch.float16: {"rtol": 2**-10, "atol": 2e-6},
    torch.bfloat16: {"rtol": 2**-7, "atol": 2e-6},
}

case = cases_of("rotary_embedding")
implementation = implementations_of("rotary_embedding")


def table(num_positions: int, head_dim: int, device: torch.device | None = None) -> Tensor:
    positions, dims = torch.arange(num_positions).float(), torch.arange(head_dim // 2)
    angles = torch.outer(positions, 100.0 ** -(dims / head_dim))
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(device)


@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "num_kv_heads", "head_dim"),
    [
        (0, 1, 1, 4),
        (0, 4, 2, 64),
        (1, 1, 1, 2),
        (5, 6, 2, 8),
        (17, 3, 1, 64),
        (70, 9, 3, 80),
        (5, 4, 4, 80),
        (5, 4, 0, 80),  # the keys are in the cache
        (5, 6, 2, 96),
        (5, 14, 2, 128),
        (3, 2, 1, 256),
        (5, 3, 1, 256),
    ],
)
def test_rotates_like_the_reference(
    num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, case: Case
) -> None:
    torch.manual_seed(0)
    packed = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim).to(case.device, case.dtype)
    query, key, _ = packed.split((num_heads, num_kv_heads, num_kv_heads), dim=1)  # views, as projected
    positions = torch.randint(0, 33, (num_tokens,)).to(case.device)
    before = packed.clone()
    angles = table(33, head_dim, case.device)
    rotated = case(rotary_embedding, query, key, positions, angles)
    expected = rotary_embedding(query, key, positions, angles, impl="reference")
    for out, wanted in zip(rotated, expected, strict=True):
        assert out.dtype == case.dtype
        assert out.is_contiguous()
        torch.testing.assert_close(out, wanted, **TOLERANCE[case.dtype])
    assert torch.equal(packed, before)


@pytest.mark.filterwarnings("ignore:invalid value encountered in multiply")  # of Triton's interpreter
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize(
    ("head_dim", "rotary_dim"), [(2, 2), (8, 2), (64, 64), (64, 32), (80, 32), (96, 72), (128, 64), (256, 64)]
)
def test_the_first_elements_are_rotated_and_the_rest_copied(
    head_dim: int, rotary_dim: int, interleaved: bool, case: Case
) -> None:
    torch.manual_seed(5)
    packed = torch.randn(5, 9, head_dim).to(case.device, case.dtype)
    query, key, _ = packed.split((5, 2, 2), dim=1)
    query[0, 0, -1] = torch.inf if rotary_dim < head_dim else 1.0  # what is copied is not computed with
    positions, angles = torch.randint(0, 33, (5,)).to(case.device), table(33, rotary_dim, case.device)
    options = {"interleaved": interleaved}
    rotated = case(rotary_embedding, query, key, positions, angles, **options)
    expected = rotary_embedding(query, key, positions, angles, **options, impl="reference")
    for x, out, wanted in zip((query, key), rotated, expected, strict=True):
        assert out.is_contiguous()
        torch.testing.assert_close(out, wanted, **TOLERANCE[case.dtype])
        assert torch.equal(out[..., rotary_dim:], x[..., rotary_dim:])


def test_interleaved_pairs_are_rotated_as_complex_numbers(implementation: Implementation) -> None:
    torch.manual_seed(6)
    device = implementation.device
    query, key = torch.randn(4, 3, 16).to(device), torch.randn(4, 1, 16).to(device)
    positions, angles = torch.tensor([3, 1, 4, 1], device=device), table(9, 16, device)
    turns = torch.complex(*angles[positions].chunk(2, dim=-1))[:, None]
    rotated = implementation(rotary_embedding, query, key, positions, angles, interleaved=True)
    for x, out in zip((query, key), rotated, strict=True):
        expected = torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * turns).flatten(-2)
        torch.testing.assert_close(out, expected, **TOLERANCE[torch.float32])


def test_heads_may_lie_before_tokens(implementation: Implementation) -> None:
    torch.manual_seed(1)
    device = implementation.device
    query, key = torch.randn(2, 3, 4, 64).to(device).transpose(1, 2)  # [4, 3, 64] each
    positions, angles = torch.tensor([3, 1, 4, 1], device=device), table(50, 64, device)
    rotated = implementation(rotary_embedding, query, key, positions, angles)
    expected = rotary_embedding(query, key, positions, angles, impl="reference")
    torch.testing.assert_close(rotated, expected, **TOLERANCE[torch.float32])


def test_products_depend_only_on_the_distance(implementation: Implementation) -> None:
    torch.manual_seed(1)
    device = implementation.device
    query, key, angles = (
        torch.randn(1, 1, 16).to(device),
        torch.randn(1, 1, 16).to(device),
        table(40, 16, device),
    )
    products = []
    for offset in (0, 5, 20):
        earlier, later = (torch.tensor([position], device=device) for position in (offset, offset + 7))
        rotated_query, _ = implementation(rotary_embedding, query, key, later, angles)
        _, rotated_key = implementation(rotary_embedding, query, key, earlier, angles)
        products.append((rotated_query * rotated_key).sum().item())
    assert products[1] == pytest.approx(products[0], abs=1e-4)
    assert products[2] == pytest.approx(products[0], abs=1e-4)


def test_a_token_has_the_same_bits_in_any_batch(case: Case) -> None:
    torch.manual_seed(2)
    query = torch.randn(50, 9, 64).to(case.device, case.dtype)
    key = torch.randn(50, 3, 64).to(case.device, case.dtype)
    positions, angles = torch.randint(0, 33, (50,)).to(case.device), table(33, 64, case.device)
    together = case(rotary_embedding, query, key, positions, angles)
    for token in (0, 20, 21, 49):
        own = slice(token, token + 1)
        single = case(rotary_embedding, query[own], key[own], positions[own], angles)
        assert torch.equal(single[0], together[0][own])
        assert torch.equal(single[1], together[1][own])


def test_position_zero_changes_nothing(implementation: Implementation) -> None:
    device = implementation.device
    query, key = torch.randn(2, 3, 8).to(device), torch.randn(2, 1, 8).to(device)
    positions = torch.zeros(2, dtype=torch.int64, device=device)
    rotated = implementation(rotary_embedding, query, key, positions, table(4, 8, device))
    assert torch.equal(rotated[0], query)
    assert torch.equal(rotated[1], key)


def test_shapes_that_disagree_are_named() -> None:
    query, key, positions = torch.ones(2, 3, 8), torch.ones(2, 1, 8), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"query \[2, 3, 8\] and key \[1, 1, 8\]"):
        rotary_embedding(query, key[:1], positions, table(4, 8))
    with pytest.raises(ValueError, match=r"positions \[1\] do not fit query \[2, 3, 8\]"):
        rotary_embedding(query, key, positions[:1], table(4, 8))
    with pytest.raises(ValueError, match=r"cos_sin_cache \[4, 10\] does not fit query \[2, 3, 8\]"):
        rotary_embedding(query, key, positions, table(4, 10))
    with pytest.raises(ValueError, match=r"cos_sin_cache \[4, 5\] does not fit query \[2, 3, 8\]"):
        rotary_embedding(query, key, positions, torch.ones(4, 5))
    with pytest.raises(ValueError, match="must be of one dtype, their last axes dense"):
        rotary_embedding(query, key.bfloat16(), positions, table(4, 8))
    with pytest.raises(ValueError, match="must be of one dtype, their last axes dense"):
        rotary_embedding(query.transpose(1, 2).contiguous().transpose(1, 2), key, positions, table(4, 8))


def _model_call(
    num_heads: int, num_kv_heads: int, head_dim: int, rotary_dim: int = 0, *, interleaved: bool = False
) -> object:
    query, key, _ = meta_heads(num_heads, num_kv_heads, head_dim)
    angles = meta_float32(8192, rotary_dim or head_dim)
    return rotary_embedding(query, key, meta_int64(256), angles, interleaved=interleaved, impl="triton")


MODEL_CALLS = {
    f"heads of {heads[2]}": ModelCall(lambda heads=heads: _model_call(*heads), is_memory_bound=True)
    for heads in ((9, 3, 64), (32, 32, 80), (32, 8, 128), (8, 4, 256))
} | {
    "a quarter of 256": ModelCall(lambda: _model_call(16, 8, 256, 64)),
    "interleaved": ModelCall(lambda: _model_call(32, 8, 128, 64, interleaved=True)),
}


def launch_small(draw: SmallOperands) -> None:
    query, key, _ = draw.heads()
    rotary_embedding(query, key, *draw.rotary(), impl="triton")
