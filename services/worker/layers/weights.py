"""Loading of checkpoint tensors into parameters: a table from name to place, each filled once."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from triptych.errors import ModelError
from triptych_kernels.weights.base import BlockWeight, Half, LinearWeight
from triptych_kernels.weights.coded import CodedRows
from triptych_kernels.weights.formats import QuantizedFormat
from triptych_kernels.weights.packed import PackedWeight, WidenedWeight, can_pack
from triptych_services.worker.context.model_context import ModelContext
from triptych_services.worker.layers.quantization import (
    CodedStack,
    CodedTensor,
    StoredBlocks,
    UnreadTensor,
    choose_format,
    create_quantized_weight,
)

LoadedTensor = Tensor | UnreadTensor | StoredBlocks | CodedTensor | CodedStack
"""A tensor of a checkpoint on its way into a model."""

AnyWeight = nn.Parameter | LinearWeight
"""[out_features, in_features] in the form that the device's product reads; the ops take either."""


@dataclass(frozen=True, slots=True, eq=False)
class WeightTarget:
    """The place of one checkpoint tensor, or of this rank's share of it."""

    fill: Callable[[Tensor], object]
    """Takes this rank's share and stores a copy, rounded to the weight's form."""
    checkpoint_shape: tuple[int, ...]
    """Shape of the whole tensor, as every rank reads it."""
    length: int
    """Length of this rank's share, on the axis that ranks share."""
    dim: int = 0
    """The axis that ranks share."""
    start: int = 0
    """Start of this rank's share on that axis."""
    constant: float | None = None
    """Value of all elements in random checkpoints, for a norm's weight; None: they are drawn."""
    fill_blocks: Callable[[str, Tensor], object] | None = None
    """Takes this rank's share of a tensor as stored: GGML's name of the form, and [rows, bytes] uint8.
    None if the weight is not held in blocks."""
    keeps_blocks: Callable[[str], bool] = lambda type: False
    """Returns whether `fill_blocks` takes a form, by GGML's name."""
    fill_codes: Callable[[int, CodedRows], object] | None = None
    """Takes rows of this rank's share as codes, and the first of them within the share. None if the weight is not held
    in codes."""
    format: QuantizedFormat | None = None
    """Form of such codes."""

    @property
    def num_elements(self) -> int:
        """Number of elements of this rank's share."""
        return math.prod(self.checkpoint_shape) // self.checkpoint_shape[self.dim] * self.length

    def load(self, name: str, tensor: LoadedTensor) -> None:
        """Pass this rank's share of `tensor` to `fill`, or as blocks or codes to `fill_blocks` or `fill_codes`.

        Raises:
            ModelError: The tensor has another shape, names both; or holds a scale that is no number.
        """
        check_shape(name, tensor, self.checkpoint_shape)
        if not self.length:
            return  # nothing of it is read
        if isinstance(tensor, StoredBlocks):
            if self.fill_blocks is not None and self.keeps_blocks(tensor.type):
                try:
                    self._load_blocks(tensor, self.fill_blocks)
                except ValueError as error:
                    raise ModelError(f"{name}: {error}") from error
                return
            tensor = tensor.codes
        fill, format = self.fill_codes, self.format
        # a weight of tensors that no format holds together is rounded
        if isinstance(tensor, CodedTensor) and fill and format and format.holds(tensor.format):
            for row, codes in tensor.parts(self.dim, self.start, self.length, format.group):
                fill(row, codes)
            return
        self.fill(tensor.narrow(self.dim, self.start, self.length))

    def _load_blocks(self, tensor: StoredBlocks, fill: Callable[[str, Tensor], object]) -> None:
        start, length = self.start, self.length
        if self.dim == 1:
            # blocks lie along the inputs, and no rank holds a part of a block: see `choose_quantization`
            row_bytes, columns = tensor.data.shape[1], self.checkpoint_shape[1]
            start, length = start * row_bytes // columns, length * row_bytes // columns
        fill(tensor.type, tensor.data.narrow(self.dim, start, length))


def check_shape(name: str, tensor: LoadedTensor, expected: tuple[int, ...]) -> None:
    """Check the shape of a checkpoint's tensor.

    Raises:
        ModelError: It is another; names both.
    """
    if tuple(tensor.shape) != expected:
        raise ModelError(
            f"{name}: the checkpoint holds {list(tensor.shape)}, the model needs {list(expected)}"
        )


def parameter_target(
    parameter: Tensor, checkpoint_shape: tuple[int, ...], *, dim: int = 0, start: int = 0
) -> WeightTarget:
    """Return the place of a tensor that fills (a part of) a parameter."""
    return WeightTarget(parameter.copy_, checkpoint_shape, parameter.shape[dim], dim, start)


class WeightedLayer(nn.Module, ABC):
    """A layer with parameters of its own."""

    @abstractmethod
    def weight_targets(self) -> dict[str, WeightTarget]:
        """Return name in the checkpoint -> place, for every tensor that this layer's parameters are made of."""


def empty_parameter(*shape: int, context: ModelContext, dtype: torch.dtype | None = None) -> nn.Parameter:
    """Allocate a parameter on this rank's device; its content is undefined.

    Args:
        dtype: Its precision; None: the model's.
    """
    storage = torch.empty(shape, dtype=dtype or context.dtype, device=context.device)
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
    """Allocate a linear layer's weight and its bias.

    The weight is quantized if the operator asked for it, else packed if there is a native product, else a plain
    parameter.

    Args:
        sources: Names of the checkpoint's tensors that the weight is made of.
        gated: Whether the two halves of the outputs are an MLP's gate and up.
        is_head: Whether the weight computes logits.

    Returns:
        The weight and the bias; the bias is None if there is none, or if the weight contains it.
    """
    format = choose_format(sources, in_features=in_features, is_head=is_head, context=context)
    if format is not None:
        weight = create_quantized_weight(
            out_features, in_features, format, gated=gated, bias=bias, is_head=is_head, context=context
        )
        return weight, None
    if context.device.type == "cpu" and can_pack(in_features, context.dtype):
        return _create_packed_weight(
            out_features, in_features, sources=sources, gated=gated, bias=bias, context=context
        ), None
    parameter = empty_parameter(out_features, in_features, context=context)
    return parameter, empty_parameter(out_features, context=context) if bias else None


def _create_packed_weight(
    out_features: int,
    in_features: int,
    *,
    sources: Sequence[str],
    gated: bool,
    bias: bool,
    context: ModelContext,
) -> PackedWeight:
    """Allocate a weight for native products, in as few bytes as hold the checkpoint's tensors without loss."""
    stored_dtype = context.stored_dtype(sources)
    if stored_dtype == context.dtype:
        return PackedWeight(out_features, in_features, context.dtype, gated=gated, bias=bias)
    return WidenedWeight(out_features, in_features, stored_dtype, gated=gated, bias=bias)


def unused_target(checkpoint_shape: tuple[int, ...]) -> WeightTarget:
    """Return the target of a tensor that only other ranks use; this rank checks its shape."""
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
    """Return the place of one projection in a linear layer's weight.

    Args:
        first_row: Row of the projection's first output in the weight; in a gated weight, within its half.
        length: Number of the projection's outputs in the weight; None: all of the weight's.
        dim: The axis that ranks share.
        start: Start of this rank's share on that axis.
        half: Half of a gated weight.
    """
    num_rows = weight.shape[0] if length is None else length
    on_this_rank = (num_rows, weight.shape[1])[dim]
    if isinstance(weight, BlockWeight):
        return WeightTarget(
            partial(weight.fill_rows, first_row, half=half),
            checkpoint_shape,
            on_this_rank,
            dim,
            start,
            fill_blocks=partial(weight.fill_blocks, first_row, half=half),
            keeps_blocks=weight.keeps_blocks,
            fill_codes=lambda row, codes: weight.fill_codes(first_row + row, codes, half=half),
            format=weight.format,
        )
    if isinstance(weight, LinearWeight):
        return WeightTarget(
            partial(weight.fill_rows, first_row, half=half), checkpoint_shape, on_this_rank, dim, start
        )
    if half == "up":
        first_row += weight.shape[0] // 2
    return parameter_target(weight[first_row : first_row + num_rows], checkpoint_shape, dim=dim, start=start)


def bias_target(
    weight: AnyWeight,
    bias: Tensor | None,
    out_features: int,
    *,
    first_row: int = 0,
    length: int | None = None,
    start: int = 0,
    half: Half | None = None,
) -> WeightTarget:
    """Return the place of the bias of a projection that has `out_features` outputs in the checkpoint."""
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
    """Return the memory of the weights in bytes, with tied weights counted once."""
    num_bytes = sum(weight.num_bytes for weight in linear_weights(model))
    return num_bytes + sum(parameter.nbytes for parameter in model.parameters())


def find_weight_targets(model: nn.Module) -> dict[str, WeightTarget]:
    """Return name in the checkpoint -> place, for every parameter of `model`."""
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


def linear_weights(model: nn.Module) -> list[LinearWeight]:
    """Return the model's packed and quantized weights, each once although layers may share it."""
    found = {
        id(value): value
        for module in model.modules()
        for value in vars(module).values()
        if isinstance(value, LinearWeight)
    }
    return list(found.values())
