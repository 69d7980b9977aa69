"""The requests of frontends' sessions: submitted, ended, kept without a reader, and attached to another session."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from triptych.errors import (
    AttachedElsewhere,
    EngineUnavailable,
    InvalidRequest,
    NotKept,
    TriptychError,
)
from triptych.types.facts import WorkerFacts
from triptych.types.journal import Aborted, SessionClosed, SessionOpened, Submitted
from triptych.types.outputs import FinishedRequest, OutputBatch
from triptych.types.step import U32, LogprobColumns, RequestGuesses
from triptych.types.submit import MAX_SUBMIT_BYTES, AttachRequest, SubmitRequest
from triptych_services.enginecore.frontends.kept_requests import ChoiceKey, KeptRequest, KeptRequests
from triptych_services.enginecore.frontends.outputs import SessionOutputs
from triptych_services.enginecore.frontends.routing_updates import RoutingUpdates
from triptych_services.enginecore.journal.listener import CallLog
from triptych_services.enginecore.kv.remote import without_useless_transfers
from triptych_services.enginecore.request import Request, check_vocabulary
from triptych_services.enginecore.restrictions import CrashBisect
from triptych_services.enginecore.scheduler.scheduler import Scheduler
from triptych_services.enginecore.scheduler.step_results import Failed, Finished
from triptych_services.enginecore.tasks import check_submit

log = logging.getLogger(__name__)


class FrontendRequests:
    """Carries out what frontends ask of the engine. The engine core owns it.

    A choice is named by session and number: in the scheduler as it was submitted, in outputs as it is read.
    """

    def __init__(
        self, calls: CallLog, updates: RoutingUpdates, crashes: CrashBisect, *, max_kept_bytes: int
    ) -> None:
        """
        Args:
            calls: Time of the current call, and the report of calls.
            updates: What a new frontend begins with.
            crashes: Suspects requests that other engines have died of.
            max_kept_bytes: Bytes of all requests that are kept without a reader. 0: none is kept.
        """
        self._calls = calls
        self._updates = updates
        self._crashes = crashes
        self.kept = KeptRequests(calls.now, max_kept_bytes)
        self.outputs = SessionOutputs(self.kept)
        self._scheduler: Scheduler | None = None
        self._facts: WorkerFacts | None = None

    def serve_with(self, scheduler: Scheduler, facts: WorkerFacts) -> None:
        """Give requests to the scheduler of a new worker from now on."""
        self._scheduler, self._facts = scheduler, facts

    def open_session(self, session: int) -> list[OutputBatch]:
        """Begin to gather outputs for a frontend, and return its first batches, which say what is cached here."""
        self._calls.start(SessionOpened, session)
        return self.outputs.open(session, self._updates.take_base(self._scheduler) if self._scheduler else ())

    def close_session(self, session: int) -> None:
        """End all requests that a frontend reads, because it has left. Those that another session reads continue."""
        self.outputs.close(session)
        for kept in self.kept.read_by(session):
            self._drop(kept)
        left = self._submitted_on(session)
        if any(self.kept.of(ChoiceKey(session, request.number)) is not None for request in left):
            self._detach_all(session, left, 0.0)
            return
        self._calls.start(SessionClosed, session)
        if self._scheduler is not None:
            self._scheduler.requests.abort_session(session)

    def detach_session(self, session: int, lost_for_s: float = 0.0) -> None:
        """Detach a lost frontend's requests: keep those that may be kept, abort the others.

        Args:
            lost_for_s: Seconds since the frontend was lost.
        """
        self.outputs.close(session)
        self._detach_all(session, self._submitted_on(session), lost_for_s)

    def submit(self, session: int, submit: SubmitRequest) -> None:
        """Queue a request. A refusal is an output of its session, never an exception.

        A session that has ended meanwhile gets no output, so nothing happens.
        """
        self._calls.start(Submitted, session, submit)
        if not self.outputs.is_open(session):
            return
        try:
            if self._scheduler is None or self._facts is None:
                raise EngineUnavailable("the engine has no worker yet")
            if submit.model_digest and submit.model_digest != self._facts.model.identity.digest:
                raise EngineUnavailable("the engine has another model by now than the one it was chosen for")
            check_submit(submit, self._facts)
            check_vocabulary(submit, self._facts.model.vocab_size)
            submit = without_useless_transfers(submit, self._facts.kv_endpoint)
            remaining_ms = submit.deadline_remaining_ms
            deadline = None if remaining_ms is None else self._calls.now_s + remaining_ms / 1000
            guesses = self._facts.max_samples_per_row > 1
            choices = Request.choices_of(submit, session=session, deadline=deadline, guesses=guesses)
            displaced = self._scheduler.requests.add(*choices)
        except TriptychError as error:
            self.refuse(session, submit.numbers.tolist(), error)
        else:
            if submit.pooling is None:  # it is computed anew as fast as a reader comes back
                self.kept.add(session, submit, deadline)
            self._updates.note_admitted()
            self.outputs.admit(session, submit.numbers.tolist(), whole_output=submit.whole_output)
            self.note_failed(displaced)
            log.debug(
                "request %s is queued: session %d, %d prompt tokens, %d choices, tenant %r, priority %d",
                submit.head.request_id,
                session,
                len(submit.prompt_token_ids),
                submit.num_choices,
                submit.head.tenant,
                submit.head.priority,
            )
            if submit.num_engine_deaths:
                self._crashes.suspect(choices)

    def refuse(self, session: int, numbers: Sequence[int], error: TriptychError) -> None:
        """Answer the choices of a request that is not queued."""
        for number in numbers:
            self.outputs.refuse(session, number, error)

    def abort(self, session: int, number: int) -> None:
        """End a choice that no client waits for any more. One that has ended already is no error."""
        if (key := self.kept.submitted_as(ChoiceKey(session, number))) is not None:
            self.kept.forget_all_of(key)
            self._abort(key)

    def stop(self, session: int, number: int) -> None:
        """End a choice with what it has. If it may be kept, it is."""
        if (key := self.kept.submitted_as(ChoiceKey(session, number))) is not None:
            self._abort(key)

    def detach(self, session: int, number: int) -> None:
        """Let a request wait for another reader, because its session reads it no more. One that is not kept ends.

        Args:
            number: Name of one of its choices. A choice that has ended, or is read elsewhere, is no error.
        """
        self._calls.advance()
        key = self.kept.submitted_as(ChoiceKey(session, number))
        if key is None:
            return
        kept = self.kept.of(key)
        if kept is None:
            self._abort(key)
        elif kept.reader == session:
            self.kept.detach(kept)

    def attach(self, session: int, attach: AttachRequest) -> None:
        """Send the outputs of a kept request to this session from now on, and none to the session that read it.

        A refusal is one output of the session, of the first number, never an exception: nothing confirms the others.
        """
        self._calls.advance()
        if not self.outputs.is_open(session):
            return
        try:
            kept = self.kept.find(attach)
            attached, unseen, logprobs = self._state_of(kept, attach)
        except TriptychError as error:
            self.outputs.refuse(session, attach.first_number, error)
            return
        if kept.reader:
            why = AttachedElsewhere(
                "the client goes on with this stream at another frontend, or on another connection"
            )
            for key, number in zip(kept.keys, kept.numbers, strict=True):
                if key.number not in kept.ends:
                    self.outputs.refuse(kept.reader, number, why)
        self.kept.attach(kept, session, attach.numbers)
        self.outputs.attach(kept, attached, unseen, logprobs)

    def expire(self) -> None:
        """End kept requests that no frontend has attached in time, and those that are too large to be kept."""
        if self.kept:
            self._calls.advance()
            for kept in self.kept.take_expired():
                self._drop(kept)

    def note_finished(self, finished: Sequence[Finished]) -> None:
        """Report requests that ended well to their readers."""
        for end in finished:
            self.outputs.finish(end)

    def note_failed(self, failed: Sequence[Failed]) -> None:
        """Report requests that failed to their readers."""
        for end in failed:
            self.outputs.fail(end)

    def _submitted_on(self, session: int) -> Sequence[Request]:
        return () if self._scheduler is None else self._scheduler.requests.of_session(session)

    def _detach_all(self, session: int, requests: Sequence[Request], lost_for_s: float) -> None:
        """Abort the requests that are not kept, and detach what the session reads."""
        for request in requests:
            key = ChoiceKey(request.session, request.number)
            if self.kept.of(key) is None:
                self._abort(key)
        for kept in self.kept.read_by(session):
            self.kept.detach(kept, lost_for_s)

    def _abort(self, key: ChoiceKey) -> None:
        """End a choice, named as it was submitted. One that has ended already is no error."""
        self._calls.start(Aborted, *key)
        if self._scheduler is not None and (finished := self._scheduler.requests.abort(*key)) is not None:
            self.outputs.finish(finished)

    def _drop(self, kept: KeptRequest) -> None:
        for key in kept.keys:
            if key.number not in kept.ends:
                self._abort(key)
        self.kept.forget(kept)

    def _state_of(
        self, kept: KeptRequest, attach: AttachRequest
    ) -> tuple[SubmitRequest, list[U32], list[list[LogprobColumns]]]:
        """Return a request for its new reader, and for each choice the tokens that its client lacks.

        Raises:
            NotKept, InvalidRequest: It cannot be read from there on.
        """
        seen: list[U32] = []
        cached_tokens: list[int | None] = []
        guesses: dict[int, tuple[int, int]] = {}
        unseen: list[U32] = []
        logprobs: list[list[LogprobColumns]] = []
        for index, key in enumerate(kept.keys):
            num_seen = attach.seen.get(index, 0)
            if (end := kept.ends.get(key.number)) is not None:
                output = end.token_ids
                good_end = end.outcome if isinstance(end.outcome, FinishedRequest) else None
                cached_tokens.append(None if good_end is None else good_end.num_cached_tokens)
            else:
                assert self._scheduler is not None, "nothing is kept before there is a scheduler"
                request = self._scheduler.requests.find(*key)
                assert request is not None, "a choice has not ended and is not alive"
                output = self._scheduler.requests.output_of(request)
                cached_tokens.append(request.num_cached_tokens)
                if request.num_accepted_guesses or request.num_rejected_guesses:
                    counts = request.num_accepted_guesses, request.num_rejected_guesses
                    guesses[attach.numbers[index]] = counts
            if num_seen > len(output):
                raise InvalidRequest("seen", f"{num_seen} tokens of a choice that has {len(output)}")
            seen.append(output[:num_seen])
            unseen.append(output[num_seen:])
            needs_logprobs = kept.submit.sampling.logprobs is not None
            logprobs.append(self.kept.logprobs.last_of(key, len(unseen[-1])) if needs_logprobs else [])
        deadline = kept.deadline
        remaining_ms = None if deadline is None else max(1, round((deadline - self._calls.now_s) * 1000))
        attached = replace(
            kept.submit,
            numbers=np.array(attach.numbers, np.uint32),
            emitted=tuple(seen),
            deadline_remaining_ms=remaining_ms,
            cached_tokens=tuple(cached_tokens),
            guesses=RequestGuesses.of(guesses),
        )
        if attached.num_bytes + sum(4 * len(token_ids) for token_ids in unseen) > MAX_SUBMIT_BYTES:
            raise NotKept(
                f"the stream takes more than {MAX_SUBMIT_BYTES} bytes, the limit of what can be handed over"
            )
        return attached, unseen, logprobs
