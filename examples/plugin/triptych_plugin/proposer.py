"""A guess of the tokens that come next: that the latest ones come again, as in tables, lists and loops."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from triptych.types.facts import WorkerFacts
from triptych.types.step import NewRow
from triptych_services.worker.runner.drafting.base import Guesses
from triptych_services.worker.sampling.params import TokenHistory

I64 = NDArray[np.int64]
LONGEST = 8


class Repeating:
    """Guesses that up to `LONGEST` tokens, which have come twice in a row, come once more.

    a b c x y x y          x y x y x … may follow
    """

    name = "repeating"

    def __init__(self, facts: WorkerFacts, history: TokenHistory) -> None:
        """
        Args:
            history: Tokens of the worker's rows, by slot. They are read, never written.
        """
        self._history = history

    def enter(self, row: NewRow) -> None:
        """Do nothing: all that is known of a row is in the history."""

    def leave(self, slot: int) -> None:
        """Do nothing, for the same reason."""

    def accept(self, slots: I64, counts: I64) -> None:
        """Do nothing, for the same reason."""

    def propose(self, slots: I64, limits: I64) -> Guesses:
        found: list[NDArray[np.int32]] = []
        for slot, limit in zip(slots.tolist(), limits.tolist(), strict=True):
            tokens = self._history.token_ids[slot, : self._history.num_known[slot]]
            found.append(_repeated(tokens)[:limit])
        return Guesses(np.concatenate(found), np.array([part.size for part in found]))


def _repeated(tokens: NDArray[np.int32]) -> NDArray[np.int32]:
    for period in range(1, LONGEST + 1):
        if tokens.size >= 2 * period and (tokens[-period:] == tokens[-2 * period : -period]).all():
            return np.tile(tokens[-period:], LONGEST)
    return tokens[:0]
