"""Requests whose frontend is gone: they end, wait for another frontend, or go on at one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from triptych.errors import AttachedElsewhere, InvalidRequest, NotKept, TriptychError
from triptych.types.outputs import FinishedRequest
from triptych.types.step import U32, LogprobColumns
from triptych.types.submit import MAX_SUBMIT_BYTES, AttachRequest, SubmitRequest
from triptych_services.enginecore.frontends.kept_requests import ChoiceKey, KeptRequest, KeptRequests
from triptych_services.enginecore.frontends.outputs import SessionOutputs
from triptych_services.enginecore.journal.listener import CallClock
from triptych_services.enginecore.request import Request
from triptych_services.enginecore.scheduler.scheduler import Scheduler


class Handover:
    """Owned by the engine core."""

    def __init__(
        self,
        kept: KeptRequests,
        outputs: SessionOutputs,
        abort: Callable[[ChoiceKey], None],
        clock: CallClock,
    ) -> None:
        """
        Args:
            abort: Ends a choice, named as it was submitted. One that has ended already is no error.
            clock: Seconds at the engine's current call.
        """
        self._kept = kept
        self._outputs = outputs
        self._abort = abort
        self._clock = clock

    def attach(self, session: int, wish: AttachRequest, scheduler: Scheduler | None) -> None:
        """Let a request go on in a session. The one that has read it so far hears no more of it.

        A refusal is one output of the session, of the first number, never an exception: nothing confirms the
        others.
        """
        try:
            kept = self._kept.find(wish)
            attached, unseen, logprobs = self._state_of(kept, wish, scheduler)
        except TriptychError as error:
            self._outputs.refuse(session, wish.first_number, error)
            return
        if kept.reader:
            why = AttachedElsewhere(
                "the client goes on with this stream at another frontend, or on another connection"
            )
            for key, number in zip(kept.keys, kept.numbers, strict=True):
                if key.number not in kept.ends:
                    self._outputs.refuse(kept.reader, number, why)
        self._kept.attach(kept, session, wish.numbers)
        self._outputs.attach(kept, attached, unseen, logprobs)

    def let_go(self, session: int, number: int) -> None:
        """Let a request wait for another reader, because its session reads it no more. One that is not kept ends.

        Args:
            number: Name of one of its choices. A choice that has ended, or is read elsewhere, is no error.
        """
        key = self._kept.submitted_as(ChoiceKey(session, number))
        if key is None:
            return
        kept = self._kept.of(key)
        if kept is None:
            self._abort(key)
        elif kept.reader == session:
            self._kept.detach(kept)

    def leave(self, session: int, requests: Sequence[Request]) -> bool:
        """End what a session reads, because its frontend has left.

        Args:
            requests: Those that were submitted on the session.

        Returns:
            Whether some of them go on, because another session reads them. If not, those that are not kept are left.
        """
        for kept in self._kept.read_by(session):
            self._drop(kept)
        if all(self._kept.of(ChoiceKey(session, request.number)) is None for request in requests):
            return False
        self.detach(session, requests, 0.0)
        return True

    def detach(self, session: int, requests: Sequence[Request], lost_for_s: float) -> None:
        """Let what a lost session reads run on, as far as it may be kept, and end the rest.

        Args:
            requests: Those that were submitted on the session.
            lost_for_s: Seconds since the frontend was lost.
        """
        for request in requests:
            key = ChoiceKey(request.session, request.number)
            if self._kept.of(key) is None:
                self._abort(key)
        for kept in self._kept.read_by(session):
            self._kept.detach(kept, lost_for_s)

    def expire(self) -> None:
        """End what no frontend has come for in time, or what is too much to be kept."""
        if self._kept:
            self._clock.advance()
            for kept in self._kept.take_expired():
                self._drop(kept)

    def _drop(self, kept: KeptRequest) -> None:
        for key in kept.keys:
            if key.number not in kept.ends:
                self._abort(key)
        self._kept.forget(kept)

    def _state_of(
        self, kept: KeptRequest, wish: AttachRequest, scheduler: Scheduler | None
    ) -> tuple[SubmitRequest, list[U32], list[list[LogprobColumns]]]:
        """Return a request for its new reader, and for each choice the tokens that its client lacks.

        Raises:
            NotKept, InvalidRequest: It cannot go on as the client wishes.
        """
        seen: list[U32] = []
        cached_tokens: list[int | None] = []
        unseen: list[U32] = []
        logprobs: list[list[LogprobColumns]] = []
        for index, key in enumerate(kept.keys):
            num_seen = wish.seen.get(index, 0)
            if (end := kept.ends.get(key.number)) is not None:
                output = end.token_ids
                good_end = end.outcome if isinstance(end.outcome, FinishedRequest) else None
                cached_tokens.append(None if good_end is None else good_end.num_cached_tokens)
            else:
                assert scheduler is not None, "nothing is kept before there is a scheduler"
                request = scheduler.find(*key)
                assert request is not None, "a choice has not ended and is not alive"
                output = scheduler.output_of(request)
                cached_tokens.append(request.num_cached_tokens)
            if num_seen > len(output):
                raise InvalidRequest("seen", f"{num_seen} tokens of a choice that has {len(output)}")
            seen.append(output[:num_seen])
            unseen.append(output[num_seen:])
            needs_logprobs = kept.submit.sampling.logprobs is not None
            logprobs.append(self._kept.logprobs.last_of(key, len(unseen[-1])) if needs_logprobs else [])
        deadline = kept.deadline
        remaining_ms = None if deadline is None else max(1, round((deadline - self._clock()) * 1000))
        attached = replace(
            kept.submit,
            numbers=np.array(wish.numbers, np.uint32),
            emitted=tuple(seen),
            deadline_remaining_ms=remaining_ms,
            cached_tokens=tuple(cached_tokens),
        )
        if attached.num_bytes + sum(4 * len(token_ids) for token_ids in unseen) > MAX_SUBMIT_BYTES:
            raise NotKept(
                f"the stream takes more than {MAX_SUBMIT_BYTES} bytes, the limit of what can be handed over"
            )
        return attached, unseen, logprobs
