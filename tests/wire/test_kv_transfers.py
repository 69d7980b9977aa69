"""Prompts that go from one worker to another over real sockets and engines: same tokens, whatever breaks on the way."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import numpy as np
import pytest

from tests.helpers.kv_proxy import Damage, cut, flip_bit, silence, slow
from tests.helpers.kv_stack import kv_stack
from tests.worker.simulated import WORD_IDS
from triptych_services.worker.kv_transfer import socket_pull, socket_server

BLOCK_SIZE = 16
PATIENT_S = 60.0
"""Time for the blocks of a prompt to come, however busy the machine is."""


def make_prompt(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).choice(WORD_IDS, length).tolist()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a silent link be noticed in a moment."""
    monkeypatch.setattr(socket_pull, "SILENCE_S", 0.6)
    monkeypatch.setattr(socket_server, "WAITING_S", 0.1)


async def test_a_prompt_is_pulled_and_its_blocks_are_given_back() -> None:
    async with kv_stack() as stack:
        prompt = make_prompt(1000, 1)
        number = await stack.submit(prompt, ready_in_s=PATIENT_S)
        tokens = await stack.result(number)
        assert await stack.num_cached(number) == 1000 // BLOCK_SIZE * BLOCK_SIZE
        await stack.wait_empty()
        assert tokens == await stack.expected(prompt)


async def test_the_next_turn_finds_what_was_pulled() -> None:
    async with kv_stack() as stack:
        prompt = make_prompt(500, 1)
        await stack.result(await stack.submit(prompt, ready_in_s=PATIENT_S))
        longer = [*prompt, *make_prompt(200, 2)]
        number = await stack.submit(longer, ready_in_s=PATIENT_S)
        assert await stack.num_cached(number) == 700 // BLOCK_SIZE * BLOCK_SIZE
        assert stack.proxy.num_connections == 2
        assert await stack.result(number) == await stack.expected(longer)


@pytest.mark.thorough
async def test_many_prompts_are_pulled_at_once() -> None:
    async with kv_stack() as stack:
        prompts = [make_prompt(100 + 90 * number, number) for number in range(12)]
        numbers = [await stack.submit(prompt, seed=5) for prompt in prompts]
        for number, prompt in zip(numbers, prompts, strict=True):
            assert await stack.result(number) == await stack.expected(prompt, seed=5)
        await stack.wait_empty()


@pytest.mark.parametrize("kind", [cut, flip_bit, silence])
@pytest.mark.parametrize("at", [0, 60, 3000, 9000])
@pytest.mark.usefixtures("impatient")
async def test_a_link_that_fails_costs_time_and_no_token(kind: Callable[[int], Damage], at: int) -> None:
    async with kv_stack() as stack:
        prompt = make_prompt(1200, at)
        stack.proxy.damage = kind(at)
        number = await stack.submit(prompt, ready_in_s=5.0)
        tokens = await stack.result(number)
        assert await stack.num_cached(number) < 1200 // BLOCK_SIZE * BLOCK_SIZE
        assert tokens == await stack.expected(prompt)


@pytest.mark.thorough
async def test_a_slow_link_is_given_up() -> None:
    async with kv_stack() as stack:
        for number in range(20):  # so that the time of a step is known
            await stack.result(await stack.submit(make_prompt(40, number), max_tokens=2))
        stack.proxy.damage = slow(2000)
        prompt = make_prompt(1500, 77)
        number = await stack.submit(prompt, ready_in_s=0.1)
        tokens = await stack.result(number)
        assert await stack.num_cached(number) < 1500 // BLOCK_SIZE * BLOCK_SIZE
        assert tokens == await stack.expected(prompt)


async def test_a_client_that_leaves_lets_all_blocks_go() -> None:
    async with kv_stack(lease_s=0.3) as stack:
        stack.proxy.damage = slow(5000)
        number = await stack.submit(make_prompt(1500, 3), ready_in_s=5.0)
        await asyncio.sleep(0.05)
        await stack.decode.abort(number)
        await stack.wait_empty()


@pytest.mark.thorough
async def test_blocks_that_nobody_pulls_are_let_go() -> None:
    async with kv_stack(lease_s=4.0) as stack:
        sampling = {"max_tokens": 1, "temperature": 0.0}
        await stack.prefill.submit(1, make_prompt(600, 1), sampling=sampling, kv_lease=b"l" * 16)
        await stack.prefill.wait_for(lambda: 1 in stack.prefill.ends)
        assert stack.statuses()[0].num_used_blocks == 600 // BLOCK_SIZE
        await stack.wait_empty()


async def test_the_worker_that_prefills_is_lost() -> None:
    async with kv_stack() as stack:
        prompt = make_prompt(1500, 4)
        stack.proxy.damage = slow(40_000)
        number = await stack.submit(prompt, ready_in_s=5.0)
        await asyncio.sleep(0.05)
        stack.prefill_worker.transfers.close()
        tokens = await stack.result(number)
        assert tokens == await stack.expected(prompt)


async def test_other_layouts_are_not_pulled() -> None:
    async with kv_stack() as stack:
        stack.prefill_worker.endpoint = type(stack.prefill_worker.endpoint)("x:1", "other", 1)
        prompt = make_prompt(300, 5)
        number = await stack.submit(prompt)
        assert await stack.result(number) == await stack.expected(prompt)
        assert stack.proxy.num_connections == 0


@pytest.mark.quick_cases(1)
@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("seed", range(4))
async def test_faults_at_random_points_change_no_token(seed: int) -> None:
    """Few blocks and eight rows, so that pulls wait, give way, and are found in parts by others."""
    rng = random.Random(seed)
    async with kv_stack(num_blocks=220, lease_s=1.0) as stack:
        shared = make_prompt(300, 1000)
        submitted = []
        for number in range(16):
            stack.proxy.damage = rng.choice(
                [
                    lambda passed, data: data,
                    cut(rng.randrange(12_000)),
                    flip_bit(rng.randrange(12_000)),
                    silence(rng.randrange(12_000)),
                    slow(rng.choice([5_000, 50_000, 500_000])),
                ]
            )
            prompt = make_prompt(rng.randint(1, 1000), number)
            prompt = [*shared, *prompt] if rng.random() < 0.4 else prompt
            submitted.append((await stack.submit(prompt, seed=number, max_tokens=20), prompt, number))
            await asyncio.sleep(rng.random() * 0.1)
        for name, prompt, own_seed in submitted:
            tokens = await stack.result(name)
            assert tokens == await stack.expected(prompt, seed=own_seed, max_tokens=20)
        await stack.wait_empty()
