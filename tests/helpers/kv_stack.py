"""Two workers that transfer KV blocks, an engine for each, and a frontend that speaks to both; all in this process."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from tests.helpers.kv_proxy import KvProxy, kv_proxy
from tests.helpers.stack import EngineStack, FakeFrontend, WorkerStack, make_config
from tests.worker.simulated import simulated_runner
from triptych.config import EngineConfig
from triptych.config.step_times import StepTimeModel
from triptych.types.facts import EngineStatus
from triptych.types.kv_transfer import KvSource
from triptych.types.outputs import FinishedRequest
from triptych_services.worker.kv_transfer.service import KvTransferService
from triptych_services.worker.simulation.device import SimulatedDevice
from triptych_services.worker.simulation.runner import SimulatedRunner

STEP_TIME = StepTimeModel(base_ms=1, prefill_token_us=20, decode_row_us=1, context_token_ns=0)


def make_simulated_runner(config: EngineConfig, num_blocks: int) -> SimulatedRunner:
    """Return a runner whose steps take a millisecond and 20 microseconds per token of a prompt."""
    return simulated_runner(
        num_blocks=num_blocks,
        block_size=16,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_model_len=2048,
        budget=config.scheduler.max_num_batched_tokens,
        device=SimulatedDevice(STEP_TIME),
        has_blocks=True,
    )


class KvWorkerStack(WorkerStack):
    """A worker that takes part in transfers."""

    def __init__(self, config: EngineConfig, runner: Any) -> None:
        self.transfers = KvTransferService(_with_any_port(config), runner.facts, runner.block_store)
        self.endpoint = self.transfers.endpoint
        runner._facts = replace(runner.facts, kv_endpoint=self.endpoint)
        super().__init__(config, runner)
        self._lease.kv_transfers = self.transfers

    async def stop(self, grace_s: float = 0.0) -> None:
        self.transfers.close()
        await super().stop(grace_s)


class KvStack:
    """The engine that prefills, the one that decodes, and what is between their workers."""

    def __init__(
        self,
        workers: Sequence[KvWorkerStack],
        engines: Sequence[EngineStack],
        frontends: Sequence[FakeFrontend],
        proxy: KvProxy,
    ) -> None:
        self.prefill_worker, self.decode_worker = workers
        self.prefill_engine, self.decode_engine = engines
        self.prefill, self.decode = frontends
        self.proxy = proxy
        self._number = 0

    async def submit(
        self,
        prompt: Sequence[int],
        *,
        seed: int = 1,
        max_tokens: int = 8,
        ready_in_s: float = 0.2,
        **fields: Any,
    ) -> int:
        """Have a prompt computed on the one, and its output on the other; return its number at both."""
        self._number += 1
        lease = secrets.token_bytes(16)
        endpoint = replace(self.prefill_worker.endpoint, address=self.proxy.address)
        sampling = {"max_tokens": 1, "temperature": 0.0}
        await self.prefill.submit(self._number, prompt, sampling=sampling, kv_lease=lease)
        await self.decode.submit(
            self._number,
            prompt,
            sampling={"max_tokens": max_tokens, **fields},
            seed=seed,
            kv_source=KvSource(endpoint, lease, ready_in_s),
        )
        return self._number

    async def result(self, number: int) -> list[int]:
        """Return the tokens of a request that ends well."""
        await self.decode.wait_for(lambda: number in self.decode.ends)
        end = self.decode.ends[number]
        assert isinstance(end, FinishedRequest), end
        return self.decode.tokens[number]

    async def num_cached(self, number: int) -> int:
        """Return the tokens of its prompt that a request found in the cache."""
        await self.result(number)
        end = self.decode.ends[number]
        assert isinstance(end, FinishedRequest)
        return end.num_cached_tokens

    async def expected(self, prompt: Sequence[int], *, seed: int = 1, max_tokens: int = 8) -> list[int]:
        """Return the tokens that the engine that prefills would give by itself."""
        self._number += 1
        number = self._number
        await self.prefill.submit(number, prompt, sampling={"max_tokens": max_tokens}, seed=seed)
        await self.prefill.wait_for(lambda: number in self.prefill.ends)
        return self.prefill.tokens[number]

    def statuses(self) -> tuple[EngineStatus, EngineStatus]:
        return self.prefill_engine.loop.operator.status(), self.decode_engine.loop.operator.status()

    async def wait_empty(self) -> None:
        """Until no block is held at either end."""
        for frontend in (self.prefill, self.decode):
            await frontend.wait_status(lambda status: status.num_used_blocks == 0)


def _with_any_port(config: EngineConfig) -> EngineConfig:
    return replace(config, worker=replace(config.worker, kv_transfer=True, kv_transfer_port=0))


@asynccontextmanager
async def kv_stack(
    num_blocks: int = 400,
    *,
    lease_s: float = 10.0,
    make_runner: Callable[[EngineConfig, int], Any] = make_simulated_runner,
    **scheduler: Any,
) -> AsyncIterator[KvStack]:
    """`make_runner`: returns a worker's runner with so many blocks."""
    scheduler = {"max_num_batched_tokens": 128, "max_num_seqs": 8, **scheduler}
    workers, engines, frontends = [], [], []
    with kv_proxy() as proxy:
        try:
            for role in ("prefill", "decode"):
                config = make_config(**scheduler)
                worker = KvWorkerStack(config, make_runner(config, num_blocks))
                workers.append(worker)
                await worker.start()
                config = make_config(worker.port, **scheduler)
                config = replace(config, engine=replace(config.engine, role=role, kv_lease_s=lease_s))
                engines.append(EngineStack(config))
                await engines[-1].start()
                frontends.append(FakeFrontend(engines[-1].address))
                await frontends[-1].start()
            for frontend in frontends:
                await frontend.wait_ready()
            host, _, port = workers[0].endpoint.address.rpartition(":")
            proxy.target = (host, int(port))
            yield KvStack(workers, engines, frontends, proxy)
        finally:
            for part in (*frontends, *engines, *workers):
                await part.stop()
