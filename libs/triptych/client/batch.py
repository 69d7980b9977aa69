"""Many prompts through one client: a window of requests in flight that shrinks when the server is full."""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

from triptych.client.grpc_client import GenerationClient
from triptych.client.request import Prompt, RequestOptions, Sampling
from triptych.errors import (
    EngineUnavailable,
    FieldViolation,
    GenerationLost,
    InvalidRequest,
    QueueFull,
    TriptychError,
)
from triptych.types.outputs import RequestOutput

MAX_IN_FLIGHT = 256
"""Far below `scheduler.max_num_waiting`'s default of 1024, so that other clients find free places; above any
`max_num_seqs` that one CPU or GPU uses, so that the engine never starves."""
STALL_LIMIT_S = 120.0
"""With nothing in flight and every attempt refused for so long, the batch gives up."""

_MIN_PAUSE_S = 0.05
REDIAL_PAUSE_S = 1.0  # for a server that is away and names no time; a restart takes seconds


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt of a batch."""

    prompt: Prompt
    sampling: Sampling


class Batch:
    """Runs jobs to their end, in any order. Owned by the coroutine that awaits `run`.

    A refusal (QueueFull) sends the job back, holds all further ones for the time that the server named and
    narrows the window to what the server did take; each success widens it by 1/window, so that another
    refusal comes about once per windowful. A job whose server went away is sent again from the start:
    nobody has seen any of its output.
    """

    def __init__(
        self,
        client: GenerationClient,
        jobs: Sequence[Job],
        options: RequestOptions,
        *,
        on_finished: Callable[[RequestOutput], None],
        check_server: Callable[[], None],
        max_in_flight: int = MAX_IN_FLIGHT,
        stall_limit_s: float = STALL_LIMIT_S,
    ) -> None:
        self._stream = client.open_batch()
        self._jobs = jobs
        self._options = replace(options, whole_choices=True)  # fewest messages
        self._on_finished = on_finished
        self._check_server = check_server  # raises once there is no server to come back
        self._max_in_flight = max_in_flight
        self._stall_limit_s = stall_limit_s
        self._window = float(max_in_flight)
        self._waiting = list(range(len(jobs)))  # a heap: lower indices first
        self._running: dict[asyncio.Task[RequestOutput], int] = {}
        self._hold_until = 0.0
        self._last_progress = time.monotonic()

    async def run(self) -> list[RequestOutput]:
        """All outputs, in the order of the jobs.

        Raises:
            TriptychError: of the first job that cannot succeed; the rest is cancelled by then.
        """
        outputs: dict[int, RequestOutput] = {}
        try:
            while self._waiting or self._running:
                self._launch()
                for task in await self._next_done():
                    index = self._running.pop(task)
                    output = self._outcome(task, index)
                    if output is not None:
                        outputs[index] = output
                        self._on_finished(output)
        finally:
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)
            await self._stream.close()
        return [outputs[index] for index in range(len(self._jobs))]

    def _launch(self) -> None:
        while self._waiting and len(self._running) < self._window and time.monotonic() >= self._hold_until:
            index = heapq.heappop(self._waiting)
            self._running[asyncio.create_task(self._attempt(self._jobs[index]))] = index

    async def _next_done(self) -> set[asyncio.Task[RequestOutput]]:
        """Wait for a job to end, or for the hold to pass if another job may start by then."""
        has_space = bool(self._waiting) and len(self._running) < self._window
        pause_s = max(0.0, self._hold_until - time.monotonic()) if has_space else None
        if not self._running:
            await asyncio.sleep(pause_s or 0.0)
            return set()
        done, _ = await asyncio.wait(self._running, timeout=pause_s, return_when=asyncio.FIRST_COMPLETED)
        return done

    async def _attempt(self, job: Job) -> RequestOutput:
        return await self._stream.answer(job.prompt, job.sampling, self._options)

    def _outcome(self, task: asyncio.Task[RequestOutput], index: int) -> RequestOutput | None:
        """The job's output, or None if it goes back to wait; raises what no retry can mend."""
        try:
            output = task.result()
        except QueueFull as error:
            self._window = max(1.0, float(len(self._running)))
            self._send_back(index, error, error.retry_after_s)
            return None
        except (EngineUnavailable, GenerationLost) as error:
            self._send_back(index, error, REDIAL_PAUSE_S)
            return None
        except TriptychError as error:
            raise self._name_prompt(error, index) from None
        self._last_progress = time.monotonic()
        self._window = min(float(self._max_in_flight), self._window + 1.0 / self._window)
        return output

    def _send_back(self, index: int, error: TriptychError, pause_s: float) -> None:
        self._check_server()
        now = time.monotonic()
        if not self._running and now - self._last_progress > self._stall_limit_s:
            raise error
        heapq.heappush(self._waiting, index)
        self._hold_until = max(self._hold_until, now + max(_MIN_PAUSE_S, pause_s))

    def _name_prompt(self, error: TriptychError, index: int) -> TriptychError:
        """The same error, telling which prompt of several it is about."""
        if len(self._jobs) == 1 or not isinstance(error, InvalidRequest):
            return error
        return InvalidRequest(
            [FieldViolation(f"prompts[{index}].{v.field}", v.description) for v in error.violations]
        )


if TYPE_CHECKING:
    from tqdm import tqdm


class ProgressBar:
    """A tqdm bar that counts prompts and shows tokens/s; `add` is called on the loop's thread."""

    def __init__(self, num_prompts: int, *, is_shown: bool) -> None:
        self._num_tokens_in = self._num_tokens_out = 0
        self._started = time.monotonic()
        self._bar: tqdm[Any] | None = None
        if is_shown:
            from tqdm import tqdm

            self._bar = tqdm(total=num_prompts, desc="Processed prompts", unit="prompt", dynamic_ncols=True)

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def add(self, output: RequestOutput) -> None:
        if self._bar is None:
            return
        self._num_tokens_in += output.usage.num_prompt_tokens
        self._num_tokens_out += output.usage.num_output_tokens
        elapsed_s = time.monotonic() - self._started
        rates = f"{self._num_tokens_in / elapsed_s:.0f} tok/s in, {self._num_tokens_out / elapsed_s:.0f} tok/s out"
        self._bar.set_postfix_str(rates, refresh=False)
        self._bar.update(1)
