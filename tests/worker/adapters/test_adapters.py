"""Rows with low-rank adapters, against what peft computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.worker.adapters.trained import (
    LLAMA,
    PROJECTIONS,
    create,
    make_runner,
    merged,
    save_adapter,
    save_base,
)
from tests.worker.models.checkpoints import greedy_tokens
from tests.worker.tiny import new_row, step_plan
from triptych.types.sampling import SamplingParams
from triptych.types.step import RowErrorCode
from triptych_services.worker.runner.base import Runner

EVERYWHERE = [*PROJECTIONS, "embed_tokens", "lm_head"]
KINDS = {
    "all": {},
    "stabilised": {"use_rslora": True, "r": 5},
    "some": {"target_modules": ["q_proj", "v_proj"], "r": 3},
    "half": {"target_modules": ["up_proj", "down_proj"]},
    "patterns": {"rank_pattern": {"q_proj": 12, "layers.1.mlp.gate_proj": 2}, "alpha_pattern": {"o_proj": 4}},
    "ends": {"target_modules": EVERYWHERE},
    "one": {"r": 1, "layers_to_transform": [1]},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("adapters")
    return {
        name: save_adapter(base, directory / name, seed=seed, **changes)
        for seed, (name, changes) in enumerate(KINDS.items())
    }


def texts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, LLAMA.vocab_size, (length,), generator=generator).tolist() for length in lengths]


def say(
    runner: Runner, prompts: Sequence[list[int]], digests: Sequence[str], num_new: int
) -> list[list[int]]:
    """Greedy tokens of a ragged batch, whose prompts are computed in one step."""
    runner.reset()
    rows = [
        new_row(slot, prompt, range(1 + 16 * slot, 17 + 16 * slot), adapter=digest)
        for slot, (prompt, digest) in enumerate(zip(prompts, digests, strict=True))
    ]
    plan = step_plan(1, new=rows, chunks={slot: len(prompt) for slot, prompt in enumerate(prompts)})
    said: list[list[int]] = [[] for _ in prompts]
    for step_id in range(1, num_new + 1):
        result = runner.execute(plan)
        assert not result.row_errors
        for slot, token in enumerate(result.token_ids.tolist()):
            said[slot].append(token)
        plan = step_plan(step_id + 1)
    return said


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("enforce_eager", [False, True], ids=["recorded", "eager"])
def test_batches_say_what_merged_models_say(base, adapters, enforce_eager):
    runner, store = make_runner(base, max_adapters=8, enforce_eager=enforce_eager)
    names = list(KINDS)
    digests = [store.load(name, "", adapters[name]).digest for name in names]
    prompts = texts(1, 4, 5, 9, 11, 2, 7, 3)
    said = say(runner, prompts, [*digests, ""], 24)
    for prompt, tokens, name in zip(prompts, said, [*names, None], strict=True):
        assert tokens == greedy_tokens(merged(base, None if name is None else adapters[name]), prompt, 24), (
            name
        )


def test_log_probabilities_are_those_of_peft(base, adapters):
    runner, store = make_runner(base)
    (prompt,) = texts(9)
    digest = store.load("ends", "", adapters["ends"]).digest
    asked = SamplingParams(temperature=0.0, logprobs=5, prompt_logprobs=0)
    runner.reset()
    row = new_row(0, prompt, range(1, 9), sampling=asked, adapter=digest)
    result = runner.execute(step_plan(1, new=[row], chunks={0: len(prompt)}))
    with torch.inference_mode():
        expected = merged(base, adapters["ends"])(torch.tensor([prompt])).logits[0].double().log_softmax(-1)
    best = expected[-1].topk(5).values
    np.testing.assert_allclose(result.logprobs.logprobs[1:], best, atol=5e-5)
    (scored,) = result.prompt_logprobs.values()
    own = expected[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    np.testing.assert_allclose(scored.logprobs[:, 0], own, atol=5e-5)


@pytest.mark.thorough
def test_eight_adapters_share_four_slots_one_after_the_other(base, adapters, tmp_path):
    runner, store = make_runner(base, max_adapters=4)
    (prompt,) = texts(6)
    paths = [save_adapter(base, tmp_path / str(seed), seed=100 + seed, r=4) for seed in range(8)]
    digests = [store.load(str(number), "", path).digest for number, path in enumerate(paths)]
    assert len(set(digests)) == 8
    expected = [greedy_tokens(merged(base, path), prompt, 4) for path in paths]
    for first in (0, 4, 0):
        chosen = range(first, first + 4)
        assert say(runner, [prompt] * 4, [digests[n] for n in chosen], 4) == [expected[n] for n in chosen]


@pytest.mark.thorough
def test_sixty_four_adapters_run_in_one_batch(base, tmp_path):
    runner, store = make_runner(base, max_adapters=64, max_num_seqs=65, budget=320)
    prompts = texts(*(1 + number % 7 for number in range(65)))
    paths = [save_adapter(base, tmp_path / str(seed), seed=seed, r=1 + seed % 16) for seed in range(64)]
    digests = [store.load(str(number), "", path).digest for number, path in enumerate(paths)]
    said = say(runner, prompts, [*digests, ""], 5)
    expected = [
        greedy_tokens(merged(base, path), prompt, 5)
        for prompt, path in zip(prompts, [*paths, None], strict=True)
    ]
    assert said == expected


def test_a_row_of_an_adapter_that_is_not_loaded_fails_alone(base, adapters):
    runner, store = make_runner(base, max_adapters=1)
    one, other = texts(5, 6)
    digest = store.load("all", "", adapters["all"]).digest
    second = store.load("some", "", adapters["some"]).digest
    rows = [
        new_row(0, one, range(1, 9), adapter=digest),
        new_row(1, other, range(9, 17), adapter="0" * 64),
        new_row(2, other, range(17, 25)),
        new_row(3, other, range(25, 33), adapter=second),
    ]
    runner.reset()
    result = runner.execute(step_plan(1, new=rows, chunks={0: 5, 1: 6, 2: 6, 3: 6}))
    assert {key.slot: error.code for key, error in result.row_errors.items()} == {
        1: RowErrorCode.INVALID_REQUEST,
        3: RowErrorCode.INVALID_REQUEST,
    }
    assert not any(error.kv_is_valid for error in result.row_errors.values())
    tokens = result.token_ids.tolist()
    assert tokens[0] == greedy_tokens(merged(base, adapters["all"]), one, 1)[0]
    assert tokens[2] == greedy_tokens(merged(base, None), other, 1)[0]
    # the slot is free again when its row has left
    plan = step_plan(2, removed=[0, 1, 2, 3], new=[replace(rows[3], slot_version=2)], chunks={3: 6})
    result = runner.execute(plan)
    assert not result.row_errors
    assert result.token_ids.tolist() == greedy_tokens(merged(base, adapters["some"]), other, 1)


def test_an_unloaded_adapter_serves_the_rows_that_have_it(base, adapters):
    runner, store = make_runner(base)
    (prompt,) = texts(5)
    digest = store.load("all", "", adapters["all"]).digest
    runner.reset()
    row = new_row(0, prompt, range(1, 9), adapter=digest)
    tokens = runner.execute(step_plan(1, new=[row], chunks={0: 5})).token_ids.tolist()
    assert [facts.name for facts in store.list()] == ["all"]
    store.unload(digest)
    assert not store.list()
    tokens += runner.execute(step_plan(2)).token_ids.tolist()
    assert tokens == greedy_tokens(merged(base, adapters["all"]), prompt, 2)
    later = replace(row, slot_version=2)
    assert runner.execute(step_plan(3, removed=[0], new=[later], chunks={0: 5})).row_errors
    store.unload(digest)


def test_bits_do_not_depend_on_the_batch(base, adapters):
    runner, store = make_runner(base)
    digests = [store.load(name, "", adapters[name]).digest for name in ("all", "half")]
    prompts = texts(5, 9, 3, 7, 4, 8)
    asked = SamplingParams(temperature=0.0, logprobs=3)

    def logprobs(slots: Sequence[int], num_steps: int) -> dict[int, np.ndarray]:
        runner.reset()
        rows = [
            new_row(
                slot,
                prompts[slot],
                range(1 + 8 * slot, 9 + 8 * slot),
                sampling=asked,
                adapter=digests[slot % 2],
            )
            for slot in slots
        ]
        plan = step_plan(1, new=rows, chunks={slot: len(prompts[slot]) for slot in slots})
        found: dict[int, list[np.ndarray]] = {slot: [] for slot in slots}
        for step_id in range(2, num_steps + 2):
            result = runner.execute(plan)
            for number, slot in enumerate(slots):
                begin, end = result.logprobs.offsets[number : number + 2]
                found[slot].append(result.logprobs.logprobs[begin:end].copy())
            plan = step_plan(step_id)
        return {slot: np.concatenate(parts) for slot, parts in found.items()}

    together = logprobs(range(6), 4)
    for slot in range(6):
        np.testing.assert_array_equal(logprobs([slot], 4)[slot], together[slot])


def test_serving_adapters_adds_no_call_but_that_of_the_embedding(base):
    def kernels(max_adapters: int) -> list[tuple[str, ...]]:
        recorded = create(base, max_adapters=max_adapters).runner.recorded()
        assert recorded is not None
        return [(*(stage.kernel for stage in call.stages), call.kernel) for call in recorded[0].calls]

    without, serving = kernels(0), kernels(4)
    assert [call for call in serving if call != ("adapt_embedding",)] == without
    assert len(serving) == len(without) + 1
