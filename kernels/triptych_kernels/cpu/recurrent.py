"""Layers with a recurrent state by the native kernels, which take a row's tokens one after the other."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from triptych_kernels.cpu.dtypes import DTYPES
from triptych_kernels.cpu.launch import Operand, launch
from triptych_kernels.state_batch import StateBatch


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
    launch(
        "causal_conv", batch.read_pages, x, dtype=DTYPES[x.dtype],
        x=x, x_stride=x.stride(0), weight=weight, bias=bias, out=out,
        channels=x.shape[1], taps=len(weight), has_silu=activation == "silu", **_pages(state, batch),
    )  # fmt: skip
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
    return _scan_heads(
        query, key, value, decay, rates, decay_bias, state, batch,
        beta=beta, beta_stride=beta.stride(0), beta_scale=beta_scale, skip=None, dt_min=0.0, dt_max=math.inf,
    )  # fmt: skip


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
    return _scan_heads(
        c, b, x, dt, rates, dt_bias, state, batch,
        beta=None, beta_stride=0, beta_scale=1.0, skip=skip, dt_min=dt_limits[0], dt_max=dt_limits[1],
    )  # fmt: skip


def selective_scan(
    x: Tensor, dt: Tensor, b: Tensor, c: Tensor, rates: Tensor, skip: Tensor, state: Tensor, batch: StateBatch
) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch(
        "selective_scan", batch.read_pages, x, dtype=DTYPES[x.dtype],
        x=x, x_stride=x.stride(0), dt=dt, dt_stride=dt.stride(0),
        b=b, b_stride=b.stride(0), c=c, c_stride=c.stride(0), rates=rates, skip=skip, out=out,
        channels=x.shape[1], state_size=len(rates), **_pages(state, batch),
    )  # fmt: skip
    return out


def _scan_heads(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    step: Tensor,
    rates: Tensor,
    step_bias: Tensor,
    state: Tensor,
    batch: StateBatch,
    **others: Operand,
) -> Tensor:
    """Launch the kernel that both kinds of heads have in common."""
    out = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    launch(
        "scan_heads", batch.read_pages, value, dtype=DTYPES[value.dtype],
        query=query, query_stride=query.stride(0), query_head_stride=query.stride(1),
        key=key, key_stride=key.stride(0), key_head_stride=key.stride(1),
        value=value, value_stride=value.stride(0), value_head_stride=value.stride(1),
        step=step, step_stride=step.stride(0), rates=rates, step_bias=step_bias, out=out,
        num_heads=value.shape[1], num_key_heads=key.shape[1], key_dim=key.shape[2], value_dim=value.shape[2],
        **others, **_pages(state, batch),
    )  # fmt: skip
    return out


def _pages(state: Tensor, batch: StateBatch) -> dict[str, Operand]:
    """Return the fields of `Pages` in pages.h."""
    guesses = batch.guesses
    memory = None if guesses is None else guesses.memory
    return {
        "pages_guesses": memory,
        "pages_slot_stride": 0 if memory is None else memory.stride(0),
        "pages_guess_stride": 0 if memory is None else memory.stride(1),
        "pages_slots": None if guesses is None else guesses.slots,
        "pages_replayed": None if guesses is None else guesses.replayed,
        "pages_guessed": None if guesses is None else guesses.counts,
        "pages_state": state,
        "pages_stride": state.stride(0),
        "pages_read": batch.read_pages,
        "pages_write": batch.write_pages,
        "pages_query_starts": batch.query_starts,
    }
