"""Pooled rows and adapters of the simulated worker."""

from __future__ import annotations

import numpy as np
import pytest

from tests.worker.simulated import simulated_runner
from tests.worker.tiny import GREEDY, new_row, step_plan, u32
from triptych.types.pooling import PoolingKind, PoolingParams, Task
from triptych.types.step import NewRow, RowContent
from triptych_services.worker.simulation.runner import SimulatedRunner

MEAN = PoolingParams(kind=PoolingKind.MEAN)
PROMPT = [5, 6, 7, 8, 9, 10]


def pooled_row(slot: int, prompt: list[int], pooling: PoolingParams | None, adapter: str = "") -> NewRow:
    blocks = u32(*range(2 * slot + 1, 2 * slot + 3))
    content = RowContent(u32(*prompt), GREEDY, pooling, adapter)
    return NewRow(slot, 1, content, u32(), 0, 0, blocks, seed=0)


def vectors_alone(pooling: PoolingParams, prompt: list[int] = PROMPT, adapter: str = "") -> np.ndarray:
    runner = simulated_runner(makes_vectors=True)
    row = pooled_row(0, prompt, pooling, adapter)
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


def test_vectors_tell_texts_and_adapters_apart() -> None:
    texts = [(PROMPT, ""), (PROMPT, "a"), (PROMPT, "b"), (PROMPT[::-1], ""), (PROMPT[1:], "")]
    vectors = {vectors_alone(MEAN, prompt, adapter).tobytes() for prompt, adapter in texts}
    assert len(vectors) == len(texts)


def test_an_adapter_changes_tokens_wherever_its_row_starts_over() -> None:
    tokens: dict[str, list[int]] = {}
    for adapter in ("", "a", "b"):
        runner = simulated_runner(has_blocks=True)
        row = pooled_row(0, PROMPT, None, adapter)
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


def test_a_block_of_another_adapter_is_noticed() -> None:
    runner = simulated_runner(has_blocks=True)
    runner.execute(step_plan(1, new=[pooled_row(0, PROMPT, None, "a")], chunks={0: 6}))
    content = RowContent(u32(*PROMPT), GREEDY, None, "b")
    other = NewRow(1, 1, content, u32(), 4, 4, u32(1, 9), seed=0)
    result = runner.execute(step_plan(2, new=[other], chunks={1: 2}))
    assert "KV of another prefix" in result.row_errors[other.key].message


def test_a_row_fails_where_no_vectors_are_made() -> None:
    runner = simulated_runner()
    row = pooled_row(0, PROMPT, MEAN)
    result = runner.execute(step_plan(1, new=[row, new_row(1, PROMPT, [5, 6])], chunks={0: 6, 1: 6}))
    assert "embed is none of this model's" in result.row_errors[row.key].message
    assert len(result.token_ids) == 1
