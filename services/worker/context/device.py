"""The device and the threads of this process, and what torch knows of them."""

from __future__ import annotations

import logging
import os
import platform
from pathlib import Path

import torch

from triptych import host
from triptych.checkpoint.architecture import ModelArchitecture
from triptych.config import EngineConfig
from triptych.errors import ConfigError
from triptych_kernels.cpu.compile import FLAGS_OF_MACHINE
from triptych_kernels.cpu.library import isa, missing_flags, refused_isas
from triptych_kernels.cpu.library import use_threads as use_native_threads
from triptych_services.worker.context.machine import (
    cpu_flags_of,
    cpu_prefers_bfloat16,
    cpu_traits,
    examine_machine,
)
from triptych_services.worker.context.resolve import resolve_for_device
from triptych_services.worker.context.resolved_config import DeviceTraits, ResolvedConfig

log = logging.getLogger(__name__)

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
STORED_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Forms of stored tensors that torch reads as they are -> dtype."""

_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_ALLOCATOR_SETTINGS = "expandable_segments:True"


def resolve_config(
    engine: EngineConfig, architecture: ModelArchitecture, *, root: Path = host.ROOT
) -> ResolvedConfig:
    """Join the operator's config, the checkpoint's architecture and this machine's facts.

    Raises:
        ConfigError: The device or the instruction set does not exist, or max_model_len is above the model's own.
        FeatureDisabled: A value is not supported on this machine.
    """
    device = choose_device(engine.worker.device, engine.worker.local_rank)
    if device.type == "cpu" and root == host.ROOT:
        examine_machine(engine.worker.instruction_set)  # first, since it decides about kernels and precision
    traits = cpu_traits(root)
    if device.type != "cpu":
        traits = DeviceTraits(
            device=str(device),
            prefers_bfloat16=prefers_bfloat16(device, root),
            native_kernels=traits.native_kernels,
            byte_input_forms=traits.byte_input_forms,
            native_float8=has_native_float8(device),
            compute_capability=torch.cuda.get_device_capability(device),
            attention_packages=traits.attention_packages,
            device_bytes=torch.cuda.get_device_properties(device).total_memory,
        )
    return resolve_for_device(engine, architecture, traits)


def choose_device(requested: str, local_rank: int) -> torch.device:
    """Return the device that `worker.device` means on this machine: `cpu` or `cuda:<local_rank>`.

    Raises:
        ConfigError: It is `cuda`, and torch sees no such device.
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
            f"worker.local_rank: {local_rank}, but torch sees {num_devices} CUDA device(s), numbered from 0"
        )
    return torch.device("cuda", local_rank)


def prefers_bfloat16(device: torch.device, root: Path = host.ROOT) -> bool:
    """Return whether the device multiplies bfloat16 faster than float32, rather than converting at every product.

    The instruction set of the native kernels decides on a CPU; its flags do without them, or if `root` is that of
    another machine.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)  # Ampere; older ones emulate
    return cpu_prefers_bfloat16(root)


def has_native_float8(device: torch.device) -> bool:
    """Return whether the device multiplies 8-bit floats itself: Ada, Hopper and newer."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def missing_kernels(root: Path = host.ROOT) -> str:
    """Return why no native kernels are in use on this CPU, and the remedy; empty if they are in use."""
    if isa():
        return ""
    if platform.system() not in ("Linux", "Darwin") or platform.machine() not in FLAGS_OF_MACHINE:
        return f"there are none for {platform.system()} on {platform.machine()}"
    if refused_isas():
        return "; ".join(f"{name} is not used: {problem}" for name, problem in refused_isas().items())
    if missing := missing_flags(cpu_flags_of(root)):
        return f"this processor has no {', '.join(missing)}, which they need"
    return (
        "they are not built; `python -m triptych_kernels.cpu.build` builds them where there is g++ or clang++"
    )


def use_threads(requested: int, *, num_sharing: int = 1) -> int:
    """Give native kernels and torch the model's CPU threads, process-wide, and return how many each has.

    Args:
        requested: Number of threads; 0: the physical cores that this process may use, since a second thread per core
            only competes for the same vector unit.
        num_sharing: Number of processes that share those cores in equal parts.
    """
    num_threads = requested or max(1, host.usable_cores() // num_sharing)
    use_native_threads(num_threads)
    torch.set_num_threads(num_threads)
    return num_threads


def leave_cores_to_kernels() -> None:
    """Let torch use one thread, for its small part of a step; native kernels keep their threads."""
    torch.set_num_threads(1)


def use_device(device: torch.device) -> None:
    """Make a device current on the calling thread and set torch up for it, before anything is allocated on it.

    Segments that grow in place keep steps of many sizes from fragmenting memory. An allocator setting in the
    environment takes precedence. Products that cuBLAS computes in parts are summed in float32; torch's default lets it
    sum them in 16 bits.
    """
    if device.type != "cuda":
        return
    if not any(name in os.environ for name in _ALLOCATOR_VARIABLES):
        _set_allocator()
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.cuda.set_device(device)


def _set_allocator() -> None:
    """Let segments grow in place, by private functions of torch that other versions may not have."""
    set_settings = getattr(torch._C, "_accelerator_setAllocatorSettings", None) or getattr(
        torch.cuda.memory, "_set_allocator_settings", None
    )
    try:
        if set_settings is None:
            raise RuntimeError(f"torch {torch.__version__} has no function for it")
        set_settings(_ALLOCATOR_SETTINGS)
    except RuntimeError as error:
        log.warning(
            "torch's allocator cannot be set to %s (%s), so memory may be cut up by steps of many sizes; set %s "
            "in the environment",
            _ALLOCATOR_SETTINGS,
            error,
            _ALLOCATOR_VARIABLES[0],
        )


def free_memory(device: torch.device) -> int:
    """Return the number of bytes on `device` that this process can still allocate."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    return host.free_memory()


def held_memory(device: torch.device) -> int:
    """Return the number of bytes on `device` that this process has allocated."""
    if device.type == "cuda":
        return torch.cuda.memory_reserved(device)
    return host.resident_memory()


def device_name(device: torch.device) -> str:
    """Return the processor's name, for people."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else host.cpu_name()
