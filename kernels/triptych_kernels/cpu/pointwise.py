"""Calls of the kernel that computes element by element: steps over views with any strides."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain

import torch
from torch import Tensor

from triptych_kernels.cpu.launch import Operand
from triptych_kernels.cpu.library import isa, load
from triptych_kernels.cpu.recording import NotRecordable, Place

ELEMENTS = {torch.float32: 0, torch.bfloat16: 1, torch.int64: 3, torch.bool: 4}
"""Dtypes that are read and written -> `DType` in kernel.h."""
COMPARISONS = frozenset(("eq", "ne", "lt", "le", "gt", "ge"))
_AXES, _INPUTS, _OUTPUTS, _STEPS, _CONSTANTS = 4, 12, 4, 16, 16  # kAxes … in strided.h and pointwise.cpp


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """A tensor as a kernel reads or writes it, row by row."""

    tensor: Tensor
    row_stride: int
    strides: tuple[int, ...]
    """Strides of the axes of a row. All strides are in elements."""
    reach: int
    """Elements from the first one of a row to the last one."""

    @property
    def storage(self) -> int:
        """Identity of the storage."""
        return self.tensor.untyped_storage()._cdata

    def overlaps(self, other: View) -> bool:
        """Return whether the views may have elements of a row in common and are not the same."""
        if self.storage != other.storage or self.key == other.key:
            return False
        first, other_first = (int(v.tensor.storage_offset()) * v.tensor.itemsize for v in (self, other))
        end, other_end = (
            start + (view.reach + 1) * view.tensor.itemsize
            for start, view in ((first, self), (other_first, other))
        )
        return first < other_end and other_first < end

    @property
    def key(self) -> tuple[object, ...]:
        """A value that two views share if they are the same elements in the same order."""
        return (
            self.storage,
            self.tensor.storage_offset(),
            self.tensor.dtype,
            self.row_stride,
            self.strides,
        )


@dataclass(frozen=True, slots=True)
class Result:
    """The result of an earlier step of the same call."""

    step: int


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    operation: str
    sources: tuple[View | Result | float, ...]
    dtype: torch.dtype
    """Dtype that the result is rounded to."""
    output: View | None
    """The view that the result is stored in; None for one that only later steps read."""


@dataclass(frozen=True, slots=True, eq=False)
class Pointwise:
    """One call of the kernel `pointwise`."""

    name: str
    count: str
    sizes: tuple[int, ...]
    """Sizes of the axes of a row, none of them 1."""
    steps: tuple[Step, ...]

    @property
    def kernel(self) -> str:
        return "pointwise"

    @property
    def is_exact(self) -> bool:
        """Whether integers are computed, which float32 does not hold."""
        return any(
            step.dtype == torch.int64 or (step.operation in COMPARISONS and torch.int64 in _dtypes(step))
            for step in self.steps
        )

    @property
    def outputs(self) -> list[View]:
        return [step.output for step in self.steps if step.output is not None]

    @property
    def inputs(self) -> dict[tuple[object, ...], View]:
        """The views that are read, by their keys."""
        views = [source for step in self.steps for source in step.sources if isinstance(source, View)]
        return {view.key: view for view in views}

    @property
    def storages(self) -> tuple[set[int], set[int]]:
        """The storages that are read, and those that are written."""
        return {view.storage for view in self.inputs.values()}, {view.storage for view in self.outputs}

    def widens(self) -> View | None:
        """Return the bfloat16 of dense rows that it only copies to float32; None if it does something else."""
        if len(self.steps) != 1 or self.steps[0].operation != "copy":
            return None
        (source,), output = self.steps[0].sources, self.steps[0].output
        if not isinstance(source, View) or output is None:
            return None
        dtypes = source.tensor.dtype, output.tensor.dtype
        rows_are_dense = all(
            (view.row_stride, view.strides, view.tensor.storage_offset()) == (*self.sizes, (1,), 0)
            for view in (source, output)
        )
        return source if rows_are_dense and dtypes == (torch.bfloat16, torch.float32) else None

    def fits(self) -> bool:
        """Return whether the kernel has room for all of it."""
        numbers = {
            source for step in self.steps for source in step.sources if isinstance(source, float | int)
        }
        return (
            len(self.steps) <= _STEPS
            and len(self.inputs) <= _INPUTS
            and len(self.outputs) <= _OUTPUTS
            and len(numbers) <= _CONSTANTS
            and len(_folded(self.sizes, [*self.inputs.values(), *self.outputs])) <= _AXES
        )

    def followed_by(self, other: Pointwise) -> Pointwise | None:
        """Return one call for this one and then `other`, or None if an element of one needs others of the other.

        All results are stored.
        """
        if (self.count, self.sizes, self.is_exact) != (other.count, other.sizes, other.is_exact):
            return None
        written = {step.output.key: i for i, step in enumerate(self.steps) if step.output is not None}
        rewritten = {output.key for output in other.outputs}
        read = self.inputs.values()
        for view in other.inputs.values():
            if any(view.overlaps(output) for output in self.outputs):
                return None
        for output in other.outputs:
            if any(output.overlaps(view) for view in (*read, *self.outputs)):
                return None

        def moved(source: View | Result | float) -> View | Result | float:
            if isinstance(source, Result):
                return Result(len(self.steps) + source.step)
            if isinstance(source, View) and source.key in written:
                return Result(written[source.key])
            return source

        steps = [replace(step, sources=tuple(map(moved, step.sources))) for step in other.steps]
        before = [
            replace(step, output=None) if step.output is not None and step.output.key in rewritten else step
            for step in self.steps
        ]
        return replace(self, name=f"{self.name}, {other.name}", steps=(*before, *steps))

    def storing(self, is_needed: Callable[[int], bool]) -> Pointwise:
        """Return the call without the results in storages that are not needed."""
        steps = [
            replace(step, output=None)
            if step.output is not None and not is_needed(step.output.storage)
            else step
            for step in self.steps
        ]
        return replace(self, steps=tuple(steps))

    def operands(self) -> Mapping[str, Operand]:
        inputs: dict[tuple[object, ...], View] = {}
        outputs: list[View] = []
        constants: list[float] = []
        steps: list[int] = []

        def number(source: View | Result | float) -> int:
            if isinstance(source, View):
                inputs.setdefault(source.key, source)
                return list(inputs).index(source.key)
            if isinstance(source, Result):
                return _INPUTS + source.step
            if source not in constants:
                constants.append(source)
            return _INPUTS + _STEPS + constants.index(source)

        for step in self.steps:
            sources = [number(source) for source in step.sources]
            output = -1
            if step.output is not None:
                output = len(outputs)
                outputs.append(step.output)
            steps += [
                operations("pointwise")[step.operation],
                *sources,
                *([-1] * (3 - len(sources))),
                output,
                ELEMENTS[step.dtype],
            ]
        views = [*inputs.values(), *outputs]
        sizes, strides = fold_axes(self.name, self.sizes, views)
        if all(size == 1 for size in sizes):  # then the rows themselves are the last axis
            strides = [[*own[:-1], view.row_stride] for view, own in zip(views, strides, strict=True)]
        is_flat = all(size == 1 for size in sizes[:-1]) and all(
            view.row_stride == sizes[-1] * own[-1] for view, own in zip(views, strides, strict=True)
        )
        table = [described(self.name, view, own) for view, own in zip(views, strides, strict=True)]
        nothing = [0] * (2 + _AXES)
        table[len(inputs) : len(inputs)] = [nothing] * (_INPUTS - len(inputs))
        table += [nothing] * (_OUTPUTS - len(outputs))
        padding = [0] * (6 * (_STEPS - len(self.steps)))
        code = [
            *sizes,
            is_flat,
            self.is_exact,
            len(self.steps),
            *chain.from_iterable(table),
            *bits(constants, _CONSTANTS),
            *steps,
            *padding,
        ]
        tensors: dict[str, Operand] = {"code": torch.tensor(code, dtype=torch.int64)}
        tensors |= {f"in{i}": None for i in range(_INPUTS)} | {f"out{i}": None for i in range(_OUTPUTS)}
        tensors |= {f"in{i}": view.tensor for i, view in enumerate(inputs.values())}
        return tensors | {f"out{i}": view.tensor for i, view in enumerate(outputs)}


def _dtypes(step: Step) -> set[torch.dtype]:
    return {source.tensor.dtype for source in step.sources if isinstance(source, View)}


def operations(kernel: str) -> Mapping[str, int]:
    """Return the numbers of a kernel's operations as the library names them."""
    return _operations(isa(), kernel)


@cache
def _operations(isa: str, kernel: str) -> Mapping[str, int]:
    names = getattr(load(isa), f"triptych_{kernel}_operations")
    names.argtypes, names.restype = [], ctypes.c_char_p
    return {name: number for number, name in enumerate(names().decode().split())}


def bits(values: Sequence[float], size: int) -> list[int]:
    """Return the bits of float64 values as integers, padded with zeros to `size`."""
    padded = [*values, *([0.0] * (size - len(values)))]
    return list(struct.unpack(f"{size}q", struct.pack(f"{size}d", *padded)))


def view_of(tensor: Tensor, place: Place, *, is_constant: bool) -> View:
    """Return how a kernel reads a tensor with rows along `place.axis`; a constant is the same for all rows."""
    strides = [stride if size > 1 else 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    if place.group == 1 or is_constant:
        strides[place.axis] = 0
    reach = sum(
        (size - 1) * stride for size, stride in zip(sizes_of(tensor.shape, place), strides, strict=True)
    )
    return View(tensor, 0 if is_constant else place.row, tuple(strides), reach)


def sizes_of(shape: Sequence[int], place: Place) -> tuple[int, ...]:
    """Return the sizes of the axes of a row; the axis of rows has what is merged with it."""
    sizes = list(shape)
    sizes[place.axis] = place.group
    return tuple(sizes)


def fold_axes(
    name: str, sizes: Sequence[int], views: Sequence[View], keep_last: bool = False
) -> tuple[list[int], list[list[int]]]:
    """Merge axes that all views pass through as if they were one, and pad them to those of the kernel.

    Args:
        keep_last: Whether the last axis stays as it is.
    Raises:
        NotRecordable: There are more axes than the kernel has.
    """
    folded = _folded(sizes, views, keep_last)
    if len(folded) > _AXES:
        raise NotRecordable(f"{name}: no native kernel has {len(folded)} axes beside the rows")
    folded = [(1, [0] * len(views))] * (_AXES - len(folded)) + folded
    return [size for size, _ in folded], [list(own) for own in zip(*(s for _, s in folded), strict=True)]


def _folded(
    sizes: Sequence[int], views: Sequence[View], keep_last: bool = False
) -> list[tuple[int, list[int]]]:
    """Return the size of each merged axis and the strides of the views along it."""
    axes = [(size, [view.strides[axis] for view in views]) for axis, size in enumerate(sizes)]
    folded: list[tuple[int, list[int]]] = []
    for number, (size, strides) in enumerate(axes):
        is_kept = keep_last and number == len(axes) - 1
        if size == 1 and not is_kept:
            continue
        if folded and not is_kept and folded[-1][1] == [stride * size for stride in strides]:
            folded[-1] = (folded[-1][0] * size, strides)
        else:
            folded.append((size, strides))
    return folded


def described(name: str, view: View, strides: Sequence[int]) -> list[int]:
    """Return the `Strided` of strided.h.

    Raises:
        NotRecordable: No kernel reads its dtype.
    """
    check_dtype(name, view.tensor.dtype)
    return [ELEMENTS[view.tensor.dtype], view.row_stride, *strides]


def check_dtype(name: str, dtype: torch.dtype) -> None:
    """
    Raises:
        NotRecordable: No kernel reads or writes this dtype.
    """
    if dtype not in ELEMENTS:
        raise NotRecordable(f"{name}: no native kernel computes with {dtype}")
