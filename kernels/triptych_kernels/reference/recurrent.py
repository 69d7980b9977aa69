"""Recurrent states, one token and one head at a time in float64."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from triptych_kernels.state_batch import StateBatch

_EPS = 1e-6


def _rows(state: Tensor, batch: StateBatch) -> Iterator[tuple[range, Tensor]]:
    """Yield each row's tokens, and its state in float64, which is kept as it then is."""
    batch.require_no_guesses("reference")
    pages = zip(batch.read_pages.tolist(), batch.write_pages.tolist(), strict=True)
    for (first, end), (read, write) in zip(pairwise(batch.query_starts.tolist()), pages, strict=True):
        own = state[read].double() if read else torch.zeros_like(state[0], dtype=torch.float64)
        yield range(first, end), own
        if write:
            state[write] = own


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    batch: StateBatch,
    *,
    activation: str | None,
) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    for tokens, past in _rows(state, batch):
        for token in tokens:
            seen = torch.cat((past, x[token : token + 1].double()))
            total = (seen * weight.double()).sum(0)
            if bias is not None:
                total += bias
            out[token] = silu(total) if activation == "silu" else total
            past.copy_(seen[1:])
    return out


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
    out = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    for tokens, own in _rows(state, batch):
        for token in tokens:
            for head in range(value.shape[1]):
                k = key[token, head // heads_per_key].double()
                q = query[token, head // heads_per_key].double()
                k, q = k / (k @ k + _EPS).sqrt(), q / (q @ q + _EPS).sqrt() / math.sqrt(len(q))
                a = torch.exp(
                    -rates[head].double() * softplus(decay[token, head].double() + decay_bias[head])
                )
                own[head] *= a
                correction = value[token, head].double() - k @ own[head]
                own[head] += torch.outer(k, beta_scale * beta[token, head].double().sigmoid() * correction)
                out[token, head] = q @ own[head]
    return out


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
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    for tokens, own in _rows(state, batch):
        for token in tokens:
            for head in range(x.shape[1]):
                group = head // heads_per_group
                step = softplus(dt[token, head].double() + dt_bias[head]).clamp(*dt_limits)
                value = x[token, head].double()
                own[head] *= torch.exp(-rates[head].double() * step)
                own[head] += torch.outer(b[token, group].double(), step * value)
                out[token, head] = c[token, group].double() @ own[head] + skip[head] * value
    return out


def selective_scan(
    x: Tensor, dt: Tensor, b: Tensor, c: Tensor, rates: Tensor, skip: Tensor, state: Tensor, batch: StateBatch
) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    for tokens, own in _rows(state, batch):
        for token in tokens:
            step, value = softplus(dt[token].double()), x[token].double()
            own *= torch.exp(-rates.double() * step)
            own += torch.outer(b[token].double(), step * value)
            out[token] = c[token].double() @ own + skip * value
    return out
