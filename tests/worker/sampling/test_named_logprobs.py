"""`logprob_token_ids` in the sampler, against torch's log-softmax."""

from __future__ import annotations

import numpy as np
import torch

from tests.worker.sampling.sampler_bench import VOCAB_SIZE, SamplerBench
from triptych.types.sampling import SamplingParams


def test_named_tokens_beside_the_best_ones_of_other_rows():
    bench = SamplerBench()
    logits = torch.randn((4, VOCAB_SIZE), generator=torch.Generator().manual_seed(1)) * 4
    wanted = logits.double().log_softmax(-1)
    named = {0: (7,), 2: (0, 3, 9, VOCAB_SIZE - 1)}
    for slot in range(4):
        fields = {"logprob_token_ids": named[slot], "logprobs": 0} if slot in named else {"logprobs": 2}
        bench.enter(slot, SamplingParams(temperature=0.0, **fields))
    sampled = bench.sample(logits, [0, 1, 2, 3])
    columns = sampled.logprobs
    assert columns.rows.tolist() == [0, 1, 2, 3]
    for row in range(4):
        entries = slice(columns.offsets[row], columns.offsets[row + 1])
        ids = columns.token_ids[entries].tolist()
        others = list(named.get(row, wanted[row].topk(2).indices.tolist()))
        assert ids == [int(sampled.token_ids[row]), *others]
        np.testing.assert_allclose(columns.logprobs[entries], wanted[row, ids], atol=2e-5)  # float32
    assert columns.ranks.tolist() == [1, 1, 1, 1]


def test_nothing_is_left_of_a_request_that_is_gone():
    bench = SamplerBench()
    logits = torch.randn((1, VOCAB_SIZE), generator=torch.Generator().manual_seed(2))
    bench.enter(0, SamplingParams(temperature=0.0, logprob_token_ids=(1, 2), logprobs=0))
    bench.enter(0, SamplingParams(temperature=0.0, logprobs=0))
    assert bench.sample(logits, [0]).logprobs.token_ids.size == 1
