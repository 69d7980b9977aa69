"""A mixture of experts with packed weights: torch chooses the experts, native products compute."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from triptych_kernels.cpu.recording import NotRecordable
from triptych_kernels.torch.moe import mix_experts
from triptych_kernels.weights.packed import PackedWeight


def fused_moe(
    x: Tensor,
    router_logits: Tensor,
    w13: Sequence[PackedWeight],
    w2: Sequence[PackedWeight],
    top_k: int,
    renormalize: bool,
    activation: str,
    w13_bias: None,
    w2_bias: None,
) -> Tensor:
    if x.device.type == "meta":
        raise NotRecordable("how many rows each expert computes is known only when the router has spoken")

    def apply_expert(expert: int, inputs: Tensor) -> Tensor:
        return w2[expert].multiply(w13[expert].multiply(inputs, x.dtype, activation), torch.float32)

    return mix_experts(x, router_logits, top_k, renormalize, apply_expert)
