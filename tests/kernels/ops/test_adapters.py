"""`linear`, `gated_linear` and `adapt_embedding` with low-rank adapters, against sums in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from triptych_kernels.cpu.library import forced_isa, usable_isas
from triptych_kernels.ops import gated_linear, linear
from triptych_kernels.weights.adapter_tables import create_adapter_table
from triptych_kernels.weights.adapters import (
    AdaptedRows,
    AdapterRef,
    Factors,
    StackedTable,
)
from triptych_kernels.weights.formats import GROUP_SIZE, QuantizedFormat
from triptych_kernels.weights.packed import PackedWeight, WidenedWeight
from triptych_kernels.weights.quantized import QuantizedWeight

IN_FEATURES = 3 * GROUP_SIZE
LENGTHS = (40, 24, 9)  # no multiples of a panel
OUT_FEATURES = sum(LENGTHS)
PIECES = [AdaptedRows(0, 40), AdaptedRows(40, 24), AdaptedRows(64, 9)]
SLOTS: list[dict[int, int]] = [{0: 4, 1: 7, 2: 3}, {1: 1}, {0: 16, 2: 2}, {}]
"""Number of a piece -> rank, for each slot. Nothing is ever put into the last."""
ROWS = [1, 2, 5, 37]


@pytest.fixture(params=usable_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    with forced_isa(request.param):
        yield request.param


def factors(
    generator: torch.Generator, ranks: dict[int, int], pieces: list[AdaptedRows]
) -> dict[int, Factors]:
    return {
        number: Factors(
            torch.randn(rank, IN_FEATURES, generator=generator) / 8,
            torch.randn(pieces[number].length, rank, generator=generator),
        )
        for number, rank in ranks.items()
    }


def deltas(
    x: Tensor, slots: Tensor, of_slots: list[dict[int, Factors]], starts: list[int], size: int
) -> Tensor:
    """Return the sum to add, [num_rows, size] float64, by numpy's rules alone."""
    added = torch.zeros(len(x), size, dtype=torch.float64)
    for row, slot in enumerate(slots.tolist()):
        for number, factor in of_slots[slot].items() if slot >= 0 else ():
            own = factor.b.double() @ (factor.a.double() @ x[row].double())
            added[row, starts[number] : starts[number] + len(own)] += own
    return added


def packed(weight: Tensor, dtype: torch.dtype) -> PackedWeight:
    made = PackedWeight(*weight.shape, dtype)
    made.fill_rows(0, weight)
    return made


def widened(weight: Tensor, dtype: torch.dtype) -> PackedWeight:
    made = WidenedWeight(*weight.shape, torch.bfloat16)
    made.fill_rows(0, weight)
    return made


def quantized(
    bits: int, input_bits: int, wide_bits: int = 0
) -> Callable[[Tensor, torch.dtype], PackedWeight]:
    def make(weight: Tensor, dtype: torch.dtype) -> PackedWeight:
        made = QuantizedWeight(
            *weight.shape, dtype, QuantizedFormat(bits, "minimum" if bits == 4 else "none")
        )
        made.fill_rows(0, weight)
        made.input_bits = input_bits  # type: ignore[assignment]
        if wide_bits:
            made.wide_rows, made.wide_bits = 1, wide_bits  # type: ignore[assignment]
        return made

    return make


WEIGHTS: dict[str, tuple[Callable[[Tensor, torch.dtype], PackedWeight], torch.dtype]] = {
    "float32": (packed, torch.float32),
    "bfloat16": (packed, torch.bfloat16),
    "widened": (widened, torch.float32),
    "q4, 8 bits": (quantized(4, 8), torch.bfloat16),
    "q4, 16 bits": (quantized(4, 16), torch.float32),
    "q4, wide": (quantized(4, 8, 16), torch.bfloat16),
    "q4, wide bytes": (quantized(4, 8, 8), torch.bfloat16),
    "q8": (quantized(8, 8), torch.float32),
}


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("num_rows", ROWS)
def test_products_add_each_rows_adapter(isa, kind, num_rows):
    make, dtype = WEIGHTS[kind]
    generator = torch.Generator().manual_seed(num_rows)
    weight = make(torch.randn(OUT_FEATURES, IN_FEATURES, generator=generator), dtype)
    table = create_adapter_table(weight, PIECES, num_slots=len(SLOTS), max_rank=16)
    of_slots = [factors(generator, ranks, PIECES) for ranks in SLOTS]
    for slot, own in enumerate(of_slots[:-1]):
        table.put(slot, table.pack(own, torch.float32))
    slots = torch.randint(-1, len(SLOTS), (num_rows,), dtype=torch.int32, generator=generator)
    slots[0] = 0
    x = torch.randn(num_rows, IN_FEATURES, generator=generator).to(dtype)
    out = linear(x, weight, adapters=AdapterRef(table, slots), out_dtype=torch.float32)
    base = linear(x, weight, out_dtype=torch.float32)
    starts = [piece.first for piece in PIECES]
    expected = base.double() + deltas(x, slots, of_slots, starts, OUT_FEATURES)
    torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=2e-5)
    without = slots.lt(0) | slots.eq(len(SLOTS) - 1)
    assert torch.equal(out[without], base[without])


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "q4, 8 bits"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_has_the_same_bits_in_any_batch(isa, kind, dtype):
    make, x_dtype = WEIGHTS[kind]
    generator = torch.Generator().manual_seed(5)
    weight = make(torch.randn(OUT_FEATURES, IN_FEATURES, generator=generator), x_dtype)
    table = create_adapter_table(weight, PIECES, num_slots=3, max_rank=16)
    for slot, ranks in enumerate(SLOTS[:-1]):
        table.put(slot, table.pack(factors(generator, ranks, PIECES), dtype))
    slots = torch.randint(-1, 3, (37,), dtype=torch.int32, generator=generator)
    x = torch.randn(37, IN_FEATURES, generator=generator).to(x_dtype)
    together = linear(x, weight, adapters=AdapterRef(table, slots))
    for row in range(37):
        part = slice(row, row + 1)
        alone = linear(x[part], weight, adapters=AdapterRef(table, slots[part]))
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("ranks", [{0: 4, 1: 4}, {0: 3, 1: 8}, {1: 5}, {0: 2}])
@pytest.mark.parametrize("length", [40, 64])
def test_gates_and_ups_are_adapted_before_they_are_multiplied(isa, ranks, length):
    generator = torch.Generator().manual_seed(length)
    pieces = [AdaptedRows(0, length, "gate"), AdaptedRows(0, length, "up")]
    weight = PackedWeight(2 * length, IN_FEATURES, torch.float32, gated=True)
    halves = [torch.randn(length, IN_FEATURES, generator=generator) / 8 for _ in pieces]
    weight.fill_rows(0, halves[0], "gate")
    weight.fill_rows(0, halves[1], "up")
    table = create_adapter_table(weight, pieces, num_slots=1, max_rank=16)
    own = factors(generator, ranks, pieces)
    table.put(0, table.pack(own, torch.float32))
    x = torch.randn(7, IN_FEATURES, generator=generator)
    slots = torch.tensor([0, -1, 0, 0, -1, 0, 0], dtype=torch.int32)
    out = gated_linear(x, weight, activation="gelu_pytorch_tanh", adapters=AdapterRef(table, slots))
    product = x.double() @ torch.cat(halves).double().T + deltas(x, slots, [own], [0, length], 2 * length)
    gate, up = product.chunk(2, dim=1)
    expected = torch.nn.functional.gelu(gate, approximate="tanh") * up
    torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("impl", ["torch", "reference"])
def test_plain_weights_add_the_same(impl):
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(OUT_FEATURES, IN_FEATURES, generator=generator)
    table = create_adapter_table(weight, PIECES, num_slots=3, max_rank=16)
    assert isinstance(table, StackedTable)
    of_slots = [factors(generator, ranks, PIECES) for ranks in SLOTS[:-1]]
    for slot, own in enumerate(of_slots):
        table.put(slot, table.pack(of_slots[0], torch.float32))  # all of which goes with the next one
        table.put(slot, table.pack(own, torch.float32))
    slots = torch.tensor([2, -1, 0, 1, 2], dtype=torch.int32)
    x = torch.randn(5, IN_FEATURES, generator=generator)
    out = linear(x, weight, adapters=AdapterRef(table, slots), impl=impl)
    starts = [piece.first for piece in PIECES]
    expected = x.double() @ weight.double().T + deltas(x, slots, of_slots, starts, OUT_FEATURES)
    torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=2e-5)


def test_slots_of_another_shape_are_refused():
    weight = torch.randn(OUT_FEATURES, IN_FEATURES)
    table = create_adapter_table(weight, PIECES, num_slots=1, max_rank=4)
    for slots in (torch.zeros(3, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)):
        with pytest.raises(ValueError, match="slots"):
            linear(torch.randn(2, IN_FEATURES), weight, adapters=AdapterRef(table, slots))
