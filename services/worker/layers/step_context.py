"""Inputs of a step for every layer of a model, besides token ids and positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from triptych_kernels.state_batch import StateBatch
from triptych_services.worker.attention.base import AttentionBatch, KvCache


@dataclass(frozen=True, slots=True, eq=False)
class ChosenKeys:
    """The keys that each token attends to in some layers, as `ops.choose_keys` lists them."""

    slots: Tensor
    """[num_tokens, most of them] int32, the slots of their vectors."""
    counts: Tensor
    """[num_tokens] int32."""


@dataclass(frozen=True, slots=True, eq=False)
class KeptStates:
    """States between layers, from which something outside of the model goes on."""

    layers: tuple[int, ...]
    """For each state the layers before it; 0: it is the embedding."""
    found: dict[int, Tensor] = field(default_factory=dict)
    """Layers before it -> [num_tokens, hidden_size] float32. Written by the model."""

    def take(self, num_layers: int, hidden: Tensor | None, residual: Tensor) -> None:
        """Keep the state behind so many layers if it is one of these; `hidden` is not added to the residual yet."""
        if num_layers in self.layers:
            self.found[num_layers] = residual if hidden is None else residual + hidden

    def joined(self, dtype: torch.dtype) -> Tensor:
        """Return the states of each token side by side."""
        return torch.cat([self.found[number].to(dtype) for number in self.layers], dim=-1)


@dataclass(frozen=True, slots=True, eq=False)
class LayerStates:
    """The states of one layer, or a part of them: those of its convolution, and those of the recurrence behind it."""

    pages: Tensor
    """[num_pages, page elements] float32."""
    kept: Tensor | None
    """[num_slots, guesses of a row, kept elements] float32; None: no row guesses."""
    batch: StateBatch

    def part(self, page_elements: slice, kept_elements: slice) -> tuple[Tensor, StateBatch]:
        """Return the pages of one op, and the batch for it."""
        kept = None if self.kept is None else self.kept[:, :, kept_elements]
        return self.pages[:, page_elements], self.batch.with_memory(kept)


@dataclass(frozen=True, slots=True, eq=False)
class StepContext:
    """The state that one step's layers read and write; each layer takes what it needs.

    A new kind of per-step input becomes a field here, and no `forward` between the model and the layer changes.
    """

    attention: tuple[AttentionBatch, ...]
    """Layout of the step's tokens by group of keys and values: a layer takes that of `KvCache.group`."""
    kv_caches: Sequence[KvCache]
    """Paged keys and values, one entry per layer, by the layer's index."""
    state: StateBatch | None = None
    """Pages of the rows' states. None: the model has no states."""
    adapter_slots: Tensor | None = None
    """[num_tokens] int32, the slot of each token's low-rank adapter, -1 for none. None: the worker serves none."""
    state_pages: Sequence[Tensor | None] = ()
    """[num_pages, page elements] float32, one entry per layer, by the layer's index: see `StateSpec.page_elements`.
    None for a layer without a state; empty where no layer has one."""
    kept_guesses: Sequence[Tensor | None] = ()
    """[num_slots, guesses of a row, kept elements] float32 likewise: see `KvCache.guesses`. Empty: none is kept."""
    states_before: Tensor | None = None
    """[num_tokens, hidden_size] in the model's precision, what another model has computed at the token before each;
    read by an `MtpLayer` and an `Eagle3Head`. None: the model reads tokens only."""
    kept: KeptStates | None = None
    """States between layers that a decoder keeps; None: it keeps none."""
    chosen_keys: list[ChosenKeys] = field(default_factory=list)
    """At most one: what the last layer that chooses keys has chosen. Written by such layers, read by those after
    them."""

    def states_of(self, layer_index: int) -> LayerStates:
        """Return what the mixer of a layer reads and writes, which has a state."""
        pages = self.state_pages[layer_index]
        assert pages is not None, f"layer {layer_index} has a state"
        assert self.state is not None, "a step of a model with states has a StateBatch"
        return LayerStates(pages, self.kept_guesses[layer_index] if self.kept_guesses else None, self.state)


@dataclass(frozen=True, slots=True, eq=False)
class TextLayout:
    """The texts of one step, the same for every layer."""

    query_starts: Tensor
    """[num_texts + 1] int32, the first token of each text."""
    seq_lens: Tensor
    """[num_texts] int32."""
    token_types: Tensor
    """[num_tokens] int64, the text of a pair that a token is in."""
    seq_lens_list: tuple[int, ...] | None = None
    """Values of `seq_lens`; None in a recording."""
