"""The form in which a linear layer's weight is held, from the operator's choice and the checkpoint's form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from triptych_kernels.weights.base import LinearWeight
from triptych_kernels.weights.formats import BLOCK_FORMATS, ChannelFormat, QuantizedFormat, common_format
from triptych_kernels.weights.quantized import QuantizedWeight
from triptych_services.worker.context.model_context import ModelContext

WeightFormat = QuantizedFormat | ChannelFormat

_QUANTIZED_TO = {
    "q4": QuantizedFormat(4, "minimum"),  # each group as a Q4_0 or a Q4_1, whichever is nearer
    "q8": QuantizedFormat(8),
}
_CHANNEL_FORMATS = {"int8": ChannelFormat(torch.int8), "fp8": ChannelFormat(torch.float8_e4m3fn)}
_INT8_ON_CPUS = QuantizedFormat(8)  # its products' inputs are in 8 bits, too
_HEAD_FORMAT = QuantizedFormat(8)  # no later layer averages out its errors


ReadPart = Callable[[int, int, int], Tensor]
"""Reads a part of a checkpoint's tensor: (dim, start, length), as `Tensor.narrow` takes them."""


@dataclass(frozen=True, slots=True, eq=False)
class UnreadTensor:
    """A tensor of a checkpoint, of which a rank reads only the part that it holds."""

    shape: tuple[int, ...]
    read: ReadPart

    def narrow(self, dim: int, start: int, length: int) -> Tensor:
        """Return a part, as `Tensor.narrow` does."""
        return self.read(dim, start, length)


@dataclass(frozen=True, slots=True, eq=False)
class StoredBlocks:
    """A matrix as its file stores it, for weights that keep the blocks."""

    type: str
    """One of `triptych_kernels.weights.formats.BLOCK_FORMATS`."""
    data: Tensor
    """[rows, bytes of a row] uint8, rows in Hugging Face's order; a view of the file, to be copied at once."""
    shape: tuple[int, int]
    read: ReadPart
    """Reads rows or columns in floating point, for weights that cannot keep the blocks."""

    def narrow(self, dim: int, start: int, length: int) -> Tensor:
        """Return a part in floating point, as `Tensor.narrow` does."""
        return self.read(dim, start, length)


def choose_format(
    sources: Sequence[str], *, is_head: bool = False, context: ModelContext
) -> WeightFormat | None:
    """Return the smallest lossless format for a weight made of these tensors of the checkpoint.

    Args:
        sources: Names of the tensors.
        is_head: Whether the weight computes logits; tensors that are not stored in blocks are then quantized to 8 bits.

    Returns:
        None if the weight is not quantized.
    """
    quantization = context.config.quantization
    if quantization == "none":
        return None
    if quantization == "int8" and context.device.type == "cpu" and not is_head:
        return _INT8_ON_CPUS
    if quantization in _CHANNEL_FORMATS and not is_head:
        return _CHANNEL_FORMATS[quantization]
    otherwise = _HEAD_FORMAT if is_head else _QUANTIZED_TO[quantization]
    formats = [
        BLOCK_FORMATS[type] if keeps_blocks(type, quantization) else otherwise
        for type in (context.tensor_type(name) for name in sources)
    ]
    return common_format(formats)


def keeps_blocks(type: str, quantization: str) -> bool:
    """Return whether linear weights keep the blocks of tensors stored in this form.

    Under q8 blocks of 4 bits are kept as well, since 8 bits would hold the same values. The kernels for inputs in 8
    bits read no blocks.
    """
    return quantization in _QUANTIZED_TO and type in BLOCK_FORMATS


def create_quantized_weight(
    out_features: int,
    in_features: int,
    format: WeightFormat,
    *,
    gated: bool,
    bias: bool,
    is_head: bool = False,
    context: ModelContext,
) -> LinearWeight:
    """Allocate a linear layer's weight in the form that products on this rank's device read.

    Args:
        is_head: Whether the weight computes logits; on CPUs its inputs keep 16 bits.
    """
    dtype, device = context.dtype, context.device
    if device.type == "cpu":
        assert isinstance(format, QuantizedFormat), "choose_quantization allows no other format on CPUs"
        weight = QuantizedWeight(out_features, in_features, dtype, format, gated=gated, bias=bias)
        if context.config.activation_bits == 8 and not is_head:
            weight.input_bits = 8
        return weight
    # Triton comes with the CUDA builds of torch
    from triptych_kernels.triton.linear.quantized_weight import GroupQuantizedWeight
    from triptych_kernels.triton.linear.w8a8_weight import ChannelQuantizedWeight

    if isinstance(format, ChannelFormat):
        return ChannelQuantizedWeight(
            out_features, in_features, dtype, format.dtype, device=device, gated=gated, bias=bias
        )
    return GroupQuantizedWeight(
        out_features,
        in_features,
        dtype,
        format,
        device=device,
        gated=gated,
        bias=bias,
        batch_invariant=context.config.batch_invariant,
    )


def create_quantized_experts(
    num_experts: int,
    out_features: int,
    in_features: int,
    format: WeightFormat,
    *,
    gated: bool,
    context: ModelContext,
) -> Sequence[LinearWeight]:
    """Allocate one product of a mixture's experts in the form that products on this rank's CUDA device read."""
    from triptych_kernels.triton.moe.quantized_experts import GroupQuantizedExperts
    from triptych_kernels.triton.moe.w8a8_experts import ChannelQuantizedExperts

    dtype, device = context.dtype, context.device
    shape = (num_experts, out_features, in_features)
    if isinstance(format, ChannelFormat):
        return ChannelQuantizedExperts(*shape, dtype, format.dtype, device=device, gated=gated)
    return GroupQuantizedExperts(
        *shape, dtype, format, device=device, gated=gated, batch_invariant=context.config.batch_invariant
    )
