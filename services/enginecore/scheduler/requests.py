"""Takes requests in, finds them, and ends them: all that is done to requests between two steps."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from triptych.errors import DeadlineExceeded, TriptychError
from triptych.types.facts import EngineCounters
from triptych.types.outputs import FinishReason
from triptych.types.step import U32
from triptych_services.enginecore.request import Request, RequestState
from triptych_services.enginecore.scheduler.admission import Admission
from triptych_services.enginecore.scheduler.request_states import RequestStates
from triptych_services.enginecore.scheduler.step_results import Failed, Finished
from triptych_services.enginecore.scheduler.waiting_queue import WaitsFor


class Requests:
    """The requests of a scheduler, as the engine sees them. The scheduler owns it, and every end is counted here."""

    def __init__(
        self,
        states: RequestStates,
        admission: Admission,
        clock: Callable[[], float],
        counters: EngineCounters,
    ) -> None:
        self._states = states
        self._admission = admission
        self._clock = clock
        self.counters = counters

    def add(self, *choices: Request) -> tuple[Failed, ...]:
        """Queue all choices of one client's request, and return the requests that had to leave a full queue for them.

        Raises:
            InvalidRequest, DuplicateRequest, DeadlineUnreachable: As `Admission.check` says; nothing has changed.
            QueueFull: As `Admission.displace_for` says; nothing has changed.
        """
        now, states = self._clock(), self._states
        self._admission.check(choices, states, now)
        leaving = self._admission.displace_for(choices, states)
        displaced = tuple(self.fail(request, self._admission.displaced_error(states)) for request in leaving)
        tables = [request.blocks for request in choices]
        states.blocks.hash_prompt(tables, choices[0].token_ids, choices[0].num_prompt_tokens)
        for request in choices:
            request.limit = self._admission.limit_of(request)
            request.queued_at = now
            states.add(request)
        states.shared_prompts.add(choices)
        self._begin_transfers(choices[0], now)
        return displaced

    def find(self, session: int, number: int) -> Request | None:
        """Return a choice that has not ended."""
        return self._states.index.by_number(session, number)

    def of_session(self, session: int) -> list[Request]:
        """Return the requests that were submitted on a session."""
        return [request for request in self._states.index if request.session == session]

    def adapters(self) -> dict[str, int]:
        """Return the digest of each adapter of requests that have not ended -> their lowest priority value."""
        adapters = self._states.index.adapters
        return {digest: min(priority for _, priority in asking) for digest, asking in adapters.items()}

    def adapter_tenants(self) -> dict[str, set[str]]:
        """Return the digest of each adapter of requests that have not ended -> the tenants of these."""
        adapters = self._states.index.adapters
        return {digest: {tenant for tenant, _ in asking} for digest, asking in adapters.items()}

    def running_adapters(self) -> set[str]:
        """Return the digests of the adapters of all requests with a row, or with results still to come."""
        return {request.content.adapter for request in self.started() if request.content.adapter}

    def with_adapter(self, digest: str) -> list[Request]:
        """Return the requests for an adapter that have not ended."""
        return [request for request in self._states.index if request.content.adapter == digest]

    def all(self) -> list[Request]:
        """Return the requests that run or wait."""
        return list(self._states.index)

    def with_output(self) -> list[Request]:
        """Return the waiting requests that have output tokens, by this engine or by one that they were moved from."""
        return [
            request
            for request in self._states.index
            if request.state is RequestState.WAITING and len(request.token_ids) > request.num_prompt_tokens
        ]

    def started(self) -> list[Request]:
        """Return the requests with a row, or with results still to come."""
        return [*self._states.running, *self._states.draining.values()]

    def beyond(self, time_s: float, step_s: float) -> list[Request]:
        """Return the requests that may not end within a time: all that wait, and those with too much output left.

        Args:
            step_s: Seconds that a step takes.
        """
        rows = self._states.rows
        return [
            request
            for request in self._states.index
            if request.state is RequestState.WAITING
            or (request.limit - int(rows.known[request.slot])) * step_s >= time_s
        ]

    def output_of(self, request: Request) -> U32:
        """Return all output tokens of a request so far."""
        if request.state is RequestState.RUNNING:
            return self._states.rows.last_tokens(request, request.limit)
        return np.array(request.token_ids[request.num_prompt_tokens :], np.uint32)

    def abort(self, session: int, number: int) -> Finished | None:
        """End a request for its client's sake, and return None if it has ended already.

        Its blocks are free at once. The next plan removes its row from the worker.
        """
        request = self.find(session, number)
        return None if request is None else self.finish(request, FinishReason.ABORT)

    def abort_session(self, session: int) -> tuple[Finished, ...]:
        """End all requests of one frontend session."""
        return tuple(self.finish(request, FinishReason.ABORT) for request in self.of_session(session))

    def abort_all(self) -> tuple[Finished, ...]:
        """End all requests."""
        return tuple(self.finish(request, FinishReason.ABORT) for request in self.all())

    def expire(self, now: float) -> tuple[Failed, ...]:
        """End all requests with a deadline that has passed.

        Called before a step is planned, so that a request that expired while it waited is never computed.
        """
        self._states.transfers.expire(now, self._admission.forecast.prefill_s)
        failed = []
        while (request := self._states.index.next_expired(now)) is not None:
            stage = "waited to be scheduled" if request.planned_at is None else "ran"
            failed.append(
                self.fail(request, DeadlineExceeded(f"the deadline passed while the request {stage}"))
            )
        return tuple(failed)

    def finish(self, request: Request, reason: FinishReason, stop_token_id: int | None = None) -> Finished:
        """End a request well."""
        self._end(request, reason.word)
        return Finished(request, reason, stop_token_id)

    def fail(self, request: Request, error: TriptychError, *, is_trusted: bool = True) -> Failed:
        """End a request for a reason that its client did not cause.

        Args:
            is_trusted: Whether its blocks hold what was planned, so that others may find them.
        """
        self._end(request, "error", is_trusted=is_trusted)
        return Failed(request, error)

    def _end(self, request: Request, outcome: str, *, is_trusted: bool = True) -> None:
        request.ended_at = self._clock()
        self._states.end(request, request.ended_at, is_trusted=is_trusted)
        ran_s = None if request.planned_at is None else request.ended_at - request.planned_at
        self._admission.forecast.endings.note_ending(ran_s)
        self.counters.num_finished[outcome] += 1

    def _begin_transfers(self, request: Request, now: float) -> None:
        """Begin to lease or to pull the prompt of a new request, if it asks for that.

        It waits for what it pulls, and others pass it.
        """
        states = self._states
        if request.kv_lease and states.blocks.enable_prefix_caching:
            states.transfers.leases.add(request)
        source = request.kv_source
        if source is None or request.has_emitted or not states.reads_cache(request):
            return
        if states.transfers.pulls.add(request, source, now):
            states.waiting.hold(request, WaitsFor.REMOTE_KV)
