"""Everything that can happen to a scheduler, in every order, against a model of what each request must come to."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.helpers.scheduling import (
    EOS,
    Clock,
    Engine,
    NaiveWorker,
    find_cached_blocks,
    make_request,
    make_scheduler,
    naive_generation,
    owners_of,
    request_in,
    row_counts,
)
from triptych.errors import DeadlineExceeded, DeadlineUnreachable, EngineFailure, InvalidRequest, QueueFull
from triptych.types.facts import EngineStatus, KvLayout
from triptych.types.output_limits import RepetitionDetection
from triptych.types.outputs import FinishReason
from triptych.types.sampling import SamplingParams
from triptych.types.step import StepPlan
from triptych_services.enginecore.request import Request, RequestState
from triptych_services.enginecore.scheduler.scheduler import Scheduler
from triptych_services.enginecore.scheduler.step_results import Failed, Finished

MAX_MODEL_LEN = 40
SESSIONS = 2
MOST_IN_FLIGHT = 4

PREFIXES = st.sampled_from(
    [[], [1, 2, 3], [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 9, 9, 9, 9, 9, 9], [5] * 12]
)
TENANTS = st.sampled_from(["", "a", "b", "c"])
SAMPLING = st.fixed_dictionaries(
    {},
    optional={
        "max_tokens": st.integers(1, 25) | st.none(),
        "min_tokens": st.integers(0, 1),
        "ignore_eos": st.booleans(),
        "stop_token_ids": st.sampled_from([(), (3,), (EOS, 12, 40)]),
        "repetition_detection": st.sampled_from([None, RepetitionDetection(2, 2)]),
        "prompt_logprobs": st.just(1),
    },
)


@dataclass
class NaiveOrder:
    """The order of admission, computed naively: counters in a dict, and a search through all."""

    tokens_served: dict[tuple[int, str], int] = field(default_factory=dict)
    last_waited: dict[int, str] = field(default_factory=dict)
    """Priority to the tenant whose waiting requests were the last to come to none."""
    alive: list[Request] = field(default_factory=list)
    admitted: set[Request] = field(default_factory=set)

    def add(self, request: Request) -> None:
        if request.is_moved:
            self.alive.append(request)
            self.admitted.add(request)
            return
        level, tenant = request.head.priority, request.head.tenant
        others = [
            other for other in self.alive if other.head.priority == level and other not in self.admitted
        ]
        if all(other.head.tenant != tenant for other in others):
            floor = 0
            if others:
                floor = min(self.tokens_served[level, other.head.tenant] for other in others)
            elif level in self.last_waited:
                floor = self.tokens_served[level, self.last_waited[level]]
            self.tokens_served[level, tenant] = max(floor, self.tokens_served.get((level, tenant), 0))
        self.alive.append(request)

    def place_of(self, request: Request) -> tuple[int, bool, int, int]:
        """Lower first; those that have run; the tenant served least; the first to come."""
        if request in self.admitted:
            return request.head.priority, False, 0, request.arrival
        return (
            request.head.priority,
            True,
            self.tokens_served[request.head.priority, request.head.tenant],
            request.arrival,
        )

    def leavers_for(self, request: Request) -> list[Request]:
        """Return the requests that may be displaced from a full queue.

        Of each tenant that waits most on the least urgent level it is the last one.
        """
        waiting = [other for other in self.alive if other not in self.admitted]
        level = max((other.head.priority for other in waiting), default=-1)
        if level < request.head.priority:
            return []
        counts = Counter(other.head.tenant for other in waiting if other.head.priority == level)
        most = max(counts.values())
        if level == request.head.priority and most - 1 < counts[request.head.tenant] + 1:
            return []
        last = {other.head.tenant: other for other in waiting if other.head.priority == level}
        return [last[tenant] for tenant, count in counts.items() if count == most]

    def admit(self, request: Request, num_computed_tokens: int) -> None:
        if request not in self.admitted:
            self.charge(request, len(request.token_ids) - num_computed_tokens)
            self.admitted.add(request)
            self._note_no_longer_waiting(request)

    def charge(self, request: Request, cost: int) -> None:
        key = request.head.priority, request.head.tenant
        self.tokens_served[key] = self.tokens_served.get(key, 0) + cost

    def end(self, request: Request) -> None:
        self.alive.remove(request)
        if request not in self.admitted:
            self._note_no_longer_waiting(request)
        if all(other.head.priority != request.head.priority for other in self.alive):
            self.last_waited.pop(request.head.priority, None)
            self.tokens_served = {
                key: cost for key, cost in self.tokens_served.items() if key[0] != request.head.priority
            }

    def _note_no_longer_waiting(self, request: Request) -> None:
        mine = request.head.priority, request.head.tenant
        waiting = [other for other in self.alive if other not in self.admitted]
        if all((other.head.priority, other.head.tenant) != mine for other in waiting):
            self.last_waited[request.head.priority] = request.head.tenant


def is_ready(request: Request) -> bool:
    return request.state is RequestState.WAITING and not request.is_draining


class SchedulerMachine(RuleBasedStateMachine):
    """Two streams, one scheduler, one worker, and up to four steps in flight."""

    @initialize(
        block_size=st.integers(1, 5),
        spare_blocks=st.integers(0, 12),
        config=st.fixed_dictionaries(
            {
                "max_num_seqs": st.integers(1, 5),
                "max_num_batched_tokens": st.integers(1, 50),
                "long_prefill_token_threshold": st.sampled_from([0, 0, 1, 6]),
                "max_num_waiting": st.integers(0, 6),
                "max_long_partial_prefills": st.sampled_from([0, 1, 2]),
                "policy": st.sampled_from(["fcfs", "priority"]),
            }
        ),
        is_chunked=st.booleans(),
        is_caching=st.booleans(),
        max_samples_per_row=st.sampled_from([1, 1, 2, 3, 7]),
        num_stages=st.sampled_from([1, 1, 2, 3]),
    )
    def start(
        self,
        block_size: int,
        spare_blocks: int,
        config: dict[str, Any],
        is_chunked: bool,
        is_caching: bool,
        max_samples_per_row: int,
        num_stages: int,
    ) -> None:
        self.begin(
            config,
            is_caching=is_caching,
            is_chunked=is_chunked,
            max_samples_per_row=max_samples_per_row,
            num_stages=num_stages,
        )
        self.block_size = block_size
        worker = NaiveWorker(block_size, draws_guesses=True)
        self.engine = Engine(self.make_scheduler(spare_blocks), worker)

    def begin(
        self,
        config: dict[str, Any],
        *,
        is_caching: bool,
        is_chunked: bool,
        max_samples_per_row: int,
        num_stages: int,
    ) -> None:
        if not is_chunked:
            config |= {"max_num_batched_tokens": MAX_MODEL_LEN + 5, "long_prefill_token_threshold": 0}
        if not config["long_prefill_token_threshold"]:
            config |= {"max_long_partial_prefills": 0}
        self.config = config
        self.max_samples_per_row, self.num_stages = max_samples_per_row, num_stages
        self.budget = -(-config["max_num_batched_tokens"] // (num_stages if is_chunked else 1))
        self.clock = Clock()
        self.is_caching, self.is_chunked = is_caching, is_chunked
        self.order = NaiveOrder()
        self.num_ends_seen = 0
        self.allowed: set[Request] | None = None
        self.expected: dict[tuple[int, int], tuple[list[int], FinishReason, int | None]] = {}
        self.numbers = [0] * SESSIONS

    def make_scheduler(self, spare_blocks: int) -> Scheduler:
        """Make a scheduler with blocks for one request of any length, and some more."""
        return make_scheduler(
            num_blocks=1 + -(-MAX_MODEL_LEN // self.block_size) + spare_blocks,
            block_size=self.block_size,
            max_model_len=MAX_MODEL_LEN,
            eos_token_ids=(EOS,),
            enable_prefix_caching=self.is_caching,
            enable_chunked_prefill=self.is_chunked,
            clock=self.clock,
            max_samples_per_row=self.max_samples_per_row,
            num_stages=self.num_stages,
            **self.config,
        )

    @rule(
        session=st.integers(0, SESSIONS - 1),
        prefix=PREFIXES,
        rest=st.lists(st.integers(0, 9), min_size=1, max_size=12),
        num_emitted=st.sampled_from([0, 0, 0, 1, 4]),
        is_moved=st.sampled_from([False, False, True]),
        priority=st.integers(0, 2),
        tenant=TENANTS,
        cache_salt=st.sampled_from(["", "", "salt"]),
        deadline_in=st.none() | st.integers(1, 20),
        sampling=SAMPLING,
    )
    def add(
        self,
        session: int,
        prefix: list[int],
        rest: list[int],
        num_emitted: int,
        is_moved: bool,
        priority: int,
        tenant: str,
        cache_salt: str,
        deadline_in: int | None,
        sampling: dict[str, Any],
    ) -> None:
        number, prompt = self.numbers[session], prefix + rest
        outputs, *end = naive_generation(prompt, number, SamplingParams(**sampling), (EOS,), MAX_MODEL_LEN)
        num_emitted = min(num_emitted, len(outputs) - 1)
        request = make_request(
            number,
            prompt,
            session=session,
            emitted=outputs[:num_emitted],
            priority=priority if self.config["policy"] == "priority" else 0,
            tenant=tenant,
            cache_salt=cache_salt,
            deadline=None if deadline_in is None else self.clock.now + deadline_in,
            is_moved=is_moved,
            **sampling,
        )
        num_places = self.config["max_num_seqs"] * (2 if is_moved else 1) + self.config["max_num_waiting"]
        is_full = len(self.order.alive) >= num_places
        leavers = self.order.leavers_for(request) if is_full else []
        try:
            displaced = self.engine.add_choices(request)
        except DeadlineUnreachable:
            assert deadline_in is not None
            assert not is_moved
            return
        except QueueFull:
            assert is_full
            assert not leavers
            return
        assert len(displaced) == bool(leavers)
        assert all(outcome.request in leavers for outcome in displaced)
        self.note_ends()
        self.order.add(request)
        self.numbers[session] += 1
        self.expected[session, number] = outputs[num_emitted:], *end  # type: ignore[assignment]

    @precondition(lambda self: len(self.engine.plans) < MOST_IN_FLIGHT)
    @rule()
    def schedule(self) -> None:
        scheduler, counters = self.engine.scheduler, self.engine.scheduler.counters
        running, preemptions = len(scheduler.snapshot().running), counters.num_preemptions
        candidates = [request for request in self.order.alive if is_ready(request)]
        rows = [row_counts(scheduler, request) for request in scheduler.snapshot().running]
        num_long = sum(self.is_long(row.num_expected, row.computed) for row in rows)
        plan = self.engine.plan()
        if plan is None:
            is_stuck = scheduler.has_work and not scheduler.num_in_flight
            assert not is_stuck or self.allowed is not None, "nothing will ever run"
            return
        self.check_plan(plan, running, has_preempted=counters.num_preemptions > preemptions)
        self.check_order(plan, candidates, num_long)
        if counters.num_preemptions == preemptions:
            self.check_nothing_fits(plan, candidates)

    def check_plan(self, plan: StepPlan, num_running: int, *, has_preempted: bool) -> None:
        config, scheduler = self.config, self.engine.scheduler
        assert 0 < plan.num_tokens <= self.budget
        assert len(scheduler.snapshot().running) <= config["max_num_seqs"]
        if threshold := config["long_prefill_token_threshold"]:
            assert all(length <= threshold for length in plan.chunk_lengths.tolist())
        if has_preempted:
            assert plan.new_rows == (), "the waiting do not gain from a preemption"
            assert len(scheduler.snapshot().running) < num_running

    def check_nothing_fits(self, plan: StepPlan, candidates: list[Request]) -> None:
        """The first of those that are not admitted does not fit beside those that run."""
        scheduler, snapshot = self.engine.scheduler, self.engine.scheduler.snapshot()
        has_budget = plan.num_tokens < self.budget
        has_row = len(snapshot.running) < self.config["max_num_seqs"]
        new_slots = {row.slot for row in plan.new_rows}
        has_chunks = not new_slots.issuperset(plan.chunk_slots.tolist())  # they may have grown last of all
        is_limited = (
            self.config["max_long_partial_prefills"] or not self.is_chunked or self.allowed is not None
        )
        if not candidates or not has_budget or not has_row or has_chunks or is_limited:
            return
        head = min(candidates, key=self.order.place_of)
        held = {block for request in snapshot.running for block in request.blocks.block_ids}
        num_free = snapshot.num_blocks - len(held)
        for request in snapshot.running:
            num_needed = -(-row_counts(scheduler, request).known // self.block_size)
            num_free -= max(num_needed - len(request.blocks.block_ids), 0)
        num_hits = len(held.intersection(find_cached_blocks(scheduler, head)))
        num_needed = -(-len(head.token_ids) // self.block_size) - num_hits
        assert num_needed > num_free, "a request that fits is left behind"

    def check_order(self, plan: StepPlan, candidates: list[Request], num_long: int) -> None:
        """`num_long`: those in partial prefill before it."""
        most_long = self.config["max_long_partial_prefills"]
        if self.allowed is not None:
            candidates = [request for request in candidates if request in self.allowed]
        for row in plan.new_rows:
            eligible = candidates
            if most_long and num_long >= most_long:
                eligible = [request for request in candidates if not self.is_long(len(request.token_ids))]
            request = request_in(self.engine.scheduler, row.slot)
            assert request is min(eligible, key=self.order.place_of), "admitted out of order"
            self.order.admit(request, row.num_computed_tokens)
            candidates.remove(request)
            num_long += self.is_long(len(request.token_ids), row.num_computed_tokens)

    def is_long(self, num_tokens: int, num_computed: int = 0) -> bool:
        return num_tokens - num_computed > self.config["long_prefill_token_threshold"] > 0

    @precondition(lambda self: self.engine.plans)
    @rule()
    def update(self) -> None:
        self.finish_step()

    def finish_step(self, **slots: tuple[int, ...]) -> None:
        output = self.engine.finish_step(**slots)
        by_key = {(request.session, request.number): request for request in self.order.alive}
        for key in owners_of(output):
            self.order.charge(by_key[key], 2)
        self.note_ends()

    def note_ends(self) -> None:
        for outcome in list(self.engine.outcomes.values())[self.num_ends_seen :]:
            self.order.end(outcome.request)
            self.num_ends_seen += 1

    @rule(num_steps=st.integers(1, 9), steps_in_flight=st.integers(1, MOST_IN_FLIGHT))
    def run_for_a_while(self, num_steps: int, steps_in_flight: int) -> None:
        for _ in range(num_steps):
            while len(self.engine.plans) < steps_in_flight:
                num_planned = len(self.engine.plans)
                self.schedule()
                if len(self.engine.plans) == num_planned:
                    break
            if self.engine.plans:
                self.finish_step()

    @precondition(lambda self: self.engine.plans)
    @rule(slot=st.integers(0, 4), how=st.sampled_from(["failing_slots", "refused_slots"]))
    def fail_row(self, slot: int, how: str) -> None:
        self.finish_step(**{how: (slot,)})

    @precondition(lambda self: self.expected)
    @rule(choice=st.integers(0, 1000))
    def abort(self, choice: int) -> None:
        key = list(self.expected)[choice % len(self.expected)]
        outcome = self.engine.scheduler.requests.abort(*key)
        assert (outcome is None) == (key in self.engine.outcomes)
        if outcome is not None:
            self.engine.note(outcome)
        self.note_ends()

    @rule(session=st.integers(0, SESSIONS - 1))
    def lose_stream(self, session: int) -> None:
        for outcome in self.engine.scheduler.requests.abort_session(session):
            assert outcome.request.session == session
            self.engine.note(outcome)
        self.note_ends()

    @rule(seconds=st.integers(1, 10))
    def let_time_pass(self, seconds: int) -> None:
        self.clock.now += seconds
        for outcome in self.engine.scheduler.requests.expire(self.clock.now):
            assert outcome.request.deadline is not None
            assert outcome.request.deadline <= self.clock.now
            assert isinstance(outcome.error, DeadlineExceeded)
            self.engine.note(outcome)
        self.note_ends()

    @rule()
    def lose_worker(self) -> None:
        self.engine.lose_worker()

    @rule(spare_blocks=st.integers(0, 12))
    def change_worker(self, spare_blocks: int) -> None:
        successor = self.make_scheduler(spare_blocks)
        assert successor.adopt(self.engine.scheduler) == ()
        self.engine.scheduler = successor
        self.engine.lose_worker()

    @precondition(lambda self: self.order.alive)
    @rule(choice=st.integers(0, 1 << 12))
    def admit_only(self, choice: int) -> None:
        self.allowed = {request for place, request in enumerate(self.order.alive) if choice >> place & 1}
        self.engine.scheduler.restrict(self.allowed)

    @rule()
    def admit_all(self) -> None:
        self.allowed = None
        self.engine.scheduler.restrict(None)

    @rule()
    def reset_prefix_cache(self) -> None:
        is_idle = self.engine.scheduler.snapshot().num_used_blocks == 0
        assert self.engine.scheduler.reset_prefix_cache() == is_idle

    @invariant()
    def status_counts_what_waits(self) -> None:
        scheduler, now = self.engine.scheduler, self.clock.now
        snapshot = scheduler.snapshot()
        status = scheduler.add_counts(
            EngineStatus("e", True, ""), KvLayout(9, 4, 1, 1, 1, "float32"), now=now
        )
        assert (status.num_running, status.num_waiting) == (len(snapshot.running), len(snapshot.waiting))
        assert status.num_waiting_by_priority == Counter(each.head.priority for each in snapshot.waiting)
        waited_s = [now - request.queued_at for request in snapshot.waiting]
        assert status.oldest_waiting_s == max(waited_s, default=0.0)

    @invariant()
    def holds_together(self) -> None:
        scheduler = self.engine.scheduler
        scheduler.check_integrity()
        assert scheduler.num_in_flight == len(self.engine.plans)
        assert self.order.alive == list(scheduler.snapshot().requests)
        in_flight = [r for r in self.order.alive if r.state is RequestState.RUNNING or r.is_draining]
        assert scheduler.requests_in_flight().keys() == set(in_flight if self.engine.plans else [])
        assert len(scheduler.snapshot().running) + len(scheduler.snapshot().waiting) == len(
            self.expected
        ) - len(self.engine.outcomes)
        for key, tokens in self.engine.tokens.items():
            expected, reason, stop_token_id = self.expected[key]
            assert tokens == expected[: len(tokens)]
            outcome = self.engine.outcomes.get(key)
            if outcome is None:
                assert len(tokens) < len(expected), "it goes on after its end"
            elif isinstance(outcome, Finished) and outcome.reason is not FinishReason.ABORT:
                assert (tokens, outcome.reason, outcome.stop_token_id) == (expected, reason, stop_token_id)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.admit_all()
        self.engine.run()
        self.note_ends()
        self.holds_together()
        assert self.engine.outcomes.keys() == self.expected.keys(), "each request ends exactly once"
        assert self.engine.scheduler.snapshot().num_used_blocks == 0
        for outcome in self.engine.outcomes.values():
            if isinstance(outcome, Failed):
                assert isinstance(
                    outcome.error, DeadlineExceeded | EngineFailure | InvalidRequest | QueueFull
                )


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
