"""Mixers of tokens with a recurrent state: gated delta net, Mamba 1 and 2, short convolution.

A mixer's page holds the last inputs of its convolution, and behind them its state (docs/adr/0084):

    page              [ taps - 1, conv channels | num_heads, key_dim, value_dim ]    float32
    kept of a guess   [ conv channels | what enters the state with it ]

Each `prefix` is that of the mixer in the checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from triptych.checkpoint.architecture import StateSpec
from triptych.errors import FeatureDisabled
from triptych_kernels.ops import gated_delta_scan, selective_scan, state_space_scan
from triptych_services.worker.context.model_context import ModelContext
from triptych_services.worker.layers.linear import ColumnLinear, PackedLinear, Piece, RowLinear
from triptych_services.worker.layers.mixer_parts import CausalConv, GatedNorm, StateParameters
from triptych_services.worker.layers.norm import RMSNorm
from triptych_services.worker.layers.step_context import StepContext
from triptych_services.worker.parallel.shares import share_state


@dataclass(frozen=True, slots=True)
class _Share:
    """The sizes of a mixer, and where this rank's part of it lies."""

    whole: StateSpec
    before: StateSpec
    """Sizes of what the ranks before this one hold."""
    own: StateSpec
    """Sizes of this rank's part."""

    @staticmethod
    def of(spec: StateSpec, context: ModelContext) -> _Share:
        """Raises:
        ConfigError: Ranks cannot share the mixer.
        """
        return _Share(spec, *share_state(spec, rank=context.rank))

    def channels(self, name: str) -> Piece:
        """Return a projection to the channels of values."""
        return Piece(name, self.whole.num_channels, self.before.num_channels, self.own.num_channels)

    def keys(self, name: str) -> Piece:
        """Return a projection to the channels of keys."""
        return Piece(
            name, self.whole.num_key_channels, self.before.num_key_channels, self.own.num_key_channels
        )

    def heads(self, name: str) -> Piece:
        """Return a projection to one number for each head."""
        return Piece(name, self.whole.num_heads, self.before.num_heads, self.own.num_heads)


class GatedDeltaNet(nn.Module):
    """The gated delta rule of Qwen3-Next; ranks share its heads."""

    def __init__(self, spec: StateSpec, *, layer_index: int, context: ModelContext, prefix: str) -> None:
        super().__init__()
        hidden_size = context.architecture.hidden_size
        share = _Share.of(spec, context)
        self.layer_index, self.own = layer_index, share.own
        pieces = (
            *(share.keys("in_q"), share.keys("in_k"), share.channels("in_v"), share.channels("in_z")),
            *(share.heads("in_a"), share.heads("in_b")),
        )
        self.in_proj = PackedLinear(hidden_size, pieces, bias=False, context=context, prefix=prefix)
        convolved = share.keys("conv_q"), share.keys("conv_k"), share.channels("conv_v")
        self.conv = CausalConv(spec, convolved, activation="silu", context=context, prefix=prefix)
        self.parameters_of_heads = StateParameters(
            spec.num_heads,
            start=share.before.num_heads,
            length=share.own.num_heads,
            has_skip=False,
            context=context,
            prefix=prefix,
        )
        self.norm = GatedNorm(
            spec.value_dim, order="before_gate", eps=spec.norm_eps, context=context, prefix=f"{prefix}.norm"
        )
        self.out_proj = RowLinear(
            spec.num_channels, hidden_size, bias=False, context=context, prefix=f"{prefix}.out_proj"
        )

    def forward(self, hidden: Tensor, context: StepContext) -> Tensor:
        """Map [num_tokens, hidden_size] to [num_tokens, hidden_size]."""
        spec, states = self.own, context.states_of(self.layer_index)
        sizes = self.conv.channels, spec.num_channels, spec.num_heads, spec.num_heads
        mixed, gate, decay, beta = self.in_proj(hidden, context.adapter_slots).split(sizes, dim=1)
        mixed = self.conv(mixed, states)
        query, key, value = mixed.split(
            (spec.num_key_channels, spec.num_key_channels, spec.num_channels), dim=1
        )
        own = self.parameters_of_heads
        assert own.dt_bias is not None, "see the constructor"
        out = gated_delta_scan(
            query.unflatten(1, (-1, spec.key_dim)), key.unflatten(1, (-1, spec.key_dim)),
            value.unflatten(1, (-1, spec.value_dim)), decay, beta, own.rates, own.dt_bias,
            *self.conv.matrices(states, (spec.num_heads, spec.key_dim, spec.value_dim)),
            beta_scale=spec.beta_scale,
        )  # fmt: skip
        mapped: Tensor = self.out_proj(self.norm(out, gate), context.adapter_slots)
        return mapped


class Mamba2(nn.Module):
    """The state space of Mamba 2; ranks share its heads."""

    def __init__(self, spec: StateSpec, *, layer_index: int, context: ModelContext, prefix: str) -> None:
        super().__init__()
        hidden_size = context.architecture.hidden_size
        share = _Share.of(spec, context)
        self.layer_index, self.own = layer_index, share.own
        pieces = (
            *(share.channels("in_gate"), share.channels("in_x")),
            *(share.keys("in_b"), share.keys("in_c"), share.heads("in_dt")),
        )
        self.in_proj = PackedLinear(hidden_size, pieces, bias=spec.bias, context=context, prefix=prefix)
        convolved = share.channels("conv_x"), share.keys("conv_b"), share.keys("conv_c")
        self.conv = CausalConv(spec, convolved, activation="silu", context=context, prefix=prefix)
        self.parameters_of_heads = StateParameters(
            spec.num_heads,
            start=share.before.num_heads,
            length=share.own.num_heads,
            context=context,
            prefix=prefix,
        )
        self.norm = GatedNorm(
            spec.num_channels,
            order=spec.norm,
            eps=spec.norm_eps,
            num_groups=spec.norm_groups,
            start=share.before.num_channels,
            length=share.own.num_channels,
            context=context,
            prefix=f"{prefix}.norm",
        )
        self.out_proj = RowLinear(
            spec.num_channels, hidden_size, bias=spec.bias, context=context, prefix=f"{prefix}.out_proj"
        )
        self.multipliers: Tensor | None = None
        """[outputs of the first projection]; None: there are none."""
        if spec.input_multipliers:
            counts = torch.tensor([piece.length for piece in pieces])
            factors = torch.tensor(spec.input_multipliers).repeat_interleave(counts)
            self.multipliers = factors.to(context.device, context.dtype)

    def forward(self, hidden: Tensor, context: StepContext) -> Tensor:
        """Map [num_tokens, hidden_size] to [num_tokens, hidden_size]."""
        spec, states = self.own, context.states_of(self.layer_index)
        projected = self.in_proj(hidden, context.adapter_slots)
        if self.multipliers is not None:
            projected = projected * self.multipliers
        gate, mixed, dt = projected.split((spec.num_channels, self.conv.channels, spec.num_heads), dim=1)
        x, b, c = self.conv(mixed, states).split(
            (spec.num_channels, spec.num_key_channels, spec.num_key_channels), dim=1
        )
        own = self.parameters_of_heads
        assert own.dt_bias is not None, "see the constructor"
        assert own.skip is not None, "see the constructor"
        out = state_space_scan(
            x.unflatten(1, (-1, spec.value_dim)), dt,
            b.unflatten(1, (-1, spec.key_dim)), c.unflatten(1, (-1, spec.key_dim)),
            own.rates, own.dt_bias, own.skip,
            *self.conv.matrices(states, (spec.num_heads, spec.key_dim, spec.value_dim)),
            dt_limits=spec.dt_limits,
        )  # fmt: skip
        mapped: Tensor = self.out_proj(self.norm(out, gate), context.adapter_slots)
        return mapped


class Mamba(nn.Module):
    """The state space of Mamba 1; ranks share its channels, and add up what step sizes, B and C are made of."""

    def __init__(self, spec: StateSpec, *, layer_index: int, context: ModelContext, prefix: str) -> None:
        super().__init__()
        hidden_size, channels = context.architecture.hidden_size, spec.num_channels
        share = _Share.of(spec, context)
        self.layer_index, self.own = layer_index, share.own
        self.in_proj = PackedLinear(
            hidden_size,
            (share.channels("in_x"), share.channels("in_gate")),
            bias=spec.bias,
            context=context,
            prefix=prefix,
        )
        self.conv = CausalConv(
            spec, (share.channels("conv1d"),), activation="silu", context=context, prefix=prefix
        )
        self.x_proj = RowLinear(
            channels, spec.dt_rank + 2 * spec.key_dim, bias=False, context=context, prefix=f"{prefix}.x_proj"
        )
        self.dt_proj = ColumnLinear(
            spec.dt_rank, channels, activation=None, bias=True, context=context, prefix=f"{prefix}.dt_proj"
        )
        self.norms = nn.ModuleList(
            RMSNorm(
                size,
                context.architecture.block.norm.eps,
                weight=spec.dt_norm == "weighted",
                context=context,
                prefix=f"{prefix}.{name}_layernorm",
            )
            for name, size in (("dt", spec.dt_rank), ("b", spec.key_dim), ("c", spec.key_dim))
            if spec.dt_norm != "none"
        )
        self.parameters_of_channels = StateParameters(
            channels,
            start=share.before.num_channels,
            length=share.own.num_channels,
            key_dim=spec.key_dim,
            has_bias=False,
            context=context,
            prefix=prefix,
        )
        self.out_proj = RowLinear(
            channels, hidden_size, bias=spec.bias, context=context, prefix=f"{prefix}.out_proj"
        )

    def forward(self, hidden: Tensor, context: StepContext) -> Tensor:
        """Map [num_tokens, hidden_size] to [num_tokens, hidden_size]."""
        spec, states, adapters = self.own, context.states_of(self.layer_index), context.adapter_slots
        x, gate = self.in_proj(hidden, adapters).split(spec.num_channels, dim=1)
        x = self.conv(x, states)
        selected = self.x_proj(x, adapters).split((spec.dt_rank, spec.key_dim, spec.key_dim), dim=1)
        if self.norms:
            selected = [norm(part) for norm, part in zip(self.norms, selected, strict=True)]
        dt, b, c = selected
        own = self.parameters_of_channels
        assert own.skip is not None, "see the constructor"
        out = selective_scan(
            x, self.dt_proj(dt, adapters), b, c, own.rates, own.skip,
            *self.conv.matrices(states, (spec.key_dim, spec.num_channels)),
        )  # fmt: skip
        mapped: Tensor = self.out_proj(out * silu(gate), adapters)
        return mapped


class ShortConv(nn.Module):
    """The gated convolution of LFM2, `out(c * conv(b * x))`; ranks share its channels."""

    def __init__(self, spec: StateSpec, *, layer_index: int, context: ModelContext, prefix: str) -> None:
        super().__init__()
        hidden_size = context.architecture.hidden_size
        share = _Share.of(spec, context)
        self.layer_index, self.own = layer_index, share.own
        self.in_proj = PackedLinear(
            hidden_size,
            (share.channels("in_b"), share.channels("in_c"), share.channels("in_x")),
            bias=spec.bias,
            context=context,
            prefix=prefix,
        )
        self.conv = CausalConv(
            spec, (share.channels("conv1d"),), activation=None, context=context, prefix=prefix
        )
        self.out_proj = RowLinear(
            spec.num_channels, hidden_size, bias=spec.bias, context=context, prefix=f"{prefix}.out_proj"
        )

    def forward(self, hidden: Tensor, context: StepContext) -> Tensor:
        """Map [num_tokens, hidden_size] to [num_tokens, hidden_size]."""
        b, c, x = self.in_proj(hidden, context.adapter_slots).split(self.own.num_channels, dim=1)
        mixed = c * self.conv(b * x, context.states_of(self.layer_index))
        out: Tensor = self.out_proj(mixed, context.adapter_slots)
        return out


_MIXERS: Mapping[str, type[GatedDeltaNet | Mamba2 | Mamba | ShortConv]] = {
    "gated_delta": GatedDeltaNet,
    "mamba2": Mamba2,
    "mamba": Mamba,
    "short_conv": ShortConv,
}


def create_mixer(spec: StateSpec, *, layer_index: int, context: ModelContext, prefix: str) -> nn.Module:
    """Create what `spec.kind` names.

    Args:
        layer_index: As of `StepContext.states_of`.
        prefix: That of the mixer in the checkpoint.
    Raises:
        ConfigError: Ranks cannot share it.
        FeatureDisabled: There is no such kind.
    """
    if spec.kind not in _MIXERS:
        raise FeatureDisabled(f"state {spec.kind}", f"this worker knows {', '.join(_MIXERS)}")
    return _MIXERS[spec.kind](spec, layer_index=layer_index, context=context, prefix=prefix)
