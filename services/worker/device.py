"""Choosing the device, the threads and the precision, and refusing what this worker cannot do."""

from __future__ import annotations

from pathlib import Path

import torch

from services.worker import host
from triptych.config.architecture import ModelArchitecture
from triptych.config.fields import EngineConfig
from triptych.config.resolved import ResolvedConfig
from triptych.errors import ConfigError, FeatureDisabled
from triptych.types.facts import RankFacts

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_NATIVE_BFLOAT16 = frozenset({"avx512_bf16", "amx_bf16"})  # x86 extensions that multiply bfloat16


def resolve_config(
    engine: EngineConfig, architecture: ModelArchitecture, *, root: Path = host.ROOT
) -> ResolvedConfig:
    """Join the operator's config, the checkpoint's architecture and this machine's facts.

    Raises:
        ConfigError: a device that is not there, or a max_model_len above the model's own.
        FeatureDisabled: a value that this build knows and does not serve.
    """
    refuse_unbuilt(engine)
    own_limit, asked = architecture.max_position_embeddings, engine.model.max_model_len
    if asked > own_limit:
        raise ConfigError(
            f"model.max_model_len: {asked} is above the model's own limit {own_limit}; set it to "
            f"at most {own_limit}, or to 0 for the model's limit"
        )
    device = choose_device(engine.worker.device, engine.parallel.local_rank)
    dtype = choose_dtype(engine.model.dtype, architecture, native_bfloat16=has_native_bfloat16(device, root))
    return ResolvedConfig(
        engine=engine,
        architecture=architecture,
        rank=RankFacts(local_rank=engine.parallel.local_rank, device=str(device)),
        dtype=dtype,
        kv_dtype=dtype if engine.cache.dtype == "auto" else engine.cache.dtype,
    )


def refuse_unbuilt(engine: EngineConfig) -> None:
    """Refuse, naming key and value, what the config can say and this worker does not do.

    Raises:
        FeatureDisabled: weight-only quantization or more than one worker per model.
    """
    for key, value, served in (
        ("model.quantization", engine.model.quantization, "none"),
        ("parallel.tensor_parallel_size", engine.parallel.tensor_parallel_size, 1),
        ("parallel.pipeline_parallel_size", engine.parallel.pipeline_parallel_size, 1),
        ("parallel.rank", engine.parallel.rank, 0),
    ):
        if value != served:
            raise FeatureDisabled(f"{key} = {value}", f"this worker serves {key} = {served} alone; set it so")


def choose_device(requested: str, local_rank: int) -> torch.device:
    """The device that `worker.device` means on this machine: `cpu` or `cuda:<local_rank>`.

    Raises:
        ConfigError: `cuda` where torch sees no such device.
    """
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if requested == "cpu" or (requested == "auto" and num_devices == 0):
        return torch.device("cpu")
    if num_devices == 0:
        raise ConfigError(
            f"worker.device: cuda, but torch {torch.__version__} sees no CUDA device; install a CUDA "
            "build of torch and a driver, or set worker.device to cpu"
        )
    if local_rank >= num_devices:
        raise ConfigError(
            f"parallel.local_rank: {local_rank}, but torch sees {num_devices} CUDA device(s), numbered from 0"
        )
    return torch.device("cuda", local_rank)


def choose_dtype(requested: str, architecture: ModelArchitecture, *, native_bfloat16: bool) -> str:
    """The precision that `model.dtype` means; `auto` is the checkpoint's, where the device can do it.

    GGUF files are quantized, so their own precision says nothing: they count as bfloat16, which becomes
    float32 on a device that would only emulate it.
    """
    if requested != "auto":
        return requested
    stored = "bfloat16" if architecture.is_gguf else architecture.dtype
    return "float32" if stored == "bfloat16" and not native_bfloat16 else stored


def has_native_bfloat16(device: torch.device, root: Path = host.ROOT) -> bool:
    """Whether the device multiplies bfloat16 itself, rather than converting at every product."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)  # Ampere; older ones emulate
    return not _NATIVE_BFLOAT16.isdisjoint(host.cpu_flags(root))


def use_threads(requested: int) -> int:
    """Give torch its CPU threads, process-wide, and return how many; 0: the physical cores we may use.

    A second thread per core only fights for the same vector unit.
    """
    num_threads = requested or host.usable_cores()
    torch.set_num_threads(num_threads)
    return num_threads


def free_memory(device: torch.device) -> int:
    """Bytes on `device` that this process can still take."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return host.free_memory()


def device_name(device: torch.device) -> str:
    """The processor's name, for people."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else host.cpu_name()
