"""Adapters of which each rank has a share, against what peft computes: real processes over gloo."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig

from tests.helpers.processes import free_port
from tests.worker.adapters.mixtures import MIXTURES, kinds_of, save_mixture
from tests.worker.adapters.trained import LLAMA, PROJECTIONS, merged, save_adapter, save_base
from tests.worker.models.checkpoints import greedy_tokens
from tests.worker.models.families import FAMILIES
from tests.worker.ranks import Answer, Case, adapted_prompts, asked_for, run_ranks, uneven_counts
from tests.worker.tiny import tiny_config
from triptych.checkpoint.adapter import WEIGHTS_FILE, read_adapter
from triptych.checkpoint.config_json import read_architecture
from triptych.errors import ModelError
from triptych_services.worker.adapters.sites import ModelSites
from triptych_services.worker.context.model_context import ModelContext
from triptych_services.worker.context.resolved_config import RankFacts
from triptych_services.worker.models.registry import create_model

EVERYWHERE = [*PROJECTIONS, "embed_tokens", "lm_head"]
KINDS: dict[str, dict[str, Any]] = {
    "all": {},
    "some": {"target_modules": ["q_proj", "v_proj", "down_proj"], "r": 3, "use_rslora": True},
    "ends": {"target_modules": EVERYWHERE, "r": 5},
    "one": {"r": 1, "layers_to_transform": [1]},
}
FUSED = {"all": {"target_modules": ["qkv_proj", "gate_up_proj", "o_proj", "down_proj"]}}
ONE_KEY_HEAD = {"tie_word_embeddings": True, "num_key_value_heads": 1}
MODELS: dict[str, tuple[PreTrainedConfig, dict[str, dict[str, Any]]]] = {
    "llama": (LLAMA, KINDS),
    "tied": (LlamaConfig(**LLAMA.to_dict() | ONE_KEY_HEAD), KINDS),
    "fused": (FAMILIES["Phi 3"].config(), FUSED),
    "Qwen2": (MIXTURES["Qwen2"], {name: kinds_of("Qwen2")[name] for name in ("both", "router", "shared")}),
    "GPT-OSS": (MIXTURES["GPT-OSS"], {name: kinds_of("GPT-OSS")[name] for name in ("both", "up")}),
}
CASES = {
    "two ranks": ("llama", 2, 1, False),
    "two stages": ("llama", 2, 2, False),
    "two ranks, fused": ("fused", 2, 1, False),
    "two ranks, eager": ("llama", 2, 1, True),
    "two ranks, tied": ("tied", 2, 1, False),
    "two stages, tied": ("tied", 2, 2, False),
    "two stages of two ranks": ("llama", 4, 2, False),
    "shares of experts": ("Qwen2", 2, 1, False),
    "shares of experts, eager": ("Qwen2", 2, 1, True),
    "shares of interleaved experts": ("GPT-OSS", 2, 1, False),
    "whole experts": ("Qwen2", 2, 1, False),
    "whole interleaved experts": ("GPT-OSS", 2, 1, False),
    "two stages of experts": ("Qwen2", 2, 2, False),
}
"""Name -> model, ranks, stages, eager."""


@pytest.fixture(scope="module")
def cases(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    asked = {name: CASES[name] for name in asked_for(request, CASES)}
    models = {model for model, *_ in asked.values()}
    bases = {
        name: (save_mixture if name in MIXTURES else save_base)(
            tmp_path_factory.mktemp("base"), name if name in MIXTURES else config
        )
        for name, (config, _) in MODELS.items()
        if name in models
    }
    adapters = {
        model: tuple(
            save_adapter(bases[model], tmp_path_factory.mktemp("adapter") / name, seed=seed, **changes)
            for seed, (name, changes) in enumerate(kinds.items())
        )
        for model, (_, kinds) in MODELS.items()
        if model in models
    }
    return {
        name: Case(
            bases[model],
            num_ranks,
            num_stages,
            port=free_port(),
            enforce_eager=is_eager,
            expert_parallel=name.startswith("whole"),
            expert_counts=uneven_counts(bases[model]) if name.startswith("whole") else "",
            adapters=adapters[model],
        )
        for name, (model, num_ranks, num_stages, is_eager) in asked.items()
    }


@pytest.fixture(scope="module")
def answers(cases: dict[str, Case], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Answer]]:
    return run_ranks(cases, tmp_path_factory.mktemp("ranks"))


def unmerged(base: Path, adapter: Path | None) -> Any:
    """Peft adds to the outputs of modules here. Merging would change both ends of a model that ties them."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return (model if adapter is None else peft.PeftModel.from_pretrained(model, adapter)).eval()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", CASES)
def test_ranks_say_what_peft_says(
    name: str, cases: dict[str, Case], answers: dict[str, list[Answer]]
) -> None:
    case = cases[name]
    oracle = merged if CASES[name][0] in MIXTURES else unmerged  # with experts unmerged takes minutes
    prompts = adapted_prompts(len(case.adapters))
    expected = [
        greedy_tokens(oracle(case.directory, adapter), prompt, 12)
        for prompt, adapter in zip(prompts, [*case.adapters, None], strict=True)
    ]
    for answer in answers[name]:  # no rank is sent tokens by another of its stage
        assert answer.adapted == expected
    first = answers[name][0].adapted
    assert len(set(map(tuple, first))) == len(first), "each adapter changes something"


@pytest.mark.parametrize(
    ("module", "refusing"),
    [
        ("model.layers.0.self_attn.q_proj", []),
        ("model.layers.0.self_attn.x_proj", [0]),
        ("model.layers.2.self_attn.x_proj", [1]),
        ("model.layers.3.self_attn.q_proj", [0, 1]),
        ("model.norm", [1]),
        ("elsewhere", [0, 1]),
    ],
)
def test_a_module_that_no_stage_has_is_refused_by_one(
    tmp_path: Path, module: str, refusing: list[int]
) -> None:
    base = save_base(tmp_path / "base")
    directory = save_adapter(
        base, tmp_path / "adapter", seed=1, target_modules=["q_proj"], layers_to_transform=[0]
    )
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {
        key.replace(name, f"base_model.model.{module}"): tensor
        for key, tensor in load_file(directory / WEIGHTS_FILE).items()
    }
    save_file(tensors, directory / WEIGHTS_FILE)
    files = read_adapter(directory, max_rank=8, max_bytes=1 << 20, num_layers=3)
    config, refused = tiny_config(read_architecture(base)), []
    for stage in range(2):
        place = replace(config, rank=RankFacts(stage=stage, num_stages=2))
        model: Any = create_model(context=ModelContext(place))
        try:
            ModelSites.of_model(model, config.architecture, num_slots=1, max_rank=8).check(files)
        except ModelError as error:
            refused.append((stage, str(error).partition(": ")[2]))
    why = f"{module}: is no projection of this model that adapters are applied to"
    assert refused == [(stage, why) for stage in refusing]
