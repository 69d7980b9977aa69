"""Adapters of a worker that starts from a stored program: the tokens of peft, before and after torch takes over."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.worker.adapters.trained import BLOCK_SIZE, merged, save_adapter, save_base
from tests.worker.models.checkpoints import greedy_tokens
from tests.worker.runner.stored_start import config_of, start
from tests.worker.runner.test_stored_program import in_process_without_torch, leave_program
from tests.worker.tiny import new_row, step_plan
from triptych.types.sampling import SamplingParams
from triptych.types.step import StepPlan
from triptych_kernels.cpu.library import isa
from triptych_services.worker.context.machine import machine_directory
from triptych_services.worker.runner.base import ServesAdapters
from triptych_services.worker.runner.stored.runner import StoredRunner

pytestmark = pytest.mark.skipif(not isa(), reason="programs are recorded for the native kernels")

EVERYWHERE = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PROMPTS = [[5, 9, 31, 44, 7], [60, 61, 62, 63, 64, 65, 66], [8, 90, 17]]
FLAGS: dict[str, Any] = {
    "model.model": "somewhere/tiny",
    "model.dtype": "float32",
    "model.quantization": "none",
    "cache.block_size": BLOCK_SIZE,
    "cache.num_blocks": 65,
    "scheduler.max_num_seqs": 5,
    "scheduler.max_num_batched_tokens": 32,
    "worker.device": "cpu",
    "worker.num_threads": 1,
    "worker.max_adapters": 2,
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("adapters")
    ends = {"target_modules": [*EVERYWHERE, "embed_tokens", "lm_head"]}
    kinds: list[dict[str, Any]] = [{}, ends, {"target_modules": ["q_proj", "down_proj"], "r": 3}]
    return [save_adapter(base, root / str(n), seed=n, **kind) for n, kind in enumerate(kinds)]


@pytest.fixture
def runner(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StoredRunner:
    """A worker's runner, started from the program that an ordinary start has left."""
    own, known = tmp_path / "machine", machine_directory()
    own.mkdir()
    for file in known.glob("*.json"):  # else each test measures the machine
        shutil.copy(file, own)
    monkeypatch.setenv("TRIPTYCH_MACHINE_DIR", str(own))
    config = config_of(FLAGS)
    leave_program(config, base)
    runner = start(config, base)
    assert isinstance(runner, StoredRunner)
    return runner


def load(runner: StoredRunner, paths: Sequence[Path]) -> list[str]:
    assert isinstance(runner, ServesAdapters)
    return [runner.adapters.load(path.name, "", path).digest for path in paths]


def entering(digests: Sequence[str]) -> StepPlan:
    """Return the first step of PROMPTS, each with an adapter."""
    rows = [
        new_row(slot, prompt, range(1 + 8 * slot, 9 + 8 * slot), adapter=digest)
        for slot, (prompt, digest) in enumerate(zip(PROMPTS, digests, strict=False))
    ]
    return step_plan(1, new=rows, chunks={slot: len(PROMPTS[slot]) for slot in range(len(rows))})


def say(runner: StoredRunner, plans: Sequence[StepPlan]) -> list[list[int]]:
    results = [runner.execute(plan) for plan in plans]
    assert not any(result.row_errors for result in results)
    return [list(tokens) for tokens in zip(*(result.token_ids.tolist() for result in results), strict=True)]


def later(first: int, last: int) -> list[StepPlan]:
    return [step_plan(step_id) for step_id in range(first, last + 1)]


def test_rows_with_adapters_have_the_tokens_of_merged_models(runner, base, adapters):
    digests = load(runner, adapters)
    for chosen in ([0, 1], [2, 1], [0, 2]):  # three adapters take turns in two slots
        runner.reset()
        said = say(runner, [entering([digests[chosen[0]], "", digests[chosen[1]]]), *later(2, 12)])
        models = [merged(base, adapters[chosen[0]]), merged(base, None), merged(base, adapters[chosen[1]])]
        assert said == [
            greedy_tokens(model, prompt, 12) for model, prompt in zip(models, PROMPTS, strict=True)
        ]
    assert not runner.has_resumed


def test_rows_keep_their_adapters_when_torch_takes_over(runner, base, adapters):
    first, second, third = load(runner, adapters)
    runner.reset()
    said = say(runner, [entering([first, "", second]), *later(2, 5)])
    runner.adapters.unload(first)  # its row goes on
    asks = SamplingParams(temperature=0.0, logprobs=1)
    refused = new_row(3, PROMPTS[0], range(30, 38), sampling=asks, adapter=third)
    assert runner.execute(step_plan(6, new=[refused], chunks={3: 5})).row_errors  # rows have both slots
    assert runner.has_resumed
    said = [one + more for one, more in zip(said, say(runner, later(7, 12)), strict=False)]
    models = [merged(base, path) for path in (adapters[0], None, adapters[1])]
    for tokens, model, prompt in zip(said, models, PROMPTS, strict=True):
        expected = greedy_tokens(model, prompt, 12)
        assert tokens == expected[:5] + expected[6:]
    row = new_row(0, PROMPTS[0], range(1, 9), slot_version=2, adapter=third)
    result = runner.execute(step_plan(13, removed=[0, 1, 2, 3], new=[row], chunks={0: 5}))
    assert result.token_ids.tolist() == greedy_tokens(merged(base, adapters[2]), PROMPTS[0], 1)
    assert [facts.digest for facts in runner.adapters.list()] == [second, third]


@pytest.mark.thorough
def test_it_starts_without_torch_and_refuses_what_is_not_loaded(runner, base):
    found = in_process_without_torch(FLAGS, base)
    assert not found["has_torch"]
    assert len(found["tokens"]) == 3
    runner.reset()
    result = runner.execute(entering(["0" * 64]))
    assert "none is loaded yet" in next(iter(result.row_errors.values())).message
