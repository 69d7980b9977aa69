"""The gated delta rule, in one launch."""

from __future__ import annotations

from torch import Tensor

from triptych_kernels.state_batch import StateBatch
from triptych_kernels.triton.recurrent.scan_heads import Heads, scan_heads


def gated_delta_scan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    rates: Tensor,
    decay_bias: Tensor,
    state: Tensor,
    batch: StateBatch,
    *,
    beta_scale: float,
) -> Tensor:
    return scan_heads(
        Heads(query, key, value, decay, rates, decay_bias, beta=beta, beta_scale=beta_scale), state, batch
    )
