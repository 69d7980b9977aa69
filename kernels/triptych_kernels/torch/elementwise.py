"""Normalisation, gated activation and looking up rows in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional


def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, residual: Tensor | None, out_dtype: torch.dtype
) -> Tensor | tuple[Tensor, Tensor]:
    summed = x if residual is None else x + residual
    if weight is not None and summed.dtype == weight.dtype == out_dtype:
        out = torch.rms_norm(summed, weight.shape, weight, eps)
    else:
        scales = None if weight is None else weight.float()
        out = torch.rms_norm(summed.float(), summed.shape[-1:], scales, eps).to(out_dtype)
    return out if residual is None else (out, summed)


def layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    residual: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor | tuple[Tensor, Tensor]:
    summed = x if residual is None else x + residual
    factors, terms = (None if part is None else part.float() for part in (weight, bias))
    out = functional.layer_norm(summed.float(), summed.shape[-1:], factors, terms, eps).to(out_dtype)
    return out if residual is None else (out, summed)


def silu_and_mul(x: Tensor) -> Tensor:
    return activate_gated(x, "silu")


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_pytorch_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}


def activate(x: Tensor, activation: str) -> Tensor:
    """Apply one of `ops.linear.ACTIVATIONS`."""
    return _ACTIVATIONS[activation](x)


def activate_gated(gate_up: Tensor, activation: str) -> Tensor:
    """Compute `activation(gate) * up` of [..., gates, then ups], for one of `ops.linear.GATED_ACTIVATIONS`."""
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "swiglu_oai":
        return activate(gate.clamp(max=7.0), "quick_gelu").mul_(up.clamp(-7.0, 7.0) + 1)
    return activate(gate, activation).mul_(up)


def embedding(token_ids: Tensor, weight: Tensor, out_dtype: torch.dtype) -> Tensor:
    return functional.embedding(token_ids, weight).to(out_dtype)


def gather_rows(x: Tensor, rows: Tensor) -> Tensor:
    return x[rows]


def local_ids(token_ids: Tensor, first: int, count: int) -> Tensor:
    own = token_ids - first
    return own.masked_fill_((own < 0) | (own >= count), 0)


def clear_other_rows(x: Tensor, token_ids: Tensor, first: int, count: int) -> Tensor:
    is_elsewhere = (token_ids < first) | (token_ids >= first + count)
    return x.masked_fill_(is_elsewhere[:, None], 0.0)
