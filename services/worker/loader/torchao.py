"""Packings of torchao's tensors, as `triptych.checkpoint.quantization.torchao` finds them in the headers of files.

| class                                    | _weight_qdata                    | scales and zeros                    |
|------------------------------------------|----------------------------------|-------------------------------------|
| Int8Tensor, IntxUnpackedToInt8Tensor     | a byte for each, with a sign     | [rows, groups], zeros integers      |
| Float8Tensor                             | a byte for each                  | [rows, groups]                      |
| Int4Tensor                               | pairs, the first in the low bits | [groups, rows], zeros floats, added |
| NVFP4Tensor, MXTensor of 4 bits          | pairs, the first in the low bits | in blocks, see `unblocked`          |
| MXTensor of 8 bits                       | a byte for each                  | in blocks                           |

w = scale * (code - zero), of Int4Tensor scale * code + zero. Source: torchao 0.18.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from triptych_kernels.weights.coded import CodedRows, StoredCodes
from triptych_kernels.weights.formats import QuantizedFormat
from triptych_services.worker.layers.quantization import CodedPart
from triptych_services.worker.loader.layouts import (
    FLOATS,
    ByteLayout,
    CodedForm,
    CodedModule,
    Layout,
    PairLayout,
)

_SCALE, _ZERO = "_weight_scale", "_weight_zero_point"
_MIDDLE = 8  # of codes of 4 bits


class TorchaoLayout(ByteLayout):
    """A byte for each weight, integers of up to 8 bits or 8-bit floats, with scales of tensor, outputs or groups."""

    main = "_weight_qdata"
    others = (_SCALE, _ZERO, "_weight_act_quant_scale", "_weight_act_quant_zero_point")

    def __init__(self) -> None:
        super().__init__(("I8", "F8_E4M3"), (_SCALE,))

    def describe(self, module: CodedModule) -> CodedForm:
        scheme = module.scheme
        rows, columns = _matrix(module, self.main, ("F8_E4M3",) if scheme.table else ("I8",))
        blocks = _whole_blocks(module, self.main, rows, columns)
        shapes: list[tuple[int, ...]] = [blocks]
        if blocks[1] == 1:
            shapes += [(blocks[0],)]
        scales = module.check(_SCALE, tuple(FLOATS), *shapes)
        has_zeros = False
        if module.has(_ZERO):
            module.check(_ZERO, ("I8",), *shapes)
            has_zeros = _is_used(module)
        format = QuantizedFormat(
            scheme.bits,
            "zero" if has_zeros else "none",
            scheme.group,
            "e4m3" if scheme.table else "",
            FLOATS[scales.type],
        )
        return CodedForm((rows, columns), format)

    def read(self, module: CodedModule, form: CodedForm, part: CodedPart, expert: int = 0) -> CodedRows:
        codes = module.view(self.main)[
            part.row : part.row + part.rows, part.column : part.column + part.columns
        ]
        if module.scheme.table:
            codes = codes.view(torch.uint8)
            if bool(((codes & 0x7F) == 0x7F).any()):
                module.fail(self.main, "holds an 8-bit float that is no number", "finite ones")
        else:
            codes = self._unsigned(module, self.main, codes)
        scales = module.scales(_SCALE, self._spread(module, module.view(_SCALE), form, part))
        zeros = None
        if form.format.offset == "zero":
            zeros = self._unsigned(module, _ZERO, self._spread(module, module.view(_ZERO), form, part))
        return CodedRows(replace(form.format, group=part.group), codes, scales, zeros)

    def _unsigned(self, module: CodedModule, part: str, codes: Tensor) -> Tensor:
        """Return integers with signs as ones without, which begin with the least of so many bits.

        Raises:
            ModelError: One does not fit.
        """
        bits = module.scheme.bits
        middle = 1 << (bits - 1)
        unsigned = codes.view(torch.uint8) + middle  # of a byte the highest bit is dropped
        if bits < 8 and bool((unsigned >> bits).any()):
            module.fail(part, f"holds {int(codes.min())} to {int(codes.max())}", f"{-middle} to {middle - 1}")
        return unsigned


class TorchaoInt4Layout(Layout):
    """Pairs of integers with signs in bytes, with a scale for each group of inputs, and a float that is added."""

    main, types = "_weight_qdata", ("I8", "U8")
    others = (_SCALE, _ZERO)

    def describe(self, module: CodedModule) -> CodedForm:
        rows, pairs = _matrix(module, self.main, self.types)
        columns = pairs * 2
        _, groups = _whole_blocks(module, self.main, rows, columns)
        if module.scheme.group_rows != 1:
            module.fail(
                self.main, f"has a scale for {module.scheme.group_rows or 'all'} outputs", "one for each"
            )
        scales = module.check(_SCALE, tuple(FLOATS), (groups, rows))
        module.check(_ZERO, tuple(FLOATS), (groups, rows))
        format = QuantizedFormat(4, "none", module.scheme.group, scale=FLOATS[scales.type])
        if _is_used(module):  # what the least code means has more digits than zero and scale
            format = replace(format, offset="minimum", scale="float32")
        return CodedForm((rows, columns), format)

    def read(self, module: CodedModule, form: CodedForm, part: CodedPart, expert: int = 0) -> CodedRows:
        rows = slice(part.row, part.row + part.rows)
        pairs = module.view(self.main).view(torch.uint8)
        pairs = pairs[rows, part.column // 2 : -(-(part.column + part.columns) // 2)] ^ 0x88  # without signs

        def unpack() -> Tensor:
            codes = torch.stack([pairs & 15, pairs >> 4], dim=-1).flatten(1)
            return codes[:, part.column % 2 :][:, : part.columns]

        codes: Tensor | StoredCodes
        if part.column % 2 or part.columns % 32:
            codes = unpack()
        else:
            codes = StoredCodes((part.rows, part.columns), pairs, "rows", 4, unpack)
        columns = form.shape[1]
        inputs = torch.arange(part.column, part.column + part.columns, part.group or columns)
        groups = inputs // (module.scheme.group or columns)
        scales = module.scales(_SCALE, module.view(_SCALE)[groups][:, rows].t())
        minima = None
        if form.format.offset == "minimum":
            zeros = module.scales(_ZERO, module.view(_ZERO)[groups][:, rows].t())
            scales = scales.float()
            minima = zeros.float() - scales * _MIDDLE
        return CodedRows(replace(form.format, group=part.group), codes, scales, minima)


class BlockedPairLayout(PairLayout):
    """Pairs of 4-bit floats in bytes, with scales in blocks, and maybe one of the whole tensor."""

    def __init__(self, scale_type: str) -> None:
        super().__init__("_weight_qdata", _SCALE, scale_type, whole="_weight_per_tensor_scale")
        self.others = (*self.others, "_weight_act_per_tensor_scale")

    def _scale_shape(self, rows: int, groups: int) -> tuple[int, int]:
        return _blocked_shape(rows, groups)

    def _of_outputs(self, scales: Tensor, part: CodedPart, groups: int) -> Tensor:
        return unblocked(scales, part.row, part.rows, groups)

    def _has_whole(self, module: CodedModule) -> bool:
        return module.has(self.whole)


class BlockedByteLayout(TorchaoLayout):
    """An 8-bit float for each weight, with exponents as scales in blocks."""

    def describe(self, module: CodedModule) -> CodedForm:
        rows, columns = _matrix(module, self.main, ("F8_E4M3",))
        _, groups = _whole_blocks(module, self.main, rows, columns)
        module.check(_SCALE, ("F8_E8M0",), _blocked_shape(rows, groups))
        return CodedForm((rows, columns), QuantizedFormat(8, "none", module.scheme.group, "e4m3", "e8m0"))

    def _spread(self, module: CodedModule, stored: Tensor, form: CodedForm, part: CodedPart) -> Tensor:
        group = module.scheme.group
        inputs = torch.arange(part.column, part.column + part.columns, part.group)
        return unblocked(stored, part.row, part.rows, form.shape[1] // group)[:, inputs // group]


def _blocked_shape(rows: int, groups: int) -> tuple[int, int]:
    return -(-rows // 128) * 32, -(-groups // 4) * 16


def unblocked(scales: Tensor, row: int, rows: int, groups: int) -> Tensor:
    """Return scales of some outputs, [rows, groups] float32, of such that lie as Blackwell's tensor cores read them.

    A block has those of 128 outputs and 4 groups, and blocks of the same outputs follow each other:

        output 0: 4 groups | output 32: 4 groups | output 64 | output 96 | output 1 | output 33 | …

    Args:
        scales: [32 * blocks of outputs, 16 * blocks of groups], with the last blocks filled up.
        row: The first output.
    Source: cuBLAS, layout of the scales of blocks.
    """
    first, last, width = row // 128, -(-(row + rows) // 128), -(-groups // 4)
    blocks = scales[first * 32 : last * 32].float().reshape(last - first, width, 32, 4, 4)
    by_output = blocks.permute(0, 3, 2, 1, 4).reshape(-1, width * 4)
    return by_output[row - first * 128 :][:rows, :groups]


def _matrix(module: CodedModule, part: str, types: tuple[str, ...]) -> tuple[int, int]:
    stored = module.check(part, types)
    if len(stored.shape) != 2:
        module.fail(part, f"is {list(stored.shape)}", "a matrix")
    return stored.shape[0], stored.shape[1]


def _whole_blocks(module: CodedModule, part: str, rows: int, columns: int) -> tuple[int, int]:
    """Return how many blocks with a scale there are, of outputs and of inputs.

    Raises:
        ModelError: They do not divide the matrix.
    """
    height, width = module.scheme.group_rows or rows, module.scheme.group or columns
    if not rows or not columns or rows % height or columns % width:
        module.fail(part, f"is {[rows, columns]}", f"whole blocks of {[height, width]} with a scale each")
    return rows // height, columns // width


def _is_used(module: CodedModule) -> bool:
    """Return whether there is a zero that is not 0: symmetric weights have them as well."""
    is_used = bool(module.view(_ZERO).any())
    module.files.release(module.parts[_ZERO])
    return is_used


TORCHAO_LAYOUTS = {
    "torchao": TorchaoLayout(),
    "torchao-int4": TorchaoInt4Layout(),
    "torchao-nvfp4": BlockedPairLayout("F8_E4M3"),
    "torchao-mxfp4": BlockedPairLayout("F8_E8M0"),
    "torchao-mxfp8": BlockedByteLayout(),
}
"""Name of a layout, as of `WeightScheme` -> how it is read."""
