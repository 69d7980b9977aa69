"""Measures one frontend process under load: requests and tokens per second over HTTP and gRPC, and CPU time per token.

The worker is simulated and takes no time for a step, so that the services and the client share the machine's cores
and nothing else limits them. The clients read bytes and take nothing apart: they count messages, and of HTTP look for
the stream's last one. Each stream sends `--requests` requests, the next when the last has ended, and the figures are
of all together. `--output-len 1` measures what a request costs beside its output; `--unpaced` sends tokens as they
come instead of several in a message where streams are many. `--beside logprobs` measures in turn with requests for
each token's 20 best log-probabilities, `--beside tls` with TLS on all ports and hops. `--real` serves the embedded
model instead.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import ssl
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc
import grpc.aio
import numpy as np

from benchmarks.harness.cluster import running, simulated_config
from benchmarks.harness.command import create_parser, run
from benchmarks.harness.figures import Figure
from benchmarks.harness.process_tree import cpu_seconds, descendants
from triptych.config import EngineConfig
from triptych.launcher.launch import config_from_overrides
from triptych.launcher.local_cluster import LocalCluster
from triptych.v1 import generation_pb2

VOCAB_SIZE = 49152
NUM_LOGPROBS = 20
_TIMEOUT_S = 120.0
_MESSAGE, _DONE = b"data: ", b"data: [DONE]\n\n"
_METHOD = "/triptych.v1.GenerationService/StreamGenerate"

Complete = Callable[[list[int]], Awaitable[int]]
"""Send one request with this prompt and read its stream to the end; return the number of messages."""


@dataclass(frozen=True, slots=True)
class Load:
    """One way to load a frontend; made in the parent, used by the client's process."""

    api: str
    address: str
    num_streams: int
    input_len: int
    output_len: int
    num_logprobs: int = 0
    ca: bytes = b""
    """PEM of the authority of a server with TLS. Empty: plain text."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Result of one load."""

    requests_per_s: float
    tokens_per_s: float
    cpu_s_per_token: Mapping[str, float]
    """By service."""
    cpu_s_per_message: float
    """CPU seconds of the frontend for each message to a client."""
    client_share: float
    """Share of one core that the client took."""


def measure(arguments: argparse.Namespace) -> Iterator[Figure]:
    def config(**options: str) -> EngineConfig:
        num_seqs = {"max_num_seqs": max(arguments.streams, 64)}
        if arguments.unpaced:
            num_seqs["frontend.max_messages_per_s"] = 0
        if arguments.real:
            return config_from_overrides({**num_seqs, **options})
        return simulated_config(0, **num_seqs, **options)

    with ExitStack() as stack:
        plain = stack.enter_context(running(config()))
        variants = {"": (plain, 0, b"")}
        if arguments.beside == "logprobs":
            variants["logprobs"] = plain, NUM_LOGPROBS, b""
        elif arguments.beside == "tls":
            tls, ca = create_tls(Path(stack.enter_context(TemporaryDirectory())))
            variants["tls"] = stack.enter_context(running(config(**tls))), 0, ca
        for number in range(arguments.rounds + 1):
            for api in arguments.apis:
                found: dict[str, Rates] = {}
                for name, (cluster, num_logprobs, ca) in variants.items():
                    address = cluster.http_address if api == "http" else cluster.address
                    lengths = arguments.streams, arguments.input_len, arguments.output_len
                    load = Load(api, address, *lengths, num_logprobs, ca)
                    found[name] = rates(cluster, load, arguments.requests if number else 1)
                if number:
                    yield from figures(api, arguments.streams, found)


def figures(api: str, num_streams: int, found: Mapping[str, Rates]) -> Iterator[Figure]:
    plain = found[""]
    for name, shown in found.items():
        title = f"{api}, {num_streams} streams" + (f", {name}" if name else "")
        yield Figure(f"{title}: requests", "1/s", (shown.requests_per_s,))
        yield Figure(f"{title}: tokens", "tok/s", (shown.tokens_per_s,))
        for service, cpu_s in shown.cpu_s_per_token.items():
            yield Figure(f"{title}: {service}, CPU per token", "us", (1e6 * cpu_s,), less_is_better=True)
        per_message = f"{title}: frontend, CPU per message"
        yield Figure(per_message, "us", (1e6 * shown.cpu_s_per_message,), less_is_better=True)
        yield Figure(f"{title}: client, share of a core", "", (shown.client_share,))
        if not name:
            continue
        yield Figure(f"{title}: tokens / plain", "", (shown.tokens_per_s / plain.tokens_per_s,))
        for service in ("frontend", "enginecore"):
            more_s = shown.cpu_s_per_token[service] - plain.cpu_s_per_token[service]
            yield Figure(f"{title}: {service}, CPU above plain", "us", (1e6 * more_s,), less_is_better=True)


def create_tls(folder: Path) -> tuple[dict[str, str], bytes]:
    """Return the options of a stack with TLS on all ports and hops, and the authority's PEM."""
    from tests.helpers.certificates import Authority

    authority = Authority(folder)
    chain, key = authority.issue("stack")
    options = {"tls.certificate": chain, "tls.key": key, "tls.ca": authority.file}
    return options, authority.ca.cert_pem.bytes()


def rates(cluster: LocalCluster, load: Load, num_requests: int) -> Rates:
    """Send `num_requests` requests over each stream, from a process of its own."""
    pipe, child_end = multiprocessing.Pipe()
    client = multiprocessing.get_context("spawn").Process(
        target=send_load, args=(load, num_requests, child_end)
    )
    client.start()
    child_end.close()
    try:
        receive(pipe)  # its connections are there
        before = {name: cpu_seconds(descendants([pid])) for name, pid in cluster.pids.items()}
        pipe.send("go")
        elapsed_s, client_s, num_messages = receive(pipe)
        after = {name: cpu_seconds(descendants([pid])) for name, pid in cluster.pids.items()}
    finally:
        client.kill()
        client.join()
    num_requests *= load.num_streams
    num_tokens = num_requests * load.output_len
    cpu_s = {name: (after[name] - before[name]) / num_tokens for name in cluster.pids}
    per_message = (after["frontend"] - before["frontend"]) / num_messages
    return Rates(num_requests / elapsed_s, num_tokens / elapsed_s, cpu_s, per_message, client_s / elapsed_s)


def receive(pipe: Connection) -> tuple[float, float, int]:
    """Return what the client says.

    Raises:
        TimeoutError: It says nothing.
    """
    if not pipe.poll(_TIMEOUT_S):
        raise TimeoutError(f"the client says nothing for {_TIMEOUT_S:g} s")
    elapsed_s, cpu_s, num_messages = pipe.recv()
    return elapsed_s, cpu_s, num_messages


def send_load(load: Load, num_requests: int, pipe: Connection) -> None:
    """Connect, wait to be told, send the requests, and say how many seconds, CPU seconds and messages that took."""
    rng = np.random.default_rng(0)

    async def send_all(complete: Complete) -> int:
        prompts = [rng.integers(0, VOCAB_SIZE, load.input_len).tolist() for _ in range(num_requests)]
        return sum([await complete(prompt) for prompt in prompts])

    async def send() -> None:
        completes = await (connect_http if load.api == "http" else connect_grpc)(load)
        pipe.send((0.0, 0.0, 0))
        pipe.recv()
        began_at, cpu_before_s = time.perf_counter(), time.process_time()
        num_messages = sum(await asyncio.gather(*map(send_all, completes)))
        pipe.send((time.perf_counter() - began_at, time.process_time() - cpu_before_s, num_messages))

    asyncio.run(send())


async def connect_http(load: Load) -> list[Complete]:
    """Open a connection for each stream, and return a function for each that sends a request over it."""
    host, port = load.address.rsplit(":", 1)
    context = ssl.create_default_context(cadata=load.ca.decode()) if load.ca else None
    terms = {"max_tokens": load.output_len, "ignore_eos": True, "stream": True}
    if load.num_logprobs:
        terms["logprobs"] = load.num_logprobs

    async def connect() -> Complete:
        reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 24, ssl=context)

        async def complete(prompt: list[int]) -> int:
            body = json.dumps({"prompt": prompt, **terms}).encode()
            head = (
                f"POST /v1/completions HTTP/1.1\r\nHost: {load.address}\r\nContent-Type: application/json\r\n"
            )
            writer.write(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
            answer = await reader.readuntil(_DONE)
            await reader.readuntil(b"0\r\n\r\n")  # the last chunk
            return answer.count(_MESSAGE)

        return complete

    return await asyncio.gather(*(connect() for _ in range(load.num_streams)))


async def connect_grpc(load: Load) -> list[Complete]:
    """Open one connection for all streams, and return a function for each; messages stay bytes."""
    if load.ca:
        channel = grpc.aio.secure_channel(load.address, grpc.ssl_channel_credentials(load.ca))
    else:
        channel = grpc.aio.insecure_channel(load.address)
    call = channel.unary_stream(_METHOD)
    request = generation_pb2.StreamGenerateRequest()
    request.generation.length.max_tokens = load.output_len
    request.generation.length.ignore_eos = True
    if load.num_logprobs:
        request.generation.response.logprobs.top = load.num_logprobs

    async def complete(prompt: list[int]) -> int:
        del request.generation.token_ids.ids[:]
        request.generation.token_ids.ids.extend(prompt)
        num_messages = 0
        async for _ in call(request.SerializeToString()):
            num_messages += 1
        return num_messages

    return [complete] * load.num_streams


if __name__ == "__main__":
    parser = create_parser(__doc__, rounds=3)
    parser.add_argument("--apis", nargs="+", choices=("http", "grpc"), default=["http", "grpc"])
    parser.add_argument(
        "--beside", choices=("logprobs", "tls"), help="measure this in turn with plain requests"
    )
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--input-len", type=int, default=32, help="tokens of each prompt (default: 32)")
    parser.add_argument("--output-len", type=int, default=512, help="tokens of each answer (default: 512)")
    parser.add_argument("--real", action="store_true", help="the embedded model instead of a simulated one")
    parser.add_argument("--unpaced", action="store_true", help="tokens are not held back to leave together")
    parser.add_argument("--requests", type=int, default=4, help="of each stream (default: 4)")
    sys.exit(run(parser, measure))
