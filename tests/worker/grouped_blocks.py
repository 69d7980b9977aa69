"""An engine by hand for a worker with several KV groups: it keeps what a query sees, and no block more.

What it releases is overwritten with NaN at once, and soon given to another row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tests.worker.tiny import new_row, step_plan, u32
from triptych.types.facts import KvGroup, KvKind
from triptych.types.step import NewRow
from triptych_services.worker.attention.base import KvCache
from triptych_services.worker.runner.base import StepRunner


def seen_blocks(group: KvGroup, position: int) -> set[int]:
    """Return the indices of the blocks that a query reads, position by position."""
    seen = range(position + 1)
    if group.kind is KvKind.WINDOW:
        seen = range(max(position - group.window + 1, 0), position + 1)
    elif group.kind is KvKind.CHUNK:
        seen = range(position - position % group.window, position + 1)
    return {each // group.block_size for each in seen}


@dataclass
class Request:
    """A request, in a slot or waiting for one."""

    prompt: Sequence[int]
    num_new: int
    tokens: list[int] = field(default_factory=list)
    """The prompt and what follows it so far."""
    num_computed: int = 0
    tables: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def generated(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def is_done(self) -> bool:
        return len(self.generated) == self.num_new


class HandEngine:
    """Plans the steps of a runner of several groups."""

    def __init__(self, runner: StepRunner, kv_caches: Sequence[KvCache]) -> None:
        kv = runner.facts.kv
        self.groups = kv.groups
        self.most_held = 0
        """The most blocks that were held at a time."""
        self._runner, self._kv_caches = runner, kv_caches
        self._free = list(range(1, kv.num_blocks))
        self._num_users: Counter[int] = Counter()
        self._running: dict[int, Request] = {}
        self._entering: list[NewRow] = []
        self._removed: list[int] = []
        self._blocks: list[tuple[int, int, int]] = []
        self._step_id = 0
        self._version = 0

    def add(self, slot: int, request: Request, chunk: int, shares: int | None = None) -> None:
        """Let a request enter with the next step, in which it computes `chunk` tokens.

        Args:
            shares: Slot of a row with the same tokens, from whose last computed token on it goes on.
        """
        request.tables = [[] for _ in self.groups]
        request.num_computed = 0
        if shares is not None:
            other = self._running[shares]
            request.num_computed = start = other.num_computed
            assert other.tokens[:start] == request.tokens[:start]
            for group, table, shared in zip(self.groups, request.tables, other.tables, strict=True):
                assert start % group.block_size == 0, "blocks that are full"
                seen = seen_blocks(group, start)
                table += [shared[index] if index in seen else 0 for index in range(start // group.block_size)]
                self._num_users.update(block for block in table if block)
        self._grow(request, request.num_computed + chunk)
        first, *others = request.tables
        self._version += 1
        row = new_row(
            slot,
            request.tokens,
            first,
            num_prompt=len(request.prompt),
            computed=request.num_computed,
            slot_version=self._version,
        )
        self._entering.append(replace(row, group_block_ids=tuple(u32(*table) for table in others)))
        self._running[slot] = request

    def remove(self, slot: int) -> Request:
        """Remove a row with the next step, and forget what it holds."""
        request = self._running.pop(slot)
        self._removed.append(slot)
        for table in request.tables:
            self._release(table)
        return request

    def step(self, chunks: dict[int, int]) -> None:
        """Compute so many tokens of each row, and release what no later query sees."""
        entering = {row.slot for row in self._entering}
        for slot, count in chunks.items():
            if slot not in entering:
                added = self._grow(self._running[slot], self._running[slot].num_computed + count)
                self._blocks += [(slot, block, group) for group, block in added]
        self._step_id += 1
        # rows and groups in another order each step; a row's blocks of a group stay in order
        self._blocks.sort(key=lambda block: hash((self._step_id, block[0], block[2])))
        plan = step_plan(
            self._step_id,
            removed=self._removed,
            new=self._entering,
            chunks=chunks,
            skipped=[slot for slot in self._running if slot not in chunks],
            blocks=[(slot, block) for slot, block, _ in self._blocks],
        )
        if len(self.groups) > 1:
            plan = replace(plan, block_groups=u32(*(group for _, _, group in self._blocks)))
        self._entering, self._removed, self._blocks = [], [], []
        result = self._runner.execute(plan)
        assert not result.row_errors, (self._step_id, plan, result.row_errors)
        sampled = iter(result.token_ids.tolist())
        for slot in sorted(chunks):
            request = self._running[slot]
            request.num_computed += chunks[slot]
            if request.num_computed == len(request.tokens):
                request.tokens.append(next(sampled))
            self._release_unseen(request)
        self.most_held = max(self.most_held, sum(count > 0 for count in self._num_users.values()))

    def remaining(self, slot: int) -> int:
        """Return how many known tokens a row has to compute."""
        request = self._running[slot]
        return len(request.tokens) - request.num_computed

    def slots(self) -> list[int]:
        return [slot for slot, request in self._running.items() if not request.is_done]

    def _grow(self, request: Request, num_tokens: int) -> list[tuple[int, int]]:
        """Add blocks for so many tokens. Return the group and the id of each."""
        added = []
        for number, (group, table) in enumerate(zip(self.groups, request.tables, strict=True)):
            while len(table) * group.block_size < num_tokens:
                table.append(self._free.pop(0))
                self._num_users[table[-1]] += 1
                added.append((number, table[-1]))
        return added

    def _release_unseen(self, request: Request) -> None:
        for group, table in zip(self.groups, request.tables, strict=True):
            unseen = set(range(request.num_computed // group.block_size)) - seen_blocks(
                group, request.num_computed
            )
            self._release([table[index] for index in sorted(unseen)])
            for index in unseen:
                table[index] = 0

    def _release(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            if not block:
                continue
            self._num_users[block] -= 1
            if not self._num_users[block]:
                self._free.insert(0, block)  # the next row gets it
                for cache in self._kv_caches:
                    (cache.blocks if cache.scales is None else cache.scales)[block] = float("nan")
