"""Launches every op that has Triton kernels at small odd sizes: a program for tools/sanitize_gpu.sh.

python3 -m tests.gpu.small_launches [cpu]
"""

from __future__ import annotations

import sys
from importlib import import_module

import torch

from tests.kernels.operands import SmallOperands
from triptych_kernels.registry import OPS


def main() -> None:
    draw = SmallOperands(torch.device(sys.argv[1] if len(sys.argv) > 1 else "cuda"))
    torch.manual_seed(0)
    for op in OPS.values():
        if "triton" not in op.impls:
            continue
        import_module(f"tests.kernels.ops.test_{op.name}").launch_small(draw)
        if draw.device.type == "cuda":
            torch.cuda.synchronize()
        print(f"launched {op.name}", flush=True)


if __name__ == "__main__":
    main()
