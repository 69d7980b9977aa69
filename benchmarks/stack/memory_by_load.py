"""Measures the resident memory of all processes of a stack by what it has served, what waits, and what is connected.

The worker is simulated. Parts, each on a stack of its own that has served a little before:
  requests     many short requests over gRPC, at most `--rate` a second, some at once; memory after every fifth of
               them, when nothing runs: a process that goes on growing keeps something of each request
  waiting      requests of 500 prompt tokens that wait at the same time; they are cancelled, and as many come again
  connections  idle connections to the HTTP port, each after one request, and to the gRPC port, each after its greeting

Memory is the resident set, pages that processes share included. What a process frees it gives back to the system in
part only, so that "again" says more of a loss than "cancelled" does.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import AsyncExitStack, ExitStack
from multiprocessing import get_context
from threading import Event

import grpc.aio

from benchmarks.harness.cluster import running, simulated_config
from benchmarks.harness.command import create_parser, run
from benchmarks.harness.figures import Figure
from benchmarks.harness.process_tree import resident_bytes
from triptych.client.grpc_client import GenerationClient
from triptych.launcher.local_cluster import LocalCluster
from triptych.v1 import generation_pb2

_METHOD = "/triptych.v1.GenerationService/StreamGenerate"
_NUM_CLIENTS = 64
_PROMPT_LEN, _OUTPUT_LEN = 32, 4
_WAITING_PROMPT_LEN = 500
_STREAMS_PER_CHANNEL = 2500  # below frontend.max_calls_per_connection
_NUM_PARTS = 5
_SETTLE_S = 2.0
_WAIT_S = 120.0
_POLL_S = 0.2
_AT_ONCE = 500  # calls that begin: of 10,000 that no handler has taken yet gRPC's server cancels some
_HTTP_REQUEST = b"GET /ping HTTP/1.1\r\nHost: idle\r\n\r\n"
_HTTP2_GREETING = (
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
)  # empty SETTINGS


def measure(arguments: argparse.Namespace) -> Iterator[Figure]:
    for part in arguments.parts:
        yield from PARTS[part](arguments)


def measure_requests(arguments: argparse.Namespace) -> Iterator[Figure]:
    """Yield the memory after each part of the requests, and how much each request of the last parts has left."""
    count = arguments.requests // _NUM_PARTS
    config = simulated_config(1.0, max_num_seqs=_NUM_CLIENTS)
    with running(config) as cluster, _client() as client:
        _warm_up(cluster, client)
        yield from _figures("ready", _sizes(cluster))
        after: list[Mapping[str, float]] = []
        started_s = time.monotonic()
        for part in range(1, _NUM_PARTS + 1):
            client.submit(run_requests, cluster.address, count, arguments.rate, part).result()
            time.sleep(_SETTLE_S)
            after.append(_sizes(cluster))
            yield from _figures(f"after {part * count:,} requests", after[-1])
        rate = _NUM_PARTS * count / (time.monotonic() - started_s)
        yield Figure("requests", "1/s", (rate,))
        for name, size in after[-1].items():
            grown = (size - after[0][name]) / ((_NUM_PARTS - 1) * count)
            yield Figure(f"{name}, each request after the first {count:,}", "bytes", (1e6 * grown,))


def measure_waiting(arguments: argparse.Namespace) -> Iterator[Figure]:
    """Yield the memory while requests wait, when they are cancelled, and while as many wait again."""
    config = simulated_config(1000.0, max_num_seqs=1, max_num_waiting=arguments.waiting, max_model_len=2048)
    with running(config) as cluster, _client() as client:
        _warm_up(cluster, client, num_requests=2)
        ready = _sizes(cluster)
        yield from _figures("ready", ready)
        for when in ("", " again"):
            with get_context("spawn").Manager() as manager:
                is_over, has_come = manager.Event(), manager.Event()
                waiting = client.submit(wait_in_queue, cluster.address, arguments.waiting, has_come, is_over)
                ends_at = time.monotonic() + _WAIT_S
                while not has_come.wait(_POLL_S):
                    if waiting.done():
                        waiting.result()  # raises what has happened
                    if time.monotonic() > ends_at:
                        raise RuntimeError(f"not all requests wait after {_WAIT_S:.0f} s")
                sizes = _sizes(cluster)
                is_over.set()
                waiting.result()
            yield from _figures(f"{arguments.waiting:,} waiting{when}", sizes)
            for name, size in sizes.items():
                each = 1e3 * (size - ready[name]) / arguments.waiting
                yield Figure(f"{name}, each waiting{when}", "kB", (each,))
            time.sleep(_SETTLE_S)
            yield from _figures(f"cancelled{when}", _sizes(cluster))


def measure_connections(arguments: argparse.Namespace) -> Iterator[Figure]:
    """Yield the memory before and with idle connections to both ports."""
    with running(simulated_config(1.0)) as cluster, _client() as client:
        _warm_up(cluster, client)
        before = _sizes(cluster)
        yield from _figures("ready", before)
        for kind, address, greeting in (
            ("HTTP", cluster.http_address, _HTTP_REQUEST),
            ("gRPC", cluster.address, _HTTP2_GREETING),
        ):
            sizes = asyncio.run(_sizes_with_connections(cluster, address, greeting, arguments.connections))
            yield from _figures(f"{arguments.connections:,} idle {kind} connections", sizes)
            for name, size in sizes.items():
                each = 1e3 * (size - before[name]) / arguments.connections
                yield Figure(f"{name}, each {kind} connection", "kB", (each,))
            time.sleep(_SETTLE_S)
            before = _sizes(cluster)


PARTS: dict[str, Callable[[argparse.Namespace], Iterator[Figure]]] = {
    "requests": measure_requests,
    "waiting": measure_waiting,
    "connections": measure_connections,
}


def run_requests(address: str, count: int, rate: float, part: int) -> None:
    """Send so many short requests, `_NUM_CLIENTS` at once and at most `rate` a second. Runs in a process of its own."""

    async def run_all() -> None:
        started_s, numbers = time.monotonic(), iter(range(count))
        sampling = {"max_tokens": _OUTPUT_LEN, "ignore_eos": True}

        async def run_client(client: GenerationClient) -> None:
            for number in numbers:
                if (pause_s := started_s + number / rate - time.monotonic()) > 0:
                    await asyncio.sleep(pause_s)
                prompt = [part, 3 + number % 1000, 3 + number // 1000, *range(3, _PROMPT_LEN)]
                async for _ in client.generate(prompt, sampling):
                    pass

        async with GenerationClient(address) as client, asyncio.TaskGroup() as group:
            for _ in range(_NUM_CLIENTS):
                group.create_task(run_client(client))

    asyncio.run(run_all())


def wait_in_queue(address: str, count: int, has_come: Event, is_over: Event) -> None:
    """Send so many requests, say when all wait, and cancel them when it is over. Runs in a process of its own."""
    request = generation_pb2.StreamGenerateRequest()
    request.generation.token_ids.ids.extend(range(3, 3 + _WAITING_PROMPT_LEN))
    request.generation.length.max_tokens = 1000
    request.generation.length.ignore_eos = True

    async def wait_all() -> None:
        coming, admitted = asyncio.Semaphore(_AT_ONCE), asyncio.Semaphore(0)

        async def wait_one(call: grpc.aio.UnaryStreamMultiCallable) -> None:
            await coming.acquire()
            async for _ in call(request.SerializeToString()):
                coming.release()
                admitted.release()  # by its first message it has a place in the queue
            raise RuntimeError("an answer has ended: none was to")

        async with AsyncExitStack() as stack:
            tasks = []
            for first in range(0, count, _STREAMS_PER_CHANNEL):
                options = [("grpc.use_local_subchannel_pool", 1)]  # a connection of its own
                channel = await stack.enter_async_context(grpc.aio.insecure_channel(address, options))
                call = channel.unary_stream(_METHOD)
                for _ in range(min(_STREAMS_PER_CHANNEL, count - first)):
                    tasks.append(asyncio.create_task(wait_one(call)))
            everyone = asyncio.create_task(_acquire(admitted, count))
            done, _ = await asyncio.wait([everyone, *tasks], return_when=asyncio.FIRST_COMPLETED)
            if everyone in done:
                has_come.set()
                await asyncio.to_thread(is_over.wait, _WAIT_S)
                done, _ = await asyncio.wait(tasks, timeout=0)
            for task in (everyone, *tasks):
                task.cancel()
            await asyncio.gather(everyone, *tasks, return_exceptions=True)
            for task in done - {everyone}:
                task.result()  # none has ended but by an error

    asyncio.run(wait_all())


async def _acquire(admitted: asyncio.Semaphore, count: int) -> None:
    for _ in range(count):
        await admitted.acquire()


async def _sizes_with_connections(
    cluster: LocalCluster, address: str, greeting: bytes, count: int
) -> Mapping[str, float]:
    """Return the memory when so many connections have been greeted and answered, and are idle."""
    host, _, port = address.rpartition(":")
    async with asyncio.timeout(_WAIT_S):
        with ExitStack() as stack:
            for _ in range(count):
                reader, writer = await asyncio.open_connection(host, int(port))
                stack.callback(writer.close)
                writer.write(greeting)
                if not await reader.read(4096):
                    raise RuntimeError(f"{address} closed a connection")
            await asyncio.sleep(_SETTLE_S)
            return _sizes(cluster)


def _warm_up(cluster: LocalCluster, client: Executor, num_requests: int = 2 * _NUM_CLIENTS) -> None:
    """Have everything loaded that is loaded at first use."""
    client.submit(run_requests, cluster.address, num_requests, 1e6, 0).result()
    asyncio.run(_sizes_with_connections(cluster, cluster.http_address, _HTTP_REQUEST, 1))


def _client() -> Executor:
    return ProcessPoolExecutor(1, mp_context=get_context("spawn"))


def _sizes(cluster: LocalCluster) -> Mapping[str, float]:
    """Return the resident megabytes of each service."""
    return {name: resident_bytes(pid) / 1e6 for name, pid in cluster.pids.items()}


def _figures(when: str, sizes: Mapping[str, float]) -> Iterator[Figure]:
    for name, size in sizes.items():
        yield Figure(f"{name}, {when}", "MB", (size,))


if __name__ == "__main__":
    parser = create_parser(__doc__)
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help="(default: all)"
    )
    parser.add_argument("--requests", type=int, default=100_000, metavar="N", help="(default: 100,000)")
    parser.add_argument(
        "--rate", type=float, default=600.0, metavar="R", help="requests/s at most (default: 600)"
    )
    parser.add_argument("--waiting", type=int, default=10_000, metavar="N", help="(default: 10,000)")
    parser.add_argument(
        "--connections", type=int, default=1000, metavar="N", help="to each port (default: 1,000)"
    )
    sys.exit(run(parser, measure))
