"""The attention function that models of transformers call, and what answers it: a step, or a check."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from triptych.errors import FeatureDisabled
from triptych_kernels.attend_options import AttendOptions
from triptych_kernels.ops import encode_attention, write_kv
from triptych_services.worker.attention.base import AttentionBackend
from triptych_services.worker.layers.step_context import StepContext, TextLayout
from triptych_services.worker.models.fallback import IMPLEMENTATION
from triptych_services.worker.models.fallback.masks import Mask

_FEATURE = "model.backend = transformers"
_HARMLESS = frozenset({
    "dropout", "position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states",
    "return_dict", "past_key_values", "layer_idx", "target_dtype",
})  # fmt: skip
"""Arguments that do not change what attention computes."""


@dataclass(frozen=True, slots=True, eq=False)
class AttentionCall:
    """One call of the attention function."""

    name: str
    """Path of the module that calls."""
    query: Tensor
    """[num_tokens, num_heads, head_dim], rotated."""
    key: Tensor
    """[num_tokens, num_kv_heads, head_dim]"""
    value: Tensor
    """[num_tokens, num_kv_heads, value_dim]"""
    scale: float
    mask: Mask
    soft_cap: float = 0.0
    sinks: Tensor | None = None
    """[num_heads], one more score in the softmax of each head."""

    def options(self) -> AttendOptions:
        sinks = None if self.sinks is None else self.sinks.float().flatten()
        mask = self.mask
        return AttendOptions(
            self.scale, mask.window, mask.chunk, self.soft_cap, sinks, is_causal=mask.is_causal
        )


class Attention(Protocol):
    """The interface of what answers the calls of a forward pass."""

    def attend(self, call: AttentionCall) -> Tensor:
        """Return [num_tokens, num_heads, value_dim]."""
        ...


@dataclass(slots=True, eq=False)
class AttentionCalls:
    """The calls of one model: its modules have this object as `triptych`, and find there what answers them now."""

    attention: Attention | None = None
    names: dict[int, str] = field(default_factory=dict)
    """Identity of a module -> its path."""
    is_causal: bool = True
    """Whether a token must see those before it only; every call must agree."""

    def connect(self, model: nn.Module) -> None:
        for name, module in model.named_modules():
            self.names[id(module)] = name
            module.triptych = self


class PagedCalls:
    """Answers by attention over the paged cache: the n-th call of a pass has the n-th cache."""

    def __init__(self, step: StepContext, options: list[AttendOptions]) -> None:
        """
        Args:
            options: Those of each call, once a pass has been made; the model keeps them.
        """
        self._step = step
        self._options = options
        self.num_calls = 0

    def attend(self, call: AttentionCall) -> Tensor:
        cache = self._step.kv_caches[self.num_calls]
        batch = self._step.attention[cache.group]
        self.num_calls += 1
        num_kv_heads, head_dim = cache.blocks.shape[2], cache.blocks.shape[4]
        key, value = (
            _in_cache_shape(x, num_kv_heads, head_dim, name=call.name) for x in (call.key, call.value)
        )
        query = _widen(call.query, head_dim)
        write_kv(
            key, value, cache.blocks, batch.slot_mapping, kv_scales=cache.scales, impl=batch.backend.writer
        )
        if len(self._options) < self.num_calls:  # the first pass; each has the same calls
            self._options.append(_supported(call, batch.backend))
        out = batch.backend.attend(query, cache, batch, self._options[self.num_calls - 1])
        value_dim = call.value.shape[2]
        return out if value_dim == head_dim else out[:, :, :value_dim]


class TextCalls:
    """Answers by attention within each text of a step."""

    def __init__(self, layout: TextLayout, options: list[AttendOptions]) -> None:
        """
        Args:
            options: As of `PagedCalls`.
        """
        self._layout = layout
        self._options = options
        self.num_calls = 0

    def attend(self, call: AttentionCall) -> Tensor:
        layout = self._layout
        if len(self._options) == self.num_calls:  # the first pass; each has the same calls
            self._options.append(call.options())
        options = self._options[self.num_calls]
        self.num_calls += 1
        return encode_attention(
            call.query,
            call.key,
            call.value,
            layout.query_starts,
            layout.seq_lens,
            options,
            seq_lens_list=layout.seq_lens_list,
        )


def _supported(call: AttentionCall, backend: AttentionBackend) -> AttendOptions:
    options = call.options()
    if lacking := sorted(options.in_use - backend.supported):
        raise FeatureDisabled(
            f"worker.attention_backend = {backend.name}",
            f"it does not compute {', '.join(lacking)}, which {call.name} needs; set it to auto",
        )
    return options


def _in_cache_shape(x: Tensor, num_kv_heads: int, head_dim: int, *, name: str) -> Tensor:
    repeats, rest = divmod(num_kv_heads, x.shape[1])
    if rest:
        raise FeatureDisabled(
            _FEATURE, f"{name}: {x.shape[1]} key heads do not divide the {num_kv_heads} of other layers"
        )
    if repeats > 1:
        x = x.repeat_interleave(repeats, 1)
    return _widen(x, head_dim)


def _widen(x: Tensor, head_dim: int) -> Tensor:
    """Add zeros to each head, which change no product."""
    missing = head_dim - x.shape[2]
    return torch.cat((x, x.new_zeros(*x.shape[:2], missing)), 2) if missing else x


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask | None = None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute attention of [1, heads, num_tokens, head_dim], as transformers' interface has it."""
    calls = module.triptych
    assert isinstance(calls, AttentionCalls), "every module of the model has been connected"
    name = f"{type(module).__name__} at {calls.names[id(module)]}"
    softcap, sinks = options.pop("softcap", None), options.pop("s_aux", None)
    window, is_causal = options.pop("sliding_window", None), options.pop("is_causal", None)
    unknown = sorted(
        name for name, option in options.items() if _means_something(option) and name not in _HARMLESS
    )
    if unknown:
        raise FeatureDisabled(_FEATURE, f"{name} gives {unknown[0]} to its attention")
    if attention_mask is None:
        # in an encoder nothing says on which side of a token its window is
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if window and not causal:
            raise FeatureDisabled(_FEATURE, f"{name} gives a window without a mask to its attention")
        attention_mask = Mask(window=int(window or 0), is_causal=bool(causal))
    if not isinstance(attention_mask, Mask):
        raise FeatureDisabled(_FEATURE, f"{name} gives a mask of its own to its attention")
    if attention_mask.is_causal != calls.is_causal:
        raise FeatureDisabled(_FEATURE, f"{name} is {'not ' if calls.is_causal else ''}causal")
    if query.shape[0] != 1 or key.shape[2] != query.shape[2]:
        raise FeatureDisabled(
            _FEATURE,
            f"{name} attends from {list(query.shape)} to {list(key.shape)}, not from tokens to themselves",
        )
    if isinstance(scaling, Tensor):
        scaling = float(scaling)
    assert calls.attention is not None, "the model has set what answers"
    out = calls.attention.attend(
        AttentionCall(
            name=calls.names[id(module)],
            query=query[0].transpose(0, 1),
            key=key[0].transpose(0, 1),
            value=value[0].transpose(0, 1),
            scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
            mask=attention_mask,
            soft_cap=float(softcap or 0.0),
            sinks=sinks,
        )
    )
    return out[None], None


def _means_something(option: Any) -> bool:
    if isinstance(option, (bool, int, float, type(None), Sequence)):
        return bool(option)
    return True


def register_attention() -> None:
    """Let configs of transformers name this attention; no mask function goes with it, so that no mask is built."""
    ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, _attend)
