"""Log-probabilities of one output batch, row by row, with their tokens' text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from triptych.types.outputs import Logprob, TokenLogprobs
from triptych.types.step import LogprobColumns


class BatchLogprobs:
    """The columns of one batch as Python lists; one per batch, shared by its requests, read only."""

    def __init__(self, columns: LogprobColumns) -> None:
        self._row_to_entry = {row: entry for entry, row in enumerate(columns.rows.tolist())}
        self._offsets: list[int] = columns.offsets.tolist()
        self._token_ids: list[int] = columns.token_ids.tolist()
        self._logprobs: list[float] = columns.logprobs.tolist()
        self._ranks: list[int] = columns.ranks.tolist()

    def at(self, row: int, token_bytes: Callable[[int], bytes]) -> TokenLogprobs:
        """The entry of the batch's token number `row`.

        Raises:
            KeyError: the engine sent none for this token.
        """
        entry = self._row_to_entry[row]
        start, end = self._offsets[entry], self._offsets[entry + 1]
        candidates = [
            Logprob.of_bytes(token_id, logprob, token_bytes(token_id), rank)
            for rank, (token_id, logprob) in enumerate(
                zip(self._token_ids[start:end], self._logprobs[start:end], strict=True)
            )
        ]
        chosen, *top = candidates  # the chosen token comes first, then the best ones, ranked from 1
        return TokenLogprobs(replace(chosen, rank=self._ranks[entry]), tuple(top))
