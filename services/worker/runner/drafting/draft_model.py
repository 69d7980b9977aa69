"""Guesses of a small model that has the vocabulary of the large one: docs/adr/0122.

It has rows of its own with the same slots, and a KV cache of its own, of which the engine knows nothing. What a row
has got since it was last guessed for is computed as one ragged query, and then one token of each row for each further
place:

    known to the row        … a b c d            computed here up to b, with the guess x, which was not c
    one query of all rows         c d            chooses e
    one token of each row           e            chooses f
                                      f          chooses g; the guesses are e, f and g

A guess that turns out right has been computed already. A row that lacks more than a step brings has a text to read
first. That is computed part by part, one between two steps, as long as the budget of guesses allows. A row that has no
room in the cache is left to other proposers.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triptych.types.facts import KvLayout, WorkerFacts
from triptych.types.sampling import SamplingParams
from triptych.types.step import NewRow
from triptych_services.worker.attention.base import AttentionBackend, KvCache
from triptych_services.worker.models.base import CausalLM
from triptych_services.worker.runner.backend import StepOutput
from triptych_services.worker.runner.cpu_backend import create_cpu_backend
from triptych_services.worker.runner.drafting.base import I64, Guesses
from triptych_services.worker.runner.drafting.costs import StepCosts
from triptych_services.worker.runner.input_batch import InputBuffers
from triptych_services.worker.runner.request_rows import RequestRows, StepRows
from triptych_services.worker.runner.step_inputs import StepSizes
from triptych_services.worker.sampling.params import TokenHistory

PART, _LEAST_PART = 256, 16
"""Tokens that it computes in one query, of all rows together, at most; and those of a text, at least."""
_MAX_NEW = 17
"""Tokens that a row gets in a step at most. One that lacks more has a text to read."""
_NUM_TEXTS = 5
"""Parts of texts that are kept, the latest. The fastest one counts: what else runs on a machine only slows it."""
_NUM_WARM_UPS = 5
_GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A loaded model, and the sizes of what it computes."""

    model: CausalLM
    attention: AttentionBackend
    kv_caches: Sequence[KvCache]
    """In the shape of `kv`, all in one group."""
    kv: KvLayout
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    enforce_eager: bool = False
    states_before: Tensor | None = None
    """[most tokens of a query, hidden_size] as of `create_cpu_backend`; None: the model reads tokens only."""


class DraftModelProposer:
    """A `Proposer` that `TakesTime` and `ReadsTexts`. Owns the draft model's rows and cache."""

    name = "draft"

    def __init__(self, draft: DraftModel, facts: WorkerFacts, *, history: TokenHistory) -> None:
        self._history = history
        num_cached = (draft.kv.num_blocks - 1) * draft.kv.block_size
        self._max_len = min(draft.max_model_len, facts.model.max_model_len, num_cached)
        self._vocab_size, self._eos_token_ids = draft.vocab_size, frozenset(draft.eos_token_ids)
        self._part = min(PART, facts.max_num_batched_tokens)
        self._rows = RequestRows(
            max_num_seqs=facts.max_num_seqs,
            max_model_len=self._max_len,
            max_num_batched_tokens=self._part,
            kv=draft.kv,
            vocab_size=draft.vocab_size,
        )
        (self._table,) = self._rows.tables
        self._agreed: I64 = np.zeros(facts.max_num_seqs, np.int64)
        """[max_num_seqs] tokens of the row here that were those of the history when it was last guessed for."""
        self._free = list(range(draft.kv.num_blocks - 1, 0, -1))
        """Blocks that no row holds; block 0 is the null block."""
        self._inputs = InputBuffers(
            max_num_seqs=facts.max_num_seqs,
            max_num_batched_tokens=self._part,
            tables=self._rows.tables,
            attention=draft.attention,
        )
        self._backend = create_cpu_backend(
            draft.model,
            draft.kv_caches,
            self._inputs,
            enforce_eager=draft.enforce_eager,
            states_before=draft.states_before,
        )
        self._costs = StepCosts()
        """By the tokens of a query that reads no text."""
        self._query_costs = StepCosts()
        """By the tokens of any query."""
        self._token_seconds: deque[float] = deque(maxlen=_NUM_TEXTS)
        """Seconds by token of the latest parts of texts."""
        self._token_limit_s = math.inf
        """The seconds of a query of one token as it starts: a query takes no more for each of its tokens."""
        self._seconds = self._reading_seconds = 0.0
        """The time of queries that `take_seconds` and `take_reading_seconds` have not returned yet."""
        self._allowed: float | None = None
        """As of `allow_reading`."""
        self._reading: frozenset[int] = frozenset()
        """Slots of rows with a text of which the latest `propose` has computed a part."""
        self._step = 0
        self._warm_up()

    @property
    def num_free_blocks(self) -> int:
        """Blocks of its cache that no row holds."""
        return len(self._free)

    @torch.inference_mode()
    def _warm_up(self) -> None:
        """Compute tokens of no row, so that no request waits for what is set up first, and a place's time is known."""
        slots, samples = np.zeros(1, np.int64), np.ones(1, np.bool_)
        longest = min(self._part, self._max_len)
        self._make_room(0, longest)
        for _ in range(2):  # the first one has more to set up
            self._rows.num_computed[0] = 0
            self._compute(slots, np.full(1, longest), samples, is_text=True)
        for _ in range(_NUM_WARM_UPS):
            self._rows.num_computed[0] = 0
            self._compute(slots, np.ones(1, np.int64), samples)
            self._token_limit_s = min(self._token_limit_s, self.take_seconds())
        self._forget(0)
        self.take_reading_seconds()

    def enter(self, row: NewRow) -> None:
        self._rows.sampling.enter(row.slot, _GREEDY, 0)
        self._forget(row.slot)

    def leave(self, slot: int) -> None:
        self._rows.sampling.leave(slot)
        self._forget(slot)

    def accept(self, slots: I64, counts: I64) -> None:
        """Count a step: what a row has got is looked up when it is guessed for."""
        self._step += 1

    def place_seconds(self, num_rows: int) -> float | None:
        self._costs.pass_to(self._step)
        seconds = self._costs.estimate(num_rows, 1)
        return None if seconds is None else seconds[0]

    def take_seconds(self) -> float:
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def allow_reading(self, seconds: float | None) -> None:
        self._allowed = seconds

    def is_reading(self, slot: int) -> bool:
        return slot in self._reading

    def take_reading_seconds(self) -> float:
        seconds, self._reading_seconds = self._reading_seconds, 0.0
        return seconds

    @torch.inference_mode()
    def propose(self, slots: I64, limits: I64) -> Guesses:
        wanted = {
            slot: count
            for slot, limit in zip(slots.tolist(), limits.tolist(), strict=True)
            if (count := self._take_over(slot, limit))
        }
        guesses = {slot: [token_id] for slot, token_id in self._catch_up(list(wanted)).items()}
        while going_on := [
            slot
            for slot, token_ids in guesses.items()
            if len(token_ids) < wanted[slot] and self._may_go_on(token_ids[-1])
        ]:
            for slot, token_id in self._append([(slot, guesses[slot][-1]) for slot in going_on]).items():
                guesses[slot].append(token_id)
        return Guesses.of([guesses.get(slot, ()) for slot in slots.tolist()])

    def _may_go_on(self, token_id: int) -> bool:
        """Return whether tokens may follow a guess. It is negative where nothing could be chosen."""
        return token_id >= 0 and token_id not in self._eos_token_ids

    def _take_over(self, slot: int, limit: int) -> int:
        """Copy what a row has got, and return how many guesses it can have; 0: none, since there is no room."""
        known = int(self._history.num_known[slot])
        limit = min(limit, self._max_len + 1 - known)
        if limit < 1 or not self._make_room(slot, known + limit - 1):
            return 0
        agreed, computed = int(self._agreed[slot]), int(self._rows.num_computed[slot])
        own, news = self._rows.token_ids[slot], self._history.token_ids[slot, agreed:known]
        if news.size and int(news.max()) >= self._vocab_size:  # padding of the large model's vocabulary
            self._forget(slot)
            return 0
        num_guessed = max(min(computed, known) - agreed, 0)
        differs = np.flatnonzero(own[agreed : agreed + num_guessed] != news[:num_guessed])
        if differs.size:
            computed = agreed + int(differs[0])
        own[agreed:known] = news
        self._agreed[slot] = self._rows.num_known[slot] = known
        self._rows.num_computed[slot] = min(computed, known - 1)
        return limit

    def _make_room(self, slot: int, num_tokens: int) -> bool:
        """Give a row blocks for so many tokens. One for which there are none gives back those that it holds."""
        table = self._table
        held, needed = int(table.num_held[slot]), -(-num_tokens // table.block_size)
        if needed > held:
            if needed - held > len(self._free):
                self._forget(slot)
                return False
            taken = [self._free.pop() for _ in range(needed - held)]
            table.append(np.full(len(taken), slot, np.uint32), np.array(taken, np.uint32))
        return True

    def _forget(self, slot: int) -> None:
        """Drop what was computed of a row."""
        held = int(self._table.num_held[slot])
        self._free += self._table.ids[slot, :held].tolist()
        self._table.leave(slot)
        self._table.num_held[slot] = 0
        self._agreed[slot] = self._rows.num_computed[slot] = 0

    def _catch_up(self, slots: Sequence[int]) -> dict[int, int]:
        """Compute what rows have got, and as much of their texts as is allowed.

        Returns:
            Slot -> the token that follows, for the rows of which all is computed by now.
        """
        all_slots = np.array(slots, np.int64)
        has_text = self._rows.num_known[all_slots] - self._rows.num_computed[all_slots] > _MAX_NEW
        texts, self._reading = all_slots[has_text], frozenset()
        found = self._compute_up_to(self._part, all_slots[~has_text])
        if texts.size and (room := self._text_room()):
            found |= self._compute_up_to(room, texts, is_text=True)
            self._reading = frozenset(texts.tolist()) - found.keys()
        return found

    def _text_room(self) -> int:
        """Return how many tokens of texts may be computed now."""
        if self._allowed is None:
            return self._part
        if self._allowed <= 0:
            return 0
        return min(max(int(self._allowed / min(self._token_seconds)), _LEAST_PART), self._part)

    def _compute_up_to(self, room: int, slots: I64, *, is_text: bool = False) -> dict[int, int]:
        """Compute up to so many tokens of what rows lack, the shortest first; see `_catch_up`."""
        if not slots.size:
            return {}
        lacking = self._rows.num_known[slots] - self._rows.num_computed[slots]
        order = np.argsort(lacking, kind="stable")
        room_before = room - (np.cumsum(lacking[order]) - lacking[order])
        query_lens = np.zeros_like(lacking)
        query_lens[order] = np.clip(room_before, 0, lacking[order])
        takes_part = query_lens > 0
        return self._compute(
            slots[takes_part], query_lens[takes_part], (query_lens == lacking)[takes_part], is_text=is_text
        )

    def _append(self, guesses: Sequence[tuple[int, int]]) -> dict[int, int]:
        """Compute the latest guess of each row, and return the next one."""
        slots, token_ids = np.array(guesses, np.int64).T
        self._rows.token_ids[slots, self._rows.num_computed[slots]] = token_ids
        return self._compute(slots, np.ones_like(slots), np.ones(slots.size, np.bool_))

    def _compute(
        self, slots: I64, query_lens: I64, samples: NDArray[np.bool_], *, is_text: bool = False
    ) -> dict[int, int]:
        """Compute tokens of rows behind what is computed of them, and return by slot what follows, where it samples."""
        started = time.perf_counter()
        step = StepRows(slots, query_lens, self._rows.num_computed[slots], samples)
        sizes, output = self._forward(step)
        token_ids = output.token_ids.tolist()
        self._rows.num_computed[slots] += query_lens
        self._note(sizes.num_tokens, time.perf_counter() - started, is_text=is_text)
        return dict(zip(step.sampling_slots.tolist(), token_ids, strict=True))

    def _forward(self, step: StepRows) -> tuple[StepSizes, StepOutput]:
        """Compute the tokens of a query."""
        sizes = self._inputs.gather(self._rows, step)
        return sizes, self._backend.forward(sizes)

    def _note(self, num_tokens: int, seconds: float, *, is_text: bool) -> None:
        """Take in what a query took. It counts as much as the fastest of its size lately, as the steps of the model."""
        self._query_costs.pass_to(self._step)
        self._query_costs.note(num_tokens, seconds)
        known = self._query_costs.estimate(num_tokens, 1) if self._query_costs.knows(num_tokens) else None
        # Nothing else tells a slow query of a new size from a slow moment of the machine.
        counted = min(seconds, num_tokens * self._token_limit_s if known is None else known[0])
        if is_text:
            self._token_seconds.append(seconds / num_tokens)
            self._reading_seconds += counted
        else:
            self._costs.note(num_tokens, seconds)
            self._seconds += counted
