"""The division of a device's memory between the largest step and the KV cache, decided after the weights are loaded."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from triptych.config.step_size import next_smaller_step
from triptych.errors import ConfigError
from triptych_services.worker.attention.base import AttentionBackend
from triptych_services.worker.context.device import free_memory
from triptych_services.worker.context.rank_group import RankGroup
from triptych_services.worker.context.resolved_config import ResolvedConfig
from triptych_services.worker.models.base import CausalLM
from triptych_services.worker.runner.drafting.speculation import max_sampling_places
from triptych_services.worker.runner.graph_sizes import graph_token_limit
from triptych_services.worker.runner.startup.activation_memory import LargestSteps, measure_activations
from triptych_services.worker.runner.startup.kv_groups import most_tokens
from triptych_services.worker.runner.startup.kv_plan import KvPlan, plan_kv_cache, step_tokens

log = logging.getLogger(__name__)


def plan_memory(
    config: ResolvedConfig,
    group: RankGroup,
    model: CausalLM,
    attention: AttentionBackend,
    device: torch.device,
    draft_cache_bytes: int = 0,
) -> tuple[ResolvedConfig, KvPlan]:
    """Decide the number of KV blocks; on a CUDA device the measured memory of the largest step is left free.

    Where the operator has left the tokens of a step to the device, and its memory does not hold such a step with a KV
    cache beside it, the next smaller step that fits is taken. Several ranks take none: one that is out of memory would
    leave the others waiting within the step.

    Args:
        draft_cache_bytes: What the KV cache of a model that guesses will take on a CPU, at this rank.

    Returns:
        The config, with the step that is taken, and the plan.

    Raises:
        ConfigError: See `plan_kv_cache`; or the largest step does not fit.
    """
    if device.type != "cuda":
        # ranks on one machine have counted the same memory, less what only one of them will take
        free_bytes = group.minimum(free_memory(device) - draft_cache_bytes) // config.rank.ranks_on_host
        return config, _agree_on_blocks(config, plan_kv_cache(config, free_bytes), group)
    plan_kv_cache(
        config, group.minimum(free_memory(device))
    )  # what does not fit without a step fits with none
    while True:
        try:
            kv = _plan_beside_step(config, group, model, attention, device)
        except ConfigError as error:
            smaller = _with_smaller_step(config)
            if smaller is None:
                raise
            why = error.message
        else:
            break
        # out of the handler, so that what the step had allocated is free again
        config = smaller
        log.warning(
            "%s; it was not set, so that %d is tried", why, config.engine.scheduler.max_num_batched_tokens
        )
    log.info(
        "%d KV blocks of %d tokens, %d MiB; %d MiB are left for the longest step",
        kv.shape.num_blocks,
        kv.shape.block_size,
        kv.shape.num_blocks * kv.shape.block_bytes >> 20,
        kv.activation_bytes >> 20,
    )
    return config, kv


def _plan_beside_step(
    config: ResolvedConfig,
    group: RankGroup,
    model: CausalLM,
    attention: AttentionBackend,
    device: torch.device,
) -> KvPlan:
    """Run the largest steps, and plan the KV cache beside them. The rank that can hold the fewest blocks decides.

    Raises:
        ConfigError: They do not fit.
    """
    engine, scheduler = config.engine, config.engine.scheduler
    free_bytes = group.minimum(free_memory(device))
    unmeasured = plan_kv_cache(config, free_bytes)
    try:
        steps = LargestSteps(
            model,
            unmeasured,
            device,
            attention=attention,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            max_num_rows=max_sampling_places(scheduler.max_num_seqs, config.max_samples_per_row),
            max_model_len=unmeasured.max_model_len,
            rank=config.rank,
            hidden_size=config.architecture.hidden_size,
            verifies_guesses=config.max_samples_per_row > 1,
        )
        max_graph_tokens = 0 if engine.worker.enforce_eager else graph_token_limit(config.architecture)
        activation_bytes = measure_activations(steps, device, max_graph_tokens=max_graph_tokens)
        del steps  # its block is memory for the KV cache
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"scheduler.max_num_batched_tokens: {scheduler.max_num_batched_tokens} tokens of "
            f"{scheduler.max_num_seqs} requests do not fit into the {free_bytes >> 20} MiB free after loading "
            f"({error}); lower it or scheduler.max_num_seqs"
        ) from None
    # measured again: kernels and workspaces that the steps have loaded stay in memory
    free_bytes, activation_bytes = group.minimum(free_memory(device)), -group.minimum(-activation_bytes)
    return _agree_on_blocks(
        config, plan_kv_cache(config, free_bytes, activation_bytes=activation_bytes), group
    )


def _with_smaller_step(config: ResolvedConfig) -> ResolvedConfig | None:
    """Return the config with the next smaller step; None if the operator has set it, or there is none."""
    if not config.has_step_by_device or config.rank.num_ranks > 1:
        return None
    max_model_len = config.engine.model.max_model_len or config.architecture.max_context
    scheduler = next_smaller_step(config.engine.scheduler, max_model_len)
    return None if scheduler is None else replace(config, engine=replace(config.engine, scheduler=scheduler))


def _agree_on_blocks(config: ResolvedConfig, plan: KvPlan, group: RankGroup) -> KvPlan:
    """Return the plan with as many blocks and pages of states as every rank can hold.

    Stages may have more layers than others, and none of a kind: they can hold as many of its blocks as requests need.
    """
    shape, soft = plan.shape, plan.shape.soft_num_blocks
    shape = replace(
        shape,
        num_blocks=group.minimum(shape.num_blocks),
        soft_num_blocks=None if soft is None else group.minimum(soft),
        num_state_blocks=group.minimum(shape.num_state_blocks),
    )
    longest = most_tokens(shape, step_tokens(config))
    return replace(plan, shape=shape, max_model_len=min(plan.max_model_len, longest))
