"""Checkpoints that another tool has quantized: weights as the published layouts mean them, and refusals by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.worker.models.sequences import Sequences, assert_equals_oracle
from tests.worker.quantized_files import SCHEMES, is_quantized, save_quantized
from tests.worker.tiny import dense, tiny_config
from triptych.checkpoint.config_json import read_architecture
from triptych_kernels.cpu.library import isa
from triptych_kernels.weights.quantized import QuantizedWeight
from triptych_services.worker.layers.weights import linear_weights
from triptych_services.worker.loader.load import load_model, open_checkpoint
from triptych_services.worker.models.base import CausalLM

HELD = ("gptq", "gptq 8", "gptq rows", "auto-round")
"""Schemes with codes that products read; the others are dequantized."""


def load(directory: Path, quantization: str) -> CausalLM:
    """Load a model with activations in float32.

    Args:
        quantization: stored, or none: dequantized.
    """
    config = replace(tiny_config(read_architecture(directory)), dtype="float32", weight_dtype="float32")
    return load_model(replace(config, quantization=quantization), open_checkpoint(directory))


def logits(model: CausalLM, directory: Path) -> tuple[Sequences, list[torch.Tensor]]:
    sequences = Sequences(model, read_architecture(directory), lengths=(9, 4))
    return sequences, sequences.run(lambda row, left: left)


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("name", SCHEMES)
def test_weights_are_what_the_layout_means(tmp_path: Path, name: str) -> None:
    model = save_quantized(tmp_path, SCHEMES[name])
    checkpoint = open_checkpoint(tmp_path)
    expected = model.state_dict()
    assert checkpoint.tensors.keys() == expected.keys()
    for tensor, meant in expected.items():
        assert torch.equal(checkpoint.read(tensor, torch.float32), meant), tensor
        if is_quantized(tensor):
            assert checkpoint.tensors[tensor].type == SCHEMES[name].type


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", SCHEMES)
def test_dequantized_models_compute_what_transformers_does(tmp_path: Path, name: str) -> None:
    oracle = save_quantized(tmp_path, SCHEMES[name])
    assert_equals_oracle(oracle, *logits(load(tmp_path, "none"), tmp_path))


@pytest.mark.skipif(not isa(), reason="no native kernels are built for this processor")
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", SCHEMES)
def test_held_codes_mean_the_same_weights(tmp_path: Path, name: str) -> None:
    oracle = save_quantized(tmp_path, SCHEMES[name])
    held, plain = load(tmp_path, "stored"), load(tmp_path, "none")
    if name in HELD:
        num_held = sum(isinstance(weight, QuantizedWeight) for weight in linear_weights(held))
        assert num_held == len(linear_weights(held)) - 1, "all but the output head"
    for (module, layer), other in zip(plain.named_modules(), held.modules(), strict=True):
        if hasattr(layer, "weight"):
            assert torch.equal(dense(other.weight), dense(layer.weight)), module
    sequences, found = logits(held, tmp_path)
    for token_ids, ours in zip(sequences.token_ids, found, strict=True):
        expected = oracle(token_ids[None]).logits[0]
        assert (ours - expected).abs().max() < 1e-3 * expected.abs().max()
