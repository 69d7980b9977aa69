"""The choice of KV groups from the layers of a model, and what their blocks hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.worker.grouped_blocks import seen_blocks
from tests.worker.tiny import tiny_architecture, tiny_config
from triptych.checkpoint.architecture import LayerSpec, StateSpec
from triptych.config import SpeculativeConfig
from triptych.errors import ConfigError
from triptych.types.facts import KvGroup, KvKind, KvLayout
from triptych_services.enginecore.scheduler.admission import longest_step_of
from triptych_services.worker.context.resolved_config import RankFacts, ResolvedConfig
from triptych_services.worker.runner.block_tables import GUESSING_SLOTS
from triptych_services.worker.runner.startup.facts import worker_facts
from triptych_services.worker.runner.startup.kv_cache import allocate_kv_cache, parts_of_caches
from triptych_services.worker.runner.startup.kv_groups import (
    blocks_held,
    choose_groups,
    guess_bytes,
    most_tokens,
)
from triptych_services.worker.runner.startup.kv_plan import GUESSES, kv_parts, plan_kv_cache, step_tokens

SIZES = {"num_heads": 4, "num_kv_heads": 1, "head_dim": 8, "intermediate_size": 40}
FULL, WINDOW = LayerSpec(**SIZES), LayerSpec(**SIZES, attention="sliding", window=1024)
CHUNK = LayerSpec(**SIZES, attention="chunked", window=8192)
MAMBA = StateSpec(kind="mamba", taps=3, num_heads=1, value_dim=8, key_dim=2)


def config_of(*layers: LayerSpec, context: int = 131072, **changes: Any) -> ResolvedConfig:
    architecture = replace(tiny_architecture(), layers=layers, max_position_embeddings=context)
    config = tiny_config(architecture, num_blocks=0)
    cache = replace(config.engine.cache, groups=changes.pop("groups", "auto"))
    worker = replace(config.engine.worker, **changes)
    return replace(config, engine=replace(config.engine, cache=cache, worker=worker))


def gemma(num_layers: int) -> tuple[LayerSpec, ...]:
    """Five windows, then a full layer, and so on."""
    return tuple(FULL if index % 6 == 5 else WINDOW for index in range(num_layers))


@pytest.mark.parametrize(
    ("layers", "num_full", "num_windows", "num_tensors"),
    [
        (gemma(26), 1, 6, 4),  # Gemma 3 1B: 4 full layers, 22 windows
        (gemma(34), 1, 6, 5),  # 4B
        (gemma(48), 1, 5, 8),  # 12B
        (gemma(62), 1, 5, 11),  # 27B: groups of 10 pad short requests by 13%
        ((WINDOW, FULL) * 12, 1, 1, 12),  # GPT-OSS, Gemma 2
        ((WINDOW, WINDOW, WINDOW, FULL) * 8, 1, 3, 8),  # Cohere 2, OLMo 3
        ((WINDOW,) * 32, 0, 1, 32),  # Mistral 7B
        ((FULL,) * 32, 1, 0, 32),
    ],
)
def test_groups_of_published_models(
    layers: tuple[LayerSpec, ...], num_full: int, num_windows: int, num_tensors: int
) -> None:
    choice = choose_groups(config_of(*layers))
    kinds = [kind.kind for kind in choice.kinds]
    assert kinds == [KvKind.FULL] * num_full + [KvKind.WINDOW] * num_windows
    assert choice.num_tensors == num_tensors
    assert not choice.reason
    # no two layers share a place, and each is in a group of its kind
    assert len(set(choice.places)) == len(layers)
    for layer, place in zip(layers, choice.places, strict=True):
        assert (choice.kinds[place.group].kind is KvKind.WINDOW) == (layer is WINDOW)
        assert choice.kinds[place.group].window == layer.window
        assert place.tensor < num_tensors


def test_layers_that_read_keys_of_others_share_their_places() -> None:
    layers = (WINDOW, FULL, replace(WINDOW, kv_from=0), replace(FULL, kv_from=1))
    choice = choose_groups(config_of(*layers))
    assert [(place.group, place.tensor) for place in choice.places] == [(1, 0), (0, 0), (1, 0), (0, 0)]


def gemma4(
    num_layers: int, every: int, heads: tuple[int, int], num_shared: int = 0, window: int = 1024
) -> tuple[LayerSpec, ...]:
    """Layers of which each so manieth sees all keys, with heads of twice the size; the last ones read those of others.

    Args:
        heads: Number of key heads of layers with a window, and of others.
    """
    sliding = LayerSpec(32, heads[0], 256, 40, attention="sliding", window=window)
    kinds = [index % every == every - 1 for index in range(num_layers)]
    layers = [LayerSpec(32, heads[1], 512, 40) if is_full else sliding for is_full in kinds]
    last = {is_full: index for index, is_full in enumerate(kinds[: num_layers - num_shared])}
    for index in range(num_layers - num_shared, num_layers):
        layers[index] = replace(layers[index], kv_from=last[kinds[index]])
    return tuple(layers)


@pytest.mark.parametrize(
    ("layers", "num_windows", "num_tensors", "tokens"),
    [
        (gemma4(35, 5, (1, 1), 20, 512), 4, 3, (4, 8)),  # Gemma 4 E2B: keys of 15 layers
        (gemma4(42, 6, (2, 2), 18, 512), 5, 4, (4, 8)),  # E4B: of 24
        (gemma4(60, 6, (16, 4)), 5, 10, (8, 4)),  # 31B: windows keep twice as much of a token
        (gemma4(30, 6, (8, 2)), 5, 5, (8, 4)),  # 26B-A4B
    ],
)
def test_layers_of_two_sizes_have_blocks_of_equal_bytes(
    layers: tuple[LayerSpec, ...], num_windows: int, num_tensors: int, tokens: tuple[int, int]
) -> None:
    config = config_of(*layers)
    choice, plan = choose_groups(config), plan_kv_cache(config, 1 << 28)
    assert choice.num_tensors == num_tensors
    assert [group.kind for group in plan.shape.groups] == [KvKind.FULL] + [KvKind.WINDOW] * num_windows
    assert [group.block_size for group in plan.shape.groups] == [tokens[0]] + [tokens[1]] * num_windows
    caches = allocate_kv_cache(plan.shape, torch.device("cpu"), plan.places)
    for layer, cache in zip(layers, caches, strict=True):
        num_tokens = plan.shape.groups[cache.group].block_size
        assert cache.blocks.shape[1:] == (2, layer.num_kv_heads, num_tokens, layer.head_dim)
        assert cache.blocks.is_contiguous()
        assert cache.blocks[0].nbytes * num_tensors == plan.shape.block_bytes  # nothing is padding
        if layer.kv_from >= 0:
            assert cache.blocks.data_ptr() == caches[layer.kv_from].blocks.data_ptr()
    keeping = {(cache.group, cache.blocks.data_ptr()) for cache in caches}
    assert len(keeping) == sum(layer.keeps_keys for layer in layers)


def test_layers_of_two_sizes_without_windows_have_a_group_for_each() -> None:
    config = config_of(*gemma4(12, 6, (2, 1)), groups="one")
    assert choose_groups(config).reason == "cache.groups is one"
    plan = plan_kv_cache(config, 1 << 28)
    assert plan.shape.is_plain  # 2 x 256 are as much as 1 x 512, but heads differ
    config = config_of(*gemma4(12, 6, (1, 1)), groups="one")
    groups = plan_kv_cache(config, 1 << 28).shape.groups
    assert {(group.kind, group.block_size, group.num_layers) for group in groups} == {
        (KvKind.FULL, 4, 2),
        (KvKind.FULL, 8, 2),
    }
    assert len(groups) == 6


def test_models_of_transformers_pad_all_layers_to_the_most_of_any() -> None:
    odd = LayerSpec(4, 2, 12, 40), LayerSpec(4, 1, 20, 40, value_dim=24)
    config = config_of(*odd, *gemma4(6, 6, (2, 1))[:5])
    config = replace(config, architecture=replace(config.architecture, config={"model_type": "any"}))
    plan = plan_kv_cache(config, 1 << 28)
    assert plan.shape.is_plain
    caches = allocate_kv_cache(plan.shape, torch.device("cpu"), plan.places)
    assert {cache.blocks.shape[1:] for cache in caches} == {(2, 2, 4, 256)}


def test_stages_of_one_size_each_have_groups_of_both() -> None:
    """Layers of two sizes are never in one group, whatever that pads."""
    config = config_of(*gemma4(4, 1, (1, 1))[:2], *gemma4(4, 5, (1, 1))[:2])
    for stage, kind in enumerate((KvKind.FULL, KvKind.WINDOW)):
        rank = RankFacts(stage=stage, num_stages=2)
        choice = choose_groups(replace(config, rank=rank))
        assert [place.tensor for place in choice.places] == [0, 1]
        assert {choice.kinds[place.group].tokens for place in choice.places} == {
            1 if kind is KvKind.FULL else 2
        }
        assert "100% of padding" in choice.reason
        plan = plan_kv_cache(replace(config, rank=rank), 1 << 28)
        assert [group.kind for group in plan.shape.groups] == [KvKind.FULL, KvKind.FULL]


def test_chunks_and_windows_are_groups_of_their_own() -> None:
    choice = choose_groups(config_of(*(CHUNK, WINDOW, FULL) * 2))
    assert [(kind.kind, kind.window) for kind in choice.kinds] == [
        (KvKind.FULL, 0),
        (KvKind.WINDOW, 1024),
        (KvKind.CHUNK, 8192),
    ]


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (config_of(WINDOW, FULL, groups="one"), "cache.groups is one"),
        (config_of(WINDOW, FULL, context=1100), "they would save less than 10% of 1100 tokens"),
        (config_of(*(WINDOW,) * 13, FULL, FULL, FULL, *(CHUNK,) * 2), "padding, and 10% is the limit"),
    ],
)
def test_one_group_for_a_reason(config: ResolvedConfig, says: str) -> None:
    choice = choose_groups(config)
    assert says in choice.reason
    assert plan_kv_cache(config, 1 << 30).shape.is_plain


def test_a_window_of_the_whole_context_is_none() -> None:
    choice = choose_groups(config_of(WINDOW, FULL, context=1024))
    assert (len(choice.kinds), choice.reason) == (1, "")


def test_stages_have_the_same_groups() -> None:
    config = config_of(*(WINDOW, FULL) * 8)
    kinds = set()
    for stage in range(2):
        rank = RankFacts(stage=stage, num_stages=2)
        choice = choose_groups(replace(config, rank=rank))
        kinds.add(choice.kinds)
        shape = plan_kv_cache(replace(config, rank=rank), 1 << 30).shape
        assert [group.num_layers for group in shape.groups] == [choice.num_tensors] * 2
    assert len(kinds) == 1


def test_layers_of_a_tensor_hold_other_blocks_of_it() -> None:
    config = config_of(WINDOW, WINDOW, FULL, WINDOW, FULL, WINDOW)
    plan = plan_kv_cache(config, 1 << 24)
    assert [group.block_bytes for group in plan.shape.groups] == [plan.shape.block_bytes] * 3
    layers = allocate_kv_cache(plan.shape, torch.device("cpu"), plan.places)
    assert [layer.group for layer in layers] == [1, 1, 0, 2, 0, 2]
    parts = parts_of_caches(layers)
    assert layers[0].blocks.data_ptr() == layers[2].blocks.data_ptr() == layers[3].blocks.data_ptr()
    assert [name for name, _, _ in kv_parts(plan.shape)] == list(parts) == ["0.blocks", "1.blocks"]
    assert [num_bytes for _, _, num_bytes in kv_parts(plan.shape)] == [part.nbytes for part in parts.values()]


@pytest.mark.parametrize(
    "second", [MAMBA, replace(MAMBA, kind="gated_delta", num_heads=3, num_key_heads=1, key_dim=5)]
)
def test_a_page_holds_the_states_of_all_layers(second: StateSpec) -> None:
    """Kinds of states may differ, and so may their sizes: there is one group of states, and no padding."""
    states = (MAMBA, second)
    layers_with_states = [replace(FULL, state=state) for state in states]
    plan = plan_kv_cache(config_of(FULL, *layers_with_states), 1 << 24)
    sizes = [state.page_elements for state in states]
    assert [group.kind for group in plan.shape.groups] == [KvKind.FULL, KvKind.STATE]
    assert plan.shape.page_bytes == sum(sizes) * 4
    layers = allocate_kv_cache(plan.shape, torch.device("cpu"), plan.places)
    parts = parts_of_caches(layers)
    assert [(name, part.nbytes) for name, part in parts.items()] == [
        (name, num_bytes) for name, _, num_bytes in kv_parts(plan.shape)
    ]
    assert [layer.state is None for layer in layers] == [True, False, False]
    for number, layer in enumerate(layers[1:]):
        layer.state[:] = number + 1
    pages = parts["states"].view(plan.shape.num_state_blocks, sum(sizes))
    for part, number in zip(pages.split(sizes, dim=1), (1, 2), strict=True):
        assert (part == number).all()


def test_guesses_are_kept_beside_pages_of_states() -> None:
    """The cache is smaller by what is kept of guesses, which is memory of its own."""
    delta = replace(MAMBA, kind="gated_delta", num_heads=3, num_key_heads=1, key_dim=5)
    short = replace(MAMBA, kind="short_conv", key_dim=0)
    config = config_of(FULL, *(replace(FULL, state=state) for state in (MAMBA, delta, short)))
    # the convolutions' inputs, and what enters: step size and input by channel and B; or key, value, decay and factor
    sizes = [8 + 2 * 8 + 2, 3 * 8 + 2 * 5 + 3 * (5 + 8 + 2), 8]
    plans = []
    for max_tokens in (0, 3):
        speculative = SpeculativeConfig(enabled="true" if max_tokens else "false", max_tokens=max_tokens or 1)
        plan = plan_kv_cache(replace(config, engine=replace(config.engine, speculative=speculative)), 1 << 24)
        plans.append(
            plan.shape.num_blocks * plan.shape.block_bytes
            + plan.shape.num_state_blocks * plan.shape.page_bytes
        )
    num_bytes = sum(sizes) * 4 * 3 * GUESSING_SLOTS
    assert guess_bytes(plan.places, 3) == num_bytes
    assert num_bytes / 2 - 4096 < plans[0] - plans[1] < num_bytes + 4096, "of a share of the free memory"
    layers = allocate_kv_cache(plan.shape, torch.device("cpu"), plan.places, num_guesses=3)
    kept = [layer.guesses for layer in layers]
    assert kept[0] is None
    assert [tuple(each.shape) for each in kept if each is not None] == [(GUESSING_SLOTS, 3, n) for n in sizes]
    memory = parts_of_caches(layers)[GUESSES].view(GUESSING_SLOTS, 3, -1)
    for number, (part, own) in enumerate(zip(memory.split(sizes, dim=2), kept[1:], strict=True)):
        assert own is not None
        own[:] = number + 1
        assert (part == number + 1).all()
    assert all(
        layer.guesses is None for layer in allocate_kv_cache(plan.shape, torch.device("cpu"), plan.places)
    )


def test_guesses_that_leave_no_room_for_states_are_refused_with_their_bytes() -> None:
    state = replace(MAMBA, value_dim=80_000)
    kept = (80_000 + 2 * 80_000 + 1250 * 2) * 4 * 8 * GUESSING_SLOTS
    config = config_of(replace(FULL, attention="none", state=state))
    plan_kv_cache(config, 8 * kept)
    with pytest.raises(
        ConfigError,
        match=rf"are left for recurrent states beside the {kept / 2**20:.1f} MiB of what is kept of guesses, but 3 "
        r"pages take .* lower speculative\.max_tokens, set speculative\.enabled to false",
    ):
        plan_kv_cache(config, kept)


@pytest.mark.parametrize("group", [KvGroup(KvKind.WINDOW, 1, 4, 64, 9), KvGroup(KvKind.CHUNK, 1, 4, 64, 10)])
@pytest.mark.parametrize("step", [1, 3, 16])
def test_no_request_holds_more_than_the_plan_says(group: KvGroup, step: int) -> None:
    for num_tokens in (1, 5, 40, 61):
        most = 0
        for start in range(num_tokens):
            last = min(start + step, num_tokens) - 1
            held = set().union(*(seen_blocks(group, position) for position in range(start, last + 1)))
            most = max(most, len(held))
        assert most <= blocks_held((group,), num_tokens, step)


@pytest.mark.parametrize("max_num_batched_tokens", [16, 512])
@pytest.mark.parametrize("enabled", ["true", "false"])
def test_the_tokens_of_a_step_are_those_that_the_engine_counts(
    max_num_batched_tokens: int, enabled: str
) -> None:
    config = config_of(WINDOW, FULL)
    engine = replace(
        config.engine,
        scheduler=replace(config.engine.scheduler, max_num_batched_tokens=max_num_batched_tokens),
        speculative=replace(config.engine.speculative, enabled=enabled),
    )
    config = replace(config, engine=engine)
    plan = plan_kv_cache(config, 1 << 30)
    facts = worker_facts(
        config, plan, fingerprint="", weights="", boot_id="", device_name="", weight_bytes=0, load_s=0
    )
    assert step_tokens(config) == longest_step_of(engine.scheduler, facts)


def test_the_longest_request_just_fits() -> None:
    groups = (KvGroup(KvKind.FULL, 1, 4, 64), *[KvGroup(KvKind.WINDOW, 1, 4, 64, 9)] * 2)
    for num_blocks in (4, 10, 40):
        layout = KvLayout(num_blocks, 4, 3, 1, 2, "float32", groups=groups)
        longest = most_tokens(layout, 3)
        assert blocks_held(groups, longest, 3) <= num_blocks - 1 < blocks_held(groups, longest + 1, 3)
    assert most_tokens(KvLayout(10, 4, 3, 1, 2, "float32"), 3) == 36


def test_the_same_memory_holds_five_times_the_tokens_of_windows_at_32k() -> None:
    """Ratio of what one request of 32k tokens takes: Gemma 3 12B's layers, in one group and in several."""
    grouped = plan_kv_cache(config_of(*gemma(48), context=32768), 1 << 36).shape
    plain = plan_kv_cache(config_of(*gemma(48), context=32768, groups="one"), 1 << 36).shape

    def num_bytes(shape: KvLayout, step_tokens: int) -> int:
        return blocks_held(shape.groups, 32768, step_tokens) * shape.block_bytes

    assert num_bytes(plain, 5) / num_bytes(grouped, 5) > 5  # while it decodes, with four steps in flight
    assert num_bytes(plain, 2048) / num_bytes(grouped, 2048) > 4  # in the last step of its prompt
