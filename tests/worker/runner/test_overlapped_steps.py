"""Steps launched before the results of earlier ones are known say what they would say one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.worker.deferred import DeferredStream
from tests.worker.runner.test_random_plans import BUDGET, MAX_NUM_SEQS, NUM_BLOCKS, VOCAB, NaiveEngine
from tests.worker.sampling_kinds import KINDS
from tests.worker.step_runs import assert_same, plans, runner_for
from tests.worker.tiny import (
    EchoModel,
    new_row,
    next_token,
    step_plan,
    tiny_architecture,
    tiny_config,
)
from triptych.types.sampling import SamplingParams
from triptych_services.worker.context.rank_group import OneRank
from triptych_services.worker.loader.load import load_model
from triptych_services.worker.loader.random import RandomCheckpoint
from triptych_services.worker.runner.model_runner import ModelRunner

CPU = torch.device("cpu")


def echo_runner(model: EchoModel | None = None) -> tuple[ModelRunner, DeferredStream]:
    stream = DeferredStream()
    config = tiny_config(tiny_architecture(vocab_size=VOCAB))
    return runner_for(model or EchoModel(VOCAB), config, stream), stream


def continuation(prompt: list[int], length: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(length):
        tokens.append(next_token(tokens, VOCAB))
    return tokens[len(prompt) :]


def test_the_next_steps_are_launched_before_a_token_is_known() -> None:
    runner, stream = echo_runner()
    prompt = [5, 6, 7]
    pending = [
        runner.launch(plan)
        for plan in (
            step_plan(1, new=[new_row(2, prompt, [9])], chunks={2: 3}),
            step_plan(2),
            step_plan(3, blocks=[(2, 4)]),
            step_plan(4, new=[new_row(0, [8, 8], [3])], chunks={0: 2}),
        )
    ]
    assert not any(step.is_done() for step in pending)
    tokens = [step.wait().token_ids.tolist() for step in pending]
    said = continuation(prompt, 4)
    assert tokens == [[said[0]], [said[1]], [said[2]], [*continuation([8, 8], 1), said[3]]]
    assert [read.done for read in stream.reads] == [True] * 4


def test_waiting_for_a_step_waits_for_those_before_it() -> None:
    runner, _ = echo_runner()
    first = runner.launch(step_plan(1, new=[new_row(0, [3, 4], [1])], chunks={0: 2}))
    second = runner.launch(step_plan(2))
    assert second.wait().token_ids.tolist() == continuation([3, 4], 2)[1:]
    assert first.is_done()
    assert first.wait().token_ids.tolist() == continuation([3, 4], 1)
    assert second.wait() is second.wait()


@pytest.mark.thorough
@settings(max_examples=40, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 4))
def test_random_plans_say_what_single_requests_would_with_any_window(random: Any, window: int) -> None:
    model, stream = EchoModel(VOCAB), DeferredStream()
    config = tiny_config(
        tiny_architecture(vocab_size=VOCAB),
        max_num_seqs=MAX_NUM_SEQS,
        budget=BUDGET,
        num_blocks=NUM_BLOCKS,
        max_model_len=23,
    )
    runner = runner_for(model, config, stream)
    engine = NaiveEngine(random, 4, runner.facts.model.max_model_len)
    flying = []
    for _ in range(25):
        model.written_slots = []
        step = runner.launch(engine.plan())
        tokens, written = engine.expect()
        assert model.written_slots == written
        flying.append((step, tokens))
        while len(flying) >= window or (flying and random.random() < 0.2):
            step, tokens = flying.pop(0)
            result = step.wait()
            assert result.token_ids.tolist() == tokens
            assert result.row_errors == {}


_OF_KINDS = [[kind] for kind in KINDS] + [list(KINDS)]


@pytest.mark.parametrize("kinds", _OF_KINDS, ids=lambda kinds: "+".join(kinds))
def test_a_model_says_the_same_with_steps_in_flight_and_without(kinds: list[str]) -> None:
    architecture = tiny_architecture()
    config = tiny_config(architecture, max_num_seqs=6, num_blocks=80)
    model = load_model(config, RandomCheckpoint(architecture, seed=3))
    assert isinstance(model, nn.Module)
    alone = runner_for(model, config, None)
    expected = [alone.execute(plan) for plan in plans(kinds, 20)]
    ahead = runner_for(model, config, DeferredStream())
    flying = [ahead.launch(plan) for plan in plans(kinds, 20)]
    for one, other in zip((step.wait() for step in flying), expected, strict=True):
        assert_same(one, other)


@pytest.mark.parametrize(("kind", "waits"), [(kind, kind == "penalties") for kind in KINDS])
def test_only_penalties_wait_for_the_tokens_before(kind: str, waits: bool) -> None:
    runner, stream = echo_runner()
    row = new_row(0, [5, 6], [1], sampling=KINDS[kind], seed=1)
    runner.launch(step_plan(1, new=[row], chunks={0: 2}))
    second = runner.launch(step_plan(2))
    assert [read.done for read in stream.reads] == [waits, False]
    runner.launch(step_plan(3, removed=[0], new=[new_row(1, [5], [2])]))
    assert not second.is_done() or waits, "who has left asks nothing"
    assert not stream.reads[1].done


def test_a_late_token_is_not_written_into_the_next_request() -> None:
    runner, _ = echo_runner()
    first = runner.launch(step_plan(1, new=[new_row(0, [5, 6, 7], [1])], chunks={0: 3}))
    prompt = [9, 10, 11, 12, 13, 14]
    entering = new_row(0, prompt, [2, 3], slot_version=2)
    second = runner.launch(step_plan(2, removed=[0], new=[entering], chunks={0: 2}))
    assert first.wait().token_ids.tolist() == continuation([5, 6, 7], 1)
    assert second.wait().token_ids.size == 0
    third = runner.launch(step_plan(3, chunks={0: 4}))
    assert third.wait().token_ids.tolist() == continuation(prompt, 1)


def test_a_skipped_row_goes_on_with_the_token_that_arrived() -> None:
    runner, _ = echo_runner()
    runner.launch(step_plan(1, new=[new_row(0, [5, 6], [1])], chunks={0: 2})).wait()
    runner.launch(step_plan(2, skipped=[0], new=[new_row(1, [1], [2])])).wait()
    assert runner.execute(step_plan(3, skipped=[1])).token_ids.tolist() == continuation([5, 6], 2)[1:]


def test_a_row_that_fails_is_named_when_its_step_is_waited_for() -> None:
    poison = 50
    runner, _ = echo_runner(EchoModel(VOCAB, poisoned_tokens=[poison]))
    rows = [new_row(0, [1, 2], [1]), new_row(3, [3, poison], [2], slot_version=7)]
    first = runner.launch(step_plan(1, new=rows, chunks={0: 2, 3: 2}))
    second = runner.launch(step_plan(2))
    successor = new_row(3, [4], [5], slot_version=8)
    third = runner.launch(step_plan(3, removed=[3], new=[successor]))
    said = continuation([1, 2], 3)
    result = first.wait()
    assert (result.token_ids.tolist(), result.token_counts.tolist()) == ([said[0]], [1, 0])
    ((row, error),) = result.row_errors.items()
    assert row == (3, 7)
    assert "NaN" in error.message
    assert second.wait().token_ids.tolist() == [said[1], next_token([3, poison, 0], VOCAB)]
    assert third.wait().token_ids.tolist() == [said[2], *continuation([4], 1)]


def test_a_reset_waits_for_what_is_in_flight_and_forgets_it() -> None:
    runner, stream = echo_runner()
    runner.launch(step_plan(1, new=[new_row(0, [1, 2], [1])], chunks={0: 2}))
    runner.launch(step_plan(2))
    runner.reset()
    assert [read.done for read in stream.reads] == [True, True]
    first = runner.launch(step_plan(1, new=[new_row(0, [3], [2])]))
    second = runner.launch(step_plan(2))
    assert [int(step.wait().token_ids[0]) for step in (first, second)] == continuation([3], 2)


def test_timings_are_the_devices_own() -> None:
    runner, _ = echo_runner()
    timings = runner.execute(step_plan(1, new=[new_row(0, [1], [1])])).timings
    assert (timings.forward_ns, timings.gap_ns) == (5_000, 70)
    assert timings.prepare_ns > 0
    assert timings.sample_ns > 0


def test_a_decode_of_one_row_sends_little_of_the_longest_step() -> None:
    stream = DeferredStream()
    config = tiny_config(tiny_architecture(vocab_size=VOCAB), max_num_seqs=64, budget=4096)
    runner = runner_for(EchoModel(VOCAB), config, stream)
    runner.execute(step_plan(1, new=[new_row(0, range(9), [1, 2, 3])], chunks={0: 9}))
    runner.execute(step_plan(2))
    assert stream.uploaded_bytes[1] < 5_000


class MemoryHog(EchoModel):
    """Lacks memory for its next steps, as many as a test says."""

    num_failures = 0

    def forward(self, *arguments: Any) -> torch.Tensor:
        if self.num_failures:
            self.num_failures -= 1
            raise torch.OutOfMemoryError("tried to allocate 7.00 GiB")
        return super().forward(*arguments)


def test_a_step_that_lacks_memory_once_is_tried_again() -> None:
    model = MemoryHog(VOCAB)
    runner, _ = echo_runner(model)
    first = runner.launch(step_plan(1, new=[new_row(0, [1, 2], [1])], chunks={0: 2}))
    model.num_failures = 1
    second = runner.launch(step_plan(2))
    assert [int(step.wait().token_ids[0]) for step in (first, second)] == continuation([1, 2], 2)


def test_a_step_that_lacks_memory_is_not_tried_again_by_ranks() -> None:
    model = MemoryHog(VOCAB)
    config = tiny_config(tiny_architecture(vocab_size=VOCAB))
    runner = runner_for(model, config, DeferredStream(), OneRank(0, 2))
    model.num_failures = 1
    with pytest.raises(torch.OutOfMemoryError):
        runner.launch(step_plan(1, new=[new_row(0, [1, 2], [1])], chunks={0: 2}))
    assert model.num_failures == 0


def test_a_step_that_never_fits_fails_its_own_requests_by_name() -> None:
    model = MemoryHog(VOCAB)
    runner, _ = echo_runner(model)
    rows = [new_row(0, [1, 2], [1]), new_row(1, [7], [3], slot_version=5)]
    first = runner.launch(step_plan(1, new=rows, chunks={0: 2}))
    model.num_failures = 4
    entering = new_row(2, [4, 5, 6], [6], slot_version=4)
    second = runner.launch(step_plan(2, new=[entering], chunks={2: 2}, skipped=[1]))
    third = runner.launch(step_plan(3, removed=[0, 2]))
    assert first.wait().token_ids.tolist() == [*continuation([1, 2], 1), *continuation([7], 1)]
    result = second.wait()
    assert (result.token_ids.size, result.token_counts.tolist()) == (0, [0])
    assert sorted(result.row_errors) == [(0, 1), (2, 4)]
    assert "no memory for a step of 3 tokens of 2 requests" in result.row_errors[0, 1].message
    assert third.wait().token_ids.tolist() == continuation([7], 2)[1:]


class SmallMemory(EchoModel):
    """Has memory for steps of so many tokens."""

    max_tokens = 64

    def forward(self, token_ids: torch.Tensor, *arguments: Any) -> torch.Tensor:
        if len(token_ids) > self.max_tokens:
            raise torch.OutOfMemoryError("tried to allocate 7.00 GiB")
        return super().forward(token_ids, *arguments)


def test_a_step_without_memory_is_computed_without_its_newest_prompts() -> None:
    model = SmallMemory(VOCAB)
    runner, _ = echo_runner(model)
    logprobs = SamplingParams(temperature=0.0, logprobs=1)
    rows = [new_row(1, [1, 2], [1]), new_row(3, [7], [3], sampling=logprobs)]
    first = runner.launch(step_plan(1, new=rows, chunks={1: 2}))
    older = new_row(2, [9] * 5, [5, 6])
    second = runner.launch(step_plan(2, new=[older], chunks={2: 2}))
    model.max_tokens = 6
    newer = new_row(0, [4, 5, 6, 7], [8], slot_version=4)
    third = runner.launch(step_plan(3, new=[newer], chunks={2: 3, 0: 4}))
    fourth = runner.launch(step_plan(4, removed=[0], blocks=[(1, 9)]))
    said = [continuation([1, 2], 4), continuation([9] * 5, 2), continuation([7], 4)]
    assert first.wait().token_ids.tolist() == [said[0][0], said[2][0]]
    assert second.wait().token_ids.tolist() == [said[0][1], said[2][1]]
    result = third.wait()
    assert result.token_ids.tolist() == [said[0][2], said[1][0], said[2][2]]
    assert result.token_counts.tolist() == [0, 1, 1, 1]
    assert sorted(result.row_errors) == [(0, 4)]
    assert "no memory for a step of 9 tokens of 4 requests" in result.row_errors[0, 4].message
    assert result.logprobs is not None
    assert (result.logprobs.rows.tolist(), int(result.logprobs.token_ids[0])) == ([2], said[2][2])
    assert fourth.wait().token_ids.tolist() == [said[0][3], said[1][1], said[2][3]]


def test_a_row_that_reads_blocks_of_a_failed_prompt_fails() -> None:
    model = SmallMemory(VOCAB)
    runner, _ = echo_runner(model)
    model.max_tokens = 4
    prompt = [4, 5, 6, 7, 8]
    rows = [
        new_row(
            0, prompt, [1, 2], computed=4
        ),  # of one token, behind a block that slot 1 writes in this step
        new_row(1, prompt, [1, 3]),
        new_row(2, [7], [4]),
    ]
    result = runner.execute(step_plan(1, new=rows, chunks={1: 5}))
    assert result.token_ids.tolist() == continuation([7], 1)
    assert result.token_counts.tolist() == [0, 0, 1]
    assert sorted(row.slot for row in result.row_errors) == [0, 1]
