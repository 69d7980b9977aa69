"""Mixers of tokens with a recurrent state: gated delta net, Mamba 1 and 2, short convolution.

A mixer's page holds the last inputs of its convolution, and behind them its state (docs/adr/0084):

    page    [ taps - 1, conv channels | num_heads, key_dim, value_dim ]    float32

Each `prefix` is that of the mixer in the checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping

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
from triptych_services.worker.parallel.shares import share


class GatedDeltaNet(nn.Module):
    """The gated delta rule of Qwen3-Next; ranks share its heads."""

    def __init__(self, spec: StateSpec, *, layer_index: int, context: ModelContext, prefix: str) -> None:
        super().__init__()
        hidden_size = context.architecture.hidden_size
        self.layer_index = layer_index
        self.key_dim, self.value_dim = spec.key_dim, spec.value_dim
        first_key, self.num_key_heads = share(
            spec.num_key_heads, what="linear_num_key_heads", rank=context.rank
        )
        first, self.num_heads = share(spec.num_heads, what="linear_num_value_heads", rank=context.rank)

        def keys(name: str) -> Piece:
            sizes = (spec.num_key_heads, first_key, self.num_key_heads)
            return Piece(name, *(size * spec.key_dim for size in sizes))

        def values(name: str, size: int = spec.value_dim) -> Piece:
            return Piece(name, spec.num_heads * size, first * size, self.num_heads * size)

        pieces = (
            *(keys("in_q"), keys("in_k"), values("in_v"), values("in_z")),
            *(values("in_a", 1), values("in_b", 1)),
        )
        self.in_proj = PackedLinear(hidden_size, pieces, bias=False, context=context, prefix=prefix)
        convolved = keys("conv_q"), keys("conv_k"), values("conv_v")
        self.conv = CausalConv(spec, convolved, activation="silu", context=context, prefix=prefix)
        self.parameters_of_heads = StateParameters(
            spec.num_heads,
            start=first,
            length=self.num_heads,
            has_skip=False,
            context=context,
            prefix=prefix,
        )
        self.norm = GatedNorm(spec.value_dim, order="before_gate", context=context, prefix=f"{prefix}.norm")
        self.out_proj = RowLinear(
            spec.num_channels, hidden_size, bias=False, context=context, prefix=f"{prefix}.out_proj"
        )

    def forward(self, hidden: Tensor, context: StepContext) -> Tensor:
        """Map [num_tokens, hidden_size] to [num_tokens, hidden_size]."""
        pages = _pages(context, self.layer_index)
        sizes = self.conv.channels, self.num_heads * self.value_dim, self.num_heads, self.num_heads
        mixed, gate, decay, beta = self.in_proj(hidden, context.adapter_slots).split(sizes, dim=1)
        num_keys = self.num_key_heads * self.key_dim
        mixed = self.conv(mixed, pages, context)
        query, key, value = mixed.split((num_keys, num_keys, sizes[1]), dim=1)
        own = self.parameters_of_heads
        assert own.dt_bias is not None, "see the constructor"
        assert context.state is not None, "see `CausalConv`"
        out = gated_delta_scan(
            query.unflatten(1, (-1, self.key_dim)), key.unflatten(1, (-1, self.key_dim)),
            value.unflatten(1, (-1, self.value_dim)), decay, beta, own.rates, own.dt_bias,
            _matrices(pages, self.conv, (self.num_heads, self.key_dim, self.value_dim)), context.state,
        )  # fmt: skip
        mapped: Tensor = self.out_proj(self.norm(out, gate), context.adapter_slots)
        return mapped


class Mamba2(nn.Module):
    """The state space of Mamba 2, on one rank;"""

    def __init__(self, spec: StateSpec, *, layer_index: int, context: ModelContext, prefix: str) -> None:
        super().__init__()
        _refuse_ranks("mamba2", context)
        hidden_size = context.architecture.hidden_size
        self.layer_index, self.spec = layer_index, spec
        self.sizes = spec.num_channels, spec.conv_channels, spec.num_heads
        """Outputs of the first projection: gate, what is convolved, step sizes."""
        self.in_proj = ColumnLinear(
            hidden_size,
            sum(self.sizes),
            activation=None,
            bias=spec.bias,
            context=context,
            prefix=f"{prefix}.in_proj",
        )
        self.conv = CausalConv(
            spec, (_whole("conv1d", spec.conv_channels),), activation="silu", context=context, prefix=prefix
        )
        self.parameters_of_heads = StateParameters(spec.num_heads, context=context, prefix=prefix)
        self.norm = GatedNorm(
            spec.num_channels,
            order=spec.norm,
            num_groups=spec.norm_groups,
            context=context,
            prefix=f"{prefix}.norm",
        )
        self.out_proj = RowLinear(
            spec.num_channels, hidden_size, bias=spec.bias, context=context, prefix=f"{prefix}.out_proj"
        )
        self.multipliers: Tensor | None = None
        if spec.input_multipliers:
            groups = spec.num_key_heads * spec.key_dim
            counts = torch.tensor([spec.num_channels, spec.num_channels, groups, groups, spec.num_heads])
            factors = torch.tensor(spec.input_multipliers).repeat_interleave(counts)
            self.multipliers = factors.to(context.device, context.dtype)

    def forward(self, hidden: Tensor, context: StepContext) -> Tensor:
        """Map [num_tokens, hidden_size] to [num_tokens, hidden_size]."""
        spec, pages = self.spec, _pages(context, self.layer_index)
        projected = self.in_proj(hidden, context.adapter_slots)
        if self.multipliers is not None:
            projected = projected * self.multipliers
        gate, mixed, dt = projected.split(self.sizes, dim=1)
        groups = spec.num_key_heads * spec.key_dim
        x, b, c = self.conv(mixed, pages, context).split((spec.num_channels, groups, groups), dim=1)
        own = self.parameters_of_heads
        assert own.dt_bias is not None, "see the constructor"
        assert own.skip is not None, "see the constructor"
        assert context.state is not None, "see `CausalConv`"
        out = state_space_scan(
            x.unflatten(1, (-1, spec.value_dim)), dt,
            b.unflatten(1, (-1, spec.key_dim)), c.unflatten(1, (-1, spec.key_dim)),
            own.rates, own.dt_bias, own.skip,
            _matrices(pages, self.conv, (spec.num_heads, spec.key_dim, spec.value_dim)), context.state,
            dt_limits=spec.dt_limits,
        )  # fmt: skip
        mapped: Tensor = self.out_proj(self.norm(out, gate), context.adapter_slots)
        return mapped


class Mamba(nn.Module):
    """The state space of Mamba 1, on one rank;"""

    def __init__(self, spec: StateSpec, *, layer_index: int, context: ModelContext, prefix: str) -> None:
        super().__init__()
        _refuse_ranks("mamba", context)
        hidden_size, channels = context.architecture.hidden_size, spec.num_channels
        self.layer_index, self.spec = layer_index, spec

        def linear(name: str, in_features: int, out_features: int, *, bias: bool) -> ColumnLinear:
            return ColumnLinear(
                in_features,
                out_features,
                activation=None,
                bias=bias,
                context=context,
                prefix=f"{prefix}.{name}",
            )

        self.in_proj = linear("in_proj", hidden_size, 2 * channels, bias=spec.bias)
        self.conv = CausalConv(
            spec, (_whole("conv1d", channels),), activation="silu", context=context, prefix=prefix
        )
        self.x_proj = linear("x_proj", channels, spec.dt_rank + 2 * spec.key_dim, bias=False)
        self.dt_proj = linear("dt_proj", spec.dt_rank, channels, bias=True)
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
            channels, key_dim=spec.key_dim, has_bias=False, context=context, prefix=prefix
        )
        self.out_proj = linear("out_proj", channels, hidden_size, bias=spec.bias)

    def forward(self, hidden: Tensor, context: StepContext) -> Tensor:
        """Map [num_tokens, hidden_size] to [num_tokens, hidden_size]."""
        spec, pages, adapters = self.spec, _pages(context, self.layer_index), context.adapter_slots
        x, gate = self.in_proj(hidden, adapters).split(spec.num_channels, dim=1)
        x = self.conv(x, pages, context)
        selected = self.x_proj(x, adapters).split((spec.dt_rank, spec.key_dim, spec.key_dim), dim=1)
        if self.norms:
            selected = [norm(part) for norm, part in zip(self.norms, selected, strict=True)]
        dt, b, c = selected
        own = self.parameters_of_channels
        assert own.skip is not None, "see the constructor"
        assert context.state is not None, "see `CausalConv`"
        out = selective_scan(
            x, self.dt_proj(dt, adapters), b, c, own.rates, own.skip,
            _matrices(pages, self.conv, (spec.key_dim, spec.num_channels)), context.state,
        )  # fmt: skip
        mapped: Tensor = self.out_proj(out * silu(gate), adapters)
        return mapped


class ShortConv(nn.Module):
    """The gated convolution of LFM2, on one rank: `out(c * conv(b * x))`;"""

    def __init__(self, spec: StateSpec, *, layer_index: int, context: ModelContext, prefix: str) -> None:
        super().__init__()
        _refuse_ranks("short_conv", context)
        hidden_size = context.architecture.hidden_size
        self.layer_index, self.channels = layer_index, spec.num_channels
        self.in_proj = ColumnLinear(
            hidden_size,
            3 * self.channels,
            activation=None,
            bias=spec.bias,
            context=context,
            prefix=f"{prefix}.in_proj",
        )
        self.conv = CausalConv(
            spec, (_whole("conv1d", self.channels),), activation=None, context=context, prefix=prefix
        )
        self.out_proj = RowLinear(
            self.channels, hidden_size, bias=spec.bias, context=context, prefix=f"{prefix}.out_proj"
        )

    def forward(self, hidden: Tensor, context: StepContext) -> Tensor:
        """Map [num_tokens, hidden_size] to [num_tokens, hidden_size]."""
        b, c, x = self.in_proj(hidden, context.adapter_slots).split(self.channels, dim=1)
        mixed = c * self.conv(b * x, _pages(context, self.layer_index), context)
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
        layer_index: Index of the layer's pages in `StepContext.state_pages`.
        prefix: That of the mixer in the checkpoint.
    Raises:
        FeatureDisabled: There is no such kind, or ranks cannot share it.
    """
    if spec.kind not in _MIXERS:
        raise FeatureDisabled(f"state {spec.kind}", f"this worker knows {', '.join(_MIXERS)}")
    return _MIXERS[spec.kind](spec, layer_index=layer_index, context=context, prefix=prefix)


def _refuse_ranks(kind: str, context: ModelContext) -> None:
    """Check that there is one rank.

    Raises:
        FeatureDisabled: There are several.
    """
    num_ranks = context.rank.tensor_parallel_size
    if num_ranks > 1:
        raise FeatureDisabled(
            f"parallel.tensor_parallel_size = {num_ranks}",
            f"{context.architecture.name} has layers of {kind}, which ranks do not share; set it to 1",
        )


def _whole(name: str, size: int) -> Piece:
    return Piece(name, size, 0, size)


def _pages(context: StepContext, layer_index: int) -> Tensor:
    pages = context.state_pages[layer_index]
    assert pages is not None, f"layer {layer_index} has a state"
    return pages


def _matrices(pages: Tensor, conv: CausalConv, shape: tuple[int, ...]) -> Tensor:
    """Return the states behind the inputs of the convolution, [num_pages, *shape]."""
    return pages[:, conv.page_elements :].unflatten(1, shape)
