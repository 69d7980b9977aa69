"""Options of the processes: addresses, devices, time limits, simulation, recordings and logs; see `fields`."""

from __future__ import annotations

from dataclasses import dataclass

from triptych.config.option import ALL, ENGINE, FRONTEND, WORKER, value
from triptych.types.sampling import MAX_BIASES


@dataclass(frozen=True, slots=True)
class FrontendConfig:
    """The tokenizing gateway: public gRPC and HTTP."""

    host: str = value("127.0.0.1", "Address to bind; 0.0.0.0 for all.", FRONTEND)
    port: int = value(50051, "gRPC port; 0: any free one, written to --ready-file.", FRONTEND, ge=0, le=65535)
    admin_port: int = value(
        50050, "gRPC port of the operator's AdminService; 0: any free one.", FRONTEND, ge=0, le=65535
    )
    admin_host: str = value(
        "127.0.0.1",
        "Address to bind the admin port to. Any client that reaches it can stop the engines, unless "
        "`frontend.api_keys_file` asks for a key.",
        FRONTEND,
    )
    serve_admin_http: bool = value(
        False,
        "Serve operators' calls over HTTP as well, under the names that vLLM has for them: /sleep, /wake_up, /pause, "
        "/resume, /reset_prefix_cache and more; the same keys are asked for as on the admin port.",
        FRONTEND,
    )
    admin_http_port: int = value(
        8001,
        "Port of operators' calls over HTTP, on `frontend.admin_host`; 0: any free one.",
        FRONTEND,
        ge=0,
        le=65535,
    )
    serve_http: bool = value(
        True,
        "Serve the OpenAI-compatible HTTP API beside gRPC. A stack that LLM or AsyncLLM starts for itself serves none, "
        "unless this is set: so it starts sooner.",
        FRONTEND,
    )
    http_port: int = value(8000, "OpenAI-compatible HTTP port; 0: any free one.", FRONTEND, ge=0, le=65535)
    metrics_host: str = value(
        "127.0.0.1",
        "Address to bind the metrics port to. It serves /metrics, /livez and /readyz over plain HTTP, without keys.",
        FRONTEND,
    )
    metrics_port: int = value(9101, "Prometheus /metrics port; 0: any free one.", FRONTEND, ge=0, le=65535)
    processes: int = value(
        1,
        "Processes that serve on the frontend's ports together, each on a core of its own. They are supervised and "
        "restarted by the one that is started. 0: one for every 8 CPUs within its affinity and its container's CPU "
        "limit, at least one.",
        FRONTEND,
        ge=0,
        le=64,
    )
    max_messages_per_s: int = value(
        10_000,
        "Messages per second that all streams of a frontend's process share. Where tokens come faster, a stream's "
        "tokens leave together; a message costs tens of microseconds. 0: every token leaves as it comes.",
        FRONTEND,
        ge=0,
    )
    metrics_vllm_names: bool = value(
        False,
        "Serve the metrics under vLLM's names too (`vllm:num_requests_running`, …), which gateways, autoscalers and "
        "dashboards look for.",
        FRONTEND,
    )
    engine_addresses: str = value(
        "127.0.0.1:50052",
        "Engines to send requests to, comma-separated: host:port, or dns:name:port for all addresses of a name, as of "
        "a headless Service, which is looked up every 5 s.",
        FRONTEND,
    )
    routing: str = value(
        "prefix",
        "Which of several engines gets a request. prefix: the one that is expected to give the first token soonest, by "
        "what waits there and what is cached there; least_loaded: the one with the fewest requests of this frontend; "
        "round_robin; random.",
        FRONTEND,
        choices=("prefix", "least_loaded", "round_robin", "random"),
    )
    model_aliases: str = value(
        "",
        "Other names that requests may use for models, comma-separated: `gpt-4o=qwen3` means the model that is served "
        "as qwen3 (`model.served_name`).",
        FRONTEND,
    )
    drain_s: float = value(
        30.0, "Seconds that running requests may take to finish after SIGTERM.", FRONTEND, ge=0
    )
    moves: str = value(
        "same_numerics",
        "Engines that a request with output may move to when its own is lost or drains. same_numerics: those of equal "
        "processor, kernels, libraries and precision; where these are batch invariant, it goes on as if nothing had "
        "happened. any: those of the same weights; the answer says so. never: none; the request fails.",
        FRONTEND,
        choices=("same_numerics", "any", "never"),
    )
    move_after_s: float = value(
        0.25,
        "Seconds after a broken stream in which its engine may come back, before requests move to another; none where "
        "no process listens any more.",
        FRONTEND,
        ge=0,
    )
    move_after_silence_s: float = value(
        1.0,
        "Seconds without a sign of life from an engine with an open stream, before requests move to another that "
        "gives one. It is asked for after 0.33 s. Where more engines are silent than give signs, five times as long.",
        FRONTEND,
        ge=0.5,
    )
    move_timeout_s: float = value(
        30.0,
        "Seconds that a request waits for an engine to move to, if its deadline does not come first.",
        FRONTEND,
        ge=0,
    )
    keep_s: float = value(
        10.0,
        "Seconds for which a stream goes on at its engine after its frontend is lost, so that its client can read on "
        "at another frontend (engine.max_kept_bytes). Over HTTP only where the client asks for event ids. "
        "0: not at all.",
        FRONTEND,
        ge=0,
        le=3600,
    )
    tool_call_parser: str = value(
        "auto",
        "How the model writes calls of tools. auto: as its chat template shows; none: calls stay text.",
        FRONTEND,
        choices=(
            "auto", "none", "qwen3_coder", "hermes", "mistral", "deepseek", "llama3_json", "pythonic",
        ),
    )  # fmt: skip
    reasoning_parser: str = value(
        "auto",
        "How the model writes what it thinks before it answers. auto: as its chat template shows; none: it stays text.",
        FRONTEND,
        choices=("auto", "none", "think", "mistral"),
    )
    client_timeout_s: float = value(
        60.0,
        "Seconds that a client may take to send an HTTP request, or read nothing of an answer that waits for it; then "
        "its connection or call ends and the request is aborted.",
        FRONTEND,
        gt=0,
    )
    ping_interval_s: float = value(
        15.0,
        "Seconds after which a stream over HTTP that has nothing to say sends a line without data, so that proxies "
        "keep it open. 0: never.",
        FRONTEND,
        ge=0,
    )
    max_connections: int = value(
        8192,
        "HTTP connections at once. One more takes the place of the one that has waited longest for a request; if all "
        "are being answered, it gets 503. Fewer, with a warning, where the limit of open files is lower.",
        FRONTEND,
        ge=1,
    )
    max_connections_per_address: int = value(
        0,
        "HTTP connections at once from one address (a /64 of IPv6). One more takes the place of the one of its own "
        "that has waited longest for a request; if all are being answered, it gets 429. 0: an eighth of "
        "`frontend.max_connections`. Behind a proxy, which has one address for all clients: as many as of all.",
        FRONTEND,
        ge=0,
    )
    max_logit_bias: int = value(
        MAX_BIASES,
        "Tokens that the `logit_bias` of a request may name. Each costs some 0.7 us on the engine's loop and as much "
        "in the worker, where others' tokens wait for it.",
        FRONTEND,
        ge=0,
    )
    max_unsent_bytes: int = value(
        256 << 20,
        "Bytes that all answers with vectors together may have from when these are computed until clients have read "
        "them, a quarter of it those of one tenant. A call that needs more gets 429 or RESOURCE_EXHAUSTED.",
        FRONTEND,
        ge=16 << 20,
    )
    max_grpc_connections: int = value(
        4096, "gRPC connections at once to the public port; one more is closed.", FRONTEND, ge=1
    )
    max_calls_per_connection: int = value(
        4096,
        "Calls at once on one gRPC connection to the public port; clients let more of them wait.",
        FRONTEND,
        ge=1,
    )
    api_keys_file: str = value(
        "",
        "File of the API keys that clients must send, see `triptych keys --help`; read again when it changes. "
        "Empty: none is asked for, and every client is believed.",
        FRONTEND,
    )
    unknown_fields: str = value(
        "refuse",
        "What becomes of fields in HTTP requests that the API does not have, which some gateways add. warn: they are "
        "left out, and each name is logged once.",
        FRONTEND,
        choices=("refuse", "warn"),
    )
    cors_origins: str = value(
        "",
        "Origins of web pages that may call the HTTP API from a browser, comma-separated: https://app.example; `*`: "
        "any. Empty: none.",
        FRONTEND,
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
    metrics_host: str = value(
        "127.0.0.1",
        "Address to bind the metrics port to. It serves /metrics, /livez and /readyz over plain HTTP, without keys.",
        ENGINE,
    )
    metrics_port: int = value(9102, "Prometheus /metrics port; 0: any free one.", ENGINE, ge=0, le=65535)
    engine_id: str = value(
        "",
        "This engine's name towards workers, in logs and metrics; no two engines may share one. An engine that "
        "replaces another under its name gets its worker at once. Empty: the host's name.",
        ENGINE,
    )
    worker_address: str = value(
        "127.0.0.1:50053",
        "The worker, or its group's leader, host:port. Several, comma-separated, or dns:name:port for all addresses of "
        "a name, are a pool: the engine takes any worker that no other engine holds, and another one when that dies.",
        ENGINE,
    )
    resume_ttl_s: float = value(
        10.0,
        "Seconds for which a broken stream, to the worker or from a frontend, can be resumed with nothing lost. Of the "
        "step stream the worker's value counts; the engine learns it in the handshake.",
        ENGINE + WORKER,
        ge=0,
    )
    max_kept_bytes: int = value(
        256 << 20,
        "Bytes of requests that have lost their frontend, or have ended, which another frontend may still ask for "
        "(frontend.keep_s). Above it the first to expire are dropped. 0 keeps none.",
        ENGINE,
        ge=0,
    )
    drain_s: float = value(
        30.0, "Seconds that running requests may take to finish after SIGTERM.", ENGINE, ge=0
    )
    role: str = value(
        "both",
        "The part of requests that this engine computes. prefill: prompts, for engines that decode; decode: outputs, "
        "and those prompts that it has sooner than they could be pulled. Both need `worker.kv_transfer`.",
        ENGINE,
        choices=("both", "prefill", "decode"),
    )
    kv_lease_s: float = value(
        10.0,
        "Seconds for which the KV blocks of a prompt are held for another worker that does not pull them.",
        ENGINE,
        gt=0,
    )


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """One accelerator's process."""

    host: str = value("127.0.0.1", "Address to bind.", WORKER, per_rank=True)
    port: int = value(
        50053, "gRPC port; 0: any free one, written to --ready-file.", WORKER, ge=0, le=65535, per_rank=True
    )
    metrics_host: str = value(
        "127.0.0.1",
        "Address to bind the metrics port to. It serves /metrics, /livez, /readyz and /expert_counts over plain HTTP, "
        "without keys.",
        WORKER,
        per_rank=True,
    )
    metrics_port: int = value(
        9103, "Prometheus /metrics port; 0: any free one.", WORKER, ge=0, le=65535, per_rank=True
    )
    device: str = value(
        "auto",
        "auto: cuda if there is one, else cpu.",
        WORKER,
        choices=("auto", "cpu", "cuda"),
        per_rank=True,
    )
    rank: int = value(
        0,
        "This process's number among the ranks of its group; give it as a flag or in the environment, since all ranks "
        "may read the same file.",
        WORKER,
        ge=0,
        per_rank=True,
    )
    local_rank: int = value(
        0, "Number of this process's accelerator on its machine.", WORKER, ge=0, per_rank=True
    )
    num_threads: int = value(
        0,
        "CPU threads for the model; 0: the physical cores this process may use.",
        WORKER,
        ge=0,
        per_rank=True,
    )
    instruction_set: str = value(
        "auto",
        "Instruction set of the native kernels on a CPU: avx2 lets any x86-64 worker give the bits of one that has no "
        "more. auto: the widest that is built and that the processor has; `triptych env` names it.",
        WORKER,
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
        per_rank=True,
    )

    stored_programs_gib: float = value(
        4.0,
        "GiB at most of recorded programs with packed weights in the cache directory, from which a worker on CPUs "
        "starts in half the time; those that were not used for longest are deleted. 0: none are kept.",
        WORKER,
        ge=0,
        per_rank=True,
    )

    max_adapters: int = value(
        0,
        "Different LoRA adapters that the rows of a step may have: so many have a place on the device, and more may be "
        "loaded. 0: none are served.",
        WORKER,
        ge=0,
        le=1024,
    )
    max_adapter_rank: int = value(
        64, "The largest rank of a LoRA adapter; places on the device have this size.", WORKER, ge=1, le=256
    )
    adapter_gib: float = value(
        4.0,
        "GiB of the host's memory that LoRA adapters may take together. Those used last stay; others are read again "
        "when a request names them.",
        WORKER,
        gt=0,
    )

    kv_transfer: bool = value(
        False,
        "Serve KV blocks to other workers and pull theirs, for engines with a role (`engine.role`). Connections are "
        "plain TCP, for a network that is trusted.",
        WORKER,
    )
    kv_transfer_port: int = value(
        50054, "Port that KV blocks are served on; 0: any free one.", WORKER, ge=0, le=65535, per_rank=True
    )
    kv_transfer_address: str = value(
        "",
        "host:port under which other workers reach that port. Empty: `worker.host`, or this machine's name where that "
        "is 0.0.0.0, and the port.",
        WORKER,
        per_rank=True,
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
    tokens_per_step: int = value(
        1,
        "Tokens that a request gets in a step, at most: as if a model guessed several ahead and often guessed right. "
        "The tokens themselves do not change.",
        WORKER,
        ge=1,
        le=16,
    )
    num_stages: int = value(
        0,
        "Stages of a simulated pipeline, each of which takes its part of a step's time, all in one process; 0: "
        "`parallel.pipeline_parallel_size`.",
        WORKER,
        ge=0,
        le=64,
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
        "info",
        "Least severe line to print.",
        ALL,
        choices=("debug", "info", "warning", "error"),
        per_rank=True,
    )
    format: str = value(
        "text", "text: for people; json: one object a line.", ALL, choices=("text", "json"), per_rank=True
    )
