"""`vllm.grpc.engine.VllmEngine`: vLLM's own gRPC service, so that its gateways work with this frontend as they are.

Calls that steer the engine (FlushCache, StartProfile, StopProfile) are the operator's here, on the admin port. Embed
and SubscribeKvEvents are not served yet. All of these are UNIMPLEMENTED.
"""

from __future__ import annotations

import asyncio
import datetime
import functools
import hashlib
import importlib.metadata
import io
import json
import time
import zipfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from pathlib import Path

import grpc.aio

from triptych.checkpoint.config_json import read_model_class
from triptych.compat import common_pb2, vllm_engine_pb2, vllm_engine_pb2_grpc
from triptych.errors import FeatureDisabled, InvalidRequest
from triptych.rpc.interceptors import current_request_id, set_request_id
from triptych.types.facts import EngineStatus
from triptych_services.frontend.generate import Generator
from triptych_services.frontend.grpc.long_calls import read_long
from triptych_services.frontend.grpc.stall_watch import StallWatch
from triptych_services.frontend.grpc.vllm.convert import VllmEncoder, read_generate, to_raw_request
from triptych_services.frontend.requests.long_reader import LongReader
from triptych_services.frontend.requests.raw import MAX_ABORTS, RawRequest, with_remaining_time

VLLM_SERVICE = vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"].full_name

_SERVER_TYPE = "vllm-grpc"  # what gateways look for
_CHUNK_BYTES = 1 << 20  # of a tokenizer's archive
# Sorted, and all of the same time, so that equal files give an equal archive.
_TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)


class VllmServicer(vllm_engine_pb2_grpc.VllmEngineServicer):
    """Serves `vllm.grpc.engine.VllmEngine` for the only model of this frontend."""

    def __init__(
        self,
        generator: Generator,
        client_timeout_s: float,
        long_reader: LongReader,
        statuses: Callable[[], Iterator[tuple[str, EngineStatus]]],
    ) -> None:
        """
        Args:
            client_timeout_s: How long a client may read nothing while its answer waits.
            long_reader: Reads long requests.
            statuses: Returns the model's name and the latest counters of each engine.
        """
        self._generator = generator
        self._client_timeout_s = client_timeout_s
        self._long_reader = long_reader
        self._statuses = statuses
        self._started_at = time.monotonic()
        self._archive: bytes | None = None

    async def Generate(
        self, request: vllm_engine_pb2.GenerateRequest | bytes, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[vllm_engine_pb2.GenerateResponse]:
        is_streamed, raw = await self._read(request, context.time_remaining())
        set_request_id(raw.head.request_id)
        encoder = VllmEncoder(is_streamed=is_streamed)
        watch = StallWatch(context, self._client_timeout_s)
        try:
            async with aclosing(self._generator.generate(raw)) as events:
                async for event in events:
                    for message in encoder.encode(event):
                        watch.begin_write()
                        yield message
                        watch.end_write()
        finally:
            watch.close()

    async def _read(
        self, request: vllm_engine_pb2.GenerateRequest | bytes, remaining_s: float | None
    ) -> tuple[bool, RawRequest]:
        """Return whether the answer is streamed, and what is asked for."""
        if not isinstance(request, bytes):
            request_id = request.request_id or current_request_id()
            return request.stream, to_raw_request(request_id, request, remaining_s)
        arrived = time.monotonic()
        read = functools.partial(read_generate, current_request_id(), remaining_s)
        is_streamed, raw = await read_long(
            self._long_reader, request, read, f"/{VLLM_SERVICE}/Generate", remaining_s
        )
        return is_streamed, with_remaining_time(raw, arrived)

    async def Abort(
        self, request: vllm_engine_pb2.AbortRequest, context: grpc.aio.ServicerContext
    ) -> vllm_engine_pb2.AbortResponse:
        if (num_ids := len(request.request_ids)) > MAX_ABORTS:
            raise InvalidRequest("request_ids", f"{num_ids} ids are above the limit {MAX_ABORTS}")
        await self._generator.abort(request.request_ids)
        return vllm_engine_pb2.AbortResponse()

    async def HealthCheck(
        self, request: vllm_engine_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> vllm_engine_pb2.HealthCheckResponse:
        why_not = self._generator.why_not_ready
        return vllm_engine_pb2.HealthCheckResponse(
            healthy=self._generator.is_ready, message=why_not or self._generator.why_waiting() or "ready"
        )

    async def GetModelInfo(
        self, request: vllm_engine_pb2.GetModelInfoRequest, context: grpc.aio.ServicerContext
    ) -> vllm_engine_pb2.GetModelInfoResponse:
        served, text = self._generator.find_model(""), self._generator.text_model
        tokenizer = text.tokenizer
        model_type, architectures = read_model_class(text.directory)
        return vllm_engine_pb2.GetModelInfoResponse(
            model_path=served.name,
            served_model_name=served.name,
            tokenizer_path=served.name,  # where it lies is nothing that a tenant needs to know
            is_generation=True,
            max_context_length=served.max_model_len,
            max_req_input_len=served.max_model_len,
            vocab_size=served.vocab_size,
            model_type=model_type,
            architectures=architectures,
            eos_token_ids=served.eos_token_ids,
            pad_token_id=tokenizer.token_id(tokenizer.pad_token or "") or 0,
            bos_token_id=tokenizer.token_id(tokenizer.bos_token or "") or 0,
            default_sampling_params_json=json.dumps(text.defaults) if text.defaults else "",
        )

    async def GetServerInfo(
        self, request: vllm_engine_pb2.GetServerInfoRequest, context: grpc.aio.ServicerContext
    ) -> vllm_engine_pb2.GetServerInfoResponse:
        statuses = [status for _, status in self._statuses()]
        return vllm_engine_pb2.GetServerInfoResponse(
            active_requests=await self._generator.count_active(),
            is_paused=bool(statuses) and all(status.paused for status in statuses),
            uptime_seconds=time.monotonic() - self._started_at,
            server_type=_SERVER_TYPE,
            data_parallel_size=1,  # which engine takes a request is decided here
            block_size=max((status.block_size for status in statuses), default=0),
            constrained_decoding_start="first_token",
        )

    async def GetLoads(
        self, request: vllm_engine_pb2.GetLoadsRequest, context: grpc.aio.ServicerContext
    ) -> vllm_engine_pb2.GetLoadsResponse:
        return vllm_engine_pb2.GetLoadsResponse(
            timestamp=datetime.datetime.now(datetime.UTC).isoformat(),
            version=importlib.metadata.version("triptych"),
            dp_rank_count=1,
            loads=[_load([status for _, status in self._statuses()])],
        )

    async def GetTokenizer(
        self, request: common_pb2.GetTokenizerRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[common_pb2.GetTokenizerChunk]:
        if self._archive is None:
            self._archive = await asyncio.to_thread(pack, self._generator.text_model.directory)
        archive = self._archive
        for start in range(0, len(archive), _CHUNK_BYTES):
            is_last = start + _CHUNK_BYTES >= len(archive)
            yield common_pb2.GetTokenizerChunk(
                data=archive[start : start + _CHUNK_BYTES],
                sha256=hashlib.sha256(archive).hexdigest() if is_last else "",
            )

    async def FlushCache(
        self, request: common_pb2.FlushCacheRequest, context: grpc.aio.ServicerContext
    ) -> common_pb2.FlushCacheResponse:
        why = "it is an operator's call here; use triptych.admin.v1.AdminService.ResetPrefixCache on the admin port"
        raise FeatureDisabled("VllmEngine.FlushCache", why)


def _load(statuses: list[EngineStatus]) -> vllm_engine_pb2.SchedulerLoad:
    """Return the load of all engines together, as of one scheduler."""
    num_running = sum(status.num_running for status in statuses)
    num_waiting = sum(status.num_waiting for status in statuses)
    num_used = sum(status.num_used_blocks * status.block_size for status in statuses)
    num_tokens = sum(status.num_blocks * status.block_size for status in statuses)
    queries = sum(status.counters.prefix_queries for status in statuses)
    return vllm_engine_pb2.SchedulerLoad(
        num_running_reqs=num_running,
        num_waiting_reqs=num_waiting,
        num_total_reqs=num_running + num_waiting,
        num_used_tokens=num_used,
        max_total_num_tokens=num_tokens,
        token_usage=num_used / num_tokens if num_tokens else 0.0,
        cache_hit_rate=sum(status.counters.prefix_hits for status in statuses) / queries if queries else 0.0,
    )


def pack(directory: Path) -> bytes:
    """Return a zip archive of what a tokenizer needs."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        for name in _TOKENIZER_FILES:
            if (path := directory / name).is_file():
                info = zipfile.ZipInfo(name)
                info.compress_type = zipfile.ZIP_DEFLATED
                file.writestr(info, path.read_bytes())
    return archive.getvalue()
