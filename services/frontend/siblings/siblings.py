"""The other processes of a frontend, as one of them sees them.

A client's connection ends at any of the processes that share a port. What concerns a request, an operator or a limit
must not depend on which: so each of them asks the others.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import operator
import pickle
import socket
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from prometheus_client import REGISTRY
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from triptych.errors import DuplicateRequest, EngineUnavailable, RateLimited
from triptych_services.frontend.access.caller import Caller
from triptych_services.frontend.access.rate_limits import RateLimits
from triptych_services.frontend.requests.raw import RawRequest
from triptych_services.frontend.siblings.hub import ANSWER_S, Answers, Refusal
from triptych_services.frontend.siblings.link import Link, LinkClosed, Place

log = logging.getLogger(__name__)

SUPERVISOR_S = 2 * ANSWER_S
"""Time for the supervisor to answer, which may ask the other processes for it."""

_NUM_CLAIMS = 3
"""Times that an id is claimed: after its owner has said that it has ended, another client may have claimed it."""


class Siblings:
    """Owned by the app of a process that has siblings. Bound to one event loop."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._link = Link(self._handle)
        self._calls: dict[str, Callable[..., Any]] = {}
        """Name of what the others may ask -> what answers it, with a value or a coroutine."""
        self.are_ready = False
        """Whether all processes are ready, this one among them."""
        self.on_ready_changed: Callable[[], None] = lambda: None
        self._is_ready_here = False

    async def run(self) -> None:
        """Answer the others until the supervisor is gone."""
        await self._link.run(socket.socket(fileno=self.place.descriptor))

    def answer(self, name: str, call: Callable[..., Any]) -> None:
        """Let the others ask for something. `call` takes their arguments."""
        self._calls[name] = call

    def join(self) -> None:
        """Say that this process serves: from now on it is asked."""
        self._link.tell("join")

    def say_ready(self, is_ready: bool) -> None:
        """Say whether this process is ready, if that has changed."""
        if is_ready != self._is_ready_here:
            self._is_ready_here = is_ready
            self._link.tell("say_ready", is_ready)

    async def ask_others(self, name: str, *arguments: Any) -> list[Any]:
        """Return the answers of all other processes that serve, in no order.

        Raises:
            EngineUnavailable: One or the supervisor does not answer; what was asked for may have been done.
        """
        return _unpack(await self._ask("ask_others", name, pickle.dumps(arguments)))

    async def claim_or_find(self, caller: Caller, raw: RawRequest) -> str:
        """Hold the id of a new request until `release`; or return the token by which it goes on, if a request that is
        alive at another process is the same.

        Raises:
            DuplicateRequest: Another request has the id.
            EngineUnavailable: The supervisor does not answer.
            PermissionDenied: As `Caller.own`.
        """
        raw = caller.own(raw)
        if not has_chosen_id(raw):
            return ""
        for _ in range(_NUM_CLAIMS):
            if (owner := await self._claim(raw)) is None:
                return ""
            question = "token_of_duplicate", pickle.dumps((caller, raw))
            answers = _unpack(await self._ask("ask_one", owner, *question))
            token: str | None = next(iter(answers), None)
            if token:
                return token
            if token is not None:
                break
            # It has ended there, or died with its process; the supervisor has heard so before it passed on the answer.
        raise DuplicateRequest(
            f"request_id: a request {raw.head.request_id!r} is alive; choose another id, or wait"
        )

    async def _claim(self, raw: RawRequest) -> int | None:
        """Hold an id, or return the process that has it. Raises EngineUnavailable: The supervisor does not answer."""
        asking = asyncio.ensure_future(self._link.ask("claim", raw.head.tenant, raw.head.request_id))
        try:
            async with asyncio.timeout(SUPERVISOR_S):
                owner: int | None = await asyncio.shield(asking)
        except (asyncio.CancelledError, TimeoutError) as error:
            # its client has left or waits no longer, while the supervisor may hold the id for it
            asking.add_done_callback(lambda done: self.release(raw) if _is_held(done) else None)
            raise _no_answer("claim") if isinstance(error, TimeoutError) else error from None
        except LinkClosed:
            raise _no_answer("claim") from None
        return owner

    def release(self, raw: RawRequest) -> None:
        """Hold the id of a request no longer, which has ended."""
        if has_chosen_id(raw):
            self._link.tell("release", raw.head.tenant, raw.head.request_id)

    def claim_again(self, raw: RawRequest) -> None:
        """Hold the id of a stream that goes on here, until `release`; where it began it is held, too, until it ends."""
        if has_chosen_id(raw):
            self._link.tell("claim_again", raw.head.tenant, raw.head.request_id)

    def answer_metrics(self, alike: Collection[str]) -> None:
        """Let the others ask for the metrics of this process.

        Args:
            alike: Names of those which all processes have with the same values. They are not added up.
        """
        everywhere = frozenset((*alike, *_ALIKE))

        def collect() -> list[Metric]:
            return [metric for metric in REGISTRY.collect() if metric.name not in everywhere]

        # in a thread, as a scrape of this process alone
        self.answer("metrics", lambda: asyncio.to_thread(collect))

    async def find_metrics(self) -> Collector:
        """Return the metrics of all processes together.

        Raises:
            EngineUnavailable: One does not answer: a sum without it would look like counters that fall.
        """
        return SummedMetrics(REGISTRY, await self.ask_others("metrics"))

    async def admit(self, method: str, caller: Caller) -> None:
        """Ask the supervisor's windows; see `RateLimits`. Raises RateLimited, EngineUnavailable."""
        refusal: Refusal | None = await self._ask(method, caller)
        if refusal is not None:
            error = RateLimited(refusal.message, refusal.retry_after_s)
            error.metadata = refusal.metadata
            raise error

    def note(self, method: str, *arguments: Any) -> None:
        """Let the supervisor's windows count something."""
        self._link.tell(method, *arguments)

    async def _ask(self, method: str, *arguments: Any) -> Any:
        """Return the supervisor's answer.

        Raises:
            EngineUnavailable: It does not answer, or is gone.
        """
        try:
            async with asyncio.timeout(SUPERVISOR_S):
                return await self._link.ask(method, *arguments)
        except (TimeoutError, LinkClosed):
            raise _no_answer(method) from None

    def _handle(self, method: str, arguments: tuple[Any, ...]) -> Any:
        if method == "note_ready":
            (self.are_ready,) = arguments
            self.on_ready_changed()
            return None
        if method == "ping":
            return None
        return self._answer(*arguments)

    async def _answer(self, name: str, packed: bytes) -> bytes:
        result = self._calls[name](*pickle.loads(packed))
        if hasattr(result, "__await__"):
            result = await result
        return pickle.dumps(result, pickle.HIGHEST_PROTOCOL)


class SharedRateLimits(RateLimits):
    """The limits of keys as they hold for all processes together: the supervisor has the windows."""

    def __init__(self, siblings: Siblings, on_refused: Callable[[Caller, str], None]) -> None:
        """`on_refused`: See `RateLimits`."""
        super().__init__(on_refused=on_refused)
        self._siblings = siblings

    async def admit(self, caller: Caller) -> None:
        await self._ask("admit", caller)

    async def admit_tokens(self, caller: Caller) -> None:
        await self._ask("admit_tokens", caller)

    async def check_guess(self, caller: Caller) -> None:
        await self._ask("check_guess", caller)

    def note_guess(self, caller: Caller) -> None:
        if caller.has_limits:
            self._siblings.note("note_guess", caller)

    def charge(self, caller: Caller, num_tokens: int) -> None:
        if caller.tokens_per_minute and num_tokens:
            self._siblings.note("charge", caller, num_tokens)

    async def _ask(self, method: str, caller: Caller) -> None:
        if not caller.has_limits:
            return
        try:
            await self._siblings.admit(method, caller)
        except RateLimited as error:
            self._on_refused(caller, error.metadata["unit"])
            raise


class SummedMetrics(Collector):
    """The metrics of several processes as if one had done all the work. Collected once, on any thread."""

    def __init__(self, own: Collector, others: Sequence[Sequence[Metric]]) -> None:
        """
        Args:
            own: The metrics of this process, those among them that all processes have with the same values.
            others: Those of each other process, without the latter.
        """
        self._own = own
        self._others = others

    def collect(self) -> Iterator[Metric]:
        name_to_metric = {metric.name: copy.copy(metric) for metric in self._own.collect()}
        for metric in (metric for metrics in self._others for metric in metrics):
            total = name_to_metric.setdefault(metric.name, copy.copy(metric))
            if total.samples is metric.samples:  # this process has none of that name
                continue
            found = {(sample.name, *sorted(sample.labels.items())): sample for sample in total.samples}
            for sample in metric.samples:
                key = sample.name, *sorted(sample.labels.items())
                known = found.get(key)
                value = sample.value if known is None else _combine(sample.name)(known.value, sample.value)
                found[key] = sample._replace(value=value)
            total.samples = list(found.values())
        yield from name_to_metric.values()


def _combine(name: str) -> Callable[[float, float], float]:
    """Return how the values of a sample are put together."""
    if name.endswith("_created") or name == "process_start_time_seconds":
        return min
    return max if "_oldest_" in name else operator.add


_ALIKE = ("triptych_build", "triptych_certificate_expiry_seconds", "python_info")


def has_chosen_id(raw: RawRequest) -> bool:
    """Return whether a client may have chosen a request's id. Over HTTP all ids end with random digits."""
    return raw.api != "http" and raw.head.request_id != ""


def _is_held(claim: asyncio.Future[int | None]) -> bool:
    return not claim.cancelled() and claim.exception() is None and claim.result() is None


def _unpack(answers: Answers) -> list[Any]:
    if answers.silent:
        raise EngineUnavailable(_why_silent(answers.silent))
    return [pickle.loads(packed) for packed in answers.packed]


def _no_answer(method: str) -> EngineUnavailable:
    return EngineUnavailable(
        f"the supervisor of this frontend's processes has not answered {method} within {SUPERVISOR_S:g} s; try again, "
        "and start the frontend again if that stays so"
    )


def _why_silent(silent: Sequence[int]) -> str:
    names = ", ".join(f"frontend/{index}" for index in silent)
    return (
        f"{names}: no answer within {ANSWER_S:g} s, so this is known of the other processes only; try again"
    )
