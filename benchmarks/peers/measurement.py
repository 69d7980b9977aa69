"""Measuring: engines in turn, round after round, each in a process of its own from start to end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.peers.adapter_process import AdapterError, AdapterProcess
from benchmarks.peers.engines import Engine
from benchmarks.peers.environments import log_file
from benchmarks.peers.process_tree import cpu_seconds, descendants, peak_resident_bytes
from benchmarks.peers.rows import (
    FIRST_TOKEN,
    IDLE,
    MAX_MODEL_LEN,
    MAX_NUM_SEQS,
    MEMORY,
    ROWS,
    START,
    Row,
    Workload,
    draw_prompts,
)

LOAD_TIMEOUT_S = 900.0
"""vLLM compiles for minutes the first time."""
SLOWEST_TOKENS_PER_S = 20.0
"""Prompt and output; an engine slower than this is taken to hang."""
RUN_MARGIN_S = 60.0
WARM_UP_OUTPUT_LEN = 4
WARM_UP_INPUT_LEN = 32
IDLE_SETTLE_S = 1.0
IDLE_S = 5.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One figure of one engine in one round."""

    engine: str
    row: str
    round_number: int
    value: float
    """In the row's unit."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an engine has no figures, or no more of them, in one round."""

    engine: str
    round_number: int
    reason: str


@dataclass(frozen=True, slots=True)
class Setup:
    """What holds for all engines alike."""

    rows: tuple[Row, ...]
    cpus: tuple[int, ...]
    """One per physical core: compute threads run on these."""
    vocab_size: int
    seed: int


def measure_rounds(
    engines: Sequence[Engine], setup: Setup, num_rounds: int, show: Callable[[str], None]
) -> Iterator[Sample | Failure]:
    """Every engine once per round, so that a machine that drifts hits all alike; results as they come.

    Before the first round each is started once: compilers' and packers' caches are warm, as a user's are from
    the second start on. An engine that fails there takes part no further.
    """
    ready: list[tuple[Engine, Path | str]] = []
    for engine in engines:
        model = engine.prepare()
        show(f"first start: {engine.name}")
        first_start = replace(setup, rows=tuple(row for row in (START,) if row.key in engine.rows))
        failures = [
            result for result in _measure(engine, model, first_start, 0) if isinstance(result, Failure)
        ]
        yield from failures
        if not failures:
            ready.append((engine, model))
    for round_number in range(1, num_rounds + 1):
        for engine, model in ready:
            show(f"round {round_number} of {num_rounds}: {engine.name}")
            yield from _measure(engine, model, setup, round_number)


def _measure(
    engine: Engine, model: Path | str, setup: Setup, round_number: int
) -> Iterator[Sample | Failure]:
    """One engine, one round: start it, let it run the rows that it takes part in, end it."""
    rows = [row for row in setup.rows if row.key in engine.rows]

    def sample(row: Row, value: float) -> Sample:
        return Sample(engine.name, row.key, round_number, value)

    def prompts(row: Row, workload: Workload, batch: int) -> list[list[int]]:
        return draw_prompts(workload, setup.vocab_size, setup.seed, round_number, ROWS.index(row), batch)

    try:
        with AdapterProcess(
            engine.command, _environment(engine, setup.cpus), log_file(engine.name)
        ) as adapter:
            adapter.ask({"load": _load(engine, model, setup)}, LOAD_TIMEOUT_S)
            if START in rows:
                _run(adapter, FIRST_TOKEN, prompts(START, FIRST_TOKEN, 0))
                yield sample(START, time.monotonic() - adapter.started_s)
            for row in rows:
                if row.workload is None:
                    continue
                warm_up = _warm_up(row.workload)
                _run(adapter, warm_up, prompts(row, warm_up, row.repeats))
                for batch in range(row.repeats):
                    wall_s = _run(adapter, row.workload, prompts(row, row.workload, batch))
                    yield sample(row, row.figure(wall_s))
            if IDLE in rows:
                yield sample(IDLE, _idle_percent(adapter))
            peak_bytes = peak_resident_bytes(descendants(adapter.engine_pids))
            peak_bytes = max(peak_bytes, adapter.close()["peak_ended_bytes"])
            if MEMORY in rows:
                yield sample(MEMORY, peak_bytes / 1e9)
    except AdapterError as error:
        yield Failure(engine.name, round_number, str(error))


def _environment(engine: Engine, cpus: tuple[int, ...]) -> dict[str, str]:
    """Ours, less what would tell an engine's threads anything but what its adapter tells."""
    inherited = {
        name: text for name, text in os.environ.items() if not name.startswith(("OMP_", "KMP_", "MKL_"))
    }
    return {**inherited, **engine.env(cpus)}


def _load(engine: Engine, model: Path | str, setup: Setup) -> dict[str, Any]:
    return {
        "model": str(model),
        "num_threads": len(setup.cpus),
        "max_num_seqs": MAX_NUM_SEQS,
        "max_model_len": MAX_MODEL_LEN,
        "options": dict(engine.options()),
    }


def _warm_up(workload: Workload) -> Workload:
    """The same width, for a moment: threads, buffers and kernels of that shape are there before the clock runs."""
    return replace(
        workload,
        input_len=workload.input_len if workload.is_prefill else WARM_UP_INPUT_LEN,
        output_len=min(workload.output_len, WARM_UP_OUTPUT_LEN),
    )


def _run(adapter: AdapterProcess, workload: Workload, prompts: list[list[int]]) -> float:
    """One batch; its wall time in seconds.

    Raises:
        AdapterError: it failed, hangs, or gave other than the tokens asked for.
    """
    timeout_s = RUN_MARGIN_S + workload.num_tokens / SLOWEST_TOKENS_PER_S
    answer = adapter.ask({"run": {"prompts": prompts, "max_tokens": workload.output_len}}, timeout_s)
    expected = [workload.output_len] * workload.num_prompts
    if answer["num_tokens"] != expected:
        raise AdapterError(
            f"{workload}: new tokens per prompt are {answer['num_tokens']} instead of {workload.output_len}"
        )
    wall_s: float = answer["wall_s"]
    return wall_s


def _idle_percent(adapter: AdapterProcess) -> float:
    """CPU time over wall time with nothing to do; 100 is one busy core."""
    time.sleep(IDLE_SETTLE_S)
    processes = descendants(adapter.engine_pids)
    before_s, started = cpu_seconds(processes), time.monotonic()
    time.sleep(IDLE_S)
    return 100 * (cpu_seconds(processes) - before_s) / (time.monotonic() - started)
