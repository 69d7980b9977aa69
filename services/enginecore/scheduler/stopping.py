"""When a token ends its request; the engine alone decides this."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from services.enginecore.request import Request
from triptych.types.outputs import FinishReason
from triptych.types.step import U32

_NO_TOKEN = 0xFFFFFFFF  # no vocabulary reaches it; keeps the table from being empty


def stop_of(
    request: Request, token_id: int, num_known: int, eos_token_ids: Sequence[int]
) -> tuple[FinishReason, int | None] | None:
    """Why the token at position `num_known - 1` ends its request, and the stop id that did; None: it goes on.

    Order: min_tokens guard, EOS, stop_token_ids, length. The guard shields from token ids alone: the
    length limit always holds. The first of `eos_token_ids` is the tokenizer's own; another one that the model names is
    reported like a stop id.
    """
    sampling = request.sampling
    if num_known - request.num_prompt_tokens >= sampling.min_tokens:
        if token_id in eos_token_ids and not sampling.ignore_eos:
            return FinishReason.STOP, token_id if token_id != eos_token_ids[0] else None
        if token_id in sampling.stop_token_ids:
            return FinishReason.STOP, token_id
    if num_known >= request.limit:
        return FinishReason.LENGTH, None
    return None


class WatchedTokens:
    """Every id that may end some running request, so that one look finds the few tokens worth a question.

    Changes when requests with stop ids of their own come and go; a step costs one binary search per
    token, however many ids are watched.
    """

    def __init__(self, eos_token_ids: Iterable[int]) -> None:
        self._watchers = Counter(eos_token_ids)
        self._watchers[_NO_TOKEN] = 1
        self._sort()

    def add(self, token_ids: Iterable[int]) -> None:
        """Watch a request's own stop ids."""
        before = len(self._watchers)
        self._watchers.update(token_ids)
        if len(self._watchers) != before:
            self._sort()

    def discard(self, token_ids: Iterable[int]) -> None:
        """No longer on behalf of this request."""
        before = len(self._watchers)
        for token_id in token_ids:
            self._watchers[token_id] -= 1
            if not self._watchers[token_id]:
                del self._watchers[token_id]
        if len(self._watchers) != before:
            self._sort()

    def among(self, token_ids: U32) -> NDArray[np.bool_]:
        """[len(token_ids)] which of them are watched."""
        places = self._sorted.searchsorted(token_ids)
        return self._sorted.take(places, mode="clip") == token_ids

    def _sort(self) -> None:
        self._sorted: U32 = np.sort(np.fromiter(self._watchers, np.uint32, len(self._watchers)))
