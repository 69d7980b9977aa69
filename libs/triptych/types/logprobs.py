"""Log-probabilities of output tokens as clients see them: one position, and those of a run of tokens as columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

from triptych.types.step import F32


@dataclass(frozen=True, slots=True)
class Logprob:
    """One candidate for one position."""

    token_id: int
    logprob: float
    text: str = ""
    rank: int = 0
    """1 = best; 0 = not known."""
    token_bytes: bytes | None = None
    """The token's bytes where `text` does not hold them: a part of a character. None: those of `text`."""

    @classmethod
    def of_bytes(cls, token_id: int, logprob: float, token_bytes: bytes, rank: int) -> Logprob:
        """Return the entry of a token of these bytes."""
        try:
            return cls(token_id, logprob, token_bytes.decode(), rank)
        except UnicodeDecodeError:
            return cls(token_id, logprob, token_bytes.decode(errors="replace"), rank, token_bytes)

    @property
    def utf8(self) -> bytes:
        """The token's bytes: a part of a UTF-8 text."""
        return self.text.encode() if self.token_bytes is None else self.token_bytes

    @property
    def decoded_token(self) -> str:
        """`text`, under vLLM's name."""
        return self.text


@dataclass(frozen=True, slots=True)
class TokenLogprobs(Mapping[int, Logprob]):
    """The chosen token's log-probability and its best rivals', at one position: columns, the chosen one first.

    As in vLLM it is a mapping of token ids to entries, in this order: `for token_id, entry in row.items()`.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    token_bytes: Sequence[bytes]
    """Parts of a UTF-8 text; empty where they are not known."""
    ranks: Sequence[int]
    """1 = best; 0 = not known."""

    @classmethod
    def of(cls, chosen: Logprob, top: Sequence[Logprob] = ()) -> TokenLogprobs:
        """Return the columns of these candidates."""
        entries = (chosen, *top)
        return cls(
            [entry.token_id for entry in entries],
            [entry.logprob for entry in entries],
            [entry.utf8 for entry in entries],
            [entry.rank for entry in entries],
        )

    @property
    def chosen(self) -> Logprob:
        return self._entry(0)

    @property
    def top(self) -> tuple[Logprob, ...]:
        return tuple(map(self._entry, range(1, len(self.token_ids))))

    def __getitem__(self, token_id: int) -> Logprob:
        try:
            return self._entry(self.token_ids.index(token_id))
        except ValueError:
            raise KeyError(token_id) from None

    def __iter__(self) -> Iterator[int]:
        return iter(dict.fromkeys(self.token_ids))  # the chosen one may be among the best as well

    def __len__(self) -> int:
        return len(set(self.token_ids))

    def _entry(self, place: int) -> Logprob:
        return Logprob.of_bytes(
            self.token_ids[place], self.logprobs[place], self.token_bytes[place], self.ranks[place]
        )


class LogprobRows(Sequence[TokenLogprobs]):
    """Log-probabilities of consecutive tokens of one choice, kept as columns. All have as many candidates.

    A position becomes a `TokenLogprobs` when it is looked at, so what is only sent on costs no object per token.
    """

    __slots__ = ("_token_bytes", "is_named", "logprobs", "num_candidates", "ranks", "token_ids")

    def __init__(
        self,
        num_candidates: int,
        token_ids: list[int],
        logprobs: F32,
        ranks: list[int],
        token_bytes: Callable[[int], bytes] | Sequence[bytes],
        *,
        is_named: bool = False,
    ) -> None:
        """
        Args:
            num_candidates: Of each token: itself, then the best ones in falling order, or those named.
            token_ids: [len(ranks) * num_candidates]
            logprobs: [len(ranks) * num_candidates]
            ranks: Of each token among all, 1 = best.
            token_bytes: See `Tokenizer.token_bytes`; or the bytes of each of `token_ids`.
            is_named: The request has named the candidates, so that their ranks are not known.
        """
        self.num_candidates = num_candidates
        self.token_ids = token_ids
        self.logprobs = logprobs
        self.ranks = ranks
        self.is_named = is_named
        self._token_bytes = token_bytes

    @classmethod
    def of(cls, rows: Sequence[TokenLogprobs]) -> LogprobRows:
        """Return the columns of at least one position; of columns, themselves."""
        if isinstance(rows, cls):
            return rows
        return cls(
            len(rows[0].token_ids),
            [token_id for row in rows for token_id in row.token_ids],
            np.array([logprob for row in rows for logprob in row.logprobs], np.float32),
            [row.ranks[0] for row in rows],
            [token_bytes for row in rows for token_bytes in row.token_bytes],
            is_named=len(rows[0].ranks) > 1 and not rows[0].ranks[1],
        )

    @classmethod
    def joined(cls, parts: Sequence[LogprobRows]) -> LogprobRows:
        """Return the columns of at least one part, all of one choice."""
        first = parts[0]
        if len(parts) == 1:
            return first
        return cls(
            first.num_candidates,
            [token_id for part in parts for token_id in part.token_ids],
            np.concatenate([part.logprobs for part in parts]),
            [rank for part in parts for rank in part.ranks],
            first._token_bytes
            if callable(first._token_bytes)
            else [token_bytes for part in parts for token_bytes in part.token_bytes],
            is_named=first.is_named,
        )

    @property
    def token_bytes(self) -> Sequence[bytes]:
        """[len(token_ids)] parts of UTF-8 texts."""
        if callable(self._token_bytes):
            return list(map(self._token_bytes, self.token_ids))
        return self._token_bytes

    def __len__(self) -> int:
        return len(self.ranks)

    @overload
    def __getitem__(self, at: int) -> TokenLogprobs: ...
    @overload
    def __getitem__(self, at: slice) -> LogprobRows: ...
    def __getitem__(self, at: int | slice) -> TokenLogprobs | LogprobRows:
        """Return one position, or the columns of consecutive ones."""
        if isinstance(at, slice):
            start, stop, _ = at.indices(len(self.ranks))
            return self._part(start, max(start, stop))
        row = range(len(self.ranks))[at]
        part = self._part(row, row + 1)
        others = [0] * (self.num_candidates - 1) if self.is_named else range(1, self.num_candidates)
        return TokenLogprobs(part.token_ids, part.logprobs.tolist(), part.token_bytes, [*part.ranks, *others])

    def _part(self, start: int, end: int) -> LogprobRows:
        entries = slice(start * self.num_candidates, end * self.num_candidates)
        return LogprobRows(
            self.num_candidates,
            self.token_ids[entries],
            self.logprobs[entries],
            self.ranks[start:end],
            self._token_bytes if callable(self._token_bytes) else self._token_bytes[entries],
            is_named=self.is_named,
        )
