"""A runner at work, called in process: streams that decode alone, and whole requests through the scheduler."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from services.enginecore.request import Request
from services.enginecore.scheduler import Scheduler
from services.worker.runner.base import PendingStep, Runner
from triptych.config import SchedulerConfig
from triptych.types.sampling import SamplingParams
from triptych.types.step import NewRow, RowContent, StepPlan, StepResult, empty_u32
from triptych.types.submit import single_choice

_GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
_WINDOW = 2  # steps that are launched before the result of the oldest is waited for


class DecodingStreams:
    """Streams that decode side by side, each with a full context behind it.

    Prompts are computed once per runner: later sessions find keys and values where those left them.
    """

    def __init__(self, runner: Runner, context: int) -> None:
        self._runner = runner
        self._context = context
        self._blocks_each = (runner.facts.kv.num_blocks - 1) // runner.facts.max_num_seqs
        self._num_filled = 0
        self._step_id = 0

    def start(self, num_streams: int) -> None:
        """A session of streams that stand at the last token of their context, none of them computed again."""
        self._fill(num_streams)
        self._begin_session()
        last = self._context - 1
        rows = tuple(self._row(slot, num_computed=last) for slot in range(num_streams))
        checked(self._launch(new_rows=rows).wait())

    def advance(self, num_steps: int) -> list[float]:
        """Take so many steps, a token of every stream in each; the seconds from one result to the next.

        The next step is launched before a result is waited for, as the worker does.
        """
        pending: deque[PendingStep] = deque()
        seconds: list[float] = []
        last = time.perf_counter()
        for number in range(num_steps):
            while len(pending) < min(_WINDOW, num_steps - number):
                pending.append(self._launch())
            checked(pending.popleft().wait())
            now = time.perf_counter()
            seconds.append(now - last)
            last = now
        return seconds

    def _fill(self, num_streams: int) -> None:
        """Compute the prompts that no session has computed yet, as many at once as a step takes."""
        per_step = self._runner.facts.max_num_batched_tokens // self._context
        if per_step < 1:
            raise ValueError(f"a step of the runner takes no prompt of {self._context} tokens")
        while self._num_filled < num_streams:
            slots = range(self._num_filled, min(self._num_filled + per_step, num_streams))
            self._begin_session()
            step = self._launch(
                new_rows=tuple(self._row(slot, num_computed=0) for slot in slots),
                chunk_slots=np.array(slots, np.uint32),
                chunk_lengths=np.full(len(slots), self._context, np.uint32),
            )
            checked(step.wait())
            self._num_filled = slots.stop

    def _begin_session(self) -> None:
        self._runner.reset()
        self._step_id = 0

    def _launch(self, **columns: Any) -> PendingStep:
        self._step_id += 1
        plan = StepPlan(step_id=self._step_id, last_result_seen=self._step_id - 1, **columns)
        return self._runner.launch(plan)

    def _row(self, slot: int, *, num_computed: int) -> NewRow:
        rng = np.random.default_rng(slot)
        first_block = 1 + slot * self._blocks_each
        return NewRow(
            slot=slot,
            generation=0,
            content=RowContent(
                rng.integers(0, self._runner.facts.model.vocab_size, self._context, dtype=np.uint32), _GREEDY
            ),
            emitted_token_ids=empty_u32(),
            num_computed_tokens=num_computed,
            num_cached_tokens=num_computed,
            block_ids=np.arange(first_block, first_block + self._blocks_each, dtype=np.uint32),
            seed=0,
        )


@dataclass(frozen=True, slots=True)
class Served:
    """A number of requests from the first plan to the last token."""

    seconds: float
    num_tokens: int
    """Of prompts and answers together."""
    num_steps: int


def serve(runner: Runner, num_requests: int, input_len: int, output_len: int, *, seed: int) -> Served:
    """All requests at once, through the engine's own scheduler, prompts cut into chunks; nothing is shared."""
    facts = runner.facts
    scheduler = Scheduler(
        config=SchedulerConfig(
            max_num_seqs=facts.max_num_seqs, max_num_batched_tokens=facts.max_num_batched_tokens
        ),
        num_blocks=facts.kv.num_blocks,
        block_size=facts.kv.block_size,
        max_model_len=facts.model.max_model_len,
        eos_token_ids=facts.model.eos_token_ids,
        enable_prefix_caching=False,
        clock=time.monotonic,
    )
    rng = np.random.default_rng(seed)
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=output_len)
    for number in range(num_requests):
        submit = single_choice(
            number,
            str(number),
            rng.integers(0, facts.model.vocab_size, input_len, dtype=np.uint32),
            sampling,
            seed=number,
        )
        scheduler.add(*Request.choices_of(submit, session=0))
    runner.reset()
    pending: deque[PendingStep] = deque()
    num_output = num_steps = 0
    started = time.perf_counter()
    while scheduler.has_work or pending:
        while len(pending) < _WINDOW and (plan := scheduler.schedule()) is not None:
            pending.append(runner.launch(plan))
        output = scheduler.update(checked(pending.popleft().wait()))
        num_output += output.token_ids.size
        num_steps += 1
    seconds = time.perf_counter() - started
    if num_output != num_requests * output_len:
        raise ValueError(f"{num_output} tokens came of {num_requests} requests for {output_len} each")
    return Served(seconds, num_requests * input_len + num_output, num_steps)


def checked(result: StepResult) -> StepResult:
    """Raises ValueError if a row failed: its figure would count tokens that nobody got."""
    if result.row_errors:
        error = next(iter(result.row_errors.values()))
        raise ValueError(f"{len(result.row_errors)} rows failed: {error.message}")
    return result


def gaps_between(intervals: Iterable[tuple[float, float]]) -> list[float]:
    """The lengths of the times in which none of these (start, end) was running, first to last."""
    gaps: list[float] = []
    busy_until: float | None = None
    for start, end in sorted(intervals):
        if busy_until is not None and start > busy_until:
            gaps.append(start - busy_until)
        busy_until = end if busy_until is None else max(busy_until, end)
    return gaps
