"""chosen_attention against float64, and bit by bit against latent_attention where all vectors are chosen."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tests.kernels.ops.implementations import Case, Implementation, cases_of, implementations_of
from triptych_kernels.cpu.library import use_threads
from triptych_kernels.cpu.program import record
from triptych_kernels.ops import chosen_attention, latent_attention

SCALE = 0.2
# float32: sums of tens of products. 16 bits: the weights are rounded before the sum over values of size 1, then the
# result; float16 keeps three bits more.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}

case = cases_of("chosen_attention")
implementation = implementations_of("chosen_attention")


@dataclass
class Step:
    query: Tensor
    vectors: Tensor
    slots: Tensor
    counts: Tensor
    value_dim: int

    def attend(self, compute: Case | Implementation | str) -> Tensor:
        operands = self.query, self.vectors, self.slots, self.counts
        if isinstance(compute, str):
            return chosen_attention(*operands, scale=SCALE, value_dim=self.value_dim, impl=compute)
        out: Tensor = compute(chosen_attention, *operands, scale=SCALE, value_dim=self.value_dim)
        return out


def build_step(
    counts: list[int],
    *,
    num_slots: int = 60,
    num_heads: int = 4,
    width: int = 24,
    value_dim: int = 16,
    behind: int = 3,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
) -> Step:
    """Queries that chose so many vectors, each of them others; vectors that none chose are NaN.

    Args:
        behind: Elements of a cached vector behind those that count.
    """
    torch.manual_seed(0)
    slots = torch.full((len(counts), max(counts) + 2), -1, dtype=torch.int32)
    cache = torch.full((num_slots, width + behind), torch.nan)
    for token, count in enumerate(counts):
        own = torch.randperm(num_slots)[:count]
        slots[token, :count] = own
        cache[own, :width] = torch.randn(count, width)
    query = torch.randn(len(counts), num_heads, width).to(dtype)
    vectors = cache.to(cache_dtype or dtype)[:, :width]
    return Step(query, vectors, slots, torch.tensor(counts, dtype=torch.int32), value_dim)


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype
    tolerance = TOLERANCE[found.dtype]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("num_heads", "width", "value_dim", "behind"),
    [(4, 24, 16, 3), (1, 24, 24, 0), (13, 18, 1, 2), (40, 22, 10, 12), (16, 576, 512, 128)],
)
def test_attends_like_the_reference(
    num_heads: int, width: int, value_dim: int, behind: int, case: Case
) -> None:
    step = build_step(
        [1, 9, 2, 32, 17, 33], num_heads=num_heads, width=width, value_dim=value_dim, behind=behind,
        dtype=case.dtype,
    )  # fmt: skip
    if width == 576:
        step.query /= 8  # scores of size 1
    assert_close(step.attend(case), step.attend("reference"))


def test_more_vectors_than_a_span(case: Case) -> None:
    step = build_step([600, 3, 256, 257], num_slots=700, dtype=case.dtype)
    assert_close(step.attend(case), step.attend("reference"))


def test_a_cache_of_another_dtype(case: Case) -> None:
    for cache_dtype in (torch.float32, torch.bfloat16, torch.float16):
        step = build_step([5, 20], dtype=case.dtype, cache_dtype=cache_dtype)
        assert_close(step.attend(case), step.attend("reference"))


def test_all_vectors_give_the_bits_of_latent_attention(case: Case) -> None:
    """A prompt of 300 tokens, which the other op computes in tiles of several queries."""
    if not case.implementation.has_fixed_sums:
        pytest.skip("torch chooses its sums by the shape")
    torch.manual_seed(0)
    cache = torch.randn(30, 16, 24).to(case.dtype)
    query = torch.randn(300, 4, 24).to(case.dtype)
    table = (torch.randperm(29)[:19] + 1).int()[None]
    starts, lens = torch.tensor([0, 300]).int(), torch.tensor([300]).int()
    expected = case(latent_attention, query, cache, table, starts, lens, scale=SCALE, value_dim=16)
    positions = torch.arange(300)
    slots = (table[0, positions // 16] * 16 + positions % 16).int().repeat(300, 1)
    step = Step(query, cache.flatten(0, 1), slots, (positions + 1).int(), 16)
    assert torch.equal(step.attend(case), expected)


def test_a_query_has_the_same_bits_alone(implementation: Implementation) -> None:
    if not implementation.has_fixed_sums:
        pytest.skip("torch chooses its sums by the shape")
    step = build_step([300, 7, 41, 256], num_slots=400)
    whole = step.attend(implementation)
    use_threads(1)
    for token in range(4):
        own = slice(token, token + 1)
        alone = Step(step.query[own], step.vectors, step.slots[own], step.counts[own], step.value_dim)
        assert torch.equal(alone.attend(implementation), whole[own])


def test_it_is_recorded(implementation: Implementation) -> None:
    if not implementation.isa:
        pytest.skip("only native kernels are recorded")
    step = build_step([1, 9, 2, 32])

    def forward(recording: object) -> tuple[Tensor, ...]:
        query, slots, counts = (
            recording.input(x, count="tokens")  # type: ignore[attr-defined]
            for x in (step.query, step.slots, step.counts)
        )
        return (chosen_attention(query, step.vectors, slots, counts, scale=SCALE, value_dim=step.value_dim),)

    program = record(forward)
    program.run({"tokens": 4})
    assert torch.equal(program.outputs[0], step.attend(implementation))


def test_shapes_and_values_that_disagree_are_named() -> None:
    step = build_step([3, 1])

    def attend(**changed: object) -> Tensor:
        arguments = {"query": step.query, "vectors": step.vectors, "slots": step.slots}
        arguments |= {"counts": step.counts, "scale": SCALE, "value_dim": 16}
        return chosen_attention(**(arguments | changed))  # type: ignore[arg-type]

    with pytest.raises(ValueError, match=r"query \[2, 4, 20\] with .* does not fit vectors \[60, 24\]"):
        attend(query=step.query[..., :20])
    with pytest.raises(ValueError, match=r"vectors \[60, 24\] torch\.int8 with .* must be"):
        attend(vectors=torch.zeros(60, 24, dtype=torch.int8))
    with pytest.raises(ValueError, match=r"slots \[1, 5\] and counts \[2\] do not fit query \[2, 4, 24\]"):
        attend(slots=step.slots[:1])
    with pytest.raises(ValueError, match=r"slots torch\.int64 .* must be torch\.int32"):
        attend(slots=step.slots.long())
    with pytest.raises(ValueError, match="value_dim 25 must be 1 to 24"):
        attend(value_dim=25)
    with pytest.raises(ValueError, match="scale 0 positive"):
        attend(scale=0)
