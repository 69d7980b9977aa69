"""Steps in flight on an asynchronous device: launched in order, their tokens taken when they have arrived."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from services.worker.runner.backend import ForwardBackend
from services.worker.runner.base import CompletedStep, PendingStep
from services.worker.runner.device.last_tokens import LastTokens
from services.worker.runner.device.link import DeviceLink, ReadBack
from services.worker.runner.input_batch import StepSizes
from services.worker.runner.prompt_logprobs import PromptScorer
from services.worker.runner.prompt_targets import PromptTargets
from services.worker.runner.publish import publish
from services.worker.runner.request_rows import RequestRows, StepRows
from services.worker.sampling.sampler import ChosenTokens, Sampler
from triptych.types.step import U32, RowError, StepResult, StepTimings

log = logging.getLogger(__name__)

T = TypeVar("T")


class DeviceSteps:
    """Owned by the `ModelRunner`, whose rows and sampler it uses."""

    def __init__(
        self,
        *,
        backend: ForwardBackend,
        sampler: Sampler,
        scorer: PromptScorer,
        rows: RequestRows,
        link: DeviceLink,
        last_tokens: LastTokens,
        retries: bool = True,
    ) -> None:
        """
        Args:
            retries: a step without memory is launched once more, and then fails its requests. False: it ends the
                session, since other ranks wait in the middle of it.
        """
        self._retries = retries
        self._backend = backend
        self._sampler = sampler
        self._scorer = scorer
        self._rows = rows
        self._link = link
        self._last_tokens = last_tokens
        self._in_flight: deque[_LaunchedStep] = deque()

    def launch(self, step_id: int, step: StepRows, sizes: StepSizes, started_ns: int) -> PendingStep:
        """Launch a step that has been gathered, and count it as computed.

        A request with penalties needs the tokens themselves, so the steps before are waited for; by then the device
        computes this one.
        """
        slots = step.sampling_slots
        targets = self._scorer.take_targets(step)
        scores: tuple[Tensor, ...] = ()
        try:
            output = self._launch(lambda: self._backend.forward(sizes))
            if self._sampler.needs_history(slots):
                self.settle()
            choice = self._launch(lambda: self._sampler.choose(output.logits, output.token_ids, slots))
            if targets is not None:
                scores = self._launch(lambda: self._scorer.launch(output, targets))
        except torch.OutOfMemoryError as error:
            if not self._retries:
                raise
            return CompletedStep(self._fail(step_id, step, sizes, error))
        if choice.token_ids is not choice.first:
            assert output.slots is not None, "the backend of a device keeps last tokens"
            self._last_tokens.keep(output.slots, choice.token_ids)
        self._rows.advance(step)
        self._rows.await_ids(step, step_id)
        launched = _LaunchedStep(
            steps=self,
            step_id=step_id,
            step=step,
            generation=self._rows.generation.copy(),
            choice=choice,
            targets=targets,
            read_back=self._link.read_back(choice.tensors + scores),
            launch_ns=time.perf_counter_ns() - started_ns,
        )
        self._in_flight.append(launched)
        return launched

    def settle(self) -> None:
        """Wait for every step in flight and record its tokens."""
        while self._in_flight:
            self.settle_oldest()

    def settle_oldest(self) -> None:
        launched = self._in_flight.popleft()
        values, times = launched.read_back.wait()
        arrived = time.perf_counter_ns()
        num_chosen = len(launched.choice.tensors)
        sampled = self._sampler.read(launched.choice, values[:num_chosen])
        scored = None
        if launched.targets is not None:
            scored = self._scorer.read(launched.targets, values[num_chosen:])
        self._rows.record_late(launched.step, launched.step_id, sampled.token_ids)
        timings = StepTimings(
            prepare_ns=launched.launch_ns,
            forward_ns=times.busy_ns,
            sample_ns=time.perf_counter_ns() - arrived,
            gap_ns=times.gap_ns,
        )
        launched.result = publish(
            launched.step_id, launched.step, launched.generation, sampled, timings, scored
        )

    def _launch(self, launch: Callable[[], T]) -> T:
        return _retry_without_cache(launch) if self._retries else launch()

    def _fail(
        self, step_id: int, step: StepRows, sizes: StepSizes, error: torch.OutOfMemoryError
    ) -> StepResult:
        """A step that does not fit fails its own requests; those that wait, and the steps after, go on.

        The rows count as computed, with 0 as the token of those that sample, until the engine removes them.
        """
        log.error("step %d: %s", step_id, error)
        self.settle()
        num_sampling = step.sampling_slots.size
        self._rows.advance(step)
        self._rows.record(step, np.zeros(num_sampling, np.int64))
        refused = {failure.slot for failure in step.row_errors}
        message = (
            f"the device has no memory for a step of {sizes.num_tokens} tokens of {sizes.num_rows} requests; lower "
            "scheduler.max_num_batched_tokens or cache.memory_fraction"
        )
        failures = tuple(
            RowError(slot, int(self._rows.generation[slot]), message)
            for slot in step.slots.tolist()
            if slot not in refused
        )
        return StepResult(step_id, np.zeros(num_sampling, np.uint32), row_errors=step.row_errors + failures)


@dataclass(slots=True, eq=False)
class _LaunchedStep:
    """A `PendingStep`."""

    steps: DeviceSteps
    step_id: int
    step: StepRows
    generation: U32
    choice: ChosenTokens
    targets: PromptTargets | None
    read_back: ReadBack
    launch_ns: int
    result: StepResult | None = field(default=None)

    def is_done(self) -> bool:
        return self.result is not None or self.read_back.is_done()

    def wait(self) -> StepResult:
        while self.result is None:
            self.steps.settle_oldest()
        return self.result


def _retry_without_cache(launch: Callable[[], T]) -> T:
    """Launch once more if memory that torch keeps for later was missing.

    Raises:
        torch.OutOfMemoryError: it was not that.
    """
    try:
        return launch()
    except torch.OutOfMemoryError as error:
        log.warning("out of memory, trying again without torch's cache: %s", error)
    torch.cuda.empty_cache()
    return launch()
