"""Estimates when engines would give a first token: one by one where they are few, as columns where they are many."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from triptych_services.frontend.routing.load import TRUSTED_S, EngineLoad, WorkTimes
from triptych_services.frontend.routing.prefix_index import RoutedPrompt, count_leading

F64 = NDArray[np.float64]

_NEVER = math.inf
_FEW = 10
"""Up to so many engines numpy takes longer than to ask each."""
_ALIKE_SHARE, _ALIKE_S = 0.05, 0.005  # by which expected times differ no more than they are known
_UNMEASURED_TOKEN_S = 1e-4  # for each token of a prompt, where no engine has measured any yet


class Outlooks:
    """The loads of some engines, which have the same clock. Owned by the policy, which makes it anew for others."""

    def __init__(self, loads: Sequence[EngineLoad]) -> None:
        """`loads`: At least one."""
        self._loads = loads

    def refresh(self) -> bool:
        """Take in what has changed. Return whether all engines have reported their loads."""
        return all(load.is_known for load in self._loads)

    def soonest(self, cost: float, row_to_cost: Mapping[int, float], num_choices: int) -> list[int]:
        """Return the engines that are about as soon as the soonest, and of these those that must compute no more.

        Args:
            cost: Tokens of a prompt that an engine must compute.
            row_to_cost: The same of engines that differ.
            num_choices: Choices of the request.
        """
        best, loads = self._best_times(), self._loads
        costs = [row_to_cost.get(row, cost) for row in range(len(loads))]
        seconds = [load.first_token_s(own, num_choices, best) for load, own in zip(loads, costs, strict=True)]
        limit_s = _alike_s(min(seconds))
        alike = [row for row in range(len(loads)) if seconds[row] <= limit_s]
        most_tokens = min(costs[row] for row in alike) + _ALIKE_S / best.prefill_token_s
        return [row for row in alike if costs[row] <= most_tokens]

    def num_choices(self, row: int) -> float:
        """Return the choices that run or wait at an engine."""
        return self._loads[row].num_choices

    def count_cached_tokens(self, prompt: RoutedPrompt) -> dict[int, int]:
        """Return how many tokens of a prompt need not be computed, by engine; those where it is none are left out."""
        counts = ((row, load.count_cached_tokens(prompt)) for row, load in enumerate(self._loads))
        return {row: count for row, count in counts if count}

    def _best_times(self) -> WorkTimes:
        """Return the least that any engine has measured last."""
        reported = [load.reported for load in self._loads]
        return WorkTimes(
            min(filter(None, [load.prefill_token_s for load in reported]), default=_UNMEASURED_TOKEN_S),
            min(filter(None, [load.decode_step_s for load in reported]), default=0.0),
        )


class _Columns(NamedTuple):
    """The parts of each engine's load that count here, each [num_engines]. A time that was not measured is inf, and was
    measured at -inf."""

    num_prefill_tokens: F64
    told_at: F64
    num_booked_tokens: F64
    num_lacking: F64
    """Rows that choices which were sent there lack already; below 0: so many are free."""
    row_interval_s: F64
    prefill_token_s: F64
    prefill_measured_at: F64
    decode_step_s: F64
    decode_measured_at: F64
    num_choices: F64


class _ManyOutlooks(Outlooks):
    """The same for many engines, as columns over them. A load's row is read again when it has changed."""

    def __init__(self, loads: Sequence[EngineLoad]) -> None:
        super().__init__(loads)
        num = len(loads)
        self._seen = [-1] * num
        """Changes of each load that its row takes in."""
        self._table = np.zeros((len(_Columns._fields), num))
        self._columns = _Columns(*self._table)  # views
        self._tables: list[array[int]] = [array("Q")] * num
        self._shifts = np.zeros(num, np.uint64)
        self._expected: list[set[int]] = [set()] * num
        self._block_sizes = [0] * num
        self._different_block_sizes: set[int] = set()
        self._is_known = False

    def refresh(self) -> bool:
        loads, seen = self._loads, self._seen
        changed = [row for row, load in enumerate(loads) if load.num_changes != seen[row]]
        if changed:
            self._table[:, changed] = np.array([_row_of(loads[row]) for row in changed]).T
            for row in changed:
                load = loads[row]
                seen[row] = load.num_changes
                self._tables[row], self._shifts[row] = load.cached.table
                self._expected[row] = load.expected_firsts
                if load.block_size != self._block_sizes[row]:
                    self._block_sizes[row] = load.block_size
                    self._different_block_sizes = set(self._block_sizes) - {0}
            self._is_known = self._is_known or all(load.is_known for load in loads)
        return self._is_known

    def soonest(self, cost: float, row_to_cost: Mapping[int, float], num_choices: int) -> list[int]:
        best = self._best_times()
        costs = np.full(len(self._loads), cost)  # [num_engines]
        for row, own in row_to_cost.items():
            costs[row] = own
        seconds = self._first_token_s(costs, num_choices, best)
        is_alike = seconds <= _alike_s(float(seconds.min()))
        most_tokens = costs[is_alike].min() + _ALIKE_S / best.prefill_token_s
        rows: list[int] = np.flatnonzero(is_alike & (costs <= most_tokens)).tolist()
        return rows

    def num_choices(self, row: int) -> float:
        return float(self._columns.num_choices[row])

    def count_cached_tokens(self, prompt: RoutedPrompt) -> dict[int, int]:
        holders: dict[int, int] = {}
        for block_size in self._different_block_sizes:
            first_key = prompt.first_key(block_size)
            if not first_key:
                continue
            keys: Sequence[int] = ()
            num_blocks = 0
            for row, is_expected in self._may_cache(first_key):
                load = self._loads[row]
                if self._block_sizes[row] != block_size:
                    continue
                if is_expected:
                    keys = keys or prompt.keys(block_size)
                    num_blocks = load.count_cached_blocks(keys, num_blocks)
                elif first_key in load.cached:
                    keys = keys or prompt.keys(block_size)
                    num_blocks = count_leading(keys, load.cached, num_blocks)
                else:
                    continue
                if num_blocks:
                    holders[row] = min(num_blocks * block_size, prompt.num_tokens - 1)
        return holders

    def _best_times(self) -> WorkTimes:
        columns = self._columns
        return WorkTimes(
            _least(columns.prefill_token_s, _UNMEASURED_TOKEN_S), _least(columns.decode_step_s, 0.0)
        )

    def _first_token_s(self, num_tokens: F64, num_choices: int, best: WorkTimes) -> F64:
        """Return what `EngineLoad.first_token_s` says of each engine, [num_engines]."""
        columns, now = self._columns, self._loads[0].now()
        token_s = _trusted(columns.prefill_token_s, columns.prefill_measured_at, now, best.prefill_token_s)
        step_s = _trusted(columns.decode_step_s, columns.decode_measured_at, now, best.decode_step_s)
        row_s = np.maximum(columns.num_lacking + num_choices, 0.0) * columns.row_interval_s
        told_s = columns.num_prefill_tokens * token_s
        waiting_s = np.maximum(told_s - (now - columns.told_at), 0.0) + columns.num_booked_tokens * token_s
        own_s = num_tokens * token_s
        seconds: F64 = np.maximum(waiting_s, row_s) + own_s + step_s
        return seconds

    def _may_cache(self, first_key: int) -> list[tuple[int, bool]]:
        """Return the engines that may cache a prompt's first block, given its key, and whether each is about to compute
        it.

        The place of a key at home is taken at every engine that caches it, and at few others.
        """
        homes = (np.uint64(first_key) >> self._shifts).tolist()
        entries = map(array.__getitem__, self._tables, homes)
        is_expected = map(set.__contains__, self._expected, repeat(first_key))
        return [
            (row, expected)
            for row, (entry, expected) in enumerate(zip(entries, is_expected, strict=True))
            if entry or expected
        ]


def create_outlooks(loads: Sequence[EngineLoad]) -> Outlooks:
    """Return the outlooks of engines with these loads, at least one."""
    return Outlooks(loads) if len(loads) <= _FEW else _ManyOutlooks(loads)


def _row_of(load: EngineLoad) -> tuple[float, ...]:
    """Return the values of the columns for one engine."""
    reported = load.reported
    return (
        reported.num_prefill_tokens,
        load.told_at,
        load.num_booked_tokens,
        load.num_booked_choices - reported.num_free_rows,
        reported.row_interval_s,
        reported.prefill_token_s or _NEVER,
        load.prefill_measured_at if reported.prefill_token_s else -_NEVER,
        reported.decode_step_s or _NEVER,
        load.decode_measured_at if reported.decode_step_s else -_NEVER,
        load.num_choices,
    )


def _alike_s(soonest_s: float) -> float:
    """Return until when an engine is as soon as the soonest."""
    return soonest_s + max(_ALIKE_SHARE * soonest_s, _ALIKE_S)


def _least(column: F64, otherwise: float) -> float:
    least = float(column.min())
    return least if least < _NEVER else otherwise


def _trusted(column: F64, measured_at: F64, now: float, otherwise: float) -> F64:
    """Return the measures, and `otherwise` where there is none or it is too old."""
    trusted: F64 = np.where(measured_at > now - TRUSTED_S, column, otherwise)
    return trusted
