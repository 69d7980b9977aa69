"""The Triton process_logits against logit-by-logit arithmetic."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from torch import Tensor

from tests.kernels.test_process_logits import ints, random_case
from tests.kernels.triton.poison import poisoned_allocations
from triptych_kernels.logit_index import BiasColumns, PenaltyColumns, TokenColumns
from triptych_kernels.ops import process_logits

Columns = TokenColumns | BiasColumns | PenaltyColumns


def process(logits: Tensor, rows: Tensor, asked: dict[str, Columns], device: torch.device) -> Tensor:
    """Return the processed logits on the host."""
    on_device = {
        name: type(columns)(*(getattr(columns, field.name).to(device) for field in fields(columns)))
        for name, columns in asked.items()
    }
    with poisoned_allocations():
        return process_logits(logits.to(device), rows.to(device), **on_device, impl="triton").cpu()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("given", ["nothing", "allowed", "banned", "biases", "penalties", "all"])
def test_processes_like_the_reference(given: str, seed: int, device: torch.device) -> None:
    logits, columns = random_case(seed)
    asked = {name: columns[name] for name in columns if given in (name, "all")}
    before, rows = logits.clone(), ints(3, 0, 7, 6, 2)
    expected = process_logits(logits, rows, **asked, impl="reference")
    torch.testing.assert_close(process(logits, rows, asked, device), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(logits, before)


def test_entries_beyond_one_program_reach_rows_of_several(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(9)
    num_rows, vocab_size = 3, 9001

    def entries(count: int) -> tuple[Tensor, Tensor]:
        places = torch.randperm(num_rows * vocab_size, generator=generator)[:count].sort().values
        return places // vocab_size, places % vocab_size

    rows, token_ids = entries(700)
    logits = torch.randn(num_rows, vocab_size, generator=generator)
    asked: dict[str, Columns] = {
        "allowed": TokenColumns(*(column[-400:] for column in entries(1200))),  # none in the first row
        "banned": TokenColumns(*entries(600)),
        "biases": BiasColumns(*entries(130), torch.randn(130, generator=generator)),
        "penalties": PenaltyColumns(
            rows,
            token_ids,
            torch.randint(0, 4, (700,), generator=generator),
            torch.tensor([0.5, -0.5, 0.0]),
            torch.tensor([0.0, 0.3, -0.3]),
            torch.tensor([1.0, 2.0, 0.7]),
        ),
    }
    expected = process_logits(logits, ints(2, 0, 1), **asked, impl="reference")
    torch.testing.assert_close(process(logits, ints(2, 0, 1), asked, device), expected, rtol=1e-5, atol=1e-5)
    assert expected[0].isfinite().sum() > vocab_size - 700
    assert expected[2].isneginf().sum() > vocab_size - 700


def test_biases_of_one_token_add_up_wherever_they_stand(device: torch.device) -> None:
    # 150 entries of one row are more than one program's; token 0 comes back in each
    token_ids = torch.arange(150) % 75
    biases = torch.randn(152, generator=torch.Generator().manual_seed(0))
    rows = torch.cat([ints(0), torch.ones(150, dtype=torch.int64), ints(3)])
    columns = BiasColumns(rows, torch.cat([ints(5), token_ids, ints(5)]), biases)
    processed = process(torch.zeros(4, 80), torch.arange(4), {"biases": columns}, device)
    expected = torch.zeros(4, 80)
    expected[0, 5], expected[3, 5] = biases[0], biases[-1]
    expected[1, :75] = biases[1:76] + biases[76:151]
    assert torch.equal(processed, expected)


def test_a_masked_token_stays_masked_under_biases_and_penalties(device: torch.device) -> None:
    asked: dict[str, Columns] = {
        "banned": TokenColumns(ints(0), ints(1)),
        "biases": BiasColumns(ints(0), ints(1), torch.tensor([100.0])),
        "penalties": PenaltyColumns(
            ints(0), ints(1), ints(2), torch.tensor([-9.0]), torch.tensor([-9.0]), torch.tensor([0.5])
        ),
    }
    assert process(torch.zeros(1, 3), ints(0), asked, device).tolist() == [[0.0, -torch.inf, 0.0]]


def test_no_rows_and_no_entries_leave_nothing_to_do(device: torch.device) -> None:
    assert process(torch.randn(4, 70), ints(), {}, device).shape == (0, 70)
    logits = torch.randn(2, 70)
    none: dict[str, Columns] = {
        "allowed": TokenColumns(ints(), ints()),
        "banned": TokenColumns(ints(), ints()),
    }
    assert torch.equal(process(logits, ints(1, 0), none, device), logits[[1, 0]])


def test_logits_may_be_a_part_of_a_wider_tensor(device: torch.device) -> None:
    wide = torch.randn(5, 40).to(device)
    asked: dict[str, Columns] = {"allowed": TokenColumns(ints(1, 1), ints(4, 7))}
    for part in (wide[:, 3:30], wide[:, ::2]):
        expected = process(part.contiguous(), ints(4, 1), asked, device)
        assert torch.equal(process(part, ints(4, 1), asked, device), expected)
