"""Engines of the real model die and stop under streams: the clients see the tokens that an undisturbed run gives."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.grounds.processes import DEADLINE_S, ProcessGround, process_ground
from triptych.client.grpc_client import GenerationClient
from triptych.types.events import DeltaEvent, FinishedEvent
from triptych.types.sampling import SamplingParams
from triptych.types.structured import StructuredOutputs

OPTIONS = (
    "--model.dtype=float32",
    "--model.max-model-len=512",
    "--model.batch-invariant=true",
    "--worker.num-threads=1",
    "--engine.drain-s=1",
    "--speculative.enabled=auto",
)
SCHEMA = {"type": "object", "properties": {"town": {"type": "string"}, "people": {"type": "integer"}}}
PROMPT = "The largest towns of the north, and how many people live there:"
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "ignore_eos": True},
    "penalties": {"temperature": 0.8, "seed": 1, "presence_penalty": 0.7, "repetition_penalty": 1.2, "n": 3},
    "log-probabilities": {"temperature": 0.9, "seed": 2, "logprobs": 2, "ignore_eos": True},
    "a stop string": {"temperature": 0.0, "stop": ["\n\n\n", "zzz"], "ignore_eos": True},
    "json": {"temperature": 0.9, "seed": 3, "structured_outputs": StructuredOutputs(json=json.dumps(SCHEMA))},
    "bad words": {"temperature": 0.0, "bad_words": ["the", "of"], "logit_bias": {11: -5.0}},
}
MAX_TOKENS = 48

Answer = dict[int, tuple[list[int], str]]


async def ask(
    client: GenerationClient, name: str, on_token: Callable[[], None], *, guesses: bool
) -> tuple[Answer, FinishedEvent]:
    """Return the tokens and text of each choice, and the end."""
    sampling = SamplingParams(**{"max_tokens": MAX_TOKENS, "speculation": guesses, **REQUESTS[name]})
    answer: Answer = {}
    async for event in client.generate(PROMPT, sampling, timeout_s=DEADLINE_S):
        if isinstance(event, DeltaEvent):
            token_ids, text = answer.get(event.index, ([], ""))
            answer[event.index] = [*token_ids, *event.token_ids], text + event.text
            on_token()
        elif isinstance(event, FinishedEvent):
            return answer, event
    raise AssertionError("the stream ended before its end")


async def ask_all(
    client: GenerationClient, on_token: Callable[[], None] = lambda: None, *, guesses: bool = True
) -> dict[str, tuple[Answer, FinishedEvent]]:
    """Send all requests at once."""
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
        tasks = {name: group.create_task(ask(client, name, on_token, guesses=guesses)) for name in REQUESTS}
    return {name: task.result() for name, task in tasks.items()}


async def ask_all_while(
    ground: ProcessGround, client: GenerationClient, lose: Callable[[str], Awaitable[None]]
) -> dict[str, tuple[Answer, FinishedEvent]]:
    """Send all requests at once; when tokens have come, lose the engine that has the most requests.

    Its worker stands still meanwhile, so that no answer ends before the engine does.
    """
    num_deltas = 0
    has_begun = asyncio.Event()
    workers = [member.name for member in ground.of_kind("worker")]

    def on_token() -> None:
        nonlocal num_deltas
        num_deltas += 1
        if num_deltas == 12:
            for worker in workers:
                ground.signal(worker, signal.SIGSTOP)
            has_begun.set()

    async def disturb() -> None:
        await has_begun.wait()
        victim = await busiest(ground)
        own_worker = victim.replace("enginecore", "worker")
        for worker in set(workers) - {own_worker}:
            ground.signal(worker, signal.SIGCONT)
        await lose(victim)
        ground.signal(own_worker, signal.SIGCONT)

    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
        answers = group.create_task(ask_all(client, on_token))
        group.create_task(disturb())
    return answers.result()


async def wait_until_all_serve(ground: ProcessGround) -> None:
    """Return when the frontend gives requests to every engine."""

    async def ask(number: int) -> None:
        async for _ in client.generate(f"{number} ships", SamplingParams(max_tokens=8, ignore_eos=True)):
            pass

    names = [member.name for member in ground.of_kind("enginecore")]
    async with (
        GenerationClient(ground.of_kind("frontend")[0].address) as client,
        asyncio.timeout(DEADLINE_S),
    ):
        for name in names:
            await ground.wait_listening(name)
            before = (await ground.status(name)).counters.num_scheduled_tokens
            while (await ground.status(name)).counters.num_scheduled_tokens == before:
                await asyncio.gather(*map(ask, range(2 * len(names))))


async def busiest(ground: ProcessGround) -> str:
    """Return the engine with the most requests."""
    names = [member.name for member in ground.of_kind("enginecore")]
    statuses = {name: await ground.status(name) for name in names}
    return max(names, key=lambda name: statuses[name].num_running + statuses[name].num_waiting)


@pytest.mark.thorough
async def test_engines_that_are_killed_and_stopped_change_no_token(tmp_path: Path) -> None:
    options = {
        "worker": ("--simulation.enabled=false", *OPTIONS),
        "enginecore": OPTIONS,
        "frontend": OPTIONS,
    }
    async with (
        process_ground(tmp_path, num_engines=2, **options) as ground,
        GenerationClient(ground.of_kind("frontend")[0].address) as client,
    ):
        await wait_until_all_serve(ground)
        expected = await ask_all(client, guesses=False)

        async def kill(victim: str) -> None:
            ground.signal(victim, signal.SIGKILL)
            await ground.wait_ended(victim)
            await ground.start(victim)

        async def stop(victim: str) -> None:
            ground.signal(victim, signal.SIGTERM)
            assert await ground.wait_ended(victim) == 0

        for lose in (kill, stop):
            got = await ask_all_while(ground, client, lose)
            for name in REQUESTS:
                (answer, end), (expected_answer, expected_end) = got[name], expected[name]
                assert answer == expected_answer, name
                assert end.is_exact
                counts = end.usage.num_prompt_tokens, end.usage.num_output_tokens
                assert counts == (expected_end.usage.num_prompt_tokens, expected_end.usage.num_output_tokens)
            assert any(end.num_moves for _, end in got.values())
            await wait_until_all_serve(ground) if lose is kill else None
