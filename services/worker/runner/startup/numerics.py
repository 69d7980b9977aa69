"""The names and values of what decides the bits of a worker's results beside the checkpoint. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import metadata

from triptych.checkpoint.architecture import TRANSFORMERS_MODEL
from triptych_services.worker.context.resolved_config import ResolvedConfig

_PACKAGES = ("triptych", "torch", "triton", "llguidance")
_PACKAGES_OF_ATTENTION = ("flash-attn", "flash-attn-3", "flashinfer-python")


def numerics_of(config: ResolvedConfig, *, processor: str, block_size: int, num_threads: int = 0) -> str:
    """Return it as a JSON object. Workers of one checkpoint with equal ones give equal bits for equal steps.

    It covers the processor, the attention backend, the precision of activations, weights and KV cache, the ranks, the
    size of blocks, batch invariance, and the versions of the libraries that compute or mask logits.

    Args:
        processor: Name of what the kernels run on: an instruction set, a GPU, or `simulated`.
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
        "block_size": block_size,
        **{name: _version(name) for name in _packages(config)},
    }
    return json.dumps(deciding, sort_keys=True)


def _packages(config: ResolvedConfig) -> tuple[str, ...]:
    is_transformers = config.architecture.name == TRANSFORMERS_MODEL
    return (*_PACKAGES, *_PACKAGES_OF_ATTENTION, *(("transformers",) if is_transformers else ()))


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
