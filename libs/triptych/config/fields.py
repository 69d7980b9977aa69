"""Every value that an operator may set, declared once: type, default, unit, range, meaning.

The loader derives the yaml key (`scheduler.max_num_seqs`), the environment variable
(`TRIPTYCH_SCHEDULER_MAX_NUM_SEQS`), the flag (`--scheduler.max-num-seqs`) and its help from here.
All leaves are frozen and have defaults, so `EngineConfig()` builds with no model on disk.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field
from typing import Any

FRONTEND, ENGINE, WORKER = ("frontend",), ("enginecore",), ("worker",)
"""The packages of `services` that read an option."""
ALL = FRONTEND + ENGINE + WORKER


@dataclass(frozen=True, slots=True)
class Limits:
    """The range of an option, its meaning and its readers, kept in the metadata of its dataclass field."""

    help: str
    read_by: tuple[str, ...]
    ge: float | None = None
    le: float | None = None
    gt: float | None = None
    choices: tuple[str, ...] = ()

    def describe(self) -> str:
        """The allowed range in words, empty where anything goes."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        parts = [
            f"{sign} {bound:.15g}"
            for sign, bound in ((">=", self.ge), (">", self.gt), ("<=", self.le))
            if bound is not None
        ]
        return " and ".join(parts)


def value(
    default: Any,
    help: str,
    read_by: tuple[str, ...],
    *,
    ge: float | None = None,
    le: float | None = None,
    gt: float | None = None,
    choices: tuple[str, ...] = (),
) -> Any:
    """Declare one option: its default, its meaning (with the unit), its readers and its range."""
    metadata = {"limits": Limits(help, read_by, ge=ge, le=le, gt=gt, choices=choices)}
    if default is MISSING:
        raise ValueError("every option has a default")
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model, and in what precision."""

    model: str = value("embedded", "Path of a model directory or .gguf file, a hub id, or `embedded`.", ALL)
    served_name: str = value("", "Name that clients use; empty: the last part of `model.model`.", WORKER)
    dtype: str = value(
        "auto",
        "Precision of weights and activations; auto: the checkpoint's, float32 where the CPU "
        "has no native bfloat16. On a CPU a checkpoint in float16 counts as one in bfloat16.",
        ENGINE + WORKER,
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    quantization: str = value(
        "none",
        "Quantization of linear layers. none: weights in `model.dtype`. q4, q8: of weights only; blocks of 4 "
        "and 8 bits that a GGUF file holds are kept, everything else is quantized in groups of 32, the output "
        "head to 8 bits. int8, fp8: of weights and their inputs, with a scale per output and per token, the "
        "output head as with q8; on CUDA devices only, fp8 from compute capability 8.9 on. auto: q4 where the "
        "native kernels for CPUs serve it, else none.",
        ENGINE + WORKER,
        choices=("none", "q4", "q8", "int8", "fp8", "auto"),
    )
    batch_invariant: str = value(
        "auto",
        "true: a request's numbers do not depend on the batch that it runs in. false: quantized products of "
        "many rows, as in a prefill, may be computed in `model.dtype` where that is faster. auto: true where that "
        "costs nothing; false with `model.quantization = auto`, with q4 and q8 on CUDA devices, whose prefill it "
        "would slow down, and where sums follow the batch: with weights that are not quantized on CUDA devices, "
        "without native kernels on a CPU, and with torch, flash-attn or flashinfer as `worker.attention_backend`.",
        WORKER,
        choices=("auto", "true", "false"),
    )
    max_model_len: int = value(
        0,
        "Tokens of prompt and output together; 0: the model's own limit. Never above what the KV blocks "
        "can hold.",
        ENGINE + WORKER,
        ge=0,
    )
    seed: int = value(0, "Seeds random weights (`load.format = random`) and nothing else.", WORKER, ge=0)


@dataclass(frozen=True, slots=True)
class LoadConfig:
    """How weights come in."""

    format: str = value(
        "auto",
        "auto: by the files found; random: weights drawn from `model.seed`, for tests and benchmarks.",
        WORKER,
        choices=("auto", "safetensors", "gguf", "random"),
    )


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The paged KV cache."""

    block_size: int = value(16, "Tokens per KV block.", ENGINE + WORKER, ge=1, le=256)
    dtype: str = value(
        "auto",
        "Precision of keys and values; auto: `model.dtype`. int8 rounds each key and each value to 8 bits with a scale "
        "of its own, so that almost twice the tokens of bfloat16 fit. float8_e4m3fn does the same with 8-bit "
        "floats, which are coarser and converted by the device itself: on CUDA devices only, from compute capability "
        "8.9 on.",
        ENGINE + WORKER,
        choices=("auto", "float32", "bfloat16", "float16", "int8", "float8_e4m3fn"),
    )
    num_blocks: int = value(
        0, "KV blocks, the null block included; 0: sized from the memory left after loading.", WORKER, ge=0
    )
    memory_fraction: float = value(
        0.0,
        "Share of the memory free after loading that KV blocks may take; on a CUDA device together with what the "
        "longest step takes, which is measured. 0: 0.9 there, 0.5 on a CPU, which others use as well.",
        WORKER,
        ge=0,
        le=0.98,
    )
    enable_prefix_caching: bool = value(True, "Reuse the KV blocks of equal prefixes.", ENGINE)


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits and policy of a step: which requests run, and how many tokens of each."""

    max_num_seqs: int = value(
        64, "Requests that run at once (rows in the worker).", ENGINE + WORKER, ge=1, le=65536
    )
    max_num_batched_tokens: int = value(
        2048, "Token budget of one step, at least max_num_seqs.", ENGINE + WORKER, ge=1, le=1 << 18
    )
    max_num_waiting: int = value(
        1024,
        "Requests that may wait. When the queue is full, one more is refused with a retry time, or the last one of the "
        "tenant with the most waiting requests loses its latest.",
        ENGINE,
        ge=0,
    )
    max_waiting_bytes: int = value(
        1 << 29,
        "Bytes of prompts and sampling parameters that running and waiting requests may hold together; more is refused "
        "with a retry time.",
        ENGINE,
        ge=1 << 26,
    )
    policy: str = value(
        "priority",
        "fcfs: first come, first served, and a priority other than 0 is refused; "
        "priority: lower first. Among equals the tenant served least comes first, then the first to come.",
        ENGINE,
        choices=("fcfs", "priority"),
    )
    enable_chunked_prefill: bool = value(
        True, "Split long prompts over steps; off demands max_num_batched_tokens >= max_model_len.", ENGINE
    )
    long_prefill_token_threshold: int = value(
        0,
        "Most tokens of one request in one step; 0: only the budget limits it. In either case a prompt that wants "
        "more than a quarter of a step leaves a quarter of what is there to requests that wait.",
        ENGINE,
        ge=0,
    )
    max_long_partial_prefills: int = value(
        0,
        "Prompts longer than long_prefill_token_threshold that may be partly computed at once, while shorter ones "
        "pass those that wait; 0: any number.",
        ENGINE,
        ge=0,
    )
    steps_in_flight: int = value(
        0,
        "Steps in flight towards the worker; 1 turns overlap off; 0: as many as the measured round trip and step "
        "time need, 2 to 4.",
        ENGINE,
        ge=0,
        le=4,
    )


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """How one model is spread over processes."""

    tensor_parallel_size: int = value(1, "Workers that share each layer.", WORKER, ge=1)
    pipeline_parallel_size: int = value(1, "Groups of layers, one after the other.", WORKER, ge=1)
    rank: int = value(0, "This worker's number in its group.", WORKER, ge=0)
    local_rank: int = value(0, "This worker's accelerator on its machine.", WORKER, ge=0)
    rendezvous_address: str = value(
        "127.0.0.1:29500",
        "Where rank 0 of the group listens and the other ranks meet it, host:port; not asked of a single rank.",
        WORKER,
    )
    timeout_s: float = value(
        600.0,
        "Seconds that ranks wait for each other: at the rendezvous, while one of them still loads, and in an "
        "operation that all take part in.",
        WORKER,
        gt=0,
    )


@dataclass(frozen=True, slots=True)
class FrontendConfig:
    """The tokenizing gateway: public gRPC and HTTP."""

    host: str = value("127.0.0.1", "Address to bind; 0.0.0.0 for all.", FRONTEND)
    port: int = value(50051, "gRPC port; 0: any free one, written to --ready-file.", FRONTEND, ge=0, le=65535)
    http_port: int = value(8000, "OpenAI-compatible HTTP port; 0: any free one.", FRONTEND, ge=0, le=65535)
    metrics_port: int = value(9101, "Prometheus /metrics port; 0: any free one.", FRONTEND, ge=0, le=65535)
    engine_addresses: str = value(
        "127.0.0.1:50052", "Engines to send requests to, host:port, comma-separated.", FRONTEND
    )
    drain_s: float = value(
        30.0, "Seconds that running requests may take to finish after SIGTERM.", FRONTEND, ge=0
    )
    client_timeout_s: float = value(
        60.0,
        "Seconds that a client may take to send an HTTP request, or read nothing of an answer that waits for it; then "
        "its connection or call ends and the request is aborted.",
        FRONTEND,
        gt=0,
    )
    max_connection_age_s: float = value(
        0.0,
        "Seconds after which a gRPC connection is asked to end, so that clients behind a load balancer spread again; "
        "running calls finish. 0: never.",
        FRONTEND,
        ge=0,
    )


@dataclass(frozen=True, slots=True)
class EngineCoreConfig:
    """The scheduler's process."""

    host: str = value("127.0.0.1", "Address to bind.", ENGINE)
    port: int = value(50052, "gRPC port; 0: any free one, written to --ready-file.", ENGINE, ge=0, le=65535)
    metrics_port: int = value(9102, "Prometheus /metrics port; 0: any free one.", ENGINE, ge=0, le=65535)
    engine_id: str = value("engine-0", "This engine's name towards workers and in logs.", ENGINE)
    worker_address: str = value("127.0.0.1:50053", "The worker group's leader, host:port.", ENGINE)
    resume_ttl_s: float = value(
        10.0,
        "Seconds for which a broken stream, to the worker or from a frontend, can be resumed with nothing lost. Of the "
        "step stream the worker's value counts; the engine learns it in the handshake.",
        ENGINE + WORKER,
        ge=0,
    )
    drain_s: float = value(
        30.0, "Seconds that running requests may take to finish after SIGTERM.", ENGINE, ge=0
    )


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """One accelerator's process."""

    host: str = value("127.0.0.1", "Address to bind.", WORKER)
    port: int = value(50053, "gRPC port; 0: any free one, written to --ready-file.", WORKER, ge=0, le=65535)
    metrics_port: int = value(9103, "Prometheus /metrics port; 0: any free one.", WORKER, ge=0, le=65535)
    device: str = value(
        "auto", "auto: cuda if there is one, else cpu.", WORKER, choices=("auto", "cpu", "cuda")
    )
    num_threads: int = value(
        0, "CPU threads for the model; 0: the physical cores this process may use.", WORKER, ge=0
    )
    attention_backend: str = value(
        "auto",
        "What attends to the KV cache. triton: the project's kernels for CUDA devices; torch: plain torch, slow; "
        "flash-attn, flashinfer: those packages, on CUDA devices, in 16 bits, installed by you. auto: triton on a CUDA "
        "device, the native kernels on a CPU.",
        WORKER,
        choices=("auto", "triton", "torch", "flash-attn", "flashinfer"),
    )
    enforce_eager: bool = value(
        False,
        "Call the model operation by operation, not as one recorded program or CUDA graph; for debugging.",
        WORKER,
    )
    graph_capture: str = value(
        "startup",
        "When CUDA graphs are captured. startup: all before the worker is ready, and again when it wakes; lazy: each "
        "behind the first step that needs it, which then takes up to a second.",
        WORKER,
        choices=("startup", "lazy"),
    )
    hang_timeout_s: float = value(
        30.0,
        "Seconds that a step is given at least, and more where steps of so many tokens take long; then the worker "
        "exits with code 70, to be started again.",
        WORKER,
        gt=0,
    )


@dataclass(frozen=True, slots=True)
class SimulationConfig:
    """A worker without weights: real steps, made-up tokens, modelled times."""

    enabled: bool = value(False, "Simulate the model instead of loading it.", WORKER)
    profile: str = value(
        "",
        "JSON file with the four step-time coefficients, as `python -m tools.fit` writes it from a recorded run; "
        "empty: those below.",
        WORKER,
    )
    base_ms: float = value(
        5.0,
        "Milliseconds of any step: reading the weights once. The defaults, this one and the three below, estimate "
        "an 8B model in bfloat16 on an accelerator of 3 TB/s.",
        WORKER,
        ge=0,
    )
    prefill_token_us: float = value(
        25.0, "Microseconds per token that was known when its request entered the batch.", WORKER, ge=0
    )
    decode_row_us: float = value(
        5.0, "Microseconds per request that computes a token sampled since.", WORKER, ge=0
    )
    context_token_ns: float = value(
        50.0, "Nanoseconds per token of context that attention reads.", WORKER, ge=0
    )
    eos_probability: float = value(
        0.0, "Chance of EOS at each token; 0: every request runs to its length.", WORKER, ge=0, le=1
    )
    free_memory_gib: float = value(
        32.0,
        "GiB free after loading on the simulated device; `cache.memory_fraction` of it holds KV blocks, unless "
        "`cache.num_blocks` says how many there are.",
        WORKER,
        gt=0,
    )


@dataclass(frozen=True, slots=True)
class JournalConfig:
    """A recording of what the engine core is given and decides, for `python -m tools.replay`."""

    path: str = value(
        "",
        "Directory for one journal per run of the engine, on a local disk; it contains prompts and outputs as "
        "token ids. Empty: nothing is recorded.",
        ENGINE,
    )
    max_bytes: int = value(
        256 << 20,
        "Bytes of all journals of one engine there. Those of earlier runs are deleted for it, oldest first; then the "
        "recording ends.",
        ENGINE,
        ge=1 << 16,
    )


@dataclass(frozen=True, slots=True)
class LogConfig:
    """Logging of all three services."""

    level: str = value(
        "info", "Least severe line to print.", ALL, choices=("debug", "info", "warning", "error")
    )
    format: str = value("text", "text: for people; json: one object a line.", ALL, choices=("text", "json"))


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """All of it, handed down engine -> executor -> worker -> runner -> model. Never written to."""

    model: ModelConfig = field(default_factory=ModelConfig)
    load: LoadConfig = field(default_factory=LoadConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    frontend: FrontendConfig = field(default_factory=FrontendConfig)
    engine: EngineCoreConfig = field(default_factory=EngineCoreConfig)
    worker: WorkerConfig = field(default_factory=WorkerConfig)
    simulation: SimulationConfig = field(default_factory=SimulationConfig)
    journal: JournalConfig = field(default_factory=JournalConfig)
    log: LogConfig = field(default_factory=LogConfig)
