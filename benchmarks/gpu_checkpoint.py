"""Writes a checkpoint of Llama-3.1-8B's shape with random weights, 16 GB of safetensors, for `benchmarks/gpu.py`.

    python3 benchmarks/gpu_checkpoint.py DIR [--device cpu]

What is whole already is left alone. The weights are drawn on the device.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if __name__ == "__main__":
    root = Path(__file__).resolve().parents[1]
    sys.path[:0] = [str(root), str(root / "libs"), str(root / "kernels")]
    import torch

    from benchmarks.gpu_figures.checkpoint import write_checkpoint
    from benchmarks.gpu_figures.models import LLAMA_8B, model_config
    from benchmarks.gpu_figures.rows import REAL, TINY

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="of a model that takes no space")
    arguments = parser.parse_args()
    config = model_config(LLAMA_8B, TINY if arguments.tiny else REAL)
    write_checkpoint(arguments.directory, config, torch.device(arguments.device))
