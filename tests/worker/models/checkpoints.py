"""Tiny random checkpoints as transformers writes them, loaded here, and what transformers says of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.worker.tiny import tiny_config
from triptych.checkpoint.architecture import ModelArchitecture
from triptych.checkpoint.config_json import read_architecture
from triptych.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, WorkerConfig
from triptych_services.worker.context.device import resolve_config
from triptych_services.worker.loader.load import load_model, open_checkpoint
from triptych_services.worker.models.base import CausalLM
from triptych_services.worker.runner.sleepable_runner import SleepableRunner
from triptych_services.worker.runner.startup.create import create_runner

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attn_implementation": "eager",
}
"""Arguments of a config of transformers."""


def save_checkpoint(model: Any, directory: Path) -> Any:
    """Fill a model of transformers with weights whose logits differ, write it down and return it."""
    model.eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
        for name, buffer in model.named_buffers():
            # those that checkpoints store: of routers, and factors of layers
            if name.endswith(("correction_bias", "expert_bias", "layer_scalar")):
                drawn = torch.randn(buffer.shape, generator=generator) * 0.3
                buffer.copy_(drawn + 1 if name.endswith("layer_scalar") else drawn)
    model.save_pretrained(directory)
    return model


def load_checkpoint(
    directory: Path, *, quantization: str = "none", dtype: str = "float32"
) -> tuple[CausalLM, ModelArchitecture]:
    """The model, its activations in `dtype`."""
    architecture = read_architecture(directory)
    config = replace(tiny_config(architecture), quantization=quantization, dtype=dtype)
    return load_model(config, open_checkpoint(directory)), architecture


def make_runner(directory: Path) -> SleepableRunner:
    """A runner of five requests, 16 tokens a step."""
    engine = EngineConfig(
        model=ModelConfig(model="somewhere/tiny"),
        cache=CacheConfig(block_size=5, state_interval=10),
        scheduler=SchedulerConfig(max_num_seqs=5, max_num_batched_tokens=16),
        worker=WorkerConfig(device="cpu", num_threads=1),
    )
    config = resolve_config(engine, read_architecture(directory))
    return create_runner(config, directory, boot_id="b", on_phase=lambda phase, progress: None)


def random_prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randint(3, SIZES["vocab_size"], (length,), generator=generator).tolist() for length in lengths
    ]


@torch.inference_mode()
def greedy_tokens(oracle: Any, prompt: Sequence[int], num_new: int) -> list[int]:
    """Return transformers' greedy tokens after a prompt, each computed from all before it."""
    tokens = list(prompt)
    for _ in range(num_new):
        tokens.append(int(oracle(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]
