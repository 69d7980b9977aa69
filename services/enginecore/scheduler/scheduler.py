"""Decides what runs next, and reads what came of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import numpy as np

from triptych.config import SchedulerConfig
from triptych.errors import EngineFailure, FeatureDisabled
from triptych.types.facts import EngineCounters, EngineStatus, KvLayout, WorkerFacts
from triptych.types.outputs import LoadReport
from triptych.types.pooling import GENERATION
from triptych.types.step import U32, RowKey, StepPlan, StepResult
from triptych_services.enginecore.kv.grouped_manager import create_block_manager
from triptych_services.enginecore.request import Request, RequestState
from triptych_services.enginecore.scheduler.admission import (
    Admission,
    check_facts,
    longest_step_of,
    without_chunks,
)
from triptych_services.enginecore.scheduler.microbatches import Microbatches, split_budget
from triptych_services.enginecore.scheduler.pace import PooledShare
from triptych_services.enginecore.scheduler.planner import StepPlanner
from triptych_services.enginecore.scheduler.policy import (
    AdapterLimit,
    AdmissionLimit,
    create_limits,
    create_policy,
)
from triptych_services.enginecore.scheduler.request_states import RequestStates
from triptych_services.enginecore.scheduler.requests import Requests
from triptych_services.enginecore.scheduler.result_reader import ResultReader
from triptych_services.enginecore.scheduler.running_rows import RunningRows, Slots
from triptych_services.enginecore.scheduler.step_builder import StepBuilder
from triptych_services.enginecore.scheduler.step_results import (
    Failed,
    InFlightStep,
    StepOutput,
    StepsInFlight,
)
from triptych_services.enginecore.tasks import check_task


@dataclass(frozen=True, slots=True, eq=False)
class SchedulerSnapshot:
    """The state of a scheduler between two calls, for status, metrics and tests. Its requests must not be changed."""

    requests: tuple[Request, ...]
    """All requests that have not ended, in the order of their arrival."""
    running: tuple[Request, ...]
    """Requests with a row, in the order of their admission."""
    waiting: tuple[Request, ...]
    """All other requests, in the order of their arrival."""
    draining: tuple[Request, ...]
    """Waiting requests that were preempted while results for them were in flight."""
    steps_in_flight: tuple[InFlightStep, ...]
    """The steps in flight, oldest first."""
    num_blocks: int
    """Blocks that requests may hold."""
    num_used_blocks: int
    """Blocks that requests hold."""
    num_cached_blocks: int
    """Free blocks with content that can still be hit."""
    num_touched_blocks: int
    """Blocks that requests have held since the start."""
    num_heap_entries: int
    """Entries of all heaps, those of requests that left included."""
    num_watched_tokens: int
    """Different token ids that may end a running request."""
    counters: EngineCounters


class Scheduler:
    """Plans steps and takes in their results. The engine core owns it; frontends' requests come to `requests`.

    It is pure: it reads no clock but the one given.

    The loop calls `requests.expire(now)`, then `schedule()` as often as the pipeline depth allows, sending each plan at
    once, and `update(result)` for each result, in order. `schedule()` may be called again before the last plan's result
    has come: tokens in flight count as placeholders. What is done to requests between two steps is in `requests`.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        facts: WorkerFacts,
        *,
        enable_prefix_caching: bool,
        clock: Callable[[], float],
        kv_lease_s: float = 10.0,
    ) -> None:
        """Create a scheduler without requests.

        Args:
            config: Options that `check_config` has passed.
            facts: Facts of the worker, of which `num_stages` may be lowered.
            enable_prefix_caching: Whether requests share blocks of equal content.
            clock: Monotonic time in seconds.
            kv_lease_s: Seconds for which blocks are held for other workers that do not pull.

        Raises:
            ConfigError: The config cannot work with this worker; names both values.
        """
        check_facts(config, facts)
        if facts.model.is_encoder:  # computes texts whole, and leaves nothing to be found
            config, enable_prefix_caching = without_chunks(config), False
        kv, num_stages, eos_token_ids = facts.kv, facts.num_stages, facts.model.eos_token_ids
        config = split_budget(config, num_stages)
        self._model, self._clock = facts.model, clock
        policy = create_policy(config)
        self._blocks = create_block_manager(
            kv, enable_prefix_caching=enable_prefix_caching, longest_step=longest_step_of(config, facts)
        )
        num_groups = max(len(self._blocks.groups), 1)
        self._rows = RunningRows(config.max_num_seqs, kv.block_size, eos_token_ids, num_groups)
        self.cache_changes = self._blocks.pool.cache_changes
        self._admission = Admission(config, facts.model.max_model_len, num_stages=num_stages)
        share, self._limits = self._create_limits(config, facts.max_adapters)
        self._states = RequestStates(
            rows=self._rows,
            blocks=self._blocks,
            policy=policy,
            limits=self._limits,
            kv_lease_s=kv_lease_s,
            last_state_tasks=facts.model.last_state_tasks,
        )
        self.transfers = self._states.transfers
        self._in_flight = StepsInFlight()
        self._microbatches = Microbatches(self._rows, self._in_flight, num_stages)
        sizes = kv.block_size, facts.max_samples_per_row
        self._planner = StepPlanner(config, policy, self._states, self._microbatches, *sizes, share)
        self.counters = EngineCounters()
        """Totals since the start, of this scheduler and those it has adopted."""
        self.requests = Requests(self._states, self._admission, clock, self.counters)
        self._reader = ResultReader(
            states=self._states,
            in_flight=self._in_flight,
            requests=self.requests,
            admission=self._admission,
            eos_token_ids=eos_token_ids,
            clock=clock,
        )

    @property
    def has_work(self) -> bool:
        return len(self._states.index) > 0 or len(self.transfers) > 0

    @property
    def next_due_at(self) -> float:
        """When a request expires or `schedule` tries something again, in seconds of the clock; inf: never."""
        transfers_due_at = self.transfers.next_due_at(self._admission.forecast.prefill_s)
        return min(self._states.next_due_at, transfers_due_at)

    @property
    def num_in_flight(self) -> int:
        """Number of steps in flight."""
        return len(self._in_flight)

    @property
    def num_requests(self) -> int:
        """Number of requests that run or wait."""
        return len(self._states.index)

    @property
    def num_free_places(self) -> int:
        """Number of choices that can be added before the queue is full."""
        return max(self._admission.limits.max_choices - len(self._states.index), 0)

    def snapshot(self) -> SchedulerSnapshot:
        """Return the current state. Takes time in proportion to the number of requests."""
        return SchedulerSnapshot(
            requests=tuple(self._states.index),
            running=tuple(self._states.running),
            waiting=tuple(request for request in self._states.index if request.state is RequestState.WAITING),
            draining=tuple(self._states.draining.values()),
            steps_in_flight=tuple(self._in_flight),
            num_blocks=self._blocks.pool.num_blocks - 1,
            num_used_blocks=self._blocks.pool.num_held,
            num_cached_blocks=self._blocks.pool.num_cached_free,
            num_touched_blocks=self._blocks.pool.num_touched,
            num_heap_entries=self._states.num_entries,
            num_watched_tokens=len(self._rows.watched),
            counters=self.counters.copy(),
        )

    def add_counts(self, status: EngineStatus, kv: KvLayout, *, now: float) -> EngineStatus:
        """Return a status with the numbers of this scheduler and of its worker's KV cache.

        Its time does not depend on the number of waiting requests. `now`: on the engine's clock.
        """
        waiting_since = (each.queued_at for each in self._states.index if each.state is RequestState.WAITING)
        running = Counter(each.head.priority for each in self._rows.slot_to_request.values())
        alive = self._states.shares.count_alive_by_priority().items()
        return replace(
            status,
            num_running=len(self._rows.slot_to_request),
            num_waiting=len(self._states.waiting),
            oldest_waiting_s=max(now - next(waiting_since, now), 0.0),  # the index is in the order of arrival
            num_waiting_by_priority={level: num for level, count in alive if (num := count - running[level])},
            num_blocks=self._blocks.pool.num_blocks - 1,
            num_used_blocks=self._blocks.pool.num_held,
            num_cached_blocks=self._blocks.pool.num_cached_free,
            num_touched_blocks=self._blocks.pool.num_touched,
            soft_num_blocks=kv.soft_num_blocks,
            block_bytes=kv.block_bytes,
            page_bytes=kv.page_bytes,
            block_size=kv.block_size,
            kv_transfers=replace(self.transfers.counts),
            counters=self.counters.copy(),
            groups=tuple(usage.status() for usage in self._blocks.usages),
        )

    def measure_load(self) -> LoadReport:
        """Return what any new request would wait for."""
        return self._admission.forecast.measure_load(self._states)

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache. Return False, changing nothing, while any block is in use."""
        return self._blocks.reset()

    def requeue_all(self) -> None:
        """Let all requests wait again, because the worker is lost, with its rows and blocks.

        Requests keep their emitted tokens. Results in flight never come. Step ids start at 1 again.
        """
        self._in_flight.forget()
        self.transfers.forget()
        for request in list(self._states.draining.values()):
            self._states.finish_draining(request)
        for request in self._states.running:
            self._states.requeue(request)
        self._states.removed_slots.clear()
        is_reset = self._blocks.reset()
        assert is_reset, "blocks are held although nothing runs"

    def adopt(self, previous: Scheduler) -> tuple[Failed, ...]:
        """Take over all requests and counters of the scheduler of a worker that is gone.

        Returns:
            The requests that the new worker does not serve, or that do not fit into its blocks.
        """
        assert previous._blocks.block_size == self._blocks.block_size, "block hashes depend on it"
        previous.requeue_all()
        self.counters = self.requests.counters = previous.counters
        self.transfers.counts.add(previous.transfers.counts)
        for usage in self._blocks.usages:
            usage.add_totals(previous._blocks.usages)
        self._admission.forecast = previous._admission.forecast
        self._states.adopt(previous._states, self._limits)
        failed = []
        for request in list(self._states.index):
            try:
                check_task(request.content.pooling, self._model)
            except FeatureDisabled as error:
                failed.append(self.requests.fail(request, error))
                continue
            request.limit = self._admission.limit_of(request)
            if len(request.token_ids) >= request.limit:
                why = f"{len(request.token_ids)} tokens reach {request.limit}, all that the new worker's blocks hold"
                failed.append(self.requests.fail(request, EngineFailure(why)))
        return tuple(failed)

    def requests_in_flight(self) -> dict[Request, int]:
        """Return the requests that a loss of the worker would interrupt: all that have started, if any step is sent.

        Returns:
            Request to its position, the number of its known tokens and of those in flight.
        """
        if not self._in_flight:
            return {}
        positions = {request: int(self._rows.num_expected[request.slot]) for request in self._states.running}
        for request in self._states.draining.values():
            positions[request] = len(request.token_ids) + request.num_in_flight
        return positions

    def restrict(self, admissible: Collection[Request] | None, *, may_compute: bool = True) -> None:
        """Replace the restriction on what may be planned.

        Args:
            admissible: The only requests that are admitted, whatever their place in the queue; None: any request.
            may_compute: Whether running requests compute.
        """
        if admissible is not None:
            self._states.shared_prompts.release_all()
        self._states.waiting.admit_only(admissible)
        for slot in self._rows.slot_to_request:
            self._rows.release(slot) if may_compute else self._rows.hold(slot)

    def keep_waiting(self, adapters: Collection[str]) -> None:
        """Admit no request for these adapters; see `AdapterLimit.keep_waiting`."""
        for limit in self._limits:
            if isinstance(limit, AdapterLimit):
                limit.keep_waiting(adapters)

    def schedule(self) -> StepPlan | None:
        """Decide the next step; None if there is nothing to compute until a result or a request comes in."""
        self._states.retry_deferred(self._clock())
        build = self._planner.build()
        self.counters.num_preemptions += build.num_preempted
        return self._commit(build) if build.num_tokens or self.transfers.has_orders else None

    def _create_limits(
        self, config: SchedulerConfig, max_adapters: int
    ) -> tuple[PooledShare | None, tuple[AdmissionLimit, ...]]:
        """Return the limit of texts that become vectors beside rows that generate, and all limits.

        The first is None where there are never both, and where texts are computed whole: their steps are as long as
        they are.
        """
        tasks, share = self._model.tasks, None
        if GENERATION in tasks and len(tasks) > 1 and config.enable_chunked_prefill:
            share = PooledShare(
                lambda: self._admission.forecast.steps, config.max_num_batched_tokens, self._clock
            )
        return share, create_limits(config, max_adapters, self._model.embedding_size, share, self._clock)

    def _commit(self, build: StepBuilder) -> StepPlan:
        """Count a step as computed from here on."""
        build.close()
        rows, slots = self._rows, build.slots
        sampling_slots, slot_versions = self._advance(build)
        pooled_rows: tuple[RowKey, ...] = ()
        if rows.num_pooled:
            sampling_slots, pooled_rows = self._split_pooled(sampling_slots)
            slot_versions = rows.slot_version[sampling_slots]
        sample_limits = None
        if build.guesses is not None:
            rows.expect(slots, build.guesses)
            slot_to_limit = np.ones(len(rows.known), np.int64)
            slot_to_limit[slots] += build.guesses
            sample_limits = slot_to_limit[sampling_slots]
        if build.new_rows:
            self._note_admitted(build)
        if not self._microbatches.are_whole:
            self._microbatches.note_planned(build.new_rows, sampling_slots)
        plan = build.to_plan(
            self._in_flight.next_step_id,
            self._in_flight.last_result_seen,
            self._states.removed_slots,
            self.transfers.take_orders(rows.computed),
        )
        self._states.removed_slots.clear()
        self._in_flight.push(
            InFlightStep(
                step_id=plan.step_id,
                num_tokens=plan.num_tokens,
                planned_at=self._clock(),
                sampling_slots=sampling_slots,
                slot_versions=slot_versions,
                sample_limits=sample_limits,
                newly_cached_blocks=self._blocks.take_newly_cached(),
                pooled_rows=pooled_rows,
            )
        )
        self.counters.num_steps += 1
        self.counters.num_scheduled_tokens += plan.num_tokens
        return plan

    def _advance(self, build: StepBuilder) -> tuple[Slots, U32]:
        """Count what a step computes, expect a token of each row that samples, and return their slots and versions."""
        rows, slots = self._rows, build.slots
        if build.is_decode:
            running = rows.running()
            rows.computed[running.index] += running.ones
            rows.num_expected[running.index] += running.ones
            return running.slots, running.versions
        rows.computed[slots] = build.ends
        num_expected = rows.num_expected[slots]
        is_sampling = build.ends == num_expected
        rows.num_expected[slots] = num_expected + is_sampling
        if np.count_nonzero(is_sampling) == len(rows.slot_to_request):
            running = rows.running()
            return running.slots, running.versions
        slots = np.sort(slots[is_sampling])
        return slots, rows.slot_version[slots]

    def _split_pooled(self, slots: Slots) -> tuple[Slots, tuple[RowKey, ...]]:
        """Return those of the rows that sample, and the keys of those that are pooled."""
        rows = self._rows
        is_pooled = rows.is_pooled[slots]
        pooled = slots[is_pooled]
        versions = rows.slot_version[pooled]
        return slots[~is_pooled], tuple(map(RowKey, pooled.tolist(), versions.tolist()))

    def update(self, result: StepResult) -> StepOutput:
        """Take in the oldest step's result.

        Raises:
            ProtocolViolation: This is not that step's result; nothing has changed.
        """
        output = self._reader.read(result)
        for guesses in result.guesses:
            self.counters.num_guesses += int(guesses.verified.sum())
            self.counters.num_accepted_guesses += int(guesses.accepted.sum())
        return output

    def check_integrity(self) -> None:
        """Check everything. For tests, and for an idle engine.

        Raises:
            AssertionError: Names what is wrong.
        """
        self._states.check_integrity()
        num_in_flight = self._in_flight.count_tokens()
        for request in self._states.index:
            noted, planned = request.num_in_flight, 0
            if request.state is RequestState.RUNNING:
                noted = int(self._rows.num_expected[request.slot] - self._rows.known[request.slot])
            if request.state is RequestState.RUNNING or request.is_draining:
                planned = num_in_flight[request.slot, request.slot_version]
            assert noted == planned, (
                f"request {request.head.request_id} expects {noted} tokens, steps in flight bring {planned}"
            )
        if not self.has_work:
            assert not self._blocks.pool.num_held, f"{self._blocks.pool.num_held} blocks were not given back"

    def _note_admitted(self, build: StepBuilder) -> None:
        for request, row in zip(build.admitted, build.new_rows, strict=True):
            if request.planned_at is not None:
                continue  # it comes back; what it finds of itself says nothing of the cache
            request.planned_at = self._clock()
            self._admission.forecast.note_admitted(len(request.token_ids), row.num_computed_tokens)
            num_cached_tokens = min(row.num_computed_tokens, request.num_prompt_tokens)
            if request.num_cached_tokens is None:
                request.num_cached_tokens = num_cached_tokens
            if self._blocks.enable_prefix_caching and self._states.reads_cache(request):
                self.counters.prefix_queries += request.num_prompt_tokens
                self.counters.prefix_hits += num_cached_tokens
