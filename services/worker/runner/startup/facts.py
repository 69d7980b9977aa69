"""The facts that a runner reports to the engine, the same for real and simulated runners. Needs no torch."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path, PurePosixPath

from triptych.checkpoint.architecture import TRANSFORMERS_ENCODER, TRANSFORMERS_MODEL, ModelArchitecture
from triptych.checkpoint.config_json import CONFIG_FILE
from triptych.checkpoint.pooling import PoolingSpec, read_pooling
from triptych.errors import FeatureDisabled, ModelError
from triptych.types.facts import ModelFacts, WorkerFacts
from triptych.types.identity import ModelIdentity
from triptych.types.pooling import GENERATION, PoolingKind, Task
from triptych_services.worker.context.resolved_config import ResolvedConfig, max_steps_in_flight
from triptych_services.worker.runner.startup.kv_plan import KvPlan

log = logging.getLogger(__name__)

_PACKAGES = ("triptych", "torch", "triton", "llguidance")
_PACKAGES_OF_ATTENTION = ("flash-attn", "flash-attn-3", "flashinfer-python")


@dataclass(frozen=True, slots=True)
class ServedTasks:
    """The tasks of a model, and the sizes of what they report."""

    tasks: tuple[str, ...]
    """As of `ModelFacts`, like the others."""
    embedding_size: int = 0
    num_labels: int = 0
    pooling: PoolingSpec | None = None
    """The way to its vectors; None: it makes none."""
    last_state_tasks: tuple[str, ...] = ()


_HEAD_TO_TASKS = {
    "logits": (Task.GENERATE, Task.EMBED, Task.TOKEN_EMBED),
    "score": (Task.CLASSIFY, Task.EMBED, Task.TOKEN_EMBED),
    "none": (Task.EMBED, Task.TOKEN_EMBED),
}


def served_tasks(architecture: ModelArchitecture, directory: Path) -> ServedTasks:
    """Return the tasks of a model, from its head and from what its directory says of vectors.

    One that generates does so even if its vectors need what is not built.

    Raises:
        FeatureDisabled: Its vectors need what is not built, and it does nothing else.
        ModelError: A file is odd.
    """
    try:
        # sentence-transformers makes means of what it is told nothing of
        kind = PoolingKind.LAST if architecture.encoder is None else PoolingKind.MEAN
        pooling = read_pooling(directory, default_kind=kind)
    except FeatureDisabled as error:
        if architecture.head != "logits":
            raise
        log.warning("no vectors are served: %s", error)
        return ServedTasks((GENERATION,))
    dense = pooling.dense
    if dense and dense[0].in_features != architecture.hidden_size:
        raise ModelError(
            f"{directory / dense[0].directory / CONFIG_FILE}: in_features: {dense[0].in_features} must be the "
            f"model's hidden size, {architecture.hidden_size}"
        )
    return ServedTasks(
        tuple(task.label for task in _HEAD_TO_TASKS[architecture.head]),
        pooling.vector_size(architecture.hidden_size),
        architecture.num_labels,
        pooling,
        tuple(task.label for task in _last_state_tasks(architecture, pooling)),
    )


def _last_state_tasks(architecture: ModelArchitecture, pooling: PoolingSpec) -> Iterator[Task]:
    """Yield the tasks that read the state of the last token alone: a decoder's classifier always does."""
    if architecture.encoder is not None:
        return
    if pooling.kind is PoolingKind.LAST and not pooling.own_pooler:
        yield Task.EMBED
    if architecture.head == "score":
        yield Task.CLASSIFY


def worker_facts(
    config: ResolvedConfig,
    kv: KvPlan,
    *,
    boot_id: str,
    fingerprint: str,
    weights: str,
    device_name: str,
    weight_bytes: int,
    load_s: float,
    kernels: str = "",
    quantization: str = "",
    max_samples_per_row: int = 0,
    num_stages: int = 0,
    processor: str = "",
    num_threads: int = 0,
    is_batch_invariant: bool | None = None,
    served: ServedTasks | None = None,
) -> WorkerFacts:
    """Return a worker's facts; arguments as the fields of `WorkerFacts`, `ModelFacts` and `ModelIdentity`.

    Args:
        quantization: Form of linear weights, for people; empty: as the config has it.
        served: Its tasks; None: generation only.
        max_samples_per_row: 0: as the config has it.
        num_stages: 0: as many as the ranks are divided into.
        processor, num_threads: As `numerics_of`.
        is_batch_invariant: None: as the config has it.
    """
    engine = config.engine
    identity = ModelIdentity(
        fingerprint=fingerprint,
        weights=weights,
        numerics=numerics_of(
            config, processor=processor, block_size=kv.shape.block_size, num_threads=num_threads
        ),
        is_batch_invariant=config.batch_invariant if is_batch_invariant is None else is_batch_invariant,
    )
    return WorkerFacts(
        boot_id=boot_id,
        model=_model_facts(
            config,
            identity,
            kv.max_model_len,
            served or ServedTasks((GENERATION,)),
            quantization or config.quantization,
        ),
        kv=kv.shape,
        max_num_seqs=engine.scheduler.max_num_seqs,
        max_num_batched_tokens=engine.scheduler.max_num_batched_tokens,
        max_steps_in_flight=max_steps_in_flight(num_stages or config.rank.num_stages),
        num_stages=num_stages or config.rank.num_stages,
        max_samples_per_row=max_samples_per_row or config.max_samples_per_row,
        device_name=device_name,
        kernels=kernels,
        weight_bytes=weight_bytes,
        load_s=load_s,
        max_adapters=engine.worker.max_adapters,
        max_adapter_rank=engine.worker.max_adapter_rank if engine.worker.max_adapters else 0,
    )


def _model_facts(
    config: ResolvedConfig,
    identity: ModelIdentity,
    max_model_len: int,
    served: ServedTasks,
    quantization: str,
) -> ModelFacts:
    engine, architecture = config.engine, config.architecture
    if config.no_guesses and architecture.head == "logits":
        log.info("speculative.enabled = auto is false: %s", config.no_guesses)
    return ModelFacts(
        name=engine.model.served_name or PurePosixPath(engine.model.model).name,
        identity=identity,
        vocab_size=architecture.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=architecture.eos_token_ids,
        dtype=config.dtype,
        kv_dtype=config.kv_dtype,
        quantization=quantization,
        tasks=served.tasks,
        embedding_size=served.embedding_size,
        num_labels=served.num_labels,
        is_encoder=architecture.encoder is not None,
        last_state_tasks=served.last_state_tasks,
    )


def numerics_of(config: ResolvedConfig, *, processor: str, block_size: int, num_threads: int = 0) -> str:
    """Return it as a JSON object. Workers of one checkpoint with equal ones give equal bits for equal steps.

    It covers the processor, the attention backend, the precision of activations, weights and KV cache, the ranks and
    what they share, the size of blocks, batch invariance, and the versions of the libraries that compute or mask
    logits.

    Args:
        processor: Name of what the kernels run on: an instruction set with the build of its kernels, a GPU, or
            `simulated`.
        num_threads: Threads by which sums are cut. 0: they are not.
    """
    parallel = config.engine.parallel
    deciding: Mapping[str, object] = {
        "processor": processor,
        "num_threads": num_threads,
        "attention_backend": config.attention_backend,
        "dtype": config.dtype,
        "weight_dtype": config.weight_dtype,
        "kv_dtype": config.kv_dtype,
        "quantization": config.quantization,
        "activation_bits": config.activation_bits,
        "batch_invariant": config.batch_invariant,
        "tensor_parallel_size": parallel.tensor_parallel_size,
        "pipeline_parallel_size": parallel.pipeline_parallel_size,
        "expert_parallel": parallel.expert_parallel,
        "block_size": block_size,
        **({} if config.expert_placement is None else {"expert_counts": config.expert_placement.digest}),
        **{name: _version(name) for name in _packages(config)},
    }
    return json.dumps(deciding, sort_keys=True)


def _packages(config: ResolvedConfig) -> tuple[str, ...]:
    is_transformers = config.architecture.name in (TRANSFORMERS_MODEL, TRANSFORMERS_ENCODER)
    return (*_PACKAGES, *_PACKAGES_OF_ATTENTION, *(("transformers",) if is_transformers else ()))


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
