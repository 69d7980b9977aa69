"""CUDA graphs on CPU tensors: what a capture sees is noted, undone, and done again in the same memory when replayed.

Stricter than launching again what was given: numbers and shapes that Python knew at the time are frozen, as they are in
a graph; memory that recordings share holds NaN before the first is replayed; what a capture forbids is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from triptych_kernels import registry
from triptych_services.worker.runner.cuda.graph_recorder import Replay

_FORBIDDEN = ("item", "_local_scalar_dense", "nonzero")
_WRITERS = ("write_kv", "rotary_and_write_kv")


@dataclass(slots=True)
class _Launch:
    """One operation, whose results always stand in the same memory."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[Tensor]
    """Those that own their memory."""

    def __call__(self) -> None:
        computed = tree_leaves(self.function(*self.args, **self.kwargs))
        if self.results:
            for result, value in zip(self.results, computed, strict=True):
                result.copy_(value)


class TracedGraphs(TorchDispatchMode):
    """A `GraphRecorder`; an operation of the kernels is one launch, whatever it computes with."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.num_bytes = 0
        self.num_recorded = self.num_replayed = 0
        self.num_pieces: list[int] = []
        """Pieces of each recording, in order."""
        self.failure: Exception | None = None
        self._pieces: list[list[_Launch]] = []
        self._undo: list[tuple[Tensor, Tensor]] = []
        self._is_recording = False
        load = registry.load_impl
        patch.setattr(registry, "load_impl", lambda op, impl: self._as_launch(op, load(op, impl)))

    def record(self, launch: Callable[[Callable[[], None]], None]) -> tuple[Replay, ...]:
        self._pieces, self._undo, self._is_recording = [[]], [], True
        try:
            with self:
                launch(lambda: self._pieces.append([]))
            if self.failure is not None:
                raise self.failure
        finally:
            self._is_recording = False
            for tensor, before in reversed(self._undo):
                tensor.copy_(before)
        self.num_recorded += 1
        pieces = self._pieces
        self.num_pieces.append(len(pieces))
        return tuple(lambda number=number: self._replay(pieces, number) for number in range(len(pieces)))

    def _replay(self, pieces: list[list[_Launch]], number: int) -> None:
        self.num_replayed += number == 0
        if number == 0:
            for result in (result for piece in pieces for launch in piece for result in launch.results):
                result.fill_(float("nan") if result.is_floating_point() else 1)
        for launch in pieces[number]:
            launch()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.__name__
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        indexed_by_bool = name.startswith("index") and any(t.dtype == torch.bool for t in tensors[1:])
        if name.startswith(_FORBIDDEN) or indexed_by_bool:
            raise RuntimeError(f"{name}: operation not permitted when stream is capturing")
        written = [
            tensor
            for argument, tensor in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        self._undo += [(tensor, tensor.clone()) for tensor in written]
        result = func(*args, **kwargs)
        is_view = not written and any(each.alias_info is not None for each in func._schema.returns)
        if not is_view:
            owned = [] if written else [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
            self._pieces[-1].append(_Launch(func, args, kwargs, owned))
        return result

    def _as_launch(self, op: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def launch(*args: Any, **kwargs: Any) -> Any:
            if not self._is_recording:
                return function(*args, **kwargs)
            with _disable_current_modes():
                if op in _WRITERS:
                    caches = [arg for arg in args if isinstance(arg, Tensor) and arg.ndim == 5]
                    self._undo += [(cache, cache.clone()) for cache in caches]
                result = function(*args, **kwargs)
            owned = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
            self._pieces[-1].append(_Launch(function, args, kwargs, owned))
            return result

        return launch
