"""Which tokens a penalized request has seen and said, kept up to date as it grows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

I64 = NDArray[np.int64]

_FIRST_CAPACITY = 64  # distinct tokens; doubles when full


class TokenCounts:
    """The distinct tokens of one sequence, and how often each stands in its output.

    Counting anew in every step would cost a sort of the whole sequence; this costs one look-up per new token.
    """

    def __init__(self) -> None:
        self._token_ids = np.empty(_FIRST_CAPACITY, np.int64)
        self._output_counts = np.zeros(_FIRST_CAPACITY, np.int64)
        self._place_of: dict[int, int] = {}
        self._num_counted = 0

    @property
    def token_ids(self) -> I64:
        """[distinct], in order of first appearance; a view, valid until the next `count`."""
        return self._token_ids[: len(self._place_of)]

    @property
    def output_counts(self) -> I64:
        """[distinct], parallel to `token_ids`; 0: in the prompt alone."""
        return self._output_counts[: len(self._place_of)]

    def count(self, sequence: NDArray[np.integer], num_prompt: int) -> None:
        """Count what came to `sequence`, [num_known] prompt and output, since the last call."""
        for position, token_id in enumerate(sequence[self._num_counted :].tolist(), self._num_counted):
            place = self._place_of.setdefault(token_id, len(self._place_of))
            if place == self._token_ids.size:
                self._token_ids = np.concatenate((self._token_ids, np.empty_like(self._token_ids)))
                self._output_counts = np.concatenate(
                    (self._output_counts, np.zeros_like(self._output_counts))
                )
            self._token_ids[place] = token_id
            self._output_counts[place] += position >= num_prompt
        self._num_counted = sequence.size
