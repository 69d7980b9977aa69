"""The mixture's layer: which share of each expert a rank holds, and where its tensors go."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.worker.tiny import tiny_architecture, tiny_config
from triptych.errors import ConfigError
from triptych_kernels.cpu.library import forced_isa, isa
from triptych_kernels.ops import fused_moe
from triptych_services.worker.context.model_context import ModelContext
from triptych_services.worker.context.resolved_config import RankFacts
from triptych_services.worker.layers.checkpoint_tensors import load_weights
from triptych_services.worker.layers.moe import SparseMoE
from triptych_services.worker.layers.weights import find_weight_targets

HIDDEN, INNER, NUM_EXPERTS = 12, 20, 3


@pytest.fixture(params=["packed", "plain"], autouse=True)
def form(request: pytest.FixtureRequest) -> Iterator[None]:
    """Weights as the native products want them, and as plain parameters."""
    if request.param == "packed" and not isa():
        pytest.skip("no native kernels are built for this processor")
    with forced_isa(isa() if request.param == "packed" else ""):
        yield


def create(rank: int = 0, size: int = 1, *, renormalize: bool = True, inner: int = INNER) -> SparseMoE:
    place = RankFacts(tensor_parallel_rank=rank, tensor_parallel_size=size)
    context = ModelContext(replace(tiny_config(), rank=place))
    return SparseMoE(
        HIDDEN,
        inner,
        NUM_EXPERTS,
        2,
        renormalize=renormalize,
        context=context,
        prefix="m",
    )


def checkpoint() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}
    tensors = {"m.gate.weight": torch.randn(NUM_EXPERTS, HIDDEN, generator=generator)}
    for expert in range(NUM_EXPERTS):
        for name, shape in shapes.items():
            tensors[f"m.experts.{expert}.{name}.weight"] = torch.randn(shape, generator=generator)
    return tensors


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_the_ranks_results_sum_to_the_whole_mixture(num_ranks: int, renormalize: bool) -> None:
    tensors, x = checkpoint(), torch.randn(7, HIDDEN, generator=torch.Generator().manual_seed(2))
    total = torch.zeros(7, HIDDEN)
    for rank in range(num_ranks):
        layer = create(rank, num_ranks, renormalize=renormalize)
        load_weights(layer, tensors.items(), tiny_architecture())
        total += layer(x)
    experts = [f"m.experts.{expert}" for expert in range(NUM_EXPERTS)]
    w13 = [torch.cat([tensors[f"{e}.gate_proj.weight"], tensors[f"{e}.up_proj.weight"]]) for e in experts]
    w2 = [tensors[f"{e}.down_proj.weight"] for e in experts]
    logits = x @ tensors["m.gate.weight"].T
    expected = fused_moe(
        x, logits, torch.stack(w13), torch.stack(w2), top_k=2, renormalize=renormalize, impl="reference"
    )
    torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-4)


def test_ranks_share_experts_and_hold_the_whole_router() -> None:
    layer = create(1, 4)
    targets = find_weight_targets(layer)
    assert targets.keys() == checkpoint().keys()
    for name, target in targets.items():
        assert (target.start, target.length) == ((0, 3) if name == "m.gate.weight" else (5, 5)), name
    held = sum(target.num_elements for target in targets.values())
    assert held == NUM_EXPERTS * HIDDEN * (1 + 3 * INNER // 4)


def test_an_uneven_share_is_refused() -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size: 4 does not divide intermediate_size = 18"):
        create(0, 4, inner=18)
