"""Log-probabilities with the text of their tokens: those of a batch, and those of a prompt for the client."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

import numpy as np

from triptych.types.events import PromptLogprobsEvent
from triptych.types.logprobs import LogprobRows
from triptych.types.step import U32, LogprobColumns, PromptLogprobs

MAX_CANDIDATES = 4096
"""In one event: it takes some 60 kB of a message, and a loop that serves others some milliseconds."""


class PromptReport:
    """One prompt's log-probabilities. Owned by the outputs of its request."""

    def __init__(self, prompt_token_ids: U32, num_top: int, token_bytes: Callable[[int], bytes]) -> None:
        """
        Args:
            num_top: Alternatives per position.
            token_bytes: See `Tokenizer.token_bytes`.
        """
        self._token_bytes = token_bytes
        self._first_token_bytes = token_bytes(int(prompt_token_ids[0]))
        self._num_tokens = len(prompt_token_ids)
        self._next_position = 1
        self._parts: deque[PromptLogprobs] = deque()
        self._is_closed = False
        self.may_repeat = False
        """Another engine has begun the prompt anew: what has come before is dropped."""
        if self.is_complete:  # a part says so all the same
            shape = 0, 1 + num_top
            nothing = np.zeros(shape, np.uint32), np.zeros(shape, np.float32), np.zeros(0, np.uint32)
            self._parts.append(PromptLogprobs(1, *nothing))

    @property
    def is_complete(self) -> bool:
        """Whether all parts have come, or no more will."""
        return self._is_closed or self._next_position == self._num_tokens

    def add(self, part: PromptLogprobs) -> None:
        """Take in the next part.

        Raises:
            LookupError: It is another part than the next.
        """
        if self.may_repeat and part.first_position < self._next_position:
            part = _without(part, self._next_position - part.first_position)
            if not len(part.ranks):
                return
        if part.first_position != self._next_position or part.end > self._num_tokens:
            raise LookupError(
                f"the engine sent log-probabilities of prompt positions {part.first_position} to {part.end - 1}; "
                f"{self._next_position} was due, of {self._num_tokens}"
            )
        self._next_position = part.end
        self._parts.extend(_split(part))

    def close(self, *, is_computed: bool) -> None:
        """No more parts will come.

        Raises:
            LookupError: The prompt was computed, but the engine has not sent all of it.
        """
        if is_computed and not self.is_complete:
            missing = self._num_tokens - self._next_position
            raise LookupError(
                f"the engine sent no log-probabilities for the last {missing} tokens of the prompt"
            )
        self._is_closed = True

    def take(self) -> PromptLogprobsEvent | None:
        """Return the next part for the client, or None if it has come no further."""
        if not self._parts:
            return None
        part = self._parts.popleft()
        token_bytes = list(map(self._token_bytes, part.token_ids.ravel().tolist()))
        first_token_bytes = self._first_token_bytes if part.first_position == 1 else b""
        return PromptLogprobsEvent(part, token_bytes, first_token_bytes)


def _without(part: PromptLogprobs, num_positions: int) -> PromptLogprobs:
    """Return a part without its first positions."""
    return PromptLogprobs(
        part.first_position + num_positions,
        part.token_ids[num_positions:],
        part.logprobs[num_positions:],
        part.ranks[num_positions:],
    )


def _split(part: PromptLogprobs) -> Iterator[PromptLogprobs]:
    """Parts of at most `MAX_CANDIDATES`; views."""
    num_positions = max(1, MAX_CANDIDATES // part.token_ids.shape[1])
    for start in range(0, len(part.ranks), num_positions):
        rows = slice(start, start + num_positions)
        yield PromptLogprobs(
            part.first_position + start, part.token_ids[rows], part.logprobs[rows], part.ranks[rows]
        )


class BatchLogprobs:
    """The columns of one batch; one per batch, shared by its requests, read only."""

    def __init__(self, columns: LogprobColumns) -> None:
        self._row_to_entry = {row: entry for entry, row in enumerate(columns.rows.tolist())}
        self._offsets: list[int] = columns.offsets.tolist()
        self._token_ids: list[int] = columns.token_ids.tolist()
        self._logprobs = columns.logprobs
        self._ranks: list[int] = columns.ranks.tolist()

    def rows(
        self, first: int, count: int, token_bytes: Callable[[int], bytes], *, is_named: bool = False
    ) -> LogprobRows:
        """Return the columns of `count` of the batch's tokens, at least one, from number `first` on.

        Args:
            is_named: The request has named the candidates, so that their ranks are not known.

        Raises:
            LookupError: The engine sent none for one of these tokens, or not as many for each.
        """
        entry = self._row_to_entry[first]
        end = self._row_to_entry[first + count - 1] + 1
        start, stop = self._offsets[entry], self._offsets[end]
        num_candidates = self._offsets[entry + 1] - start
        if end - entry != count or stop - start != count * num_candidates:
            raise LookupError(
                f"the engine sent {stop - start} log-probabilities for {count} tokens, of which the first has "
                f"{num_candidates}"
            )
        return LogprobRows(  # the chosen token comes first, then the best ones, ranked from 1, or those named
            num_candidates,
            self._token_ids[start:stop],
            self._logprobs[start:stop],
            self._ranks[entry:end],
            token_bytes,
            is_named=is_named,
        )
