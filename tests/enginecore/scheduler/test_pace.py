"""The measured time of steps, and the part of it that texts get beside rows that generate."""

from __future__ import annotations

import numpy as np
import pytest

from tests.enginecore.scheduler.test_forecast import STEP_S, TOKEN_S, TimedEngine, make_engine, request_of
from tests.helpers.scheduling import Clock
from triptych.types.pooling import PoolingKind, PoolingParams
from triptych_services.enginecore.scheduler.pace import PooledShare, StepPace
from triptych_services.enginecore.scheduler.running_rows import RunningRows

MEAN = PoolingParams(kind=PoolingKind.MEAN)


def test_the_pace_of_steps_is_a_line_between_the_sizes_measured() -> None:
    pace = StepPace()
    for size in (1, 64, 64, 512):
        pace.note(size, STEP_S + TOKEN_S * size)
    for size in (1, 2, 40, 64, 300, 512, 4096):
        assert pace.seconds(size) == pytest.approx(STEP_S + TOKEN_S * size)
    assert pace.num_steps == 4


def test_with_one_size_measured_all_steps_cost_the_same() -> None:
    pace = StepPace()
    for _ in range(20):
        pace.note(64, 0.02)
    assert [pace.seconds(size) for size in (1, 64, 8192)] == pytest.approx([0.02] * 3)


def test_a_rare_step_size_is_not_forgotten() -> None:
    pace = StepPace()
    pace.note(2048, 0.5)
    for _ in range(1000):
        pace.note(64, 0.02)
    for _ in range(100):
        pace.note(64, 0.04)
    assert pace.seconds(2048) == pytest.approx(0.5)
    assert pace.seconds(64) == pytest.approx(0.04, rel=0.01)


def test_larger_steps_are_never_thought_to_be_faster() -> None:
    pace = StepPace()
    pace.note(1, 0.05)
    pace.note(512, 0.02)
    assert pace.seconds(300) == 0.05
    assert pace.seconds(4096) == 0.05


def test_the_largest_step_of_a_time_is_at_most_twice_what_was_measured() -> None:
    pace = StepPace()
    assert pace.size_within(1.0, 0) == 0
    for size in (1, 64, 512):
        pace.note(size, STEP_S + TOKEN_S * size)
    assert pace.size_within(STEP_S + TOKEN_S * 40, 1) == pytest.approx(40)
    assert pace.size_within(STEP_S + TOKEN_S * 300, 64) == pytest.approx(300)
    assert pace.size_within(STEP_S + TOKEN_S * 700, 1) == pytest.approx(700), "the line goes on"
    assert pace.size_within(4 * STEP_S, 512) < 512, "smaller steps say nothing"
    assert pace.size_within(1.0, 1) == 1024
    pace.note(20, 1.0)
    assert pace.size_within(STEP_S + TOKEN_S * 64, 1) == pytest.approx(1, abs=0.2), "a step of 20 took longer"


def step_times(engine: TimedEngine, num_steps: int) -> list[float]:
    """Return the seconds of the next steps."""
    assert engine.clock is not None
    times = []
    for _ in range(num_steps):
        while engine.plan() is not None and len(engine.plans) < engine.steps_in_flight:
            pass
        before = engine.clock.now
        engine.finish_step()
        times.append(engine.clock.now - before)
    return times


def flood(engine: TimedEngine, num_texts: int, first_number: int = 100) -> None:
    engine.add(*(request_of(engine, first_number + each, 300, pooling=MEAN) for each in range(num_texts)))


def test_texts_lengthen_the_steps_of_a_stream_by_three_quarters_at_most() -> None:
    engine = make_engine()
    engine.add(request_of(engine, 0, 20, max_tokens=400))
    own_s = step_times(engine, 30)[-1]
    flood(engine, 40)
    times = step_times(engine, 80)
    assert max(times) <= 1.75 * own_s + TOKEN_S
    assert times[-1] > 1.6 * own_s, "and they get what that leaves"
    engine.run()
    assert len(engine.outcomes) == 41


def test_a_stream_passes_texts_that_wait_beside_another_stream() -> None:
    engine = make_engine()
    engine.add(request_of(engine, 0, 20, max_tokens=400))
    step_times(engine, 30)
    flood(engine, 40)
    step_times(engine, 10)
    engine.add(request_of(engine, 1, 20, max_tokens=400))
    step_times(engine, 3)
    assert 1 in [request.number for request in engine.scheduler.snapshot().running]


def test_texts_alone_take_a_quarter_of_a_second_and_learn_what_that_is() -> None:
    engine = make_engine(max_num_batched_tokens=4096)
    flood(engine, 120)
    times = step_times(engine, 12)
    assert times[0] == pytest.approx(STEP_S + TOKEN_S * 256)
    assert max(times) == pytest.approx(0.25, rel=0.05)
    engine.run()
    assert len(engine.outcomes) == 120


def test_texts_alone_take_short_steps_while_the_next_stream_is_expected() -> None:
    pace, clock = StepPace(), Clock()
    for size, seconds in ((1, 0.010), (64, 0.018), (512, 0.130)):
        pace.note(size, seconds)
    share = PooledShare(lambda: pace, 4096, clock)
    rows = RunningRows(4, 16, frozenset())

    def room(num_streams: int) -> int:
        """Return the tokens that one long text gets beside streams."""
        slots = np.arange(num_streams + 1)
        rows.is_pooled[slots] = slots == num_streams
        rows.num_pooled = 1
        wanted = np.where(rows.is_pooled[slots], 4000, 1)
        return int(share.limit(rows, slots, wanted)[-1])

    alone = room(0)
    assert alone == pytest.approx(1023, abs=1), "a quarter of a second"
    assert room(3) == 61, "with the three tokens 1.75 times the time of these alone, 17.9 ms"
    clock.now += 9.9
    assert room(0) == 16, "the time of a token, or a tile"
    clock.now += 0.2
    assert room(0) == alone, "ten seconds after the last stream nothing is lost"


def test_texts_beside_a_prompt_get_what_they_have_beside_a_token() -> None:
    engine = make_engine()
    engine.add(request_of(engine, 0, 20, max_tokens=400))
    step_times(engine, 30)
    flood(engine, 40)
    step_times(engine, 10)
    beside_tokens = step_times(engine, 1)[0]
    engine.add(request_of(engine, 1, 500, max_tokens=4))
    assert max(step_times(engine, 3)) <= beside_tokens + 501 * TOKEN_S + STEP_S * 0.2


@pytest.mark.parametrize("is_encoder", [True, False])
def test_a_model_of_one_kind_takes_whole_steps(is_encoder: bool) -> None:
    engine = make_engine(is_encoder=is_encoder, enable_chunked_prefill=not is_encoder)
    requests = [
        request_of(engine, each, 400, pooling=MEAN if is_encoder else None, max_tokens=1)
        for each in range(12)
    ]
    engine.add(*requests)
    assert max(step_times(engine, 2)) > STEP_S + TOKEN_S * 1600
