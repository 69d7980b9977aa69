"""Operands and rows for the tests of all ops with a recurrent state, and the promises about their bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.operands import meta
from tests.kernels.ops.implementations import Case, Implementation
from triptych_kernels.cpu.library import use_threads
from triptych_kernels.cpu.program import record
from triptych_kernels.cpu.recording import Recording
from triptych_kernels.state_batch import GuessedTokens, StateBatch

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""Sums of tens of products in float32 and a state that goes through tens of tokens, rounded once to the dtype."""
NUM_PAGES = 9


@dataclass(frozen=True)
class Recurrence:
    """An op, and how its operands are drawn."""

    op: Callable[..., Any]
    state_shape: tuple[int, ...]
    """Shape of a page."""
    sizes: Sequence[tuple[int, ...]]
    """Shape of each operand that has a row for each token, without its first axis."""
    parameters: Sequence[Tensor | None]
    options: dict[str, Any] = field(default_factory=dict)
    num_kept: int = 0
    """Numbers that are kept of a guess."""

    def tokens(self, num_tokens: int, dtype: torch.dtype) -> list[Tensor]:
        """Draw the operands, each a view of a larger tensor."""
        generator = torch.Generator().manual_seed(num_tokens)
        return [
            torch.randn((num_tokens, size[0] + 1, *size[1:]), generator=generator)[:, 1:].to(dtype)
            if len(size) > 1
            else torch.randn((num_tokens, size[0] + 3), generator=generator).to(dtype)[:, 2:-1]
            for size in self.sizes
        ]

    def state(self) -> Tensor:
        """Draw pages, as views of larger ones; page 0 holds NaN, and so does what lies between them."""
        pages = torch.full((NUM_PAGES, 5 + self.state_shape[0], *self.state_shape[1:]), torch.nan)
        generator = torch.Generator().manual_seed(0)
        pages[1:, 5:] = torch.randn((NUM_PAGES - 1, *self.state_shape), generator=generator)
        return pages[:, 5:]

    def __call__(
        self,
        call: Callable[..., Any],
        tokens: Sequence[Tensor],
        state: Tensor,
        batch: StateBatch,
        **options: Any,
    ) -> Tensor:
        """Compute by `call`, an implementation."""
        out: Tensor = call(self.op, *tokens, *self.parameters, state, batch, **self.options, **options)
        return out


def rows(lens: Sequence[int], read: Sequence[int], write: Sequence[int]) -> StateBatch:
    starts = torch.tensor([0, *lens]).cumsum(0).int()
    pages = (torch.tensor(each, dtype=torch.int32) for each in (read, write))
    return StateBatch(*pages, starts, tuple(lens))


def assert_like_reference(recurrence: Recurrence, case: Case) -> None:
    """Compare rows that begin, go on in their page, leave a snapshot, and keep nothing."""
    lens, read, write = (1, 18, 5, 2, 3), (0, 2, 3, 4, 0), (1, 2, 5, 0, 0)
    state, tokens = recurrence.state(), recurrence.tokens(sum(lens), case.dtype)
    expected_state = state.clone()
    batch = rows(lens, read, write)
    expected = recurrence(_reference, tokens, expected_state, batch)
    out = recurrence(case, tokens, state, batch)
    assert out.dtype == case.dtype
    assert expected.isfinite().all()
    tolerance = TOLERANCE[case.dtype]
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(state[1:], expected_state[1:], rtol=1e-5, atol=1e-5)
    assert state[0].isnan().all()
    for page in set(range(1, NUM_PAGES)) - set(write):
        assert torch.equal(state[page], recurrence.state()[page])
    for page in set(write) - {0}:
        assert not torch.equal(state[page], recurrence.state()[page])


def assert_same_bits_however_cut(recurrence: Recurrence, implementation: Implementation) -> None:
    for dtype in implementation.dtypes[:2]:
        total = 37
        tokens, whole = recurrence.tokens(total, dtype), recurrence.state()
        expected = recurrence(implementation, tokens, whole, rows([total], [3], [4]))
        for lens in ([1] * total, [16, 21], [5, 1, 27, 4]):
            state, first, read, outs = recurrence.state(), 0, 3, []
            for length in lens:
                part = [operand[first : first + length] for operand in tokens]
                outs.append(recurrence(implementation, part, state, rows([length], [read], [4])))
                first, read = first + length, 4
            assert torch.equal(torch.cat(outs), expected)
            assert torch.equal(state[4], whole[4])


def assert_same_bits_alone(recurrence: Recurrence, implementation: Implementation) -> None:
    """Compare each row of a batch with the same row alone, with one thread and with three."""
    for dtype in implementation.dtypes[:2]:
        lens = (3, 20, 1, 33)
        tokens, state = recurrence.tokens(sum(lens), dtype), recurrence.state()
        together = recurrence(implementation, tokens, state, rows(lens, (1, 2, 0, 4), (1, 2, 3, 4)))
        first = 0
        for row, length in enumerate(lens):
            own = [operand[first : first + length] for operand in tokens]
            for num_threads in (1, 3):
                use_threads(num_threads)
                alone_state = recurrence.state()
                batch = rows([length], [0 if row == 2 else row + 1], [row + 1])
                alone = recurrence(implementation, own, alone_state, batch)
                assert torch.equal(together[first : first + length], alone)
                assert torch.equal(state[row + 1], alone_state[row + 1])
            first += length


def assert_recorded(recurrence: Recurrence) -> None:
    """Compare a recorded program with the calls that it records, for steps of two sizes."""
    state, tokens = recurrence.state(), recurrence.tokens(12, torch.float32)
    inputs = [operand.contiguous() for operand in tokens]
    layout = [torch.zeros(size, dtype=torch.int32) for size in (3, 3, 4)]

    def forward(recording: Recording) -> list[Tensor]:
        stand_ins = [recording.input(memory, count="tokens") for memory in inputs]
        batch = StateBatch(*(recording.input(memory, count="rows") for memory in layout))
        return [recurrence(_itself, stand_ins, state, batch)]

    program = record(forward)
    for lens, read, write in (([4, 1, 7], [0, 2, 3], [1, 2, 4]), ([2, 1], [1, 4], [1, 4])):
        batch, expected_state = rows(lens, read, write), state.clone()
        part = [operand[: sum(lens)] for operand in inputs]
        expected = recurrence(_itself, part, expected_state, batch)
        for memory, values in zip(
            layout, (batch.read_pages, batch.write_pages, batch.query_starts), strict=True
        ):
            memory[: len(values)] = values
        program.run({"tokens": sum(lens), "rows": len(lens)})
        assert torch.equal(program.outputs[0][: sum(lens)], expected)
        assert torch.equal(state[1:], expected_state[1:])


def assert_guesses_are_taken_back(recurrence: Recurrence, implementation: Implementation) -> None:
    """Compare steps in which guesses come out wrong at any place with the tokens that are left, without guesses.

    Two rows are in each step: the one that guesses, and one that does not, in a slot without memory.
    """
    for dtype in implementation.dtypes[:2]:
        total = 52
        tokens, whole = recurrence.tokens(total, dtype), recurrence.state()
        expected = recurrence(implementation, tokens, whole, rows([total], [3], [4]))
        memory = torch.full((2, 21, recurrence.num_kept + 3), torch.nan)[:, :, 1:-2]
        state, first, read, replayed, outs = recurrence.state(), 0, 3, 0, []
        for num_known, num_guesses, num_right in (
            (2, 3, 2),
            (1, 3, 0),
            (1, 19, 19),
            (3, 2, 1),
            (1, 20, 18),
            (4, 0, 0),
        ):
            start, length = first + replayed, num_known + num_guesses
            part = [operand[start : start + num_known + num_right] for operand in tokens]
            wrong = [x[:1].expand(num_guesses - num_right, *x.shape[1:]) for x in recurrence.tokens(1, dtype)]
            other = [operand[7:9] for operand in tokens]
            own = [torch.cat(parts) for parts in zip(part, wrong, other, strict=True)]
            batch = replace(
                rows([length, 2], [read, 5], [4, 6]),
                guesses=GuessedTokens(ints(1, 99), ints(replayed, 0), ints(num_guesses, 0), memory),
            )
            out = recurrence(implementation, own, state, batch)
            outs.append(out[: num_known + num_right])
            first, read, replayed = start + num_known, 4, num_right
        assert first == total
        assert torch.equal(torch.cat(outs), expected)
        assert torch.equal(state[4], whole[4])
        assert memory[0].isnan().all(), "the memory of another slot"
        expected_state = recurrence.state()
        recurrence(implementation, [operand[7:9] for operand in tokens], expected_state, rows([2], [5], [6]))
        assert torch.equal(state[6], expected_state[6])


def assert_guesses_are_refused(recurrence: Recurrence) -> None:
    """Say so where an implementation takes no guesses, and where their memory does not fit."""
    tokens, state, batch = recurrence.tokens(3, torch.float32), recurrence.state(), rows([3], [0], [1])
    with pytest.raises(ValueError, match=rf"is None; it must be .*{recurrence.num_kept}\]"):
        recurrence(_itself, tokens, state, replace(batch, guesses=GuessedTokens(ints(0), ints(0), ints(1))))
    memory = torch.zeros(1, 2, recurrence.num_kept)
    with pytest.raises(ValueError, match="slots, replayed and counts of guesses"):
        recurrence(
            _itself,
            tokens,
            state,
            replace(batch, guesses=GuessedTokens(ints(0, 1), ints(0), ints(1), memory)),
        )
    batch = replace(batch, guesses=GuessedTokens(ints(0), ints(0), ints(1), memory))
    for implementation in ("reference", "torch"):
        with pytest.raises(ValueError, match="by the native kernels only"):
            recurrence(_itself, tokens, state, batch, impl=implementation)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def meta_rows(num_rows: int) -> StateBatch:
    return StateBatch(
        meta(num_rows, dtype=torch.int32),
        meta(num_rows, dtype=torch.int32),
        meta(num_rows + 1, dtype=torch.int32),
    )


def small_rows(device: torch.device) -> StateBatch:
    """Return the layout of 9 tokens."""
    batch = rows((1, 5, 3), (0, 2, 3), (1, 2, 0))
    return StateBatch(*(x.to(device) for x in (batch.read_pages, batch.write_pages, batch.query_starts)))


def _reference(op: Callable[..., Tensor], *operands: Any, **options: Any) -> Tensor:
    return op(*operands, **options, impl="reference")


def _itself(op: Callable[..., Tensor], *operands: Any, **options: Any) -> Tensor:
    return op(*operands, **options)
