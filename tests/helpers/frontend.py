"""A frontend's core in this process, in front of fake engines; no doors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import CollectorRegistry

from tests.helpers.byte_tokenizer import byte_tokenizer
from tests.helpers.fake_engine import FakeEngine, eventually
from tests.helpers.stack import EngineStack
from triptych.observe.metrics import FrontendMetrics
from triptych.text.tokenizer import Tokenizer
from triptych.types.events import AdmittedEvent, DeltaEvent, Event, FinishedEvent
from triptych_services.frontend.engines.client import EngineClient
from triptych_services.frontend.engines.mover import Mover, MoveTerms
from triptych_services.frontend.engines.router import Router
from triptych_services.frontend.engines.routing_policy import RoutingPolicy
from triptych_services.frontend.generate import Generator
from triptych_services.frontend.requests.raw import RawRequest
from triptych_services.frontend.text_model import TextModel

NEVER = MoveTerms(policy="never")


@dataclass(frozen=True)
class FrontendCore:
    """The objects that `app.run` wires, without the servers."""

    generator: Generator
    router: Router
    registry: CollectorRegistry
    mover: Mover

    def count(self, outcome: str) -> float:
        """Requests that ended so."""
        return self.metric("requests_total", api="test", outcome=outcome)

    def metric(self, name: str, **labels: str) -> float:
        """A metric of the frontend, summed over the labels that are not given; 0: it was never observed."""
        return sum(
            sample.value
            for family in self.registry.collect()
            for sample in family.samples
            if sample.name == f"triptych_frontend_{name}" and labels.items() <= sample.labels.items()
        )


@asynccontextmanager
async def frontend_core(
    *engines: FakeEngine | EngineStack,
    tokenizer: Tokenizer | None = None,
    defaults: Mapping[str, float] | None = None,
    waits: bool = True,
    aliases: Mapping[str, str] | None = None,
    directory: Path = Path("no-checkpoint"),
    moves: MoveTerms = NEVER,
    keep_s: float = 0.0,
    policy: RoutingPolicy | None = None,
    **parsers: str,
) -> AsyncIterator[FrontendCore]:
    """Dial the engines; with `waits`, until all are ready. Nothing moves unless asked for.

    `parsers`: those of `TextModel`.
    """
    router, registry = Router(aliases or {}, policy), CollectorRegistry()
    router.engines = [
        EngineClient(engine.address, frontend_id="test", boot_id="boot", on_change=router.on_change)
        for engine in engines
    ]
    metrics = FrontendMetrics.create(registry)
    mover = Mover(router, metrics, moves)
    generator = Generator(router, metrics, mover, keep_s=keep_s)
    generator.set_text_model(TextModel(tokenizer or byte_tokenizer(), defaults or {}, directory, **parsers))
    tasks = [asyncio.create_task(client.run()) for client in router.engines]
    tasks.append(asyncio.create_task(mover.run()))
    try:
        if waits:
            await eventually(lambda: all(client.is_ready for client in router.engines))
        yield FrontendCore(generator, router, registry, mover)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def raw_request(prompt: object = "Hello", **fields: object) -> RawRequest:
    return RawRequest(api="test", prompt=prompt, **fields)  # type: ignore[arg-type]


async def collect(generator: Generator, raw: RawRequest) -> list[Event]:
    async with asyncio.timeout(10), aclosing(generator.generate(raw)) as events:
        return [event async for event in events]


@dataclass(frozen=True)
class Answer:
    """The events of one request, gathered."""

    admitted: AdmittedEvent
    deltas: list[DeltaEvent]
    finished: FinishedEvent

    def text(self, index: int = 0) -> str:
        return "".join(delta.text for delta in self.deltas if delta.index == index)

    def token_ids(self, index: int = 0) -> list[int]:
        return [token_id for delta in self.deltas if delta.index == index for token_id in delta.token_ids]


async def answer(generator: Generator, raw: RawRequest) -> Answer:
    """Also checks the order of events: admitted, deltas, finished."""
    first, *deltas, last = await collect(generator, raw)
    assert isinstance(first, AdmittedEvent)
    assert isinstance(last, FinishedEvent)
    assert all(isinstance(delta, DeltaEvent) for delta in deltas)
    return Answer(first, deltas, last)  # type: ignore[arg-type]
