"""Contract of a mixture of experts: each token goes through the MLPs of the experts that its router prefers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from triptych_kernels.expert_choice import ExpertChoice
from triptych_kernels.ops.linear import ACTIVATIONS, GATED_ACTIVATIONS
from triptych_kernels.registry import find_impl
from triptych_kernels.weights.adapter_tables import ExpertAdapters
from triptych_kernels.weights.base import LinearWeight
from triptych_kernels.weights.packed import PackedStack

__all__ = ["fused_moe"]

ExpertWeights = Tensor | Sequence[LinearWeight]
"""Weights of one product of all experts: one stacked tensor, or a `LinearWeight` for each expert. On CPUs the latter
are a `PackedStack`, on CUDA devices an `ExpertStack`."""


def fused_moe(
    x: Tensor,
    router_logits: Tensor,
    w13: ExpertWeights,
    w2: ExpertWeights,
    choice: ExpertChoice,
    *,
    activation: str = "silu",
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    shared: Tensor | None = None,
    shared_gate: Tensor | None = None,
    first_expert: int | None = None,
    adapters: ExpertAdapters | None = None,
    impl: str | None = None,
) -> Tensor:
    """Compute a mixture of experts: each token goes through the MLPs of the experts that its router prefers.

        out = sigmoid(shared_gate) * shared + sum over the token's experts e of
              weight[e] * (w2[e] @ activated + w2_bias[e])
        activated = activation(gate) * up,    [gate | up] = w13[e] @ x + w13_bias[e], or without a gate activation(up)

    `choice` says which experts a token has, and their weights. With `choice.scales_input` the experts read
    weight[e] * x, rounded to x's dtype, and their results are added as they are. Sums are taken in float32.
    `activated` is rounded to x's dtype, and the result once (plain torch rounds every product). A token's values, NaN
    included, affect no other token's. Each `LinearWeight` may round the inputs of both products, as in `ops.linear`.

    Args:
        x: [num_tokens, hidden_size], the last axis contiguous.
        router_logits: [num_tokens, num_experts], the last axis contiguous, float32 or of x's dtype.
        w13: [num_experts, 2 * intermediate_size, hidden_size], gate first, contiguous, of x's dtype; or a gated
            `LinearWeight` of the last two axes for each expert. Without a gate: intermediate_size rows; not on GPUs.
        w2: [num_experts, hidden_size, intermediate_size] like w13, not gated.
        activation: One of `GATED_ACTIVATIONS`, or of `ACTIVATIONS` without a gate; silu with an `ExpertStack`.
        w13_bias: [num_experts, rows of w13], contiguous, of w13's dtype. None: there is none, or the weights
            are `LinearWeight`s, which have their own; those of an `ExpertStack` have none.
        w2_bias: [num_experts, hidden_size], likewise.
        shared: [num_tokens, hidden_size] of x's dtype, contiguous: the result of an expert of all tokens, or None.
        shared_gate: [num_tokens] float32, contiguous. None: `shared` is added as it is.
        first_expert: Index of the first expert of w13 and w2, as of `choice.weight_index`, if these hold some experts
            only: a token's other experts add nothing. None: they hold all.
        adapters: What low-rank adapters of some tokens add to both products, with `PackedStack`s; None: nothing.
    Returns:
        [num_tokens, hidden_size], a new tensor like x.
    Raises:
        ValueError: Shapes or dtypes disagree, the choice does not fit the experts, or the activation is none of these;
            names both.
    Source: Mixtral of Experts, arXiv:2401.04088.
    """
    is_gated = _check(x, router_logits, w13, w2, first_expert)
    _check_choice(router_logits, choice, activation, GATED_ACTIVATIONS if is_gated else ACTIVATIONS)
    _check_bias("w13", w13, w13_bias)
    _check_bias("w2", w2, w2_bias)
    _check_shared(x, shared, shared_gate)
    operand, biases = w13 if isinstance(w13, Tensor) else w13[0], (w13_bias, w2_bias)
    more = () if adapters is None else (_checked_adapters(x, w13, w2, adapters),)
    out: Tensor = find_impl("fused_moe", operand, impl)(
        x, router_logits, w13, w2, choice, activation, *biases, shared, shared_gate, first_expert or 0, *more
    )
    return out


def _check(
    x: Tensor, router_logits: Tensor, w13: ExpertWeights, w2: ExpertWeights, first_expert: int | None
) -> bool:
    """Return whether experts have a gate."""
    shapes = []
    for name, weight in (("w13", w13), ("w2", w2)):
        if isinstance(weight, Tensor):
            fits = weight.dtype == x.dtype and weight.is_contiguous()
            shape = tuple(weight.shape)
        else:
            fits = all(x.dtype in one.input_dtypes and one.shape == weight[0].shape for one in weight)
            shape = (len(weight), *weight[0].shape) if weight else (0,)
        if not fits or len(shape) != 3:
            raise ValueError(
                f"fused_moe: {name} {list(shape)} must be [num_experts, out_features, in_features], contiguous or "
                f"LinearWeights of one shape, for inputs in {x.dtype}"
            )
        shapes.append(shape)
    num_experts, hidden_size, intermediate_size = shapes[1]
    is_gated = shapes[0] == (num_experts, 2 * intermediate_size, hidden_size)
    if not is_gated and shapes[0] != (num_experts, intermediate_size, hidden_size):
        raise ValueError(
            f"fused_moe: w13 {list(shapes[0])} and w2 {list(shapes[1])} must be "
            "[num_experts, 2 * intermediate_size, hidden_size] and [num_experts, hidden_size, intermediate_size], w13 "
            "without the factor 2 if experts have no gate"
        )
    if any(
        not isinstance(weight, Tensor) and weight[0].gated != gated
        for weight, gated in ((w13, is_gated), (w2, False))
    ):
        raise ValueError(
            f"fused_moe: LinearWeights of w13 must be gated as its shape {list(shapes[0])} says, w2's not"
        )
    if x.ndim != 2 or x.shape[1] != hidden_size or x.stride(1) != 1:
        raise ValueError(
            f"fused_moe: x {list(x.shape)} does not fit w2 {list(shapes[1])}; it must be "
            "[num_tokens, hidden_size], its last axis contiguous"
        )
    if first_expert is not None:
        all_experts = router_logits.shape[-1]
        if not 0 <= first_expert <= all_experts - num_experts:
            raise ValueError(
                f"fused_moe: first_expert {first_expert} with {num_experts} experts must be among the {all_experts} "
                "of router_logits"
            )
        num_experts = all_experts
    if (
        router_logits.shape != (len(x), num_experts)
        or router_logits.stride(1) != 1
        or router_logits.dtype not in (x.dtype, torch.float32)
    ):
        raise ValueError(
            f"fused_moe: router_logits {list(router_logits.shape)} {router_logits.dtype} must be "
            f"[num_tokens, num_experts] = {[len(x), num_experts]} in {x.dtype} or torch.float32, the last axis "
            "contiguous"
        )
    return is_gated


def _check_choice(
    router_logits: Tensor, choice: ExpertChoice, activation: str, activations: Sequence[str]
) -> None:
    choice.check_experts(router_logits.shape[1])
    if activation not in activations:
        raise ValueError(f"fused_moe: activation {activation!r} is none of {', '.join(activations)}")


def _checked_adapters(
    x: Tensor, w13: ExpertWeights, w2: ExpertWeights, adapters: ExpertAdapters
) -> ExpertAdapters:
    if not isinstance(w13, PackedStack) or not isinstance(w2, PackedStack):
        raise ValueError("fused_moe: adapters must be None with weights that are no PackedStack")
    slots = adapters.slots
    if slots.shape != x.shape[:1] or slots.dtype != torch.int32 or not slots.is_contiguous():
        raise ValueError(
            f"fused_moe: slots {list(slots.shape)} {slots.dtype} of adapters must be [num_tokens] = [{len(x)}] of "
            "torch.int32, contiguous"
        )
    for name, stack, table in (("w13", w13, adapters.w13), ("w2", w2, adapters.w2)):
        if (table.num_experts, table.in_features) != (len(stack), stack[0].shape[1]):
            raise ValueError(
                f"fused_moe: the adapters of {name} are for {table.num_experts} experts with {table.in_features} "
                f"inputs, and not for {len(stack)} with {stack[0].shape[1]}"
            )
    if adapters.w13.num_slots != adapters.w2.num_slots:
        raise ValueError(
            f"fused_moe: the adapters of w13 have {adapters.w13.num_slots} slots, those of w2 "
            f"{adapters.w2.num_slots}"
        )
    return adapters


def _check_bias(name: str, weights: ExpertWeights, bias: Tensor | None) -> None:
    if bias is None:
        return
    if not isinstance(weights, Tensor):
        raise ValueError(
            f"fused_moe: {name}_bias {list(bias.shape)} must be None with LinearWeights, which have their own"
        )
    if bias.shape != weights.shape[:2] or bias.dtype != weights.dtype or not bias.is_contiguous():
        raise ValueError(
            f"fused_moe: {name}_bias {list(bias.shape)} {bias.dtype} does not fit {name} {list(weights.shape)}; it "
            f"must be {list(weights.shape[:2])} in {weights.dtype}, contiguous"
        )


def _check_shared(x: Tensor, shared: Tensor | None, shared_gate: Tensor | None) -> None:
    if shared is not None and (
        shared.shape != x.shape or shared.dtype != x.dtype or not shared.is_contiguous()
    ):
        raise ValueError(
            f"fused_moe: shared {list(shared.shape)} {shared.dtype} must be as x, {list(x.shape)} {x.dtype}, contiguous"
        )
    if shared_gate is None:
        return
    if shared is None:
        raise ValueError("fused_moe: shared_gate must be None without shared, which it multiplies")
    if shared_gate.shape != x.shape[:1] or shared_gate.dtype != torch.float32 or shared_gate.stride(0) != 1:
        raise ValueError(
            f"fused_moe: shared_gate {list(shared_gate.shape)} {shared_gate.dtype} must be [num_tokens] = "
            f"[{len(x)}] of torch.float32, contiguous"
        )
