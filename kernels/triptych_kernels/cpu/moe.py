"""A mixture of experts with packed weights, in one native call."""

from __future__ import annotations

import torch
from torch import Tensor

from triptych_kernels.cpu.dtypes import DTYPES
from triptych_kernels.cpu.launch import Operand, launch
from triptych_kernels.expert_choice import SCORES, ExpertChoice
from triptych_kernels.weights.adapter_tables import ExpertAdapters
from triptych_kernels.weights.packed import ACTIVATIONS, PackedStack


def fused_moe(
    x: Tensor,
    router_logits: Tensor,
    w13: PackedStack,
    w2: PackedStack,
    choice: ExpertChoice,
    activation: str,
    w13_bias: None,
    w2_bias: None,
    shared: Tensor | None,
    shared_gate: Tensor | None,
    first_expert: int,
    adapters: ExpertAdapters | None = None,
) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch(
        "fused_moe",
        x,
        **_choice_operands(router_logits, choice),
        first_expert=first_expert,
        held_experts=len(w13),
        **{f"gate_up_{field}": operand for field, operand in w13.operands().items()},
        gate_up_adapters=None if adapters is None else adapters.w13.addresses,
        **{f"down_{field}": operand for field, operand in w2.operands().items()},
        down_adapters=None if adapters is None else adapters.w2.addresses,
        dtype=DTYPES[x.dtype],
        x=x,
        x_stride=x.stride(0),
        out=out,
        activation=ACTIVATIONS[activation],
        scales_input=choice.scales_input,
        shared=shared,
        shared_gate=shared_gate,
        slots=None if adapters is None else adapters.slots,
        num_adapters=0 if adapters is None else adapters.w13.num_slots,
    )
    return out


def _choice_operands(router_logits: Tensor, choice: ExpertChoice) -> dict[str, Operand]:
    """Return the fields of `Routing` in routing.h."""
    return {
        "routing_dtype": DTYPES[router_logits.dtype],
        "routing_logits": router_logits,
        "routing_stride": router_logits.stride(0),
        "routing_num_experts": router_logits.shape[1],
        "routing_top_k": choice.top_k,
        "routing_score": SCORES.index(choice.score),
        "routing_renormalize": choice.renormalize,
        "routing_scale": float(choice.scale),
        "routing_jitter": float(choice.jitter),
        "routing_num_groups": choice.num_groups,
        "routing_top_groups": choice.top_groups,
        "routing_group_experts": choice.group_experts,
        "routing_correction": choice.correction,
        "routing_expert_scales": choice.expert_scales,
        "routing_weight_index": choice.weight_index,
        "routing_layer": choice.layer,
    }
