"""A follower's side of a group: it joins, and does what the leader relays."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future

from triptych.config import EngineConfig
from triptych.errors import (
    ConfigError,
    HandshakeMismatch,
    MemoryShort,
    ProtocolViolation,
    RankUnavailable,
    TriptychError,
)
from triptych.internal.v1 import group_pb2
from triptych.types.facts import WorkerFacts
from triptych.types.step import StepResult
from triptych.wire.admin import sleep_level_from_proto
from triptych.wire.step import StepDecoder
from triptych_services.worker.context.group_place import GroupPlace, host_name, split_address
from triptych_services.worker.group.liveness import Liveness, end_process
from triptych_services.worker.group.messages import (
    PROTOCOL,
    FollowerMessage,
    LeaderMessage,
    parse_frame,
    read_frame,
    read_message,
    to_frame,
)
from triptych_services.worker.service.adapters import RankAdapters
from triptych_services.worker.service.runner_thread import RunnerThread

log = logging.getLogger(__name__)

_DIAL_S = 5.0
_REDIAL_S = 0.2
_REFUSED_S = 20.0  # a group that is about to end is given so long


class GroupFollower:
    """Owned by the follower's event loop."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        on_result: Callable[[StepResult], None],
        on_lost: Callable[[str], None] = end_process,
    ) -> None:
        """
        Args:
            on_result: Called on the event loop with the result of each step, which is sent to no other.
            on_lost: Called with what is lost, when the leader is.
        """
        self._parallel = config.parallel
        self._rank = config.worker.rank
        self._host, self._port = split_address(config.parallel.rendezvous_address)
        self._on_result = on_result
        self._on_lost = on_lost
        self._writer: asyncio.StreamWriter | None = None
        self._relay: _LocalRelay | None = None
        self._decoder = StepDecoder()
        self._session = 0
        self._liveness = Liveness(config.parallel.silence_timeout_s, on_lost=on_lost)
        self._calls: set[asyncio.Task[None]] = set()
        self.place: Future[GroupPlace] = Future()
        """Set when all ranks have met; the error if they do not."""
        self.has_left = asyncio.Event()
        """Set when the leader has ended the group in order."""

    async def follow(self, thread: RunnerThread, adapters: RankAdapters) -> None:
        """Join the group, and do with this rank's thread and adapters what the leader relays, until the group ends."""
        relay = self._relay = _LocalRelay()
        await relay.open()
        try:
            reader, joined = await self._join(relay.port)
        except TriptychError as error:
            self.place.set_exception(error)
            return
        beats = await self._connect_beats(joined.beat_port)
        self._liveness.start_to_leader(beats, rank=self._rank)
        hosts = tuple(joined.hosts)
        followers_here = [rank for rank, host in enumerate(hosts) if rank and host == hosts[self._rank]]
        if joined.relay_port:
            async with asyncio.timeout(_DIAL_S):
                reader, _ = await asyncio.open_connection("127.0.0.1", joined.relay_port)
        elif hosts[0] != hosts[self._rank]:
            await relay.wait_for(len(followers_here) - 1, _DIAL_S)
        relay.close()
        self.place.set_result(
            GroupPlace(joined.generation, hosts, self._rank, f"{self._host}:{joined.store_port}")
        )
        try:
            await self._obey(reader, thread, adapters)
        except (OSError, asyncio.IncompleteReadError):
            if not self.has_left.is_set():
                self._on_lost("the connection to rank 0, the leader, has ended")

    def tell_ready(self, facts: WorkerFacts) -> None:
        """Report to the leader that this rank has loaded its part."""
        self._liveness.tighten()
        self._tell(
            FollowerMessage(
                ready={
                    "num_blocks": facts.kv.num_blocks,
                    "max_model_len": facts.model.max_model_len,
                    "weight_bytes": facts.weight_bytes,
                }
            )
        )

    async def leave(self, timeout_s: float) -> None:
        """Ask the leader to end the group in order, and wait for that."""
        if self._writer is None or self.has_left.is_set():
            return
        self._tell(FollowerMessage(leaving={}))
        try:
            async with asyncio.timeout(timeout_s):
                await self.has_left.wait()
        except TimeoutError:
            log.warning("the leader has not ended the group within %g s", timeout_s)

    async def _join(self, relay_port: int) -> tuple[asyncio.StreamReader, group_pb2.Joined]:
        """Dial the leader until it lets this rank in.

        Raises:
            RankUnavailable: No leader listens there, or not all ranks came, within `parallel.timeout_s`.
            HandshakeMismatch, ConfigError: The leader does not want this rank; says why.
        """
        parallel = self._parallel
        started, refused_since, why = time.monotonic(), 0.0, "nothing listens there"
        join = FollowerMessage(
            join={
                "protocol": PROTOCOL,
                "rank": self._rank,
                "num_ranks": parallel.num_ranks,
                "host": host_name(),
                "relay_port": relay_port,
            }
        )
        while (left_s := parallel.timeout_s - (time.monotonic() - started)) > 0:
            try:
                async with asyncio.timeout(_DIAL_S):
                    reader, writer = await asyncio.open_connection(self._host, self._port)
                writer.write(to_frame(join))
                async with asyncio.timeout(left_s):
                    answer = await read_message(reader, LeaderMessage)
            except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
                why = str(error) or "the leader has ended, or other ranks have not come"
                await asyncio.sleep(_REDIAL_S)
                continue
            if answer.WhichOneof("message") == "joined":
                self._writer = writer
                return reader, answer.joined
            writer.close()
            why = answer.refused.reason
            if not answer.refused.is_temporary:
                raise HandshakeMismatch(
                    f"the leader at {parallel.rendezvous_address} refuses this rank: {why}"
                )
            refused_since = refused_since or time.monotonic()
            if time.monotonic() - refused_since > _REFUSED_S:
                raise ConfigError(why)
            await asyncio.sleep(_REDIAL_S)
        raise RankUnavailable(
            f"parallel.rendezvous_address: {parallel.rendezvous_address}: rank {self._rank} of {parallel.num_ranks} "
            f"waited {parallel.timeout_s:g} s (parallel.timeout_s) for the group: {why}"
        )

    async def _connect_beats(self, port: int) -> socket.socket:
        def dial() -> socket.socket:
            return socket.create_connection((self._host, port), timeout=_DIAL_S)

        try:
            return await asyncio.to_thread(dial)
        except OSError as error:
            self._on_lost(f"rank 0, the leader, does not answer at port {port}: {error}")
            raise

    async def _obey(self, reader: asyncio.StreamReader, thread: RunnerThread, adapters: RankAdapters) -> None:
        assert self._relay is not None
        while True:
            frame = await read_frame(reader)
            self._relay.pass_on(frame)
            message = parse_frame(frame, LeaderMessage)
            match message.WhichOneof("message"):
                case "step":
                    thread.submit(self._session, self._decoder.decode(message.step), message.step)
                case "session_begins":
                    self._decoder = StepDecoder()
                    self._session = thread.open_session(self._take)
                case "call":
                    task = asyncio.create_task(self._carry_out(message.call, thread, adapters), name="call")
                    self._calls.add(task)
                    task.add_done_callback(self._calls.discard)
                    await asyncio.sleep(0)  # it is in the thread's queue before the next message
                case "leave":
                    self._liveness.stop()
                    self.has_left.set()
                    return
                case other:
                    raise ProtocolViolation(f"unexpected from the leader: {other}")

    async def _carry_out(self, call: group_pb2.Call, thread: RunnerThread, adapters: RankAdapters) -> None:
        """Do what the leader does as well, and report what has come of it."""
        done = group_pb2.CallDone(id=call.id)
        try:
            match call.WhichOneof("what"):
                case "sleep":
                    done.released_bytes = await thread.sleep(sleep_level_from_proto(call.sleep))
                case "wake":
                    await thread.wake()
                case "load_adapter":
                    facts = await adapters.read(call.load_adapter.name, call.load_adapter.source)
                    done.digest = facts.digest
                case "settle_adapter":
                    adapters.settle(keeps=call.settle_adapter)
                case "unload_adapter":
                    await adapters.free(call.unload_adapter)
        except TriptychError as error:  # what one rank cannot do, none does
            log.warning("no rank does what was asked: %s", error)
            done.refusal = error.message
            done.is_memory_short = isinstance(error, MemoryShort)
        except Exception as error:  # the leader waits for an answer
            log.exception("call %d has failed", call.id)
            done.refusal = repr(error)
        self._tell(FollowerMessage(call_done=done))

    def _take(self, outcome: StepResult | Exception) -> None:
        """Take what a step has come to. A refused plan is reported by the leader, which refuses it too."""
        if isinstance(outcome, StepResult):
            self._on_result(outcome)

    def _tell(self, message: FollowerMessage) -> None:
        assert self._writer is not None, "joined"
        self._writer.write(to_frame(message))


class _LocalRelay:
    """Passes the leader's messages on to the other ranks of this host, where it is not the leader's."""

    def __init__(self) -> None:
        self._writers: list[asyncio.StreamWriter] = []
        self._has_come = asyncio.Event()
        self._server: asyncio.Server | None = None
        self.port = 0
        """Port that the others dial, on the loopback interface."""

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def wait_for(self, num_ranks: int, timeout_s: float) -> None:
        """Wait until so many ranks have dialed. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while len(self._writers) < num_ranks:
                self._has_come.clear()
                await self._has_come.wait()

    def pass_on(self, frame: bytes) -> None:
        """Send a message to all of them."""
        for writer in self._writers:
            writer.write(frame)

    def close(self) -> None:
        """Refuse all others."""
        assert self._server is not None
        self._server.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        self._has_come.set()
