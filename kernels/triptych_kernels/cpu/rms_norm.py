"""Root-mean-square normalisation on CPUs."""

from __future__ import annotations

import torch
from torch import Tensor

from triptych_kernels.cpu.launch import launch
from triptych_kernels.cpu.library import DTYPES


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    out = torch.empty(x.shape, dtype=weight.dtype, device=x.device)
    total = None if residual is None else torch.empty(x.shape, dtype=torch.float32, device=x.device)
    launch(
        "rms_norm", x, DTYPES[x.dtype], DTYPES[weight.dtype],
        x, x.stride(0), weight, residual, total, out, x.shape[1:-1].numel(), x.shape[-1], eps,
    )  # fmt: skip
    return out if total is None else (out, total)
