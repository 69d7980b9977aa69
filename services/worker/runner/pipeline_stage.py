"""Steps of a model with layers spread over stages, each in a process of its own: docs/adr/0033.

    first stage   | step 1 | step 2 | step 3 | step 4 |      steps 1 and 3 compute other rows than 2 and 4
    last stage             | step 1 | step 2 | step 3 |
    tokens of              1        2        3               which step 3, 4, 5 begin with

Every stage holds the rows of all requests and is given every plan, so positions and blocks are known everywhere. Only
tokens are not: the last stage chooses them, and the first one needs them for its next step of the same rows. They come
with the step's result, which the first stage hands to the engine.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from triptych.types.step import StepResult, StepTimings, empty_u32
from triptych_services.worker.context.rank_group import ExpectedResult, StageLink
from triptych_services.worker.context.resolved_config import ResolvedConfig
from triptych_services.worker.parallel.shares import stage_layers
from triptych_services.worker.runner.backend import StepLauncher
from triptych_services.worker.runner.base import CompletedStep, PendingStep
from triptych_services.worker.runner.request_rows import RequestRows, StepRows
from triptych_services.worker.runner.step_inputs import StepSizes

log = logging.getLogger(__name__)

_POLL_S = 200e-6  # a result that a step waits for is taken at once; the cores may be those of other stages

ComputeStates = Callable[[StepSizes], Tensor]
"""Computes a stage's states from gathered inputs: [num_tokens, hidden_size] float32, valid until the next step."""


@dataclass(frozen=True, slots=True, eq=False)
class PipelineStage:
    """The part of a model's layers that a runner computes."""

    link: StageLink
    is_last: bool
    """Whether tokens are chosen here."""
    received: Tensor | None
    """[max_num_batched_tokens, hidden_size] float32 on the rank's device, the states of the stage before; None on the
    first stage."""


def create_stage(config: ResolvedConfig, link: StageLink) -> PipelineStage:
    """Allocate what a stage receives."""
    layers = stage_layers(config.architecture, rank=config.rank)
    log.info(
        "stage %d of %d: layers %d to %d of %d",
        config.rank.stage,
        config.rank.num_stages,
        layers.start,
        layers.stop - 1,
        config.architecture.num_layers,
    )
    rank, received = config.rank, None
    if not rank.is_first_stage:
        shape = config.engine.scheduler.max_num_batched_tokens, config.architecture.hidden_size
        received = torch.zeros(shape, device=rank.device)
    return PipelineStage(link, rank.is_last_stage, received)


def create_stage_steps(
    stage: PipelineStage, steps: StepLauncher, compute: ComputeStates, rows: RequestRows
) -> StepLauncher:
    """Create the launcher of a stage.

    Args:
        steps: Launches what the last stage computes.
        compute: Computes any other stage.
    """
    if not stage.is_last:
        return EarlyStageSteps(compute=compute, link=stage.link, received=stage.received, rows=rows)
    assert stage.received is not None, "the last stage is not the first"
    return LastStageSteps(steps, stage.link, stage.received)


class EarlyStageSteps:
    """A `StepLauncher` of any stage but the last. Owned by the `ModelRunner`; uses its rows."""

    def __init__(
        self, *, compute: ComputeStates, link: StageLink, received: Tensor | None, rows: RequestRows
    ) -> None:
        """
        Args:
            received: [max_num_batched_tokens, hidden_size] float32, the input of `compute`; None on the first stage.
        """
        self._compute = compute
        self._link = link
        self._received = received
        self._rows = rows
        self._in_flight: deque[_StepElsewhere] = deque()
        self._waited_ns = 0

    def await_inputs(self, step: StepRows) -> None:
        started = time.perf_counter_ns()
        if self._received is not None:
            self._link.receive_states(self._received[: int(step.query_lens.sum())])
        else:
            while self._in_flight and self._rows.awaits_id(step.slots).any():
                self._settle_oldest()
        self._waited_ns = time.perf_counter_ns() - started

    def launch(self, step_id: int, step: StepRows, sizes: StepSizes, started_ns: int) -> PendingStep:
        """Compute this stage's part of a step, and let the other stages go on with it.

        Only the first stage hears of the tokens; the result that another one returns has none. Its times are those of
        this stage: `gap_ns` is the wait for its inputs.
        """
        prepared = time.perf_counter_ns()
        self._link.send_states(self._compute(sizes))
        self._rows.advance(step)
        timings = StepTimings(
            prepare_ns=prepared - started_ns,
            forward_ns=time.perf_counter_ns() - prepared,
            gap_ns=self._waited_ns,
        )
        if self._received is not None:
            return CompletedStep(StepResult(step_id, empty_u32(), timings=timings))
        self._rows.await_ids(step, step_id)
        launched = _StepElsewhere(self._settle_oldest, step_id, step, timings, self._link.expect_result())
        self._in_flight.append(launched)
        return launched

    def settle(self) -> None:
        while self._in_flight:
            self._settle_oldest()

    def _settle_oldest(self) -> None:
        launched = self._in_flight.popleft()
        result = launched.expected.wait()
        launched.result = replace(result, timings=launched.timings)
        token_ids = np.zeros(launched.step.sampling_slots.size, np.int64)  # 0 for rows that failed
        has_token = result.token_counts > 0 if result.token_counts.size else slice(None)
        token_ids[has_token] = result.token_ids
        self._rows.record_late(launched.step, launched.step_id, token_ids)


class LastStageSteps:
    """A `StepLauncher` of the last stage: what another one computes, from received states."""

    def __init__(self, steps: StepLauncher, link: StageLink, received: Tensor) -> None:
        """
        Args:
            received: As of `EarlyStageSteps`.
        """
        self._steps = steps
        self._link = link
        self._received = received
        self._waited_ns = 0

    def await_inputs(self, step: StepRows) -> None:
        started = time.perf_counter_ns()
        self._link.receive_states(self._received[: int(step.query_lens.sum())])
        self._waited_ns = time.perf_counter_ns() - started

    def launch(self, step_id: int, step: StepRows, sizes: StepSizes, started_ns: int) -> PendingStep:
        """Compute a step and report it to the first stage. `gap_ns` is the wait for the states."""
        result = self._steps.launch(step_id, step, sizes, started_ns).wait()
        result = replace(result, timings=replace(result.timings, gap_ns=self._waited_ns))
        self._link.send_result(result)
        return CompletedStep(result)

    def settle(self) -> None:
        self._steps.settle()


@dataclass(slots=True, eq=False)
class _StepElsewhere:
    """A `PendingStep` that later stages still compute."""

    settle_oldest: Callable[[], None]
    step_id: int
    step: StepRows
    timings: StepTimings
    expected: ExpectedResult
    result: StepResult | None = field(default=None)

    @property
    def poll_s(self) -> float:
        return _POLL_S

    def is_done(self) -> bool:
        return self.result is not None or self.expected.is_done()

    def wait(self) -> StepResult:
        while self.result is None:
            self.settle_oldest()
        return self.result
