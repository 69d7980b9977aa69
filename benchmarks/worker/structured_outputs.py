"""Measures what structured outputs add to a decode step of the worker's runner, called in process.

    python -m benchmarks.worker.structured_outputs [--model.quantization q4] [any other option of the config]

All streams sample at temperature 1: as they like, or each a JSON array that does not end, by a matcher of its own.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator
from dataclasses import replace

from llguidance import LLMatcher

from benchmarks.harness.command import create_parser, run
from benchmarks.harness.figures import Figure
from benchmarks.harness.timing import wall_s
from benchmarks.worker.session import RunnerSession, checked
from triptych.config.loader import add_config_flags, config_from_arguments
from triptych.types.sampling import SamplingParams
from triptych.types.step import RowContent
from triptych.types.structured import StructuredOutputs, compiled
from triptych_services.worker.runner.base import Runner
from triptych_services.worker.service.startup import load_runner

_INPUT_LEN = 32
_ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "count": {"type": "integer", "minimum": 0, "maximum": 999},
        "kind": {"enum": ["small", "medium", "large"]},
    },
    "required": ["name", "count", "kind"],
    "additionalProperties": False,
}
_SCHEMA = {"type": "array", "items": _ITEM, "minItems": 1000}


def measure(arguments: argparse.Namespace) -> Iterator[Figure]:
    runner = load_runner(config_from_arguments(arguments), lambda phase, progress: None)
    grammar = LLMatcher.grammar_from_json_schema(_SCHEMA, overrides={"whitespace_flexible": False})
    for _ in range(arguments.rounds):
        free_ms = decode_step_ms(runner, arguments.streams, arguments.output_len, None)
        forced_ms = decode_step_ms(runner, arguments.streams, arguments.output_len, compiled(grammar))
        title = f"{arguments.streams} streams"
        yield Figure(f"{title}, decode step, free text", "ms", (free_ms,))
        yield Figure(f"{title}, decode step, JSON of a schema", "ms", (forced_ms,))
        yield Figure(f"{title}, added per token", "us", (1e3 * (forced_ms - free_ms) / arguments.streams,))


def decode_step_ms(
    runner: Runner, num_streams: int, output_len: int, form: StructuredOutputs | None
) -> float:
    """Return the median time of a decode step of a new session."""
    session = RunnerSession(runner)
    num_blocks = -(-(_INPUT_LEN + output_len) // runner.facts.kv.block_size)
    sampling = SamplingParams(temperature=1.0, ignore_eos=True, structured_outputs=form, speculation=False)
    rows = []
    for slot in range(num_streams):
        row = session.row(slot, _INPUT_LEN, num_blocks=num_blocks)
        rows.append(replace(row, content=RowContent(row.content.prompt_token_ids, sampling), seed=slot))
    session.restart()
    session.prefill(rows)
    steps_s = [wall_s(lambda: checked(session.launch().wait())) for _ in range(output_len - 1)]
    return 1e3 * statistics.median(steps_s)


if __name__ == "__main__":
    parser = create_parser(__doc__, rounds=3)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=128)
    add_config_flags(parser)
    sys.exit(run(parser, measure))
