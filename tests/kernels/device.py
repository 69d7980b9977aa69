"""The device of Triton kernels in tests: a CUDA device if there is one (`make test-gpu`), else the interpreter.

The interpreter computes on the CPU, block by block. It is right in float32 and float16; bfloat16 needs a device.
"""

from __future__ import annotations

import os

import torch

ON_DEVICE = torch.cuda.is_available()

TRITON_DTYPES = (torch.float32, torch.float16, *((torch.bfloat16,) if ON_DEVICE else ()))

if not ON_DEVICE:
    # read when a kernel is defined, so before any is imported; programs that compile for a device set it to 0
    os.environ.setdefault("TRITON_INTERPRET", "1")
