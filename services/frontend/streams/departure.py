"""How a frontend leaves: its streams go on at others, at once where there is another one, else when its time is over.

SIGTERM ──► engines know that no stream can go on here ──► streams whose clients resume are handed over,
                                                           each while its engine has another frontend
        ──► drain_s is over: all that their engines keep are left there; the rest end with an error
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from triptych_services.frontend.routing.router import Router
from triptych_services.frontend.streams.registry import AliveRequest, AliveRequests

_KNOWN_S = 1.0
"""An engine answers between two steps. One that is silent for so long is not waited for."""
_POLL_S = 0.05


class Departure:
    """Owned by the generator, which takes no more requests."""

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
        """Return when all engines that are there know that no stream can go on here.

        Two frontends that leave together would hand their streams to each other otherwise.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + _KNOWN_S
        while loop.time() < until and not all(engine.knows_state for engine in self._router.engines):
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
