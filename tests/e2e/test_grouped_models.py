"""Models whose layers keep states or windows, as processes: transformers' numbers, also when a process is killed."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.chaos.grounds.processes import process_ground
from tests.e2e.test_failover import wait_until_all_serve
from tests.e2e.test_worker_groups import DEADLINE_S, group_of_ranks, is_running, ranks_of
from tests.helpers.byte_tokenizer import byte_backend, write_model_directory
from tests.worker.models.checkpoints import save_checkpoint
from tests.worker.models.families import FAMILIES, FULL, SLIDING
from tests.worker.models.recurrent_families import RECURRENT_FAMILIES
from triptych.client.grpc_client import GenerationClient
from triptych.launcher.local_cluster import LocalCluster
from triptych.types.events import DeltaEvent, FinishedEvent
from triptych.types.sampling import SamplingParams
from triptych_kernels.cpu.library import isa

GEMMA_3, QWEN_3_MOE = FAMILIES["Gemma 3"], FAMILIES["Qwen 3 MoE"]
SIX_LAYERS = {"sliding_window": 24, "layer_types": [SLIDING, SLIDING, FULL] * 2}
MODELS = {
    **RECURRENT_FAMILIES,
    "Gemma 3": replace(
        GEMMA_3,
        arguments={**GEMMA_3.arguments, **SIX_LAYERS},
        sizes={**GEMMA_3.sizes, "num_hidden_layers": 6},
    ),
    "Qwen 3 MoE": replace(QWEN_3_MOE, arguments={**QWEN_3_MOE.arguments, "num_experts": 8}),
}
FAMILY_TO_GROUPS = {
    "Qwen3-Next": "2 KV groups share the blocks: 1 layers full, 3 layers state",
    "Falcon-H1": "2 KV groups share the blocks: 4 layers full, 4 layers state",
    "Mamba": "1 KV groups share the blocks: 4 layers state",
    "Gemma 3": "3 KV groups share the blocks: 2 layers full, 2 layers window 24, 2 layers window 24",
}
STATE_INTERVAL = 32
FLAGS = {
    "model.dtype": "float32",
    "model.quantization": "none",
    "cache.num_blocks": "400",
    "cache.state_interval": str(STATE_INTERVAL),
    "speculative.max_tokens": "4",  # as many as such short pages allow
    "scheduler.max_num_batched_tokens": "64",
    "worker.device": "cpu",
    "worker.num_threads": "1",
    "engine.drain_s": "1",
}
NUM_NEW = 400
ENOUGH = 10
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True, logprobs=0)
DRAWN = replace(GREEDY, temperature=1.0, seed=1)
REQUESTS = [
    ("Hello the world, and stop the world where it is. Go on:", GREEDY),
    ("Hello the world, and stop the world where it is. Go on:", DRAWN),
    ("Hello the world, and stop the world where it stood. Go on, go on:", DRAWN),
    ("stop", DRAWN),
]


@dataclass
class Answer:
    """The tokens of a stream so far, and their log-probabilities."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    num_moves: int = 0

    async def read(
        self, client: GenerationClient, prompt: str, sampling: SamplingParams, on_delta: Callable[[], None]
    ) -> None:
        async for event in client.generate(prompt, sampling):
            if isinstance(event, DeltaEvent):
                self.token_ids += event.token_ids
                self.logprobs += [entry.chosen.logprob for entry in event.logprobs]
                on_delta()
            elif isinstance(event, FinishedEvent):
                self.num_moves = event.num_moves


def save(family: str, directory: Path) -> Any:
    """Write a checkpoint with a tokenizer, and return transformers' model of it."""
    write_model_directory(directory)
    tiny = MODELS[family]
    sizes = {"vocab_size": byte_backend().get_vocab_size(), "max_position_embeddings": 512}
    own = {name: size for name, size in sizes.items() if name in tiny.sizes}
    return save_checkpoint(replace(tiny, sizes={**tiny.sizes, **own}).create(), directory)


async def stream_all(address: str, disturb: Callable[[], None] = lambda: None) -> list[Answer]:
    """Answer all requests at once; let something happen when some tokens of each have come."""
    answers = [Answer() for _ in REQUESTS]
    num_unfinished = 0

    def disturb_once() -> None:
        # at once, since a guessed answer of a tiny model takes some tens of ms
        nonlocal num_unfinished
        if not num_unfinished and all(len(answer.token_ids) > ENOUGH for answer in answers):
            num_unfinished = sum(len(answer.token_ids) < NUM_NEW for answer in answers)
            disturb()

    async with GenerationClient(address) as client, asyncio.timeout(DEADLINE_S):
        streams = [
            answer.read(client, *request, disturb_once)
            for answer, request in zip(answers, REQUESTS, strict=True)
        ]
        await asyncio.gather(*streams)
    assert num_unfinished, "it came too late"
    return answers


@torch.inference_mode()
def assert_equal_to_oracle(oracle: Any, answers: list[Answer]) -> None:
    """Check each token's log-probability after all before it, and that greedy ones are the likeliest."""
    for (prompt, sampling), answer in zip(REQUESTS, answers, strict=True):
        assert len(answer.token_ids) == len(answer.logprobs) == NUM_NEW
        token_ids = byte_backend().encode(prompt).ids + answer.token_ids
        logprobs = oracle(torch.tensor([token_ids[:-1]])).logits[0, -NUM_NEW:].log_softmax(1)
        chosen = logprobs.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
        # float32 through some layers, logits of size 10; sums in another order
        torch.testing.assert_close(torch.tensor(answer.logprobs), chosen, rtol=1e-3, atol=1e-3)
        if sampling == GREEDY:
            assert (logprobs.amax(1) - chosen).max() < 1e-3


async def num_cached(stack: LocalCluster, prompt: str) -> int:
    """Return how many tokens of a prompt need not be computed."""
    async with GenerationClient(stack.address) as client, asyncio.timeout(DEADLINE_S):
        async for event in client.generate(prompt, replace(GREEDY, max_tokens=1)):
            if isinstance(event, FinishedEvent):
                return event.usage.num_cached_tokens
    raise AssertionError("the stream ended before its end")


def chosen_experts(stack: LocalCluster) -> dict[int, float]:
    """Return how often each expert was chosen, as the worker's metrics say it."""
    text = page_of_worker(stack, "/metrics").decode()
    found = re.findall(r'^triptych_worker_expert_choices_total{expert="(\d+)"} (\S+)$', text, re.MULTILINE)
    return {int(expert): float(count) for expert, count in found}


def page_of_worker(stack: LocalCluster, path: str) -> bytes:
    url = f"http://127.0.0.1:{stack.config.worker.metrics_port}{path}"
    with urllib.request.urlopen(url, timeout=DEADLINE_S) as answer:
        content: bytes = answer.read()
    return content


CASES = [
    ("Qwen3-Next", "worker"),
    ("Qwen3-Next", "enginecore"),
    ("Falcon-H1", "worker"),
    ("Mamba", "worker"),
    ("Gemma 3", "worker"),
    ("Gemma 3", "enginecore"),
]


@pytest.mark.thorough
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("family", "victim"), CASES)
async def test_a_killed_process_changes_no_token_of_transformers(
    family: str, victim: str, tmp_path: Path
) -> None:
    oracle = save(family, tmp_path)
    with group_of_ranks(**FLAGS, **{"model.model": str(tmp_path)}) as (stack, lines):
        assert any(FAMILY_TO_GROUPS[family] in line for line in lines)
        expected = await stream_all(stack.address)
        assert_equal_to_oracle(oracle, expected)
        assert await num_cached(stack, REQUESTS[0][0]) >= STATE_INTERVAL
        if isa():
            num_experts = MODELS[family].arguments.get("num_experts", 0)
            counts = chosen_experts(stack)
            assert list(counts) == list(range(num_experts))
            assert not counts or sum(counts.values()) > 2 * 3 * NUM_NEW * len(REQUESTS), (
                "two, in three layers"
            )
        pid = stack.pids[victim]
        answers = await stream_all(stack.address, partial(os.kill, pid, signal.SIGKILL))
        assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]
        assert_equal_to_oracle(oracle, answers)
        assert stack.pids[victim] != pid


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["Qwen3-Next", "Falcon-H1", "Mamba"])
async def test_a_killed_stage_changes_no_token_of_transformers(family: str, tmp_path: Path) -> None:
    oracle = save(family, tmp_path)
    flags = {**FLAGS, "model.model": str(tmp_path), "parallel.pipeline_parallel_size": "2"}
    with group_of_ranks(**flags) as (stack, _):
        expected = await stream_all(stack.address)
        assert_equal_to_oracle(oracle, expected)
        prompt = "Hello the world, and stop the world where it is. " * 2
        expected_hit = len(byte_backend().encode(prompt).ids[:-1]) // 16 * 16
        assert expected_hit % STATE_INTERVAL, "within a page"
        assert [await num_cached(stack, prompt) for _ in range(2)][1] == expected_hit
        ranks = ranks_of(stack)
        answers = await stream_all(stack.address, partial(os.kill, ranks["worker/1"], signal.SIGKILL))
        assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]
        assert_equal_to_oracle(oracle, answers)
        assert not any(map(is_running, ranks.values())), "the end of any stage is that of all"


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["Qwen3-Next", "Falcon-H1", "Gemma 3"])
async def test_a_move_to_another_engine_changes_no_token_of_transformers(family: str, tmp_path: Path) -> None:
    """An engine is killed under its streams, and one is drained: the other goes on with them."""
    oracle = save(family, tmp_path)
    flags = {**FLAGS, "model.model": str(tmp_path), "model.batch_invariant": "true", "engine.drain_s": "0"}
    own = tuple(f"--{name.replace('_', '-')}={text}" for name, text in flags.items())
    options = {"worker": ("--simulation.enabled=false", *own), "enginecore": own, "frontend": own}
    async with process_ground(tmp_path, num_engines=2, **options) as ground:
        await wait_until_all_serve(ground)
        address = ground.of_kind("frontend")[0].address
        expected = await stream_all(address)
        assert_equal_to_oracle(oracle, expected)
        for number in (signal.SIGKILL, signal.SIGTERM):
            num_moves = 0
            for victim in ("enginecore-0", "enginecore-1"):  # one of them has streams
                answers = await stream_all(address, partial(ground.signal, victim, number))
                assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]
                assert_equal_to_oracle(oracle, answers)
                await ground.wait_ended(victim)
                await ground.start(victim)
                await wait_until_all_serve(ground)
                if num_moves := sum(answer.num_moves for answer in answers):
                    break
            assert num_moves


@pytest.mark.thorough
@pytest.mark.skipif(not isa(), reason="without native kernels choices are not counted")
async def test_counts_of_a_run_place_the_experts_of_the_next(tmp_path: Path) -> None:
    oracle, path = save("Qwen 3 MoE", tmp_path), tmp_path / "counts.json"
    ranks = {"parallel.tensor_parallel_size": "2", "parallel.expert_parallel": "true"}
    flags = {**FLAGS, **ranks, "model.model": str(tmp_path)}
    with group_of_ranks(**flags) as (stack, _):
        with pytest.raises(urllib.error.HTTPError, match="503"):  # what warms up is not counted
            page_of_worker(stack, "/expert_counts")
        total = -sum(chosen_experts(stack).values())
        assert_equal_to_oracle(oracle, await stream_all(stack.address))
        path.write_bytes(page_of_worker(stack, "/expert_counts"))
        total += sum(chosen_experts(stack).values())
    layers = json.loads(path.read_text())["layers"]
    assert list(layers) == ["0", "2", "3"], "layer 1 is dense"
    assert sum(map(sum, layers.values())) == total
    with group_of_ranks(**flags, **{"parallel.expert_counts": str(path)}) as (stack, lines):
        assert_equal_to_oracle(oracle, await stream_all(stack.address))
        found = [
            re.search(r"the busiest of 2 ranks has (\S+) times .* would have (\S+) times", line)
            for line in lines
        ]
        placed, neighbours = next(map(float, match.groups()) for match in found if match)
        assert 1 <= placed < neighbours
