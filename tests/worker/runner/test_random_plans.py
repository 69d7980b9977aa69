"""Random plans, as an engine might send them, against requests kept one by one in plain lists."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worker.tiny import (
    EchoModel,
    new_row,
    next_token,
    runner_for,
    step_plan,
    tiny_architecture,
    tiny_config,
)
from triptych.types.step import NewRow, StepPlan
from triptych_services.worker.runner.model_runner import ModelRunner

VOCAB, MAX_NUM_SEQS, BUDGET, NUM_BLOCKS = 89, 5, 24, 30


@dataclass
class Request:
    """One request as a naive engine knows it."""

    tokens: list[int]
    num_prompt: int
    computed: int
    cached: int
    blocks: list[int]
    planned: int = 0
    """Tokens to compute in the step at hand."""

    @property
    def samples(self) -> bool:
        return self.computed + self.planned == len(self.tokens)


@dataclass
class NaiveEngine:
    """Plans at random within the protocol, and knows what the runner must answer."""

    random: Random
    block_size: int
    max_model_len: int
    running: dict[int, Request] = field(default_factory=dict)
    holders: list[int] = field(default_factory=lambda: [0] * NUM_BLOCKS)
    step_id: int = 0
    slot_version: int = 0

    def plan(self) -> StepPlan:
        random, self.step_id = self.random, self.step_id + 1
        removed = {slot: self.running.pop(slot) for slot in list(self.running) if random.random() < 0.15}
        candidates = [self._new_request() for _ in range(random.randint(0, 2))]
        donors = {slot: len(request.blocks) for slot, request in self.running.items()}
        for request in removed.values():
            self._release(request)
        entering: dict[int, Request] = {}
        for request in candidates:
            free_slots = [slot for slot in range(MAX_NUM_SEQS) if slot not in self.running]
            if free_slots and self._revive(request):
                slot = random.choice(free_slots)
                self.running[slot] = entering[slot] = request
        budget = BUDGET
        for slot in random.sample(sorted(self.running), len(self.running)):
            budget -= self._choose_length(self.running[slot], budget)
        return self._columns(list(removed), entering, donors)

    def expect(self) -> tuple[list[int], list[int]]:
        """(tokens in slot order, cache slots written) of the step just planned; counts it as done."""
        tokens, written = [], []
        for _, request in sorted(self.running.items()):
            for position in range(request.computed, request.computed + request.planned):
                if position >= request.cached:
                    block = request.blocks[position // self.block_size]
                    written.append(block * self.block_size + position % self.block_size)
            if request.planned and request.samples:
                tokens.append(next_token(request.tokens, VOCAB))
                request.tokens.append(tokens[-1])
                request.computed = len(request.tokens) - 1
            else:
                request.computed += request.planned
        return tokens, written

    def _new_request(self) -> Request:
        """Fresh, resumed after a preemption, or with a prefix of a running request, whole prompts included."""
        random = self.random
        tokens = [random.randrange(VOCAB) for _ in range(random.randint(1, self.max_model_len // 2))]
        request = Request(tokens, random.randint(1, len(tokens)), 0, 0, [])
        if self.running and random.random() < 0.6:
            donor = random.choice(list(self.running.values()))
            num_shared = random.randint(0, donor.computed // self.block_size)
            if num_shared:
                hit = num_shared * self.block_size
                extra = tokens[: random.randint(0, max(0, self.max_model_len - 1 - hit))]
                if random.random() < 0.3:
                    extra = []
                request = Request(
                    donor.tokens[:hit] + extra, 1, hit if extra else hit - 1, hit, donor.blocks[:num_shared]
                )
        return request if len(request.tokens) < self.max_model_len else Request([3], 1, 0, 0, [])

    def _revive(self, request: Request) -> bool:
        """Hold the shared blocks, unless a request that left with this plan took them along."""
        if any(self.holders[block] == 0 for block in request.blocks):
            return False
        for block in request.blocks:
            self.holders[block] += 1
        return True

    def _release(self, request: Request) -> None:
        for block in request.blocks:
            self.holders[block] -= 1

    def _choose_length(self, request: Request, budget: int) -> int:
        remaining = len(request.tokens) - request.computed
        length = min(self.random.choice([0, 1, remaining, self.random.randint(1, remaining)]), budget)
        if request.computed + length == len(request.tokens) == self.max_model_len:
            length = 0
        needed = -(-(request.computed + length) // self.block_size) - len(request.blocks)
        free = [block for block in range(1, NUM_BLOCKS) if not self.holders[block]]
        if needed > len(free):
            length = 0
        elif needed > 0:
            taken = self.random.sample(free, needed)
            request.blocks += taken
            for block in taken:
                self.holders[block] = 1
        request.planned = length
        return length

    def _columns(self, removed: list[int], entering: dict[int, Request], donors: dict[int, int]) -> StepPlan:
        new: list[NewRow] = []
        chunks, skipped = {}, []
        appended: list[tuple[int, list[int]]] = []
        for slot in self.random.sample(sorted(self.running), len(self.running)):
            request = self.running[slot]
            if slot in entering:
                self.slot_version += 1
                new.append(
                    new_row(
                        slot,
                        request.tokens,
                        request.blocks,
                        computed=request.computed,
                        cached=request.cached,
                        num_prompt=request.num_prompt,
                        slot_version=self.slot_version,
                    )
                )
            else:
                appended.append((slot, request.blocks[donors[slot] :]))
            if request.planned == 0:
                skipped.append(slot)
            elif request.planned > 1 or self.random.random() < 0.1:
                chunks[slot] = request.planned
        blocks = []
        while appended := [(slot, ids) for slot, ids in appended if ids]:  # interleave the slots
            slot, ids = self.random.choice(appended)
            blocks.append((slot, ids.pop(0)))
        return step_plan(
            self.step_id, removed=removed, new=new, chunks=chunks, skipped=skipped, blocks=blocks
        )


@settings(max_examples=30, deadline=None)
@given(st.randoms(use_true_random=False), st.sampled_from([1, 3, 4, 16]))
def test_random_plans_say_and_write_what_single_requests_would(random, block_size):
    model = EchoModel(VOCAB)
    config = tiny_config(
        tiny_architecture(vocab_size=VOCAB),
        max_num_seqs=MAX_NUM_SEQS,
        budget=BUDGET,
        block_size=block_size,
        num_blocks=NUM_BLOCKS,
        max_model_len=min(23, (NUM_BLOCKS - 1) * block_size),
    )
    runner: ModelRunner = runner_for(model, config)
    engine = NaiveEngine(random, block_size, runner.facts.model.max_model_len)
    for _ in range(25):
        model.written_slots = []
        result = runner.execute(engine.plan())
        tokens, written = engine.expect()
        assert result.token_ids.tolist() == tokens
        assert model.written_slots == written
        assert result.row_errors == {}
