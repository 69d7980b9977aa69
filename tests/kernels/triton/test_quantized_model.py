"""A model whose quantized weights are Triton's says what the CPU's say: its other ops stay the CPU's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.worker.teacher_forcing import teacher_forced_logprobs
from tests.worker.tiny import runner_for, tiny_architecture, tiny_config
from triptych.checkpoint.architecture import ExpertsSpec, ModelArchitecture
from triptych_kernels.cpu.library import isa
from triptych_kernels.triton.linear.quantized_weight import GroupQuantizedWeight
from triptych_kernels.triton.linear.w8a8_weight import ChannelQuantizedWeight
from triptych_kernels.triton.moe.quantized_experts import GroupQuantizedExperts
from triptych_kernels.triton.moe.w8a8_experts import ChannelQuantizedExperts
from triptych_kernels.weights.formats import ChannelFormat
from triptych_services.worker.context.model_context import ModelContext
from triptych_services.worker.context.resolved_config import RankFacts
from triptych_services.worker.layers import moe, weights
from triptych_services.worker.layers.checkpoint_tensors import load_weights
from triptych_services.worker.layers.linear import GatedLinear
from triptych_services.worker.layers.moe import SparseMoE
from triptych_services.worker.layers.quantization import WeightFormat, choose_format
from triptych_services.worker.loader.load import load_model
from triptych_services.worker.loader.random import RandomCheckpoint

pytestmark = pytest.mark.skipif(
    not isa() or torch.cuda.is_available(), reason="compares with native kernels, in the interpreter"
)


ARCHITECTURE = tiny_architecture(hidden_size=32, intermediate_size=64, num_layers=1, num_heads=2, head_dim=16)
MIXTRAL = replace(
    ARCHITECTURE,
    name="MixtralForCausalLM",
    layers=(replace(ARCHITECTURE.layers[0], mlp="experts", experts=ExpertsSpec(4, 2)),),
)


def create_for_triton(
    out_features: int,
    in_features: int,
    format: WeightFormat,
    *,
    gated: bool,
    bias: bool,
    is_head: bool = False,
    context: ModelContext,
) -> GroupQuantizedWeight | ChannelQuantizedWeight:
    """Return the weight that `create_quantized_weight` creates on a CUDA device."""
    options = {"device": torch.device("cpu"), "gated": gated, "bias": bias}
    if isinstance(format, ChannelFormat):
        return ChannelQuantizedWeight(out_features, in_features, torch.float32, format.dtype, **options)
    return GroupQuantizedWeight(out_features, in_features, torch.float32, format, **options)


def create_experts_for_triton(
    out_features: int,
    in_features: int,
    sources: Sequence[Sequence[str]],
    *,
    gated: bool,
    bias: bool,
    context: ModelContext,
) -> GroupQuantizedExperts | ChannelQuantizedExperts:
    """Return the experts that `moe` creates on a CUDA device."""
    format = choose_format(
        [name for names in sources for name in names], in_features=in_features, context=context
    )
    options = {"device": torch.device("cpu"), "gated": gated}
    shape = (len(sources), out_features, in_features)
    if isinstance(format, ChannelFormat):
        return ChannelQuantizedExperts(*shape, torch.float32, format.dtype, **options)
    return GroupQuantizedExperts(*shape, torch.float32, format, **options)


def logprobs(quantization: str, architecture: ModelArchitecture = ARCHITECTURE) -> np.ndarray:
    """Return the log-probabilities of a few tokens, by a model of one layer with random weights and a tied head."""
    config = replace(tiny_config(architecture), quantization=quantization)
    model = load_model(config, RandomCheckpoint(architecture, seed=0))
    runner = runner_for(model, config, enforce_eager=True)
    return np.concatenate(teacher_forced_logprobs(runner, [[5, 9, 2, 7]], [1]))


def test_weights_in_4_bits_and_a_head_in_8_say_what_the_cpus_say(monkeypatch: pytest.MonkeyPatch) -> None:
    native = logprobs("q4")
    change = np.abs(logprobs("none") - native).min()
    monkeypatch.setattr(weights, "create_quantized_weight", create_for_triton)
    # the CPU's products round their inputs to 16 bits
    assert np.abs(logprobs("q4") - native).max() < 0.01 * change


@pytest.mark.parametrize(
    ("dtype", "largest_error"), [(torch.int8, 0.02), (torch.float8_e4m3fn, 0.3)], ids=["int8", "fp8"]
)
def test_a_layer_with_rounded_inputs_is_loaded_and_multiplied(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, largest_error: float
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 32, "activation": "silu", "bias": False, "prefix": "mlp"}
    plain = GatedLinear(**sizes, context=ModelContext(tiny_config()))
    monkeypatch.setattr(weights, "choose_format", lambda sources, **_: ChannelFormat(dtype))
    monkeypatch.setattr(weights, "create_quantized_weight", create_for_triton)
    rounded = GatedLinear(**sizes, context=ModelContext(tiny_config()))
    assert isinstance(rounded.weight, ChannelQuantizedWeight)
    torch.manual_seed(0)
    for name, target in rounded.weight_targets().items():
        rows = torch.randn(32, 64)
        target.load(name, rows)
        plain.weight_targets()[name].load(name, rows)
    x = torch.randn(5, 64)
    exact = plain(x)
    # of 8-bit floats, the interpreter rounds some by half
    assert (rounded(x) - exact).norm() < largest_error * exact.norm()


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # the interpreter says so
@pytest.mark.parametrize("quantization", ["q4", "q8"])
def test_quantized_experts_say_what_the_cpus_say(monkeypatch: pytest.MonkeyPatch, quantization: str) -> None:
    native = logprobs(quantization, MIXTRAL)
    change = np.abs(logprobs("none", MIXTRAL) - native).max()
    monkeypatch.setattr(weights, "create_quantized_weight", create_for_triton)
    monkeypatch.setattr(moe, "create_packed", create_experts_for_triton)
    # the CPU's products round their inputs to 16 bits
    assert np.abs(logprobs(quantization, MIXTRAL) - native).max() < 0.02 * change


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # the interpreter says so
@pytest.mark.parametrize(("quantization", "largest_error"), [("q8", 0.02), ("int8", 0.03), ("fp8", 0.3)])
def test_ranks_shares_of_quantized_experts_sum_to_the_whole(
    monkeypatch: pytest.MonkeyPatch, quantization: str, largest_error: float
) -> None:
    hidden, inner = 32, 64
    shapes = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    torch.manual_seed(0)
    tensors = {"m.gate.weight": torch.randn(2, hidden)}
    for expert in range(2):
        for name, shape in shapes.items():
            tensors[f"m.experts.{expert}.{name}.weight"] = torch.randn(shape) * shape[1] ** -0.5

    def mix(x: torch.Tensor, rank: int = 0, size: int = 1, quantization: str = "none") -> torch.Tensor:
        facts = RankFacts(tensor_parallel_rank=rank, tensor_parallel_size=size)
        context = ModelContext(replace(tiny_config(), rank=facts, quantization=quantization))
        layer = SparseMoE(hidden, inner, ExpertsSpec(2, 2), activation="silu", context=context, prefix="m")
        load_weights(layer, tensors.items(), ARCHITECTURE)
        return layer(x)

    x = torch.randn(3, hidden)
    exact = mix(x)
    monkeypatch.setattr(moe, "create_packed", create_experts_for_triton)
    total = sum(mix(x, rank, 2, quantization) for rank in range(2))
    # of 8-bit floats, the interpreter rounds some by half
    assert 0 < (total - exact).norm() < largest_error * exact.norm()
