"""`thinking_token_budget` in the sampler, token by token."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.worker.sampling.sampler_bench import VOCAB_SIZE, SamplerBench, peaked
from triptych.types.output_limits import ThinkingBudget
from triptych.types.sampling import SamplingParams

OPENING, CLOSING, WORD = 40, 41, 30


def params(num_tokens: int, *, is_open: bool, **fields) -> SamplingParams:
    budget = ThinkingBudget(num_tokens, OPENING, CLOSING, is_open)
    return SamplingParams(**{"temperature": 0.0, "thinking_token_budget": budget, **fields})


def write(bench: SamplerBench, *best: int) -> list[int]:
    """Return the tokens that come where the model wants these."""
    chosen = []
    for token_id in best:
        chosen += bench.sample(peaked(token_id), [0]).token_ids.tolist()
        bench.extend(0, chosen[-1])
    return chosen


@pytest.mark.parametrize("num_tokens", [0, 1, 3])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_end_is_forced_once(num_tokens, temperature):
    bench = SamplerBench()
    bench.enter(0, params(num_tokens, is_open=True, temperature=temperature, top_k=1))
    assert write(bench, *[WORD] * 9) == [WORD] * num_tokens + [CLOSING] + [WORD] * (8 - num_tokens)


def test_tokens_count_from_the_opening_one():
    bench = SamplerBench()
    bench.enter(0, params(2, is_open=False))
    assert write(bench, 3, OPENING, *[WORD] * 5) == [3, OPENING, WORD, WORD, CLOSING, WORD, WORD]


def test_a_model_that_ends_in_time_is_left_alone():
    bench = SamplerBench()
    bench.enter(0, params(3, is_open=True))
    wanted = [WORD, CLOSING, *[WORD] * 6, OPENING, *[WORD] * 6]
    assert write(bench, *wanted) == wanted
    assert not bench.sampler.needs_history(np.array([0]))


def test_an_answer_without_reasoning_is_left_alone():
    bench = SamplerBench()
    bench.enter(0, params(0, is_open=False))
    wanted = [*[WORD] * 20, OPENING, WORD, WORD]
    assert write(bench, *wanted) == wanted


def test_a_request_that_comes_back_goes_on_as_before():
    for output in ([], [WORD], [WORD, WORD], [WORD, WORD, CLOSING], [WORD, WORD, CLOSING, WORD]):
        bench = SamplerBench()
        bench.enter(0, params(2, is_open=True), output=output)
        num_more = 6 - len(output)
        assert output + write(bench, *[WORD] * num_more) == [WORD, WORD, CLOSING, WORD, WORD, WORD]


def test_other_rows_are_as_they_are():
    bench = SamplerBench()
    bench.enter(0, params(0, is_open=True, allowed_token_ids=(WORD,)))
    bench.enter(1, SamplingParams(temperature=0.0))
    assert bench.sample(torch.cat((peaked(WORD), peaked(WORD))), [0, 1]).token_ids.tolist() == [CLOSING, WORD]


def test_marks_outside_of_the_vocabulary_are_refused():
    budget = ThinkingBudget(1, OPENING, VOCAB_SIZE, is_open=True)
    refusal = SamplerBench().columns.enter(0, SamplingParams(thinking_token_budget=budget), seed=0)
    assert refusal is not None
    assert f"thinking_token_budget: token id {VOCAB_SIZE}" in refusal.message
