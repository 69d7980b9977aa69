"""Calls for what torch computes with stand-ins: each row from the same row of the operands, or the recording ends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from triptych_kernels.cpu.dtypes import DTYPES
from triptych_kernels.cpu.expressions import Expression
from triptych_kernels.cpu.launch import Operand
from triptych_kernels.cpu.pointwise import (
    Pointwise,
    Result,
    Step,
    View,
    bits,
    check_dtype,
    described,
    fold_axes,
    operations,
    sizes_of,
    view_of,
)
from triptych_kernels.cpu.recording import KernelCall, NotRecordable, Place, Recording
from triptych_kernels.weights.packed import PackedWeight, can_pack


def is_stand_in(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "meta"


class RowOperations:
    """Appends the calls for torch's operations to a recording."""

    def __init__(self, recording: Recording, packed: dict[object, tuple[Tensor, PackedWeight]]) -> None:
        """
        Args:
            packed: Address, shape and strides of a constant -> it, and its weight; kept between recordings.
        """
        self.recording = recording
        self._packed = packed

    def compute(self, name: str, expression: Expression, dtype: torch.dtype) -> Tensor:
        """Record what is computed element by element, and return the result.

        Args:
            expression: Its tensors broadcast to the shape of the result.
        """
        check_dtype(name, dtype)
        tensors = [leaf for leaf in tree_leaves(expression) if isinstance(leaf, Tensor)]
        shape = _broadcast(tensor.shape for tensor in tensors)
        place = self.common_place(name, filter(is_stand_in, tensors), len(shape))
        result = self.recording.new(shape, dtype, place)
        self._append(name, expression, result, place)
        return result

    def assign(self, name: str, expression: Expression, target: Tensor) -> Tensor:
        """Record the same into a view of a result, or into an empty tensor of the model; return it."""
        check_dtype(name, target.dtype)
        tensors = [leaf for leaf in tree_leaves(expression) if is_stand_in(leaf)]
        is_known = target.untyped_storage()._cdata in self.recording.buffers
        place = self.common_place(name, [*tensors, target] if is_known else tensors, target.ndim)
        if not is_known:
            self.recording.adopt(name, target, place)
        self._append(name, expression, target, place)
        return target

    def _append(self, name: str, expression: Expression, result: Tensor, place: Place) -> None:
        if result.numel() == 0:
            return
        steps: list[Step] = []
        sizes = sizes_of(result.shape, place)
        axes = [axis for axis, size in enumerate(sizes) if size != 1]

        def view(tensor: Tensor) -> View:
            full = self._view(name, tensor, result.shape, place)
            return replace(full, strides=tuple(full.strides[axis] for axis in axes))

        output = view(result)

        def add(part: Expression, is_last: bool) -> View | Result | float:
            if isinstance(part, tuple):
                operation, *operands = part
                is_rounded = is_last or operation == "rounded"
                if operation == "rounded":
                    ((operation, *operands),) = operands
                sources = tuple(add(operand, False) for operand in operands)
                inside = torch.int64 if result.dtype == torch.int64 else torch.float32
                dtype = result.dtype if is_rounded else inside
                steps.append(Step(operation, sources, dtype, output if is_last else None))
                return Result(len(steps) - 1)
            if isinstance(part, Tensor):
                if part.ndim == 0 and not is_stand_in(part):
                    return float(part.item())
                return view(part)
            return float(part)

        add(expression if isinstance(expression, tuple) else ("copy", expression), True)
        self._refuse_overlap(name, steps, output)
        self.recording.calls.append(
            Pointwise(name, place.count, tuple(sizes[axis] for axis in axes), tuple(steps))
        )

    def common_place(self, name: str, tensors: Iterable[Tensor], ndim: int) -> Place:
        """Return where tensors that broadcast to `ndim` axes have their rows.

        Raises:
            NotRecordable: Not at the same place.
        """
        places = {
            replace(place, axis=place.axis + ndim - tensor.ndim, row=0)
            for tensor in tensors
            for place in [self.recording.locate(name, tensor)]
        }
        if len(places) > 1:
            counts = " with ".join(sorted({place.count for place in places}))
            raise NotRecordable(f"{name} mixes {counts}: its operands have them along different axes")
        if not places:
            raise NotRecordable(f"{name}: no recorded call has filled any of its operands")
        return places.pop()

    def _view(self, name: str, tensor: Tensor, shape: Sequence[int], place: Place) -> View:
        """Return how a kernel reads a tensor that broadcasts to `shape`, with rows along `place.axis`.

        Raises:
            NotRecordable: It is a constant with a value for each row.
        """
        expanded = tensor.expand(shape)
        if is_stand_in(tensor):
            own = self.recording.locate(name, tensor)
            return view_of(expanded, replace(place, row=own.row), is_constant=False)
        if shape[place.axis] > 1 and expanded.stride(place.axis) != 0:
            raise NotRecordable(f"{name}: a constant has values of its own for each of the {place.count}")
        # without its copies for the rows, which are not there to be compared
        return view_of(expanded.narrow(place.axis, 0, 1), place, is_constant=True)

    @staticmethod
    def _refuse_overlap(name: str, steps: Sequence[Step], output: View) -> None:
        for step in steps:
            for source in step.sources:
                if isinstance(source, View) and source.overlaps(output):
                    raise NotRecordable(f"{name} writes over what it reads")

    def along_axis(
        self,
        name: str,
        operation: str,
        x: Tensor,
        axis: int,
        *,
        dtype: torch.dtype | None = None,
        is_kept: bool | None = None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        parameter: float = 0.0,
    ) -> Tensor:
        """Record what is computed over one axis of each row.

        Args:
            dtype: Of the result; None means that of x.
            is_kept: Whether an axis of 1 is left of the axis; None means that the result has the shape of x.
            weight, bias: [size of the axis] constants.
        Raises:
            NotRecordable: It is the axis of rows.
        """
        place = self.recording.locate(name, x)
        axis %= x.ndim
        if axis == place.axis:
            raise NotRecordable(f"{name} mixes {place.count}")
        dtype = dtype or x.dtype
        for own in (x.dtype, dtype, *(t.dtype for t in (weight, bias) if t is not None)):
            if own not in DTYPES:
                raise NotRecordable(f"{name}: no native kernel computes with {own}")
        for constant in (weight, bias):
            if constant is not None and (is_stand_in(constant) or not constant.is_contiguous()):
                raise NotRecordable(f"{name}: its weights are not constant")
        shape = list(x.shape)
        if is_kept is not None:
            shape[axis] = 1
        full = self.recording.new(shape, dtype, place)
        order = [i for i in range(x.ndim) if i != axis] + [axis]
        moved_place = replace(place, axis=order.index(place.axis))
        views = [
            self._view(name, tensor.permute(order), tensor.permute(order).shape, moved_place)
            for tensor in (x, full)
        ]
        sizes, strides = fold_axes(name, sizes_of(x.permute(order).shape, moved_place), views, keep_last=True)
        code = [
            operations("last_axis")[operation],
            *sizes,
            *described(name, views[0], strides[0]),
            *described(name, views[1], strides[1]),
            *(DTYPES[t.dtype] if t is not None else 0 for t in (weight, bias)),
            *bits([parameter], 1),
        ]
        fields: dict[str, Operand] = {
            "code": torch.tensor(code, dtype=torch.int64), "x": views[0].tensor, "out": views[1].tensor,
            "weight": weight, "bias": bias,
        }  # fmt: skip
        self.recording.calls.append(KernelCall(name, "last_axis", place.count, fields))
        return full.squeeze(axis) if is_kept is False else full

    def multiply(self, name: str, x: Tensor, constant: Tensor, bias: Tensor | None = None) -> Tensor:
        """Record a product by the native kernel of linear layers, which keeps a packed copy of the weight.

        Args:
            x: [tokens, in_features]
            constant: [in_features, out_features], a constant as `bias` is.
            bias: [out_features]
        """
        if is_stand_in(constant) or (bias is not None and is_stand_in(bias)) or constant.ndim != 2:
            raise NotRecordable(f"{name} has a native kernel for a constant right side only")
        place = self.recording.locate(name, x)
        if place.axis != 0:
            raise NotRecordable(f"{name} mixes {place.count}")
        if place.group != 1 or not can_pack(len(constant), x.dtype):
            raise NotRecordable(f"{name}: no native kernel multiplies {tuple(x.shape)} of {x.dtype} so")
        key = (
            constant.data_ptr(),
            constant.shape,
            constant.stride(),
            None if bias is None else bias.data_ptr(),
        )
        if key not in self._packed:
            weight = PackedWeight(constant.shape[1], constant.shape[0], x.dtype, bias=bias is not None)
            weight.fill_rows(0, constant.t())
            if bias is not None:
                weight.fill_bias(0, bias)
            self._packed[key] = constant, weight
        if x.stride(1) != 1:
            x = self.compute(name, ("copy", x), x.dtype)
        return self._packed[key][1].multiply(x, x.dtype)

    def look_up(self, name: str, table: Tensor, indices: Tensor) -> Tensor:
        """Record rows of a constant table, one for each row of `indices`.

        Args:
            table: [num_entries, …]
            indices: Recorded, one in each row.
        """
        if is_stand_in(table) or table.dtype not in DTYPES:
            raise NotRecordable(f"{name}: no native kernel looks up rows of such a table of {table.dtype}")
        place = self.recording.locate(name, indices)
        if indices.dtype != torch.int64 or place.group != 1 or indices.numel() != place.num_rows:
            raise NotRecordable(
                f"{name}: no native kernel looks up several rows for each of the {place.count}"
            )
        if place.row != 1:
            indices = self.compute(name, ("copy", indices), indices.dtype)
        out = self.recording.new((*indices.shape, *table.shape[1:]), table.dtype, place)
        dtype = DTYPES[table.dtype]
        fields: dict[str, Operand] = {
            "dtype": dtype, "out_dtype": dtype, "is_packed": False, "weight": table.contiguous(),
            "token_ids": indices, "out": out, "size": table[0].numel(),
        }  # fmt: skip
        self.recording.calls.append(KernelCall(name, "embedding", place.count, fields))
        return out


def _broadcast(shapes: Iterable[Sequence[int]]) -> list[int]:
    """Return the shape to which shapes broadcast; torch.broadcast_shapes imports torch's compiler."""
    padded = list(shapes)
    ndim = max(map(len, padded))
    columns = zip(*([1] * (ndim - len(shape)) + list(shape) for shape in padded), strict=True)
    return [next((size for size in column if size != 1), 1) for column in columns]
