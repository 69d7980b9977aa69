"""Frontends die or leave under streams: clients go on at another one and get the same answers, over gRPC and HTTP."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.chaos.grounds.processes import Member, ProcessGround, process_ground
from tests.chaos.load import answers_undisturbed, make_load, run_clients
from tests.chaos.recorder import Recorder, Request
from tests.chaos.resuming_http import post_to, resume_over_http
from tests.chaos.validators import Evidence, violations_of
from triptych.client.grpc_client import GenerationClient
from triptych.client.request import RequestOptions
from triptych.types.events import DeltaEvent, Event, FinishedEvent

pytestmark = pytest.mark.model
DEADLINE_S = 180.0
SHAPES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"seed": 1},
    {"seed": 2, "n": 3},
    {"seed": 3, "logprobs": 2},
    {"seed": 4, "stop": ["zq", "#"]},
]
LENGTH = {"max_tokens": 50, "ignore_eos": True}

Outcome = tuple[dict[int, str], dict[int, list[int]], int]


async def read(
    client: GenerationClient, shape: dict[str, Any], has_begun: asyncio.Event | None = None
) -> Outcome:
    texts: dict[int, str] = {}
    token_ids: dict[int, list[int]] = {}
    num_logprobs = 0
    events = client.generate("Once upon", {**LENGTH, **shape}, RequestOptions())
    async with asyncio.timeout(DEADLINE_S), aclosing(events):
        async for event in events:
            match event:
                case DeltaEvent():
                    texts[event.index] = texts.get(event.index, "") + event.text
                    token_ids.setdefault(event.index, []).extend(event.token_ids)
                    num_logprobs += len(event.logprobs)
                    if has_begun is not None and len(token_ids[event.index]) >= 10:
                        has_begun.set()
                case FinishedEvent():
                    assert event.usage.num_output_tokens == sum(map(len, token_ids.values()))
    assert num_logprobs in (0, sum(map(len, token_ids.values())))
    return texts, token_ids, num_logprobs


def kill(member: Member) -> None:
    assert member.process is not None
    member.process.send_signal(signal.SIGKILL)


def ground(directory: Path, **options: tuple[str, ...]) -> Any:
    return process_ground(
        directory, num_engines=1, num_frontends=2, worker=("--simulation.base-ms=20",), **options
    )


async def check_blocks_are_back(stack: ProcessGround) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while (await stack.status("enginecore-0")).num_used_blocks:
            await asyncio.sleep(0.05)


@pytest.mark.thorough
async def test_our_client_goes_on_by_itself(tmp_path: Path) -> None:
    async with ground(tmp_path) as stack:
        first, second = stack.of_kind("frontend")
        async with GenerationClient(f"{first.address},{second.address}") as client:
            whole = [await read(client, shape) for shape in SHAPES]
            begun = [asyncio.Event() for _ in SHAPES]
            reading = [
                asyncio.create_task(read(client, shape, event))
                for shape, event in zip(SHAPES, begun, strict=True)
            ]
            await asyncio.wait_for(begun[1].wait(), DEADLINE_S)
            kill(first)
            assert await asyncio.gather(*reading) == whole
        await check_blocks_are_back(stack)


@pytest.mark.thorough
async def test_a_form_is_kept_across_the_break(tmp_path: Path) -> None:
    form = {"max_tokens": 60, "ignore_eos": False, "structured_outputs": {"regex": "([a-f]{3} ){60}"}}
    real = ("--simulation.enabled=false",)
    async with process_ground(tmp_path, num_engines=1, num_frontends=2, worker=real) as stack:
        first, second = stack.of_kind("frontend")
        async with GenerationClient(f"{first.address},{second.address}") as client:
            shapes = [{**form, "temperature": 0.0}, {**form, "seed": 6}]
            whole = [await read(client, shape) for shape in shapes]
            begun = asyncio.Event()
            reading = [asyncio.create_task(read(client, shape, begun)) for shape in shapes]
            await asyncio.wait_for(begun.wait(), DEADLINE_S)
            kill(first)
            assert await asyncio.gather(*reading) == whole


@pytest.mark.thorough
async def test_an_engine_that_is_gone_too_is_not_needed(tmp_path: Path) -> None:
    """The request is sent again, with what has come."""
    async with ground(tmp_path) as stack:
        first, second = stack.of_kind("frontend")
        async with GenerationClient(f"{first.address},{second.address}") as client:
            whole = [await read(client, shape) for shape in SHAPES[:3]]
            begun = asyncio.Event()
            reading = [asyncio.create_task(read(client, shape, begun)) for shape in SHAPES[:3]]
            await asyncio.wait_for(begun.wait(), DEADLINE_S)
            kill(stack.members["enginecore-0"])
            kill(first)
            await stack.members["enginecore-0"].process.wait()
            await stack.start("enginecore-0")
            assert await asyncio.gather(*reading) == whole


@pytest.mark.thorough
async def test_the_last_event_id_goes_on_over_http(tmp_path: Path) -> None:
    ids = {"stream_options": {"include_event_ids": True}}
    body = {"model": "", "prompt": "Once upon", "stream": True, "seed": 7, **ids, **LENGTH}
    async with ground(tmp_path) as stack, httpx.AsyncClient(timeout=DEADLINE_S) as http:
        urls = [f"http://127.0.0.1:{member.http_port}" for member in stack.of_kind("frontend")]

        async def follow(victim: Member | None, method: str) -> str:
            text, event_id, headers = "", "", dict[str, str]()
            verb, url = "POST", f"{urls[0]}/v1/completions"
            while True:
                try:
                    async with http.stream(verb, url, json=body, headers=headers) as response:
                        assert response.status_code == 200, await response.aread()
                        async for line in response.aiter_lines():
                            if line.startswith("id: "):
                                event_id = line[4:]
                            elif line == "data: [DONE]":
                                return text
                            elif line.startswith("data: "):
                                text += json.loads(line[6:])["choices"][0]["text"]
                                headers = {"Last-Event-ID": event_id}
                                if victim is not None and len(text) > 30:
                                    kill(victim)
                                    victim = None
                except httpx.TransportError:
                    verb, url = method, f"{urls[1]}/v1/completions"
                    if method == "GET":
                        url = f"{urls[1]}/v1/streams/{event_id.partition(':')[0]}"

        whole = await follow(None, "POST")
        first = stack.of_kind("frontend")[0]
        for method in ("POST", "GET"):
            assert await follow(first, method) == whole
            await first.process.wait()
            await stack.start(first.name)
            await stack.wait_ready(first.name)
        await check_blocks_are_back(stack)


class Clients:
    """Clients that begin at the first of two frontends: half of them over HTTP with event ids, half over gRPC."""

    kinds = ("sampled", "http", "choices", "http", "penalties", "http", "logprobs", "http")

    def __init__(self, stack: ProcessGround, grpc: GenerationClient) -> None:
        """`grpc`: Knows both frontends."""
        self._addresses = [f"127.0.0.1:{member.http_port}" for member in stack.of_kind("frontend")]
        self._grpc = grpc
        self.begun: set[tuple[int, ...]] = set()
        """Prompts of which the first frontend has answered something."""

    async def send(self, request: Request, attempt: int) -> AsyncGenerator[Event, None]:
        """Yield the events of one attempt at a request."""
        if request.http:
            events = resume_over_http(self._post, 2, attempt % 2, request, attaches_twice=False)
        else:
            events = self._grpc.generate(list(request.prompt), request.sampling)
        async with aclosing(events) as stream:
            async for event in stream:
                if isinstance(event, DeltaEvent):
                    self.begun.add(request.prompt)
                yield event

    async def _post(
        self, number: int, headers: Mapping[str, str], body: Mapping[str, Any]
    ) -> AsyncGenerator[str, None]:
        async with aclosing(post_to(self._addresses[number], headers, body)) as lines:
            async for line in lines:
                self.begun.add(tuple(body["prompt"]))
                yield line


@pytest.mark.thorough
@pytest.mark.parametrize("drain_s", [0.5, 600.0], ids=["short", "long"])
async def test_a_frontend_leaves_before_its_streams_end(drain_s: float, tmp_path: Path) -> None:
    """All streams outlast the short drain, and none keeps the frontend for the long one."""
    lengths = {"max_tokens": 200, "ignore_eos": True}
    requests = [
        replace(request, sampling={**request.sampling, **lengths})
        for request in make_load(1, 24, vocabulary=range(1000, 9000), max_tokens=200, kinds=Clients.kinds)
    ]
    async with ground(tmp_path, frontend=(f"--frontend.drain-s={drain_s}",)) as stack:
        first, second = stack.of_kind("frontend")
        async with GenerationClient(f"{first.address},{second.address}") as grpc:
            clients = Clients(stack, grpc)
            oracle = await answers_undisturbed(requests, clients.send)
            clients.begun.clear()
            recorder = Recorder(asyncio.get_running_loop().time)
            running = asyncio.create_task(run_clients(requests, recorder, clients.send))
            async with asyncio.timeout(DEADLINE_S):
                while len(clients.begun) < len(requests):
                    await asyncio.sleep(0.02)
            stack.signal("worker-0", signal.SIGSTOP)  # no stream ends before the frontend does
            stack.signal(first.name, signal.SIGTERM)
            assert await stack.wait_ended(first.name) == 0
            assert not recorder.ended, "it has waited for them"
            stack.signal("worker-0", signal.SIGCONT)
            await running
        assert not violations_of(Evidence(requests, recorder.history, oracle))
        await check_blocks_are_back(stack)


@pytest.mark.thorough
async def test_nobody_comes_back(tmp_path: Path) -> None:
    keep = ("--frontend.keep-s=1",)
    async with ground(tmp_path, frontend=keep, enginecore=("--engine.resume-ttl-s=0.5",)) as stack:
        first = stack.of_kind("frontend")[0]
        async with GenerationClient(first.address) as client:
            begun = asyncio.Event()
            reading = asyncio.create_task(read(client, {"seed": 1, "max_tokens": 5000}, begun))
            await asyncio.wait_for(begun.wait(), DEADLINE_S)
            kill(first)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        await check_blocks_are_back(stack)
