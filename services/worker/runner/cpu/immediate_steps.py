"""Steps that the thread which launches them also computes: each is complete when it has been launched."""

from __future__ import annotations

import time

from services.worker.runner.backend import ForwardBackend
from services.worker.runner.base import CompletedStep
from services.worker.runner.input_batch import StepSizes
from services.worker.runner.prompt_logprobs import PromptScorer
from services.worker.runner.publish import publish
from services.worker.runner.request_rows import RequestRows, StepRows
from services.worker.sampling.sampler import Sampler
from triptych.types.step import StepTimings


class ImmediateSteps:
    """A `StepLauncher`. Owned by the `ModelRunner`; uses its rows and its sampler."""

    def __init__(
        self, *, backend: ForwardBackend, sampler: Sampler, scorer: PromptScorer, rows: RequestRows
    ) -> None:
        self._backend = backend
        self._sampler = sampler
        self._scorer = scorer
        self._rows = rows

    def launch(self, step_id: int, step: StepRows, sizes: StepSizes, started_ns: int) -> CompletedStep:
        """Compute a step. `forward_ns` includes the first choice of tokens; `sample_ns` is the time of what some
        requests need beyond it."""
        prepared = time.perf_counter_ns()
        output = self._backend.forward(sizes)
        forwarded = time.perf_counter_ns()
        sampled = self._sampler.finish(output.logits, output.token_ids, step.sampling_slots)
        targets = self._scorer.take_targets(step)
        scored = None if targets is None else self._scorer.finish(output, targets)
        self._rows.advance(step)
        self._rows.record(step, sampled.token_ids)
        timings = StepTimings(
            prepare_ns=prepared - started_ns,
            forward_ns=forwarded - prepared,
            sample_ns=time.perf_counter_ns() - forwarded,
        )
        return CompletedStep(publish(step_id, step, self._rows.slot_version, sampled, timings, scored))

    def settle(self) -> None:
        """Do nothing, since no step is in flight."""
