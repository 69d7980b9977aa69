"""The outputs of each frontend session, gathered as columns between two sends and sent as one batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from triptych.errors import InvalidRequest, QueueFull, TriptychError
from triptych.types.outputs import (
    CacheNews,
    FinishedRequest,
    OutputBatch,
    RequestFailure,
    RequestPromptLogprobs,
)
from triptych.types.step import F32, U32, LogprobColumns, RequestGuesses, StepResult, empty_u32
from triptych.types.submit import SubmitRequest
from triptych_services.enginecore.frontends.kept_requests import ChoiceKey, KeptRequest, KeptRequests
from triptych_services.enginecore.frontends.routing_updates import RoutingUpdate
from triptych_services.enginecore.request import Request
from triptych_services.enginecore.scheduler.step_results import Failed, Finished, StepOutput

MAX_STEPS_TOGETHER = 16
"""Steps for which tokens wait that no client reads yet. A message costs both sides as much as a step's plan."""
_HASHES_TOGETHER = 1 << 13  # in one message: 128 KiB, which a frontend takes in within 4 ms
_MAX_TOGETHER_BYTES = 1 << 20  # of log-probabilities: a message stays far below its limit


@dataclass(slots=True)
class _Gathered:
    """The outputs of one session since its last batch."""

    num_batches: int = 0
    is_full: bool = False
    """The last batch said that the queue has no room."""
    streaming: set[int] = field(default_factory=set)
    """Numbers of the requests with tokens that a client reads as they come. Kept over batches."""
    admitted: list[int] = field(default_factory=list)
    is_awaited: bool = False
    """A client reads an answer of the admitted as it comes. Otherwise they wait for other outputs."""
    numbers: list[U32] = field(default_factory=list)
    """For each step, the requests with new tokens."""
    token_counts: list[U32] = field(default_factory=list)
    """For each step, the tokens of each request; empty means one each."""
    token_ids: list[U32] = field(default_factory=list)
    """For each step, the tokens."""
    logprobs: list[LogprobColumns] = field(default_factory=list)
    prompt_logprobs: list[RequestPromptLogprobs] = field(default_factory=list)
    vectors: dict[int, F32] = field(default_factory=dict)
    """Number of each pooled request -> its vectors. Their ends make the batch due."""
    num_tokens: int = 0
    num_logprob_bytes: int = 0
    finished: list[FinishedRequest] = field(default_factory=list)
    failures: list[RequestFailure] = field(default_factory=list)
    released: list[int] = field(default_factory=list)
    first_numbers: list[int] = field(default_factory=list)
    first_cached_tokens: list[int] = field(default_factory=list)
    """This and the one before: as in `OutputBatch`."""
    guesses: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Number of each request that had some -> its accepted and rejected ones so far."""
    attached: list[SubmitRequest] = field(default_factory=list)

    @property
    def is_due(self) -> bool:
        if self.is_awaited or self.finished or self.failures or self.prompt_logprobs:
            return True
        if self.released or self.attached:
            return True
        if self.num_tokens and self.streaming:
            return True
        return len(self.numbers) >= MAX_STEPS_TOGETHER or self.num_logprob_bytes >= _MAX_TOGETHER_BYTES

    def add(self, numbers: U32, token_counts: U32, token_ids: U32, logprobs: LogprobColumns | None) -> None:
        """Add the tokens of a step, with their log-probabilities by their place among all that are gathered."""
        if logprobs is not None:
            self.logprobs.append(logprobs)
            self.num_logprob_bytes += logprobs.nbytes
        self.numbers.append(numbers)
        self.token_counts.append(token_counts)
        self.token_ids.append(token_ids)
        self.num_tokens += len(token_ids)


class SessionOutputs:
    """Gathers outputs by session. `FrontendRequests` owns it. Outputs for a session that has closed are dropped."""

    def __init__(self, kept: KeptRequests) -> None:
        """`kept`: Knows which session reads a request that has moved from the one that it was submitted on."""
        self._kept = kept
        self._gathered: dict[int, _Gathered] = {}

    def __len__(self) -> int:
        """Return how many sessions are open."""
        return len(self._gathered)

    def open(self, session: int, cached: Sequence[bytes] = ()) -> list[OutputBatch]:
        """Begin to gather for a session, and return its first batches.

        Args:
            cached: Hashes of the blocks that are cached, all of which these batches report.
        """
        batches = [
            OutputBatch(number, cache=CacheNews(stored=b"".join(cached[first : first + _HASHES_TOGETHER])))
            for number, first in enumerate(range(0, len(cached), _HASHES_TOGETHER), start=1)
        ]
        self._gathered[session] = _Gathered(num_batches=len(batches))
        return batches

    def is_open(self, session: int) -> bool:
        return session in self._gathered

    def are_due(self) -> bool:
        """Return whether `take` has something to return now, without an update."""
        return any(gathered.is_due for gathered in self._gathered.values())

    def close(self, session: int) -> None:
        self._gathered.pop(session, None)

    def admit(self, session: int, numbers: Sequence[int], *, whole_output: bool = False) -> None:
        """Note that the choices of one request are queued.

        Args:
            whole_output: As in `SubmitRequest`. Nothing of the answer is read before its end, so the frontend hears of
                it with the next outputs or the next update: while a worker on the host computes, a message would take
                its cores.
        """
        if (gathered := self._gathered.get(session)) is not None:
            gathered.admitted += numbers
            if not whole_output:
                gathered.is_awaited = True
                gathered.streaming.update(numbers)

    def refuse(self, session: int, number: int, error: TriptychError) -> None:
        """Report that a choice is not queued, or not read here any more, under the number that it has here."""
        self._report(ChoiceKey(session, number), _failure(number, error))

    def fail(self, end: Failed) -> None:
        request = end.request
        failure = _failure(request.number, end.error)
        self._kept.note_end(request, failure)
        self._report_end(ChoiceKey(request.session, request.number), failure)

    def finish(self, end: Finished) -> None:
        request = end.request
        finish = FinishedRequest(
            request.number, end.reason, end.stop_token_id, request.num_cached_tokens or 0, request.timings
        )
        self._kept.note_end(request, finish)
        self._report_end(ChoiceKey(request.session, request.number), finish)

    def attach(
        self,
        kept: KeptRequest,
        attached: SubmitRequest,
        unseen: Sequence[U32],
        logprobs: Sequence[Sequence[LogprobColumns]],
    ) -> None:
        """Report a request to the session that reads it from now on.

        Args:
            kept: The request.
            attached: As the session gets it.
            unseen: [num_choices] the output tokens of each choice that are not in `attached`.
            logprobs: [num_choices] an entry for each of these tokens; empty if it has none.
        """
        gathered = self._gathered[kept.reader]
        gathered.attached.append(attached)
        gathered.admitted += kept.numbers
        if not attached.whole_output:
            gathered.streaming.update(kept.numbers)
        for number, token_ids, entries in zip(kept.numbers, unseen, logprobs, strict=True):
            if len(token_ids):
                columns = _join_logprobs(entries)
                if columns is not None:
                    rows = np.arange(gathered.num_tokens, gathered.num_tokens + len(token_ids))
                    columns = replace(columns, rows=rows.astype(np.uint32))
                counts = np.array([len(token_ids)], np.uint32)
                gathered.add(np.array([number], np.uint32), counts, token_ids, columns)
        for key in kept.keys:
            if (end := kept.ends.get(key.number)) is not None:
                self._report_end(key, end.outcome)

    def release(self, session: int, number: int) -> None:
        """Offer a request to its frontend, which may move it. It continues here until then."""
        reader = self._kept.reader_of(ChoiceKey(session, number))
        if reader is not None and (gathered := self._gathered.get(reader.session)) is not None:
            gathered.released.append(reader.number)

    def add_step(self, output: StepOutput, result: StepResult) -> None:
        """Add one step's tokens, and log-probabilities of prompts, to the sessions that they belong to."""
        for request, part in output.prompt_logprobs:
            if (gathered := self._gathered.get(request.session)) is not None:
                gathered.prompt_logprobs.append(RequestPromptLogprobs(request.number, part))
        for request, vectors in output.vectors:
            if (gathered := self._gathered.get(request.session)) is not None:
                gathered.vectors[request.number] = vectors
        if not len(output.sessions):
            return
        for request in output.first:
            self._note_first(request)
        for request in output.guessed:
            reader = self._kept.reader_of(ChoiceKey(request.session, request.number))
            if reader is not None and (gathered := self._gathered.get(reader.session)) is not None:
                gathered.guesses[reader.number] = request.num_accepted_guesses, request.num_rejected_guesses
        if result.logprobs is not None and self._kept.logprobs:
            chosen = _select_logprobs(result.logprobs, output.rows, 0)
            if chosen is not None:
                logs = self._kept.logprobs
                logs.note_step(output.sessions, output.numbers, output.token_counts, chosen)
        sessions, numbers = self._kept.to_readers(output.sessions, output.numbers)
        if numbers is not output.numbers:
            output = replace(output, sessions=sessions, numbers=numbers)
        first = int(sessions[0])
        if (sessions == first).all():  # one frontend: nothing to sort out
            self._add_tokens(first, output, result, None)
            return
        for session in np.unique(sessions).tolist():
            self._add_tokens(session, output, result, sessions == session)

    def take(self, num_free_places: int, update: RoutingUpdate | None = None) -> dict[int, OutputBatch]:
        """Return the next batch of each session for which one is due.

        Args:
            num_free_places: Choices that the queue has room for now.
            update: Load and cache changes, to be sent to all sessions now; None: nothing.
        """
        batches = {}
        for session, gathered in self._gathered.items():
            if gathered.is_due or update is not None or (gathered.is_full and num_free_places):
                batches[session] = _to_batch(gathered, num_free_places, update)
                self._gathered[session] = _Gathered(
                    gathered.num_batches + 1, is_full=not num_free_places, streaming=gathered.streaming
                )
        return batches

    def _add_tokens(
        self, session: int, output: StepOutput, result: StepResult, is_own: np.ndarray | None
    ) -> None:
        """Add tokens to a session's next batch.

        Args:
            is_own: [len(output.numbers)] whether each request is of the session; None: all are.
        """
        gathered = self._gathered.get(session)
        if gathered is None:
            return
        numbers, token_counts = output.numbers, output.token_counts
        token_ids, rows = output.token_ids, output.rows
        if is_own is not None:
            is_own_token = np.repeat(is_own, token_counts) if len(token_counts) else is_own
            numbers, token_ids, rows = numbers[is_own], token_ids[is_own_token], rows[is_own_token]
            token_counts = token_counts[is_own] if len(token_counts) else token_counts
        chosen = None
        if result.logprobs is not None:
            chosen = _select_logprobs(result.logprobs, rows, gathered.num_tokens)
        gathered.add(numbers, token_counts, token_ids, chosen)

    def _note_first(self, request: Request) -> None:
        """Tell the reader of a request, with its first token, what of its prompt was cached."""
        reader = self._kept.reader_of(ChoiceKey(request.session, request.number))
        if reader is not None and (gathered := self._gathered.get(reader.session)) is not None:
            assert request.num_cached_tokens is not None, "a request has a token that was not admitted"
            gathered.first_numbers.append(reader.number)
            gathered.first_cached_tokens.append(request.num_cached_tokens)

    def _report_end(self, key: ChoiceKey, outcome: FinishedRequest | RequestFailure) -> None:
        """Report the end of a choice to the session that reads it.

        Args:
            key: The name that it was submitted under.
        """
        reader = self._kept.reader_of(key)
        if self._kept.of(key) is None:
            self._kept.forget_choice(key)
        if reader is not None:
            self._report(reader, outcome if reader == key else replace(outcome, number=reader.number))

    def _report(self, reader: ChoiceKey, outcome: FinishedRequest | RequestFailure) -> None:
        gathered = self._gathered.get(reader.session)
        if gathered is None:
            return
        if isinstance(outcome, RequestFailure):
            gathered.failures.append(outcome)
        else:
            gathered.finished.append(outcome)
        gathered.streaming.discard(reader.number)


def _to_batch(gathered: _Gathered, num_free_places: int, update: RoutingUpdate | None) -> OutputBatch:
    """Return the batch of what was gathered.

    The tokens that a request got in several steps are put together. With log-probabilities they are not, since those
    name tokens by their place; a request then occurs once for each step.
    """
    numbers, token_ids = _joined(gathered.numbers), _joined(gathered.token_ids)
    token_counts = _join_counts(gathered)
    if len(gathered.numbers) > 1 and not gathered.logprobs:
        owners = np.repeat(numbers, token_counts) if len(token_counts) else numbers
        order = np.argsort(owners, kind="stable")
        token_ids = token_ids[order]
        numbers, repeats = np.unique(owners, return_counts=True)
        token_counts = repeats.astype(np.uint32)
    return OutputBatch(
        batch_id=gathered.num_batches + 1,
        admitted=np.array(gathered.admitted, dtype=np.uint32),
        numbers=numbers,
        token_counts=token_counts,
        token_ids=token_ids,
        logprobs=_join_logprobs(gathered.logprobs),
        prompt_logprobs=tuple(gathered.prompt_logprobs),
        vectors=gathered.vectors,
        finished=tuple(gathered.finished),
        failures=tuple(gathered.failures),
        attached=tuple(gathered.attached),
        num_free_places=num_free_places,
        released=np.array(gathered.released, dtype=np.uint32),
        first_numbers=np.array(gathered.first_numbers, dtype=np.uint32),
        first_cached_tokens=np.array(gathered.first_cached_tokens, dtype=np.uint32),
        guesses=RequestGuesses.of(gathered.guesses) if gathered.guesses else None,
        cache=update.cache if update is not None else None,
        load=update.load if update is not None else None,
    )


def _joined(columns: list[U32]) -> U32:
    if len(columns) == 1:
        return columns[0]
    return np.concatenate(columns) if columns else np.empty(0, dtype=np.uint32)


def _join_counts(gathered: _Gathered) -> U32:
    """Return the tokens of each request of each step, one after the other; empty means one each."""
    if not any(map(len, gathered.token_counts)):
        return empty_u32()
    return np.concatenate(
        [
            counts if len(counts) else np.ones(len(numbers), np.uint32)
            for numbers, counts in zip(gathered.numbers, gathered.token_counts, strict=True)
        ]
    )


def _select_logprobs(columns: LogprobColumns, rows: np.ndarray, first_row: int) -> LogprobColumns | None:
    """Return the entries of the result's `rows`, renumbered to `first_row` plus their place in `rows`."""
    order = np.argsort(rows, kind="stable")
    sorted_rows = rows[order]
    places = np.minimum(sorted_rows.searchsorted(columns.rows), len(rows) - 1)
    kept = np.flatnonzero(sorted_rows[places] == columns.rows)  # [k] entries of these rows
    if not len(kept):
        return None
    starts, ends = columns.offsets[kept].astype(np.int64), columns.offsets[kept + 1].astype(np.int64)
    lengths = ends - starts
    offsets = np.concatenate([[0], lengths.cumsum()])
    # [offsets[k]] where each candidate is in the result: starts[i], starts[i] + 1, … of each entry i
    candidates = np.repeat(starts - offsets[:-1], lengths) + np.arange(offsets[-1])
    return LogprobColumns(
        rows=(first_row + order[places[kept]]).astype(np.uint32),
        offsets=offsets.astype(np.uint32),
        token_ids=columns.token_ids[candidates],
        logprobs=columns.logprobs[candidates],
        ranks=columns.ranks[kept],
    )


def _join_logprobs(parts: Sequence[LogprobColumns]) -> LogprobColumns | None:
    if len(parts) <= 1:
        return parts[0] if parts else None
    starts = np.cumsum([0, *(int(part.offsets[-1]) for part in parts[:-1])], dtype=np.uint32)
    offsets = [part.offsets[:-1] + start for part, start in zip(parts, starts, strict=True)]
    end = np.array([sum(int(part.offsets[-1]) for part in parts)], dtype=np.uint32)
    return LogprobColumns(
        rows=np.concatenate([part.rows for part in parts]),
        offsets=np.concatenate([*offsets, end]),
        token_ids=np.concatenate([part.token_ids for part in parts]),
        logprobs=np.concatenate([part.logprobs for part in parts]),
        ranks=np.concatenate([part.ranks for part in parts]),
    )


def _failure(number: int, error: TriptychError) -> RequestFailure:
    field_name, message = "", error.message
    if isinstance(error, InvalidRequest):
        field_name, message = error.violations[0].field, error.violations[0].description
    retry_after_s = error.retry_after_s if isinstance(error, QueueFull) else 0.0
    return RequestFailure(number, error.code, message, field_name, round(retry_after_s * 1000))
