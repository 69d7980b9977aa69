"""Wiring of the frontend process: dial the engines, load the tokenizer, serve, leave in order."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import os
import socket
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from prometheus_client import REGISTRY
from prometheus_client.registry import Collector

from triptych.compat import vllm_engine_pb2_grpc
from triptych.config import EngineConfig, FrontendConfig
from triptych.config.api_keys import ANY_TENANT
from triptych.errors import ConfigError, TriptychError
from triptych.observe.logging import with_fields
from triptych.observe.metrics import (
    ChildMetrics,
    ChoiceGauges,
    EngineGauges,
    FrontendMetrics,
    VllmNames,
)
from triptych.rpc import collector
from triptych.rpc.channel import PUBLIC_MESSAGE_BYTES
from triptych.rpc.open_files import fit_connections, raise_file_limit
from triptych.rpc.server import RpcServer
from triptych.rpc.service_main import STOP_GRACE_S, ServiceApp
from triptych.rpc.tls import ServerTls, create_client_tls
from triptych.types.exit_codes import ExitCode
from triptych.v1 import embedding_pb2_grpc, generation_pb2_grpc, model_pb2_grpc
from triptych_services.frontend.access.caller import Caller
from triptych_services.frontend.access.keys import ApiKeys, create_api_keys, label_of_tenant
from triptych_services.frontend.engines.client import EngineClient
from triptych_services.frontend.engines.status_watch import StatusWatch
from triptych_services.frontend.generate import Generator
from triptych_services.frontend.grpc.admin_forwarder import ADMIN_SERVICE, create_admin_forwarder
from triptych_services.frontend.grpc.embedding_servicer import EMBEDDING_SERVICE, EmbeddingServicer
from triptych_services.frontend.grpc.generation_servicer import SERVICE, GenerationServicer
from triptych_services.frontend.grpc.interceptors import AuditInterceptor, KeyInterceptor
from triptych_services.frontend.grpc.long_calls import with_long_requests
from triptych_services.frontend.grpc.model_servicer import MODEL_SERVICE, ModelServicer
from triptych_services.frontend.grpc.vllm.servicer import VLLM_SERVICE, VllmServicer
from triptych_services.frontend.http.listener import listen
from triptych_services.frontend.offload.limited_process import child_totals
from triptych_services.frontend.requests.long_reader import LongReader
from triptych_services.frontend.routing.discovery import EngineDiscovery
from triptych_services.frontend.routing.policy import create_policy
from triptych_services.frontend.routing.prefix_index import PrefixIndex
from triptych_services.frontend.routing.router import Router
from triptych_services.frontend.siblings.siblings import Siblings
from triptych_services.frontend.streams.migrator import MigrationTerms, Migrator
from triptych_services.frontend.streams.registry import AliveRequests

if TYPE_CHECKING:
    from triptych_services.frontend.http.server import HttpServer
    from triptych_services.frontend.requests.text_model import TextModel

log = logging.getLogger(__name__)

# A thread that tokenizes or decodes would keep the GIL from the loop for 5 ms at a time: beside a long decode
# the median delay of the loop measured 3.1 ms at the default and 0.9 ms at this.
_SWITCH_INTERVAL_S = 0.0005
_ADDRESSES = 8  # that take all connections at the default of frontend.max_connections_per_address
_MAX_ADMIN_CONNECTIONS = 128  # on each of the two ports
_MAX_DETOKENIZE_BYTES = 2 << 20  # the most ids that may be, of 4 bytes each, are half of them
_HTTP_AFTER_S = 0.5  # without an engine HTTP says so


class FrontendApp(ServiceApp):
    """The tokenizing gateway."""

    section = "frontend"
    keys_option = "api_keys_file"
    logs_each_request = True
    exit_codes = ((TriptychError, ExitCode.MISCONFIGURED),)

    def __init__(self, config: EngineConfig, siblings: Siblings | None = None) -> None:
        """
        Args:
            siblings: The other processes that serve on these ports. None: there are none.
        """
        config = _with_connections_that_fit(config)
        super().__init__(config)
        self._siblings = siblings
        self.shares_ports = siblings is not None
        self._started_at = time.monotonic()
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        self._router = Router(
            _read_aliases(config.frontend.model_aliases), create_policy(config.frontend.routing)
        )
        self._keys = create_api_keys(config.frontend)
        metrics = self._metrics = FrontendMetrics.create()
        self._migrator = Migrator(self._router, metrics, MigrationTerms.of(config.frontend))
        self._status_watch = StatusWatch()
        self._generator = Generator(
            self._router,
            metrics,
            self._migrator,
            config.frontend.max_messages_per_s,
            config.frontend.keep_s,
            config.frontend.max_logit_bias,
            self._status_watch.why_waiting,
            lambda caller, unit: note_rate_limited(metrics, self._keys, caller, unit),
            config.frontend.max_unsent_bytes,
            siblings,
        )
        self._discovery = _create_discovery(config, self._router, self._status_watch, metrics)
        gauges = EngineGauges(
            self._status_watch.latest, lambda: self._status_watch.states(self._router.engines)
        )
        choices = ChoiceGauges(lambda: count_choices_without_token(self._generator.alive, self._keys))
        for source in (gauges, choices, ChildMetrics(child_totals)):
            REGISTRY.register(source)
        if siblings is not None:
            alike = (metric.name for source in (gauges, VllmNames((gauges,))) for metric in source.collect())
            siblings.answer_metrics(tuple(alike))
        if config.frontend.metrics_vllm_names:
            REGISTRY.register(VllmNames((gauges, *metrics.collectors)))
        self._long_reader = LongReader()
        self.server = create_server(
            config.frontend,
            self._generator,
            self._status_watch,
            self._keys,
            self.server_tls,
            self._long_reader,
        )
        self._admin_server = create_admin_server(self._router, self._generator, self._keys, self.server_tls)
        self._http_servers: list[HttpServer] = []
        self._has_been_ready = asyncio.Event()
        self.start_background("load-tokenizer", self._load_text_model())

    async def start(self) -> Mapping[str, int]:
        if "engines" not in self.background:
            self.dial_engines()
        self.start_background("move-requests", self._migrator.run())

        config = self.config.frontend
        admin_port = self._admin_server.bind(
            config.admin_host, config.admin_port, option="frontend.admin_port"
        )
        await self._admin_server.start()
        await self._admin_server.set_ready(True)
        ports = {"admin_port": admin_port}
        if config.serve_http:
            listener = listen(
                config.host, config.http_port, "frontend.http_port", shares_port=self.shares_ports
            )
            ports["http_port"] = listener.getsockname()[1]
            self.start_background("http", self._serve_http(listener))
        if config.serve_admin_http:
            ports["admin_http_port"] = await self._start_admin_http()
        log.info("dialing engines %s", config.engine_addresses)
        readiness = follow_readiness(
            self.server, self._generator, self._router, self._started_at, self._has_been_ready.set
        )
        self.start_background("follow-readiness", readiness)
        return ports

    async def find_metrics(self) -> Collector:
        return REGISTRY if self._siblings is None else await self._siblings.find_metrics()

    def dial_engines(self) -> None:
        """Begin to connect to the engines."""
        self.start_background("engines", self._discovery.run())

    async def _serve_http(self, listener: socket.socket) -> None:
        """Serve HTTP as soon as the frontend is ready, or a little later; until then connections wait.

        Its modules take 0.5 s of CPU time to import, which a worker and an engine core that start beside it need.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_HTTP_AFTER_S):
                await self._has_been_ready.wait()
        await asyncio.to_thread(_import_http)
        from triptych_services.frontend.http.app import create_app
        from triptych_services.frontend.http.connections import ConnectionLimits
        from triptych_services.frontend.http.server import HttpServer

        config = self.config.frontend
        app = create_app(
            self._generator,
            self._keys,
            _split(config.cors_origins),
            refuses_unknown=config.unknown_fields == "refuse",
            ping_interval_s=config.ping_interval_s,
            on_response=self._note_response,
            long_reader=self._long_reader,
        )
        server = HttpServer(
            app,
            config.host,
            config.http_port,
            limits=ConnectionLimits(
                config.client_timeout_s,
                config.max_connections,
                config.max_connections_per_address or max(1, config.max_connections // _ADDRESSES),
            ),
            tls=self.server_tls,
        )
        self._http_servers.append(server)
        _leave_out_of_collections()
        await server.start(listener)
        await server.wait_stopped()

    async def _start_admin_http(self) -> int:
        """Start the HTTP server of the operators' calls and return its port."""
        from triptych_services.frontend.http.connections import ConnectionLimits
        from triptych_services.frontend.http.operators.app import create_operators_app
        from triptych_services.frontend.http.server import HttpServer

        config = self.config.frontend
        app = create_operators_app(self._router, self._generator, self._keys, self._note_response)
        server = HttpServer(
            app,
            config.admin_host,
            config.admin_http_port,
            limits=ConnectionLimits(config.client_timeout_s, _MAX_ADMIN_CONNECTIONS),
            tls=self.server_tls,
        )
        self._http_servers.append(server)
        listener = listen(
            config.admin_host,
            config.admin_http_port,
            "frontend.admin_http_port",
            shares_port=self.shares_ports,
        )
        port = await server.start(listener)
        self.start_background("admin-http", server.wait_stopped())
        return port

    def _note_response(self, route: str, status: int) -> None:
        self._metrics.http_responses.labels(route, status).inc()

    async def drain(self) -> None:
        log.info("stopping: draining %d requests", self._generator.num_active)
        await self.server.set_ready(False)
        drain_s = self.config.frontend.drain_s
        if (num_left := await self._generator.drain(drain_s)) > 0:
            log.warning("%d requests did not finish within frontend.drain_s = %g", num_left, drain_s)

    async def stop(self) -> None:
        servers: list[RpcServer | HttpServer] = [self._admin_server, *self._http_servers]
        await asyncio.gather(super().stop(), *(server.stop(STOP_GRACE_S) for server in servers))

    async def _load_text_model(self) -> None:
        """Load on a thread of its own, which a stop does not wait for: the first time, it fetches the model."""
        thread = ThreadPoolExecutor(1, thread_name_prefix="load-tokenizer")
        text = await asyncio.get_running_loop().run_in_executor(thread, _load, self.config)
        if text.defaults:
            log.info("sampling defaults of the checkpoint", extra=with_fields(**text.defaults))
        if text.formats:
            log.info("answers to conversations are split", extra=with_fields(**text.formats))
        self._generator.set_text_model(text)
        _leave_out_of_collections()
        await collector.collect_when_idle(lambda: not self._generator.num_active)


def _leave_out_of_collections() -> None:
    """Leave what has been loaded out of all further collections. The modules that serve HTTP are 50,000 objects."""
    gc.collect()  # loading leaves garbage that would be kept
    collector.freeze()


def _load(config: EngineConfig) -> TextModel:
    from triptych.hub import resolve_model
    from triptych_services.frontend.requests.text_model import TextModel

    return TextModel.from_directory(
        resolve_model(config.model.model, revision=config.model.revision),
        tool_call_parser=config.frontend.tool_call_parser,
        reasoning_parser=config.frontend.reasoning_parser,
    )


def _import_http() -> None:
    """Import what serves HTTP."""
    import triptych_services.frontend.http.app
    import triptych_services.frontend.http.server  # noqa: F401


async def follow_readiness(
    server: RpcServer,
    generator: Generator,
    router: Router,
    started: float,
    on_ready: Callable[[], None] = lambda: None,
) -> None:
    """Health says ready while an engine is and the tokenizer is loaded. Warn of engines that share a name.

    Args:
        on_ready: Called whenever it has become ready.
    """
    told: set[str] = set()
    while True:
        router.changed.clear()
        if generator.siblings is not None:
            generator.siblings.say_ready(generator.is_ready_here)
        if generator.is_ready != server.is_ready:
            await server.set_ready(generator.is_ready)
            if generator.is_ready:
                on_ready()
                models = ",".join(model.name for model in generator.models())
                log.info("ready", extra=with_fields(models=models, after_s=time.monotonic() - started))
            else:
                log.warning("not ready: %s", generator.why_not_ready)
        namesakes = router.namesakes()
        for name in namesakes.keys() - told:
            log.warning(
                "engine.engine_id: %s is the name of several engines (%s): metrics, logs and operators' calls cannot "
                "tell them apart",
                name,
                ", ".join(namesakes[name]),
            )
        told = set(namesakes)
        await router.changed.wait()


def _create_discovery(
    config: EngineConfig, router: Router, status_watch: StatusWatch, metrics: FrontendMetrics
) -> EngineDiscovery:
    create = functools.partial(
        EngineClient,
        frontend_id=f"{socket.gethostname()}:{os.getpid()}",
        boot_id=str(uuid.uuid4()),
        on_change=router.on_change,
        on_session=lambda outcome: metrics.sessions.labels(outcome).inc(),
        tls=create_client_tls(config.tls),
        index=PrefixIndex(),
    )
    work = (EngineClient.run, status_watch.follow)
    return EngineDiscovery(config.frontend.engine_addresses, router, create, work=work)


def note_rate_limited(metrics: FrontendMetrics, keys: ApiKeys | None, caller: Caller, unit: str) -> None:
    """Count a request that was refused because its key has used up a limit."""
    tenant = ANY_TENANT if caller.tenant is None else label_of_tenant(caller.tenant, keys)
    metrics.rate_limited.labels(tenant, unit.partition(" ")[0]).inc()


def count_choices_without_token(alive: AliveRequests, keys: ApiKeys | None) -> Mapping[str, int]:
    """Count the choices that wait for their first token, by the tenant as metrics name it."""
    counts = Counter[str]()
    for tenant, count in alive.count_without_token().items():
        counts[label_of_tenant(tenant, keys)] += count
    return counts


def _with_connections_that_fit(config: EngineConfig) -> EngineConfig:
    """Return the config with as many connections as may be open files.

    Raises:
        ConfigError: Not even a few are.
    """
    names = ["max_grpc_connections", *(["max_connections"] if config.frontend.serve_http else [])]
    wanted = {f"frontend.{name}": getattr(config.frontend, name) for name in names}
    fitting = fit_connections(wanted, raise_file_limit())
    changed: dict[str, Any] = {name: fitting[f"frontend.{name}"] for name in names}
    return replace(config, frontend=replace(config.frontend, **changed))


def _read_aliases(text: str) -> dict[str, str]:
    """Return other names of models, with the names that engines have for them."""
    aliases = {}
    for entry in _split(text):
        alias, _, name = (part.strip() for part in entry.partition("="))
        if not alias or not name:
            raise ConfigError(f"frontend.model_aliases: {entry!r} is not of the form ALIAS=NAME")
        aliases[alias] = name
    return aliases


def _split(text: str) -> list[str]:
    """Return the parts of a comma-separated list."""
    return [part.strip() for part in text.split(",") if part.strip()]


def create_server(
    config: FrontendConfig,
    generator: Generator,
    status_watch: StatusWatch,
    keys: ApiKeys | None = None,
    tls: ServerTls | None = None,
    long_reader: LongReader | None = None,
) -> RpcServer:
    """Make the frontend's server with all its public services.

    Args:
        keys: None: no API key is asked for.
        tls: None: plain text.
        long_reader: Reads long requests. None: one that no other API shares.
    """
    server = RpcServer(
        services=(SERVICE, EMBEDDING_SERVICE, VLLM_SERVICE),
        other_services={MODEL_SERVICE: True},  # it answers without an engine
        limit_bytes=PUBLIC_MESSAGE_BYTES,
        max_connection_age_s=config.max_connection_age_s,
        max_connections=config.max_grpc_connections,
        max_calls_per_connection=config.max_calls_per_connection,
        client_timeout_s=config.client_timeout_s,
        interceptors=() if keys is None else (KeyInterceptor(keys),),
        tls=tls,
        shares_port=generator.siblings is not None,
    )
    long_reader = long_reader or LongReader()
    timeout_s = config.client_timeout_s
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(
        GenerationServicer(generator, timeout_s, long_reader),
        with_long_requests(
            server.grpc,
            as_bytes=("Generate", "StreamGenerate", "Tokenize"),
            items=("BatchGenerate",),
            max_bytes={"Detokenize": _MAX_DETOKENIZE_BYTES},
        ),
    )
    embedding_pb2_grpc.add_EmbeddingServiceServicer_to_server(
        EmbeddingServicer(generator, timeout_s, long_reader),
        with_long_requests(
            server.grpc, as_bytes=("Embed", "Classify", "Score", "Rerank"), items=("EmbedStream",)
        ),
    )
    model_pb2_grpc.add_ModelServiceServicer_to_server(
        ModelServicer(generator), with_long_requests(server.grpc)
    )
    vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(
        VllmServicer(generator, timeout_s, long_reader, status_watch.latest),
        with_long_requests(server.grpc, as_bytes=("Generate",)),
    )
    return server


def create_admin_server(
    router: Router, generator: Generator, keys: ApiKeys | None = None, tls: ServerTls | None = None
) -> RpcServer:
    """Make the server of the operator's calls, which are needed most when no engine is ready."""
    asks_key = () if keys is None else (KeyInterceptor(keys, needs_admin=True),)
    server = RpcServer(
        services=(ADMIN_SERVICE,),
        limit_bytes=PUBLIC_MESSAGE_BYTES,
        max_connections=_MAX_ADMIN_CONNECTIONS,
        interceptors=(AuditInterceptor(), *asks_key),
        tls=tls,
        shares_port=generator.siblings is not None,
    )
    server.grpc.add_generic_rpc_handlers((create_admin_forwarder(router, generator),))
    return server
