"""`fused_moe` with low-rank adapters of its experts, against the reference with the weights of each row's adapter."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from triptych_kernels.cpu.library import forced_isa, usable_isas
from triptych_kernels.expert_choice import ExpertChoice
from triptych_kernels.ops import fused_moe
from triptych_kernels.weights.adapter_tables import (
    ExpertAdapters,
    ExpertsTable,
    create_adapter_table,
    in_one_memory,
)
from triptych_kernels.weights.adapters import AdaptedRows, Factors
from triptych_kernels.weights.base import Half
from triptych_kernels.weights.formats import QuantizedFormat
from triptych_kernels.weights.packed import PackedStack, PackedWeight, WidenedWeight
from triptych_kernels.weights.quantized import QuantizedWeight

HIDDEN, INNER, NUM_EXPERTS, NUM_SLOTS = 64, 96, 5, 4
HALVES: tuple[Half, Half] = ("gate", "up")
UP = [AdaptedRows(0, INNER, half, expert) for expert in range(NUM_EXPERTS) for half in HALVES]
UP_WITHOUT_GATE = [AdaptedRows(0, INNER, expert=expert) for expert in range(NUM_EXPERTS)]
DOWN = [AdaptedRows(0, HIDDEN, expert=expert) for expert in range(NUM_EXPERTS)]
RANKS: list[tuple[dict[int, int], dict[int, int]]] = [
    (dict.fromkeys(range(2 * NUM_EXPERTS), 4), dict.fromkeys(range(NUM_EXPERTS), 4)),
    ({0: 3, 5: 8}, {4: 16}),
    ({}, {0: 2, 1: 7, 3: 1}),
]
"""By slot: number of a piece -> rank, in both products. Nothing is ever put into the last slot."""
CHOICE = ExpertChoice(2)


def factors(
    generator: torch.Generator, ranks: dict[int, int], pieces: list[AdaptedRows], inputs: int
) -> dict[int, Factors]:
    return {
        number: Factors(
            torch.randn(rank, inputs, generator=generator) / 8,
            torch.randn(pieces[number].length, rank, generator=generator) / 4,
        )
        for number, rank in ranks.items()
    }


def stack_of(weights: Tensor, make: Callable[..., PackedWeight], *, gated: bool) -> PackedStack:
    stack = PackedStack([make(*weight.shape, gated=gated) for weight in weights])
    for weight, own in zip(weights, stack, strict=True):
        if gated:
            own.fill_rows(0, weight[:INNER], "gate")
            own.fill_rows(0, weight[INNER:], "up")
        else:
            own.fill_rows(0, weight)
    return stack


class Mixture:
    """Weights, and adapters in slots."""

    def __init__(
        self, make: Callable[..., PackedWeight], dtype: torch.dtype, *, is_gated: bool = True
    ) -> None:
        generator = torch.Generator().manual_seed(1)
        self.activation = "silu" if is_gated else "relu2"
        self.up = UP if is_gated else UP_WITHOUT_GATE
        self.w13 = torch.randn(NUM_EXPERTS, (1 + is_gated) * INNER, HIDDEN, generator=generator) / 8
        self.w2 = torch.randn(NUM_EXPERTS, HIDDEN, INNER, generator=generator) / 8
        self.packed = stack_of(self.w13, make, gated=is_gated), stack_of(self.w2, make, gated=False)
        tables = [
            create_adapter_table(stack[0], pieces, num_slots=NUM_SLOTS, max_rank=16)
            for stack, pieces in zip(self.packed, (self.up, DOWN), strict=True)
        ]
        self.of_slots = []
        for slot, ranks in enumerate(RANKS):
            of_up = {piece: rank for piece, rank in ranks[0].items() if piece < len(self.up)}
            both = factors(generator, of_up, self.up, HIDDEN), factors(generator, ranks[1], DOWN, INNER)
            self.of_slots.append(both)
            adapters = in_one_memory(
                {number: tables[number].pack(own, dtype) for number, own in enumerate(both) if own}
            )
            for number, table in enumerate(tables):
                table.put(slot, adapters.get(number))
        assert all(isinstance(table, ExpertsTable) for table in tables)
        self.tables = tables

    def __call__(self, x: Tensor, logits: Tensor, slots: Tensor | None) -> Tensor:
        adapters = None if slots is None else ExpertAdapters(*self.tables, slots)
        return fused_moe(x, logits, *self.packed, CHOICE, activation=self.activation, adapters=adapters)

    def expected(self, x: Tensor, logits: Tensor, slots: Tensor) -> Tensor:
        """By the reference, with merged weights for each row, in float64."""
        out = []
        for row, slot in enumerate(slots.tolist()):
            w13, w2 = self.w13.double(), self.w2.double()
            if 0 <= slot < len(self.of_slots):
                ups, downs = self.of_slots[slot]
                for number, factor in ups.items():
                    first = INNER if self.up[number].half == "up" else 0
                    w13[self.up[number].expert, first : first + INNER] += (
                        factor.b.double() @ factor.a.double()
                    )
                for number, factor in downs.items():
                    w2[number] += factor.b.double() @ factor.a.double()
            part = slice(row, row + 1)
            operands = x[part].double(), logits[part].double(), w13, w2, CHOICE
            out.append(fused_moe(*operands, activation=self.activation, impl="reference"))
        return torch.cat(out)


def quantized(bits: int) -> Callable[..., PackedWeight]:
    def make(rows: int, columns: int, *, gated: bool) -> PackedWeight:
        format = QuantizedFormat(bits, "minimum" if bits == 4 else "none")
        return QuantizedWeight(rows, columns, torch.float32, format, gated=gated)

    return make


def plain(dtype: torch.dtype) -> Callable[..., PackedWeight]:
    return lambda rows, columns, *, gated: PackedWeight(rows, columns, dtype, gated=gated)


def widened(rows: int, columns: int, *, gated: bool) -> PackedWeight:
    return WidenedWeight(rows, columns, torch.bfloat16, gated=gated)


WEIGHTS: dict[str, tuple[Callable[..., PackedWeight], torch.dtype]] = {
    "float32": (plain(torch.float32), torch.float32),
    "bfloat16": (plain(torch.bfloat16), torch.bfloat16),
    "widened": (widened, torch.float32),
    "q4": (quantized(4), torch.float32),
    "q8": (quantized(8), torch.float32),
}


@pytest.fixture(params=usable_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    with forced_isa(request.param):
        yield request.param


def inputs(num_rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_rows)
    x = torch.randn(num_rows, HIDDEN, generator=generator).to(dtype)
    logits = torch.randn(num_rows, NUM_EXPERTS, generator=generator)
    slots = torch.randint(-1, NUM_SLOTS, (num_rows,), dtype=torch.int32, generator=generator)
    slots[0] = 0
    return x, logits, slots


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("num_rows", [1, 3, 37, 400])
def test_rows_are_computed_with_the_weights_of_their_adapter(isa: str, num_rows: int) -> None:
    mixture = Mixture(plain(torch.float32), torch.float32)
    x, logits, slots = inputs(num_rows, torch.float32)
    out = mixture(x, logits, slots)
    torch.testing.assert_close(out.double(), mixture.expected(x, logits, slots), atol=2e-4, rtol=2e-4)
    base = mixture(x, logits, None)
    without = slots.lt(0) | slots.eq(NUM_SLOTS - 1)
    assert torch.equal(out[without], base[without])
    assert (out[~without] != base[~without]).any()


def test_experts_without_a_gate_are_adapted(isa: str) -> None:
    mixture = Mixture(plain(torch.float32), torch.float32, is_gated=False)
    x, logits, slots = inputs(37, torch.float32)
    out = mixture(x, logits, slots)
    torch.testing.assert_close(out.double(), mixture.expected(x, logits, slots), atol=2e-4, rtol=2e-4)
    assert (out != mixture(x, logits, None)).any()


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("kind", WEIGHTS)
def test_rounded_weights_are_adapted_too(isa: str, kind: str) -> None:
    """The difference that adapters make is that of plain weights, but for what rounding changes."""
    make, dtype = WEIGHTS[kind]
    mixture = Mixture(make, torch.bfloat16)
    x, logits, slots = inputs(50, dtype)
    out, base = mixture(x, logits, slots).double(), mixture(x, logits, None).double()
    none = torch.full_like(slots, -1)
    expected = mixture.expected(x, logits, slots) - mixture.expected(x, logits, none)
    error, size = (out - base - expected).pow(2).mean().sqrt(), expected.pow(2).mean().sqrt()
    # the difference is no linear function of weights and inputs, of which 4 bits change every product
    assert error < (0.15 if kind == "q4" else 0.06) * size


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_has_the_same_bits_in_any_batch(isa: str, kind: str, dtype: torch.dtype) -> None:
    make, x_dtype = WEIGHTS[kind]
    mixture = Mixture(make, dtype)
    x, logits, slots = inputs(300, x_dtype)
    together = mixture(x, logits, slots)
    for row in [0, 1, 2, 3, 99, 299]:
        part = slice(row, row + 1)
        assert torch.equal(mixture(x[part], logits[part], slots[part])[0], together[row])
    few = torch.tensor([5, 17, 40, 41, 42, 43, 200])
    assert torch.equal(mixture(x[few], logits[few], slots[few]), together[few])


def test_operands_that_disagree_are_refused() -> None:
    mixture = Mixture(plain(torch.float32), torch.float32)
    x, logits, slots = inputs(7, torch.float32)
    with pytest.raises(
        ValueError, match=r"slots \[6\] torch.int32 of adapters must be \[num_tokens\] = \[7\]"
    ):
        mixture(x, logits, slots[:6])
    adapters = ExpertAdapters(*mixture.tables, slots)
    with pytest.raises(ValueError, match="adapters must be None with weights that are no PackedStack"):
        fused_moe(x, logits, mixture.w13, mixture.w2, CHOICE, adapters=adapters)
    with pytest.raises(
        ValueError, match="adapters of w13 are for 5 experts with 96 inputs, and not for 5 with 64"
    ):
        fused_moe(x, logits, *mixture.packed, CHOICE, adapters=ExpertAdapters(*mixture.tables[::-1], slots))
