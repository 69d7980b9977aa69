"""Wiring of the frontend process: bind, dial the engines, load the tokenizer, serve, leave in order."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
import sys
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from services.frontend.engines.client import EngineClient
from services.frontend.engines.router import Router
from services.frontend.generate import Generator
from services.frontend.grpc.admin_servicer import ADMIN_SERVICE, AdminServicer
from services.frontend.grpc.generation_servicer import (
    EMBEDDING_SERVICE,
    SERVICE,
    EmbeddingServicer,
    GenerationServicer,
)
from triptych.config import EngineConfig, FrontendConfig
from triptych.config.loader import ServiceArguments
from triptych.errors import ConfigError, TriptychError
from triptych.observe import logging as observe_logging
from triptych.observe.logging import with_fields
from triptych.observe.metrics import FrontendMetrics, serve_metrics
from triptych.rpc.channel import PUBLIC_MESSAGE_BYTES
from triptych.rpc.server import RpcServer, stop_event, write_ready_file
from triptych.types.exit_codes import ExitCode
from triptych.v1 import admin_pb2_grpc, generation_pb2_grpc

if TYPE_CHECKING:
    from services.frontend.text_model import TextModel

log = logging.getLogger(__name__)

# A thread that tokenizes or decodes would keep the GIL from the loop for 5 ms at a time: beside a long decode
# the median delay of the loop measured 3.1 ms at the default and 0.9 ms at this.
_SWITCH_INTERVAL_S = 0.0005
_STOP_GRACE_S = 1.0  # for last messages on their way; who watches health or status is cut off then


async def run(arguments: ServiceArguments) -> int:
    """Serve until SIGTERM; returns the exit code.

    Raises:
        ConfigError: a port is taken, or an address cannot be used; names it.
    """
    started = time.monotonic()
    config = arguments.config
    observe_logging.configure(config.log, "frontend")
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    stop = stop_event()
    router = Router()
    router.engines = _create_engines(config, router)
    generator = Generator(router, FrontendMetrics.create())
    loading = asyncio.create_task(_load_text_model(config.model.model, generator), name="load-tokenizer")
    server = _create_server(config.frontend, generator, router)
    host = config.frontend.host
    port = server.bind(host, config.frontend.port, option="frontend.port")
    metrics_port = serve_metrics(host, config.frontend.metrics_port, option="frontend.metrics_port")
    dialling = [asyncio.create_task(e.run(), name=f"engine-{e.address}") for e in router.engines]
    await server.start()

    from services.frontend.openai.server import (
        HttpServer,
    )  # slow to import: engines are dialled in the meantime

    client_timeout_s = config.frontend.client_timeout_s
    http = HttpServer(generator, host, config.frontend.http_port, client_timeout_s=client_timeout_s)
    http_port = await http.start()
    ports = {"port": port, "http_port": http_port, "metrics_port": metrics_port}
    write_ready_file(arguments.ready_file, ports)
    log.info("listening on %s", host, extra=with_fields(**ports, engines=config.frontend.engine_addresses))

    readiness = _follow_readiness(server, generator, router, started)
    tasks = (
        *dialling,
        asyncio.create_task(readiness, name="follow-readiness"),
        asyncio.create_task(http.wait_stopped(), name="http"),
    )
    stopping = asyncio.create_task(stop.wait(), name="stop")
    dead = await _first_death(loading, tasks, stopping)
    if dead is None:
        code = await _drain(server, generator, config.frontend.drain_s)
    else:
        code = _report_death(dead)
        await server.set_dead()
    await asyncio.gather(server.stop(_STOP_GRACE_S), http.stop(_STOP_GRACE_S))
    for task in (*tasks, stopping, loading):
        task.cancel()
    await asyncio.gather(*tasks, stopping, loading, return_exceptions=True)
    log.info("stopped")
    return code


async def _load_text_model(model: str, generator: Generator) -> None:
    """Load on a thread of its own, which a stop does not wait for: the first time, it fetches the model."""
    thread = ThreadPoolExecutor(1, thread_name_prefix="load-tokenizer")
    text = await asyncio.get_running_loop().run_in_executor(thread, _load, model)
    if text.defaults:
        log.info("sampling defaults of the checkpoint", extra=with_fields(**text.defaults))
    generator.set_text_model(text)
    # What is loaded now stays. Without this every full garbage collection walks it: 20 ms, with all streams at rest.
    gc.collect()
    gc.freeze()


def _load(model: str) -> TextModel:
    from services.frontend.text_model import TextModel
    from triptych.hub import resolve_model

    return TextModel.from_directory(resolve_model(model))


async def _first_death(
    loading: asyncio.Task[None], tasks: Sequence[asyncio.Task[None]], stopping: asyncio.Task[bool]
) -> asyncio.Task[None] | None:
    """Wait for a signal (returns None), or until a task ends that should not."""
    waited: set[asyncio.Task[None] | asyncio.Task[bool]] = {stopping, loading, *tasks}
    while True:
        done, waited = await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if stopping in done:
            return None
        for task in (*tasks, loading):
            if task in done and (task is not loading or task.exception() is not None):
                return task


async def _drain(server: RpcServer, generator: Generator, drain_s: float) -> int:
    """Leave the load balancer, let what is alive finish."""
    log.info("stopping: draining %d requests", generator.num_active)
    await server.set_ready(False)
    if (num_left := await generator.drain(drain_s)) > 0:
        log.warning("%d requests did not finish within frontend.drain_s = %g", num_left, drain_s)
    return ExitCode.OK


def _report_death(task: asyncio.Task[None]) -> int:
    error = task.exception()
    if isinstance(error, TriptychError):
        log.error("cannot serve: %s", error)
        return ExitCode.MISCONFIGURED
    log.error("%s died: %r", task.get_name(), error, exc_info=error)
    return ExitCode.FAILED


async def _follow_readiness(server: RpcServer, generator: Generator, router: Router, started: float) -> None:
    """Health says ready while an engine is and the tokenizer is loaded."""
    while True:
        router.changed.clear()
        if generator.is_ready != server.is_ready:
            await server.set_ready(generator.is_ready)
            if generator.is_ready:
                models = ",".join(model.name for model in generator.models())
                log.info("ready", extra=with_fields(models=models, after_s=time.monotonic() - started))
            else:
                log.warning("not ready: %s", generator.why_not_ready)
        await router.changed.wait()


def _create_engines(config: EngineConfig, router: Router) -> list[EngineClient]:
    addresses = [text.strip() for text in config.frontend.engine_addresses.split(",") if text.strip()]
    if not addresses:
        raise ConfigError("frontend.engine_addresses: names no engine; give host:port, comma-separated")
    frontend_id = f"{socket.gethostname()}:{os.getpid()}"
    boot_id = str(uuid.uuid4())
    return [
        EngineClient(address, frontend_id=frontend_id, boot_id=boot_id, on_change=router.on_change)
        for address in dict.fromkeys(addresses)
    ]


def _create_server(config: FrontendConfig, generator: Generator, router: Router) -> RpcServer:
    # An operator needs the admin service most when no engine is ready. No embeddings are served yet.
    server = RpcServer(
        services=(SERVICE,),
        other_services={ADMIN_SERVICE: True, EMBEDDING_SERVICE: False},
        limit_bytes=PUBLIC_MESSAGE_BYTES,
        max_connection_age_s=config.max_connection_age_s,
    )
    generation = GenerationServicer(generator, config.client_timeout_s)
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(generation, server.grpc)
    generation_pb2_grpc.add_EmbeddingServiceServicer_to_server(EmbeddingServicer(), server.grpc)
    admin_pb2_grpc.add_AdminServiceServicer_to_server(AdminServicer(router), server.grpc)
    return server
