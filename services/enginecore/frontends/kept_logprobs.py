"""The log-probabilities of streams that may continue at another frontend, by choice, in a bounded number of bytes."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np

from triptych.errors import NotKept
from triptych.types.step import U32, LogprobColumns
from triptych_services.enginecore.scheduler.running_rows import Ints

MAX_BYTES = 64 << 20
"""Limit of the log-probabilities that are remembered, over all choices."""
_LOG_BYTES = 512  # of a choice without tokens, with its objects
_TOKEN_BYTES = 8  # of a token without candidates
Key = tuple[int, int]
"""Session and number that a choice was submitted under."""


class KeptLogprobs:
    """Owned by the kept requests. Where they are too many, the choice that has most loses its older half.

    Steps come as columns; only the rows of choices that were added are taken out of them.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._logs: dict[Key, _ChoiceLog] = {}
        self._num_bytes = 0

    def __bool__(self) -> bool:
        """Return whether the log-probabilities of some choice are wanted."""
        return bool(self._logs)

    @property
    def num_bytes(self) -> int:
        """Bytes that are held, objects included. Arrays allocate up to an eighth more than they hold."""
        return self._num_bytes * 9 // 8

    def add(self, keys: Iterable[Key]) -> None:
        """Begin to remember choices, named as they were submitted."""
        for key in keys:
            self._logs[key] = _ChoiceLog()
            self._num_bytes += _LOG_BYTES

    def forget(self, keys: Iterable[Key]) -> None:
        """Drop what is remembered of choices. It is no error if they were not added."""
        for key in keys:
            if (log := self._logs.pop(key, None)) is not None:
                self._num_bytes -= log.num_bytes

    def note_step(self, sessions: Ints, numbers: U32, token_counts: U32, logprobs: LogprobColumns) -> None:
        """Remember the log-probabilities of a step.

        Args:
            sessions: [r] sessions of submission.
            numbers: [r] numbers of submission.
            token_counts: [r] tokens of each; empty means one each.
            logprobs: Rows are indices of these tokens.
        """
        owners: Ints = logprobs.rows.astype(np.int64)  # [entries] places in `numbers`
        if len(token_counts):
            owners = np.repeat(np.arange(len(numbers)), token_counts)[owners]
        token_ids, values = logprobs.token_ids.tobytes(), logprobs.logprobs.tobytes()
        ranks, offsets = logprobs.ranks.tolist(), logprobs.offsets.tolist()
        keys = zip(sessions[owners].tolist(), numbers[owners].tolist(), strict=True)
        for place, key in enumerate(keys):
            if (log := self._logs.get(key)) is not None:
                start, end = 4 * offsets[place], 4 * offsets[place + 1]
                log.append(token_ids[start:end], values[start:end], ranks[place])
                self._num_bytes += 2 * (end - start) + _TOKEN_BYTES
        while self.num_bytes > self._max_bytes and self._halve_largest():
            pass

    def last_of(self, key: Key, count: int) -> list[LogprobColumns]:
        """Return the log-probabilities of a choice's last tokens, one entry for each token.

        Raises:
            NotKept: They were too many to be remembered.
        """
        log = self._logs.get(key)
        if count and (log is None or len(log.ranks) < count):
            raise NotKept("the log-probabilities of this stream were too many to be kept")
        return [] if log is None else log.last(count)

    def _halve_largest(self) -> bool:
        """Drop the older half of what the choice with most has. Return whether there was anything to drop."""
        largest = max(self._logs.values(), key=lambda log: log.num_bytes, default=None)
        if largest is None or not len(largest.ranks):
            return False
        self._num_bytes -= largest.num_bytes
        largest.drop_first((len(largest.ranks) + 1) // 2)
        self._num_bytes += largest.num_bytes
        return True


class _ChoiceLog:
    """The log-probabilities of one choice's latest tokens, as flat columns."""

    __slots__ = ("counts", "ranks", "token_ids", "values")

    def __init__(self) -> None:
        self.counts = array("I")
        """[t] candidates of each token."""
        self.ranks = array("I")
        """[t] rank of each token."""
        self.token_ids = bytearray()
        """[sum(counts)] u32 candidates of one token after the other."""
        self.values = bytearray()
        """[sum(counts)] f32 log-probabilities of the same."""

    @property
    def num_bytes(self) -> int:
        return _LOG_BYTES + 2 * len(self.token_ids) + _TOKEN_BYTES * len(self.ranks)

    def append(self, token_ids: bytes, values: bytes, rank: int) -> None:
        """Add one token."""
        self.counts.append(len(token_ids) // 4)
        self.ranks.append(rank)
        self.token_ids += token_ids
        self.values += values

    def drop_first(self, num_tokens: int) -> None:
        """Forget the oldest tokens."""
        num_bytes = 4 * sum(self.counts[:num_tokens])
        del self.counts[:num_tokens], self.ranks[:num_tokens]
        del self.token_ids[:num_bytes], self.values[:num_bytes]

    def last(self, num_tokens: int) -> list[LogprobColumns]:
        """Return an entry for each of the latest tokens."""
        first = len(self.ranks) - num_tokens
        start = sum(self.counts[:first])
        token_ids, values = (
            np.frombuffer(bytes(self.token_ids), "<u4"),
            np.frombuffer(bytes(self.values), "<f4"),
        )
        entries = []
        for count, rank in zip(self.counts[first:], self.ranks[first:], strict=True):
            entries.append(
                LogprobColumns(
                    rows=np.zeros(1, np.uint32),
                    offsets=np.array([0, count], np.uint32),
                    token_ids=token_ids[start : start + count],
                    logprobs=values[start : start + count],
                    ranks=np.array([rank], np.uint32),
                )
            )
            start += count
        return entries
