"""Plans applied to rows: effects, their order, and the plans that are refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.worker.tiny import GREEDY, new_row, step_plan, u32
from triptych.errors import ProtocolViolation
from triptych.types.facts import KvLayout
from triptych.types.sampling import SamplingParams
from triptych.types.step import StepPlan
from triptych_services.worker.attention.paged import PagedAttention
from triptych_services.worker.runner.input_batch import InputBatch, InputBuffers
from triptych_services.worker.runner.request_rows import RequestRows, StepRows


def make_rows(**changes: int) -> RequestRows:
    sizes = {"max_num_seqs": 4, "max_model_len": 20, "max_num_batched_tokens": 32}
    kv = KvLayout(changes.pop("num_blocks", 30), changes.pop("block_size", 4), 1, 1, 8, "float32")
    return RequestRows(**{**sizes, **changes}, kv=kv, vocab_size=100)


def gather_input_batch(rows: RequestRows, step: StepRows) -> InputBatch:
    inputs = InputBuffers(
        max_num_seqs=rows.live.size,
        max_num_batched_tokens=rows.max_num_batched_tokens,
        tables=rows.tables,
        attention=PagedAttention(),
    )
    return inputs.batch(inputs.gather(rows, step), torch.device("cpu"))


def take_step(rows: RequestRows, plan: StepPlan, *sampled: int) -> StepRows:
    step = rows.apply(plan)
    rows.advance(step)
    rows.record(step, np.array(sampled, np.int64))
    return step


def test_a_new_row_computes_its_chunk_and_samples_at_its_end():
    rows = make_rows()
    step = rows.apply(step_plan(1, new=[new_row(2, [5, 6, 7], [9])], chunks={2: 3}))
    batch = gather_input_batch(rows, step)
    assert batch.token_ids.tolist() == [5, 6, 7]
    assert batch.positions.tolist() == [0, 1, 2]
    assert batch.attention[0].slot_mapping.tolist() == [36, 37, 38]
    assert batch.attention[0].block_tables.tolist() == [[9]]
    assert batch.sampling_tokens.tolist() == [2]
    assert step.sampling_slots.tolist() == [2]


def test_a_sampled_token_is_the_next_input_in_a_new_block():
    rows = make_rows()
    take_step(rows, step_plan(1, new=[new_row(0, [5, 6, 7, 8], [9])], chunks={0: 4}), 42)
    batch = gather_input_batch(rows, rows.apply(step_plan(2, blocks=[(0, 3)])))
    assert batch.token_ids.tolist() == [42]
    assert batch.positions.tolist() == [4]
    assert batch.attention[0].slot_mapping.tolist() == [12]
    assert batch.attention[0].block_tables.tolist() == [[9, 3]]
    assert batch.attention[0].seq_lens.tolist() == [5]


def test_a_chunk_that_ends_early_samples_nothing():
    rows = make_rows()
    first = take_step(rows, step_plan(1, new=[new_row(1, range(10, 17), [4])], chunks={1: 3}))
    assert first.sampling_slots.size == 0
    step = rows.apply(step_plan(2, chunks={1: 4}, blocks=[(1, 5)]))
    batch = gather_input_batch(rows, step)
    assert batch.token_ids.tolist() == [13, 14, 15, 16]
    assert batch.attention[0].slot_mapping.tolist() == [19, 20, 21, 22]
    assert batch.sampling_tokens.tolist() == [3]


def test_rows_stand_in_slot_order_whatever_the_plans_order():
    rows = make_rows()
    plan = step_plan(
        1,
        new=[new_row(3, [30, 31], [1]), new_row(0, [1, 2, 3], [2]), new_row(2, [20], [3])],
        chunks={3: 2, 0: 2},
    )
    step = rows.apply(plan)
    batch = gather_input_batch(rows, step)
    assert step.slots.tolist() == [0, 2, 3]
    assert step.sampling_slots.tolist() == [2, 3]
    assert batch.token_ids.tolist() == [1, 2, 20, 30, 31]
    assert batch.attention[0].query_starts.tolist() == [0, 2, 3, 5]
    assert batch.attention[0].query_lens_list == (2, 1, 2)
    assert batch.attention[0].seq_lens_list == (2, 1, 2)
    assert (batch.attention[0].max_query_len, batch.attention[0].max_seq_len) == (2, 2)
    assert batch.sampling_tokens.tolist() == [2, 4]


def test_tensors_have_the_dtypes_of_the_attention_contract():
    rows = make_rows()
    plan = step_plan(1, new=[new_row(0, [1, 2, 3, 4, 5], [2, 3]), new_row(1, [1], [4])], chunks={0: 5})
    batch = gather_input_batch(rows, rows.apply(plan))
    (attention,) = batch.attention
    assert {batch.token_ids.dtype, batch.positions.dtype, attention.slot_mapping.dtype} == {torch.int64}
    assert {attention.block_tables.dtype, attention.query_starts.dtype, attention.seq_lens.dtype} == {
        torch.int32
    }
    assert attention.block_tables.tolist() == [[2, 3], [4, 0]]


def test_a_skipped_row_waits_and_goes_on_unchanged():
    rows = make_rows()
    take_step(rows, step_plan(1, new=[new_row(0, [1], [1]), new_row(1, [2], [2])]), 50, 60)
    step = take_step(rows, step_plan(2, skipped=[0]), 61)
    assert step.slots.tolist() == [1]
    batch = gather_input_batch(rows, rows.apply(step_plan(3)))
    assert batch.token_ids.tolist() == [50, 61]
    assert batch.positions.tolist() == [1, 2]


def test_a_slot_is_reused_in_the_plan_that_frees_it():
    rows = make_rows()
    take_step(rows, step_plan(1, new=[new_row(0, range(9), [1, 2, 3])], chunks={0: 9}), 50)
    plan = step_plan(2, removed=[0], new=[new_row(0, [7, 8], [3], slot_version=2)], chunks={0: 2})
    batch = gather_input_batch(rows, take_step(rows, plan, 51) and rows.apply(step_plan(3)))
    assert rows.slot_version[0] == 2
    assert rows.tables[0].ids[0].tolist() == [3, 0, 0, 0, 0]
    assert batch.token_ids.tolist() == [51]
    assert batch.attention[0].block_tables.tolist() == [[3]]


def test_a_prefix_hit_starts_behind_the_cached_tokens():
    rows = make_rows()
    row = new_row(0, range(10, 16), [7, 8], computed=4)
    batch = gather_input_batch(rows, rows.apply(step_plan(1, new=[row], chunks={0: 2})))
    assert batch.positions.tolist() == [4, 5]
    assert batch.attention[0].slot_mapping.tolist() == [32, 33]
    assert batch.attention[0].seq_lens.tolist() == [6]


def test_a_whole_prompt_hit_recomputes_its_last_token_and_writes_nothing():
    rows = make_rows()
    row = new_row(0, range(10, 18), [7, 8], computed=7, cached=8)
    step = rows.apply(step_plan(1, new=[row]))
    batch = gather_input_batch(rows, step)
    assert batch.token_ids.tolist() == [17]
    assert batch.attention[0].slot_mapping.tolist() == [-1]
    assert step.samples.tolist() == [True]
    rows.advance(step)
    rows.record(step, np.array([55]))
    batch = gather_input_batch(rows, rows.apply(step_plan(2, blocks=[(0, 9)])))
    assert batch.token_ids.tolist() == [55]
    assert batch.attention[0].slot_mapping.tolist() == [36]


def test_counts_advance_before_the_sampled_ids_are_known():
    rows = make_rows()
    first = rows.apply(step_plan(1, new=[new_row(0, [5], [9])]))
    rows.advance(first)
    second = rows.apply(step_plan(2))
    assert (second.starts.tolist(), second.samples.tolist()) == ([1], [True])
    rows.record(first, np.array([77]))
    assert gather_input_batch(rows, second).token_ids.tolist() == [77]


def test_new_blocks_keep_their_order_within_each_slot():
    rows = make_rows()
    take_step(
        rows, step_plan(1, new=[new_row(0, range(16), [1]), new_row(1, range(9), [2])], chunks={0: 4, 1: 4})
    )
    rows.apply(step_plan(2, chunks={0: 8, 1: 5}, blocks=[(1, 20), (0, 11), (1, 21), (0, 10)]))
    assert rows.tables[0].ids[0].tolist() == [1, 11, 10, 0, 0]
    assert rows.tables[0].ids[1].tolist() == [2, 20, 21, 0, 0]


def test_removed_rows_compute_no_more():
    rows = make_rows()
    take_step(rows, step_plan(1, new=[new_row(0, [1], [1]), new_row(1, [2], [2])]), 50, 60)
    assert rows.apply(step_plan(2, removed=[0])).slots.tolist() == [1]


def test_clearing_forgets_every_row():
    rows = make_rows()
    rows.apply(step_plan(1, new=[new_row(0, [1], [1]), new_row(3, [2], [2])]))
    rows.clear()
    assert not rows.live.any()
    assert not rows.tables[0].ids.any()
    assert rows.apply(step_plan(1)).slots.size == 0


def test_a_request_for_what_is_not_built_is_an_error_of_its_own():
    rows = make_rows()
    asking = SamplingParams(bad_words=((1 << 20,),))
    step = rows.apply(
        step_plan(1, new=[new_row(0, [1], [1]), new_row(2, [2], [2], sampling=asking, slot_version=8)])
    )
    assert step.slots.tolist() == [0, 2]
    ((row, error),) = step.row_errors.items()
    assert row == (2, 8)
    assert "sampling.bad_words" in error.message


@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids"])
def test_sampling_ids_outside_the_vocabulary_are_an_error_of_their_row(field):
    rows = make_rows()
    step = rows.apply(step_plan(1, new=[new_row(0, [1], [1], sampling=SamplingParams(**{field: (5, 100)}))]))
    assert f"sampling.{field}: token id 100" in step.row_errors[0, 1].message


ALIVE = [new_row(0, [1, 2, 3], [1])]  # slot 0 is live with three known tokens and room for four


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (step_plan(2, removed=[1]), "removed_slots: slot 1 is not live"),
        (step_plan(2, removed=[4]), "removed_slots: slot 4 is not below max_num_seqs 4"),
        (step_plan(2, removed=[0, 0]), "removed_slots names a slot twice"),
        (step_plan(2, skipped=[3]), "skipped_slots: slot 3 is not live"),
        (step_plan(2, chunks={2: 1}), "chunk_slots: slot 2 is not live"),
        (step_plan(2, chunks={0: 0}), "chunk_lengths: 0"),
        (
            step_plan(2, chunks={0: 2}),
            "slot 0 would compute more tokens than are known: to position 5, with 4",
        ),
        (step_plan(2, blocks=[(1, 5)]), "block_slots: slot 1 is not live"),
        (step_plan(2, blocks=[(0, 0)]), "block_ids: block ids 0..0 are not within 1..29"),
        (step_plan(2, blocks=[(0, 30)]), "block_ids: block ids 30..30"),
        (
            step_plan(2, blocks=[(0, b) for b in range(2, 7)]),
            "slot 0 would hold 6 blocks; a row has at most 5",
        ),
        (StepPlan(2, 1, block_slots=u32(0)), "block_slots has 1 entries, block_ids 0"),
        (StepPlan(2, 1, chunk_slots=u32(0)), "chunk_slots has 1 entries, chunk_lengths 0"),
        (step_plan(2, new=[new_row(0, [1], [2])]), "slot 0 is live with version 1"),
        (step_plan(2, new=[new_row(4, [1], [2])]), "slot 4 is not below max_num_seqs 4"),
        (step_plan(2, new=[new_row(1, [], [2])]), "slot 1 has 0 tokens"),
        (step_plan(2, new=[new_row(1, range(21), [2])]), "slot 1 has 21 tokens.*max_model_len is 20"),
        (step_plan(2, new=[new_row(1, [1, 2], [2], num_prompt=0)]), "2 tokens, 0 of them prompt"),
        (step_plan(2, new=[new_row(1, [1, 100], [2])]), "token id 100; the vocabulary has 100"),
        (step_plan(2, new=[new_row(1, [1, 2], [2], computed=2)]), "num_computed_tokens 2"),
        (step_plan(2, new=[new_row(1, [1, 2, 3], [2], cached=2)]), "num_cached_tokens 2"),
        (step_plan(2, new=[new_row(1, [1], [0])]), "new_rows: block ids 0..0"),
        (step_plan(2, new=[new_row(1, [1], range(1, 7))]), "slot 1 holds 6 blocks"),
        (
            step_plan(2, new=[new_row(1, range(5), [2])], chunks={1: 5}),
            "slot 1 would compute more tokens than its",
        ),
        (
            step_plan(
                2,
                new=[new_row(1, range(20), range(2, 7)), new_row(2, range(15), range(7, 12))],
                chunks={1: 18, 2: 14},
            ),
            "the step has 33 tokens; max_num_batched_tokens is 32",
        ),
        (
            step_plan(2, new=[new_row(1, range(20), range(2, 7))], chunks={1: 20}),
            "a token past max_model_len 20",
        ),
    ],
)
def test_a_plan_that_contradicts_the_rows_is_a_protocol_violation(plan, says):
    rows = make_rows()
    take_step(rows, step_plan(1, new=ALIVE, chunks={0: 3}), 9)
    with pytest.raises(ProtocolViolation, match=says):
        rows.apply(plan)


def test_tokens_of_huge_contexts_are_reserved_without_being_touched():
    rows = make_rows(
        max_num_seqs=4096, max_model_len=131072, num_blocks=10, block_size=16
    )  # 2 GiB if touched
    assert rows.apply(step_plan(1, new=[new_row(4095, [1], [1], sampling=GREEDY)])).slots.tolist() == [4095]
