"""What torch's element-by-element operations are in the kernel's own: one expression for each, rounded once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Expression = Any
"""An operation of the kernel and its operands, `("add", a, ("mul", b, 2.0))`; a tensor; or a number."""
Arguments = Mapping[str, Any]
"""Name of each argument of an operation's schema -> its value."""


def _unary(operation: str) -> Callable[[Arguments], Expression]:
    return lambda a: (operation, a["self"])


def _binary(operation: str) -> Callable[[Arguments], Expression]:
    return lambda a: (operation, a["self"], a["other"])


def _rounded(operation: str) -> Callable[[Arguments], Expression]:
    """Return a binary operation for which torch rounds a number to the tensor's dtype before it computes."""
    return lambda a: (operation, a["self"], _like(a["self"], a["other"]))


def _like(tensor: Tensor, value: Any) -> Any:
    """Return a number as `tensor`'s dtype holds it, and a tensor as it is."""
    if isinstance(value, Tensor) or not tensor.is_floating_point():
        return value
    return float(torch.tensor(value, dtype=tensor.dtype))


def _scaled(value: Any, factor: Any) -> Expression:
    return value if factor is None or factor == 1 else ("mul", value, factor)


def _add(a: Arguments) -> Expression:
    return ("add", a["self"], _scaled(a["other"], a["alpha"]))


def _sub(a: Arguments) -> Expression:
    return ("sub", a["self"], _scaled(a["other"], a["alpha"]))


def _rsub(a: Arguments) -> Expression:
    return ("sub", a["other"], _scaled(a["self"], a["alpha"]))


def _div(a: Arguments) -> Expression:
    return None if a.get("rounding_mode") is not None else ("div", a["self"], a["other"])


def _pow(a: Arguments) -> Expression:
    x, exponent = a["self"], a["exponent"]
    if isinstance(exponent, Tensor):
        return ("pow", x, exponent)
    square = ("mul", x, x)
    special: dict[float, Expression] = {
        1.0: ("copy", x),
        2.0: square,
        3.0: ("mul", square, x),
        0.5: ("sqrt", x),
        -0.5: ("rsqrt", x),
        -1.0: ("reciprocal", x),
        -2.0: ("reciprocal", square),
    }
    return special.get(float(exponent), ("pow", x, float(exponent)))


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


def _clamp(low: str | None, high: str | None) -> Callable[[Arguments], Expression]:
    def expression(a: Arguments) -> Expression:
        x = a["self"]
        if low is not None and a[low] is not None:
            x = ("maximum", x, _like(a["self"], a[low]))
        if high is not None and a[high] is not None:
            x = ("minimum", x, _like(a["self"], a[high]))
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
    "leaky_relu": _leaky_relu,
    "hardtanh": _clamp("min_val", "max_val"),
    "clamp": _clamp("min", "max"),
    "clamp_min": _clamp("min", None),
    "clamp_max": _clamp(None, "max"),
    "add": _add,
    "sub": _sub,
    "rsub": _rsub,
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
