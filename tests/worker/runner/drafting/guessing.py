"""Proposers of every quality, and what rows say in steps of a runner that may yield several of their tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.worker.tiny import step_plan, tiny_facts
from triptych.types.facts import WorkerFacts
from triptych.types.step import NewRow, StepResult, VerifiedGuesses
from triptych_services.worker.context.resolved_config import ResolvedConfig
from triptych_services.worker.runner.base import StepRunner
from triptych_services.worker.runner.drafting.base import I64, Guesses, Proposer
from triptych_services.worker.runner.drafting.create import CreateProposers
from triptych_services.worker.runner.drafting.speculation import Speculation
from triptych_services.worker.runner.model_runner import LastingParts, ModelRunner
from triptych_services.worker.runner.startup.kv_cache import allocate_kv_cache
from triptych_services.worker.runner.startup.kv_plan import plan_kv_cache
from triptych_services.worker.sampling.grammars import GrammarCompiler
from triptych_services.worker.sampling.params import TokenHistory

BLOCKS_PER_ROW = 12


@dataclass
class Said:
    """The answer to one row."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[tuple[list[int], list[float], int]] = field(default_factory=list)
    """By token, if the row asks: ids, their log-probabilities, and the rank of the chosen one."""
    error: str = ""
    num_steps: int = 0
    """Steps in which it was sampled."""


class Replaying:
    """A `Proposer` that knows what rows will say, and changes it."""

    name = "replaying"

    def __init__(
        self,
        history: TokenHistory,
        known: Mapping[int, Sequence[int]],
        change: Callable[[list[int]], list[int]],
    ) -> None:
        """
        Args:
            known: Seed of a row to all tokens that it will say.
            change: Changes the tokens that come next.
        """
        self._history, self._known, self._change = history, known, change
        self._seeds: dict[int, int] = {}
        self.num_accepted: dict[int, int] = {}
        """Seed to the number of tokens that it was told of."""

    def enter(self, row: NewRow) -> None:
        assert row.slot not in self._seeds
        self._seeds[row.slot] = row.seed

    def leave(self, slot: int) -> None:
        del self._seeds[slot]

    def accept(self, slots: I64, counts: I64) -> None:
        for slot, count in zip(slots.tolist(), counts.tolist(), strict=True):
            seed = self._seeds[slot]
            self.num_accepted[seed] = self.num_accepted.get(seed, 0) + count

    def propose(self, slots: I64, limits: I64) -> Guesses:
        found = []
        for slot, limit in zip(slots.tolist(), limits.tolist(), strict=True):
            num_output = int(self._history.num_known[slot] - self._history.num_prompt[slot])
            next_ids = list(self._known[self._seeds[slot]][num_output : num_output + limit])
            found.append(self._change(next_ids))
        ids = [token_id for token_ids in found for token_id in token_ids]
        return Guesses(np.array(ids, np.int64), np.array([len(each) for each in found], np.int64))


def changes(random: Random, vocab_size: int) -> Mapping[str, Callable[[list[int]], list[int]]]:
    """Return ways to change the right guesses, by name."""

    def some_wrong(token_ids: list[int]) -> list[int]:
        return [each if random.random() < 0.7 else random.randrange(vocab_size) for each in token_ids]

    return {
        "right": lambda ids: ids,
        "wrong": lambda ids: [(each + 1) % vocab_size for each in ids],
        "random": lambda ids: [random.randrange(vocab_size) for _ in ids],
        "some": some_wrong,
        "fewer": lambda ids: ids[: random.randint(0, len(ids))],
        "longer": lambda ids: [*ids, *ids, 5, 6],
        "outside": lambda ids: [*ids[:1], vocab_size + 3, *ids[1:]],
        "negative": lambda ids: [*ids[:2], -1, *ids[2:]],
    }


def replaying(
    known: Mapping[int, Sequence[int]], change: Callable[[list[int]], list[int]]
) -> CreateProposers:
    """Return what creates one proposer that replays."""

    def create(facts: WorkerFacts, history: TokenHistory, forms: object) -> Sequence[Proposer]:
        return [Replaying(history, known, change)]

    return create


def runner_with(
    model: nn.Module,
    config: ResolvedConfig,
    limit: int,
    proposers: CreateProposers | None = None,
    *,
    grammars: GrammarCompiler | None = None,
    **arguments: Any,
) -> ModelRunner:
    """Return a runner in which a row gets up to `limit` tokens in a step. Its memory is full of NaN."""
    kv = plan_kv_cache(config, free_bytes=1 << 30)
    caches = allocate_kv_cache(kv.shape, torch.device("cpu"), kv.places, num_guesses=limit - 1)
    for layer in caches:
        (layer.blocks if layer.scales is None else layer.scales)[1:] = float("nan")
        for memory in (layer.state, layer.guesses):
            if memory is not None:
                memory.fill_(float("nan"))
    facts = tiny_facts(config, kv.max_model_len, kv.shape, max_samples_per_row=limit)
    lasting = LastingParts(grammars, proposers=proposers)
    runner = ModelRunner(model=model, kv_caches=caches, facts=facts, lasting=lasting, **arguments)
    if runner._speculation is not None:
        guess_at_all_costs(runner._speculation, limit - 1)
    return runner


def guess_at_all_costs(speculation: Speculation, most: int) -> None:
    """Let each row have as many guesses as there are, up to `most`, whatever they bring."""
    budget, num_proposers = speculation._budget, len(speculation._proposers)
    budget.prices = lambda num_rows: [0.0] * num_proposers  # type: ignore[method-assign]
    budget.least_chance = lambda *sizes: 0.0  # type: ignore[method-assign]
    budget.needs_plain = lambda num_positions: False  # type: ignore[method-assign]
    budget.reading_seconds = lambda: None  # type: ignore[method-assign]
    budget._gain = lambda num_steps: None  # type: ignore[method-assign]
    budget.keeps_states = True
    budget.allot = lambda rates, found, *others: [most] * len(rates)  # type: ignore[method-assign]


def make_up_times(speculation: Speculation) -> None:
    """Let steps take times of which nothing depends on the machine: 5% more for each position. Searches take none, nor
    do states that are kept."""
    budget = speculation._budget
    budget._place_seconds = {}
    note_step = budget.note_step

    def note_made_up(num_rows: int, num_guesses: int, num_tokens: int, seconds: float | None) -> None:
        made_up = None if seconds is None else 1e-3 * (1 + 0.05 * (num_rows + num_guesses))
        note_step(num_rows, num_guesses, num_tokens, made_up)

    budget.note_step = note_made_up  # type: ignore[method-assign]
    budget.note_search = lambda *seconds: None  # type: ignore[method-assign]
    budget.note_keeping = lambda *numbers: None  # type: ignore[method-assign]


def blocks_of(slot: int) -> range:
    """Return blocks of a slot's own, for all tokens that its row may have."""
    return range(1 + BLOCKS_PER_ROW * slot, 1 + BLOCKS_PER_ROW * (slot + 1))


def say(runner: StepRunner, rows: Sequence[NewRow], num_new: int, limit: int) -> list[Said]:
    """Let rows say so many tokens each, up to `limit` in a step. They begin one after the other, and stay in step."""
    said = [Said() for _ in rows]
    runner.reset()
    for step_id in range(1, 1000):
        entering = [row for row in rows if row.slot == step_id - 1]
        live = [row.slot for row in rows if row.slot < step_id]
        done = [slot for slot in live if len(said[slot].token_ids) >= num_new or said[slot].error]
        if len(done) == len(rows):
            return said
        sampling = [slot for slot in live if slot not in done]
        limits = {slot: min(limit, num_new - len(said[slot].token_ids)) for slot in sampling}
        plan = step_plan(
            step_id,
            new=entering,
            chunks={row.slot: row.num_known_tokens for row in entering},
            skipped=done,
            limits={slot: most for slot, most in limits.items() if most > 1},
        )
        _take(runner.execute(plan), sampling, limits, said)
    raise AssertionError("no end of steps")


def _take(result: StepResult, slots: Sequence[int], limits: Mapping[int, int], said: list[Said]) -> None:
    errors = {key.slot: error.message for key, error in result.row_errors.items()}
    counts = result.token_counts.tolist() or [1] * len(slots)
    owners = []
    token_ids = iter(result.token_ids.tolist())
    for slot, count in zip(slots, counts, strict=True):
        said[slot].num_steps += 1
        said[slot].error = errors.get(slot, "")
        assert (count == 0) == bool(said[slot].error)
        assert count <= limits[slot]
        owners += [slot] * count
        said[slot].token_ids += [next(token_ids) for _ in range(count)]
    assert next(token_ids, None) is None
    _check_report(result.guesses, num_accepted=sum(count - 1 for count in counts if count))
    if result.logprobs is not None:
        columns = result.logprobs
        assert np.all(np.diff(columns.rows.astype(np.int64)) > 0)
        for index, row in enumerate(columns.rows.tolist()):
            entries = slice(columns.offsets[index], columns.offsets[index + 1])
            said[owners[row]].logprobs.append(
                (
                    columns.token_ids[entries].tolist(),
                    columns.logprobs[entries].tolist(),
                    int(columns.ranks[index]),
                )
            )


def _check_report(guesses: Sequence[VerifiedGuesses], *, num_accepted: int) -> None:
    """Check what a step says of its guesses against the tokens beyond the first of each row."""
    assert sum(int(each.accepted.sum()) for each in guesses) == num_accepted
    for each in guesses:
        assert each.verified.size == each.accepted.size > 0
        assert each.row_counts.sum() == each.verified.sum()
        assert np.all(each.row_counts > 0)
        assert np.all(np.diff(each.rows.astype(np.int64)) > 0)
        assert np.all(each.accepted <= each.verified)
        assert np.all(each.verified > 0)
        for counts in (each.verified, each.accepted):
            assert np.all(counts[1:] <= counts[:-1])
