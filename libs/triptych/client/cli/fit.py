"""Fit the simulated worker's step times to a recorded run, and write them to a file.

  triptych serve MODEL --journal.path journals               record a run, under a load of your own
  triptych fit journals --output times.json         fit
  triptych serve MODEL --sim --simulation.profile times.json replay its speed, without its hardware

Record prompts and outputs of different lengths and a changing number of requests: steps that are all alike do
not tell what a token, a row and a context cost.
"""

from __future__ import annotations

import argparse
from dataclasses import astuple
from pathlib import Path

import numpy as np

from triptych.client.step_time_fit import StepTimeFit, fit_step_times
from triptych.config.step_time_profile import write_step_time_profile
from triptych.wire.journal_rows import read_measured_steps


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "journal", type=Path, metavar="JOURNAL", help="a step journal, or a directory: its newest one"
    )
    parser.add_argument(
        "--output", type=Path, required=True, metavar="FILE", help="where the JSON profile goes"
    )


def run(arguments: argparse.Namespace) -> int:
    steps = [step for step in read_measured_steps(arguments.journal) if step.work.num_context_tokens]
    works = np.array([astuple(step.work) for step in steps], np.int64).reshape(-1, 3)
    fit = fit_step_times(works, np.array([step.compute_ns for step in steps]) / 1e9)
    about = {
        "journal": str(arguments.journal),
        "num_steps": fit.num_steps,
        "median_error": round(fit.median_error, 4),
        "p90_error": round(fit.p90_error, 4),
    }
    write_step_time_profile(arguments.output, fit.model, about)
    print(_report(fit, arguments.output))
    return 0


def _report(fit: StepTimeFit, output: Path) -> str:
    model = fit.model
    return f"""\
{fit.num_steps} steps, predicted within {fit.median_error:.1%} at the median and {fit.p90_error:.1%} for nine in ten:

  base            {model.base_ms:10.3f} ms
  prefill token   {model.prefill_token_us:10.3f} us
  decode row      {model.decode_row_us:10.3f} us
  context token   {model.context_token_ns:10.3f} ns

Written to {output}; use it with --simulation.profile {output}"""
