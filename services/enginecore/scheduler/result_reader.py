"""Reads the result of a step: which tokens belong to which requests, which requests end, and which fail."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from triptych.errors import EngineFailure, InvalidRequest, TriptychError
from triptych.types.outputs import FinishReason
from triptych.types.step import (
    U32,
    RowError,
    RowErrorCode,
    RowKey,
    StepResult,
)
from triptych_services.enginecore.request import Request
from triptych_services.enginecore.scheduler.admission import Admission
from triptych_services.enginecore.scheduler.request_states import RequestStates
from triptych_services.enginecore.scheduler.requests import Requests
from triptych_services.enginecore.scheduler.running_rows import Flags, Ints, Slots
from triptych_services.enginecore.scheduler.step_results import (
    Failed,
    Finished,
    InFlightStep,
    StepOutput,
    StepsInFlight,
    check_vectors,
    match_prompt_logprobs,
)
from triptych_services.enginecore.scheduler.stop import find_repetition, find_stop, num_repeated_tokens

_MAX_PREFIXES = 64  # remembered, of requests that failed after they had found them in the cache


class ResultReader:
    """Takes in the results of steps in flight. The scheduler owns it."""

    def __init__(
        self,
        *,
        states: RequestStates,
        in_flight: StepsInFlight,
        requests: Requests,
        admission: Admission,
        eos_token_ids: Sequence[int],
        clock: Callable[[], float],
    ) -> None:
        self._states = states
        self._rows = states.rows
        self._in_flight = in_flight
        self._requests = requests
        self._admission = admission
        self._eos_token_ids = eos_token_ids
        self._clock = clock
        self._suspect_blocks = _SuspectBlocks(states, in_flight)
        self._last_result_at = clock()
        self._first: list[Request] = []
        """Requests that have their first token by the result that is read now."""

    def read(self, result: StepResult) -> StepOutput:
        """Take in the oldest step's result.

        Tokens for rows that are gone are dropped: they were sampled beyond an end. Those of draining requests are kept.

        Raises:
            ProtocolViolation: This is not that step's result; nothing has changed.
        """
        reported = match_prompt_logprobs(result, self._states) if result.prompt_logprobs else ()
        if (due := self._in_flight.oldest) is not None and (due.pooled_rows or result.vectors):
            check_vectors(due, result, self._states)
        step = self._in_flight.pop(result)
        for request, logprobs in reported:
            request.prompt_logprobs_start = logprobs.end
        self._measure(step)
        if self._rows.has_guesses or len(result.guess_counts):
            self._note_guesses(step, result)
        guessed = self._most_accepted(step, result) if result.guesses else ()
        failed = self._fail_rows(step, result.row_errors) if result.row_errors else []
        if step.sample_limits is None and not len(result.token_counts):
            output, is_live = self._read_one_each(step, result)
        else:
            output, is_live = self._read_several(step, result)
        output = (
            replace(output, failed=tuple(failed), prompt_logprobs=reported) if failed or reported else output
        )
        if self._states.draining:
            output = self._with_late_tokens(output, step, result, np.flatnonzero(~is_live))
        if guessed:
            for request, most in guessed:
                request.num_rejected_guesses += max(most - request.num_accepted_guesses, 0)
            output = replace(output, guessed=tuple(request for request, _ in guessed))
        if step.pooled_rows:
            output = self._with_vectors(output, step, result)
        if self._first:
            output, self._first = replace(output, first=tuple(self._first)), []
        return output

    def _read_one_each(self, step: InFlightStep, result: StepResult) -> tuple[StepOutput, Flags]:
        """Take in a result of one token for each sampling row.

        Returns:
            The output, and whether each row is the one that was planned, [s].
        """
        rows, slots, token_ids = self._rows, step.sampling_slots, result.token_ids
        if (running := rows.running_of(slots)) is not None:
            finished = self._append(slots, token_ids)
            output = StepOutput(
                running.sessions, running.numbers, token_ids, running.places, finished=tuple(finished)
            )
            return output, running.is_live
        is_live = rows.slot_version[slots] == step.slot_versions
        places = is_live.nonzero()[0]  # [t] in the result
        slots, token_ids = slots[places], token_ids[places]
        sessions, numbers = rows.session[slots], rows.number[slots]
        finished = self._append(slots, token_ids)
        return StepOutput(sessions, numbers, token_ids, places, finished=tuple(finished)), is_live

    def _read_several(self, step: InFlightStep, result: StepResult) -> tuple[StepOutput, Flags]:
        """Take in a result of any number of tokens for each sampling row; the rest as `_read_one_each`.

        The tokens of all rows are appended in rounds, one token for each row at most. A row that has ended leaves the
        rounds, so its tokens behind the end are dropped.

            row 0   a b c        round 0   a d e
            row 1   d            round 1   b f
            row 2   e f          round 2   c
        """
        rows, counts = self._rows, _counts_of(step, result)
        limits = np.ones_like(counts) if step.sample_limits is None else step.sample_limits
        starts = counts.cumsum() - counts  # [s] in the result
        is_live = rows.slot_version[step.sampling_slots] == step.slot_versions
        live = np.flatnonzero(is_live)  # [r] of the sampling rows
        slots = step.sampling_slots[live]
        sessions, numbers = rows.session[slots], rows.number[slots]
        rows.settle(slots, limits[live], counts[live])
        kept, finished = np.zeros(len(live), np.int64), list[Finished]()
        going_on = np.arange(len(live))  # of the live rows
        for place in range(int(counts[live].max(initial=0))):
            versions = rows.slot_version[slots[going_on]]
            has_more = (counts[live[going_on]] > place) & (versions == step.slot_versions[live[going_on]])
            going_on = going_on[has_more]
            kept[going_on] += 1
            for slot in slots[going_on].tolist() if place else ():
                rows.slot_to_request[slot].num_accepted_guesses += 1
            token_ids = result.token_ids[starts[live[going_on]] + place]
            finished += self._append(slots[going_on], token_ids)
        firsts = starts[live] - (kept.cumsum() - kept)
        places = np.repeat(firsts, kept).astype(np.intp) + np.arange(int(kept.sum()))  # [t] in the result
        output = StepOutput(
            sessions, numbers, result.token_ids[places], places, kept.astype(np.uint32), tuple(finished)
        )
        return output, is_live

    def _note_guesses(self, step: InFlightStep, result: StepResult) -> None:
        """Note what the next step of each row can verify."""
        is_live = self._rows.slot_version[step.sampling_slots] == step.slot_versions
        counts = result.guess_counts[is_live] if len(result.guess_counts) else result.guess_counts
        self._rows.note_guesses(step.sampling_slots[is_live], counts)

    def _most_accepted(self, step: InFlightStep, result: StepResult) -> list[tuple[Request, int]]:
        """Return the requests that had guesses in a step, each with its accepted ones if all of these are."""
        slots, versions = step.sampling_slots.tolist(), step.slot_versions.tolist()
        return [
            (request, request.num_accepted_guesses + count)
            for guesses in result.guesses
            for row, count in zip(guesses.rows.tolist(), guesses.row_counts.tolist(), strict=True)
            if (request := self._states.by_row(RowKey(slots[row], versions[row]))) is not None
        ]

    def _append(self, slots: Slots, token_ids: U32) -> list[Finished]:
        """Append one token to each row, and return the requests that these end."""
        filled, may_end = self._rows.append(slots, token_ids)
        self._note_first_tokens(slots)
        if len(filled):
            self._states.fill_blocks(filled)
        return self._finish_stopped(slots, token_ids, may_end) if len(may_end) else []

    def _measure(self, step: InFlightStep) -> None:
        """Measure a step, which starts when it is sent or when the one before it is done."""
        now = self._clock()
        if step.num_tokens:  # else it held orders only
            since = max(step.planned_at, self._last_result_at)
            self._admission.forecast.steps.note(step.num_tokens, now - since)
        self._last_result_at = now

    def _note_first_tokens(self, slots: Slots) -> None:
        if self._rows.num_awaiting and len(first := self._rows.take_first(slots)):
            now = self._clock()
            for slot in first.tolist():
                request = self._rows.slot_to_request[slot]
                request.first_token_at = now
                self._first.append(request)

    def _finish_stopped(self, slots: Slots, token_ids: U32, may_end: Slots) -> list[Finished]:
        """End the running requests that these new tokens end.

        Args:
            may_end: Places in `slots` of the few tokens that may end one.
        """
        finished = []
        for index in may_end.tolist():
            slot, token_id = int(slots[index]), int(token_ids[index])
            request, num_known = self._rows.slot_to_request[slot], int(self._rows.known[slot])
            stop = find_stop(request, token_id, num_known, self._eos_token_ids)
            if stop is None and (detection := request.sampling.repetition_detection) is not None:
                tail = self._rows.last_tokens(request, num_repeated_tokens(detection))
                stop = find_repetition(request, tail, num_known)
            if stop is not None:
                finished.append(self._requests.finish(request, *stop))
        return finished

    def _with_late_tokens(
        self, output: StepOutput, step: InFlightStep, result: StepResult, places: Slots
    ) -> StepOutput:
        """Add the tokens of draining requests to a step's output.

        Args:
            places: Indices of the sampling rows that are gone.
        """
        late: list[tuple[Request, Slots, U32]] = []  # request, indices in the result, tokens
        finished = list(output.finished)
        counts = _counts_of(step, result)
        ends = counts.cumsum()
        for place in places.tolist():
            row = RowKey(int(step.sampling_slots[place]), int(step.slot_versions[place]))
            request = self._states.draining.get(row)
            if request is None:
                continue
            indices = np.arange(ends[place] - counts[place], ends[place])
            token_ids, stop = result.token_ids[indices], None
            for num_kept, token_id in enumerate(token_ids.tolist(), 1):
                num_known = len(request.token_ids) + num_kept
                stop = find_stop(request, token_id, num_known, self._eos_token_ids)
                if stop is None and request.sampling.repetition_detection is not None:
                    known = np.array(request.token_ids[request.num_prompt_tokens :], np.uint32)
                    tail = np.concatenate((known, token_ids[:num_kept]))
                    stop = find_repetition(request, tail, num_known)
                if stop is not None:
                    indices, token_ids = indices[:num_kept], token_ids[:num_kept]
                    break
            late.append((request, indices, token_ids))
            request.num_accepted_guesses += max(len(token_ids) - 1, 0)
            limit = 1 if step.sample_limits is None else int(step.sample_limits[place])
            self._states.append_late(request, token_ids.tolist(), limit)
            if request.first_token_at is None:
                request.first_token_at = self._clock()
                self._first.append(request)
            if stop is not None:
                finished.append(self._requests.finish(request, *stop))
            elif not request.num_in_flight:
                self._states.finish_draining(request)
        return output.with_late_tokens(late, tuple(finished))

    def _with_vectors(self, output: StepOutput, step: InFlightStep, result: StepResult) -> StepOutput:
        """End the pooled requests that have their vectors. Those for rows that are gone are dropped."""
        vectors, now = [], self._clock()
        for row in step.pooled_rows:
            if (request := self._states.by_row(row)) is not None:
                request.first_token_at = now
                vectors.append((request, result.vectors[row]))
        finished = [self._requests.finish(request, FinishReason.STOP) for request, _ in vectors]
        return replace(output, vectors=tuple(vectors), finished=(*output.finished, *finished))

    def _fail_rows(self, step: InFlightStep, errors: Mapping[RowKey, RowError]) -> list[Failed]:
        """End the requests that failed in this step, and start over those that read a block which they spoiled.

        Those that the worker was not ready for wait a while.
        """
        failed, suspect_blocks = [], set[int]()
        for row, error in errors.items():
            request = self._states.by_row(row)
            if request is None:
                continue
            if error.is_deferral:
                self._states.defer(request, self._clock())
                continue
            if not error.kv_is_valid:
                suspect_blocks |= self._suspect_blocks.find(request)
            failed.append(
                self._requests.fail(
                    request, _to_client_error(step.step_id, error), is_trusted=error.kv_is_valid
                )
            )
        if not all(error.kv_is_valid for error in errors.values()):
            self._suspect_blocks.uncache(step, suspect_blocks)
        return failed


class _SuspectBlocks:
    """Removes from the prefix cache what a failed row may have spoiled. The result reader owns it.

    A chunk of a prompt samples nothing, so garbage in its KV is noticed steps later at the earliest. Therefore nothing
    that a failed request has written stays cached, whichever step wrote it.
    """

    def __init__(self, states: RequestStates, in_flight: StepsInFlight) -> None:
        self._states = states
        self._in_flight = in_flight
        self._prefixes: deque[bytes] = deque(maxlen=_MAX_PREFIXES)
        """First block hashes of requests that failed after hits. At a second failure the hits are suspect as well."""

    def find(self, request: Request) -> set[int]:
        """Return the blocks that a started request may have filled with garbage."""
        table = request.blocks
        if request.is_draining:  # its blocks are given back, under their hashes
            return set(self._states.blocks.named_blocks(table))
        first = table.num_hits
        if request.first_pulled_block is not None:  # another worker has written them for this request
            first = min(first, request.first_pulled_block)
        if first:
            prefix = table.hashes[0]
            if prefix in self._prefixes:
                first = 0
            else:
                self._prefixes.append(prefix)
        return set(self._states.blocks.own_blocks(table, first))

    def uncache(self, step: InFlightStep, blocks: set[int]) -> None:
        """Uncache `blocks` and all blocks that this step or a later one was to fill.

        Failures are rare enough for this to be coarse: the blocks of all requests in those steps are uncached. Running
        requests that hit one start over. So do draining requests, because their hits are no longer known.
        """
        manager = self._states.blocks
        suspect_blocks = {*blocks, *step.newly_cached_blocks, *manager.take_newly_cached()}
        suspect_blocks.update(*(later.newly_cached_blocks for later in self._in_flight))
        manager.uncache(suspect_blocks)
        for request in list(self._states.draining.values()):
            self._states.finish_draining(request)
        for request in self._states.running:
            if manager.has_read(request.blocks, suspect_blocks):
                self._states.requeue(request)


def _counts_of(step: InFlightStep, result: StepResult) -> Ints:
    """Return the tokens of each sampling row, [s]."""
    if len(result.token_counts):
        return result.token_counts.astype(np.int64)
    return np.ones(len(step.sampling_slots), np.int64)


def _to_client_error(step_id: int, error: RowError) -> TriptychError:
    """Return the error that a client gets for the failure of its row."""
    if error.code is RowErrorCode.INVALID_REQUEST:
        field_name, _, description = error.message.partition(": ")
        return InvalidRequest(field_name, description)
    return EngineFailure(f"the worker failed this request in step {step_id}: {error.message}")
