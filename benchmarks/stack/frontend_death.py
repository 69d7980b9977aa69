"""Kills frontends at random moments under streams, and compares what clients get with an undisturbed run.

Half of the clients are ours, over gRPC, which go on by themselves; the others read server-sent events and go on by the
id of the last one. Every token, or character, is compared, and the longest time between two events is taken. At the end
a frontend dies together with its clients, and the time is taken until the engine has all blocks back.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np

from benchmarks.harness.command import create_parser, run
from benchmarks.harness.figures import Figure
from benchmarks.harness.fleet import Fleet, running_fleet
from triptych.client.admin_client import AdminClient
from triptych.client.grpc_client import GenerationClient
from triptych.errors import TriptychError
from triptych.types.events import DeltaEvent

DEADLINE_S = 300.0
_RETRY_S = 0.05
_SHAPES: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {},
    {"n": 3},
    {"logprobs": 1, "presence_penalty": 0.5},
)


@dataclass(slots=True)
class Stream:
    """One client's answer."""

    number: int
    choices: dict[int, list[Any]] = field(default_factory=dict)
    """Index -> token ids, or pieces of text over HTTP."""
    longest_gap_s: float = 0.0
    error: str = ""
    is_whole: bool = False
    event_id: str = ""
    """Id of the last event over HTTP."""
    _last_s: float = 0.0

    def sampling(self, arguments: argparse.Namespace) -> dict[str, Any]:
        """Return the request's parameters, under names that both APIs have."""
        shape = _SHAPES[self.number // 2 % len(_SHAPES)]
        return {"max_tokens": arguments.tokens, "seed": self.number, "ignore_eos": True, **shape}

    def prompt(self) -> list[int]:
        rng = np.random.default_rng(self.number)
        return [int(token) for token in rng.integers(1000, 40_000, rng.integers(24, 128))]

    def note(self, index: int, pieces: list[Any]) -> None:
        """Take in new output."""
        now_s = time.monotonic()
        if self.choices:
            self.longest_gap_s = max(self.longest_gap_s, now_s - self._last_s)
        self._last_s = now_s
        self.choices.setdefault(index, []).extend(pieces)

    def outcome(self) -> tuple[object, ...]:
        """Return what must be equal in every run."""
        return self.is_whole, {index: list(pieces) for index, pieces in sorted(self.choices.items())}


async def follow_grpc(stream: Stream, client: GenerationClient, arguments: argparse.Namespace) -> None:
    """Read an answer over gRPC."""
    try:
        async for event in client.generate(stream.prompt(), stream.sampling(arguments), timeout_s=DEADLINE_S):
            if isinstance(event, DeltaEvent):
                stream.note(event.index, list(event.token_ids))
        stream.is_whole = True
    except TriptychError as error:
        stream.error = f"{error.code}: {error.message}"


async def follow_http(
    stream: Stream, session: aiohttp.ClientSession, urls: list[str], arguments: argparse.Namespace
) -> None:
    """Read an answer over HTTP. When the connection breaks, go on at the next URL."""
    ids = {"stream_options": {"include_event_ids": True}}
    body = {"prompt": stream.prompt(), "stream": True, **ids, **stream.sampling(arguments)}
    deadline = time.monotonic() + DEADLINE_S
    place = stream.number // 2
    while not stream.is_whole and time.monotonic() < deadline:
        headers = {"Last-Event-ID": stream.event_id} if stream.event_id else {}
        try:
            url = f"{urls[place % len(urls)]}/v1/completions"
            async with session.post(url, json=body, headers=headers) as response:
                if response.status >= 500:  # it serves again soon
                    raise aiohttp.ClientConnectionError
                if response.status != 200:
                    stream.error = await response.text()
                    return
                await _read_events(stream, response)
        except aiohttp.ClientError:
            place += 1
            await asyncio.sleep(_RETRY_S * random.random())
    if not stream.is_whole:
        stream.error = "no end within the deadline"


async def _read_events(stream: Stream, response: aiohttp.ClientResponse) -> None:
    event_id = ""
    async for line in response.content:
        if line.startswith(b"id: "):
            event_id = line[4:].strip().decode()
        elif line == b"data: [DONE]\n":
            stream.is_whole = True
        elif line.startswith(b"data: "):
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise aiohttp.ClientPayloadError(str(chunk["error"]))
            stream.event_id = event_id or stream.event_id
            for choice in chunk["choices"]:
                stream.note(choice["index"], list(choice["text"]))


def measure(arguments: argparse.Namespace) -> Iterator[Figure]:
    expected, streams, num_kills, blocks_back_s = asyncio.run(_measure(arguments))
    title = f"{num_kills} kills of frontends, {arguments.streams} streams at once"
    errors = [stream.error for stream in streams if stream.error]
    changed = [s.number for s in streams if s.outcome() != expected[s.number].outcome()]
    yield Figure(f"{title}: streams", "", (len(streams),))
    yield Figure(f"{title}: streams that failed", "", (len(errors),), note="; ".join(errors[:2])[:200])
    yield Figure(
        f"{title}: streams that are not whole and unchanged", "", (len(changed),), note=str(changed[:5])
    )
    gaps_s = [stream.longest_gap_s for stream in streams]
    yield Figure(
        f"{title}: undisturbed, longest gap", "s", (max(s.longest_gap_s for s in expected.values()),)
    )
    for name, value_s in (
        ("median", np.median(gaps_s)),
        ("p99", np.percentile(gaps_s, 99)),
        ("most", max(gaps_s)),
    ):
        yield Figure(f"{title}: longest gap of a stream, {name}", "s", (float(value_s),))
    yield Figure(
        f"frontend and clients dead: blocks back (kept for {arguments.keep_s:g} s)", "s", (blocks_back_s,)
    )


async def _measure(
    arguments: argparse.Namespace,
) -> tuple[dict[int, Stream], list[Stream], int, float]:
    options = {
        "scheduler.max_num_seqs": str(4 * arguments.streams),
        "simulation.enabled": "true",
        "simulation.base_ms": str(arguments.step_ms),
        "frontend.keep_s": str(arguments.keep_s),
        "engine.resume_ttl_s": str(arguments.keep_s),
    }
    options |= {
        f"simulation.{term}": "0" for term in ("prefill_token_us", "decode_row_us", "context_token_ns")
    }
    async with (
        running_fleet(arguments.engines, options, arguments.frontends) as fleet,
        aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True), read_bufsize=1 << 20
        ) as session,
    ):
        clients = [
            GenerationClient(",".join(fleet.addresses[first:] + fleet.addresses[:first]))
            for first in range(arguments.frontends)
        ]

        async def follow(stream: Stream) -> None:
            if stream.number % 2:
                await follow_http(stream, session, fleet.http_urls, arguments)
            else:
                await follow_grpc(stream, clients[stream.number // 2 % len(clients)], arguments)

        expected = {number: Stream(number) for number in range(arguments.streams)}
        await asyncio.gather(*map(follow, expected.values()))
        assert not any(stream.error for stream in expected.values()), "the undisturbed run has failed"
        streams: list[Stream] = []
        is_over = asyncio.Event()

        async def load(number: int) -> None:
            """Send the request of a number again and again."""
            while not is_over.is_set():
                streams.append(Stream(number))
                await follow(streams[-1])

        async with asyncio.TaskGroup() as group:
            for number in expected:
                group.create_task(load(number))
            rng = random.Random(arguments.seed)
            for _ in range(arguments.kills):
                await asyncio.sleep(0.5 + rng.random() * arguments.tokens * arguments.step_ms / 1e3)
                number = rng.randrange(arguments.frontends)
                fleet.kill(f"frontend-{number}")
                await fleet.wait_frontend(fleet.addresses[number])
            is_over.set()
        blocks_back_s = await _orphan(fleet, arguments)
        for client in clients:
            await client.close()
    return expected, streams, arguments.kills, blocks_back_s


async def _orphan(fleet: Fleet, arguments: argparse.Namespace) -> float:
    """Kill a frontend and its clients; return the seconds until the engines hold no block."""
    sampling = {"max_tokens": 2000, "ignore_eos": True}
    client = GenerationClient(fleet.address)

    async def follow(number: int) -> None:
        async for _ in client.generate(Stream(number).prompt(), sampling):
            pass

    tasks = [asyncio.create_task(follow(number)) for number in range(arguments.streams)]
    while await _used_blocks(fleet) < arguments.streams:
        await asyncio.sleep(0.05)
    fleet.kill("frontend-0")
    killed_at = time.monotonic()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await client.close()
    while await _used_blocks(fleet):
        await asyncio.sleep(0.05)
    return time.monotonic() - killed_at


async def _used_blocks(fleet: Fleet) -> int:
    used = 0
    for address in fleet.engine_addresses:
        admin = AdminClient(address)
        used += sum(status.num_used_blocks for _, status in await admin.status())
        await admin.close()
    return used


if __name__ == "__main__":
    parser = create_parser(__doc__)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--frontends", type=int, default=3)
    parser.add_argument("--streams", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=200, help="of each choice (default: 200)")
    parser.add_argument("--step-ms", type=float, default=20.0, help="of the simulated worker (default: 20)")
    parser.add_argument("--keep-s", type=float, default=10.0, help="as frontend.keep_s (default: 10)")
    parser.add_argument("--seed", type=int, default=0)
    sys.exit(run(parser, measure))
