"""Operators' calls over HTTP, under vLLM's names: each goes to the AdminService of one engine, or of all."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any

import grpc.aio
from fastapi import APIRouter, Query, Request
from google.protobuf.json_format import MessageToDict
from starlette.responses import Response

from triptych.admin.v1 import admin_pb2, admin_pb2_grpc
from triptych.errors import FeatureDisabled, FieldViolation, InvalidRequest, ModelError, TriptychError
from triptych.rpc.status import from_rpc_error
from triptych.types.facts import PauseMode
from triptych.wire.admin import pause_mode_to_proto
from triptych_services.frontend.engines.call_all import call_all_engines
from triptych_services.frontend.engines.client import EngineClient
from triptych_services.frontend.http.body import Body
from triptych_services.frontend.http.errors import json_response
from triptych_services.frontend.http.generation import names_to_abort
from triptych_services.frontend.http.generation_body import (
    AbortRequest,
    LoadAdapterBody,
    UnloadAdapterBody,
)
from triptych_services.frontend.http.state import generator_of, reader_of
from triptych_services.frontend.http.status_routes import VERSION
from triptych_services.frontend.requests.sampling import why_not_text

_CALL_S = 600.0
"""The most that a call to an engine may take: a sleep waits for requests, a wake-up reads weights."""


class Mode(StrEnum):
    """The fate of requests that run or wait."""

    ABORT = "abort"
    WAIT = "wait"
    KEEP = "keep"


_MODES = {Mode.ABORT: PauseMode.ABORT, Mode.WAIT: PauseMode.WAIT, Mode.KEEP: PauseMode.KEEP}
_EngineId = Annotated[str, Query(description="The engine that is meant. Left out: all of them.")]
_Level = Annotated[
    int,
    Query(
        ge=1, le=2, description="1: weights wait in the host's memory; 2: they are read again at /wake_up."
    ),
]
_Mode = Annotated[
    Mode,
    Query(
        description="What becomes of running requests. abort: they end; wait: they finish first; keep: they freeze."
    ),
]

router = APIRouter(tags=["operate"])


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(request: Request, engine_id: _EngineId = "") -> Response:
    """Forget all cached prefixes; refused while a request holds blocks."""
    answers = await _call(request, engine_id, "ResetPrefixCache")
    return json_response({"num_blocks": sum(answer.num_blocks for answer in answers)})


@router.post("/sleep")
async def sleep(
    request: Request, level: _Level = 1, mode: _Mode = Mode.ABORT, engine_id: _EngineId = ""
) -> Response:
    """Free the accelerator's memory; requests queue until /wake_up."""
    fields = {"level": level, "mode": pause_mode_to_proto(_MODES[mode])}
    answers = await _call(request, engine_id, "Sleep", **fields)
    return json_response({"released_bytes": sum(answer.released_bytes for answer in answers)})


@router.post("/wake_up")
async def wake_up(
    request: Request, engine_id: _EngineId = "", tags: Annotated[list[str] | None, Query()] = None
) -> Response:
    """Bring the accelerator's memory back and go on."""
    if tags is not None and not {"weights", "kv_cache"}.issubset(tags):
        raise FeatureDisabled(["tags"], "weights and cache wake together; leave it out")
    await _call(request, engine_id, "Wake")
    return json_response({"status": "awake"})


@router.get("/is_sleeping")
async def is_sleeping(request: Request, engine_id: _EngineId = "") -> Response:
    """Return whether all engines that are meant sleep."""
    return json_response({"is_sleeping": await _are_all(request, engine_id, admin_pb2.ENGINE_STATE_ASLEEP)})


@router.post("/pause")
async def pause(
    request: Request, mode: _Mode = Mode.ABORT, clear_cache: bool = True, engine_id: _EngineId = ""
) -> Response:
    """Plan no more steps until /resume, and forget cached prefixes unless requests are kept."""
    await _call(request, engine_id, "Pause", mode=pause_mode_to_proto(_MODES[mode]))
    if clear_cache and mode is not Mode.KEEP:
        await _call(request, engine_id, "ResetPrefixCache")
    return json_response({"status": "paused"})


@router.post("/resume")
async def resume(request: Request, engine_id: _EngineId = "") -> Response:
    """Go on after a pause."""
    await _call(request, engine_id, "Resume")
    return json_response({"status": "resumed"})


@router.get("/is_paused")
async def is_paused(request: Request, engine_id: _EngineId = "") -> Response:
    """Return whether all engines that are meant are paused."""
    return json_response({"is_paused": await _are_all(request, engine_id, admin_pb2.ENGINE_STATE_PAUSED)})


@router.get("/server_info")
async def server_info(request: Request, engine_id: _EngineId = "") -> Response:
    """Return the version, and the counters of each engine."""
    engines = _engines(request, engine_id)
    return json_response({"version": VERSION, "engines": await asyncio.gather(*map(_info_of, engines))})


@router.post("/abort_requests")
async def abort_requests(request: Request) -> Response:
    """End requests, of any tenant, with what they have."""
    names = await reader_of(request).read(request, AbortRequest, names_to_abort)
    aborted = await generator_of(request).abort(names, of_any_tenant=True)
    return json_response({"aborted_request_ids": aborted})


@router.post("/v1/load_lora_adapter")
async def load_lora_adapter(request: Request, engine_id: _EngineId = "") -> Response:
    """Load a LoRA adapter into all engines, or one; requests name it as their model from then on."""
    name, source = await reader_of(request).read(request, LoadAdapterBody, _adapter_to_load)
    request.app.state.router.adapters.check(name)
    try:
        answers = await _call(request, engine_id, "LoadAdapter", name=name, source=source)
    except ModelError as error:  # what is wrong is in the files, and not in the server
        raise InvalidRequest("lora_path", error.message) from None
    digests = sorted({answer.adapter.digest for answer in answers})
    return json_response({"status": "loaded", "lora_name": name, "digests": digests})


@router.post("/v1/unload_lora_adapter")
async def unload_lora_adapter(request: Request, engine_id: _EngineId = "") -> Response:
    """Unload a LoRA adapter: no new request may name it, and running ones go on."""
    name = await reader_of(request).read(request, UnloadAdapterBody, _adapter_to_unload)
    await _call(request, engine_id, "UnloadAdapter", name=name)
    return json_response({"status": "unloaded", "lora_name": name})


def _adapter_to_load(body: LoadAdapterBody) -> tuple[str, str]:
    _check(body, {"lora_name": body.lora_name, "lora_path": body.lora_path})
    return body.lora_name or "", body.lora_path or ""


def _adapter_to_unload(body: UnloadAdapterBody) -> str:
    _check(body, {"lora_name": body.lora_name})
    return body.lora_name or ""


def _check(body: Body, texts: Mapping[str, str | None]) -> None:
    """Raise InvalidRequest for all that is wrong with a body, or missing in it.

    Args:
        texts: Field to its value, of those that must be there.
    """
    violations = list(body.violations)
    wrong = {violation.field for violation in violations}
    for name, text in texts.items():
        why = why_not_text(text) if text else "is missing"
        if why is not None and name not in wrong:
            violations.append(FieldViolation(name, why))
    if violations:
        raise InvalidRequest(violations)


def _engines(request: Request, engine_id: str) -> Sequence[EngineClient]:
    router = request.app.state.router
    return [router.by_id(engine_id)] if engine_id else router.engines


async def _call(request: Request, engine_id: str, method: str, **fields: Any) -> list[Any]:
    """Call a method of the engines that are meant; see `call_all_engines`."""
    engines = _engines(request, engine_id)
    calls = call_all_engines(engines, lambda engine: _call_one(engine, method, **fields))
    answers: list[Any] = await request.app.state.in_flight.run(request.receive, calls)
    return answers


async def _call_one(engine: EngineClient, method: str, **fields: Any) -> Any:
    stub = admin_pb2_grpc.AdminServiceStub(engine.channel)
    try:
        return await getattr(stub, method)(getattr(admin_pb2, f"{method}Request")(**fields), timeout=_CALL_S)
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from None


async def _are_all(request: Request, engine_id: str, state: int) -> bool:
    answers = await _call(request, engine_id, "GetStatus")
    return all(answer.status.state == state for answer in answers)


async def _info_of(engine: EngineClient) -> dict[str, Any]:
    """Return what is known of an engine; its status is null if it does not answer."""
    info: dict[str, Any] = {"engine_id": engine.name, "address": engine.address, "ready": engine.is_ready}
    if not engine.is_ready:
        info["why_not_ready"] = engine.why_not_ready
    if engine.load.why_no_affinity:
        info["why_no_affinity"] = engine.load.why_no_affinity
    try:
        answer = await _call_one(engine, "GetStatus")
    except TriptychError:
        return info | {"status": None}
    return info | {"status": MessageToDict(answer.status, preserving_proto_field_name=True)}
