"""Stages say what one process says: real processes over gloo, each with its part of the layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from torch import nn

from tests.helpers.processes import free_port
from tests.worker.ranks import Answer, Case, asked_for, compute, run_ranks, save_checkpoint
from tests.worker.tiny import tiny_architecture, tiny_config
from triptych.checkpoint.architecture import IndexerSpec, LatentSpec
from triptych.config import EngineConfig, ParallelConfig
from triptych.errors import ConfigError, FeatureDisabled
from triptych_kernels.cpu.library import isa
from triptych_services.worker.context.model_context import ModelContext
from triptych_services.worker.context.resolve import resolve_for_device
from triptych_services.worker.context.resolved_config import DeviceTraits, RankFacts
from triptych_services.worker.models.registry import create_model, register_model
from triptych_services.worker.parallel.shares import stage_layers

SIZES: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 5,  # which no number of stages divides
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "torch_dtype": "float32",
}
MODELS: dict[str, dict[str, Any]] = {
    "biases": {"attention_bias": True, "mlp_bias": True},
    "tied": {"tie_word_embeddings": True, "num_hidden_layers": 3},
    "norms of heads": {"architectures": ["Qwen3ForCausalLM"]},
    "experts": {
        "architectures": ["MixtralForCausalLM"], "num_local_experts": 5, "num_experts_per_tok": 2,
    },
}  # fmt: skip
CASES = {
    **{f"two stages, {name}": (name, 2, 2, "none") for name in MODELS},
    "three stages of one layer, tied": ("tied", 3, 3, "none"),
    "two stages of two ranks, biases": ("biases", 4, 2, "none"),
    **({"two stages, 8 bits, tied": ("tied", 2, 2, "q8")} if isa() else {}),
}
"""Name -> model, ranks, stages, quantization."""
LOSES_A_STAGE = "three stages of one layer, tied"


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    models = {
        name: save_checkpoint(tmp_path_factory.mktemp("model"), SIZES | config)
        for name, config in MODELS.items()
    }
    return {
        name: Case(
            models[model],
            num_ranks,
            num_stages,
            port=free_port(),
            quantization=quantization,
            loses_a_rank=name == LOSES_A_STAGE,
        )
        for name, (model, num_ranks, num_stages, quantization) in CASES.items()
    }


@pytest.fixture(scope="module")
def answers(
    request: pytest.FixtureRequest, cases: dict[str, Case], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[Answer]]:
    asked = asked_for(request, cases, "two stages, biases", LOSES_A_STAGE)
    return run_ranks({name: cases[name] for name in asked}, tmp_path_factory.mktemp("ranks"))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", CASES)
def test_stages_say_what_one_says(
    name: str, cases: dict[str, Case], answers: dict[str, list[Answer]]
) -> None:
    case = cases[name]
    alone = compute(replace(case, num_ranks=1, num_stages=1, loses_a_rank=False), rank=0)
    first, last = answers[name][0], answers[name][-1]
    assert first.token_ids == alone.token_ids
    assert len({token for step in first.token_ids for token in step}) > 10, "the models do say something"
    assert last.token_ids == first.token_ids
    for ours, expected in zip(first.logprobs, alone.logprobs, strict=True):
        if case.num_ranks == case.num_stages:
            np.testing.assert_array_equal(ours, expected)  # the same operations in the same order
        else:
            # float32, sums over ranks in another order; logits of size 10
            np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=2e-4)


def test_each_stage_holds_its_layers(cases: dict[str, Case], answers: dict[str, list[Answer]]) -> None:
    alone = compute(replace(cases["two stages, biases"], num_ranks=1, num_stages=1), rank=0)
    stages = answers["two stages, biases"]
    assert sum(stage.num_layers for stage in stages) == alone.num_layers == 5
    assert sum(stage.weight_bytes for stage in stages) == alone.weight_bytes
    assert {stage.num_blocks for stage in stages} == {alone.num_blocks}
    assert {stage.fingerprint for stage in stages} == {alone.fingerprint}
    assert {stage.kernels for stage in stages} == {alone.kernels}


def test_the_first_stage_names_a_lost_one(answers: dict[str, list[Answer]]) -> None:
    # the stage between notices it when it waits for what it has sent, which may be later
    first = answers[LOSES_A_STAGE][0]
    assert len(first.after_the_loss) == 2
    assert all(lost.startswith("rank 0 of 3: receiving a result failed: ") for lost in first.after_the_loss)


def layers_of(num_stages: int, **sizes: int) -> list[int]:
    architecture = tiny_architecture(**sizes)
    stages = [
        stage_layers(architecture, rank=RankFacts(stage=stage, num_stages=num_stages))
        for stage in range(num_stages)
    ]
    assert [layer for stage in stages for layer in stage] == list(range(architecture.num_layers))
    return [len(stage) for stage in stages]


def test_layers_are_shared_by_their_weights() -> None:
    llama_70b = {
        "hidden_size": 8192, "intermediate_size": 28672, "num_heads": 64, "num_kv_heads": 8, "head_dim": 128,
        "num_layers": 80, "vocab_size": 128256,
    }  # fmt: skip
    assert layers_of(1, **llama_70b) == [80]
    assert layers_of(4, **llama_70b) == [21, 20, 20, 19]  # the head is as much as a layer
    assert layers_of(7, **llama_70b | {"num_layers": 8}) == [2, 1, 1, 1, 1, 1, 1]
    embedded = {
        "hidden_size": 576, "intermediate_size": 1536, "num_heads": 9, "num_kv_heads": 3, "head_dim": 64,
        "num_layers": 30, "vocab_size": 49152,
    }  # fmt: skip
    assert layers_of(2, **embedded) == [19, 11]  # the head is as much as eight


def test_a_stage_without_a_layer_is_refused() -> None:
    with pytest.raises(ConfigError, match="pipeline_parallel_size: 3 stages cannot share num_layers = 2"):
        layers_of(3, num_layers=2)


def test_a_model_that_cannot_be_cut_is_refused() -> None:
    class Whole(nn.Module):
        def __init__(self, *, context: ModelContext) -> None: ...

    register_model("WholeForCausalLM", Whole)  # type: ignore[arg-type]
    config = tiny_config(tiny_architecture(name="WholeForCausalLM"))
    config = replace(config, rank=RankFacts(num_stages=2))
    with pytest.raises(FeatureDisabled, match=r"pipeline_parallel_size = 2.*Whole has no `is_elsewhere`"):
        create_model(context=ModelContext(config))


def test_a_stage_that_begins_with_a_shared_choice_of_keys_is_refused() -> None:
    latents = [
        LatentSpec(18, 22, 10, 6, num_chosen_keys=7, indexer=IndexerSpec(3, 8, is_shared=is_shared))
        for is_shared in (False, True)
    ]
    architecture = tiny_architecture(num_kv_heads=1, head_dim=16, value_dim=12, latent=latents[0])
    layers = tuple(
        replace(layer, latent=latent) for layer, latent in zip(architecture.layers, latents, strict=True)
    )
    config = replace(tiny_config(replace(architecture, layers=layers)), rank=RankFacts(stage=1, num_stages=2))
    with pytest.raises(FeatureDisabled, match=r"pipeline_parallel_size = 2: layer 1 of .* attends to keys"):
        create_model(context=ModelContext(config))


def test_stages_with_cuda_graphs_are_refused() -> None:
    engine = EngineConfig(parallel=ParallelConfig(pipeline_parallel_size=2))
    with pytest.raises(
        FeatureDisabled, match=r"pipeline_parallel_size = 2.*set worker.enforce_eager to true"
    ):
        resolve_for_device(
            engine,
            tiny_architecture(),
            DeviceTraits(device="cuda:0", prefers_bfloat16=True, native_kernels=False),
        )
