"""Inputs of steps with guesses: as rows of their own they are the same tokens, with other starts of rows."""

from __future__ import annotations

import numpy as np

from tests.worker.tiny import new_row, step_plan
from triptych.types.facts import KvLayout
from triptych.types.sampling import SamplingParams
from triptych_services.worker.runner.drafting.speculation import with_guesses
from triptych_services.worker.runner.request_rows import RequestRows, StepRows
from triptych_services.worker.runner.step_inputs import StepInputs, StepSizes

BLOCK_SIZE = 4


class TwoSlots:
    """The `AdapterSlots` of two adapters."""

    def slot_of(self, digest: str) -> int:
        return ("a", "b").index(digest)

    def release(self, slot: int) -> None: ...


def make_step() -> tuple[RequestRows, StepRows]:
    """Return a step of a decode with two guesses, a part of a prompt, a prompt with one guess, and a plain decode."""
    rows = RequestRows(
        max_num_seqs=5,
        max_model_len=24,
        max_num_batched_tokens=32,
        kv=KvLayout(40, BLOCK_SIZE, 1, 1, 8, "float32"),
        vocab_size=100,
        max_samples_per_row=4,
        adapters=TwoSlots(),
    )
    sampled = SamplingParams(temperature=0.7, top_p=0.9)
    entering = [
        new_row(0, [5, 6, 7], [1, 2], sampling=sampled, seed=11, adapter="a"),
        new_row(4, [8], [3, 4], seed=12),
    ]
    first = rows.apply(step_plan(1, new=entering, chunks={0: 3, 4: 1}))
    rows.advance(first)
    rows.record(first, np.array([20, 21]))
    entering = [
        new_row(1, [30, 31, 32, 33, 34, 35], [5, 6, 7], sampling=sampled, seed=13),
        new_row(3, [40, 41, 42], [8, 9], sampling=sampled, seed=14, adapter="b"),
    ]
    step = rows.apply(step_plan(2, new=entering, chunks={1: 4, 3: 3}, limits={0: 3, 3: 2}))
    return rows, with_guesses(rows, step, np.array([50, 51, 60]), np.array([2, 1, 0]))


def gather(rows: RequestRows, step: StepRows, *, splits_guesses: bool) -> tuple[StepInputs, StepSizes]:
    inputs = StepInputs(
        max_num_seqs=5,
        max_num_batched_tokens=32,
        tables=rows.tables,
        max_sampling=20,
        splits_guesses=splits_guesses,
    )
    return inputs, inputs.gather(rows, step)


def test_a_guess_is_a_row_with_the_blocks_of_its_request() -> None:
    inputs, sizes = gather(*make_step(), splits_guesses=True)
    assert inputs.token_ids[:12].tolist() == [20, 50, 51, 30, 31, 32, 33, 40, 41, 42, 60, 21]
    # each line: a decode and its guesses, a part of a prompt, a prompt and its guess, a decode
    assert sizes.query_lens.tolist() == [*[1, 1, 1], 4, *[3, 1], 1]
    assert sizes.seq_lens.tolist() == [*[4, 5, 6], 4, *[3, 4], 2]
    assert inputs.query_starts[:8].tolist() == [0, 1, 2, 3, 7, 10, 11, 12]
    assert inputs.seq_lens[:7].tolist() == sizes.seq_lens.tolist()
    assert inputs.groups[0].block_tables[:7, 0].tolist() == [*[1, 1, 1], 5, *[8, 8], 3]
    assert inputs.sampling_tokens[: sizes.num_sampling].tolist() == [*[0, 1, 2], *[9, 10], 11]
    assert (sizes.num_tokens, sizes.num_rows, sizes.num_sampling, sizes.max_seq_len) == (12, 7, 6, 6)


def test_tokens_and_places_are_those_of_one_query_per_row() -> None:
    """Positions, slots of the cache, adapters, and the parameters, seeds and positions of each place."""
    rows, step = make_step()
    (split, sizes), (whole, expected) = (gather(rows, step, splits_guesses=way) for way in (True, False))
    assert (sizes.num_tokens, sizes.num_sampling) == (expected.num_tokens, expected.num_sampling)
    assert expected.num_rows == 4
    tokens, places = slice(sizes.num_tokens), slice(sizes.num_sampling)
    for name, used in {
        "token_ids": tokens,
        "positions": tokens,
        "adapter_slots": tokens,
        "slot_mapping": tokens,
        "sampling_tokens": places,
        "sampling_adapters": places,
        **{f"sampling.{name}": places for name in split.sampling.columns},
    }.items():
        np.testing.assert_array_equal(split.arrays[name][used], whole.arrays[name][used], err_msg=name)
    assert split.adapter_slots[tokens].tolist() == [0, 0, 0, -1, -1, -1, -1, 1, 1, 1, 1, -1]
    assert split.sampling_adapters[places].tolist() == [0, 0, 0, 1, 1, -1]
