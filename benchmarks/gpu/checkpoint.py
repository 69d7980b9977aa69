"""Writes a checkpoint of Llama-3.1-8B's shape with random weights, 16 GB, for the time to first token.

    python -m benchmarks.gpu.checkpoint DIR

The weights are drawn on the GPU if there is one. A checkpoint that an earlier run finished is not written again.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.gpu.models import LLAMA_8B
from services.worker.loader.load import open_checkpoint
from services.worker.loader.safetensors import SINGLE_FILE
from triptych.checkpoint.config_json import CONFIG_FILE


def write_checkpoint(directory: Path, config: dict[str, Any], device: torch.device) -> None:
    """Write the weights of a config.json in bfloat16. It needs memory for all of them."""
    config_path, weights_path = directory / CONFIG_FILE, directory / SINGLE_FILE
    if weights_path.is_file() and json.loads(config_path.read_text()) == config:
        print(f"{directory}: is there already", flush=True)
        return
    directory.mkdir(parents=True, exist_ok=True)
    config_path.write_text(json.dumps(config, indent=1) + "\n")
    checkpoint = open_checkpoint(directory, format="random", device=device)
    tensors = {name: checkpoint.read(name, torch.bfloat16).cpu() for name in checkpoint.tensors}
    draft = weights_path.with_suffix(".draft")
    save_file(tensors, draft, metadata={"format": "pt"})
    draft.replace(weights_path)


if __name__ == "__main__":
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    write_checkpoint(Path(sys.argv[1]), LLAMA_8B, device)
