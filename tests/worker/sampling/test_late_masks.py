"""Masks of forms that take long: rows leave the step for them, and requests fail whose masks are too slow."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from llguidance import LLMatcher

from tests.helpers.byte_tokenizer import byte_tokenizer
from tests.worker.sampling.fake_matchers import EOS_ID, HeldCompiler, SlowMatcher
from tests.worker.sampling.sampler_bench import SamplerBench
from triptych.types.sampling import SamplingParams
from triptych.types.step import RowErrorCode
from triptych.types.structured import compiled
from triptych_services.worker.sampling.form_output import (
    LATE,
    MASK_BURST_S,
    MASK_LIMIT_S,
    MASK_S,
    SLOW_MASKS_S,
    FormOutput,
    leave_out_late,
)
from triptych_services.worker.sampling.grammars import Compilation
from triptych_services.worker.sampling.logits_processors.structured_outputs import StructuredForms

VOCAB_SIZE = byte_tokenizer().vocab_size + 5  # as models pad it


def regex(pattern: str, **fields) -> SamplingParams:
    return SamplingParams(structured_outputs=compiled(LLMatcher.grammar_from_regex(pattern)), **fields)


def logits_at(step: int, num_rows: int) -> torch.Tensor:
    logits = torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(step))
    return logits.expand(num_rows, -1).contiguous()


class OtherRank:
    """A group of two ranks."""

    tensor_parallel_size = 2

    def all_reduce(self, tensor):
        return tensor


def test_request_whose_masks_take_too_long_fails_alone(monkeypatch):
    monkeypatch.setattr(StructuredForms, "settle", lambda self, slots, token_ids: np.full(slots.size, -1))
    bench = SamplerBench(vocab_size=VOCAB_SIZE, eos=EOS_ID, grammars=HeldCompiler(SlowMatcher()))
    bench.enter(0, SamplingParams())
    bench.enter(1, regex("a+"))
    num_steps = 0
    while not (failures := bench.sample(logits_at(0, 2), [0, 1]).failures):
        num_steps += 1
        assert bench.sampler.take_mask_ns() > 0
    ((row, error),) = failures
    assert (row, error.code) == (1, RowErrorCode.INVALID_REQUEST)
    assert "make it less ambiguous" in error.message
    assert num_steps == pytest.approx(MASK_BURST_S / (SlowMatcher.cpu_s - MASK_S), abs=2)


def slow_bench(*, may_defer: bool) -> SamplerBench:
    """Return a bench with four rows whose masks are slow, and an ordinary one before them."""
    bench = SamplerBench(vocab_size=VOCAB_SIZE, eos=EOS_ID, grammars=HeldCompiler(SlowMatcher()))
    bench.forms.may_defer = may_defer
    bench.enter(0, SamplingParams())
    for slot in range(1, 5):
        bench.enter(slot, regex("a" * slot, top_k=3))  # its mask is always computed
    return bench


def test_rows_whose_masks_are_late_leave_the_step():
    bench = slow_bench(may_defer=True)
    slots = list(range(5))
    assert bench.sample(logits_at(0, len(slots)), slots).failures == (), "it is not known yet"
    sampled = bench.sample(logits_at(0, len(slots)), slots)
    assert len(sampled.failures) == 3
    assert {error for _, error in sampled.failures} == {LATE}
    assert LATE.is_deferral
    (served,) = {1, 2, 3, 4} - {row for row, _ in sampled.failures}
    again = bench.sample(logits_at(0, len(slots)), slots)
    assert served not in {row for row, _ in again.failures}
    late = sampled.failures[0][0]
    bench.enter(late, regex("a" * late, top_k=3))
    assert bench.sample(logits_at(0, 2), [0, late]).failures == (), "it comes alone"


def test_late_masks_hold_the_step_where_no_row_may_leave():
    ranks = slow_bench(may_defer=True)
    ranks.forms._group = OtherRank()
    for bench in (slow_bench(may_defer=False), ranks):
        for _ in range(2):
            assert bench.sample(logits_at(0, 5), list(range(5))).failures == ()


def test_slowest_masks_are_late():
    def outputs_of(*times_s: float | None) -> list[FormOutput]:
        outputs = []
        for mask_s in times_s:
            compilation = Compilation()
            compilation.set_result(SlowMatcher())
            compilation.mask_s = mask_s
            output = FormOutput(compilation, (EOS_ID,), can_keep_first=False)
            output.start(is_missing=False, may_defer=True)
            outputs.append(output)
        return outputs

    def late(*times_s: float | None) -> list[int]:
        outputs = outputs_of(*times_s)
        leave_out_late(outputs)
        return [number for number, output in enumerate(outputs) if output.error is LATE]

    assert late(0.0001, None, 0.0004) == []
    assert late(*[None] * 5) == [4], "so many new grammars come in one step"
    assert late(*[0.0001] * 1000) == [], "fast ones are always computed"
    assert late(SLOW_MASKS_S / 2, SLOW_MASKS_S, 0.001) == [1]
    assert late(1.0) == [], "one always is"
    assert late(2.0, 1.0, 3.0) == [0, 2]


def test_request_fails_with_its_second_mask_beyond_the_limit():
    class VerySlowMatcher(SlowMatcher):
        cpu_s = MASK_LIMIT_S + 0.01

    bench = SamplerBench(vocab_size=VOCAB_SIZE, eos=EOS_ID, grammars=HeldCompiler(VerySlowMatcher()))
    bench.enter(0, regex("a+", top_k=3))
    assert not bench.sample(logits_at(0, 1), [0]).failures
    ((_, error),) = bench.sample(logits_at(0, 1), [0]).failures
    assert "two masks of this form took more CPU time than the limit of 30 ms" in error.message
