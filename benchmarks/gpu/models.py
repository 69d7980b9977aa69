"""Models of real shapes with random weights, drawn on the device: no file but a config.json."""

from __future__ import annotations

import json
import tempfile
import uuid
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.sizes import Sizes
from triptych.checkpoint.config_json import CONFIG_FILE, read_architecture
from triptych.config import CacheConfig, EngineConfig, LoadConfig, ModelConfig, SchedulerConfig, WorkerConfig
from triptych_services.worker.context.device import resolve_config
from triptych_services.worker.runner.base import Runner
from triptych_services.worker.runner.startup.create import create_runner

_BOTH = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA_8B: dict[str, Any] = {
    **_BOTH,
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "tie_word_embeddings": False,
    "rope_theta": 500000.0,
}
"""config.json of Llama-3.1-8B's shape; its scaling of positions costs nothing while it runs."""
QWEN3_06B: dict[str, Any] = {
    **_BOTH,
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "tie_word_embeddings": True,
    "rope_theta": 1000000.0,
}
"""config.json of Qwen3-0.6B's shape."""

_REDUCED = {
    "vocab_size": 513,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def model_config(config: dict[str, Any], sizes: Sizes) -> dict[str, Any]:
    """Return the same architecture, reduced if the sizes ask for that."""
    return config | _REDUCED if sizes.reduced_models else config


def num_multiplied_parameters(config: dict[str, Any]) -> int:
    """Return how many parameters each token is multiplied with: all but the embedding."""
    hidden, heads, kv_heads = (
        config[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads")
    )
    attention = hidden * config["head_dim"] * (2 * heads + 2 * kv_heads)
    layer = attention + 3 * hidden * config["intermediate_size"]
    return int(config["num_hidden_layers"] * layer + config["vocab_size"] * hidden)


def kv_elements(config: dict[str, Any]) -> int:
    """Return the elements of one token's keys and values in all layers."""
    return int(2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"])


def create_random_runner(config: dict[str, Any], sizes: Sizes, device: torch.device) -> Runner:
    """Return a runner of this architecture, its weights drawn on the device."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / CONFIG_FILE).write_text(json.dumps(config))
        return runner_for(directory, sizes, device, format="random")


def runner_for(directory: Path, sizes: Sizes, device: torch.device, *, format: str = "auto") -> Runner:
    """Return a runner of a model directory, for `streams` requests of `context` tokens and `output_len` more."""
    max_model_len = sizes.context + sizes.output_len + sizes.decode_steps
    num_blocks = 1 + sizes.streams * -(-max_model_len // CacheConfig().block_size)
    config = EngineConfig(
        model=ModelConfig(model=str(directory), max_model_len=max_model_len),
        load=LoadConfig(format=format),
        cache=CacheConfig(num_blocks=num_blocks),
        scheduler=SchedulerConfig(max_num_seqs=sizes.streams, max_num_batched_tokens=sizes.budget),
        worker=WorkerConfig(device=device.type),
    )
    resolved = resolve_config(config, read_architecture(directory))
    return create_runner(
        resolved, directory, boot_id=str(uuid.uuid4()), on_phase=lambda phase, progress: None
    )
