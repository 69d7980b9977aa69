"""The rates of the machine, measured and kept in a file, and the arithmetic by instruction set."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from triptych_kernels.cpu import library, machine, machine_files, rate_measurement
from triptych_kernels.cpu.arithmetic import ARITHMETIC, Arithmetic, arithmetic_of
from triptych_kernels.cpu.compile import ISA_FLAGS
from triptych_kernels.cpu.library import (
    forced_isa,
    isa,
    threads_in_use,
    unused_isas,
    usable_isas,
    use_threads,
    want_isa,
)
from triptych_kernels.cpu.machine import (
    MachineRates,
    Rates,
    contradictions,
    keep_rates,
    load_rates,
    rates,
)
from triptych_kernels.cpu.machine_files import machine_key, read_or_make
from triptych_kernels.cpu.rate_measurement import cache_sizes, measure_pieces, measure_rates, part_sizes

needs_kernels = pytest.mark.skipif(not isa(), reason="there are no native kernels")
MEASURED = MachineRates(isa() or "avx2", 2, Rates(float32=100, int16=200, int8=400), Rates(float32=200))


@pytest.fixture(autouse=True)
def _nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_isa_to_rates", {})
    monkeypatch.setattr(library, "_wanted", [])


@needs_kernels
def test_what_the_instruction_set_has_is_measured() -> None:
    use_threads(3)
    found = measure_rates(2)
    assert threads_in_use() == 3
    use_threads(1)
    assert (found.isa, found.num_threads) == (isa(), 2)
    for measured in (found.one_thread, found.all_threads):
        assert min(measured.float32, measured.int16, measured.int8) > 0.1
        assert min(measured.l1, measured.l2, measured.memory) > 0.01
        assert (measured.bfloat16 > 0) == (isa() in ("amx", "avx512_bf16"))
        assert (measured.tile_bfloat16 > 0) == (isa() == "amx")


class Machine:
    """A machine of one thread that computes `float32` at given rates, round after round, beside other processes."""

    def __init__(self, rounds: Callable[[int], float], share: Callable[[int], float]) -> None:
        """
        Args:
            rounds: Number of a round -> its rate.
            share: Number of a round -> part of the time that the thread is on a core.
        """
        self.num_rounds = 0
        self.now_s = 0.0
        self.cpu_s = 0.0
        self._rounds, self._share = rounds, share

    def piece(self) -> float:
        number = self.num_rounds
        self.num_rounds += 1
        self.now_s += 0.01
        self.cpu_s += 0.01 * self._share(number)
        return 1e9 * self._rounds(number)

    def measure(self) -> tuple[Rates, str]:
        return measure_pieces(
            {"float32": self.piece}, 1, clock=lambda: self.now_s, cpu_clock=lambda: self.cpu_s
        )


def test_a_quiet_measurement_is_short_and_keeps_the_best() -> None:
    quiet = Machine(lambda number: 100 + number % 3, lambda number: 0.99)
    assert quiet.measure() == (Rates(float32=102), "")
    assert quiet.num_rounds == rate_measurement._ROUNDS


def test_rounds_beside_other_processes_do_not_count() -> None:
    beside = Machine(lambda number: 150 if number % 2 else 100, lambda number: 0.5 if number % 2 else 1.0)
    assert beside.measure() == (Rates(float32=100), "")
    assert beside.num_rounds == 2 * rate_measurement._ROUNDS - 1


def test_a_loaded_machine_gives_a_reason_and_ends_in_time() -> None:
    loaded = Machine(lambda number: 100, lambda number: 0.6)
    found, disturbance = loaded.measure()
    assert found.float32 == 100
    assert disturbance == "other processes had the cores for 40% of the time"
    assert loaded.now_s < 1.1 * rate_measurement._LIMIT_S


def test_rates_that_a_neighbour_on_the_core_halves_are_disturbed() -> None:
    changing = Machine(lambda number: 60 if number % 3 else 100, lambda number: 1.0)
    found, disturbance = changing.measure()
    assert found.float32 == 100
    assert disturbance == "rates change by the moment: of float32 from 60 to 100"


@needs_kernels
def test_one_file_serves_every_number_of_threads_and_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not load_rates(tmp_path / "new").is_measured
    keep_rates(MEASURED, tmp_path / "new")
    assert rates() == MEASURED
    machine._isa_to_rates.clear()  # as in the next process
    monkeypatch.setattr(machine_files, "_digest", lambda path: "another")
    assert load_rates(tmp_path / "new") == rates() == MEASURED
    with forced_isa("avx2" if isa() != "avx2" else "avx512"):
        assert not load_rates(tmp_path / "new").is_measured


@needs_kernels
def test_a_disturbed_measurement_is_not_written(tmp_path: Path) -> None:
    keep_rates(replace(MEASURED, disturbance="others computed"), tmp_path)
    machine._isa_to_rates.clear()
    assert not load_rates(tmp_path).is_measured
    assert not list(tmp_path.iterdir())


def test_without_kernels_there_are_no_rates(tmp_path: Path) -> None:
    with forced_isa(""):
        assert not load_rates(tmp_path).is_measured
    assert arithmetic_of("", "GenuineIntel") == Arithmetic()


def test_every_instruction_set_has_its_arithmetic() -> None:
    assert ARITHMETIC.keys() == ISA_FLAGS.keys()


@pytest.mark.parametrize(
    ("isa", "vendor", "bfloat16", "bytes"),
    [
        ("amx", "GenuineIntel", True, ("q4", "q8")),
        ("avx512_bf16", "AuthenticAMD", True, ("q4", "q8")),
        ("avx512_bf16", "GenuineIntel", False, ("q4", "q8")),
        ("avx512_vnni", "GenuineIntel", False, ("q4", "q8")),
        ("avx512", "GenuineIntel", False, ()),
        ("avx2", "AuthenticAMD", False, ("q4",)),
    ],
)
def test_arithmetic_follows_the_instruction_set(
    isa: str, vendor: str, bfloat16: bool, bytes: tuple[str, ...]
) -> None:
    assert arithmetic_of(isa, vendor) == Arithmetic(bfloat16, bytes)


@pytest.mark.parametrize(
    ("chosen", "one_thread", "words"),
    [
        (Arithmetic(), Rates(float32=100, bfloat16=140, int16=100, int8=140), []),
        (Arithmetic(), Rates(float32=100, bfloat16=160), ["bfloat16 are not chosen", "1.6"]),
        (Arithmetic(True, ("q4",)), Rates(float32=100, bfloat16=70, int16=100, int8=70), []),
        (Arithmetic(True), Rates(float32=100, bfloat16=50), ["bfloat16 are chosen", "0.5"]),
        (Arithmetic(True), Rates(float32=100, bfloat16=50, tile_bfloat16=800), []),
        (Arithmetic(False, ("q4",)), Rates(float32=1, int16=100, int8=50), ["8-bit inputs", "are chosen"]),
        (Arithmetic(False, ("q4",)), Rates(float32=1, int16=100, int8=0), []),
        (Arithmetic(), Rates(float32=1, int16=100, int8=200), []),
        (Arithmetic(False, ("q4",)), Rates(), []),
    ],
)
def test_rates_contradict_a_choice_by_a_wide_margin_only(
    chosen: Arithmetic, one_thread: Rates, words: list[str]
) -> None:
    found = list(contradictions(MachineRates("avx2", 2, one_thread, one_thread), chosen))
    assert len(found) == bool(words)
    assert all(word in found[0] for word in words)


@pytest.mark.skipif(len(usable_isas()) < 2, reason="there is no narrower instruction set")
def test_an_instruction_set_that_is_wanted_is_used() -> None:
    widest, narrower = usable_isas()[0], usable_isas()[-1]
    want_isa(narrower)
    assert isa() == narrower
    assert unused_isas()[widest] == f"{narrower} is asked for"
    with forced_isa(widest):
        assert isa() == widest
    with pytest.raises(ValueError, match=f"sse9 is none of {widest}"):
        want_isa("sse9")
    assert isa() == narrower
    want_isa("")
    assert isa() == widest


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
