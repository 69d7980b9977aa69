"""Pooled rows and adapters of the simulated worker."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.scheduling import make_request
from tests.worker.simulated import simulated_runner
from tests.worker.tiny import GREEDY, new_row, step_plan, u32
from triptych.config import SchedulerConfig
from triptych.types.pooling import PoolingKind, PoolingParams, Task
from triptych.types.step import NewRow, RowContent, StepPlan
from triptych_services.enginecore.scheduler.scheduler import Scheduler
from triptych_services.worker.simulation.runner import CONFIG_FILE, SimulatedRunner

MEAN = PoolingParams(kind=PoolingKind.MEAN)
LAST = PoolingParams(kind=PoolingKind.LAST)
PROMPT = [5, 6, 7, 8, 9, 10]


def pooled_row(slot: int, prompt: list[int], pooling: PoolingParams | None, adapter: str = "") -> NewRow:
    num_blocks = -(-len(prompt) // 4)
    blocks = u32(*range(num_blocks * slot + 1, num_blocks * (slot + 1) + 1))
    content = RowContent(u32(*prompt), GREEDY, pooling, adapter)
    return NewRow(slot, 1, content, u32(), 0, 0, blocks, seed=0)


def load(runner: SimulatedRunner, names: str, directory: Path) -> dict[str, str]:
    """Load adapters with one letter each, and return their digests."""
    digests = {}
    for name in names:
        source = directory / name
        source.mkdir(exist_ok=True)
        (source / CONFIG_FILE).write_text(name)
        digests[name] = runner.adapters.load(name, name, source).digest
    return digests


def vectors_alone(
    pooling: PoolingParams, prompt: list[int] = PROMPT, adapter: str = "", place: Path = Path()
) -> np.ndarray:
    runner = simulated_runner(makes_vectors=True, max_adapters=1)
    row = pooled_row(0, prompt, pooling, load(runner, adapter, place).get(adapter, ""))
    result = runner.execute(step_plan(1, new=[row], chunks={0: len(prompt)}))
    assert not result.row_errors
    assert not len(result.token_ids)
    return result.vectors[row.key]


def step_tokens(runner: SimulatedRunner, step_id: int) -> list[int]:
    return runner.execute(step_plan(step_id)).token_ids.tolist()


@pytest.mark.parametrize("has_blocks", [False, True])
@pytest.mark.parametrize(
    "pooling", [MEAN, PoolingParams(), PoolingParams(Task.TOKEN_EMBED), PoolingParams(dimensions=4)]
)
def test_chunks_and_neighbours_change_no_vector(pooling: PoolingParams, has_blocks: bool) -> None:
    runner = simulated_runner(makes_vectors=True, has_blocks=has_blocks)
    row, beside = pooled_row(0, PROMPT, pooling), pooled_row(1, PROMPT, None)
    first = runner.execute(step_plan(1, new=[row, beside], chunks={0: 4, 1: 6}))
    assert not first.vectors
    second = runner.execute(step_plan(2, chunks={0: 2}))
    assert len(second.token_ids) == 1, "the row beside it samples"
    assert not second.row_errors
    np.testing.assert_array_equal(second.vectors[row.key], vectors_alone(pooling))
    third = runner.execute(step_plan(3, skipped=[0]))
    assert not third.vectors
    plain = simulated_runner()
    plain.execute(step_plan(1, new=[pooled_row(1, PROMPT, None)], chunks={1: 6}))
    assert [second.token_ids.tolist(), third.token_ids.tolist()] == [
        step_tokens(plain, 2),
        step_tokens(plain, 3),
    ]


def test_vectors_tell_texts_and_adapters_apart(tmp_path: Path) -> None:
    texts = [(PROMPT, ""), (PROMPT, "a"), (PROMPT, "b"), (PROMPT[::-1], ""), (PROMPT[1:], "")]
    vectors = {vectors_alone(MEAN, prompt, adapter, tmp_path).tobytes() for prompt, adapter in texts}
    assert len(vectors) == len(texts)


def test_an_adapter_changes_tokens_wherever_its_row_starts_over(tmp_path: Path) -> None:
    tokens: dict[str, list[int]] = {}
    for adapter in ("", "a", "b"):
        runner = simulated_runner(has_blocks=True, max_adapters=1)
        row = pooled_row(0, PROMPT, None, load(runner, adapter, tmp_path).get(adapter, ""))
        drawn = runner.execute(step_plan(1, new=[row], chunks={0: 6})).token_ids.tolist() + step_tokens(
            runner, 2
        )
        again = NewRow(
            1,
            1,
            row.content,
            u32(drawn[0]),
            num_computed_tokens=0,
            num_cached_tokens=0,
            block_ids=u32(7, 8),
            seed=0,
        )
        result = runner.execute(step_plan(3, new=[again], chunks={1: 7}, removed=[0]))
        assert not result.row_errors
        assert result.token_ids.tolist() == drawn[1:]
        tokens[adapter] = drawn
    assert len({tuple(drawn) for drawn in tokens.values()}) == 3


def test_a_block_of_another_adapter_is_noticed(tmp_path: Path) -> None:
    runner = simulated_runner(has_blocks=True, max_adapters=2)
    digests = load(runner, "ab", tmp_path)
    runner.execute(step_plan(1, new=[pooled_row(0, PROMPT, None, digests["a"])], chunks={0: 6}))
    content = RowContent(u32(*PROMPT), GREEDY, None, digests["b"])
    other = NewRow(1, 1, content, u32(), 4, 4, u32(1, 9), seed=0)
    result = runner.execute(step_plan(2, new=[other], chunks={1: 2}))
    assert "KV of another prefix" in result.row_errors[other.key].message


def test_a_row_fails_where_no_vectors_are_made() -> None:
    runner = simulated_runner()
    row = pooled_row(0, PROMPT, MEAN)
    result = runner.execute(step_plan(1, new=[row, new_row(1, PROMPT, [5, 6])], chunks={0: 6, 1: 6}))
    assert "embed is none of this model's" in result.row_errors[row.key].message
    assert len(result.token_ids) == 1


def test_an_adapter_that_cannot_be_applied_fails_its_row_by_itself(tmp_path: Path) -> None:
    runner = simulated_runner(max_adapters=1)
    digests = load(runner, "ab", tmp_path)
    rows = [
        pooled_row(slot, PROMPT, None, digest)
        for slot, digest in enumerate((digests["a"], "x", digests["b"]))
    ]
    errors = runner.execute(step_plan(1, new=rows, chunks={0: 6, 1: 6, 2: 6})).row_errors
    assert "x is not loaded" in errors[rows[1].key].message
    assert "hold adapters of other rows" in errors[rows[2].key].message
    assert rows[0].key not in errors


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize(("num_blocks", "budget"), [(200, 64), (17, 7), (20, 13)])
def test_preempted_and_chunked_beside_others_a_request_has_the_vector_that_it_has_alone(
    num_blocks: int, budget: int, num_stages: int
) -> None:
    runner = simulated_runner(num_blocks=num_blocks, budget=budget, has_blocks=True, makes_vectors=True)
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=budget),
        replace(runner.facts, num_stages=num_stages, model=replace(runner.facts.model, max_model_len=64)),
        enable_prefix_caching=True,
        clock=time.monotonic,
    )
    rng, poolings = np.random.default_rng(5), [None, MEAN, LAST, PoolingParams(Task.TOKEN_EMBED)]
    prompts = [PROMPT[:4] * 2 + rng.integers(0, 200, int(rng.integers(1, 56))).tolist() for _ in range(40)]
    for number, prompt in enumerate(prompts):
        pooling = poolings[number % 4]
        max_tokens = min(20, 64 - len(prompt)) if pooling is None else 1
        scheduler.requests.add(make_request(number, prompt, pooling=pooling, max_tokens=max(max_tokens, 1)))
    plans: deque[StepPlan] = deque()
    vectors: dict[int, np.ndarray] = {}
    ended: list[int] = []
    while scheduler.has_work:
        while len(plans) < 3 and (plan := scheduler.schedule()) is not None:
            plans.append(plan)
        output = scheduler.update(runner.execute(plans.popleft()))
        scheduler.check_integrity()
        assert not output.failed
        ended += [end.request.number for end in output.finished]
        vectors.update({request.number: each for request, each in output.vectors})
    assert sorted(ended) == list(range(40))
    for number, prompt in enumerate(prompts):
        if (pooling := poolings[number % 4]) is not None:
            np.testing.assert_array_equal(vectors.pop(number), vectors_alone(pooling, prompt))
    assert not vectors
