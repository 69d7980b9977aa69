"""Serve a model on this machine: worker, engine core and frontend, watched and restarted if they die.

  triptych serve                              the embedded model, SmolLM2-135M-Instruct
  triptych serve embedded-embedding           the embedded model for embeddings, all-MiniLM-L6-v2
  triptych serve HuggingFaceTB/SmolLM2-360M-Instruct --scheduler.max-num-seqs 16
  triptych serve /models/x.gguf --model.quantization q8 --frontend.http-port 8080
  triptych serve --sim --simulation.base-ms 20  all but the model itself: made-up words, no weights, modelled times

Ctrl-C lets running requests finish and leaves; a second one ends everything at once.
Options can also be set in a yaml file (--config) or in the environment; flags win.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from types import FrameType

from triptych.admin.v1 import admin_pb2, admin_pb2_grpc
from triptych.cli.access import DEFAULT_ADDRESS
from triptych.cli.stack import given_options
from triptych.config import EngineConfig
from triptych.config.loader import add_config_flags, given_values, load_config
from triptych.errors import ConfigError
from triptych.internal.v1 import worker_pb2, worker_pb2_grpc
from triptych.launcher.launch import launch
from triptych.launcher.local_cluster import LocalCluster
from triptych.launcher.ports import with_free_internal_ports
from triptych.observe import logging as observe_logging
from triptych.rpc.channel import credentials_of, open_blocking_channel
from triptych.rpc.tls import ClientCredentials, create_client_tls

_STATUS_TIMEOUT_S = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="directory, .gguf file, hub id or `embedded`; the same as --model.model",
    )
    parser.add_argument(
        "--sim",
        action="store_true",
        help="simulate the model: the same as --simulation.enabled true",
    )
    parser.usage = f"{parser.prog} [MODEL] [--sim] [--config FILE] [--SECTION.OPTION VALUE ...]"
    add_config_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    config = _load(arguments)
    observe_logging.configure(config.log, "cluster")
    interrupts = _Interrupts()
    started_s = time.monotonic()
    cluster: LocalCluster | None = None
    try:
        cluster = interrupts.cluster = launch(config)
        print(_banner(cluster, time.monotonic() - started_s), flush=True)
        cluster.wait()
    except KeyboardInterrupt:
        if cluster is not None:
            print("stopping; Ctrl-C again ends it at once", file=sys.stderr)
            cluster.stop()
    return 0


class _Interrupts:
    """The first SIGINT, SIGTERM or SIGHUP is a KeyboardInterrupt in the main thread, each later one kills."""

    def __init__(self) -> None:
        self.cluster: LocalCluster | None = None
        self._is_first = True
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._is_first:
            self._is_first = False
            raise KeyboardInterrupt
        if self.cluster is not None:
            self.cluster.kill()


def _load(arguments: argparse.Namespace) -> EngineConfig:
    flags = given_options(arguments)
    if arguments.model is not None and flags.setdefault("model.model", arguments.model) != arguments.model:
        raise ConfigError(f"MODEL {arguments.model!r} and --model.model {flags['model.model']!r} disagree")
    if arguments.sim:
        flags.setdefault("simulation.enabled", "true")
    config = with_free_internal_ports(
        load_config(file=arguments.config, flags=flags), given_values(file=arguments.config, flags=flags)
    )
    if arguments.sim and not config.simulation.enabled:
        raise ConfigError(f"--sim and --simulation.enabled {flags['simulation.enabled']} disagree")
    return config


def _banner(cluster: LocalCluster, elapsed_s: float) -> str:
    """Describe the stack as engine and worker know it: the frontend may ask for a key."""
    credentials = credentials_of(create_client_tls(cluster.config.tls))
    name = _model_name(cluster.config.engine.worker_address, credentials)
    http = f"{'https' if cluster.config.tls.certificate else 'http'}://{cluster.http_address}"
    simulated = " (simulated: the answers are made-up words)" if cluster.config.simulation.enabled else ""
    to_chat = "triptych chat"
    if cluster.address != DEFAULT_ADDRESS:
        to_chat += f" --address {cluster.address}"
    key = " -H 'Authorization: Bearer KEY'" if cluster.config.frontend.api_keys_file else ""
    body = f'{{"model": "{name}", "messages": [{{"role": "user", "content": "What is the capital of France?"}}]}}'
    return f"""
Triptych serves {name}{simulated}, ready after {elapsed_s:.1f} s.

  gRPC   {cluster.address}
  admin  {cluster.admin_address}   (triptych admin --help)
  HTTP   {http}/v1   (OpenAI-compatible; try it at {http}/docs)
  cache  {_describe_cache(_status(cluster.engine_address, credentials))}

  Try    {to_chat}
         curl {http}/v1/chat/completions -H 'Content-Type: application/json'{key} \\
           -d '{body}'

  Ctrl-C stops it.
"""


def _model_name(worker_address: str, credentials: ClientCredentials | None) -> str:
    with open_blocking_channel(worker_address, credentials) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        info = stub.GetInfo(worker_pb2.GetInfoRequest(), timeout=_STATUS_TIMEOUT_S).info
    return str(info.facts.model.name)


def _status(engine_address: str, credentials: ClientCredentials | None) -> admin_pb2.EngineStatus:
    with open_blocking_channel(engine_address, credentials) as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        return stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=_STATUS_TIMEOUT_S).status


def _describe_cache(status: admin_pb2.EngineStatus) -> str:
    """Say how much memory keys and values take now, and how much they may take."""

    def size(num_blocks: int) -> str:
        return f"{num_blocks * status.block_bytes / 1e9:.1f} GB"

    if not status.HasField("soft_num_blocks"):
        return f"{size(status.num_blocks)} of keys and values"
    return (
        f"{size(status.num_touched_blocks)} of keys and values now, {size(status.soft_num_blocks)} in light use, "
        f"at most {size(status.num_blocks)}   (cache.soft_memory_fraction, cache.memory_fraction)"
    )
