"""A frontend of two processes around a simulated worker: what clients and operators see must not depend on which of
them has a connection."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from types import MappingProxyType

import grpc.aio
import httpx
import pytest

from tests.e2e.conftest import READY_S
from triptych.admin.v1 import admin_pb2, admin_pb2_grpc
from triptych.client.grpc_client import GenerationClient
from triptych.client.request import RequestOptions
from triptych.config.api_keys import entry_line
from triptych.config.loader import load_config
from triptych.errors import ConfigError, DuplicateRequest, RateLimited
from triptych.launcher.local_cluster import LocalCluster
from triptych.rpc.channel import open_channel
from triptych.types.events import DeltaEvent, FinishedEvent
from triptych.types.outputs import FinishReason
from triptych.v1 import generation_pb2, generation_pb2_grpc

pytestmark = [pytest.mark.model, pytest.mark.thorough]  # the model's config and tokenizer are read

PROMPT = "The story begins"
NUM_STREAMS = 16
"""Connections, of which both processes have some but for a chance of 2 in 65,536."""
ENDLESS = 4000
DEADLINE_S = 180.0
FREE_PORTS = {
    "frontend.admin_port": "0",
    "frontend.http_port": "0",
    **{f"{leaf}.port": "0" for leaf in ("frontend", "engine", "worker")},
    **{f"{leaf}.metrics_port": "0" for leaf in ("frontend", "engine", "worker")},
}


class Stack:
    """A stack that is ready, and the lines of its log."""

    def __init__(self, cluster: LocalCluster, lines: list[str]) -> None:
        self.cluster = cluster
        self.lines = lines

    @property
    def frontends(self) -> list[int]:
        """The process ids of those that serve, in the order of their start."""
        supervisor = self.cluster.pids["frontend"]
        children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
        return sorted(map(int, children))

    def num_lines(self, pattern: str) -> int:
        return sum(re.search(pattern, line) is not None for line in self.lines)

    async def until_logged(self, pattern: str, count: int = 1) -> None:
        """Wait for so many lines: frontends write several at once."""
        async with asyncio.timeout(DEADLINE_S):
            while self.num_lines(pattern) < count:
                await asyncio.sleep(0.02)

    async def kill_one(self) -> None:
        """Kill a process, and return when the supervisor has noticed."""
        os.kill(self.frontends[0], signal.SIGKILL)
        await self.until_logged(r"frontend/\d was killed by SIGKILL; starting it again at once")

    @asynccontextmanager
    async def clients(
        self, count: int = NUM_STREAMS, **options: str
    ) -> AsyncIterator[list[GenerationClient]]:
        """Clients with a connection each."""
        async with AsyncExitStack() as stack:
            yield [
                await stack.enter_async_context(GenerationClient(self.cluster.address, **options))
                for _ in range(count)
            ]


@contextmanager
def started(options: Mapping[str, str] = MappingProxyType({})) -> Iterator[Stack]:
    flags = {
        "simulation.enabled": "true",
        "simulation.base_ms": "4",
        "frontend.processes": "2",
        **FREE_PORTS,
        **options,
    }
    lines: list[str] = []
    with LocalCluster(load_config(env={}, flags=flags), on_log_line=lines.append) as cluster:
        try:
            cluster.wait_ready(READY_S)
            yield Stack(cluster, lines)
        finally:
            print("\n".join(lines[-60:]))


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with started() as stack:
        yield stack


class Reading:
    """One endless stream that is being read."""

    def __init__(self, client: GenerationClient, request_id: str, max_tokens: int = ENDLESS) -> None:
        self.request_id = request_id
        self.num_tokens = 0
        self.reason: FinishReason | None = None
        self.begun = asyncio.Event()
        self.task = asyncio.create_task(self._read(client, max_tokens))

    async def _read(self, client: GenerationClient, max_tokens: int) -> None:
        sampling = {"max_tokens": max_tokens, "ignore_eos": True, "seed": 1}
        events = client.generate(PROMPT, sampling, RequestOptions(request_id=self.request_id))
        async for event in events:
            if isinstance(event, DeltaEvent):
                self.num_tokens += len(event.token_ids)
                self.reason = event.finish_reason or self.reason
                self.begun.set()

    async def end(self) -> FinishReason | None:
        async with asyncio.timeout(DEADLINE_S):
            await self.task
        return self.reason


async def begin(clients: list[GenerationClient], name: str, max_tokens: int = ENDLESS) -> list[Reading]:
    """Begin a stream on each connection, and return when all have output."""
    readings = [Reading(client, f"{name}-{index}", max_tokens) for index, client in enumerate(clients)]
    async with asyncio.timeout(DEADLINE_S):
        for reading in readings:
            await asyncio.wait(
                (reading.task, asyncio.create_task(reading.begun.wait())), return_when=asyncio.FIRST_COMPLETED
            )
            if reading.task.done():
                await reading.task
    return readings


async def listed(stack: Stack) -> list[str]:
    """The ids of all requests that are alive, in pages of 5."""
    ids, token = list[str](), ""
    async with open_channel(stack.cluster.admin_address) as channel:
        while True:
            page = await admin_pb2_grpc.AdminServiceStub(channel).ListRequests(
                admin_pb2.ListRequestsRequest(page_size=5, page_token=token)
            )
            ids += [request.request_id for request in page.requests]
            token = page.next_page_token
            if not token:
                return ids


async def test_any_process_lists_and_aborts_the_requests_of_both(stack: Stack) -> None:
    async with stack.clients() as clients, stack.clients(1) as (other,):
        readings = await begin(clients, "listed")
        ids = sorted(reading.request_id for reading in readings)
        assert await listed(stack) == ids
        assert await other.abort([*ids, "unknown"]) == ids
        assert {await reading.end() for reading in readings} == {FinishReason.ABORT}
        assert await listed(stack) == []
    for index in range(2):
        await stack.until_logged(rf"frontend/{index} .*request_id=listed-")


async def test_http_and_operators_abort_the_requests_of_both(stack: Stack) -> None:
    url = f"http://{stack.cluster.http_address}"
    body = {"model": "", "prompt": PROMPT, "max_tokens": ENDLESS, "ignore_eos": True}

    async def complete(index: int) -> int:
        async with httpx.AsyncClient(timeout=DEADLINE_S) as http:
            answer = await http.post(
                f"{url}/v1/completions", json={**body, "request_id": f"over-http-{index}"}
            )
            assert answer.status_code == 200, answer.text
            return answer.json()["usage"]["completion_tokens"]

    names = [f"over-http-{index}" for index in range(NUM_STREAMS)]
    calls = [asyncio.create_task(complete(index)) for index in range(NUM_STREAMS)]
    async with httpx.AsyncClient(timeout=DEADLINE_S) as http, asyncio.timeout(DEADLINE_S):
        while (await http.get(f"{url}/load")).json()["server_load"] < NUM_STREAMS:
            await asyncio.sleep(0.05)
        aborted = await http.post(f"{url}/abort_requests", json={"request_ids": names})
        assert aborted.json() == {"aborted_request_ids": names}
    assert max(await asyncio.gather(*calls)) < ENDLESS


async def test_an_id_is_held_for_both(stack: Stack) -> None:
    async with stack.clients(1) as (client,), stack.clients() as others:
        first = Reading(client, "held")
        await asyncio.wait_for(first.begun.wait(), DEADLINE_S)
        for other in others:
            with pytest.raises(DuplicateRequest, match="'held' is alive"):
                # another request: it asks for fewer tokens
                async for _ in other.generate(PROMPT, {"max_tokens": 3}, RequestOptions(request_id="held")):
                    pass
        assert await others[0].abort(["held"]) == ["held"]
        assert await first.end() is FinishReason.ABORT
        # it is free again, at whichever
        for other in others:
            async for event in other.generate(PROMPT, {"max_tokens": 1}, RequestOptions(request_id="held")):
                if isinstance(event, FinishedEvent):
                    break


async def test_the_same_request_goes_on_at_the_other_process(stack: Stack) -> None:
    """A client that has lost its connection sends its request again, and gets the same answer."""

    async def read(call: grpc.aio.UnaryStreamCall, num_wanted: int) -> list[int]:
        token_ids = list[int]()
        while len(token_ids) < num_wanted:
            token_ids += (await call.read()).output.token_ids
        return token_ids

    async def send_twice(index: int) -> list[int]:
        request = generation_pb2.StreamGenerateRequest(request_id=f"again-{index}")
        request.generation.text.text = PROMPT
        request.generation.length.max_tokens = 100
        request.generation.length.ignore_eos = True
        request.generation.sampling.seed = 5
        async with open_channel(stack.cluster.address) as one, open_channel(stack.cluster.address) as other:
            first = generation_pb2_grpc.GenerationServiceStub(one).StreamGenerate(request)
            part = await read(first, 10)
            second = generation_pb2_grpc.GenerationServiceStub(other).StreamGenerate(request)
            whole = await read(second, 100)
            assert part == whole[: len(part)]
            return whole

    async with asyncio.timeout(DEADLINE_S):
        answers = await asyncio.gather(*map(send_twice, range(NUM_STREAMS)))
    assert all(answer == answers[0] for answer in answers)


async def scrape(stack: Stack) -> dict[str, float]:
    address = stack.cluster.config.frontend
    async with httpx.AsyncClient(timeout=DEADLINE_S) as http:
        text = (await http.get(f"http://127.0.0.1:{address.metrics_port}/metrics")).text
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


def total(values: Mapping[str, float], name: str) -> float:
    return sum(value for key, value in values.items() if key.partition("{")[0] == name)


async def test_metrics_are_those_of_both(stack: Stack) -> None:
    async with asyncio.timeout(DEADLINE_S):
        # the requests of tests before end when their processes hear that their clients have left
        while total(before := await scrape(stack), "triptych_frontend_active_requests"):
            await asyncio.sleep(0.05)
    async with stack.clients() as clients:
        readings = await begin(clients, "counted", max_tokens=7)
        for reading in readings:
            assert await reading.end() is FinishReason.LENGTH
    for _ in range(4):  # whichever answers
        after = await scrape(stack)
        name = "triptych_frontend_generation_tokens_total"
        assert total(after, name) - total(before, name) == 7 * NUM_STREAMS
        name = "triptych_frontend_e2e_request_latency_seconds_count"
        assert total(after, name) - total(before, name) == NUM_STREAMS
        assert total(after, "triptych_frontend_engine_ready") == 1
        assert total(after, "triptych_frontend_active_requests") == 0
        assert total(after, "triptych_build_info") == 1


async def test_the_log_level_is_that_of_both(stack: Stack) -> None:
    levels = admin_pb2.LOG_LEVEL_WARNING, admin_pb2.LOG_LEVEL_INFO
    async with open_channel(stack.cluster.admin_address) as channel, stack.clients() as clients:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        for level, name in zip(levels, ("silent", "loud"), strict=True):
            await stub.SetLogLevel(admin_pb2.SetLogLevelRequest(log_level=level))
            for reading in await begin(clients, name, max_tokens=2):
                await reading.end()
    async with asyncio.timeout(DEADLINE_S):
        while stack.num_lines("request_id=loud-") < NUM_STREAMS:
            await asyncio.sleep(0.05)
    assert stack.num_lines("request_id=silent-") == 0


async def test_one_that_dies_takes_only_its_own_streams(stack: Stack) -> None:
    async with stack.clients() as clients:
        # our client resumes by itself, so that all go on
        readings = await begin(clients, "survivor", max_tokens=1000)
        await stack.kill_one()
        for reading in readings:
            assert await reading.end() is FinishReason.LENGTH
            assert reading.num_tokens == 1000
    # nothing is refused while it starts: connections come to the other one until it is ready
    async with asyncio.timeout(DEADLINE_S):
        while stack.num_lines(r"frontend/\d listening on") < 3:
            async with stack.clients(1) as (client,):
                (reading,) = await begin([client], "meanwhile", max_tokens=1)
                assert await reading.end() is FinishReason.LENGTH
    async with stack.clients() as clients:
        for reading in await begin(clients, "afterwards", max_tokens=2):
            await reading.end()
    for index in range(2):
        await stack.until_logged(rf"frontend/{index} .*request_id=afterwards-")


async def test_a_limit_holds_for_both_together(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(
        entry_line("few", "tk-few", requests_per_minute=10)
        + "\n"
        + entry_line("short", "tk-short", tokens_per_minute=40)
        + "\n"
    )

    async def admitted(clients: list[GenerationClient], name: str) -> int:
        count = 0
        for client in clients:
            try:
                await Reading(client, f"{name}-{count}", max_tokens=4).task
                count += 1
            except RateLimited:
                pass
        return count

    with started({"frontend.api_keys_file": str(file)}) as stack:
        async with stack.clients(24, api_key="tk-few") as few, stack.clients(24, api_key="tk-short") as short:
            assert await admitted(few, "few") == 10
            assert 40 / 8 <= await admitted(short, "short") <= 10
            # one that dies takes no count with it
            await stack.kill_one()
        async with stack.clients(24, api_key="tk-few") as few:
            assert await admitted(few, "again") == 0
            file.write_text(entry_line("few", "tk-few", requests_per_minute=12) + "\n")
            more = 0
            async with asyncio.timeout(DEADLINE_S):
                while more < 2:  # the file is looked at once a second
                    more += await admitted(few, f"more-{more}")
            assert (more, await admitted(few, "most")) == (2, 0)


async def test_stopping_lets_the_streams_of_both_finish() -> None:
    with started() as stack:
        async with stack.clients() as clients:
            readings = await begin(clients, "draining", max_tokens=400)
            stopping = asyncio.create_task(asyncio.to_thread(stack.cluster.stop))
            for reading in readings:
                assert await reading.end() is FinishReason.LENGTH
                assert reading.num_tokens == 400
            await stopping
        assert stack.cluster.failure is None
        assert stack.num_lines("killed|did not leave|ERROR") == 0
        assert stack.num_lines(r"frontend/\d stopped") == 2


def test_a_foreign_server_on_a_port_is_refused_by_name() -> None:
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as foreign:
        port = foreign.getsockname()[1]
        with (
            pytest.raises(ConfigError, match=rf"frontend\.http_port: cannot bind 127\.0\.0\.1:{port}"),
            started({"frontend.http_port": str(port)}),
        ):
            pass
