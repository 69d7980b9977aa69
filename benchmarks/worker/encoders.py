"""Measures texts per second of an encoder's runner, and of the peers that are installed, in turn.

    python -m benchmarks.worker.encoders MODEL [--task embed|rerank] [--peer-python PYTHON] [--dtype bfloat16]

MODEL is the directory of an encoder: all-MiniLM-L6-v2, or a cross-encoder for `rerank`. The texts are random token ids.
The peers, in the Python of --peer-python, are sentence-transformers, onnxruntime, and OpenVINO in the precision that it
chooses and in float32. A ratio is a peer's time over ours: by the clock, and of all cores together, which other
processes disturb less. `distance` is the largest difference of a number.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.command import create_parser, run
from benchmarks.harness.figures import Figure
from triptych.config import EngineConfig, ModelConfig, SchedulerConfig, WorkerConfig
from triptych.types.pooling import PoolingParams, Task
from triptych.types.sampling import SamplingParams
from triptych.types.step import F32, NewRow, RowContent, RowKey, StepPlan, empty_u32
from triptych_services.worker.runner.base import Runner
from triptych_services.worker.service.startup import load_runner

PEERS = ("sentence-transformers", "onnxruntime", "openvino", "openvino-float32")
CLS, SEP, FIRST_WORD, END_OF_WORDS = 101, 102, 1000, 20000  # of BERT's vocabulary


@dataclass(frozen=True, slots=True)
class Times:
    """The seconds of some texts, by the clock and of all cores together."""

    wall_s: float
    cpu_s: float


class OwnRunner:
    """The runner, by plans of steps that are as full as they may be."""

    def __init__(self, directory: str, arguments: argparse.Namespace) -> None:
        config = EngineConfig(
            model=ModelConfig(model=directory, dtype=arguments.dtype, quantization=arguments.quantization),
            scheduler=SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=arguments.step_tokens),
            worker=WorkerConfig(device="cpu", num_threads=arguments.num_threads),
        )
        self._runner: Runner = load_runner(config, lambda phase, progress: None)
        self._pooling = PoolingParams()
        if arguments.task == "rerank":
            self._pooling = PoolingParams(Task.CLASSIFY, activation=False)

    def compute(self, texts: NDArray[np.uint32]) -> tuple[Times, F32]:
        """Return the times that the texts take, and what they give, in their order."""
        runner = self._runner
        runner.reset()
        facts = runner.facts
        per_step = min(facts.max_num_batched_tokens // texts.shape[1], facts.max_num_seqs)
        found: list[F32] = []
        started, cpu_started = time.perf_counter(), time.process_time()
        num_before = 0
        for step_id, first in enumerate(range(0, len(texts), per_step), 1):
            rows = texts[first : first + per_step]
            result = runner.execute(self._plan(step_id, rows, num_before))
            if result.row_errors:
                raise RuntimeError(str(next(iter(result.row_errors.values()))))
            found += [result.vectors[RowKey(slot, step_id)] for slot in range(len(rows))]
            num_before = len(rows)
        times = Times(time.perf_counter() - started, time.process_time() - cpu_started)
        return times, np.concatenate(found)

    def _plan(self, step_id: int, texts: NDArray[np.uint32], num_before: int) -> StepPlan:
        slots = np.arange(len(texts), dtype=np.uint32)
        rows = tuple(
            NewRow(
                slot, step_id, RowContent(text, SamplingParams(), self._pooling), empty_u32(), 0, 0,
                np.array([slot + 1], np.uint32), 0,
            )
            for slot, text in enumerate(texts)
        )  # fmt: skip
        return StepPlan(
            step_id=step_id,
            last_result_seen=step_id - 1,
            removed_slots=np.arange(num_before, dtype=np.uint32),
            new_rows=rows,
            chunk_slots=slots,
            chunk_lengths=np.full(len(texts), texts.shape[1], np.uint32),
        )


class Peer:
    """A peer's process."""

    def __init__(self, name: str, directory: str, arguments: argparse.Namespace) -> None:
        script = Path(__file__).with_name("encoder_peer.py")
        command = [arguments.peer_python, str(script), directory, name, arguments.task]
        sizes = [str(arguments.num_threads), str(arguments.peer_batch)]
        self._process = subprocess.Popen(
            [*command, *sizes],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._read()

    def compute(self, path: Path) -> tuple[Times, F32]:
        """Return the times that the texts of a file take, and what they give."""
        assert self._process.stdin is not None, "a pipe"
        print(path, file=self._process.stdin, flush=True)
        answer = self._read()
        return Times(answer["seconds"], answer["cpu_s"]), np.load(answer["out"])

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None, "a pipe"
        while line := self._process.stdout.readline():
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise RuntimeError(f"the peer ended with {self._process.wait()}: {self._process.args!r}")


def measure(arguments: argparse.Namespace) -> Iterator[Figure]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        own = OwnRunner(arguments.model, arguments)
        peers: dict[str, Peer] = {}
        for name in arguments.peers if arguments.peer_python else ():
            peers[name] = Peer(name, arguments.model, arguments)
            stack.callback(peers[name].close)
        unit = "texts/s"
        for seed in range(arguments.rounds + 1):
            texts, types = random_texts(arguments, seed)
            path = folder / f"{seed}.npz"
            np.savez(path, token_ids=texts, token_types=types)
            times, vectors = own.compute(texts)
            timed = seed > 0  # the first one warms up
            if timed:
                yield Figure("triptych", unit, (len(texts) / times.wall_s,))
            for name, peer in peers.items():
                peer_times, expected = peer.compute(path)
                if timed:
                    yield Figure(name, unit, (len(texts) / peer_times.wall_s,))
                    yield Figure(f"triptych over {name}", "", (peer_times.wall_s / times.wall_s,))
                    ratio = peer_times.cpu_s / times.cpu_s
                    yield Figure(f"triptych over {name}, all cores' time", "", (ratio,))
                    yield Figure(f"distance to {name}", "", (float(np.abs(vectors - expected).max()),))


def random_texts(arguments: argparse.Namespace, seed: int) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """Return token ids and token types, [num_texts, num_tokens]: texts, or pairs with a fifth for the question."""
    shape = arguments.num_texts, arguments.num_tokens
    texts = np.random.default_rng(seed).integers(FIRST_WORD, END_OF_WORDS, shape).astype(np.uint32)
    types = np.zeros_like(texts)
    texts[:, 0], texts[:, -1] = CLS, SEP
    if arguments.task == "rerank":
        middle = arguments.num_tokens // 5
        texts[:, middle] = SEP
        types[:, middle + 1 :] = 1
    return texts, types


if __name__ == "__main__":
    parser = create_parser(__doc__, rounds=5)
    parser.add_argument("model")
    parser.add_argument("--task", choices=("embed", "rerank"), default="embed")
    parser.add_argument(
        "--peer-python", default="", help="with the peers' packages; empty: no peer is measured"
    )
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=PEERS)
    parser.add_argument("--peer-batch", type=int, default=16, help="texts that a peer computes at once")
    parser.add_argument("--num-texts", type=int, default=64)
    parser.add_argument("--num-tokens", type=int, default=128)
    parser.add_argument("--step-tokens", type=int, default=2048)
    parser.add_argument("--num-threads", type=int, default=2)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default="none")
    sys.exit(run(parser, measure))
