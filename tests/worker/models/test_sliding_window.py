"""Models whose tokens see a window of keys, against transformers on tiny random checkpoints."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from tests.helpers.in_process import InProcessEngine
from tests.worker.deferred import DeferredStream
from tests.worker.models.checkpoints import (
    greedy_tokens,
    make_runner,
    random_prompts,
    save_checkpoint,
)
from tests.worker.models.families import FAMILIES, WINDOW
from tests.worker.runner.cuda import test_piecewise_graph
from tests.worker.runner.cuda.traced_graphs import TracedGraphs
from tests.worker.step_runs import assert_same, plans, runner_for
from tests.worker.tiny import tiny_architecture, tiny_config
from triptych.types.sampling import SamplingParams
from triptych_kernels.cpu.library import isa
from triptych_services.worker.loader.load import load_model
from triptych_services.worker.loader.random import RandomCheckpoint

graphs = test_piecewise_graph.graphs


def test_a_window_changes_what_is_said(tmp_path: Path) -> None:
    oracle = save_checkpoint(FAMILIES["Mistral"].create(), tmp_path)
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
    architecture = tiny_architecture(attention="sliding", window=WINDOW)
    config = tiny_config(architecture, max_num_seqs=8, num_blocks=80)
    model = load_model(config, RandomCheckpoint(architecture, seed=3))
    assert isinstance(model, nn.Module)
    alone, replayed = runner_for(model, config, None), runner_for(model, config, DeferredStream())
    for one, other in zip(plans(["greedy"], 12), plans(["greedy"], 12), strict=True):
        assert_same(replayed.execute(one), alone.execute(other))
    assert graphs.num_replayed > 8
