"""Descriptions in the place of transformers' masks: our attention computes itself which keys a token sees."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

from torch import nn

from triptych.errors import FeatureDisabled
from triptych_services.worker.models.fallback import IMPLEMENTATION


@dataclass(frozen=True, slots=True)
class Mask:
    """The keys that a token sees; it goes through a model in the place of a mask's tensor."""

    window: int = 0
    """Number of keys, the token's own included, on each side of it if the mask is not causal; 0: all."""
    chunk: int = 0
    """Positions of a chunk, inside of which keys are seen; 0: all."""
    is_causal: bool = True

    def __getitem__(self, places: tuple[slice, ...]) -> Mask:
        """Return the same mask for some of its queries and keys; the attention call shows which are there."""
        if not all(isinstance(place, slice) for place in places):
            raise TypeError(f"a mask is a description, of which {places} cannot be taken")
        return self


def _causal(config: Any) -> Mask:
    return Mask()


def _sliding(config: Any) -> Mask:
    return Mask(window=int(config.sliding_window))


def _chunked(config: Any) -> Mask:
    return Mask(chunk=int(config.attention_chunk_size))


def _bidirectional(config: Any) -> Mask:
    return Mask(is_causal=False)


def _bidirectional_sliding(config: Any) -> Mask:
    return Mask(window=int(config.sliding_window) + 1, is_causal=False)


_BUILDERS: dict[str, Callable[[Any], Mask]] = {
    "create_causal_mask": _causal,
    "create_sliding_window_causal_mask": _sliding,
    "create_chunked_causal_mask": _chunked,
    "create_bidirectional_mask": _bidirectional,
    "create_bidirectional_sliding_window_mask": _bidirectional_sliding,
}
"""Functions of transformers.masking_utils -> what their masks say."""

_CHANGES = ("or_mask_function", "and_mask_function", "block_sequence_ids")
"""Arguments that let a token see other keys."""


def describe_masks(model: nn.Module) -> None:
    """Let the files that define a model's modules build a `Mask` wherever a config names our attention."""
    for name in {type(module).__module__ for module in model.modules()}:
        namespace = vars(sys.modules[name])
        for builder, describe in _BUILDERS.items():
            function = namespace.get(builder)
            if function is not None and not hasattr(function, "builds_descriptions"):
                namespace[builder] = _describing(function, describe)


def _describing(function: Callable[..., Any], describe: Callable[[Any], Mask]) -> Callable[..., Any]:
    signature = inspect.signature(function)

    @wraps(function)
    def build(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        config = arguments["config"]
        if config._attn_implementation != IMPLEMENTATION:
            return function(*args, **kwargs)
        for name in _CHANGES:
            if arguments.get(name) is not None:
                raise FeatureDisabled("model.backend = transformers", f"{function.__name__} is given {name}")
        if not getattr(config, "is_causal", True):
            return _bidirectional_sliding(config) if describe is _sliding else Mask(is_causal=False)
        return describe(config)

    build.builds_descriptions = True  # type: ignore[attr-defined]
    return build
