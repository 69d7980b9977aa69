"""Steps in flight on an asynchronous device: launched in order, with their tokens read when they have arrived."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triptych.types.step import U32, RowError, StepResult, StepTimings, empty_u32
from triptych_services.worker.runner.backend import ForwardBackend
from triptych_services.worker.runner.base import CompletedStep, PendingStep
from triptych_services.worker.runner.cuda.forward import LastTokens
from triptych_services.worker.runner.cuda.streams import DeviceStream, ReadBack
from triptych_services.worker.runner.drafting.speculation import Speculation
from triptych_services.worker.runner.pooled_rows import PooledPart, RowPooler
from triptych_services.worker.runner.prompt_logprobs import PromptScorer
from triptych_services.worker.runner.prompt_targets import PromptTargets
from triptych_services.worker.runner.publish import publish
from triptych_services.worker.runner.request_rows import Flags, RequestRows, StepRows
from triptych_services.worker.runner.step_inputs import StepSizes
from triptych_services.worker.sampling.sampled import SampledTokens
from triptych_services.worker.sampling.sampler import ChosenTokens, Sampler

log = logging.getLogger(__name__)

T = TypeVar("T")

# Between two looks at a step in flight; a plan that arrives meanwhile is taken at once. The device has its next step
# by then or has none, so this delays a result, not a step.
_POLL_S = 50e-6
_NUM_KEPT = 5
"""Waits around steps with guesses of which the fastest counts."""


class DeviceSteps:
    """A `StepLauncher`. Owned by the `ModelRunner`; uses its rows and its sampler."""

    def __init__(
        self,
        *,
        backend: ForwardBackend,
        sampler: Sampler,
        scorer: PromptScorer,
        pooler: RowPooler,
        rows: RequestRows,
        stream: DeviceStream,
        last_tokens: LastTokens,
        gather: Callable[[StepRows], StepSizes],
        speculation: Speculation | None = None,
        retries: bool = True,
    ) -> None:
        """
        Args:
            gather: See `InputBuffers.gather`; for steps that replace one without memory.
            speculation: Hears of the tokens of each step when they have arrived; None: no row guesses.
            retries: Whether a step without memory is launched once more, and then without some of its requests. False:
                it ends the session, since other ranks wait in the middle of it.
        """
        self._retries = retries
        self._backend = backend
        self._sampler = sampler
        self._scorer = scorer
        self._pooler = pooler
        self._rows = rows
        self._stream = stream
        self._last_tokens = last_tokens
        self._gather = gather
        self._speculation = speculation
        self._waits = _GuessWaits()
        self._in_flight: deque[_LaunchedStep] = deque()

    def await_inputs(self, step: StepRows) -> None:
        """Do nothing: the device itself keeps what the host does not know yet."""

    def launch(self, step_id: int, step: StepRows, sizes: StepSizes, started_ns: int) -> PendingStep:
        """Launch a step; see `StepLauncher.launch`.

        In the timings `forward_ns` is the device's own measurement, sampling included. `prepare_ns` is the host's time
        to prepare and launch, and `sample_ns` its time to read the result; both overlap with other steps.

        A step with guesses is waited for: the positions of the next one follow from its tokens.

        A step that does not fit into memory is computed without guesses, and then without the prompts that entered
        last; their requests fail.
        """
        try:
            launched = self._launch_rows(step_id, step, sizes, started_ns)
        except torch.OutOfMemoryError as error:
            if not self._retries:
                raise
            log.error("step %d: %s", step_id, error)
        else:
            if step.places is not None:
                launched.wait()
            return launched
        self.settle()
        if step.places is not None:
            step = replace(step, places=None)
            return self.launch(step_id, step, self._gather(step), started_ns)
        return CompletedStep(self._compute_less(step_id, step, sizes, started_ns))

    def _launch_rows(self, step_id: int, step: StepRows, sizes: StepSizes, started_ns: int) -> _LaunchedStep:
        """Launch a step and count it as computed.

        A request with penalties needs the values of the tokens, so the earlier steps are waited for, while the device
        computes this one.

        Raises:
            torch.OutOfMemoryError: The step does not count as computed. Its inputs on the device may have been
                overwritten, so it can be launched again after `settle` and another `gather`.
        """
        slots = step.sampling_slots
        targets = self._scorer.take_targets(step)
        parts = self._pooler.take_parts(step)
        scores: tuple[Tensor, ...] = ()
        states: tuple[Tensor, ...] = ()
        output = self._launch(lambda: self._backend.forward(sizes))
        choice = ChosenTokens(output.token_ids, output.token_ids)
        if step.places is None:  # else it is chosen at each place when the tokens before it are known
            if self._sampler.needs_history(slots):
                self.settle()
            choice = self._launch(lambda: self._sampler.choose(output.logits, output.token_ids, slots))
        if targets is not None:
            scores = self._launch(lambda: self._scorer.launch(output, targets))
        if parts:
            states = self._launch(lambda: self._pooler.launch(output, parts))
        if choice.token_ids is not choice.first:
            assert output.slots is not None, "the backend of a device keeps last tokens"
            self._last_tokens.keep(output.slots, choice.token_ids)
        if step.places is None:
            self._rows.advance(step)
            self._rows.await_ids(step, step_id)
        launched = _LaunchedStep(
            steps=self,
            step_id=step_id,
            step=step,
            slot_version=self._rows.slot_version.copy(),
            logits=None if step.places is None else output.logits,
            choice=choice,
            targets=targets,
            parts=parts,
            read_back=self._stream.read_back(choice.tensors + scores + states),
            launch_ns=time.perf_counter_ns() - started_ns,
            mask_ns=self._sampler.take_mask_ns(),
        )
        self._in_flight.append(launched)
        return launched

    def _compute_less(self, step_id: int, step: StepRows, sizes: StepSizes, started_ns: int) -> StepResult:
        """Compute a step without as many of its prompts as it takes to fit, and fail the requests of the others.

        Those rows count as computed, with 0 as the token of those that sample, until the engine removes them.

        Args:
            sizes: Sizes of the whole step.
        """
        computed = np.ones(step.slots.size, np.bool_)
        result = StepResult(step_id, empty_u32(), row_errors=step.row_errors)
        while True:
            stays = self._rows.rows_without_newest_prompts(step.select(computed))
            if stays is None:
                computed[:] = False
                break
            computed[computed] = stays
            part = step.select(computed)
            try:
                result = self._launch_rows(step_id, part, self._gather(part), started_ns).wait()
            except torch.OutOfMemoryError as error:
                log.error(
                    "step %d with %d of its %d requests: %s", step_id, part.slots.size, step.slots.size, error
                )
            else:
                break
        failed = step.select(~computed)
        self._rows.advance(failed)
        self._rows.record_late(failed, step_id, np.zeros(failed.sampling_slots.size, np.int64))
        return self._with_failures(result, step, failed, computed, sizes)

    def _with_failures(
        self, result: StepResult, step: StepRows, failed: StepRows, computed: Flags, sizes: StepSizes
    ) -> StepResult:
        """Return the result of a whole step.

        Args:
            result: Result of the rows that were `computed`, [num_rows].
            failed: The other rows.
        """
        message = (
            f"the device has no memory for a step of {sizes.num_tokens} tokens of {sizes.num_rows} requests; lower "
            "scheduler.max_num_batched_tokens or cache.memory_fraction"
        )
        failures = {self._rows.key_of(slot): RowError(message) for slot in failed.slots.tolist()}
        token_counts = np.zeros(step.sampling_slots.size, np.uint32)
        token_counts[computed[step.samples]] = result.token_counts if result.token_counts.size else 1
        return replace(
            result,
            token_counts=token_counts,
            row_errors={**failures, **result.row_errors},
            guess_counts=empty_u32(),  # are of other rows
        )

    def settle(self) -> None:
        """Wait for every step in flight and record its tokens."""
        while self._in_flight:
            self.settle_oldest()

    def settle_oldest(self) -> None:
        launched = self._in_flight.popleft()
        values, times = launched.read_back.wait()
        arrived = time.perf_counter_ns()
        num_chosen, num_parts = len(launched.choice.tensors), len(launched.parts)
        values, states = values[: len(values) - num_parts], values[len(values) - num_parts :]
        step = launched.step
        sampled = self._read_tokens(launched, values[:num_chosen])
        scored = None
        if launched.targets is not None:
            scored = self._scorer.read(launched.targets, values[num_chosen:])
        pooled = None
        if launched.parts:
            pooled = self._pooler.read(
                launched.parts, [part.astype(np.float32, copy=False) for part in states]
            )
        if step.places is not None:
            self._rows.advance(step, sampled.token_counts)
        is_current = self._rows.record_late(step, launched.step_id, sampled.token_ids, sampled.token_counts)
        guesses = None
        if self._speculation is not None:
            self._waits.note(self._speculation, step, times.gap_ns)
            guesses = self._speculation.finish(
                step, sampled.token_counts, times.busy_ns, is_current=is_current
            )
        timings = StepTimings(
            prepare_ns=launched.launch_ns,
            forward_ns=times.busy_ns,
            sample_ns=time.perf_counter_ns() - arrived,
            gap_ns=times.gap_ns,
            mask_ns=launched.mask_ns,
        )
        launched.result = publish(
            launched.step_id, step, launched.slot_version, sampled, timings, scored, pooled, guesses
        )

    def _read_tokens(self, launched: _LaunchedStep, values: Sequence[NDArray[np.generic]]) -> SampledTokens:
        """Return the tokens of a step that has arrived; those up to the first wrong guess of each row."""
        step, logits = launched.step, launched.logits
        if step.places is None or logits is None:
            return self._sampler.read(launched.choice, values)
        launched.logits = None
        sampled = self._sampler.finish_places(
            logits, launched.choice.token_ids, step.sampling_slots, step.places
        )
        launched.mask_ns = self._sampler.take_mask_ns()
        return sampled

    def _launch(self, launch: Callable[[], T]) -> T:
        return _retry_without_cache(launch) if self._retries else launch()


@dataclass(slots=True, eq=False)
class _LaunchedStep:
    """A `PendingStep`."""

    steps: DeviceSteps
    step_id: int
    step: StepRows
    slot_version: U32
    logits: Tensor | None
    """The logits of a step with guesses, until it has arrived. None: it has no guesses."""
    choice: ChosenTokens
    targets: PromptTargets | None
    parts: Sequence[PooledPart]
    read_back: ReadBack
    launch_ns: int
    mask_ns: int
    result: StepResult | None = field(default=None)

    @property
    def poll_s(self) -> float:
        return _POLL_S

    def is_done(self) -> bool:
        return self.result is not None or self.read_back.is_done()

    def wait(self) -> StepResult:
        while self.result is None:
            self.steps.settle_oldest()
        return self.result


class _GuessWaits:
    """The time for which the device waits for the host around steps with guesses."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=_NUM_KEPT)
        """The latest such times."""
        self._follows_guesses = False

    def note(self, speculation: Speculation, step: StepRows, gap_ns: int) -> None:
        """Charge guesses with the gap before a step that has some, or follows one that has. The fastest of the latest
        counts, since a device may wait for requests, too.
        """
        has_guesses = step.places is not None
        if has_guesses or self._follows_guesses:
            self._seconds.append(gap_ns * 1e-9)
            speculation.note_wait(step.sampling_slots.size, min(self._seconds))
        self._follows_guesses = has_guesses


def _retry_without_cache(launch: Callable[[], T]) -> T:
    """Launch again without torch's cache if memory was short.

    Raises:
        torch.OutOfMemoryError: Memory is short without the cache as well.
    """
    try:
        return launch()
    except torch.OutOfMemoryError as error:
        log.warning("out of memory, trying again without torch's cache: %s", error)
    torch.cuda.empty_cache()
    return launch()
