"""adapt_embedding: embeddings with what the low-rank adapters of their rows add."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.operands import ModelCall, SmallOperands, meta, meta_float32, meta_int64
from tests.kernels.ops.implementations import Implementation, implementations_of
from triptych_kernels.ops import adapt_embedding
from triptych_kernels.weights.adapter_tables import create_adapter_table
from triptych_kernels.weights.adapters import AdaptedRows, AdapterRef, Factors

implementation = implementations_of("adapt_embedding")
NUM_TOKENS = 96


@pytest.mark.parametrize(("hidden_size", "rank"), [(24, 5), (64, 1), (70, 64), (33, 130)])
def test_rows_get_what_their_adapter_adds(
    implementation: Implementation, hidden_size: int, rank: int
) -> None:
    generator = torch.Generator().manual_seed(hidden_size)
    device = implementation.device
    table = create_adapter_table(
        torch.empty(NUM_TOKENS, hidden_size, device=device),
        [AdaptedRows(0, hidden_size)],
        num_slots=3,
        max_rank=rank + 3,
        is_lookup=True,
    )
    own = [
        Factors(
            torch.randn(size, NUM_TOKENS, generator=generator),
            torch.randn(hidden_size, size, generator=generator),
        )
        for size in (rank, rank + 3)
    ]
    table.put(1, table.pack({0: own[1]}, torch.float32))  # all of which goes with the next one
    table.put(1, table.pack({0: own[0]}, torch.float32))
    table.put(2, table.pack({0: own[1]}, torch.float32))
    ids, slots = [3, 0, NUM_TOKENS - 1, 7, 3, *range(20)], [1, -1, 1, 0, 2, *[-1] * 20]
    before = torch.randn(len(ids), hidden_size, generator=generator)
    out = before.clone().to(device)
    adapters = AdapterRef(table, torch.tensor(slots, dtype=torch.int32, device=device))
    found = implementation(adapt_embedding, out, torch.tensor(ids, device=device), adapters)
    assert found is out
    expected = before.double()
    for row, slot in ((0, 1), (2, 1), (4, 2)):
        expected[row] += own[slot - 1].b.double() @ own[slot - 1].a[:, ids[row]].double()
    torch.testing.assert_close(out.cpu().double(), expected, atol=1e-4, rtol=1e-5)
    assert torch.equal(out.cpu()[[1, 3, *range(5, 25)]], before[[1, 3, *range(5, 25)]])


def test_no_tokens_are_no_error(implementation: Implementation) -> None:
    table = create_adapter_table(
        torch.empty(9, 8, device=implementation.device), [AdaptedRows(0, 8)], num_slots=1, max_rank=1, is_lookup=True
    )  # fmt: skip
    slots = torch.empty(0, dtype=torch.int32, device=implementation.device)
    x = torch.empty(0, 8, device=implementation.device)
    ids = torch.empty(0, dtype=torch.int64, device=implementation.device)
    assert implementation(adapt_embedding, x, ids, AdapterRef(table, slots)).shape == (0, 8)


def _adapted(num_tokens: int) -> object:
    table = create_adapter_table(
        meta(128256, 4096), [AdaptedRows(0, 4096)], num_slots=8, max_rank=64, is_lookup=True
    )
    adapters = AdapterRef(table, meta(num_tokens, dtype=torch.int32))
    return adapt_embedding(meta_float32(num_tokens, 4096), meta_int64(num_tokens), adapters, impl="triton")


MODEL_CALLS = {
    "a token": ModelCall(lambda: _adapted(1)),
    "2048 tokens": ModelCall(lambda: _adapted(2048)),
}


def launch_small(draw: SmallOperands) -> None:
    table = create_adapter_table(
        draw.normal(draw.vocab_size, 72), [AdaptedRows(0, 72)], num_slots=3, max_rank=5, is_lookup=True
    )
    own = Factors(torch.randn(3, draw.vocab_size), torch.randn(72, 3))
    table.put(2, table.pack({0: own}, draw.dtype))
    adapters = AdapterRef(table, draw.tensor([2, -1, 0, 2, 1, -1, 2]).int())
    token_ids = torch.randint(draw.vocab_size, (7,), device=draw.device)
    adapt_embedding(draw.normal(7, 72).float(), token_ids, adapters, impl="triton")
