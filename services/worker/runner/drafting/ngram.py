"""Guesses from the row itself: what followed the last time that its newest tokens occurred.

    a b c d e f a b c          the newest tokens, a b c, occurred before
    a b c|d e f a|             so d e f a may follow

An index finds the places where the two newest tokens occurred, and the longest common end decides among the latest of
these. It costs a step the same however long the row is: a long prompt is taken in over several steps.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from triptych.types.step import NewRow
from triptych_services.worker.runner.drafting.base import I64, Guesses
from triptych_services.worker.sampling.params import TokenHistory

_KEY_TOKENS = 2  # fewer agree by chance
_MAX_PLACES = 8
"""Places that are looked at for one guess, the latest first."""
_MAX_COMMON = 8
"""Tokens by which places are told apart; those behind a longer common end are as good."""
_TOKENS_PER_COMMON = 3
"""Guesses that a common end of one token is good for: the longer it is, the more of what followed comes again."""
_PAIRS_PER_STEP = 4096
"""Pairs that all rows take in for one step, at most: about 1 ms. The others follow in later steps."""
_NOWHERE = -1


class NgramProposer:
    """A `Proposer`. Its memory is some 100 bytes per token of the rows that it has guessed for."""

    name = "ngram"

    def __init__(self, max_num_seqs: int, *, history: TokenHistory) -> None:
        self._history = history
        self._indexes: list[_PairIndex] = [_PairIndex() for _ in range(max_num_seqs)]

    def enter(self, row: NewRow) -> None:
        self._indexes[row.slot] = _PairIndex()

    def leave(self, slot: int) -> None:
        self._indexes[slot] = _PairIndex()

    def accept(self, slots: I64, counts: I64) -> None:
        """Do nothing: an index takes in the new tokens when it is asked."""

    def propose(self, slots: I64, limits: I64) -> Guesses:
        parts: list[list[int]] = []
        num_left = _PAIRS_PER_STEP
        for slot, limit in zip(slots.tolist(), limits.tolist(), strict=True):
            tokens = self._history.token_ids[slot, : self._history.num_known[slot]]
            num_left -= self._indexes[slot].take_in(tokens, num_left)
            parts.append(self._indexes[slot].guess(tokens, limit))
        return Guesses.of(parts)


class _PairIndex:
    """The places of each pair of tokens in one row.

    A place is the index of the token behind the pair.
    """

    def __init__(self) -> None:
        self._latest: dict[int, int] = {}
        """Pair -> its latest place."""
        self._before: list[int] = []
        """Place - 2 -> the place before it of the same pair, or `_NOWHERE`."""

    def take_in(self, tokens: NDArray[np.int32], limit: int) -> int:
        """Add up to so many pairs that came since the last call, but for the newest one: nothing follows it yet.

        Returns:
            The number of pairs that were added.
        """
        first = len(self._before) + _KEY_TOKENS
        end = min(tokens.size, first + limit)
        if first >= end:
            return 0
        newest = tokens[first - _KEY_TOKENS : end - 1].astype(np.int64)
        latest, before = self._latest, self._before
        for place, pair in enumerate((newest[:-1] << 32 | newest[1:]).tolist(), first):
            before.append(latest.get(pair, _NOWHERE))
            latest[pair] = place
        return end - first

    def guess(self, tokens: NDArray[np.int32], limit: int) -> list[int]:
        """Return up to `limit` tokens that may follow.

        Args:
            tokens: [num_known] all of the row.
        """
        place, num_common = self._best(tokens)
        if place == _NOWHERE:
            return []
        limit = min(limit, num_common * _TOKENS_PER_COMMON)
        follow = tokens[place : place + limit].tolist()
        if len(follow) < limit:  # the row repeats itself, with this period
            follow = (follow * limit)[:limit]
        return follow

    def _best(self, tokens: NDArray[np.int32]) -> tuple[int, int]:
        """Return the place with the longest common end, the latest of such, and the length of that; `_NOWHERE`
        and 0 if the newest pair is new."""
        if tokens.size <= _KEY_TOKENS:
            return _NOWHERE, 0
        *_, last_but_one, last = tokens[-_KEY_TOKENS:].tolist()
        place = self._latest.get(last_but_one << 32 | last, _NOWHERE)
        best, best_common = place, 0 if place == _NOWHERE else _KEY_TOKENS
        newest = tokens[-_MAX_COMMON:].tolist()
        for _ in range(_MAX_PLACES):
            if place == _NOWHERE:
                break
            common = common_end(tokens[max(place - _MAX_COMMON, 0) : place].tolist(), newest)
            if common > best_common:
                best, best_common = place, common
            if common == _MAX_COMMON:
                break
            place = self._before[place - _KEY_TOKENS]
        return best, best_common


def common_end(one: list[int], other: list[int]) -> int:
    """Return the number of last tokens that two lists have in common."""
    count = 0
    for first, second in zip(reversed(one), reversed(other), strict=False):
        if first != second:
            break
        count += 1
    return count
