"""Log-probabilities by the real model beside those that transformers computes in the same run.

Of prompts, in float32, they are the same: whole, in chunks and preempted. Of tokens, in bfloat16, they are as near to
float32 as transformers' own.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.in_process import InProcessEngine
from tests.oracle.entries import Entry, read_entries
from tests.oracle.reference import greedy, load_reference, teacher_forced_logprobs
from tests.oracle.test_greedy_tokens import MAX_MODEL_LEN, make_runner
from triptych.hub import resolve_model
from triptych.types.sampling import SamplingParams
from triptych.types.step import NewRow, RowContent, StepPlan, empty_u32
from triptych_services.worker.runner.base import Runner

pytestmark = pytest.mark.model

LIVE = (0, 4, 12)  # entries that transformers computes again in this run
NUM_TOP = 3
SCORING = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, prompt_logprobs=NUM_TOP)
NEAR = {"rtol": 0, "atol": 1e-3}  # float32, summed in another order: 3e-4 at a second token, 3e-5 elsewhere


@pytest.fixture(scope="module")
def directory() -> Path:
    return resolve_model("embedded")


@pytest.fixture(scope="module")
def reference(directory: Path) -> Any:
    """The model as transformers has it, in float32."""
    return load_reference(directory)


@pytest.fixture(scope="module")
def prompts(directory: Path) -> list[list[int]]:
    """One of a single token and some of a few chunks."""
    prompts = sorted((entry.prompt for entry in read_entries(directory)), key=len)
    return [prompts[0], *[prompt for prompt in prompts if 20 < len(prompt) < 400][1::3]]


@pytest.fixture(scope="module")
def runner(directory: Path) -> Runner:
    return make_runner(directory, "float32")


@pytest.fixture(scope="module")
def expected(reference: Any, prompts: list[list[int]]) -> list[np.ndarray]:
    """Per prompt [len - 1, vocab_size]: the log-softmax before each token but the first."""
    with torch.inference_mode():
        return [
            torch.log_softmax(reference(torch.tensor([prompt])).logits[0, :-1].float(), dim=-1).numpy()
            for prompt in prompts
        ]


def check(engine: InProcessEngine, prompts: list[list[int]], expected: list[np.ndarray]) -> list[list[int]]:
    outputs = engine.generate(prompts, SCORING)
    for number, (prompt, logprobs) in enumerate(zip(prompts, expected, strict=True)):
        if len(prompt) == 1:
            assert number not in engine.prompt_logprobs
            continue
        scores = engine.scores_of(number)
        assert scores.token_ids[:, 0].tolist() == prompt[1:]
        own = logprobs[np.arange(len(prompt) - 1), prompt[1:]]
        np.testing.assert_allclose(scores.logprobs[:, 0], own, **NEAR)
        best = np.sort(logprobs, axis=1)[:, : -1 - NUM_TOP : -1]
        np.testing.assert_allclose(scores.logprobs[:, 1:], best, **NEAR)
        rows = np.arange(len(prompt) - 1)[:, None]
        np.testing.assert_allclose(logprobs[rows, scores.token_ids[:, 1:]], best, **NEAR)
        # tokens as likely as the prompt's own, up to what rounding decides, may stand on either side of it
        likelier, as_likely = ((logprobs > own[:, None] + margin).sum(axis=1) for margin in (1e-3, -1e-3))
        assert ((likelier < scores.ranks) & (scores.ranks <= np.maximum(as_likely, 1))).all()
    return outputs


@pytest.mark.thorough
def test_whole_in_chunks_and_preempted(
    runner: Runner, prompts: list[list[int]], expected: list[np.ndarray]
) -> None:
    whole = check(InProcessEngine(runner), prompts, expected)
    assert whole == InProcessEngine(runner).generate(prompts, replace(SCORING, prompt_logprobs=None))
    assert whole == check(InProcessEngine(runner, max_num_batched_tokens=64), prompts, expected)
    crowded = InProcessEngine(
        runner, num_blocks=MAX_MODEL_LEN // 16 + 1, max_model_len=MAX_MODEL_LEN, max_num_batched_tokens=64
    )
    assert whole == check(crowded, prompts, expected)


@pytest.mark.thorough
def test_beside_requests_that_do_not_ask_and_after_their_prefixes(
    runner: Runner, prompts: list[list[int]], expected: list[np.ndarray]
) -> None:
    engine = InProcessEngine(runner)
    plain = engine.generate(prompts, replace(SCORING, prompt_logprobs=None), first_number=100)
    assert engine.scheduler.snapshot().num_cached_blocks
    assert check(engine, prompts, expected) == plain


@pytest.mark.thorough
@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.slow)], ids=["few", "each"])
def test_three_prompts_live_and_bfloat16_is_as_near_as_transformers_own(
    directory: Path, reference: Any, step: int
) -> None:
    entries = read_entries(directory)
    for index in LIVE:
        tokens, _ = greedy(reference, entries[index].prompt, 24)
        assert tokens == entries[index].tokens[:24], "transformers says something else today: make oracle"
    prompts = [entry for entry in entries if len(entry.prompt) <= 400][::step]
    exact = _all_logprobs(reference, prompts)
    theirs = np.abs(_all_logprobs(deepcopy(reference).to(torch.bfloat16), prompts) - exact).mean()
    assert theirs > 0, "transformers' bfloat16 equals its float32: the comparison says nothing"
    for quantization, cache_dtype, activation_bits, batch_invariant, limit in (
        ("none", "auto", "auto", "true", 1.2),
        ("q4", "auto", "16", "true", 1.2),
        ("q4", "auto", "8", "true", 1.2),
        ("q4", "auto", "8", "false", 1.2),  # steps of prompts are wide products
        ("int8", "auto", "8", "true", 1.5),  # weights and inputs of 8 bits, which only who asks for them gets
        ("none", "int8", "auto", "true", 1.2),
        ("q4", "int8", "16", "true", 1.2),
    ):
        runner = make_runner(
            directory, "bfloat16", quantization, cache_dtype, activation_bits, batch_invariant
        )
        ours = np.abs(_runner_logprobs(runner, prompts) - exact).mean()
        print(
            f"mean |d logprob|, {quantization}, inputs {activation_bits}, cache {cache_dtype}, batch invariance "
            f"{batch_invariant}: ours {ours:.5f}, transformers' bfloat16 {theirs:.5f}"
        )
        assert ours <= limit * theirs


def _all_logprobs(model: object, entries: list[Entry]) -> np.ndarray:
    """[n * NUM_NEW_TOKENS] of the oracle's tokens, each given what comes before it."""
    return np.concatenate([teacher_forced_logprobs(model, entry.prompt, entry.tokens) for entry in entries])


def _runner_logprobs(runner: Runner, entries: list[Entry]) -> np.ndarray:
    """The same from the runner, one step per entry.

    The last row computes the whole sequence; the others share its blocks and compute their own last token
    alone, writing nothing, as after a hit of the whole prompt. `allowed_token_ids` forces the oracle's token;
    logprobs are raw, taken before any mask.
    """
    return np.concatenate([_teacher_forced(runner, entry.prompt, entry.tokens) for entry in entries])


def _teacher_forced(runner: Runner, prompt: list[int], tokens: list[int]) -> np.ndarray:
    last = len(tokens) - 1
    num_blocks = (len(prompt) + len(tokens)) // runner.facts.kv.block_size + 1
    rows = []
    for slot, token in enumerate(tokens):
        known = prompt + tokens[:slot]
        row = NewRow(
            slot=slot,
            slot_version=0,
            content=RowContent(
                np.array(known, np.uint32), SamplingParams(allowed_token_ids=(token,), logprobs=0)
            ),
            emitted_token_ids=empty_u32(),
            num_computed_tokens=len(known) - 1 if slot < last else 0,
            num_cached_tokens=len(known) if slot < last else 0,
            block_ids=np.arange(1, num_blocks + 1, dtype=np.uint32),
            seed=0,
        )
        rows.append(row)
    runner.reset()
    plan = StepPlan(
        step_id=1,
        last_result_seen=0,
        new_rows=tuple(rows),
        chunk_slots=np.array([last], np.uint32),
        chunk_lengths=np.array([len(prompt) + last], np.uint32),
    )
    result = runner.execute(plan)
    assert result.token_ids.tolist() == tokens
    assert result.logprobs is not None
    return result.logprobs.logprobs[result.logprobs.offsets[:-1]]
