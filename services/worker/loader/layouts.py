"""Packings of quantized weights in published files: which tensors a weight is made of, and what its codes are.

| layout                            | codes                                    | scales                             |
|-----------------------------------|------------------------------------------|------------------------------------|
| gptq, gptq_v2                     | qweight [inputs in words, outputs]       | scales, qzeros, g_idx by group     |
| awq                               | qweight [inputs, outputs in words]       | scales, qzeros                     |
| pack-quantized                    | weight_packed [outputs, inputs in words] | weight_scale, weight_zero_point    |
| fp8, int-quantized, float-        | weight, a byte for each                  | weight_scale or weight_scale_inv   |
| llm-int8                          | weight, a byte for each                  | SCB: 127 times the scale           |
| nvfp4, nvfp4-pack-quantized       | weight, weight_packed: pairs in bytes    | weight_scale and one of the tensor |
| mxfp4-pack-quantized, mxfp4       | weight_packed, _blocks: pairs in bytes   | weight_scale, _scales: exponents   |

A word is a little-endian int32; the codes of an axis are one stream of bits in it. Sources: GPTQModel 7.7,
compressed-tensors 0.20, bitsandbytes 0.50, and the published checkpoints of DeepSeek V3, GPT-OSS and modelopt.
torchao's packings are in torchao.py, those of bitsandbytes in 4 bits in quantized.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import NoReturn

import torch
from torch import Tensor

from triptych.checkpoint.quantization.scheme import WeightScheme
from triptych.errors import ModelError
from triptych_kernels.weights.coded import CodedRows, StoredCodes
from triptych_kernels.weights.formats import Offset, QuantizedFormat, Scale, Table
from triptych_services.worker.layers.quantization import CodedPart
from triptych_services.worker.loader.base import StoredTensor
from triptych_services.worker.loader.safetensors import SafetensorsCheckpoint

FLOATS: Mapping[str, Scale] = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}
"""Types of stored scales -> their precision in a format."""
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Place in a word of each of eight neighbours."""
_INPUT_SCALES = ("input_scale", "input_zero_point", "input_global_scale", "activation_scale", "output_scale")
"""Tensors about the rounding of inputs and outputs, which `model.activation_bits` decides here."""


@dataclass(frozen=True, slots=True)
class CodedModule:
    """The tensors of one quantized weight in the files."""

    name: str
    scheme: WeightScheme
    parts: Mapping[str, str]
    """Ending -> name of the tensor: `scales` -> `model.layers.0.mlp.up_proj.scales`."""
    files: SafetensorsCheckpoint

    def has(self, part: str) -> bool:
        return part in self.parts

    def stored(self, part: str) -> StoredTensor:
        """Return the properties of a tensor.

        Raises:
            ModelError: It is missing; names it.
        """
        if part not in self.parts:
            raise ModelError(
                f"{self.name}: there is no {part}, which {self.scheme} needs; found {', '.join(self.parts)}"
            )
        return self.files.tensors[self.parts[part]]

    def view(self, part: str) -> Tensor:
        """Return a tensor as its file has it, mapped."""
        return self.files.view(self.parts[part])

    def check(self, part: str, types: tuple[str, ...], *shapes: tuple[int, ...]) -> StoredTensor:
        """Check type and shape of a tensor.

        Raises:
            ModelError: They are others; names file, tensor, what is there and what is expected.
        """
        stored = self.stored(part)
        if stored.type not in types or (shapes and stored.shape not in shapes):
            expected = " or ".join(dict.fromkeys(str(list(shape)) for shape in shapes))
            self.fail(
                part, f"is {stored.type} {list(stored.shape)}", f"{' or '.join(types)} {expected}".strip()
            )
        return stored

    def fail(self, part: str, found: str, expected: str) -> NoReturn:
        file = self.files.file_of(self.parts[part])
        raise ModelError(f"{file}: {self.parts[part]}: {found}; {self.scheme} needs {expected}")

    def scales(self, part: str, values: Tensor) -> Tensor:
        """Return scales as they are, once it is known that all are numbers.

        Raises:
            ModelError: One is none.
        """
        if not bool(torch.isfinite(values.float()).all()):
            self.fail(part, "holds a scale that is no number", "finite ones")
        return values


@dataclass(frozen=True, slots=True)
class CodedForm:
    """The properties of a quantized weight that its headers tell."""

    shape: tuple[int, ...]
    """[out_features, in_features], of stacked experts [num_experts, out_features, in_features]."""
    format: QuantizedFormat
    """The format of the codes, of group 1 where no group of neighbouring inputs shares its scales."""
    remark: str = ""
    """Why the format is of group 1."""


class Layout(ABC):
    """One packing."""

    main: str
    """Ending of the tensor with the codes."""
    types: tuple[str, ...]
    """Types of that tensor's elements."""
    others: tuple[str, ...]
    """Endings of tensors that belong to it."""
    output = "weight"
    """Ending of the weight's own name, as models without quantization have it; empty: there is none."""
    experts = False
    """Whether it holds all experts of a mixture, along a first axis."""

    @property
    def endings(self) -> tuple[str, ...]:
        return (self.main, *self.others, *_INPUT_SCALES)

    @abstractmethod
    def describe(self, module: CodedModule) -> CodedForm:
        """Return what the headers tell, which are checked.

        Raises:
            ModelError: A tensor is missing, or of another type or shape; names it.
        """

    @abstractmethod
    def read(self, module: CodedModule, form: CodedForm, part: CodedPart, expert: int = 0) -> CodedRows:
        """Read a part of the weight; `part.group` divides the groups that share a scale.

        Raises:
            ModelError: A value is no number, or out of range; names it.
        """


class WordLayout(Layout):
    """Codes of some bits in words along the inputs, with a scale and maybe a zero for each group."""

    main, types = "weight_packed", ("I32",)
    others: tuple[str, ...] = ("weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape")
    scale, zero, order = "weight_scale", "weight_zero_point", "weight_g_idx"
    is_by_input = False
    """Whether the tensors are stored with inputs first."""
    adds_one = False
    """Whether zeros are stored less one."""

    def describe(self, module: CodedModule) -> CodedForm:
        scheme = module.scheme
        bits, stored = scheme.bits, module.check(self.main, self.types)
        if len(stored.shape) != 2:
            module.fail(self.main, f"is {list(stored.shape)}", "a matrix")
        rows, words = stored.shape[::-1] if self.is_by_input else stored.shape
        columns = self._num_columns(module, words)
        group = scheme.group or columns
        groups = -(-columns // group)
        shapes: list[tuple[int, ...]] = [(groups, rows) if self.is_by_input else (rows, groups)]
        shapes += [(rows,)] * (groups == 1)
        scales = module.check(self.scale, tuple(FLOATS), *shapes)
        if not scheme.is_symmetric or (self.is_by_input and module.has(self.zero)):
            words = -(-rows * bits // 32)
            module.check(self.zero, ("I32",), (groups, words) if self.is_by_input else (words, groups))
        return _in_groups(
            (rows, columns), scheme, FLOATS[scales.type], order=self._order(module, columns, group, groups)
        )

    def _num_columns(self, module: CodedModule, words: int) -> int:
        bits = module.scheme.bits
        if module.has("weight_shape"):
            module.check("weight_shape", ("I64", "I32"), (2,))
            rows, columns = (int(size) for size in module.view("weight_shape"))
            expected = module.stored(self.main).shape[0], -(-columns * bits // 32)
            if (rows, words) != expected or columns < 1:
                module.fail("weight_shape", f"is {[rows, columns]}", f"that of {[expected[0], words]} words")
            return columns
        if words * 32 % bits:
            module.fail(self.main, f"has {words} words of inputs", f"whole codes of {bits} bits")
        return words * 32 // bits

    def _order(self, module: CodedModule, columns: int, group: int, groups: int) -> Tensor | None:
        """Return the group of each input; None if neighbours share one.

        Raises:
            ModelError: A group is not there.
        """
        if not module.has(self.order):
            return None
        module.check(self.order, ("I32", "I64"), (columns,))
        order = module.view(self.order).long()
        if not bool(((order >= 0) & (order < groups)).all()):
            module.fail(
                self.order, f"has groups {int(order.min())} to {int(order.max())}", f"0 to {groups - 1}"
            )
        return None if torch.equal(order, torch.arange(columns) // group) else order

    def read(self, module: CodedModule, form: CodedForm, part: CodedPart, expert: int = 0) -> CodedRows:
        codes = self._codes(module, part, form.shape[1])
        of_inputs = self._groups(module, form, part)
        scales = self._of_rows(module, module.view(self.scale), part)
        scales = module.scales(self.scale, scales)
        zeros = self._zeros(module, part, scales.shape[1])
        return CodedRows(
            replace(form.format, group=part.group),
            codes,
            scales[:, of_inputs],
            None if zeros is None else zeros[:, of_inputs],
        )

    def _codes(self, module: CodedModule, part: CodedPart, columns: int) -> Tensor | StoredCodes:
        bits, matrix = module.scheme.bits, module.view(self.main)

        def unpack() -> Tensor:
            first, last = part.column // 32 * 32, min(-(-(part.column + part.columns) // 32) * 32, columns)
            count = -(-(last - first) * bits // 32)
            words = self._narrow(matrix, part.row, part.rows, first * bits // 32, count)
            codes = unpack_words(words.contiguous(), bits, last - first)
            return codes[:, part.column - first : part.column - first + part.columns]

        if part.column % 32 or part.columns % 32:
            return unpack()
        words = self._narrow(matrix, part.row, part.rows, part.column * bits // 32, part.columns * bits // 32)
        shape = part.rows, part.columns
        if self.is_by_input:
            return StoredCodes(shape, words.t(), "words", bits, unpack)
        return StoredCodes(shape, words, "rows", bits, unpack)

    def _groups(self, module: CodedModule, form: CodedForm, part: CodedPart) -> Tensor:
        """Return the stored group of each group of the form."""
        columns, group = form.shape[1], module.scheme.group or form.shape[1]
        inputs = torch.arange(part.column, part.column + part.columns, part.group or columns)
        order = self._order(module, columns, group, -(-columns // group))
        return inputs // group if order is None else order[inputs]

    def _of_rows(self, module: CodedModule, scales: Tensor, part: CodedPart) -> Tensor:
        """Return scales of some outputs, [rows, groups]."""
        if scales.dim() == 1:
            scales = scales[None] if self.is_by_input else scales[:, None]
        return (scales.t() if self.is_by_input else scales).narrow(0, part.row, part.rows)

    def _narrow(self, words: Tensor, row: int, rows: int, column: int, columns: int) -> Tensor:
        """Return a part of a matrix of words, outputs first."""
        matrix = words.t() if self.is_by_input else words
        return matrix[row : row + rows, column : column + columns]

    def _zeros(self, module: CodedModule, part: CodedPart, num_groups: int) -> Tensor | None:
        """Return the zeros of some outputs, [rows, groups] uint8; None if they are the middle of the codes."""
        if not module.has(self.zero):
            return None
        bits, words = module.scheme.bits, module.view(self.zero)
        words = words if self.is_by_input else words.t()
        first, last = part.row // 32 * 32, -(-(part.row + part.rows) // 32) * 32
        words = words[:, first * bits // 32 : -(-last * bits // 32)].contiguous()
        last = min(last, first + words.shape[1] * 32 // bits)
        zeros = unpack_words(self._shifted(words, bits), bits, last - first)
        zeros = zeros[:, part.row - first : part.row - first + part.rows].t()
        middle = 1 << (bits - 1)
        if module.scheme.is_symmetric:
            if not bool((zeros == middle).all()):
                module.fail(
                    self.zero, f"has zeros from {int(zeros.min())} to {int(zeros.max())}", f"{middle}"
                )
            return None
        return zeros

    def _shifted(self, words: Tensor, bits: int) -> Tensor:
        """Return zeros as codes count: one is added to each, with a carry into its neighbour, as it was subtracted."""
        if not self.adds_one:
            return words
        if bits == 3:  # codes that two words share: nothing carries there
            ones = unpack_words(words, bits, words.shape[1] * 32 // 3)
            return _pack_words((ones + 1) & 7, bits)
        one = sum(1 << shift for shift in range(0, 32, bits))
        return (words.long() + one).to(torch.int32)


class GptqLayout(WordLayout):
    """Words along the inputs, inputs first, and zeros less one."""

    main, others = "qweight", ("qzeros", "scales", "g_idx")
    scale, zero, order = "scales", "qzeros", "g_idx"
    is_by_input = adds_one = True


class Gptq2Layout(GptqLayout):
    """The second form of GPTQ, with zeros as they are."""

    adds_one = False


class AwqLayout(WordLayout):
    """Words along the outputs, eight in another order; inputs first."""

    main, others = "qweight", ("qzeros", "scales")
    scale, zero, order = "scales", "qzeros", "g_idx"
    is_by_input = True

    def _num_columns(self, module: CodedModule, words: int) -> int:
        return words

    def describe(self, module: CodedModule) -> CodedForm:
        scheme = module.scheme
        stored = module.check(self.main, self.types)
        if len(stored.shape) != 2:
            module.fail(self.main, f"is {list(stored.shape)}", "a matrix")
        columns, words = stored.shape
        rows, group = words * 8, scheme.group or columns
        groups = -(-columns // group)
        scales = module.check(self.scale, tuple(FLOATS), (groups, rows))
        if not scheme.is_symmetric or module.has(self.zero):
            module.check(self.zero, ("I32",), (groups, words))
        return _in_groups((rows, columns), scheme, FLOATS[scales.type])

    def read(self, module: CodedModule, form: CodedForm, part: CodedPart, expert: int = 0) -> CodedRows:
        words = module.view(self.main)[part.column : part.column + part.columns]
        codes: Tensor | StoredCodes
        if part.columns % 32:
            codes = self._unpack(words, part)
        else:
            first, last = part.row // 8, -(-(part.row + part.rows) // 8)
            codes = StoredCodes(
                (part.rows, part.columns),
                words[:, first:last],
                "inputs",
                4,
                partial(self._unpack, words, part),
                skip=part.row - first * 8,
            )
        of_inputs = self._groups(module, form, part)
        scales = module.scales(self.scale, self._of_rows(module, module.view(self.scale), part))
        zeros = self._zeros(module, part, scales.shape[1])
        return CodedRows(
            replace(form.format, group=part.group),
            codes,
            scales[:, of_inputs],
            None if zeros is None else zeros[:, of_inputs],
        )

    def _zeros(self, module: CodedModule, part: CodedPart, num_groups: int) -> Tensor | None:
        if module.scheme.is_symmetric or not module.has(self.zero):
            return None
        return self._unpack(module.view(self.zero), part)

    def _unpack(self, words: Tensor, part: CodedPart) -> Tensor:
        """Return the codes of some outputs, [rows, n] uint8, of words [n, outputs / 8]."""
        first = part.row // 8
        words = words[:, first : -(-(part.row + part.rows) // 8)].contiguous()
        places = unpack_words(words, 4, words.shape[1] * 8).unflatten(1, (-1, 8))
        codes = places[..., _AWQ_ORDER].flatten(1)
        return codes[:, part.row - first * 8 : part.row - first * 8 + part.rows].t().contiguous()


class ByteLayout(Layout):
    """A byte for each weight, integers or 8-bit floats, with scales of tensor, outputs, groups or blocks."""

    main = "weight"
    others: tuple[str, ...] = (
        "weight_scale",
        "weight_scale_inv",
        "weight_zero_point",
        "SCB",
        "weight_format",
    )

    def __init__(self, types: tuple[str, ...], scales: tuple[str, ...], factor: float = 1.0) -> None:
        """
        Args:
            types: Types of the codes.
            scales: Names that the tensor of scales may have.
            factor: Of all scales.
        """
        self.types, self.scales, self.factor = types, scales, factor

    def describe(self, module: CodedModule) -> CodedForm:
        stored = module.check(self.main, self.types)
        if len(stored.shape) != 2:
            module.fail(self.main, f"is {list(stored.shape)}", "a matrix")
        rows, columns = stored.shape
        scale = self._scale_of(module)
        blocks = self._blocks(module, rows, columns)
        shapes: list[tuple[int, ...]] = [blocks]
        if blocks[1] == 1:
            shapes += [(blocks[0],), (rows, 1), (rows,), (1,), (1, 1)]
        found = module.check(scale, (*FLOATS, "F8_E8M0"), *shapes)
        if not module.scheme.is_symmetric:
            module.check("weight_zero_point", ("I8",), *shapes)
        if module.has("weight_format") and int(module.view("weight_format").view(-1)[0]) != 0:
            module.fail(
                "weight_format", f"is {module.view('weight_format').tolist()}", "0, rows one after the other"
            )
        precision: Scale = "float32" if self.factor != 1.0 else FLOATS.get(found.type, "e8m0")
        return _in_groups((rows, columns), module.scheme, precision)

    def read(self, module: CodedModule, form: CodedForm, part: CodedPart, expert: int = 0) -> CodedRows:
        scheme = module.scheme
        codes = module.view(self.main)[
            part.row : part.row + part.rows, part.column : part.column + part.columns
        ].view(torch.uint8)
        if scheme.table and bool(((codes & 0x7F) == 0x7F).any()):
            module.fail(self.main, "holds an 8-bit float that is no number", "finite ones")
        if not scheme.table:
            codes = codes ^ 0x80
        name = self._scale_of(module)
        scales = module.scales(name, self._spread(module, module.view(name), form, part))
        if module.stored(name).shape == (1,) and not bool(scales.any()):
            module.fail(name, "is zero", "a scale that is not")
        if self.factor != 1.0:
            scales = scales.float() * self.factor
        zeros = None
        if not scheme.is_symmetric:
            zeros = (
                self._spread(module, module.view("weight_zero_point"), form, part).view(torch.uint8) ^ 0x80
            )
        return CodedRows(replace(form.format, group=part.group), codes, scales, zeros)

    def _scale_of(self, module: CodedModule) -> str:
        return next((name for name in self.scales if module.has(name)), self.scales[0])

    def _blocks(self, module: CodedModule, rows: int, columns: int) -> tuple[int, int]:
        scheme = module.scheme
        height, width = scheme.group_rows or rows, scheme.group or columns
        return -(-rows // height), -(-columns // width)

    def _spread(self, module: CodedModule, stored: Tensor, form: CodedForm, part: CodedPart) -> Tensor:
        """Return what is stored for each block as [rows, groups] of a part."""
        scheme, (rows, columns) = module.scheme, form.shape
        width, groups = scheme.group or columns, self._blocks(module, rows, columns)[1]
        matrix = stored.reshape(-1, groups)
        height = rows if len(matrix) == 1 else 1 if len(matrix) == rows else scheme.group_rows or rows
        row = torch.arange(part.row, part.row + part.rows) // height
        column = torch.arange(part.column, part.column + part.columns, part.group or columns) // width
        plain = matrix.float() if matrix.dtype == torch.float8_e8m0fnu else matrix
        return plain[row[:, None], column]


class PairLayout(Layout):
    """Two codes of a table of 16 values in a byte, the first in its low bits, along the inputs."""

    types = ("U8",)

    def __init__(
        self,
        main: str,
        scale: str,
        scale_type: str,
        *,
        whole: str = "",
        divides: bool = False,
        experts: bool = False,
    ) -> None:
        """
        Args:
            main, scale: Endings of the tensors of codes and scales.
            scale_type: Type of the scales: F8_E4M3, or U8 for exponents.
            whole: Ending of the scale of the whole tensor; empty: there is none.
            divides: Whether that divides.
            experts: Whether the tensors are those of all experts, with an axis for the groups.
        """
        self.main, self.scale, self.scale_type = main, scale, scale_type
        self.whole, self.divides, self.experts = whole, divides, experts
        self.others = (scale, *((whole,) if whole else ()))
        self.output = "" if experts else "weight"

    def describe(self, module: CodedModule) -> CodedForm:
        stored = module.check(self.main, self.types)
        group = module.scheme.group
        if len(stored.shape) != (4 if self.experts else 2) or (self.experts and stored.shape[3] * 2 != group):
            expected = f"[experts, outputs, groups, {group // 2}]" if self.experts else "a matrix"
            module.fail(self.main, f"is {list(stored.shape)}", expected)
        *outer, rows, groups = stored.shape[:3] if self.experts else stored.shape
        columns = groups * group if self.experts else groups * 2
        if columns % group:
            module.fail(self.main, f"has {columns} inputs", f"a multiple of {group}")
        types = (self.scale_type, "F8_E8M0") if self.scale_type == "U8" else (self.scale_type,)
        module.check(self.scale, types, (*outer, *self._scale_shape(rows, columns // group)))
        if self._has_whole(module):
            module.check(self.whole, ("F32",), (1,), (1, 1))
        precision: Scale = "e4m3" if self.scale_type == "F8_E4M3" else "e8m0"
        format = QuantizedFormat(4, "none", group, "fp4", precision)
        return CodedForm((*outer, rows, columns), format)

    def read(self, module: CodedModule, form: CodedForm, part: CodedPart, expert: int = 0) -> CodedRows:
        group, pairs = module.scheme.group, module.view(self.main)
        scales = module.view(self.scale)
        if self.experts:
            pairs, scales = pairs[expert].flatten(1), scales[expert]
        rows = slice(part.row, part.row + part.rows)
        pairs = pairs[rows, part.column // 2 : -(-(part.column + part.columns) // 2)]

        def unpack() -> Tensor:
            codes = torch.stack([pairs & 15, pairs >> 4], dim=-1).flatten(1)
            return codes[:, part.column % 2 :][:, : part.columns]

        codes: Tensor | StoredCodes
        if part.column % 2 or part.columns % 32:
            codes = unpack()
        else:
            codes = StoredCodes((part.rows, part.columns), pairs, "rows", 4, unpack)
        groups = torch.arange(part.column, part.column + part.columns, part.group) // group
        scales = self._of_outputs(scales, part, form.shape[-1] // group)[:, groups]
        if self.scale_type == "U8":
            scales = scales.view(torch.float8_e8m0fnu)
        scales = module.scales(self.scale, scales.float())
        return CodedRows(replace(form.format, group=part.group), codes, scales, factor=self._factor(module))

    def _scale_shape(self, rows: int, groups: int) -> tuple[int, int]:
        """Return the shape in which scales are stored."""
        return rows, groups

    def _of_outputs(self, scales: Tensor, part: CodedPart, groups: int) -> Tensor:
        """Return the scales of a part's outputs, [rows, groups]."""
        return scales[part.row : part.row + part.rows]

    def _has_whole(self, module: CodedModule) -> bool:
        return bool(self.whole)

    def _factor(self, module: CodedModule) -> float:
        if not self._has_whole(module):
            return 1.0
        factor = module.scales(self.whole, module.view(self.whole)).view(-1)[0]
        if float(factor) == 0 or (self.divides and not bool(torch.isfinite(1 / factor))):
            module.fail(self.whole, f"is {float(factor)}", "a scale that is not zero")
        return float(1 / factor if self.divides else factor)


def _in_groups(
    shape: tuple[int, int], scheme: WeightScheme, scale: Scale, *, order: Tensor | None = None
) -> CodedForm:
    """Return the form of a weight with groups of neighbouring inputs, or of single ones where that is not so."""
    offset: Offset = "none" if scheme.is_symmetric else "zero"
    table: Table = "e4m3" if scheme.table else ""
    group, remark = scheme.group, ""
    if order is not None:
        group, remark = 1, "its inputs are in the order of their activations"
    elif group and shape[1] % group:
        group, remark = 1, f"groups of {group} do not divide its {shape[1]} inputs"
    elif group >= shape[1]:
        group = 0
    return CodedForm(shape, QuantizedFormat(scheme.bits, offset, group, table, scale), remark)


def unpack_words(words: Tensor, bits: int, count: int) -> Tensor:
    """Return the first `count` codes of each row of words, [n, count] uint8.

    Args:
        words: [n, m] int32, contiguous: the codes of a row are one stream of bits, lowest first.
    """
    if bits in (2, 4, 8):
        stream = words.view(torch.uint8)
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
        codes = (stream[..., None] >> shifts) & ((1 << bits) - 1) if bits < 8 else stream
        return codes.reshape(len(words), -1)[:, :count]
    places = torch.arange(count) * bits
    wide = torch.nn.functional.pad(words.long() & 0xFFFFFFFF, (0, 1))
    low, shift = places // 32, places % 32
    return (((wide[:, low] | (wide[:, low + 1] << 32)) >> shift) & ((1 << bits) - 1)).to(torch.uint8)


def _pack_words(codes: Tensor, bits: int) -> Tensor:
    """Return codes [n, count] as words, the inverse of `unpack_words`; `count * bits` is a multiple of 32."""
    places = torch.arange(codes.shape[1]) * bits
    words = torch.zeros(len(codes), codes.shape[1] * bits // 32 + 1, dtype=torch.int64)
    shifted = codes.long() << (places % 32)
    words.index_add_(1, places // 32, shifted & 0xFFFFFFFF)
    words.index_add_(1, places // 32 + 1, shifted >> 32)
    words = words[:, :-1]
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


LAYOUTS: Mapping[str, Layout] = {
    "gptq": GptqLayout(),
    "gptq_v2": Gptq2Layout(),
    "awq": AwqLayout(),
    "pack-quantized": WordLayout(),
    "fp8": ByteLayout(("F8_E4M3",), ("weight_scale_inv", "weight_scale")),
    "float-quantized": ByteLayout(("F8_E4M3",), ("weight_scale",)),
    "int-quantized": ByteLayout(("I8",), ("weight_scale",)),
    "llm-int8": ByteLayout(("I8",), ("SCB",), factor=1 / 127),
    "nvfp4": PairLayout("weight", "weight_scale", "F8_E4M3", whole="weight_scale_2"),
    "nvfp4-pack-quantized": PairLayout(
        "weight_packed", "weight_scale", "F8_E4M3", whole="weight_global_scale", divides=True
    ),
    "mxfp4-pack-quantized": PairLayout("weight_packed", "weight_scale", "U8"),
    "mxfp4": PairLayout("_blocks", "_scales", "U8", experts=True),
}
"""Name of a layout, as of `WeightScheme` -> how it is read."""
