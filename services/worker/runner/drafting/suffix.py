"""Guesses from what this worker has put out lately: what followed the last times that a row's newest tokens occurred.

Only outputs of the row's own scope are looked at, a digest of its tenant and its cache salt. So the
time of a step says nothing of the answers that others got.

    tokens     | output | output | output    | output … (oldest, overwritten next)     one ring for all scopes
    keys       of each place: scope and the three tokens before it
    heads      bucket of a key -> its latest place -> the place before it of the same bucket -> …

An output is taken in when its row leaves, some tokens in each step: a place costs a step the same whatever ends in it,
and what is oldest is forgotten token by token. Needs no torch.
"""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from triptych.types.step import NewRow
from triptych_services.worker.runner.drafting.base import I64, Guesses
from triptych_services.worker.runner.drafting.ngram import common_end
from triptych_services.worker.sampling.params import TokenHistory

_KEY_TOKENS = 3  # fewer agree by chance between texts
_TOKEN_BITS = 21
_MAX_PLACES = 8
"""Places of a bucket that are looked at for one guess, the latest first."""
_MAX_COMMON = 12
"""Tokens by which places are told apart; those behind a longer common end are as good."""
_TOKENS_PER_COMMON = 2
"""Guesses that a common end of one token is good for."""
_MAX_OUTPUT = 4096
"""Tokens of one output that are kept, the last ones."""
_TOKENS_PER_STEP = 256
"""Tokens that a step takes in, at most: some 60 us of a step."""
_MAX_WAITING = 1 << 18
"""Tokens that wait to be taken in, at most. The oldest make room."""
_BYTES_PER_TOKEN = 36
"""The most that a place takes: its token, its key, the place before it, and two heads of buckets."""
_NOWHERE = -1
_BORDER = -1
"""Separates two outputs; it is no token."""
_MIX = 0x9E3779B97F4A7C15  # 2 ** 64 over the golden ratio: neighbours fall far apart
_MASK = (1 << 64) - 1
U64 = NDArray[np.uint64]


class SuffixProposer:
    """A `Proposer`."""

    name = "suffix"

    def __init__(self, max_num_seqs: int, max_bytes: int, *, history: TokenHistory) -> None:
        """
        Args:
            max_bytes: Bytes of all that is kept. Memory is backed when it is first written.
        """
        self._history = history
        self._outputs = _Outputs(max_bytes // _BYTES_PER_TOKEN)
        self._secret = os.urandom(16)
        """Makes keys of a scope unknown outside, so that no client can choose a scope with those of another one."""
        self._scopes: list[int | None] = [None] * max_num_seqs
        """[max_num_seqs] 64 bits of the scope of the slot's row; None: it shares nothing."""

    def enter(self, row: NewRow) -> None:
        scope = row.content.draft_scope
        digest = blake2b(scope.encode(), digest_size=8, key=self._secret).digest()
        self._scopes[row.slot] = int.from_bytes(digest, "little") if scope else None

    def leave(self, slot: int) -> None:
        scope, self._scopes[slot] = self._scopes[slot], None
        first, end = int(self._history.num_prompt[slot]), int(self._history.num_known[slot])
        if scope is not None:
            self._outputs.add(scope, self._history.token_ids[slot, max(first, end - _MAX_OUTPUT) : end])

    def accept(self, slots: I64, counts: I64) -> None:
        """Take in some tokens of rows that have left."""
        self._outputs.take_in(_TOKENS_PER_STEP)

    def propose(self, slots: I64, limits: I64) -> Guesses:
        parts: list[list[int]] = []
        for slot, limit in zip(slots.tolist(), limits.tolist(), strict=True):
            scope, end = self._scopes[slot], int(self._history.num_known[slot])
            newest = self._history.token_ids[slot, max(end - _MAX_COMMON, 0) : end].tolist()
            parts.append([] if scope is None else self._outputs.guess(scope, newest, limit))
        return Guesses.of(parts)


@dataclass(slots=True)
class _Waiting:
    """An output that is taken in piece by piece."""

    scope: int
    tokens: U64
    """[num_tokens]"""
    num_taken: int = 0


class _Outputs:
    """The outputs of all scopes. An output is contiguous.

    A place counts the tokens that were ever written. It lies at `place % size` as long as it is among the last `size`.
    """

    def __init__(self, max_tokens: int) -> None:
        self._size = max_tokens
        self._tokens: NDArray[np.int32] = np.zeros(max_tokens, np.int32)
        self._keys: U64 = np.zeros(max_tokens, np.uint64)
        """[size] of the tokens before each place; only of places that follow so many tokens of their output."""
        self._before: I64 = np.zeros(max_tokens, np.int64)
        """[size] the place before it in its bucket, or `_NOWHERE`."""
        bits = max(max_tokens - 1, 1).bit_length()
        self._shift = 64 - bits
        self._heads: I64 = np.zeros(1 << bits, np.int64)
        """[num_buckets] the latest place of each bucket, 0: none."""
        self._end = max_tokens
        """The place that is written next. All places are above 0."""
        self._waiting: deque[_Waiting] = deque()
        self._num_waiting = 0
        """Tokens of these that are not taken in yet."""

    def add(self, scope: int, output: NDArray[np.int32]) -> None:
        """Copy an output, and take it in later. One that is too short or too long to be found is left out."""
        if not _KEY_TOKENS < output.size < self._size:
            return
        self._waiting.append(_Waiting(scope, output.astype(np.uint64)))
        self._num_waiting += output.size
        while self._num_waiting > _MAX_WAITING:
            oldest = self._waiting.popleft()
            self._num_waiting -= oldest.tokens.size - oldest.num_taken
            self._close()

    def take_in(self, limit: int) -> None:
        """Take in up to so many tokens of the outputs that wait."""
        while self._waiting and limit > 0:
            output = self._waiting[0]
            if not output.num_taken and self._end % self._size + output.tokens.size >= self._size:
                self._end += self._size - self._end % self._size  # it does not fit to the end
            count = min(limit, output.tokens.size - output.num_taken)
            self._write(output, count)
            limit -= count
            self._num_waiting -= count
            if output.num_taken == output.tokens.size:
                self._waiting.popleft()
                self._close()

    def _write(self, output: _Waiting, count: int) -> None:
        """Write the next tokens of an output."""
        first, start = self._end, self._end % self._size
        self._tokens[start : start + count] = output.tokens[output.num_taken : output.num_taken + count]
        num_short = min(
            max(_KEY_TOKENS - output.num_taken, 0), count
        )  # places with too few tokens before them
        behind = output.tokens[max(output.num_taken - _KEY_TOKENS, 0) : output.num_taken + count - 1]
        if behind.size >= _KEY_TOKENS:
            keys = _keys_of(behind) ^ np.uint64(output.scope)
            self._link(keys, np.arange(first + num_short, first + count))
        output.num_taken += count
        self._end += count

    def _link(self, keys: U64, places: I64) -> None:
        """Put places, in ascending order, in front of their buckets."""
        buckets = (keys * np.uint64(_MIX)) >> np.uint64(self._shift)
        order = np.argsort(buckets, kind="stable")
        sorted_buckets, sorted_places = buckets[order], places[order]
        before = np.empty_like(places)
        before[0], before[1:] = _NOWHERE, sorted_places[:-1]
        is_first = np.ones(places.size, np.bool_)
        np.not_equal(sorted_buckets[1:], sorted_buckets[:-1], out=is_first[1:])
        before[is_first] = self._heads[sorted_buckets[is_first]]
        start = int(places[0]) % self._size
        self._keys[start : start + places.size] = keys
        self._before[sorted_places % self._size] = before
        self._heads[buckets] = places  # of equal buckets the last place stays

    def _close(self) -> None:
        """End the output that was written last."""
        self._tokens[self._end % self._size] = _BORDER
        self._end += 1

    def guess(self, scope: int, newest: list[int], limit: int) -> list[int]:
        """Return up to `limit` tokens that may follow a row's newest ones."""
        if len(newest) < _KEY_TOKENS:
            return []
        one, two, three = newest[-_KEY_TOKENS:]
        key = (one << 2 * _TOKEN_BITS | two << _TOKEN_BITS | three) ^ scope
        place = int(self._heads[(key * _MIX & _MASK) >> self._shift])
        oldest = self._end - self._size
        best, best_common = _NOWHERE, 0
        for _ in range(_MAX_PLACES):
            if place < max(oldest, 1):
                break
            at = place % self._size
            if int(self._keys[at]) == key:
                text = self._tokens[max(at - _MAX_COMMON, 0) : at - _KEY_TOKENS].tolist()
                common = _KEY_TOKENS + common_end(newest[:-_KEY_TOKENS], text)
                if common > best_common:
                    best, best_common = place, common
                if common >= _MAX_COMMON:
                    break
            place = int(self._before[at])
        if best == _NOWHERE:
            return []
        count = min(limit, best_common * _TOKENS_PER_COMMON, self._end - best)
        follow: list[int] = self._tokens[best % self._size :][:count].tolist()
        return follow[: follow.index(_BORDER)] if _BORDER in follow else follow


def _keys_of(tokens: U64) -> U64:
    """Return each three tokens in a row as one number, [num_tokens - 2]."""
    bits = np.uint64(_TOKEN_BITS)
    return ((tokens[:-2] << bits | tokens[1:-1]) << bits) | tokens[2:]
