"""Measures one frontend process under load: requests and tokens per second over HTTP and gRPC, and CPU time per token.

The worker is simulated and takes no time for a step, so that the services and the client share the machine's cores
and nothing else limits them. The clients read bytes and take nothing apart: of HTTP they look for the stream's last
event, of gRPC they count messages. Each stream begins its next request when the last has ended.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from multiprocessing.connection import Connection

import grpc.aio
import numpy as np

from benchmarks.harness.cluster import running, simulated_config
from benchmarks.harness.command import create_parser, run
from benchmarks.harness.figures import Figure
from benchmarks.harness.process_tree import cpu_seconds, descendants
from triptych.launcher.local_cluster import LocalCluster
from triptych.v1 import generation_pb2

VOCAB_SIZE = 49152
_TIMEOUT_S = 120.0
_DONE = b"data: [DONE]\n\n"
_METHOD = "/triptych.v1.GenerationService/StreamGenerate"

Complete = Callable[[list[int]], Awaitable[None]]
"""Send one request with this prompt and read its stream to the end."""


def measure(arguments: argparse.Namespace) -> Iterator[Figure]:
    config = simulated_config(0, max_num_seqs=max(arguments.streams, 64))
    with running(config) as cluster:
        for number in range(arguments.rounds + 1):
            for api in arguments.apis:
                yield from measure_api(cluster, api, arguments, is_warm_up=not number)


def measure_api(
    cluster: LocalCluster, api: str, arguments: argparse.Namespace, *, is_warm_up: bool
) -> Iterator[Figure]:
    """Load the frontend from a process of its own for so many seconds."""
    pipe, child_end = multiprocessing.Pipe()
    terms = (api, cluster.http_address if api == "http" else cluster.address, arguments, child_end)
    client = multiprocessing.get_context("spawn").Process(target=send_load, args=terms)
    client.start()
    child_end.close()
    try:
        receive(pipe)  # it has streams under way
        before = {name: cpu_seconds(descendants([pid])) for name, pid in cluster.pids.items()}
        pipe.send("count")
        num_before, began_at = receive(pipe), time.perf_counter()
        time.sleep(1.0 if is_warm_up else arguments.seconds)
        pipe.send("count")
        num_requests, elapsed_s = receive(pipe) - num_before, time.perf_counter() - began_at
        after = {name: cpu_seconds(descendants([pid])) for name, pid in cluster.pids.items()}
        pipe.send("stop")
        client_s = receive(pipe)
    finally:
        client.kill()
        client.join()
    if is_warm_up:
        return
    num_tokens = num_requests * arguments.output_len
    title = f"{api}, {arguments.streams} streams"
    yield Figure(f"{title}, requests", "1/s", (num_requests / elapsed_s,))
    yield Figure(f"{title}, tokens", "tok/s", (num_tokens / elapsed_s,))
    for name in cluster.pids:
        yield Figure(
            f"{title}, {name}, CPU per token", "us", (1e6 * (after[name] - before[name]) / num_tokens,)
        )
    yield Figure(f"{title}, client, share of a core", "", (client_s,))


def receive(pipe: Connection) -> float:
    """Return what the client says.

    Raises:
        TimeoutError: It says nothing.
    """
    if not pipe.poll(_TIMEOUT_S):
        raise TimeoutError(f"the client says nothing for {_TIMEOUT_S:g} s")
    return float(pipe.recv())


def send_load(api: str, address: str, arguments: argparse.Namespace, pipe: Connection) -> None:
    """Keep all streams busy; answer each `count` with the requests completed so far, and `stop` with the CPU share."""
    asyncio.run(_send_load(api, address, arguments, pipe))


async def _send_load(api: str, address: str, arguments: argparse.Namespace, pipe: Connection) -> None:
    loop, questions = asyncio.get_running_loop(), asyncio.Queue[str]()
    loop.add_reader(pipe.fileno(), lambda: questions.put_nowait(pipe.recv()))
    num_done = 0.0
    rng = np.random.default_rng(0)

    async def keep_busy(complete: Complete) -> None:
        nonlocal num_done
        while True:
            await complete(rng.integers(0, VOCAB_SIZE, arguments.input_len).tolist())
            num_done += 1

    async def answer() -> None:
        while num_done < arguments.streams:
            await asyncio.sleep(0.01)
        pipe.send(0.0)
        began_at, cpu_before_s = loop.time(), time.process_time()
        while await questions.get() == "count":
            pipe.send(num_done)
        pipe.send((time.process_time() - cpu_before_s) / (loop.time() - began_at))

    connect = connect_http if api == "http" else connect_grpc
    completes = await asyncio.gather(
        *(connect(address, arguments.output_len) for _ in range(arguments.streams))
    )
    async with asyncio.TaskGroup() as group:
        streams = [group.create_task(keep_busy(complete)) for complete in completes]
        await answer()
        for stream in streams:
            stream.cancel()


async def connect_http(address: str, output_len: int) -> Complete:
    """Return what completes over one kept connection."""
    host, port = address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 20)

    async def complete(prompt: list[int]) -> None:
        terms = {"max_tokens": output_len, "ignore_eos": True, "stream": True}
        body = json.dumps({"prompt": prompt, **terms}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\n"
        writer.write(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        await reader.readuntil(_DONE)
        await reader.readuntil(b"0\r\n\r\n")  # the last chunk

    return complete


async def connect_grpc(address: str, output_len: int) -> Complete:
    """Return what completes over the connection that all streams share; messages stay bytes."""
    channel = grpc.aio.insecure_channel(address)
    call = channel.unary_stream(_METHOD)

    async def complete(prompt: list[int]) -> None:
        request = generation_pb2.StreamGenerateRequest()
        request.generation.token_ids.ids.extend(prompt)
        request.generation.length.max_tokens = output_len
        request.generation.length.ignore_eos = True
        async for _ in call(request.SerializeToString()):
            pass

    return complete


if __name__ == "__main__":
    parser = create_parser(__doc__, rounds=3)
    parser.add_argument("--apis", nargs="+", choices=("http", "grpc"), default=["http", "grpc"])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--input-len", type=int, default=32, help="tokens of each prompt (default: 32)")
    parser.add_argument("--output-len", type=int, default=512, help="tokens of each answer (default: 512)")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each measurement (default: 8)")
    sys.exit(run(parser, measure))
