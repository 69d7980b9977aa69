"""Several processes are one worker: they start, serve, sleep, stop and die as one."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import grpc.aio
import pytest

from triptych.admin.v1 import admin_pb2, admin_pb2_grpc
from triptych.client.grpc_client import GenerationClient
from triptych.config.loader import load_config
from triptych.errors import ConfigError
from triptych.launcher.launch import with_free_ports
from triptych.launcher.local_cluster import LocalCluster
from triptych.types.events import DeltaEvent

pytestmark = pytest.mark.model

READY_S = 180.0
DEADLINE_S = 60.0
SILENCE_S = 2.0
PROMPT = "The history of the sea begins with"
SAMPLING = {"max_tokens": 400, "temperature": 0.7, "seed": 11, "ignore_eos": True}
SIMULATED = {"simulation.enabled": "true", "simulation.base_ms": "3", "parallel.tensor_parallel_size": "3"}
"""The embedded model has three key heads."""


@contextmanager
def group_of_ranks(**flags: str) -> Iterator[tuple[LocalCluster, list[str]]]:
    """A stack whose worker has several ranks, and the lines of its log."""
    lines: list[str] = []
    config = load_config(env={}, flags={"parallel.silence_timeout_s": str(SILENCE_S), **flags})
    with LocalCluster(with_free_ports(config), on_log_line=lines.append) as stack:
        try:
            stack.wait_ready(READY_S)
            yield stack, lines
        finally:
            print("\n".join(lines[-60:]))


def ranks_of(stack: LocalCluster) -> dict[str, int]:
    return {name: pid for name, pid in stack.pids.items() if name.startswith("worker/")}


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def tokens_of(
    client: GenerationClient,
    tokens: list[int],
    prompt: str = PROMPT,
    sampling: Mapping[str, object] = SAMPLING,
) -> list[int]:
    async for event in client.generate(prompt, sampling):
        if isinstance(event, DeltaEvent):
            tokens += event.token_ids
    return tokens


async def wait_until(condition) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.02)


async def test_the_end_or_silence_of_any_rank_is_that_of_all_and_costs_no_token() -> None:
    with group_of_ranks(**SIMULATED) as (stack, lines):
        async with GenerationClient(stack.address) as client:
            expected = await tokens_of(client, [])
            assert len(expected) == SAMPLING["max_tokens"]
            faults = [
                ("worker/0", signal.SIGKILL),
                ("worker/1", signal.SIGKILL),
                ("worker/2", signal.SIGSTOP),
            ]
            for name, number in faults:
                tokens: list[int] = []
                stream = asyncio.create_task(tokens_of(client, tokens))
                await wait_until(lambda tokens=tokens: len(tokens) > 20)
                ranks = ranks_of(stack)
                os.kill(ranks[name], number)
                await wait_until(lambda ranks=ranks: not any(map(is_running, ranks.values())))
                async with asyncio.timeout(DEADLINE_S):
                    assert await stream == expected, f"{name} got {number!r}"
                assert ranks_of(stack).keys() == ranks.keys()
            assert any("rank 2" in line and "has been silent for 2 s" in line for line in lines)


async def test_sleep_and_drain_are_those_of_all_ranks() -> None:
    with group_of_ranks(**SIMULATED) as (stack, lines):
        async with (
            GenerationClient(stack.address) as client,
            grpc.aio.insecure_channel(stack.admin_address) as channel,
            asyncio.timeout(DEADLINE_S),
        ):
            admin = admin_pb2_grpc.AdminServiceStub(channel)
            expected = await tokens_of(client, [])
            await admin.Sleep(admin_pb2.SleepRequest(level=1, mode=admin_pb2.PAUSE_MODE_KEEP))
            stream = asyncio.create_task(tokens_of(client, []))
            await admin.Wake(admin_pb2.WakeRequest())
            assert await stream == expected
            # one rank that is asked to stop takes the others with it, in order
            ranks = ranks_of(stack)
            os.kill(ranks["worker/1"], signal.SIGTERM)
            await wait_until(lambda: not any(map(is_running, ranks.values())))
            assert await tokens_of(client, []) == expected
        assert not any("rank" in line and "ends, and all" in line for line in lines), "they left in order"
    assert not any(map(is_running, stack.pids.values()))


def test_heads_that_ranks_do_not_divide_are_refused_by_name() -> None:
    with (
        pytest.raises(
            ConfigError,
            match=r"worker/\d: cannot serve: parallel.tensor_parallel_size: 2 does not divide num_kv_heads = 3",
        ),
        group_of_ranks(**SIMULATED | {"parallel.tensor_parallel_size": "2"}),
    ):
        pass
