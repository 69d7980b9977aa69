"""The dtypes that the native kernels take, as they number them."""

from __future__ import annotations

import torch

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
"""Dtypes that the kernels compute with -> `DType` in kernel.h."""
KV_DTYPES = DTYPES | {torch.int8: 2}
"""Dtypes of KV caches that the kernels read and write -> `DType`."""
