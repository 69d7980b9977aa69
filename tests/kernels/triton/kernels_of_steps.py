"""Which kernels the steps of models of Llama-3.1-8B's shapes launch on an H200, without a GPU; two are compiled ahead.

A program, as `TRITON_INTERPRET` is read when kernels are defined. Prints JSON: see `main`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from triton import knobs

from services.worker.attention.paged import PagedAttention
from services.worker.models.base import CausalLM
from services.worker.models.registry import create_model
from services.worker.runner.activation_memory import measure_activations
from services.worker.runner.device import compile_ahead
from tests.kernels.triton.hopper import believe_in_hopper
from tests.worker.deferred import DeferredLink
from tests.worker.tiny import tiny_architecture, tiny_config
from triptych.config.checkpoint import read_architecture
from triptych.config.fields import EngineConfig, SchedulerConfig
from triptych.config.resolved import ResolvedConfig
from triptych.types.facts import KvShape, RankFacts
from triptych_kernels import dispatch
from triptych_kernels.cpu.library import forced_isa
from triptych_kernels.held_weight import HeldWeight
from triptych_kernels.ops import embedding, silu_and_mul
from triptych_kernels.triton.compile_ahead import NotedLaunch, noted_launches

META = torch.device("meta")
MAX_LEN = 8192
STEPS = ((8192, 256), (8000, 2), (512, 64), (333, 200), (100, 33), (48, 16), (17, 5), (3, 3), (1, 1))
"""Tokens of the longest step with prompts, and requests."""

MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "q4": {"quantization": "q4"},
    "int8": {"quantization": "int8"},
    "experts": {"architectures": ["MixtralForCausalLM"]},
    "experts, q4": {"architectures": ["MixtralForCausalLM"], "quantization": "q4"},
}


def launches_of_steps(name: str) -> tuple[list[str], list[str]]:
    """Names of the kernels of the steps that a start goes through, and of those that `STEPS` need beyond them."""
    config = _config(**MODELS[name])
    model = create_model(config=config)
    ahead = _noted(model, compile_ahead.step_sizes(config))
    late = _noted(model, STEPS)
    return [launch.name for launch in ahead], [launch.name for launch in late if launch not in ahead]


def _noted(model: CausalLM, sizes: Iterable[tuple[int, int]]) -> dict[NotedLaunch, None]:
    kv = KvShape(num_blocks=1, block_size=16, num_layers=1, num_kv_heads=8, head_dim=128, dtype="bfloat16")
    with noted_launches() as noted, torch.inference_mode():
        for num_tokens, num_rows in sizes:
            measure_activations(
                model,
                kv,
                META,
                attention=PagedAttention(),
                max_num_batched_tokens=num_tokens,
                max_num_seqs=num_rows,
                max_model_len=MAX_LEN,
                with_graphs=False,
                peak_of=_run,
            )
    return noted


def compile_two() -> tuple[int, int]:
    """How many compilations two kernels cost ahead, and how many at their launch after that."""
    x, table = torch.empty(4, 128, device=META), torch.empty(9, 64, device=META)
    calls: list[Callable[[], object]] = [
        partial(silu_and_mul, x, impl="triton"),
        partial(embedding, torch.empty(4, dtype=torch.int64, device=META), table, impl="triton"),
    ]
    num_compiled = 0

    def count(**_: Any) -> None:
        nonlocal num_compiled
        num_compiled += 1

    knobs.runtime.jit_post_compile_hook = count
    with noted_launches() as noted:
        for call in calls * 2:
            call()
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda launch: launch.compile(), noted))
    ahead, num_compiled = num_compiled, 0
    with noted_launches() as left:
        for call in calls:
            call()
    return ahead, num_compiled + len(left)


def launches_at_start() -> list[str]:
    """Names of the kernels that a worker compiles while it reads the weights of a tiny model."""
    compile_ahead.CudaLink = lambda device: DeferredLink()  # type: ignore[assignment,misc]
    with forced_isa(""):  # as on a device, no weights are packed for native kernels
        config = replace(
            tiny_config(tiny_architecture(head_dim=16, max_position_embeddings=2048)),
            attention_backend="triton",
        )
        noted = compile_ahead._launches_of_steps(config, create_model(config=config), torch.device("cpu"))
    return [launch.name for launch in noted]


def main() -> None:
    believe_in_hopper()
    ahead, at_launch = compile_two()
    dispatch._impl_for = _impl_on_cuda
    found = {
        "ahead": ahead,
        "at_launch": at_launch,
        "start": launches_at_start(),
        "steps": {name: launches_of_steps(name) for name in MODELS},
    }
    json.dump(found, sys.stdout)


def _impl_on_cuda(op: str, operand: object) -> str:
    is_held = isinstance(operand, HeldWeight) and op in dispatch.QUANTIZED_OPS
    return "triton" if is_held or op in dispatch.TRITON_OPS else "torch"


def _config(*, quantization: str = "none", **changes: Any) -> ResolvedConfig:
    config = {
        "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "rms_norm_eps": 1e-5, "vocab_size": 128256,
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 1, "num_attention_heads": 32,
        "num_key_value_heads": 8, "max_position_embeddings": MAX_LEN, "rope_theta": 500000.0,
        "num_local_experts": 8, "num_experts_per_tok": 2, "torch_dtype": "bfloat16",
    }  # fmt: skip
    with TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(config | changes))
        architecture = read_architecture(Path(directory))
    engine = EngineConfig(scheduler=SchedulerConfig(max_num_seqs=256, max_num_batched_tokens=8192))
    return ResolvedConfig(
        engine,
        architecture,
        RankFacts(device="meta"),
        dtype="bfloat16",
        kv_dtype="bfloat16",
        quantization=quantization,
    )


def _run(launch: Callable[[], None]) -> int:
    launch()
    return 0


if __name__ == "__main__":
    main()
