"""The rows of the comparison, and how they are measured: engines in turn, each in a process of its own per round."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.figures import Figure
from benchmarks.harness.machine import compute_cpus
from benchmarks.harness.process_tree import cpu_seconds, descendants, peak_resident_bytes
from benchmarks.harness.processes import Child, ChildError
from benchmarks.peers.engines import Engine
from benchmarks.peers.environments import log_file

MAX_NUM_SEQS = 64
MAX_MODEL_LEN = 1280
"""Prompt and output of every workload fit; engines that reserve memory by it reserve no more."""
LOAD_TIMEOUT_S = 900.0
"""vLLM compiles for minutes the first time."""
CLOSE_TIMEOUT_S = 60.0
RUN_TIMEOUT_S = 900.0
"""The longest batch has 16,384 tokens."""
WARM_UP_OUTPUT_LEN = 4
WARM_UP_INPUT_LEN = 32
IDLE_SETTLE_S = 1.0
IDLE_S = 5.0


@dataclass(frozen=True, slots=True)
class Workload:
    """One batch: all prompts at once, greedy, end-of-sequence ignored."""

    num_prompts: int
    input_len: int
    """Tokens per prompt."""
    output_len: int
    """New tokens per prompt."""

    @property
    def is_prefill(self) -> bool:
        """One new token: what is measured is the prompt."""
        return self.output_len == 1

    def tokens_per_s(self, wall_s: float) -> float:
        """Return the rate of one batch: output tokens over the whole time, or prompt tokens of a prefill."""
        return self.num_prompts * (self.input_len if self.is_prefill else self.output_len) / wall_s

    def warm_up(self) -> Workload:
        """Return a short batch of the same width, after which threads, buffers and kernels of that shape exist."""
        input_len = self.input_len if self.is_prefill else WARM_UP_INPUT_LEN
        return replace(self, input_len=input_len, output_len=min(self.output_len, WARM_UP_OUTPUT_LEN))


@dataclass(frozen=True, slots=True)
class Row:
    """One figure per engine."""

    key: str
    """As `--rows` names it."""
    title: str
    unit: str
    less_is_better: bool = False
    workload: Workload | None = None
    """Batch that is timed; None for a figure of the process."""
    repeats: int = 1
    """Batches per round: single short ones say little."""

    def figure(self, engine: Engine, value: float) -> Figure:
        return Figure(self.name(engine), self.unit, (value,), less_is_better=self.less_is_better)

    def name(self, engine: Engine) -> str:
        return f"{engine.name}: {self.title}"


FIRST_TOKEN = Workload(1, 128, 1)
START = Row("start", "start to first token", "s", less_is_better=True)
START_CPU = Row("start-cpu", "CPU time of a start", "s", less_is_better=True)
MEMORY = Row("memory", "peak memory", "GB", less_is_better=True)
IDLE = Row("idle", "idle CPU", "%", less_is_better=True)
ROWS = (
    Row("1", "1 stream", "tok/s", workload=Workload(1, 128, 128), repeats=3),
    Row("8", "8 streams", "tok/s", workload=Workload(8, 128, 128), repeats=2),
    Row("32", "32 streams", "tok/s", workload=Workload(32, 128, 128)),
    Row("64", "64 streams", "tok/s", workload=Workload(64, 128, 128)),
    Row("prefill", "prefill of 1,024", "tok/s", workload=Workload(1, 1024, 1), repeats=3),
    START,
    START_CPU,
    MEMORY,
    IDLE,
)


def draw_prompts(workload: Workload, vocab_size: int, *key: int) -> list[list[int]]:
    """Return random prompts as token ids: the same `key`, the same prompts.

    With a key of its own for every batch of a round, no prefix cache finds anything; with the same one for every
    engine, none gets easier prompts than another.
    """
    shape = (workload.num_prompts, workload.input_len)
    prompts: list[list[int]] = np.random.default_rng(key).integers(0, vocab_size, shape).tolist()
    return prompts


def measure_rounds(
    engines: Sequence[Engine], rows: Sequence[Row], num_rounds: int, *, vocab_size: int, seed: int
) -> Iterator[Figure]:
    """Measure every engine once per round, so that a machine that drifts hits all alike.

    Before the first round each is started once: compilers' and packers' caches are warm, as a user's are from
    the second start on. An engine that fails there is not measured further.
    """
    engine_to_model: dict[Engine, Path | str] = {}
    for number in range(num_rounds + 1):
        title = f"round {number}" if number else "first start"
        for engine in engines if number == 0 else list(engine_to_model):
            print(f"{title} of {num_rounds}: {engine.name}", file=sys.stderr, flush=True)
            model = engine_to_model.get(engine) or engine.prepare()
            try:
                chosen = rows if number else [START]
                for figure in _measure(engine, model, chosen, vocab_size, (seed, number)):
                    if number:
                        yield figure
                engine_to_model[engine] = model
            except ChildError as error:
                yield Figure(f"{engine.name}: {title}", error=str(error))


def _measure(
    engine: Engine, model: Path | str, rows: Sequence[Row], vocab_size: int, key: tuple[int, int]
) -> Iterator[Figure]:
    """Start one engine, let it run the rows, and end it.

    Raises:
        ChildError: It failed, hangs, or gave other than the tokens asked for.
    """
    cpus = compute_cpus()

    def batch_s(row: Row, workload: Workload, batch: int) -> float:
        prompts = draw_prompts(workload, vocab_size, *key, ROWS.index(row), batch)
        request = {"run": {"prompts": prompts, "max_tokens": workload.output_len}}
        answer = adapter.ask(request, RUN_TIMEOUT_S)
        if answer["num_tokens"] != [workload.output_len] * workload.num_prompts:
            raise ChildError(
                f"{workload}: new tokens per prompt are {answer['num_tokens']} instead of {workload.output_len}"
            )
        engine_pids[:] = answer["pids"]  # llama.cpp's server is a new one for each number of streams
        peaks_bytes.append(peak_resident_bytes(descendants(engine_pids)))
        wall_s: float = answer["wall_s"]
        return wall_s

    with Child(engine.command, env=environment(engine, cpus), log=log_file(engine.name)) as adapter:
        load = {
            "model": str(model),
            "num_threads": len(cpus),
            "max_num_seqs": MAX_NUM_SEQS,
            "max_model_len": MAX_MODEL_LEN,
            "options": dict(engine.options()),
        }
        engine_pids: list[int] = adapter.ask({"load": load}, LOAD_TIMEOUT_S)["pids"]
        peaks_bytes = [peak_resident_bytes(descendants(engine_pids))]
        if START in rows or START_CPU in rows:
            batch_s(START, FIRST_TOKEN, 0)
            started_s = time.monotonic() - adapter.started_s
            started_cpu_s = cpu_seconds(descendants([adapter.pid]))
            if START in rows:
                yield START.figure(engine, started_s)
            if START_CPU in rows:
                yield START_CPU.figure(engine, started_cpu_s)
        for row in rows:
            if row.workload is not None:
                batch_s(row, row.workload.warm_up(), row.repeats)
                for batch in range(row.repeats):
                    wall_s = batch_s(row, row.workload, batch)
                    yield row.figure(engine, row.workload.tokens_per_s(wall_s))
        if IDLE in rows:
            yield IDLE.figure(engine, _idle_percent(engine_pids))
        if MEMORY in rows:
            yield MEMORY.figure(engine, max(peaks_bytes) / 1e9)
        adapter.finish(CLOSE_TIMEOUT_S)


def environment(engine: Engine, cpus: tuple[int, ...]) -> dict[str, str]:
    """Return ours without variables that would set an engine's threads: its adapter sets them."""
    inherited: dict[str, Any] = {
        name: text for name, text in os.environ.items() if not name.startswith(("OMP_", "KMP_", "MKL_"))
    }
    return {**inherited, **engine.env(cpus)}


def _idle_percent(engine_pids: list[int]) -> float:
    """Return CPU time over wall time with nothing to do; 100 is one busy core."""
    time.sleep(IDLE_SETTLE_S)
    processes = descendants(engine_pids)
    before_s, started_s = cpu_seconds(processes), time.monotonic()
    time.sleep(IDLE_S)
    return 100 * (cpu_seconds(processes) - before_s) / (time.monotonic() - started_s)
