"""Each token arrives once and unchanged, whatever happens to the stream between frontend and engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import pytest

from tests.helpers.clock import pass_time
from tests.helpers.cut_proxy import CutProxy
from tests.helpers.scheduling import EOS, make_prompt, naive_generation
from tests.helpers.stack import (
    DEADLINE_S,
    EngineStack,
    FakeFrontend,
    NaiveRunner,
    WorkerStack,
    make_config,
    num_finished,
)
from triptych.internal.v1 import engine_core_pb2
from triptych.rpc.session.handshake import ENGINE_PROTOCOL, SessionTerms, session_hello
from triptych.types.outputs import FinishedRequest, FinishReason
from triptych.types.sampling import SamplingParams
from triptych.types.submit import SubmitRequest, single_choice
from triptych_services.enginecore import loop as loop_module
from triptych_services.frontend.engines.client import EngineClient
from triptych_services.frontend.engines.session import ADMITTED, ChoiceOutput, EngineLoss

NUM_REQUESTS = 40
MAX_TOKENS = 30
NUM_BLOCKS = 600


async def eventually(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.002)


def make_submit(number: int, index: int, **sampling: Any) -> SubmitRequest:
    """Request `index` of a test, under a number of its session."""
    prompt = make_prompt(5 + index % 23, seed=index)
    params = SamplingParams(**{"max_tokens": MAX_TOKENS, "temperature": 0.5 * (index % 2), **sampling})
    return single_choice(number, f"r{index}", prompt, params, seed=index)


def undisturbed(index: int, **sampling: Any) -> list[int]:
    submit = make_submit(0, index, **sampling)
    return naive_generation(submit.prompt_token_ids.tolist(), index, submit.sampling, (EOS,), 512)[0]


@dataclass
class Sink:
    """The outputs of one request; refuses any that come twice or too late."""

    tokens: list[int] = field(default_factory=list)
    num_admissions: int = 0
    end: FinishedRequest | Exception | str | None = None

    def on_output(self, output: ChoiceOutput) -> None:
        if output is ADMITTED:
            self.num_admissions += 1
            return
        assert output.num_cached_tokens is None or not self.tokens, "a first token after others"
        assert self.end is None, "a token after the end"
        self.tokens += output.token_ids
        self.end = output.finish

    def on_end(self, why: Exception | EngineLoss) -> None:
        assert self.end is None, "a second end"
        self.end = why.why if isinstance(why, EngineLoss) else why


@dataclass
class Stand:
    """A worker, an engine, a proxy that cuts, and a frontend's engine client behind it."""

    worker: WorkerStack
    engine: EngineStack
    proxy: CutProxy
    client: EngineClient
    task: asyncio.Task[None]
    operator: FakeFrontend
    sinks: list[Sink] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)

    def submit(self, count: int = 1, **sampling: Any) -> None:
        for _ in range(count):
            index = len(self.sinks)
            self.sinks.append(Sink())
            self.numbers += self.client.submit(
                lambda numbers, index=index: make_submit(numbers[0], index, **sampling), self.sinks[-1:]
            )

    @property
    def num_tokens(self) -> int:
        return sum(len(sink.tokens) for sink in self.sinks)

    @property
    def num_sessions(self) -> int:
        return len(self.engine.servicer.sessions) - 1  # the operator's is one

    async def cut(self) -> None:
        """And wait until it was noticed."""
        self.proxy.cut()
        await eventually(lambda: not self.client.is_ready)

    async def all_end(self) -> None:
        await eventually(lambda: all(sink.end is not None for sink in self.sinks))

    async def all_end_undisturbed(self, **sampling: Any) -> None:
        await self.all_end()
        for index, sink in enumerate(self.sinks):
            assert isinstance(sink.end, FinishedRequest), sink.end
            assert sink.num_admissions == 1
            assert sink.tokens == undisturbed(index, **sampling), f"request {index}"
        await self.is_idle()

    async def is_idle(self) -> None:
        """Nothing runs and every block is back."""
        status = await self.operator.wait_status(
            lambda s: s.num_running == s.num_waiting == s.num_used_blocks == 0
        )
        assert not status.why_not_ready
        self.engine.loop._engine.scheduler.check_integrity()


@asynccontextmanager
async def stand(resume_ttl_s: float = 30.0, **scheduler: Any) -> AsyncIterator[Stand]:
    config = make_config(**scheduler)
    worker = WorkerStack(config, NaiveRunner(config, NUM_BLOCKS))
    await worker.start()
    config = make_config(worker.port, **scheduler)
    engine = EngineStack(replace(config, engine=replace(config.engine, resume_ttl_s=resume_ttl_s)))
    await engine.start()
    operator = FakeFrontend(engine.address)
    await operator.start()
    async with CutProxy(engine.address) as proxy:
        client = EngineClient(proxy.address, frontend_id="f", boot_id="b")
        task = asyncio.create_task(client.run())
        try:
            await eventually(lambda: client.is_ready)
            yield Stand(worker, engine, proxy, client, task, operator)
        finally:
            task.cancel()
            await asyncio.wait([task])
            await operator.stop()
            await engine.stop()
            await worker.stop()


@pytest.mark.parametrize("num_tokens", [1, 150, 700])
async def test_a_stream_cut_while_tokens_flow_goes_on_where_it_was(num_tokens: int) -> None:
    async with stand() as s:
        s.submit(NUM_REQUESTS)
        await eventually(lambda: s.num_tokens >= num_tokens)
        await s.cut()
        await s.all_end_undisturbed()
        await eventually(lambda: s.client.is_ready)  # it may have had all tokens before it was cut
        assert s.proxy.num_connections == 2


@pytest.mark.parametrize("num_bytes", [1, 700, 3000, 6000])
async def test_cut_within_a_message_down_loses_and_repeats_nothing(num_bytes: int) -> None:
    async with stand() as s:
        s.proxy.cut_after(down=num_bytes)
        s.submit(NUM_REQUESTS)
        await s.all_end_undisturbed()
        assert s.proxy.num_cuts == 1


@pytest.mark.parametrize("num_bytes", [1, 300, 1500, 2500])
async def test_a_cut_during_submission_loses_and_repeats_no_request(num_bytes: int) -> None:
    async with stand() as s:
        s.proxy.cut_after(up=num_bytes)
        s.submit(NUM_REQUESTS)  # some 3 kB
        await s.all_end_undisturbed()
        assert s.proxy.num_cuts == 1
        status = await s.operator.status()
        assert sum(entry.count for entry in status.num_finished) == NUM_REQUESTS


async def test_many_cuts_in_a_row_are_a_delay_and_nothing_else() -> None:
    async with stand() as s:
        s.submit(NUM_REQUESTS, max_tokens=100, ignore_eos=True)
        for wanted in range(400, 3600, 400):
            await eventually(lambda wanted=wanted: s.num_tokens >= wanted and s.client.is_ready)
            await s.cut()
        await s.all_end_undisturbed(max_tokens=100, ignore_eos=True)
        assert s.proxy.num_cuts == 8


async def test_outputs_of_a_long_absence_are_gathered_and_delivered() -> None:
    async with stand() as s:
        s.submit(NUM_REQUESTS)
        await eventually(lambda: s.num_tokens >= NUM_REQUESTS)
        await s.proxy.refuse()
        await s.cut()
        await s.operator.wait_status(lambda status: status.num_running + status.num_waiting == 0)
        assert not any(isinstance(sink.end, str) for sink in s.sinks)
        await s.proxy.accept()
        await s.all_end_undisturbed()


async def test_new_stream_replaces_one_whose_cut_is_unnoticed() -> None:
    async with stand() as s:
        s.submit(NUM_REQUESTS)
        await eventually(lambda: s.num_tokens >= NUM_REQUESTS)
        s.proxy.cut(is_server_told=False)
        await s.all_end_undisturbed()
        assert s.num_sessions == 1


async def test_submits_and_aborts_of_an_absence_take_effect_later() -> None:
    async with stand() as s:
        s.submit(NUM_REQUESTS, max_tokens=300, ignore_eos=True)
        await eventually(lambda: s.num_tokens >= NUM_REQUESTS)
        s.worker.runner.may_step.clear()
        await s.proxy.refuse()
        await s.cut()
        for index in range(10):
            s.client.abort(s.numbers[index], s.sinks[index])
        for index in range(10, 20):
            s.client.stop(s.numbers[index], s.sinks[index])
        s.submit(5, max_tokens=300, ignore_eos=True)  # a request's later choices
        await s.proxy.accept()
        num_left = NUM_REQUESTS + 5 - 20
        await s.operator.wait_status(
            lambda status: (
                num_finished(status, "abort") == 20 and status.num_running + status.num_waiting == num_left
            )
        )
        s.worker.runner.may_step.set()
        await eventually(lambda: all(sink.end is not None for sink in s.sinks[10:]))
        for index, sink in enumerate(s.sinks):
            whole = undisturbed(index, max_tokens=300, ignore_eos=True)
            if index < 20:
                assert sink.tokens == whole[: len(sink.tokens)]
                assert sink.end is None if index < 10 else sink.end.reason is FinishReason.ABORT
            else:
                assert sink.tokens == whole
        await s.is_idle()


async def test_cut_while_aborts_are_on_their_way() -> None:
    async with stand() as s:
        s.submit(NUM_REQUESTS, max_tokens=200, ignore_eos=True)
        await eventually(lambda: s.num_tokens >= NUM_REQUESTS)
        s.worker.runner.may_step.clear()
        s.proxy.cut_after(up=20)  # into the message of the aborts
        for index in range(0, NUM_REQUESTS, 2):
            s.client.abort(s.numbers[index], s.sinks[index])
        await s.operator.wait_status(lambda status: num_finished(status, "abort") == NUM_REQUESTS // 2)
        assert s.proxy.num_cuts == 1
        s.worker.runner.may_step.set()
        await eventually(lambda: all(sink.end is not None for sink in s.sinks[1::2]))
        for index in range(1, NUM_REQUESTS, 2):
            assert s.sinks[index].tokens == undisturbed(index, max_tokens=200, ignore_eos=True)
        await s.is_idle()


async def test_expired_session_ends_on_both_sides_and_frees_blocks() -> None:
    async with stand(resume_ttl_s=0.2) as s:
        s.worker.runner.may_step.clear()
        s.submit(NUM_REQUESTS, max_tokens=300, ignore_eos=True)
        await s.operator.wait_status(lambda status: status.num_running + status.num_waiting == NUM_REQUESTS)
        await s.proxy.refuse()
        await s.cut()
        await s.all_end()
        assert all("not back within 0.2 s" in sink.end for sink in s.sinks)
        await s.operator.wait_status(lambda status: status.num_running + status.num_waiting == 0)
        s.worker.runner.may_step.set()
        await s.is_idle()
        assert s.num_sessions == 0
        await s.proxy.accept()
        await eventually(lambda: s.client.is_ready)
        s.sinks.clear()
        s.submit(3)
        await s.all_end_undisturbed()


async def test_resumed_session_outlives_the_time_to_live() -> None:
    async with stand(resume_ttl_s=60.0) as s:
        s.worker.runner.may_step.clear()
        s.submit(NUM_REQUESTS)
        await s.operator.wait_status(lambda status: status.num_running + status.num_waiting == NUM_REQUESTS)
        await s.cut()
        await eventually(lambda: s.client.is_ready)
        await pass_time(61.0)
        s.worker.runner.may_step.set()
        await s.all_end_undisturbed()


async def test_requests_of_a_vanished_frontend_are_aborted() -> None:
    async with stand(resume_ttl_s=0.2) as s:
        other = FakeFrontend(s.engine.address)
        await other.start()
        for number in range(1, 11):
            await other.submit(number, make_prompt(9), sampling={"max_tokens": 490, "ignore_eos": True})
        await other.wait_for(lambda: len(other.tokens) == 10)
        s.worker.runner.may_step.clear()
        other.vanish()
        await eventually(lambda: s.num_sessions == 1)
        s.worker.runner.may_step.set()
        await s.is_idle()
        assert num_finished(await s.operator.status(), "abort") == 10
        await other.stop()


async def test_a_goodbye_ends_the_session_at_once() -> None:
    async with stand(resume_ttl_s=3600.0) as s:
        s.worker.runner.may_step.clear()
        s.submit(5, max_tokens=300)
        await s.operator.wait_status(lambda status: status.num_running + status.num_waiting == 5)
        s.task.cancel()
        await asyncio.wait([s.task])
        assert all("the frontend is stopping" in sink.end for sink in s.sinks)
        assert s.num_sessions == 0
        s.worker.runner.may_step.set()
        await s.is_idle()


async def test_a_time_to_live_of_0_ends_the_requests_with_their_stream() -> None:
    async with stand(resume_ttl_s=0.0) as s:
        s.worker.runner.may_step.clear()
        s.submit(5, max_tokens=300)
        await s.operator.wait_status(lambda status: status.num_running + status.num_waiting == 5)
        s.proxy.cut()
        await s.all_end()
        s.worker.runner.may_step.set()
        await s.is_idle()
        await eventually(lambda: s.client.is_ready)


async def test_another_engine_at_the_address_does_not_know_the_session() -> None:
    async with stand() as s:
        s.submit(5, max_tokens=490, ignore_eos=True)
        await eventually(lambda: s.num_tokens > 5)
        async with stand() as other:
            s.proxy.server_address = other.engine.address
            s.proxy.cut()
            await s.all_end()
            assert all("it has not kept the session" in sink.end for sink in s.sinks)
            await eventually(lambda: s.client.is_ready)
            s.sinks.clear()
            s.submit(3)
            await s.all_end()
            assert [sink.tokens for sink in s.sinks] == [undisturbed(index) for index in range(3)]
            s.task.cancel()
            await asyncio.wait([s.task])


async def test_absence_beyond_the_kept_batches_ends_the_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loop_module, "MAX_PENDING", 100)  # a busy machine may be some behind before the cut
    async with stand() as s:
        s.submit(5, max_tokens=480, ignore_eos=True)
        await eventually(lambda: s.num_tokens > 5)
        await s.proxy.refuse()
        await s.cut()
        await s.operator.wait_status(lambda status: num_finished(status, "abort") == 5)
        await s.proxy.accept()
        await s.all_end()
        assert all("it has not kept the session" in sink.end for sink in s.sinks)
        await s.is_idle()


async def test_resumed_stream_begins_behind_the_last_batch_seen() -> None:
    async with stand() as s:
        first, second = FakeFrontend(s.engine.address), FakeFrontend(s.engine.address)
        await first.start()
        await first.submit(1, make_prompt(9), sampling={"max_tokens": 50, "ignore_eos": True})
        await first.wait_for(lambda: 1 in first.ends)
        await second.start(resume_session=first.terms.name, last_batch_seen=7)
        await second.wait_for(lambda: 1 in second.ends)
        assert (second.terms.name, second.terms.is_resumed) == (first.terms.name, True)
        assert second.terms.last_received == 1
        assert [batch.batch_id for batch in second.batches] == [b.batch_id for b in first.batches[7:]]
        assert second.tokens[1] == [t for batch in first.batches[7:] for t in batch.token_ids.tolist()]
        await first.stop()
        await second.stop()


async def test_replaced_stream_takes_no_more_messages() -> None:
    async with stand() as s:
        first, second = FakeFrontend(s.engine.address), FakeFrontend(s.engine.address)
        await first.start()
        await first.submit(1, make_prompt(9), sampling={"max_tokens": 8, "ignore_eos": True})
        await first.wait_for(lambda: 1 in first.ends)
        s.worker.runner.may_step.clear()
        await second.start(resume_session=first.terms.name)
        await second.wait_for(lambda: 1 in second.ends)
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # it may know by now
            await first.submit(2, make_prompt(9))
        # the second is gRPC's, where the stream ends while the client writes
        ends = "a newer stream has taken this one's place|Internal error from Core"
        with pytest.raises(grpc.aio.AioRpcError, match=ends):
            await first.ended()
        await second.submit(3, make_prompt(9))
        await s.operator.wait_status(lambda status: status.num_running + status.num_waiting == 1)
        s.worker.runner.may_step.set()
        await second.wait_for(lambda: 3 in second.ends)
        assert 2 not in second.ends
        await first.stop()
        await second.stop()


async def test_what_comes_late_on_the_old_stream_is_not_taken_twice() -> None:
    is_late = asyncio.Event()

    async def requests(resume_session: str, *, brings_abort: bool) -> AsyncIterator[Any]:
        hello = engine_core_pb2.ConnectHello(
            session=session_hello(ENGINE_PROTOCOL, resume_session, 0), frontend_id="other"
        )
        yield engine_core_pb2.ConnectRequest(hello=hello)
        if brings_abort:
            await is_late.wait()
            yield engine_core_pb2.ConnectRequest(abort=b"")
        await asyncio.Event().wait()

    async with stand() as s:

        async def connect(
            resume_session: str = "", *, brings_abort: bool = False
        ) -> tuple[Any, SessionTerms]:
            call = s.engine.servicer.Connect(requests(resume_session, brings_abort=brings_abort), None)
            return call, SessionTerms.from_proto((await anext(call)).welcome.session, ENGINE_PROTOCOL)

        first, terms = await connect(brings_abort=True)
        second, _ = await connect(terms.name)
        is_late.set()
        await asyncio.sleep(0.01)
        third, terms = await connect(terms.name)
        assert (terms.is_resumed, terms.last_received) == (True, 0)
        for call in (first, second, third):
            await call.aclose()


@pytest.mark.parametrize("last_batch_seen", [2, 1_000_000], ids=["forgotten", "never sent"])
async def test_a_session_that_cannot_go_on_from_there_begins_anew(last_batch_seen: int) -> None:
    async with stand() as s:
        first, second = FakeFrontend(s.engine.address), FakeFrontend(s.engine.address)
        await first.start()
        await first.submit(1, make_prompt(9), sampling={"max_tokens": 490, "ignore_eos": True})
        await first.wait_for(lambda: len(first.batches) > 5)
        s.worker.runner.may_step.clear()
        await first.send(engine_core_pb2.ConnectRequest(last_batch_seen=4))
        await first.submit(2, make_prompt(9))
        await s.operator.wait_status(lambda status: status.num_running + status.num_waiting == 2)
        await second.start(resume_session=first.terms.name, last_batch_seen=last_batch_seen)
        await second.wait_for(lambda: bool(second.welcomes))
        assert not second.terms.is_resumed
        await s.operator.wait_status(lambda status: status.num_running + status.num_waiting == 0)
        s.worker.runner.may_step.set()
        await second.submit(1, make_prompt(9))
        await second.wait_for(lambda: 1 in second.ends)
        await first.stop()
        await second.stop()


async def test_an_engine_that_stops_in_order_keeps_nobody_waiting() -> None:
    async with stand(resume_ttl_s=3600.0) as s:
        s.worker.runner.may_step.clear()
        s.submit(5, max_tokens=300)
        await s.operator.wait_status(lambda status: status.num_running + status.num_waiting == 5)
        s.engine.servicer.close()
        await s.all_end()
        assert all("the engine closed the stream" in sink.end for sink in s.sinks)


async def test_message_that_breaks_the_protocol_ends_the_session() -> None:
    async with stand(resume_ttl_s=3600.0) as s:
        other = FakeFrontend(s.engine.address)
        await other.start()
        await other.submit(1, make_prompt(9), sampling={"max_tokens": 490, "ignore_eos": True})
        await other.wait_for(lambda: 1 in other.tokens)
        await other.send(engine_core_pb2.ConnectRequest(abort=b"odd"))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await other.ended()
        assert caught.value.code() is grpc.StatusCode.ABORTED
        await eventually(lambda: s.num_sessions == 1)
        await s.is_idle()
        await other.stop()


async def test_a_frontend_started_again_ends_what_it_left_behind() -> None:
    async with stand(resume_ttl_s=3600.0) as s:
        earlier = FakeFrontend(s.engine.address, frontend_id="pod-0", boot_id="first")
        await earlier.start()
        await earlier.submit(
            1, make_prompt(9), sampling={"max_tokens": 490, "ignore_eos": True}, request_id="same"
        )
        await s.operator.wait_status(lambda status: status.num_running == 1)
        later = FakeFrontend(s.engine.address, frontend_id="pod-0", boot_id="second")
        await later.start()
        await later.wait_ready()
        assert s.num_sessions == 3  # the stream of the earlier one lives: two frontends may have one name
        await later.submit(
            1, make_prompt(9), sampling={"max_tokens": 490, "ignore_eos": True}, request_id="same"
        )
        await s.operator.wait_status(lambda status: status.num_running == 2)
        earlier.vanish()
        await s.operator.wait_status(lambda status: status.num_running == 1)
        assert s.num_sessions == 2
        await later.stop()


async def test_a_restart_after_the_loss_ends_the_session_at_once() -> None:
    async with stand(resume_ttl_s=3600.0) as s:
        for boot_id in ("first", "second"):
            frontend = FakeFrontend(s.engine.address, frontend_id="pod-0", boot_id=boot_id)
            await frontend.start()
            await frontend.submit(1, make_prompt(9), sampling={"max_tokens": 490, "ignore_eos": True})
            await frontend.wait_for(lambda frontend=frontend: bool(frontend.tokens.get(1)))
            await s.operator.wait_status(lambda status: status.num_running == 1)
            frontend.vanish()


async def test_given_up_session_ends_with_the_next_hello() -> None:
    async with stand(resume_ttl_s=3600.0) as s:
        s.submit(5, max_tokens=490, ignore_eos=True)
        await s.operator.wait_status(lambda status: status.num_running > 0)
        s.client.dialer.give_up("its time to live has passed")
        s.proxy.cut()
        await eventually(lambda: s.client.is_ready)
        await s.is_idle()
        assert s.num_sessions == 1
