"""Guesses from what this worker has put out lately: what followed the last times that a row's newest tokens occurred.

Only outputs of the row's own scope are looked at, a digest of its tenant and its cache salt. So the
time of a step says nothing of the answers that others got.

    scope a    corpus [ output | output | … ]     every three tokens -> the places behind them, the latest first
    scope b    corpus [ output | … ]              the scope that was used least recently makes room

An output is taken in when its row leaves. Needs no torch.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from triptych.types.step import NewRow
from triptych_services.worker.runner.drafting.base import I64, Guesses
from triptych_services.worker.runner.drafting.ngram import common_end
from triptych_services.worker.sampling.params import TokenHistory

_KEY_TOKENS = 3  # fewer agree by chance between texts
_MAX_PLACES = 4
"""Places that are looked at for one guess, the latest first."""
_MAX_COMMON = 12
"""Tokens by which places are told apart; those behind a longer common end are as good."""
_TOKENS_PER_COMMON = 2
"""Guesses that a common end of one token is good for."""
_MAX_OUTPUT = 4096
"""Tokens of one output that are kept, the last ones: to take them in holds up a step."""
_BYTES_PER_TOKEN = 200
"""The most that a token of a corpus takes: an entry of a dict with its two numbers, and two entries of lists."""
_NOWHERE = -1
_BORDER = -1
"""Separates two outputs; it is no token."""
_Ids = NDArray[np.integer]


class SuffixProposer:
    """A `Proposer`."""

    name = "suffix"

    def __init__(self, max_num_seqs: int, max_bytes: int, *, history: TokenHistory) -> None:
        """
        Args:
            max_bytes: Bytes of all that is kept.
        """
        self._history = history
        self._max_tokens = max_bytes // _BYTES_PER_TOKEN
        self._corpora: OrderedDict[str, _Corpus] = OrderedDict()
        """Scope -> its outputs; the one used least recently first."""
        self._scopes = [""] * max_num_seqs
        """[max_num_seqs] scope of the slot's row; empty: it shares nothing."""

    def enter(self, row: NewRow) -> None:
        self._scopes[row.slot] = row.content.draft_scope

    def leave(self, slot: int) -> None:
        scope, self._scopes[slot] = self._scopes[slot], ""
        first, end = int(self._history.num_prompt[slot]), int(self._history.num_known[slot])
        output = self._history.token_ids[slot, max(first, end - _MAX_OUTPUT) : end]
        if scope and _KEY_TOKENS < output.size <= self._max_tokens:
            self._corpora.setdefault(scope, _Corpus()).add(output)
            self._corpora.move_to_end(scope)
            self._make_room()

    def accept(self, slots: I64, counts: I64) -> None:
        """Do nothing: an output is taken in as a whole."""

    def propose(self, slots: I64, limits: I64) -> Guesses:
        parts: list[list[int]] = []
        for slot, limit in zip(slots.tolist(), limits.tolist(), strict=True):
            corpus, end = self._corpora.get(self._scopes[slot]), int(self._history.num_known[slot])
            newest = self._history.token_ids[slot, max(end - _MAX_COMMON, 0) : end]
            parts.append(corpus.guess(newest.tolist(), limit) if corpus is not None else [])
        counts = np.array([len(part) for part in parts], np.int64)
        return Guesses(np.array([token_id for part in parts for token_id in part], np.int64), counts)

    def _make_room(self) -> None:
        """Forget what is oldest until all corpora are within their bytes."""
        num_tokens = sum(len(corpus) for corpus in self._corpora.values())
        while num_tokens > self._max_tokens:
            scope, oldest = next(iter(self._corpora.items()))
            num_tokens -= len(oldest)
            if len(self._corpora) > 1:
                del self._corpora[scope]
                continue
            oldest.forget_older_half()
            num_tokens += len(oldest)


class _Corpus:
    """The outputs of one scope, one behind the other. A place is the index of the token behind a key."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._before: list[int] = []
        """[len(tokens)] the place before it of the same key, or `_NOWHERE`."""
        self._latest: dict[int, int] = {}
        """Key -> its latest place."""

    def __len__(self) -> int:
        return len(self._tokens)

    def add(self, output: _Ids) -> None:
        """Append an output of more than `_KEY_TOKENS` tokens."""
        first = len(self._tokens)
        self._tokens += output.tolist()
        self._tokens.append(_BORDER)
        latest, before = self._latest, self._before
        before += [_NOWHERE] * _KEY_TOKENS
        for place, key in enumerate(_keys_of(output)[:-1].tolist(), first + _KEY_TOKENS):
            before.append(latest.get(key, _NOWHERE))
            latest[key] = place
        before.append(_NOWHERE)

    def forget_older_half(self) -> None:
        """Keep the outputs that begin in the newer half of the tokens."""
        half = len(self._tokens) // 2
        kept, self._tokens = self._tokens[half:], []
        self._before.clear()
        self._latest.clear()
        ends = [place for place, token_id in enumerate(kept) if token_id == _BORDER]
        for start, end in pairwise(ends):
            self.add(np.array(kept[start + 1 : end], np.int64))

    def guess(self, newest: list[int], limit: int) -> list[int]:
        """Return up to `limit` tokens that may follow a row's newest ones."""
        if len(newest) < _KEY_TOKENS:
            return []
        one, two, three = newest[-_KEY_TOKENS:]
        place = self._latest.get(_pack(one, two, three), _NOWHERE)
        best, best_common = place, 0
        for _ in range(_MAX_PLACES):
            if place == _NOWHERE:
                break
            common = _KEY_TOKENS + common_end(
                newest[:-_KEY_TOKENS], self._tokens[max(place - _MAX_COMMON, 0) : place - _KEY_TOKENS]
            )
            if common > best_common:
                best, best_common = place, common
            if common >= _MAX_COMMON:
                break
            place = self._before[place]
        if best == _NOWHERE:
            return []
        follow = self._tokens[best : best + min(limit, best_common * _TOKENS_PER_COMMON)]
        return follow[: follow.index(_BORDER)] if _BORDER in follow else follow


def _pack(one: int, two: int, three: int) -> int:
    """Return three ids, each below 2 ** 21, as one number."""
    return one << 42 | two << 21 | three


def _keys_of(output: _Ids) -> I64:
    """Return the key of each three tokens in a row, [num_tokens - 2]."""
    ids = output.astype(np.int64)
    return ids[:-2] << 42 | ids[1:-1] << 21 | ids[2:]
