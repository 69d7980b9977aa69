"""Steps that are launched ahead over several stages, as an engine plans them, say what one process says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.in_process import InProcessEngine
from tests.worker.models import checkpoints
from tests.worker.models.families import FAMILIES, WINDOW
from tests.worker.models.recurrent_families import RECURRENT_FAMILIES
from tests.worker.parallel.test_pipeline_parallel import SIZES
from tests.worker.pooled import save_decoder
from tests.worker.ranks import save_checkpoint
from tests.worker.runner.stages_in_threads import StagesInThreads, create_stages
from tests.worker.sampling_kinds import KINDS
from tests.worker.tiny import new_row, step_plan
from triptych.types.facts import KvKind
from triptych.types.pooling import PoolingKind, PoolingParams, Task
from triptych.types.sampling import SamplingParams
from triptych.types.step import StepPlan, StepResult
from triptych_services.worker.runner.base import PendingStep, do_nothing
from triptych_services.worker.runner.model_runner import ModelRunner

NUM_TOKENS = 24
PAGE = 16
"""Tokens of a page of states."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = SIZES | {"tie_word_embeddings": True, "eos_token_id": 96}
    return save_checkpoint(tmp_path_factory.mktemp("model"), sizes)


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(2)
    return [rng.integers(3, 90, length).tolist() for length in (1, 30, 7, 4, 18, 11, 2, 25, 9, 5, 16)]


def generate(runner: ModelRunner | StagesInThreads, num_stages: int, **options: int) -> list[list[int]]:
    """Generate with more requests than rows, and so few blocks that some are preempted."""
    engine = InProcessEngine(
        runner, steps_in_flight=num_stages + 1, max_num_seqs=8, max_num_batched_tokens=48, **options
    )
    sampling = SamplingParams(temperature=0.8, max_tokens=NUM_TOKENS, ignore_eos=True)
    tokens = engine.generate(prompts(), sampling)
    assert engine.scheduler.counters.num_preemptions > 0
    return tokens


@pytest.mark.parametrize("num_stages", [2, 3, 5])
def test_overlapped_steps_say_what_one_process_says(model: Path, num_stages: int) -> None:
    (alone,) = create_stages(model, 1)
    stages = StagesInThreads(create_stages(model, num_stages))
    expected = generate(alone, 1)
    assert len({token for tokens in expected for token in tokens}) > 10, "the model does say something"
    assert generate(stages, num_stages) == expected
    assert generate(stages, num_stages) == expected, "after a reset"
    stages.close()


@pytest.mark.thorough
def test_stages_have_the_groups_of_the_whole_model(tmp_path: Path) -> None:
    checkpoints.save_checkpoint(FAMILIES["Gemma 2"].create(), tmp_path)
    (alone,) = create_stages(tmp_path, 1, num_blocks=80)
    runners = create_stages(tmp_path, 2, num_blocks=80)
    layouts = [
        [(group.kind, group.window) for group in runner.facts.kv.groups] for runner in (alone, *runners)
    ]
    assert layouts == [[(KvKind.FULL, 0), (KvKind.WINDOW, WINDOW)]] * 3
    stages = StagesInThreads(runners)
    assert generate(stages, 2) == generate(alone, 1)
    stages.close()


class StagesThatGoOn(StagesInThreads):
    """Counts rows that leave a page of states within it, and rows that enter there."""

    num_leaving = 0
    num_entering = 0

    def launch(self, plan: StepPlan, on_prepared: Callable[[], None] = do_nothing) -> PendingStep:
        self.num_leaving += plan.state_slots.size
        self.num_entering += sum(row.num_computed_tokens % PAGE != 0 for row in plan.new_rows)
        return super().launch(plan, on_prepared)


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["Qwen3-Next", "Falcon-H1", "Mamba", "Jamba", "Nemotron-H"])
def test_states_go_on_from_snapshots_in_all_stages(family: str, tmp_path: Path) -> None:
    """Steps are launched ahead, some rows are preempted, and what is asked again begins at the end of its prompt."""
    oracle = checkpoints.save_checkpoint(RECURRENT_FAMILIES[family].create(), tmp_path)
    stages = StagesThatGoOn(create_stages(tmp_path, 2, num_blocks=30, state_interval=PAGE))
    has_keys = any(group.kind is KvKind.FULL for group in stages.facts.kv.groups)
    engine = InProcessEngine(stages, steps_in_flight=3, max_num_seqs=8, max_num_batched_tokens=48)
    prompts = checkpoints.random_prompts(1, 30, 7, 14, 27, 11, 25, 31)
    expected = [checkpoints.greedy_tokens(oracle, prompt, NUM_TOKENS) for prompt in prompts]
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    assert engine.generate(prompts, sampling) == expected
    assert has_keys == (engine.scheduler.counters.num_preemptions > 0)
    for first in (8, 10):
        num_entering = stages.num_entering
        assert engine.generate(prompts[-2:], sampling, first_number=first) == expected[-2:]
    assert stages.num_entering == num_entering + 2
    assert stages.num_leaving >= len(prompts) - 1
    stages.close()


def execute(runner: ModelRunner | StagesInThreads, num_ahead: int) -> list[StepResult]:
    """Run rows of all kinds of sampling in two halves that take turns, so many steps launched ahead."""
    rng = np.random.default_rng(3)
    rows = [
        new_row(slot, rng.integers(3, 90, 5).tolist(), range(1 + 5 * slot, 6 + 5 * slot), sampling=sampling, seed=slot)
        for slot, sampling in enumerate(KINDS.values())
    ]  # fmt: skip
    chunks = {row.slot: 5 for row in rows}
    even, odd = [0, 2, 4], [1, 3, 5]
    plans = [
        step_plan(1, new=rows, chunks=chunks),
        *(step_plan(step_id, skipped=odd if step_id % 2 else even) for step_id in range(2, 22)),
    ]
    runner.reset()
    launched, results = [], []
    for plan in plans:
        launched.append(runner.launch(plan))
        if len(launched) > num_ahead:
            results.append(launched.pop(0).wait())
    return results + [step.wait() for step in launched]


def assert_same(results: Sequence[StepResult], expected: Sequence[StepResult]) -> None:
    for result, wanted in zip(results, expected, strict=True):
        assert result.step_id == wanted.step_id
        assert result.token_ids.tolist() == wanted.token_ids.tolist()
        assert result.row_errors == wanted.row_errors
        assert result.prompt_logprobs.keys() == wanted.prompt_logprobs.keys()
        for key, part in result.prompt_logprobs.items():
            np.testing.assert_array_equal(part.logprobs, wanted.prompt_logprobs[key].logprobs)
        assert (result.logprobs is None) == (wanted.logprobs is None)
        if result.logprobs is not None and wanted.logprobs is not None:
            np.testing.assert_array_equal(result.logprobs.logprobs, wanted.logprobs.logprobs)


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_all_kinds_of_sampling_go_through_stages(model: Path, enforce_eager: bool) -> None:
    (alone,) = create_stages(model, 1, enforce_eager=enforce_eager)
    stages = StagesInThreads(create_stages(model, 2, enforce_eager=enforce_eager))
    expected = execute(alone, 0)
    assert any(result.prompt_logprobs for result in expected)
    assert_same(execute(stages, 3), expected)
    stages.close()


@pytest.mark.parametrize("head", ["ForCausalLM", "Model", "ForSequenceClassification"])
def test_the_last_stage_pools(tmp_path: Path, head: str) -> None:
    save_decoder(tmp_path, "Qwen3", head)
    task = Task.CLASSIFY if head == "ForSequenceClassification" else Task.EMBED
    params = PoolingParams(task, PoolingKind.MEAN)
    rows = [
        replace(row, content=replace(row.content, pooling=params))
        for row in (new_row(slot, range(5, 17), range(1 + 4 * slot, 5 + 4 * slot)) for slot in range(2))
    ]
    plans = [
        step_plan(1, new=rows[:1], chunks={0: 5}),
        step_plan(2, new=rows[1:], chunks={0: 7, 1: 12}),
        step_plan(3, removed=[0, 1]),
    ]
    stages = StagesInThreads(create_stages(tmp_path, 2))
    (alone,) = create_stages(tmp_path, 1)
    expected = [alone.execute(plan) for plan in plans]
    results = [step.wait() for step in [stages.launch(plan) for plan in plans]]
    stages.close()
    assert [len(result.vectors) for result in expected] == [0, 2, 0]
    for result, wanted in zip(results, expected, strict=True):
        assert result.vectors.keys() == wanted.vectors.keys()
        for key, vectors in result.vectors.items():
            np.testing.assert_array_equal(vectors, wanted.vectors[key])


def test_a_row_that_fails_goes_on_until_it_is_removed(model: Path) -> None:
    impossible = SamplingParams(min_tokens=9, allowed_token_ids=(96,))  # the end, which is not allowed yet
    rows = [new_row(0, [5, 6], range(1, 6), sampling=impossible), new_row(1, [7, 8, 9], range(6, 11))]
    plans = [step_plan(1, new=rows, chunks={0: 2, 1: 3}), step_plan(2), step_plan(3, removed=[0])]
    stages = StagesInThreads(create_stages(model, 3))
    (alone,) = create_stages(model, 1)
    alone.reset()
    stages.reset()
    launched = [stages.launch(plan) for plan in plans]
    results = [step.wait() for step in launched]
    assert [len(result.row_errors) for result in results] == [1, 1, 0]
    assert_same(results, [alone.execute(plan) for plan in plans])
    stages.close()


def test_steps_in_flight_are_dropped_by_a_reset(model: Path) -> None:
    stages = StagesInThreads(create_stages(model, 2))
    stages.reset()
    first = step_plan(1, new=[new_row(0, [5, 6, 7], [1, 2])], chunks={0: 3})
    stages.launch(first)
    stages.launch(step_plan(2))
    stages.reset()
    (alone,) = create_stages(model, 1)
    alone.reset()
    assert_same([stages.launch(first).wait()], [alone.execute(first)])
    stages.close()
