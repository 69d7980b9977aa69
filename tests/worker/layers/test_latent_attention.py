"""The latent attention layer: against transformers' module, its cache, its bits, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV3Config, DynamicCache
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3Attention,
    DeepseekV3RotaryEmbedding,
)

from tests.worker.models.checkpoints import load_checkpoint, save_checkpoint
from tests.worker.models.families import FAMILIES, LATENT, MSCALED
from tests.worker.models.sequences import CUTS, Sequences
from tests.worker.tiny import tiny_architecture, tiny_config
from triptych.checkpoint.architecture import IndexerSpec, LatentSpec
from triptych.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, WorkerConfig
from triptych.errors import FeatureDisabled
from triptych_kernels.cpu.library import isa
from triptych_services.worker.attention.base import AttentionBatch, KvCache
from triptych_services.worker.attention.paged import PagedAttention
from triptych_services.worker.context.device import resolve_config
from triptych_services.worker.context.model_context import ModelContext
from triptych_services.worker.context.resolve import choose_quantization, resolve_for_device
from triptych_services.worker.context.resolved_config import DeviceTraits
from triptych_services.worker.kv_transfer.cpu_store import CpuBlockStore
from triptych_services.worker.layers.latent_attention import LatentSelfAttention
from triptych_services.worker.layers.rotary import RotaryTables
from triptych_services.worker.layers.step_context import StepContext
from triptych_services.worker.layers.weights import find_weight_targets
from triptych_services.worker.runner.startup.kv_cache import allocate_kv_cache
from triptych_services.worker.runner.startup.kv_plan import plan_kv_cache

LAYER: dict[str, Any] = {
    "name": "YoutuForCausalLM",
    "num_heads": 4,
    "num_kv_heads": 1,
    "head_dim": 16,
    "value_dim": 12,
    "latent": LatentSpec(kv_rank=18, q_rank=22, nope_dim=10, rope_dim=6),
}


def test_it_equals_the_module_of_transformers() -> None:
    """A prompt, then three tokens that read what it left in the cache."""
    config = DeepseekV3Config(**(LATENT | MSCALED | {"v_head_dim": 12}))
    theirs = DeepseekV3Attention(config, layer_idx=0).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    ours = layer_like(config)
    targets = find_weight_targets(ours)
    for name, parameter in theirs.state_dict().items():
        targets[f"attn.{name}"].load(name, parameter)
    hidden, cache, rotary = torch.randn(1, 14, 32), DynamicCache(), DeepseekV3RotaryEmbedding(config)
    kv_cache = KvCache(torch.full((5, 1, 1, 4, 24), torch.nan))
    for first, end in ((0, 11), (11, 12), (12, 14)):
        own, positions = hidden[:, first:end], torch.arange(first, end)
        mask = torch.zeros(end - first, end).masked_fill(torch.arange(end) > positions[:, None], -torch.inf)
        with torch.no_grad():
            expected, _ = theirs(own, rotary(own, positions[None]), mask[None, None], past_key_values=cache)
            found = ours(own[0], positions, StepContext((one_row(first, end),), [kv_cache]))
        torch.testing.assert_close(found, expected[0], rtol=2e-5, atol=2e-5)


def layer_like(config: DeepseekV3Config) -> LatentSelfAttention:
    """A layer of the description that the family reads from such a config."""
    config.architectures = ["YoutuForCausalLM"]
    architecture = replace(read(config), hidden_size=32)
    context = ModelContext(tiny_config(architecture))
    return LatentSelfAttention(
        architecture.layers[0],
        layer_index=0,
        tables=RotaryTables(context=context),
        context=context,
        prefix="attn",
    )


def read(config: DeepseekV3Config) -> Any:
    from triptych.checkpoint.config_file import ConfigFile
    from triptych.checkpoint.families.latent import youtu

    return youtu(ConfigFile(Path("config.json"), config.to_dict()))


def one_row(first: int, end: int) -> AttentionBatch:
    """The layout of a step of one row, in blocks of 4 tokens."""
    table = torch.tensor([[3, 1, 4, 2]], dtype=torch.int32)
    positions = torch.arange(first, end)
    return AttentionBatch(
        slot_mapping=table[0].long()[positions // 4] * 4 + positions % 4,
        block_tables=table,
        query_starts=torch.tensor([0, end - first], dtype=torch.int32),
        seq_lens=torch.tensor([end], dtype=torch.int32),
        backend=PagedAttention(),
        max_query_len=end - first,
        max_seq_len=end,
        query_lens_list=(end - first,),
        seq_lens_list=(end,),
    )


@pytest.mark.skipif(not isa(), reason="no native kernels are built for this processor")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_token_has_the_same_bits_however_its_prompt_is_cut(dtype: str, tmp_path: Path) -> None:
    save_checkpoint(FAMILIES["Youtu"].create(), tmp_path)
    found: list[list[Tensor]] = []
    for cut in CUTS.values():
        model, architecture = load_checkpoint(tmp_path, dtype=dtype)
        sequences = Sequences(model, architecture, (1, 5, 29))
        sequences.kv_caches = [
            KvCache(cache.blocks.to(getattr(torch, dtype))) for cache in sequences.kv_caches
        ]
        with torch.inference_mode():
            found.append(sequences.run(cut))
    for other in found[1:]:
        for logits, expected in zip(other, found[0], strict=True):
            assert torch.equal(logits, expected)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("indexer", [None, IndexerSpec(num_heads=3, head_dim=8)])
def test_the_cache_holds_one_vector_per_token_on_each_rank(
    num_ranks: int, indexer: IndexerSpec | None
) -> None:
    """And the key of an indexer behind it."""
    engine = EngineConfig(
        cache=CacheConfig(block_size=4, num_blocks=7),
        parallel=ParallelConfig(tensor_parallel_size=num_ranks),
        worker=WorkerConfig(device="cpu"),
    )
    latent, width = replace(LAYER["latent"], indexer=indexer), 24 if indexer is None else 32
    config = resolve_config(engine, tiny_architecture(**(LAYER | {"latent": latent})))
    layout = plan_kv_cache(config, 1 << 30).shape
    assert layout.block_bytes == 2 * 4 * width * 4  # layers, tokens, elements of a vector, float32
    caches = allocate_kv_cache(layout, torch.device("cpu"))
    assert [list(cache.blocks.shape) for cache in caches] == [[7, 1, 1, 4, width]] * 2
    assert CpuBlockStore(caches).num_bytes(1) == layout.block_bytes  # as other workers pull them


def test_what_it_is_not_computed_with_is_refused_by_name() -> None:
    for changes, message in (
        ({"attention": "sliding", "window": 4}, "attention = sliding"),
        ({"qk_norm": "head"}, "qk_norm = head"),
        ({"has_sinks": True}, "sinks"),
        ({"attention_soft_cap": 3.0}, r"attention_soft_cap = 3\.0"),
    ):
        context = ModelContext(tiny_config(tiny_architecture(**LAYER, **changes)))
        spec = context.architecture.layers[0]
        with pytest.raises(FeatureDisabled, match=f"YoutuForCausalLM: {message}: latent attention is not"):
            LatentSelfAttention(
                spec, layer_index=0, tables=RotaryTables(context=context), context=context, prefix="attn"
            )


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_a_cache_of_8_bits_is_refused(dtype: str) -> None:
    traits = DeviceTraits(
        device="cuda:0", native_kernels=False, native_float8=True, compute_capability=(9, 0)
    )
    engine = EngineConfig(cache=CacheConfig(dtype=dtype))
    with pytest.raises(FeatureDisabled, match=f"cache.dtype = {dtype}: YoutuForCausalLM keeps one vector"):
        resolve_for_device(engine, tiny_architecture(**LAYER), traits)


@pytest.mark.parametrize("backend", ["flash-attn", "flashinfer"])
def test_packages_of_attention_kernels_are_refused(backend: str) -> None:
    traits = DeviceTraits(device="cuda:0", native_kernels=False, compute_capability=(9, 0))
    engine = EngineConfig(worker=WorkerConfig(attention_backend=backend))
    with pytest.raises(FeatureDisabled, match=f"{backend}: it does not compute latent attention"):
        resolve_for_device(engine, tiny_architecture(**LAYER), traits)


def test_contexts_that_keys_are_chosen_of_are_refused_on_cuda_devices() -> None:
    latent = replace(LAYER["latent"], num_chosen_keys=48, indexer=IndexerSpec(num_heads=3, head_dim=8))
    architecture = tiny_architecture(**(LAYER | {"latent": latent}))
    cpu = DeviceTraits(device="cpu", native_kernels=True)
    cuda = DeviceTraits(device="cuda:0", native_kernels=False, compute_capability=(9, 0))
    for asked in (0, 48):
        engine = EngineConfig(model=ModelConfig(max_model_len=asked))
        config = resolve_for_device(engine, architecture, cuda)
        assert ModelContext(config).max_positions == 48
        assert config.architecture.latent == replace(latent, indexer=None)
    longer = EngineConfig(model=ModelConfig(max_model_len=49))
    with pytest.raises(
        FeatureDisabled,
        match=r"max_model_len = 49: .* attends to 48 keys of a longer context, and chooses them on CPUs only",
    ):
        resolve_for_device(longer, architecture, cuda)
    assert ModelContext(resolve_for_device(longer, architecture, cpu)).max_positions == 49
    whole = ModelContext(resolve_for_device(EngineConfig(), architecture, cpu))
    assert whole.max_positions == architecture.max_position_embeddings


def test_groups_of_quantized_weights_must_divide_the_latents() -> None:
    sizes = LAYER | {"hidden_size": 64, "intermediate_size": 64, "value_dim": 8}
    traits = DeviceTraits(device="cpu", native_kernels=True)
    for changes, message in (
        ({"value_dim": 12}, r"num_heads \* value_dim = 48"),
        ({"latent": replace(LAYER["latent"], q_rank=40)}, "q_rank = 40"),
    ):
        architecture = tiny_architecture(**(sizes | changes))
        with pytest.raises(FeatureDisabled, match=f"do not divide {message}"):
            choose_quantization("q8", architecture, "float32", traits)
    whole = tiny_architecture(**(sizes | {"latent": replace(LAYER["latent"], q_rank=64)}))
    assert choose_quantization("q8", whole, "float32", traits) == "q8"
