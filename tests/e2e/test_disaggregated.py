"""One engine computes prompts, another one decodes, as processes: with real weights, and with processes that die."""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.e2e.test_grouped_models import save
from tests.helpers.kv_proxy import KvProxy, kv_proxy, slow
from tests.helpers.processes import Service, free_port, service_process
from tests.helpers.stack import FakeFrontend
from triptych.types.kv_transfer import KvSource
from triptych.types.outputs import FinishedRequest

BLOCK_SIZE = 16
DEADLINE_S = 180.0
NUM_TRIES = 3
SIMULATED = ("--simulation.enabled=true", "--simulation.base-ms=1", "--scheduler.max-num-batched-tokens=256")
REAL = (
    "--model.dtype=float32",
    "--worker.num-threads=1",
    "--cache.num-blocks=200",
    "--model.max-model-len=1024",
    "--scheduler.max-num-batched-tokens=128",
    "--scheduler.max-num-seqs=8",
)


@dataclass
class Processes:
    """A worker and an engine that prefill, a worker and an engine that decode, and a frontend of both."""

    workers: list[Service]
    engines: list[Service]
    prefill: FakeFrontend
    decode: FakeFrontend
    proxy: KvProxy
    restart: AsyncExitStack
    worker_flags: list[Sequence[str]]
    directory: Path
    numbers: Iterator[int] = field(default_factory=partial(itertools.count, 1))
    """Numbers of the requests to come."""

    async def submit(self, number: int, prompt: Sequence[int], *, ready_in_s: float, **sampling: Any) -> None:
        lease = secrets.token_bytes(16)
        endpoint = replace(self.prefill.welcomes[-1].kv_endpoint, address=self.proxy.address)
        greedy = {"max_tokens": 1, "temperature": 0.0}
        await self.prefill.submit(number, prompt, sampling=greedy, kv_lease=lease)
        source = KvSource(endpoint, lease, ready_in_s)
        await self.decode.submit(number, prompt, sampling=sampling, kv_source=source)

    async def result(self, number: int, frontend: FakeFrontend | None = None) -> list[int]:
        frontend = frontend or self.decode
        async with asyncio.timeout(DEADLINE_S):
            while number not in frontend.ends:
                await asyncio.sleep(0.02)
        end = frontend.ends[number]
        assert isinstance(end, FinishedRequest), end
        return frontend.tokens[number]

    async def pull(
        self, draw: Callable[[int], list[int]], num_tokens: int, **sampling: Any
    ) -> list[tuple[int, list[int], list[int]]]:
        """Answer prompts, up to one of which so many tokens were pulled. Return each with its number and its answer.

        A link that is silent for 3 s is given up, and what has not come is computed where it is needed. So a machine
        that stops a process for so long loses a pull, and another prompt tries again.

        Args:
            draw: Returns the prompt of a seed.
        """
        answers = []
        for attempt in range(NUM_TRIES):
            number, prompt = next(self.numbers), draw(attempt)
            await self.submit(number, prompt, ready_in_s=120.0, **sampling)
            answers.append((number, prompt, await self.result(number)))
            end = self.decode.ends[number]
            assert isinstance(end, FinishedRequest)
            if end.num_cached_tokens == num_tokens:
                return answers
        raise AssertionError(f"{end.num_cached_tokens} tokens were pulled in place of {num_tokens}")

    async def start_worker(self, index: int) -> None:
        """Start a worker again at its port."""
        process = service_process("worker", self.directory, *self.worker_flags[index])
        self.workers[index] = await self.restart.enter_async_context(process)


@asynccontextmanager
async def processes(directory: Path, *flags: str) -> AsyncIterator[Processes]:
    async with AsyncExitStack() as stack:
        workers, engines, frontends, worker_flags = [], [], [], []
        for role in ("prefill", "decode"):
            own = (
                f"--worker.port={(port := free_port())}",
                "--worker.kv-transfer=true",
                "--worker.kv-transfer-port=0",
                *flags,
            )
            worker_flags.append(own)
            workers.append(await stack.enter_async_context(service_process("worker", directory, *own)))
            engine = service_process(
                "enginecore",
                directory,
                f"--engine.role={role}",
                f"--engine.worker-address=127.0.0.1:{port}",
                "--engine.kv-lease-s=2",
                "--engine.resume-ttl-s=2",
                *flags,
            )
            engines.append(await stack.enter_async_context(engine))
        proxy = stack.enter_context(kv_proxy())
        for engine in engines:
            frontend = FakeFrontend(f"127.0.0.1:{await engine.port()}")
            await frontend.start()
            stack.push_async_callback(frontend.stop)
            frontends.append(frontend)
        async with asyncio.timeout(DEADLINE_S):
            for frontend in frontends:
                while not (frontend.welcomes and frontend.welcomes[-1].ready):
                    await asyncio.sleep(0.02)
        host, _, port_text = frontends[0].welcomes[-1].kv_endpoint.address.rpartition(":")
        proxy.target = (host, int(port_text))
        yield Processes(workers, engines, *frontends, proxy, stack, worker_flags, directory)


def make_prompt(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(1000, 40_000, length).tolist()


@pytest.mark.thorough
async def test_real_blocks_give_the_tokens_of_one_engine(tmp_path: Path) -> None:
    # however busy the machine is; a pull that broke leaves its lease to time
    patient = ("--engine.kv-lease-s=20", "--engine.resume-ttl-s=120")
    async with processes(tmp_path, *REAL, *patient) as stack:
        for length, temperature in [(300, 0.0), (517, 1.0), (64, 0.7)]:
            sampling = {"max_tokens": 12, "temperature": temperature}
            num_whole = min(length // BLOCK_SIZE * BLOCK_SIZE, length - 1)
            for number, prompt, tokens in await stack.pull(
                partial(make_prompt, length), num_whole, **sampling
            ):
                await stack.prefill.submit(100 + number, prompt, sampling=sampling, seed=number)
                assert tokens == await stack.result(100 + number, stack.prefill)
        for frontend in (stack.prefill, stack.decode):
            await frontend.wait_status(lambda status: status.num_used_blocks == 0)


@torch.inference_mode()
def assert_likeliest(oracle: Any, prompt: list[int], tokens: list[int]) -> None:
    """Check that each token is transformers' choice after all before it."""
    logits = oracle(torch.tensor([[*prompt, *tokens[:-1]]])).logits[0, -len(tokens) :]
    assert len(tokens) == 12
    assert tokens == logits.argmax(1).tolist()


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["Gemma 3", "Qwen3-Next", "Falcon-H1", "Mamba"])
async def test_models_of_several_groups_give_transformers_tokens(family: str, tmp_path: Path) -> None:
    """Prompts arrive whole; then the worker that prefills is killed in the middle, and the rest is computed."""
    oracle = save(family, tmp_path)
    flags = (*REAL, f"--model.model={tmp_path}", "--model.quantization=none", "--cache.state-interval=64")
    async with processes(
        tmp_path, *flags, "--model.max-model-len=512", "--engine.kv-lease-s=120", "--engine.resume-ttl-s=120"
    ) as stack:
        sampling = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}

        def draw(length: int, seed: int) -> list[int]:
            return np.random.default_rng(1000 * seed + length).integers(3, 250, length).tolist()

        for length in (300, 257, 64, 129):
            num_whole = (length - 1) // BLOCK_SIZE * BLOCK_SIZE
            for _, prompt, tokens in await stack.pull(partial(draw, length), num_whole, **sampling):
                assert_likeliest(oracle, prompt, tokens)
        is_in_the_middle, is_killed = threading.Event(), threading.Event()

        def lose_rest(passed: int, data: bytes) -> bytes | None:
            if passed + len(data) <= 5_000:
                return data
            is_in_the_middle.set()
            is_killed.wait(DEADLINE_S)
            return None

        stack.proxy.damage = lose_rest
        prompts = {next(stack.numbers): draw(length, 0) for length in (330, 345)}
        for number, prompt in prompts.items():
            await stack.submit(number, prompt, ready_in_s=120.0, **sampling)
        assert await asyncio.to_thread(is_in_the_middle.wait, DEADLINE_S)
        os.kill(stack.workers[0].process.pid, signal.SIGKILL)
        is_killed.set()
        for number, prompt in prompts.items():
            assert_likeliest(oracle, prompt, await stack.result(number))
            end = stack.decode.ends[number]
            assert isinstance(end, FinishedRequest)
            assert end.num_cached_tokens == 0, "it came in the middle, and a part of the groups is no hit"
        await stack.decode.wait_status(lambda status: status.num_used_blocks == 0)


@pytest.mark.parametrize(
    ("victim", "kind"),
    [
        ("prefill worker", signal.SIGKILL),
        pytest.param("prefill worker", signal.SIGSTOP, marks=pytest.mark.thorough),
        pytest.param("prefill engine", signal.SIGKILL, marks=pytest.mark.thorough),
        pytest.param("decode worker", signal.SIGKILL, marks=pytest.mark.thorough),
    ],
)
async def test_a_death_in_the_middle_of_transfers_changes_no_token(
    tmp_path: Path, victim: str, kind: signal.Signals
) -> None:
    async with processes(tmp_path, *SIMULATED) as stack:
        prompts = {number: make_prompt(1000 + 100 * number, number) for number in range(1, 7)}
        sampling = {"max_tokens": 20, "temperature": 1.0}
        expected = {}
        for number, prompt in prompts.items():
            await stack.prefill.submit(
                100 + number, prompt, sampling=sampling, seed=number, cache_salt="other"
            )
            expected[number] = await stack.result(100 + number, stack.prefill)
        stack.proxy.damage = slow(30_000)
        for number, prompt in prompts.items():
            await stack.submit(number, prompt, ready_in_s=4.0, **sampling)
        await stack.decode.wait_status(lambda status: status.num_used_blocks > 100)
        await asyncio.sleep(0.1)
        tier, index = victim.split()[1], ("prefill", "decode").index(victim.split()[0])
        service = (stack.workers if tier == "worker" else stack.engines)[index]
        os.kill(service.process.pid, kind)
        if victim == "decode worker":
            await service.process.wait()
            await stack.start_worker(index)
        for number in prompts:
            assert await stack.result(number) == expected[number]
        await stack.decode.wait_status(lambda status: status.num_used_blocks == 0)
        if victim == "decode worker":
            await stack.prefill.wait_status(lambda status: status.num_used_blocks == 0)
        if kind is signal.SIGSTOP:
            os.kill(service.process.pid, signal.SIGCONT)
