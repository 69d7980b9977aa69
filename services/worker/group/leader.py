"""Rank 0's side of a group: it waits for the other ranks, and relays to them what the engine sends.

engine ══ step ══► leader's event loop ──┬──► its runner thread
                                         ├──► the followers of its host
                                         └──► one follower of each other host ──► the others there
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass

from triptych.config import ParallelConfig
from triptych.errors import ConfigError, ProtocolViolation, RankUnavailable
from triptych.internal.v1 import group_pb2
from triptych_services.worker.context.group_place import GroupPlace, host_name, split_address
from triptych_services.worker.group.liveness import Liveness, end_process
from triptych_services.worker.group.messages import (
    PROTOCOL,
    FollowerMessage,
    LeaderMessage,
    read_message,
    to_frame,
)

log = logging.getLogger(__name__)

_JOIN_S = 10.0  # between a connection and its first message
_LEAVE_S = 5.0  # for followers to end in order


@dataclass(slots=True, eq=False)
class _Follower:
    """A rank that has joined, and its connection."""

    rank: int
    host: str
    relay_port: int
    writer: asyncio.StreamWriter
    num_blocks: int | None = None
    """Blocks of its KV cache, once it is ready."""


class GroupLeader:
    """Owned by the leader's event loop."""

    def __init__(
        self,
        parallel: ParallelConfig,
        *,
        generation: str,
        on_leaving: Callable[[], None],
        on_lost: Callable[[str], None] = end_process,
    ) -> None:
        """
        Args:
            generation: Identity of the group, drawn for it.
            on_leaving: Called when a follower has been asked to stop, so that the whole group has to.
            on_lost: Called with what is lost, when a rank is.
        """
        self._parallel = parallel
        self._generation = generation
        self._on_leaving = on_leaving
        self._on_lost = on_lost
        self._followers: dict[int, _Follower] = {}
        self._relayed_to: Sequence[asyncio.StreamWriter] = ()
        self._is_leaving = False
        self._has_changed = asyncio.Condition()
        self._server: asyncio.Server | None = None
        self._store_socket = socket.socket()
        self._liveness: Liveness | None = None
        self._num_calls = 0
        self._calls: dict[int, dict[int, asyncio.Future[group_pb2.CallDone]]] = {}
        """Number of a call -> rank -> what it answers."""
        self.place: Future[GroupPlace] = Future()
        """Set when all ranks have met; RankUnavailable if they did not in time."""

    async def open(self) -> int:
        """Listen for the other ranks at `parallel.rendezvous_address`, and return the port.

        Raises:
            ConfigError: The address is invalid, or cannot be listened at.
        """
        address = self._parallel.rendezvous_address
        host, port = split_address(address, port_may_be_free=True)
        try:
            bind_host, family = await _bind_host(host)
            self._server = await asyncio.start_server(self._serve, bind_host, port)
            self._store_socket = _listen(bind_host, family)
            self._liveness = Liveness(
                self._parallel.silence_timeout_s,
                listener=_listen(bind_host, family),
                on_lost=self._on_lost,
            )
        except OSError as error:
            raise ConfigError(
                f"parallel.rendezvous_address: {address}: rank 0 cannot listen there: {error.strerror or error}"
            ) from None
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    async def gather(self) -> None:
        """Wait until all ranks have joined, and report that to them; sets `place`."""
        num_followers = self._parallel.num_ranks - 1
        try:
            async with asyncio.timeout(self._parallel.timeout_s), self._has_changed:
                await self._has_changed.wait_for(lambda: len(self._followers) == num_followers)
        except TimeoutError:
            missing = [rank for rank in range(1, num_followers + 1) if rank not in self._followers]
            self.place.set_exception(
                RankUnavailable(
                    f"parallel.rendezvous_address: {self._parallel.rendezvous_address}: rank 0 of {num_followers + 1} "
                    f"waited {self._parallel.timeout_s:g} s (parallel.timeout_s) for ranks {missing}; are they running?"
                )
            )
            return
        self._begin()

    def _begin(self) -> None:
        assert self._liveness is not None, "opened"
        ranks = sorted(self._followers)
        hosts = (host_name(), *(self._followers[rank].host for rank in ranks))
        host_to_head = {
            host: rank for rank, host in reversed(list(enumerate(hosts)))
        }  # the first of each host
        self._liveness.start({rank: f"rank {rank} ({hosts[rank].partition('/')[0]})" for rank in ranks})
        beat_port = self._liveness.port
        store_port = self._store_socket.getsockname()[1]
        for rank in ranks:
            head = host_to_head[hosts[rank]]
            self._followers[rank].writer.write(
                to_frame(
                    LeaderMessage(
                        joined={
                            "generation": self._generation,
                            "store_port": store_port,
                            "beat_port": beat_port,
                            "relay_port": 0 if head in (0, rank) else self._followers[head].relay_port,
                            "hosts": hosts,
                        }
                    )
                )
            )
        self._relayed_to = [
            self._followers[rank].writer for rank in ranks if host_to_head[hosts[rank]] in (0, rank)
        ]
        log.info("all %d ranks have joined, on %d hosts", len(hosts), len(host_to_head))
        host = split_address(self._parallel.rendezvous_address, port_may_be_free=True)[0]
        self.place.set_result(
            GroupPlace(self._generation, hosts, 0, f"{host}:{store_port}", self._store_socket.detach())
        )

    async def wait_ready(self, num_blocks: int) -> None:
        """Wait until every follower has loaded its part.

        Args:
            num_blocks: Blocks of this rank's KV cache, which all ranks must have.

        Raises:
            RankUnavailable: A rank is not ready within `parallel.timeout_s`, or has another number of blocks.
        """
        followers, timeout_s = self._followers.values(), self._parallel.timeout_s
        try:
            async with asyncio.timeout(timeout_s), self._has_changed:
                await self._has_changed.wait_for(lambda: all(f.num_blocks is not None for f in followers))
        except TimeoutError:
            late = [follower.rank for follower in followers if follower.num_blocks is None]
            raise RankUnavailable(
                f"rank 0 waited {timeout_s:g} s (parallel.timeout_s) for ranks {late} to load"
            ) from None
        for follower in followers:
            if follower.num_blocks != num_blocks:
                raise RankUnavailable(
                    f"rank {follower.rank} has {follower.num_blocks} KV blocks, and rank 0 has {num_blocks}"
                )
        assert self._liveness is not None
        self._liveness.tighten()

    def relay(self, message: LeaderMessage) -> None:
        """Send a message to all followers. Returns at once; a follower that reads nothing is soon found silent."""
        frame = to_frame(message)
        for writer in self._relayed_to:
            writer.write(frame)

    def begin_call(self, **what: object) -> int:
        """Have every follower do something, behind all that was relayed before; return the number of the call."""
        self._num_calls += 1
        loop = asyncio.get_running_loop()
        self._calls[self._num_calls] = {rank: loop.create_future() for rank in self._followers}
        self.relay(LeaderMessage(call={"id": self._num_calls, **what}))
        return self._num_calls

    async def finish_call(self, call: int) -> int:
        """Wait until every follower has done it, and return how many bytes they released together.

        The group ends if one has not done it within `parallel.timeout_s`.
        """
        timeout_s = self._parallel.timeout_s
        _, late = await asyncio.wait(self._calls[call].values(), timeout=timeout_s)
        if late:
            ranks = [rank for rank, answer in self._calls[call].items() if answer in late]
            self._on_lost(f"ranks {ranks} have not answered within {timeout_s:g} s (parallel.timeout_s)")
        return sum(answer.released_bytes for answer in (await self.answers_to(call)).values())

    async def answers_to(self, call: int) -> dict[int, group_pb2.CallDone]:
        """Wait until every follower has carried out a call, however long it takes; return what each reports, by rank.

        A follower that does not live any more ends the group.
        """
        answers = self._calls[call]
        await asyncio.wait(answers.values())
        del self._calls[call]
        return {rank: answer.result() for rank, answer in answers.items()}

    async def leave(self) -> None:
        """Have all followers end, and wait for that, a few seconds at most."""
        self._is_leaving = True
        if self._liveness is not None:
            self._liveness.let_end()
        self.relay(LeaderMessage(leave={}))
        with suppress(TimeoutError):
            async with asyncio.timeout(_LEAVE_S), self._has_changed:
                await self._has_changed.wait_for(lambda: not self._followers)
        if self._liveness is not None:
            self._liveness.stop()  # not before: a follower that has not read the message would take it for a loss
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection, from its first message to its end."""
        follower: _Follower | None = None
        try:
            async with asyncio.timeout(_JOIN_S):
                message = await read_message(reader, FollowerMessage)
            follower = await self._admit(message, writer)
            while follower is not None:
                await self._take(follower, await read_message(reader, FollowerMessage))
        except (OSError, asyncio.IncompleteReadError, TimeoutError):
            pass
        except ProtocolViolation as error:
            log.warning("a connection to the group's port breaks its protocol: %s", error)
        finally:
            writer.close()
            if follower is not None:
                await self._drop(follower)

    async def _admit(self, message: FollowerMessage, writer: asyncio.StreamWriter) -> _Follower | None:
        """Take a process in as a rank, or refuse it with the reason."""
        join, num_ranks = message.join, self._parallel.num_ranks
        if message.WhichOneof("message") != "join":
            raise ProtocolViolation("the first message is no request to join")
        reason = ""
        if join.protocol != PROTOCOL:
            reason = f"the leader speaks version {PROTOCOL}, this rank {join.protocol}; start one release everywhere"
        elif join.num_ranks != num_ranks:
            reason = f"parallel: the leader has {num_ranks} ranks, and this rank {join.num_ranks}"
        elif not 0 < join.rank < num_ranks:
            reason = f"worker.rank: {join.rank} is not one of the followers, 1 to {num_ranks - 1}"
        is_temporary = not reason
        if not reason and join.rank in self._followers:
            reason = (
                f"worker.rank: rank {join.rank} of this group (generation {self._generation}) has joined already; "
                "was it given to two workers?"
            )
        if reason:
            writer.write(to_frame(LeaderMessage(refused={"reason": reason, "is_temporary": is_temporary})))
            return None
        follower = _Follower(join.rank, join.host, join.relay_port, writer)
        async with self._has_changed:
            self._followers[join.rank] = follower
            self._has_changed.notify_all()
        return follower

    async def _take(self, follower: _Follower, message: FollowerMessage) -> None:
        match message.WhichOneof("message"):
            case "ready":
                async with self._has_changed:
                    follower.num_blocks = message.ready.num_blocks
                    self._has_changed.notify_all()
            case "call_done":
                answer = self._calls.get(message.call_done.id, {}).get(follower.rank)
                if answer is not None and not answer.done():
                    answer.set_result(message.call_done)
            case "leaving":
                log.info("rank %d has been asked to stop, so all ranks stop", follower.rank)
                self._on_leaving()
            case other:
                raise ProtocolViolation(f"unexpected from a follower: {other}")

    async def _drop(self, follower: _Follower) -> None:
        """Note that a follower's connection has ended: that of a complete group ends the group."""
        if self.place.done() and not self._is_leaving:
            self._on_lost(f"rank {follower.rank} ({follower.host.partition('/')[0]}) is gone")
        async with self._has_changed:
            if self._followers.get(follower.rank) is follower:
                del self._followers[follower.rank]
            self._has_changed.notify_all()


async def _bind_host(host: str) -> tuple[str, socket.AddressFamily]:
    """Return what to bind, so that other machines reach the address and, if it is loopback, none does."""
    infos = await asyncio.get_running_loop().getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    family, _, _, _, address = infos[0]
    is_loopback = str(address[0]).startswith("127.") or address[0] == "::1"
    if is_loopback:
        return str(address[0]), family
    return ("::" if family == socket.AF_INET6 else "0.0.0.0"), family


def _listen(host: str, family: socket.AddressFamily) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.bind((host, 0))
    listener.listen(128)
    return listener
