"""Creation of a runner that is ready for step 1, from a resolved config and a model directory."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from triptych import host
from triptych.errors import ConfigError, FeatureDisabled, ModelError
from triptych.types.facts import Phase, WorkerFacts
from triptych.types.identity import Likeness, ModelIdentity, compare
from triptych_kernels.cpu.library import amx_refusal, isa, isa_and_build
from triptych_kernels.cpu.machine import rates
from triptych_services.worker.adapters.store import AdapterLimits, AdapterStore
from triptych_services.worker.attention.create import create_attention
from triptych_services.worker.context.attention_choice import NATIVE_DTYPES
from triptych_services.worker.context.device import (
    device_name,
    leave_cores_to_kernels,
    missing_kernels,
    use_device,
    use_threads,
)
from triptych_services.worker.context.group_place import GroupPlace
from triptych_services.worker.context.machine import describe_rates
from triptych_services.worker.context.rank_group import RankGroup
from triptych_services.worker.context.resolved_config import ResolvedConfig
from triptych_services.worker.layers.attention import check_layers
from triptych_services.worker.layers.quantization import describe_quantization
from triptych_services.worker.layers.weights import linear_weights, weight_bytes
from triptych_services.worker.loader.base import Checkpoint, digest_weights, fingerprint
from triptych_services.worker.loader.load import DuringLoad, load_model, open_checkpoint
from triptych_services.worker.models.base import CausalLM, EncoderModel
from triptych_services.worker.parallel.create import check_agreement, create_rank_group
from triptych_services.worker.runner.base import PhaseChange
from triptych_services.worker.runner.cuda.streams import CudaStream
from triptych_services.worker.runner.drafting.create import proposers_of
from triptych_services.worker.runner.encoder_runner import EncoderRunner
from triptych_services.worker.runner.graph_sizes import graph_token_limit
from triptych_services.worker.runner.model_runner import LastingParts, ModelRunner
from triptych_services.worker.runner.pipeline_stage import create_stage
from triptych_services.worker.runner.sleepable_runner import MemoryNeeds, SleepableRunner
from triptych_services.worker.runner.startup.encoder import (
    create_encoder_runner,
    plan_encoder,
    warm_up_encoder,
)
from triptych_services.worker.runner.startup.facts import served_tasks, worker_facts
from triptych_services.worker.runner.startup.guessing import GuessSources
from triptych_services.worker.runner.startup.kv_cache import allocate_kv_cache, view_kv_cache
from triptych_services.worker.runner.startup.kv_groups import choose_groups, guess_bytes
from triptych_services.worker.runner.startup.kv_plan import KvPlan, report_groups
from triptych_services.worker.runner.startup.memory_plan import plan_memory
from triptych_services.worker.runner.startup.pooler import create_pooler
from triptych_services.worker.runner.startup.warm_up import warm_up
from triptych_services.worker.runner.stored.runner import HeldState, Resume
from triptych_services.worker.sampling.grammars import GrammarCompiler

log = logging.getLogger(__name__)

GRAMMARS_AFTER_S = 10.0  # the first tokens of a worker that has just started are more urgent


def create_runner(
    config: ResolvedConfig,
    directory: Path,
    *,
    boot_id: str,
    on_phase: PhaseChange,
    place: GroupPlace | None = None,
    draft_directory: Path | None = None,
) -> SleepableRunner:
    """Load the model, size and allocate its KV cache, and warm up. Called on the thread that will compute.

    Each of several ranks creates its own runner. The ranks wait for each other here, and execute the same plans.

    Args:
        directory: Directory of the checkpoint, from `triptych.hub`.
        boot_id: A uuid drawn at process start.
        on_phase: Called while the runner starts, and again whenever it wakes.
        place: What several ranks know of each other if they have met before.
        draft_directory: The same of `speculative.model`; None: there is none, or this rank does not guess.

    Raises:
        ModelError: A file is missing, cut short or not understood.
        ConfigError: The KV cache or the slots of adapters do not fit into the free memory.
        FeatureDisabled: The architecture, the attention backend or what is to guess tokens does not serve here.
        RankUnavailable, HandshakeMismatch: Another rank is missing, or has another model or config.
    """
    engine, device = config.engine, torch.device(config.rank.device)
    proposers_of(engine.speculative)  # a wrong name is refused before the model is loaded
    use_device(device)
    group = create_rank_group(config, place)
    num_threads = _use_threads(config)
    on_phase(Phase.LOADING, 0.0)
    started = time.perf_counter()
    guessing = GuessSources(config, directory, draft_directory)
    checkpoint, identity = _open(config, directory)
    log.info("weights: samples of their bytes have sha256 %s", identity.weights)
    processor = isa_and_build() if device.type == "cpu" else device_name(device)
    check_agreement(config, group, identity=identity, processor=processor)
    kept_types, during = list[str](), partial(_checked_and_compiled, config, group)
    model = _load(config, checkpoint, group, on_phase, during, kept_types)
    load_s = time.perf_counter() - started
    assert isinstance(model, nn.Module), "the contract of CausalLM"
    on_phase(Phase.ALLOCATING, 0.0)
    config, kv, adapters = _plan(config, group, model, guessing)
    facts = worker_facts(
        config,
        kv,
        boot_id=boot_id,
        fingerprint=identity.fingerprint,
        weights=identity.weights,
        device_name=device_name(device),
        processor=processor or f"torch on {device_name(device)}",
        num_threads=num_threads if device.type == "cpu" and not config.batch_invariant else 0,
        weight_bytes=weight_bytes(model),
        quantization=describe_quantization(linear_weights(model), config, kept_types),
        load_s=load_s,
        served=served_tasks(config.architecture, directory),
    )
    factory = RunnerFactory(config, directory, facts, group, on_phase, adapters, guessing=guessing)
    return factory.sleepable(model, activation_bytes=kv.activation_bytes)


def _plan(
    config: ResolvedConfig, group: RankGroup, model: CausalLM, guessing: GuessSources
) -> tuple[ResolvedConfig, KvPlan, AdapterStore | None]:
    """Load what guesses, allocate the slots of adapters, and plan the KV cache beside both, see `plan_memory`.

    Returns:
        The config with the step that is taken, the sizes of the KV cache, and the adapters; None: none are served.

    Raises:
        ConfigError: The device's memory does not hold the slots; or as of `plan_memory`.
    """
    adapters = _create_adapters(config)
    if config.architecture.encoder is not None:
        return *plan_encoder(config), adapters
    guessing.load()
    if adapters is not None:
        assert isinstance(model, nn.Module), "the contract of CausalLM"
        try:
            adapters.attach(model)
        except torch.OutOfMemoryError as error:
            limits = adapters.limits
            raise ConfigError(
                f"worker.max_adapters: {limits.max_adapters} slots of worker.max_adapter_rank {limits.max_rank} do not "
                f"fit into the device's memory beside the weights ({error}); lower one of both"
            ) from None
    device = torch.device(config.rank.device)
    config, kv = plan_memory(config, group, model, create_attention(config), device, guessing.cache_bytes)
    report_groups(config, kv.shape)
    return config, kv, adapters


def load_to_resume(
    config: ResolvedConfig, directory: Path, facts: WorkerFacts, on_phase: PhaseChange
) -> Resume:
    """Load the model of a stored program, on any thread; others may compute meanwhile.

    Args:
        facts: Those of the runner that computes until the model is there.
        on_phase: Called whenever the next runner wakes.

    Returns:
        What creates that runner, which goes on in the rows and the KV cache of the first.

    Raises:
        ModelError: The checkpoint's files hold another model.
    """
    group = create_rank_group(config, None)
    model = _load(config, open_same(config, directory, facts), group, lambda phase, progress: None)

    def resume(held: HeldState) -> SleepableRunner:
        use_threads(config.engine.worker.num_threads)
        factory = RunnerFactory(config, directory, facts, group, on_phase, held.adapters, held)
        return factory.sleepable(model, activation_bytes=0)

    return resume


def open_same(config: ResolvedConfig, directory: Path, facts: WorkerFacts) -> Checkpoint:
    """Open the checkpoint of a worker again.

    Raises:
        ModelError: Its files hold another model by now.
    """
    checkpoint, found = _open(config, directory)
    known = facts.model.identity
    if (known.fingerprint, known.weights) != (found.fingerprint, found.weights):
        raise ModelError(f"{directory} holds another model than this worker; start the worker again")
    return checkpoint


class RunnerFactory:
    """Loads a model again and creates its runner, as often as a worker wakes. The `SleepableRunner` owns it."""

    def __init__(
        self,
        config: ResolvedConfig,
        directory: Path,
        facts: WorkerFacts,
        group: RankGroup,
        on_phase: PhaseChange,
        adapters: AdapterStore | None,
        held: HeldState | None = None,
        guessing: GuessSources | None = None,
    ) -> None:
        """
        Args:
            facts: Those of the worker with the weights that are loaded first.
            adapters: Those of all its models; None: none are served.
            held: State of a runner that the first one goes on for; None: there is none.
            guessing: What guesses and is loaded; None: nothing is.
        """
        self._config = config
        self._directory = directory
        self._facts = facts
        self._group = group
        self._on_phase = on_phase
        self._held = held
        self._adapters = adapters
        self._guessing = guessing
        self._device = torch.device(config.rank.device)
        self._grammars = GrammarCompiler(
            directory, vocab_size=facts.model.vocab_size, eos_token_ids=facts.model.eos_token_ids
        )
        if config.architecture.encoder is None:
            self._grammars.prepare_after(GRAMMARS_AFTER_S)

    def load(self) -> CausalLM:
        """Load the model again, with new weights if the files hold some.

        Raises:
            ModelError: The files hold another model.
        """
        checkpoint, found = _open(self._config, self._directory)
        identity = self._facts.model.identity
        if (comparison := compare(identity, found)).likeness < Likeness.FORM:
            raise ModelError(
                f"{self._directory} holds another model now ({comparison.difference}); put the weights back, or start "
                "the worker again"
            )
        identity = replace(identity, weights=found.weights)
        self._facts = replace(self._facts, model=replace(self._facts.model, identity=identity))
        return _load(self._config, checkpoint, self._group, self._on_phase)

    def create(self, model: CausalLM) -> ModelRunner | EncoderRunner:
        """Create the runner of a loaded model, with all its memory."""
        runner: ModelRunner | EncoderRunner
        if self._config.architecture.encoder is not None:
            encoder = cast(EncoderModel, model)
            runner = create_encoder_runner(self._config, self._directory, self._facts, encoder)
        else:
            runner = self._create_for_decoder(model)
        if not runner.computes_with_torch:
            leave_cores_to_kernels()
        return runner

    def _create_for_decoder(self, model: CausalLM) -> ModelRunner:
        config, stages = self._config, self._group.stages
        stage = None if stages is None else create_stage(config, stages)
        held, shape, places = self._held, self._facts.kv, choose_groups(config).places
        num_guesses = self._facts.max_samples_per_row - 1
        if self._guessing is None:
            proposers = proposers_of(config.engine.speculative)
        else:
            proposers = self._guessing.proposers_for(model)
        runner = ModelRunner(
            model=model,
            kv_caches=allocate_kv_cache(shape, self._device, places, num_guesses=num_guesses)
            if held is None
            else view_kv_cache(
                shape, held.kv_memory, places, guess_memory=held.guess_memory, num_guesses=num_guesses
            ),
            facts=self._facts,
            attention=create_attention(config),
            enforce_eager=config.engine.worker.enforce_eager,
            stream=CudaStream(self._device) if self._device.type == "cuda" and stage is None else None,
            group=self._group,
            stage=stage,
            max_graph_tokens=graph_token_limit(config.architecture),
            lasting=LastingParts(self._grammars, self._adapters, proposers),
        )
        pooler = create_pooler(config.architecture, self._directory, model)
        if pooler is not None:
            runner.pool_with(pooler)
        if held is not None:
            runner.go_on_for(held)
        return runner

    def sleepable(self, model: CausalLM, *, activation_bytes: int) -> SleepableRunner:
        """Create a runner that can give back the model's memory and load the model again.

        Args:
            model: The loaded model.
            activation_bytes: Bytes that a step takes besides weights and KV cache.
        """
        kv = self._facts.kv
        num_bytes = kv.num_blocks * kv.block_bytes + kv.num_state_blocks * kv.page_bytes
        if kv.page_bytes:
            places = choose_groups(self._config).places
            num_bytes += guess_bytes(places, self._facts.max_samples_per_row - 1)
        return SleepableRunner(
            model,
            device=self._device,
            needs=MemoryNeeds(
                self._facts.weight_bytes,
                num_bytes,
                activation_bytes,
                0 if self._guessing is None else self._guessing.num_bytes,
            ),
            load=self.load,
            create=self.create,
            warm_up=self.warm_up,
            group=self._group,
            adapters=self._adapters,
        )

    def warm_up(self, runner: ModelRunner | EncoderRunner) -> None:
        """Prepare a runner for step 1, which all ranks do together.

        One that goes on with rows computes their next step.
        """
        if self._held is not None:
            self._held = None
            return
        self._on_phase(Phase.WARMING, 0.0)
        started = time.perf_counter()
        if isinstance(runner, EncoderRunner):
            warm_up_encoder(runner)
        else:
            if self._config.engine.worker.graph_capture == "startup":
                runner.capture_graphs(lambda progress: self._on_phase(Phase.WARMING, progress))
            warm_up(runner)
        log.info("warmed up in %.1f s", time.perf_counter() - started)


def _create_adapters(config: ResolvedConfig) -> AdapterStore | None:
    """Create the store of adapters, which outlives the runners; None: none are served.

    Raises:
        FeatureDisabled: The model is an encoder.
    """
    worker = config.engine.worker
    if not worker.max_adapters:
        return None
    if config.architecture.encoder is not None:
        raise FeatureDisabled(
            "worker.max_adapters", f"{config.architecture.name} applies no adapters; set it to 0"
        )
    limits = AdapterLimits(worker.max_adapters, worker.max_adapter_rank, int(worker.adapter_gib * 2**30))
    return AdapterStore(config.architecture, limits)


def create_stored_adapters(
    config: ResolvedConfig, record: Mapping[str, Any], addresses: Sequence[NDArray[np.int64]]
) -> AdapterStore:
    """Create the store of the adapters of a stored program, on the thread that loads them.

    Args:
        record, addresses: As of `ModelSites.of_record`.
    """
    adapters = _create_adapters(config)
    assert adapters is not None, "worker.max_adapters is part of a program's key"
    adapters.attach_stored(record, addresses)
    leave_cores_to_kernels()
    return adapters


def _open(config: ResolvedConfig, directory: Path) -> tuple[Checkpoint, ModelIdentity]:
    """Open the checkpoint, and return its identity, without numerics."""
    engine, device = config.engine, torch.device(config.rank.device)
    checkpoint = open_checkpoint(
        directory,
        format=engine.load.format,
        seed=engine.model.seed,
        device=device,
        architecture=config.architecture,
    )
    form = fingerprint(
        checkpoint,
        config.architecture,
        dtype=config.dtype,
        weight_dtype=config.weight_dtype,
        quantization=config.quantization,
        activation_bits=config.activation_bits,
        kv_dtype=config.kv_dtype,
    )
    return checkpoint, ModelIdentity(form, digest_weights(checkpoint))


def _load(
    config: ResolvedConfig,
    checkpoint: Checkpoint,
    group: RankGroup,
    on_phase: PhaseChange,
    during: DuringLoad = nullcontext,
    kept_types: list[str] | None = None,
) -> CausalLM:
    return load_model(
        config,
        checkpoint,
        group=group,
        progress=lambda done, total: on_phase(Phase.LOADING, done / total),
        during=during,
        kept_types=kept_types,
    )


def _checked_and_compiled(
    config: ResolvedConfig, group: RankGroup, model: CausalLM
) -> AbstractContextManager[None]:
    """Check the model before its weights are read; on a CUDA device, compile its kernels while they are.

    Raises:
        FeatureDisabled: The attention backend does not compute the attention of a layer.
    """
    assert isinstance(model, nn.Module), "the contract of CausalLM"
    if config.architecture.encoder is not None:  # its attention has no cache, and no backend
        return nullcontext()
    check_layers(model, create_attention(config))
    if not config.rank.device.startswith("cuda"):
        return nullcontext()
    from triptych_services.worker.runner.startup.compile_ahead import (
        compiled_ahead,  # imports triton: not for CPUs
    )

    return compiled_ahead(config, group, model)


def _use_threads(config: ResolvedConfig) -> int:
    """Give the model its threads, and return how many; log how CPUs compute."""
    num_threads = use_threads(config.engine.worker.num_threads, num_sharing=config.rank.ranks_on_host)
    if config.rank.device == "cpu":
        _report_processor(config, num_threads)
    return num_threads


def _report_processor(config: ResolvedConfig, num_threads: int) -> None:
    """Log how this machine's CPUs compute, and what would make them faster."""
    report_host(num_threads, host.numa_nodes(), host.huge_pages())
    if isa():
        log.info("%s; activations in %s", describe_rates(rates()), config.dtype)
    warn_of_missing_kernels(missing_kernels(), config.dtype)
    report_rounding(config)


def report_host(num_threads: int, numa_nodes: int, huge_pages: str) -> None:
    log.info("computing with %d threads on %s", num_threads, host.cpu_name())
    if numa_nodes > 1:
        log.warning(
            "threads on %d memory nodes share one copy of the weights, which half of them or more read remotely; "
            "start one worker per node under `numactl --cpunodebind=N --membind=N`",
            numa_nodes,
        )
    if huge_pages == "never":
        log.warning(
            "huge pages: the system grants none (never), which costs about a tenth of a step; "
            "`echo madvise > /sys/kernel/mm/transparent_hugepage/enabled` as root grants them"
        )


def warn_of_missing_kernels(missing: str, dtype: str) -> None:
    """Warn if native kernels are not in use.

    Args:
        missing: As of `missing_kernels`.
        dtype: Precision of activations.
    """
    if missing:
        log.warning(
            "native kernels: %s; plain torch computes in %s, several times slower, without quantization, "
            "cache.dtype = int8 and batch invariance",
            missing,
            dtype,
        )
    elif dtype not in NATIVE_DTYPES:
        log.warning(
            "native kernels: they take %s, not model.dtype = %s; plain torch computes, several times slower; set "
            "model.dtype to auto",
            " and ".join(NATIVE_DTYPES),
            dtype,
        )
    elif amx_refusal():
        log.warning(
            "native kernels: the processor has AMX, but the system keeps it from this process (%s); %s serves",
            amx_refusal(),
            isa(),
        )


def report_rounding(config: ResolvedConfig) -> None:
    """Log the precision that a checkpoint in float16 is converted to, since CPUs do not compute in float16."""
    if config.architecture.is_gguf or config.architecture.dtype != "float16" or config.dtype == "float16":
        return
    if config.dtype == "bfloat16":
        log.info(
            "model.dtype: the checkpoint's float16 is rounded to bfloat16, 8 of 11 significant bits; float32 keeps all"
        )
    else:
        log.info("model.dtype: the checkpoint's float16 is computed in float32, which is exact")
