"""Guesses change no token and no log-probability, whatever they are and whatever the rows ask for."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch

from tests.worker.runner.drafting.guessing import Said, blocks_of, changes, replaying, runner_with, say
from tests.worker.sampling_kinds import KINDS
from tests.worker.tiny import EchoModel, new_row, tiny_architecture, tiny_config
from triptych.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, WorkerConfig
from triptych.types.sampling import SamplingParams
from triptych.types.step import NewRow
from triptych_kernels.cpu.library import isa
from triptych_services.worker.context.device import resolve_config
from triptych_services.worker.context.resolved_config import ResolvedConfig
from triptych_services.worker.loader.load import load_model
from triptych_services.worker.loader.random import RandomCheckpoint

VOCAB, NUM_NEW = 97, 13
CHANGES = tuple(changes(Random(0), VOCAB))
needs_kernels = pytest.mark.skipif(not isa(), reason="no native kernels are built for this processor")


def rows_of(kinds: dict[str, SamplingParams]) -> list[NewRow]:
    random = Random(7)
    return [
        new_row(
            slot,
            [random.randrange(3, VOCAB) for _ in range(5 + slot)],
            blocks_of(slot),
            sampling=sampling,
            seed=100 + slot,
        )
        for slot, sampling in enumerate(kinds.values())
    ]


def known_of(said: list[Said]) -> dict[int, list[int]]:
    return {100 + slot: each.token_ids for slot, each in enumerate(said)}


def assert_same(found: list[Said], expected: list[Said]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert replace(one, num_steps=0) == replace(other, num_steps=0)


def config_of(dtype: str, quantization: str, cache: str = "auto") -> ResolvedConfig:
    architecture = tiny_architecture(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_position_embeddings=128,
    )
    engine = EngineConfig(
        model=ModelConfig(dtype=dtype, quantization=quantization, batch_invariant="true"),
        cache=CacheConfig(block_size=4, num_blocks=90, dtype=cache),
        scheduler=SchedulerConfig(max_num_seqs=7, max_num_batched_tokens=64),
        worker=WorkerConfig(device="cpu"),
    )
    return resolve_config(engine, architecture)


@needs_kernels
@pytest.mark.parametrize(
    ("dtype", "quantization", "cache"),
    [
        ("float32", "none", "auto"),
        pytest.param("float32", "none", "int8", marks=pytest.mark.thorough),
        pytest.param("bfloat16", "none", "auto", marks=pytest.mark.thorough),
        ("bfloat16", "q4", "auto"),
        pytest.param("bfloat16", "q4", "int8", marks=pytest.mark.thorough),
        pytest.param("float32", "q8", "auto", marks=pytest.mark.thorough),
    ],
)
def test_recorded_programs_say_the_same(dtype: str, quantization: str, cache: str) -> None:
    config = config_of(dtype, quantization, cache)
    model = load_model(config, RandomCheckpoint(config.architecture, seed=3))
    rows = rows_of(KINDS)
    alone = runner_with(model, config, 1)
    expected = say(alone, rows, NUM_NEW, 1)
    assert alone.recorded() is not None
    assert not any(each.error for each in expected)
    for name, change in changes(Random(1), VOCAB).items():
        runner = runner_with(model, config, 5, replaying(known_of(expected), change))
        found = say(runner, rows, NUM_NEW, 5)
        assert_same(found, expected)
        if name == "right":  # 13 tokens in steps of 5, 5 and 3
            assert [each.num_steps for each in found] == [3] * len(rows)
        if name == "wrong":
            assert [each.num_steps for each in found] == [NUM_NEW] * len(rows)
    assert_same(say(runner_with(model, config, 5), rows, NUM_NEW, 5), expected)  # the n-gram proposer
