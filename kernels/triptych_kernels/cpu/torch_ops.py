"""Torch's own operations in a recording: each becomes calls of kernels, or ends the recording by its name.

What reads no stand-in is carried out at once, as torch would: tables, buffers and parameters are constants, and stay in
memory where a model moves them to the device of its stand-ins. Views are torch's. Of everything else only what is in
the tables of `expressions` and below is recorded, and only if it computes each row from the same row of its operands.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from triptych_kernels.cpu.expressions import EXPRESSIONS, Arguments
from triptych_kernels.cpu.recording import NotRecordable, Recording
from triptych_kernels.cpu.row_operations import RowOperations, is_stand_in
from triptych_kernels.weights.packed import PackedWeight

ALLOCATIONS = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
_UNIFORM = ("zeros", "ones", "full")
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_WHOLE = ("_fused_rms_norm",)
_VIEWS = ("_unsafe_view", "_reshape_alias", "lift_fresh", "alias", "detach")


def base_name(func: Any) -> str:
    """Return the name of an operation without its namespace and overload."""
    return str(func.name()).removeprefix("aten::").partition(".")[0]


class RecordTorch(TorchDispatchMode):
    """A mode in which torch's operations on stand-ins are recorded."""

    def __init__(self, recording: Recording, packed: dict[object, tuple[Tensor, PackedWeight]]) -> None:
        """
        Args:
            packed: Weights that are packed already, for `RowOperations`.
        """
        super().__init__()
        self._rows = RowOperations(recording, packed)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, which saves the import of torch's compiler, a second of start-up; nothing here is compiled."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        base = base_name(func)
        if base in ALLOCATIONS or torch.Tag.inplace_view in func.tags:
            return func(*args, **kwargs)
        if not any(is_stand_in(leaf) for leaf in tree_leaves((args, kwargs))):
            return _carry_out(base, func, args, kwargs)
        if base not in _WHOLE and torch._C._dispatch_has_kernel_for_dispatch_key(
            func.name(), _COMPOSITE.name
        ):
            with self:  # in inference mode what is made of other operations arrives in one piece
                return func._op_dk(_COMPOSITE, *args, **kwargs)
        name = func.name()
        operation = base.removesuffix("_") if func._schema.is_mutable else base
        if operation in EXPRESSIONS or operation in OPERATIONS:
            return self._record(name, operation, func, args, kwargs)
        if func.is_view or base in _VIEWS:
            return _view(name, func, args, kwargs)
        raise NotRecordable(f"{name} has no native kernel")

    def _record(
        self, name: str, operation: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        arguments = _bind(func, args, kwargs)
        if func._schema.is_mutable and not is_stand_in(arguments["self"]):
            raise NotRecordable(f"{name} writes into a constant")
        if operation in OPERATIONS:
            return OPERATIONS[operation](self._rows, name, arguments)
        expression = EXPRESSIONS[operation](arguments)
        if expression is None:
            raise NotRecordable(f"{name} with these arguments has no native kernel")
        if func._schema.is_mutable:
            return self._rows.assign(name, expression, arguments["self"])
        return self._rows.compute(name, expression, _result_dtype(func, args, kwargs))


class KeepConstants(TorchFunctionMode):
    """A mode in which tensors of given numbers are made in memory, although the meta device is asked for."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if (
            func in (torch.tensor, torch.as_tensor)
            and torch.device(kwargs.get("device") or "cpu").type == "meta"
        ):
            kwargs = kwargs | {"device": None if any(map(is_stand_in, args)) else "cpu"}
        return func(*args, **kwargs)


def _result_dtype(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype of a result, by an example: torch imports its compiler to tell it of stand-ins."""

    def example(value: Any) -> Any:
        return torch.ones((2,) * value.ndim, dtype=value.dtype) if isinstance(value, Tensor) else value

    dtype: torch.dtype = func(*tree_map(example, args), **tree_map(example, dict(kwargs))).dtype
    return dtype


def _bind(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments:
    arguments: dict[str, Any] = {}
    for number, argument in enumerate(func._schema.arguments):
        if number < len(args):
            arguments[argument.name] = args[number]
        else:
            arguments[argument.name] = kwargs.get(argument.name, argument.default_value)
    return arguments


def _carry_out(base: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute with constants only, in memory although the meta device is asked for."""

    def in_memory(value: Any) -> Any:
        is_meta = isinstance(value, torch.device) and value.type == "meta"
        return torch.device("cpu") if is_meta else value

    if base in _UNIFORM and getattr(kwargs.get("device"), "type", None) == "meta":
        # one value, since its shape may have an axis of rows
        value = func([], *args[1:], **tree_map(in_memory, kwargs))
        return value.expand(args[0])
    return func(*tree_map(in_memory, args), **tree_map(in_memory, kwargs))


def _view(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make a view.

    Raises:
        NotRecordable: It is a copy, or there is no such view of how the rows lie.
    """
    try:
        result = func(*args, **kwargs)
    except RuntimeError as error:
        raise NotRecordable(f"{name}: {error}") from error
    if not storages(result) <= storages((args, kwargs)):
        raise NotRecordable(f"{name} copies here, and has no native kernel")
    return result


def storages(value: Any) -> set[int]:
    """Return the identities of the storages of all tensors in nested sequences and mappings."""
    return {leaf.untyped_storage()._cdata for leaf in tree_leaves(value) if isinstance(leaf, Tensor)}


Record = Callable[[RowOperations, str, Arguments], Any]


def _copy_into(rows: RowOperations, name: str, a: Arguments) -> Tensor:
    return rows.assign(name, ("copy", a["src"]), a["self"])


def _clone(rows: RowOperations, name: str, a: Arguments) -> Tensor:
    device = a.get("device")
    if device is not None and device.type not in ("meta", "cpu"):
        raise NotRecordable(f"{name} to {device}")
    return rows.compute(name, ("copy", a["self"]), a.get("dtype") or a["self"].dtype)


def _new_uniform(rows: RowOperations, name: str, a: Arguments) -> Tensor:
    value = a["fill_value"] if name == "aten::new_full" else float(name == "aten::new_ones")
    dtype = a["dtype"] or a["self"].dtype
    return torch.full((), value, dtype=dtype).expand(a["size"])


def _uniform_like(value: float | None) -> Record:
    def record(rows: RowOperations, name: str, a: Arguments) -> Tensor:
        x = a["self"]
        out = rows.recording.new(x.shape, a["dtype"] or x.dtype, rows.recording.locate(name, x))
        return rows.assign(name, ("copy", a["fill_value"] if value is None else value), out)

    return record


def _cat(rows: RowOperations, name: str, a: Arguments) -> Tensor:
    parts = [part for part in a["tensors"] if part.numel()]
    ndim = parts[0].ndim
    place = rows.common_place(name, [part for part in parts if is_stand_in(part)], ndim)
    axis = a["dim"] % ndim
    if axis == place.axis:
        raise NotRecordable(f"{name} mixes {place.count}")
    shape = list(next(part for part in parts if is_stand_in(part)).shape)
    shape[axis] = sum(part.shape[axis] for part in parts)
    dtype = reduce(torch.promote_types, (part.dtype for part in parts))
    out = rows.recording.new(shape, dtype, place)
    first = 0
    for part in parts:
        rows.assign(name, ("copy", part), out.narrow(axis, first, part.shape[axis]))
        first += part.shape[axis]
    return out


def _stack(rows: RowOperations, name: str, a: Arguments) -> Tensor:
    axis = a["dim"] % (a["tensors"][0].ndim + 1)
    return _cat(rows, name, {"tensors": [part.unsqueeze(axis) for part in a["tensors"]], "dim": axis})


def _pad(rows: RowOperations, name: str, a: Arguments) -> Tensor:
    x = a["self"]
    place = rows.recording.locate(name, x)
    shape, firsts = list(x.shape), [0] * x.ndim
    for number in range(len(a["pad"]) // 2):
        axis, (before, after) = x.ndim - 1 - number, a["pad"][2 * number : 2 * number + 2]
        if (before or after) and axis == place.axis:
            raise NotRecordable(f"{name} mixes {place.count}")
        if before < 0 or after < 0:
            raise NotRecordable(f"{name} has no native kernel that cuts")
        firsts[axis] = before
        shape[axis] += before + after
    out = target = rows.recording.new(shape, x.dtype, place)
    rows.assign(name, ("copy", a["value"]), out)
    for axis, first in enumerate(firsts):
        target = target.narrow(axis, first, x.shape[axis])
    rows.assign(name, ("copy", x), target)
    return out


def _repeat(rows: RowOperations, name: str, a: Arguments) -> Tensor:
    repeats = a["repeats"]
    x = a["self"].reshape([1] * (len(repeats) - a["self"].ndim) + list(a["self"].shape))
    place = rows.recording.locate(name, x)
    if repeats[place.axis] != 1:
        raise NotRecordable(f"{name} mixes {place.count}")
    shape = [size * times for size, times in zip(x.shape, repeats, strict=True)]
    out = target = rows.recording.new(shape, x.dtype, place)
    for axis in reversed(range(x.ndim)):
        if axis != place.axis:
            target, x = target.unflatten(axis, (-1, x.shape[axis])), x.unsqueeze(axis)
    rows.assign(name, ("copy", x), target)
    return out


def _reduction(operation: str, parameter: str | None = None) -> Record:
    def record(rows: RowOperations, name: str, a: Arguments) -> Tensor:
        x, axes = a["self"], a.get("dim")
        axes = [axes] if isinstance(axes, int) else list(axes or range(x.ndim))
        if operation == "norm" and float(a.get("ord", a.get("p", 2))) != 2.0:
            raise NotRecordable(f"{name} has a native kernel for the Euclidean norm only")
        if len(axes) != 1:
            place = rows.recording.locate(name, x)
            if place.axis in [axis % x.ndim for axis in axes]:
                raise NotRecordable(f"{name} mixes {place.count}")
            raise NotRecordable(f"{name} has a native kernel for one axis only")
        value = 0.0 if parameter is None else float(a[parameter] if a[parameter] is not None else 1)
        dtype, is_kept = a.get("dtype") or x.dtype, bool(a.get("keepdim"))
        return rows.along_axis(name, operation, x, axes[0], dtype=dtype, is_kept=is_kept, parameter=value)

    return record


def _softmax(operation: str) -> Record:
    def record(rows: RowOperations, name: str, a: Arguments) -> Tensor:
        return rows.along_axis(name, operation, a["self"], a["dim"])

    return record


def _layer_norm(rows: RowOperations, name: str, a: Arguments) -> tuple[Tensor, ...]:
    """Return the normalised tensor, and the mean and deviation, which nothing has filled."""
    nothing = torch.empty(1, device="meta")
    return (_norm(rows, name, "layer_norm", a, float(a["eps"])), nothing, nothing)


def _rms_norm(rows: RowOperations, name: str, a: Arguments) -> tuple[Tensor, ...]:
    eps = torch.finfo(a["input"].dtype).eps if a["eps"] is None else a["eps"]
    return (_norm(rows, name, "rms_norm", a, float(eps)), torch.empty(1, device="meta"))


def _norm(rows: RowOperations, name: str, operation: str, a: Arguments, eps: float) -> Tensor:
    if len(a["normalized_shape"]) != 1:
        raise NotRecordable(f"{name} has a native kernel for one axis only")
    return rows.along_axis(
        name, operation, a["input"], -1, weight=a["weight"], bias=a.get("bias"), parameter=eps
    )


def _embedding(rows: RowOperations, name: str, a: Arguments) -> Tensor:
    return rows.look_up(name, a["weight"], a["indices"])


def _index(rows: RowOperations, name: str, a: Arguments) -> Tensor:
    indices = a["indices"]
    if len(indices) != 1 or indices[0].dtype != torch.int64:
        raise NotRecordable(f"{name} has a native kernel for the first axis of a constant only")
    return rows.look_up(name, a["self"], indices[0])


def _index_select(rows: RowOperations, name: str, a: Arguments) -> Tensor:
    if a["dim"] != 0:
        raise NotRecordable(f"{name} has a native kernel for the first axis of a constant only")
    return rows.look_up(name, a["self"], a["index"])


def _product(rows: RowOperations, name: str, a: Arguments) -> Tensor:
    """Record a product with a constant right side, or over one inner element: of constant frequencies and positions."""
    x, y = a["self"], a["mat2"]
    if x.shape[-1] != 1:
        is_batch = x.ndim == 3 and len(x) == 1
        return rows.multiply(name, x[0], y[0])[None] if is_batch else rows.multiply(name, x, y)
    return rows.compute(name, ("mul", x, y), x.dtype)


def _product_with_bias(rows: RowOperations, name: str, a: Arguments) -> Tensor:
    if (a["beta"], a["alpha"]) != (1, 1):
        raise NotRecordable(f"{name} has a native kernel without factors only")
    return rows.multiply(name, a["mat1"], a["mat2"], a["self"])


OPERATIONS: Mapping[str, Record] = {
    "copy": _copy_into,
    "clone": _clone,
    "_to_copy": _clone,
    "new_zeros": _new_uniform,
    "new_ones": _new_uniform,
    "new_full": _new_uniform,
    "zeros_like": _uniform_like(0.0),
    "ones_like": _uniform_like(1.0),
    "full_like": _uniform_like(None),
    "cat": _cat,
    "stack": _stack,
    "constant_pad_nd": _pad,
    "repeat": _repeat,
    "sum": _reduction("sum"),
    "mean": _reduction("mean"),
    "amax": _reduction("amax"),
    "amin": _reduction("amin"),
    "linalg_vector_norm": _reduction("norm"),
    "norm": _reduction("norm"),
    "var": _reduction("var", "correction"),
    "std": _reduction("std", "correction"),
    "_softmax": _softmax("softmax"),
    "_log_softmax": _softmax("log_softmax"),
    "native_layer_norm": _layer_norm,
    "_fused_rms_norm": _rms_norm,
    "embedding": _embedding,
    "index": _index,
    "index_select": _index_select,
    "mm": _product,
    "addmm": _product_with_bias,
    "bmm": _product,
}
