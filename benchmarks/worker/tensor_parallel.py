"""Measures ranks that share each layer against one process with as many cores.

    python -m benchmarks.worker.tensor_parallel [--ranks 2] [any option of the config]

The model has the sizes of SmolLM2-135M, except for numbers of heads that an even number of ranks divides, and random
weights. `--model.model` names another one. Runners are called in process, as by `runner_steps`: ranks compute the same
steps, each on its share of the cores.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from benchmarks.harness.command import ROOT, create_parser, module_command, run
from benchmarks.harness.figures import Figure
from tests.helpers.processes import free_port
from triptych.host import usable_cores
from triptych.hub import resolve_model

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 72,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "torch_dtype": "bfloat16",
}
TIMEOUT_S = 600.0
TITLES = ("decode", "prefill")


def measure(arguments: argparse.Namespace) -> Iterator[Figure]:
    options = [f"--{key}={text}" for key, text in vars(arguments).items() if "." in key]
    with tempfile.TemporaryDirectory() as folder:
        if not any(option.startswith("--model.model=") for option in options):
            Path(folder, "config.json").write_text(json.dumps(MODEL))
            shutil.copy(resolve_model("embedded") / "tokenizer.json", folder)
            options += [f"--model.model={folder}", "--load.format=random"]
        for _ in range(arguments.rounds):
            together = _run(arguments, options, 1)
            apart = _run(arguments, options, arguments.ranks)
            for title in TITLES:
                name = f"{arguments.streams} streams, {title}"
                yield Figure(f"{name}, one rank", "tok/s", (together[title],))
                yield Figure(f"{name}, {arguments.ranks} ranks", "tok/s", (apart[title],))
                yield Figure(f"{name}, ratio", "", (apart[title] / together[title],))


def _run(arguments: argparse.Namespace, options: list[str], num_ranks: int) -> dict[str, float]:
    """Return the tokens per second of `num_ranks` ranks, as rank 0 measures them."""
    num_threads = max(1, usable_cores() // num_ranks)
    shared = [
        f"--streams={arguments.streams}", "--input-len=128", "--output-len=65", "--rounds=1", "--json",
        f"--parallel.tensor-parallel-size={num_ranks}", f"--worker.num-threads={num_threads}",
        f"--parallel.rendezvous-address=127.0.0.1:{free_port()}", "--parallel.timeout-s=60",
        "--cache.num-blocks=1200", "--worker.device=cpu",
    ]  # fmt: skip
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(
                subprocess.Popen(
                    module_command(
                        "benchmarks.worker.runner_steps", *shared, f"--worker.rank={rank}", *options
                    ),
                    cwd=ROOT,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                )
            )
            for rank in range(num_ranks)
        ]
        for process in ranks:
            stack.callback(process.kill)
        written = [process.communicate(timeout=TIMEOUT_S)[0] for process in ranks]
    figures = {figure["name"]: figure for figure in json.loads(written[0])["figures"]}
    return {title: figures[f"{arguments.streams} streams, {title}"]["median"] for title in TITLES}


if __name__ == "__main__":
    from triptych.config.loader import add_config_flags

    parser = create_parser(__doc__, rounds=3)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--streams", type=int, default=64)
    add_config_flags(parser)
    sys.exit(run(parser, measure))
