"""Tiny checkpoints with pooling, runners of them, and rows that are pooled."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from tests.worker.tiny import new_row, step_plan
from triptych.checkpoint.config_json import read_architecture
from triptych.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, WorkerConfig
from triptych.types.pooling import PoolingParams
from triptych.types.step import F32, NewRow, RowContent, StepResult
from triptych_services.worker.attention.create import create_attention
from triptych_services.worker.context.device import resolve_config
from triptych_services.worker.loader.load import load_model, open_checkpoint
from triptych_services.worker.runner.base import StepRunner
from triptych_services.worker.runner.cuda.streams import DeviceStream
from triptych_services.worker.runner.model_runner import ModelRunner
from triptych_services.worker.runner.startup.facts import served_tasks, worker_facts
from triptych_services.worker.runner.startup.kv_cache import allocate_kv_cache
from triptych_services.worker.runner.startup.kv_plan import plan_kv_cache
from triptych_services.worker.runner.startup.pooler import create_pooler

BLOCKS_PER_ROW = 16  # of 8 tokens
MODULES = {
    "transformer": ("", "Transformer"),
    "pooling": ("1_Pooling", "Pooling"),
    "dense": ("2_Dense", "Dense"),
    "normalize": ("3_Normalize", "Normalize"),
}


def save_decoder(
    directory: Path, family: str, head: str = "ForCausalLM", seed: int = 0, **changes: Any
) -> Any:
    """Save a random decoder of transformers; return the model, in float32."""
    config = getattr(transformers, f"{family}Config")(
        **{
            "vocab_size": 97,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 256,
            "initializer_range": 0.2,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            **changes,
        }
    )
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}{head}")(config).eval()
    model.save_pretrained(directory)
    return model


def save_modules(directory: Path, *names: str, pooling_mode: str = "mean", dense: Any = None) -> None:
    """Add the files of sentence-transformers."""
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (path, kind) in enumerate(MODULES[name] for name in ("transformer", "pooling", *names))
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir()
    config = {"word_embedding_dimension": 64, "pooling_mode": pooling_mode}
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(config))
    if dense is not None:
        (directory / "2_Dense").mkdir()
        dense.save(str(directory / "2_Dense"))


def pooling_runner(
    directory: Path, *, enforce_eager: bool = False, stream: DeviceStream | None = None, budget: int = 256
) -> ModelRunner:
    engine = EngineConfig(
        model=ModelConfig(model="somewhere/tiny", dtype="float32", quantization="none"),
        cache=CacheConfig(block_size=8, num_blocks=8 * BLOCKS_PER_ROW + 1),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=budget),
        worker=WorkerConfig(device="cpu"),
    )
    config = resolve_config(engine, read_architecture(directory))
    kv = plan_kv_cache(config, 1 << 30)
    model = load_model(config, open_checkpoint(directory))
    runner = ModelRunner(
        model=model,
        kv_caches=allocate_kv_cache(kv.shape, torch.device("cpu"), kv.places),
        facts=worker_facts(
            config,
            kv,
            boot_id="b",
            fingerprint="f",
            weights="w",
            device_name="",
            weight_bytes=0,
            load_s=0.0,
            served=served_tasks(config.architecture, directory),
        ),
        attention=create_attention(config),
        enforce_eager=enforce_eager or stream is not None,
        stream=stream,
    )
    pooler = create_pooler(config.architecture, directory, model)
    if pooler is not None:
        runner.pool_with(pooler)
    return runner


def pooled_row(slot: int, token_ids: Sequence[int], params: PoolingParams, **fields: Any) -> NewRow:
    first = 1 + BLOCKS_PER_ROW * slot
    row = new_row(slot, token_ids, range(first, first + BLOCKS_PER_ROW), **fields)
    return replace(row, content=RowContent(row.content.prompt_token_ids, row.sampling, params))


def generating_row(slot: int, token_ids: Sequence[int]) -> NewRow:
    first = 1 + BLOCKS_PER_ROW * slot
    return new_row(slot, token_ids, range(first, first + BLOCKS_PER_ROW))


def pool(runner: StepRunner, texts: Sequence[Sequence[int]], params: PoolingParams) -> list[F32]:
    """The vectors of texts that are computed in one step of a new session."""
    rows = [pooled_row(slot, text, params) for slot, text in enumerate(texts)]
    result = run(runner, rows)
    assert not result.row_errors, result.row_errors
    assert not result.token_ids.size
    by_slot = {key.slot: vectors for key, vectors in result.vectors.items()}
    return [by_slot[slot] for slot in range(len(texts))]


def run(runner: StepRunner, rows: Sequence[NewRow]) -> StepResult:
    """The result of a first step that computes rows whole."""
    runner.reset()
    return runner.execute(step_plan(1, new=rows, chunks={row.slot: len(row.token_ids) for row in rows}))


def texts_of(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 97, length).tolist() for length in lengths]
