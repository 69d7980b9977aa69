"""The fallback: transformers' own modules over our cache and products, against transformers and native models."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.helpers.in_process import InProcessEngine
from tests.worker.models.census import examine, read_findings
from tests.worker.models.checkpoints import greedy_tokens, random_prompts, save_checkpoint
from tests.worker.models.sequences import CUTS, Sequences, assert_equals_oracle
from tests.worker.models.small_configs import small_config
from tests.worker.tiny import tiny_architecture, tiny_config
from triptych.checkpoint.architecture import TRANSFORMERS_MODEL
from triptych.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, WorkerConfig
from triptych.errors import FeatureDisabled, ModelError
from triptych.types.sampling import SamplingParams
from triptych_kernels.cpu.library import isa
from triptych_services.worker.context.device import resolve_config
from triptych_services.worker.loader.load import load_model, open_checkpoint
from triptych_services.worker.models.choose import choose_architecture
from triptych_services.worker.models.fallback.describe import describe
from triptych_services.worker.models.fallback.experts import PackedMixture
from triptych_services.worker.runner.sleepable_runner import SleepableRunner
from triptych_services.worker.runner.startup import facts
from triptych_services.worker.runner.startup.create import create_runner
from triptych_services.worker.runner.startup.facts import numerics_of

RECORDED = (
    "gpt2",
    "gpt_neox",
    "gemma2",
    "llama",
    "qwen3",
    "phi",
    "opt",
    "stablelm",
    "cohere",
    "glm4",
    "olmo2",
)
"""Types of models whose steps are recorded on CPUs."""
MIXING = ("mamba", "falcon_h1", "lfm3", "qwen3_next", "zaya")
"""Types of models that mix tokens beside attention, or without it."""
MASKING = ("bloom", "doge")
"""Types of models that work on masks of their own."""


def save(model_type: str, directory: Path, **changes: Any) -> Any:
    config = small_config(model_type)
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    create = getattr(transformers, config.architectures[0])
    return save_checkpoint(create._from_config(config, attn_implementation="eager"), directory)


def runner_for(
    directory: Path, backend: str, *, quantization: str = "none", eager: bool = False
) -> SleepableRunner:
    """A runner of five requests, 16 tokens a step."""
    engine = EngineConfig(
        model=ModelConfig(model="somewhere/tiny", backend=backend, quantization=quantization),
        cache=CacheConfig(block_size=5),
        scheduler=SchedulerConfig(max_num_seqs=5, max_num_batched_tokens=16),
        worker=WorkerConfig(device="cpu", num_threads=1, enforce_eager=eager),
    )
    config = resolve_config(engine, choose_architecture(directory, backend))
    return create_runner(config, directory, boot_id="b", on_phase=lambda phase, progress: None)


def greedy(runner: SleepableRunner, prompts: list[list[int]]) -> list[list[int]]:
    engine = InProcessEngine(runner, max_num_batched_tokens=16)
    return engine.generate(prompts, SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("model_type", ["deepseek_v3", "gpt_oss", "gemma3n_text", "roberta"])
def test_logits_equal_transformers_for_all_cuts(model_type: str, tmp_path: Path) -> None:
    oracle = save(model_type, tmp_path)
    architecture = describe(tmp_path)
    model = load_model(tiny_config(architecture), open_checkpoint(tmp_path))
    with torch.inference_mode():
        for cut in CUTS.values():
            sequences = Sequences(model, architecture, (1, 3, 4, 5, 11, 18))
            assert_equals_oracle(oracle, sequences, sequences.run(cut))


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("model_type", RECORDED)
def test_steps_are_recorded_and_equal_transformers(model_type: str, tmp_path: Path) -> None:
    oracle = save(model_type, tmp_path)
    prompts = random_prompts(1, 4, 5, 23, 40)
    expected = [greedy_tokens(oracle, prompt, 9) for prompt in prompts]
    runner = runner_for(tmp_path, "transformers")
    assert runner.facts.kernels == (f"{isa()} recorded" if isa() else "torch")
    assert greedy(runner, prompts) == expected
    assert greedy(runner_for(tmp_path, "transformers", eager=True), prompts) == expected


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("model_type", ["gemma2", "llama"])
def test_native_models_say_the_same(model_type: str, tmp_path: Path) -> None:
    save(model_type, tmp_path)
    prompts = random_prompts(1, 5, 23)
    native, own = (choose_architecture(tmp_path, backend) for backend in ("auto", "transformers"))
    assert own.name == TRANSFORMERS_MODEL != native.name
    assert [replace(layer, intermediate_size=0, rope=None) for layer in own.layers] == [
        replace(layer, intermediate_size=0, rope=None, value_dim=layer.head_dim) for layer in native.layers
    ]
    assert greedy(runner_for(tmp_path, "native"), prompts) == greedy(
        runner_for(tmp_path, "transformers"), prompts
    )


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("model_type", ["gpt2", "persimmon"])
def test_quantized_weights_load(model_type: str, tmp_path: Path) -> None:
    save(model_type, tmp_path)
    runner = runner_for(tmp_path, "transformers", quantization="q8" if isa() else "none")
    assert len(greedy(runner, random_prompts(7))[0]) == 9


def mixtures(directory: Path, quantization: str = "none") -> list[PackedMixture]:
    config = replace(tiny_config(describe(directory)), quantization=quantization)
    model = load_model(config, open_checkpoint(directory))
    return [module for module in model.modules() if isinstance(module, PackedMixture)]


GEMMA4 = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 64}


@pytest.mark.skipif(not isa(), reason="no native kernels are built for this processor")
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("model_type", "changes", "activation"),
    [
        ("flex_olmo", {}, "silu"),
        ("gemma4_text", GEMMA4, "gelu_pytorch_tanh"),
        ("gpt_oss", {}, "swiglu_oai"),
        ("aria_text", {}, "silu"),
    ],
)
def test_mixtures_are_native_calls(
    model_type: str, changes: dict[str, Any], activation: str, tmp_path: Path
) -> None:
    """Gated, biased, with gates and ups in alternate rows, and transposed."""
    oracle = save(model_type, tmp_path, **changes)
    found = mixtures(tmp_path)
    assert found
    assert {mixture.activation for mixture in found} == {activation}
    prompts = random_prompts(1, 5, 23)
    expected = [greedy_tokens(oracle, prompt, 9) for prompt in prompts]
    assert greedy(runner_for(tmp_path, "transformers"), prompts) == expected


@pytest.mark.thorough
@pytest.mark.skipif(not isa(), reason="no native kernels are built for this processor")
def test_mixtures_are_quantized(tmp_path: Path) -> None:
    save("flex_olmo", tmp_path)
    exact, rounded = mixtures(tmp_path), mixtures(tmp_path, "q8")
    assert sum(m.w13[0].num_bytes for m in rounded) < 0.4 * sum(m.w13[0].num_bytes for m in exact)
    hidden, index = torch.randn(7, 64), torch.tensor([[0, 3]] * 7)
    weights = torch.rand(7, 2)
    for own, wanted in zip(rounded, exact, strict=True):
        expected = wanted(hidden, index, weights)
        assert (own(hidden, index, weights) - expected).norm() < 0.02 * expected.norm()


@pytest.mark.skipif(not isa(), reason="no native kernels are built for this processor")
def test_experts_that_compute_nothing_add_nothing(tmp_path: Path) -> None:
    save("flex_olmo", tmp_path)
    mixture, *_ = mixtures(tmp_path)
    hidden, weights = torch.randn(3, 64), torch.tensor([[0.5, -0.25]] * 3)
    beyond = len(mixture.w13)
    one = mixture(hidden, torch.tensor([[2, beyond]] * 3), weights)
    torch.testing.assert_close(one, mixture(hidden, torch.tensor([[2], [2], [2]]), weights[:, :1]))
    negative = mixture(hidden, torch.tensor([[beyond, 2]] * 3), weights)
    torch.testing.assert_close(negative, -0.5 * one)
    assert not mixture(hidden, torch.tensor([[beyond, beyond + 1]] * 3), weights).any()


def test_no_bits_are_promised_of_modules_of_another_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save("persimmon", tmp_path)
    engine = EngineConfig(worker=WorkerConfig(device="cpu", num_threads=1))
    config = resolve_config(engine, choose_architecture(tmp_path, "auto"))
    assert not config.batch_invariant
    asked = replace(engine, model=ModelConfig(batch_invariant="true"))
    with pytest.raises(FeatureDisabled, match="transformers' modules compute this model"):
        resolve_config(asked, config.architecture)
    digest = partial(numerics_of, processor="avx2", block_size=16)
    version = facts._version
    before, native = digest(config), replace(config, architecture=tiny_architecture())
    native_before = digest(native)
    monkeypatch.setattr(
        facts, "_version", lambda package: "0" if package == "transformers" else version(package)
    )
    assert digest(config) != before
    assert digest(native) == native_before


def test_auto_leaves_unknown_families_to_transformers(tmp_path: Path) -> None:
    save("persimmon", tmp_path)
    assert choose_architecture(tmp_path, "auto").name == TRANSFORMERS_MODEL
    with pytest.raises(FeatureDisabled, match="architecture PersimmonForCausalLM"):
        choose_architecture(tmp_path, "native")


def test_auto_leaves_no_error_of_a_native_family_to_transformers(tmp_path: Path) -> None:
    save("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 3}))
    with pytest.raises(ModelError, match="num_key_value_heads"):
        choose_architecture(tmp_path, "auto")


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("model_type", MIXING)
def test_models_that_mix_tokens_are_refused(model_type: str, tmp_path: Path) -> None:
    save(model_type, tmp_path)
    with pytest.raises(FeatureDisabled, match=r"mixes tokens outside of attention|does not attend"):
        describe(tmp_path)


@pytest.mark.parametrize("model_type", MASKING)
def test_models_with_masks_of_their_own_are_refused(model_type: str, tmp_path: Path) -> None:
    save(model_type, tmp_path)
    with pytest.raises(FeatureDisabled, match="without its own cache and masks"):
        describe(tmp_path)


def test_positions_of_a_step_are_refused(tmp_path: Path) -> None:
    save("bart", tmp_path)
    with pytest.raises(FeatureDisabled, match="computes positions by a token's place in the step"):
        describe(tmp_path)


def test_unknown_arguments_of_attention_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save("llama", tmp_path)
    attention = transformers.models.llama.modeling_llama.LlamaAttention
    forward = attention.forward
    monkeypatch.setattr(
        attention, "forward", lambda self, *args, **kwargs: forward(self, *args, bias=1.0, **kwargs)
    )
    with pytest.raises(FeatureDisabled, match=r"LlamaAttention at model\.layers\.0\.self_attn gives bias"):
        describe(tmp_path)


@pytest.mark.parametrize("where", ["", "text_config"])
def test_sizes_are_refused_before_memory_is_taken(where: str, tmp_path: Path) -> None:
    values = {"num_hidden_layers": 10**9}
    config = {"architectures": ["PersimmonForCausalLM"], "model_type": "persimmon"}
    config |= {where: values} if where else values
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ModelError, match=rf"config.json: {where}.?num_hidden_layers: 10{{9}} is above the limit 4096"
    ):
        choose_architecture(tmp_path, "auto")


def test_code_in_a_checkpoint_is_never_run(tmp_path: Path) -> None:
    save("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {
        "architectures": ["OwnForCausalLM"],
        "auto_map": {"AutoModelForCausalLM": "own.OwnForCausalLM"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        FeatureDisabled,
        match=r"no decoder or encoder of texts of that name; `auto_map` names code in the checkpoint",
    ):
        choose_architecture(tmp_path, "auto")


def test_random_weights_have_the_modules_names(tmp_path: Path) -> None:
    save("gpt2", tmp_path)
    architecture = describe(tmp_path)
    random = open_checkpoint(tmp_path, format="random", architecture=architecture)
    stored = open_checkpoint(tmp_path)
    shapes = {name: tensor.shape for name, tensor in random.tensors.items()}
    assert shapes == {name: tensor.shape for name, tensor in stored.tensors.items()}
    load_model(tiny_config(architecture), random)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("model_type", ["biogpt", "olmoe", "llama4_text", "gemma4", "bart"])
def test_a_sample_of_the_census(model_type: str) -> None:
    found, known = examine(model_type), read_findings()[model_type]
    assert (found.outcome, found.reason) == (known.outcome, known.reason)


def test_the_census_has_every_class() -> None:
    assert set(read_findings()) == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert not [finding for finding in read_findings().values() if finding.outcome == "wrong"]
