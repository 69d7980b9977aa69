"""Steps of models with several KV groups, through hand-made plans: the tokens are those of transformers."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.worker.grouped_blocks import HandEngine, Request
from tests.worker.models.checkpoints import greedy_tokens, random_prompts, save_checkpoint
from tests.worker.models.families import FAMILIES
from tests.worker.tiny import tiny_config, tiny_facts
from triptych.checkpoint.config_json import read_architecture
from triptych.types.facts import KvKind
from triptych_services.worker.context.device import use_threads
from triptych_services.worker.context.resolved_config import ResolvedConfig
from triptych_services.worker.loader.load import load_model, open_checkpoint
from triptych_services.worker.runner.model_runner import ModelRunner
from triptych_services.worker.runner.startup.kv_cache import allocate_kv_cache
from triptych_services.worker.runner.startup.kv_plan import plan_kv_cache

NUM_GROUPS = {
    "Gemma 3": 4, "Mistral": 1, "Gemma 2": 2, "GPT-OSS": 2, "Ministral": 2, "Cohere 2": 4, "OLMo 3": 4, "EXAONE 4": 4,
    "Qwen 2, windows": 2,
}  # fmt: skip
"""By family: groups of its tiny checkpoint of four layers."""
NUM_NEW = 21
"""Beyond three windows, so that a decode alone crosses several."""


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(directory, model of transformers) of a family by its name, made once."""

    @cache
    def save(name: str) -> tuple[Path, Any]:
        directory = tmp_path_factory.mktemp("family")
        return directory, save_checkpoint(FAMILIES[name].create(), directory)

    return save


def grouped_config(directory: Path, groups: str = "auto") -> ResolvedConfig:
    config = tiny_config(read_architecture(directory), max_num_seqs=8, num_blocks=300)
    cache = replace(config.engine.cache, groups=groups)
    return replace(config, engine=replace(config.engine, cache=cache))


def engine_of(directory: Path, *, enforce_eager: bool = False, groups: str = "auto") -> HandEngine:
    use_threads(1)  # several wait for each other on a busy machine
    config = grouped_config(directory, groups)
    model = load_model(config, open_checkpoint(directory))
    assert isinstance(model, nn.Module)
    kv = plan_kv_cache(config, free_bytes=1 << 30)
    kv_caches = allocate_kv_cache(kv.shape, torch.device("cpu"), kv.places)
    for layer in kv_caches:
        layer.blocks[1:] = float("nan")
    runner = ModelRunner(
        model=model,
        kv_caches=kv_caches,
        facts=tiny_facts(config, kv.max_model_len, kv.shape),
        enforce_eager=enforce_eager,
    )
    return HandEngine(runner, kv_caches)


def run(engine: HandEngine, chunk: int) -> None:
    """Compute until all is done: prompts in chunks, beside decodes."""
    while slots := engine.slots():
        engine.step({slot: min(engine.remaining(slot), chunk) for slot in slots})


def assert_tokens(oracle: Any, *requests: Request) -> None:
    for request in requests:
        assert request.generated == greedy_tokens(oracle, request.prompt, request.num_new)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", NUM_GROUPS)
def test_groups_keep_what_their_queries_see(name: str, saved: Any) -> None:
    directory, oracle = saved(name)
    engine = engine_of(directory)
    assert len(engine.groups) == NUM_GROUPS[name]
    assert engine.groups[-1].kind is KvKind.WINDOW
    requests = [Request(prompt, NUM_NEW) for prompt in random_prompts(1, 5, 23, 40)]
    for slot, request in enumerate(requests):
        engine.add(slot, request, min(len(request.prompt), 7))
    engine.step({slot: min(len(request.prompt), 7) for slot, request in enumerate(requests)})
    run(engine, chunk=7)
    assert_tokens(oracle, *requests)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", NUM_GROUPS)
def test_rows_that_enter_behind_a_prefix_or_again(name: str, saved: Any) -> None:
    directory, oracle = saved(name)
    engine = engine_of(directory)
    (prompt, other_prompt) = random_prompts(37, 18)
    first, second, third = Request(prompt, NUM_NEW), Request(prompt, NUM_NEW), Request(other_prompt, NUM_NEW)
    engine.add(0, first, 16)
    engine.add(3, third, 18)
    engine.step({0: 16, 3: 18})
    engine.add(5, second, 21, shares=0)  # 16 tokens are there, in windows the last ones only
    engine.step({0: 5, 3: 1, 5: 21})
    for _ in range(9):
        engine.step({slot: min(engine.remaining(slot), 5) for slot in engine.slots()})
    preempted = engine.remove(3)
    engine.step({slot: min(engine.remaining(slot), 5) for slot in engine.slots()})
    engine.add(3, preempted, 11)
    engine.step({0: min(engine.remaining(0), 5), 3: 11})
    run(engine, chunk=6)
    assert_tokens(oracle, first, second, third)


@pytest.mark.thorough
def test_whole_prompts_and_operations_one_by_one(saved: Any) -> None:
    directory, oracle = saved("Gemma 3")
    engine = engine_of(directory, enforce_eager=True)
    requests = [Request(prompt, NUM_NEW) for prompt in random_prompts(1, 5, 23)]
    for slot, request in enumerate(requests):
        engine.add(slot, request, len(request.prompt))
    engine.step({slot: len(request.prompt) for slot, request in enumerate(requests)})
    run(engine, chunk=64)
    assert_tokens(oracle, *requests)


def test_windows_hold_fewer_blocks(saved: Any) -> None:
    directory, _ = saved("Gemma 3")
    held = {}
    for groups in ("auto", "one"):
        engine = engine_of(directory, groups=groups)
        request = Request(random_prompts(40)[0], 4)
        engine.add(0, request, 4)
        engine.step({0: 4})
        run(engine, chunk=4)
        held[groups] = engine.most_held
    # blocks of one layer: 11 of the full layer, and for each of three windows of 6 two after each step
    assert held == {"auto": 11 + 3 * 2, "one": 11}
