"""Measures short requests, one after the other on one connection: latency, its parts, and CPU time of each tier.

    python -m benchmarks.stack.short_requests [--what embedding generation] [--apis http grpc] [model.dtype=bfloat16]

`embedding` is the vector of seven words by the embedded embedding model. `generation` is one token, streamed, by the
embedded model, or with `--simulated` by a worker that takes no time for a step. The client sends and reads bytes:
what a client's library costs is not in the figures.

The parts of a latency are means over a round, from the metrics that all tiers have:

    client ─► frontend ─► engine core ─► worker ─► engine core ─► frontend ─► client
              ├── e2e_request_latency ───────────────────────────────────┤
                          ├── queue and prefill time ──────┤
                              ├── engine_step_seconds ─────┤
                                         ├──────┤ worker_stage_seconds without idle
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import grpc
import numpy as np

from benchmarks.harness.cluster import running, simulated_config
from benchmarks.harness.command import create_parser, run
from benchmarks.harness.figures import Figure
from benchmarks.harness.process_tree import cpu_seconds, descendants
from triptych.config import EngineConfig
from triptych.launcher.launch import config_from_overrides
from triptych.launcher.local_cluster import LocalCluster
from triptych.v1 import embedding_pb2, generation_pb2

TEXT = "the quick brown fox jumps over dogs"
_TIMEOUT_S = 30.0
_STAGES = ("prepare", "forward", "sample")

Call = Callable[[], None]
"""Send one request and read its answer to the end."""


def measure(arguments: argparse.Namespace) -> Iterator[Figure]:
    for what in arguments.what:
        with ExitStack() as stack:
            options = dict(option.split("=", 1) for option in arguments.options)
            cluster = stack.enter_context(running(_config(what, arguments.simulated, options)))
            calls = {api: stack.enter_context(_CONNECT[api](cluster, what)) for api in arguments.apis}
            for call in calls.values():
                _times_of(call, arguments.requests // 4)  # warm up
            for _ in range(arguments.rounds):
                for api, call in calls.items():
                    yield from _figures(f"{what}, {api}", cluster, call, arguments.requests)


def _config(what: str, is_simulated: bool, options: Mapping[str, str]) -> EngineConfig:
    if what == "generation" and is_simulated:
        return simulated_config(0, **options)
    model = {"model.model": "embedded-embedding"} if what == "embedding" else {}
    return config_from_overrides({**model, **options})


def _times_of(call: Call, num_requests: int) -> np.ndarray:
    """Return the seconds of each of some calls, one after the other: float [num_requests]."""
    times_s = np.zeros(num_requests)
    for number in range(num_requests):
        started_s = time.perf_counter()
        call()
        times_s[number] = time.perf_counter() - started_s
    return times_s


def _figures(name: str, cluster: LocalCluster, call: Call, num_requests: int) -> Iterator[Figure]:
    cpu_before = {tier: cpu_seconds(descendants([pid])) for tier, pid in cluster.pids.items()}
    totals_before = _totals(cluster)
    times_s = _times_of(call, num_requests)
    totals = _totals(cluster)
    for percent in (10, 50, 99):
        value_ms = 1e3 * float(np.percentile(times_s, percent))
        yield Figure(f"{name}: p{percent}", "ms", (value_ms,), less_is_better=True)
    frontend_s, engine_s, step_s, worker_s = (
        (totals[part] - totals_before[part]) / num_requests
        for part in ("frontend", "engine", "step", "worker")
    )
    parts_s = {
        "client, HTTP or gRPC": float(times_s.mean()) - frontend_s,
        "frontend, and to the engine core and back": frontend_s - engine_s,
        "engine core": engine_s - step_s,
        "between engine core and worker": step_s - worker_s,
        "worker": worker_s,
    }
    for part, part_s in parts_s.items():
        yield Figure(f"{name}: part of {part}", "ms", (1e3 * part_s,), less_is_better=True)
    for tier, pid in cluster.pids.items():
        cpu_s = cpu_seconds(descendants([pid])) - cpu_before[tier]
        yield Figure(f"{name}: {tier}, CPU", "ms", (1e3 * cpu_s / num_requests,), less_is_better=True)


def _totals(cluster: LocalCluster) -> dict[str, float]:
    """Return the seconds so far that the tiers have measured, by part."""
    config = cluster.config
    frontend, worker = _scrape(config.frontend.metrics_port), _scrape(config.worker.metrics_port)
    return {
        "frontend": _sum(frontend, "triptych_frontend_e2e_request_latency_seconds_sum"),
        "engine": _sum(frontend, "triptych_frontend_request_queue_time_seconds_sum")
        + _sum(frontend, "triptych_frontend_request_prefill_time_seconds_sum"),
        "step": _sum(_scrape(config.engine.metrics_port), "triptych_engine_step_seconds_sum"),
        "worker": sum(
            _sum(worker, f'triptych_worker_stage_seconds_total{{stage="{stage}"}}') for stage in _STAGES
        ),
    }


def _scrape(port: int) -> dict[str, float]:
    """Return each series of a process and its value."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=_TIMEOUT_S) as response:
        lines = response.read().decode().splitlines()
    return {
        name: float(value)
        for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    }


def _sum(series: dict[str, float], prefix: str) -> float:
    """Return the sum of a metric over its labels; 0 if there is no series yet."""
    return sum(value for name, value in series.items() if name.startswith(prefix))


@contextmanager
def _connected_http(cluster: LocalCluster, what: str) -> Iterator[Call]:
    host, port = cluster.http_address.rsplit(":", 1)
    body: dict[str, Any]
    if what == "embedding":
        path, body = "/v1/embeddings", {"input": TEXT, "model": ""}
    else:
        path, body = "/v1/completions", {"prompt": TEXT, "max_tokens": 1, "ignore_eos": True, "stream": True}
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    request = head.encode() + f"Content-Length: {len(data)}\r\n\r\n".encode() + data
    with socket.create_connection((host, int(port)), timeout=_TIMEOUT_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield lambda: _exchange(connection, request)


def _exchange(connection: socket.socket, request: bytes) -> None:
    """Send a request and read its answer, which has a length or comes in chunks.

    Raises:
        RuntimeError: It is an error, or the connection was closed.
    """
    connection.sendall(request)
    answer = b""
    while not _is_whole(answer):
        if not (more := connection.recv(1 << 16)):
            raise RuntimeError(f"the frontend has closed the connection after {answer[-200:]!r}")
        answer += more
    if not answer.startswith(b"HTTP/1.1 200 "):
        raise RuntimeError(f"the frontend answered {answer[:500]!r}")


def _is_whole(answer: bytes) -> bool:
    head, found, body = answer.partition(b"\r\n\r\n")
    if not found:
        return False
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return len(body) >= int(line.partition(b":")[2])
    return body.endswith(b"0\r\n\r\n")  # the last chunk


@contextmanager
def _connected_grpc(cluster: LocalCluster, what: str) -> Iterator[Call]:
    with grpc.insecure_channel(cluster.address) as channel:
        if what == "embedding":
            embed_request = embedding_pb2.EmbedRequest()
            embed_request.inputs.add().text.text = TEXT
            embed = channel.unary_unary("/triptych.v1.EmbeddingService/Embed")
            data = embed_request.SerializeToString()
            yield lambda: embed(data, timeout=_TIMEOUT_S)
            return
        request = generation_pb2.StreamGenerateRequest()
        request.generation.text.text = TEXT
        request.generation.length.max_tokens = 1
        request.generation.length.ignore_eos = True
        generate = channel.unary_stream("/triptych.v1.GenerationService/StreamGenerate")
        data = request.SerializeToString()

        def call() -> None:
            for _ in generate(data, timeout=_TIMEOUT_S):
                pass

        yield call


_CONNECT = {"http": _connected_http, "grpc": _connected_grpc}

if __name__ == "__main__":
    parser = create_parser(__doc__, rounds=3)
    parser.add_argument(
        "--what", nargs="+", choices=("embedding", "generation"), default=["embedding", "generation"]
    )
    parser.add_argument("--apis", nargs="+", choices=tuple(_CONNECT), default=list(_CONNECT))
    parser.add_argument("--requests", type=int, default=400, help="of a round (default: 400)")
    parser.add_argument("--simulated", action="store_true", help="the generating worker computes nothing")
    parser.add_argument("options", nargs="*", metavar="name=value", help="of the config")
    sys.exit(run(parser, measure))
