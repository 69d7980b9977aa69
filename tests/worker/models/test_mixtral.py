"""MixtralForCausalLM against transformers on tiny random checkpoints."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import MixtralConfig, MixtralForCausalLM

from tests.helpers.in_process import InProcessEngine
from tests.worker.models.checkpoints import (
    SIZES,
    greedy_tokens,
    load_checkpoint,
    make_runner,
    random_prompts,
    save_checkpoint,
)
from tests.worker.models.sequences import CUTS, Sequences, assert_equals_oracle
from tests.worker.tiny import tiny_architecture, tiny_config
from triptych.checkpoint.architecture import ExpertsSpec
from triptych.errors import ModelError
from triptych.types.sampling import SamplingParams
from triptych_kernels.cpu.library import forced_isa, isa
from triptych_kernels.weights.quantized import QuantizedWeight
from triptych_services.worker.context.model_context import ModelContext
from triptych_services.worker.context.resolved_config import RankFacts
from triptych_services.worker.layers.moe import PackedExpert, PackedExperts, Router
from triptych_services.worker.layers.weights import find_weight_targets
from triptych_services.worker.loader.load import open_checkpoint
from triptych_services.worker.models.registry import create_model

PROMPTS = random_prompts(1, 4, 5, 23, 40)
NUM_NEW = 9


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny-mixtral")


@pytest.fixture(scope="module")
def oracle(directory: Path) -> Any:
    config = MixtralConfig(
        **SIZES, num_local_experts=5, num_experts_per_tok=2, experts_implementation="eager"
    )
    return save_checkpoint(MixtralForCausalLM(config), directory)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("cut", CUTS)
def test_logits_equal_transformers_for_all_cuts(oracle: Any, directory: Path, cut: str, native: bool) -> None:
    if native and not isa():
        pytest.skip("no native kernels are built for this processor")
    with forced_isa(isa() if native else ""):
        model, architecture = load_checkpoint(directory)
        sequences = Sequences(model, architecture, (1, 3, 4, 5, 11, 18))
        assert_equals_oracle(oracle, sequences, sequences.run(CUTS[cut]))


def test_experts_may_be_more_and_chosen_alone(tmp_path: Path) -> None:
    config = MixtralConfig(
        **SIZES, num_local_experts=7, num_experts_per_tok=1, experts_implementation="eager"
    )
    oracle = save_checkpoint(MixtralForCausalLM(config), tmp_path)
    model, architecture = load_checkpoint(tmp_path)
    assert architecture.layers[0].experts == ExpertsSpec(7, 1)
    sequences = Sequences(model, architecture, (1, 11, 18))
    assert_equals_oracle(oracle, sequences, sequences.run(CUTS["whole prompts"]))


def test_chunked_batches_equal_transformers(oracle: Any, directory: Path) -> None:
    runner = make_runner(directory)
    assert runner.facts.kernels == (f"{isa()} recorded" if isa() else "torch")
    engine = InProcessEngine(runner, max_num_batched_tokens=16)
    said = engine.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True))
    assert said == [greedy_tokens(oracle, prompt, NUM_NEW) for prompt in PROMPTS]


def test_experts_quantized_to_8_bits_say_nearly_the_same(oracle: Any, directory: Path) -> None:
    if not isa():
        pytest.skip("no native kernels are built for this processor")
    model, architecture = load_checkpoint(directory, quantization="q8")
    experts = [module for module in model.modules() if isinstance(module, PackedExpert)]
    assert (
        {type(expert.w13) for expert in experts}
        == {type(expert.w2) for expert in experts}
        == {QuantizedWeight}
    )
    sequences = Sequences(model, architecture, (18,))
    (logits,) = sequences.run(CUTS["whole prompts"])
    with torch.no_grad():
        expected = oracle(sequences.token_ids[0][None]).logits[0]
    error = (logits - expected).norm(dim=1) / expected.norm(dim=1)  # by token
    # the median: a token whose router all but ties may go to another expert, and is another token then
    assert 0 < error.median() < 0.03  # 8 bits: half a step is 1/254 of the largest of 32 weights


def test_a_missing_expert_is_named(oracle: Any, directory: Path, tmp_path: Path) -> None:
    oracle.save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    missing = "model.layers.1.block_sparse_moe.experts.4.w1.weight"
    tensors = {name: tensor.clone() for name, tensor in load_file(weights).items() if name != missing}
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=f"1 tensors are missing: {missing}"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_local_experts": None}, "num_local_experts: is missing"),
        ({"num_experts_per_tok": 6}, "num_experts_per_tok: 6 must be at most num_local_experts 5"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok: 0 must be an integer >= 1"),
    ],
)
def test_an_odd_number_of_experts_is_named(
    oracle: Any, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    oracle.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ModelError, match=message):
        load_checkpoint(tmp_path)


def test_random_weights_have_the_names_and_shapes_of_saved_ones(oracle: Any, directory: Path) -> None:
    random, saved = open_checkpoint(directory, format="random"), open_checkpoint(directory)
    assert {name: stored.shape for name, stored in random.tensors.items()} == {
        name: stored.shape for name, stored in saved.tensors.items()
    }


@pytest.mark.parametrize(
    ("quantization", "bytes_per_weight"), [("q4", 20 / 32), ("q8", 34 / 32), ("int8", 1)]
)
def test_quantized_experts_are_one_tensor_per_product_on_cuda(
    quantization: str, bytes_per_weight: float
) -> None:
    architecture = tiny_architecture(
        name="MixtralForCausalLM", hidden_size=64, num_heads=4, intermediate_size=128, num_layers=1,
        mlp="experts", experts=ExpertsSpec(4, 2),
    )  # fmt: skip
    config = replace(tiny_config(architecture), rank=RankFacts(device="meta"), quantization=quantization)
    model = create_model(context=ModelContext(config))
    (layer,) = (module for module in model.modules() if isinstance(module, PackedExperts))
    targets = find_weight_targets(layer)
    assert len(targets) == 3 * 4
    for name, stack, size in (("w13", layer.w13, 256 * 64), ("w2", layer.w2, 64 * 128)):
        scales = 4 * stack[0].out_features if quantization == "int8" else 0
        assert [weight.num_bytes for weight in stack] == [size * bytes_per_weight + scales] * 4
        assert [getattr(expert, name) for expert in layer.experts] == list(stack)
    routers = [module.weight for module in model.modules() if isinstance(module, Router)]
    assert [(type(weight), weight.dtype) for weight in routers] == [(torch.nn.Parameter, torch.float32)]


def test_on_a_device_the_experts_stand_in_two_tensors_per_layer(oracle: Any, directory: Path) -> None:
    architecture = load_checkpoint(directory)[1]
    model = create_model(
        context=ModelContext(replace(tiny_config(architecture), rank=RankFacts(device="meta")))
    )
    shapes = {tuple(parameter.shape) for parameter in model.parameters() if parameter.ndim == 3}
    assert shapes == {(5, 128, 32), (5, 32, 64)}
    assert torch.device("meta") in {parameter.device for parameter in model.parameters()}
