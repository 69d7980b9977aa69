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
    client: GenerationClient, then: Callable[[], Awaitable[None]] | None = None, *, guesses: bool = True
) -> dict[str, tuple[Answer, FinishedEvent]]:
    """Send all requests at once; let something happen when tokens have come."""
    num_deltas = 0
    has_begun = asyncio.Event()

    def on_token() -> None:
        nonlocal num_deltas
        num_deltas += 1
        if num_deltas >= 12:
            has_begun.set()

    async def disturb() -> None:
        if then is not None:
            await has_begun.wait()
            await then()

    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
        tasks = {name: group.create_task(ask(client, name, on_token, guesses=guesses)) for name in REQUESTS}
        group.create_task(disturb())
    return {name: task.result() for name, task in tasks.items()}


async def wait_until_all_serve(ground: ProcessGround) -> None:
    async with asyncio.timeout(DEADLINE_S):
        for member in ground.of_kind("enginecore"):
            await ground.wait_listening(member.name)
            while not (await ground.status(member.name)).ready:
                await asyncio.sleep(0.1)
        await asyncio.sleep(1.0)  # the frontend hears of it


async def busiest(ground: ProcessGround) -> str:
    """Return the engine with the most requests."""
    names = [member.name for member in ground.of_kind("enginecore")]
    num_running = {name: (await ground.status(name)).num_running for name in names}
    return max(names, key=num_running.__getitem__)


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

        async def kill() -> None:
            victim = await busiest(ground)
            ground.signal(victim, signal.SIGKILL)
            await ground.wait_ended(victim)
            await ground.start(victim)

        async def stop() -> None:
            victim = await busiest(ground)
            ground.signal(victim, signal.SIGTERM)
            assert await ground.wait_ended(victim) == 0

        for disturb in (kill, stop):
            got = await ask_all(client, disturb)
            for name in REQUESTS:
                (answer, end), (expected_answer, expected_end) = got[name], expected[name]
                assert answer == expected_answer, name
                assert end.is_exact
                counts = end.usage.num_prompt_tokens, end.usage.num_output_tokens
                assert counts == (expected_end.usage.num_prompt_tokens, expected_end.usage.num_output_tokens)
            assert any(end.num_moves for _, end in got.values())
            await wait_until_all_serve(ground) if disturb is kill else None
