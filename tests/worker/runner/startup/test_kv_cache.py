"""How many KV blocks fit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.worker.tiny import tiny_architecture, tiny_config
from triptych.config import CacheConfig
from triptych.errors import ConfigError
from triptych_services.worker.runner.startup.kv_cache import allocate_kv_cache
from triptych_services.worker.runner.startup.kv_plan import plan_kv_cache

BLOCK_BYTES = 2 * 2 * 1 * 4 * 8 * 4  # layers, key and value, heads, block_size, head_dim, float32


def config_with(cache: CacheConfig, **arguments):
    config = tiny_config(**arguments)
    return replace(config, engine=replace(config.engine, cache=cache))


def test_measured_blocks_take_the_fraction_of_what_is_free():
    plan = plan_kv_cache(config_with(CacheConfig(block_size=4, memory_fraction=0.5)), 22 * BLOCK_BYTES + 1)
    assert plan.shape.block_bytes == BLOCK_BYTES
    assert plan.shape.num_blocks == 11
    assert plan.max_model_len == 40


@pytest.mark.parametrize(("device", "num_blocks"), [("cpu", 10), ("cuda:1", 18)])
def test_what_the_operator_leaves_open_follows_from_the_device(device: str, num_blocks: int) -> None:
    config = config_with(CacheConfig(block_size=4), max_num_seqs=2)
    config = replace(config, rank=replace(config.rank, device=device))
    assert plan_kv_cache(config, 20 * BLOCK_BYTES).shape.num_blocks == num_blocks


def test_a_cache_in_a_cpu_s_memory_has_a_soft_limit():
    config = config_with(CacheConfig(block_size=4, soft_memory_fraction=0.25))
    assert plan_kv_cache(config, 20 * BLOCK_BYTES).shape.soft_num_blocks == 5
    few = config_with(CacheConfig(block_size=4, num_blocks=3))
    assert plan_kv_cache(few, 1 << 30).shape.soft_num_blocks == 2
    on_cuda = replace(config, rank=replace(config.rank, device="cuda:0"))
    assert plan_kv_cache(on_cuda, 20 * BLOCK_BYTES).shape.soft_num_blocks is None


def test_what_steps_take_comes_out_of_the_share_that_is_granted():
    config = config_with(CacheConfig(block_size=4, memory_fraction=0.5))
    plan = plan_kv_cache(config, 22 * BLOCK_BYTES, activation_bytes=3 * BLOCK_BYTES + 1)
    assert plan.shape.num_blocks == 7
    with pytest.raises(ConfigError, match=r"free after loading, less .* MiB for activations, is"):
        plan_kv_cache(config, 22 * BLOCK_BYTES, activation_bytes=10 * BLOCK_BYTES)
    with pytest.raises(ConfigError, match="set at most 4, or 0"):
        plan_kv_cache(tiny_config(num_blocks=5), 8 * BLOCK_BYTES, activation_bytes=4 * BLOCK_BYTES)


def test_measured_blocks_stop_at_what_all_requests_can_fill():
    plan = plan_kv_cache(config_with(CacheConfig(block_size=5), max_num_seqs=3), 1 << 40)
    assert plan.shape.num_blocks == 3 * 13 + 1  # 64 tokens fill 13 blocks of 5
    assert plan.max_model_len == 64


def test_max_model_len_limits_measured_blocks():
    plan = plan_kv_cache(config_with(CacheConfig(block_size=4), max_num_seqs=2, max_model_len=9), 1 << 40)
    assert plan.shape.num_blocks == 2 * 3 + 1
    assert plan.max_model_len == 9


def test_given_blocks_are_taken_as_they_are():
    plan = plan_kv_cache(tiny_config(num_blocks=3), 3 * BLOCK_BYTES)
    assert plan.shape.num_blocks == 3
    assert plan.max_model_len == 8


@pytest.mark.parametrize(
    ("cache", "free", "says"),
    [
        (CacheConfig(block_size=4, num_blocks=1), 1 << 30, "cache.num_blocks: 1 leaves too few"),
        (CacheConfig(block_size=4, num_blocks=9), 5 * BLOCK_BYTES, "cache.num_blocks: 9 .* at most 5"),
        (
            CacheConfig(block_size=4, memory_fraction=0.5),
            3 * BLOCK_BYTES,
            "cache.memory_fraction: 0.5 .* 2 KV blocks",
        ),
    ],
)
def test_too_little_memory_stops_the_boot_with_the_numbers(cache, free, says):
    with pytest.raises(ConfigError, match=says):
        plan_kv_cache(config_with(cache), free)


def test_half_precision_halves_a_block():
    config = replace(tiny_config(), kv_dtype="bfloat16")
    assert plan_kv_cache(config, 1 << 30).shape.block_bytes == BLOCK_BYTES // 2


def test_the_cache_has_the_planned_shape_and_a_zero_null_block():
    config = tiny_config(tiny_architecture(num_layers=3, num_kv_heads=2), num_blocks=7, block_size=5)
    shape = plan_kv_cache(config, 1 << 30).shape
    layers = allocate_kv_cache(shape, torch.device("cpu"))
    assert [layer.blocks.shape for layer in layers] == [(7, 2, 2, 5, 8)] * 3
    assert all(layer.blocks.dtype == torch.float32 and not layer.blocks[0].any() for layer in layers)
    assert all(layer.scales is None for layer in layers)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_a_cache_of_8_bits_has_scales_and_its_plan_counts_them(dtype):
    config = replace(
        tiny_config(tiny_architecture(num_layers=3, num_kv_heads=2), block_size=5), kv_dtype=dtype
    )
    plan = plan_kv_cache(config, 1 << 30)
    layers = allocate_kv_cache(plan.shape, torch.device("cpu"))
    assert {layer.blocks.dtype for layer in layers} == {getattr(torch, dtype)}
    assert {layer.scales.dtype for layer in layers} == {torch.float32}
    assert all(layer.scales.shape == layer.blocks.shape[:4] for layer in layers)
    assert all(not layer.blocks[0].float().any() and not layer.scales[0].any() for layer in layers)
    allocated = sum(tensor.nbytes for layer in layers for tensor in (layer.blocks, layer.scales))
    assert allocated == plan.shape.num_blocks * plan.shape.block_bytes
