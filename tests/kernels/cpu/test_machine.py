"""The rates of the machine: measured, kept in a file, and what is chosen by them."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from triptych_kernels.cpu import machine, machine_files
from triptych_kernels.cpu.library import forced_isa, isa, threads_in_use, use_threads
from triptych_kernels.cpu.machine import (
    MachineRates,
    Rates,
    cache_sizes,
    load_rates,
    measure_rates,
    part_sizes,
    rates,
)
from triptych_kernels.cpu.machine_files import machine_key, read_or_make

needs_kernels = pytest.mark.skipif(not isa(), reason="there are no native kernels")
MEASURED = MachineRates(isa() or "avx2", 2, Rates(float32=100, int16=200, int8=400), Rates(float32=200))


@pytest.fixture(autouse=True)
def _nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_isa_to_rates", {})


@needs_kernels
def test_what_the_instruction_set_has_is_measured() -> None:
    use_threads(3)
    found = measure_rates(2)
    assert threads_in_use() == 3
    use_threads(1)
    assert (found.isa, found.num_threads) == (isa(), 2)
    for measured in (found.one_thread, found.all_threads):
        assert min(measured.float32, measured.int16) > 0.1
        assert (measured.int8 > 0) == (isa() not in ("avx512", "avx2"))
        assert min(measured.l1, measured.l2, measured.memory) > 0.01
        assert (measured.bfloat16 > 0) == (isa() in ("amx", "avx512_bf16"))
        assert (measured.tile_bfloat16 > 0) == (isa() == "amx")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let measurements give `MEASURED`, and return the numbers of threads that were asked for."""
    asked: list[int] = []

    def measure(num_threads: int) -> MachineRates:
        asked.append(num_threads)
        return replace(MEASURED, num_threads=num_threads)

    monkeypatch.setattr(machine, "measure_rates", measure)
    return asked


@needs_kernels
def test_rates_are_measured_once_per_number_of_threads(tmp_path: Path, measured: list[int]) -> None:
    assert not rates().is_measured
    assert load_rates(2, tmp_path / "new") == rates() == MEASURED
    machine._isa_to_rates.clear()  # as in the next process
    assert load_rates(2, tmp_path / "new") == MEASURED
    assert load_rates(3, tmp_path / "new").num_threads == 3
    assert measured == [2, 3]


@needs_kernels
def test_rates_of_other_libraries_are_measured_apart(
    tmp_path: Path, measured: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    load_rates(2, tmp_path)
    monkeypatch.setattr(machine_files, "_digest", lambda path: "another")
    load_rates(2, tmp_path)
    assert measured == [2, 2]


@needs_kernels
@pytest.mark.parametrize("error", [RuntimeError("no threads"), MemoryError("none"), AttributeError("old")])
def test_a_failure_leaves_the_choice_to_the_instruction_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    def fail(num_threads: int) -> MachineRates:
        raise error

    monkeypatch.setattr(machine, "measure_rates", fail)
    found = load_rates(2, tmp_path)
    assert not found.is_measured
    assert str(error) in caplog.text
    assert found.prefers_bfloat16 == (isa() in ("amx", "avx512_bf16"))


def test_without_kernels_nothing_is_measured(tmp_path: Path, measured: list[int]) -> None:
    with forced_isa(""):
        found = load_rates(2, tmp_path)
    assert not (found.is_measured)
    assert not (found.prefers_bfloat16)
    assert not (found.prefers_8_bit_inputs)
    assert not measured


@pytest.mark.parametrize(
    ("one_thread", "bfloat16", "bytes"),
    [
        (Rates(float32=100, bfloat16=50, int16=200, int8=400), False, True),
        (Rates(float32=100, bfloat16=50, tile_bfloat16=800, int16=200, int8=400), True, True),
        (Rates(float32=100, bfloat16=119, int16=100, int8=119), False, False),
        (Rates(float32=100, bfloat16=121, int16=100, int8=121), True, True),
        (Rates(float32=100, int16=100), False, False),
    ],
    ids=["Ice Lake", "AMX", "within noise", "beyond noise", "no VNNI"],
)
def test_arithmetic_is_chosen_by_a_wide_margin(one_thread: Rates, bfloat16: bool, bytes: bool) -> None:
    found = MachineRates("avx512", 2, one_thread, one_thread)
    assert (found.prefers_bfloat16, found.prefers_8_bit_inputs) == (bfloat16, bytes)


@pytest.mark.parametrize(
    ("isa", "bfloat16", "bytes"),
    [("amx", True, True), ("avx512_vnni", False, True), ("avx512", False, False), ("avx2_vnni", False, True)],
)
def test_unmeasured_machines_choose_by_instruction_set(isa: str, bfloat16: bool, bytes: bool) -> None:
    found = MachineRates(isa, 1, Rates(), Rates())
    assert (found.prefers_bfloat16, found.prefers_8_bit_inputs) == (bfloat16, bytes)


def test_caches_are_read_from_the_system(tmp_path: Path) -> None:
    for number, (level, kind, size) in enumerate(
        [(1, "Data", "48K"), (1, "Instruction", "32K"), (2, "Unified", "2048K"), (3, "Unified", "107520K")]
    ):
        folder = tmp_path / f"index{number}"
        folder.mkdir()
        for name, content in (("level", level), ("type", kind), ("size", size)):
            (folder / name).write_text(f"{content}\n")
    sizes = cache_sizes(tmp_path)
    assert sizes == {1: 48 << 10, 2: 2 << 20, 3: 105 << 20}
    assert cache_sizes(tmp_path / "nothing") == {}
    assert part_sizes(sizes, 3, 512 << 20) == {
        "l1": 24 << 10, "l2": 1 << 20, "l3": 8 << 20, "memory": (512 << 20) // 3 // 512 * 512,
    }  # fmt: skip
    assert "l3" not in part_sizes(sizes, 64, 512 << 20)


KEY: machine_files.Json = {"processor": "p", "isa": "avx2"}


@pytest.fixture
def make() -> Iterator[Callable[[], machine_files.Json]]:
    """Return a function that makes another content each time."""
    numbers = iter(range(100))
    return lambda: {"number": next(numbers)}


def number_of(found: machine_files.Json) -> int:
    return int(str(found["number"]))


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:20],
        lambda text: "[]",
        lambda text: text.replace('"number"', '"name"'),
        lambda text: text.replace('"version": 1', '"version": 0'),
        lambda text: text.replace('"avx2"', '"amx"'),
    ],
    ids=["cut short", "another type", "another field", "another version", "another key"],
)
def test_a_damaged_file_is_made_anew(
    tmp_path: Path, make: Callable[[], machine_files.Json], damage: Callable[[str], str]
) -> None:
    def read() -> int:
        return read_or_make(tmp_path, "name", KEY, make, number_of)

    assert [read(), read()] == [0, 0]
    (path,) = tmp_path.glob("*.json")
    path.write_text(damage(path.read_text()))
    assert [read(), read()] == [1, 1]
    assert json.loads(path.read_text())["key"] == KEY


def test_a_directory_that_cannot_be_written_is_a_warning(
    tmp_path: Path, make: Callable[[], machine_files.Json], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()  # in place of a directory: root may write anywhere else
    with caplog.at_level(logging.WARNING):
        found = [read_or_make(tmp_path / "file", "name", KEY, make, number_of) for _ in range(2)]
    assert found == [0, 1]
    assert "cannot be written" in caplog.text


def test_no_scratch_file_is_left(tmp_path: Path, make: Callable[[], machine_files.Json]) -> None:
    read_or_make(tmp_path, "name", KEY, make, number_of)
    (file,) = (path for path in tmp_path.iterdir() if path.name != ".lock")
    assert file.name.startswith("name-")
    assert file.suffix == ".json"


@needs_kernels
def test_the_key_names_the_processor() -> None:
    key = machine_key(isa())
    assert key == machine_key(isa())
    assert key["processor"]
