"""Prompts that are pulled beside short streams, with real weights: every answer is that of its request alone.

REQUESTS=2000 python -m pytest -n0 -s tests/wire/test_kv_transfers_real.py       so many of them

Nothing is replaced or slowed: two engines with a CPU worker each in this process, and real sockets. Blocks of streams
that end are given to pulls while the streams' last steps are in flight.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.helpers.kv_stack import KvStack, kv_stack
from tests.helpers.stack import FakeFrontend
from tests.worker.models.checkpoints import save_checkpoint
from tests.worker.models.families import FAMILIES, Tiny
from tests.worker.models.recurrent_families import RECURRENT_FAMILIES
from triptych.checkpoint.config_json import read_architecture
from triptych.config import CacheConfig, EngineConfig, ModelConfig, WorkerConfig
from triptych.types.kv_transfer import KvSource
from triptych_services.worker.context.device import resolve_config
from triptych_services.worker.kv_transfer import socket_pull, socket_server
from triptych_services.worker.runner.startup.create import create_runner

NUM_REQUESTS = int(os.environ.get("REQUESTS", "200"))
NUM_CLIENTS = 12
VOCAB_SIZE = 997
PATIENT_S = 120.0
"""For blocks to come and to be fetched, however busy the machine is."""


@dataclass(frozen=True)
class Answered:
    """A request, and the tokens that came of it under load."""

    prompt: list[int]
    sampling: dict[str, Any]
    is_pulled: bool
    tokens: list[int]


LARGER = {"max_position_embeddings": 512, "vocab_size": VOCAB_SIZE}
MODELS = {
    "Llama": replace(  # large enough for steps of some milliseconds
        FAMILIES["Llama"],
        arguments={
            **LARGER,
            "hidden_size": 256,
            "intermediate_size": 768,
            "num_hidden_layers": 6,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        },
    ),
    **{
        name: replace(tiny, arguments={**tiny.arguments, **LARGER})
        for name, tiny in {**FAMILIES, **RECURRENT_FAMILIES}.items()
        if name in ("DeepSeek V3.2", "Gemma 3", "Qwen3-Next", "Falcon-H1")  # latent, windows, states
    },
    "Mamba 2": replace(  # states alone
        RECURRENT_FAMILIES["Mamba 2"],
        arguments={**RECURRENT_FAMILIES["Mamba 2"].arguments, "vocab_size": VOCAB_SIZE},
    ),
}


@pytest.fixture(scope="module")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Directory of a model by its name, made once."""

    @cache
    def save(name: str) -> Path:
        directory = tmp_path_factory.mktemp("model")
        tiny: Tiny = MODELS[name]
        save_checkpoint(tiny.create(), directory)
        return directory

    return save


class Clients:
    """Twelve clients that send one request after the other; every third one has its prompts computed elsewhere."""

    def __init__(self, stack: KvStack) -> None:
        self._stack = stack
        self._random = Random(1)
        self._last_number = 0
        self._writes = asyncio.Lock()  # one write at a time on a stream
        self.answered: list[Answered] = []

    async def run(self, num_requests: int) -> None:
        async def one_client(index: int) -> None:
            while self._last_number < num_requests:
                await self._ask(is_pulled=index % 3 == 0)

        await asyncio.gather(*(one_client(index) for index in range(NUM_CLIENTS)))

    async def answer_alone(self, request: Answered) -> list[int]:
        """Return the tokens of a request that the engine which prefills computes by itself."""
        return await self._finish(self._stack.prefill, self._number(), request.prompt, request.sampling)

    def _number(self) -> int:
        self._last_number += 1
        return self._last_number

    async def _ask(self, *, is_pulled: bool) -> None:
        number, random = self._number(), self._random
        length = random.randrange(33, 80) if is_pulled else random.randrange(5, 30)
        prompt = [random.randrange(3, VOCAB_SIZE) for _ in range(length)]
        sampling = {"max_tokens": random.randrange(2, 12), "temperature": 0.0, "ignore_eos": True}
        fields = {}
        if is_pulled:
            lease = number.to_bytes(16, "little")
            first = {"max_tokens": 1, "temperature": 0.0}
            await self._finish(self._stack.prefill, number, prompt, first, kv_lease=lease)
            fields["kv_source"] = KvSource(self._stack.prefill_worker.endpoint, lease, PATIENT_S)
        tokens = await self._finish(self._stack.decode, number, prompt, sampling, **fields)
        self.answered.append(Answered(prompt, sampling, is_pulled, tokens))

    async def _finish(
        self, frontend: FakeFrontend, number: int, prompt: list[int], sampling: dict[str, Any], **fields: Any
    ) -> list[int]:
        async with self._writes:
            await frontend.submit(number, prompt, sampling=sampling, seed=1, **fields)
        await frontend.wait_for(lambda: number in frontend.ends)
        return frontend.tokens.pop(number, [])


@pytest.mark.thorough
@pytest.mark.parametrize("name", MODELS)
async def test_pulls_beside_streams_that_end_change_no_answer(
    name: str, checkpoint_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = checkpoint_of(name)
    monkeypatch.setattr(socket_pull, "SILENCE_S", PATIENT_S)
    monkeypatch.setattr(socket_server, "SILENCE_S", PATIENT_S)
    monkeypatch.setattr(socket_server, "REQUEST_S", PATIENT_S)

    def make_runner(config: EngineConfig, num_blocks: int) -> Any:
        own = replace(
            config,
            model=ModelConfig(model="somewhere/tiny", dtype="float32"),
            cache=CacheConfig(block_size=16, num_blocks=num_blocks),
            worker=WorkerConfig(device="cpu", num_threads=1, kv_transfer=True, kv_transfer_port=0),
        )
        resolved = resolve_config(own, read_architecture(checkpoint))
        return create_runner(resolved, checkpoint, boot_id="b", on_phase=lambda phase, progress: None)

    sizes = {"max_num_batched_tokens": 256, "max_num_seqs": 8}
    async with kv_stack(200, lease_s=PATIENT_S, make_runner=make_runner, **sizes) as stack:
        clients = Clients(stack)
        await clients.run(NUM_REQUESTS)
        num_pulled = sum(request.is_pulled for request in clients.answered)
        transfers = stack.decode_engine.loop._engine.scheduler.transfers
        assert transfers is not None
        num_blocks, num_failed = transfers.counts.num_in_blocks, transfers.counts.num_in_failed
        wrong = [
            f"{'pulled prompt' if request.is_pulled else 'short stream'} of {len(request.prompt)}: "
            f"{request.tokens}, alone {alone}"
            for request in clients.answered
            if (alone := await clients.answer_alone(request)) != request.tokens
        ]
    print(
        f"{name}: {len(clients.answered)} requests, {num_pulled} with pulled prompts, {num_blocks} blocks pulled: "
        f"{len(wrong)} wrong answers"
    )
    assert not wrong, "\n".join(wrong)
    assert num_blocks >= num_pulled, "every pulled prompt has two whole blocks at least, or a page"
    assert not num_failed
