"""The number of blocks of the paged KV cache, decided before they are allocated. Needs no torch."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from triptych.checkpoint.architecture import ModelArchitecture
from triptych.errors import ConfigError
from triptych.types.facts import KvGroup, KvKind, KvLayout
from triptych_services.worker.context.resolved_config import (
    RankFacts,
    ResolvedConfig,
    max_steps_in_flight,
)
from triptych_services.worker.parallel.shares import key_heads, share_kv_heads, stage_layers
from triptych_services.worker.runner.startup.kv_groups import (
    LayerPlace,
    blocks_held,
    choose_groups,
    guess_bytes,
    most_tokens,
)

log = logging.getLogger(__name__)

_MIB = 1 << 20
_SCALED_DTYPES, _SCALE_BYTES = ("int8", "float8_e4m3fn"), 4
_PAGES_PER_ROW = 2  # the one that is read, and the one that is written
_PART_ALIGNMENT = 1 << 21  # a huge page
STATES, GUESSES = "states", "guesses"
"""Names among the parts of a cache: pages of states, and what is kept of guesses beside them."""


@dataclass(frozen=True, slots=True)
class KvPlan:
    """The size of a KV cache that is not allocated yet."""

    shape: KvLayout
    max_model_len: int
    """Tokens of prompt and output together: min(the model's or the operator's, the tokens that the blocks hold)."""
    activation_bytes: int = 0
    """Bytes left free for the largest step; 0 if that was not measured."""
    places: tuple[LayerPlace, ...] = ()
    """By layer of this stage. Empty: there is one full group, with a tensor for each layer."""


def plan_kv_cache(config: ResolvedConfig, free_bytes: int, *, activation_bytes: int = 0) -> KvPlan:
    """Decide the number of blocks: the operator's, or `cache.memory_fraction` of the free memory.

    The latter never exceeds the number that `max_num_seqs` requests of `max_model_len` tokens can fill. On a CPU
    `cache.soft_memory_fraction` of the free memory is the soft limit.

    Args:
        free_bytes: Memory that this process can still allocate on the device, measured after loading.
        activation_bytes: Memory of the largest step if that was measured, else 0; it counts towards the fraction.

    Raises:
        ConfigError: The operator's blocks do not fit, or not even one block does; or ranks cannot share the heads.
    """
    cache, architecture = config.engine.cache, config.architecture
    _check_state_interval(config)
    choice = choose_groups(config)
    shape = choice.with_groups(_without_blocks(config), cache.state_interval)
    max_model_len = config.engine.model.max_model_len or architecture.max_context
    fraction = cache.memory_fraction or _default_fraction(config.rank.device)
    kept = guess_bytes(choice.places, config.max_samples_per_row - 1)
    granted = int(free_bytes * fraction) - activation_bytes - kept
    free_bytes -= kept
    states = next((group for group in shape.groups if group.kind is KvKind.STATE), None)
    if states is not None:
        num_pages = _num_pages(config, states, granted, kept, max_model_len, beside_kv=shape.block_bytes > 0)
        shape = replace(shape, num_state_blocks=num_pages, continues_states=True)
        granted -= num_pages * states.block_bytes
        free_bytes -= num_pages * states.block_bytes
    if choice.kinds:
        shape = _with_blocks(config, shape, free_bytes, granted, max_model_len, activation_bytes)
    longest = most_tokens(shape, step_tokens(config))
    return KvPlan(shape, min(max_model_len, longest), activation_bytes, choice.places)


def _with_blocks(
    config: ResolvedConfig,
    shape: KvLayout,
    free_bytes: int,
    granted: int,
    max_model_len: int,
    activation_bytes: int,
) -> KvLayout:
    """Return a layout with its number of blocks of keys and values.

    Args:
        granted: Bytes that they may take if the operator has not said how many there are. A stage on which they take
            none has as many as its requests can fill.
    """
    cache, block_bytes = config.engine.cache, shape.block_bytes
    of_kv = [group for group in shape.groups if group.kind is not KvKind.STATE]
    min_blocks = 1 + len(of_kv)  # the null block and one of each
    if cache.num_blocks:
        num_blocks = _check_num_blocks(
            cache.num_blocks, min_blocks, block_bytes, free_bytes - activation_bytes
        )
    else:
        blocks_per_seq = blocks_held(of_kv, max_model_len, step_tokens(config))
        num_blocks = config.engine.scheduler.max_num_seqs * blocks_per_seq + 1
        if block_bytes:
            num_blocks = min(num_blocks, granted // block_bytes)
        if num_blocks < min_blocks:
            fraction = cache.memory_fraction or _default_fraction(config.rank.device)
            raise ConfigError(
                f"cache.memory_fraction: {fraction:g} of the {_mib(free_bytes)} free after loading"
                f"{f', less {_mib(activation_bytes)} for activations,' if activation_bytes else ''} is "
                f"{_mib(granted)}, but {min_blocks} KV blocks of {cache.block_size} tokens take "
                f"{_mib(min_blocks * block_bytes)}; free memory, raise cache.memory_fraction or lower "
                "cache.block_size"
            )
    soft_num_blocks = None
    if config.rank.device == "cpu":
        soft_num_blocks = num_blocks - 1
        if block_bytes:
            in_memory = int(free_bytes * cache.soft_memory_fraction) // block_bytes
            soft_num_blocks = min(soft_num_blocks, in_memory)
    return replace(shape, num_blocks=num_blocks, soft_num_blocks=soft_num_blocks)


def _check_state_interval(config: ResolvedConfig) -> None:
    """Raise ConfigError if pages of recurrent states do not hold whole blocks of tokens."""
    cache, architecture = config.engine.cache, config.architecture
    if not architecture.keeps_states:
        return
    if cache.state_interval % cache.block_size:
        raise ConfigError(
            f"cache.state_interval: {cache.state_interval} is no multiple of cache.block_size = {cache.block_size}; "
            "set it to one"
        )


def _num_pages(
    config: ResolvedConfig, states: KvGroup, granted: int, kept: int, max_model_len: int, *, beside_kv: bool
) -> int:
    """Return the number of pages of states: two for each request, and those of all snapshots of all contexts, if half
    of the cache's memory holds so many. A stage without states could hold any number.

    Args:
        granted: Bytes that the whole cache may take.
        kept: Bytes of what is kept of guesses, which are not among these.
        beside_kv: Whether keys and values need some of it here. If not, states get all.

    Raises:
        ConfigError: Not one request has room.
    """
    max_num_seqs = config.engine.scheduler.max_num_seqs
    wanted = 1 + max_num_seqs * (_PAGES_PER_ROW + max_model_len // states.block_size)
    if not states.block_bytes:
        return wanted
    share = max(granted // 2 if beside_kv else granted, 0)
    num_pages = min(wanted, share // states.block_bytes)
    if num_pages < 1 + _PAGES_PER_ROW:
        guesses = f" beside the {_mib(kept)} of what is kept of guesses" if kept else ""
        remedies = "lower speculative.max_tokens, set speculative.enabled to false, " if kept else ""
        raise ConfigError(
            f"cache.memory_fraction: {_mib(share)} are left for recurrent states{guesses}, but {1 + _PAGES_PER_ROW} "
            f"pages take {_mib((1 + _PAGES_PER_ROW) * states.block_bytes)}; {remedies}free memory, or raise "
            "cache.memory_fraction"
        )
    return num_pages


def step_tokens(config: ResolvedConfig) -> int:
    """Return the most tokens between what a row needs no more and the end of a step, as the engine core counts them."""
    in_flight = (max_steps_in_flight(config.rank.num_stages) + 1) * config.max_samples_per_row
    return max(config.engine.scheduler.max_num_batched_tokens, in_flight)


def report_groups(config: ResolvedConfig, shape: KvLayout) -> None:
    """Log the groups if there are others than one full one, or why there are none for layers with windows."""
    reason = choose_groups(config).reason
    if reason:
        log.info("no memory is saved by the windows of layers: %s", reason)
    if not shape.is_plain:
        log.info(
            "%d KV groups share the blocks: %s",
            len(shape.groups),
            ", ".join(
                f"{group.num_layers} layers {group.kind.name.lower()} {group.window or ''}".rstrip()
                for group in shape.groups
            ),
        )


def _without_blocks(config: ResolvedConfig) -> KvLayout:
    """Return the layout of the caches of this rank's layers: one full group, of layers that all keep the most."""
    architecture = config.architecture
    vectors = vector_shape(architecture, config.rank)
    stage = stage_layers(architecture, rank=config.rank)
    num_layers = sum(architecture.layers[index].keeps_keys for index in stage)
    layout = KvLayout(
        num_blocks=1,  # the null block; the others are counted later
        block_size=config.engine.cache.block_size,
        num_layers=num_layers,
        num_kv_heads=vectors.num_heads,
        head_dim=vectors.width,
        dtype=config.kv_dtype,
    )
    (pairs,) = layout.groups
    return replace(layout, groups=(replace(pairs, block_bytes=pairs.block_bytes // 2 * vectors.num_vectors),))


@dataclass(frozen=True, slots=True)
class VectorShape:
    """The vectors that one layer keeps for a token."""

    num_vectors: int
    """2: a key and a value. 1: a latent vector, which is both."""
    num_heads: int
    """Key heads of this rank, of which each has such vectors."""
    width: int
    """Elements of a vector."""


def vector_shape(architecture: ModelArchitecture, rank: RankFacts) -> VectorShape:
    """Return what each layer with attention keeps on this rank, or those that keep most, the same in all stages.

    All heads read one latent vector, so each rank has it.

    Raises:
        ConfigError: Ranks cannot share the heads.
    """
    keeping = [layer for layer in architecture.layers if layer.keeps_keys]
    if not keeping:
        return VectorShape(2, 1, 1)
    if architecture.latent is not None:
        return VectorShape(1, 1, architecture.latent.width)
    if architecture.config:  # see `heads_of_layers`
        _, num_kv_heads = share_kv_heads(architecture.num_kv_heads, rank=rank)
        return VectorShape(2, num_kv_heads, architecture.head_dim)
    widest = max((key_heads(layer, rank=rank) for layer in keeping), key=lambda heads: heads.width)
    return VectorShape(2, widest.number, widest.dim)


def vectors_per_token(layout: KvLayout) -> int:
    """Return how many vectors a layer keeps for a token and key head: a key and a value, or one that is both."""
    of_pairs = replace(layout, num_layers=max(num_kv_tensors(layout), 1), groups=())
    return 2 * layout.block_bytes // of_pairs.block_bytes


def _default_fraction(device: str) -> float:
    """Return the default of `cache.memory_fraction`.

    A CUDA device belongs to the worker. On a CPU other processes need memory too, if only for the page cache.
    """
    return 0.9 if device.startswith("cuda") else 0.5


def _check_num_blocks(num_blocks: int, min_blocks: int, block_bytes: int, free_bytes: int) -> int:
    if num_blocks < min_blocks:
        raise ConfigError(
            f"cache.num_blocks: {num_blocks} leaves too few, block 0 being the null block; "
            f"set at least {min_blocks}, or 0 to size from free memory"
        )
    if num_blocks * block_bytes > free_bytes:
        raise ConfigError(
            f"cache.num_blocks: {num_blocks} blocks take {_mib(num_blocks * block_bytes)}, but {_mib(free_bytes)} "
            f"are free after loading; set at most {free_bytes // block_bytes}, or 0 to size from free memory"
        )
    return num_blocks


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / _MIB:.1f} MiB"


def kv_parts(shape: KvLayout) -> list[tuple[str, int, int]]:
    """Return the name, the start and the bytes of each tensor's blocks and scales in one piece of memory, and of the
    pages of states."""
    num_tensors = num_kv_tensors(shape)
    vectors = shape.num_blocks * 2 * shape.num_kv_heads * shape.block_size
    bytes_of_all = shape.block_bytes * shape.num_blocks // max(num_tensors, 1)
    scale_bytes = vectors * _SCALE_BYTES if shape.dtype in _SCALED_DTYPES else 0
    parts, end = [], 0
    for tensor in range(num_tensors):
        for name, num_bytes in (("blocks", bytes_of_all - scale_bytes), ("scales", scale_bytes)):
            if num_bytes:
                parts.append((f"{tensor}.{name}", end, num_bytes))
                end += -(-num_bytes // _PART_ALIGNMENT) * _PART_ALIGNMENT
    page_bytes = sum(group.block_bytes for group in shape.groups if group.kind is KvKind.STATE)
    if page_bytes:
        parts.append((STATES, end, page_bytes * shape.num_state_blocks))
    return parts


def num_kv_tensors(shape: KvLayout) -> int:
    """Return the number of tensors with blocks: as many as the largest group has layers."""
    return max((group.num_layers for group in shape.groups if group.kind is not KvKind.STATE), default=0)
