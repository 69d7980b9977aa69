"""gRPC without a network: streams between processes of a fake-time loop, over links that can be cut, held and slowed.

Only what our two internal streams use of `grpc.aio` is here. Messages go through their bytes, as on a wire.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from contextvars import Context as NoProcess
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from tests.chaos.grounds.fake_time import Process, current_process
from triptych.errors import TriptychError
from triptych.rpc.channel import KEEPALIVE_TIME_S, KEEPALIVE_TIMEOUT_S
from triptych.rpc.status import internal_status, to_status

LATENCY_S = 0.0005
WINDOW = 64
"""Messages that a client has not read, after which the server waits."""
_FLOW_S = 0.005
_APART_S = 1e-6  # two messages on one way: timers that are due together fire in any order
ATTEMPT_S = 2.0
"""After so long a connection that nobody answers is given up."""
SILENCE_S = float(KEEPALIVE_TIME_S + KEEPALIVE_TIMEOUT_S)
"""After so long either end of a silent connection calls it broken."""


@dataclass
class Link:
    """The way between a client and a server, by their names, over all their lives."""

    latency_s: float = LATENCY_S
    is_held: dict[str, bool] = field(default_factory=lambda: {"up": False, "down": False})
    """Whether what is sent to the server (up), or to the client, waits until the link heals."""
    calls: set[Call] = field(default_factory=set)


class Network:
    """Servers by their addresses, and the links to them."""

    def __init__(self) -> None:
        self._servers: dict[str, tuple[Process, dict[str, Any]]] = {}
        self._links: dict[tuple[str, str], Link] = {}
        self.bugs: list[str] = []
        """Errors of servicers that are nobody's but ours."""

    def serve(self, address: str, handlers: dict[str, Any]) -> None:
        """Let the current process answer at an address. `handlers`: path of each method -> its gRPC handler."""
        process = current_process()
        assert process is not None, "only a process can serve"
        self._servers[address] = (process, handlers)

    def server_at(self, address: str) -> tuple[Process, dict[str, Any]] | None:
        """Return who answers at an address, and how."""
        found = self._servers.get(address)
        return found if found is not None and not found[0].is_dead else None

    def link(self, client: str, server: str) -> Link:
        return self._links.setdefault((client, server), Link())

    def cut(self, client: str, server: str, *, is_server_told: bool = True) -> None:
        """Break the streams of a link; the server may be left to find out by the silence."""
        for call in tuple(self.link(client, server).calls):
            call.break_off("the connection was reset", tells_server=is_server_told)

    def hold(self, client: str, server: str, *ways: str) -> None:
        """Let nothing through, up, down or both, until the link heals. After a while both ends notice."""
        link = self.link(client, server)
        for way in ways:
            link.is_held[way] = True
        for call in link.calls:
            call.watch_silence()

    def heal(self, client: str, server: str) -> None:
        """Let everything through, first what was held."""
        link = self.link(client, server)
        link.is_held = {"up": False, "down": False}
        for call in tuple(link.calls):
            call.release()

    async def stop_server(self, process: Process, grace_s: float) -> None:
        """Take no more calls of a process, give those that run so long to end, and cancel the rest.

        Returns when what serves them has ended.
        """
        for address, (server, _) in tuple(self._servers.items()):
            if server is process:
                del self._servers[address]
        calls = [call for link in self._links.values() for call in link.calls if call.server is process]
        tasks = [call.serving for call in calls if call.serving is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=grace_s)
        for call in calls:
            call.break_off("Cancelling all calls", tells_server=True)
        if tasks:
            await asyncio.wait(tasks)

    def drop_process(self, process: Process) -> None:
        """Break all streams of a process that has died: its kernel resets them."""
        for link in self._links.values():
            for call in tuple(link.calls):
                if process is call.client or (process is call.server and not call.is_answered):
                    call.break_off("Socket closed", tells_server=call.server is not process)

    def forget(self, process: Process) -> None:
        """Break the streams of a process that is cut off from all others for now, without telling it."""
        for link in self._links.values():
            for call in tuple(link.calls):
                if call.client is process:
                    call.break_off("the peer is gone", tells_server=True)
                elif call.server is process:
                    call.break_off("the peer is gone", tells_server=False)

    def watch_stopped(self, process: Process) -> None:
        """Note that a process has stopped: its kernel goes on, but nobody answers its peers' pings."""
        for link in self._links.values():
            for call in link.calls:
                if process in (call.client, call.server):
                    call.watch_silence()


class Pipe:
    """Messages one way, in order, each after the link's latency."""

    def __init__(self, link: Link, way: str, deliver: Callable[[Any], None]) -> None:
        self._link = link
        self._way = way
        self._deliver = deliver
        self._held: deque[Any] = deque()
        self._arrives_at = 0.0
        self.is_broken = False

    def send(self, message: Any) -> None:
        if self._link.is_held[self._way] or self._held:
            self._held.append(message)
            return
        loop = asyncio.get_running_loop()
        self._arrives_at = max(self._arrives_at + _APART_S, loop.time() + self._link.latency_s)
        loop.call_at(
            self._arrives_at, self._arrive, message, context=NoProcess()
        )  # whatever becomes of the sender

    def release(self) -> None:
        held, self._held = self._held, deque()
        for message in held:
            self.send(message)

    def _arrive(self, message: Any) -> None:
        if self.is_broken:
            return
        if self._link.is_held[self._way]:  # it was under way
            self._held.append(message)
        else:
            self._deliver(message)


_END = object()


class Context:
    """The part of `grpc.aio.ServicerContext` that our servicers use."""

    def __init__(self, deadline: float | None) -> None:
        self._deadline = deadline

    def time_remaining(self) -> float | None:
        if self._deadline is None:
            return None
        return self._deadline - asyncio.get_running_loop().time()

    def invocation_metadata(self) -> tuple[()]:
        return ()

    async def abort(self, code: grpc.StatusCode, details: str = "", metadata: Any = ()) -> None:
        raise AssertionError(f"a call is aborted: {code} {details}")


class Call:
    """One stream, as its client sees it: the part of `grpc.aio.StreamStreamCall` that we use.

    With a request of its own it is a call with one request and many responses.
    """

    def __init__(
        self,
        network: Network,
        address: str,
        path: str,
        serialize: Callable[[Any], bytes],
        deserialize: Any,
        *,
        request: Any = None,
        timeout_s: float | None = None,
    ) -> None:
        client = current_process()
        assert client is not None, "only a process dials"
        self._network = network
        self._loop = asyncio.get_running_loop()  # which has ended when what is left is collected
        self.client = client
        self.server: Process | None = None
        self._serialize, self._deserialize = serialize, deserialize
        self._inbox: asyncio.Queue[Any] = asyncio.Queue()
        self._status: asyncio.Future[tuple[grpc.StatusCode, str, Any]] = self._loop.create_future()
        self._requests: asyncio.Queue[Any] = asyncio.Queue()
        self.serving: asyncio.Task[None] | None = None
        self.is_answered = False
        """The server has sent all, and its kernel sees to it that the client gets that."""
        self._silence: asyncio.TimerHandle | None = None
        found = network.server_at(address)
        server_name = address.partition(":")[0]
        self._link = network.link(client.name, server_name)
        self._up = Pipe(self._link, "up", self._requests.put_nowait)
        self._down = Pipe(self._link, "down", self._take)
        loop = self._loop
        self._context = Context(None if timeout_s is None else loop.time() + timeout_s)
        if timeout_s is not None:
            loop.call_later(
                timeout_s,
                self._end,
                grpc.StatusCode.DEADLINE_EXCEEDED,
                "Deadline Exceeded",
                context=NoProcess(),
            )
        if request is not None:
            self._up.send(serialize(request))
        if any(self._link.is_held.values()) or (found is not None and found[0].is_stopped):
            loop.call_later(
                ATTEMPT_S, self._end, grpc.StatusCode.UNAVAILABLE, "connection timed out", context=NoProcess()
            )
        elif found is None:
            loop.call_later(
                self._link.latency_s,
                self._end,
                grpc.StatusCode.UNAVAILABLE,
                "connection refused",
                context=NoProcess(),
            )
        else:
            self.server, handlers = found
            self._link.calls.add(self)
            with self.server.running():
                self.serving = loop.create_task(self._serve(handlers[path]))

    # -- the client's end ---------------------------------------------------------------------------------------

    async def write(self, message: Any) -> None:
        if self._status.done():
            raise asyncio.InvalidStateError("RPC already finished.")
        if not self.client.is_dead:
            self._up.send(self._serialize(message))
        await asyncio.sleep(0)

    async def read(self) -> Any:
        message = await self._inbox.get()
        if message is not _END:
            return self._deserialize(message)
        self._inbox.put_nowait(_END)
        code, details, metadata = self._status.result()
        if code is grpc.StatusCode.OK:
            return grpc.aio.EOF
        if code is grpc.StatusCode.CANCELLED and details == "Locally cancelled":
            raise asyncio.CancelledError
        raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, details=details)

    def __aiter__(self) -> Call:
        return self

    async def __anext__(self) -> Any:
        if (message := await self.read()) is grpc.aio.EOF:
            raise StopAsyncIteration
        return message

    def cancel(self) -> bool:
        if self._status.done():
            return False
        self._end(grpc.StatusCode.CANCELLED, "Locally cancelled")
        return True

    def done(self) -> bool:
        return self._status.done()

    async def code(self) -> grpc.StatusCode:
        return (await asyncio.shield(self._status))[0]

    async def details(self) -> str:
        return (await asyncio.shield(self._status))[1]

    async def initial_metadata(self) -> Any:
        return grpc.aio.Metadata()

    async def trailing_metadata(self) -> Any:
        return (await asyncio.shield(self._status))[2]

    async def done_writing(self) -> None:
        self._up.send(_END)

    # -- the network --------------------------------------------------------------------------------------------

    def break_off(self, why: str, *, tells_server: bool) -> None:
        """Break the stream. Each end sees at once what it would see of a reset."""
        self._up.is_broken = self._down.is_broken = True
        self._end_client(grpc.StatusCode.UNAVAILABLE, why)
        if tells_server:
            self._end_server()
        else:
            self.watch_silence()

    def release(self) -> None:
        self._stop_watching()
        self._up.release()
        self._down.release()

    def watch_silence(self) -> None:
        """Break the stream when it has been silent for too long."""
        if self._silence is None:
            self._silence = self._loop.call_later(SILENCE_S, self._fall_silent, context=NoProcess())

    def _fall_silent(self) -> None:
        self._silence = None
        is_stopped = self.client.is_stopped or (self.server is not None and self.server.is_stopped)
        if self._up.is_broken or is_stopped or any(self._link.is_held.values()):
            self.break_off("keepalive watchdog timeout", tells_server=True)

    def _stop_watching(self) -> None:
        if self._silence is not None:
            self._silence.cancel()
            self._silence = None

    def _take(self, message: Any) -> None:
        if isinstance(message, tuple):
            self._end_client(*message)
        elif not self._status.done():
            self._inbox.put_nowait(message)

    def _end(self, code: grpc.StatusCode, details: str) -> None:
        """End the call from the client's side; the server hears of it."""
        self._end_client(code, details)
        if not self._up.is_broken:
            self._loop.call_later(self._link.latency_s, self._end_server, context=NoProcess())

    def _end_client(self, code: grpc.StatusCode, details: str, metadata: Any = None) -> None:
        if not self._status.done():
            self._status.set_result((code, details, grpc.aio.Metadata() if metadata is None else metadata))
            self._inbox.put_nowait(_END)
        if self.is_answered:
            self._leave()

    def _leave(self) -> None:
        self._link.calls.discard(self)
        self._stop_watching()

    def _end_server(self) -> None:
        self._leave()
        self._requests.put_nowait(_END)
        if self.serving is not None:
            self._loop.call_soon(self.serving.cancel, context=NoProcess())

    # -- the server's end ---------------------------------------------------------------------------------------

    async def _serve(self, handler: Any) -> None:
        try:
            async for response in self._responses(handler):
                self._answer(handler.response_serializer(response))
                while self._inbox.qsize() > WINDOW and not self._status.done():
                    await asyncio.sleep(_FLOW_S)
        except TriptychError as error:
            status = to_status(error)
            self._answer((status.code, status.details, grpc.aio.Metadata(*status.trailing_metadata)))
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self._network.bugs.append(f"{type(error).__name__}: {error}")
            status = internal_status()
            self._answer((status.code, status.details, grpc.aio.Metadata(*status.trailing_metadata)))
        else:
            self._answer((grpc.StatusCode.OK, ""))
        self.is_answered = True
        if self._status.done():
            self._leave()

    async def _responses(self, handler: Any) -> AsyncIterator[Any]:
        if handler.stream_stream is not None:
            responses = handler.stream_stream(self._read_requests(handler), self._context)
        else:
            request = await anext(aiter(self._read_requests(handler)))
            responses = handler.unary_stream(request, self._context)
        async with aclosing(responses) as stream:
            async for response in stream:
                yield response

    def _answer(self, message: Any) -> None:
        if self.server is not None and not self.server.is_dead:
            self._down.send(message)

    async def _read_requests(self, handler: Any) -> AsyncIterator[Any]:
        while (message := await self._requests.get()) is not _END:
            yield handler.request_deserializer(message)


class Channel:
    """A channel to one address: the part of `grpc.aio.Channel` that our stubs use."""

    def __init__(self, network: Network, address: str) -> None:
        self._network, self._address = network, address
        self._calls: list[Call] = []

    def stream_stream(
        self, path: str, request_serializer: Any, response_deserializer: Any, **_: Any
    ) -> Callable[[], Call]:
        def dial() -> Call:
            call = Call(self._network, self._address, path, request_serializer, response_deserializer)
            self._calls.append(call)
            return call

        return dial

    def unary_stream(
        self, path: str, request_serializer: Any, response_deserializer: Any, **_: Any
    ) -> Callable[..., Call]:
        def dial(request: Any, timeout: float | None = None) -> Call:
            call = Call(
                self._network, self._address, path, request_serializer, response_deserializer,
                request=request, timeout_s=timeout,
            )  # fmt: skip
            self._calls.append(call)
            return call

        return dial

    def unary_unary(self, path: str, **_: Any) -> Callable[..., None]:
        def refuse(*_: Any, **__: Any) -> None:
            raise AssertionError(f"{path} is not served here")

        return refuse

    async def close(self, grace: float | None = None) -> None:
        for call in self._calls:
            call.cancel()

    async def __aenter__(self) -> Channel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class HandlerCollector:
    """Takes what the generated code would add to a server."""

    def __init__(self) -> None:
        self.handlers: dict[str, Any] = {}

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """Ignore these: the same come registered by name."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        self.handlers |= {f"/{service}/{name}": handler for name, handler in handlers.items()}
