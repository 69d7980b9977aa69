"""Ranks and stages that share layers with recurrent states give transformers' tokens: real processes, with their own
engines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.processes import free_port
from tests.worker.models.checkpoints import greedy_tokens, random_prompts, save_checkpoint
from tests.worker.models.families import FULL, Tiny
from tests.worker.models.recurrent_families import LINEAR, RECURRENT_FAMILIES
from tests.worker.ranks import Case, run_ranks
from triptych.checkpoint.config_json import read_architecture
from triptych_kernels.cpu.library import isa
from triptych_services.worker.context.resolved_config import RankFacts
from triptych_services.worker.parallel.shares import stage_layers

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
    "Nemotron-H, experts": (2,),
    "Nemotron-H, whole experts": (2,),
    "Nemotron-H, latent experts": (2,),
    "Nemotron-H, whole latent experts": (2,),
}
"""Family -> numbers of ranks."""


def with_arguments(family: str, **arguments: Any) -> Tiny:
    tiny = RECURRENT_FAMILIES[family]
    return replace(tiny, arguments={**tiny.arguments, **arguments})


STATE_MODELS = {
    **RECURRENT_FAMILIES,
    "Nemotron-H, whole experts": RECURRENT_FAMILIES["Nemotron-H, experts"],
    "Nemotron-H, whole latent experts": RECURRENT_FAMILIES["Nemotron-H, latent experts"],
    "Qwen3-Next, 8 heads": with_arguments("Qwen3-Next", linear_num_value_heads=8),
    "Granite 4, one group": with_arguments("Granite 4, dense", mamba_n_groups=1),
    "Qwen3-Next, states first": with_arguments("Qwen3-Next", layer_types=[LINEAR, LINEAR, FULL, FULL]),
    "Qwen3-Next, keys first": with_arguments("Qwen3-Next", layer_types=[FULL, FULL, LINEAR, LINEAR]),
    "Nemotron-H, MLPs last": with_arguments("Nemotron-H", layers_block_type=[LINEAR, FULL, "mlp", "mlp"]),
    "Nemotron-H, MLPs first": with_arguments("Nemotron-H", layers_block_type=["mlp", "mlp", FULL, LINEAR]),
}
STAGE_CASES = {
    "Falcon-H1": (2, "ks ks|ks ks"),
    "Jamba": (2, "s k|s s"),
    "Granite 4": (2, "s s|k s"),
    "Mamba": (2, "s s|s s"),
    "Mamba 2": (4, "s s|s s"),
    "Qwen3-Next, states first": (2, "s s|k k"),
    "Qwen3-Next, keys first": (2, "k k|s s"),
    "Qwen3-Next, 8 heads": (4, "s s|k s"),
    "Nemotron-H, experts": (2, "s -|k -"),
    "Nemotron-H, MLPs last": (2, "s k|- -"),
    "Nemotron-H, MLPs first": (4, "- -|k s"),
}
"""Family -> number of ranks of two stages, and what the layers of each keep: k keys and values, s states."""


@pytest.mark.thorough
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("families", [list(STATE_CASES)[first::4] for first in range(4)])
def test_ranks_share_layers_with_states(families: list[str], tmp_path: Path) -> None:
    cases, expected = {}, {}
    for family in families:
        oracle = save_checkpoint(STATE_MODELS[family].create(), tmp_path / family)
        for num_ranks in STATE_CASES[family]:
            name = f"{family} by {num_ranks}"
            case = Case(
                tmp_path / family,
                num_ranks,
                port=free_port(),
                expert_parallel="whole" in family,
                prompts=PROMPTS,
                num_new=NUM_NEW,
            )
            cases[name] = case
            expected[name] = 2 * [greedy_tokens(oracle, prompt, NUM_NEW) for prompt in PROMPTS]
    answers = run_ranks(cases, tmp_path)
    for name, tokens in expected.items():
        assert answers[name] == [tokens] * cases[name].num_ranks, name


@pytest.mark.thorough
@pytest.mark.skipif(not isa(), reason="states are taken back by the native kernels")
def test_ranks_take_back_states_behind_guesses(tmp_path: Path) -> None:
    """Requests are preempted meanwhile."""
    families = "Qwen3-Next, 8 heads", "Mamba"
    cases = {}
    for family in families:
        save_checkpoint(STATE_MODELS[family].create(), tmp_path / family)
        cases[family] = Case(
            tmp_path / family,
            2,
            port=free_port(),
            prompts=tuple((5, 6, 7 + number) * 5 for number in range(5)),
            num_new=30,
            num_blocks=30,
            preempts=family != "Mamba",  # without keys and values there is no lack of blocks
            guesses=True,
            knows_answers=True,
        )
    for first, second in run_ranks(cases, tmp_path).values():
        half = len(first.tokens) // 2
        assert first.tokens[half:] == first.tokens[:half], "as without guesses"
        assert second.steps == first.steps, "each rank takes back its own part"
        num_guesses, num_right = first.guesses["knowing"]
        assert 100 < num_right < num_guesses, "right ones and wrong ones"


def kept_by_stages(directory: Path) -> str:
    architecture = read_architecture(directory)
    kept = [
        ("k" if layer.attention != "none" else "") + ("s" if layer.state else "") or "-"
        for layer in architecture.layers
    ]
    stages = [stage_layers(architecture, rank=RankFacts(stage=stage, num_stages=2)) for stage in range(2)]
    return "|".join(" ".join(kept[layer] for layer in stage) for stage in stages)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("families", [list(STAGE_CASES)[first::5] for first in range(5)])
def test_stages_keep_the_states_of_their_layers(families: list[str], tmp_path: Path) -> None:
    """Hits and preemptions included; some stages keep nothing of a kind, or nothing at all."""
    cases, expected = {}, {}
    for family in families:
        oracle = save_checkpoint(STATE_MODELS[family].create(), tmp_path / family)
        num_ranks, kept = STAGE_CASES[family]
        assert kept_by_stages(tmp_path / family) == kept
        cases[family] = Case(
            tmp_path / family,
            num_ranks,
            num_stages=2,
            port=free_port(),
            prompts=PROMPTS,
            num_new=NUM_NEW,
            num_blocks=14,
            preempts="k" in kept,
        )
        expected[family] = 2 * [greedy_tokens(oracle, prompt, NUM_NEW) for prompt in PROMPTS]
    answers = run_ranks(cases, tmp_path)
    for family, tokens in expected.items():
        assert answers[family] == [tokens] * cases[family].num_ranks, family
