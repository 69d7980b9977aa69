"""The mixture's layer: which share of each expert a rank holds, and where its tensors go."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.worker.tiny import tiny_architecture, tiny_config
from triptych.checkpoint.architecture import ExpertsSpec
from triptych.checkpoint.tensor_names import FusedTensor, TensorNames
from triptych.config import EngineConfig, ParallelConfig
from triptych.errors import ConfigError, FeatureDisabled, ModelError
from triptych_kernels.cpu.library import forced_isa, isa
from triptych_kernels.expert_choice import ExpertChoice
from triptych_kernels.ops import fused_moe
from triptych_kernels.reference.linear import gated_linear, linear
from triptych_services.worker.context.model_context import ModelContext
from triptych_services.worker.context.resolved_config import RankFacts
from triptych_services.worker.layers.checkpoint_tensors import load_weights
from triptych_services.worker.layers.mlp import create_mlp
from triptych_services.worker.layers.moe import SparseMoE
from triptych_services.worker.layers.quantization import UnreadTensor
from triptych_services.worker.layers.weights import find_weight_targets

HIDDEN, INNER, NUM_EXPERTS = 12, 20, 3


@pytest.fixture(params=["packed", "plain"], autouse=True)
def form(request: pytest.FixtureRequest) -> Iterator[None]:
    """Weights as the native products want them, and as plain parameters."""
    if request.param == "packed" and not isa():
        pytest.skip("no native kernels are built for this processor")
    with forced_isa(isa() if request.param == "packed" else ""):
        yield


def create(
    rank: int = 0,
    size: int = 1,
    *,
    renormalize: bool = True,
    inner: int = INNER,
    bias: bool = False,
    activation: str = "silu",
    is_gated: bool = True,
    expert_parallel: bool = False,
) -> SparseMoE:
    place = RankFacts(tensor_parallel_rank=rank, tensor_parallel_size=size)
    engine = EngineConfig(parallel=ParallelConfig(expert_parallel=expert_parallel))
    context = ModelContext(replace(tiny_config(), rank=place, engine=engine))
    return SparseMoE(
        HIDDEN,
        inner,
        ExpertsSpec(NUM_EXPERTS, 2, renormalize=renormalize, bias=bias, is_gated=is_gated),
        activation=activation,
        context=context,
        prefix="m",
    )


def checkpoint(*, bias: bool = False) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}
    modules = {"m.gate": (NUM_EXPERTS, HIDDEN)}
    for expert in range(NUM_EXPERTS):
        modules |= {f"m.experts.{expert}.{name}": shape for name, shape in shapes.items()}
    tensors = {}
    for name, shape in modules.items():
        tensors[f"{name}.weight"] = torch.randn(shape, generator=generator)
        if bias:
            tensors[f"{name}.bias"] = torch.randn(shape[0], generator=generator)
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
        x,
        logits,
        torch.stack(w13),
        torch.stack(w2),
        ExpertChoice(2, renormalize=renormalize),
        impl="reference",
    )
    torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_the_ranks_results_sum_to_the_mixture_with_biases(num_ranks: int) -> None:
    tensors, x = checkpoint(bias=True), torch.randn(7, HIDDEN, generator=torch.Generator().manual_seed(2))
    total = torch.zeros(7, HIDDEN)
    for rank in range(num_ranks):
        layer = create(rank, num_ranks, bias=True, activation="swiglu_oai")
        load_weights(layer, tensors.items(), tiny_architecture())
        total += layer(x)

    def stacked(*projections: str, kind: str) -> Tensor:
        return torch.stack(
            [
                torch.cat([tensors[f"m.experts.{expert}.{name}.{kind}"] for name in projections])
                for expert in range(NUM_EXPERTS)
            ]
        )

    expected = fused_moe(
        x,
        x @ tensors["m.gate.weight"].T + tensors["m.gate.bias"],
        stacked("gate_proj", "up_proj", kind="weight"),
        stacked("down_proj", kind="weight"),
        ExpertChoice(2),
        activation="swiglu_oai",
        w13_bias=stacked("gate_proj", "up_proj", kind="bias"),
        w2_bias=stacked("down_proj", kind="bias"),
        impl="reference",
    )
    torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bias", [True, False])
def test_ranks_of_whole_experts_sum_to_the_mixture(bias: bool) -> None:
    tensors, x = checkpoint(bias=bias), torch.randn(7, HIDDEN, generator=torch.Generator().manual_seed(2))
    whole, total = create(bias=bias, activation="swiglu_oai"), torch.zeros(7, HIDDEN)
    load_weights(whole, tensors.items(), tiny_architecture())
    for rank in range(NUM_EXPERTS):
        layer = create(rank, NUM_EXPERTS, bias=bias, activation="swiglu_oai", expert_parallel=True)
        own = f"m.experts.{rank}."
        parts = {
            name: tensor
            if name.startswith((own, "m.gate."))
            else UnreadTensor(tuple(tensor.shape), lambda *part: pytest.fail("read another rank's expert"))
            for name, tensor in tensors.items()
        }
        load_weights(layer, parts.items(), tiny_architecture())
        held = sum(target.num_elements for target in find_weight_targets(layer).values())
        router = sum(tensors[name].numel() for name in tensors if name.startswith("m.gate."))
        assert held == router + sum(tensors[name].numel() for name in tensors if name.startswith(own))
        total += layer(x)
    torch.testing.assert_close(total, whole(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("has_gate", [True, False])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_ranks_add_their_parts_of_a_shared_expert(num_ranks: int, has_gate: bool) -> None:
    spec = ExpertsSpec(NUM_EXPERTS, 2, shared_size=8, has_shared_gate=has_gate)
    generator = torch.Generator().manual_seed(3)
    shapes = {"gate_proj": (8, HIDDEN), "up_proj": (8, HIDDEN), "down_proj": (HIDDEN, 8)}
    shared = {
        f"m.shared_experts.{name}.weight": torch.randn(shape, generator=generator)
        for name, shape in shapes.items()
    }
    gate = {"m.shared_expert_gate.weight": torch.randn(1, HIDDEN, generator=generator)} if has_gate else {}
    x, total = torch.randn(7, HIDDEN, generator=generator), torch.zeros(7, HIDDEN)
    without = torch.zeros(7, HIDDEN)
    for rank in range(num_ranks):
        architecture = tiny_architecture(hidden_size=HIDDEN, num_heads=4, num_kv_heads=4)
        place = RankFacts(tensor_parallel_rank=rank, tensor_parallel_size=num_ranks)
        context = ModelContext(replace(tiny_config(architecture), rank=place))
        layer_spec = replace(architecture.layers[0], mlp="experts", experts=spec, intermediate_size=INNER)
        layer = create_mlp(layer_spec, context=context, prefix="m")
        load_weights(layer, (checkpoint() | shared | gate).items(), tiny_architecture())
        total += layer(x)
        alone = create(rank, num_ranks)
        load_weights(alone, checkpoint().items(), tiny_architecture())
        without += alone(x)
    names = [f"m.shared_experts.{name}.weight" for name in shapes]
    up, down = torch.cat([shared[name] for name in names[:2]]), shared[names[2]]
    expected = linear(gated_linear(x, up, None, "silu"), down, None, torch.float32, None)
    if has_gate:
        expected = expected * (x @ gate["m.shared_expert_gate.weight"].T).sigmoid()
    torch.testing.assert_close(total, without + expected, rtol=1e-4, atol=1e-4)


def test_quantized_experts_with_biases_are_refused_on_gpus() -> None:
    facts = RankFacts(device="meta")  # as a GPU, but without one
    context = ModelContext(replace(tiny_config(), rank=facts, quantization="q4"))
    with pytest.raises(FeatureDisabled, match=r"model\.quantization = q4: .* experts with biases"):
        SparseMoE(
            HIDDEN, INNER, ExpertsSpec(3, 2, bias=True), activation="swiglu_oai", context=context, prefix="m"
        )


@pytest.mark.parametrize(("num_ranks", "expert_parallel"), [(1, False), (2, False), (3, True)])
def test_experts_may_have_no_gate(num_ranks: int, expert_parallel: bool) -> None:
    tensors = {name: tensor for name, tensor in checkpoint().items() if "gate_proj" not in name}
    x = torch.randn(7, HIDDEN, generator=torch.Generator().manual_seed(2))
    total = torch.zeros(7, HIDDEN)
    for rank in range(num_ranks):
        layer = create(rank, num_ranks, activation="relu2", is_gated=False, expert_parallel=expert_parallel)
        load_weights(layer, tensors.items(), tiny_architecture())
        total += layer(x)
    w1, w2 = (
        torch.stack([tensors[f"m.experts.{expert}.{name}.weight"] for expert in range(NUM_EXPERTS)])
        for name in ("up_proj", "down_proj")
    )
    logits = x @ tensors["m.gate.weight"].T
    expected = fused_moe(x, logits, w1, w2, ExpertChoice(2), activation="relu2", impl="reference")
    torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-4)


def test_experts_without_a_gate_are_refused_on_gpus() -> None:
    context = ModelContext(replace(tiny_config(), rank=RankFacts(device="cuda")))  # on which nothing is made
    spec = ExpertsSpec(3, 2, is_gated=False)
    with pytest.raises(FeatureDisabled, match="experts without a gate, which only CPUs compute"):
        SparseMoE(HIDDEN, INNER, spec, activation="relu2", context=context, prefix="m")


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_stacked_tensors_are_those_of_the_experts(num_ranks: int) -> None:
    """Gate and up in alternate columns [num_experts, inputs, outputs], as GPT-OSS has them."""
    fused = tuple(
        FusedTensor(
            f"experts.{name}",
            tuple(f"experts.{part}" for part in parts),
            interleaved="rows",
            of_experts=True,
            is_transposed=True,
            suffixes=("", "_bias"),
        )
        for name, parts in (("gate_up", ("gate_proj", "up_proj")), ("down", ("down_proj",)))
    )
    names = TensorNames(renamed=(("m.gate.", "m.router."),), fused=fused)
    architecture = replace(tiny_architecture(), names=names)
    plain = checkpoint(bias=True)
    stacked = {f"m.router.{kind}": plain[f"m.gate.{kind}"] for kind in ("weight", "bias")}
    for fusion in fused:
        parts = [
            [plain[f"m.experts.{expert}.{part.split('.')[1]}.weight"] for part in fusion.parts]
            for expert in range(NUM_EXPERTS)
        ]
        biases = [
            [plain[f"m.experts.{expert}.{part.split('.')[1]}.bias"] for part in fusion.parts]
            for expert in range(NUM_EXPERTS)
        ]
        stacked[f"m.{fusion.name}"] = torch.stack([torch.stack(p, dim=1).flatten(0, 1).T for p in parts])
        stacked[f"m.{fusion.name}_bias"] = torch.stack([torch.stack(b, dim=1).flatten() for b in biases])
    x = torch.randn(7, HIDDEN, generator=torch.Generator().manual_seed(2))
    for rank in range(num_ranks):
        layers = [create(rank, num_ranks, bias=True) for _ in range(2)]
        load_weights(layers[0], plain.items(), tiny_architecture())
        load_weights(layers[1], stacked.items(), architecture)
        assert torch.equal(layers[0](x), layers[1](x))
    with pytest.raises(
        ModelError, match=r"m\.experts\.down: the checkpoint holds \[2, 20, 12\], .* \[3, 20, 12\]"
    ):
        load_weights(
            layers[1], (stacked | {"m.experts.down": stacked["m.experts.down"][:2]}).items(), architecture
        )


def test_ranks_share_experts_and_hold_the_whole_router() -> None:
    layer = create(1, 4)
    targets = find_weight_targets(layer)
    assert targets.keys() == checkpoint().keys()
    for name, target in targets.items():
        assert (target.start, target.length) == ((0, 3) if name == "m.gate.weight" else (5, 5)), name
    held = sum(target.num_elements for target in targets.values())
    assert held == NUM_EXPERTS * HIDDEN * (1 + 3 * INNER // 4)


def test_experts_that_ranks_cannot_share_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"expert_parallel: 2 ranks \(.*size\) cannot share num_experts = 3 evenly"
    ):
        create(0, 2, expert_parallel=True)


def test_an_uneven_share_is_refused() -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size: 4 does not divide intermediate_size = 18"):
        create(0, 4, inner=18)
