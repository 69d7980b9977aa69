"""Engines of simulated workers in this process, behind a frontend's core: some die, drain or freeze, others go on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from tests.helpers.frontend import FrontendCore, frontend_core
from tests.helpers.stack import EngineStack, WorkerStack, make_config
from tests.worker.simulated import simulated_runner
from triptych.config import EngineConfig
from triptych.config.step_times import StepTimeModel
from triptych_services.frontend.streams.migrator import MigrationTerms
from triptych_services.worker.simulation.device import SimulatedDevice
from triptych_services.worker.simulation.runner import SimulatedRunner

BLOCK_SIZE = 4
NUM_BLOCKS = 400


def unit_config(
    worker_port: int = 0,
    *,
    name: str = "engine-0",
    resume_ttl_s: float = 10.0,
    drain_s: float = 30.0,
    **scheduler: Any,
) -> EngineConfig:
    config = make_config(worker_port, **{"max_num_seqs": 8, **scheduler})
    engine = replace(config.engine, engine_id=name, resume_ttl_s=resume_ttl_s, drain_s=drain_s)
    return replace(config, engine=engine, cache=replace(config.cache, block_size=BLOCK_SIZE))


def timed_runner(step_ms: float, max_num_seqs: int = 8, **identity: str) -> SimulatedRunner:
    """Return a simulated runner whose steps take real time. `identity`: `numerics` and `weights` of its facts."""
    step_time = StepTimeModel(base_ms=step_ms, prefill_token_us=0, decode_row_us=0, context_token_ns=0)
    return simulated_runner(
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        max_num_seqs=max_num_seqs,
        max_model_len=256,
        eos_probability=0.02,
        device=SimulatedDevice(step_time),
        **identity,
    )


@dataclass
class Unit:
    """One engine with its worker."""

    name: str
    worker: WorkerStack
    engine: EngineStack
    config: EngineConfig
    is_dead: bool = False

    @property
    def address(self) -> str:
        return self.engine.address

    async def die(self) -> None:
        """End the engine as kill -9 does: its streams break and its port refuses."""
        self.is_dead = True
        await self.engine.kill()

    async def start_again(self) -> None:
        """Start another engine on the same port, with the same worker."""
        port = int(self.engine.address.rpartition(":")[2])
        self.engine = EngineStack(self.config, port)
        await self.engine.start()
        self.is_dead = False

    async def replace_worker(self, step_ms: float = 2.0, **identity: str) -> None:
        """Stop the worker and start another one on its port, of other `numerics` or `weights`."""
        port = self.worker.port
        await self.worker.stop()
        self.worker = WorkerStack(self.config, timed_runner(step_ms, **identity))
        await self.worker.start(port)

    @property
    def num_requests(self) -> int:
        return 0 if self.is_dead else self.engine.loop.num_requests

    @property
    def num_used_blocks(self) -> int:
        return 0 if self.is_dead else self.engine.loop.operator.status().num_used_blocks


@asynccontextmanager
async def running_units(
    count: int = 2,
    *,
    step_ms: float = 2.0,
    numerics: Iterable[str] = (),
    moves: MigrationTerms | None = None,
    **options: Any,
) -> AsyncIterator[tuple[list[Unit], FrontendCore]]:
    """Engines that are ready, and a frontend's core in front of them. `options`: of `unit_config`."""
    numerics = list(numerics) or ["simulated"] * count
    async with AsyncExitStack() as stack:
        units = []
        for number in range(count):
            max_num_seqs = options.get("max_num_seqs", 8)
            worker = WorkerStack(
                unit_config(**options), timed_runner(step_ms, max_num_seqs, numerics=numerics[number])
            )
            await worker.start()
            config = unit_config(worker.port, name=f"engine-{number}", **options)
            unit = Unit(f"engine-{number}", worker, EngineStack(config), config)
            await unit.engine.start()
            stack.push_async_callback(_stop, unit)
            units.append(unit)
        core = await stack.enter_async_context(frontend_core(*units, moves=moves or MigrationTerms()))
        yield units, core


async def _stop(unit: Unit) -> None:
    await unit.engine.stop()
    await unit.worker.stop()


async def wait_until_idle(units: Iterable[Unit], deadline_s: float = 30.0) -> None:
    """Wait until no engine has a request or holds a block."""
    async with asyncio.timeout(deadline_s):
        while any(unit.num_requests or unit.num_used_blocks for unit in units):
            await asyncio.sleep(0.01)
