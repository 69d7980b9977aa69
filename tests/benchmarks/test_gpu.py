"""benchmarks.gpu without a GPU: all of it runs at toy sizes, and a figure that fails stops no other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu.__main__ import all_rows, outcome, supervise
from benchmarks.gpu.models import LLAMA_8B, QWEN3_06B, model_config, num_multiplied_parameters
from benchmarks.gpu.serving import gaps_between
from benchmarks.gpu.sizes import REAL, TINY
from benchmarks.gpu.start import evict, read, read_from_storage, write_checkpoint
from benchmarks.gpu.timing import Row
from benchmarks.harness.figures import Figure
from benchmarks.harness.processes import Child
from tests.imports.test_imports import GRPC, HTTP, import_without
from triptych_services.worker.loader.load import open_checkpoint

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


@pytest.mark.thorough
def test_every_figure_is_measured_at_toy_sizes(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, model_config(LLAMA_8B, TINY), CPU)
    figures = [outcome(row) for row in all_rows(CPU, TINY, tmp_path)]
    assert [(figure.name, figure.error) for figure in figures if figure.error] == []
    assert all(figure.median > 0 for figure in figures)
    sections = {figure.name.partition(":")[0] for figure in figures}
    assert sections == {"limits", "sampling", "attention", "models", "start"}


def test_real_rows_have_distinct_titles_and_allocate_nothing() -> None:
    titles = [row.title for row in all_rows(CPU, REAL, None)]
    assert len(set(titles)) == len(titles)
    for figure in (
        "decode, bf16 KV, 256 x 32,768",
        "prefill, 16,384",
        "top-k 50, top-p 0.9, penalties, 256 x 128,256",
    ):
        assert any(figure in title for title in titles)


def test_failed_row_is_an_outcome() -> None:
    def fail() -> Figure:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")

    assert outcome(Row("bad", fail)).error == "OutOfMemoryError: CUDA out of memory. Tried to allocate"


CHILD = """
import json, os, signal, sys, time
def say(**values):
    print(json.dumps(values), flush=True)
say(titles=["a", "dies", "b", "hangs", "loses the device", "c"])
for line in sys.stdin:
    index = json.loads(line)["index"]
    if index == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if index == 3:
        time.sleep(600)
    error = dict(error="illegal memory access") if index == 4 else {}
    say(name="abcdef"[index], unit="x", samples=[os.getpid()], **error)
"""


def test_process_that_dies_or_hangs_costs_one_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    ask = Child.ask

    def ask_one_briefly(child: Child, question: dict[str, int], timeout_s: float) -> dict[str, Any]:
        assert timeout_s == 60.0
        return ask(child, question, 0.1 if question["index"] == 3 else timeout_s)

    monkeypatch.setattr(Child, "ask", ask_one_briefly)
    figures = list(supervise([sys.executable, "-c", CHILD], 1000, row_timeout_s=60.0))
    errors = [figure.error.removeprefix("the measuring process was lost: ") for figure in figures]
    assert errors == ["", "ended with status -9", "", "no answer after 0 s", "illegal memory access", ""]
    pids = {figure.samples for figure in figures if figure.samples}
    assert len(pids) == 4, "a new process after each loss"


def test_rows_beyond_the_budget_are_skipped_by_name() -> None:
    figures = list(supervise([sys.executable, "-c", CHILD], 0.0))
    assert [figure.name for figure in figures][:2] == ["a", "dies"]
    assert {figure.note for figure in figures} == {"skipped: the time budget is spent"}


@pytest.mark.thorough
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device to measure")
def test_command_without_a_device_says_what_to_try(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--json", str(tmp_path / "figures.json")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(str(ROOT / name) for name in ("libs", "kernels"))
    }
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1
    assert "sees no CUDA device; try --device cpu --tiny" in done.stdout
    assert "Traceback" not in done.stderr


def test_checkpoint_is_what_the_loader_reads(tmp_path: Path) -> None:
    config = model_config(LLAMA_8B, TINY)
    write_checkpoint(tmp_path, config, CPU)
    written = open_checkpoint(tmp_path)
    drawn = open_checkpoint(tmp_path, format="random")
    assert written.tensors.keys() == drawn.tensors.keys()
    for name in drawn.tensors:
        assert torch.equal(written.read(name, torch.bfloat16), drawn.read(name, torch.bfloat16))


@pytest.mark.parametrize(("config", "num_parameters"), [(LLAMA_8B, 7.5e9), (QWEN3_06B, 0.596e9)])
def test_limits_count_the_parameters_that_are_multiplied(config: dict, num_parameters: float) -> None:
    assert num_multiplied_parameters(config) == pytest.approx(num_parameters, rel=0.02)


def test_gaps_are_what_no_kernel_covers() -> None:
    assert gaps_between([(5, 9), (0, 4), (1, 2), (8, 10), (12, 13)]) == [1, 2]
    assert gaps_between([]) == []


def test_bytes_from_storage_never_exceed_the_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(os.urandom(1 << 20))
    read(file)
    before = read_from_storage()
    read(file)
    assert read_from_storage() == before, "the page cache holds it"
    evict(file)
    read(file)
    assert read_from_storage() - before <= 2 << 20  # none from a file system in memory


@pytest.mark.thorough
def test_bare_gpu_machine_has_all_that_is_imported() -> None:
    """There is no gRPC, no client's library and no reader of GGUF."""
    modules = [f"benchmarks.gpu.{path.stem}" for path in (ROOT / "benchmarks/gpu").glob("*.py")]
    modules += ["tests.helpers.in_process", "tests.worker.teacher_forcing"]
    missing = GRPC | HTTP | {"prometheus_client", "tokenizers", "gguf", "yaml", "tqdm", "uvloop"}
    import_without(missing, modules)
