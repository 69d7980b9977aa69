"""A model whose quantized weights are Triton's says what the CPU's say: its other ops stay the CPU's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from services.worker.layers import weights
from services.worker.layers.linear import GatedLinear
from services.worker.layers.quantization import WeightFormat
from services.worker.loader import load_model
from services.worker.loader.random import RandomCheckpoint
from tests.worker.teacher_forcing import teacher_forced_logprobs
from tests.worker.tiny import runner_for, tiny_architecture, tiny_config
from triptych.config.resolved import ResolvedConfig
from triptych_kernels.cpu.library import isa
from triptych_kernels.quantized_format import ChannelFormat
from triptych_kernels.triton.quantized_weight import GroupQuantizedWeight
from triptych_kernels.triton.w8a8_weight import ChannelQuantizedWeight

pytestmark = pytest.mark.skipif(
    not isa() or torch.cuda.is_available(), reason="compares with native kernels, in the interpreter"
)


ARCHITECTURE = tiny_architecture(hidden_size=32, intermediate_size=64, num_layers=1, num_heads=2, head_dim=16)


def create_for_triton(
    out_features: int,
    in_features: int,
    format: WeightFormat,
    *,
    gated: bool,
    bias: bool,
    config: ResolvedConfig,
) -> GroupQuantizedWeight | ChannelQuantizedWeight:
    """What `create_quantized_weight` creates on a CUDA device."""
    options = {"device": torch.device("cpu"), "gated": gated, "bias": bias}
    if isinstance(format, ChannelFormat):
        return ChannelQuantizedWeight(out_features, in_features, torch.float32, format.dtype, **options)
    return GroupQuantizedWeight(out_features, in_features, torch.float32, format, **options)


def logprobs(quantization: str) -> np.ndarray:
    """Of a few tokens, by a model of one layer with random weights and a tied head."""
    config = replace(tiny_config(ARCHITECTURE), quantization=quantization)
    model = load_model(config, RandomCheckpoint(ARCHITECTURE, seed=0))
    runner = runner_for(model, config, enforce_eager=True)
    return np.concatenate(teacher_forced_logprobs(runner, [[5, 9, 2, 7]], [1]))


def test_weights_in_4_bits_and_a_head_in_8_say_what_the_cpus_say(monkeypatch: pytest.MonkeyPatch) -> None:
    native = logprobs("q4")
    change = np.abs(logprobs("none") - native).min()
    monkeypatch.setattr(weights, "create_quantized_weight", create_for_triton)
    # the CPU's products round their inputs to 16 bits
    assert np.abs(logprobs("q4") - native).max() < 0.01 * change


@pytest.mark.parametrize("quantization", ["int8", "fp8"])
def test_a_layer_whose_inputs_are_rounded_too_is_loaded_and_multiplied(
    monkeypatch: pytest.MonkeyPatch, quantization: str
) -> None:
    monkeypatch.setattr(weights, "create_quantized_weight", create_for_triton)
    sizes = {"hidden_size": 64, "intermediate_size": 32, "activation": "silu", "bias": False, "prefix": "mlp"}
    plain = GatedLinear(**sizes, config=tiny_config())
    rounded = GatedLinear(**sizes, config=replace(tiny_config(), quantization=quantization))
    assert isinstance(rounded.weight, ChannelQuantizedWeight)
    torch.manual_seed(0)
    for name, target in rounded.weight_targets().items():
        rows = torch.randn(32, 64)
        target.load(name, rows)
        plain.weight_targets()[name].load(name, rows)
    x = torch.randn(5, 64)
    exact = plain(x)
    # of 8-bit floats, the interpreter rounds some by half
    assert (rounded(x) - exact).norm() < (0.02 if quantization == "int8" else 0.3) * exact.norm()
