"""Measures the tiles of the Triton kernels on this machine's GPU and stores the fastest, so that no start-up tunes.

    python3 tools/tune_gpu.py                                  the most valuable choices, within 4 minutes
    python3 tools/tune_gpu.py --budget-s 1500                  all of them
    python3 tools/tune_gpu.py --only paged_attention_decode    some
    python3 tools/tune_gpu.py --list                           which there are, and what each depends on

Each choice is a kernel at a key: sizes and dtypes of a layer, and where the kernel allows it a bucket of rows. All
candidates that the kernel declares are compiled on all processors, and run at the shapes of Llama-3.1-8B, Qwen3-0.6B,
SmolLM2-135M and Mixtral-8x7B. One whose machine code may overwrite what a tensor core still reads is not run,
whatever its speed (benchmarks/gpu_tuning/wgmma_hazards.py). One whose result differs from the default's is refused:
by more than rounding explains, or by a bit, where rows must have the same bits in any batch. The others are timed as
replays of a CUDA graph over operands that no cache holds, the three fastest again and for longer, beside the default,
which stays unless it is beaten by 2 %.

The file, kernels/triptych_kernels/triton/tuned/<device>.json, is written after every choice and keeps what was measured
before. Workers on devices of exactly that name take their tiles from it; a kernel at a key that it does not have, or on
another device, takes the default in its source. To ship it: `make test-gpu` on that device, then commit the file;
tests see that it fits the kernels and that all of it compiles.

Needs torch, triton and numpy; no installed Triptych and no network.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    root = Path(__file__).resolve().parents[1]
    sys.path[:0] = [str(root), str(root / "libs"), str(root / "kernels")]
    from benchmarks.gpu_tuning.command import main

    sys.exit(main(sys.argv[1:], __doc__ or ""))
