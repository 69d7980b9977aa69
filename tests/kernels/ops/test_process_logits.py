"""process_logits against logit-by-logit arithmetic, and its order of effects."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from torch import Tensor

from tests.kernels.operands import ModelCall, SmallOperands, meta_float32, meta_int64
from tests.kernels.ops.implementations import Implementation, implementations_of
from triptych_kernels.logit_index import BiasColumns, PenaltyColumns, TokenColumns
from triptych_kernels.ops import process_logits

Columns = TokenColumns | BiasColumns | PenaltyColumns

implementation = implementations_of("process_logits")


def process(implementation: Implementation, logits: Tensor, rows: Tensor, **asked: Columns) -> Tensor:
    """Process on the implementation's device, and return the result on the host."""
    device = implementation.device
    on_device = {
        name: type(columns)(*(getattr(columns, field.name).to(device) for field in fields(columns)))
        for name, columns in asked.items()
    }
    processed: Tensor = implementation(process_logits, logits.to(device), rows.to(device), **on_device)
    return processed.cpu()


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def penalties(
    entries: list[tuple[int, int, int]],
    *,
    presence: list[float],
    frequency: list[float],
    repetition: list[float],
) -> PenaltyColumns:
    """Entries are (row, token id, count in the output)."""
    rows, token_ids, counts = (ints(*column) for column in zip(*entries, strict=True))
    return PenaltyColumns(
        rows, token_ids, counts, torch.tensor(presence), torch.tensor(frequency), torch.tensor(repetition)
    )


def random_case(seed: int) -> tuple[Tensor, dict[str, TokenColumns | BiasColumns | PenaltyColumns]]:
    generator = torch.Generator().manual_seed(seed)
    num_rows, vocab_size = 5, 23
    logits = torch.randn(num_rows + 3, vocab_size, generator=generator) * 3

    def entries(count: int) -> tuple[Tensor, Tensor]:
        places = torch.randperm(num_rows * vocab_size, generator=generator)[:count]
        places = places[(places // vocab_size).argsort()]  # ascending by row, in any order within
        return places // vocab_size, places % vocab_size

    rows, token_ids = entries(40)
    bias_rows, bias_token_ids = entries(9)
    return logits, {
        "allowed": TokenColumns(*entries(7)),
        "banned": TokenColumns(*entries(6)),
        "biases": BiasColumns(bias_rows, bias_token_ids, torch.randn(9, generator=generator)),
        "penalties": PenaltyColumns(
            rows,
            token_ids,
            torch.randint(0, 4, (40,), generator=generator),
            torch.rand(num_rows, generator=generator) * 4 - 2,
            torch.rand(num_rows, generator=generator) * 4 - 2,
            torch.rand(num_rows, generator=generator) + 0.5,
        ),
    }


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("given", ["nothing", "allowed", "banned", "biases", "penalties", "all"])
def test_processes_like_the_reference(given: str, seed: int, implementation: Implementation) -> None:
    logits, columns = random_case(seed)
    asked = {name: columns[name] for name in columns if given in (name, "all")}
    before, rows = logits.clone(), ints(3, 0, 7, 6, 2)
    processed = process(implementation, logits, rows, **asked)
    expected = process_logits(logits, rows, **asked, impl="reference")
    torch.testing.assert_close(processed, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(processed, before[rows]) == (given == "nothing")
    assert torch.equal(logits, before)


def test_rows_come_out_as_they_are_where_nothing_is_asked(implementation: Implementation) -> None:
    logits = torch.randn(4, 70)
    assert torch.equal(process(implementation, logits, ints(2, 0)), logits[[2, 0]])
    assert process(implementation, logits, ints()).shape == (0, 70)
    none = TokenColumns(ints(), ints())
    assert torch.equal(process(implementation, logits, ints(1, 0), allowed=none, banned=none), logits[[1, 0]])


def test_logits_may_be_a_view(implementation: Implementation) -> None:
    wide = torch.randn(5, 40)
    for part in (wide[:, 3:30], wide[:, ::2], wide.T[:5].T):
        banned = TokenColumns(ints(1), ints(4))
        expected = process(implementation, part.contiguous(), ints(4, 1), banned=banned)
        assert torch.equal(process(implementation, part, ints(4, 1), banned=banned), expected)


def test_allowed_ids_restrict_only_the_rows_they_name(implementation: Implementation) -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    processed = process(implementation, logits, ints(0, 1), allowed=TokenColumns(ints(1, 1), ints(2, 0)))
    assert processed.tolist() == [[1.0, 2.0, 3.0], [4.0, -torch.inf, 6.0]]


def test_a_bias_cannot_bring_back_a_masked_token(implementation: Implementation) -> None:
    processed = process(
        implementation,
        torch.zeros(1, 3),
        ints(0),
        allowed=TokenColumns(ints(0, 0), ints(0, 1)),
        banned=TokenColumns(ints(0), ints(1)),
        biases=BiasColumns(ints(0, 0, 0), ints(0, 1, 2), torch.tensor([5.0, 100.0, 100.0])),
    )
    assert processed.tolist() == [[5.0, -torch.inf, -torch.inf]]


def test_biases_of_the_same_token_add_up(implementation: Implementation) -> None:
    processed = process(
        implementation,
        torch.zeros(1, 2),
        ints(0),
        biases=BiasColumns(ints(0, 0), ints(1, 1), torch.tensor([1.0, 2.5])),
    )
    assert processed.tolist() == [[0.0, 3.5]]


def test_repetition_lowers_positive_and_negative_logits(implementation: Implementation) -> None:
    processed = process(
        implementation,
        torch.tensor([[4.0, -4.0, 4.0]]),
        ints(0),
        penalties=penalties([(0, 0, 0), (0, 1, 3)], presence=[0.0], frequency=[0.0], repetition=[2.0]),
    )
    assert processed.tolist() == [[2.0, -8.0, 4.0]]


def test_presence_and_frequency_count_only_the_output(implementation: Implementation) -> None:
    processed = process(
        implementation,
        torch.tensor([[1.0, 1.0, 1.0]]),
        ints(0),
        penalties=penalties([(0, 0, 0), (0, 1, 3)], presence=[0.5], frequency=[0.25], repetition=[1.0]),
    )
    assert processed.tolist() == [[1.0, -0.25, 1.0]]


def test_penalties_come_after_biases_and_repetition_first(implementation: Implementation) -> None:
    processed = process(
        implementation,
        torch.tensor([[-1.0]]),
        ints(0),
        biases=BiasColumns(ints(0), ints(0), torch.tensor([5.0])),
        penalties=penalties([(0, 0, 1)], presence=[1.0], frequency=[0.5], repetition=[2.0]),
    )
    assert processed.tolist() == [[(-1.0 + 5.0) / 2.0 - 0.5 - 1.0]]


def test_many_entries_reach_several_rows(implementation: Implementation) -> None:
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
    torch.testing.assert_close(
        process(implementation, logits, ints(2, 0, 1), **asked), expected, rtol=1e-5, atol=1e-5
    )
    assert expected[0].isfinite().sum() > vocab_size - 700
    assert expected[2].isneginf().sum() > vocab_size - 700


def test_biases_of_one_token_add_up_in_any_order(implementation: Implementation) -> None:
    # 150 entries of one row are more than one program's; token 0 comes back in each
    token_ids = torch.arange(150) % 75
    biases = torch.randn(152, generator=torch.Generator().manual_seed(0))
    rows = torch.cat([ints(0), torch.ones(150, dtype=torch.int64), ints(3)])
    columns = BiasColumns(rows, torch.cat([ints(5), token_ids, ints(5)]), biases)
    processed = process(implementation, torch.zeros(4, 80), torch.arange(4), biases=columns)
    expected = torch.zeros(4, 80)
    expected[0, 5], expected[3, 5] = biases[0], biases[-1]
    expected[1, :75] = biases[1:76] + biases[76:151]
    torch.testing.assert_close(processed, expected, rtol=0, atol=1e-6)


def test_a_masked_token_stays_masked_under_biases_and_penalties(implementation: Implementation) -> None:
    asked: dict[str, Columns] = {
        "banned": TokenColumns(ints(0), ints(1)),
        "biases": BiasColumns(ints(0), ints(1), torch.tensor([100.0])),
        "penalties": PenaltyColumns(
            ints(0), ints(1), ints(2), torch.tensor([-9.0]), torch.tensor([-9.0]), torch.tensor([0.5])
        ),
    }
    assert process(implementation, torch.zeros(1, 3), ints(0), **asked).tolist() == [[0.0, -torch.inf, 0.0]]


def test_columns_of_unequal_length_are_named() -> None:
    logits = torch.zeros(2, 3)
    with pytest.raises(
        ValueError, match=r"banned must have columns of one length, not rows \[1\], token_ids \[2\]"
    ):
        process_logits(logits, ints(0, 1), banned=TokenColumns(ints(0), ints(0, 1)))
    with pytest.raises(ValueError, match=r"biases \[1\]"):
        process_logits(logits, ints(0, 1), biases=BiasColumns(ints(0, 1), ints(0, 1), torch.zeros(1)))
    with pytest.raises(ValueError, match=r"rows \[2\], presence \[1\]"):
        process_logits(
            logits,
            ints(0, 1),
            penalties=penalties([(0, 0, 0)], presence=[0.0], frequency=[0.0, 0.0], repetition=[1.0, 1.0]),
        )
    with pytest.raises(ValueError, match=r"rows \[2\] torch.float32 must be \[num_rows\] torch.int64"):
        process_logits(logits, torch.zeros(2))


def _model_call(num_rows: int, vocab_size: int, num_entries: int) -> Tensor:
    entries = meta_int64(num_entries), meta_int64(num_entries)
    strengths = (meta_float32(num_rows) for _ in range(3))
    return process_logits(
        meta_float32(256, vocab_size),
        meta_int64(num_rows),
        allowed=TokenColumns(*entries),
        banned=TokenColumns(*entries),
        biases=BiasColumns(*entries, meta_float32(num_entries)),
        penalties=PenaltyColumns(*entries, meta_int64(num_entries), *strengths),
        impl="triton",
    )


MODEL_CALLS = {
    "128256": ModelCall(lambda: _model_call(256, 128256, 4000)),
    "one entry each": ModelCall(lambda: _model_call(1, 49152, 1)),
}


def launch_small(draw: SmallOperands) -> None:
    rows, token_ids = draw.tensor([0, 0, 1, 2, 2, 2]), draw.tensor([0, 1030, 7, 1, 2, 3])
    ones, counts = draw.tensor([1.0, 1.0, 1.0]), torch.arange(6, device=draw.device)
    process_logits(
        torch.randn(6, draw.vocab_size, device=draw.device),
        draw.tensor([0, 2, 5]),
        allowed=TokenColumns(rows[:2], token_ids[:2]),
        banned=TokenColumns(rows[2:3], token_ids[2:3]),
        biases=BiasColumns(rows, token_ids, torch.randn(6, device=draw.device)),
        penalties=PenaltyColumns(rows, token_ids, counts, ones, ones, ones),
        impl="triton",
    )
