"""The tables of the comparison."""

from __future__ import annotations

import pytest

from benchmarks.harness.figures import Figure
from benchmarks.peers.engines import Engine
from benchmarks.peers.measurement import IDLE, ROWS, START, Row
from benchmarks.peers.report import best, ratios_table, text

STREAMS = ROWS[0]


def engine(product: str, weights: str, *, is_quantized: bool = False) -> Engine:
    return Engine(product, weights, weights, "none.py", lambda: "", is_quantized=is_quantized)


OURS, OURS_Q4 = engine("triptych", "bf16"), engine("triptych", "4-bit", is_quantized=True)
PEER, PEER_Q4 = engine("vllm", "bf16"), engine("llama.cpp", "Q4_0", is_quantized=True)
ENGINES = (PEER, PEER_Q4, OURS, OURS_Q4)


def figures(row: Row, values: dict[Engine, tuple[float, ...]]) -> dict[str, Figure]:
    made = [Figure(row.name(engine), row.unit, samples) for engine, samples in values.items()]
    return {figure.name: figure for figure in made}


def ratios(row: Row, values: dict[Engine, tuple[float, ...]]) -> list[list[str]]:
    lines = ratios_table(ENGINES, [row], figures(row, values)).splitlines()[2:]
    return [[cell.strip() for cell in line.split("|")[2:-1]] for line in lines]


def test_best_of_ours_beside_the_best_peer():
    assert ratios(STREAMS, {PEER: (40,), PEER_Q4: (80,), OURS: (60,), OURS_Q4: (200,)}) == [
        ["any", PEER_Q4.name, "80", OURS_Q4.name, "200", "2.50"],
        ["16 bits or more", PEER.name, "40", OURS.name, "60", "1.50"],
    ]


def test_best_is_the_least_where_less_is_better():
    values = figures(START, {PEER: (96,), PEER_Q4: (0.5,), OURS: (2,)})
    assert best(START, ENGINES, values) == PEER_Q4


@pytest.mark.parametrize("missing", [(PEER, PEER_Q4), (OURS, OURS_Q4)])
def test_no_ratio_without_both_sides(missing):
    assert ratios(STREAMS, {engine: (1.0,) for engine in ENGINES if engine not in missing}) == []


def test_no_ratio_to_a_peer_that_takes_nothing():
    assert ratios(IDLE, {PEER: (0.0,), OURS: (1.0,)})[0][-1] == "-"


def test_table_names_measured_engines_and_failures():
    measured = figures(STREAMS, {PEER: (1234.0, 1235.0), PEER_Q4: (80,), OURS: (60,)})
    failure = Figure(f"{OURS_Q4.name}: first start", error="q4 is not built")
    written = text(ENGINES, ROWS, {**measured, failure.name: failure})
    assert all(engine.product in written and engine.weights in written for engine in (PEER, PEER_Q4, OURS))
    assert "1,234 (1,234 to 1,235)" in written
    assert "failed: triptych-4-bit: first start: q4 is not built" in written
