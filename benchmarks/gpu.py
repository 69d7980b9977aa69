"""Every figure of the GPU worker in one run: limits, kernels, models, start.

    python3 benchmarks/gpu_checkpoint.py /some/disk/8b          once, for the time to first token
    python3 benchmarks/gpu.py --checkpoint /some/disk/8b        all of it, within 8 minutes
    python3 benchmarks/gpu.py --only "attention: decode" limits
    python3 benchmarks/gpu.py --device cpu --tiny               no GPU: sees that all of it runs

Needs torch, triton, numpy and safetensors, and neither an installed Triptych nor a network. Models have random
weights, drawn on the device. Figures are medians over rounds, printed as they come and written to --json after each;
one that fails is an error in its row, and the rest goes on.

Kernels are timed as replays of a CUDA graph over operands that no cache holds, models by the clock of the host. The
limits are this device's own: the bandwidth of a large copy, bytes read and written counted, and the rate of a large
bfloat16 product of random numbers.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    root = Path(__file__).resolve().parents[1]
    sys.path[:0] = [str(root), str(root / "libs"), str(root / "kernels")]
    from benchmarks.gpu_figures.command import main

    sys.exit(main(sys.argv[1:], __doc__ or ""))
