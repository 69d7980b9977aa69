"""A frontend's gRPC servers in this process, in front of fake engines, and stubs to them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from tests.helpers.byte_tokenizer import byte_tokenizer
from tests.helpers.fake_engine import DEADLINE_S, FakeEngine
from tests.helpers.frontend import FrontendCore, frontend_core
from triptych import errors
from triptych.admin.v1 import admin_pb2_grpc
from triptych.config.fields import FrontendConfig
from triptych.rpc.channel import open_channel
from triptych.rpc.server import RpcServer
from triptych.rpc.status import from_rpc_error
from triptych.text.tokenizer import Tokenizer
from triptych.types.submit import SubmitRequest
from triptych.v1 import (
    generation_pb2,
    generation_pb2_grpc,
    model_pb2_grpc,
)
from triptych_services.frontend import app as app_module
from triptych_services.frontend.access.keys import create_api_keys
from triptych_services.frontend.engines.status_watch import StatusWatch

TOKENIZER = byte_tokenizer()


def ask(request_id: str = "", **generation: Any) -> generation_pb2.StreamGenerateRequest:
    """A request; a text may be given as a string, token ids as a list."""
    if isinstance(generation.get("text"), str):
        generation["text"] = {"text": generation["text"]}
    if isinstance(generation.get("token_ids"), list):
        generation["token_ids"] = {"ids": generation["token_ids"]}
    return generation_pb2.StreamGenerateRequest(
        request_id=request_id, generation=generation_pb2.Generation(**generation)
    )


def alphabet(request: SubmitRequest) -> list[int]:
    return [TOKENIZER.encode("a")[0] + i % 26 for i in range(request.sampling.max_tokens or 0)]


@dataclass(frozen=True)
class Api:
    """The running servers of a frontend, and stubs to them."""

    core: FrontendCore
    server: RpcServer
    generation: Any
    models: Any
    admin: Any
    address: str
    channel: grpc.aio.Channel
    admin_channel: grpc.aio.Channel


@asynccontextmanager
async def open_api(
    *engines: FakeEngine,
    waits: bool = True,
    tokenizer: Tokenizer | None = None,
    directory: Path = Path("no-checkpoint"),
    **options: float | str,
) -> AsyncIterator[Api]:
    config = FrontendConfig(**options)  # type: ignore[arg-type]
    async with frontend_core(
        *engines,
        waits=waits,
        tokenizer=tokenizer,
        directory=directory,
        max_unsent_bytes=config.max_unsent_bytes,
    ) as core:
        keys = create_api_keys(config)
        watch = StatusWatch()
        core.generator.why_waiting = watch.why_waiting
        server = app_module.create_server(config, core.generator, watch, keys)
        port = server.bind("127.0.0.1", 0, option="frontend.port")
        await server.start()
        admin_server = app_module.create_admin_server(core.router, core.generator, keys)
        admin_port = admin_server.bind("127.0.0.1", 0, option="frontend.admin_port")
        await admin_server.start()
        await admin_server.set_ready(True)
        background = asyncio.gather(
            app_module.follow_readiness(server, core.generator, core.router, 0.0),
            *map(watch.follow, core.router.engines),
        )
        try:
            async with (
                open_channel(f"127.0.0.1:{port}") as channel,
                open_channel(f"127.0.0.1:{admin_port}") as admin_channel,
            ):
                yield Api(
                    core,
                    server,
                    generation_pb2_grpc.GenerationServiceStub(channel),
                    model_pb2_grpc.ModelServiceStub(channel),
                    admin_pb2_grpc.AdminServiceStub(admin_channel),
                    f"127.0.0.1:{port}",
                    channel,
                    admin_channel,
                )
        finally:
            background.cancel()
            await asyncio.gather(background, return_exceptions=True)
            await server.stop(None)
            await admin_server.stop(None)


async def error_of(call: Any) -> errors.TriptychError:
    """The typed error that a unary or streaming call ends with."""

    async def drain() -> None:
        if isinstance(call, grpc.aio.UnaryStreamCall):
            async for _ in call:
                pass
        else:
            await call

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(drain(), DEADLINE_S)
    return from_rpc_error(caught.value)
