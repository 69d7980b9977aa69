"""From a resolved config and a model directory to a runner that is ready for step 1."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn

from services.worker import host
from services.worker.attention.base import AttentionBackend
from services.worker.attention.paged import PagedAttention
from services.worker.device import device_name, free_memory, use_device, use_threads
from services.worker.layers.weights import weight_bytes
from services.worker.loader import fingerprint, load_model, open_checkpoint
from services.worker.models.base import CausalLM
from services.worker.runner.activation_memory import measure_activations
from services.worker.runner.base import Runner
from services.worker.runner.device_link import CudaLink
from services.worker.runner.facts import worker_facts
from services.worker.runner.kv_cache import allocate_kv_cache
from services.worker.runner.kv_plan import KvPlan, plan_kv_cache
from services.worker.runner.model_runner import ModelRunner
from triptych.config.resolved import ResolvedConfig
from triptych.errors import ConfigError
from triptych.types.facts import Phase
from triptych.types.sampling import SamplingParams
from triptych.types.step import NewRow, StepPlan
from triptych_kernels.cpu.library import amx_refusal, isa

log = logging.getLogger(__name__)

PhaseChange = Callable[[str, float], None]
"""(phase, progress within it, 0..1)"""

_WARM_UP_TOKENS = 16  # enough to take the path of a prefill, too few to wait for


def create_runner(
    config: ResolvedConfig, directory: Path, *, boot_id: str, on_phase: PhaseChange
) -> ModelRunner:
    """Load the model, size and reserve its KV cache, warm up. Called on the thread that will compute.

    Args:
        directory: where the checkpoint stands, from `triptych.hub`.
        boot_id: a uuid drawn at process start.
    Raises:
        ModelError: files that are missing, cut short or not understood.
        ConfigError: the KV cache does not fit into the memory left.
        FeatureDisabled: an architecture that no model is registered for.
    """
    engine, device = config.engine, torch.device(config.rank.device)
    use_device(device)
    num_threads = use_threads(engine.worker.num_threads)
    if device.type == "cpu":
        _tell_of_host(num_threads, host.numa_nodes(), host.huge_pages())
        _warn_of_missing_kernels()
    on_phase(Phase.LOADING, 0.0)
    started = time.perf_counter()
    checkpoint = open_checkpoint(directory, format=engine.load.format, seed=engine.model.seed, device=device)
    model = load_model(config, checkpoint, progress=lambda done, total: on_phase(Phase.LOADING, done / total))
    load_s = time.perf_counter() - started
    assert isinstance(model, nn.Module), "the contract of CausalLM"
    on_phase(Phase.ALLOCATING, 0.0)
    attention = PagedAttention()
    kv = _plan_kv_cache(config, model, attention, device)
    kv_caches = allocate_kv_cache(kv.shape, device)
    facts = worker_facts(
        config,
        kv,
        boot_id=boot_id,
        fingerprint=fingerprint(checkpoint, config.architecture, config.dtype, config.quantization),
        device_name=device_name(device),
        weight_bytes=weight_bytes(model),
        load_s=load_s,
    )
    runner = ModelRunner(
        model=model,
        kv_caches=kv_caches,
        facts=facts,
        attention=attention,
        enforce_eager=engine.worker.enforce_eager,
        link=CudaLink(device) if device.type == "cuda" else None,
    )
    on_phase(Phase.WARMING, 0.0)
    warm_up(runner)
    return runner


def _plan_kv_cache(
    config: ResolvedConfig, model: CausalLM, attention: AttentionBackend, device: torch.device
) -> KvPlan:
    """How many blocks there is room for; on a CUDA device beside what the longest step was measured to take.

    Raises:
        ConfigError: see `plan_kv_cache`; or not even that step fits.
    """
    if device.type != "cuda":
        return plan_kv_cache(config, free_memory(device))
    engine, scheduler = config.engine, config.engine.scheduler
    free_bytes = free_memory(device)
    alone = plan_kv_cache(config, free_bytes)
    try:
        activation_bytes = measure_activations(
            model,
            alone.shape,
            device,
            attention=attention,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            max_num_seqs=scheduler.max_num_seqs,
            max_model_len=alone.max_model_len,
            with_graphs=not engine.worker.enforce_eager,
        )
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"scheduler.max_num_batched_tokens: {scheduler.max_num_batched_tokens} tokens of "
            f"{scheduler.max_num_seqs} requests do not fit into the {free_bytes >> 20} MiB free after loading "
            f"({error}); lower it or scheduler.max_num_seqs"
        ) from None
    # asked again: what was loaded to run the step, kernels and workspaces, stays
    kv = plan_kv_cache(config, free_memory(device), activation_bytes=activation_bytes)
    log.info(
        "%d KV blocks of %d tokens, %d MiB; %d MiB are left for the longest step",
        kv.shape.num_blocks,
        kv.shape.block_size,
        kv.shape.num_blocks * kv.block_bytes >> 20,
        activation_bytes >> 20,
    )
    return kv


def warm_up(runner: Runner) -> None:
    """Run a small prefill and a decode, so that the first request does not pay for lazy set-up.

    They are ordinary steps of a session of their own and leave keys and values in the first blocks: for a
    runner whose blocks nobody counts on yet.
    """
    facts = runner.facts
    num_prompt = min(_WARM_UP_TOKENS, facts.max_num_batched_tokens, facts.model.max_model_len - 2)
    if num_prompt < 1:
        return  # a context of two tokens has no decode to warm up
    row = NewRow(
        slot=0,
        generation=0,
        token_ids=np.zeros(num_prompt, np.uint32),
        num_prompt_tokens=num_prompt,
        num_computed_tokens=0,
        num_cached_tokens=0,
        block_ids=np.arange(1, num_prompt // facts.kv.block_size + 2, dtype=np.uint32),
        sampling=SamplingParams(top_p=0.9, logprobs=1),
        seed=0,
    )
    runner.reset()
    runner.execute(
        StepPlan(
            step_id=1,
            last_result_seen=0,
            new_rows=(row,),
            chunk_slots=np.zeros(1, np.uint32),
            chunk_lengths=np.array([num_prompt], np.uint32),
        )
    )
    runner.execute(StepPlan(step_id=2, last_result_seen=1))
    runner.reset()


def _tell_of_host(num_threads: int, numa_nodes: int, huge_pages: str) -> None:
    log.info("computing with %d threads on %s", num_threads, host.cpu_name())
    if numa_nodes > 1:
        log.warning(
            "threads on %d memory nodes share one copy of the weights, and half of them or more read it from afar; "
            "start one worker per node under `numactl --cpunodebind=N --membind=N`",
            numa_nodes,
        )
    if huge_pages not in ("always", "madvise"):
        log.warning(
            "huge pages: the system grants none (%s), which costs about a tenth of a step; "
            "`echo madvise > /sys/kernel/mm/transparent_hugepage/enabled` as root grants them",
            huge_pages,
        )


def _warn_of_missing_kernels() -> None:
    if not isa():
        log.warning(
            "native kernels: none are built for this processor, plain torch serves, slower; "
            "`python -m triptych_kernels.cpu.build` builds them where there is g++"
        )
    elif amx_refusal():
        log.warning(
            "native kernels: the processor has AMX, but the system keeps it from this process (%s); %s serves",
            amx_refusal(),
            isa(),
        )
