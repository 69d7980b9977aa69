"""Writes a checkpoint of Llama-3.1-8B's shape with random weights, 16 GB of safetensors, for the time to first token.

    python -m benchmarks.gpu.checkpoint DIR [--device cpu]

The weights are drawn on the device. A checkpoint that an earlier run finished is not written again.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.gpu.models import LLAMA_8B, model_config
from benchmarks.gpu.sizes import REAL, TINY
from services.worker.loader import open_checkpoint
from services.worker.loader.safetensors import SHARD_INDEX_FILE
from triptych.checkpoint.config_json import CONFIG_FILE

SHARD_TENSORS = 64
"""Tensors of one file; of Llama-3.1-8B, some 3.5 GB."""


def write_checkpoint(directory: Path, config: dict[str, Any], device: torch.device) -> None:
    """Write the weights of a config.json in bfloat16; the index is written last."""
    index_path = directory / SHARD_INDEX_FILE
    if index_path.is_file() and json.loads((directory / CONFIG_FILE).read_text()) == config:
        print(f"{directory}: is there already", flush=True)
        return
    directory.mkdir(parents=True, exist_ok=True)
    index_path.unlink(missing_ok=True)
    (directory / CONFIG_FILE).write_text(json.dumps(config, indent=1) + "\n")
    checkpoint = open_checkpoint(directory, format="random", device=device)
    names = list(checkpoint.tensors)
    weight_map: dict[str, str] = {}
    for first in range(0, len(names), SHARD_TENSORS):
        shard = names[first : first + SHARD_TENSORS]
        file_name = f"model-{first:05}.safetensors"
        tensors = {name: checkpoint.read(name, torch.bfloat16).cpu() for name in shard}
        save_file(tensors, directory / file_name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file_name)
        print(f"{file_name}: {(directory / file_name).stat().st_size:,} bytes", flush=True)
    index_path.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="of a model that takes no space")
    arguments = parser.parse_args()
    config = model_config(LLAMA_8B, TINY if arguments.tiny else REAL)
    write_checkpoint(arguments.directory, config, torch.device(arguments.device))
