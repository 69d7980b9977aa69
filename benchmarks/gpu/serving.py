"""A runner at work, called in process: streams that decode, and whole requests through the scheduler."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import replace

from benchmarks.engine.requests import create_scheduler, submit_of
from benchmarks.worker.session import RunnerSession, checked
from triptych.types.sampling import SamplingParams
from triptych_services.worker.runner.base import PendingStep, Runner

_STEPS_IN_FLIGHT = 2  # steps that are launched before the result of the oldest is waited for


class DecodingStreams:
    """Streams that decode side by side, each with a full context behind it.

    Prompts are computed once: later sessions find keys and values where the first one left them.
    """

    def __init__(self, runner: Runner, context: int) -> None:
        self.runner = runner
        self._session = RunnerSession(runner)
        num_streams = runner.facts.max_num_seqs
        num_blocks = (runner.facts.kv.num_blocks - 1) // num_streams
        rows = [self._session.row(slot, context, num_blocks=num_blocks) for slot in range(num_streams)]
        self._session.restart()
        self._session.prefill(rows)
        self._computed_rows = [
            replace(row, num_computed_tokens=context - 1, num_cached_tokens=context - 1) for row in rows
        ]

    def start(self, num_streams: int) -> None:
        """Begin a session of streams at the last token of their context."""
        self._session.restart()
        rows = tuple(self._computed_rows[:num_streams])
        checked(self._session.launch(new_rows=rows).wait())

    def advance(self, num_steps: int) -> list[float]:
        """Take steps, a token of every stream in each, and return the seconds from one result to the next.

        The next step is launched before a result is waited for, as the worker does.
        """
        pending: deque[PendingStep] = deque()
        seconds: list[float] = []
        last_s = time.perf_counter()
        for number in range(num_steps):
            while len(pending) < min(_STEPS_IN_FLIGHT, num_steps - number):
                pending.append(self._session.launch())
            checked(pending.popleft().wait())
            now_s = time.perf_counter()
            seconds.append(now_s - last_s)
            last_s = now_s
        return seconds


def serve(
    runner: Runner, num_requests: int, input_len: int, output_len: int, *, seed: int
) -> tuple[float, int]:
    """Serve all requests at once through the engine's scheduler, prompts cut into chunks, nothing shared.

    Returns:
        Seconds from the first plan to the last token, and the number of steps.
    """
    facts = runner.facts
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=output_len)
    numbers = range(seed * num_requests, (seed + 1) * num_requests)
    scheduler = create_scheduler(
        [submit_of(number, input_len, sampling, vocab_size=facts.model.vocab_size) for number in numbers],
        num_blocks=facts.kv.num_blocks,
        block_size=facts.kv.block_size,
        max_model_len=facts.model.max_model_len,
        max_num_seqs=facts.max_num_seqs,
        max_num_batched_tokens=facts.max_num_batched_tokens,
        enable_prefix_caching=False,
    )
    runner.reset()
    pending: deque[PendingStep] = deque()
    num_output = num_steps = 0
    started_s = time.perf_counter()
    while scheduler.has_work or pending:
        while len(pending) < _STEPS_IN_FLIGHT and (plan := scheduler.schedule()) is not None:
            pending.append(runner.launch(plan))
        output = scheduler.update(checked(pending.popleft().wait()))
        num_output += output.token_ids.size
        num_steps += 1
    seconds = time.perf_counter() - started_s
    if num_output != num_requests * output_len:
        raise ValueError(f"{num_output} tokens came of {num_requests} requests for {output_len} each")
    return seconds, num_steps


def gaps_between(intervals: Iterable[tuple[float, float]]) -> list[float]:
    """Return the lengths of the times in which none of these (start, end) ran, between the first and the last."""
    gaps: list[float] = []
    busy_until = -math.inf
    for start, end in sorted(intervals):
        if start > busy_until:
            gaps.append(start - busy_until)
        busy_until = max(busy_until, end)
    return gaps[1:]  # without the time before the first
