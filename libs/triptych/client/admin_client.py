"""A typed asyncio client of the AdminService, for all engines behind one frontend."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc

from triptych.admin.v1 import admin_pb2, admin_pb2_grpc
from triptych.client.dialer import Dialer
from triptych.config import TlsConfig
from triptych.errors import FeatureDisabled, InvalidRequest, TriptychError
from triptych.rpc.status import from_rpc_error
from triptych.types.adapters import AdapterFacts
from triptych.types.facts import EngineStatus, PauseMode, SleepLevel
from triptych.wire.admin import pause_mode_to_proto, sleep_level_to_proto, status_from_proto

CALL_TIMEOUT_S = 600.0
"""Time for a call to end: a sleep may wait for running requests, and a large model takes long to wake."""
_LIST_TIMEOUT_S = 60.0
DEFAULT_ADDRESS = "127.0.0.1:50050"
"""The admin port of a frontend by default."""

_Response = TypeVar("_Response")


@dataclass(frozen=True, slots=True)
class EngineMetric:
    """One figure of one engine at one moment."""

    name: str
    """vLLM's name: `vllm:num_requests_running`, `vllm:kv_cache_usage_perc`, `vllm:prefix_cache_hits_total`, …"""
    labels: dict[str, str]
    """`model_name`, `engine` and perhaps others."""
    value: float


class AdminClient:
    """Steers every engine behind a frontend, all at once. For use on the event loop that it is created on.

    Every method raises the errors of `triptych.errors`: of the first engine that refuses, once all have answered.
    """

    def __init__(
        self,
        address: str,
        *,
        api_key: str | None = None,
        tls: TlsConfig | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """See `Dialer`.

        Args:
            address: host:port of the frontend's admin server, or of an engine.
        """
        self._dialer = Dialer(address, api_key, tls, metadata)

    async def close(self) -> None:
        """Hang up."""
        await self._dialer.close()

    async def status(self) -> list[tuple[str, EngineStatus]]:
        """Return the model's name and the counters of each engine."""

        def ask(engine_id: str) -> Awaitable[admin_pb2.GetStatusResponse]:
            return self._stub.GetStatus(
                admin_pb2.GetStatusRequest(engine_id=engine_id), timeout=_LIST_TIMEOUT_S
            )

        return [status_from_proto(response.status) for response in await self._each(ask)]

    async def sleep(self, level: SleepLevel, mode: PauseMode) -> int:
        """Free the accelerators' memory until `wake`, and return how many bytes were."""
        fields: dict[str, Any] = {"level": sleep_level_to_proto(level), "mode": pause_mode_to_proto(mode)}

        def ask(engine_id: str) -> Awaitable[admin_pb2.SleepResponse]:
            return self._stub.Sleep(
                admin_pb2.SleepRequest(engine_id=engine_id, **fields), timeout=CALL_TIMEOUT_S
            )

        return sum(response.released_bytes for response in await self._each(ask))

    async def wake(self) -> None:
        """Bring the workers back; returns when they can compute."""
        await self._each(
            lambda engine_id: self._stub.Wake(
                admin_pb2.WakeRequest(engine_id=engine_id), timeout=CALL_TIMEOUT_S
            )
        )

    async def pause(self, mode: PauseMode) -> None:
        """Plan no more steps; returns when none is under way. New requests queue until `resume`."""
        await self._each(
            lambda engine_id: self._stub.Pause(
                admin_pb2.PauseRequest(engine_id=engine_id, mode=pause_mode_to_proto(mode)),
                timeout=CALL_TIMEOUT_S,
            )
        )

    async def resume(self) -> None:
        """Go on after a pause."""
        await self._each(
            lambda engine_id: self._stub.Resume(
                admin_pb2.ResumeRequest(engine_id=engine_id), timeout=CALL_TIMEOUT_S
            )
        )

    async def reset_prefix_cache(self) -> int:
        """Forget all cached prefixes, and return how many blocks had content. Refused while requests hold blocks."""

        def ask(engine_id: str) -> Awaitable[admin_pb2.ResetPrefixCacheResponse]:
            return self._stub.ResetPrefixCache(
                admin_pb2.ResetPrefixCacheRequest(engine_id=engine_id), timeout=CALL_TIMEOUT_S
            )

        return sum(response.num_blocks for response in await self._each(ask))

    async def load_adapter(self, name: str, source: str) -> AdapterFacts:
        """Load a LoRA adapter into all engines, from a directory on the workers' machines."""
        request = admin_pb2.LoadAdapterRequest(name=name, source=source)
        return _adapter((await self._answer(self._stub.LoadAdapter(request, timeout=CALL_TIMEOUT_S))).adapter)

    async def unload_adapter(self, name: str) -> None:
        """Forget an adapter in all engines. Requests that run with it go on."""
        request = admin_pb2.UnloadAdapterRequest(name=name)
        await self._answer(self._stub.UnloadAdapter(request, timeout=CALL_TIMEOUT_S))

    async def list_adapters(self) -> list[AdapterFacts]:
        """Return the adapters that requests may name."""
        listed = self._stub.ListAdapters(admin_pb2.ListAdaptersRequest(), timeout=_LIST_TIMEOUT_S)
        return [_adapter(adapter) for adapter in (await self._answer(listed)).adapters]

    @property
    def _stub(self) -> admin_pb2_grpc.AdminServiceStub:
        return self._dialer.stub(admin_pb2_grpc.AdminServiceStub)

    async def metrics(self) -> list[EngineMetric]:
        """Return the engines' counters under vLLM's names, as `/metrics` has them."""
        from triptych.observe.metrics import EngineGauges, VllmNames

        statuses = await self.status()
        samples = (s for m in VllmNames([EngineGauges(lambda: statuses, list)]).collect() for s in m.samples)
        return [EngineMetric(sample.name, dict(sample.labels), sample.value) for sample in samples]

    async def is_asleep(self) -> bool:
        """Return whether any engine's worker sleeps."""
        return any(status.asleep for _, status in await self.status())

    async def _each(self, ask: Callable[[str], Awaitable[_Response]]) -> list[_Response]:
        listed = self._stub.ListEngines(admin_pb2.ListEnginesRequest(), timeout=_LIST_TIMEOUT_S)
        engines = (await self._answer(listed)).engines
        calls = (self._answer(ask(engine.engine_id)) for engine in engines)
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]

    async def _answer(self, call: Awaitable[_Response]) -> _Response:
        try:
            return await call
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                raise admin_error(error, self._dialer.address) from None
            raise self._dialer.to_typed_error(error, has_output=False) from None


def _adapter(adapter: admin_pb2.Adapter) -> AdapterFacts:
    return AdapterFacts(adapter.name, adapter.digest, adapter.rank, adapter.source)


def admin_error(error: grpc.RpcError, address: str) -> TriptychError:
    """Return the typed error of a call to an admin server; it says so if the port is a public one."""
    typed = from_rpc_error(error)
    if error.code() is not grpc.StatusCode.UNIMPLEMENTED or isinstance(typed, FeatureDisabled):
        return typed
    return FeatureDisabled(
        "triptych.admin.v1.AdminService",
        f"{address} does not serve this call; a frontend does on its admin port (frontend.admin_port, by default "
        f"{DEFAULT_ADDRESS}), and an engine does but for those of a frontend",
    )


def to_sleep_level(level: int) -> SleepLevel:
    """Return the level of this number; raises InvalidRequest if there is none."""
    try:
        return SleepLevel(level)
    except ValueError:
        raise InvalidRequest("level", f"{level!r:.40} is neither 1 nor 2") from None


def to_pause_mode(mode: str) -> PauseMode:
    """Return the mode of this name; raises InvalidRequest if there is none."""
    known = {each.name.lower(): each for each in PauseMode}
    if mode not in known:
        raise InvalidRequest("mode", f"{mode!r:.40} is none of {', '.join(known)}")
    return known[mode]
