"""A process that loads a checkpoint, answers one prompt with one token, and says so: `start` measures it.

python -m benchmarks.gpu_figures.first_token DIR [--device cpu] [--tiny]
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

_PROMPT_TOKENS = 128


def main() -> None:
    started = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()

    import torch

    from benchmarks.gpu_figures.models import Mode, runner_for
    from benchmarks.gpu_figures.rows import REAL, TINY
    from benchmarks.gpu_figures.serving import serve

    imported = time.perf_counter()
    sizes = TINY if arguments.tiny else REAL
    runner = runner_for(arguments.directory, sizes, torch.device(arguments.device), Mode())
    ready = time.perf_counter()
    serve(runner, 1, min(_PROMPT_TOKENS, sizes.context), 1, seed=0)
    phases = {
        "imports": imported - started,
        "weights": runner.facts.load_s,
        "rest of set-up": ready - imported - runner.facts.load_s,
        "answer": time.perf_counter() - ready,
    }
    print(json.dumps(phases), flush=True)


if __name__ == "__main__":
    main()
