"""Serve a model on this machine: worker, engine core and frontend, watched and restarted if they die.

  triptych serve                              the embedded model, SmolLM2-135M-Instruct
  triptych serve HuggingFaceTB/SmolLM2-360M-Instruct --scheduler.max-num-seqs 16
  triptych serve /models/x.gguf --model.quantization q8 --frontend.http-port 8080
  triptych serve --sim --simulation.base-ms 20  all but the model itself: made-up words, no weights, modelled times

Ctrl-C lets running requests finish and leaves; a second one ends everything at once.
Options can also be set in a yaml file (--config) or in the environment; flags win.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time
from types import FrameType

from triptych.cli.stack import given_options
from triptych.cli.streaming import DEFAULT_ADDRESS
from triptych.client.grpc_client import GenerationClient
from triptych.config import EngineConfig
from triptych.config.loader import add_config_flags, load_config
from triptych.errors import ConfigError
from triptych.launcher.launch import launch
from triptych.launcher.local_cluster import LocalCluster
from triptych.observe import logging as observe_logging


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
    config = load_config(file=arguments.config, flags=flags)
    if arguments.sim and not config.simulation.enabled:
        raise ConfigError(f"--sim and --simulation.enabled {flags['simulation.enabled']} disagree")
    return config


def _banner(cluster: LocalCluster, elapsed_s: float) -> str:
    name = asyncio.run(_model_name(cluster.address))
    simulated = " (simulated: the answers are made-up words)" if cluster.config.simulation.enabled else ""
    to_chat = "triptych chat"
    if cluster.address != DEFAULT_ADDRESS:
        to_chat += f" --address {cluster.address}"
    body = f'{{"model": "{name}", "messages": [{{"role": "user", "content": "What is the capital of France?"}}]}}'
    return f"""
Triptych serves {name}{simulated}, ready after {elapsed_s:.1f} s.

  gRPC   {cluster.address}
  admin  {cluster.admin_address}   (triptych admin --help)
  HTTP   http://{cluster.http_address}/v1   (OpenAI-compatible; try it at http://{cluster.http_address}/docs)

  Try    {to_chat}
         curl http://{cluster.http_address}/v1/chat/completions -H 'Content-Type: application/json' \\
           -d '{body}'

  Ctrl-C stops it.
"""


async def _model_name(address: str) -> str:
    async with GenerationClient(address) as client:
        return (await client.list_models())[0].name
