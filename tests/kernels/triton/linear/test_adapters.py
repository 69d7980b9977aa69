"""Products with low-rank adapters of their rows against float64, and what rows without one get."""

from __future__ import annotations

import pytest
import torch

from triptych_kernels.ops import gated_linear, linear
from triptych_kernels.weights.adapters import AdaptedRows, AdapterRef, Factors, StackedTable

ROUNDING = {torch.float32: 2.0**-22, torch.float16: 2.0**-10}
"""Error of a sum, relative to the sum of its terms' magnitudes; products are rounded to the factors' dtype."""
NUM_SLOTS = 4


def table_of(
    in_features: int, lengths: tuple[int, ...], rank: int, dtype: torch.dtype, device: torch.device
) -> StackedTable:
    """Return a table with adapters in all slots but the last, the ranks of which differ."""
    starts = [sum(lengths[:number]) for number in range(len(lengths))]
    pieces = [AdaptedRows(start, length) for start, length in zip(starts, lengths, strict=True)]
    table = StackedTable(pieces, in_features, num_slots=NUM_SLOTS, max_rank=rank, dtype=dtype, device=device)
    for slot in range(NUM_SLOTS - 1):
        own = max(rank - slot, 1)
        factors = {
            number: Factors(torch.randn(own, in_features) / 8, torch.randn(length, own))
            for number, length in enumerate(lengths)
            if (number + slot) % 2 == 0
        }
        table.put(slot, table.pack(factors, dtype))
    return table


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize(
    ("num_rows", "in_features", "lengths", "rank"),
    [(37, 200, (70, 33), 5), (1, 8, (9, 1), 1), (16, 129, (64, 64), 17)],
)
def test_rows_get_what_their_adapter_adds(device, dtype, num_rows, in_features, lengths, rank):
    table = table_of(in_features, lengths, rank, dtype, device)
    weight = torch.randn(sum(lengths), in_features, device=device).to(dtype)
    x = torch.randn(num_rows, in_features + 3, device=device).to(dtype)[:, :in_features]
    slots = torch.randint(-1, NUM_SLOTS, (num_rows,), dtype=torch.int32, device=device)
    slots[0] = 0
    out = linear(x, weight, out_dtype=torch.float32, adapters=AdapterRef(table, slots), impl="triton")
    base = torch.nn.functional.linear(x, weight).float()
    expected, size = base.double(), torch.zeros_like(base, dtype=torch.float64)
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            a, b = table.a[slot].double(), table.b[slot].double()
            expected[row] += x[row].double() @ a.T @ b
            size[row] = x[row].double().abs() @ a.abs().T @ b.abs()
    # sums in float32 of up to 200 terms, products rounded to the dtype of factors, and the sum with the base
    error = (out.double() - expected).abs()
    assert (error <= ROUNDING[dtype] * (size + expected.abs()) + 1e-12).all()
    without = (slots < 0) | (slots == NUM_SLOTS - 1)
    assert torch.equal(out[without], base[without])


def test_a_row_has_the_same_bits_alone_and_with_others(device):
    table = table_of(100, (40, 30), 6, torch.float32, device)
    weight = torch.randn(70, 100, device=device)
    x = torch.randn(35, 100, device=device)
    slots = torch.randint(-1, NUM_SLOTS, (35,), dtype=torch.int32, device=device)
    plain = torch.zeros_like(weight)  # cuBLAS gives a row other bits among others
    together = linear(x, plain, adapters=AdapterRef(table, slots), impl="triton")
    for row in (0, 16, 34):
        part = slice(row, row + 1)
        alone = linear(x[part], plain, adapters=AdapterRef(table, slots[part]), impl="triton")
        assert torch.equal(alone[0], together[row])


def test_gates_and_ups_are_adapted_before_they_are_multiplied(device):
    table = table_of(64, (48, 48), 4, torch.float32, device)
    weight = torch.randn(96, 64, device=device) / 8
    x = torch.randn(5, 64, device=device)
    slots = torch.tensor([0, -1, 2, 1, 0], dtype=torch.int32, device=device)
    adapters = AdapterRef(table, slots)
    out = gated_linear(x, weight, activation="silu", adapters=adapters, impl="triton")
    expected = gated_linear(
        x.double(), weight.double(), activation="silu", adapters=adapters, impl="reference"
    )
    torch.testing.assert_close(out.double(), expected, atol=1e-4, rtol=1e-4)
