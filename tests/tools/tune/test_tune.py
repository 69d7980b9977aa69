"""The tuner without a GPU: its choices, its refusals, the files that it writes and those that are shipped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # as the tests of kernels, which run in this process too

from triton.backends.compiler import GPUTarget
from triton.runtime.errors import OutOfResources

import triptych_kernels.triton.tuning.tunable as tuning
from tests.imports.test_imports import GRPC, HTTP, import_without
from tools.tune import __main__ as command
from tools.tune import compiling, stored
from tools.tune.cases import NAME_TO_TUNABLE, Case, all_cases, create_case
from tools.tune.compiling import AheadCompiler
from tools.tune.search import LONG_S, Outcome, Refusal, problem_of, tune
from tools.tune.workloads import Workload
from triptych_kernels.triton.tuning.tunable import Tunable, TunedFile, read_file

ROOT = Path(__file__).parents[3]
CPU, META = torch.device("cpu"), torch.device("meta")
EXACT = torch.linspace(1, 2, 64).view(2, 32)


@dataclass(frozen=True, slots=True)
class Tiles:
    size: int


def case_of(results: dict[int, Any], *, same_bits: bool = False) -> Case:
    """A kernel whose tiles of each size give such a result, or raise it; the first is the default."""
    default, *others = (Tiles(size) for size in results)
    tunable = Tunable(
        "fake", ("n",), default=lambda n: default, candidates=lambda n: others, same_bits=same_bits
    )

    def call() -> Tensor:
        result = results[tunable.chosen(CPU, 7).size]
        if isinstance(result, Exception):
            raise result
        return result

    return Case(tunable, (7,), lambda device: [Workload("small", [call]), Workload("large", [call])])


def clock_of(case: Case, size_to_seconds: dict[int, float | tuple[float, float]]) -> Callable[..., float]:
    """Times by size, or at first and of finalists."""

    def clock(workload: Workload, round_s: float) -> float:
        seconds = size_to_seconds[case.tunable.chosen(CPU, 7).size]
        if isinstance(seconds, tuple):
            seconds = seconds[round_s == LONG_S]
        return seconds * (100 if workload.name == "large" else 1)

    return clock


def run(
    results: dict[int, Any], seconds: dict[int, Any], refused: Sequence[Refusal] = (), **options: Any
) -> Outcome:
    case = case_of(results, **options)
    return tune(case, CPU, clock_of(case, seconds), refused)


def test_fastest_is_chosen() -> None:
    outcome = run(dict.fromkeys((1, 2, 3, 4), EXACT), {1: 1e-3, 2: 9e-4, 3: 5e-4, 4: 2e-3})
    assert outcome.config == Tiles(3)
    assert outcome.speed_up == pytest.approx(2)
    assert outcome.seconds == pytest.approx(5e-3), (
        "the geometric mean of a workload and one 100 times as long"
    )
    assert (outcome.num_timed, outcome.refusals) == (4, ())


@pytest.mark.parametrize("wrong", [EXACT * 1.05, EXACT * torch.nan, EXACT.flip(0)])
def test_fast_wrong_kernel_never_wins(wrong: Tensor) -> None:
    outcome = run({1: EXACT, 2: wrong, 3: EXACT}, {1: 1e-3, 2: 1e-6, 3: 9e-4})
    assert outcome.config == Tiles(3)
    (refusal,) = outcome.refusals
    assert refusal.config == Tiles(2)
    assert "differs from the default's" in refusal.reason


def test_rounding_is_allowed_unless_bits_must_match() -> None:
    rounded, seconds = EXACT * (1 + 2**-9), {1: 1e-3, 2: 5e-4}
    assert run({1: EXACT, 2: rounded}, seconds).config == Tiles(2)
    outcome = run({1: EXACT, 2: rounded}, seconds, same_bits=True)
    assert outcome.config == Tiles(1)
    assert outcome.refusals[0].reason == "small: 64 numbers do not have the default's bits"
    assert run({1: EXACT, 2: EXACT.clone()}, seconds, same_bits=True).config == Tiles(2)


def test_one_lost_key_of_thousands_is_noticed() -> None:
    torch.manual_seed(0)
    values = torch.randn(4096, 128)
    assert problem_of(values[:-1].mean(0, True), values.mean(0, True), same_bits=False) is not None


def test_the_default_stays_where_little_is_gained() -> None:
    outcome = run(dict.fromkeys((1, 2), EXACT), {1: 1e-3, 2: 0.99e-3})
    assert (outcome.config, outcome.speed_up) == (Tiles(1), 1)


def test_finalists_are_measured_again() -> None:
    outcome = run(dict.fromkeys((1, 2, 3), EXACT), {1: 1e-3, 2: (1e-4, 1e-3), 3: 8e-4})
    assert outcome.config == Tiles(3)


def test_candidate_that_does_not_fit_is_refused() -> None:
    outcome = run(
        {1: EXACT, 2: OutOfResources(300_000, 232_448, "shared memory"), 3: EXACT}, {1: 1e-3, 3: 5e-4}
    )
    assert outcome.config == Tiles(3)
    assert "OutOfResources: out of resource: shared memory" in outcome.refusals[0].reason


def test_refused_default_is_named() -> None:
    refused = [Refusal(Tiles(1), "does not compile: OverwrittenOperand: 0x10 MOV R5, R1 writes")]
    with pytest.raises(ValueError, match=r"the default: does not compile: OverwrittenOperand: 0x10 MOV"):
        run(dict.fromkeys((1, 2), EXACT), {1: 1e-3, 2: 5e-4}, refused)


def test_candidate_that_did_not_compile_is_not_tried() -> None:
    refused = [Refusal(Tiles(2), "does not compile")]
    outcome = run({1: EXACT, 2: RuntimeError("tried"), 3: EXACT}, {1: 1e-3, 3: 5e-4}, refused)
    assert (outcome.config, outcome.refusals) == (Tiles(3), tuple(refused))


def test_default_that_is_not_finite_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"fake\(n=7\): the default's results are not finite"):
        run({1: EXACT * torch.inf}, {1: 1e-3})


def test_candidates_are_refused_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile(name: str, key: tuple[int, ...], index: int) -> int:
        if index == 1:
            raise RuntimeError("PassManager::run failed\nat great length")
        return 200 << 10 if index else 64

    monkeypatch.setattr(compiling, "compile_numbered", compile)
    monkeypatch.setattr(AheadCompiler, "create_pool", lambda self: ThreadPoolExecutor(1))
    cases = [case_of(dict.fromkeys((1, 2, 3), EXACT)) for _ in range(20)]
    with AheadCompiler(GPUTarget("cuda", 89, 32), 128) as compiler:
        compiled = list(compiler.compiled(cases))
    assert [case for case, _ in compiled] == cases
    for _, refusals in compiled:
        assert refusals == [
            Refusal(Tiles(2), "does not compile: RuntimeError: PassManager::run failed"),
            Refusal(Tiles(3), "204800 bytes of shared memory, more than the 101376 of a program"),
        ]


CASE = create_case("paged_attention_decode", (128, torch.int8, 16))


def outcome_of(case: Case, index: int) -> Outcome:
    return Outcome(case.tunable.candidates(*case.key)[index], 1e-5, 2e-5, 9, ())


@pytest.fixture
def file(tmp_path: Path) -> TunedFile:
    return TunedFile(tmp_path / "x" / "A_GPU.json", "A GPU", (9, 0), {})


def test_written_file_is_read_again(file: TunedFile) -> None:
    other = create_case("w8a8_linear", (256, 512, torch.float8_e4m3fn, 16))
    for case, index in ((CASE, 1), (other, 0), (CASE, 2)):
        file = stored.with_outcome(file, case, outcome_of(case, index), "2026-01-02, torch 2, triton 3")
        stored.write(file)
    again = read_file(file.path)
    assert again == file
    assert CASE.tunable.read(again) == {CASE.key: CASE.tunable.candidates(*CASE.key)[2]}
    assert other.tunable.read(again) == {other.key: other.tunable.default(*other.key)}
    lines = file.path.read_text().splitlines()
    assert sum('"measured": "2026-01-02, torch 2, triton 3"' in line for line in lines) == 2, (
        "an entry, a line"
    )
    assert [path.name for path in file.path.parent.iterdir()] == ["A_GPU.json"]


def test_file_keeps_what_kernels_still_offer(file: TunedFile) -> None:
    good = stored.with_outcome(file, CASE, outcome_of(CASE, 1), "then")
    (entry,) = good.kernel_to_entries["paged_attention_decode"]
    stale = replace(entry, key={**entry.key, "head_dim": 64}, config={"block_n": 3})
    stored.write(
        replace(good, kernel_to_entries={"paged_attention_decode": (entry, stale), "gone": (entry,)})
    )
    told: list[str] = []
    opened = stored.open_file(file.path, "A GPU", (9, 0), NAME_TO_TUNABLE, told.append)
    assert opened == good
    unknown, unoffered = told
    assert "no kernel is named 'gone'" in unknown
    assert '"head_dim": 64' in unoffered
    with pytest.raises(ValueError, match="device 'A GPU', but this one is 'B'"):
        stored.open_file(file.path, "B", (9, 0), NAME_TO_TUNABLE, told.append)


@pytest.mark.parametrize("name", NAME_TO_TUNABLE)
def test_workloads_launch_with_their_choice(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not with that of another key, whose candidates would all be as fast."""
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=9)
    )
    monkeypatch.setattr("triton.runtime.interpreter.GridExecutor.__call__", lambda *args, **options: None)
    case = next(case for case in all_cases((9, 0)) if case.tunable.name == name)
    no_tiles = pytest.raises((AttributeError, TypeError), match=r"'object' object|dataclass instances")
    for workload in case.build(META):
        with case.tunable.forced(META, case.key, object()), no_tiles:
            workload.calls[0]()


def test_each_choice_is_listed_once_with_candidates() -> None:
    titles = [case.title for case in all_cases((9, 0))]
    assert len(set(titles)) == len(titles)
    for case in all_cases((9, 0)):
        candidates = case.tunable.candidates(*case.key)
        assert len(candidates) >= 5, case.title
        assert len(set(candidates)) == len(candidates)
    assert not any("float8" in case.title for case in all_cases((8, 0)))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device with three choices to make; all candidates are right, and each is timed faster than the one before."""
    target = GPUTarget("cuda", 90, 32)
    fake = command.Device(CPU, "A GPU", (9, 0), target, 132)
    cases = [case for case in all_cases((9, 0)) if case.tunable.name == "w8a8_linear"][:3]

    def build(_: torch.device) -> list[Workload]:
        return [Workload("any", [lambda: EXACT])]

    def clock(self: command.GraphClock, workload: Workload, round_s: float) -> float:
        return next(seconds)

    seconds = iter(1 / n for n in range(1, 10_000))
    monkeypatch.setattr(command, "find_device", lambda: fake)
    monkeypatch.setattr(command, "all_cases", lambda _: [replace(case, build=build) for case in cases])
    monkeypatch.setattr(command.GraphClock, "__call__", clock)
    monkeypatch.setattr(compiling, "compile_numbered", lambda name, key, index: 300_000 if index == 1 else 0)
    monkeypatch.setattr(AheadCompiler, "create_pool", lambda self: ThreadPoolExecutor(1))


@pytest.mark.thorough
@pytest.mark.usefixtures("device")
def test_command_measures_and_stores(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--out", str(tmp_path), "--verbose"]
    assert command.main([*options, "--only", "in_features=14336", "out_features=6144"]) == 0
    printed = capsys.readouterr().out
    assert "2 measured, 0 failed, 0 left" in printed
    assert "300000 bytes of shared memory, more than the 232448" in printed
    first = read_file(tmp_path / "A_GPU.json")
    stored.check(first, NAME_TO_TUNABLE)
    assert len(first.kernel_to_entries["w8a8_linear"]) == 2
    assert command.main(options) == 0, "and what was measured before is measured anew"
    again = read_file(tmp_path / "A_GPU.json").kernel_to_entries["w8a8_linear"]
    assert len(again) == 3
    assert all(entry.us < entry.default_us for entry in again)


@pytest.mark.usefixtures("device")
def test_command_stops_when_its_budget_is_spent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--out", str(tmp_path), "--budget-s", "0"]) == 0
    assert "0 measured, 0 failed, 3 left" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_command_without_a_device(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "find_device", lambda: None)
    assert command.main(["--list", "--only", "paged_attention"]) == 0
    assert "30 candidates  paged_attention_decode(head_dim=128, " in capsys.readouterr().out
    assert command.main([]) == 2
    assert "sees no CUDA device" in capsys.readouterr().err
    assert command.main(["--only", "nothing"]) == 2


@pytest.mark.thorough
def test_tool_imports_without_grpc() -> None:
    import_without(GRPC | HTTP | {"yaml", "tqdm", "safetensors"}, ["tools.tune.__main__"])


def shipped() -> list[Path]:
    return sorted(tuning.FOLDER.glob("*.json"))


def compile_files(paths: list[Path]) -> list[str]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "kernels"), str(ROOT / "libs"), str(ROOT)])
    command = [sys.executable, "-m", "tools.tune.compiling", *map(str, paths)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_shipped_files_hold_what_the_kernels_offer() -> None:
    for path in shipped():
        file = read_file(path)
        stored.check(file, NAME_TO_TUNABLE)
        assert path == tuning.file_path(file.device), "or it would not be found"


@pytest.mark.thorough
def test_shipped_files_compile(file: TunedFile) -> None:
    case = create_case("w8a8_linear", (4096, 4096, torch.int8, 16))
    candidates = case.tunable.candidates(*case.key)
    largest = max(candidates, key=lambda t: t.num_stages * (t.block_n + t.block_m))
    too_small = TunedFile(file.path.with_name("Ada.json"), "Ada", (8, 9), {})
    for one, config in ((file, candidates[0]), (too_small, largest)):
        outcome = Outcome(config, 1e-5, 2e-5, 1, ())
        stored.write(stored.with_outcome(one, case, outcome, "never"))
    both = file
    for name, index in (("linear_few_rows", 0), ("gated_linear_few_rows", 1)):
        few = create_case(name, (256, 1024, torch.bfloat16, 1))
        both = stored.with_outcome(both, few, outcome_of(few, index), "never")
    left_to_torch = both.kernel_to_entries["linear_few_rows"][0]
    assert left_to_torch.config == {}
    stored.write(replace(both, path=file.path.with_name("few.json")))
    problems = compile_files([file.path, too_small.path, file.path.with_name("few.json"), *shipped()])
    assert len(problems) == 1, problems
    assert problems[0].startswith(f"{too_small.path}: {case.title}: {largest}: ")
    assert "bytes of shared memory, not up to 101376" in problems[0]
