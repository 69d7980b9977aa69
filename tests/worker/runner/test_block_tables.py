"""Tables of several KV groups: what plans fill in, what a step reads of them, and the plans that are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.worker.tiny import new_row, step_plan, u32
from triptych.errors import ProtocolViolation
from triptych.types.facts import KvGroup, KvKind, KvLayout
from triptych.types.step import NewRow, StepPlan
from triptych_services.worker.attention.paged import PagedAttention
from triptych_services.worker.runner.block_tables import GUESSING_SLOTS
from triptych_services.worker.runner.drafting.speculation import with_guesses
from triptych_services.worker.runner.input_batch import InputBatch, InputBuffers
from triptych_services.worker.runner.request_rows import RequestRows, StepRows

FULL = KvGroup(KvKind.FULL, 1, 4, 512)
WINDOW = KvGroup(KvKind.WINDOW, 1, 4, 512, window=5)
WIDE_WINDOW = KvGroup(KvKind.WINDOW, 1, 8, 512, window=5)
CHUNK = KvGroup(KvKind.CHUNK, 1, 4, 512, window=6)
STATE = KvGroup(KvKind.STATE, 1, 8, 64)


def rows_of(*groups: KvGroup, max_num_seqs: int = 4) -> RequestRows:
    kv = KvLayout(30, 4, 1, 1, 8, "float32", groups=groups, num_state_blocks=9)
    sizes = {"max_model_len": 40, "max_num_batched_tokens": 64, "vocab_size": 100, "max_samples_per_row": 9}
    return RequestRows(max_num_seqs=max_num_seqs, kv=kv, **sizes)


def row(slot: int, num_tokens: int, *tables: Any, **changes: Any) -> NewRow:
    first, *others = tables
    new = new_row(slot, range(num_tokens), first, **changes)
    return replace(new, group_block_ids=tuple(u32(*ids) for ids in others))


def gather(rows: RequestRows, step: StepRows) -> InputBatch:
    inputs = InputBuffers(
        max_num_seqs=rows.live.size,
        max_num_batched_tokens=rows.max_num_batched_tokens,
        tables=rows.tables,
        attention=PagedAttention(),
    )
    return inputs.batch(inputs.gather(rows, step), torch.device("cpu"))


def with_groups(plan: StepPlan, *groups: int) -> StepPlan:
    return replace(plan, block_groups=u32(*groups))


def test_each_group_has_places_of_its_own():
    rows = rows_of(FULL, WINDOW, WIDE_WINDOW)
    step = rows.apply(step_plan(1, new=[row(1, 6, [3, 5], [7, 2], [4])], chunks={1: 6}))
    full, window, wide = gather(rows, step).attention
    assert full.block_tables.tolist() == [[3, 5]]
    assert full.slot_mapping.tolist() == [12, 13, 14, 15, 20, 21]
    assert window.block_tables.tolist() == [[7, 2]]
    assert window.slot_mapping.tolist() == [28, 29, 30, 31, 8, 9]
    assert wide.block_tables.tolist() == [[4]]
    assert wide.slot_mapping.tolist() == [32, 33, 34, 35, 36, 37]
    assert full.query_starts.tolist() == window.query_starts.tolist() == [0, 6]


def test_new_blocks_go_to_the_tables_of_their_groups():
    rows = rows_of(FULL, WINDOW)
    rows.advance(
        rows.apply(step_plan(1, new=[row(0, 4, [3], [7]), row(2, 4, [4], [8])], chunks={0: 4, 2: 4}))
    )
    blocks = [(2, 9), (0, 10), (0, 11), (2, 12)]
    step = rows.apply(with_groups(step_plan(2, blocks=blocks), 1, 0, 1, 0))
    full, window = gather(rows, step).attention
    assert full.block_tables.tolist() == [[3, 10], [4, 12]]
    assert window.block_tables.tolist() == [[7, 11], [8, 9]]
    rows.clear()
    assert not rows.tables[0].ids.any()
    assert not rows.tables[1].ids.any()


def test_a_row_enters_without_what_lies_behind_its_window():
    rows = rows_of(FULL, WINDOW, CHUNK)
    # position 12 reads the keys from 8 on in the window, and from 12 on in the chunk
    entering = row(0, 13, [1, 2, 3, 4], [0, 0, 5, 6], [0, 0, 0, 7], computed=12)
    batch = gather(rows, rows.apply(step_plan(1, new=[entering], chunks={0: 1})))
    assert [group.block_tables.tolist() for group in batch.attention] == [
        [[1, 2, 3, 4]],
        [[0, 0, 5, 6]],
        [[0, 0, 0, 7]],
    ]


def test_states_are_read_where_the_last_token_left_them():
    rows = rows_of(FULL, STATE)
    step = rows.apply(step_plan(1, new=[row(0, 20, [1, 2], [3])], chunks={0: 8}))
    state = gather(rows, step).state
    assert state is not None
    assert (state.read_pages.tolist(), state.write_pages.tolist()) == ([0], [3])  # from zeros
    rows.advance(step)
    plan = with_groups(step_plan(2, chunks={0: 3}, blocks=[(0, 4), (0, 5)]), 0, 1)
    step = rows.apply(plan)
    state = gather(rows, step).state
    assert state is not None
    assert (state.read_pages.tolist(), state.write_pages.tolist()) == ([3], [5])  # page 3 is a snapshot now
    rows.advance(step)
    state = gather(rows, rows.apply(step_plan(3, chunks={0: 1}))).state
    assert state is not None
    assert (state.read_pages.tolist(), state.write_pages.tolist()) == ([5], [5])


def test_a_row_resumes_at_a_snapshot():
    rows = rows_of(FULL, STATE)
    entering = row(0, 18, [1, 2, 3, 4, 5], [0, 6, 7], computed=16)
    state = gather(rows, rows.apply(step_plan(1, new=[entering], chunks={0: 2}))).state
    assert state is not None
    assert (state.read_pages.tolist(), state.write_pages.tolist()) == ([6], [7])


def test_no_guess_is_the_last_token_of_a_page_of_states():
    """The page would be kept without it."""
    rows = rows_of(FULL, STATE, max_num_seqs=GUESSING_SLOTS + 1)
    for position, most in ((3, 4), (4, 3), (5, 2), (6, 1), (7, 1), (8, 7), (9, 6)):
        rows.clear()
        entering = [
            row(slot, position + 1, [1, 2, 3, 4], [0 if position > 8 else 3, 4, 5], computed=position)
            for slot in (0, GUESSING_SLOTS)
        ]
        limits = dict.fromkeys((0, GUESSING_SLOTS), 7)
        step = rows.apply(step_plan(1, new=entering, limits=limits))
        assert step.sample_limits is not None
        assert step.sample_limits.tolist() == [most, 1], "nothing is kept for the last slot"


def test_a_state_goes_through_the_guesses_that_were_right():
    rows = rows_of(FULL, STATE)
    entering = [row(slot, 3, [1 + slot, 5 + slot], [1 + slot], computed=0) for slot in (1, 3)]
    step = rows.apply(step_plan(1, new=entering, chunks={1: 3, 3: 3}, limits={3: 5}))
    step = with_guesses(rows, step, np.array([7, 8, 9]), np.array([0, 3]))
    assert columns_of_guesses(rows, step) == ([1, 3], [0, 0], [0, 3])
    counts = np.array([1, 3])
    rows.advance(step, counts)
    rows.record(step, np.array([4, 7, 8, 6]), counts)
    step = rows.apply(step_plan(2, skipped=[3]))
    assert columns_of_guesses(rows, step) == ([1], [0], [0])
    rows.advance(step)
    step = rows.apply(step_plan(3))
    assert columns_of_guesses(rows, step) == ([1, 3], [0, 2], [0, 0]), (
        "a step without the row changes nothing"
    )
    batch = gather(rows, step)
    assert batch.state is not None
    assert batch.positions.tolist() == [4, 5]
    assert (batch.state.read_pages.tolist(), batch.state.write_pages.tolist()) == ([2, 4], [2, 4])
    rows.advance(step)
    entering = [row(1, 2, [9], [8], computed=0)]
    step = rows.apply(step_plan(4, removed=[1], new=entering, chunks={1: 2}))
    assert columns_of_guesses(rows, step) == ([1, 3], [0, 0], [0, 0])


def columns_of_guesses(rows: RequestRows, step: StepRows) -> tuple[list[int], ...]:
    inputs = InputBuffers(
        max_num_seqs=rows.live.size,
        max_num_batched_tokens=64,
        tables=rows.tables,
        attention=PagedAttention(),
        max_sampling=9,
    )
    num_rows = inputs.gather(rows, step).num_rows
    assert inputs.state is not None
    guesses = inputs.state.guesses(lambda column: column[:num_rows])
    return guesses.slots.tolist(), guesses.replayed.tolist(), guesses.counts.tolist()


def with_pages(plan: StepPlan, pages: dict[int, int]) -> StepPlan:
    """Let rows go on with other pages of states."""
    return replace(plan, state_slots=u32(*pages), state_pages=u32(*pages.values()))


def test_a_row_goes_on_from_a_snapshot_on_another_page():
    rows = rows_of(FULL, STATE)
    entering = [row(0, 20, [1, 2, 3, 9], [0, 3], computed=10), row(2, 20, [4, 5, 6, 10], [7, 8], computed=8)]
    step = rows.apply(with_pages(step_plan(1, new=entering, chunks={0: 2, 2: 3}), {0: 5}))
    state = gather(rows, step).state
    assert state is not None
    assert (state.read_pages.tolist(), state.write_pages.tolist()) == ([3, 7], [5, 8])
    few = step.select(np.array([False, True]))
    assert few.state_reads is not None
    assert few.state_reads.tolist() == [0], "it reads the page of its table"
    rows.advance(step)
    step = rows.apply(
        with_pages(step_plan(2, chunks={0: 1, 2: 1}), {2: 4})
    )  # page 3 may be another row's now
    state = gather(rows, step).state
    assert state is not None
    assert (state.read_pages.tolist(), state.write_pages.tolist()) == ([5, 8], [5, 4])
    rows.advance(step)
    state = gather(rows, rows.apply(step_plan(3, chunks={0: 1, 2: 1}))).state
    assert state is not None
    assert (state.read_pages.tolist(), state.write_pages.tolist()) == ([5, 4], [5, 4])


@pytest.mark.parametrize(
    ("groups", "changes", "says"),
    [
        ((FULL, STATE), {"state_pages": u32(4)}, "state_slots has 0 entries, state_pages 1"),
        ((FULL, STATE), {"state_slots": u32(0), "state_pages": u32(9)}, "state_pages: .*within 1..8"),
        ((FULL, STATE), {"state_slots": u32(0), "state_pages": u32(0)}, "state_pages: .*within 1..8"),
        ((FULL, STATE), {"state_slots": u32(0, 0), "state_pages": u32(4, 5)}, "names a slot twice"),
        ((FULL, STATE), {"state_slots": u32(1), "state_pages": u32(4)}, "slot 1 is not live"),
        ((FULL, STATE), {"state_slots": u32(2), "state_pages": u32(4)}, "do not all compute a token"),
        (
            (FULL, STATE),
            {"state_slots": u32(3), "state_pages": u32(4)},
            "slot 3 computes from position 8 on, which",
        ),
        ((FULL, WINDOW), {"state_slots": u32(0), "state_pages": u32(4)}, "the model has no states"),
    ],
)
def test_pages_that_cannot_be_replaced_are_refused(groups, changes, says):
    rows = rows_of(*groups)
    tables = [[0, 3]] if STATE in groups else [[0, 8, 9]]
    entering = [row(slot, 12, [1, 2, 3], *tables, computed=9) for slot in (0, 2)]
    entering.append(row(3, 12, [4, 5, 6], *([[6, 7]] if STATE in groups else tables), computed=8))
    plan = step_plan(1, new=entering, chunks={0: 3, 3: 4}, skipped=[2])
    with pytest.raises(ProtocolViolation, match=says):
        rows.apply(replace(plan, **changes))


@pytest.mark.parametrize(
    ("groups", "entering", "says"),
    [
        ((FULL, WINDOW), row(0, 4, [1]), "slot 0 has blocks of 1 groups; the cache has 2"),
        ((FULL, WINDOW), row(0, 4, [0], [1]), "group 0 .full.: new_rows: block ids 0..0"),
        ((FULL, WINDOW), row(0, 13, [1, 2, 3, 4], [0, 0, 0, 6], computed=12), "group 1 .window.: .*block ids 0"),
        ((FULL, WINDOW), row(0, 13, [1, 2, 3, 4], [5, 0, 7, 6], computed=12), "null block comes after others"),
        ((FULL, WINDOW), row(0, 13, [1, 2, 3, 4], [30, 5, 7, 6], computed=12), "block ids 5..30"),
        ((FULL, CHUNK), row(0, 12, [1, 2, 3], [0, 0, 6], computed=11), "group 1 .chunk.: new_rows: block ids 0"),
        ((FULL, STATE), row(0, 9, [1, 2, 3], [0, 6], computed=8), "group 1 .state.: new_rows: block ids 0"),
        ((FULL, STATE), row(0, 4, [1], [9]), "within 1..8"),
        ((FULL, STATE), row(0, 9, [1, 2, 3], [5, 6], computed=8, cached=9), "they are equal in a model with states"),
    ],
)  # fmt: skip
def test_a_row_without_what_it_reads_is_refused(groups, entering, says):
    with pytest.raises(ProtocolViolation, match=says):
        rows_of(*groups).apply(step_plan(1, new=[entering], chunks={0: 1}))


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (with_groups(step_plan(2, blocks=[(0, 5)]), 2), "block_groups: 2 is not below 2"),
        (with_groups(step_plan(2, blocks=[(0, 5)]), 0, 0), "block_slots has 1 entries, block_groups 2"),
        (with_groups(step_plan(2, blocks=[(0, 0)]), 1), "group 1 .state.: block_ids: block ids 0..0"),
        (step_plan(2, chunks={0: 4}), "more tokens than its blocks hold: to position 10, .* blocks for 8"),
        (step_plan(2, chunks={0: 3}, blocks=[(0, 5)]), "more tokens than its blocks hold: .* blocks for 8"),
        (
            with_groups(step_plan(2, chunks={0: 3}, blocks=[(0, 5), (0, 6)]), 0, 1),
            "tokens of two blocks of states, each of 8",
        ),
    ],
)
def test_a_step_beyond_the_tables_is_refused(plan, says):
    rows = rows_of(FULL, STATE)
    rows.advance(rows.apply(step_plan(1, new=[row(0, 12, [1, 2], [3])], chunks={0: 6})))
    with pytest.raises(ProtocolViolation, match=says):
        rows.apply(plan)


def test_a_smaller_step_leaves_out_the_readers_of_any_group():
    rows = rows_of(FULL, WINDOW)
    rows.apply(step_plan(1, new=[row(0, 4, [1], [2])], chunks={0: 3}))
    # slot 1 enters last and leaves; slot 2 reads a block of the window group that slot 1 writes
    entering = [row(2, 9, [7, 8, 9], [0, 5, 10], computed=8), row(1, 8, [3, 4], [6, 5])]
    step = rows.apply(step_plan(2, new=entering, chunks={0: 1, 1: 8, 2: 1}))
    stays = rows.rows_without_newest_prompts(step)
    assert stays is not None
    assert step.slots[stays].tolist() == [0]


def test_tables_are_taken_over():
    rows, other = rows_of(FULL, WINDOW), rows_of(FULL, WINDOW)
    rows.advance(rows.apply(step_plan(1, new=[row(0, 4, [3], [7])], chunks={0: 4})))
    other.take_over(rows)
    step = other.apply(with_groups(step_plan(2, blocks=[(0, 8), (0, 9)]), 1, 0))
    full, window = gather(other, step).attention
    assert (full.block_tables.tolist(), window.block_tables.tolist()) == ([[3, 9]], [[7, 8]])
    assert np.array_equal(other.num_known, rows.num_known)
