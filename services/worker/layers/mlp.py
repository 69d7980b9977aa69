"""The MLP of a layer: gated, plain, or a mixture of experts."""

from __future__ import annotations

from torch import Tensor, nn

from triptych.checkpoint.architecture import LayerSpec
from triptych_services.worker.context.model_context import ModelContext
from triptych_services.worker.layers.linear import ColumnLinear, GatedLinear, RowLinear
from triptych_services.worker.layers.moe import SparseMoE


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
                activation=block.activation,
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
        out: Tensor = self.down_proj(self.up_proj(hidden, adapter_slots), adapter_slots)
        return out


def create_mlp(spec: LayerSpec, *, context: ModelContext, prefix: str) -> nn.Module:
    """Create what `spec.mlp` names; `prefix` is that of the MLP."""
    if spec.experts is not None:
        shared: MLP | None = None
        if spec.experts.shared_size:
            shared = MLP(
                spec.experts.shared_size,
                is_gated=True,
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
