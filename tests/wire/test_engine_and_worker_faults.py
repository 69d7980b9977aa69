"""Faults between the tiers affect only the requests that caused them, and no request waits for ever."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from dataclasses import replace

import grpc
import grpc.aio
import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from tests.helpers.scheduling import EOS, make_prompt, naive_generation
from tests.helpers.stack import (
    DEADLINE_S,
    EngineStack,
    FakeFrontend,
    NaiveRunner,
    WorkerStack,
    make_config,
    make_executor,
    num_finished,
    running_stack,
)
from triptych.errors import EngineFailure
from triptych.internal.v1 import engine_core_pb2, step_pb2, worker_pb2_grpc
from triptych.observe.metrics import EngineMetrics
from triptych.rpc.server import RpcServer
from triptych.types.identity import ModelIdentity
from triptych.types.sampling import SamplingParams
from triptych.types.step import StepPlan, StepResult
from triptych.types.submit import SubmitRequest, single_choice
from triptych_services.enginecore import inbox, wake_timer
from triptych_services.enginecore import loop as loop_module
from triptych_services.enginecore.loop import EngineLoop
from triptych_services.enginecore.workers import connection
from triptych_services.enginecore.workers.base import Connected, WorkerLost

LONG = {"max_tokens": 400, "ignore_eos": True}


def expected_tokens(number: int, prompt: list[int], **sampling: object) -> list[int]:
    params = SamplingParams(**{"max_tokens": 16, **sampling})
    return naive_generation(prompt, number, params, (EOS,), 512)[0]


def make_submit(number: int, prompt: list[int], **sampling: object) -> SubmitRequest:
    return single_choice(
        number,
        f"direct-{number}",
        prompt,
        SamplingParams(**sampling),
        seed=number,
    )


async def wait_until(condition) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.005)


# No worker


async def longest_pause_s(for_s: float) -> float:
    """Return the longest time for which the event loop ran nothing else."""
    longest, last = 0.0, time.monotonic()
    until = last + for_s
    while last < until:
        await asyncio.sleep(0.005)
        now = time.monotonic()
        longest, last = max(longest, now - last), now
    return longest


async def test_waiting_for_a_worker_does_not_block_the_event_loop() -> None:
    engine = EngineStack(make_config(worker_port=1))
    await engine.start()
    session, _ = engine.loop.open_session()
    engine.loop.submit(session, make_submit(1, [1, 2], max_tokens=4))
    looks = [await longest_pause_s(for_s=1.7)]  # past the redial that waits for 0.8 s
    while (
        min(looks) >= 0.3 and len(looks) < 10
    ):  # other processes stop this one now and then, the engine in each look
        looks.append(await longest_pause_s(for_s=1.7))
    await engine.stop()
    assert min(looks) < 0.3, looks


class SilentWorker(worker_pb2_grpc.WorkerServiceServicer):
    async def Execute(self, request_iterator, context):
        await asyncio.Event().wait()
        yield


async def test_silent_worker_delays_no_deadline_and_no_newcomer() -> None:
    async with running_stack() as (worker, _, frontend):
        worker.runner.may_step.clear()
        await frontend.submit(1, make_prompt(6), deadline_remaining_ms=2500, sampling=LONG)
        await frontend.wait_status(lambda status: status.num_running == 1)
        port = worker.port
        await worker.stop()
        silent = RpcServer(services=(), limit_bytes=1000)
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(SilentWorker(), silent.grpc)
        silent.bind("127.0.0.1", port, option="worker.port")
        await silent.start()
        await asyncio.sleep(1.1)  # past every redial that was under way
        await frontend.submit(2, make_prompt(600))
        await frontend.wait_for(
            lambda: 1 in frontend.ends and 2 in frontend.ends
        )  # the dial waits on meanwhile
        assert frontend.ends[1].code == "DEADLINE_EXCEEDED"
        assert frontend.ends[2].code == "INVALID_REQUEST"
        await silent.stop(0)


async def test_a_worker_that_comes_back_with_another_model_is_refused(caplog, monkeypatch) -> None:
    """Requests are given back: one that ran on the worker before, and one that comes while there is none."""
    monkeypatch.setattr(connection, "_REFUSED_S", 0.0)
    async with running_stack(resume_ttl_s=0.05) as (worker, _, frontend):
        worker.runner.may_step.clear()
        await frontend.submit(1, make_prompt(6), sampling=LONG)
        await frontend.wait_status(lambda status: status.num_running == 1)
        port = worker.port
        await worker.stop()
        config = make_config()
        runner = NaiveRunner(config)
        runner.facts = replace(
            runner.facts, model=replace(runner.facts.model, identity=ModelIdentity("0" * 64))
        )
        other = WorkerStack(config, runner)
        await other.start(port)
        await wait_until(lambda: any("fingerprint" in record.getMessage() for record in caplog.records))
        told = next(record for record in caplog.records if "fingerprint" in record.getMessage())
        assert told.levelno == logging.WARNING
        assert (
            "another model than the worker has: fingerprint: ffffffffffff and 000000000000"
            in told.getMessage()
        )
        assert not other.status_publisher.state.held_by
        await frontend.wait_for(lambda: 1 in frontend.ends)
        await frontend.submit(2, make_prompt(6))  # the engine takes it while it has no worker
        await frontend.wait_for(lambda: 2 in frontend.ends)
        for number in (1, 2):
            assert frontend.ends[number].code == "ENGINE_UNAVAILABLE"
            assert "start the engine again" in frontend.ends[number].message
        status = await frontend.status()
        assert status.why_not_ready == frontend.ends[1].message
        assert status.num_waiting == status.num_running == 0
        await other.stop()


# The stream is lost


class ScriptedExecutor:
    """Answers every step with one token and loses the stream at once, both before the loop looks."""

    address = "scripted"

    def __init__(self, facts) -> None:
        self.facts = facts
        self.num_connects = 0
        self.is_closed = False
        self._arrived: list[StepResult] = []
        self._is_lost = False

    async def connect(self, on_event, *, resume: bool) -> Connected:
        self.num_connects += 1
        self._is_lost = False
        self._on_event = on_event
        return Connected(self.facts, 1, resume_ttl_s=10.0, is_resumed=False)

    async def send(self, plan: StepPlan) -> None:
        self._arrived.append(StepResult(plan.step_id, np.array([5], np.uint32)))
        self._is_lost = True
        self._on_event()

    def receive(self) -> list[StepResult]:
        results, self._arrived = self._arrived, []
        if not results and self._is_lost:
            raise WorkerLost("told to")
        return results

    def take_kv_progress(self) -> None:
        return None

    async def close(self) -> None:
        self.is_closed = True


async def test_a_loss_right_behind_the_last_result_is_noticed() -> None:
    config = make_config()
    executor = ScriptedExecutor(NaiveRunner(config).facts)
    loop = EngineLoop(
        config=config,
        executor=executor,
        metrics=EngineMetrics.create(CollectorRegistry()),
        on_ready_change=lambda ready: None,
    )
    task = asyncio.create_task(loop.run())
    session, _ = loop.open_session()
    await wait_until(lambda: loop.welcome.ready)
    loop.submit(session, make_submit(1, [1, 2], max_tokens=1))
    await wait_until(lambda: loop.operator.status().counters.num_finished.get("length") == 1)
    await wait_until(lambda: executor.num_connects == 2)
    task.cancel()
    await asyncio.wait([task])
    assert executor.is_closed, "the loop leaves its stream open"


async def test_engine_that_dials_again_replaces_itself() -> None:
    config = make_config()
    worker = WorkerStack(config, NaiveRunner(config))
    await worker.start()
    executors = [make_executor(worker.port, config, boot_id="same") for _ in range(2)]
    news = asyncio.Event()
    await executors[0].connect(news.set, resume=False)
    await executors[1].connect(lambda: None, resume=False)
    async with asyncio.timeout(DEADLINE_S):
        await news.wait()
    with pytest.raises(WorkerLost, match="has started a new session"):
        executors[0].receive()
    assert "engine-0" in worker.status_publisher.state.held_by
    for executor in executors:
        await executor.close()
    await worker.stop()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda result: replace(result, step_id=result.step_id + 1),
        lambda result: replace(result, token_ids=np.append(result.token_ids, np.uint32(1))),
        lambda result: replace(result, token_ids=np.full_like(result.token_ids, 61)),
    ],
    ids=["another step", "a token too many", "a token beyond the vocabulary"],
)
async def test_wrong_result_costs_the_stream_and_no_token(spoil, caplog) -> None:
    async with running_stack() as (worker, _, frontend):
        honest, num_steps = worker.runner.execute, 0

        def execute(plan: StepPlan) -> StepResult:
            nonlocal num_steps
            num_steps += 1
            result = honest(plan)
            return spoil(result) if num_steps == 3 else result

        worker.runner.execute = execute
        with caplog.at_level(logging.INFO):
            await frontend.submit(1, make_prompt(6), sampling={"ignore_eos": True})
            await frontend.wait_for(lambda: 1 in frontend.ends)
        assert frontend.tokens[1] == expected_tokens(1, make_prompt(6), ignore_eos=True)
        told = [record for record in caplog.records if record.name.startswith("triptych_services.enginecore")]
        assert [record.levelname for record in told if record.levelno >= logging.WARNING] == ["WARNING"]
        assert not any(record.exc_info for record in told)


async def test_a_failed_step_is_explained_to_the_engine(caplog) -> None:
    async with running_stack() as (worker, _, frontend):
        is_first = iter([True])
        worker.runner.fail_at = lambda plan: next(is_first, False)
        with caplog.at_level(logging.WARNING):
            await frontend.submit(1, make_prompt(6))
            await frontend.wait_for(lambda: 1 in frontend.ends)
        assert frontend.tokens[1] == expected_tokens(1, make_prompt(6))
        told = [record for record in caplog.records if record.name == "triptych_services.enginecore.loop"]
        warnings = [record.getMessage() for record in told if record.levelno >= logging.WARNING]
        assert len(warnings) == 1
        assert "step 1 failed: RuntimeError('told to fail')" in warnings[0]
        assert sum(record.exc_info is not None for record in caplog.records) == 1, "one traceback is enough"


@pytest.mark.parametrize("is_reported_wrongly", [False, True])
async def test_prompt_is_reported_once_across_a_worker_failure(is_reported_wrongly) -> None:
    async with running_stack(max_num_seqs=8, max_num_batched_tokens=8) as (worker, _, frontend):
        prompt, honest, num_steps = make_prompt(50), worker.runner.execute, 0

        def execute(plan: StepPlan) -> StepResult:
            nonlocal num_steps
            num_steps += 1
            if num_steps != 3:
                return honest(plan)
            if not is_reported_wrongly:
                raise RuntimeError("told to fail")
            result = honest(plan)
            return replace(
                result,
                prompt_logprobs={
                    row: replace(part, first_position=part.first_position + 1)
                    for row, part in result.prompt_logprobs.items()
                },
            )

        worker.runner.execute = execute
        await frontend.submit(1, prompt, sampling={"prompt_logprobs": 0}, whole_output=True)
        await frontend.wait_for(lambda: 1 in frontend.ends)
        assert num_steps > 9
        parts = [entry.logprobs for batch in frontend.batches for entry in batch.prompt_logprobs]
        assert [position for part in parts for position in range(part.first_position, part.end)] == [
            *range(1, 50)
        ]
        assert [token for part in parts for token in part.token_ids[:, 0].tolist()] == prompt[1:]
        assert frontend.tokens[1] == expected_tokens(1, prompt)
        is_first = [bool(len(batch.token_ids)) for batch in frontend.batches].index(True)
        assert not any(batch.prompt_logprobs for batch in frontend.batches[is_first + 1 :])


# A worker that drains


async def test_worker_drains_under_load() -> None:
    async with running_stack() as (worker, _, frontend):
        for number in range(1, 9):
            await frontend.submit(number, make_prompt(6, seed=number), sampling=LONG)
        await frontend.wait_for(lambda: len(frontend.tokens) == 8)
        port = worker.port
        worker.drain()
        await wait_until(lambda: not worker.num_in_flight)
        await worker.stop()
        config = make_config()
        second = WorkerStack(config, NaiveRunner(config))
        await second.start(port)
        await frontend.wait_for(lambda: len(frontend.ends) == 8)
        for number in range(1, 9):
            assert frontend.tokens[number] == expected_tokens(number, make_prompt(6, seed=number), **LONG)
        await second.stop()


# A frontend that misbehaves


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"prompt_token_ids": b""}, "INVALID_REQUEST"),
        ({"prompt_token_ids": b"\xff\xff\xff\xff"}, "INVALID_REQUEST"),
        ({"emitted_token_ids": [b"\xff\xff\xff\xff"]}, "INVALID_REQUEST"),
        ({"emitted_token_ids": [bytes(16)]}, "INVALID_REQUEST"),  # all that max_tokens allows
        ({"adapter": "lora"}, "ENGINE_UNAVAILABLE"),
        ({"task": 0}, "FEATURE_DISABLED"),
        ({"sampling": {"max_tokens": 4, "temperature": -1.0}}, "INVALID_REQUEST"),
        ({"sampling": {"max_tokens": 4, "n": (1 << 31) - 1}}, "INVALID_REQUEST"),
        ({"deadline_remaining_ms": 0}, "DEADLINE_EXCEEDED"),
        ({"priority": -(2**31), "deadline_remaining_ms": 2**64 - 1, "seeds": b"\xff" * 8}, None),
    ],
)
async def test_a_malformed_submit_ends_alone(fields, code) -> None:
    async with running_stack() as (_, _engine, frontend):
        good = {
            "numbers": b"\1\0\0\0",
            "request_id": "odd",
            "prompt_token_ids": b"\1\0\0\0\2\0\0\0",
            "seeds": bytes(8),
            "sampling": {"max_tokens": 4},
            "task": step_pb2.TASK_GENERATE,
        }
        submit = engine_core_pb2.Submit(**good | fields)
        await frontend.send(engine_core_pb2.ConnectRequest(submit={"requests": [submit]}))
        await frontend.submit(2, make_prompt(6))
        await frontend.wait_for(lambda: 2 in frontend.ends and 1 in frontend.ends)
        assert getattr(frontend.ends[1], "code", None) == code
        assert frontend.tokens[2] == expected_tokens(2, make_prompt(6))


@pytest.mark.parametrize(
    "message",
    [
        engine_core_pb2.ConnectRequest(
            submit={"requests": [{"prompt_token_ids": b"\1\0\0", "task": step_pb2.TASK_GENERATE}]}
        ),
        engine_core_pb2.ConnectRequest(abort=b"\1"),
        engine_core_pb2.ConnectRequest(hello={"frontend_id": "again"}),
        engine_core_pb2.ConnectRequest(),
    ],
    ids=["half an id", "half a number", "a second hello", "nothing"],
)
async def test_invalid_message_ends_only_its_stream(message) -> None:
    async with running_stack() as (_, engine, frontend):
        other = FakeFrontend(engine.address)
        await other.start()
        await other.wait_ready()
        await other.send(message)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async with asyncio.timeout(DEADLINE_S):
                await other.ended()
        assert caught.value.code() is grpc.StatusCode.ABORTED
        await other.stop()
        await frontend.submit(1, make_prompt(6))
        await frontend.wait_for(lambda: 1 in frontend.ends)
        assert frontend.tokens[1] == expected_tokens(1, make_prompt(6))


async def test_frontend_that_stops_reading_loses_its_requests(monkeypatch) -> None:
    async with running_stack() as (_, engine, frontend):
        monkeypatch.setattr(loop_module, "MAX_PENDING", 5)
        session, stalled = engine.loop.open_session()
        engine.loop.submit(session, make_submit(1, make_prompt(6), **LONG))
        await frontend.wait_status(lambda status: num_finished(status, "abort") == 1)
        engine.loop.submit(session, make_submit(2, make_prompt(6), **LONG))
        status = await frontend.status()
        assert (status.num_running, status.num_waiting, status.num_used_blocks) == (0, 0, 0)
        with pytest.raises(EngineFailure, match=r"more than 5 messages or \d+ bytes behind"):
            await anext(stalled.messages())
        engine.loop.close_session(session)
        await frontend.submit(3, make_prompt(6))
        await frontend.wait_for(lambda: 3 in frontend.ends)


async def test_busy_engine_takes_no_more_than_it_can_hold() -> None:
    engine = EngineStack(make_config(worker_port=1))  # its loop does not run
    session, _ = engine.loop.open_session()
    num_submitted = 0
    try:
        async with asyncio.timeout(0.5):
            while True:
                await engine.loop.wait_until_below_limit()
                engine.loop.submit(session, make_submit(num_submitted, [1], max_tokens=1))
                num_submitted += 1
    except TimeoutError:
        pass
    assert 100 < num_submitted < 100_000
    await engine.start()
    async with asyncio.timeout(DEADLINE_S):
        await engine.loop.wait_until_below_limit()
    await engine.stop()


async def test_busy_engine_takes_no_more_bytes_than_it_can_hold(monkeypatch) -> None:
    monkeypatch.setattr(inbox, "MAX_INBOX_BYTES", 100_000)
    engine = EngineStack(make_config(worker_port=1))  # its loop does not run
    session, _ = engine.loop.open_session()
    num_submitted = 0
    with suppress(TimeoutError):
        async with asyncio.timeout(0.2):
            while True:
                await engine.loop.wait_until_below_limit()
                engine.loop.submit(session, make_submit(num_submitted, [1] * 5000, max_tokens=1))
                num_submitted += 1
    assert 4 <= num_submitted <= 6  # of 20 kB each
    await engine.start()
    async with asyncio.timeout(DEADLINE_S):
        await engine.loop.wait_until_below_limit()
    await engine.stop()


async def test_flood_of_requests_is_taken_in_over_several_turns(monkeypatch) -> None:
    monkeypatch.setattr(inbox, "INBOX_S", 0.0)  # one call a turn
    monkeypatch.setattr(wake_timer, "TICK_S", DEADLINE_S)  # a turn that waits for it fails by the deadline
    async with running_stack() as (_, engine, frontend):
        session, outbox = engine.loop.open_session()
        for number in range(30):
            engine.loop.submit(session, make_submit(number, make_prompt(600)))  # longer than any context
        numbers: set[int] = set()
        async with asyncio.timeout(DEADLINE_S):
            async for message in outbox.messages():
                numbers |= {failure.number for failure in getattr(message, "failures", ())}
                if len(numbers) == 30:
                    break
        await frontend.submit(1, make_prompt(6))
        await frontend.wait_for(lambda: 1 in frontend.ends)


async def test_cache_reset_with_results_on_their_way() -> None:
    async with running_stack() as (worker, engine, frontend):
        await frontend.submit(1, make_prompt(40), sampling=LONG)
        await frontend.wait_for(lambda: 1 in frontend.tokens)
        worker.runner.may_step.clear()
        await wait_until(lambda: worker.num_in_flight == 2)
        await frontend.abort(1)
        await frontend.wait_for(lambda: 1 in frontend.ends)
        assert engine.loop.operator.reset_prefix_cache() > 0
        await frontend.submit(2, make_prompt(40), sampling={"max_tokens": 20, "ignore_eos": True})
        worker.runner.may_step.set()
        await frontend.wait_for(lambda: 2 in frontend.ends)
        assert frontend.ends[2].num_cached_tokens == 0
        assert frontend.tokens[2] == expected_tokens(2, make_prompt(40), max_tokens=20, ignore_eos=True)


async def test_streams_end_in_order_when_the_engine_has_drained() -> None:
    async with running_stack() as (_, engine, frontend):
        engine.loop.operator.stop_taking()
        engine.servicer.close()
        async with asyncio.timeout(DEADLINE_S):
            await frontend.ended()
        assert not frontend.welcomes[-1].ready


async def test_workers_that_drain_one_after_the_other_accuse_nobody() -> None:
    async with running_stack() as (first, engine, frontend):
        config, worker = make_config(), first
        await frontend.submit(1, make_prompt(6), sampling=LONG)
        for _ in range(4):
            num_tokens = len(frontend.tokens.get(1, []))
            await frontend.wait_for(
                lambda num_tokens=num_tokens: len(frontend.tokens.get(1, [])) > num_tokens
            )
            worker.drain()
            await wait_until(lambda worker=worker: not worker.num_in_flight)
            await worker.stop(1.0)
            port, worker = worker.port, WorkerStack(config, NaiveRunner(config))
            await worker.start(port)
        await frontend.wait_for(lambda: 1 in frontend.ends)
        assert frontend.tokens[1] == expected_tokens(1, make_prompt(6), **LONG)
        await engine.stop()
        await worker.stop()
