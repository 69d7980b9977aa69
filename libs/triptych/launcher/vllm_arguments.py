"""Arguments of vLLM's engine -> options of a stack.

What asks for nothing, or cannot change an answer, is taken and has no effect: None everywhere, vLLM's own defaults,
and hints on speed and memory that have no counterpart here. What would change an answer and is not served is refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from triptych.config.loader import iter_options
from triptych.errors import ConfigError
from triptych.types.sampling import MAX_LOGPROBS

ALIASES = {
    "gpu_memory_utilization": "cache.memory_fraction",
    "kv_cache_dtype": "cache.dtype",
    "load_format": "load.format",
    "num_gpu_blocks_override": "cache.num_blocks",
    "scheduling_policy": "scheduler.policy",
    "served_model_name": "model.served_name",
}
"""vLLM's name of an option -> its key, where the bare name differs."""

_VALUE_TO_OURS: dict[str, dict[Any, Any]] = {
    "dtype": {"half": "float16", "float": "float32"},
    "load_format": {"dummy": "random", "hf": "auto", "safetensors": "auto"},
    "max_model_len": {-1: None, "auto": None},
    "revision": {"main": None},
    "attention_backend": {"": None},
}
"""Argument -> value -> what it is called here; None is the default."""

HINTS = frozenset({
    "aggregate_engine_logging", "all2all_backend", "allowed_local_media_path", "allowed_media_domains",
    "async_scheduling", "compilation_config", "cudagraph_capture_sizes", "disable_cascade_attn",
    "disable_chunked_mm_input", "disable_custom_all_reduce", "disable_hybrid_kv_cache_manager",
    "disable_log_requests", "disable_log_stats", "disable_nccl_for_dp_synchronization",
    "distributed_executor_backend", "distributed_timeout_seconds", "enable_dbo", "enable_expert_parallel",
    "enable_flashinfer_autotune", "enable_log_requests", "enable_sleep_mode", "enable_tower_connector_lora",
    "expert_placement_strategy", "fully_sharded_loras", "guided_decoding_backend", "interleave_mm_strings",
    "kernel_config", "kv_cache_metrics", "kv_cache_metrics_sample", "limit_mm_per_prompt", "linear_backend",
    "lora_dtype", "lora_extra_vocab_size", "max_cpu_loras",
    "max_cudagraph_capture_size", "max_parallel_loading_workers", "max_seq_len_to_capture", "mm_encoder_tp_mode",
    "mm_processor_cache_gb", "mm_processor_cache_type", "mm_processor_kwargs", "moe_backend",
    "multi_step_stream_outputs", "num_scheduler_steps", "numa_bind", "optimization_level", "performance_mode",
    "prefix_caching_hash_algo", "ray_workers_use_nsight", "renderer_num_workers", "safetensors_load_strategy",
    "scheduler_reserve_full_isl", "show_hidden_metrics_for_version", "shutdown_timeout", "skip_mm_profiling",
    "sleep_mode_backend", "stream_interval", "swap_space", "trust_remote_code", "use_tqdm_on_load",
    "use_v2_block_manager", "watermark",
})  # fmt: skip
"""Arguments that cannot change an answer here: hints on speed, permissions, bounds of what is not served."""

NEUTRAL = {
    "attention_config": (),
    "chat_template": (),
    "code_revision": ("main",),
    "config_format": ("auto", "hf"),
    "convert": ("auto", "none"),
    "cpu_offload_gb": (),
    "data_parallel_backend": ("mp",),
    "data_parallel_size": (1,),
    "decode_context_parallel_size": (1,),
    "disable_sliding_window": (),
    "download_dir": (),
    "enable_prompt_embeds": (),
    "enable_return_routed_experts": (),
    "generation_config": ("auto",),
    "hf_config_path": (),
    "hf_overrides": (),
    "hf_token": (),
    "kv_cache_memory_bytes": (),
    "kv_offloading_size": (),
    "kv_transfer_config": (),
    "logits_processors": (),
    "logprobs_mode": ("raw_logprobs",),
    "max_logprobs": tuple(range(MAX_LOGPROBS + 1)),
    "model_impl": ("auto", "vllm"),
    "nnodes": (1,),
    "offload_backend": ("auto",),
    "offload_group_size": (),
    "offload_num_in_group": (1,),
    "offload_params": (),
    "offload_prefetch_step": (1,),
    "otlp_traces_endpoint": (),
    "override_generation_config": (),
    "override_pooler_config": (),
    "pooler_config": (),
    "prefill_context_parallel_size": (1,),
    "profiler_config": (),
    "quantization_config": (),
    "reasoning_parser": (),
    "return_sampling_mask": (),
    "rope_scaling": (),
    "rope_theta": (),
    "runner": ("auto", "generate"),
    "scheduler_cls": (),
    "skip_tokenizer_init": (),
    "spec_method": (),
    "spec_model": (),
    "spec_tokens": (),
    "structured_outputs_config": (),
    "task": ("auto", "generate"),
    "tokenizer": (),
    "tokenizer_mode": ("auto", "hf", "fast"),
    "tokenizer_revision": ("main",),
    "worker_cls": ("auto",),
    "worker_extension_cls": (),
}
"""Argument without a counterpart here -> values that ask for nothing, besides None, False, 0 and what is empty."""

_REMEDIES = {
    "download_dir": "set $TRIPTYCH_HOME",
    "generation_config": "give SamplingParams with every call",
    "hf_token": "set $HF_TOKEN",
    "kv_cache_memory_bytes": "see cache.num_blocks and gpu_memory_utilization",
    "max_logprobs": f"a request may ask for {MAX_LOGPROBS}",
    "reasoning_parser": "see frontend.reasoning_parser",
    "skip_tokenizer_init": "give SamplingParams(detokenize=False)",
    "tokenizer": "the model's own is used",
}


_OF_ADAPTERS = frozenset({"enable_lora", "lora_modules", "max_lora_rank", "max_loras"})
_SPECULATIVE = "speculative_config"
_MODEL_METHODS = (None, "draft_model", "eagle3")
_LAYER_METHODS = ("mtp", "deepseek_mtp", "glm4_moe_mtp", "mimo_mtp", "qwen3_next_mtp", "qwen3_5_mtp")
"""Methods that guess by a layer of the checkpoint; all but the first are older names for single models."""
_WITH_LAYER = "grammar,ngram,suffix,mtp"
"""Methods of a `speculative_config` in which a checkpoint guesses; a head is recognised by its config.json."""
_VLLM_MAX_LORAS, _VLLM_MAX_LORA_RANK = 1, 16  # its defaults


def to_overrides(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that are options of a stack, with values as they are called here.

    Raises:
        ConfigError: Values that are not served; names all of them.
    """
    overrides = _adapter_options(arguments) | _speculative_options(arguments)
    problems = []
    options = {
        option.name for option in iter_options()
    }  # these go before: a version may serve more than this table
    for name, value in arguments.items():
        if name in HINTS - options or name in _OF_ADAPTERS or name == _SPECULATIVE:
            continue
        if name in NEUTRAL.keys() - options:
            if not _is_neutral(name, value, arguments):
                remedy = f"; {_REMEDIES[name]}" if name in _REMEDIES else ""
                problems.append(f"{name}={value!r:.80} is not served{remedy}")
            continue
        overrides[name] = _to_ours(name, value)
    if problems:
        raise ConfigError("; ".join(problems))
    return overrides


def _adapter_options(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of adapters; none unless `enable_lora` is set, as vLLM has it.

    Raises:
        ConfigError: A module is neither NAME=PATH nor an object with both.
    """
    if not arguments.get("enable_lora"):
        return {}
    modules = arguments.get("lora_modules") or ()
    return {
        "worker.max_adapters": arguments.get("max_loras") or _VLLM_MAX_LORAS,
        "worker.max_adapter_rank": arguments.get("max_lora_rank") or _VLLM_MAX_LORA_RANK,
        "model.adapter_root": "/",  # a LoRARequest may have any path
        **({"model.adapters": ",".join(map(_adapter_entry, modules))} if modules else {}),
    }


def _speculative_options(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a checkpoint that guesses.

    Raises:
        ConfigError: Something else is to guess, or a key is not served; names it.
    """
    config = arguments.get(_SPECULATIVE)
    if not config:
        return {}
    if not isinstance(config, Mapping):
        raise ConfigError(f"{_SPECULATIVE}: {config!r:.80} is no object")
    values = {key: value for key, value in config.items() if value is not None}
    method = values.pop("method", None)
    model, number = values.pop("model", None), values.pop("num_speculative_tokens", None)
    is_layer = method in _LAYER_METHODS and not model
    if values or not (is_layer or (method in _MODEL_METHODS and model)):
        raise ConfigError(
            f"{_SPECULATIVE}={config!r:.200} is not served, but method draft_model or eagle3 with a model, or mtp "
            "without one, and num_speculative_tokens; ngram and the like guess anyway"
        )
    own = {"speculative.proposers": _WITH_LAYER} if is_layer else {"speculative.model": model}
    return own | ({} if number is None else {"speculative.max_tokens": number})


def _adapter_entry(module: Any) -> str:
    """Return an adapter as `model.adapters` has it."""
    if isinstance(module, str) and module.lstrip().startswith("{"):
        try:
            module = json.loads(module)
        except ValueError as error:
            raise ConfigError(f"lora_modules: {module!r:.80} is no JSON: {error}") from None
    if isinstance(module, Mapping) and module.get("name") and module.get("path"):
        return f"{module['name']}={module['path']}"
    if isinstance(module, str) and "=" in module:
        return module
    raise ConfigError(f"lora_modules: {module!r:.80} is neither NAME=PATH nor an object with name and path")


def _is_neutral(name: str, value: Any, arguments: Mapping[str, Any]) -> bool:
    if not value or value in NEUTRAL[name]:
        return True
    if name == "tokenizer":
        return value in (arguments.get("model"), arguments.get("model.model"))
    if name == "tokenizer_revision":  # the tokenizer's files are those of the model's revision
        return bool(value == arguments.get("revision"))
    if name == "structured_outputs_config" and isinstance(value, Mapping):
        return not any(given for key, given in value.items() if key not in ("backend", "disable_fallback"))
    return False


def _to_ours(name: str, value: Any) -> Any:
    if name in ("adapters", "model.adapters") and isinstance(value, Mapping):
        return ",".join(f"{adapter}={os.fspath(path)}" for adapter, path in value.items())
    if name == "dtype" and value is not None and not isinstance(value, str):
        value = str(value).removeprefix("torch.")
    if name == "served_model_name" and isinstance(value, list | tuple):
        if len(value) != 1:
            raise ConfigError(
                f"served_model_name: {value!r:.80} are several names; see frontend.model_aliases"
            )
        return value[0]
    ours = _VALUE_TO_OURS.get(name, {})
    return ours.get(value, value) if isinstance(value, str | int) else value
