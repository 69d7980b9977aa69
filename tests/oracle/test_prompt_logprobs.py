"""Log-probabilities of prompts by the real model in float32 equal transformers', whole, in chunks and preempted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from services.worker.runner.base import Runner
from tests.helpers.in_process import InProcessEngine
from tests.oracle.entries import read_entries
from tests.oracle.reference import load_reference
from tests.oracle.test_greedy_tokens import MAX_MODEL_LEN, make_runner
from triptych.hub import resolve_model
from triptych.types.sampling import SamplingParams

pytestmark = pytest.mark.model

NUM_TOP = 3
SCORING = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, prompt_logprobs=NUM_TOP)
NEAR = {"rtol": 0, "atol": 1e-3}  # float32, summed in another order: 3e-4 at a second token, 3e-5 elsewhere


@pytest.fixture(scope="module")
def directory() -> Path:
    return resolve_model("embedded")


@pytest.fixture(scope="module")
def prompts(directory: Path) -> list[list[int]]:
    """One of a single token and some of a few chunks."""
    prompts = sorted((entry.prompt for entry in read_entries(directory)), key=len)
    return [prompts[0], *[prompt for prompt in prompts if 20 < len(prompt) < 400][1::3]]


@pytest.fixture(scope="module")
def runner(directory: Path) -> Runner:
    return make_runner(directory, "float32")


@pytest.fixture(scope="module")
def expected(directory: Path, prompts: list[list[int]]) -> list[np.ndarray]:
    """Per prompt [len - 1, vocab_size]: the log-softmax before each token but the first."""
    model = load_reference(directory)
    with torch.inference_mode():
        return [
            torch.log_softmax(model(torch.tensor([prompt])).logits[0, :-1].float(), dim=-1).numpy()
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


def test_beside_requests_that_do_not_ask_and_after_their_prefixes(
    runner: Runner, prompts: list[list[int]], expected: list[np.ndarray]
) -> None:
    engine = InProcessEngine(runner)
    plain = engine.generate(prompts, replace(SCORING, prompt_logprobs=None), first_number=100)
    assert engine.scheduler.num_cached_blocks
    assert check(engine, prompts, expected) == plain
