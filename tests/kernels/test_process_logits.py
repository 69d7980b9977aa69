"""process_logits against logit-by-logit arithmetic, and its order of effects."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from triptych_kernels.cpu.library import forced_isa, usable_isas, use_threads
from triptych_kernels.logit_index import BiasColumns, PenaltyColumns, TokenColumns
from triptych_kernels.ops import process_logits


@pytest.fixture(params=[*usable_isas(), "plain"], autouse=True)
def form(request: pytest.FixtureRequest) -> Iterator[None]:
    """The native kernel for each instruction set that this processor has, and plain torch."""
    with forced_isa("" if request.param == "plain" else request.param):
        use_threads(2)
        yield


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
@pytest.mark.parametrize("given", ["allowed", "banned", "biases", "penalties", "all"])
def test_processes_like_the_reference(given: str, seed: int) -> None:
    logits, columns = random_case(seed)
    asked = columns if given == "all" else {given: columns[given]}
    before, rows = logits.clone(), ints(3, 0, 7, 6, 2)
    processed = process_logits(logits, rows, **asked)
    torch.testing.assert_close(
        processed, process_logits(logits, rows, **asked, impl="reference"), rtol=1e-5, atol=1e-5
    )
    assert not torch.equal(processed, before[rows])
    assert torch.equal(logits, before)


def test_rows_come_out_as_they_are_where_nothing_is_asked() -> None:
    logits = torch.randn(4, 70)
    assert torch.equal(process_logits(logits, ints(2, 0)), logits[[2, 0]])
    assert process_logits(logits, ints()).shape == (0, 70)


def test_logits_may_be_a_part_of_a_wider_tensor() -> None:
    wide = torch.randn(5, 40)
    for part in (wide[:, 3:30], wide[:, ::2], wide.T[:5].T):
        banned = TokenColumns(ints(1), ints(4))
        expected = process_logits(part.contiguous(), ints(4, 1), banned=banned)
        assert torch.equal(process_logits(part, ints(4, 1), banned=banned), expected)


def test_allowed_ids_restrict_only_the_rows_they_name() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    processed = process_logits(logits, ints(0, 1), allowed=TokenColumns(ints(1, 1), ints(2, 0)))
    assert processed.tolist() == [[1.0, 2.0, 3.0], [4.0, -torch.inf, 6.0]]


def test_a_bias_cannot_bring_back_a_masked_token() -> None:
    processed = process_logits(
        torch.zeros(1, 3),
        ints(0),
        allowed=TokenColumns(ints(0, 0), ints(0, 1)),
        banned=TokenColumns(ints(0), ints(1)),
        biases=BiasColumns(ints(0, 0, 0), ints(0, 1, 2), torch.tensor([5.0, 100.0, 100.0])),
    )
    assert processed.tolist() == [[5.0, -torch.inf, -torch.inf]]


def test_biases_of_the_same_token_add_up() -> None:
    processed = process_logits(
        torch.zeros(1, 2), ints(0), biases=BiasColumns(ints(0, 0), ints(1, 1), torch.tensor([1.0, 2.5]))
    )
    assert processed.tolist() == [[0.0, 3.5]]


def test_repetition_pushes_positive_and_negative_logits_down_in_prompt_and_output() -> None:
    processed = process_logits(
        torch.tensor([[4.0, -4.0, 4.0]]),
        ints(0),
        penalties=penalties([(0, 0, 0), (0, 1, 3)], presence=[0.0], frequency=[0.0], repetition=[2.0]),
    )
    assert processed.tolist() == [[2.0, -8.0, 4.0]]


def test_presence_and_frequency_count_the_output_alone() -> None:
    processed = process_logits(
        torch.tensor([[1.0, 1.0, 1.0]]),
        ints(0),
        penalties=penalties([(0, 0, 0), (0, 1, 3)], presence=[0.5], frequency=[0.25], repetition=[1.0]),
    )
    assert processed.tolist() == [[1.0, -0.25, 1.0]]


def test_penalties_come_after_biases_and_repetition_first() -> None:
    processed = process_logits(
        torch.tensor([[-1.0]]),
        ints(0),
        biases=BiasColumns(ints(0), ints(0), torch.tensor([5.0])),
        penalties=penalties([(0, 0, 1)], presence=[1.0], frequency=[0.5], repetition=[2.0]),
    )
    assert processed.tolist() == [[(-1.0 + 5.0) / 2.0 - 0.5 - 1.0]]


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
