"""Models whose tokens see a window of keys, against transformers on tiny random checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn
from transformers import (
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from tests.helpers.in_process import InProcessEngine
from tests.worker.deferred import DeferredStream
from tests.worker.models.checkpoints import (
    SIZES,
    greedy_tokens,
    load_checkpoint,
    make_runner,
    random_prompts,
    save_checkpoint,
)
from tests.worker.models.sequences import CUTS, Sequences, assert_equals_oracle
from tests.worker.runner.cuda import test_piecewise_graph
from tests.worker.runner.cuda.traced_graphs import TracedGraphs
from tests.worker.step_runs import assert_same, plans, runner_for
from tests.worker.tiny import tiny_architecture, tiny_config
from triptych.types.sampling import SamplingParams
from triptych_kernels.cpu.library import isa
from triptych_services.worker.loader.load import load_model
from triptych_services.worker.loader.random import RandomCheckpoint

WINDOW = 6  # neither a multiple of a block nor of a chunk
graphs = test_piecewise_graph.graphs

MODELS: dict[str, tuple[type, Any]] = {
    "Mistral": (MistralForCausalLM, MistralConfig(**SIZES, head_dim=8, sliding_window=WINDOW)),
    "Mixtral": (MixtralForCausalLM, MixtralConfig(**SIZES, num_local_experts=4, sliding_window=WINDOW)),
    "Qwen2": (
        Qwen2ForCausalLM,
        Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=0),
    ),
}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_those_of_transformers(name: str, cut: str, tmp_path: Path) -> None:
    create, config = MODELS[name]
    oracle = save_checkpoint(create(config), tmp_path)
    model, architecture = load_checkpoint(tmp_path)
    assert architecture.sliding_window == WINDOW
    sequences = Sequences(model, architecture, (1, 5, WINDOW, WINDOW + 1, 18, 30))
    assert_equals_oracle(oracle, sequences, sequences.run(CUTS[cut]))


def test_a_window_changes_what_is_said(tmp_path: Path) -> None:
    create, config = MODELS["Mistral"]
    oracle = save_checkpoint(create(config), tmp_path)
    runner = make_runner(tmp_path)
    assert runner.facts.kernels == (f"{isa()} recorded" if isa() else "torch")
    prompts = random_prompts(1, 5, 7, 23, 40)
    said = InProcessEngine(runner, max_num_batched_tokens=16).generate(
        prompts, SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    )
    assert said == [greedy_tokens(oracle, prompt, 9) for prompt in prompts]
    oracle.config.sliding_window = None
    assert said != [greedy_tokens(oracle, prompt, 9) for prompt in prompts]


def test_steps_cut_at_attention_keep_the_window(graphs: TracedGraphs) -> None:
    architecture = tiny_architecture(sliding_window=WINDOW)
    config = tiny_config(architecture, max_num_seqs=8, num_blocks=80)
    model = load_model(config, RandomCheckpoint(architecture, seed=3))
    assert isinstance(model, nn.Module)
    alone, replayed = runner_for(model, config, None), runner_for(model, config, DeferredStream())
    for one, other in zip(plans(["greedy"], 12), plans(["greedy"], 12), strict=True):
        assert_same(replayed.execute(one), alone.execute(other))
    assert graphs.num_replayed > 8
