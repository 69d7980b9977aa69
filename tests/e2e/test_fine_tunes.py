"""Two fine-tunes of one architecture under one name: no stream goes from the weights of one to those of the other."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.chaos.grounds.processes import DEADLINE_S, ProcessGround, process_ground
from tests.helpers.byte_tokenizer import byte_backend, write_model_directory
from tests.worker.models.checkpoints import SIZES
from triptych.client.grpc_client import GenerationClient
from triptych.errors import TriptychError
from triptych.types.events import DeltaEvent, FinishedEvent

NUM_STREAMS = 12
NUM_TOKENS = 1500
NUM_BEGUN = 10
"""Tokens after which a stream has begun."""
ENGINES = ("enginecore-0", "enginecore-1")
SHARED = ("--model.served-name=tuned", "--model.dtype=float32", "--model.batch-invariant=true")


Answers = list[list[int]]
"""Tokens of each stream, by its number."""


@dataclass
class Stream:
    """One answer, as far as its client has seen it."""

    token_ids: list[int] = field(default_factory=list)
    end: FinishedEvent | TriptychError | None = None


def write_fine_tune(directory: Path, seed: int) -> Path:
    """Write a tiny checkpoint. Those of other seeds differ in nothing but their weights."""
    directory.mkdir()
    write_model_directory(directory)
    sizes = {"vocab_size": byte_backend().get_vocab_size(), "max_position_embeddings": 2048}
    model = LlamaForCausalLM(LlamaConfig(**{**SIZES, **sizes}))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    model.save_pretrained(directory)
    return directory


async def follow(client: GenerationClient, number: int, stream: Stream) -> None:
    """Take down a stream to its end."""
    sampling = {
        "max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0.9 * (number % 2), "seed": number,
    }  # fmt: skip
    try:
        async for event in client.generate(f"Once upon {number}", sampling, timeout_s=DEADLINE_S):
            if isinstance(event, DeltaEvent):
                stream.token_ids += event.token_ids
            elif isinstance(event, FinishedEvent):
                stream.end = event
    except TriptychError as error:
        stream.end = error


class Clients:
    """Clients of one frontend."""

    def __init__(self, client: GenerationClient) -> None:
        self.streams = [Stream() for _ in range(NUM_STREAMS)]
        self._tasks = [
            asyncio.create_task(follow(client, number, stream)) for number, stream in enumerate(self.streams)
        ]

    async def wait_begun(self) -> None:
        """Return when all have tokens."""
        async with asyncio.timeout(DEADLINE_S):
            while not all(len(stream.token_ids) >= NUM_BEGUN for stream in self.streams):
                assert not any(isinstance(stream.end, TriptychError) for stream in self.streams), self.streams
                await asyncio.sleep(0.005)

    async def wait_ended(self) -> list[Stream]:
        """Return the streams when all have ended."""
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(*self._tasks)
        return self.streams


async def wait_both_serve(ground: ProcessGround, client: GenerationClient, started: str) -> None:
    """Return when the frontend of a client gives requests to an engine that was started last."""

    async def ask(number: int) -> None:
        async for _ in client.generate(f"Once upon {number}", {"max_tokens": 8, "ignore_eos": True}):
            pass

    await ground.wait_listening(started)
    before = (await ground.status(started)).counters.num_scheduled_tokens
    async with asyncio.timeout(DEADLINE_S):
        while (await ground.status(started)).counters.num_scheduled_tokens == before:
            await asyncio.gather(*map(ask, range(4)))


async def answers_of_each(ground: ProcessGround, clients: Sequence[GenerationClient]) -> list[Answers]:
    """Return the tokens of all streams as each engine gives them while the other one is away."""
    answers = []
    for other in reversed(ENGINES):
        ground.signal(other, signal.SIGTERM)
        assert await ground.wait_ended(other) == 0
        streams = await Clients(clients[0]).wait_ended()
        assert all(isinstance(stream.end, FinishedEvent) for stream in streams), streams
        answers.append([stream.token_ids for stream in streams])
        await ground.start(other)
        for client in clients:
            await wait_both_serve(ground, client, other)
    return answers


def check_only_first_is_left(streams: Sequence[Stream], first: Answers, second: Answers) -> None:
    """Check that streams of the first fine-tune are whole, and that those of the second have ended with an error."""
    lost = [stream for stream in streams if isinstance(stream.end, TriptychError)]
    assert 0 < len(lost) < NUM_STREAMS
    for number, stream in enumerate(streams):
        if stream in lost:
            assert stream.token_ids == second[number][: len(stream.token_ids)], number
            assert "weights" in str(stream.end), stream.end
        else:
            assert stream.token_ids == first[number], number


@pytest.mark.thorough
async def test_no_stream_goes_on_with_other_weights(tmp_path: Path) -> None:
    """Streams of one fine-tune end with an error where only the other is left, and wait for it where it comes back."""
    tunes = [write_fine_tune(tmp_path / name, seed) for seed, name in enumerate(("first", "second"))]
    directory = tmp_path / "changing"
    directory.symlink_to(tunes[1])
    flags = {
        "worker": ("--simulation.enabled=false", "--worker.num-threads=1", *SHARED),
        "enginecore": SHARED,
        **{
            f"{tier}-{index}": (f"--model.model={model}",)
            for tier in ("worker", "enginecore")
            for index, model in enumerate((tunes[0], directory))
        },
        "frontend": (f"--model.model={tunes[0]}", "--frontend.routing=round_robin"),
        "frontend-0": ("--frontend.moves=any", "--frontend.move-timeout-s=1"),
    }
    async with process_ground(tmp_path, num_engines=2, num_frontends=2, **flags) as ground:
        hasty, patient = (GenerationClient(member.address) for member in ground.of_kind("frontend"))
        async with hasty, patient:
            first, second = await answers_of_each(ground, (hasty, patient))
            for one, other in zip(first, second, strict=True):
                assert one[:NUM_BEGUN] != other[:NUM_BEGUN], "they are alike"

            # An engine dies, and with it the second fine-tune.
            clients = Clients(hasty)
            await clients.wait_begun()
            ground.signal(ENGINES[1], signal.SIGKILL)
            check_only_first_is_left(await clients.wait_ended(), first, second)

            # It dies again, and comes back at once.
            await restart(ground, ENGINES[1])
            await wait_both_serve(ground, patient, ENGINES[1])
            clients = Clients(patient)
            await clients.wait_begun()
            ground.signal(ENGINES[1], signal.SIGKILL)
            await restart(ground, ENGINES[1])
            streams = await clients.wait_ended()
            assert all(isinstance(each.end, FinishedEvent) and each.end.is_exact for each in streams), streams
            assert sum(each.end.num_moves for each in streams if isinstance(each.end, FinishedEvent))
            for number, stream in enumerate(streams):
                assert stream.token_ids in (first[number], second[number]), number

            # Its worker dies, and the next one finds the first fine-tune in the second one's place.
            await wait_both_serve(ground, hasty, ENGINES[1])
            clients = Clients(hasty)
            await clients.wait_begun()
            ground.signal("worker-1", signal.SIGKILL)
            directory.unlink()
            directory.symlink_to(tunes[0])
            await restart(ground, "worker-1")
            check_only_first_is_left(await clients.wait_ended(), first, second)
            assert [stream.token_ids for stream in await Clients(patient).wait_ended()] == first


async def restart(ground: ProcessGround, name: str) -> None:
    """Start a process again that was killed."""
    await ground.wait_ended(name)
    await ground.start(name)
