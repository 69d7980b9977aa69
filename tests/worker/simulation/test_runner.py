"""The simulated runner: the real protocol, tokens that depend on their prefix alone, times of a model."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from tests.helpers.in_process import InProcessEngine
from tests.worker.simulated import (
    EOS,
    VOCAB_SIZE,
    WORD_IDS,
    SleepingClock,
    simulated_device,
    simulated_runner,
)
from tests.worker.tiny import new_row, step_plan
from triptych.config.step_times import StepTimeModel
from triptych.errors import ProtocolViolation
from triptych.types.output_limits import ThinkingBudget
from triptych.types.sampling import SamplingParams
from triptych_services.worker.simulation.sampler import NOTHING_ALLOWED

SAMPLED = SamplingParams(max_tokens=24, temperature=0.8)


def prompts(count):
    """Lengths around the block size and the budget, so that chunks end within and at the end of blocks."""
    rng = np.random.default_rng(3)
    return [rng.integers(0, VOCAB_SIZE, length).tolist() for length in (1, 3, 4, 5, 8, 17, 31, 40)[:count]]


def alone(prompt, sampling, seed, **runner):
    """Return a request's tokens without other requests, with its prompt whole, one step at a time."""
    engine = InProcessEngine(
        simulated_runner(**runner), steps_in_flight=1, max_num_seqs=1, enable_prefix_caching=False
    )
    return engine.generate([prompt], replace(sampling, seed=seed))[0]


def rounds_of(result):
    """Each sampling row's tokens and their log-probabilities."""
    counts = result.token_counts.tolist() or [1] * result.token_ids.size
    entries = {}
    if (columns := result.logprobs) is not None:
        for index, start, end in zip(columns.rows, columns.offsets, columns.offsets[1:], strict=False):
            entries[int(index)] = (
                columns.token_ids[start:end].tolist(),
                columns.logprobs[start:end].tolist(),
            )
    ends = np.cumsum(counts).tolist()
    return [
        [(int(result.token_ids[place]), entries.get(place)) for place in range(end - count, end)]
        for count, end in zip(counts, ends, strict=True)
    ]


def tokens_of(row, num_steps, **runner):
    """Return the tokens of one row over some steps, from its entry on, with blocks for all of it."""
    runner = simulated_runner(**runner)
    length = row.token_ids.size
    plans = [step_plan(1, new=[row], chunks={0: length} if length > 1 else {})]
    plans += [step_plan(number) for number in range(2, num_steps + 1)]
    return [int(runner.execute(plan).token_ids[0]) for plan in plans]


@pytest.mark.parametrize("has_blocks", [False, True])
@pytest.mark.parametrize("tokens_per_step", [1, 4])
@pytest.mark.parametrize(
    ("num_blocks", "budget", "prefix_caching"),
    [(200, 64, True), (20, 64, True), (17, 7, True), (17, 64, False), (20, 13, False)],
)
def test_batches_chunks_and_preemptions_change_no_token(
    num_blocks, budget, prefix_caching, tokens_per_step, has_blocks
):
    engine = InProcessEngine(
        simulated_runner(
            num_blocks=num_blocks, budget=budget, tokens_per_step=tokens_per_step, has_blocks=has_blocks
        ),
        max_model_len=64,
        max_num_batched_tokens=budget,
        enable_prefix_caching=prefix_caching,
    )
    generated = engine.generate(prompts(8), SAMPLED)
    assert generated == [alone(prompt, SAMPLED, seed) for seed, prompt in enumerate(prompts(8))]
    assert (engine.scheduler.counters.num_preemptions > 0) == (num_blocks <= 20)


@pytest.mark.parametrize(
    ("block", "is_noticed"),
    [(1, True), (2, True), (4, True), (5, False)],
    ids=["prompt", "prompt-and-output", "output", "not-its-own"],
)
def test_a_block_that_is_overwritten_fails_the_row_that_reads_it(block, is_noticed):
    """A prompt of 6 and an output of 8 in blocks of 4: the fourth block holds two sampled tokens."""
    runner = simulated_runner(has_blocks=True)
    row = new_row(0, [5, 6, 7, 8, 9, 10], [1, 2, 3, 4])
    assert not runner.execute(step_plan(1, new=[row], chunks={0: 6})).row_errors
    for step_id in range(2, 10):
        assert not runner.execute(step_plan(step_id)).row_errors
    runner.block_store().write(block, 0, memoryview(bytes(runner.block_store().num_bytes(block))))
    assert bool(runner.execute(step_plan(10)).row_errors) == is_noticed


def test_a_row_that_finds_sampled_tokens_of_another_prefix_fails():
    runner = simulated_runner(has_blocks=True)
    prompt = [5, 6, 7]
    step = step_plan(1, new=[new_row(0, prompt, [1, 2])], chunks={0: 3})
    tokens = [int(runner.execute(step).token_ids[0])]
    tokens += [int(runner.execute(step_plan(step_id)).token_ids[0]) for step_id in (2, 3)]
    known = prompt + tokens
    wrong = known[:3] + [known[3] ^ 1] + known[4:]
    rows = [
        new_row(slot, token_ids, [1, block], num_prompt=3, computed=4)
        for slot, token_ids, block in ((1, known, 3), (2, wrong, 4))
    ]
    result = runner.execute(step_plan(4, new=rows, chunks={1: 2, 2: 2}))
    assert [key.slot for key in result.row_errors] == [2]
    assert "position 3 " in result.row_errors[rows[1].key].message


def test_resubmitted_request_continues_its_output():
    prompt, blocks = [5, 6, 7], range(1, 10)
    sampling = SamplingParams(temperature=1.0)
    whole = tokens_of(new_row(0, prompt, blocks, sampling=sampling, seed=9), 20)
    for cut in (1, 2, 7, 19):
        row = new_row(0, prompt + whole[:cut], blocks, num_prompt=3, sampling=sampling, seed=9)
        assert tokens_of(row, 20 - cut) == whole[cut:]


def test_prefix_and_seed_decide_the_tokens():
    def say(prompt, temperature, seed):
        sampling = SamplingParams(temperature=temperature)
        return tuple(tokens_of(new_row(0, prompt, range(1, 10), sampling=sampling, seed=seed), 8))

    base = say([5, 6, 7, 8], 1.0, 1)
    others = {say(prompt, 1.0, 1) for prompt in ([4, 6, 7, 8], [5, 6, 7, 9], [6, 5, 7, 8], [0, 5, 6, 7, 8])}
    assert len({base, say([5, 6, 7, 8], 1.0, 2), say([5, 6, 7, 8], 1.0, 2**64 - 1)} | others) == 7
    assert say([5, 6, 7, 8], 0.0, 1) == say([5, 6, 7, 8], 0.0, 2)


def test_all_words_come_up_evenly_and_nothing_else_does():
    words = WORD_IDS[:20]
    runner = simulated_runner(word_ids=words, max_model_len=4096, num_blocks=9000)
    engine = InProcessEngine(runner)
    outputs = engine.generate([[seed] for seed in range(8)], SamplingParams(max_tokens=500))
    counts = Counter(token for output in outputs for token in output)
    assert counts.keys() == set(words.tolist())
    # chi-square of 19 degrees of freedom: above 43.8 once in 1,000 draws; the seeds are fixed, so this is one draw
    assert sum((count - 200) ** 2 / 200 for count in counts.values()) < 43.8


def test_eos_comes_as_often_as_told_and_never_below_min_tokens():
    runner = simulated_runner(eos_probability=0.1, max_model_len=2048, num_blocks=9000)
    at_will = SamplingParams(max_tokens=1000)
    lengths = [
        len(output)
        for round_ in range(50)
        for output in InProcessEngine(runner).generate(
            [[s] for s in range(8)], at_will, first_number=8 * round_
        )
    ]
    # Geometric with mean 10 and deviation 9.5: that of 400 lengths is 0.47.
    assert abs(np.mean(lengths) - 10) < 4 * 0.47
    held = SamplingParams(max_tokens=1000, min_tokens=40)
    outputs = InProcessEngine(runner).generate([[s] for s in range(8)], held)
    assert all(len(output) > 40 and EOS not in output[:40] for output in outputs)


def test_eos_is_never_drawn_unless_told():
    outputs = InProcessEngine(simulated_runner()).generate(prompts(8), SamplingParams(max_tokens=80))
    assert [len(output) for output in outputs] == [80] * 8


def test_stop_ids_are_masked_below_min_tokens_and_drawn_after():
    words, stop = WORD_IDS[:3], int(WORD_IDS[1])
    sampling = SamplingParams(max_tokens=60, min_tokens=20, stop_token_ids=(stop,))
    outputs = InProcessEngine(simulated_runner(word_ids=words)).generate(prompts(4), sampling)
    assert all(stop not in output[:20] and output[-1] == stop for output in outputs)
    assert {token for output in outputs for token in output[:20]} == {10, 12}


def test_allowed_ids_alone_are_drawn_be_they_words_or_not():
    sampling = SamplingParams(max_tokens=60, allowed_token_ids=(3, 11, 280))
    outputs = InProcessEngine(simulated_runner()).generate(prompts(4), sampling)
    assert {token for output in outputs for token in output} == {3, 11, 280}


def test_row_without_allowed_token_fails_alone():
    sampling = SamplingParams(min_tokens=2, allowed_token_ids=(EOS,))
    runner = simulated_runner()
    rows = [
        new_row(0, [5], [1]),
        new_row(1, [5], [2], sampling=sampling, slot_version=7),
        new_row(2, [5], [3]),
    ]
    result = runner.execute(step_plan(1, new=rows))
    assert result.row_errors == {(1, 7): NOTHING_ALLOWED}
    assert result.token_counts.tolist() == [1, 0, 1]
    assert result.token_ids[0] == result.token_ids[1]


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        (
            SamplingParams(thinking_token_budget=ThinkingBudget(1, 2, 3, is_open=True)),
            "length.thinking_token_budget: the simulated worker",
        ),
        (SamplingParams(stop_token_ids=(VOCAB_SIZE,)), "sampling.stop_token_ids: token id 300"),
    ],
)
def test_unsupported_request_is_refused_once_by_name(sampling, message):
    runner = simulated_runner()
    result = runner.execute(step_plan(1, new=[new_row(3, [5], [1], sampling=sampling, slot_version=2)]))
    ((row, error),) = result.row_errors.items()
    assert row == (3, 2)
    assert message in error.message
    assert runner.execute(step_plan(2)).row_errors == {}


def test_log_probabilities_fall_and_sum_below_one():
    runner = simulated_runner()
    asked = {0: 3, 1: None, 2: 0, 3: 20}
    rows = [
        new_row(slot, [slot, 5], [slot + 1], sampling=SamplingParams(logprobs=number))
        for slot, number in asked.items()
    ]
    result = runner.execute(step_plan(1, new=rows, chunks=dict.fromkeys(asked, 2)))
    columns = result.logprobs
    assert columns.rows.tolist() == [0, 2, 3]
    assert columns.offsets.tolist() == [0, 4, 5, 26]
    assert columns.ranks.tolist() == [1, 1, 1]
    for row, start, end in zip(columns.rows, columns.offsets, columns.offsets[1:], strict=False):
        token_ids, logprobs = columns.token_ids[start:end], columns.logprobs[start:end]
        chosen, top = token_ids[0], token_ids[1:]
        assert chosen == result.token_ids[row]
        assert not top.size or top[0] == chosen
        assert len(set(top.tolist())) == top.size
        assert (np.diff(logprobs[1:]) < 0).all()
        assert np.exp(logprobs[1:]).sum() <= 1.00001, "float32"
        assert logprobs[0] < 0


def test_log_probabilities_name_each_word_once():
    runner = simulated_runner(word_ids=np.array([20, 30, 40]), eos_probability=1.0)
    rows = [
        new_row(slot, [5], [slot + 1], sampling=SamplingParams(logprobs=20, min_tokens=minimum))
        for slot, minimum in enumerate((1, 0))
    ]
    columns = runner.execute(step_plan(1, new=rows)).logprobs
    assert columns.offsets.tolist() == [0, 4, 8]
    assert sorted(columns.token_ids[1:4].tolist()) == [20, 30, 40]
    assert columns.token_ids[4:6].tolist() == [EOS, EOS]
    assert len(set(columns.token_ids[5:].tolist())) == 3


@pytest.mark.parametrize("limit", [2, 3, 5])
def test_several_tokens_in_a_step_are_those_of_several_steps(limit):
    samplings = [SamplingParams(temperature=1.0, logprobs=number, min_tokens=9) for number in (None, 2, 0)]
    rows = [
        new_row(slot, [slot, 5], range(1 + 12 * slot, 13 + 12 * slot), sampling=sampling, seed=slot)
        for slot, sampling in enumerate(samplings)
    ]
    first = step_plan(1, new=rows, chunks=dict.fromkeys(range(3), 2))
    one_by_one, together = [[], [], []], [[], [], []]
    single = simulated_runner(eos_probability=0.2)
    for plan in (first, *map(step_plan, range(2, 30))):
        for tokens, more in zip(one_by_one, rounds_of(single.execute(plan)), strict=True):
            tokens += more
    several, num_steps = simulated_runner(eos_probability=0.2, tokens_per_step=limit), 1
    result = several.execute(step_plan(1, new=rows, chunks={0: 2, 1: 2, 2: 2}, limits={0: limit, 1: limit}))
    while True:
        for tokens, more in zip(together, rounds_of(result), strict=True):
            assert 1 <= len(more) <= limit
            tokens += more
        if max(map(len, together)) + limit > 29:
            break
        num_steps += 1
        result = several.execute(step_plan(num_steps, limits={0: limit, 2: limit}))
    assert [tokens[: len(more)] for tokens, more in zip(one_by_one, together, strict=True)] == together
    assert len(together[0]) > num_steps > len(together[1]) / limit


def test_a_failed_row_has_none_of_several_tokens():
    refused = SamplingParams(min_tokens=2, allowed_token_ids=(EOS,))
    rows = [
        new_row(0, [5], [1, 2], sampling=SamplingParams(logprobs=0)),
        new_row(1, [5], [3, 4], sampling=refused),
        new_row(2, [5], [5, 6]),
    ]
    result = simulated_runner(tokens_per_step=4).execute(step_plan(1, new=rows, limits={0: 4, 1: 4, 2: 4}))
    first, failed, last = result.token_counts.tolist()
    assert (first, failed) == (last, 0)
    assert result.token_ids[:first].tolist() == result.token_ids[first:].tolist()
    assert result.logprobs.rows.tolist() == list(range(first))
    assert result.row_errors == {(1, 1): NOTHING_ALLOWED}


VIOLATIONS = {
    "a step is skipped": [step_plan(2)],
    "a step comes twice": [step_plan(1), step_plan(1)],
    "a slot beyond the rows": [step_plan(1, new=[new_row(8, [5], [1])])],
    "a slot that is taken": [
        step_plan(1, new=[new_row(0, [5], [1])]),
        step_plan(2, new=[new_row(0, [5], [2])]),
    ],
    "a slot that is not live": [step_plan(1, removed=[0])],
    "the null block": [step_plan(1, new=[new_row(0, [5], [0])])],
    "a block beyond the last": [step_plan(1, new=[new_row(0, [5], [200])])],
    "a chunk longer than what is known": [step_plan(1, new=[new_row(0, [5, 6], [1])], chunks={0: 3})],
    "a chunk of nothing": [step_plan(1, new=[new_row(0, [5, 6], [1])], chunks={0: 0})],
    "more than the blocks hold": [step_plan(1, new=[new_row(0, [5] * 9, [1, 2])], chunks={0: 9})],
    "more than the budget": [step_plan(1, new=[new_row(0, [5] * 65, range(1, 18))], chunks={0: 65})],
    "more tokens than a row can get": [step_plan(1, new=[new_row(0, [5], [1])], limits={0: 4})],
    "a limit of one": [step_plan(1, new=[new_row(0, [5], [1])], limits={0: 1})],
    "tokens for a row that does not sample": [
        step_plan(1, new=[new_row(0, [5, 6], [1])], chunks={0: 1}, limits={0: 2})
    ],
    "tokens for a slot that is not live": [step_plan(1, limits={0: 2})],
    "guesses beyond the blocks": [step_plan(1, new=[new_row(0, [5] * 3, [1])], chunks={0: 3}, limits={0: 3})],
    "guesses beyond the budget": [
        step_plan(1, new=[new_row(0, [5] * 63, range(1, 18))], chunks={0: 63}, limits={0: 3})
    ],
    "guesses beyond the context": [
        step_plan(1, new=[new_row(0, [5] * 64, range(1, 33), computed=0)], chunks={0: 64}),
        step_plan(2, new=[new_row(1, [5] * 127, range(40, 72), computed=100)], chunks={1: 27}, limits={1: 2}),
    ],
    "a token outside the vocabulary": [step_plan(1, new=[new_row(0, [VOCAB_SIZE], [1])])],
}


@pytest.mark.parametrize("plans", VIOLATIONS.values(), ids=VIOLATIONS.keys())
def test_contradictory_plan_is_a_violation_until_reset(plans):
    runner = simulated_runner(budget=64, tokens_per_step=3)
    *good, bad = plans
    for plan in good:
        runner.execute(plan)
    with pytest.raises(ProtocolViolation):
        runner.execute(bad)
    runner.reset()
    assert runner.execute(step_plan(1, new=[new_row(0, [5], [1])])).token_ids.size == 1


def test_a_step_takes_what_its_tokens_rows_and_context_cost():
    clock = SleepingClock()
    step_time = StepTimeModel(base_ms=2, prefill_token_us=100, decode_row_us=10, context_token_ns=1000)
    runner = simulated_runner(device=simulated_device(step_time, clock))
    blocks = range(1, 9)
    prefill = step_plan(
        1, new=[new_row(0, [5] * 9, blocks), new_row(1, [6] * 6, [9, 10])], chunks={0: 9, 1: 5}
    )
    result = runner.execute(prefill)
    assert clock.slept_ns == [2_000_000 + 14 * 100_000 + 14 * 1_000]
    assert result.timings.forward_ns == clock.slept_ns[0]
    runner.execute(step_plan(2))  # the last token of a prompt is prefill, although it is one
    assert clock.slept_ns[1] == 2_000_000 + 100_000 + 10_000 + 16 * 1_000
    runner.execute(step_plan(3, skipped=[1]))
    assert clock.slept_ns[2] == 2_000_000 + 10_000 + 11 * 1_000
    runner.execute(step_plan(4, removed=[0, 1]))
    assert len(clock.slept_ns) == 3, "a step without tokens takes no time"
