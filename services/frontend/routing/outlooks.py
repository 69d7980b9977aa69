"""Estimates when engines would give a first token: one by one where they are few, as columns where they are many."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from triptych_services.frontend.routing.load import TRUSTED_S, EngineLoad, WorkTimes
from triptych_services.frontend.routing.prefix_index import PrefixIndex, RoutedPrompt

F64 = NDArray[np.float64]
Rows = Sequence[int] | NDArray[np.intp]
"""Engines by their places in the sequence that is chosen from."""

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

    def close(self) -> None:
        """Follow the loads no more."""

    def soonest(self, cost: float, others: Sequence[tuple[float, Rows]], num_choices: int) -> list[int]:
        """Return the engines that are about as soon as the soonest, and of these those that must compute no more.

        Args:
            cost: Tokens of a prompt that an engine must compute.
            others: The same of engines that differ, with these.
            num_choices: Choices of the request.
        """
        best, loads = self._best_times(), self._loads
        row_to_cost = {row: other for other, rows in others for row in rows}
        costs = [row_to_cost.get(row, cost) for row in range(len(loads))]
        seconds = [load.first_token_s(own, num_choices, best) for load, own in zip(loads, costs, strict=True)]
        limit_s = _alike_s(min(seconds))
        alike = [row for row in range(len(loads)) if seconds[row] <= limit_s]
        most_tokens = min(costs[row] for row in alike) + _ALIKE_S / best.prefill_token_s
        return [row for row in alike if costs[row] <= most_tokens]

    def num_choices(self, row: int) -> float:
        """Return the choices that run or wait at an engine."""
        return self._loads[row].num_choices

    def count_cached_tokens(self, prompt: RoutedPrompt) -> list[tuple[int, Rows]]:
        """Return how many tokens of a prompt need not be computed, and where. Engines where it is none are left out."""
        groups: dict[tuple[PrefixIndex, int], dict[int, int]] = {}
        for row, load in enumerate(self._loads):
            if load.block_size and load.cached.member >= 0:
                groups.setdefault((load.cached.index, load.block_size), {})[load.cached.member] = row
        found: list[tuple[int, Rows]] = []
        for (index, block_size), member_to_row in groups.items():
            among = sum(1 << member for member in member_to_row)
            for num_blocks, holders in index.find(prompt, block_size, among):
                rows = [row for member, row in member_to_row.items() if holders >> member & 1]
                found.append((min(num_blocks * block_size, prompt.num_tokens - 1), rows))
        return found

    def _best_times(self) -> WorkTimes:
        """Return the least that any engine has measured last."""
        reported = [load.reported for load in self._loads]
        return WorkTimes(
            min(filter(None, [load.prefill_token_s for load in reported]), default=_UNMEASURED_TOKEN_S),
            min(filter(None, [load.decode_step_s for load in reported]), default=0.0),
        )


class _ManyOutlooks(Outlooks):
    """The same for many engines, as columns over them. A load's row is read again when it has changed."""

    def __init__(self, loads: Sequence[EngineLoad]) -> None:
        super().__init__(loads)
        num = len(loads)
        self._table = np.zeros((_NUM_COLUMNS, num))
        """The values of `_row_of`, [_NUM_COLUMNS, num_engines]."""
        self._members: dict[tuple[PrefixIndex, int], _Members] = {}
        """Prefix index and block size -> the engines that have them."""
        self._places: list[tuple[PrefixIndex, int, int] | None] = [None] * num
        """The index, block size and member of each engine in `_members`. None: it is in none."""
        self._is_known = False
        self._changed: set[int] = set()
        for row, load in enumerate(loads):
            load.watch(self._changed, row)

    def close(self) -> None:
        for load in self._loads:
            load.unwatch(self._changed)

    def refresh(self) -> bool:
        if self._changed:
            rows, loads = list(self._changed), self._loads
            self._changed.clear()
            self._table[:, rows] = np.array([_row_of(loads[row]) for row in rows]).T
            moved = [row for row in rows if self._places[row] != _place_of(loads[row])]
            for row in moved:
                self._take_out(row)
            for row in moved:  # one that has come since may have the number of one that has left
                self._put_in(row)
            self._is_known = self._is_known or all(load.is_known for load in loads)
        return self._is_known

    def soonest(self, cost: float, others: Sequence[tuple[float, Rows]], num_choices: int) -> list[int]:
        best = self._best_times()
        costs = np.full(len(self._loads), cost)  # [num_engines]
        for other, rows in others:
            costs[rows] = other
        seconds = self._first_token_s(costs, num_choices, best)
        is_alike = seconds <= _alike_s(float(seconds.min()))
        most_tokens = costs[is_alike].min() + _ALIKE_S / best.prefill_token_s
        chosen: list[int] = np.flatnonzero(is_alike & (costs <= most_tokens)).tolist()
        return chosen

    def num_choices(self, row: int) -> float:
        return float(self._table[_NUM_CHOICES, row])

    def count_cached_tokens(self, prompt: RoutedPrompt) -> list[tuple[int, Rows]]:
        found: list[tuple[int, Rows]] = []
        for (index, block_size), members in self._members.items():
            for num_blocks, holders in index.find(prompt, block_size, members.bits):
                found.append((min(num_blocks * block_size, prompt.num_tokens - 1), members.rows(holders)))
        return found

    def _best_times(self) -> WorkTimes:
        prefill_token_s, decode_step_s = self._table[_MEASURES].min(axis=1).tolist()
        return WorkTimes(
            prefill_token_s if prefill_token_s < _NEVER else _UNMEASURED_TOKEN_S,
            decode_step_s if decode_step_s < _NEVER else 0.0,
        )

    def _first_token_s(self, num_tokens: F64, num_choices: int, best: WorkTimes) -> F64:
        """Return what `EngineLoad.first_token_s` says of each engine, [num_engines]."""
        table, now = self._table, self._loads[0].now()
        num_prefill_tokens, told_at, num_booked_tokens, num_lacking, row_interval_s, _ = table[
            :_FIRST_MEASURE
        ]
        is_trusted = table[_MEASURED_AT] > now - TRUSTED_S
        token_s, step_s = np.where(is_trusted, table[_MEASURES], np.array(best)[:, None])
        row_s = np.maximum(num_lacking + num_choices, 0.0) * row_interval_s
        told_s = num_prefill_tokens * token_s
        waiting_s = np.maximum(told_s - (now - told_at), 0.0) + num_booked_tokens * token_s
        own_s = num_tokens * token_s
        seconds: F64 = np.maximum(waiting_s, row_s) + own_s + step_s
        return seconds

    def _take_out(self, row: int) -> None:
        """Leave an engine out of `_members`."""
        if (place := self._places[row]) is not None:
            members = self._members[place[:2]]
            members.discard(place[2])
            if not members.bits:
                del self._members[place[:2]]

    def _put_in(self, row: int) -> None:
        """Take an engine into `_members` as it is now."""
        place = self._places[row] = _place_of(self._loads[row])
        if place is not None:
            self._members.setdefault(place[:2], _Members()).add(place[2], row)


class _Members:
    """The members of a prefix index that have the same block size, and the engine of each."""

    def __init__(self) -> None:
        self.bits = 0
        self._rows = np.zeros(64, np.intp)
        """[number of a member or more] where the member is here, its engine."""

    def add(self, member: int, row: int) -> None:
        """Take in a member, which is an engine."""
        if member >= len(self._rows):
            self._rows = np.concatenate([self._rows, np.zeros(member, np.intp)])
        self._rows[member] = row
        self.bits |= 1 << member

    def discard(self, member: int) -> None:
        """Leave out a member."""
        self.bits &= ~(1 << member)

    def rows(self, members: int) -> NDArray[np.intp]:
        """Return the engines of members, at least one, which are here."""
        content = np.frombuffer(members.to_bytes(-(-members.bit_length() // 8), "little"), np.uint8)
        return self._rows[np.flatnonzero(np.unpackbits(content, bitorder="little"))]


def create_outlooks(loads: Sequence[EngineLoad]) -> Outlooks:
    """Return the outlooks of engines with these loads, at least one."""
    return Outlooks(loads) if len(loads) <= _FEW else _ManyOutlooks(loads)


_NUM_COLUMNS, _NUM_CHOICES, _FIRST_MEASURE = 10, 5, 6
_MEASURES, _MEASURED_AT = slice(6, 8), slice(8, 10)


def _place_of(load: EngineLoad) -> tuple[PrefixIndex, int, int] | None:
    """Return the prefix index of an engine, its block size and its member. None: nothing is cached there."""
    cached = load.cached
    return (cached.index, load.block_size, cached.member) if load.block_size and cached.member >= 0 else None


def _row_of(load: EngineLoad) -> tuple[float, ...]:
    """Return the values of the columns for one engine. What was not measured is inf, and was measured at -inf."""
    reported = load.reported
    return (
        reported.num_prefill_tokens,
        load.told_at,
        load.num_booked_tokens,
        load.num_booked_choices - reported.num_free_rows,  # rows that are lacking; below 0: so many are free
        reported.row_interval_s,
        load.num_choices,
        reported.prefill_token_s or _NEVER,
        reported.decode_step_s or _NEVER,
        load.prefill_measured_at if reported.prefill_token_s else -_NEVER,
        load.decode_measured_at if reported.decode_step_s else -_NEVER,
    )


def _alike_s(soonest_s: float) -> float:
    """Return until when an engine is as soon as the soonest."""
    return soonest_s + max(_ALIKE_SHARE * soonest_s, _ALIKE_S)
