"""Routes for monitors and operators."""

from __future__ import annotations

import asyncio
import importlib.metadata

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, generate_latest
from starlette.responses import Response

from triptych.errors import EngineUnavailable
from triptych_services.frontend.http.answers import (
    HealthAnswer,
    LoadAnswer,
    PingAnswer,
    VersionAnswer,
    error_answers,
)
from triptych_services.frontend.http.errors import json_response
from triptych_services.frontend.http.state import generator_of

VERSION = importlib.metadata.version("triptych")

router = APIRouter(responses=error_answers(), tags=["operate"])


@router.get("/health", responses={200: {"model": HealthAnswer}, **error_answers(503)})
async def health(request: Request) -> Response:
    """200 when requests are taken, 503 with the reason when not. Says if those that are taken wait, and why."""
    generator = generator_of(request)
    if not generator.is_ready:
        raise EngineUnavailable(generator.why_not_ready)
    why_waiting = generator.why_waiting()
    return json_response({"status": "ready", **({"why_waiting": why_waiting} if why_waiting else {})})


@router.get("/ping", responses={200: {"model": PingAnswer}})
async def ping() -> Response:
    """200 while the process lives, ready or not."""
    return json_response({"status": "alive"})


@router.get("/load", responses={200: {"model": LoadAnswer}})
async def load(request: Request) -> Response:
    """The load of this frontend."""
    return json_response({"server_load": await generator_of(request).count_active()})


@router.get("/version", responses={200: {"model": VersionAnswer}})
async def version() -> Response:
    """The version of this server."""
    return json_response({"version": VERSION})


@router.get("/metrics", responses={200: {"content": {"text/plain": {}}}})
async def metrics(request: Request) -> Response:
    """This frontend's Prometheus metrics."""
    siblings = generator_of(request).siblings
    found = REGISTRY if siblings is None else await siblings.find_metrics()
    return Response(await asyncio.to_thread(generate_latest, found), media_type=CONTENT_TYPE_LATEST)
