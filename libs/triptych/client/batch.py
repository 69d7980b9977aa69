"""Many prompts through one stream: a window of requests in flight that shrinks when the server is full."""

from __future__ import annotations

import asyncio
import heapq
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, TypeAlias, cast

from triptych.client.batch_stream import BatchStream
from triptych.client.prompts import ParsedPrompt, is_token_ids
from triptych.client.request import RequestOptions, Sampling
from triptych.errors import (
    DeadlineExceeded,
    EngineUnavailable,
    FieldViolation,
    GenerationLost,
    InvalidRequest,
    ModelNotFound,
    PermissionDenied,
    QueueFull,
    TriptychError,
    Unauthenticated,
)
from triptych.types.outputs import RequestOutput

MAX_IN_FLIGHT = 256
"""Prompts at a time where the engines run fewer. Far below `scheduler.max_num_waiting`'s default of 1024, so that other
clients find free places."""
_MIN_WAITING = 64
STALL_LIMIT_S = 120.0
"""With nothing in flight and every attempt refused for so long, the batch gives up."""

_MIN_PAUSE_S = 0.05
REDIAL_PAUSE_S = 1.0  # for a server that is away and names no time; a restart takes seconds
_OF_ALL = (Unauthenticated, PermissionDenied, ModelNotFound)
"""Errors that every other prompt would meet as well."""


def window_of(max_running: int) -> int:
    """Return how many prompts to have in flight, so that engines never wait for the next one.

    Args:
        max_running: Choices that the engines run at a time, all together. 0: not known.
    """
    return max(MAX_IN_FLIGHT, max_running + max(_MIN_WAITING, max_running // 4))


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt of a batch."""

    prompt: ParsedPrompt
    sampling: Sampling
    options: RequestOptions
    timeout_s: float | None = None
    """Seconds from its first sending to its end. None: no limit."""


def make_jobs(
    prompts: Sequence[ParsedPrompt], sampling_params: Any, options: RequestOptions, **per_prompt: Any
) -> list[Job]:
    """Return a job per prompt.

    Args:
        sampling_params: For all prompts, or a list with one for each.
        options: Of all.
        per_prompt: `timeout_s` and fields of `RequestOptions`: a value for all prompts or a list with one for each. A
            prompt's own cache salt goes before.

    Raises:
        InvalidRequest: A list is not as long as the prompts, or a timeout is no time; has every violation.
    """
    violations: list[FieldViolation] = []
    columns: dict[str, list[Any]] = {}
    for name, value in {"sampling_params": sampling_params, **per_prompt}.items():
        is_list = isinstance(value, Iterable) and not isinstance(value, str | Mapping)
        columns[name] = list(value) if is_list else [value] * len(prompts)
        if len(columns[name]) != len(prompts):
            violations.append(
                FieldViolation(name, f"{len(columns[name])} of them for {len(prompts)} prompts")
            )
    for timeout_s in columns["timeout_s"]:
        if timeout_s is not None and not (isinstance(timeout_s, int | float) and 0 < timeout_s < math.inf):
            violations.append(
                FieldViolation("timeout_s", f"{timeout_s!r:.40} is not a time in seconds above 0")
            )
            break
    if violations:
        raise InvalidRequest(violations)
    jobs = []
    names = [name for name in columns if name not in ("sampling_params", "timeout_s")]
    for number, prompt in enumerate(prompts):
        own = {name: columns[name][number] for name in names}
        if prompt.cache_salt is not None:
            own["cache_salt"] = prompt.cache_salt
        sampling, timeout_s = columns["sampling_params"][number], columns["timeout_s"][number]
        jobs.append(Job(prompt, sampling, replace(options, **own), timeout_s))
    return jobs


class PartialFailure(TriptychError):
    """Some prompts of several failed, and the others were finished. Its cause is the first error.

    `outputs` has an entry for each prompt, in their order; those that failed have an `error`.
    """

    def __init__(self, outputs: Sequence[RequestOutput]) -> None:
        self.outputs = list(outputs)
        failed = [number for number, output in enumerate(outputs) if output.error is not None]
        first = failed[0]
        super().__init__(
            f"{len(failed)} of {len(outputs)} prompts failed, first prompts[{first}]: {outputs[first].error}; "
            "`outputs` of this error has the others, and so has on_error='return'"
        )


def raise_failures(outputs: Sequence[RequestOutput]) -> None:
    """Raise if a prompt has failed: the one error that all have, as a lone prompt, or else PartialFailure."""
    errors = [output.error for output in outputs if output.error is not None]
    if not errors:
        return
    if len(errors) == len(outputs) and len(set(map(id, errors))) == 1:
        raise errors[0]
    raise PartialFailure(outputs) from errors[0]


class Batch:
    """Runs jobs to their end, in any order. Owned by the coroutine that awaits `run`, as is the stream.

    A refusal (QueueFull) sends the job back, holds all further ones for the time that the server named and
    narrows the window to what the server did take; each success widens it by 1/window, so that another
    refusal comes about once per windowful. A job that lost its server is sent again from the start:
    none of its output has been seen.
    """

    def __init__(
        self,
        stream: BatchStream,
        jobs: Sequence[Job],
        *,
        on_finished: Callable[[RequestOutput], None],
        check_server: Callable[[], None],
        max_in_flight: int = MAX_IN_FLIGHT,
        stall_limit_s: float = STALL_LIMIT_S,
    ) -> None:
        """
        Args:
            on_finished: Called with each output, the failed ones too.
            check_server: Raises a TriptychError once there is no server to come back.
        """
        self._stream = stream
        self._jobs = jobs
        self._on_finished = on_finished
        self._check_server = check_server
        self._max_in_flight = max_in_flight
        self._stall_limit_s = stall_limit_s
        self._window = float(max_in_flight)
        self._waiting = list(range(len(jobs)))  # a heap: lower indices first
        self._running: dict[asyncio.Task[RequestOutput], int] = {}
        self._deadlines: dict[int, float] = {}
        """Job with a timeout that has been sent -> the time of its end."""
        self._hold_until = 0.0
        self._last_progress = time.monotonic()

    async def run(self) -> list[RequestOutput]:
        """Return all outputs, in the order of the jobs. Those that failed have an `error` instead of choices.

        An error that all would meet (a key that is refused, a server that is gone) ends those that have not finished.
        """
        outputs: dict[int, RequestOutput] = {}
        end: TriptychError | None = None
        try:
            while self._waiting or self._running:
                self._launch()
                for task in await self._next_done():
                    index = self._running.pop(task)
                    output = self._outcome(task, index)
                    if output is not None:
                        outputs[index] = output
                        self._on_finished(output)
        except TriptychError as error:
            end = error
        finally:
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)
        return [outputs.get(index) or _failed(job, end) for index, job in enumerate(self._jobs)]

    def _launch(self) -> None:
        while self._waiting and len(self._running) < self._window and time.monotonic() >= self._hold_until:
            index = heapq.heappop(self._waiting)
            self._running[asyncio.create_task(self._attempt(index))] = index

    async def _next_done(self) -> set[asyncio.Task[RequestOutput]]:
        """Wait for a job to end, or for the hold to pass if another job may start by then."""
        has_space = bool(self._waiting) and len(self._running) < self._window
        pause_s = max(0.0, self._hold_until - time.monotonic()) if has_space else None
        if not self._running:
            await asyncio.sleep(pause_s or 0.0)
            return set()
        done, _ = await asyncio.wait(self._running, timeout=pause_s, return_when=asyncio.FIRST_COMPLETED)
        return done

    async def _attempt(self, index: int) -> RequestOutput:
        job, left_s = self._jobs[index], None
        if job.timeout_s is not None:
            now = time.monotonic()
            left_s = self._deadlines.setdefault(index, now + job.timeout_s) - now
            if left_s <= 0:
                raise DeadlineExceeded(f"timeout_s: not finished after {job.timeout_s:g} s")
        options = replace(job.options, whole_choices=True)  # fewest messages
        output = await self._stream.answer(job.prompt.content, job.sampling, options, left_s)
        output.prompt = job.prompt.text
        return output

    def _outcome(self, task: asyncio.Task[RequestOutput], index: int) -> RequestOutput | None:
        """Return the job's output or failure, None if it goes back to wait; raises what ends all."""
        try:
            output = task.result()
        except QueueFull as error:
            self._window = max(1.0, float(len(self._running)))
            self._send_back(index, error, error.retry_after_s)
            return None
        except (EngineUnavailable, GenerationLost) as error:
            self._send_back(index, error, REDIAL_PAUSE_S)
            return None
        except _OF_ALL:
            raise
        except TriptychError as error:
            self._last_progress = time.monotonic()
            return _failed(self._jobs[index], error)
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


def _failed(job: Job, error: TriptychError | None) -> RequestOutput:
    assert error is not None, "every job has an output or a reason"
    content = job.prompt.content
    token_ids = list(cast("Sequence[int]", content)) if is_token_ids(content) else []
    return RequestOutput(
        job.options.request_id, job.prompt.text, token_ids, outputs=[], finished=True, error=error
    )


UseTqdm: TypeAlias = bool | Callable[..., Any]
"""Whether to show a progress bar; or what makes it in place of `tqdm.tqdm`, from the same keyword arguments."""


class ProgressBar:
    """A bar that counts prompts and shows tokens/s; `add` is called on the loop's thread."""

    def __init__(self, num_prompts: int, use_tqdm: UseTqdm) -> None:
        self._num_tokens_in = self._num_tokens_out = 0
        self._started = time.monotonic()
        self._bar: Any = None
        if use_tqdm:
            self._bar = _bar_maker(use_tqdm)(
                total=num_prompts, desc="Processed prompts", unit="prompt", dynamic_ncols=True
            )

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def add(self, output: RequestOutput) -> None:
        """Count one prompt."""
        self.count(output.usage.num_prompt_tokens, output.usage.num_output_tokens)

    def count(self, num_tokens_in: int, num_tokens_out: int) -> None:
        """Count one prompt with tokens of its own and of its output."""
        if self._bar is None:
            return
        self._num_tokens_in += num_tokens_in
        self._num_tokens_out += num_tokens_out
        elapsed_s = time.monotonic() - self._started
        rates = f"{self._num_tokens_in / elapsed_s:.0f} tok/s in, {self._num_tokens_out / elapsed_s:.0f} tok/s out"
        self._bar.set_postfix_str(rates, refresh=False)
        self._bar.update(1)


def _bar_maker(use_tqdm: UseTqdm) -> Callable[..., Any]:
    if callable(use_tqdm):
        return use_tqdm
    from tqdm import tqdm

    return tqdm
