"""Measures what structured outputs add to a decode step of the worker's runner, called in process.

    python -m benchmarks.worker.structured_outputs [--fields 10 60] [any other option of the config]

All streams sample at temperature 1: as they like, or each a JSON array that does not end, by a matcher of its own. Both
take steps in turn, so that a busy machine slows both down.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
from llguidance import LLMatcher

from benchmarks.harness.command import create_parser, run
from benchmarks.harness.figures import Figure
from benchmarks.harness.timing import wall_s
from benchmarks.worker.session import RunnerSession, checked
from triptych.config.loader import add_config_flags, config_from_arguments
from triptych.types.sampling import SamplingParams
from triptych.types.step import U32, NewRow, RowContent
from triptych.types.structured import StructuredOutputs, compiled
from triptych_services.worker.runner.base import Runner
from triptych_services.worker.service.startup import load_runner

_INPUT_LEN = 32
_KIND_TO_SCHEMA = {
    "name": {"type": "string", "maxLength": 20},
    "count": {"type": "integer", "minimum": 0, "maximum": 999},
    "kind": {"enum": ["small", "medium", "large"]},
    "is_new": {"type": "boolean"},
}


def measure(arguments: argparse.Namespace) -> Iterator[Figure]:
    runner = load_runner(config_from_arguments(arguments), lambda phase, progress: None)
    for num_fields in arguments.fields:
        schema = _array_of(num_fields)
        grammar = LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False})
        steps = _StepsInTurn(runner, arguments.streams, arguments.output_len)
        for _ in range(arguments.rounds):
            free_ms, forced_ms = steps.measure_ms(compiled(grammar))
            title = f"{arguments.streams} streams, {num_fields} fields"
            yield Figure(f"{title}, decode step, free text", "ms", (statistics.median(free_ms),))
            yield Figure(f"{title}, decode step, JSON", "ms", (statistics.median(forced_ms),))
            added_ms = statistics.median(
                forced - free for forced, free in zip(forced_ms, free_ms, strict=True)
            )
            yield Figure(f"{title}, added per token", "us", (1e3 * added_ms / arguments.streams,))
            yield Figure(f"{title}, added", "%", (100 * added_ms / statistics.median(free_ms),))


def _array_of(num_fields: int) -> dict[str, object]:
    """Return the schema of an array of objects with so many fields, all of them required."""
    kinds = list(_KIND_TO_SCHEMA)
    names = [f"{kinds[number % len(kinds)]}_{number}" for number in range(num_fields)]
    item = {
        "type": "object",
        "properties": {name: _KIND_TO_SCHEMA[name.rpartition("_")[0]] for name in names},
        "required": names,
        "additionalProperties": False,
    }
    return {"type": "array", "items": item, "minItems": 1000}


def _run_step(session: RunnerSession, skipped_slots: U32) -> None:
    checked(session.launch(skipped_slots=skipped_slots).wait())


class _StepsInTurn:
    """Rows with and without a form, of which either half computes in a step."""

    def __init__(self, runner: Runner, num_streams: int, output_len: int) -> None:
        self._runner = runner
        self._num_streams = num_streams
        self._output_len = output_len

    def measure_ms(self, form: StructuredOutputs) -> tuple[list[float], list[float]]:
        """Return the times of the steps of a new session, of those as they like and of those with the form."""
        session = RunnerSession(self._runner)
        session.restart()
        session.prefill([*self._rows(session, 0, None), *self._rows(session, self._num_streams, form)])
        halves = np.arange(2 * self._num_streams, dtype=np.uint32).reshape(2, -1)
        times_ms: tuple[list[float], list[float]] = ([], [])
        for number in range(2 * (self._output_len - 1)):
            own = number % 2
            run_step = partial(_run_step, session, halves[1 - own])
            times_ms[own].append(1e3 * wall_s(run_step))
        return times_ms

    def _rows(self, session: RunnerSession, first: int, form: StructuredOutputs | None) -> list[NewRow]:
        num_blocks = -(-(_INPUT_LEN + self._output_len) // self._runner.facts.kv.block_size)
        sampling = SamplingParams(
            temperature=1.0, ignore_eos=True, structured_outputs=form, speculation=False
        )
        rows = [
            session.row(slot, _INPUT_LEN, num_blocks=num_blocks)
            for slot in range(first, first + self._num_streams)
        ]
        return [
            replace(row, content=RowContent(row.content.prompt_token_ids, sampling), seed=row.slot)
            for row in rows
        ]


if __name__ == "__main__":
    parser = create_parser(__doc__, rounds=3)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--fields", type=int, nargs="+", default=(10, 60))
    parser.add_argument("--output-len", type=int, default=128)
    add_config_flags(parser)
    sys.exit(run(parser, measure))
