"""The MLP of a layer, gated, plain, or a mixture of experts; and what some families have behind it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from triptych.checkpoint.architecture import XIELU, LayerInputsSpec, LayerSpec
from triptych_kernels.ops import rms_norm
from triptych_services.worker.context.model_context import ModelContext
from triptych_services.worker.layers.linear import ColumnLinear, GatedLinear, RowLinear
from triptych_services.worker.layers.moe import SparseMoE
from triptych_services.worker.layers.norm import create_norm
from triptych_services.worker.layers.weights import (
    WeightedLayer,
    WeightTarget,
    empty_parameter,
    parameter_target,
)


class MLP(nn.Module):
    """`down(act(gate(x)) * up(x))`, or without a gate `down(act(up(x)))`; `prefix` is that of its projections."""

    def __init__(
        self,
        intermediate_size: int,
        *,
        is_gated: bool,
        context: ModelContext,
        prefix: str,
        is_summed: bool = True,
    ) -> None:
        """
        Args:
            is_summed: As of `RowLinear`.
        """
        super().__init__()
        hidden_size, block = context.architecture.hidden_size, context.architecture.block
        self.act_fn = XIelu(context=context, prefix=f"{prefix}.act_fn") if block.activation == XIELU else None
        self.up_proj: nn.Module
        if is_gated:
            self.up_proj = GatedLinear(
                hidden_size,
                intermediate_size,
                activation=block.activation,
                bias=block.mlp_bias,
                context=context,
                prefix=prefix,
            )
        else:
            self.up_proj = ColumnLinear(
                hidden_size,
                intermediate_size,
                activation=block.activation if self.act_fn is None else None,
                bias=block.mlp_bias,
                context=context,
                prefix=f"{prefix}.up_proj",
            )
        self.down_proj = RowLinear(
            intermediate_size,
            hidden_size,
            bias=block.mlp_bias or block.down_bias,
            context=context,
            prefix=f"{prefix}.down_proj",
            is_summed=is_summed,
        )

    def forward(self, hidden: Tensor, adapter_slots: Tensor | None = None) -> Tensor:
        """Map [num_tokens, hidden_size] to [num_tokens, hidden_size]."""
        activated = self.up_proj(hidden, adapter_slots)
        if self.act_fn is not None:
            activated = self.act_fn(activated)
        out: Tensor = self.down_proj(activated, adapter_slots)
        return out


class XIelu(WeightedLayer):
    """An activation with four numbers of its own in each layer, computed in float32; `prefix` is its name.

        above 0    (beta + softplus(alpha_p) * x) * x
        else       beta * e + softplus(alpha_n) * (e - x), e = expm1(min(x, eps))

    Source: xIELU, arXiv:2411.13010.
    """

    def __init__(self, *, context: ModelContext, prefix: str) -> None:
        super().__init__()
        self.prefix = prefix
        self.square, self.below, self.beta, self.eps = (
            empty_parameter(1, context=context, dtype=torch.float32) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return a new tensor like x."""
        wide = x.float()
        power = torch.expm1(torch.minimum(wide, self.eps))
        below = self.beta * power + self.below * (power - wide)
        above = (self.beta + self.square * wide) * wide
        return torch.where(wide > 0, above, below).to(x.dtype)

    def weight_targets(self) -> dict[str, WeightTarget]:
        def softplus_into(parameter: Tensor) -> Callable[[Tensor], object]:
            return lambda stored: parameter.copy_(functional.softplus(stored.float()))

        fills = {
            "alpha_p": (softplus_into(self.square), 0.2),
            "alpha_n": (softplus_into(self.below), -1.1),
            "beta": (self.beta.copy_, 0.5),
            "eps": (self.eps.copy_, -1e-6),
        }
        return {
            f"{self.prefix}.{name}": WeightTarget(fill, (1,), 1, constant=constant)
            for name, (fill, constant) in fills.items()
        }


class MLPBesideExperts(nn.Module):
    """An MLP and a mixture of experts side by side, each with norms of its own; `prefix` is the layer's."""

    def __init__(self, spec: LayerSpec, *, context: ModelContext, prefix: str) -> None:
        super().__init__()
        assert spec.experts is not None, "this class is for such layers"
        hidden_size, norm = context.architecture.hidden_size, context.architecture.block.norm

        def create(name: str) -> nn.Module:
            return create_norm(hidden_size, norm, context=context, prefix=f"{prefix}.{name}")

        self.mlp = MLP(spec.experts.shared_size, is_gated=True, context=context, prefix=f"{prefix}.mlp")
        self.experts = SparseMoE(
            hidden_size,
            spec.intermediate_size,
            spec.experts,
            activation=context.architecture.block.activation,
            context=context,
            prefix=f"{prefix}.mlp",
        )
        self.router_norm = RouterNorm(hidden_size, norm.eps, context=context, prefix=f"{prefix}.router.scale")
        self.mlp_out_norm = create("post_feedforward_layernorm_1")
        self.experts_norm = create("pre_feedforward_layernorm_2")
        self.experts_out_norm = create("post_feedforward_layernorm_2")

    def forward(self, normalised: Tensor, residual: Tensor, adapter_slots: Tensor | None = None) -> Tensor:
        """Return [num_tokens, hidden_size].

        Args:
            normalised: What the MLP reads.
            residual: What the experts and their router read, each normalised in its own way.
        """
        of_mlp = self.mlp_out_norm(self.mlp(normalised, adapter_slots))
        mixed = self.experts(self.experts_norm(residual), adapter_slots, routed=self.router_norm(residual))
        out: Tensor = of_mlp + self.experts_out_norm(mixed)
        return out


class RouterNorm(WeightedLayer):
    """The norm of what a router reads, with a weight that is divided by sqrt(hidden_size)."""

    def __init__(self, hidden_size: int, eps: float, *, context: ModelContext, prefix: str) -> None:
        super().__init__()
        self.prefix, self.eps, self.out_dtype = prefix, eps, context.dtype
        self.weight = empty_parameter(hidden_size, context=context, dtype=torch.float32)

    def forward(self, residual: Tensor) -> Tensor:
        return rms_norm(residual, self.weight, self.eps, None, out_dtype=self.out_dtype)

    def weight_targets(self) -> dict[str, WeightTarget]:
        size = len(self.weight)
        target = WeightTarget(
            lambda stored: self.weight.copy_(stored.float() * size**-0.5), (size,), size, constant=1.0
        )
        return {self.prefix: target}


def create_mlp(spec: LayerSpec, *, context: ModelContext, prefix: str) -> nn.Module:
    """Create what `spec.mlp` names; `prefix` is that of the MLP."""
    if spec.experts is not None and spec.experts.has_norms:
        return MLPBesideExperts(spec, context=context, prefix=prefix.removesuffix(".mlp"))
    if spec.experts is not None:
        shared: MLP | None = None
        if spec.experts.shared_size:
            shared = MLP(
                spec.experts.shared_size,
                is_gated=spec.experts.is_gated,
                context=context,
                prefix=f"{prefix}.shared_experts",
                is_summed=False,
            )
        return SparseMoE(
            context.architecture.hidden_size,
            spec.intermediate_size,
            spec.experts,
            activation=context.architecture.block.activation,
            shared=shared,
            context=context,
            prefix=prefix,
        )
    return MLP(spec.intermediate_size, is_gated=spec.mlp == "gated", context=context, prefix=prefix)


class LayerInput(nn.Module):
    """The part of a layer that adds a token's input, as `LayerInputsSpec` has it; `prefix` is the layer's."""

    def __init__(self, spec: LayerInputsSpec, *, layer: int, context: ModelContext, prefix: str) -> None:
        """
        Args:
            layer: Index of the layer in the whole model.
        """
        super().__init__()
        hidden_size, block = context.architecture.hidden_size, context.architecture.block
        self.dtype = context.dtype
        self.gate = ColumnLinear(
            hidden_size,
            spec.size,
            activation=block.activation,
            bias=False,
            context=context,
            prefix=f"{prefix}.per_layer_input_gate",
        )
        self.start = layer * spec.size + self.gate.start
        """Column of this rank's part of the layer's input among those of all layers."""
        self.out = RowLinear(
            spec.size, hidden_size, bias=False, context=context, prefix=f"{prefix}.per_layer_projection"
        )
        self.norm = create_norm(
            hidden_size, block.norm, context=context, prefix=f"{prefix}.post_per_layer_input_norm"
        )

    def forward(self, residual: Tensor, inputs: Tensor, adapter_slots: Tensor | None = None) -> Tensor:
        """Return [num_tokens, hidden_size].

        Args:
            inputs: Of all layers: [num_tokens, num_layers * size].
        """
        own = inputs[:, self.start : self.start + self.gate.length]
        gated = self.gate(residual.to(self.dtype), adapter_slots) * own
        added: Tensor = self.norm(self.out(gated, adapter_slots))
        return added


class LayerScalar(WeightedLayer):
    """The factor of the residual that leaves a layer, in float32."""

    def __init__(self, *, context: ModelContext, prefix: str) -> None:
        super().__init__()
        self.prefix = prefix
        self.weight = empty_parameter(1, context=context, dtype=torch.float32)

    def forward(self, residual: Tensor) -> Tensor:
        return residual * self.weight

    def weight_targets(self) -> dict[str, WeightTarget]:
        return {self.prefix: replace(parameter_target(self.weight, (1,)), constant=1.0)}
