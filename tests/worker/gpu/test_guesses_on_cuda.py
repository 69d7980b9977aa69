"""Guesses on the device: they change no token, and replay the graphs of decodes.

Weights are quantized: products with others are cuBLAS's, whose sums follow the number of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch

from tests.gpu.test_models import SHAPES
from tests.worker.runner.drafting.guessing import (
    BLOCKS_PER_ROW,
    Said,
    blocks_of,
    changes,
    guess_at_all_costs,
    replaying,
    say,
)
from tests.worker.sampling_kinds import KINDS
from tests.worker.tiny import new_row, step_plan, tiny_facts
from triptych.checkpoint.config_json import read_architecture
from triptych.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, WorkerConfig
from triptych.types.sampling import SamplingParams
from triptych.types.step import NewRow
from triptych_services.worker.context.device import resolve_config
from triptych_services.worker.context.resolved_config import ResolvedConfig
from triptych_services.worker.loader.load import load_model, open_checkpoint
from triptych_services.worker.models.base import CausalLM
from triptych_services.worker.runner.cuda.streams import CudaStream
from triptych_services.worker.runner.drafting.create import CreateProposers
from triptych_services.worker.runner.drafting.speculation import Speculation
from triptych_services.worker.runner.model_runner import LastingParts, ModelRunner
from triptych_services.worker.runner.startup.kv_cache import allocate_kv_cache
from triptych_services.worker.runner.startup.kv_plan import plan_kv_cache

VOCAB, NUM_NEW, LIMIT = 1009, 40, 5
SAMPLING = {**KINDS, "seeded": SamplingParams(temperature=0.8, frequency_penalty=0.7, logprobs=2)}


@pytest.fixture(params=["q8", "int8"])
def loaded(
    device: torch.device, tmp_path: Path, request: pytest.FixtureRequest
) -> tuple[ResolvedConfig, CausalLM]:
    SHAPES["groups of 3, heads of 64, tied"]().save_pretrained(tmp_path)
    engine = EngineConfig(
        model=ModelConfig(dtype="bfloat16", quantization=request.param, batch_invariant="true"),
        cache=CacheConfig(num_blocks=1 + BLOCKS_PER_ROW * len(SAMPLING)),
        scheduler=SchedulerConfig(max_num_seqs=len(SAMPLING), max_num_batched_tokens=128),
        worker=WorkerConfig(device=device.type),
    )
    config = resolve_config(engine, read_architecture(tmp_path))
    checkpoint = open_checkpoint(
        tmp_path, format="auto", seed=0, device=device, architecture=config.architecture
    )
    return config, load_model(config, checkpoint)


def runner_of(
    loaded: tuple[ResolvedConfig, CausalLM], limit: int, proposers: CreateProposers | None = None
) -> ModelRunner:
    config, model = loaded
    device = torch.device(config.rank.device)
    kv = plan_kv_cache(config, free_bytes=1 << 30)
    runner = ModelRunner(
        model=model,
        kv_caches=allocate_kv_cache(kv.shape, device, kv.places),
        facts=tiny_facts(config, kv.max_model_len, kv.shape, max_samples_per_row=limit),
        stream=CudaStream(device),
        lasting=LastingParts(proposers=proposers),
    )
    if isinstance(runner._speculation, Speculation):
        guess_at_all_costs(runner._speculation, limit - 1)
    runner.capture_graphs(lambda progress: None)
    return runner


def rows() -> list[NewRow]:
    random = Random(7)
    return [
        new_row(
            slot,
            [random.randrange(3, VOCAB) for _ in range(5 + slot)],
            blocks_of(slot),
            sampling=sampling,
            seed=100 + slot,
        )
        for slot, sampling in enumerate(SAMPLING.values())
    ]


def assert_same(found: Sequence[Said], expected: Sequence[Said]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert replace(one, num_steps=0) == replace(other, num_steps=0)


def test_tokens_and_logprobs_are_those_without_guesses(loaded) -> None:
    expected = say(runner_of(loaded, 1), rows(), NUM_NEW, 1)
    assert not any(each.error for each in expected)
    known = {100 + slot: each.token_ids for slot, each in enumerate(expected)}
    for name, change in changes(Random(1), VOCAB).items():
        runner = runner_of(loaded, LIMIT, replaying(known, change))
        assert runner.facts.kernels == "triton graphs"
        found = say(runner, rows(), NUM_NEW, LIMIT)
        assert_same(found, expected)
        if name == "right":
            assert [each.num_steps for each in found] == [NUM_NEW // LIMIT] * len(found)


def test_steps_without_guesses_are_launched_ahead_around_one_with_some(loaded) -> None:
    (expected,) = say(runner_of(loaded, 1), rows()[:1], 20, 1)
    runner = runner_of(loaded, LIMIT, replaying({100: expected.token_ids}, lambda ids: ids))
    runner.reset()
    row = rows()[0]
    tokens: list[int] = []
    pending = [runner.launch(step_plan(1, new=[row], chunks={0: row.num_known_tokens}))]
    pending += [runner.launch(step_plan(step_id)) for step_id in (2, 3)]
    pending.append(runner.launch(step_plan(4, limits={0: LIMIT})))
    torch.cuda._sleep(1_000_000_000)
    plain = [runner.launch(step_plan(step_id)) for step_id in (5, 6)]
    assert not any(step.is_done() for step in plain)
    for step in pending + plain:
        tokens += step.wait().token_ids.tolist()
    assert tokens == expected.token_ids[: len(tokens)]
    assert len(tokens) == 5 + LIMIT
