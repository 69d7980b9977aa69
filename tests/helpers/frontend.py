"""A frontend's core in this process, in front of fake engines; no doors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from tests.helpers.byte_tokenizer import byte_tokenizer
from tests.helpers.fake_engine import DEADLINE_S, FakeEngine, eventually
from tests.helpers.stack import EngineStack
from triptych.observe.metrics import FrontendMetrics
from triptych.text.tokenizer import Tokenizer
from triptych.types.events import AdmittedEvent, DeltaEvent, Event, FinishedEvent
from triptych.types.submit import RequestHead
from triptych_services.frontend.engines.client import EngineClient
from triptych_services.frontend.generate import Generator
from triptych_services.frontend.requests.raw import RawRequest
from triptych_services.frontend.requests.text_model import TextModel
from triptych_services.frontend.routing.policy import RoutingPolicy
from triptych_services.frontend.routing.router import Router
from triptych_services.frontend.streams.migrator import MigrationTerms, Migrator

NEVER = MigrationTerms(policy="never")


@dataclass(frozen=True)
class FrontendCore:
    """The objects that `app.run` wires, without the servers."""

    generator: Generator
    router: Router
    registry: CollectorRegistry
    migrator: Migrator

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
    moves: MigrationTerms = NEVER,
    keep_s: float = 0.0,
    policy: RoutingPolicy | None = None,
    max_unsent_bytes: int = 256 << 20,
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
    migrator = Migrator(router, metrics, moves)
    generator = Generator(router, metrics, migrator, keep_s=keep_s, max_unsent_bytes=max_unsent_bytes)
    generator.set_text_model(TextModel(tokenizer or byte_tokenizer(), defaults or {}, directory, **parsers))
    tasks = [asyncio.create_task(client.run()) for client in router.engines]
    tasks.append(asyncio.create_task(migrator.run()))
    try:
        if waits:
            await eventually(lambda: all(client.is_ready for client in router.engines))
        yield FrontendCore(generator, router, registry, migrator)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def raw_request(prompt: object = "Hello", *, api: str = "test", **given: Any) -> RawRequest:
    """Return a request of the fields of `RawRequest` and of `RequestHead`."""
    head = {each.name: given.pop(each.name) for each in fields(RequestHead) if each.name in given}
    return RawRequest(api=api, prompt=prompt, head=RequestHead(**head), **given)


async def collect(generator: Generator, raw: RawRequest) -> list[Event]:
    async with asyncio.timeout(DEADLINE_S), aclosing(generator.generate(raw)) as events:
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
