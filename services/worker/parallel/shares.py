"""The share of a layer that each tensor-parallel rank holds, and the layers of each stage. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from triptych.checkpoint.architecture import LayerSpec, ModelArchitecture, StateSpec
from triptych.errors import ConfigError, FeatureDisabled
from triptych_services.worker.context.resolved_config import RankFacts

_VOCAB_ALIGNMENT = 16  # rows of a share: products on GPUs store their outputs in pieces of 16 bytes and more


@dataclass(frozen=True, slots=True)
class KeyHeads:
    """The key heads of a layer on this rank."""

    number: int
    dim: int

    @property
    def width(self) -> int:
        """Elements of a token's keys."""
        return self.number * self.dim


def share(size: int, *, what: str, rank: RankFacts) -> tuple[int, int]:
    """Return this rank's part of `size` equal things: the index of the first, and their number.

    Args:
        what: Name of the things, for the error.

    Raises:
        ConfigError: The number of ranks does not divide `size`.
    """
    num_ranks = rank.tensor_parallel_size
    if size % num_ranks:
        raise ConfigError(f"parallel.tensor_parallel_size: {num_ranks} does not divide {what} = {size}")
    return rank.tensor_parallel_rank * (size // num_ranks), size // num_ranks


def share_kv_heads(num_kv_heads: int, *, what: str = "num_kv_heads", rank: RankFacts) -> tuple[int, int]:
    """Return this rank's key heads: the index of the first, and their number.

    Where there are more ranks than heads, neighbouring ranks hold the same head.

    Args:
        what: Name of the heads, for the error.

    Raises:
        ConfigError: Neither number divides the other.
    """
    num_ranks = rank.tensor_parallel_size
    if num_ranks > num_kv_heads and num_ranks % num_kv_heads == 0:
        return rank.tensor_parallel_rank // (num_ranks // num_kv_heads), 1
    return share(num_kv_heads, what=what, rank=rank)


def key_heads(layer: LayerSpec, *, rank: RankFacts) -> KeyHeads:
    """Return a layer's key heads on a rank.

    Raises:
        ConfigError: Ranks cannot share them.
    """
    number = share_kv_heads(layer.num_kv_heads, rank=rank)[1]
    return KeyHeads(number, max(layer.head_dim, layer.value_dim))


def heads_of_layers(architecture: ModelArchitecture, *, rank: RankFacts) -> dict[int, KeyHeads | None]:
    """Return the layers that keep keys and values, and their heads on a rank where these differ; else None.

    Models that read their own keys of config.json pad what they keep to the most of any layer.

    Raises:
        ConfigError: Ranks cannot share the heads.
        FeatureDisabled: Blocks of one size cannot hold the sizes there are.
    """
    keeping = {index: layer for index, layer in enumerate(architecture.layers) if layer.keeps_keys}
    if architecture.latent is not None or architecture.config:
        return dict.fromkeys(keeping)
    heads = {index: key_heads(layer, rank=rank) for index, layer in keeping.items()}
    if len(set(heads.values())) <= 1:
        return dict.fromkeys(keeping)
    widest = max(each.width for each in heads.values())
    if any(widest % each.width for each in heads.values()):
        raise FeatureDisabled(
            f"{architecture.name}: {_list_sizes(heads.values())} in its layers",
            "blocks of one size hold whole tokens of each only if the most elements are a multiple of the others",
        )
    return dict(heads)


def _list_sizes(heads: Iterable[KeyHeads]) -> str:
    """Return a description for errors."""
    sizes = sorted({(each.number, each.dim) for each in heads})
    return f"key heads of {' and '.join(f'{number} x {dim}' for number, dim in sizes)} elements"


def share_state(spec: StateSpec, *, rank: RankFacts) -> tuple[StateSpec, StateSpec]:
    """Return the sizes of what lies before this rank's part of a mixer with a state, and of the part.

    Ranks share the heads, a key head or group with those that read it, or the channels where there are no heads.

        4 ranks, 8 heads, 2 groups      rank 2: before it 4 heads and 1 group, its own 2 heads and 1 group

    Raises:
        ConfigError: They cannot be divided so.
    """
    if not spec.num_key_heads:
        first, length = share(spec.num_channels, what=f"channels of {spec.kind}", rank=rank)
        before, own = (replace(spec, num_heads=1, value_dim=size) for size in (first, length))
        return before, own
    heads = share(spec.num_heads, what=f"heads of {spec.kind}", rank=rank)
    key_heads = share_kv_heads(spec.num_key_heads, what=f"key heads or groups of {spec.kind}", rank=rank)
    before, own = (
        replace(spec, num_heads=number, num_key_heads=number_of_keys)
        for number, number_of_keys in zip(heads, key_heads, strict=True)
    )
    return before, own


def vocab_lengths(vocab_size: int, *, rank: RankFacts) -> tuple[int, ...]:
    """Return how many tokens of the vocabulary each rank holds, by rank.

    The lengths are equal if the number of ranks divides the vocabulary. Otherwise they are about equal, and all but the
    last are multiples of 16.

    Raises:
        ConfigError: There are so few tokens that a rank would have none.
    """
    num_ranks = rank.tensor_parallel_size
    if vocab_size % num_ranks == 0:
        return (vocab_size // num_ranks,) * num_ranks
    num_pieces = -(-vocab_size // _VOCAB_ALIGNMENT)
    if num_pieces < num_ranks:
        raise ConfigError(
            f"parallel.tensor_parallel_size: {num_ranks} does not divide vocab_size = {vocab_size}, which has fewer "
            f"pieces of {_VOCAB_ALIGNMENT} tokens than there are ranks"
        )
    firsts = [num_pieces * index // num_ranks * _VOCAB_ALIGNMENT for index in range(num_ranks)]
    return tuple(end - first for first, end in zip(firsts, [*firsts[1:], vocab_size], strict=True))


def stage_layers(architecture: ModelArchitecture, *, rank: RankFacts) -> range:
    """Return the layers of this rank's stage.

    Stages read about as many weights per token, so that none waits for another. The last one has fewer layers, since it
    also has the head; what is left over goes to the first ones.

    Raises:
        ConfigError: There are more stages than layers.
    """
    num_layers, num_stages = architecture.num_layers, rank.num_stages
    if num_layers < num_stages:
        raise ConfigError(
            f"parallel.pipeline_parallel_size: {num_stages} stages cannot share num_layers = {num_layers}"
        )
    if num_stages == 1:
        return range(num_layers)
    num_weights = sum(
        map(_num_active_weights, architecture.layers)
    )  # of all layers, by a row of each product
    head = architecture.vocab_size * num_layers / num_weights  # in layers
    num_last = max(round((num_layers + head) / num_stages - head), 1)
    if rank.is_last_stage:
        return range(num_layers - num_last, num_layers)
    each, num_left_over = divmod(num_layers - num_last, num_stages - 1)
    start = rank.stage * each + min(rank.stage, num_left_over)
    return range(start, start + each + (rank.stage < num_left_over))


def _num_active_weights(layer: LayerSpec) -> int:
    """Return about how many weights of a layer one token is multiplied by, for each element of its hidden state."""
    attention = 2 * (layer.num_heads + layer.num_kv_heads) * max(layer.head_dim, layer.value_dim)
    state = layer.state
    mixer = (
        0 if state is None else state.conv_channels + 2 * state.num_channels
    )  # the gate, and what comes out
    return (attention if layer.attention != "none" else 0) + mixer + 3 * layer.active_columns
