"""`bad_words` in the sampler, against transformers' processor."""

from __future__ import annotations

import pytest
import torch
from transformers import NoBadWordsLogitsProcessor

from tests.worker.sampling.sampler_bench import VOCAB_SIZE, SamplerBench, peaked
from triptych.types.sampling import SamplingParams
from triptych_services.worker.sampling.params import NOTHING_ALLOWED


def greedy(*sequences: tuple[int, ...], **fields) -> SamplingParams:
    return SamplingParams(temperature=0.0, bad_words=sequences, **fields)


def test_same_tokens_as_transformers():
    generator = torch.Generator().manual_seed(3)
    for case in range(40):
        bench = SamplerBench()
        size = 3 + case % 3  # so few tokens that sequences often begin
        sequences = {
            tuple(torch.randint(size, (1 + index % 4,), generator=generator).tolist()) for index in range(4)
        }
        oracle = NoBadWordsLogitsProcessor([list(each) for each in sequences])
        bench.enter(0, greedy(*sequences))
        output: list[int] = []
        for _ in range(12):
            logits = torch.randn((1, VOCAB_SIZE), generator=generator)
            logits[:, :size] += 5
            # transformers needs one token at least, and counts those of the prompt
            wanted = oracle(torch.tensor([[VOCAB_SIZE - 1, *output]]), logits.clone()).argmax().item()
            assert bench.sample(logits, [0]).token_ids.tolist() == [wanted]
            output.append(int(torch.randint(size, (), generator=generator)))
            bench.extend(0, output[-1])


def test_a_sequence_that_the_prompt_begins_may_end():
    params = greedy((7, 10))
    assert bench_one(params, prompt=(5, 7)) == 10
    assert bench_one(params, prompt=(5,), output=(7,)) == 11


def test_other_rows_are_as_they_are():
    bench = SamplerBench()
    bench.enter(0, greedy((10,)))
    bench.enter(1, SamplingParams(temperature=0.0))
    bench.enter(2, greedy((9, 10)))
    assert bench.sample(torch.cat([peaked(10, 11)] * 3), [0, 1, 2]).token_ids.tolist() == [11, 10, 10]
    bench.columns.leave(0)
    bench.enter(0, SamplingParams(temperature=0.0))
    assert bench.sample(peaked(10, 11), [0]).token_ids.tolist() == [10]


@pytest.mark.parametrize("allowed", [(10,), (10, 12)])
def test_nothing_left_is_an_error_of_the_request(allowed):
    bench = SamplerBench()
    bench.enter(0, greedy((10,), (12,), allowed_token_ids=allowed))
    assert bench.sample(peaked(10), [0]).failures == ((0, NOTHING_ALLOWED),)


def bench_one(params, **tokens) -> int:
    return SamplerBench().sample_one(params, peaked(10, 11), **tokens)
