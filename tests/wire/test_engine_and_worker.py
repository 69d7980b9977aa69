"""A real engine core and a real worker servicer over loopback; only the frontend and the model are fakes."""

from __future__ import annotations

import asyncio

import pytest

from tests.helpers.scheduling import EOS, make_prompt, naive_generation
from tests.helpers.stack import (
    EngineStack,
    FakeFrontend,
    NaiveRunner,
    WorkerStack,
    make_config,
    make_executor,
    running_stack,
)
from triptych.config.loader import shared_config
from triptych.errors import EngineUnavailable, HandshakeMismatch, WorkerHeld
from triptych.types.outputs import FinishReason
from triptych.types.sampling import SamplingParams


def expected(number: int, prompt: list[int], **sampling: object) -> tuple[list[int], FinishReason]:
    params = SamplingParams(**{"max_tokens": 16, **sampling})
    tokens, reason, _ = naive_generation(prompt, number, params, (EOS,), 512)
    return tokens, reason


@pytest.mark.parametrize("limit", [1, 5])
async def test_requests_stream_the_tokens_of_the_naive_model(limit: int) -> None:
    async with running_stack(max_samples_per_row=limit) as (_, _, frontend):
        prompts = {number: make_prompt(5 + 7 * number, seed=number) for number in range(1, 30)}
        for number, prompt in prompts.items():
            await frontend.submit(number, prompt)
        await frontend.wait_for(lambda: len(frontend.ends) == len(prompts))
        for number, prompt in prompts.items():
            tokens, reason = expected(number, prompt)
            assert frontend.tokens[number] == tokens
            assert frontend.ends[number].reason is reason
        status = await frontend.status()
        assert (status.num_running, status.num_waiting, status.num_used_blocks) == (0, 0, 0)


async def test_two_steps_are_in_flight_before_the_first_result_is_back() -> None:
    async with running_stack() as (worker, _, frontend):
        worker.runner.may_step.clear()
        await frontend.submit(1, make_prompt(8), sampling={"ignore_eos": True})
        async with asyncio.timeout(60):
            while worker.num_in_flight < 2:
                await asyncio.sleep(0.005)
        assert worker.runner.num_steps == 0
        worker.runner.may_step.set()
        await frontend.wait_for(lambda: 1 in frontend.ends)
        assert len(frontend.tokens[1]) == 16


async def test_aborted_requests_give_back_only_their_blocks() -> None:
    async with running_stack(num_blocks=2000) as (worker, _, frontend):
        worker.runner.may_step.clear()
        prompts = {number: make_prompt(20, seed=number) for number in range(1, 41)}
        for number, prompt in prompts.items():
            await frontend.submit(number, prompt, sampling={"max_tokens": 100, "ignore_eos": True})
        await frontend.wait_status(lambda status: status.num_running + status.num_waiting == 40)
        await frontend.abort(*range(1, 21))
        worker.runner.may_step.set()
        await frontend.wait_for(lambda: len(frontend.ends) == 40)
        for number in range(1, 21):
            assert frontend.ends[number].reason is FinishReason.ABORT
        for number in range(21, 41):
            tokens, _ = expected(number, prompts[number], max_tokens=100, ignore_eos=True)
            assert frontend.tokens[number] == tokens
        status = await frontend.wait_status(lambda status: status.num_used_blocks == 0)
        assert (status.num_running, status.num_waiting) == (0, 0)


async def test_a_frontend_that_leaves_takes_its_requests_with_it() -> None:
    async with running_stack() as (worker, engine, frontend):
        other = FakeFrontend(engine.address)
        await other.start()
        await other.wait_ready()
        worker.runner.may_step.clear()
        for number in range(10):
            await other.submit(number, make_prompt(30), request_id=f"o{number}", sampling={"max_tokens": 300})
        await frontend.submit(1, make_prompt(9), sampling={"ignore_eos": True})
        await frontend.wait_status(lambda status: status.num_running + status.num_waiting == 11)
        await other.stop()
        await frontend.wait_status(lambda status: status.num_running + status.num_waiting == 1)
        worker.runner.may_step.set()
        await frontend.wait_for(lambda: 1 in frontend.ends)
        assert frontend.tokens[1] == expected(1, make_prompt(9), ignore_eos=True)[0]
        await frontend.wait_status(lambda status: status.num_used_blocks == 0)


async def test_full_queue_refuses_with_a_retry_time() -> None:
    async with running_stack(max_num_seqs=4, max_num_waiting=8) as (worker, _, frontend):
        worker.runner.may_step.clear()
        for number in range(30):
            await frontend.submit(number, make_prompt(6, seed=number))
        await frontend.wait_for(lambda: len(frontend.ends) == 18)
        assert all(end.code == "QUEUE_FULL" and end.retry_after_ms > 0 for end in frontend.ends.values())
        worker.runner.may_step.set()
        await frontend.wait_for(lambda: len(frontend.ends) == 30)
        assert sum(hasattr(end, "reason") for end in frontend.ends.values()) == 12


async def test_a_duplicate_id_and_a_prompt_too_long_end_alone() -> None:
    async with running_stack() as (worker, _, frontend):
        worker.runner.may_step.clear()
        await frontend.submit(1, make_prompt(6), request_id="same")
        await frontend.submit(2, make_prompt(6), request_id="same")
        await frontend.submit(3, make_prompt(600))
        await frontend.wait_for(lambda: len(frontend.ends) == 2)
        assert frontend.ends[2].code == "DUPLICATE_REQUEST"
        assert frontend.ends[3].code == "INVALID_REQUEST"
        assert "600" in frontend.ends[3].message
        assert "512" in frontend.ends[3].message
        worker.runner.may_step.set()
        await frontend.wait_for(lambda: 1 in frontend.ends)
        assert frontend.tokens[1] == expected(1, make_prompt(6))[0]


async def test_a_deadline_ends_a_request_that_waits_and_one_that_runs() -> None:
    async with running_stack(max_num_seqs=1) as (worker, _, frontend):
        worker.runner.may_step.clear()
        await frontend.submit(1, make_prompt(6), deadline_remaining_ms=300)
        await frontend.submit(2, make_prompt(6), deadline_remaining_ms=200)
        await frontend.submit(3, make_prompt(6))
        await frontend.wait_for(lambda: len(frontend.ends) == 2)
        assert {frontend.ends[number].code for number in (1, 2)} == {"DEADLINE_EXCEEDED"}
        worker.runner.may_step.set()
        await frontend.wait_for(lambda: 3 in frontend.ends)
        assert frontend.tokens[3] == expected(3, make_prompt(6))[0]


async def test_a_lost_worker_costs_no_token_and_changes_none() -> None:
    async with running_stack(num_blocks=2000) as (worker, _, frontend):
        sampling = {"max_tokens": 200, "ignore_eos": True}
        prompts = {number: make_prompt(20 + number, seed=number) for number in range(1, 21)}
        for number, prompt in prompts.items():
            await frontend.submit(number, prompt, sampling=sampling)
        await frontend.wait_for(lambda: len(frontend.tokens) == 20)
        port = worker.port
        await worker.stop()
        config = make_config()
        second = WorkerStack(config, NaiveRunner(config, num_blocks=1500))
        await second.start(port)
        await frontend.wait_for(lambda: len(frontend.ends) == 20)
        for number, prompt in prompts.items():
            assert frontend.tokens[number] == expected(number, prompt, **sampling)[0]
        status = await frontend.wait_status(lambda status: status.num_used_blocks == 0)
        assert status.num_blocks == 1499
        await second.stop()


async def test_request_that_kills_every_worker_is_failed() -> None:
    async with running_stack() as (worker, _, frontend):
        worker.runner.fail_at = lambda plan: True
        await frontend.submit(1, make_prompt(6))
        await frontend.wait_for(lambda: 1 in frontend.ends)
        assert frontend.ends[1].code == "ENGINE_FAILURE"
        worker.runner.fail_at = lambda plan: False
        await frontend.submit(2, make_prompt(6))
        await frontend.wait_for(lambda: 2 in frontend.ends)
        assert frontend.tokens[2] == expected(2, make_prompt(6))[0]


async def test_second_engine_is_refused_by_name() -> None:
    async with running_stack() as (worker, _, frontend):
        second = make_executor(worker.port, make_config(), engine_id="engine-1", boot_id="second")
        with pytest.raises(WorkerHeld, match="engine-0"):
            await second.connect(lambda: None, resume=False)
        await second.close()
        await frontend.submit(1, make_prompt(6))
        await frontend.wait_for(lambda: 1 in frontend.ends)


async def test_config_mismatch_names_key_and_both_values() -> None:
    config = make_config()
    worker = WorkerStack(config, NaiveRunner(config))
    await worker.start()
    other = make_executor(
        worker.port,
        config,
        shared={**shared_config(config), "cache.block_size": "32"},
        engine_id="engine-1",
        boot_id="second",
    )
    with pytest.raises(HandshakeMismatch, match=r"cache.block_size: engine has '32', worker has '16'"):
        await other.connect(lambda: None, resume=False)
    await other.close()
    await worker.stop()


async def test_no_worker_is_an_engine_that_is_not_ready_and_says_why() -> None:
    engine = EngineStack(make_config(worker_port=1))
    await engine.start()
    frontend = FakeFrontend(engine.address)
    await frontend.start()
    await frontend.wait_for(
        lambda: bool(frontend.welcomes) and "UNAVAILABLE" in frontend.welcomes[-1].why_not_ready
    )
    assert not frontend.welcomes[-1].ready
    await frontend.submit(1, make_prompt(4))
    await frontend.wait_for(lambda: 1 in frontend.ends)
    assert frontend.ends[1].code == EngineUnavailable.code
    await frontend.stop()
    await engine.stop()


async def test_token_beyond_the_vocabulary_fails_only_its_request() -> None:
    async with running_stack() as (_, _, frontend):
        await frontend.submit(1, [3, 61])
        await frontend.submit(2, make_prompt(6))
        await frontend.wait_for(lambda: len(frontend.ends) == 2)
        assert frontend.ends[1].code == "INVALID_REQUEST"
        assert "61 is not in the vocabulary, 0..60" in frontend.ends[1].message
        assert frontend.tokens[2] == expected(2, make_prompt(6))[0]


async def test_a_window_of_nothing_is_refused() -> None:
    config = make_config()
    worker = WorkerStack(config, NaiveRunner(config))
    await worker.start()
    engine = make_executor(worker.port, config, boot_id="first", max_steps_in_flight=0)
    with pytest.raises(HandshakeMismatch, match="max_steps_in_flight: 0"):
        await engine.connect(lambda: None, resume=False)
    await engine.close()
    await worker.stop()


async def test_draining_engine_finishes_what_it_has() -> None:
    async with running_stack() as (worker, engine, frontend):
        worker.runner.may_step.clear()
        await frontend.submit(1, make_prompt(6))
        await frontend.wait_status(lambda status: status.num_running + status.num_waiting == 1)
        engine.loop.operator.stop_taking()
        await frontend.wait_for(lambda: not frontend.welcomes[-1].ready)
        assert frontend.welcomes[-1].why_not_ready == "the engine is stopping"
        worker.runner.may_step.set()
        await frontend.wait_for(lambda: 1 in frontend.ends)
        assert frontend.tokens[1] == expected(1, make_prompt(6))[0]


@pytest.mark.thorough
async def test_rows_too_large_for_one_message_enter_over_steps() -> None:
    """64 requests with 1.4 MB of sampling parameters each wait for one step: 90 MB, where a message holds 64."""
    num_requests, allowed = 64, tuple(range(1 << 21, (1 << 21) + 350_000))
    async with running_stack(max_num_seqs=num_requests) as (worker, _, frontend):
        worker.runner.may_step.clear()
        await frontend.submit(0, make_prompt(6))
        await frontend.wait_status(lambda status: status.num_running == 1)
        for number in range(1, num_requests + 1):
            sampling = {"max_tokens": 2, "ignore_eos": True, "allowed_token_ids": allowed}
            await frontend.submit(number, make_prompt(6, seed=number), sampling=sampling)
        await frontend.wait_status(lambda status: status.num_waiting >= num_requests - 2)
        worker.runner.may_step.set()
        await frontend.wait_for(lambda: len(frontend.ends) == num_requests + 1)
        assert all(len(frontend.tokens[number]) == 2 for number in range(1, num_requests + 1))
        assert len(frontend.welcomes) <= 2  # the stream to the worker never broke
