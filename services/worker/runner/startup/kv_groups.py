"""The choice of KV groups: which layers share a block table, and which share a tensor. docs/adr/0087. Needs no torch.

six layers, windows but for the third and the sixth, divided into groups of two

             group 0, full     group 1, window     group 2, window
tensor 0     layer 2           layer 0             layer 3
tensor 1     layer 5           layer 1             layer 4

Layers that keep different amounts of a token are in groups of their own. A group that keeps less of it has more tokens
in a block, so that all blocks have equal bytes: docs/adr/0120.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from triptych.checkpoint.architecture import ModelArchitecture
from triptych.types.facts import KvGroup, KvKind, KvLayout
from triptych_services.worker.context.resolved_config import RankFacts, ResolvedConfig
from triptych_services.worker.parallel.shares import (
    KeyHeads,
    heads_of_layers,
    share_state,
    stage_layers,
)
from triptych_services.worker.runner.block_tables import GUESSING_SLOTS

_MAX_PADDING = 0.1  # of what a request holds: bytes of a group's blocks that no layer uses
_MAX_GROUPS = 16  # of a model: each step fills in a table and a slot mapping for each
_LEAST_SAVING = 0.1  # of what the longest request holds in one group: a table more costs each step something
_STATE_BYTES = 4  # of a number: states are float32
_ATTENTION_TO_KIND = {"sliding": KvKind.WINDOW, "chunked": KvKind.CHUNK}


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """The memory of one layer."""

    group: int
    """Group of its keys and values; -1: it has none."""
    tensor: int
    """Number of the tensor, which a layer of each group has a part of; -1: none."""
    state_elements: int = 0
    """Numbers of a page of its states; 0: it has none."""
    guess_elements: int = 0
    """Numbers that are kept of a guess beside these pages."""
    heads: KeyHeads | None = None
    """Those of its blocks; None: as the layout says."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """The positions that the queries of a layer see, and how much it keeps of each."""

    kind: KvKind
    window: int = 0
    tokens: int = 1
    """Tokens of a block, in those of the layers that keep most of each."""

    def num_held(self, num_tokens: int) -> float:
        """Return how much of a request is kept, about, in tokens of the layers that keep most of each."""
        return (min(num_tokens, self.window) if self.window else num_tokens) / self.tokens


@dataclass(frozen=True, slots=True)
class GroupChoice:
    """The groups of a stage's layers."""

    kinds: tuple[_Kind, ...]
    """By group of keys and values: full ones first, then by window."""
    places: tuple[LayerPlace, ...]
    """By layer of the stage."""
    num_tensors: int
    has_states: bool = False
    """Whether a layer of the model, of this stage or another, keeps states."""
    reason: str = ""
    """Why layers with windows are in one group with others; empty: they are not."""

    def with_groups(self, shape: KvLayout, state_interval: int) -> KvLayout:
        """Return the layout of one full group as one of these groups, and of one of states if there are any.

        Args:
            state_interval: Tokens per page of states.
        """
        layer_bytes = shape.block_bytes // max(shape.num_layers, 1)
        groups = tuple(
            KvGroup(
                kind.kind,
                num_layers=len({place.tensor for place in self.places if place.group == number}),
                block_size=shape.block_size * kind.tokens,
                block_bytes=layer_bytes * self.num_tensors,
                window=kind.window,
            )
            for number, kind in enumerate(self.kinds)
        )
        if self.has_states:
            elements = [place.state_elements for place in self.places if place.state_elements]
            states = KvGroup(KvKind.STATE, len(elements), state_interval, sum(elements) * _STATE_BYTES)
            groups = (*groups, states)
        return replace(shape, groups=groups)


def choose_groups(config: ResolvedConfig) -> GroupChoice:
    """Choose the groups of this rank's layers, the same kinds on every stage.

    Every rank finds the same, from the layers of the whole model. A stage without layers of a kind has its group, too,
    with blocks of no bytes.
    """
    architecture = config.architecture
    stage = stage_layers(architecture, rank=config.rank)
    max_model_len = config.engine.model.max_model_len or architecture.max_context
    heads = heads_of_layers(architecture, rank=config.rank)
    kind_to_layers = _by_kind(architecture, heads, max_model_len)
    if not kind_to_layers:
        return _with_places(config, stage, heads, {})
    stages, reason = _stages(architecture, config.rank), ""
    without_windows = _by_kind(architecture, heads, 0)
    if kind_to_layers != without_windows:
        reason = _obstacle(config)
        if not reason:
            counts = _choose_counts(kind_to_layers, stages, max_model_len)
            if not isinstance(counts, str):
                return _place(config, stage, heads, kind_to_layers, counts)
            reason = counts
    # layers that keep different amounts are never in one group, whatever that pads
    _, counts = min(_divisions(without_windows, stages, {max_model_len}), key=lambda division: division[0])
    return replace(_place(config, stage, heads, without_windows, counts), reason=reason)


def _by_kind(
    architecture: ModelArchitecture, heads: Mapping[int, KeyHeads | None], max_model_len: int
) -> dict[_Kind, list[int]]:
    """Return the layers of each kind, full ones first, then by window; a window of the whole context is none.

    Args:
        heads: As `heads_of_layers` returns them.
    """
    widest = max((each.width for each in heads.values() if each), default=0)
    kind_to_layers: dict[_Kind, list[int]] = {}
    for index, own in heads.items():
        layer, tokens = architecture.layers[index], 1 if own is None else widest // own.width
        kind = _ATTENTION_TO_KIND.get(layer.attention)
        found = _Kind(KvKind.FULL, 0, tokens)
        if kind is not None and layer.window < max_model_len:
            found = _Kind(kind, layer.window, tokens)
        kind_to_layers.setdefault(found, []).append(index)
    return dict(
        sorted(kind_to_layers.items(), key=lambda item: (item[0].kind is not KvKind.FULL, item[0].window))
    )


def _obstacle(config: ResolvedConfig) -> str:
    """Return why there can be one group only, whatever the layers are; empty if there can be others."""
    if config.engine.cache.groups == "one":
        return "cache.groups is one"
    if config.architecture.config:
        return f"the windows of {config.architecture.name} are its own code's"
    return ""


def _stages(architecture: ModelArchitecture, rank: RankFacts) -> list[range]:
    """Return the layers of each stage."""
    return [stage_layers(architecture, rank=replace(rank, stage=stage)) for stage in range(rank.num_stages)]


def _choose_counts(
    kind_to_layers: Mapping[_Kind, Sequence[int]], stages: Sequence[range], max_model_len: int
) -> dict[_Kind, int] | str:
    """Return into how many groups each kind is divided, as few as padding allows; or why that is impossible."""
    lengths = {min(kind.window or max_model_len for kind in kind_to_layers), max_model_len}
    least_padding = 1.0
    for padding, counts in _divisions(kind_to_layers, stages, lengths):
        least_padding = min(least_padding, padding)
        if padding > _MAX_PADDING:
            continue
        held = sum(kind.num_held(max_model_len) * len(layers) for kind, layers in kind_to_layers.items())
        in_one_group = sum(
            max_model_len / kind.tokens * len(layers) for kind, layers in kind_to_layers.items()
        )
        if held > (1 - _LEAST_SAVING) * in_one_group:
            return f"they would save less than {_LEAST_SAVING:.0%} of {max_model_len} tokens"
        return counts
    return (
        f"up to {_MAX_GROUPS} groups of equal blocks would have {least_padding:.0%} of padding, and {_MAX_PADDING:.0%} "
        "is the limit"
    )


def _divisions(
    kind_to_layers: Mapping[_Kind, Sequence[int]], stages: Sequence[range], lengths: Collection[int]
) -> Iterator[tuple[float, dict[_Kind, int]]]:
    """Yield numbers of groups of each kind, the fewest first, and what they pad at most of requests of such lengths."""
    for num_layers in range(max(map(len, kind_to_layers.values())), 0, -1):
        counts = {kind: -(-len(layers) // num_layers) for kind, layers in kind_to_layers.items()}
        if sum(counts.values()) > _MAX_GROUPS:
            break
        yield (
            max(
                _padding(kind_to_layers, counts, stage, num_tokens)
                for stage in stages
                for num_tokens in lengths
            ),
            counts,
        )


def _padding(
    kind_to_layers: Mapping[_Kind, Sequence[int]], counts: Mapping[_Kind, int], stage: range, num_tokens: int
) -> float:
    """Return the share of a request's memory on a stage that no layer uses, relative to what layers use."""
    num_of_stage = {kind: sum(index in stage for index in layers) for kind, layers in kind_to_layers.items()}
    num_tensors = max(-(-num_of_stage[kind] // count) for kind, count in counts.items())
    used = sum(kind.num_held(num_tokens) * number for kind, number in num_of_stage.items())
    taken = num_tensors * sum(kind.num_held(num_tokens) * count for kind, count in counts.items())
    return taken / used - 1 if taken else 0.0


def _place(
    config: ResolvedConfig,
    stage: range,
    heads: Mapping[int, KeyHeads | None],
    kind_to_layers: Mapping[_Kind, Sequence[int]],
    counts: Mapping[_Kind, int],
) -> GroupChoice:
    """Divide the layers of each kind, in their order, and give those that read another layer's keys its place."""
    of_stage = {
        kind: [index for index in layers if index in stage] for kind, layers in kind_to_layers.items()
    }
    num_tensors = max(-(-len(of_stage[kind]) // count) for kind, count in counts.items())
    layer_to_place: dict[int, tuple[int, int]] = {}
    kinds: list[_Kind] = []
    for kind, count in counts.items():
        for number, index in enumerate(of_stage[kind]):
            layer_to_place[index] = len(kinds) + number // num_tensors, number % num_tensors
        kinds += [kind] * count
    for index in stage:
        source = config.architecture.layers[index].kv_from
        if source >= 0:
            layer_to_place[index] = layer_to_place[source]
    choice = _with_places(config, stage, heads, layer_to_place)
    return replace(choice, kinds=tuple(kinds), num_tensors=num_tensors)


def _with_places(
    config: ResolvedConfig,
    stage: range,
    heads: Mapping[int, KeyHeads | None],
    layer_to_place: Mapping[int, tuple[int, int]],
) -> GroupChoice:
    """Return a choice without groups yet, of which each layer has a group and a tensor, or neither."""
    places, layers = [], config.architecture.layers
    for index in stage:
        state = layers[index].state
        elements, kept = 0, 0
        if state is not None:
            _, own = share_state(state, rank=config.rank)
            elements, kept = own.page_elements, own.guess_elements
        group, tensor = layer_to_place.get(index, (-1, -1))
        source = index if layers[index].kv_from < 0 else layers[index].kv_from
        places.append(LayerPlace(group, tensor, elements, kept, heads.get(source)))
    return GroupChoice((), tuple(places), 0, has_states=any(layer.state for layer in layers))


def guess_bytes(places: Sequence[LayerPlace], num_guesses: int) -> int:
    """Return the bytes of what is kept of guesses beside the pages of states.

    Args:
        num_guesses: Guesses of one row in a step, at most; 0: no row guesses.
    """
    return sum(place.guess_elements for place in places) * _STATE_BYTES * num_guesses * GUESSING_SLOTS


def blocks_held(groups: Sequence[KvGroup], num_tokens: int, step_tokens: int) -> int:
    """Return the most blocks of keys and values that a request of so many tokens holds at a time.

    Args:
        step_tokens: Tokens between what a row needs no more and the end of a step, at most.
    """
    total = 0
    for group in groups:
        if group.kind is not KvKind.STATE:
            of_all, most = -(-num_tokens // group.block_size), group.most_held(step_tokens)
            total += of_all if most is None else min(of_all, most)
    return total


def most_tokens(layout: KvLayout, step_tokens: int) -> int:
    """Return the length of the longest request that the blocks of a layout hold.

    Args:
        step_tokens: As of `blocks_held`.
    """
    num_blocks = layout.num_blocks - 1
    if layout.is_plain:
        return num_blocks * layout.block_size
    least, most = (
        0,
        1 << 40,
    )  # a request of `least` tokens fits, and one of `most` only if windows keep it small
    while least < most:
        middle = (least + most + 1) // 2
        if blocks_held(layout.groups, middle, step_tokens) <= num_blocks:
            least = middle
        else:
            most = middle - 1
    return least
