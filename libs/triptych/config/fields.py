"""Every value that an operator may set, declared once: type, default, unit, range, meaning, and who must share it.

The yaml key (`scheduler.max_num_seqs`), the environment variable (`TRIPTYCH_SCHEDULER_MAX_NUM_SEQS`), the flag
(`--scheduler.max-num-seqs`) and its help are derived from here. So is what an engine and its worker compare
(`shared=True`), and what the ranks of a group compare (all that workers read, but for `per_rank=True`).
All sections are frozen and have defaults, so `EngineConfig()` can be built with no model on disk.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from triptych.config.option import ALL, ENGINE, FRONTEND, WORKER, value
from triptych.config.process_fields import (
    EngineCoreConfig,
    FrontendConfig,
    JournalConfig,
    LogConfig,
    SimulationConfig,
    WorkerConfig,
)
from triptych.config.tls_fields import TlsConfig


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The model and its precision."""

    model: str = value(
        "embedded", "Path of a model directory or .gguf file, a hub id, or `embedded`.", ALL, shared=True
    )
    revision: str = value(
        "",
        "Branch, tag or commit of a hub id; empty: the newest of its main branch. A commit is always the same files.",
        FRONTEND + WORKER,
    )
    served_name: str = value("", "Name that clients use; empty: the last part of `model.model`.", WORKER)
    adapters: str = value(
        "",
        "LoRA adapters that are loaded at the start, comma-separated: `sql=/adapters/sql` is the directory of the one "
        "that requests name as the model `sql`, and `law=org/name` or `law=org/name@revision` a hub id. "
        "`worker.max_adapters` says how many may run at once.",
        ENGINE + WORKER,
    )
    adapter_root: str = value(
        "",
        "Directory on the worker's machine within which adapters that are loaded later must lie, links resolved. "
        "Empty: none are.",
        WORKER,
    )
    backend: str = value(
        "auto",
        "What computes the decoder. native: this project's own layers. transformers: the modules of transformers "
        "around this project's products, attention and cache, if nothing but attention mixes tokens there. auto: "
        "native where that serves the checkpoint, else transformers where it is installed.",
        WORKER,
        choices=("auto", "native", "transformers"),
    )
    dtype: str = value(
        "auto",
        "Precision of weights and activations; auto: the checkpoint's, float32 where the CPU "
        "has no native bfloat16. On a CPU a checkpoint in float16 counts as one in bfloat16.",
        ENGINE + WORKER,
        choices=("auto", "float32", "bfloat16", "float16"),
        shared=True,
    )
    quantization: str = value(
        "none",
        "Quantization of linear layers. none: nothing is quantized here; what a GGUF file or another tool has "
        "quantized (GPTQ, AWQ, fp8, …) is kept where the device has kernels for that, all else is in "
        "`model.dtype`. The embedded model is dequantized. dequantized: all in `model.dtype`. q4, q8: of weights only; "
        "what a GGUF file holds in up to 8 bits is kept, everything else is quantized in groups of 32, the output "
        "head to 8 bits. int8, fp8: of weights and their inputs, on CUDA devices with a scale per output and per "
        "token, on CPUs (int8 only) in groups of 32; the output head as with q8; fp8 from compute capability 8.9 "
        "on. auto: q4 where the native kernels for CPUs serve it, else none.",
        ENGINE + WORKER,
        choices=("none", "dequantized", "q4", "q8", "int8", "fp8", "auto"),
        shared=True,
    )
    activation_bits: str = value(
        "auto",
        "Bits that inputs of products with weights of q4, q8 and int8 are rounded to on CPUs, in groups of 32; "
        "the output head keeps 16. 16: finer than bfloat16. 8: with a zero point per group, coarser than bfloat16 "
        "at the same answers' accuracy as a model in bfloat16, and up to twice as fast. auto: 8 where the "
        "processor multiplies bytes at least 1.2 times as fast (`triptych env` shows it) and `cache.dtype` is not "
        "int8; and always with int8 weights.",
        WORKER,
        choices=("auto", "8", "16"),
    )
    batch_invariant: str = value(
        "auto",
        "true: a request's numbers do not depend on the batch that it runs in. false: quantized products of "
        "many rows, as in a prefill, may be computed in `model.dtype` where that is faster. auto: true where that "
        "costs nothing; false with `model.quantization = auto`, with q4 and q8 on CUDA devices, where it would "
        "slow the prefill down, and where sums follow the batch: with weights that are not quantized on CUDA devices, "
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
        shared=True,
    )
    seed: int = value(0, "Seeds random weights (`load.format = random`) and nothing else.", WORKER, ge=0)


@dataclass(frozen=True, slots=True)
class LoadConfig:
    """The way weights are loaded."""

    format: str = value(
        "auto",
        "auto: by the files found; random: weights drawn from `model.seed`, for tests and benchmarks.",
        WORKER,
        choices=("auto", "safetensors", "gguf", "random"),
    )


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The paged KV cache."""

    block_size: int = value(16, "Tokens per KV block.", ENGINE + WORKER, ge=1, le=256, shared=True)
    dtype: str = value(
        "auto",
        "Precision of keys and values; auto: `model.dtype`, or bfloat16 if that is auto and means float32 on a CPU "
        "that would emulate the checkpoint's bfloat16. int8 rounds each key and each value to 8 bits with a scale "
        "of its own, so that almost twice the tokens of bfloat16 fit. float8_e4m3fn does the same with 8-bit "
        "floats, which are coarser and converted by the device itself: on CUDA devices only, from compute capability "
        "8.9 on.",
        ENGINE + WORKER,
        choices=("auto", "float32", "bfloat16", "float16", "int8", "float8_e4m3fn"),
        shared=True,
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
    soft_memory_fraction: float = value(
        0.1,
        "On a CPU: share of the memory free after loading that KV blocks take without need. Above it the blocks of "
        "requests that have ended are used again first; the cache grows further where running requests need it, or "
        "where prefixes come again after their blocks were used for others. 1: until the cache is full.",
        WORKER,
        ge=0,
        le=1,
    )
    groups: str = value(
        "auto",
        "auto: layers with a window keep the blocks of their window only, in KV groups of their own, where groups of "
        "equal blocks can be made and save memory; a request then takes a block of each group. one: all layers keep "
        "all tokens.",
        WORKER,
        choices=("auto", "one"),
    )
    state_interval: int = value(
        256,
        "Models with recurrent states: tokens after which the state of a request is kept as a snapshot, from which "
        "equal prefixes go on. It is also kept where a prompt ends. A multiple of `cache.block_size`.",
        WORKER,
        ge=1,
    )
    enable_prefix_caching: bool = value(True, "Reuse the KV blocks of equal prefixes.", ENGINE)


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits and policy of a step: which requests run, and how many tokens of each."""

    max_num_seqs: int = value(
        0,
        "Requests that run at once (rows in the worker); 0: 256 on an accelerator with 40 GB of memory or more, 64 on "
        "any other device.",
        ENGINE + WORKER,
        ge=0,
        le=65536,
        shared=True,
    )
    max_num_batched_tokens: int = value(
        0,
        "Token budget of one step, at least max_num_seqs; 0: 8192 on an accelerator with 40 GB of memory or more, 2048 "
        "on any other device; halved where an accelerator's free memory does not hold such a step.",
        ENGINE + WORKER,
        ge=0,
        le=1 << 18,
        shared=True,
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
        "Steps in flight towards the worker, each planned at once; 1 turns overlap off; 0: as many as the measured "
        "round trip and step time need, 2 to 4, and one more for each further stage of a pipeline, planned late.",
        ENGINE,
        ge=0,
        le=64,
    )


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """The processes that one model is spread over; `worker.rank` says which of them a process is."""

    tensor_parallel_size: int = value(1, "Workers that share each layer.", WORKER, ge=1)
    pipeline_parallel_size: int = value(1, "Groups of layers, one after the other.", WORKER, ge=1)
    expert_parallel: bool = value(
        False,
        "Whether each of the workers that share a layer holds whole experts of its mixture, in place of a part of "
        "every expert.",
        WORKER,
    )
    expert_counts: str = value(
        "",
        "File of how often each expert of each layer was chosen, as /expert_counts of a worker's metrics port answers. "
        "By it `expert_parallel` gives the ranks experts that are chosen about equally often. Empty: each rank has "
        "neighbouring experts.",
        WORKER,
        per_rank=True,
    )
    rendezvous_address: str = value(
        "127.0.0.1:29500",
        "Where rank 0 of the group listens and the other ranks meet it, host:port; not asked of a single rank. Rank 0 "
        "may take port 0, any free one, which is written to --ready-file.",
        WORKER,
        per_rank=True,
    )
    timeout_s: float = value(
        600.0,
        "Seconds that ranks wait for each other: at the rendezvous, while one of them still loads, and in an "
        "operation that all take part in.",
        WORKER,
        gt=0,
    )
    silence_timeout_s: float = value(
        5.0,
        "Seconds after which a rank that says nothing counts as lost, and all ranks end with code 70, to be started "
        "again together. One that has ended is noticed at once.",
        WORKER,
        gt=0,
    )

    @property
    def num_ranks(self) -> int:
        """Number of processes of one worker group; rank = stage * tensor_parallel_size + place in the stage."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """Tokens that are guessed ahead, so that a step verifies several of a request."""

    enabled: str = value(
        "auto",
        "Guess tokens ahead: of requests that repeat their own text, answer in a form, or say what their tenant was "
        "answered lately. A guess is taken only if it is the token that would have been chosen, so outputs stay the "
        "same where `model.batch_invariant` is true; where it is false, near ties may fall otherwise. Steps have no "
        "guesses where these would cost more than they bring. auto: true on CPUs with "
        "`model.batch_invariant`, `speculative.model` or `mtp` and no pipeline stages, else false; the log says why. "
        "true guesses on a CUDA device with one rank, too, where nothing was measured. It is refused with several "
        "ranks or recurrent states there, and with pipeline stages.",
        WORKER,
        choices=("auto", "true", "false"),
    )
    max_tokens: int = value(8, "Guesses of one request in a step, at most.", WORKER, ge=1, le=16)
    proposers: str = value(
        "grammar,ngram,suffix",
        "What guesses, comma-separated; the first of equals is asked first. `grammar` guesses what the form of an "
        "answer leaves open, `ngram` from the request's own text, `suffix` from what its tenant was answered lately, "
        "`draft` by `speculative.model`, last if it is not named, `mtp` by a layer that the checkpoint has for it "
        "(DeepSeek V3, GLM 4.5, MiMo, Qwen 3.5); others are entry points `triptych.proposers` of installed packages.",
        WORKER,
    )
    model: str = value(
        "",
        "A small model that guesses: path of a model directory or .gguf file, or a hub id, perhaps "
        "`org/name@revision`. It has the tokens of `model.model`, and ends with the same ones; else it is refused, and "
        "so it is on CUDA devices and where `speculative.enabled = true` is. Of several ranks rank 0 alone reads and "
        "holds it. Its weights are held in 4 bits if they are not quantized yet. It guesses where that is worth its "
        "own time. Or an EAGLE-3 head that was trained for `model.model`, as the authors or speculators write it: its "
        "weights are quantized only if the model's are. Empty: none.",
        WORKER,
    )
    cache_gib: float = value(
        1.0,
        "GiB for keys and values of the model or head that guesses, and as many for `mtp`, at most, taken before "
        "`cache.num_blocks` is sized. Requests without room there are guessed for by the other proposers.",
        WORKER,
        gt=0,
        le=1024,
    )
    suffix_mib: int = value(
        32,
        "MiB for outputs of this worker that later ones are guessed from, each tenant's apart; 0: requests are guessed "
        "from their own text only.",
        WORKER,
        ge=0,
        le=65536,
    )

    @property
    def proposer_names(self) -> tuple[str, ...]:
        """Those of `proposers`, each once, in their order."""
        parts = (part.strip() for part in self.proposers.split(","))
        return tuple(dict.fromkeys(part for part in parts if part))

    @property
    def wants_mtp(self) -> bool:
        """Whether a layer of the checkpoint is to guess, if the worker can."""
        return self.enabled != "false" and "mtp" in self.proposer_names


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
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)
    simulation: SimulationConfig = field(default_factory=SimulationConfig)
    journal: JournalConfig = field(default_factory=JournalConfig)
    tls: TlsConfig = field(default_factory=TlsConfig)
    log: LogConfig = field(default_factory=LogConfig)
