"""Ranks and stages of models with heads of two sizes say what transformers does, in groups of unequal blocks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.processes import free_port
from tests.worker.models.checkpoints import greedy_tokens, random_prompts, save_checkpoint
from tests.worker.models.families import FAMILIES
from tests.worker.ranks import Case, run_ranks

PROMPTS = tuple(map(tuple, random_prompts(1, 5, 19, 11)))
NUM_NEW = 9


FORMS = {
    "Gemma 4": 1,
    "Gemma 4 MoE": 2,
    "Gemma 4, keys as values": 1,
    "Gemma 4, shared keys": 1,
}
"""Family -> number of stages."""


@pytest.mark.thorough
def test_ranks_and_stages_share_layers_of_two_sizes(tmp_path: Path) -> None:
    cases, expected = {}, {}
    for family, num_stages in FORMS.items():
        directory = tmp_path / family
        oracle = save_checkpoint(FAMILIES[family].create(), directory)
        cases[family] = Case(directory, 2, num_stages, port=free_port(), prompts=PROMPTS, num_new=NUM_NEW)
        # again from prefixes that are cached then
        expected[family] = 2 * [greedy_tokens(oracle, prompt, NUM_NEW) for prompt in PROMPTS]
    answers = run_ranks(cases, tmp_path)
    for family, tokens in expected.items():
        assert answers[family] == [tokens] * cases[family].num_ranks, family
