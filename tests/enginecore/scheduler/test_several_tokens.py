"""Workers that answer with several tokens of a row in one step: plans, results, and the same streams as ever."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from tests.helpers.scheduling import (
    EOS,
    Engine,
    NaiveWorker,
    make_prompt,
    make_request,
    make_scheduler,
    naive_generation,
    owners_of,
)
from triptych.errors import ProtocolViolation
from triptych.types.output_limits import RepetitionDetection
from triptych.types.outputs import FinishReason
from triptych.types.sampling import SamplingParams
from triptych.types.step import RowError, StepPlan, StepResult, VerifiedGuesses


def engine_of(limit: int, **scheduler: object) -> Engine:
    return Engine(make_scheduler(max_samples_per_row=limit, **scheduler))  # type: ignore[arg-type]


def limits_of(plan: StepPlan | None) -> dict[int, int]:
    assert plan is not None
    return dict(zip(plan.sample_slots.tolist(), plan.sample_limits.tolist(), strict=True))


def answer(plan: StepPlan, *rows: list[int], **tables: object) -> StepResult:
    """Return a result with these tokens of each sampling row, and ten guesses ready for each."""
    tables.setdefault("guess_counts", np.full(len(rows), 10, np.uint32))
    return StepResult(
        plan.step_id,
        np.array([token for row in rows for token in row], np.uint32),
        np.array([len(row) for row in rows], np.uint32),
        **tables,  # type: ignore[arg-type]
    )


def guessing(*counts: int) -> np.ndarray:
    return np.array(counts, np.uint32)


def verified(row_to_count: dict[int, int], proposer: str = "ngram") -> VerifiedGuesses:
    """Return what a result says of one proposer's guesses; the counts by place are of no account here."""
    return VerifiedGuesses(
        proposer, guessing(), guessing(), guessing(*row_to_count), guessing(*row_to_count.values())
    )


@settings(max_examples=80, deadline=None)
@given(
    limit=st.integers(1, 6),
    steps_in_flight=st.integers(1, 4),
    block_size=st.integers(1, 6),
    spare_blocks=st.integers(0, 20),
    budget=st.integers(6, 60),
    lose_at=st.none() | st.integers(1, 12),
    num_guesses=st.integers(0, 7),
    draws_guesses=st.booleans(),
    requests=st.lists(
        st.tuples(
            st.integers(1, 20),
            st.integers(1, 25),
            st.sampled_from([(), (3,), (EOS, 12, 40)]),
            st.sampled_from([None, RepetitionDetection(1, 2), RepetitionDetection(3, 2)]),
        ),
        min_size=1,
        max_size=6,
    ),
)
def test_streams_are_the_same_for_every_limit(
    limit: int,
    steps_in_flight: int,
    block_size: int,
    spare_blocks: int,
    budget: int,
    lose_at: int | None,
    num_guesses: int,
    draws_guesses: bool,
    requests: list[tuple[int, int, tuple[int, ...], RepetitionDetection | None]],
) -> None:
    scheduler = make_scheduler(
        max_samples_per_row=limit,
        block_size=block_size,
        num_blocks=1 + -(-50 // block_size) + spare_blocks,
        max_model_len=50,
        max_num_batched_tokens=budget,
        max_num_seqs=4,
        eos_token_ids=(EOS,),
    )
    engine = Engine(scheduler, steps_in_flight=steps_in_flight)
    engine.worker = NaiveWorker(block_size, num_guesses=num_guesses, draws_guesses=draws_guesses)
    fields: list[dict[str, object]] = [
        {"max_tokens": max_tokens, "stop_token_ids": stop_token_ids, "repetition_detection": detection}
        for _, max_tokens, stop_token_ids, detection in requests
    ]
    for number, (length, *_) in enumerate(requests):
        engine.add(make_request(number, make_prompt(length, seed=length), **fields[number]))  # type: ignore[arg-type]
    if lose_at is not None:
        for _ in range(lose_at):
            while len(engine.plans) < steps_in_flight and engine.plan() is not None:
                pass
            if engine.plans:
                engine.finish_step()
        engine.lose_worker()
    engine.run()
    for number, (length, *_) in enumerate(requests):
        sampling = SamplingParams(**fields[number])  # type: ignore[arg-type]
        prompt = make_prompt(length, seed=length)
        assert engine.end_of(number) == naive_generation(prompt, number, sampling, (EOS,), 50)
    assert scheduler.snapshot().num_used_blocks == 0


def test_a_decode_of_several_tokens_has_blocks_for_them() -> None:
    engine = engine_of(4, block_size=4)
    engine.worker = NaiveWorker(4)
    engine.add(make_request(0, make_prompt(7), max_tokens=40), make_request(1, make_prompt(4), max_tokens=40))
    first = engine.plan()
    assert limits_of(first) == {}, "a row that enters gets one token"
    assert limits_of(engine.plan()) == {}, "nothing has been said of guesses"
    engine.finish_step()
    second = engine.plan()
    assert second is not None
    assert limits_of(second) == {0: 4, 1: 4}
    assert second.num_tokens == 8
    # Positions 8 to 11 of one row, which holds four blocks now, 5 to 8 of the other.
    assert second.block_slots.tolist() == [0, 1]
    for column in (second.sample_slots, second.sample_limits):
        assert not column.flags.writeable


def test_the_limit_shrinks_to_what_is_left_of_the_output() -> None:
    engine = engine_of(4)
    engine.add(make_request(0, make_prompt(5), max_tokens=7))
    engine.plan()
    engine.finish_step()
    plans = [engine.plan() for _ in range(2)]
    assert [limits_of(plan) for plan in plans] == [{0: 4}, {0: 2}]
    assert engine.plan() is None, "nothing more can come until it is known how much has come"
    engine.run()
    assert len(engine.tokens[0, 0]) == 7


def test_a_step_that_brought_less_is_followed_by_another() -> None:
    engine = engine_of(8)
    engine.add(make_request(0, make_prompt(5), max_tokens=9))
    engine.plan()
    engine.finish_step()
    plan = engine.plan()
    assert limits_of(plan) == {0: 8}
    assert engine.plan() is None
    engine.plans.clear()
    output = engine.scheduler.update(answer(plan, [20, 21, 22]))
    assert (output.numbers.tolist(), output.token_counts.tolist()) == ([0], [3])
    engine.scheduler.check_integrity()
    assert limits_of(engine.plan()) == {0: 5}


def test_a_row_is_given_up_once_its_last_token_is_certain() -> None:
    engine = engine_of(8, max_num_seqs=1)
    engine.add(make_request(0, make_prompt(5), max_tokens=9), make_request(1, make_prompt(6), max_tokens=3))
    engine.plan()
    engine.finish_step()
    plan = engine.plan()
    assert limits_of(plan) == {0: 8}
    assert engine.plan() is None, "the eight tokens may not all come"
    engine.plans.clear()
    assert plan is not None
    engine.scheduler.update(answer(plan, [20] * 7))
    assert limits_of(engine.plan()) == {}
    successor = engine.plan()
    assert successor is not None
    assert [row.slot for row in successor.new_rows] == [0], "the ninth is in flight"


def test_guesses_take_what_the_budget_leaves() -> None:
    engine = engine_of(5, max_num_batched_tokens=12)
    for number in range(4):
        engine.add(make_request(number, make_prompt(3, seed=number), max_tokens=40))
    engine.plan()
    engine.finish_step()
    plan = engine.plan()
    assert limits_of(plan) == {0: 5, 1: 5}
    assert plan is not None
    assert plan.num_tokens == 12


def test_no_request_is_preempted_for_a_guess() -> None:
    engine = engine_of(5, block_size=4, num_blocks=4, max_model_len=12)
    engine.worker = NaiveWorker(4)
    engine.add(make_request(0, make_prompt(3), max_tokens=9), make_request(1, make_prompt(7), max_tokens=5))
    engine.plan()
    engine.finish_step()
    assert limits_of(engine.plan()) == {}, "every block is in use"
    assert engine.scheduler.counters.num_preemptions == 0


def test_a_stop_cuts_the_tokens_behind_it() -> None:
    engine = engine_of(6, eos_token_ids=(EOS,))
    engine.add(
        make_request(0, make_prompt(5), max_tokens=40, min_tokens=3),
        make_request(1, make_prompt(9), max_tokens=40),
    )
    engine.plan()
    engine.finish_step()
    plan = engine.plan()
    assert plan is not None
    output = engine.scheduler.update(answer(plan, [EOS, 30, EOS, 31, 32], [40, 41]))
    # One token came with the first step: the guard of min_tokens holds for the first EOS.
    assert output.token_ids.tolist() == [EOS, 30, EOS, 40, 41]
    assert owners_of(output) == [(0, 0)] * 3 + [(0, 1)] * 2
    assert output.rows.tolist() == [0, 1, 2, 5, 6], (
        "places in the result, by which log-probabilities are found"
    )
    (finished,) = output.finished
    assert (finished.request.number, finished.reason) == (0, FinishReason.STOP)
    engine.scheduler.check_integrity()


def test_guesses_that_did_not_come_are_counted_by_request() -> None:
    engine = engine_of(6, eos_token_ids=(EOS,))
    requests = [make_request(number, make_prompt(5, number), max_tokens=40) for number in range(4)]
    engine.add(*requests)
    engine.plan()
    engine.finish_step()
    plan = engine.plan()
    assert plan is not None
    guesses = verified({0: 3, 2: 5}), verified({1: 4}, "suffix")
    engine.scheduler.update(answer(plan, [20], [21, 22, 23], [24, EOS, 25, 26], [27], guesses=guesses))
    counts = [(each.timings if each.ended_at else each).num_rejected_guesses for each in requests]
    assert counts == [3, 2, 4, 0], "what follows an end did not come"
    assert [each.num_accepted_guesses for each in requests] == [0, 2, 1, 0]


def test_guesses_for_rows_that_are_not_there_are_refused() -> None:
    engine = engine_of(3)
    engine.add(make_request(0, make_prompt(5)), make_request(1, make_prompt(6)))
    plan = engine.plan()
    assert plan is not None
    with pytest.raises(ProtocolViolation, match="guesses for row 2, 2 rows were planned"):
        engine.scheduler.update(answer(plan, [20], [30], guesses=(verified({0: 1, 2: 1}),)))
    engine.finish_step()


@pytest.mark.parametrize("drawn", [[30], [30, 31, 32], [30, EOS, 32, 33], [30, 31, 32, 33]])
def test_tokens_of_a_preempted_request_are_kept_up_to_its_stop(drawn: list[int]) -> None:
    engine = engine_of(4, block_size=4, num_blocks=5, max_model_len=16, eos_token_ids=(EOS,))
    engine.add(
        make_request(0, make_prompt(4), max_tokens=12), make_request(1, make_prompt(4, 1), max_tokens=12)
    )
    engine.plan()
    engine.finish_step()
    second = engine.plan()
    assert second is not None
    assert limits_of(second) == {0: 4, 1: 4}
    engine.plan()  # needs a fifth block
    scheduler = engine.scheduler
    assert [request.number for request in scheduler.snapshot().draining] == [1]
    (preempted,) = scheduler.snapshot().draining
    output = scheduler.update(answer(second, [22, 23], drawn, guesses=(verified({0: 3, 1: 3}),)))
    scheduler.check_integrity()
    kept = drawn[: drawn.index(EOS) + 1] if EOS in drawn else drawn
    assert owners_of(output) == [(0, 0)] * 2 + [(0, 1)] * len(kept)
    assert output.token_ids.tolist() == [22, 23, *kept]
    assert output.rows.tolist() == list(range(2 + len(kept)))
    assert [finished.request.number for finished in output.finished] == [1] * (EOS in drawn)
    assert (preempted.num_accepted_guesses, preempted.num_rejected_guesses) == (len(kept) - 1, 4 - len(kept))
    assert not scheduler.snapshot().draining


def test_rows_without_guesses_cost_nothing() -> None:
    engine = engine_of(6, block_size=4, max_num_batched_tokens=40)
    engine.worker = NaiveWorker(4)
    requests = [make_request(number, make_prompt(4, number), max_tokens=40) for number in range(3)]
    engine.add(*requests)
    first = engine.plan()
    assert first is not None
    engine.plans.clear()
    engine.scheduler.update(answer(first, [20], [21], [22], guess_counts=guessing(0, 2, 0)))
    engine.add(make_request(3, make_prompt(60), max_tokens=40))
    plan = engine.plan()
    assert limits_of(plan) == {1: 3}
    assert plan is not None
    assert dict(zip(plan.chunk_slots.tolist(), plan.chunk_lengths.tolist(), strict=True)) == {3: 40 - 3 - 2}
    assert sorted(plan.block_slots.tolist()) == [0, 1, 2], "no block for a guess that is not there"


def test_a_report_holds_until_the_row_samples_again() -> None:
    engine = engine_of(6)
    engine.add(make_request(0, make_prompt(5), max_tokens=40), make_request(1, make_prompt(6), max_tokens=40))
    first = engine.plan()
    assert first is not None
    engine.plans.clear()
    engine.scheduler.update(answer(first, [20], [21], guess_counts=guessing(3, 1)))
    second, third = engine.plan(), engine.plan()
    assert [limits_of(plan) for plan in (second, third)] == [{0: 4, 1: 2}] * 2
    assert second is not None
    assert third is not None
    engine.scheduler.update(answer(second, [20, 30], [21], guess_counts=guessing(0, 5)))
    assert limits_of(engine.plan()) == {1: 6}
    engine.scheduler.update(answer(third, [20], [21], guess_counts=guessing()))
    assert limits_of(engine.plan()) == {}, "an empty column: no row has any"
    engine.scheduler.check_integrity()


def test_guesses_of_another_row_in_the_slot_are_not_taken() -> None:
    engine = engine_of(6)
    engine.add(make_request(0, make_prompt(5), max_tokens=40))
    first = engine.plan()
    assert first is not None
    engine.plans.clear()
    engine.scheduler.requests.abort(0, 0)
    engine.add(make_request(1, make_prompt(6), max_tokens=40))
    second = engine.plan()
    assert second is not None
    engine.scheduler.update(answer(first, [20], guess_counts=guessing(5)))
    assert limits_of(engine.plan()) == {}


def test_guesses_that_fit_no_free_block_fill_the_blocks_of_their_row() -> None:
    engine = engine_of(6, block_size=4, num_blocks=4, max_model_len=12)
    engine.worker = NaiveWorker(4)
    engine.add(make_request(0, make_prompt(5), max_tokens=5), make_request(1, make_prompt(2), max_tokens=9))
    engine.plan()
    engine.finish_step()
    plan = engine.plan()
    assert limits_of(plan) == {0: 3, 1: 2}, "positions 5 to 7, and 2 to 3"
    assert plan is not None
    assert not plan.block_slots.size
    engine.plans.clear()


@pytest.mark.parametrize("counts", [(1,), (1, 2, 3)])
def test_guess_counts_of_other_rows_are_refused(counts: tuple[int, ...]) -> None:
    engine = engine_of(3)
    engine.add(make_request(0, make_prompt(5)), make_request(1, make_prompt(6)))
    plan = engine.plan()
    assert plan is not None
    with pytest.raises(ProtocolViolation, match=f"has {len(counts)} guess_counts, 2 rows"):
        engine.scheduler.update(answer(plan, [20], [30], guess_counts=guessing(*counts)))
    engine.finish_step()


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        (([20, 21, 22, 23], [30]), "slot 0 has 4 tokens"),
        (([], [30]), "slot 0 has 0 tokens"),
        (([20], [30], [40]), "3 counts; 2 rows were planned"),
        (([20],), "1 counts; 2 rows were planned"),
    ],
)
def test_counts_that_were_not_planned_are_refused(rows: tuple[list[int], ...], named: str) -> None:
    engine = engine_of(3)
    engine.add(make_request(0, make_prompt(5)), make_request(1, make_prompt(6)))
    engine.plan()
    engine.finish_step()
    plan = engine.plan()
    assert plan is not None
    with pytest.raises(ProtocolViolation, match=named):
        engine.scheduler.update(answer(plan, *rows))
    engine.finish_step()
    engine.run()


def test_a_row_fails_beside_one_with_several_tokens() -> None:
    engine = engine_of(3)
    engine.add(make_request(0, make_prompt(5)), make_request(1, make_prompt(6)))
    engine.plan()
    engine.finish_step()
    plan = engine.plan()
    assert plan is not None
    row = engine.worker.rows[0].new.key
    result = answer(plan, [], [30, 31], row_errors={row: RowError("told to fail")})
    output = engine.scheduler.update(result)
    assert [failed.request.number for failed in output.failed] == [0]
    assert (output.numbers.tolist(), output.token_ids.tolist()) == ([1], [30, 31])
    engine.scheduler.check_integrity()


def test_one_token_each_beside_a_limit_needs_no_counts() -> None:
    engine = engine_of(3)
    engine.add(make_request(0, make_prompt(5)))
    engine.plan()
    engine.finish_step()
    plan = engine.plan()
    assert plan is not None
    engine.scheduler.update(replace(answer(plan, [20]), token_counts=np.empty(0, np.uint32)))
    engine.scheduler.check_integrity()
    assert limits_of(engine.plan()) == {0: 3}
