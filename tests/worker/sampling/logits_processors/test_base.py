"""The protocol of logits processors, by processors that the worker does not have."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.worker.sampling.sampler_bench import EOS, VOCAB_SIZE, SamplerBench, peaked
from triptych.types.sampling import SamplingParams
from triptych.types.step import RowError
from triptych_kernels import ops
from triptych_services.worker.sampling.params import LogitChange

NOTHING_DERIVED = RowError.of_client("the grammar derives no further token")


class OfStopString:
    """Has the rows of requests with stop string "("."""

    def __init__(self) -> None:
        self._slots: set[int] = set()

    def enter(self, slot, params):
        if params.stop != ("(",):
            return LogitChange.NEVER
        self._slots.add(slot)
        return LogitChange.ALWAYS

    def leave(self, slot):
        self._slots.discard(slot)

    def find_rows(self, slots):
        flags = np.isin(slots, list(self._slots))
        return flags if flags.any() else None


class AlternatingGrammar(OfStopString):
    """A grammar for requests with stop string "(": opening and closing parentheses in turn, at most two of each.

    Its state is a function of the output tokens.
    """

    OPENING, CLOSING = 40, 41
    needs_history = True
    fault = NOTHING_DERIVED

    def __init__(self, history) -> None:
        super().__init__()
        self._history = history

    def allowed(self, own):
        allowed = torch.zeros(len(own), VOCAB_SIZE, dtype=torch.bool)
        for number, (_, slot) in enumerate(own):
            history = self._history
            output = history.token_ids[slot, history.num_prompt[slot] : history.num_known[slot]]
            if output.size < 4:
                allowed[number, self.CLOSING if output.size % 2 else self.OPENING] = True
        return allowed


class Alternating(AlternatingGrammar):
    """A `DirectProcessor`."""

    def apply(self, logits, changed, own):
        rows = [row for row, _ in own]
        logits[rows] = logits[rows].masked_fill(~self.allowed(own), -torch.inf)
        return {}


class PackedAlternating(AlternatingGrammar):
    """A `MaskingProcessor`."""

    def masks(self, vocab_size, own):
        bits = np.zeros((len(own), -(-vocab_size // 32) * 32), np.uint8)
        bits[:, :vocab_size] = self.allowed(own)
        return np.packbits(bits, axis=1, bitorder="little").view(np.uint32), {}


class Forcing(OfStopString):
    """Forces a token in rows with stop string "(", and keeps the logits that it finds."""

    TOKEN = 9
    needs_history = False
    fault = None

    def __init__(self, history) -> None:
        super().__init__()
        self.seen: list[torch.Tensor] = []

    def apply(self, logits, changed, own):
        for row, _ in own:
            self.seen.append(logits[row].clone())
            logits[row] = -torch.inf
            logits[row, self.TOKEN] = 0.0
        return {}


class TopA:
    """A filter for requests with stop string "top_a": drops tokens less likely than half of the best one squared."""

    needs_history = False
    fault = None

    def __init__(self, history) -> None:
        self._slot_to_temperature: dict[int, float] = {}

    def enter(self, slot, params):
        if params.stop != ("top_a",):
            return LogitChange.NEVER
        self._slot_to_temperature[slot] = params.temperature
        return LogitChange.ALWAYS

    def leave(self, slot):
        self._slot_to_temperature.pop(slot, None)

    def find_rows(self, slots):
        flags = np.array([slot in self._slot_to_temperature for slot in slots.tolist()])
        return flags if flags.any() else None

    def apply(self, logits, changed, own):
        for row, slot in own:
            probabilities = (logits[row] / self._slot_to_temperature[slot]).softmax(-1)
            logits[row, probabilities < 0.5 * probabilities.max() ** 2] = -torch.inf
        return {}


def bench_with(*kinds) -> SamplerBench:
    return SamplerBench(lambda history: [kind(history) for kind in kinds])


def generate(bench: SamplerBench, slot: int, num_tokens: int, logits: torch.Tensor) -> list[int]:
    for _ in range(num_tokens):
        bench.extend(slot, int(bench.sample(logits, [slot]).token_ids[0]))
    known, prompt = bench.history.num_known[slot], bench.history.num_prompt[slot]
    return bench.history.token_ids[slot, prompt:known].tolist()


GRAMMAR = SamplingParams(temperature=0.0, stop=("(",))
GRAMMARS = [Alternating, PackedAlternating]


@pytest.mark.parametrize("grammar", GRAMMARS)
def test_grammar_masks_by_the_tokens_so_far(grammar):
    bench = bench_with(grammar)
    bench.enter(0, GRAMMAR)
    assert generate(bench, 0, 4, peaked(5, 41, 40)) == [40, 41, 40, 41]


@pytest.mark.parametrize("grammar", GRAMMARS)
def test_grammar_goes_on_after_a_preemption(grammar):
    bench = bench_with(grammar)
    bench.enter(0, GRAMMAR)
    output = generate(bench, 0, 3, peaked(5))
    bench.columns.leave(0)
    bench.enter(6, GRAMMAR, output=output)
    assert generate(bench, 6, 1, peaked(5)) == [40, 41, 40, 41]


@pytest.mark.parametrize("grammar", GRAMMARS)
def test_rows_beside_a_grammar_are_left_alone(grammar):
    bench = bench_with(grammar)
    bench.enter(0, SamplingParams(temperature=0.0))
    bench.enter(1, GRAMMAR)
    bench.enter(2, SamplingParams(temperature=0.0, logit_bias=((7, 9.0),)))
    assert bench.sample(peaked(5).repeat(3, 1), [0, 1, 2]).token_ids.tolist() == [5, 40, 7]


@pytest.mark.parametrize("grammar", GRAMMARS)
def test_grammar_and_fused_processors_change_one_row_together(grammar):
    bench = bench_with(grammar)
    bench.enter(0, SamplingParams(temperature=0.0, stop=("(",), logit_bias=((5, 50.0),), min_tokens=9))
    assert bench.sample(peaked(EOS, 5), [0]).token_ids.tolist() == [40]


@pytest.mark.parametrize("grammar", GRAMMARS)
def test_grammar_reports_its_own_fault(grammar):
    bench = bench_with(grammar)
    bench.enter(0, GRAMMAR, output=(40, 41, 40, 41))
    bench.enter(1, SamplingParams(temperature=0.0))
    sampled = bench.sample(peaked(5).repeat(2, 1), [0, 1])
    assert sampled.failures == ((0, NOTHING_DERIVED),)
    assert sampled.token_ids.tolist() == [0, 5]


def test_masked_rows_are_not_copied(monkeypatch):
    monkeypatch.delattr(ops, "process_logits")
    bench = bench_with(PackedAlternating)
    bench.enter(0, SamplingParams(temperature=0.0))
    bench.enter(1, GRAMMAR)
    assert bench.sample(peaked(5).repeat(2, 1), [0, 1]).token_ids.tolist() == [5, 40]
    with pytest.raises(AttributeError):
        bench_with(Alternating).sample_one(GRAMMAR, peaked(5))


def test_a_mask_comes_before_the_processors_behind_it():
    made = []

    def forcing(history):
        made.append(Forcing(history))
        return made[-1]

    bench = bench_with(PackedAlternating, forcing)
    bench.enter(0, SamplingParams(temperature=0.0))
    bench.enter(1, GRAMMAR)
    assert bench.sample(peaked(5, 40).repeat(2, 1), [0, 1]).token_ids.tolist() == [5, Forcing.TOKEN]
    (seen,) = made[0].seen
    assert torch.isfinite(seen).nonzero().flatten().tolist() == [PackedAlternating.OPENING]
    bench = bench_with(Forcing, PackedAlternating)
    bench.enter(1, GRAMMAR)
    assert bench.sample(peaked(5, 40), [1]).failures == ((0, NOTHING_DERIVED),)


def test_history_is_needed_only_by_rows_that_read_it():
    bench = bench_with(Alternating)
    bench.enter(0, GRAMMAR)
    bench.enter(1, SamplingParams(temperature=0.0, logit_bias=((7, 1.0),)))
    bench.enter(2, SamplingParams(temperature=0.0, presence_penalty=1.0))
    needs = [bench.sampler.needs_history(np.array(slots)) for slots in ([0], [1], [2], [1, 2])]
    assert needs == [True, False, True, True]


@pytest.mark.parametrize("stop", [("top_a",), ()])
def test_filter_shapes_the_choice(stop):
    bench = bench_with(TopA)
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, :2] = 6.0  # each has a probability of 0.47, others of 0.001
    seen = set()
    for seed in range(300):
        bench.enter(0, SamplingParams(temperature=1.0, stop=stop), seed=seed)
        seen |= set(bench.sample(logits, [0]).token_ids.tolist())
    assert seen == {0, 1} if stop else len(seen) > 2


def test_filter_leaves_the_choice_to_seed_and_position():
    logits = peaked(3, 4, 5)
    plain, filtered = bench_with(), bench_with(TopA)
    for seed in range(20):
        token = plain.sample_one(SamplingParams(temperature=0.5), logits, seed=seed)
        if token == 3:
            params = SamplingParams(temperature=0.5, stop=("top_a",))
            assert filtered.sample_one(params, logits, seed=seed) == 3
