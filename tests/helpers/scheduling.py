"""Builders for scheduler tests, and a worker that carries out plans the naive way.

The worker knows nothing of the scheduler. It keeps rows and KV cells as the plans tell it, and its KV cell of
a position is a fingerprint of all tokens up to there: whoever attends to a cell that belongs to another
prefix, or that was never written, is caught at once.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np

from triptych.config import SchedulerConfig
from triptych.config.step_size import size_for_device
from triptych.types.facts import KvGroup, KvKind, KvLayout, ModelFacts, WorkerFacts
from triptych.types.identity import ModelIdentity
from triptych.types.output_limits import RepetitionDetection
from triptych.types.outputs import FinishReason
from triptych.types.pooling import PoolingKind, PoolingParams, Task
from triptych.types.sampling import SamplingParams
from triptych.types.step import (
    F32,
    U32,
    NewRow,
    PromptLogprobs,
    RowError,
    RowErrorCode,
    RowKey,
    StepPlan,
    StepResult,
    VerifiedGuesses,
)
from triptych.types.submit import single_choice
from triptych_services.enginecore.request import Request
from triptych_services.enginecore.scheduler.fairness import TenantShare
from triptych_services.enginecore.scheduler.scheduler import Scheduler
from triptych_services.enginecore.scheduler.step_results import Failed, Finished, StepOutput

BLOCK_SIZE = 16
VOCAB_SIZE = 61
EOS = 7
NAIVE_TASKS = tuple(task.label for task in Task)
NAIVE_IDENTITY = ModelIdentity("f" * 64, "w" * 64, numerics="naive", is_batch_invariant=True)


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make_scheduler(
    *,
    num_blocks: int = 1001,
    block_size: int = BLOCK_SIZE,
    max_model_len: int = 2048,
    eos_token_ids: Sequence[int] = (),
    enable_prefix_caching: bool = True,
    clock: Clock | None = None,
    max_samples_per_row: int = 1,
    num_stages: int = 1,
    is_encoder: bool = False,
    max_adapters: int = 0,
    kv: KvLayout | None = None,
    last_state_tasks: tuple[str, ...] = (),
    **config: Any,
) -> Scheduler:
    """Return a scheduler with 1,000 blocks, no EOS, and the given fields of `SchedulerConfig`."""
    sizes = size_for_device(SchedulerConfig(**config), 0)
    model = ModelFacts(
        "naive",
        NAIVE_IDENTITY,
        VOCAB_SIZE,
        max_model_len,
        tuple(eos_token_ids),
        "float32",
        "float32",
        "none",
        tasks=NAIVE_TASKS,
        embedding_size=4,
        num_labels=4,
        is_encoder=is_encoder,
        last_state_tasks=last_state_tasks,
    )
    facts = WorkerFacts(
        boot_id="naive",
        model=model,
        kv=kv or KvLayout(num_blocks, block_size, 1, 1, 1, "float32"),
        max_num_seqs=sizes.max_num_seqs,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        max_steps_in_flight=2,
        max_samples_per_row=max_samples_per_row,
        num_stages=num_stages,
        max_adapters=max_adapters,
    )
    return Scheduler(sizes, facts, enable_prefix_caching=enable_prefix_caching, clock=clock or Clock())


def make_prompt(length: int, seed: int = 0) -> list[int]:
    return [int(token_id) for token_id in np.random.default_rng(seed).integers(0, VOCAB_SIZE, length)]


def make_request(
    number: int,
    prompt: Sequence[int],
    *,
    session: int = 0,
    emitted: Sequence[int] = (),
    priority: int = 0,
    tenant: str = "",
    cache_salt: str = "",
    deadline: float | None = None,
    seed: int | None = None,
    request_id: str = "",
    is_moved: bool = False,
    pooling: PoolingParams | None = None,
    adapter_digest: str = "",
    **sampling: Any,
) -> Request:
    """Return a request. Its seed is its number unless one is given."""
    submit = single_choice(
        number,
        request_id or f"{session}-{number}",
        [*prompt, *emitted],
        SamplingParams(**sampling),
        num_prompt_tokens=len(prompt),
        seed=number if seed is None else seed,
        priority=priority,
        tenant=tenant,
        cache_salt=cache_salt,
        is_moved=is_moved,
        pooling=pooling,
        adapter_digest=adapter_digest,
    )
    (request,) = Request.choices_of(submit, session=session, deadline=deadline)
    return request


def owners_of(output: StepOutput) -> list[tuple[int, int]]:
    """Return the session and the number that each token of a step belongs to."""
    owners = list(zip(output.sessions.tolist(), output.numbers.tolist(), strict=True))
    counts = output.token_counts.tolist() or [1] * len(owners)
    return [owner for owner, count in zip(owners, counts, strict=True) for _ in range(count)]


def prefix_fingerprints(token_ids: Sequence[int]) -> list[int]:
    """Return one number per position, for that token and all before it."""
    fingerprints, parent = [], 0
    for token_id in token_ids:
        parent = hash((parent, int(token_id)))
        fingerprints.append(parent)
    return fingerprints


def sample(seed: int, position: int, fingerprint: int) -> int:
    """Return the token at `position` after the prefix of `fingerprint`, as keyed sampling does."""
    return hash((seed, position, fingerprint)) % VOCAB_SIZE


def naive_generation(
    prompt: Sequence[int],
    seed: int,
    sampling: SamplingParams,
    eos_token_ids: Sequence[int],
    max_model_len: int,
) -> tuple[list[int], FinishReason, int | None]:
    """Return the tokens and end of a request that runs alone, token by token."""
    tokens = list(prompt)
    while True:
        tokens.append(sample(seed, len(tokens), prefix_fingerprints(tokens)[-1]))
        outputs = tokens[len(prompt) :]
        may_stop = len(outputs) >= sampling.min_tokens
        if may_stop and outputs[-1] in eos_token_ids and not sampling.ignore_eos:
            return outputs, FinishReason.STOP, None if outputs[-1] == eos_token_ids[0] else outputs[-1]
        if may_stop and outputs[-1] in sampling.stop_token_ids:
            return outputs, FinishReason.STOP, outputs[-1]
        if len(outputs) == sampling.max_tokens or len(tokens) == max_model_len:
            return outputs, FinishReason.LENGTH, None
        if may_stop and _repeats(outputs, sampling.repetition_detection):
            return outputs, FinishReason.REPETITION, None


def naive_vectors(prompt: Sequence[int], pooling: PoolingParams) -> F32:
    """Return the vectors of a prompt that is pooled by itself."""
    columns = np.array(prompt, np.float32)
    if pooling.task is Task.TOKEN_EMBED:
        return np.stack((columns, columns.cumsum()), axis=1)
    return np.array([[columns[0], columns[-1], columns.mean(), len(prompt)]], np.float32)


def _repeats(outputs: list[int], detection: RepetitionDetection | None) -> bool:
    if detection is None:
        return False
    return any(
        len(outputs) >= size * detection.min_count
        and outputs[-size * detection.min_count :] == outputs[-size:] * detection.min_count
        for size in range(detection.min_pattern_size, detection.max_pattern_size + 1)
    )


@dataclass
class WorkerRow:
    """One live slot, as plans described it."""

    new: NewRow
    tokens: list[int]
    num_computed: int
    tables: list[list[int]]
    """The blocks of each group."""
    guesses: list[tuple[int, int]] = field(default_factory=list)
    """Each step with which guesses were reported, and how many."""
    num_replayed: int = 0
    """Computed tokens that its pages of states lack: guesses of its latest step that were right."""


def full_group(block_size: int) -> KvGroup:
    return KvLayout(2, block_size, 1, 1, 1, "float32").groups[0]


class NaiveWorker:
    """Executes plans strictly in order and holds every rule of the step protocol against them.

    A cell of keys holds the group and the prefix of its position. A page of states holds the prefix that it stands for.

    A row that may get several tokens gets a random number of them. What it guessed wrong is garbage in its blocks. Its
    page of states is written before its guesses, none of which is the last token of the page or in another one.
    It has always `num_guesses` ready, or a random number up to that.
    """

    def __init__(
        self,
        block_size: int = BLOCK_SIZE,
        groups: Sequence[KvGroup] = (),
        *,
        num_guesses: int = 10,
        draws_guesses: bool = False,
    ) -> None:
        self._random = Random(0)
        self.num_guesses, self.draws_guesses = num_guesses, draws_guesses
        self.rows: dict[int, WorkerRow] = {}
        self.cells: dict[tuple[int, int], tuple[int, int]] = {}
        self.pages: dict[int, tuple[int, int]] = {}
        self._read_pages = defaultdict[int, set[int]](set)
        """Page to the slots that read it in this step."""
        self.num_tokens_computed = 0
        self.has_failed = False
        self.pools_last = False
        """Whether rows that ask for no kind read their last state alone."""
        self.groups = list(groups) or [full_group(block_size)]
        self._last_step_id = 0

    def execute(
        self,
        plan: StepPlan,
        failing_slots: Sequence[int] = (),
        refused_slots: Sequence[int] = (),
        spoiled_slots: Sequence[int] = (),
        deferred_slots: Sequence[int] = (),
    ) -> StepResult:
        """Return the tokens of each slot that reaches the end of what is known.

        Args:
            failing_slots: They err instead, and write garbage.
            refused_slots: They err instead, for their client's sake.
            spoiled_slots: They write garbage, and do not notice.
            deferred_slots: They get no token where they sample, and go on from a wrong one until they are removed.
        """
        assert plan.step_id == self._last_step_id + 1, "step ids are dense"
        self._last_step_id = plan.step_id
        assert plan.last_result_seen < plan.step_id
        self._apply_changes(plan)
        counts = self._counts(plan)
        limits = self._limits(plan, counts)
        guess_counts, verified, accepted = list[int](), dict[int, int](), dict[int, int]()
        garbage_slots = {*failing_slots, *spoiled_slots}
        self.has_failed |= bool(garbage_slots)
        spans = {
            slot: range(row.num_computed, row.num_computed + counts[slot]) for slot, row in self.rows.items()
        }
        pages = dict(zip(plan.state_slots.tolist(), plan.state_pages.tolist(), strict=True))
        assert len(pages) == len(plan.state_slots), "a slot is listed twice"
        beyond = self._read_states(spans, pages)
        for slot, span in spans.items():  # all writes of a step come before any read
            self._write(self.rows[slot], span, is_garbage=slot in garbage_slots or slot in beyond)
        misled = self._spread_garbage(spans, beyond)
        self._write_states(spans, misled | garbage_slots)
        assert self.has_failed or not misled, f"slots {misled} attend to KV that is not theirs"
        token_ids, token_counts, errors = list[int](), list[int](), dict[RowKey, RowError]()
        vectors = dict[RowKey, F32]()
        scored = {
            self.rows[slot].new.key: scores
            for slot in sorted(spans)
            if slot not in (*failing_slots, *refused_slots)
            and (scores := self._score(self.rows[slot], spans[slot])) is not None
        }
        for slot in sorted(spans):
            row, span = self.rows[slot], spans[slot]
            row.num_computed += len(span)
            if slot in failing_slots and span:
                errors[row.new.key] = RowError("made to fail")
            elif slot in refused_slots and span:
                errors[row.new.key] = RowError.of_client("sampling: made to be refused")
            if span and row.num_computed == len(row.tokens) and row.new.content.pooling is not None:
                if slot in deferred_slots and row.new.key not in errors:
                    assert plan.may_defer_rows
                    errors[row.new.key] = RowError("made to wait", RowErrorCode.NOT_READY, kv_is_valid=True)
                if row.new.key not in errors:
                    tokens = [-1, *row.tokens] if slot in misled else row.tokens
                    vectors[row.new.key] = naive_vectors(tokens, row.new.content.pooling)
            elif span and row.num_computed == len(row.tokens):
                is_deferred = slot in deferred_slots and row.new.key not in errors
                is_failing = slot in (*failing_slots, *refused_slots) or is_deferred
                if is_deferred:
                    assert plan.may_defer_rows
                    errors[row.new.key] = RowError("made to wait", RowErrorCode.NOT_READY, kv_is_valid=True)
                drawn = self._draw(row, limits.get(slot, 1), is_misled=slot in misled or is_deferred)
                if slot in limits:
                    verified[len(token_counts)] = limits[slot] - 1
                    accepted[len(token_counts)] = len(drawn) - 1
                token_ids += [] if is_failing else drawn
                token_counts.append(0 if is_failing else len(drawn))
                guess_counts.append(
                    self._random.randint(0, self.num_guesses) if self.draws_guesses else self.num_guesses
                )
                row.guesses.append((plan.step_id, guess_counts[-1]))
        return StepResult(
            plan.step_id,
            np.array(token_ids, np.uint32),
            np.array([] if set(token_counts) <= {1} else token_counts, np.uint32),
            row_errors=errors,
            prompt_logprobs=scored,
            vectors=vectors,
            guess_counts=np.array(guess_counts if any(guess_counts) else [], np.uint32),
            guesses=_verified(verified, accepted),
        )

    def _draw(self, row: WorkerRow, limit: int, *, is_misled: bool) -> list[int]:
        """Extend a row by up to `limit` tokens, and write the KV of all that were guessed, right or wrong."""
        first, drawn = len(row.tokens), list[int]()
        most = 1 if is_misled else limit
        for group in self.groups:
            if group.kind is KvKind.STATE:
                most = min(most, max(group.block_size - 1 - (first - 1) % group.block_size, 1))
        for _ in range(self._random.randint(1, most)):
            token_id = sample(row.new.seed, len(row.tokens), prefix_fingerprints(row.tokens)[-1])
            drawn.append((token_id + 1) % VOCAB_SIZE if is_misled else token_id)
            row.tokens.append(drawn[-1])
        row.num_computed += len(drawn) - 1
        row.num_replayed = len(drawn) - 1
        for position in range(first, first + limit - 1):
            is_right = position < row.num_computed
            self._put(row, position, prefix_fingerprints(row.tokens)[position] if is_right else -1)
        return drawn

    def _score(self, row: WorkerRow, span: range) -> PromptLogprobs | None:
        """Return a row's report of its prompt: each token, with its position as the log-probability."""
        if row.new.sampling.prompt_logprobs is None:
            return None
        start = max(row.new.prompt_logprobs_start, span.start + 1)
        positions = np.arange(start, min(span.stop + 1, row.new.num_prompt_tokens))
        if not span or not len(positions):
            return None
        return PromptLogprobs(
            start,
            np.array(row.tokens, np.uint32)[positions, None],
            -positions[:, None].astype(np.float32),
            np.ones(len(positions), np.uint32),
        )

    def _apply_changes(self, plan: StepPlan) -> None:
        for slot in plan.removed_slots.tolist():
            del self.rows[slot]
        for new in plan.new_rows:
            assert new.slot not in self.rows, f"slot {new.slot} is taken"
            assert new.num_cached_tokens - new.num_computed_tokens in (0, 1)
            tables = [new.block_ids.tolist(), *(table.tolist() for table in new.group_block_ids)]
            for group, table in zip(self.groups, tables, strict=True):
                num_null = self._first_read(group, new.num_computed_tokens)
                assert not any(table[:num_null]), "a block that no query reads"
                assert 0 not in table[num_null:], "the null block is never used"
                assert len(set(table[num_null:])) == len(table[num_null:]), "a block is there twice"
            pooling = new.content.pooling
            if new.num_computed_tokens and pooling is not None:
                is_last = pooling.kind is PoolingKind.LAST or (pooling.kind is None and self.pools_last)
                assert is_last, "its states are needed from the first one on"
                assert pooling.task is not Task.TOKEN_EMBED
            self.rows[new.slot] = WorkerRow(new, new.token_ids.tolist(), new.num_computed_tokens, tables)
        assert len(self.groups) == 1 or len(plan.block_groups) == len(plan.block_ids)
        block_groups = plan.block_groups.tolist() or [0] * len(plan.block_ids)
        for slot, block, group in zip(
            plan.block_slots.tolist(), plan.block_ids.tolist(), block_groups, strict=True
        ):
            assert block != 0, "the null block is never used"
            self.rows[slot].tables[group].append(block)

    def _counts(self, plan: StepPlan) -> dict[int, int]:
        counts = dict.fromkeys(self.rows, 1)
        for slot, length in zip(plan.chunk_slots.tolist(), plan.chunk_lengths.tolist(), strict=True):
            assert counts[slot] == 1, "a slot is listed twice"
            assert length > 1, "one token is the default, none is a skip"
            counts[slot] = length
        for slot in plan.skipped_slots.tolist():
            assert counts[slot] == 1, "a slot is listed twice"
            counts[slot] = 0
        assert (
            sum(counts.values()) + int(plan.sample_limits.sum()) - len(plan.sample_limits) == plan.num_tokens
        )
        self.num_tokens_computed += plan.num_tokens
        return counts

    def _limits(self, plan: StepPlan, counts: dict[int, int]) -> dict[int, int]:
        """Return the most tokens of each slot that may get several."""
        limits = dict(zip(plan.sample_slots.tolist(), plan.sample_limits.tolist(), strict=True))
        assert len(limits) == len(plan.sample_slots), "a slot is listed twice"
        for slot, limit in limits.items():
            row = self.rows[slot]
            assert limit > 1, "one token is the default"
            assert row.num_computed + counts[slot] == len(row.tokens), "it has none to get"
            reports = [count for step_id, count in row.guesses if step_id <= plan.last_result_seen]
            assert limit - 1 <= max(reports[-1:], default=0), "more than there are guesses"
            self._check_reach(row, len(row.tokens) + limit - 1)
        return limits

    def _check_reach(self, row: WorkerRow, end: int) -> None:
        for group, table in zip(self.groups, row.tables, strict=True):
            assert end <= len(table) * group.block_size, "beyond its blocks"

    def _write(self, row: WorkerRow, span: range, *, is_garbage: bool) -> None:
        assert span.stop <= len(row.tokens), "computes a token that is not known"
        self._check_reach(row, span.stop)
        fingerprints = prefix_fingerprints(row.tokens)
        for position in span:
            if position >= row.new.num_cached_tokens:
                self._put(row, position, -1 if is_garbage else fingerprints[position])

    def _spread_garbage(self, spans: dict[int, range], beyond: set[int]) -> set[int]:
        """Return the slots that attend to anything but their own prefix. They write garbage too.

        Args:
            beyond: Slots that do so by their state.
        """
        misled = set(beyond)
        while True:
            more = {
                slot
                for slot, span in spans.items()
                if span and slot not in misled and not self._reads_itself(self.rows[slot], span)
            }
            if not more:
                return misled
            misled |= more
            for slot in more:
                self._write(self.rows[slot], spans[slot], is_garbage=True)

    def _reads_itself(self, row: WorkerRow, span: range) -> bool:
        fingerprints = prefix_fingerprints(row.tokens)[: span.stop]
        for index, (group, table) in enumerate(zip(self.groups, row.tables, strict=True)):
            if group.kind is KvKind.STATE:
                continue
            first = self._first_position(group, span.start)
            for position in range(first, span.stop):
                block, offset = divmod(position, group.block_size)
                if self.cells.get((table[block], offset)) != (index, fingerprints[position]):
                    return False
        return True

    def _read_states(self, spans: dict[int, range], pages: dict[int, int]) -> set[int]:
        """Return the slots that begin with the state of another prefix. All reads of a step come before any write.

        Args:
            pages: Slot to the page that it goes on with.
        """
        misled = set()
        self._read_pages.clear()
        for slot, span in spans.items():
            row = self.rows[slot]
            for index, (group, table) in enumerate(zip(self.groups, row.tables, strict=True)):
                if group.kind is KvKind.STATE and span and span.start:
                    page = table[(span.start - 1) // group.block_size]
                    num_written = span.start - row.num_replayed
                    assert (num_written - 1) // group.block_size == (span.start - 1) // group.block_size
                    own = index, prefix_fingerprints(row.tokens[:num_written])[-1]
                    assert page != 0, "the null block is never used"
                    self._read_pages[page].add(slot)
                    if self.pages.get(page) != own:
                        misled.add(slot)
                    if slot in pages:
                        assert span.start % group.block_size, "a page begins here, and is appended"
                        assert pages[slot] not in (0, page), "it goes on with another page"
                        table[span.start // group.block_size] = pages.pop(slot)
        assert not pages, "rows go on that have no state, or compute nothing"
        return misled

    def _write_states(self, spans: dict[int, range], misled: set[int]) -> None:
        written = []
        for slot, span in spans.items():
            row = self.rows[slot]
            for index, (group, table) in enumerate(zip(self.groups, row.tables, strict=True)):
                if group.kind is KvKind.STATE and span:
                    block = (span.stop - 1) // group.block_size
                    assert block == span.start // group.block_size, "a step computes tokens of two pages"
                    assert table[block] != 0, "the null block is never used"
                    written.append(table[block])
                    assert self._read_pages[table[block]] <= {slot}, "another row reads this page"
                    content = -1 if slot in misled else prefix_fingerprints(row.tokens[: span.stop])[-1]
                    self.pages[table[block]] = index, content
                    row.num_replayed = 0
        assert len(set(written)) == len(written), "two rows write one page"

    def _first_position(self, group: KvGroup, start: int) -> int:
        """Return the first position that a query at `start` or later sees."""
        if group.kind is KvKind.WINDOW:
            return max(start - group.window + 1, 0)
        return start - start % group.window if group.kind is KvKind.CHUNK else 0

    def _first_read(self, group: KvGroup, start: int) -> int:
        """Return the first block that a row needs which begins to compute at `start`."""
        if group.kind is KvKind.STATE:
            return max(start - 1, 0) // group.block_size
        return self._first_position(group, start) // group.block_size

    def _put(self, row: WorkerRow, position: int, content: int) -> None:
        for index, (group, table) in enumerate(zip(self.groups, row.tables, strict=True)):
            if group.kind is not KvKind.STATE:
                block, offset = divmod(position, group.block_size)
                assert table[block] != 0, "the null block is never used"
                self.cells[table[block], offset] = index, content


def _verified(row_to_count: dict[int, int], row_to_accepted: dict[int, int]) -> tuple[VerifiedGuesses, ...]:
    """Return what a result says of guesses, by sampling row."""
    if not row_to_count:
        return ()

    def by_place(counts: Iterable[int]) -> U32:
        counts = list(counts)
        return np.array([sum(count > place for count in counts) for place in range(most)], np.uint32)

    most = max(row_to_count.values())
    rows, counts = (np.array(list(each), np.uint32) for each in (row_to_count, row_to_count.values()))
    places = by_place(row_to_count.values()), by_place(row_to_accepted.values())
    return (VerifiedGuesses("naive", *places, rows, counts),)


@dataclass
class Engine:
    """A scheduler with a worker beside it, and up to `steps_in_flight` plans in flight."""

    scheduler: Scheduler
    worker: NaiveWorker = field(default_factory=NaiveWorker)
    steps_in_flight: int = 2
    plans: deque[StepPlan] = field(default_factory=deque)
    tokens: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    outcomes: dict[tuple[int, int], Finished | Failed] = field(default_factory=dict)
    num_together: Counter[tuple[int, int]] = field(default_factory=Counter)
    """Tokens that came in a step with the one before."""
    prompt_logprobs: defaultdict[tuple[int, int], list[tuple[int, int]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    """Position and token of each entry reported."""
    vectors: dict[tuple[int, int], F32] = field(default_factory=dict)
    on_result: Callable[[StepResult], None] = lambda result: None
    """Called with what the worker has computed, before the scheduler is."""

    def add(self, *requests: Request) -> None:
        """Add each by itself, and note what leaves a full queue for it."""
        for request in requests:
            self.add_choices(request)

    def add_choices(self, *choices: Request) -> tuple[Failed, ...]:
        """Add the choices of one request, and return what left a full queue for them."""
        displaced = self.scheduler.requests.add(*choices)
        for request in choices:
            self.tokens[request.session, request.number] = []
        for outcome in displaced:
            self.note(outcome)
        return displaced

    def plan(self) -> StepPlan | None:
        plan = self.scheduler.schedule()
        if plan is not None:
            self.plans.append(plan)
        self.scheduler.check_integrity()
        return plan

    def finish_step(self, failing_slots: Sequence[int] = (), **slots: Sequence[int]) -> StepOutput:
        """Carry out the oldest plan and take its result in; `slots` as in `NaiveWorker.execute`."""
        result = self.worker.execute(self.plans.popleft(), failing_slots, **slots)
        self.on_result(result)
        output = self.scheduler.update(result)
        self.scheduler.check_integrity()
        for (session, number), token_id in zip(owners_of(output), output.token_ids.tolist(), strict=True):
            assert (session, number) not in self.outcomes, "a token after the end"
            self.tokens[session, number].append(token_id)
        for key, count in Counter(owners_of(output)).items():
            self.num_together[key] += count - 1
        for request, part in output.prompt_logprobs:
            entries = self.prompt_logprobs[request.session, request.number]
            entries += zip(
                (-part.logprobs[:, 0]).astype(int).tolist(), part.token_ids[:, 0].tolist(), strict=True
            )
        for request, vectors in output.vectors:
            self.vectors[request.session, request.number] = vectors
        for finished in output.finished:
            self.note(finished)
            self.check_prompt_logprobs(finished.request)
        for failed in output.failed:
            self.note(failed)
        return output

    def check_prompt_logprobs(self, request: Request) -> None:
        """Check that every token of the prompt but the first was reported once, if that was asked for."""
        asks = request.sampling.prompt_logprobs is not None
        expected = list(enumerate(request.token_ids[: request.num_prompt_tokens]))[1:] if asks else []
        assert self.prompt_logprobs[request.session, request.number] == expected

    def note(self, outcome: Finished | Failed) -> None:
        key = outcome.request.session, outcome.request.number
        assert key not in self.outcomes, "a second end"
        assert outcome.request.num_accepted_guesses == self.num_together[key]
        self.outcomes[key] = outcome

    def end_of(self, number: int, session: int = 0) -> tuple[list[int], FinishReason, int | None]:
        """Return tokens, reason and stop id of a request that ended well, as `naive_generation` does."""
        outcome = self.outcomes[session, number]
        assert isinstance(outcome, Finished), f"request {number} failed"
        return self.tokens[session, number], outcome.reason, outcome.stop_token_id

    def lose_worker(self) -> None:
        self.plans.clear()
        self.worker = NaiveWorker(
            groups=self.worker.groups,
            num_guesses=self.worker.num_guesses,
            draws_guesses=self.worker.draws_guesses,
        )
        self.scheduler.requeue_all()
        self.scheduler.check_integrity()

    def run(self, max_steps: int = 100_000) -> None:
        """Run until nothing is left to do."""
        self.run_while_it_can(max_steps)
        assert not self.scheduler.has_work, "requests are left, and nothing will ever run"

    def run_while_it_can(self, max_steps: int = 100_000) -> None:
        """Run until there is nothing to compute, though requests may wait."""
        for _ in range(max_steps):
            while len(self.plans) < self.steps_in_flight and self.plan() is not None:
                pass
            if not self.plans:
                return
            self.finish_step()
        raise AssertionError(f"not done after {max_steps} steps")


def request_in(scheduler: Scheduler, slot: int) -> Request:
    """Return the running request in a slot."""
    (request,) = (request for request in scheduler.snapshot().running if request.slot == slot)
    return request


def counts_by_number(scheduler: Scheduler, plan: StepPlan | None) -> dict[int, int]:
    """Return how many tokens each running request computes in `plan`, just made, by its number; absent: none."""
    assert plan is not None, "nothing was planned"
    slot_to_number = {request.slot: request.number for request in scheduler.snapshot().running}
    counts = dict.fromkeys(slot_to_number, 1)
    counts.update(zip(plan.chunk_slots.tolist(), plan.chunk_lengths.tolist(), strict=True))
    counts.update(dict.fromkeys(plan.skipped_slots.tolist(), 0))
    return {slot_to_number[slot]: count for slot, count in counts.items() if count}


@dataclass(frozen=True, slots=True)
class RowCounts:
    """The counters of one running request; see the picture in `RunningRows`."""

    known: int
    computed: int
    num_expected: int
    wanted: int
    """Tokens that a step could compute now."""


def row_counts(scheduler: Scheduler, request: Request) -> RowCounts:
    """Return the counters of a running request."""
    rows, slot = scheduler._states.rows, request.slot
    (wanted,) = rows.wanted(np.array([slot])).tolist()
    return RowCounts(int(rows.known[slot]), int(rows.computed[slot]), int(rows.num_expected[slot]), wanted)


def find_cached_blocks(scheduler: Scheduler, request: Request) -> list[int]:
    """Return the blocks in the cache that hold the beginning of a waiting request, or of one not added yet."""
    return list(scheduler._states.cached_blocks(request))


def predict_wait_s(scheduler: Scheduler, request: Request) -> float | None:
    """Return the seconds to the first token of a request that is not added yet; None if nothing can be said."""
    return scheduler._admission.forecast.wait_s(request, scheduler._states)


def tenant_shares(scheduler: Scheduler) -> list[TenantShare]:
    """Return what each tenant was served, up to the last result."""
    shares = scheduler._states.shares
    shares._charge_outputs(scheduler._states.rows)
    return [shares._share_of(tenant) for tenant in shares._tenants.values()]
