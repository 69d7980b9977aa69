"""Contracts of layers with a recurrent state: causal convolution, gated delta rule, state space models.

Each op reads a row's state from a page, takes the row's tokens in their order, and writes the state after the last of
them to a page (`StateBatch`). States are float32, as is all arithmetic; results are rounded once to the input's dtype.

    tokens of a row       x0       x1       x2
                           |        |        |
    page read  ->  S  ->  S0   ->  S1   ->  S2  ->  page written
                           |        |        |
    results               y0       y1       y2

A row has the same bits in any batch, with any number of threads, and however its tokens are cut into steps, one by one
included; of plain torch only the first decimals are promised. NaN in a page that no row reads has no influence.

The last tokens of a row may be guesses (`GuessedTokens`). Its page is written before them, and what each of them brings
into the state is kept: of a convolution its input; of heads key, value, decay and factor of each; of Mamba 1 step size
and input of each channel, and copies of B. A state that is taken through these has the bits of one that has met the
tokens.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from triptych_kernels.registry import find_impl
from triptych_kernels.state_batch import StateBatch

_COPIED_CHANNELS = 64  # that share a copy of a guess's B: `kChannels` in selective_scan.cpp

__all__ = ["causal_conv", "gated_delta_scan", "selective_scan", "state_space_scan"]


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    batch: StateBatch,
    *,
    activation: str | None = None,
    impl: str | None = None,
) -> Tensor:
    """Convolve each channel over a row's tokens, the token's own and those before it.

        out[t, c] = activation(bias[c] + sum over j < taps of weight[j, c] * x[t - taps + 1 + j, c])

    The state is the last taps - 1 inputs, the oldest first.

    Args:
        x: [num_tokens, channels], may be a view of a larger tensor, the last axis dense.
        weight: [taps, channels] float32, contiguous; at least two taps.
        bias: [channels] float32, or None.
        state: [num_pages, taps - 1, channels] float32, each page dense.
        activation: silu, or None.
    Returns:
        [num_tokens, channels], a new tensor of x's dtype.
    Raises:
        ValueError: Shapes, dtypes or strides disagree; names both.
    """
    if x.ndim != 2 or x.stride(1) != 1:
        raise ValueError(
            f"causal_conv: x {list(x.shape)} must be [num_tokens, channels], the last axis dense"
        )
    channels, taps = x.shape[1], len(weight)
    _check_parameters("causal_conv", weight=(weight, (taps, channels)), bias=(bias, (channels,)))
    if taps < 2 or state.shape[1:] != (taps - 1, channels):
        raise ValueError(
            f"causal_conv: state {list(state.shape)} does not fit weight {list(weight.shape)}; it must be [num_pages, "
            "taps - 1, channels], with two taps or more"
        )
    if activation not in (None, "silu"):
        raise ValueError(f"causal_conv: activation {activation!r} must be 'silu' or None")
    batch.check("causal_conv", x, state, channels)
    out: Tensor = find_impl("causal_conv", x, impl)(x, weight, bias, state, batch, activation=activation)
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
    beta_scale: float = 1.0,
    impl: str | None = None,
) -> Tensor:
    """Apply the gated delta rule to each head's state S, [key_dim, value_dim].

        a = exp(-rates[h] * softplus(decay[t, h] + decay_bias[h]))
        k = key / |key|    q = query / (|query| * sqrt(key_dim))          |x| = sqrt(x . x + 1e-6)
        S = a * S + k (beta_scale * sigmoid(beta[t, h]) * (value - a * k . S))
        out = q . S

    Head h reads query and key head h // (num_heads // num_key_heads).

    Args:
        query: [num_tokens, num_key_heads, key_dim], may be a view of a larger tensor, the last axis dense.
        key: As `query`.
        value: [num_tokens, num_heads, value_dim] likewise, of the query's dtype.
        decay: [num_tokens, num_heads] likewise, of the query's dtype.
        beta: As `decay`.
        rates: [num_heads] float32, not negative.
        decay_bias: [num_heads] float32.
        state: [num_pages, num_heads, key_dim, value_dim] float32, each page dense.
        beta_scale: Above 1, what the state holds of a key may turn around: it is multiplied by less than 0.
    Returns:
        [num_tokens, num_heads, value_dim], a new tensor of the query's dtype.
    Raises:
        ValueError: Shapes, dtypes or strides disagree; names both.
    Source: Gated Delta Networks, arXiv:2412.06464; normalised and scaled as Qwen3-Next does. `beta_scale` 2 is that of
        arXiv:2411.12537.
    """
    heads = len(rates)
    _check_heads("gated_delta_scan", query, key, value, state, heads)
    _check_per_head("gated_delta_scan", query, heads, decay=decay, beta=beta)
    _check_parameters("gated_delta_scan", rates=(rates, (heads,)), decay_bias=(decay_bias, (heads,)))
    batch.check("gated_delta_scan", query, state, _kept_by_heads(heads, *state.shape[2:]))
    out: Tensor = find_impl("gated_delta_scan", query, impl)(
        query, key, value, decay, beta, rates, decay_bias, state, batch, beta_scale=beta_scale
    )
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
    dt_limits: tuple[float, float] = (0.0, math.inf),
    impl: str | None = None,
) -> Tensor:
    """Advance each head's state S, [state_size, head_dim], with one decay for all of it.

        d = clamp(softplus(dt[t, h] + dt_bias[h]), *dt_limits)
        S = exp(-rates[h] * d) * S + b (d * x)
        out = c . S + skip[h] * x

    Head h reads b and c of group h // (num_heads // num_groups).

    Args:
        x: [num_tokens, num_heads, head_dim], may be a view of a larger tensor, the last axis dense.
        dt: [num_tokens, num_heads] likewise, of x's dtype.
        b: [num_tokens, num_groups, state_size] likewise.
        c: As `b`.
        rates: [num_heads] float32, not negative.
        dt_bias: [num_heads] float32.
        skip: [num_heads] float32.
        state: [num_pages, num_heads, state_size, head_dim] float32, each page dense.
        dt_limits: Lower and upper limit of d.
    Returns:
        [num_tokens, num_heads, head_dim], a new tensor of x's dtype.
    Raises:
        ValueError: Shapes, dtypes or strides disagree; names both.
    Source: Mamba 2, arXiv:2405.21060.
    """
    heads = len(rates)
    _check_heads("state_space_scan", c, b, x, state, heads)
    _check_per_head("state_space_scan", x, heads, dt=dt)
    _check_parameters(
        "state_space_scan",
        rates=(rates, (heads,)),
        dt_bias=(dt_bias, (heads,)),
        skip=(skip, (heads,)),
    )
    batch.check("state_space_scan", x, state, _kept_by_heads(heads, *state.shape[2:]))
    out: Tensor = find_impl("state_space_scan", x, impl)(
        x, dt, b, c, rates, dt_bias, skip, state, batch, dt_limits=dt_limits
    )
    return out


def selective_scan(
    x: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    rates: Tensor,
    skip: Tensor,
    state: Tensor,
    batch: StateBatch,
    *,
    impl: str | None = None,
) -> Tensor:
    """Advance each channel's state, [state_size], with a decay for each element of it.

        d = softplus(dt[t, channel])
        S[n] = exp(-rates[n, channel] * d) * S[n] + d * b[t, n] * x[t, channel]
        out = sum over n of c[t, n] * S[n] + skip[channel] * x[t, channel]

    Args:
        x: [num_tokens, channels], may be a view of a larger tensor, the last axis dense.
        dt: As `x`, of its dtype.
        b: [num_tokens, state_size] likewise.
        c: As `b`.
        rates: [state_size, channels] float32, contiguous, not negative.
        skip: [channels] float32.
        state: [num_pages, state_size, channels] float32, each page dense.
    Returns:
        [num_tokens, channels], a new tensor of x's dtype.
    Raises:
        ValueError: Shapes, dtypes or strides disagree; names both.
    Source: Mamba, arXiv:2312.00752.
    """
    if x.ndim != 2 or dt.shape != x.shape or b.shape != (len(x), len(rates)) or c.shape != b.shape:
        raise ValueError(
            f"selective_scan: x {list(x.shape)}, dt {list(dt.shape)}, b {list(b.shape)} and c {list(c.shape)} must be "
            f"[num_tokens, channels] twice and [num_tokens, state_size = {len(rates)}] twice"
        )
    _check_dense("selective_scan", x, x=x, dt=dt, b=b, c=c)
    sizes = len(rates), x.shape[1]
    _check_parameters("selective_scan", rates=(rates, sizes), skip=(skip, sizes[1:]))
    if state.shape[1:] != sizes:
        raise ValueError(
            f"selective_scan: state {list(state.shape)} does not fit rates {list(rates.shape)}; it must be [num_pages, "
            "state_size, channels]"
        )
    batch.check("selective_scan", x, state, _kept_by_channels(sizes[1], sizes[0]))
    out: Tensor = find_impl("selective_scan", x, impl)(x, dt, b, c, rates, skip, state, batch)
    return out


def _check_heads(op: str, query: Tensor, key: Tensor, value: Tensor, state: Tensor, num_heads: int) -> None:
    """Check what multiplies a head's state from both sides."""
    if (
        query.ndim != 3
        or key.shape != query.shape
        or value.ndim != 3
        or value.shape[:2] != (len(query), num_heads)
        or num_heads % query.shape[1]
    ):
        raise ValueError(
            f"{op}: {list(query.shape)} and {list(key.shape)} must be [num_tokens, a divisor of the {num_heads} heads, "
            f"key_dim] twice, and {list(value.shape)} [num_tokens, num_heads, value_dim]"
        )
    _check_dense(op, query, query=query, key=key, value=value)
    if state.shape[1:] != (num_heads, query.shape[2], value.shape[2]):
        sizes = f"{num_heads} heads, {query.shape[2]}, {value.shape[2]}"
        raise ValueError(f"{op}: state {list(state.shape)} must be [num_pages, {sizes}]")


def _check_per_head(op: str, like: Tensor, num_heads: int, **operands: Tensor) -> None:
    for name, operand in operands.items():
        if operand.shape != (len(like), num_heads):
            raise ValueError(
                f"{op}: {name} {list(operand.shape)} must be [num_tokens = {len(like)}, num_heads = {num_heads}]"
            )
    _check_dense(op, like, **operands)


def _check_dense(op: str, like: Tensor, **operands: Tensor) -> None:
    for name, operand in operands.items():
        if operand.stride(-1) != 1 or operand.dtype != like.dtype:
            raise ValueError(
                f"{op}: {name} of {operand.dtype} with strides {operand.stride()} must be {like.dtype}, the last axis "
                "dense"
            )


def _check_parameters(op: str, **parameters: tuple[Tensor | None, tuple[int, ...]]) -> None:
    for name, (parameter, shape) in parameters.items():
        if parameter is None:
            continue
        if parameter.shape != shape or parameter.dtype != torch.float32 or not parameter.is_contiguous():
            raise ValueError(
                f"{op}: {name} {list(parameter.shape)} of {parameter.dtype} must be a contiguous {list(shape)} of "
                "torch.float32"
            )


def _kept_by_heads(num_heads: int, key_dim: int, value_dim: int) -> int:
    """Return the numbers that heads keep of a guess: key, value, decay and factor of each."""
    return num_heads * (key_dim + value_dim + 2)


def _kept_by_channels(channels: int, state_size: int) -> int:
    """Return the numbers that Mamba 1 keeps of a guess: step size and input of each channel, and copies of B."""
    return 2 * channels + -(-channels // _COPIED_CHANNELS) * state_size
