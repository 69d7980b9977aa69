"""The real model falls asleep in the middle of a stream, and the stream goes on."""

from __future__ import annotations

import asyncio

import grpc.aio
import pytest

from triptych.admin.v1 import admin_pb2, admin_pb2_grpc
from triptych.client.grpc_client import GenerationClient
from triptych.launcher.local_cluster import LocalCluster
from triptych.types.events import DeltaEvent

pytestmark = pytest.mark.model

PROMPT = "The history of the sea begins with"
SAMPLING = {"max_tokens": 120, "temperature": 0.7, "seed": 11, "ignore_eos": True}


async def stream(client: GenerationClient, tokens: list[int], started: asyncio.Event) -> list[int]:
    async for event in client.generate(PROMPT, SAMPLING):
        if isinstance(event, DeltaEvent):
            tokens += event.token_ids
            if len(tokens) > 4:
                started.set()
    return tokens


@pytest.mark.thorough
async def test_a_stream_goes_on_over_both_levels_of_sleep_with_the_same_tokens(cluster: LocalCluster) -> None:
    async with (
        asyncio.timeout(120),
        GenerationClient(cluster.address) as client,
        grpc.aio.insecure_channel(cluster.admin_address) as channel,
    ):
        admin = admin_pb2_grpc.AdminServiceStub(channel)
        expected = await stream(client, [], asyncio.Event())
        assert len(expected) == SAMPLING["max_tokens"]
        for level in (1, 2):
            tokens: list[int] = []
            started = asyncio.Event()
            task = asyncio.create_task(stream(client, tokens, started))
            await started.wait()
            response = await admin.Sleep(admin_pb2.SleepRequest(level=level, mode=admin_pb2.PAUSE_MODE_KEEP))
            status = (await admin.GetStatus(admin_pb2.GetStatusRequest())).status
            assert (status.state, status.num_waiting) == (admin_pb2.ENGINE_STATE_ASLEEP, 1)
            assert not task.done(), "it ended too soon"
            if level == 2:
                assert response.released_bytes > 300 << 20, "of float32 weights of 135M"
            await admin.Wake(admin_pb2.WakeRequest())
            assert await task == expected
            status = (await admin.GetStatus(admin_pb2.GetStatusRequest())).status
            assert status.state == admin_pb2.ENGINE_STATE_READY
