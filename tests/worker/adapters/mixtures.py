"""Tiny mixtures of experts, and adapters of their experts as peft makes them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GptOssConfig, MixtralConfig, Qwen2MoeConfig, Qwen3MoeConfig

from tests.worker.adapters.trained import save_adapter
from tests.worker.models.families import FAMILIES
from triptych.checkpoint.adapter import CONFIG_FILE, WEIGHTS_FILE

_SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_GEMMA4 = FAMILIES["Gemma 4 MoE"]
_OTHER_GEMMA4 = {
    "layer_types": ["full_attention"] * 4,  # of one kind, so that a row has one table of blocks
    "head_dim": 20,
    "tie_word_embeddings": False,  # else each token is followed by itself
}
MIXTURES = {
    "Mixtral": MixtralConfig(**_SIZES, num_local_experts=4, num_experts_per_tok=2),
    "Qwen3": Qwen3MoeConfig(**_SIZES, **_EXPERTS, head_dim=8, norm_topk_prob=True),
    "Qwen2": Qwen2MoeConfig(**_SIZES, **_EXPERTS, shared_expert_intermediate_size=20),
    "GPT-OSS": GptOssConfig(**_SIZES, num_local_experts=4, num_experts_per_tok=2, head_dim=8),
    "GLM 4.5": FAMILIES["GLM 4.5"].config(),
    "Gemma 4": replace(_GEMMA4, arguments=_GEMMA4.arguments | _OTHER_GEMMA4).config(),
}
_ROUTERS = {"GPT-OSS": "router", "Gemma 4": "router.proj"}
"""Names of routers, where they are not `gate`."""
BOTH = ["experts.gate_up_proj", "experts.down_proj"]
KINDS: dict[str, dict[str, Any]] = {
    "both": {"target_modules": ["q_proj"], "target_parameters": BOTH},
    "down": {"target_modules": [], "target_parameters": ["experts.down_proj"], "r": 3},
    "up": {
        "target_modules": ["v_proj"],
        "target_parameters": ["mlp.experts.gate_up_proj"],
        "r": 5,
        "use_rslora": True,
    },
    "router": {
        "target_modules": ["o_proj"],
        "target_parameters": ["gate.weight", *BOTH],
        "rank_pattern": {r".*\.gate_up_proj": 6, "gate.weight": 2},
        "alpha_pattern": {"gate.weight": 5, "experts.down_proj": 9},
    },
}


def save_mixture(directory: Path, name: str, **changes: Any) -> Path:
    torch.manual_seed(11)
    config = type(MIXTURES[name])(**MIXTURES[name].to_dict() | changes)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # some begin as zeros, or small
            parameter.copy_(
                torch.randn(parameter.shape) * (0.3 if parameter.ndim > 1 else 0.1) + (parameter.ndim == 1)
            )
    model.save_pretrained(directory)
    return directory


def kinds_of(name: str) -> dict[str, dict[str, Any]]:
    """The kinds of adapters that a mixture can have."""
    if (router := _ROUTERS.get(name)) is not None:
        changes = {"target_parameters": [f"{router}.weight", *BOTH], "rank_pattern": {}, "alpha_pattern": {}}
        kinds = {**KINDS, "router": {**KINDS["router"], **changes}}
        if name == "Gemma 4":  # keys are values, and experts are beside the MLP
            kinds["up"] = {**KINDS["up"], "target_modules": ["k_proj"], "target_parameters": BOTH[:1]}
        return kinds
    if (
        name == "GLM 4.5"
    ):  # of which peft takes an MLP's, the shared expert's and all experts' last projections
        return {**KINDS, "last": {"target_modules": ["down_proj"]}}
    if name == "Qwen2":
        shared = ["gate_proj", "up_proj", "down_proj", "shared_expert_gate"]
        return {
            **KINDS,
            "shared": {"target_modules": shared, "target_parameters": ["experts.down_proj"], "r": 4},
        }
    return KINDS


def save_adapters(base: Path, directory: Path, name: str) -> list[Path]:
    """One adapter of each kind."""
    return [
        save_adapter(base, directory / kind, seed=seed, **changes)
        for seed, (kind, changes) in enumerate(kinds_of(name).items())
    ]


def split_by_expert(
    adapter: Path, directory: Path, projections: Sequence[str], infix: str, num_experts: int
) -> Path:
    """Save an adapter of kind `both` under the names that each expert's modules have in a checkpoint.

    Args:
        projections: Names of gate, up and down.
        infix: Name of the mixture in place of `mlp`.
    """
    directory.mkdir()
    config = json.loads((adapter / CONFIG_FILE).read_text()) | {"target_parameters": None}
    (directory / CONFIG_FILE).write_text(json.dumps(config))
    tensors: dict[str, torch.Tensor] = {}
    stacked = load_file(adapter / WEIGHTS_FILE)
    for name, tensor in stacked.items():
        if ".experts." not in name:
            tensors[name] = tensor
    layers = sorted({name.partition(".experts.")[0] for name in stacked if ".experts." in name})
    for layer in layers:
        prefix = layer.replace(".mlp", f".{infix}")
        up_a, up_b, down_a, down_b = (
            stacked[f"{layer}.experts.{part}.weight"]
            for part in ("base_layer.lora_A", "base_layer.lora_B", "lora_A", "lora_B")
        )
        rank, columns = len(up_a) // num_experts, len(up_b) // 2
        for expert in range(num_experts):
            rows = slice(expert * rank, (expert + 1) * rank)
            own = zip(
                projections,
                (up_a, up_a, down_a),
                (up_b[:columns], up_b[columns:], down_b),
                strict=True,
            )
            for projection, a, b in own:
                module = f"{prefix}.experts.{expert}.{projection}"
                tensors[f"{module}.lora_A.weight"] = a[rows].clone()
                tensors[f"{module}.lora_B.weight"] = b[:, expert::num_experts].contiguous()
    save_file(tensors, directory / WEIGHTS_FILE)
    return directory
