"""Usage tells what of the prompt the first engine found in its cache, wherever a stream goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.helpers.frontend import FrontendCore, answer, frontend_core
from tests.helpers.units import BLOCK_SIZE, Unit, running_units
from triptych.types.events import AdmittedEvent, DeltaEvent, FinishedEvent, ResumableEvent
from triptych_services.frontend.requests.raw import RawRequest
from triptych_services.frontend.streams.migrator import MigrationTerms
from triptych_services.frontend.streams.resume import ResumeToken, SeenChoice

PROMPT = list(range(20, 20 + 5 * BLOCK_SIZE + 1))
NUM_CACHED = 5 * BLOCK_SIZE
NUM_TOKENS = 120  # so that an engine has some to go when its client has read a few, on a busy machine too
DEADLINE_S = 30.0


@dataclass
class Client:
    """One stream as its client has it."""

    token: str = ""
    token_ids: list[int] = field(default_factory=list)
    finished: FinishedEvent | None = None

    async def read(
        self,
        events: AsyncGenerator[Any, None],
        *,
        at: int = 0,
        then: Callable[[], Awaitable[None]] | None = None,
        until: int | None = None,
    ) -> None:
        """Read to the end, or until there are so many tokens. After `at` of them let something happen."""
        async with asyncio.timeout(DEADLINE_S):
            async for event in events:
                match event:
                    case AdmittedEvent() | ResumableEvent():
                        self.token = event.resume_token
                    case DeltaEvent():
                        self.token_ids += event.token_ids
                    case FinishedEvent():
                        self.finished = event
                if then is not None and len(self.token_ids) >= at:
                    await then()
                    then = None
                if until is not None and len(self.token_ids) >= until:
                    return

    def go_on_at(self, frontend: FrontendCore) -> AsyncGenerator[Any, None]:
        seen = {0: SeenChoice(len(self.token_ids))}
        return frontend.generator.attach(ResumeToken.parse(self.token), seen, "test")

    @property
    def num_cached_tokens(self) -> int:
        assert self.finished is not None
        return self.finished.usage.num_cached_tokens


def request() -> RawRequest:
    sampling = {"max_tokens": NUM_TOKENS, "seed": 3, "ignore_eos": True}
    return RawRequest(api="test", prompt=PROMPT, sampling=sampling, answer={})


class FirstInLine:
    """A routing policy that takes the first engine that is ready."""

    looks_at_prompts = False

    def choose(self, *_: object) -> int:
        return 0


@dataclass
class Stand:
    """Two engines, of which one has the prompt's blocks, and two frontends that know both."""

    units: list[Unit]
    first: FrontendCore
    second: FrontendCore

    async def lose_engine(self) -> None:
        """End the engine that has requests."""
        (busy,) = [unit for unit in self.units if unit.num_requests]
        await busy.die()


@asynccontextmanager
async def stand() -> AsyncIterator[Stand]:
    terms: dict[str, Any] = {"moves": MigrationTerms(), "keep_s": 10.0, "policy": FirstInLine()}
    async with (
        running_units(2) as (units, _),
        frontend_core(*units, **terms) as first,
        frontend_core(*units, **terms) as second,
    ):
        cold = await answer(first.generator, request())
        assert cold.finished.usage.num_cached_tokens == 0
        warm = await answer(first.generator, request())
        assert warm.finished.usage.num_cached_tokens == NUM_CACHED
        yield Stand(units, first, second)


async def test_usage_after_a_move() -> None:
    async with stand() as s, aclosing(s.first.generator.generate(request())) as events:
        client = Client()
        await client.read(events, at=5, then=s.lose_engine)
        assert client.finished is not None
        assert client.finished.num_moves == 1
        assert client.num_cached_tokens == NUM_CACHED


async def test_usage_after_a_move_and_then_another_frontend() -> None:
    async with stand() as s, aclosing(s.first.generator.generate(request())) as events:
        client = Client()
        await client.read(events, at=5, then=s.lose_engine, until=12)
        async with aclosing(client.go_on_at(s.second)) as rest:
            await client.read(rest)
        assert client.finished is not None
        assert client.finished.num_moves == 0, "the second frontend has seen no move"
        assert client.num_cached_tokens == NUM_CACHED


async def test_usage_after_another_frontend_and_then_a_move() -> None:
    async with stand() as s, aclosing(s.first.generator.generate(request())) as events:
        client = Client()
        await client.read(events, until=3)
        async with aclosing(client.go_on_at(s.second)) as rest:
            await client.read(rest, at=8, then=s.lose_engine)
        assert client.finished is not None
        assert client.finished.num_moves == 1
        assert client.num_cached_tokens == NUM_CACHED
