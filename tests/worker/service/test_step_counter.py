"""Metrics that a worker derives from the results of its steps."""

from __future__ import annotations

import numpy as np
from prometheus_client import CollectorRegistry

from triptych.observe.metrics import ExpertChoices, WorkerMetrics
from triptych.types.step import StepResult, VerifiedGuesses, empty_u32
from triptych_services.worker.service.step_counter import StepCounter


def test_guesses_are_counted_by_proposer_and_place() -> None:
    registry = CollectorRegistry()
    counter = StepCounter(WorkerMetrics.create(registry))
    ngram = VerifiedGuesses("ngram", np.array([3, 2], np.uint32), np.array([2, 0], np.uint32))
    suffix = VerifiedGuesses("suffix", np.array([1], np.uint32), np.array([1], np.uint32))
    counter.count(StepResult(1, empty_u32(), guesses=(ngram, suffix)))
    counter.count(StepResult(2, empty_u32(), guesses=(ngram,)))

    def value(name: str, proposer: str, place: str) -> float | None:
        return registry.get_sample_value(
            f"triptych_worker_{name}_total", {"proposer": proposer, "place": place}
        )

    assert [value("guesses", "ngram", place) for place in "12"] == [6, 4]
    assert [value("accepted_guesses", "ngram", place) for place in "12"] == [4, 0]
    assert value("guesses", "suffix", "1") == value("accepted_guesses", "suffix", "1") == 1
    assert value("guesses", "suffix", "2") is None
    assert registry.get_sample_value("triptych_worker_steps_total") == 2


def test_choices_of_experts_are_read_when_they_are_scraped() -> None:
    counts: tuple[dict[int, list[int]], int] = ({}, 0)
    registry = CollectorRegistry()
    ExpertChoices(lambda: counts, registry)
    assert not list(registry.collect()), "there is no mixture"
    for times in (1, 2):
        counts = ({1: [times * 2, 0], 4: [times * 3, 0, times * 7]}, times * 9)
        found = [
            registry.get_sample_value("triptych_worker_expert_choices_total", {"expert": expert})
            for expert in "012"
        ]
        assert found == [times * 5, 0, times * 7]
        assert registry.get_sample_value("triptych_worker_busiest_rank_expert_choices_total") == times * 9
