"""Everything that can happen to a scheduler, in every order, against a model of what each request must come to."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.enginecore.scheduler import Failed, Finished
from tests.helpers.scheduling import (
    EOS,
    Clock,
    Engine,
    NaiveWorker,
    make_request,
    make_scheduler,
    naive_generation,
)
from triptych.errors import DeadlineExceeded, EngineFailure, QueueFull
from triptych.types.outputs import FinishReason
from triptych.types.sampling import SamplingParams
from triptych.types.step import StepPlan

MAX_MODEL_LEN = 40
SESSIONS = 2
MOST_IN_FLIGHT = 4

PREFIXES = st.sampled_from(
    [[], [1, 2, 3], [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 9, 9, 9, 9, 9, 9], [5] * 12]
)
SAMPLING = st.fixed_dictionaries(
    {},
    optional={
        "max_tokens": st.integers(1, 25) | st.none(),
        "min_tokens": st.integers(0, 1),
        "ignore_eos": st.booleans(),
        "stop_token_ids": st.sampled_from([(), (3,), (EOS, 12, 40)]),
        "prompt_logprobs": st.just(1),
    },
)


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
                "policy": st.sampled_from(["fcfs", "priority"]),
            }
        ),
        is_chunked=st.booleans(),
        is_caching=st.booleans(),
    )
    def start(
        self, block_size: int, spare_blocks: int, config: dict[str, Any], is_chunked: bool, is_caching: bool
    ) -> None:
        if not is_chunked:
            config |= {"max_num_batched_tokens": MAX_MODEL_LEN + 5, "long_prefill_token_threshold": 0}
        self.config = config
        self.clock = Clock()
        scheduler = make_scheduler(
            num_blocks=1 + -(-MAX_MODEL_LEN // block_size) + spare_blocks,
            block_size=block_size,
            max_model_len=MAX_MODEL_LEN,
            eos_token_ids=(EOS,),
            enable_prefix_caching=is_caching,
            enable_chunked_prefill=is_chunked,
            clock=self.clock,
            **config,
        )
        self.engine = Engine(scheduler, NaiveWorker(block_size))
        self.expected: dict[tuple[int, int], tuple[list[int], FinishReason, int | None]] = {}
        self.numbers = [0] * SESSIONS

    @rule(
        session=st.integers(0, SESSIONS - 1),
        prefix=PREFIXES,
        rest=st.lists(st.integers(0, 9), min_size=1, max_size=12),
        num_emitted=st.sampled_from([0, 0, 0, 1, 4]),
        priority=st.integers(0, 2),
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
        priority: int,
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
            cache_salt=cache_salt,
            deadline=None if deadline_in is None else self.clock.now + deadline_in,
            **sampling,
        )
        alive = len(self.expected) - len(self.engine.outcomes)
        if alive >= self.config["max_num_seqs"] + self.config["max_num_waiting"]:
            with pytest.raises(QueueFull):
                self.engine.scheduler.add(request)
            return
        self.engine.add(request)
        self.numbers[session] += 1
        self.expected[session, number] = outputs[num_emitted:], *end  # type: ignore[assignment]

    @precondition(lambda self: len(self.engine.plans) < MOST_IN_FLIGHT)
    @rule()
    def schedule(self) -> None:
        scheduler, counters = self.engine.scheduler, self.engine.scheduler.counters
        running, preemptions = scheduler.num_running, counters.num_preemptions
        plan = self.engine.plan()
        if plan is None:
            assert scheduler.num_in_flight or not scheduler.has_work, "nothing will ever run"
            return
        self.check_plan(plan, running, has_preempted=counters.num_preemptions > preemptions)

    def check_plan(self, plan: StepPlan, num_running: int, *, has_preempted: bool) -> None:
        config, scheduler = self.config, self.engine.scheduler
        assert 0 < plan.num_tokens <= config["max_num_batched_tokens"]
        assert scheduler.num_running <= config["max_num_seqs"]
        if threshold := config["long_prefill_token_threshold"]:
            assert all(length <= threshold for length in plan.chunk_lengths.tolist())
        if has_preempted:
            assert plan.new_rows == (), "the waiting do not gain from a preemption"
            assert scheduler.num_running < num_running
        admitted = [scheduler._rows.slot_to_request[row.slot] for row in plan.new_rows]
        urgency = [(request.priority, request.arrival) for request in admitted]
        assert urgency == sorted(urgency), "admitted out of order"
        eligible = scheduler._roster.waiting.peek()
        if eligible is not None and urgency:
            assert urgency[-1] < (eligible.priority, eligible.arrival), "one was skipped"

    @precondition(lambda self: self.engine.plans)
    @rule()
    def update(self) -> None:
        self.engine.finish_step()

    @rule(num_steps=st.integers(1, 9), window=st.integers(1, MOST_IN_FLIGHT))
    def run_for_a_while(self, num_steps: int, window: int) -> None:
        for _ in range(num_steps):
            while len(self.engine.plans) < window:
                num_planned = len(self.engine.plans)
                self.schedule()
                if len(self.engine.plans) == num_planned:
                    break
            if self.engine.plans:
                self.engine.finish_step()

    @precondition(lambda self: self.engine.plans)
    @rule(slot=st.integers(0, 4))
    def fail_row(self, slot: int) -> None:
        self.engine.finish_step(failing_slots=[slot])

    @precondition(lambda self: self.expected)
    @rule(choice=st.integers(0, 1000))
    def abort(self, choice: int) -> None:
        key = list(self.expected)[choice % len(self.expected)]
        outcome = self.engine.scheduler.abort(*key)
        assert (outcome is None) == (key in self.engine.outcomes)
        if outcome is not None:
            self.engine.note(outcome)

    @rule(session=st.integers(0, SESSIONS - 1))
    def lose_stream(self, session: int) -> None:
        for outcome in self.engine.scheduler.abort_session(session):
            assert outcome.request.session == session
            self.engine.note(outcome)

    @rule(seconds=st.integers(1, 10))
    def let_time_pass(self, seconds: int) -> None:
        self.clock.now += seconds
        for outcome in self.engine.scheduler.expired(self.clock.now):
            assert outcome.request.deadline is not None
            assert outcome.request.deadline <= self.clock.now
            assert isinstance(outcome.error, DeadlineExceeded)
            self.engine.note(outcome)

    @rule()
    def lose_worker(self) -> None:
        self.engine.lose_worker()

    @rule()
    def reset_prefix_cache(self) -> None:
        is_idle = self.engine.scheduler.num_used_blocks == 0
        assert self.engine.scheduler.reset_prefix_cache() == is_idle

    @invariant()
    def holds_together(self) -> None:
        scheduler = self.engine.scheduler
        scheduler.check_integrity()
        assert scheduler.num_in_flight == len(self.engine.plans)
        assert scheduler.num_running + scheduler.num_waiting == len(self.expected) - len(self.engine.outcomes)
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
        self.engine.run()
        self.holds_together()
        assert self.engine.outcomes.keys() == self.expected.keys(), "each request ends exactly once"
        assert self.engine.scheduler.num_used_blocks == 0
        for outcome in self.engine.outcomes.values():
            if isinstance(outcome, Failed):
                assert isinstance(outcome.error, DeadlineExceeded | EngineFailure)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
