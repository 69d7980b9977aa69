"""The engine core without its wires."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from tests.helpers.scheduling import Clock
from tests.helpers.stack import NaiveRunner, make_config
from triptych.errors import ConfigError
from triptych.types.facts import PauseMode
from triptych.types.sampling import SamplingParams
from triptych.types.step import RequestGuesses
from triptych.types.submit import single_choice
from triptych_services.enginecore.engine import EngineCore

SESSION = 1


def make_engine(
    num_blocks: int = 200, max_model_len: int = 512, max_samples_per_row: int = 1
) -> tuple[EngineCore, NaiveRunner]:
    config = make_config()
    engine, runner = EngineCore(config), NaiveRunner(config, num_blocks, max_model_len, max_samples_per_row)
    engine.frontends.open_session(SESSION)
    engine.worker_ready(runner.facts, after_crash=False)
    return engine, runner


def submit(
    engine: EngineCore, number: int, session: int = SESSION, max_tokens: int = 8, **fields: Any
) -> None:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    engine.frontends.submit(
        session,
        single_choice(number, f"{session}-{number}", [1, 2, 3], sampling, seed=1, **fields),
    )


def step(engine: EngineCore, runner: NaiveRunner) -> None:
    plan = engine.plan()
    assert plan is not None, "nothing will ever run"
    engine.apply(runner.execute(plan))


def lose_the_worker(engine: EngineCore, runner: NaiveRunner) -> None:
    engine.worker_lost()
    runner.reset()
    engine.worker_ready(runner.facts, after_crash=True)


def test_a_worker_lost_while_idle_makes_no_suspect() -> None:
    engine, runner = make_engine()
    for _ in range(5):
        lose_the_worker(engine, runner)
    submit(engine, 1)
    assert engine.plan() is not None
    lose_the_worker(engine, runner)
    assert not engine.take_outputs()[SESSION].failures
    assert engine.num_requests == 1


def test_a_request_alone_in_flight_at_two_crashes_fails() -> None:
    engine, runner = make_engine()
    submit(engine, 1)
    assert engine.plan() is not None
    lose_the_worker(engine, runner)
    assert engine.num_requests == 1
    assert engine.plan() is not None
    lose_the_worker(engine, runner)
    (failure,) = engine.take_outputs()[SESSION].failures
    assert failure.code == "ENGINE_FAILURE"
    assert "died twice" in failure.message
    assert engine.num_requests == 0


def test_a_request_that_saw_an_engine_die_is_tested_after_one_crash() -> None:
    engine, runner = make_engine()
    for number in range(6):
        submit(engine, number, num_engine_deaths=int(number >= 3), is_moved=number >= 3)
    assert engine.plan() is not None
    lose_the_worker(engine, runner)
    assert engine.plan() is not None
    assert engine.scheduler is not None
    (suspect,) = engine.scheduler.snapshot().running
    assert suspect.number >= 3
    lose_the_worker(engine, runner)
    (failure,) = engine.take_outputs()[SESSION].failures
    assert failure.number == suspect.number


def test_what_may_not_end_in_time_is_offered_and_goes_on() -> None:
    engine, runner = make_engine()
    submit(engine, 1, max_tokens=2)
    submit(engine, 2, max_tokens=400)
    for _ in range(2):
        step(engine, runner)
    submit(engine, 3)
    engine.take_outputs()
    engine.release(within_s=1e6)
    assert engine.take_outputs()[SESSION].released.tolist() == [3], "it waits, and may begin elsewhere"
    engine.release()
    assert engine.take_outputs()[SESSION].released.tolist() == [2, 3]
    while engine.num_requests:
        step(engine, runner)
    assert {end.number for end in engine.take_outputs()[SESSION].finished} == {2, 3}


def test_a_submit_on_an_ended_session_is_dropped() -> None:
    engine, _ = make_engine()
    engine.frontends.close_session(SESSION)
    submit(engine, 1)
    assert engine.num_requests == 0
    assert not engine.take_outputs()


@pytest.mark.parametrize("max_samples_per_row", [1, 5])
def test_rows_name_their_scope_to_a_worker_that_guesses(max_samples_per_row: int) -> None:
    engine, _ = make_engine(max_samples_per_row=max_samples_per_row)
    submit(engine, 1)
    plan = engine.plan()
    assert plan is not None
    (row,) = plan.new_rows
    assert bool(row.content.draft_scope) == (max_samples_per_row > 1)


def test_a_pause_settles_while_a_group_is_under_test() -> None:
    engine, runner = make_engine(num_blocks=9, max_model_len=112)
    for number in (1, 2, 3):
        submit(engine, number, max_tokens=100)
    assert engine.scheduler is not None
    for _ in range(2):
        assert engine.plan() is not None
        lose_the_worker(engine, runner)
    while (
        len(engine.scheduler.snapshot().running) < 2
    ):  # the first of the three is cleared, the second is under test
        step(engine, runner)
    engine.pause(PauseMode.WAIT)
    while engine.is_settling:
        step(engine, runner)
    assert engine.scheduler.counters.num_preemptions > 0
    assert engine.num_requests == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_num_batched_tokens": 7, "max_num_seqs": 8}, ["max_num_batched_tokens 7", "max_num_seqs 8"]),
        ({"max_long_partial_prefills": 3}, ["max_long_partial_prefills 3", "long_prefill_token_threshold"]),
        (
            {"enable_chunked_prefill": False, "long_prefill_token_threshold": 8},
            ["long_prefill_token_threshold 8", "enable_chunked_prefill"],
        ),
    ],
)
def test_options_that_cannot_work_together_stop_the_boot(options, words) -> None:
    with pytest.raises(ConfigError) as error:
        EngineCore(make_config(**options))
    assert all(word in error.value.message for word in words)


def replace_the_worker(engine: EngineCore, runner: NaiveRunner, **identity: Any) -> None:
    """Lose the worker, and begin with one whose model's identity differs in these fields."""
    model = runner.facts.model
    other = replace(model, identity=replace(model.identity, **identity))
    engine.worker_lost()
    runner.reset()
    runner.facts = replace(runner.facts, model=other)
    engine.worker_ready(runner.facts, after_crash=False)


@pytest.mark.parametrize(
    ("identity", "difference"),
    [
        ({"numerics": "avx512"}, "numerics: naive and avx512"),
        ({"weights": "e" * 64}, "weights: wwwwwwwwwwww and eeeeeeeeeeee"),
    ],
)
def test_output_is_given_up_when_a_worker_computes_otherwise(
    identity: dict[str, str], difference: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Half of an answer by one model and half by another is neither's. A request without output has none to spoil."""
    engine, runner = make_engine()
    submit(engine, 1)
    for _ in range(3):
        step(engine, runner)
    submit(engine, 2)
    engine.take_outputs()
    replace_the_worker(engine, runner, **identity)
    (failure,) = engine.take_outputs()[SESSION].failures
    assert (failure.number, failure.code) == (1, "ENGINE_UNAVAILABLE")
    assert difference in failure.message
    assert sum(difference in record.getMessage() for record in caplog.records) == 1
    assert engine.num_requests == 1
    step(engine, runner)
    batch = engine.take_outputs()[SESSION]
    assert (batch.numbers.tolist(), len(batch.failures)) == ([2], 0)


@pytest.mark.parametrize("identity", [{}, {"weights": ""}, {"is_batch_invariant": False}])
def test_output_goes_on_at_a_worker_that_computes_alike(identity: dict[str, Any]) -> None:
    """So it does at a worker of an earlier version, which names no weights."""
    engine, runner = make_engine()
    submit(engine, 1)
    for _ in range(3):
        step(engine, runner)
    engine.take_outputs()
    replace_the_worker(engine, runner, **identity)
    step(engine, runner)
    batch = engine.take_outputs()[SESSION]
    assert (batch.numbers.tolist(), len(batch.failures)) == ([1], 0)


def test_output_for_a_model_that_was_replaced_meanwhile_is_refused() -> None:
    """A frontend chose this engine by a model that it has no more when the submission arrives."""
    engine, runner = make_engine()
    chosen_by = runner.facts.model.identity.digest
    replace_the_worker(engine, runner, numerics="avx512")
    submit(engine, 1, num_prompt_tokens=2, is_moved=True, model_digest=chosen_by)
    (failure,) = engine.take_outputs()[SESSION].failures
    assert (failure.code, engine.num_requests) == ("ENGINE_UNAVAILABLE", 0)
    submit(engine, 2, num_prompt_tokens=2, is_moved=True, model_digest=runner.facts.model.identity.digest)
    step(engine, runner)
    assert engine.take_outputs()[SESSION].numbers.tolist() == [2]


def test_the_oldest_waiting_request_is_told() -> None:
    clock, config = Clock(), make_config()
    engine, runner = EngineCore(config, clock), NaiveRunner(config)
    engine.frontends.open_session(SESSION)
    engine.worker_ready(runner.facts, after_crash=False)

    def oldest_s() -> float:
        return engine.status(ready=True, why_not_ready="", steps_in_flight=1).oldest_waiting_s

    assert oldest_s() == 0
    submit(engine, 1)
    clock.now += 3
    submit(engine, 2)
    assert oldest_s() == 3
    step(engine, runner)
    assert oldest_s() == 0


def test_guesses_are_told_with_tokens_and_counted_over_engines() -> None:
    engine, runner = make_engine(max_samples_per_row=5)
    submit(engine, 1, max_tokens=60, guesses=RequestGuesses.of({1: (7, 9)}))
    submit(engine, 2, max_tokens=60)
    told, num_together = dict[int, tuple[int, int]](), Counter[int]()
    while engine.num_requests:
        step(engine, runner)
        batch = engine.take_outputs()[SESSION]
        num_together.update({n: count - 1 for n, count in Counter(batch.owners.tolist()).items()})
        told |= {} if batch.guesses is None else batch.guesses.by_number
        for end in batch.finished:
            assert told[end.number] == (end.timings.num_accepted_guesses, end.timings.num_rejected_guesses)
    assert engine.scheduler is not None
    counters = engine.scheduler.counters
    accepted, rejected = zip(told[1], told[2], strict=True)
    assert accepted == (7 + num_together[1], num_together[2])
    assert sum(rejected) - 9 == counters.num_guesses - counters.num_accepted_guesses > 0


def test_first_tokens_are_named_once_and_with_the_first_engine_s_count() -> None:
    engine, runner = make_engine()
    submit(engine, 1)
    submit(engine, 2, num_prompt_tokens=2, cached_tokens=(2,))
    first = dict[int, int]()
    while engine.num_requests:
        step(engine, runner)
        batch = engine.take_outputs()[SESSION]
        named = dict(zip(batch.first_numbers.tolist(), batch.first_cached_tokens.tolist(), strict=True))
        assert not first.keys() & named.keys()
        assert named.keys() <= set(batch.numbers.tolist())
        first |= named
        for end in batch.finished:
            assert end.num_cached_tokens == first[end.number]
    assert first == {1: 0, 2: 2}
    assert engine.scheduler is not None
    assert engine.scheduler.snapshot().counters.prefix_hits == 0, "what another engine had is no hit here"
