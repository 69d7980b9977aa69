"""Random weights as files: shards of safetensors with their index, as Hugging Face lays them out."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from services.worker.loader import Checkpoint, open_checkpoint
from services.worker.loader.safetensors import SHARD_INDEX_FILE
from triptych.checkpoint.config_json import CONFIG_FILE

SHARD_BYTES = 4 << 30


def write_checkpoint(
    directory: Path, config: dict[str, Any], device: torch.device, *, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write what `config` asks for in bfloat16, unless an earlier run finished it: the index is written last.

    Args:
        config: of config.json.
        device: draws the weights.
    """
    index_path = directory / SHARD_INDEX_FILE
    if index_path.is_file() and json.loads((directory / CONFIG_FILE).read_text()) == config:
        print(f"{directory}: is there already", flush=True)
        return
    directory.mkdir(parents=True, exist_ok=True)
    index_path.unlink(missing_ok=True)
    (directory / CONFIG_FILE).write_text(json.dumps(config, indent=1) + "\n")
    checkpoint = open_checkpoint(directory, format="random", device=device)
    shards = list(_shards(checkpoint, shard_bytes))
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        started = time.perf_counter()
        file_name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {name: checkpoint.read(name, torch.bfloat16).cpu() for name in names}
        save_file(tensors, directory / file_name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file_name)
        num_bytes = (directory / file_name).stat().st_size
        print(f"{file_name}: {num_bytes:,} bytes in {time.perf_counter() - started:.1f} s", flush=True)
    index_path.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}) + "\n")


def _shards(checkpoint: Checkpoint, shard_bytes: int) -> Iterator[list[str]]:
    """Names in the checkpoint's order, as many as fit into a file, at least one."""
    names: list[str] = []
    taken = 0
    for name, stored in checkpoint.tensors.items():
        size = 2 * math.prod(stored.shape)
        if names and taken + size > shard_bytes:
            yield names
            names, taken = [], 0
        names.append(name)
        taken += size
    if names:
        yield names
