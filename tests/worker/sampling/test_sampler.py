"""The rules of the sampler, request by request, against arithmetic written out here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
import torch

from tests.worker.sampling.sampler_bench import EOS, VOCAB_SIZE, SamplerBench, beyond_limits, peaked
from triptych.types.sampling import SamplingParams
from triptych_kernels import ops
from triptych_kernels.cpu.library import forced_isa, isa
from triptych_services.worker.sampling.params import NOTHING_ALLOWED
from triptych_services.worker.sampling.sampled import NOT_FINITE

GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(params=["native", "plain"])
def bench(request: pytest.FixtureRequest) -> Iterator[SamplerBench]:
    """With the native kernels, and with plain torch."""
    if request.param == "native" and not isa():
        pytest.skip("no native kernels are built for this processor")
    with forced_isa(isa() if request.param == "native" else ""):
        yield SamplerBench()


def random_logits(num_rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn((num_rows, VOCAB_SIZE), generator=torch.Generator().manual_seed(seed)) * 3


def column(value, dtype) -> torch.Tensor:
    return torch.tensor([value], dtype=dtype)


@pytest.mark.parametrize("temperature", [0.0, 9e-6])
def test_greedy_takes_the_best_then_the_lowest_id(bench, temperature):
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, [9, 30]] = 4.0
    assert bench.sample_one(SamplingParams(temperature=temperature), logits) == 9


def test_sample_depends_only_on_seed_and_position(bench):
    logits = random_logits(3)
    slots, seeds, lengths = [1, 4, 6], [3, 1 << 63, (1 << 64) - 1], [3, 4, 9]
    for slot, seed, length in zip(slots, seeds, lengths, strict=True):
        bench.enter(slot, SamplingParams(temperature=1.3), prompt=range(length), seed=seed)
    together = bench.sample(logits, slots).token_ids
    for row, (slot, seed, length) in enumerate(zip(slots, seeds, lengths, strict=True)):
        alone = bench.sample(logits[row : row + 1], [slot]).token_ids[0]
        signed = seed - (1 << 64) if seed >= 1 << 63 else seed
        keyed = ops.sample(
            logits[row : row + 1],
            temperature=column(1.3, torch.float32),
            top_k=column(0, torch.int32),
            top_p=column(1.0, torch.float32),
            min_p=column(0.0, torch.float32),
            seeds=column(signed, torch.int64),
            positions=column(length, torch.int64),
        )
        assert together[row] == alone == keyed.item()


def test_noise_ignores_where_the_prompt_ends(bench):
    logits, params = random_logits(1), SamplingParams(temperature=1.0)
    fresh = bench.sample_one(params, logits, prompt=(5, 6, 7, 8, 9))
    assert bench.sample_one(params, logits, prompt=(5, 6), output=(7, 8, 9)) == fresh


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (SamplingParams(temperature=2.0, top_k=2), {10, 11}),
        (SamplingParams(temperature=2.0, top_p=0.01), {10}),
        (SamplingParams(temperature=2.0, min_p=1.0), {10}),
        (SamplingParams(temperature=2.0, top_k=-1), None),
    ],
)
def test_filters_keep_only_their_tokens(bench, params, kept):
    logits = peaked(10, 11, 12)
    seen = {bench.sample_one(params, logits, seed=seed) for seed in range(200)}
    assert len(seen) > 20 if kept is None else seen == kept


def test_greedy_and_sampled_rows_share_a_batch(bench):
    bench.enter(0, GREEDY)
    bench.enter(1, SamplingParams(temperature=1.0, allowed_token_ids=(4,)))
    assert bench.sample(torch.cat((peaked(10), peaked(11))), [0, 1]).token_ids.tolist() == [10, 4]


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_end_tokens_are_masked_until_min_tokens_are_out(bench, ignore_eos):
    params = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=(20,), ignore_eos=ignore_eos)
    logits = peaked(EOS, 20, 30)
    bench.enter(0, params)
    chosen = []
    for _ in range(3):
        chosen.append(int(bench.sample(logits, [0]).token_ids[0]))
        bench.extend(0, chosen[-1])
    assert chosen == [30, 30, EOS]


def test_min_tokens_counts_output_before_a_preemption(bench):
    params = SamplingParams(temperature=0.0, min_tokens=2)
    assert bench.sample_one(params, peaked(EOS, 30), prompt=(5,), output=(6, 7)) == EOS


def test_end_tokens_are_free_without_min_tokens(bench):
    assert bench.sample_one(SamplingParams(temperature=0.0, stop_token_ids=(20,)), peaked(20, EOS)) == 20


def test_bias_moves_one_token_of_one_row(bench):
    bench.enter(0, SamplingParams(temperature=0.0, logit_bias=((40, 5.0), (10, -1.0))))
    bench.enter(1, GREEDY)
    assert bench.sample(torch.cat((peaked(10), peaked(10))), [0, 1]).token_ids.tolist() == [40, 10]


def test_allowed_ids_exclude_all_others_of_their_row(bench):
    bench.enter(3, GREEDY)
    bench.enter(5, SamplingParams(temperature=0.0, allowed_token_ids=(33, 31, 33)))
    assert bench.sample(torch.cat((peaked(10), peaked(10, 33, 31))), [3, 5]).token_ids.tolist() == [10, 33]


def test_row_without_usable_token_fails_alone(bench):
    bench.enter(0, SamplingParams(temperature=1.0, min_tokens=1, allowed_token_ids=(EOS,), logprobs=1))
    bench.enter(1, SamplingParams(temperature=0.0, logprobs=0))
    sampled = bench.sample(torch.cat((peaked(10), peaked(11))), [0, 1])
    assert sampled.token_ids.tolist() == [0, 11]
    ((row, why),) = sampled.failures
    assert row == 0
    assert "min_tokens" in why.message
    assert why.kv_is_valid
    assert not NOT_FINITE.kv_is_valid
    assert sampled.logprobs.rows.tolist() == [1]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "params", [GREEDY, SamplingParams(temperature=1.0, logprobs=2, frequency_penalty=1.0)]
)
def test_row_with_bad_logit_fails_alone(bench, bad, params):
    for slot in (2, 3, 4):
        bench.enter(slot, params)
    logits = random_logits(3)
    expected = bench.sample(logits, [2, 3, 4])
    assert expected.failures == ()
    poisoned = logits.clone()
    poisoned[1, 17] = bad
    sampled = bench.sample(poisoned, [2, 3, 4])
    assert [row for row, _ in sampled.failures] == [1]
    assert sampled.token_ids.tolist() == [expected.token_ids[0], 0, expected.token_ids[2]]
    if params.logprobs is not None:
        assert sampled.logprobs.rows.tolist() == [0, 2]


def test_bad_logit_fails_even_if_masked(bench):
    bench.enter(0, SamplingParams(temperature=0.0, allowed_token_ids=(4, 5), logprobs=1))
    bench.enter(1, SamplingParams(temperature=0.0, min_tokens=3))
    logits = torch.cat((peaked(4), peaked(EOS, 9)))
    logits[0, 30] = logits[1, EOS] = torch.nan
    sampled = bench.sample(logits, [0, 1])
    assert sampled.failures == ((0, NOT_FINITE), (1, NOT_FINITE))
    assert sampled.token_ids.tolist() == [0, 0]
    assert sampled.logprobs is None


def test_failure_names_the_cause_in_the_request(bench):
    bench.enter(0, beyond_limits(repetition_penalty=1e-39))
    masking = {"temperature": 0.0, "min_tokens": 3, "allowed_token_ids": (EOS,)}
    bench.enter(1, SamplingParams(**masking))
    bench.enter(2, SamplingParams(temperature=0.0, repetition_penalty=1.1))
    bench.enter(3, SamplingParams(**masking, repetition_penalty=1.1, presence_penalty=1.0))
    sampled = bench.sample(peaked(5, 6).repeat(4, 1), [0, 1, 2, 3])
    assert sampled.failures == ((0, NOT_FINITE), (1, NOTHING_ALLOWED), (3, NOTHING_ALLOWED))


def penalized(logits: torch.Tensor, params: SamplingParams, prompt, output) -> torch.Tensor:
    """The penalties, token by token."""
    logits = logits.clone()
    spoken = Counter(output)
    for token_id in {*prompt, *output}:
        value = logits[token_id]
        value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        if token_id in spoken:
            value = value - params.frequency_penalty * spoken[token_id] - params.presence_penalty
        logits[token_id] = value
    return logits


def test_penalties_follow_prompt_and_output_as_they_grow(bench):
    params = [
        SamplingParams(temperature=0.0, repetition_penalty=1.8),
        SamplingParams(temperature=0.0, frequency_penalty=0.7, presence_penalty=-0.4),
        GREEDY,
        SamplingParams(temperature=0.0, repetition_penalty=0.6, presence_penalty=2.0),
    ]
    texts = [[list(range(slot, slot + 9)), [3, 4] * slot] for slot in range(4)]
    for slot, (prompt, output) in enumerate(texts):
        bench.enter(slot, params[slot], prompt=prompt, output=output)
    for step in range(12):
        logits = random_logits(4, seed=step) * 0.4
        sampled = bench.sample(logits, range(4)).token_ids
        for slot, (prompt, output) in enumerate(texts):
            assert sampled[slot] == penalized(logits[slot], params[slot], prompt, output).argmax()
            output.append(int(sampled[slot]))
            bench.extend(slot, output[-1])


def test_reused_slot_keeps_nothing(bench):
    asking = SamplingParams(
        temperature=0.0,
        frequency_penalty=2.0,
        min_tokens=9,
        logit_bias=((9, -50.0),),
        allowed_token_ids=(9, EOS),
        logprobs=3,
    )
    bench.enter(0, asking, prompt=(5,), output=(10, 10))
    bench.sample(peaked(10), [0])
    bench.columns.leave(0)
    bench.enter(0, SamplingParams(temperature=0.0, presence_penalty=0.5), prompt=(7,), output=(8,))
    sampled = bench.sample(peaked(EOS, 10, 9), [0])
    assert sampled.token_ids.tolist() == [EOS]
    assert sampled.logprobs is None


def test_logprobs_are_those_before_any_change(bench):
    bench.enter(0, SamplingParams(temperature=0.0, logprobs=3, allowed_token_ids=(44,)))
    bench.enter(1, GREEDY)
    bench.enter(2, SamplingParams(temperature=1.7, logprobs=0, frequency_penalty=1.0))
    bench.enter(3, SamplingParams(temperature=0.0, logprobs=1))
    logits = random_logits(4)
    sampled = bench.sample(logits, range(4))
    expected = logits.double().log_softmax(-1)
    columns = sampled.logprobs
    assert columns.rows.tolist() == [0, 2, 3]
    assert columns.offsets.tolist() == [0, 4, 5, 7]
    assert sampled.token_ids[0] == 44
    for place, (row, num_top) in enumerate(((0, 3), (2, 0), (3, 1))):
        entries = slice(columns.offsets[place], columns.offsets[place + 1])
        chosen = int(sampled.token_ids[row])
        best = expected[row].topk(num_top).indices.tolist()
        assert columns.token_ids[entries].tolist() == [chosen, *best]
        torch.testing.assert_close(
            torch.from_numpy(columns.logprobs[entries]).double(),
            expected[row, [chosen, *best]],
            atol=1e-5,
            rtol=0,
        )
        assert columns.ranks[place] == 1 + int((expected[row] > expected[row, chosen]).sum())


def test_logprobs_above_the_vocabulary_list_all_of_it(bench):
    bench.enter(0, beyond_limits(logprobs=VOCAB_SIZE + 5))
    columns = bench.sample(random_logits(1), [0]).logprobs
    assert sorted(columns.token_ids[1:].tolist()) == list(range(VOCAB_SIZE))


def test_no_rows_give_no_tokens(bench):
    sampled = bench.sample(torch.empty(0, VOCAB_SIZE), [])
    assert (sampled.token_ids.size, sampled.logprobs, sampled.failures) == (0, None, ())


@pytest.mark.parametrize(
    ("params", "names"),
    [
        (SamplingParams(bad_words=((1,), (2, VOCAB_SIZE))), f"sampling.bad_words: token id {VOCAB_SIZE}"),
        (SamplingParams(logit_bias=((VOCAB_SIZE, 1.0),)), f"sampling.logit_bias: token id {VOCAB_SIZE}"),
        (SamplingParams(stop_token_ids=(-1,)), "sampling.stop_token_ids: token id -1"),
    ],
)
def test_refused_request_is_named_and_sampled_greedily(bench, params, names):
    assert names in bench.columns.enter(0, params, seed=0).message
    assert bench.sample(peaked(8), [0]).token_ids.tolist() == [8]
