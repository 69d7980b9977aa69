"""How checkpoint tensors find their way into parameters: a table from name to place, filled once each."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from services.worker.context.model_context import ModelContext
from services.worker.layers.quantization import StoredBlocks, choose_format, create_quantized_weight
from triptych.errors import ModelError
from triptych_kernels.weights.base import BlockWeight, Half, LinearWeight
from triptych_kernels.weights.packed import PackedWeight, can_pack

AnyWeight = nn.Parameter | LinearWeight
"""[out_features, in_features] in the form that the device's product wants; the ops take either."""

_NUM_NAMES_SHOWN = 5  # of a list of tensor names in an error


@dataclass(frozen=True, slots=True, eq=False)
class WeightTarget:
    """The place of one checkpoint tensor, or of this rank's share of it."""

    fill: Callable[[Tensor], object]
    """Takes this rank's share and keeps a copy, rounded to the form in which the weight is held."""
    checkpoint_shape: tuple[int, ...]
    """Of the whole tensor, as every rank reads it."""
    length: int
    """Of this rank's share, on the axis that ranks share out."""
    dim: int = 0
    """That axis."""
    start: int = 0
    """Where this rank's share begins on it."""
    fill_blocks: Callable[[str, Tensor], object] | None = None
    """Takes this rank's share of a tensor as stored: GGML's name of the form, and [rows, bytes] uint8. None:
    the weight is not held in blocks."""

    @property
    def num_elements(self) -> int:
        """Of this rank's share."""
        return math.prod(self.checkpoint_shape) // self.checkpoint_shape[self.dim] * self.length

    def load(self, name: str, tensor: Tensor | StoredBlocks) -> None:
        """Hand this rank's share of `tensor` to `fill`, or of its blocks to `fill_blocks`.

        Raises:
            ModelError: the tensor has another shape; names both.
        """
        if tuple(tensor.shape) != self.checkpoint_shape:
            raise ModelError(
                f"{name}: the checkpoint holds {list(tensor.shape)}, "
                f"the model needs {list(self.checkpoint_shape)}"
            )
        if isinstance(tensor, StoredBlocks):
            if self.fill_blocks is not None:
                start, length = self.start, self.length
                if self.dim == 1:
                    # blocks lie along the inputs, and no rank holds a part of one: see `choose_quantization`
                    row_bytes, columns = tensor.data.shape[1], self.checkpoint_shape[1]
                    start, length = start * row_bytes // columns, length * row_bytes // columns
                self.fill_blocks(tensor.type, tensor.data.narrow(self.dim, start, length).contiguous())
                return
            tensor = tensor.dequantize()
        self.fill(tensor.narrow(self.dim, self.start, self.length))


def parameter_target(
    parameter: Tensor, checkpoint_shape: tuple[int, ...], *, dim: int = 0, start: int = 0
) -> WeightTarget:
    """The place of a tensor in (a part of) a parameter, which it fills."""
    return WeightTarget(parameter.copy_, checkpoint_shape, parameter.shape[dim], dim, start)


class WeightedLayer(nn.Module, ABC):
    """A layer with parameters of its own."""

    @abstractmethod
    def weight_targets(self) -> dict[str, WeightTarget]:
        """Name in the checkpoint -> place, for every tensor that this layer's parameters are made of."""


def empty_parameter(*shape: int, context: ModelContext) -> nn.Parameter:
    """Storage in `config.dtype` on this rank's device; its content is undefined until it is loaded."""
    storage = torch.empty(shape, dtype=context.dtype, device=context.device)
    return nn.Parameter(storage, requires_grad=False)


def create_linear_weight(
    out_features: int,
    in_features: int,
    *,
    sources: Sequence[str],
    context: ModelContext,
    gated: bool = False,
    bias: bool = False,
    is_head: bool = False,
) -> tuple[AnyWeight, nn.Parameter | None]:
    """Storage for a linear layer's weight and, where that does not hold it itself, its bias.

    Quantized if the operator asked for it, else packed for the native product where there is one, else a plain
    parameter.

    Args:
        sources: the tensors of the checkpoint that it is made of.
        gated: the two halves of the outputs are an MLP's gate and up.
        is_head: it computes logits.
    """
    dtype = context.dtype
    format = choose_format(sources, is_head=is_head, context=context)
    if format is not None:
        weight = create_quantized_weight(
            out_features, in_features, format, gated=gated, bias=bias, context=context
        )
        return weight, None
    if context.device.type == "cpu" and can_pack(in_features, dtype):
        return PackedWeight(out_features, in_features, dtype, gated=gated, bias=bias), None
    parameter = empty_parameter(out_features, in_features, context=context)
    return parameter, empty_parameter(out_features, context=context) if bias else None


def unused_target(checkpoint_shape: tuple[int, ...]) -> WeightTarget:
    """For a tensor of the checkpoint that another rank has use for; this one only checks its shape."""
    return WeightTarget(lambda tensor: None, checkpoint_shape, length=0)


def linear_target(
    weight: AnyWeight,
    checkpoint_shape: tuple[int, int],
    *,
    first_row: int = 0,
    length: int | None = None,
    dim: int = 0,
    start: int = 0,
    half: Half | None = None,
) -> WeightTarget:
    """The place of one projection in a linear layer's weight.

    Args:
        first_row: of the projection's outputs in the weight; in a gated one, within its half.
        length: how many outputs it has there; None: all of the weight's.
        dim: the axis that ranks share out, from `start` on.
        half: of a gated weight.
    """
    num_rows = weight.shape[0] if length is None else length
    on_this_rank = (num_rows, weight.shape[1])[dim]
    if isinstance(weight, LinearWeight):
        keep = partial(weight.fill_blocks, first_row, half=half) if isinstance(weight, BlockWeight) else None
        return WeightTarget(
            partial(weight.fill_rows, first_row, half=half),
            checkpoint_shape,
            on_this_rank,
            dim,
            start,
            keep,
        )
    if half == "up":
        first_row += weight.shape[0] // 2
    return parameter_target(weight[first_row : first_row + num_rows], checkpoint_shape, dim=dim, start=start)


def bias_target(
    weight: AnyWeight,
    bias: nn.Parameter | None,
    out_features: int,
    *,
    first_row: int = 0,
    length: int | None = None,
    start: int = 0,
    half: Half | None = None,
) -> WeightTarget:
    """The place of the bias that belongs to a projection of `out_features` outputs in the checkpoint."""
    num_rows = weight.shape[0] if length is None else length
    if isinstance(weight, LinearWeight):
        return WeightTarget(
            partial(weight.fill_bias, first_row, half=half), (out_features,), num_rows, start=start
        )
    assert bias is not None, "a layer without a bias has no target for it"
    if half == "up":
        first_row += weight.shape[0] // 2
    return parameter_target(bias[first_row : first_row + num_rows], (out_features,), start=start)


def weight_bytes(model: nn.Module) -> int:
    """Memory that the weights take, tied ones counted once."""
    held = sum(weight.num_bytes for weight in linear_weights(model))
    return held + sum(parameter.nbytes for parameter in model.parameters())


def find_weight_targets(model: nn.Module) -> dict[str, WeightTarget]:
    """Name in the checkpoint -> place, for every parameter of `model`."""
    targets: dict[str, WeightTarget] = {}
    for module in model.modules():
        if isinstance(module, WeightedLayer):
            for name, target in module.weight_targets().items():
                assert name not in targets, f"two layers ask for {name}"
                targets[name] = target
    num_elements = sum(parameter.numel() for parameter in model.parameters())
    num_elements += sum(weight.num_elements for weight in linear_weights(model))
    assert num_elements == sum(target.num_elements for target in targets.values()), "a weight has no source"
    return targets


def load_weights(
    model: nn.Module, tensors: Iterable[tuple[str, Tensor | StoredBlocks]], *, ignored: Collection[str] = ()
) -> None:
    """Fill every parameter of `model` exactly once; holds one checkpoint tensor at a time.

    Args:
        tensors: (name, tensor) in any order; each is copied before the next is asked for.
        ignored: endings of names that checkpoints may hold and the model has no use for.
    Raises:
        ModelError: a tensor is missing, unexpected, given twice or of another shape; names it.
    """
    targets = find_weight_targets(model)
    missing = dict.fromkeys(targets)
    unexpected: list[str] = []
    with torch.no_grad():
        for name, tensor in tensors:
            if name in missing:
                targets[name].load(name, tensor)
                del missing[name]
            elif name in targets:
                raise ModelError(f"{name}: the checkpoint holds this tensor twice")
            elif not name.endswith(tuple(ignored)):
                unexpected.append(name)
    complaints = [
        f"{len(names)} tensors are {what}: {_listed(names)}"
        for what, names in (("missing", list(missing)), ("unexpected", unexpected))
        if names
    ]
    if complaints:
        raise ModelError(
            f"the checkpoint does not fit {type(model).__name__}: {'; '.join(complaints)}; "
            "compare its config.json with its weights"
        )


def linear_weights(model: nn.Module) -> list[LinearWeight]:
    """Each once, though layers may share it."""
    found = {
        id(value): value
        for module in model.modules()
        for value in vars(module).values()
        if isinstance(value, LinearWeight)
    }
    return list(found.values())


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:_NUM_NAMES_SHOWN])
    num_hidden = len(names) - _NUM_NAMES_SHOWN
    return f"{shown} and {num_hidden} more" if num_hidden > 0 else shown
