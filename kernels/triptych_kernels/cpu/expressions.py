"""Expressions in the kernel's operations for what torch computes element by element; each is rounded once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Expression = Any
"""An operation of the kernel and its operands, `("add", a, ("mul", b, 2.0))`; a tensor; or a number.

The result is rounded once, and that of an operation in `("rounded", …)` too."""
Arguments = Mapping[str, Any]
"""Name of each argument of an operation's schema -> its value."""


def _unary(operation: str) -> Callable[[Arguments], Expression]:
    return lambda a: (operation, a["self"])


def _binary(operation: str) -> Callable[[Arguments], Expression]:
    return lambda a: (operation, a["self"], a["other"])


def _rounded(operation: str) -> Callable[[Arguments], Expression]:
    """Return a binary operation before which torch rounds a number to the common dtype."""
    return lambda a: (operation, *_operands(a))


def _operands(a: Arguments, names: tuple[str, str] = ("self", "other")) -> tuple[Any, Any]:
    """Return two operands, a number among them as their common dtype holds it."""
    first, second = a[names[0]], a[names[1]]
    dtype = torch.result_type(first, second)
    return _held(first, dtype), _held(second, dtype)


def _held(value: Any, dtype: torch.dtype) -> Any:
    """Return a number as a dtype holds it, and a tensor as it is."""
    is_number = not isinstance(value, Tensor) or (value.ndim == 0 and value.device.type != "meta")
    return float(torch.as_tensor(value).to(dtype)) if is_number and dtype.is_floating_point else value


def _scaled(value: Any, factor: Any) -> Expression:
    return value if factor is None or factor == 1 else ("mul", value, factor)


def _sum(operation: str, is_reversed: bool = False) -> Callable[[Arguments], Expression]:
    """Return a sum or difference; `alpha` is a factor of what is added or subtracted."""

    def expression(a: Arguments) -> Expression:
        first, second = _operands(a, ("other", "self") if is_reversed else ("self", "other"))
        return (
            operation,
            first,
            _scaled(second, _held(a["alpha"], torch.result_type(a["self"], a["other"]))),
        )

    return expression


def _div(a: Arguments) -> Expression:
    if a.get("rounding_mode") is not None:
        return None
    return ("div", _held(a["self"], torch.result_type(a["self"], a["other"])), a["other"])


def _pow(a: Arguments) -> Expression:
    x, exponent = a["self"], a["exponent"]
    if isinstance(exponent, Tensor):
        return ("pow", *_operands(a, ("self", "exponent")))
    square = ("rounded", ("mul", x, x))  # as torch does
    special: dict[float, Expression] = {
        1.0: ("copy", x),
        2.0: ("mul", x, x),
        3.0: ("mul", square, x),
        0.5: ("sqrt", x),
        -0.5: ("rsqrt", x),
        -1.0: ("reciprocal", x),
        -2.0: ("reciprocal", square),
    }
    return special.get(float(exponent), ("pow", *_operands(a, ("self", "exponent"))))


def _gelu(a: Arguments) -> Expression:
    x = a["self"]
    if a["approximate"] == "tanh":
        inner = ("mul", math.sqrt(2 / math.pi), ("add", x, ("mul", 0.044715, ("mul", ("mul", x, x), x))))
        return ("mul", ("mul", 0.5, x), ("add", 1.0, ("tanh", inner)))
    return ("mul", ("mul", 0.5, x), ("add", 1.0, ("erf", ("mul", x, math.sqrt(0.5)))))


def _softplus(a: Arguments) -> Expression:
    scaled = _scaled(a["self"], a["beta"])
    smooth: Expression = ("log1p", ("exp", scaled))
    if a["beta"] != 1:
        smooth = ("div", smooth, a["beta"])
    return ("where", ("gt", scaled, a["threshold"]), a["self"], smooth)


def _expm1(a: Arguments) -> Expression:
    x, half = a["self"], ("tanh", ("mul", a["self"], 0.5))
    near = ("div", ("mul", half, 2.0), ("sub", 1.0, half))  # keeps the digits that 1 would take away
    return ("where", ("gt", x, 1.0), ("sub", ("exp", x), 1.0), near)


def _clamp(low: str | None, high: str | None) -> Callable[[Arguments], Expression]:
    def expression(a: Arguments) -> Expression:
        x, x_dtype = a["self"], a["self"].dtype
        if low is not None and a[low] is not None:
            x = ("maximum", x, _held(a[low], x_dtype))
        if high is not None and a[high] is not None:
            x = ("minimum", x, _held(a[high], x_dtype))
        return x

    return expression


def _glu(a: Arguments) -> Expression:
    x, gate = a["self"].chunk(2, a["dim"])
    return ("mul", x, ("sigmoid", gate))


def _leaky_relu(a: Arguments) -> Expression:
    return ("where", ("gt", a["self"], 0.0), a["self"], ("mul", a["self"], a["negative_slope"]))


def _logical(operation: str) -> Callable[[Arguments], Expression]:
    """Return an operation on booleans; on integers torch computes bit by bit, which is not recorded."""

    def expression(a: Arguments) -> Expression:
        operands = [a[name] for name in ("self", "other") if name in a]
        if any(not isinstance(x, Tensor) or x.dtype != torch.bool for x in operands):
            return None
        return (operation, *operands)

    return expression


EXPRESSIONS: Mapping[str, Callable[[Arguments], Expression]] = {
    **{
        name: _unary(name)
        for name in (
            "neg",
            "abs",
            "sqrt",
            "rsqrt",
            "reciprocal",
            "exp",
            "log",
            "log1p",
            "tanh",
            "erf",
            "sigmoid",
            "silu",
        )
    },
    "cos": _unary("cos"),
    "sin": _unary("sin"),
    "relu": lambda a: ("maximum", a["self"], 0.0),
    "gelu": _gelu,
    "glu": _glu,
    "softplus": _softplus,
    "expm1": _expm1,
    "leaky_relu": _leaky_relu,
    "hardtanh": _clamp("min_val", "max_val"),
    "clamp": _clamp("min", "max"),
    "clamp_min": _clamp("min", None),
    "clamp_max": _clamp(None, "max"),
    "add": _sum("add"),
    "sub": _sum("sub"),
    "rsub": _sum("sub", is_reversed=True),
    "mul": _binary("mul"),
    "div": _div,
    "pow": _pow,
    "minimum": _binary("minimum"),
    "maximum": _binary("maximum"),
    **{name: _rounded(name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    "logical_not": _logical("logical_not"),
    "bitwise_not": _logical("logical_not"),
    "logical_and": _logical("minimum"),
    "bitwise_and": _logical("minimum"),
    "logical_or": _logical("maximum"),
    "bitwise_or": _logical("maximum"),
    "where": lambda a: ("where", a["condition"], a["self"], a["other"]),
    "masked_fill": lambda a: ("where", a["mask"], a["value"], a["self"]),
    "fill": lambda a: ("copy", a["value"]),
    "zero": lambda a: ("copy", 0.0),
}
"""Name of an operation -> its expression, or None for arguments with which it is not recorded."""
