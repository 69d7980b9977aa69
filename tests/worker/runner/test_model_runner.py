"""The runner's steps against a model whose every answer can be predicted by hand."""

from __future__ import annotations

import numpy as np
import pytest

from tests.worker.tiny import (
    EchoModel,
    new_row,
    next_token,
    runner_for,
    step_plan,
    tiny_architecture,
    tiny_config,
)
from triptych.errors import ProtocolViolation
from triptych.types.sampling import SamplingParams
from triptych.types.step import StepPlan
from triptych_services.worker.runner.startup.warm_up import warm_up

VOCAB = 97


def echo_runner(poisoned_tokens=(), **arguments):
    """A runner over an `EchoModel`, with block size 4."""
    config = tiny_config(tiny_architecture(vocab_size=VOCAB), **arguments)
    return runner_for(EchoModel(VOCAB, poisoned_tokens), config)


def continuation(prompt, length):
    """The greedy tokens that an `EchoModel` says after a prompt."""
    tokens = list(prompt)
    for _ in range(length):
        tokens.append(next_token(tokens, VOCAB))
    return tokens[len(prompt) :]


def test_two_plans_in_a_row_need_no_token_between_them():
    runner, prompt = echo_runner(), [5, 6, 7]
    plans = [
        step_plan(1, new=[new_row(0, prompt, [9])], chunks={0: 3}),
        step_plan(2),
        step_plan(3, blocks=[(0, 4)]),
    ]
    tokens = [int(runner.execute(plan).token_ids[0]) for plan in plans]
    assert tokens == continuation(prompt, 3)


def test_a_prompt_in_chunks_says_what_it_says_whole():
    runner, prompt = echo_runner(), list(range(40, 51))
    plans = [
        step_plan(1, new=[new_row(1, prompt, [3])], chunks={1: 3}),
        step_plan(2, chunks={1: 5}, blocks=[(1, 8)]),
        step_plan(3, chunks={1: 3}, blocks=[(1, 2)]),
        step_plan(4),
    ]
    results = [runner.execute(plan) for plan in plans]
    assert [result.token_ids.size for result in results] == [0, 0, 1, 1]
    assert [int(result.token_ids[0]) for result in results[2:]] == continuation(prompt, 2)


def test_only_rows_that_sample_get_logits():
    model = EchoModel(VOCAB)
    runner = runner_for(model, tiny_config())
    runner.execute(
        step_plan(1, new=[new_row(0, range(8), [1, 2]), new_row(1, [3, 4], [3])], chunks={0: 5, 1: 2})
    )
    assert model.num_logit_rows == 1


def test_a_whole_prompt_hit_answers_from_the_shared_block_and_writes_nothing():
    model = EchoModel(VOCAB)
    runner, prompt = runner_for(model, tiny_config()), [11, 12, 13, 14]
    runner.execute(step_plan(1, new=[new_row(0, prompt, [5])], chunks={0: 4}))
    result = runner.execute(step_plan(2, skipped=[0], new=[new_row(1, prompt, [5], computed=3, cached=4)]))
    assert model.written_slots == []
    assert result.token_ids.tolist() == continuation(prompt, 1)
    result = runner.execute(step_plan(3, blocks=[(0, 6), (1, 7)]))
    assert result.token_ids.tolist() == [continuation(prompt, 2)[1]] * 2
    assert model.written_slots == [6 * 4, 7 * 4]


def test_a_slot_and_blocks_are_reused_in_the_plan_that_frees_them():
    runner = echo_runner()
    runner.execute(step_plan(1, new=[new_row(0, range(7), [1, 2])], chunks={0: 7}))
    result = runner.execute(
        step_plan(2, removed=[0], new=[new_row(0, [8, 9], [2], slot_version=2)], chunks={0: 2})
    )
    assert result.token_ids.tolist() == continuation([8, 9], 1)
    assert runner.execute(step_plan(3)).token_ids.tolist() == continuation([8, 9], 2)[1:]


def test_a_resumed_request_goes_on_where_it_stopped():
    runner, prompt = echo_runner(), [4, 3, 2]
    said = continuation(prompt, 3)
    row = new_row(0, prompt + said[:2], [1, 2], num_prompt=3)
    assert runner.execute(step_plan(1, new=[row], chunks={0: 5})).token_ids.tolist() == said[2:]


def test_a_step_with_nothing_to_compute_has_an_empty_result():
    runner = echo_runner()
    runner.execute(step_plan(1, new=[new_row(0, [1], [1])]))
    result = runner.execute(step_plan(2, skipped=[0]))
    assert (result.step_id, result.token_ids.size, result.logprobs, result.row_errors) == (2, 0, None, {})
    assert runner.execute(step_plan(3, removed=[0])).token_ids.size == 0


def test_a_row_whose_logits_are_nan_fails_alone():
    poison = 50
    runner = echo_runner(poisoned_tokens=[poison])
    rows = [new_row(0, [1, 2], [1]), new_row(1, [3, poison], [2], slot_version=7), new_row(3, [4, 5], [3])]
    result = runner.execute(step_plan(1, new=rows, chunks={0: 2, 1: 2, 3: 2}))
    first, third = continuation([1, 2], 2), continuation([4, 5], 2)
    assert result.token_ids.tolist() == [first[0], third[0]]
    assert result.token_counts.tolist() == [1, 0, 1]
    ((row, error),) = result.row_errors.items()
    assert row == (1, 7)
    assert "NaN" in error.message
    result = runner.execute(step_plan(2, removed=[1]))
    assert result.token_ids.tolist() == [first[1], third[1]]


def test_logprobs_beside_a_failed_row_name_their_tokens():
    runner = echo_runner(poisoned_tokens=[50])
    asking = SamplingParams(temperature=0, logprobs=1)
    rows = [new_row(slot, [token], [1 + slot], sampling=asking) for slot, token in enumerate((50, 4, 50, 7))]
    result = runner.execute(step_plan(1, new=rows))
    assert result.token_counts.tolist() == [0, 1, 0, 1]
    assert result.logprobs.rows.tolist() == [0, 1]
    chosen = result.logprobs.token_ids[result.logprobs.offsets[:-1]]
    assert chosen.tolist() == result.token_ids.tolist() == [next_token([token], VOCAB) for token in (4, 7)]


def test_a_failed_row_can_go_on_until_it_is_removed():
    runner = echo_runner(poisoned_tokens=[50])
    runner.execute(step_plan(1, new=[new_row(0, [50], [1])]))
    assert runner.execute(step_plan(2)).token_ids.tolist() == [next_token([50, 0], VOCAB)]


def test_an_unserved_request_is_an_error_beside_its_neighbours_tokens():
    runner = echo_runner()
    rows = [new_row(0, [1], [1], sampling=SamplingParams(bad_words=((VOCAB,),))), new_row(1, [2], [2])]
    result = runner.execute(step_plan(1, new=rows))
    assert [row.slot for row in result.row_errors] == [0]
    assert result.token_ids[1] == next_token([2], VOCAB)


@pytest.mark.parametrize("step_id", [0, 1, 3, 99])
def test_a_step_that_does_not_follow_the_last_is_refused(step_id):
    runner = echo_runner()
    runner.execute(step_plan(1))
    with pytest.raises(ProtocolViolation, match=f"step_id: {step_id} came after 1; expected 2"):
        runner.execute(StepPlan(step_id=step_id, last_result_seen=0))


def test_a_reset_forgets_rows_and_starts_at_step_1():
    runner = echo_runner()
    runner.execute(step_plan(1, new=[new_row(0, [1, 2], [1])], chunks={0: 2}))
    runner.reset()
    result = runner.execute(step_plan(1, new=[new_row(0, [3], [2])]))
    assert result.token_ids.tolist() == continuation([3], 1)


def test_a_reset_recovers_from_a_refused_plan():
    runner = echo_runner()
    with pytest.raises(ProtocolViolation):
        runner.execute(step_plan(1, new=[new_row(0, [1], [1])], skipped=[2]))
    runner.reset()
    assert runner.execute(step_plan(1, new=[new_row(0, [3], [2])])).token_ids.tolist() == continuation([3], 1)


def test_an_exception_in_the_model_is_not_swallowed(monkeypatch):
    model = EchoModel(VOCAB)
    runner = runner_for(model, tiny_config())
    monkeypatch.setattr(model, "compute_logits", lambda hidden: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        runner.execute(step_plan(1, new=[new_row(0, [1], [1])]))


def test_timings_are_told_by_stage():
    timings = echo_runner().execute(step_plan(1, new=[new_row(0, [1], [1])])).timings
    assert min(timings.prepare_ns, timings.forward_ns, timings.sample_ns) > 0
    assert timings.idle_ns == 0


@pytest.mark.parametrize(("block_size", "num_blocks"), [(1, 2), (1, 3), (1, 40), (4, 2), (16, 9)])
def test_a_warmed_up_runner_expects_step_1_and_holds_no_rows(block_size, num_blocks):
    runner = echo_runner(block_size=block_size, num_blocks=num_blocks)
    warm_up(runner)
    assert runner.execute(step_plan(1)).token_ids.size == 0
    assert runner.execute(step_plan(2)).token_ids.dtype == np.uint32
