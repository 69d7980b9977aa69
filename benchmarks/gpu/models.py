"""Models of real shapes with random weights, drawn on the device: no file but a config.json."""

from __future__ import annotations

import json
import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.sizes import Sizes
from services.worker.context.device import resolve_config
from services.worker.runner.base import Runner
from services.worker.runner.startup.create import create_runner
from triptych.checkpoint.config_json import CONFIG_FILE, read_architecture
from triptych.config import CacheConfig, EngineConfig, LoadConfig, ModelConfig, SchedulerConfig, WorkerConfig


def _config(
    architecture: str,
    vocab_size: int,
    hidden_size: int,
    intermediate_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    **others: Any,
) -> dict[str, Any]:
    """Return config.json."""
    return {
        "architectures": [architecture],
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        **others,
    }


_LLAMA_3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LLAMA_8B = _config(
    "LlamaForCausalLM", 128256, 4096, 14336, 32, 32, 8, rope_theta=500000.0, rope_scaling=_LLAMA_3_ROPE
)
"""Llama-3.1-8B's shape."""
QWEN3_06B = _config(
    "Qwen3ForCausalLM", 151936, 1024, 3072, 28, 16, 8, rope_theta=1000000.0, tie_word_embeddings=True
)
"""Qwen3-0.6B's shape."""
MIXTRAL_HALF = _config(
    "MixtralForCausalLM", 32000, 4096, 14336, 16, 32, 8,
    rope_theta=1000000.0, num_local_experts=8, num_experts_per_tok=2,
)  # fmt: skip
"""Half of the 32 layers of Mixtral-8x7B: 47 GB, which leaves room for keys and values."""

_REDUCED = {
    "vocab_size": 513,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Counts from which the limits of a model are computed."""

    shared_parameters: int
    """Those of attention and the head: every token is multiplied with them. The embedding is no product."""
    expert_parameters: int
    """Those of one expert in all layers; a model without experts has one."""
    num_experts: int
    num_used: int
    """Experts of a token."""
    kv_elements: int
    """Elements of one token's keys and values in all layers."""
    head_dim: int

    @property
    def used_parameters(self) -> int:
        """Parameters that one token is multiplied with."""
        return self.shared_parameters + self.num_used * self.expert_parameters

    def read_parameters(self, num_tokens: int) -> float:
        """Return what a step reads: of the experts, as many as chance lets this many tokens choose."""
        chosen = self.num_experts * (1 - (1 - self.num_used / self.num_experts) ** num_tokens)
        return self.shared_parameters + chosen * self.expert_parameters


def model_config(config: dict[str, Any], sizes: Sizes) -> dict[str, Any]:
    """Return the same architecture, reduced if the sizes ask for that."""
    return config | _REDUCED if sizes.reduced_models else config


def shape_of(config: dict[str, Any]) -> ModelShape:
    """Count the parameters of a config.json."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads, head_dim = (
        config[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    expert = 3 * hidden * inner
    num_experts, num_used = config.get("num_local_experts", 1), config.get("num_experts_per_tok", 1)
    layers, head = config["num_hidden_layers"], config["vocab_size"] * hidden
    return ModelShape(
        shared_parameters=layers * attention + head,
        expert_parameters=layers * expert,
        num_experts=num_experts,
        num_used=num_used,
        kv_elements=layers * 2 * kv_heads * head_dim,
        head_dim=head_dim,
    )


@dataclass(frozen=True, slots=True)
class Mode:
    """How a model is run, in the config's words."""

    enforce_eager: bool = False
    quantization: str = "none"
    kv_dtype: str = "auto"

    @property
    def parameter_bytes(self) -> float:
        """Bytes of one linear weight; q4 has groups of 32 with a scale and an offset of 16 bits each."""
        return {"none": 2.0, "q4": 20 / 32, "int8": 1.0, "fp8": 1.0}[self.quantization]

    def element_bytes(self, head_dim: int) -> float:
        """Return the bytes of one element of keys and values; one of 8 bits has its share of a scale per head."""
        return 1.0 + 4.0 / head_dim if self.kv_dtype == "int8" else 2.0


def create_random_runner(config: dict[str, Any], sizes: Sizes, device: torch.device, mode: Mode) -> Runner:
    """Return a runner of this architecture, its weights drawn on the device."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / CONFIG_FILE).write_text(json.dumps(config))
        return runner_for(directory, sizes, device, mode, format="random")


def runner_for(
    directory: Path, sizes: Sizes, device: torch.device, mode: Mode, *, format: str = "auto"
) -> Runner:
    """Return a runner of a model directory, for `streams` requests of `context` tokens and `output_len` more."""
    max_model_len = sizes.context + sizes.output_len + sizes.decode_steps
    num_blocks = 1 + sizes.streams * -(-max_model_len // CacheConfig().block_size)
    config = EngineConfig(
        model=ModelConfig(model=str(directory), max_model_len=max_model_len, quantization=mode.quantization),
        load=LoadConfig(format=format),
        cache=CacheConfig(num_blocks=num_blocks, dtype=mode.kv_dtype),
        scheduler=SchedulerConfig(max_num_seqs=sizes.streams, max_num_batched_tokens=sizes.budget),
        worker=WorkerConfig(device=device.type, enforce_eager=mode.enforce_eager),
    )
    resolved = resolve_config(config, read_architecture(directory))
    return create_runner(
        resolved, directory, boot_id=str(uuid.uuid4()), on_phase=lambda phase, progress: None
    )
