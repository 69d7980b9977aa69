"""benchmarks/gpu.py without a GPU: all of it runs at toy sizes, and what befalls one figure stops no other."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_figures.checkpoint import write_checkpoint
from benchmarks.gpu_figures.measuring import measure_rows
from benchmarks.gpu_figures.models import LLAMA_8B, MIXTRAL_HALF, QWEN3_06B, model_config, shape_of
from benchmarks.gpu_figures.page_cache import evict, resident_fraction, warm
from benchmarks.gpu_figures.report import Report
from benchmarks.gpu_figures.rows import REAL, TINY, Measured, Row
from benchmarks.gpu_figures.sections import SECTIONS, all_rows
from benchmarks.gpu_figures.serving import gaps_between
from benchmarks.gpu_figures.supervisor import supervise
from services.worker.loader import open_checkpoint
from tests.imports.test_imports import GRPC, HTTP, import_without

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


def run(rows: list[Row], **options: float) -> list[dict]:
    events: list[dict] = []
    measure_rows(rows, events.append, CPU, **options)
    return [event for event in events if "index" in event and event["event"] != "started"]


def test_every_figure_is_measured_at_toy_sizes(tmp_path: Path) -> None:
    """But for the start of a process, which takes seconds: it has a test below."""
    rows = [row for row in all_rows(CPU, TINY, None) if row.section != "start"]
    assert {row.section for row in rows} == {*SECTIONS} - {"start"}
    outcomes = run(rows)
    errors = {rows[o["index"]].title: o["error"] for o in outcomes if o["event"] == "failed"}
    assert errors == {}
    assert len(outcomes) == len(rows)
    for outcome in outcomes:
        assert outcome["measured"]["value"] > 0


def test_titles_are_distinct_and_building_real_rows_allocates_nothing() -> None:
    titles = [row.title for row in all_rows(CPU, REAL, None)]
    assert len(set(titles)) == len(titles)
    for figure in (
        "decode, bf16 KV, 256 x 32,768",
        "prefill, 16,384",
        "top-k 50, top-p 0.9, penalties, 256 x 128,256",
    ):
        assert any(figure in title for title in titles)


def test_a_figure_that_fails_is_told_and_the_rest_goes_on() -> None:
    def fail() -> Measured:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")

    outcomes = run([Row("a", "bad", fail), Row("a", "good", lambda: Measured(2.0, "x", limit=8.0))])
    assert outcomes[0]["error"] == "OutOfMemoryError: CUDA out of memory. Tried to allocate"
    assert outcomes[1]["measured"]["fraction"] == 0.25


def test_when_the_budget_is_spent_the_rest_is_skipped_by_name() -> None:
    outcomes = run([Row("a", str(n), lambda: Measured(1.0, "x")) for n in range(3)], budget_s=0.0)
    assert [outcome["event"] for outcome in outcomes] == ["skipped"] * 3


SCRIPT = """
import argparse, json, os, signal, sys, time
parser = argparse.ArgumentParser()
for name in ("--events-fd", "--first"):
    parser.add_argument(name, type=int)
parser.add_argument("--budget-s")
a = parser.parse_args()
def tell(**event):
    os.write(a.events_fd, (json.dumps(event) + "\\n").encode())
tell(event="machine", device="none")
tell(event="rows", titles=["a", "dies", "b", "hangs", "c"])
for index in range(a.first, 5):
    tell(event="started", index=index)
    if index == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if index == 3:
        time.sleep(600)
    measured = dict(value=1.0, unit="x", limit=None, limit_name="", low=None, high=None, note="", fraction=None)
    tell(event="measured", index=index, measured=measured, seconds=0.0)
    if index == 2:
        sys.exit(1)
"""


def test_a_process_that_dies_or_hangs_costs_one_figure(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    out, path = io.StringIO(), tmp_path / "figures.json"
    supervise([sys.executable, str(script)], Report(out, path), budget_s=100, row_timeout_s=0.5)
    figures = {figure["figure"]: figure for figure in json.loads(path.read_text())["figures"]}
    assert figures["dies"]["error"] == "the measuring process was lost: it ended with -9"
    assert "nothing was heard of it" in figures["hangs"]["error"]
    assert [name for name, figure in figures.items() if "measured" in figure] == ["a", "b", "c"]
    assert out.getvalue().count("FAILED") == 2


def test_the_script_runs_from_anywhere_and_the_start_of_a_process_is_timed(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    write_checkpoint(checkpoint, model_config(LLAMA_8B, TINY), CPU)
    path = tmp_path / "figures.json"
    command = [
        sys.executable, str(ROOT / "benchmarks/gpu.py"), "--device", "cpu", "--tiny", "--checkpoint", str(checkpoint),
        "--only", "start: to first token, 8B, cold", "--json", str(path),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (figure,) = json.loads(path.read_text())["figures"]
    assert figure["measured"]["unit"] == "s"
    assert "weights" in figure["measured"]["note"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device to measure")
def test_without_a_device_the_script_says_so_and_what_to_try(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/gpu.py", "--json", str(tmp_path / "figures.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "sees no CUDA device; try --device cpu --tiny" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_checkpoint_is_what_the_loader_reads_and_is_written_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = model_config(LLAMA_8B, TINY)
    write_checkpoint(tmp_path, config, CPU, shard_bytes=100_000)
    written = open_checkpoint(tmp_path)
    drawn = open_checkpoint(tmp_path, format="random")
    assert len(written.file_name_to_size) > 1
    assert written.tensors.keys() == drawn.tensors.keys()
    for name in drawn.tensors:
        assert torch.equal(written.read(name, torch.bfloat16), drawn.read(name, torch.bfloat16))
    write_checkpoint(tmp_path, config, CPU, shard_bytes=100_000)
    assert capsys.readouterr().out.endswith("is there already\n")


@pytest.mark.parametrize(
    ("config", "used", "read_by_many"),
    [(LLAMA_8B, 7.5e9, 7.5e9), (QWEN3_06B, 0.596e9, 0.596e9), (MIXTRAL_HALF, 6.4e9, 23.3e9)],
    ids=["8B", "0.6B", "Mixtral, half"],
)
def test_limits_count_the_parameters_that_are_multiplied(
    config: dict, used: float, read_by_many: float
) -> None:
    shape = shape_of(config)
    assert shape.used_parameters == pytest.approx(used, rel=0.02)
    assert shape.read_parameters(1) == pytest.approx(used, rel=0.02)
    assert shape.read_parameters(256) == pytest.approx(read_by_many, rel=0.02)


def test_gaps_are_what_no_kernel_covers() -> None:
    assert gaps_between([(5, 9), (0, 4), (1, 2), (8, 10), (12, 13)]) == [1, 2]
    assert gaps_between([]) == []


def test_the_page_cache_is_told_apart(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(os.urandom(1 << 20))
    warm([file])
    assert resident_fraction([file]) == 1.0
    evict([file])
    assert 0.0 <= resident_fraction([file]) <= 1.0  # a file system in memory declines


def test_nothing_but_tensors_and_numbers_is_needed() -> None:
    """On a bare GPU machine there is no gRPC, no client's library and no reader of GGUF."""
    modules = [
        f"benchmarks.gpu_figures.{path.stem}" for path in (ROOT / "benchmarks/gpu_figures").glob("[!_]*.py")
    ]
    modules += ["tests.helpers.in_process", "tests.worker.teacher_forcing"]
    missing = GRPC | HTTP | {"prometheus_client", "tokenizers", "gguf", "yaml", "tqdm", "uvloop"}
    import_without(missing, modules)
