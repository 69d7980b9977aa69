"""Measures decoders that transformers' modules compute, recorded and eager, beside the native ones, in turn.

    python -m benchmarks.worker.transformers_fallback [--streams 1 32]

The weights are random: 8 layers, 576 wide, of a Llama and of a Qwen 3. A ratio is native's time over the other's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.harness.command import create_parser, run
from benchmarks.harness.figures import Figure
from benchmarks.harness.timing import wall_s
from benchmarks.worker.session import RunnerSession, checked
from triptych.config import EngineConfig, LoadConfig, ModelConfig, SchedulerConfig, WorkerConfig
from triptych_services.worker.runner.base import Runner
from triptych_services.worker.service.startup import load_runner

SIZES = {
    "vocab_size": 4099,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "float32",
}
MODELS = {"Llama": ("llama", "LlamaForCausalLM"), "Qwen 3": ("qwen3", "Qwen3ForCausalLM")}
"""Title -> type of the model, and its architecture."""
BACKENDS = {"native": ("native", False), "recorded": ("transformers", False), "eager": ("transformers", True)}
"""Title -> model.backend and worker.enforce_eager."""
TOKENIZER = {"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}
"""Nothing is made of text here."""
INPUT_LEN = 32


def measure(arguments: argparse.Namespace) -> Iterator[Figure]:
    for title, (model_type, architecture) in MODELS.items():
        with tempfile.TemporaryDirectory() as path:
            config = {**SIZES, "model_type": model_type, "architectures": [architecture]}
            (Path(path) / "config.json").write_text(json.dumps(config))
            (Path(path) / "tokenizer.json").write_text(json.dumps(TOKENIZER))
            runners = {name: _runner(path, *backend, arguments) for name, backend in BACKENDS.items()}
            for num_streams in arguments.streams:
                samples: dict[str, list[float]] = {name: [] for name in runners}
                for seed in range(arguments.rounds):
                    for name, runner in runners.items():
                        samples[name].append(_step_ms(runner, num_streams, arguments.output_len, seed))
                yield from _figures(f"{title}, {num_streams} streams", samples)


def _figures(title: str, samples: dict[str, list[float]]) -> Iterator[Figure]:
    for name, values in samples.items():
        yield Figure(f"{title}, {name}", "ms", tuple(values))
        if name != "native":
            ratios = (own / other for own, other in zip(samples["native"], values, strict=True))
            yield Figure(f"{title}, {name}, speed of native's", "", tuple(ratios))


def _runner(directory: str, backend: str, eager: bool, arguments: argparse.Namespace) -> Runner:
    config = EngineConfig(
        model=ModelConfig(model=directory, backend=backend),
        load=LoadConfig(format="random"),
        scheduler=SchedulerConfig(max_num_seqs=max(arguments.streams), max_num_batched_tokens=256),
        worker=WorkerConfig(device="cpu", num_threads=arguments.num_threads, enforce_eager=eager),
    )
    return load_runner(config, lambda phase, progress: None)


def _step_ms(runner: Runner, num_streams: int, output_len: int, seed: int) -> float:
    """Return the time of a step in which every stream computes one token."""
    session = RunnerSession(runner)
    num_blocks = -(-(INPUT_LEN + output_len) // runner.facts.kv.block_size)
    rows = [session.row(slot, INPUT_LEN, num_blocks=num_blocks, seed=seed) for slot in range(num_streams)]
    session.restart()
    session.prefill(rows)
    return 1e3 * statistics.median(
        wall_s(lambda: checked(session.launch().wait())) for _ in range(output_len - 1)
    )


if __name__ == "__main__":
    parser = create_parser(__doc__, rounds=3)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--output-len", type=int, default=48)
    parser.add_argument("--num-threads", type=int, default=1)
    sys.exit(run(parser, measure))
