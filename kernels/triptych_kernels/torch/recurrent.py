"""Recurrent states in plain torch: all rows of a step advance together, token by token, in float32."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from triptych_kernels.state_batch import StateBatch

_EPS = 1e-6


def _scan(
    state: Tensor,
    batch: StateBatch,
    operands: Sequence[Tensor],
    out: Tensor,
    advance: Callable[..., Tensor],
) -> Tensor:
    """Advance each row's state by its tokens and fill `out`.

    Args:
        operands: [num_tokens, …] each.
        advance: Takes the states of some rows, [rows, …] float32, to be changed in place, and their next tokens in each
            of the operands, in float32; returns the tokens' results.
    """
    batch.require_no_guesses("plain torch")
    lens = batch.lens()
    read = batch.read_pages.long()
    # [num_rows, …], zeros where the state begins; `where` keeps out what page 0 may hold
    begins = (read == 0).view(-1, *(1 for _ in state.shape[1:]))
    own = torch.where(begins, 0.0, state[read])
    firsts = batch.query_starts[:-1].long()
    for step in range(max(lens, default=0)):
        going = [row for row, length in enumerate(lens) if length > step]
        if len(going) == len(lens):
            tokens = firsts + step
            out[tokens] = advance(own, *(x[tokens].float() for x in operands)).to(out.dtype)
            continue
        rows = torch.tensor(going, device=state.device)
        tokens, some = firsts[rows] + step, own[rows]
        out[tokens] = advance(some, *(x[tokens].float() for x in operands)).to(out.dtype)
        own[rows] = some
    write = batch.write_pages.long()
    kept = write != 0
    state[write[kept]] = own[kept]
    return out


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    batch: StateBatch,
    *,
    activation: str | None,
) -> Tensor:
    def advance(past: Tensor, new: Tensor) -> Tensor:
        seen = torch.cat((past, new[:, None]), 1)  # [rows, taps, channels]
        past.copy_(seen[:, 1:])
        total = (seen * weight).sum(1)
        if bias is not None:
            total += bias
        return silu(total) if activation == "silu" else total

    return _scan(state, batch, [x], torch.empty(x.shape, dtype=x.dtype, device=x.device), advance)


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
    heads_per_key = value.shape[1] // key.shape[1]

    def normalised(x: Tensor) -> Tensor:
        x = x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _EPS)
        return x.repeat_interleave(heads_per_key, dim=1)[:, :, None]  # [rows, num_heads, 1, key_dim]

    def advance(own: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor) -> Tensor:
        q, k = normalised(q) / math.sqrt(q.shape[-1]), normalised(k)
        own *= torch.exp(-rates * softplus(g + decay_bias))[:, :, None, None]
        corrected = beta_scale * b.sigmoid()[:, :, None, None] * (v[:, :, None] - k @ own)
        own += k.transpose(2, 3) * corrected
        return (q @ own)[:, :, 0]

    out = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    return _scan(state, batch, [query, key, value, decay, beta], out, advance)


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
    heads_per_group = x.shape[1] // b.shape[1]

    def advance(own: Tensor, value: Tensor, step: Tensor, enter: Tensor, leave: Tensor) -> Tensor:
        enter, leave = (each.repeat_interleave(heads_per_group, dim=1) for each in (enter, leave))
        step = softplus(step + dt_bias).clamp(*dt_limits)[:, :, None]
        own *= torch.exp(-rates[:, None] * step)[..., None]
        own += enter[..., None] * (step * value)[:, :, None]
        return (leave[:, :, None] @ own)[:, :, 0] + skip[:, None] * value

    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return _scan(state, batch, [x, dt, b, c], out, advance)


def selective_scan(
    x: Tensor, dt: Tensor, b: Tensor, c: Tensor, rates: Tensor, skip: Tensor, state: Tensor, batch: StateBatch
) -> Tensor:
    def advance(own: Tensor, value: Tensor, step: Tensor, enter: Tensor, leave: Tensor) -> Tensor:
        step = softplus(step)
        own *= torch.exp(-rates * step[:, None])
        own += enter[..., None] * (step * value)[:, None]
        return (leave[:, None] @ own)[:, 0] + skip * value

    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return _scan(state, batch, [x, dt, b, c], out, advance)
