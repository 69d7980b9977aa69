"""The start of an encoder's runner: sizes without a KV cache, facts, and the runner itself."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from triptych.checkpoint.config_file import ConfigFile
from triptych.errors import ConfigError
from triptych.types.facts import KvLayout, WorkerFacts
from triptych.types.pooling import PoolingParams
from triptych.types.sampling import SamplingParams
from triptych.types.step import NewRow, RowContent, StepPlan, empty_u32
from triptych_services.worker.context.resolved_config import ResolvedConfig
from triptych_services.worker.models.base import EncoderModel
from triptych_services.worker.runner.encoder_runner import EncoderRunner
from triptych_services.worker.runner.startup.kv_plan import KvPlan
from triptych_services.worker.runner.startup.pooler import create_pooler

log = logging.getLogger(__name__)

_NUM_WARM_TOKENS = 16


def plan_encoder(config: ResolvedConfig) -> tuple[ResolvedConfig, KvPlan]:
    """Return the sizes of an encoder: each row holds one block, of no memory, as long as the longest text.

    A step holds the longest text; where the operator has left the tokens of a step open, they become as many.

    Raises:
        ConfigError: The operator's steps are shorter.
    """
    scheduler, limit = config.engine.scheduler, config.architecture.max_position_embeddings
    max_model_len = config.engine.model.max_model_len or limit
    budget = scheduler.max_num_batched_tokens
    if budget < max_model_len and not config.has_step_by_device:
        raise ConfigError(
            f"scheduler.max_num_batched_tokens: {budget} is below model.max_model_len {max_model_len}, and an encoder "
            "computes a text whole; raise the first, or lower the second"
        )
    scheduler = replace(scheduler, max_num_batched_tokens=max(budget, max_model_len))
    shape = KvLayout(
        num_blocks=scheduler.max_num_seqs + 1,
        block_size=1 << (max_model_len - 1).bit_length(),
        num_layers=0,
        num_kv_heads=config.architecture.num_kv_heads,
        head_dim=config.architecture.head_dim,
        dtype=config.kv_dtype,
    )
    engine = replace(config.engine, scheduler=scheduler)
    return replace(config, engine=engine), KvPlan(shape, max_model_len)


def create_encoder_runner(
    config: ResolvedConfig, directory: Path, facts: WorkerFacts, model: EncoderModel
) -> EncoderRunner:
    """Create the runner of a loaded encoder."""
    spec = config.architecture.encoder
    assert spec is not None, "described as an encoder"
    pooler = create_pooler(config.architecture, directory, model)
    assert pooler is not None, "an encoder makes vectors or is refused"
    return EncoderRunner(
        model=model,
        facts=facts,
        device=torch.device(config.rank.device),
        pooler=pooler,
        separator=read_pair_separator(directory) if spec.num_token_types > 1 else None,
        enforce_eager=config.engine.worker.enforce_eager,
    )


def warm_up_encoder(runner: EncoderRunner) -> None:
    """Compute a short text, so that the first request does not wait for what is set up on first use."""
    num_tokens = min(_NUM_WARM_TOKENS, runner.facts.model.max_model_len)
    row = NewRow(
        slot=0,
        slot_version=1,
        content=RowContent(np.zeros(num_tokens, np.uint32), SamplingParams(), PoolingParams()),
        emitted_token_ids=empty_u32(),
        num_computed_tokens=0,
        num_cached_tokens=0,
        block_ids=np.ones(1, np.uint32),
        seed=0,
    )
    runner.reset()
    runner.execute(
        StepPlan(
            step_id=1,
            last_result_seen=0,
            new_rows=(row,),
            chunk_slots=np.zeros(1, np.uint32),
            chunk_lengths=np.array([num_tokens], np.uint32),
        )
    )
    runner.reset()


_TOKENIZER_FILE = "tokenizer.json"


def read_pair_separator(directory: Path) -> int | None:
    """Return the token before the second text of a pair, where that text has token type 1.

        [CLS] a a [SEP] b b b [SEP]      a pair; the separator is [SEP]
        0     0 0 0     1 1 1 1          its token types

    None: there is no tokenizer.json, or it gives both texts type 0.

    Raises:
        ModelError: The file is no JSON object.
    """
    processor = ConfigFile.read_optional(directory / _TOKENIZER_FILE).values.get("post_processor")
    return _separator(processor) if isinstance(processor, dict) else None


def _separator(processor: dict[str, Any]) -> int | None:
    kind = processor.get("type")
    if kind == "Sequence":
        parts = processor.get("processors")
        found = [
            _separator(part) for part in (parts if isinstance(parts, list) else ()) if isinstance(part, dict)
        ]
        return next((token for token in found if token is not None), None)
    if kind == "BertProcessing":
        separator = processor.get("sep")
        return _token_id(separator[-1]) if isinstance(separator, list) and separator else None
    if kind != "TemplateProcessing":
        return None
    before: str | None = None
    for piece in processor.get("pair") or ():
        if not isinstance(piece, dict):
            return None
        sequence, token = piece.get("Sequence"), piece.get("SpecialToken")
        if isinstance(sequence, dict) and sequence.get("id") == "B":
            special = (processor.get("special_tokens") or {}).get(before)
            ids = special.get("ids") if isinstance(special, dict) else None
            return (
                _token_id(ids[-1]) if sequence.get("type_id") == 1 and isinstance(ids, list) and ids else None
            )
        before = token.get("id") if isinstance(token, dict) else None
    return None


def _token_id(value: object) -> int | None:
    return value if type(value) is int else None
