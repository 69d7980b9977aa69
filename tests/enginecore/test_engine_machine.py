"""Everything that clients, frontends, workers and operators can do to an engine core, in every order.

Some requests are poison: the worker dies of them. They must fail, alone, and whatever else happens every other
request comes to the tokens that it would have come to by itself, and ends once.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.helpers.scheduling import (
    BLOCK_SIZE,
    EOS,
    NAIVE_IDENTITY,
    NAIVE_TASKS,
    VOCAB_SIZE,
    Clock,
    NaiveWorker,
    naive_generation,
    naive_vectors,
)
from tests.helpers.stack import make_config
from triptych.errors import DeadlineExceeded, DeadlineUnreachable, EngineFailure
from triptych.prefix_hash import HASH_BYTES
from triptych.types.facts import KvLayout, ModelFacts, PauseMode, WorkerFacts
from triptych.types.outputs import FinishedRequest, FinishReason, OutputBatch, RequestFailure
from triptych.types.pooling import PoolingKind, PoolingParams, Task
from triptych.types.sampling import SamplingParams
from triptych.types.step import F32, StepPlan
from triptych.types.submit import single_choice
from triptych_services.enginecore.engine import EngineCore

MAX_MODEL_LEN = 80
POISON = [60, 60, 60]
MOST_IN_FLIGHT = 4
POOLINGS = [
    PoolingParams(kind=PoolingKind.MEAN),
    PoolingParams(kind=PoolingKind.LAST),
    PoolingParams(Task.TOKEN_EMBED),
]

Key = tuple[int, int]
"""Session and number."""


def split_hashes(column: bytes) -> set[bytes]:
    return {column[first : first + HASH_BYTES] for first in range(0, len(column), HASH_BYTES)}


class EngineMachine(RuleBasedStateMachine):
    """Frontends come and go; workers die; an operator pauses."""

    @initialize(
        num_blocks=st.integers(7, 24),
        max_num_seqs=st.integers(1, 6),
        budget=st.integers(4, 60),
        max_samples_per_row=st.sampled_from([1, 1, 2, 5]),
        soft_num_blocks=st.none() | st.integers(0, 12),
        num_stages=st.sampled_from([1, 1, 2, 3]),
    )
    def start(
        self,
        num_blocks: int,
        max_num_seqs: int,
        budget: int,
        max_samples_per_row: int,
        soft_num_blocks: int | None,
        num_stages: int,
    ) -> None:
        budget = max(budget, max_num_seqs)
        self.clock = Clock()
        config = make_config(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, max_num_waiting=50, policy="priority"
        )
        self.engine = EngineCore(config, self.clock)
        self.facts = WorkerFacts(
            boot_id="1",
            model=ModelFacts(
                "naive",
                NAIVE_IDENTITY,
                VOCAB_SIZE,
                MAX_MODEL_LEN,
                (EOS,),
                "float32",
                "float32",
                "none",
                tasks=NAIVE_TASKS,
                embedding_size=4,
            ),
            kv=KvLayout(num_blocks, BLOCK_SIZE, 1, 1, 1, "float32", soft_num_blocks),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_steps_in_flight=MOST_IN_FLIGHT,
            max_samples_per_row=max_samples_per_row,
            num_stages=num_stages,
        )
        self.worker = NaiveWorker(draws_guesses=True)
        self.plans: deque[StepPlan] = deque()
        self.sessions: set[int] = set()
        self.cached: dict[int, set[bytes]] = {}
        """Session to the hashes that it was told are cached."""
        self.num_sessions = self.num_submitted = 0
        self.is_paused = False
        self.deferred_slots: tuple[int, ...] = ()
        """Slots that the worker is not ready to sample in the next step."""
        self.poison: set[Key] = set()
        self.expected: dict[Key, tuple[list[int], FinishReason]] = {}
        self.tokens: dict[Key, list[int]] = {}
        self.ends: dict[Key, FinishedRequest | RequestFailure] = {}
        self.vectors: dict[Key, F32] = {}
        self.expected_vectors: dict[Key, F32] = {}
        self.admitted: set[Key] = set()
        self.engine.worker_ready(self.facts, after_crash=False)

    @precondition(lambda self: len(self.sessions) < 3)
    @rule()
    def connect(self) -> None:
        self.num_sessions += 1
        self.sessions.add(self.num_sessions)
        self.cached[self.num_sessions] = set()
        for batch in self.engine.frontends.open_session(self.num_sessions):
            self.take_news(self.num_sessions, batch)

    @precondition(lambda self: self.sessions)
    @rule(choice=st.integers(0, 2))
    def disconnect(self, choice: int) -> None:
        session = sorted(self.sessions)[choice % len(self.sessions)]
        self.take_outputs()
        self.sessions.remove(session)
        self.engine.frontends.close_session(session)
        for key in [key for key in self.expected if key[0] == session]:
            del self.expected[key]
            self.poison.discard(key)

    @precondition(lambda self: self.sessions)
    @rule(
        choice=st.integers(0, 2),
        prompt=st.lists(st.integers(0, 9), min_size=1, max_size=30),
        is_poison=st.sampled_from([False] * 7 + [True]),
        is_greedy=st.booleans(),
        max_tokens=st.integers(1, 40),
        ignore_eos=st.booleans(),
        priority=st.integers(0, 1),
        tenant=st.sampled_from(["", "a", "b"]),
        deadline_s=st.none() | st.integers(5, 60),
        whole_output=st.booleans(),
        pooling=st.sampled_from([None] * 4 + POOLINGS),
    )
    def submit(
        self,
        choice: int,
        prompt: list[int],
        is_poison: bool,
        is_greedy: bool,
        max_tokens: int,
        ignore_eos: bool,
        priority: int,
        tenant: str,
        deadline_s: int | None,
        whole_output: bool,
        pooling: PoolingParams | None,
    ) -> None:
        session = sorted(self.sessions)[choice % len(self.sessions)]
        self.num_submitted += 1
        key, prompt = (session, self.num_submitted), POISON + prompt if is_poison else prompt
        sampling = SamplingParams(
            temperature=0.0 if is_greedy else 1.0, max_tokens=max_tokens, ignore_eos=ignore_eos
        )
        tokens, reason, _ = naive_generation(prompt, self.num_submitted, sampling, (EOS,), MAX_MODEL_LEN)
        if pooling is not None:
            tokens, reason = [], FinishReason.STOP
            self.expected_vectors[key] = naive_vectors(prompt, pooling)
        self.expected[key], self.tokens[key] = (tokens, reason), []
        if is_poison:
            self.poison.add(key)
        self.engine.frontends.submit(
            session,
            single_choice(
                self.num_submitted,
                str(self.num_submitted),
                prompt,
                sampling,
                seed=self.num_submitted,
                priority=priority,
                tenant=tenant,
                deadline_remaining_ms=None if deadline_s is None else 1000 * deadline_s,
                whole_output=whole_output,
                pooling=pooling,
            ),
        )

    @precondition(lambda self: self.expected)
    @rule(choice=st.integers(0, 1000))
    def abort(self, choice: int) -> None:
        self.engine.frontends.abort(*list(self.expected)[choice % len(self.expected)])

    @precondition(lambda self: len(self.plans) < MOST_IN_FLIGHT)
    @rule()
    def plan(self) -> None:
        plan = self.engine.plan()
        if plan is not None:
            self.plans.append(plan)

    @precondition(lambda self: self.plans)
    @rule()
    def step(self) -> None:
        """The worker carries out the oldest plan, or dies of it."""
        plan = self.plans[0]
        if any(row.token_ids[: len(POISON)].tolist() == POISON for row in plan.new_rows):
            self.lose_worker(boot_id=f"{self.facts.boot_id}1", is_crash=True)
            return
        self.engine.apply(self.worker.execute(self.plans.popleft(), deferred_slots=self.deferred_slots))
        self.deferred_slots = ()

    @rule(slots=st.lists(st.integers(0, 3), max_size=3, unique=True))
    def defer_rows_of_the_next_step(self, slots: list[int]) -> None:
        self.deferred_slots = tuple(slots)

    @rule(num_steps=st.integers(1, 50), steps_in_flight=st.integers(1, MOST_IN_FLIGHT))
    def run_for_a_while(self, num_steps: int, steps_in_flight: int) -> None:
        for _ in range(num_steps):
            while len(self.plans) < steps_in_flight and (plan := self.engine.plan()) is not None:
                self.plans.append(plan)
            if not self.plans:
                return
            self.step()

    @rule()
    def lose_the_network(self) -> None:
        """Lose the stream for longer than the session lives; no worker died."""
        self.lose_worker(boot_id=self.facts.boot_id, is_crash=False)

    def lose_worker(self, *, boot_id: str, is_crash: bool) -> None:
        self.facts = replace(self.facts, boot_id=boot_id)
        self.plans.clear()
        self.worker = NaiveWorker(draws_guesses=True)
        self.engine.worker_lost()
        self.engine.worker_ready(self.facts, after_crash=is_crash)

    @rule(mode=st.sampled_from(PauseMode))
    def pause(self, mode: PauseMode) -> None:
        self.engine.pause(mode)
        self.is_paused = True

    @rule()
    def resume(self) -> None:
        self.engine.resume()
        self.is_paused = False

    @rule(seconds=st.integers(1, 20))
    def let_time_pass(self, seconds: int) -> None:
        self.clock.now += seconds
        self.engine.expire()

    @rule(share=st.floats(0, 0.99))
    def let_time_pass_in_which_nothing_is_due(self, share: float) -> None:
        """An engine that is left alone until something comes due misses nothing."""
        while len(self.plans) < MOST_IN_FLIGHT and (plan := self.engine.plan()) is not None:
            self.plans.append(plan)
        self.take_outputs()
        rest_s = min(self.engine.next_due_at - self.clock.now, 100.0)
        if rest_s > 0:
            self.clock.now += share * rest_s
            self.engine.expire()
            assert len(self.plans) == MOST_IN_FLIGHT or self.engine.plan() is None
            assert not self.engine.take_outputs()

    @rule()
    def take_outputs(self) -> None:
        for session, batch in self.engine.take_outputs().items():
            assert session in self.sessions, "a batch for a frontend that has left"
            self.take_news(session, batch)
            for number in batch.admitted.tolist():
                assert (session, number) not in self.admitted, "admitted twice"
                self.admitted.add((session, number))
            for number, token in zip(batch.owners.tolist(), batch.token_ids.tolist(), strict=True):
                assert (session, number) not in self.ends, "a token after the end"
                self.tokens[session, number].append(token)
            for number, vectors in batch.vectors.items():
                assert (session, number) not in self.vectors, "vectors twice"
                assert any(end.number == number for end in batch.finished), "vectors without the end"
                self.vectors[session, number] = vectors
            for end in (*batch.finished, *batch.failures):
                assert (session, end.number) not in self.ends, "a second end"
                self.ends[session, end.number] = end

    def take_news(self, session: int, batch: OutputBatch) -> None:
        """Check that a frontend knows exactly what the cache holds."""
        if batch.cache is not None:
            if batch.cache.is_cleared:
                self.cached[session].clear()
            self.cached[session] |= split_hashes(batch.cache.stored)
            self.cached[session] -= split_hashes(batch.cache.evicted)
        if batch.load is not None:
            scheduler = self.engine.scheduler
            assert scheduler is not None
            pool = scheduler._blocks.pool.snapshot()
            assert self.cached[session] == set(pool.hash_to_block), "the cache holds something else"
            assert batch.load == scheduler.measure_load()

    @invariant()
    def holds_together(self) -> None:
        if not hasattr(self, "engine"):
            return
        scheduler = self.engine.scheduler
        assert scheduler is not None
        scheduler.check_integrity()
        assert self.engine.num_in_flight == len(self.plans)
        for key, (tokens, _) in self.expected.items():
            assert self.tokens[key] == tokens[: len(self.tokens[key])]

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.resume()
        for _ in range(2000):
            if not self.engine.num_requests:
                break
            self.run_for_a_while(50, 2)
            self.clock.now += 1
            self.take_outputs()
        self.clock.now += 1
        self.take_outputs()
        self.holds_together()
        assert self.expected.keys() <= self.ends.keys(), "each request ends"
        assert self.engine.scheduler is not None
        assert self.engine.scheduler.snapshot().num_used_blocks == 0
        for key, (tokens, reason) in self.expected.items():
            end = self.ends[key]
            if isinstance(end, RequestFailure):
                is_killer = end.code == EngineFailure.code and key in self.poison
                assert is_killer or end.code in (DeadlineExceeded.code, DeadlineUnreachable.code), end
            elif end.reason is not FinishReason.ABORT:
                assert key not in self.poison
                assert (self.tokens[key], end.reason) == (tokens, reason)
                if key in self.expected_vectors:
                    assert self.vectors[key].tolist() == self.expected_vectors[key].tolist()


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
