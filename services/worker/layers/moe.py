"""Sparse mixtures of experts: a router, and many MLPs of which each token passes through a few.

With more than one tensor-parallel rank every rank holds a share of each expert's columns, as of an MLP's, or under
`parallel.expert_parallel` some experts with all their columns. In both cases it computes its part of every token's
result, and the parts are summed over the ranks. Every rank holds the whole router: equal inputs and kernels make equal
choices.

    4 experts of 6 columns, 2 ranks

    expert      0      1      2      3           0      1      2      3
    rank 0   | abc  | abc  | abc  | abc  |    |abcdef|abcdef|
    rank 1   |   def|   def|   def|   def|                  |abcdef|abcdef|
               shares of columns                 parallel.expert_parallel

`ResolvedConfig.expert_placement` says which experts a rank holds whole. The router knows them by their numbers, and the
choice looks up where their weights are.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from triptych.checkpoint.architecture import ExpertsSpec
from triptych.errors import FeatureDisabled
from triptych_kernels.expert_choice import ExpertChoice
from triptych_kernels.ops import fused_moe, linear
from triptych_kernels.weights.adapter_tables import ExpertAdapters, ExpertsTable
from triptych_kernels.weights.adapters import AdaptedRows
from triptych_kernels.weights.base import Half, LinearWeight
from triptych_kernels.weights.packed import PackedStack, PackedWeight, can_pack
from triptych_services.worker.context.expert_placement import experts_per_rank
from triptych_services.worker.context.model_context import ModelContext
from triptych_services.worker.layers.adapted import AdaptedLayer, AdaptedPiece
from triptych_services.worker.layers.linear import PackedLinear, Piece
from triptych_services.worker.layers.quantization import choose_format, create_quantized_experts
from triptych_services.worker.layers.weights import (
    AnyWeight,
    WeightedLayer,
    WeightTarget,
    bias_target,
    create_linear_weight,
    empty_parameter,
    linear_target,
    parameter_target,
    unused_target,
)
from triptych_services.worker.parallel.shares import share

_HALVES: tuple[Half, Half] = ("gate", "up")


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """The form of each expert, this rank's share of it, and the experts that this rank has a share of."""

    experts: Sequence[int]
    """Numbers of the experts, ascending."""
    num_experts: int
    """Number of experts, of all ranks together."""
    first_expert: int | None
    """Index of the first expert of this rank among all ranks', or None if it has a share of each."""
    hidden_size: int
    intermediate_size: int
    """Number of columns, of all ranks together."""
    start: int
    """Index of the first column that this rank holds."""
    length: int
    """Number of columns that this rank holds."""
    activation: str
    """As of `fused_moe`."""
    is_gated: bool
    """Whether experts have a gate."""
    has_bias: bool
    """Whether the checkpoint has biases."""
    adds_down_bias: bool
    """Whether this rank adds the bias of the second product: one of those that share an expert does."""

    @property
    def up_projections(self) -> tuple[Half, ...]:
        """The projections that the first product is made of."""
        return _HALVES if self.is_gated else ("up",)

    @property
    def up_rows(self) -> int:
        """Outputs of the first product on this rank."""
        return len(self.up_projections) * self.length


class SparseMoE(nn.Module):
    """`fused_moe` with its weights; `prefix` is that of the mixture, which has `gate` and `experts`."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        spec: ExpertsSpec,
        *,
        activation: str,
        shared: nn.Module | None = None,
        context: ModelContext,
        prefix: str,
    ) -> None:
        """
        Args:
            intermediate_size: Number of columns of an expert, of all ranks together.
            activation: As of `fused_moe`.
            shared: The MLP that every token goes through, of which each rank returns its part of the result.

        Raises:
            FeatureDisabled: The device's products do not compute such experts.
        """
        super().__init__()
        if not spec.is_gated and context.device.type not in ("cpu", "meta"):
            raise FeatureDisabled(
                f"worker.device = {context.device.type}",
                f"{context.architecture.name} has experts without a gate, which only CPUs compute",
            )
        self.group = context.group
        self.activation = activation
        layer, placement = layer_of(prefix, context), context.config.expert_placement
        order = None if placement is None else placement.order_of(layer)
        self.router = Router(
            hidden_size, spec, layer=layer, order=order, context=context, prefix=f"{prefix}.gate"
        )
        self.shared = shared
        self.shared_gate: SharedGate | None = None
        if spec.has_shared_gate:
            self.shared_gate = SharedGate(hidden_size, context=context, prefix=f"{prefix}.shared_expert_gate")
        self.latent_in: PackedLinear | None
        self.latent_out: PackedLinear | None
        self.latent_in, self.latent_out = _latent_projections(hidden_size, spec, context, prefix)
        size = spec.latent_size or hidden_size
        sizes = _share_sizes(size, intermediate_size, spec, activation, order, context=context)
        self.first_expert = sizes.first_expert
        create = PackedExperts if _are_packed(sizes, context) else StackedExperts
        self.experts = create(sizes, context=context, prefix=f"{prefix}.experts")
        self.others = OtherExperts(sizes, prefix=f"{prefix}.experts")

    def forward(
        self, x: Tensor, adapter_slots: Tensor | None = None, *, routed: Tensor | None = None
    ) -> Tensor:
        """Map [num_tokens, hidden_size] to [num_tokens, hidden_size], on every rank.

        Args:
            routed: What the router reads, like x; None: x.
        """
        shared = None if self.shared is None else self.shared(x, adapter_slots)
        gate = None if self.shared_gate is None else self.shared_gate(x, adapter_slots)
        mixed = fused_moe(
            x if self.latent_in is None else self.latent_in(x, adapter_slots),
            self.router(x if routed is None else routed, adapter_slots),
            self.experts.w13,
            self.experts.w2,
            self.router.choice,
            activation=self.activation,
            w13_bias=self.experts.w13_bias,
            w2_bias=self.experts.w2_bias,
            shared=shared if self.latent_out is None else None,
            shared_gate=gate,
            first_expert=self.first_expert,
            adapters=self.experts.adapters_of(adapter_slots),
        )
        if self.latent_out is not None:  # of this rank's experts, as the sum over ranks comes last
            mixed = self.latent_out(mixed, adapter_slots)
            mixed = mixed if shared is None else mixed + shared
        out: Tensor = self.group.all_reduce(mixed)
        return out


class Router(AdaptedLayer):
    """A logit for each expert, and what is chosen by them.

    It is never quantized: it is small, and a wrong choice is a large error.
    """

    def __init__(
        self,
        hidden_size: int,
        spec: ExpertsSpec,
        *,
        layer: int,
        order: Sequence[int] | None,
        context: ModelContext,
        prefix: str,
    ) -> None:
        """
        Args:
            layer: As of `ExpertChoice`.
            order: All ranks' experts in the order of their weights; None: that of their numbers.
        """
        super().__init__()
        self.prefix = prefix
        self.spec = spec
        num_experts, dtype = spec.num_experts, context.dtype
        self.weight: AnyWeight
        self.bias: nn.Parameter | None = None
        if context.device.type == "cpu" and can_pack(hidden_size, dtype):
            self.weight = PackedWeight(num_experts, hidden_size, dtype, bias=spec.bias)
        else:
            self.weight = empty_parameter(num_experts, hidden_size, context=context)
            self.bias = empty_parameter(num_experts, context=context) if spec.bias else None
        self.correction: nn.Parameter | None = None
        if spec.correction_shape:
            self.correction = empty_parameter(num_experts, context=context, dtype=torch.float32)
        self.expert_scales: nn.Parameter | None = None
        if spec.has_expert_scales:
            self.expert_scales = empty_parameter(num_experts, context=context, dtype=torch.float32)
        index = None if order is None else torch.tensor(order, device=context.device).argsort()
        self.register_buffer("weight_index", index, persistent=False)
        self.choice = ExpertChoice(
            spec.num_experts_per_tok,
            spec.score,
            renormalize=spec.renormalize,
            scale=spec.scale,
            num_groups=spec.num_groups,
            top_groups=spec.top_groups,
            group_experts=spec.group_experts,
            correction=self.correction,
            expert_scales=self.expert_scales,
            scales_input=spec.scales_input,
            jitter=spec.jitter,
            weight_index=index,
            layer=layer,
        )

    def forward(self, x: Tensor, adapter_slots: Tensor | None = None) -> Tensor:
        """Map [num_tokens, hidden_size] to logits [num_tokens, num_experts] in float32."""
        adapters = self.adapters_of(adapter_slots)
        return linear(x, self.weight, self.bias, out_dtype=torch.float32, adapters=adapters)

    def adapted_pieces(self) -> tuple[AdaptedPiece, ...]:
        return _whole_piece(self.prefix, self.weight)

    def weight_targets(self) -> dict[str, WeightTarget]:
        rows, columns = self.weight.shape
        targets = {f"{self.prefix}.weight": linear_target(self.weight, (rows, columns))}
        if self.spec.bias:
            targets[f"{self.prefix}.bias"] = bias_target(self.weight, self.bias, rows)
        if self.correction is not None:
            name = f"{self.prefix}.e_score_correction_bias"
            shape = self.spec.correction_shape
            targets[name] = parameter_target(self.correction.view(shape), shape)
        if self.expert_scales is not None:
            targets[f"{self.prefix}.per_expert_scale"] = replace(
                parameter_target(self.expert_scales, (rows,)), constant=1.0
            )
        return targets


class SharedGate(AdaptedLayer):
    """The logit of which the sigmoid multiplies the result of the shared expert; every rank holds it."""

    def __init__(self, hidden_size: int, *, context: ModelContext, prefix: str) -> None:
        super().__init__()
        self.prefix = prefix
        self.weight: AnyWeight
        if context.device.type == "cpu" and can_pack(hidden_size, context.dtype):
            self.weight = PackedWeight(1, hidden_size, context.dtype)
        else:
            self.weight = empty_parameter(1, hidden_size, context=context)

    def forward(self, x: Tensor, adapter_slots: Tensor | None = None) -> Tensor:
        """Map [num_tokens, hidden_size] to [num_tokens] float32."""
        adapters = self.adapters_of(adapter_slots)
        return linear(x, self.weight, out_dtype=torch.float32, adapters=adapters)[:, 0]

    def adapted_pieces(self) -> tuple[AdaptedPiece, ...]:
        return _whole_piece(self.prefix, self.weight)

    def weight_targets(self) -> dict[str, WeightTarget]:
        return {f"{self.prefix}.weight": linear_target(self.weight, (1, self.weight.shape[1]))}


class StackedExperts(WeightedLayer):
    """All experts' weights in two plain tensors, for kernels that compute all experts in one launch."""

    def __init__(
        self,
        sizes: ExpertSizes,
        *,
        context: ModelContext,
        prefix: str,
    ) -> None:
        super().__init__()
        self.prefix, self.sizes = prefix, sizes
        num_experts = len(sizes.experts)
        self.w13 = empty_parameter(num_experts, sizes.up_rows, sizes.hidden_size, context=context)
        self.w2 = empty_parameter(num_experts, sizes.hidden_size, sizes.length, context=context)
        self.w13_bias: nn.Parameter | None = None
        self.w2_bias: nn.Parameter | None = None
        if sizes.has_bias:
            self.w13_bias = empty_parameter(num_experts, sizes.up_rows, context=context)
        if sizes.adds_down_bias:
            self.w2_bias = empty_parameter(num_experts, sizes.hidden_size, context=context)

    def adapters_of(self, slots: Tensor | None) -> None:
        """Return None: the experts' products in torch and on GPUs apply no adapters, which are refused as they load."""

    def weight_targets(self) -> dict[str, WeightTarget]:
        targets: dict[str, WeightTarget] = {}
        for place, (w13, w2) in enumerate(zip(self.w13, self.w2, strict=True)):
            biases = (None if bias is None else bias[place] for bias in (self.w13_bias, self.w2_bias))
            prefix = f"{self.prefix}.{self.sizes.experts[place]}"
            targets |= _expert_targets(w13, w2, self.sizes, prefix, *biases)
        return targets


class PackedExperts(nn.Module):
    """Each expert's weights in the form that the device's products read: packed or quantized, with their biases."""

    w13_bias = w2_bias = None

    def __init__(
        self,
        sizes: ExpertSizes,
        *,
        context: ModelContext,
        prefix: str,
    ) -> None:
        super().__init__()
        prefixes = [f"{prefix}.{number}" for number in sizes.experts]

        def create(
            out_features: int, in_features: int, *projections: str, bias: bool
        ) -> Sequence[LinearWeight]:
            sources = [[f"{expert}.{name}_proj.weight" for name in projections] for expert in prefixes]
            return create_packed(
                out_features, in_features, sources, gated=len(projections) == 2, bias=bias, context=context
            )

        self.w13 = create(sizes.up_rows, sizes.hidden_size, *sizes.up_projections, bias=sizes.has_bias)
        self.w2 = create(sizes.hidden_size, sizes.length, "down", bias=sizes.adds_down_bias)
        self.experts = nn.ModuleList(
            PackedExpert(w13, w2, sizes, expert)
            for w13, w2, expert in zip(self.w13, self.w2, prefixes, strict=True)
        )
        self.adapted: tuple[AdaptedExperts, AdaptedExperts] | None = None
        if isinstance(self.w13, PackedStack) and isinstance(self.w2, PackedStack):
            self.adapted = (
                AdaptedExperts(self.w13, sizes, sizes.up_projections, prefix=prefix),
                AdaptedExperts(self.w2, sizes, ("down",), prefix=prefix),
            )
            self.adapted_layers = nn.ModuleList(self.adapted)

    def adapters_of(self, slots: Tensor | None) -> ExpertAdapters | None:
        """Return the adapters of a step's rows for both products; arguments as of `AdaptedLayer`."""
        if slots is None or self.adapted is None:
            return None
        up, down = (layer.adapters for layer in self.adapted)
        assert isinstance(up, ExpertsTable), "made for both where there are slots"
        assert isinstance(down, ExpertsTable), "made for both where there are slots"
        return ExpertAdapters(up, down, slots)


class AdaptedExperts(AdaptedLayer):
    """One product of all experts, as adapters see it: the weights are the experts' own."""

    def __init__(
        self, weights: PackedStack, sizes: ExpertSizes, projections: tuple[str, ...], *, prefix: str
    ) -> None:
        super().__init__()
        self.prefix, self.sizes, self.projections = prefix, sizes, projections
        self.weight = weights[0]

    def adapted_pieces(self) -> tuple[AdaptedPiece, ...]:
        """Return those of every expert, also of those that only other ranks have."""
        return tuple(
            self._piece(expert, projection)
            for expert in range(self.sizes.num_experts)
            for projection in self.projections
        )

    def _piece(self, expert: int, projection: str) -> AdaptedPiece:
        sizes = self.sizes
        name, columns = (
            f"{self.prefix}.{expert}.{projection}_proj",
            (sizes.intermediate_size, sizes.hidden_size),
        )
        place = sizes.experts.index(expert) if expert in sizes.experts else -1
        length = sizes.length if place >= 0 else 0
        if projection == "down":
            rows = AdaptedRows(0, sizes.hidden_size, expert=place)
            return AdaptedPiece(name, columns[::-1], rows, dim=1, start=sizes.start, length=length)
        half: Half = "gate" if projection == "gate" else "up"
        rows = AdaptedRows(0, sizes.length, half if sizes.is_gated else None, place)
        return AdaptedPiece(name, columns, rows, start=sizes.start, length=length)

    def weight_targets(self) -> dict[str, WeightTarget]:
        return {}


class PackedExpert(WeightedLayer):
    """The weights of one expert."""

    def __init__(self, w13: LinearWeight, w2: LinearWeight, sizes: ExpertSizes, prefix: str) -> None:
        super().__init__()
        self.w13, self.w2 = w13, w2
        self.sizes, self.prefix = sizes, prefix

    def weight_targets(self) -> dict[str, WeightTarget]:
        return _expert_targets(self.w13, self.w2, self.sizes, self.prefix)


class OtherExperts(WeightedLayer):
    """The experts that only other ranks have: this one checks the shapes of their tensors, and reads none."""

    def __init__(self, sizes: ExpertSizes, *, prefix: str) -> None:
        super().__init__()
        self.sizes, self.prefix = sizes, prefix

    def weight_targets(self) -> dict[str, WeightTarget]:
        sizes = self.sizes
        columns = (sizes.intermediate_size, sizes.hidden_size)
        shapes: dict[str, tuple[int, int]] = dict.fromkeys(sizes.up_projections, columns)
        shapes["down"] = columns[::-1]
        targets = {}
        for expert in (number for number in range(sizes.num_experts) if number not in sizes.experts):
            for projection, shape in shapes.items():
                name = f"{self.prefix}.{expert}.{projection}_proj"
                targets[f"{name}.weight"] = unused_target(shape)
                if sizes.has_bias:
                    targets[f"{name}.bias"] = unused_target(shape[:1])
        return targets


def _whole_piece(prefix: str, weight: AnyWeight) -> tuple[AdaptedPiece, ...]:
    """Return a small projection that every rank has, as adapters see it: on CPUs, beside the experts."""
    if not isinstance(weight, PackedWeight):
        return ()
    rows, columns = weight.shape
    return (AdaptedPiece(prefix, (rows, columns), AdaptedRows(0, rows), length=rows),)


def _latent_projections(
    hidden_size: int, spec: ExpertsSpec, context: ModelContext, prefix: str
) -> tuple[PackedLinear, PackedLinear] | tuple[None, None]:
    """Return the projections to and from what experts read and write, if that is not the token's state.

    Every rank has both: they are small beside the experts.
    """
    if not spec.latent_size:
        return None, None
    assert not spec.has_shared_gate, "no family has both"

    def create(name: str, in_features: int, out_features: int) -> PackedLinear:
        whole = Piece(name, out_features, 0, out_features)
        return PackedLinear(in_features, (whole,), bias=False, context=context, prefix=prefix)

    return (
        create("fc1_latent_proj", hidden_size, spec.latent_size),
        create("fc2_latent_proj", spec.latent_size, hidden_size),
    )


def layer_of(prefix: str, context: ModelContext) -> int:
    """Return the layer that a mixture is in, by its name; -1 if it is none of the model's, as one that guesses."""
    found = re.search(r"\.(\d+)\.", prefix)
    if found is None or context.config.guesses_for_another:
        return -1
    layer = int(found[1])
    return layer if layer < context.architecture.num_layers else -1


def _share_sizes(
    hidden_size: int,
    intermediate_size: int,
    spec: ExpertsSpec,
    activation: str,
    order: Sequence[int] | None,
    *,
    context: ModelContext,
) -> ExpertSizes:
    """Return the part of a mixture's experts that this rank holds.

    Args:
        order: As of `Router`.

    Raises:
        ConfigError: Ranks cannot share the experts, or their columns, evenly.
    """
    rank, num_experts = context.rank, spec.num_experts
    experts: Sequence[int] = range(num_experts)
    first: int | None = None
    if context.config.engine.parallel.expert_parallel:
        each = experts_per_rank(num_experts, rank.tensor_parallel_size)
        first, start, length = rank.tensor_parallel_rank * each, 0, intermediate_size
        experts = (experts if order is None else order)[first : first + each]
    else:
        start, length = share(intermediate_size, what="intermediate_size", rank=rank)
    adds_down_bias = length == intermediate_size or rank.tensor_parallel_rank == 0
    return ExpertSizes(
        experts,
        num_experts,
        first if len(experts) < num_experts else None,
        hidden_size,
        intermediate_size,
        start,
        length,
        activation,
        spec.is_gated,
        has_bias=spec.bias,
        adds_down_bias=spec.bias and adds_down_bias,
    )


def _are_packed(sizes: ExpertSizes, context: ModelContext) -> bool:
    """Return whether experts' weights are packed or quantized, rather than stacked plain tensors.

    Raises:
        FeatureDisabled: The device's products do not compute such experts.
    """
    if context.device.type != "cpu":
        quantization = context.config.quantization
        if quantization != "none" and (sizes.has_bias or sizes.activation != "silu"):
            raise FeatureDisabled(
                f"model.quantization = {quantization}",
                f"{context.architecture.name} has experts with biases or with {sizes.activation}, which GPUs compute "
                "from plain weights only; set it to none",
            )
        return quantization != "none"
    dtype = context.dtype
    return can_pack(sizes.hidden_size, dtype) and can_pack(sizes.length, dtype)


def create_packed(
    out_features: int,
    in_features: int,
    sources: Sequence[Sequence[str]],
    *,
    gated: bool,
    bias: bool,
    context: ModelContext,
) -> Sequence[LinearWeight]:
    """Allocate the weights of one product of every expert, of one form, one after the other in memory.

    Args:
        sources: For each expert, the names of the checkpoint's tensors that its weight is made of.
    """
    names = [name for own in sources for name in own]
    if context.device.type != "cpu":
        format = choose_format(names, in_features=in_features, context=context)
        assert format is not None, "plain weights are stacked"
        assert not bias, "_are_packed has refused it"
        return create_quantized_experts(
            len(sources), out_features, in_features, format, gated=gated, context=context
        )
    a_name_of_each_type = list(
        {(context.tensor_type(name), context.tensor_format(name)): name for name in names}.values()
    )
    weights = []
    for _ in sources:
        weight, _ = create_linear_weight(
            out_features, in_features, sources=a_name_of_each_type, context=context, gated=gated, bias=bias
        )
        assert isinstance(weight, PackedWeight), "_are_packed has checked that they can be packed"
        weights.append(weight)
    return PackedStack(weights)


def _expert_targets(
    w13: AnyWeight,
    w2: AnyWeight,
    sizes: ExpertSizes,
    prefix: str,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
) -> dict[str, WeightTarget]:
    """Return the places of an expert's tensors; a `LinearWeight` holds its own bias."""
    columns = (sizes.intermediate_size, sizes.hidden_size)
    share_of_columns = {"length": sizes.length, "start": sizes.start}
    targets = {f"{prefix}.down_proj.weight": linear_target(w2, columns[::-1], dim=1, start=sizes.start)}
    for projection in sizes.up_projections:
        name, half = f"{prefix}.{projection}_proj", projection if sizes.is_gated else None
        targets[f"{name}.weight"] = linear_target(w13, columns, half=half, **share_of_columns)
        if sizes.has_bias:
            targets[f"{name}.bias"] = bias_target(
                w13, w13_bias, sizes.intermediate_size, half=half, **share_of_columns
            )
    if sizes.has_bias:
        targets[f"{prefix}.down_proj.bias"] = (
            bias_target(w2, w2_bias, sizes.hidden_size)
            if sizes.adds_down_bias
            else unused_target((sizes.hidden_size,))
        )
    return targets
