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
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from triton import knobs

import triptych_kernels.triton.tuning.tunable as tuning
from tests.kernels.triton.hopper import believe_in_hopper
from tests.worker.deferred import DeferredStream
from tests.worker.sampling_kinds import KINDS
from tests.worker.step_runs import runner_for
from tests.worker.tiny import new_row, step_plan, tiny_architecture, tiny_config
from triptych.checkpoint.config_json import read_architecture
from triptych.config import EngineConfig, SchedulerConfig
from triptych.types.facts import KvLayout
from triptych.types.sampling import MAX_LOGPROBS, SamplingParams
from triptych_kernels import registry
from triptych_kernels.cpu.library import forced_isa
from triptych_kernels.ops import embedding, silu_and_mul
from triptych_kernels.triton.linear.few_rows import FEW_ROWS, GATED_LINEAR, LINEAR
from triptych_kernels.triton.tuning.compile_ahead import NotedLaunch, noted_launches
from triptych_services.worker.attention.paged import PagedAttention
from triptych_services.worker.context.model_context import ModelContext
from triptych_services.worker.context.rank_group import OneRank
from triptych_services.worker.context.resolved_config import RankFacts, ResolvedConfig
from triptych_services.worker.models.base import CausalLM
from triptych_services.worker.models.registry import create_model
from triptych_services.worker.runner.startup import compile_ahead
from triptych_services.worker.runner.startup.activation_memory import LargestSteps
from triptych_services.worker.runner.startup.kv_plan import KvPlan

META = torch.device("meta")
MAX_LEN = 8192
STEPS = ((8192, 256), (8000, 2), (512, 64), (333, 200), (100, 33), (48, 16), (17, 5), (3, 3), (1, 1))
"""Tokens of the longest step with prompts, and requests."""

EXPERTS = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2}
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "q4": {"quantization": "q4"},
    "int8": {"quantization": "int8"},
    "experts": EXPERTS,
    "experts, q4": EXPERTS | {"quantization": "q4"},
}


def launches_of_steps(name: str) -> tuple[list[str], list[str]]:
    """Names of the kernels of the steps that a start goes through, and of those that `STEPS` need beyond them."""
    config = _config(**MODELS[name])
    model = create_model(context=ModelContext(config))
    ahead = _noted(model, compile_ahead.step_sizes(config))
    late = _noted(model, STEPS)
    return [launch.name for launch in ahead], [launch.name for launch in late if launch not in ahead]


def store_tiles_of_few_rows(folder: Path) -> None:
    """Store a file for the device with tiles for plain products of few rows, other ones for each bucket."""
    shapes = {
        LINEAR: ((6144, 4096), (4096, 4096), (4096, 14336), (128256, 4096)),
        GATED_LINEAR: ((28672, 4096),),
    }
    kernels: dict[str, list[dict[str, Any]]] = {}
    for tunable, of_tunable in shapes.items():
        for bucket, (shape, rows) in enumerate(product(of_tunable, FEW_ROWS)):
            values = (*shape, torch.bfloat16, rows)
            _, *candidates = tunable.candidates(*values)
            key = dict(zip(tunable.key, (*shape, "bfloat16", rows), strict=True))
            config = tuning.as_plain(candidates[bucket % len(FEW_ROWS)])
            entry = {"key": key, "config": config, "measured": "never", "us": 1.0, "default_us": 2.0}
            kernels.setdefault(tunable.name, []).append(entry)
    path = tuning.file_path("A GPU", folder)
    path.write_text(json.dumps({"device": "A GPU", "compute_capability": [9, 0], "kernels": kernels}))
    tuning.FOLDER = folder
    tuning.device_name = lambda device: "A GPU"
    tuning.file_of_device.cache_clear()
    for tunable in shapes:
        tunable.forget()


def _noted(model: CausalLM, sizes: Iterable[tuple[int, int]]) -> dict[NotedLaunch, None]:
    kv = KvLayout(num_blocks=1, block_size=16, num_layers=1, num_kv_heads=8, head_dim=128, dtype="bfloat16")
    with noted_launches() as noted, torch.inference_mode():
        for num_tokens, num_rows in sizes:
            steps = LargestSteps(
                model,
                KvPlan(kv, MAX_LEN),
                META,
                attention=PagedAttention(),
                max_num_batched_tokens=num_tokens,
                max_num_rows=num_rows,
                max_model_len=MAX_LEN,
            )
            steps.run_prompts()
            steps.run_decodes()
    return noted


def compile_two() -> tuple[int, int, int]:
    """Count compilations of two kernels.

    Returns:
        The numbers of compilations ahead, of those at their launch after that, and of those that a launch would have
        found before they were loaded.
    """
    x, table = torch.empty(4, 128, device=META), torch.empty(9, 64, device=META)
    calls: list[Callable[[], object]] = [
        partial(silu_and_mul, x, impl="triton"),
        partial(embedding, torch.empty(4, dtype=torch.int64, device=META), table, impl="triton"),
    ]
    num_compiled = num_found_early = 0

    def count(**_: Any) -> None:
        nonlocal num_compiled
        num_compiled += 1

    def look_for_it(*_: object) -> None:
        nonlocal num_found_early
        of_launch = (launch.kernel.device_caches[0][0].values() for launch in noted)
        num_found_early += any(compiled.module is None for found in of_launch for compiled in found)

    knobs.runtime.jit_post_compile_hook = count
    knobs.runtime.kernel_load_start_hook.add(look_for_it)
    with noted_launches() as noted:
        for call in calls * 2:
            call()
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda launch: launch.compile(), noted))
    ahead, num_compiled = num_compiled, 0
    with noted_launches() as left:
        for call in calls:
            call()
    return ahead, num_compiled + len(left), num_found_early


def launches_at_start() -> tuple[list[str], list[str]]:
    """Names of the kernels that a worker compiles while it reads the weights of a tiny model, and of those that
    requests need beyond them, each of another kind of sampling."""
    compile_ahead.CudaStream = lambda device: DeferredStream()  # type: ignore[assignment,misc]
    with forced_isa(""):  # as on a device, no weights are packed for native kernels
        config = replace(
            tiny_config(tiny_architecture(head_dim=16, max_position_embeddings=2048)),
            attention_backend="triton",
        )
        model = create_model(context=ModelContext(config))
        ahead = compile_ahead.note_launches(config, OneRank(), model, torch.device("cpu"))
        runner = runner_for(model, config, DeferredStream())
        with noted_launches() as late:
            for sampling in (*KINDS.values(), SamplingParams(logprobs=MAX_LOGPROBS)):
                runner.reset()
                row = new_row(0, [5, 6, 7], [1], sampling=sampling)
                runner.execute(step_plan(1, new=[row], chunks={0: 3}))
                runner.execute(step_plan(2))
    return [launch.name for launch in ahead], [launch.name for launch in late if launch not in ahead]


def main() -> None:
    believe_in_hopper()
    ahead, at_launch, found_early = compile_two()
    registry.DEVICE_TO_IMPL |= dict.fromkeys(registry.DEVICE_TO_IMPL, "triton")
    found = {
        "ahead": ahead,
        "at_launch": at_launch,
        "found_early": found_early,
        "start": launches_at_start(),
        "steps": {name: launches_of_steps(name) for name in MODELS},
    }
    with TemporaryDirectory() as folder:
        store_tiles_of_few_rows(Path(folder))
        found["few rows"] = launches_of_steps("plain")
    json.dump(found, sys.stdout)


def _config(*, quantization: str = "none", **changes: Any) -> ResolvedConfig:
    config = {
        "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "rms_norm_eps": 1e-5, "vocab_size": 128256,
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 1, "num_attention_heads": 32,
        "num_key_value_heads": 8, "max_position_embeddings": MAX_LEN, "rope_theta": 500000.0,
        "torch_dtype": "bfloat16",
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


if __name__ == "__main__":
    main()
