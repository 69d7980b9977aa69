"""The state space of Mamba 2, in one launch."""

from __future__ import annotations

from torch import Tensor

from triptych_kernels.state_batch import StateBatch
from triptych_kernels.triton.recurrent.scan_heads import Heads, scan_heads


def state_space_scan(
    x: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    rates: Tensor,
    dt_bias: Tensor,
    skip: Tensor,
    state: Tensor,
    batch: StateBatch,
    *,
    dt_limits: tuple[float, float],
) -> Tensor:
    return scan_heads(Heads(c, b, x, dt, rates, dt_bias, skip=skip, limits=dt_limits), state, batch)
