"""The frontends' knowledge of real engines' caches, over streams that break, and caches that are reset."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import numpy as np

from tests.helpers.scheduling import BLOCK_SIZE, make_prompt
from tests.wire.test_frontend_reconnects import Sink, Stand, eventually, stand
from triptych.types.sampling import SamplingParams
from triptych.types.submit import SubmitRequest, single_choice
from triptych_services.enginecore.frontends import outputs as outputs_module
from triptych_services.frontend.engines.client import EngineClient
from triptych_services.frontend.routing.policy import RoundRobin
from triptych_services.frontend.routing.prefix_index import keys_of
from triptych_services.frontend.routing.router import Router


def cached_in(s: Stand) -> set[int]:
    """The keys of what the engine caches, as its pool says."""
    scheduler = s.engine.loop._engine.scheduler
    assert scheduler is not None
    return set(keys_of(b"".join(scheduler._blocks.pool.snapshot().hash_to_block)))


def knows(client: EngineClient, keys: set[int]) -> bool:
    """Whether a client knows these blocks to be cached, and no others."""
    cached = client.load.cached
    return len(cached) == len(keys) and all(key in cached for key in keys)


async def knows_exactly(s: Stand, client: EngineClient) -> None:
    await eventually(lambda: client.is_ready and knows(client, cached_in(s)))


@asynccontextmanager
async def another_frontend(s: Stand) -> AsyncIterator[EngineClient]:
    client = EngineClient(s.engine.address, frontend_id="g", boot_id="b")
    task = asyncio.create_task(client.run())
    try:
        yield client
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_every_frontend_knows_what_is_cached() -> None:
    async with stand() as s, another_frontend(s) as idle:
        s.submit(40)
        await s.all_end_undisturbed()
        assert cached_in(s)
        for client in (s.client, idle):
            await knows_exactly(s, client)
            assert not client.load.why_no_affinity
            load = client.load.reported
            await eventually(lambda client=client: client.load.reported.num_running == 0)
            assert load.prefill_token_s > 0


async def test_a_stream_that_is_resumed_misses_nothing() -> None:
    async with stand() as s:
        for _ in range(3):
            s.submit(20)
            await s.cut()
        await s.all_end_undisturbed()
        assert s.num_sessions == 1
        await knows_exactly(s, s.client)


async def test_a_frontend_that_comes_late_learns_it_in_parts(monkeypatch: object) -> None:
    monkeypatch.setattr(outputs_module, "_HASHES_TOGETHER", 3)  # type: ignore[attr-defined]
    async with stand() as s:
        s.submit(30)
        await s.all_end_undisturbed()
        assert len(cached_in(s)) > 6
        async with another_frontend(s) as late:
            await knows_exactly(s, late)


async def test_a_cache_that_is_reset_is_forgotten() -> None:
    async with stand() as s:
        s.submit(20)
        await s.all_end_undisturbed()
        await knows_exactly(s, s.client)
        s.engine.loop.operator.reset_prefix_cache()
        await eventually(lambda: knows(s.client, set()))
        s.submit(20)
        await s.all_end_undisturbed()
        await knows_exactly(s, s.client)
        assert cached_in(s)


async def test_what_was_said_is_known_to_be_where_it_was_said() -> None:
    """Conversations at two engines: the next turn finds all of the last one in the index of its engine only."""
    async with AsyncExitStack() as stack:
        stands = [await stack.enter_async_context(stand()) for _ in range(2)]
        router = Router(policy=RoundRobin())
        router.engines = [s.client for s in stands]
        router._policy.looks_at_prompts = True
        wanted = router.find("")
        for seed in range(6):
            prompt, sink = make_prompt(6 * BLOCK_SIZE + 5, seed=seed), Sink()
            engine = router.choose(wanted)
            sampling = SamplingParams(max_tokens=40, ignore_eos=True)
            engine.submit(partial(submission_of, prompt, sampling), [sink])
            await eventually(lambda sink=sink: sink.end is not None)
            routed = router.read_prompt(wanted, np.array(prompt + sink.tokens, np.uint32), "")
            assert routed is not None
            num_computed = (
                len(prompt) + len(sink.tokens) - 1
            ) // BLOCK_SIZE  # the last token is not computed
            await eventually(
                lambda engine=engine, routed=routed, n=num_computed: (
                    engine.load.cached.count(routed, BLOCK_SIZE) == n
                )
            )
            (other,) = (client for client in router.engines if client is not engine)
            assert other.load.cached.count(routed, BLOCK_SIZE) == 0


def submission_of(prompt: list[int], sampling: SamplingParams, numbers: Sequence[int]) -> SubmitRequest:
    return single_choice(numbers[0], f"r{numbers[0]}", prompt, sampling, seed=1)
