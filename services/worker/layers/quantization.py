"""The form in which a linear layer's weight is held, from the operator's choice and the checkpoint's form."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from triptych.errors import ModelError
from triptych_kernels.weights.base import BlockWeight, LinearWeight
from triptych_kernels.weights.coded import CodedRows
from triptych_kernels.weights.coded_weight import CodedWeight
from triptych_kernels.weights.formats import (
    BLOCK_FORMATS,
    GROUP_SIZE,
    PANEL_FORMATS,
    ChannelFormat,
    QuantizedFormat,
    common_format,
)
from triptych_kernels.weights.quantized import QuantizedWeight, can_hold
from triptych_services.worker.context.model_context import ModelContext
from triptych_services.worker.context.resolved_config import ResolvedConfig

WeightFormat = QuantizedFormat | ChannelFormat

_QUANTIZED_TO = {
    "q4": QuantizedFormat(4, "minimum"),  # each group as a Q4_0 or a Q4_1, whichever is nearer
    "q8": QuantizedFormat(8),
}
_CHANNEL_FORMATS = {"int8": ChannelFormat(torch.int8), "fp8": ChannelFormat(torch.float8_e4m3fn)}
_INT8_ON_CPUS = QuantizedFormat(8)  # its products' inputs are in 8 bits, too
_HEAD_FORMAT = QuantizedFormat(8)  # no later layer averages out its errors


_CHUNK_WEIGHTS = 1 << 20
"""Weights that are unpacked at once: 4 MiB in float32, beside which their codes stay in the second-level cache."""

_FILLED_WEIGHTS = 1 << 22
"""Weights that are packed at once: each call takes 0.3 ms in Python, as long as 1 MiB of codes takes to be packed."""

_ROW_FIELDS = ("scales", "offsets", "super_scales", "super_minimums")  # of CodedRows

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
    """One of `GGUF_FORMATS` of triptych_kernels.weights.formats."""
    data: Tensor
    """[rows, bytes of a row] uint8, rows in Hugging Face's order; a view of the file, to be copied at once."""
    shape: tuple[int, int]
    codes: CodedTensor
    """The same matrix, for weights that cannot keep the blocks."""

    def narrow(self, dim: int, start: int, length: int) -> Tensor:
        """Return a part in floating point, as `Tensor.narrow` does."""
        return self.codes.narrow(dim, start, length)

    def select(self, rows: Tensor | slice, num_rows: int) -> StoredBlocks:
        """Return the matrix of some rows: a range, or [num_rows] int64."""
        codes = self.codes.select(rows, num_rows)
        return replace(self, data=self.data[rows], shape=(num_rows, self.shape[1]), codes=codes)


@dataclass(frozen=True, slots=True)
class CodedPart:
    """A part of a quantized weight: some of its outputs, for some of its inputs."""

    row: int
    rows: int
    column: int
    columns: int
    group: int
    """Number of inputs with one scale in what is read; 0: all. It divides the groups that the file has."""


@dataclass(frozen=True, slots=True, eq=False)
class CodedTensor:
    """A matrix of a checkpoint that holds quantized weights, of which a rank reads only the part that it holds."""

    name: str
    format: QuantizedFormat
    shape: tuple[int, int]
    """[out_features, in_features], however the file lays it out."""
    read_codes: Callable[[CodedPart], CodedRows]
    dtype: torch.dtype
    """Precision of weights that cannot keep the codes."""
    dequantized: set[str]
    """Gets the name if the matrix is read in floating point."""
    read: ReadPart | None = None
    """Reads rows or columns in floating point; None: as the codes say."""

    def narrow(self, dim: int, start: int, length: int) -> Tensor:
        """Return a part in floating point, as `Tensor.narrow` does."""
        if length:
            self.dequantized.add(self.name)
        if self.read is not None:
            return self.read(dim, start, length)
        shape = [*self.shape]
        shape[dim] = length
        out = torch.empty(shape, dtype=self.dtype)
        group = self.format.group
        if group and dim == 1 and (start % group or length % group):
            group = 1
        for row, codes in self.parts(dim, start, length, group, _CHUNK_WEIGHTS):
            out[row : row + codes.shape[0]] = codes.dequantize(self.dtype)
        return out

    def parts(
        self, dim: int, start: int, length: int, group: int, num_weights: int = _FILLED_WEIGHTS
    ) -> Iterator[tuple[int, CodedRows]]:
        """Yield a part, as of `Tensor.narrow`, in pieces of some rows: the first row within the part, and its rows.

        Args:
            group: As of `CodedPart`.
            num_weights: Weights of a piece.

        Raises:
            ModelError: A weight is no number; names the tensor.
        """
        (row, rows), (column, columns) = ((start, length), (0, self.shape[1]))
        if dim == 1:
            (row, rows), (column, columns) = ((0, self.shape[0]), (start, length))
        step = max(1, num_weights // max(columns, 1))
        for first in range(0, rows, step):
            piece = CodedPart(row + first, min(step, rows - first), column, columns, group)
            codes = self.read_codes(piece)
            if not codes.is_finite():
                raise ModelError(
                    f"{self.name}: rows {piece.row} to {piece.row + piece.rows - 1}: a scale times a code is no number "
                    "in float32; the file is damaged, fetch it again"
                )
            yield first, codes

    def select(self, rows: Tensor | slice, num_rows: int) -> CodedTensor:
        """Return the matrix of some rows: a range, or [num_rows] int64."""

        def read(part: CodedPart) -> CodedRows:
            if isinstance(rows, slice):
                return self.read_codes(replace(part, row=rows.start + part.row))
            wanted = rows[part.row : part.row + part.rows]
            first, last = int(wanted.min()), int(wanted.max())
            return _select_rows(
                self.read_codes(replace(part, row=first, rows=last + 1 - first)), wanted - first
            )

        def read_floats(dim: int, start: int, length: int) -> Tensor:
            assert self.read is not None, "else codes are read"
            if dim:
                return self.read(1, start, length)[rows]
            if isinstance(rows, slice):
                return self.read(0, rows.start + start, length)
            return self.read(0, 0, self.shape[0])[rows[start : start + length]]

        own_read = None if self.read is None else read_floats
        return replace(self, shape=(num_rows, self.shape[1]), read_codes=read, read=own_read)


@dataclass(frozen=True, slots=True, eq=False)
class CodedStack:
    """A tensor of a checkpoint that holds the quantized weights of all experts of a mixture."""

    shape: tuple[int, int, int]
    """[num_experts, out_features, in_features]"""
    expert: Callable[[int], CodedTensor | StoredBlocks]
    """Returns the matrix of one expert."""

    def narrow(self, dim: int, start: int, length: int) -> Tensor:
        """Return some experts in floating point, as `Tensor.narrow` does."""
        assert dim == 0, "experts are read one by one"
        return torch.stack([self.expert(start + n).narrow(0, 0, self.shape[1]) for n in range(length)])


def _select_rows(rows: CodedRows, wanted: Tensor) -> CodedRows:
    tensors = {name: part for name in _ROW_FIELDS if (part := getattr(rows, name)) is not None}
    selected = {name: part[wanted] for name, part in tensors.items()}
    return replace(rows, codes=rows.unpacked()[wanted], **selected)


def choose_format(
    sources: Sequence[str], *, in_features: int, is_head: bool = False, context: ModelContext
) -> WeightFormat | None:
    """Return the smallest lossless format for a weight made of these tensors of the checkpoint.

    Args:
        sources: Names of the tensors.
        in_features: Number of inputs on this rank.
        is_head: Whether the weight computes logits; tensors that are not stored in blocks are then quantized to 8 bits.

    Returns:
        None if the weight is not quantized.
    """
    quantization = context.config.quantization
    if quantization == "none":
        return None
    if quantization == "stored":
        return _stored_format(sources, in_features, context)
    if quantization == "int8" and context.device.type == "cpu" and not is_head:
        return _INT8_ON_CPUS
    if quantization in _CHANNEL_FORMATS and not is_head:
        return _CHANNEL_FORMATS[quantization]
    kept = None if context.device.type != "cpu" else _stored_format(sources, in_features, context)
    if kept is not None:
        return kept
    otherwise = _HEAD_FORMAT if is_head else _QUANTIZED_TO[quantization]
    formats = [
        BLOCK_FORMATS[type] if keeps_blocks(type, quantization) else otherwise
        for type in (context.tensor_type(name) for name in sources)
    ]
    return common_format(formats)


def _stored_format(sources: Sequence[str], in_features: int, context: ModelContext) -> QuantizedFormat | None:
    """Return the format that holds the codes of these tensors; None if they are floating point, or become that.

    Groups are divided where the product or this rank's share of the inputs needs it, which repeats their scales.
    """
    formats = [context.tensor_format(name) for name in sources]
    try:
        common = common_format([format for format in formats if format is not None])
    except (TypeError, ValueError):  # there is none
        return None
    if None in formats or common.group == 1:
        return None
    for group in dict.fromkeys((common.group, GROUP_SIZE)):
        divides = common.group == group or common.group % (group or 1) == 0
        format = replace(common, group=group)
        if divides and in_features % (group or 1) == 0 and can_hold(format, in_features, context.dtype):
            return format
    return None


def describe_quantization(
    weights: Iterable[LinearWeight], config: ResolvedConfig, kept_types: Sequence[str] = ()
) -> str:
    """Return the form of linear weights for people: `Q4_K, Q6_K`, `gptq 4-bit g128`, `gptq 4-bit g128 as bfloat16`.

    Args:
        weights: All of a model's, which say whether codes were kept.
        kept_types: Forms of the file of which weights keep the codes, the most frequent first.
    """
    stored = config.architecture.quantization
    if stored is None and config.quantization == "stored":
        return ", ".join(kept_types) or "none"
    if stored is None:
        return config.quantization
    is_kept = any(isinstance(weight, BlockWeight) for weight in weights)
    return f"{stored}{'' if is_kept else f' as {config.weight_dtype}'}"


def keeps_codes(quantization: str) -> bool:
    """Return whether linear weights keep the codes of a file, where a product reads them."""
    return quantization == "stored" or quantization in _QUANTIZED_TO


def keeps_blocks(type: str, quantization: str) -> bool:
    """Return whether linear weights keep the blocks of tensors stored in this form.

    Under q8 blocks of 4 bits are kept as well, since 8 bits would hold the same values.
    """
    return keeps_codes(quantization) and type in BLOCK_FORMATS


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
        create = QuantizedWeight if format in PANEL_FORMATS else CodedWeight
        weight = create(out_features, in_features, dtype, format, gated=gated, bias=bias)
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
