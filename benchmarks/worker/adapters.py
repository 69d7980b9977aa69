"""Measures steps of rows with low-rank adapters beside steps without, in turn, called in process.

    python -m benchmarks.worker.adapters [--streams 1 32] [--num-adapters 8] [--rank 16] [--model.model embedded]

The adapters have random factors for all projections of the layers, those of experts, too. A ratio is the time of a
worker that serves none over the other's: `idle` serves adapters of which no row has one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.harness.command import create_parser, run
from benchmarks.harness.figures import Figure
from benchmarks.harness.timing import wall_s
from benchmarks.worker.session import RunnerSession, checked
from triptych.checkpoint.architecture import LayerSpec, ModelArchitecture
from triptych.config.loader import add_config_flags, config_from_arguments
from triptych.hub import resolve_model
from triptych_services.worker.context.device import resolve_config
from triptych_services.worker.context.resolved_config import ResolvedConfig
from triptych_services.worker.models.choose import choose_architecture
from triptych_services.worker.runner.base import Runner
from triptych_services.worker.runner.sleepable_runner import SleepableRunner
from triptych_services.worker.runner.startup.create import create_runner

INPUT_LEN = 32


def measure(arguments: argparse.Namespace) -> Iterator[Figure]:
    config = config_from_arguments(arguments)
    directory = resolve_model(config.model.model)
    resolved = resolve_config(config, choose_architecture(directory, config.model.backend))
    runners = {
        "without": _runner(resolved, directory, 0),
        "with": _runner(resolved, directory, arguments.num_adapters),
    }
    store = runners["with"].adapters
    with tempfile.TemporaryDirectory() as path:
        digests = []
        for number in range(arguments.num_adapters):
            saved = save_random(Path(path) / str(number), resolved.architecture, arguments.rank, number)
            started = time.perf_counter()
            digests.append(store.load(str(number), "", saved).digest)
            elapsed = time.perf_counter() - started
            yield Figure("load of an adapter", "ms", (1e3 * elapsed,))
    kinds: dict[str, tuple[Runner, Sequence[str]]] = {
        "without": (runners["without"], ("",)),
        "idle": (runners["with"], ("",)),
        "adapted": (runners["with"], digests),
    }
    for num_streams in arguments.streams:
        samples: dict[str, list[float]] = {kind: [] for kind in kinds}
        for seed in range(arguments.rounds):
            for kind, (runner, used) in kinds.items():
                samples[kind].append(_step_ms(runner, used, num_streams, arguments.output_len, seed))
        for kind, found in samples.items():
            yield Figure(
                f"{num_streams} streams, {kind}", "ms", (statistics.median(found),), less_is_better=True
            )
            ratios = tuple(base / own for base, own in zip(samples["without"], found, strict=True))
            yield Figure(f"{num_streams} streams, {kind}, ratio", "", ratios)


def save_random(directory: Path, architecture: ModelArchitecture, rank: int, seed: int) -> Path:
    """Save an adapter of all projections of a Llama, or of a mixture and its experts, in PEFT's format."""
    directory.mkdir()
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for index, layer in enumerate(architecture.layers):
        for name, out_features, in_features, count in _projections(layer, architecture.hidden_size):
            prefix = f"base_model.model.model.layers.{index}.{name}"
            for part, shape in (("A", (count * rank, in_features)), ("B", (out_features, count * rank))):
                tensors[f"{prefix}.lora_{part}.weight"] = torch.randn(shape, generator=generator) * 0.02
    save_file(tensors, directory / "adapter_model.safetensors")
    config: dict[str, object] = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none"}
    config["target_parameters"] = ["experts.gate_up_proj", "experts.down_proj"]
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def _projections(layer: LayerSpec, hidden: int) -> Iterator[tuple[str, int, int, int]]:
    """Yield each adapted module's name, its outputs and inputs, and of how many experts it holds the factors."""
    queries, keys, inner = (
        layer.num_heads * layer.head_dim,
        layer.num_kv_heads * layer.head_dim,
        layer.intermediate_size,
    )
    yield "self_attn.q_proj", queries, hidden, 1
    yield "self_attn.k_proj", keys, hidden, 1
    yield "self_attn.v_proj", keys, hidden, 1
    yield "self_attn.o_proj", hidden, queries, 1
    if layer.experts is not None:
        yield "mlp.experts.base_layer", 2 * inner, hidden, layer.experts.num_experts
        yield "mlp.experts", hidden, inner, layer.experts.num_experts
        return
    yield "mlp.gate_proj", inner, hidden, 1
    yield "mlp.up_proj", inner, hidden, 1
    yield "mlp.down_proj", hidden, inner, 1


def _runner(config: ResolvedConfig, directory: Path, max_adapters: int) -> SleepableRunner:
    worker = replace(config.engine.worker, max_adapters=max_adapters)
    config = replace(config, engine=replace(config.engine, worker=worker))
    return create_runner(config, directory, boot_id="benchmark", on_phase=lambda phase, progress: None)


def _step_ms(runner: Runner, digests: Sequence[str], num_streams: int, output_len: int, seed: int) -> float:
    """Return the median of a decode step, of which the rows have these adapters in turn."""
    session = RunnerSession(runner)
    num_blocks = -(-(INPUT_LEN + output_len) // runner.facts.kv.block_size)
    rows = []
    for slot in range(num_streams):
        row = session.row(slot, INPUT_LEN, num_blocks=num_blocks, seed=seed)
        content = replace(row.content, adapter=digests[slot % len(digests)])
        rows.append(replace(row, content=content))
    session.restart()
    session.prefill(rows)
    return 1e3 * statistics.median(
        wall_s(lambda: checked(session.launch().wait())) for _ in range(output_len - 1)
    )


if __name__ == "__main__":
    parser = create_parser(__doc__, rounds=7)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--num-adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--output-len", type=int, default=32)
    add_config_flags(parser)
    sys.exit(run(parser, measure))
