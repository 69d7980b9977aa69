"""Ranks that share layers with recurrent states give transformers' tokens: real processes, with their own engines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.processes import free_port
from tests.worker.models.checkpoints import greedy_tokens, random_prompts, save_checkpoint
from tests.worker.models.families import Tiny
from tests.worker.models.recurrent_families import RECURRENT_FAMILIES
from tests.worker.ranks import Case, run_ranks

PROMPTS = tuple(map(tuple, random_prompts(1, 5, 19, 11)))
NUM_NEW = 9
STATE_CASES = {
    "Mamba 2": (2, 4),
    "Qwen3-Next, 8 heads": (2, 4),  # two key heads, which four ranks have twice
    "Falcon-H1": (2, 4),
    "Falcon-H1, norm": (2, 4),  # two groups, each normalised by two of four ranks
    "Granite 4": (2,),
    "Granite 4, one group": (2, 4),
    "Jamba": (2, 4),
    "LFM2": (2, 4),
    "LFM2, biases": (2,),
    "Mamba": (2, 4),
    "Nemotron-H": (2,),
}
"""Family -> numbers of ranks."""


def with_arguments(family: str, **arguments: Any) -> Tiny:
    tiny = RECURRENT_FAMILIES[family]
    return replace(tiny, arguments={**tiny.arguments, **arguments})


STATE_MODELS = {
    **RECURRENT_FAMILIES,
    "Qwen3-Next, 8 heads": with_arguments("Qwen3-Next", linear_num_value_heads=8),
    "Granite 4, one group": with_arguments("Granite 4, dense", mamba_n_groups=1),
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("families", [list(STATE_CASES)[first::4] for first in range(4)])
def test_ranks_share_layers_with_states(families: list[str], tmp_path: Path) -> None:
    cases, expected = {}, {}
    for family in families:
        oracle = save_checkpoint(STATE_MODELS[family].create(), tmp_path / family)
        for num_ranks in STATE_CASES[family]:
            name = f"{family} by {num_ranks}"
            case = Case(tmp_path / family, num_ranks, port=free_port(), prompts=PROMPTS, num_new=NUM_NEW)
            cases[name] = case
            expected[name] = 2 * [greedy_tokens(oracle, prompt, NUM_NEW) for prompt in PROMPTS]
    answers = run_ranks(cases, tmp_path)
    for name, tokens in expected.items():
        assert answers[name] == [tokens] * cases[name].num_ranks, name
