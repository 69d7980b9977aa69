"""Log-probabilities of prompts: as of a model that is given every prefix, whatever the chunks, slices and rows."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from torch import nn

from tests.worker import step_runs
from tests.worker.deferred import DeferredStream
from tests.worker.simulated import simulated_runner
from tests.worker.teacher_forcing import teacher_forced_logprobs
from tests.worker.tiny import EchoModel, new_row, runner_for, step_plan, tiny_architecture, tiny_config
from triptych.errors import ProtocolViolation
from triptych.types.sampling import SamplingParams
from triptych.types.step import NewRow, PromptLogprobs, StepResult
from triptych_services.worker.loader.load import load_model
from triptych_services.worker.loader.random import RandomCheckpoint
from triptych_services.worker.runner.base import StepRunner
from triptych_services.worker.runner.model_runner import ModelRunner

VOCAB = 97
PROMPT = [5, 90, 17, 17, 3, 60, 41, 8, 9, 10, 77]
ASKING = SamplingParams(temperature=0.0, prompt_logprobs=3)


def make_runner(kind: str) -> StepRunner:
    if kind == "simulated":
        return simulated_runner()
    architecture = tiny_architecture(vocab_size=VOCAB)
    config = tiny_config(architecture)
    model = load_model(config, RandomCheckpoint(architecture, seed=3))
    assert isinstance(model, nn.Module)
    if kind == "device":
        return step_runs.runner_for(model, config, DeferredStream())
    return runner_for(model, config, enforce_eager=kind == "eager")


@pytest.fixture(params=["recorded", "eager", "device", "simulated"])
def runner(request: pytest.FixtureRequest) -> StepRunner:
    return make_runner(request.param)


def row(
    slot: int = 0,
    prompt: list[int] = PROMPT,
    *,
    start: int = 0,
    sampling: SamplingParams = ASKING,
    **fields: Any,
) -> NewRow:
    """`start`: positions of the prompt below this have been reported."""
    first_block = 1 + 8 * slot
    new = new_row(slot, prompt, range(first_block, first_block + 8), sampling=sampling, **fields)
    return replace(new, prompt_logprobs_start=start)


def in_chunks(runner: StepRunner, entering: NewRow, *lengths: int) -> list[StepResult]:
    """The results of a prompt's chunks."""
    runner.reset()
    slot = entering.slot
    plans = [
        step_plan(step_id, new=[entering] if step_id == 1 else (), chunks={slot: length})
        for step_id, length in enumerate(lengths, 1)
    ]
    return [runner.execute(plan) for plan in plans]


def reported(results: list[StepResult], slot: int = 0) -> PromptLogprobs:
    """Join a slot's reports over several steps, which must follow each other without a gap."""
    parts = [part for result in results for row, part in result.prompt_logprobs.items() if row.slot == slot]
    for part, successor in pairwise(parts):
        assert part.end == successor.first_position
    return PromptLogprobs(
        parts[0].first_position,
        *(
            np.concatenate([getattr(part, name) for part in parts])
            for name in ("token_ids", "logprobs", "ranks")
        ),
    )


def assert_equal(one: PromptLogprobs, other: PromptLogprobs) -> None:
    assert one.first_position == other.first_position
    np.testing.assert_array_equal(one.token_ids, other.token_ids)
    np.testing.assert_array_equal(one.ranks, other.ranks)
    np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["recorded", "eager", "device"])
def test_each_is_given_all_tokens_before_it(kind: str) -> None:
    runner = make_runner(kind)
    (expected,) = teacher_forced_logprobs(runner, [PROMPT], [1])
    (result,) = in_chunks(runner, row(), len(PROMPT))
    found = reported([result])
    assert found.first_position == 1
    assert found.token_ids.shape == found.logprobs.shape == (len(PROMPT) - 1, 4)
    assert found.token_ids[:, 0].tolist() == PROMPT[1:]
    np.testing.assert_allclose(found.logprobs[:, 0], expected, rtol=1e-5, atol=1e-5)
    assert (np.diff(found.logprobs[:, 1:]) <= 0).all(), "alternatives fall"
    is_best = found.ranks == 1
    np.testing.assert_array_equal(found.logprobs[is_best, 0], found.logprobs[is_best, 1])
    assert result.token_ids.size == 1, "and the first output token is sampled"


@pytest.mark.parametrize("lengths", [(3, 5, 3), (10, 1), (1, 10), (1,) * 11])
def test_chunks_report_what_the_whole_prompt_reports(runner: StepRunner, lengths: tuple[int, ...]) -> None:
    whole = reported(in_chunks(runner, row(), len(PROMPT)))
    results = in_chunks(runner, row(), *lengths)
    assert_equal(reported(results), whole)
    assert sum(len(entries.ranks) for result in results for entries in result.prompt_logprobs.values()) == 10


def test_slices_of_logits_report_what_one_slice_reports(
    runner: StepRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = reported(in_chunks(runner, row(), len(PROMPT)))
    monkeypatch.setattr("triptych_services.worker.runner.prompt_logprobs.MAX_SCORED_AT_ONCE", 3)
    assert_equal(reported(in_chunks(runner, row(), len(PROMPT))), whole)


def test_a_preempted_row_reports_only_what_is_missing(runner: StepRunner) -> None:
    whole = reported(in_chunks(runner, row(), len(PROMPT)))
    rest = reported(in_chunks(runner, row(start=5), 3, 8))
    assert rest.first_position == 5
    assert_equal(rest, PromptLogprobs(5, whole.token_ids[4:], whole.logprobs[4:], whole.ranks[4:]))
    done = row(prompt=[*PROMPT, 4, 4], num_prompt=len(PROMPT), start=len(PROMPT))
    assert not any(result.prompt_logprobs for result in in_chunks(runner, done, 6, 7))


def test_neighbours_report_their_own_and_others_nothing(runner: StepRunner) -> None:
    prompts = [PROMPT, PROMPT[::-1][:6], [7], PROMPT[2:9]]
    alone = [in_chunks(runner, row(slot, prompt), len(prompt)) for slot, prompt in enumerate(prompts)]
    runner.reset()
    rows = [row(slot, prompt) for slot, prompt in enumerate(prompts)]
    rows[1] = row(1, prompts[1], sampling=SamplingParams(temperature=0.0))
    rows[3] = row(3, prompts[3], sampling=replace(ASKING, prompt_logprobs=0))
    result = runner.execute(
        step_plan(1, new=rows, chunks={slot: len(p) for slot, p in enumerate(prompts) if slot != 2})
    )
    assert [row.slot for row in result.prompt_logprobs] == [0, 3]
    assert_equal(reported([result]), reported(alone[0]))
    whole = reported(alone[3], slot=3)
    assert_equal(
        reported([result], slot=3),
        PromptLogprobs(1, whole.token_ids[:, :1], whole.logprobs[:, :1], whole.ranks),
    )
    assert result.token_ids.tolist() == [int(step[0].token_ids[0]) for step in alone]
    assert not runner.execute(step_plan(2)).prompt_logprobs


def test_a_slot_that_is_free_again_asks_for_nothing(runner: StepRunner) -> None:
    in_chunks(runner, row(), 4)
    plain = row(slot_version=2, sampling=SamplingParams(temperature=0.0))
    assert not runner.execute(step_plan(2, removed=[0], new=[plain], chunks={0: 11})).prompt_logprobs


def test_logits_are_computed_for_those_who_ask_only() -> None:
    model = EchoModel(VOCAB)
    runner = runner_for(model, tiny_config(tiny_architecture(vocab_size=VOCAB)))
    runner.execute(step_plan(1, new=[new_row(0, PROMPT, [1, 2, 3])], chunks={0: len(PROMPT)}))
    assert model.num_logit_rows == 1
    result = runner.execute(step_plan(2, removed=[0], new=[row(1)], chunks={1: len(PROMPT)}))
    assert model.num_logit_rows == len(PROMPT) - 1
    assert [row.slot_version for row in result.prompt_logprobs] == [1]


@pytest.mark.parametrize("stream", [None, DeferredStream()])
def test_a_prompt_whose_logits_are_nan_fails_alone(stream: DeferredStream | None) -> None:
    model = EchoModel(VOCAB, poisoned_tokens=[50])
    runner: ModelRunner = step_runs.runner_for(
        model, tiny_config(tiny_architecture(vocab_size=VOCAB)), stream
    )
    rows = [row(0), row(1, [3, 50, 4, 5]), row(2, [3, 50], slot_version=7)]
    result = runner.execute(step_plan(1, new=rows, chunks={0: len(PROMPT), 1: 3, 2: 2}))
    assert [row.slot for row in result.prompt_logprobs] == [0, 2]
    assert sorted(result.row_errors) == [(1, 1), (2, 7)]
    assert all("NaN" in error.message for error in result.row_errors.values())


def test_a_row_that_skips_what_it_must_report_breaks_the_protocol(runner: StepRunner) -> None:
    with pytest.raises(ProtocolViolation, match="prompt_logprobs_start 4"):
        runner.execute(step_plan(1, new=[row(computed=4, start=4)]))
