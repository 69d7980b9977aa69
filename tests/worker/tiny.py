"""Builders for worker tests: a tiny architecture, configs, plans, and a model that can be predicted by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from triptych.checkpoint.architecture import BlockSpec, LayerSpec, ModelArchitecture, NormSpec
from triptych.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, WorkerConfig
from triptych.types.facts import KvLayout, ModelFacts, WorkerFacts
from triptych.types.identity import ModelIdentity
from triptych.types.sampling import SamplingParams
from triptych.types.step import NewRow, RowContent, StepPlan
from triptych_kernels.weights.base import LinearWeight
from triptych_services.worker.context.device import resolve_config
from triptych_services.worker.context.resolved_config import ResolvedConfig
from triptych_services.worker.layers.step_context import StepContext
from triptych_services.worker.runner.model_runner import ModelRunner
from triptych_services.worker.runner.startup.kv_cache import allocate_kv_cache
from triptych_services.worker.runner.startup.kv_plan import plan_kv_cache

GREEDY = SamplingParams(temperature=0.0)


def tiny_architecture(**changes: Any) -> ModelArchitecture:
    """A Llama. `changes` are fields of the architecture, of its block, of the block's norm, or of every layer."""
    sizes = {"num_heads": 3, "num_kv_heads": 1, "head_dim": 8, "intermediate_size": 40}
    layer = replace(LayerSpec(**sizes), **_taken(changes, LayerSpec))
    norm = replace(NormSpec(eps=1e-5), **_taken(changes, NormSpec))
    block = replace(BlockSpec(norm=norm, qk_norm_spec=norm), **_taken(changes, BlockSpec))
    architecture = ModelArchitecture(
        name="LlamaForCausalLM",
        vocab_size=97,
        hidden_size=24,
        layers=(layer,) * changes.pop("num_layers", 2),
        max_position_embeddings=64,
        tie_word_embeddings=True,
        dtype="float32",
        bos_token_id=1,
        eos_token_ids=(2,),
        block=block,
    )
    return replace(architecture, **changes)


def _taken(changes: dict[str, Any], part: type) -> dict[str, Any]:
    return {field.name: changes.pop(field.name) for field in fields(part) if field.name in changes}


def tiny_config(
    architecture: ModelArchitecture | None = None,
    *,
    max_num_seqs: int = 4,
    budget: int = 64,
    block_size: int = 4,
    num_blocks: int = 40,
    max_model_len: int = 0,
) -> ResolvedConfig:
    engine = EngineConfig(
        model=ModelConfig(max_model_len=max_model_len),
        cache=CacheConfig(block_size=block_size, num_blocks=num_blocks),
        scheduler=SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget),
        worker=WorkerConfig(device="cpu"),
    )
    return resolve_config(engine, architecture or tiny_architecture())


def tiny_facts(
    config: ResolvedConfig, max_model_len: int, kv: KvLayout, *, max_samples_per_row: int = 1
) -> WorkerFacts:
    model = ModelFacts(
        name="tiny",
        identity=ModelIdentity("f"),
        vocab_size=config.architecture.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=config.architecture.eos_token_ids,
        dtype=config.dtype,
        kv_dtype=config.kv_dtype,
        quantization="none",
    )
    scheduler = config.engine.scheduler
    return WorkerFacts(
        boot_id="boot",
        model=model,
        kv=kv,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        max_steps_in_flight=4,
        max_samples_per_row=max_samples_per_row,
    )


def runner_for(model: nn.Module, config: ResolvedConfig, *, enforce_eager: bool = False) -> ModelRunner:
    """A runner over fresh KV memory full of NaN: what no step wrote must never show."""
    kv = plan_kv_cache(config, free_bytes=1 << 30)
    kv_caches = allocate_kv_cache(kv.shape, torch.device("cpu"), kv.places)
    for layer in kv_caches:
        (layer.blocks if layer.scales is None else layer.scales)[1:] = float("nan")
    facts = tiny_facts(config, kv.max_model_len, kv.shape)
    return ModelRunner(model=model, kv_caches=kv_caches, facts=facts, enforce_eager=enforce_eager)


def dense(weight: Tensor | LinearWeight) -> Tensor:
    """[out_features, in_features] as it was loaded, whatever form it is held in."""
    if isinstance(weight, LinearWeight):
        return weight.rows(torch.arange(weight.out_features), weight.dtype)
    return weight


def u32(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint32)


def new_row(
    slot: int,
    token_ids: Sequence[int],
    block_ids: Sequence[int],
    *,
    computed: int = 0,
    cached: int | None = None,
    slot_version: int = 1,
    num_prompt: int | None = None,
    sampling: SamplingParams = GREEDY,
    seed: int = 0,
    adapter: str = "",
) -> NewRow:
    return NewRow(
        slot=slot,
        slot_version=slot_version,
        content=RowContent(u32(*token_ids[:num_prompt]), sampling, adapter=adapter),
        emitted_token_ids=u32(*token_ids[len(token_ids) if num_prompt is None else num_prompt :]),
        num_computed_tokens=computed,
        num_cached_tokens=computed if cached is None else cached,
        block_ids=u32(*block_ids),
        seed=seed,
    )


def step_plan(
    step_id: int,
    *,
    removed: Sequence[int] = (),
    new: Sequence[NewRow] = (),
    chunks: dict[int, int] | None = None,
    skipped: Sequence[int] = (),
    blocks: Sequence[tuple[int, int]] = (),
    limits: dict[int, int] | None = None,
) -> StepPlan:
    """`limits`: slot to the most tokens that it may get."""
    chunks, limits = chunks or {}, limits or {}
    return StepPlan(
        step_id=step_id,
        last_result_seen=step_id - 1,
        removed_slots=u32(*removed),
        new_rows=tuple(new),
        chunk_slots=u32(*chunks),
        chunk_lengths=u32(*chunks.values()),
        skipped_slots=u32(*skipped),
        block_slots=u32(*(slot for slot, _ in blocks)),
        block_ids=u32(*(block for _, block in blocks)),
        sample_slots=u32(*limits),
        sample_limits=u32(*limits.values()),
    )


def next_token(token_ids: Sequence[int], vocab_size: int) -> int:
    """Return the token of `EchoModel` after these tokens: it depends on every token and on its position."""
    return sum((token + 1) * (2 * position + 3) for position, token in enumerate(token_ids)) % vocab_size


class EchoModel(nn.Module):
    """Keeps each token in the KV cache and computes logits from what it reads there, exactly.

    A wrong token, position, block or length anywhere changes the greedy token, which `next_token` predicts.
    """

    def __init__(self, vocab_size: int, poisoned_tokens: Sequence[int] = ()) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.poisoned_tokens = poisoned_tokens
        """A sequence whose last token is one of these has NaN logits."""
        self.written_slots: list[int] = []
        self.num_logit_rows = 0

    def forward(self, token_ids: Tensor, positions: Tensor, context: StepContext) -> Tensor:
        (batch,) = context.attention
        cache = context.kv_caches[0].blocks[
            :, :, 0, :, 0
        ]  # [num_blocks, 2, block_size]: token ids, then positions
        block_size = cache.shape[2]
        written = batch.slot_mapping >= 0
        slots = batch.slot_mapping[written]
        self.written_slots = slots.tolist()
        cache[slots // block_size, 0, slots % block_size] = token_ids[written].to(cache.dtype)
        cache[slots // block_size, 1, slots % block_size] = positions[written].to(cache.dtype)
        hidden = []
        for row, (query_len, seq_len) in enumerate(
            zip(batch.query_lens_list, batch.seq_lens_list, strict=True)
        ):
            start = int(batch.query_starts[row])
            assert int(batch.query_starts[row + 1]) == start + query_len
            assert int(batch.seq_lens[row]) == seq_len
            assert positions[start : start + query_len].tolist() == list(range(seq_len - query_len, seq_len))
            blocks = batch.block_tables[row, : -(-seq_len // block_size)].long()
            tokens, places = cache[blocks].transpose(0, 1).reshape(2, -1)[:, :seq_len].long().tolist()
            assert places == list(range(seq_len))
            for end in range(seq_len - query_len + 1, seq_len + 1):
                poisoned = tokens[end - 1] in self.poisoned_tokens
                hidden.append(float("nan") if poisoned else next_token(tokens[:end], self.vocab_size))
        return torch.tensor(hidden)[:, None]  # [num_tokens, 1]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        self.num_logit_rows = hidden.shape[0]
        return -0.25 * (torch.arange(self.vocab_size, dtype=torch.float32) - hidden).abs()
