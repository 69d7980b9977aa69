"""Stands between an engine and its worker and does to the step stream what networks and bad software do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc.aio

from triptych.errors import EngineUnavailable
from triptych.internal.v1 import worker_pb2, worker_pb2_grpc
from triptych.rpc.channel import INTERNAL_MESSAGE_BYTES, open_channel
from triptych.rpc.server import RpcServer
from triptych.rpc.status import from_rpc_error

SERVICE = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name


class Cut(Exception):
    """Raised by a fault: the stream breaks here, on both sides."""


Fault = Callable[[Any], list[Any]]
"""A message -> what goes on in its place: itself, nothing, itself twice, …; or raises Cut."""


class StepRelay(worker_pb2_grpc.WorkerServiceServicer):
    """A relay for `WorkerService.Execute`. `down` sees what the engine says, `up` what the worker answers."""

    def __init__(self, worker_port: int) -> None:
        self.down: Fault = lambda message: [message]
        self.up: Fault = lambda message: [message]
        self.is_refusing = False
        self.num_streams = 0
        self.hellos: list[worker_pb2.Hello] = []
        self.welcomes: list[worker_pb2.Welcome] = []
        self._channel = open_channel(f"127.0.0.1:{worker_port}", limit_bytes=INTERNAL_MESSAGE_BYTES)
        self._server = RpcServer(services=(SERVICE,), limit_bytes=INTERNAL_MESSAGE_BYTES)
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, self._server.grpc)
        self.port = self._server.bind("127.0.0.1", 0, option="port")

    async def start(self) -> None:
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(0)
        await self._channel.close()

    async def Execute(
        self, request_iterator: AsyncIterator[worker_pb2.ExecuteRequest], context: Any
    ) -> AsyncIterator[worker_pb2.ExecuteResponse]:
        if self.is_refusing:
            raise EngineUnavailable("the network is down")
        self.num_streams += 1
        upstream = worker_pb2_grpc.WorkerServiceStub(self._channel).Execute()
        is_cut = asyncio.Event()
        pump = asyncio.create_task(self._pump_down(request_iterator, upstream, is_cut))
        cut = asyncio.create_task(is_cut.wait())
        try:
            while True:
                reading = asyncio.ensure_future(upstream.read())
                await asyncio.wait([reading, cut], return_when=asyncio.FIRST_COMPLETED)
                if cut.done() or (message := reading.result()) is grpc.aio.EOF:
                    reading.cancel()
                    break
                if message.HasField("welcome"):
                    self.welcomes.append(message.welcome)
                try:
                    for out in self.up(message):
                        yield out
                except Cut:
                    is_cut.set()
                    break
            if is_cut.is_set():
                raise EngineUnavailable("the stream was cut")
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        finally:
            upstream.cancel()
            pump.cancel()
            cut.cancel()

    async def _pump_down(
        self, requests: AsyncIterator[worker_pb2.ExecuteRequest], upstream: Any, is_cut: asyncio.Event
    ) -> None:
        try:
            async for message in requests:
                if message.HasField("hello"):
                    self.hellos.append(message.hello)
                for out in self.down(message):
                    await upstream.write(out)
        except Cut:
            is_cut.set()
