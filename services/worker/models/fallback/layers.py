"""Our layers in the places of transformers' projections, input embedding and output head."""

from __future__ import annotations

import re
from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from triptych.errors import FeatureDisabled
from triptych_kernels.ops import linear
from triptych_services.worker.context.model_context import ModelContext
from triptych_services.worker.layers.embedding import LogitsHead, VocabEmbedding
from triptych_services.worker.layers.weights import (
    WeightedLayer,
    WeightTarget,
    bias_target,
    create_linear_weight,
    linear_target,
    parameter_target,
)

GROUP_SIZE = 32  # of quantized weights, along the inputs
_EXPERT_COUNTS = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_num_experts",
    "num_routed_experts",
)
_ROUTERS = frozenset({"router", "gate"})
"""Parts of the paths of modules that choose experts."""


class Projection(WeightedLayer):
    """A product in the place of `nn.Linear`, or of GPT-2's `Conv1D`, with its weight the other way round."""

    def __init__(self, like: nn.Module, *, context: ModelContext, prefix: str) -> None:
        super().__init__()
        self.prefix = prefix
        self.is_transposed = isinstance(like, Conv1D)
        self.in_features, self.out_features = features(like)
        if self.in_features % GROUP_SIZE:
            context = unquantized(context)
        self.has_bias = like.bias is not None
        self.weight, self.bias = create_linear_weight(
            self.out_features,
            self.in_features,
            sources=[f"{prefix}.weight"],
            context=context,
            bias=self.has_bias,
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in_features] to [..., out_features]."""
        rows = x.reshape(-1, self.in_features)
        out = linear(rows if rows.stride(1) == 1 else rows.contiguous(), self.weight, self.bias)
        return out.view(*x.shape[:-1], self.out_features)

    def weight_targets(self) -> dict[str, WeightTarget]:
        shape = (self.out_features, self.in_features)
        target = linear_target(self.weight, shape)
        if self.is_transposed:
            fill = target.fill
            target = WeightTarget(lambda stored: fill(stored.t().contiguous()), shape[::-1], self.in_features)
        targets = {f"{self.prefix}.weight": target}
        if self.has_bias:
            targets[f"{self.prefix}.bias"] = bias_target(self.weight, self.bias, self.out_features)
        return targets


class InputEmbedding(nn.Module):
    """Our table in the place of the input embedding, with the factor that its class has."""

    def __init__(self, like: nn.Embedding, *, context: ModelContext, prefix: str) -> None:
        super().__init__()
        self.scale = _embedding_scale(like, context.dtype)
        # classes ask it for dtype and device
        self.register_buffer(
            "weight", torch.empty(0, dtype=context.dtype, device=context.device), persistent=False
        )
        self.table = VocabEmbedding(like.num_embeddings, like.embedding_dim, context=context, prefix=prefix)

    def forward(self, token_ids: Tensor) -> Tensor:
        """Map [1, num_tokens] to [1, num_tokens, hidden_size]."""
        embedded = self.table(token_ids.reshape(-1)).to(self.weight.dtype)[None]
        return embedded if self.scale == 1.0 else embedded * self.scale


class OutputHead(nn.Module):
    """Our head in the place of the output embedding."""

    def __init__(
        self, like: nn.Linear, *, tied_to: VocabEmbedding | None, context: ModelContext, prefix: str
    ) -> None:
        super().__init__()
        self.head = LogitsHead(
            like.out_features, like.in_features, tied_to=tied_to, context=context, prefix=prefix
        )
        # other modules may hold the same parameter
        self.bias = like.bias

    def forward(self, hidden: Tensor) -> Tensor:
        """Map [1, num_rows, hidden_size] to float32 logits [1, num_rows, vocab_size]."""
        logits: Tensor = self.head(hidden[0])
        return (logits if self.bias is None else logits + self.bias)[None]


class OtherParameters(WeightedLayer):
    """The parameters of transformers' own modules, which stay where they are."""

    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        """
        Args:
            parameters: By name in the checkpoint.
        """
        super().__init__()
        self._name_to_parameter = parameters

    def weight_targets(self) -> dict[str, WeightTarget]:
        return {
            # a single number is stored as a vector of one
            name: replace(
                parameter_target(parameter.view(parameter.shape or (1,)), tuple(parameter.shape) or (1,)),
                constant=1.0 if name.endswith("norm.weight") and parameter.dim() == 1 else None,
            )
            for name, parameter in self._name_to_parameter.items()
        }


def replace_layers(model: PreTrainedModel, context: ModelContext, *, has_head: bool = True) -> None:
    """Put our layers into a model on the meta device.

    Args:
        has_head: Whether the model predicts tokens.

    Raises:
        FeatureDisabled: The embedding or the head is of an unknown kind.
    """
    names = {id(module): name for name, module in model.named_modules()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings() if has_head else None
    if not isinstance(embedding, nn.Embedding) or (has_head and not isinstance(head, nn.Linear)):
        raise FeatureDisabled(
            "model.backend = transformers",
            f"{type(model).__name__} has {type(embedding).__name__} and {type(head).__name__} for its vocabulary",
        )
    own_embedding = InputEmbedding(embedding, context=context, prefix=names[id(embedding)])
    ours: dict[int, nn.Module] = {
        id(module): own_embedding
        for module in model.modules()
        if isinstance(module, nn.Embedding) and module.weight is embedding.weight
    }
    if isinstance(head, nn.Linear):
        tied_to = own_embedding.table if head.weight is embedding.weight else None
        ours[id(head)] = OutputHead(head, tied_to=tied_to, context=context, prefix=names[id(head)])
    num_experts = _expert_counts(model)
    kept = kept_in_float32(model, context.dtype)
    for name, module in model.named_modules():
        # routers choose by small differences, and some classes read their weights beside calling them
        is_router = features(module)[1] in num_experts or not _ROUTERS.isdisjoint(name.split("."))
        if id(module) not in ours and is_projection(module) and not is_router and not kept.search(name):
            ours[id(module)] = Projection(module, context=context, prefix=name)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if id(child) in ours:
                setattr(module, name, ours[id(child)])


def allocate_others(
    model: nn.Module, context: ModelContext, kept: re.Pattern[str]
) -> dict[str, nn.Parameter]:
    """Give memory to the parameters that are still on the meta device, and move buffers to the device.

    Buffers of the checkpoint become parameters, which are loaded.

    Returns:
        Name in the model -> parameter.
    """
    made: dict[int, nn.Parameter] = {}
    found: dict[str, nn.Parameter] = {}
    for path, module in model.named_modules():
        if isinstance(module, WeightedLayer):
            continue
        prefix = f"{path}." if path else ""
        for name, buffer in list(module._buffers.items()):
            if buffer is None:
                continue
            if name in module._non_persistent_buffers_set:
                module._buffers[name] = buffer.to(context.device)
            else:
                del module._buffers[name]
                module.register_parameter(name, nn.Parameter(buffer.to(context.device), requires_grad=False))
                found[prefix + name] = module._parameters[name]
        for name, parameter in list(module._parameters.items()):
            if parameter is None or prefix + name in found:
                continue
            if id(parameter) not in made:
                dtype = torch.float32 if kept.search(prefix + name) else parameter.dtype
                memory = torch.empty(parameter.shape, dtype=dtype, device=context.device)
                made[id(parameter)] = nn.Parameter(memory, requires_grad=False)
                found[prefix + name] = made[id(parameter)]
            module._parameters[name] = made[id(parameter)]
    return found


def features(module: nn.Module) -> tuple[int, int]:
    """Return the numbers of inputs and outputs of a projection; zeros if the module is none."""
    if isinstance(module, Conv1D):
        return int(module.nx), int(module.nf)
    return (module.in_features, module.out_features) if isinstance(module, nn.Linear) else (0, 0)


def is_projection(module: nn.Module) -> bool:
    """Return whether a module is a product with a weight, and computes nothing else."""
    return isinstance(module, Conv1D) or (
        isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
    )


def unquantized(context: ModelContext) -> ModelContext:
    return replace(context, config=replace(context.config, quantization="none"))


def kept_in_float32(model: PreTrainedModel, dtype: torch.dtype) -> re.Pattern[str]:
    """Return what matches the names of parameters that the class computes with in float32."""
    names = set(model._keep_in_fp32_modules_strict or ())
    if dtype == torch.float16:
        names |= set(model._keep_in_fp32_modules or ())
    if dtype == torch.float32 or not names:
        return re.compile(r"(?!)")
    return re.compile("|".join(rf"(^|\.){name}($|\.)" for name in sorted(names)))


def _expert_counts(model: PreTrainedModel) -> set[int]:
    config = model.config.get_text_config(decoder=True)
    return {count for key in _EXPERT_COUNTS if (count := getattr(config, key, None))}


def _embedding_scale(module: nn.Embedding, dtype: torch.dtype) -> float:
    """Return the factor of an embedding's rows, by what its class computes of ones.

    Raises:
        FeatureDisabled: It computes something else.
    """
    if type(module).forward is nn.Embedding.forward:
        return 1.0
    weight = module._parameters["weight"]
    outs = []
    try:
        for number in (1.0, 2.0):
            ones = torch.full((), number, dtype=dtype).expand(module.num_embeddings, module.embedding_dim)
            module._parameters["weight"] = nn.Parameter(ones, requires_grad=False)
            outs.append(module(torch.ones(1, 1, dtype=torch.int64))[0, 0])
    finally:
        module._parameters["weight"] = weight
    scale = float(outs[0][0])
    if not all(torch.equal(out, torch.full_like(out, scale * n)) for n, out in enumerate(outs, 1)):
        raise FeatureDisabled(
            "model.backend = transformers",
            f"{type(module).__name__} does not multiply its rows by one number",
        )
    return scale
