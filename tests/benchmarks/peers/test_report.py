"""The arithmetic of the comparison."""

from __future__ import annotations

import json

import pytest

from benchmarks.peers.engines import Engine
from benchmarks.peers.measurement import Failure, Sample
from benchmarks.peers.report import as_json, collect, compare, text
from benchmarks.peers.rows import IDLE, ROWS, START

STREAMS = ROWS[0]


def engine(product: str, weights: str, *, is_quantized: bool = False) -> Engine:
    return Engine(product, weights, weights, "none.py", lambda: "", is_quantized=is_quantized)


OURS, OURS_Q4 = engine("triptych", "bf16"), engine("triptych", "4-bit", is_quantized=True)
PEER, PEER_Q4 = engine("vllm", "bf16"), engine("llama.cpp", "Q4_0", is_quantized=True)
ENGINES = (PEER, PEER_Q4, OURS, OURS_Q4)


def samples(row: str, values: dict[Engine, list[float]]) -> list[Sample]:
    return [
        Sample(engine.name, row, round_number, value)
        for engine, per_round in values.items()
        for round_number, value in enumerate(per_round, 1)
    ]


def test_a_figure_is_the_median_with_its_spread():
    figure = collect(samples("1", {PEER: [30, 10, 20, 90, 25]}))[PEER.name, "1"]
    assert (figure.median, figure.least, figure.most) == (25, 10, 90)
    assert str(figure) == "25.0 (10.0 to 90.0)"


def test_the_best_of_ours_stands_against_the_best_peer_and_again_without_quantized_weights():
    figures = collect(samples("1", {PEER: [40], PEER_Q4: [80], OURS: [60], OURS_Q4: [200]}))
    any_weights = compare(STREAMS, ENGINES, figures)
    unquantized = compare(STREAMS, ENGINES, figures, quantized=False)
    assert any_weights is not None
    assert unquantized is not None
    assert (any_weights.ours, any_weights.peer, any_weights.ratio) == (OURS_Q4, PEER_Q4, 2.5)
    assert (unquantized.ours, unquantized.peer, unquantized.ratio) == (OURS, PEER, 1.5)


def test_where_less_is_better_the_best_is_the_least():
    figures = collect(samples("start", {PEER: [96], PEER_Q4: [0.5], OURS: [2], OURS_Q4: [4]}))
    comparison = compare(START, ENGINES, figures)
    assert comparison is not None
    assert (comparison.ours, comparison.peer, comparison.ratio) == (OURS, PEER_Q4, 4)


@pytest.mark.parametrize("missing", [(PEER, PEER_Q4), (OURS, OURS_Q4)])
def test_nothing_is_compared_with_nothing(missing):
    figures = collect(samples("1", {engine: [1.0] for engine in ENGINES if engine not in missing}))
    assert compare(STREAMS, ENGINES, figures) is None


def test_a_peer_that_takes_no_cpu_at_all_leaves_no_finite_ratio():
    figures = collect(samples("idle", {PEER: [0.0], OURS: [1.0]}))
    comparison = compare(IDLE, ENGINES, figures)
    assert comparison is not None
    assert comparison.ratio == float("inf")


def test_the_table_names_every_engine_and_every_failure():
    failures = [Failure(OURS_Q4.name, 0, "q4 is not built")]
    written = text(
        ENGINES, ROWS, collect(samples("1", {PEER: [1234.5], PEER_Q4: [80], OURS: [60]})), failures
    )
    assert all(engine.product in written and engine.weights in written for engine in ENGINES)
    assert "1,234" in written
    assert "triptych-4-bit, first start: q4 is not built" in written
    head, rule, *_ = written.splitlines()
    assert len(head) == len(rule)
    assert head.count("|") == rule.count("|") == len(ROWS) + 4


def test_the_json_holds_every_sample_and_no_number_that_json_lacks():
    taken = samples("1", {PEER: [10, 30], OURS: [30, 50]}) + samples("idle", {PEER: [0], OURS: [1]})
    report = as_json(ENGINES, ROWS, taken, [], {"cpu": "x"})
    row = json.loads(json.dumps(report, allow_nan=False))["rows"][0]
    assert row["figures"][PEER.name] == {"median": 20, "samples": [10, 30]}
    assert row["any_weights"] == {"best_peer": PEER.name, "triptych": OURS.name, "ratio": 2.0}
