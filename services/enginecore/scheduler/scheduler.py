"""What runs next, and what came of it: the engine core's one decision-maker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from services.enginecore.kv import BlockManager
from services.enginecore.request import Request, RequestState
from services.enginecore.scheduler.admission import Admission, check_facts
from services.enginecore.scheduler.heap import Key, LazyHeap
from services.enginecore.scheduler.planner import StepBuilder, StepPlanner
from services.enginecore.scheduler.request_states import RequestStates
from services.enginecore.scheduler.running_rows import Flags, RunningRows, Slots
from services.enginecore.scheduler.step_results import (
    Failed,
    Finished,
    InFlightStep,
    SchedulerCounters,
    StepOutput,
    StepsInFlight,
    SuspectBlocks,
    find_stop,
    match_prompt_logprobs,
    to_client_error,
)
from triptych.config import SchedulerConfig
from triptych.errors import DeadlineExceeded, EngineFailure, TriptychError
from triptych.types.outputs import FinishReason
from triptych.types.step import U32, RowError, RowKey, StepPlan, StepResult


class Scheduler:
    """Owned by the engine loop, called from nowhere else. Pure: it reads no clock but the one given.

    The loop: `expired(now)`, then `schedule()` as often as the window allows, each plan sent at once;
    `update(result)` for each result, in order. `schedule()` may be called again before the last plan's
    result is in: tokens in flight count as placeholders.
    """

    def __init__(
        self,
        *,
        config: SchedulerConfig,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        eos_token_ids: Sequence[int],
        enable_prefix_caching: bool,
        clock: Callable[[], float],
    ) -> None:
        """`num_blocks` counts the null block; `clock` gives seconds that never fall.

        Raises:
            ConfigError: the config, which `check_config` has passed, cannot work with this worker; names both values.
        """
        check_facts(config, num_blocks=num_blocks, block_size=block_size, max_model_len=max_model_len)
        self.counters = SchedulerCounters()
        self._num_blocks = num_blocks
        self._eos_token_ids = eos_token_ids
        self._clock = clock
        self._rows = RunningRows(config.max_num_seqs, block_size, eos_token_ids)
        self._blocks = BlockManager(
            num_blocks=num_blocks, block_size=block_size, enable_prefix_caching=enable_prefix_caching
        )
        self._states = RequestStates(
            rows=self._rows,
            blocks=self._blocks,
            long_prompt_tokens=(
                config.long_prefill_token_threshold if config.max_long_partial_prefills else None
            ),
        )
        self._admission = Admission(config, max_model_len)
        self._planner = StepPlanner(config, self._states, block_size)
        self._in_flight = StepsInFlight()
        self._suspect_blocks = SuspectBlocks(self._states, self._in_flight)
        self._last_result_at = clock()
        self._deadlines = LazyHeap(_by_deadline)
        self._num_arrivals = 0

    @property
    def has_work(self) -> bool:
        return len(self._states) > 0

    @property
    def num_in_flight(self) -> int:
        """Steps sent whose results are not in."""
        return len(self._in_flight)

    @property
    def num_running(self) -> int:
        return len(self._rows.slot_to_request)

    @property
    def num_waiting(self) -> int:
        """All that do not run."""
        return len(self._states) - self.num_running

    @property
    def num_blocks(self) -> int:
        """Blocks that requests may hold."""
        return self._num_blocks - 1

    @property
    def num_used_blocks(self) -> int:
        return self._blocks.num_used

    @property
    def num_cached_blocks(self) -> int:
        """Free blocks whose content can still be hit."""
        return self._blocks.num_cached

    def add(self, *choices: Request) -> tuple[Failed, ...]:
        """Queue all choices of one client's request; return what had to leave a full queue for them.

        Raises:
            InvalidRequest, DuplicateRequest, DeadlineUnreachable: As `Admission.check` says; nothing has changed.
            QueueFull: As `Admission.displace_for` says; nothing has changed.
        """
        now = self._clock()
        self._admission.check(choices, self._states, now)
        leaving = self._admission.displace_for(choices, self._states)
        displaced = tuple(self._fail(request, self._admission.displaced(self._states)) for request in leaving)
        tables = [request.blocks for request in choices]
        self._blocks.hash_prompt(tables, choices[0].token_ids, choices[0].num_prompt_tokens)
        for request in choices:
            request.limit = self._admission.limit_of(request)
            request.arrival = self._num_arrivals
            request.queued_at = now
            self._num_arrivals += 1
            self._states.add(request)
            if request.deadline is not None:
                self._deadlines.push(request)
        return displaced

    @property
    def num_places(self) -> int:
        """Return how many more choices can be added before the queue is full."""
        return max(self._admission.max_choices - len(self._states), 0)

    def abort(self, session: int, number: int) -> Finished | None:
        """End a request for its client's sake; None if it is not alive. Its blocks are free at once, and
        the next plan takes its row from the worker."""
        request = self._states.by_number(session, number)
        return None if request is None else self._finish(request, FinishReason.ABORT)

    def abort_session(self, session: int) -> tuple[Finished, ...]:
        """End all that came on one stream."""
        orphans = [request for request in self._states if request.session == session]
        return tuple(self._finish(request, FinishReason.ABORT) for request in orphans)

    def abort_all(self) -> tuple[Finished, ...]:
        """End everything, wherever it stands."""
        return tuple(self._finish(request, FinishReason.ABORT) for request in list(self._states))

    @property
    def started(self) -> list[Request]:
        """Those with a row, or with results still to come."""
        return [*self._states.running, *self._states.draining.values()]

    def expired(self, now: float) -> tuple[Failed, ...]:
        """End those whose deadline has passed, wherever they stand. Called before `schedule`, so that what
        expired while it waited is never computed."""
        failed = []
        while (request := self._deadlines.peek()) is not None and _by_deadline(request)[0] <= now:
            stage = "waited to be scheduled" if request.planned_at is None else "ran"
            failed.append(
                self._fail(request, DeadlineExceeded(f"the deadline passed while the request {stage}"))
            )
        return tuple(failed)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached content; refused (False) while any block is in use."""
        return self._blocks.reset()

    def requeue_all(self) -> None:
        """The worker is lost, with all its rows and blocks. What ran waits again, with prompt and emitted
        tokens; what is in flight never comes; step ids start at 1 again."""
        self._in_flight.forget()
        for request in list(self._states.draining.values()):
            self._states.finish_draining(request)
        for request in self._states.running:
            self._states.requeue(request)
        self._states.removed_slots.clear()
        is_reset = self._blocks.reset()
        assert is_reset, "blocks are held although nothing runs"

    def adopt(self, previous: Scheduler) -> tuple[Failed, ...]:
        """Take over all requests of a scheduler whose worker is gone, in their order of arrival, and its counts.

        For a worker that came back with another number of blocks: those that no longer fit fail.
        """
        assert previous._blocks.block_size == self._blocks.block_size, "block hashes depend on it"
        previous.requeue_all()
        self.counters, self._num_arrivals = previous.counters, previous._num_arrivals
        self._admission.forecast, self._deadlines = previous._admission.forecast, previous._deadlines
        self._states.adopt(previous._states)
        failed = []
        for request in list(self._states):
            request.limit = self._admission.limit_of(request)
            if len(request.token_ids) >= request.limit:
                why = f"{len(request.token_ids)} tokens reach {request.limit}, all that the new worker's blocks hold"
                failed.append(self._fail(request, EngineFailure(why)))
        return tuple(failed)

    def requests_in_flight(self) -> dict[Request, int]:
        """Return whom a loss of the worker would interrupt, all that have begun if any step is in flight, and the
        position of each: its known tokens and those in flight."""
        if not self._in_flight:
            return {}
        positions = {request: int(self._rows.num_expected[request.slot]) for request in self._states.running}
        for request in self._states.draining.values():
            positions[request] = len(request.token_ids) + request.num_in_flight
        return positions

    def admit_only(self, requests: Collection[Request] | None) -> None:
        """While this is a set, nobody else is admitted, whatever its place; None lifts it. What runs goes on."""
        self._states.waiting.admit_only(requests)

    def fail(self, request: Request, error: EngineFailure) -> Failed:
        """End a request through no fault of its client's."""
        return self._fail(request, error)

    def schedule(self) -> StepPlan | None:
        """Decide the next step; None if there is nothing to compute until a result or a request comes in."""
        build = self._planner.build()
        self.counters.num_preemptions += build.num_preempted
        return None if build.is_empty else self._commit(build)

    def _commit(self, build: StepBuilder) -> StepPlan:
        """From here on the step counts as computed."""
        build.close()
        rows, slots = self._rows, build.slots
        rows.computed[slots] = build.ends
        sampling_slots = np.sort(slots[build.ends == rows.num_expected[slots]])
        rows.num_expected[sampling_slots] += 1  # a placeholder for the token that each will sample
        self._note_admitted(build)
        plan = build.to_plan(
            self._in_flight.next_step_id, self._in_flight.last_result_seen, self._states.removed_slots
        )
        self._states.removed_slots.clear()
        self._in_flight.push(
            InFlightStep(
                step_id=plan.step_id,
                num_tokens=plan.num_tokens,
                planned_at=self._clock(),
                sampling_slots=sampling_slots,
                slot_versions=rows.slot_version[sampling_slots],
                newly_cached_blocks=self._blocks.take_newly_cached(),
            )
        )
        self.counters.num_steps += 1
        self.counters.num_scheduled_tokens += plan.num_tokens
        return plan

    def update(self, result: StepResult) -> StepOutput:
        """Take in the oldest step's result.

        Tokens for rows that are gone are dropped: they were sampled beyond an end. Those of a preempted
        request are kept.

        Raises:
            ProtocolViolation: this is not that step's result; nothing has changed.
        """
        reported = match_prompt_logprobs(result, self._states) if result.prompt_logprobs else ()
        step = self._in_flight.pop(result)
        for request, logprobs in reported:
            request.prompt_logprobs_start = logprobs.end
        self._measure(step)
        failed = self._fail_rows(step, result.row_errors) if result.row_errors else []
        rows = self._rows
        is_live = rows.slot_version[step.sampling_slots] == step.slot_versions
        places = np.flatnonzero(is_live)  # [t] in the result
        slots, token_ids = step.sampling_slots[places], result.token_ids[places]
        sessions, numbers = rows.session[slots], rows.number[slots]
        is_filled, is_at_limit = rows.append(slots, token_ids)
        self._note_first_tokens(slots)
        self._states.fill_blocks(slots[is_filled])
        finished = self._finish_stopped(slots, token_ids, is_at_limit)
        output = StepOutput(sessions, numbers, token_ids, places, tuple(finished), tuple(failed), reported)
        if not self._states.draining:
            return output
        return self._with_late_tokens(output, step, result, np.flatnonzero(~is_live))

    def check_integrity(self) -> None:
        """Walk everything and raise AssertionError naming what is off. For tests, and for an idle engine."""
        self._states.check_integrity()
        num_in_flight: Counter[tuple[int, int]] = Counter()
        for step in self._in_flight:
            num_in_flight.update(zip(step.sampling_slots.tolist(), step.slot_versions.tolist(), strict=True))
        for request in self._states:
            name, noted = f"request {request.request_id}", request.num_in_flight
            if request.state is RequestState.RUNNING:
                noted = int(self._rows.num_expected[request.slot] - self._rows.known[request.slot])
            planned = 0
            if request.state is not RequestState.WAITING:
                planned = num_in_flight[request.slot, request.slot_version]
            assert noted == planned, f"{name} expects {noted} tokens, steps in flight bring {planned}"
            has_deadline = request in self._deadlines
            assert has_deadline == (request.deadline is not None), f"{name} is lost to its deadline"
        if not self.has_work:
            assert not self._blocks.num_used, f"{self._blocks.num_used} blocks did not come home"

    def _measure(self, step: InFlightStep) -> None:
        """A step starts when it is sent, or when the one before it is done."""
        now = self._clock()
        self._admission.forecast.steps.note(step.num_tokens, now - max(step.planned_at, self._last_result_at))
        self._last_result_at = now

    def _note_admitted(self, build: StepBuilder) -> None:
        for request, row in zip(build.admitted, build.new_rows, strict=True):
            if request.planned_at is not None:
                continue  # it comes back; what it finds of itself says nothing of the cache
            request.planned_at = self._clock()
            self._admission.forecast.note_admitted(len(request.token_ids), row.num_computed_tokens)
            request.num_cached_tokens = min(row.num_computed_tokens, request.num_prompt_tokens)
            if self._states.reads_cache(request):
                self.counters.prefix_queries += request.num_prompt_tokens
                self.counters.prefix_hits += request.num_cached_tokens

    def _note_first_tokens(self, slots: Slots) -> None:
        first = slots[self._rows.awaits_first_token[slots]]
        if len(first):
            self._rows.awaits_first_token[first] = False
            now = self._clock()
            for slot in first.tolist():
                self._rows.slot_to_request[slot].first_token_at = now

    def _finish_stopped(self, slots: Slots, token_ids: U32, is_at_limit: Flags) -> list[Finished]:
        """End the running requests that these new tokens end; only the suspicious few are asked."""
        finished = []
        for index in np.flatnonzero(is_at_limit | self._rows.watched.among(token_ids)).tolist():
            slot, token_id = int(slots[index]), int(token_ids[index])
            request, num_known = self._rows.slot_to_request[slot], int(self._rows.known[slot])
            stop = find_stop(request, token_id, num_known, self._eos_token_ids)
            if stop is not None:
                finished.append(self._finish(request, *stop))
        return finished

    def _with_late_tokens(
        self, output: StepOutput, step: InFlightStep, result: StepResult, places: Slots
    ) -> StepOutput:
        """Add what this step sampled for requests whose rows are gone since.

        Args:
            places: Of the tokens for rows that are gone, in the result.
        """
        late: list[tuple[Request, int, int]] = []  # request, token, place in the result
        finished = list(output.finished)
        slots, slot_versions = step.sampling_slots[places].tolist(), step.slot_versions[places].tolist()
        for place, slot, slot_version in zip(places.tolist(), slots, slot_versions, strict=True):
            request = self._states.draining.get((slot, slot_version))
            if request is None:
                continue
            token_id = int(result.token_ids[place])
            late.append((request, token_id, place))
            self._states.append_late(request, token_id)
            if request.first_token_at is None:
                request.first_token_at = self._clock()
            stop = find_stop(request, token_id, len(request.token_ids), self._eos_token_ids)
            if stop is not None:
                finished.append(self._finish(request, *stop))
            elif not request.num_in_flight:
                self._states.finish_draining(request)
        return output.with_tokens(late, tuple(finished))

    def _fail_rows(self, step: InFlightStep, errors: Mapping[RowKey, RowError]) -> list[Failed]:
        """End the requests that failed in this step, and start over whoever relied on a block that they spoiled."""
        failed, suspect_blocks = [], set[int]()
        for key, error in errors.items():
            request = self._states.by_row(key)
            if request is None:
                continue
            if not error.kv_is_valid:
                suspect_blocks |= self._suspect_blocks.find(request)
            failed.append(
                self._fail(request, to_client_error(step.step_id, error), is_trusted=error.kv_is_valid)
            )
        if not all(error.kv_is_valid for error in errors.values()):
            self._suspect_blocks.uncache(step, suspect_blocks)
        return failed

    def _finish(self, request: Request, reason: FinishReason, stop_token_id: int | None = None) -> Finished:
        self._end(request, reason.word)
        return Finished(request, reason, stop_token_id)

    def _fail(self, request: Request, error: TriptychError, *, is_trusted: bool = True) -> Failed:
        self._end(request, "error", is_trusted=is_trusted)
        return Failed(request, error)

    def _end(self, request: Request, outcome: str, *, is_trusted: bool = True) -> None:
        self._states.end(request, is_trusted=is_trusted)
        self._deadlines.discard(request)
        request.ended_at = self._clock()
        ran_s = None if request.planned_at is None else request.ended_at - request.planned_at
        self._admission.forecast.endings.note_ending(ran_s)
        self.counters.num_finished[outcome] += 1


def _by_deadline(request: Request) -> Key:
    assert request.deadline is not None
    return request.deadline, request.arrival
