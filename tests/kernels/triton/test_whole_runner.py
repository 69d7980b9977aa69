"""A runner on Triton's kernels, interpreted, gives the results of the CPU's runner."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from tests.worker.deferred import DeferredStream
from tests.worker.runner.cuda.traced_graphs import TracedGraphs
from tests.worker.sampling_kinds import KINDS
from tests.worker.step_runs import assert_same, plans, runner_for
from tests.worker.tiny import tiny_architecture, tiny_config
from triptych.checkpoint.architecture import ExpertsSpec, LatentSpec
from triptych_kernels import registry
from triptych_kernels.cpu.library import forced_isa
from triptych_services.worker.loader.load import load_model
from triptych_services.worker.loader.random import RandomCheckpoint
from triptych_services.worker.runner.model_runner import ModelRunner

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="on a device tests/worker/gpu runs the real thing"
)

FAMILIES = {
    "LlamaForCausalLM": {"num_heads": 6, "num_kv_heads": 2},
    "Qwen3ForCausalLM": {"num_heads": 2, "num_kv_heads": 1, "qk_norm": "head"},
    "YoutuForCausalLM": {
        "num_heads": 4,
        "num_kv_heads": 1,
        "value_dim": 12,
        "latent": LatentSpec(kv_rank=18, q_rank=22, nope_dim=10, rope_dim=6),
    },
    "MixtralForCausalLM": {"mlp": "experts", "experts": ExpertsSpec(4, 2)},
}
NUM_STEPS = 6


@pytest.fixture(autouse=True)
def plain_weights() -> Iterator[None]:
    """Pack no weights for native kernels, as on a device."""
    with forced_isa(""):
        yield


def tiny_runner(family: str, stream: DeferredStream | None) -> ModelRunner:
    architecture = tiny_architecture(
        name=family, hidden_size=48, intermediate_size=64, head_dim=16, num_layers=1, **FAMILIES[family]
    )
    config = tiny_config(architecture, max_num_seqs=8, num_blocks=80)
    model = load_model(config, RandomCheckpoint(architecture, seed=3))
    assert isinstance(model, nn.Module)
    return runner_for(model, config, stream)


@pytest.mark.parametrize(
    ("family", "kinds", "has_graphs"),
    [
        pytest.param("LlamaForCausalLM", list(KINDS), True, marks=pytest.mark.thorough),
        ("Qwen3ForCausalLM", ["sampled"], False),
        ("MixtralForCausalLM", ["greedy"], True),
        pytest.param("YoutuForCausalLM", ["greedy"], True, marks=pytest.mark.thorough),
    ],
)
def test_steps_in_flight_say_what_the_cpu_says(
    monkeypatch: pytest.MonkeyPatch, family: str, kinds: list[str], has_graphs: bool
) -> None:
    """Graphs record decodes whole, and the other steps around attention."""
    alone = tiny_runner(family, None)
    expected = [alone.execute(plan) for plan in plans(kinds, NUM_STEPS)]
    monkeypatch.setitem(registry.DEVICE_TO_IMPL, "cpu", "triton")
    graphs = TracedGraphs(monkeypatch)
    monkeypatch.setattr(
        "triptych_services.worker.runner.model_runner.create_graph_recorder",
        lambda *_, **__: graphs if has_graphs else None,
    )
    ahead = tiny_runner(family, DeferredStream())
    flying = [ahead.launch(plan) for plan in plans(kinds, NUM_STEPS)]
    for one, other in zip((step.wait() for step in flying), expected, strict=True):
        assert_same(one, other)
    assert graphs.num_recorded == (2 + (len(kinds) > 1) if has_graphs else 0)
    assert (graphs.num_replayed > 0) == has_graphs
