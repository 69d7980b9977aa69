"""Tiny checkpoints and adapters that peft makes, with random numbers, and what peft computes with them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from triptych.checkpoint.adapter import CONFIG_FILE
from triptych.checkpoint.config_json import read_architecture
from triptych.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, WorkerConfig
from triptych_services.worker.adapters.store import AdapterStore
from triptych_services.worker.context.device import resolve_config
from triptych_services.worker.runner.sleepable_runner import SleepableRunner
from triptych_services.worker.runner.startup.create import create_runner

LLAMA = LlamaConfig(
    vocab_size=211,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=128,
    tie_word_embeddings=False,
    bos_token_id=1,
    eos_token_id=2,
    initializer_range=0.3,
)
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
BLOCK_SIZE = 5


def save_base(directory: Path, config: Any = LLAMA) -> Path:
    torch.manual_seed(7)
    LlamaForCausalLM(config).eval().save_pretrained(directory) if config is LLAMA else (
        AutoModelForCausalLM.from_config(config).eval().save_pretrained(directory)
    )
    return directory


def save_adapter(base: Path, directory: Path, *, seed: int, **changes: Any) -> Path:
    """Save an adapter whose factors are as large as the weights, so that no token stays what it was."""
    settings = {"r": 8, "lora_alpha": 16, "target_modules": list(PROJECTIONS), "task_type": "CAUSAL_LM"}
    model = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
        peft.LoraConfig(**{**settings, **changes}),
    )
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.12
    model.save_pretrained(directory)
    return directory


def merged(base: Path, adapter: Path | None) -> PreTrainedModel:
    """The model that peft makes of both."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return (
        model.eval()
        if adapter is None
        else peft.PeftModel.from_pretrained(model, adapter).merge_and_unload().eval()
    )


def make_runner(base: Path, **settings: Any) -> tuple[SleepableRunner, AdapterStore]:
    """A runner with adapters, and its store."""
    runner = create(base, **settings)
    return runner, runner.adapters


def create(
    base: Path,
    *,
    max_adapters: int = 4,
    max_rank: int = 64,
    max_bytes: int = 1 << 30,
    max_num_seqs: int = 8,
    budget: int = 64,
    dtype: str = "auto",
    **worker: Any,
) -> SleepableRunner:
    sizes = {"max_adapters": max_adapters, "max_adapter_rank": max_rank, "adapter_gib": max_bytes / 2**30}
    engine = EngineConfig(
        model=ModelConfig(model="somewhere/tiny", dtype=dtype),
        cache=CacheConfig(block_size=BLOCK_SIZE),
        scheduler=SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget),
        worker=WorkerConfig(**{"device": "cpu", "num_threads": 2, **sizes, **worker}),
    )
    config = resolve_config(engine, read_architecture(base))
    return create_runner(config, base, boot_id="b", on_phase=lambda phase, progress: None)


def change_config(**changes: Any) -> Callable[[Path], None]:
    """Return what changes fields of an adapter's config."""

    def change(directory: Path) -> None:
        path = directory / CONFIG_FILE
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change
