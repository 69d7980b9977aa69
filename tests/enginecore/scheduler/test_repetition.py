"""Outputs that repeat themselves, found as vLLM finds them: pattern by pattern, place by place."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from tests.helpers.scheduling import Engine, make_prompt, make_request, make_scheduler, naive_generation
from triptych.types.output_limits import RepetitionDetection
from triptych.types.outputs import FinishReason
from triptych.types.sampling import SamplingParams
from triptych_services.enginecore.scheduler.stop import num_repeated_tokens, repeats_itself


def naive(output: list[int], detection: RepetitionDetection) -> bool:
    """Compare each token of a pattern with the tokens that stand one pattern, two patterns, … before it."""
    for size in range(detection.min_pattern_size, detection.max_pattern_size + 1):
        if size * detection.min_count > len(output):
            return False
        if all(
            output[-(size * times + place)] == output[-place]
            for place in range(1, size + 1)
            for times in range(1, detection.min_count)
        ):
            return True
    return False


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=24),
    st.integers(1, 8),
    st.integers(1, 8),
    st.integers(2, 5),
)
def test_found_as_the_definition_says(output: list[int], one: int, other: int, count: int) -> None:
    detection = RepetitionDetection(max(one, other), count, min_pattern_size=min(one, other))
    tail = np.array(output[-num_repeated_tokens(detection) :], np.uint32)
    assert repeats_itself(tail, detection) == naive(output, detection)


def test_a_request_ends_where_it_repeats_itself() -> None:
    """Over blocks, and though it loses its worker."""
    prompt, detection = make_prompt(20), RepetitionDetection(1, 2)
    sampling = SamplingParams(max_tokens=500, repetition_detection=detection)
    expected = naive_generation(prompt, 1, sampling, (), 2048)
    assert expected[1] is FinishReason.REPETITION
    assert len(expected[0]) > 16
    engine = Engine(make_scheduler(), steps_in_flight=2)
    engine.add(make_request(1, prompt, max_tokens=500, repetition_detection=detection))
    for _ in range(len(expected[0]) // 2):
        engine.plan()
        engine.finish_step()
    engine.lose_worker()
    engine.run()
    assert engine.end_of(1) == expected
    assert engine.scheduler.counters.num_finished["repetition"] == 1
