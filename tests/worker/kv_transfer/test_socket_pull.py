"""Blocks that one worker pulls from another: the same bytes, or a failure, and nothing written once it is over."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace

import pytest

from tests.helpers.kv_proxy import KvProxy, cut, flip_bit, kv_proxy, silence
from tests.worker.simulated import simulated_runner
from triptych.types.kv_transfer import KvExport, KvOrders, KvProgress, KvPull, PullProgress
from triptych.types.row_key import RowKey
from triptych.types.step import RowError, StepPlan, StepResult, empty_u32
from triptych_services.worker.kv_transfer import socket_pull
from triptych_services.worker.kv_transfer.base import PullSink, PullStopped
from triptych_services.worker.kv_transfer.frames import CHUNK_BYTES, FrameHead, FrameKind, PullRequest
from triptych_services.worker.kv_transfer.service import layout_of
from triptych_services.worker.kv_transfer.session import KvTransferSession
from triptych_services.worker.kv_transfer.socket_pull import SocketPulls
from triptych_services.worker.kv_transfer.socket_server import BlockServer
from triptych_services.worker.step_orders import StepOrders

LAYOUT, LEASE, ROW = bytes(32), b"l" * 16, RowKey(3, 1)
NUM_BLOCKS, BLOCK_BYTES, DEADLINE_S = 20, 3000, 20.0


class Memory:
    """A `BlockStore` of plain bytes. The last two are pages, of twice as many bytes and 7."""

    def __init__(self, block_bytes: int = BLOCK_BYTES, seed: int | None = None) -> None:
        content = random.Random(seed).randbytes if seed is not None else bytes
        sizes = [block_bytes] * NUM_BLOCKS + [2 * block_bytes + 7] * 2
        self.blocks = [bytearray(content(size)) for size in sizes]

    def num_bytes(self, block: int) -> int:
        return len(self.blocks[block])

    def read(self, block: int, offset: int, buffer: memoryview) -> None:
        buffer[:] = memoryview(self.blocks[block])[offset : offset + len(buffer)]

    def write(self, block: int, offset: int, content: memoryview) -> None:
        self.blocks[block][offset : offset + len(content)] = content


def name_of(index: int) -> bytes:
    return index.to_bytes(16, "big")


class Side:
    """One worker's session, and its server."""

    def __init__(self, store: Memory, layout: bytes = LAYOUT) -> None:
        self.store = store
        self.progress = KvProgress()
        self.orders = StepOrders()
        self.orders.note_computed(0)
        self.session = KvTransferSession(store, SocketPulls(layout), self._note, self.orders)
        self.server = BlockServer(lambda: (layout, self.session.exports))
        self.port = self.server.bind("127.0.0.1", 0)
        self.news = asyncio.Event()
        self._last_step = 0

    @property
    def num_pulls(self) -> int:
        """Number of pulls that the server carries out."""
        return len(self.server._places)

    def _note(self, progress: KvProgress) -> None:
        self.progress = progress
        self.news.set()

    def step(self, **orders: tuple) -> int:
        """Receive a step with orders."""
        self._last_step += 1
        self.session.begin_step(StepPlan(self._last_step, 0, kv_orders=KvOrders(**orders)))
        return self._last_step

    def compute(self, step_id: int, errors: dict[RowKey, RowError] | None = None) -> None:
        self.session.note_errors(StepResult(step_id, empty_u32(), row_errors=errors or {}))
        self.orders.note_computed(step_id)

    def offer(self, first: int, end: int) -> None:
        """Compute blocks `first` to `end` of the prompt, which have these ids."""
        indices = tuple(range(first, end))
        self.compute(self.step(exports=(KvExport(LEASE, ROW, first, indices, tuple(map(name_of, indices))),)))

    def pull(self, address: str, first: int, end: int, *, hashes: tuple[bytes, ...] | None = None) -> None:
        """Pull these blocks of the prompt into blocks of the ids, reversed."""
        indices = tuple(range(first, end))
        ids = tuple(NUM_BLOCKS - 1 - index for index in indices)
        names = tuple(map(name_of, indices)) if hashes is None else hashes
        self.step(pulls=(KvPull(1, address, LEASE, first, ids, names),))

    async def until(self, condition: Callable[[PullProgress], bool]) -> PullProgress:
        async with asyncio.timeout(DEADLINE_S):
            while not (self.progress.pulls and condition(self.progress.pulls[0])):
                self.news.clear()
                await self.news.wait()
        return self.progress.pulls[0]

    async def ended(self, num_blocks: int) -> PullProgress:
        return await self.until(lambda pull: bool(pull.failure) or pull.num_blocks == num_blocks)

    def close(self) -> None:
        self.session.close()
        self.server.close()


@asynccontextmanager
async def two_workers(
    block_bytes: int = BLOCK_BYTES, layout: bytes = LAYOUT
) -> AsyncIterator[tuple[Side, Side, KvProxy]]:
    source, target = Side(Memory(block_bytes, seed=7)), Side(Memory(block_bytes), layout)
    with kv_proxy() as proxy:
        proxy.target = ("127.0.0.1", source.port)
        try:
            yield source, target, proxy
        finally:
            target.close()
            source.close()


@contextmanager
def patience(seconds: float) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket_pull, "SILENCE_S", seconds)
        yield


def check_arrived(source: Side, target: Side, first: int, end: int) -> None:
    for index in range(first, end):
        assert target.store.blocks[NUM_BLOCKS - 1 - index] == source.store.blocks[index], index


@pytest.mark.parametrize("block_bytes", [1, BLOCK_BYTES, CHUNK_BYTES, 2 * CHUNK_BYTES + 77])
async def test_blocks_arrive_as_they_are_computed(block_bytes: int) -> None:
    async with two_workers(block_bytes) as (source, target, proxy):
        target.pull(proxy.address, 2, 8)
        source.offer(0, 4)
        await target.until(lambda pull: pull.num_blocks == 2)
        check_arrived(source, target, 2, 4)
        source.offer(4, 8)
        assert (await target.ended(6)).failure == ""
        check_arrived(source, target, 2, 8)
        async with asyncio.timeout(DEADLINE_S):  # the source notes what it has sent after it has come
            while [lease.num_blocks for lease in source.session.exports.progress()] != [8]:
                await asyncio.sleep(0.01)


async def test_a_step_that_is_not_computed_offers_nothing() -> None:
    async with two_workers() as (source, target, proxy):
        target.pull(proxy.address, 0, 4)
        source.offer(0, 2)
        indices = (2, 3)
        step = source.step(exports=(KvExport(LEASE, ROW, 2, indices, tuple(map(name_of, indices))),))
        await target.until(lambda pull: pull.num_blocks == 2)
        assert source.session.exports.wait_for(LEASE, 2, 0.0, was_known=True) is None
        source.compute(step)
        assert (await target.ended(4)).num_blocks == 4


async def test_other_layouts_are_refused() -> None:
    async with two_workers(layout=b"x" * 32) as (source, target, proxy):
        source.offer(0, 2)
        target.pull(proxy.address, 0, 2)
        assert "layout" in (await target.ended(2)).failure


@pytest.mark.parametrize("identity", [{"weights": "a fine-tune"}, {"numerics": "avx512"}, {"adapter": "a"}])
def test_other_models_have_other_layouts(identity: dict[str, str]) -> None:
    """A prompt's blocks are of no use to other weights, whose answers they would spoil."""
    facts = simulated_runner().facts
    other = replace(facts.model, identity=replace(facts.model.identity, **identity))
    assert layout_of(replace(facts, model=other)) != layout_of(facts)
    assert layout_of(replace(facts, model=replace(facts.model, max_model_len=7))) == layout_of(facts)


async def test_another_prompts_block_is_refused() -> None:
    async with two_workers() as (source, target, proxy):
        source.offer(0, 2)
        target.pull(proxy.address, 0, 2, hashes=(name_of(0), name_of(9)))
        assert await target.ended(2) == PullProgress(
            1, 1, f"{proxy.address}: block 1 is of another prompt", is_spoiled=False
        )


@pytest.mark.parametrize("at", [0, 20, 37, 38, 1000, 3 * BLOCK_BYTES + 500])
async def test_a_flipped_bit_is_never_written(at: int) -> None:
    async with two_workers() as (source, target, proxy):
        proxy.damage = flip_bit(at)
        source.offer(0, 8)
        with patience(DEADLINE_S):
            target.pull(proxy.address, 0, 8)
            ended = await target.ended(8)
        assert ended.failure
        assert ended.num_blocks == at // (BLOCK_BYTES + 41)
        for index in range(8):
            arrived = target.store.blocks[NUM_BLOCKS - 1 - index]
            assert arrived == (source.store.blocks[index] if index < ended.num_blocks else bytes(BLOCK_BYTES))


@pytest.mark.parametrize("damage", [cut, silence])
async def test_a_link_that_breaks_keeps_what_was_whole(damage: Callable[[int], object]) -> None:
    async with two_workers() as (source, target, proxy):
        proxy.damage = damage(3 * (BLOCK_BYTES + 41) + (1 << 14))
        source.offer(0, 16)
        with patience(1.0):
            target.pull(proxy.address, 0, 16)
            ended = await target.ended(16)
        assert ended.failure
        assert 3 <= ended.num_blocks < 16
        check_arrived(source, target, 0, ended.num_blocks)


async def test_nobody_listens() -> None:
    async with two_workers() as (_, target, _):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        target.pull(f"127.0.0.1:{port}", 0, 2)
        assert "refused" in (await target.ended(2)).failure


async def test_a_stopped_pull_writes_nothing_more() -> None:
    async with two_workers() as (source, target, proxy):
        source.offer(0, 4)
        target.pull(proxy.address, 0, 8)
        await target.until(lambda pull: pull.num_blocks == 4)
        target.step(stopped=(1,))
        target.store.blocks = [bytearray(BLOCK_BYTES) for _ in range(NUM_BLOCKS)]
        source.offer(4, 8)
        async with asyncio.timeout(DEADLINE_S):
            while source.num_pulls:
                await asyncio.sleep(0.01)
        assert not any(map(any, target.store.blocks))


async def test_pages_come_behind_blocks() -> None:
    async with two_workers() as (source, target, _):
        names = tuple(map(name_of, range(4)))
        source.compute(source.step(exports=(KvExport(LEASE, ROW, 0, (5, 6), names[:3], (1,)),)))
        target.step(pulls=(KvPull(1, f"127.0.0.1:{source.port}", LEASE, 0, (3, 4), names, (2, 1)),))
        await target.until(lambda pull: pull.num_blocks == 3)
        source.compute(source.step(exports=(KvExport(LEASE, ROW, 3, (), names[3:], (2,)),)))
        await target.ended(4)
    copied = [target.store.blocks[at] for at in (3, 4, -2, -1)]
    assert copied == [source.store.blocks[at] for at in (5, 6, -1, -2)]


class Held:
    """A transport that brings nothing by itself."""

    def __init__(self) -> None:
        self.sinks: list[PullSink] = []

    def begin(self, sink: PullSink) -> Callable[[], None]:
        self.sinks.append(sink)
        return lambda: None


class Decoding:
    """A session that receives steps, and pulls over a transport that brings nothing by itself."""

    def __init__(self, *, is_open: bool = True) -> None:
        self.store, self.transport, self.orders = Memory(), Held(), StepOrders()
        self.session = KvTransferSession(self.store, self.transport, lambda progress: None, self.orders)
        if is_open:
            self.orders.note_computed(0)

    def receive(self, step_id: int, *, stopped: tuple[int, ...] = (), pull: KvPull | None = None) -> None:
        orders = KvOrders(pulls=() if pull is None else (pull,), stopped=stopped)
        self.session.begin_step(StepPlan(step_id, 0, kv_orders=orders))


def pull_into(block: int, pull_id: int = 1) -> KvPull:
    return KvPull(pull_id, "x:1", LEASE, 0, (block,), (name_of(0),))


async def test_a_pull_begins_after_the_step_before_it() -> None:
    it = Decoding()
    it.receive(1)
    it.receive(2)
    it.receive(3, pull=pull_into(5))
    assert not it.transport.sinks, "steps 1 and 2 may use the block"
    it.orders.note_computed(1)
    assert not it.transport.sinks
    it.orders.note_computed(2)
    assert len(it.transport.sinks) == 1


async def test_a_pull_of_an_idle_worker_begins_at_once() -> None:
    it = Decoding()
    it.receive(1)
    it.orders.note_computed(1)
    it.receive(2, pull=pull_into(5))
    assert len(it.transport.sinks) == 1


async def test_a_pull_waits_until_the_session_before_computes_nothing() -> None:
    it = Decoding(is_open=False)
    it.receive(1, pull=pull_into(5))
    assert not it.transport.sinks, "a step of the session before may use the block"
    it.orders.note_computed(0)
    assert len(it.transport.sinks) == 1


async def test_a_pull_that_is_stopped_before_it_begins_never_begins() -> None:
    it = Decoding()
    it.receive(1)
    it.receive(2, pull=pull_into(5))
    it.receive(3, stopped=(1,), pull=pull_into(5, pull_id=2))
    for step_id in (1, 2):
        it.orders.note_computed(step_id)
    assert [sink.pull.pull_id for sink in it.transport.sinks] == [2]


@pytest.mark.parametrize("ending", ["stop", "close"])
async def test_bytes_that_come_late_are_not_written(ending: str) -> None:
    it = Decoding()
    it.receive(1, pull=pull_into(5))
    (sink,) = it.transport.sinks
    sink.write(0, 0, memoryview(b"abc"))
    if ending == "stop":
        it.receive(2, stopped=(1,))
    else:
        it.session.close()
    with pytest.raises(PullStopped):
        sink.write(0, 0, memoryview(b"xyz"))
    assert it.store.blocks[5][:3] == b"abc"


async def test_a_withdrawn_lease_ends_its_pull() -> None:
    async with two_workers() as (source, target, proxy):
        source.offer(0, 4)
        target.pull(proxy.address, 0, 8)
        await target.until(lambda pull: pull.num_blocks == 4)
        source.step(released=(LEASE,))
        ended = await target.ended(8)
        assert "lease has ended" in ended.failure
        assert not ended.is_spoiled


async def test_a_lease_that_ends_before_its_step_is_computed_is_not_offered_again() -> None:
    async with two_workers() as (source, _, _):
        indices = (0, 1)
        step = source.step(exports=(KvExport(LEASE, ROW, 0, indices, tuple(map(name_of, indices))),))
        source.step(released=(LEASE,))
        source.compute(step)
        assert not source.session.exports.is_known(LEASE)


async def test_a_row_that_failed_spoils_its_lease() -> None:
    async with two_workers() as (source, target, proxy):
        source.offer(0, 4)
        target.pull(proxy.address, 0, 8)
        await target.until(lambda pull: pull.num_blocks == 4)
        source.compute(source.step(), {ROW: RowError("NaN")})
        ended = await target.ended(8)
        assert ended.is_spoiled
        assert "NaN" in ended.failure


async def test_a_session_that_ends_serves_and_writes_nothing() -> None:
    async with two_workers() as (source, target, proxy):
        source.offer(0, 4)
        target.pull(proxy.address, 0, 8)
        await target.until(lambda pull: pull.num_blocks == 4)
        source.session.close()
        assert (await target.ended(8)).failure
        target.session.close()
        target.session.report()


async def test_a_server_survives_what_is_no_pull() -> None:
    async with two_workers() as (source, target, proxy):
        source.offer(0, 2)
        for garbage in (
            b"",
            b"GET / HTTP/1.1\r\n\r\n" * 10,
            PullRequest(LAYOUT, LEASE, 0, 2).to_bytes()[:30],
        ):
            with socket.create_connection(("127.0.0.1", source.port)) as connection:
                connection.sendall(garbage)
        target.pull(proxy.address, 0, 2)
        assert (await target.ended(2)).failure == ""


def test_heads_come_out_of_their_bytes_again() -> None:
    head = FrameHead(FrameKind.CHUNK, 3, 4, 5, b"h" * 16, 77)
    assert FrameHead.from_bytes(head.to_bytes()) == head
    request = PullRequest(b"y" * 32, b"z" * 16, 4, 5)
    assert PullRequest.from_bytes(request.to_bytes()) == request
