"""The requests that are alive, by name: who may abort them, when the last has ended, and how they leave this frontend.

SIGTERM ──► engines know that no stream can go on here ──► streams whose clients resume are handed over,
                                                           each while its engine has another frontend
        ──► drain_s is over: all that their engines keep are left there; the rest end with an error
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

from triptych.errors import DuplicateRequest
from triptych_services.frontend.access.caller import Caller, current_caller
from triptych_services.frontend.requests.identity import unique_request_id
from triptych_services.frontend.requests.raw import RawRequest
from triptych_services.frontend.routing.router import Router
from triptych_services.frontend.siblings.siblings import Siblings
from triptych_services.frontend.streams.outputs import RequestOutputs
from triptych_services.frontend.streams.pacing import Pace

_KNOWN_S = 1.0
"""An engine answers between two steps. One that is silent for so long is not waited for."""
_POLL_S = 0.05


class AliveRequest(NamedTuple):
    """A request that has not ended."""

    outputs: RequestOutputs
    raw: RawRequest
    arrived: float
    """In seconds of the monotonic clock."""


class AliveRequests:
    """Owned by the generator. Bound to one event loop."""

    def __init__(self, siblings: Siblings | None = None) -> None:
        """`siblings`: Hold the ids that clients have chosen, too. None: there are none."""
        self._siblings = siblings
        self._requests: dict[tuple[str, str], AliveRequest] = {}
        """Tenant and request id -> the request."""
        self._name_to_keys: dict[str, set[tuple[str, str]]] = {}
        """Any name that a client may abort by -> the requests that have it, by tenant and id."""
        self._idle = asyncio.Event()
        self._idle.set()
        self.num_generating = 0
        """Requests that generate tokens; those for vectors have one message each, which nothing holds back."""

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[AliveRequest]:
        return iter(list(self._requests.values()))

    @contextmanager
    def claim(self, outputs: RequestOutputs, raw: RawRequest) -> Iterator[RawRequest]:
        """Hold the id while the request is alive, which is yielded with the tenant of its caller.

        Raises:
            DuplicateRequest: Another request of its tenant has the id.
            PermissionDenied: As `Caller.own`.
        """
        raw = current_caller().own(raw)
        try:
            with self._hold(outputs, raw):
                yield raw
        finally:
            if self._siblings is not None:
                self._siblings.release(raw)

    @contextmanager
    def _hold(self, outputs: RequestOutputs, raw: RawRequest) -> Iterator[None]:
        request_id = outputs.request_id
        key = raw.head.tenant, request_id
        if key in self._requests:
            raise DuplicateRequest(
                f"request_id: a request {request_id!r} is alive; choose another id, or wait"
            )
        self._requests[key] = AliveRequest(outputs, raw, time.monotonic())
        names = {request_id, *raw.client_names}
        for name in names:
            self._name_to_keys.setdefault(name, set()).add(key)
        self._idle.clear()
        self.num_generating += raw.pooling is None
        try:
            yield
        finally:
            self.num_generating -= raw.pooling is None
            del self._requests[key]
            for name in names:
                self._name_to_keys[name].remove(key)
                if not self._name_to_keys[name]:
                    del self._name_to_keys[name]
            if not self._requests:
                self._idle.set()

    @contextmanager
    def claim_again(self, request_id: str, raw: RawRequest, pace: Pace) -> Iterator[RequestOutputs]:
        """Hold the id of a stream that goes on here, and yield what gathers its outputs.

        Where it began here, its first call may not have heard yet that it is cut off; both are alive until then.
        """
        is_alive = (raw.head.tenant, request_id) in self._requests
        name = unique_request_id(request_id) if is_alive else request_id
        raw = replace(raw, client_names=(*raw.client_names, request_id))
        outputs = RequestOutputs(name, pace)
        if self._siblings is not None:
            self._siblings.claim_again(raw)
        try:
            with self._hold(outputs, raw):
                yield outputs
        finally:
            if self._siblings is not None:
                self._siblings.release(raw)

    def count_without_token(self) -> Counter[str]:
        """Count the choices that no token has come for, by tenant. May be called on any thread."""
        counts = Counter[str]()
        for alive in self:
            choices = list(alive.outputs.choices)
            waiting = sum(choice.finish_reason is None and not choice.num_tokens for choice in choices)
            if waiting:
                counts[alive.raw.head.tenant] += waiting
        return counts

    def abort_of(self, caller: Caller, names: Iterable[str], of_any_tenant: bool) -> list[str]:
        """End requests of the caller's tenant with what they have.

        Args:
            names: Their ids, or others of their `client_names`, each of which may be that of several.
            of_any_tenant: For operators.

        Returns those of the names that were alive, each once. The requests of others count as not alive.
        """
        aborted = []
        for name in dict.fromkeys(names):
            found = [self._requests[key] for key in self._name_to_keys.get(name, ())]
            own = [alive for alive in found if of_any_tenant or caller.may_speak_for(alive.raw.head.tenant)]
            for alive in own:
                alive.outputs.abort()
            if own:
                aborted.append(name)
        return aborted

    def token_of_duplicate(self, caller: Caller, raw: RawRequest) -> str | None:
        """Return the token by which a request goes on that is alive and the same as this one; empty if another request
        has its id, or if it cannot go on; None if none has it.

        A client sends a request again, under its name, when it has lost the connection and cannot know what came of it.
        """
        if not raw.head.request_id:
            return None
        raw = caller.own(raw)
        alive = self._requests.get((raw.head.tenant, raw.head.request_id))
        if alive is None:
            return None
        duplicate = replace(raw, deadline_s=alive.raw.deadline_s)
        return alive.outputs.resume_token if duplicate == alive.raw else ""

    @property
    def is_idle(self) -> bool:
        """Whether none is alive."""
        return self._idle.is_set()

    async def wait_idle(self) -> None:
        """Return as soon as none is alive."""
        await self._idle.wait()


class Departure:
    """How the requests of a frontend leave when it stops: they go on at others, at once where there is another one.

    Owned by the generator, which takes no more requests.
    """

    def __init__(self, router: Router, alive: AliveRequests) -> None:
        self._router = router
        self._alive = alive

    async def run(self, drain_s: float) -> int:
        """Return when nothing is alive any more, or after so many seconds.

        Returns:
            Number of requests that neither ended nor go on elsewhere.
        """
        self._router.say_takes_streams(False)
        try:
            async with asyncio.timeout(drain_s):
                await self._wait_until_known()
                while not all(map(_has_ended, self._alive)):
                    self._hand_over(_has_another_frontend)
                    await self._wait_idle(_POLL_S)
        except TimeoutError:
            self._hand_over(_is_kept)
        return sum(not _has_ended(alive) for alive in self._alive)

    async def _wait_until_known(self) -> None:
        """Return when all engines that are there know that no stream can go on here, or no stream is left.

        Two frontends that leave together would hand their streams to each other otherwise.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + _KNOWN_S
        while (
            not self._alive.is_idle
            and loop.time() < until
            and not all(engine.knows_state for engine in self._router.engines)
        ):
            await self._wait_idle(_POLL_S)

    async def _wait_idle(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._alive.wait_idle()
        except TimeoutError:
            pass

    def _hand_over(self, may_go: Callable[[AliveRequest], bool]) -> None:
        for alive in self._alive:
            if may_go(alive):
                alive.outputs.hand_over()


def _has_another_frontend(alive: AliveRequest) -> bool:
    """Return whether a client resumes its stream, and another frontend can go on with it now."""
    engine = alive.outputs.can_go_on_at if alive.raw.resumes else None
    return engine is not None and engine.num_other_frontends > 0


def _is_kept(alive: AliveRequest) -> bool:
    return alive.outputs.resume_token != ""


def _has_ended(alive: AliveRequest) -> bool:
    return alive.outputs.has_failed
