"""`triptych bench serve --sweep`: its figures in a time of their own, its report, and how it ends."""

from __future__ import annotations

import json
import os
import signal
from contextlib import asynccontextmanager
from xml.etree import ElementTree

import pytest

from tests.helpers.command import NOBODY, exit_code
from tests.helpers.slow_server import Clock, Server
from triptych.cli import build_parser
from triptych.cli.bench import sweep
from triptych.cli.bench.sweep import Sweep, rate_of_users
from triptych.client.load.backends import TokenCounts
from triptych.client.load.run import LoadResult, RequestRecord
from triptych.errors import EngineFailure, TriptychError

SERVICE_S = 1.4  # of `Server`, for 5 tokens
LENGTHS = ("--input-len", "5", "--output-len", "5")


async def swept(monkeypatch, server, shares, *words, goals_ms=None):
    """Return a sweep over a server in this process."""

    @asynccontextmanager
    async def open_backend(frontend, arguments):
        yield server, 100, None

    monkeypatch.setattr(sweep, "open_backend", open_backend)
    arguments = build_parser("bench").parse_args(["bench", "serve", *LENGTHS, *words])
    one = Sweep(arguments, shares, goals_ms or {})
    await one.run(None)
    return one


def serve(frontend, *words):
    return exit_code("bench", "serve", "--address", frontend.address, *LENGTHS, "--sweep", *words)


# Figures


async def test_the_capacity_is_what_all_places_together_answer(monkeypatch):
    Clock(monkeypatch)
    found = await swept(monkeypatch, Server(max_running=20), [], "--sweep-s", "80")
    assert found.capacity.requests_per_s == pytest.approx(20 / SERVICE_S, rel=0.01)
    assert list(found.capacity.users_to_rate) == [8, 16, 32, 64, 128]  # two doublings brought nothing
    assert found.capacity.users_to_rate[8] == pytest.approx(8 / SERVICE_S, rel=0.01)


async def test_first_tokens_wait_as_long_as_the_queue_is(monkeypatch):
    Clock(monkeypatch)
    words = ("--max-concurrency", "4", "--sweep-s", "200")
    found = await swept(monkeypatch, Server(max_running=4), [20, 120], *words, goals_ms={"ttft": 1500})
    low, high = found.points
    capacity = found.capacity.requests_per_s
    assert capacity == pytest.approx(4 / SERVICE_S, rel=0.01)
    assert [point.rate for point in found.points] == pytest.approx([0.2 * capacity, 1.2 * capacity])
    assert low.offered_per_s == pytest.approx(low.rate, rel=0.2)
    assert low.summary.ttft_ms.median == pytest.approx(1000, rel=0.01)
    assert low.goodput_per_s > 0.95 * low.offered_per_s
    # What comes beyond the capacity waits: the last of 200 s for all of it to be answered.
    behind_s = 200 * (high.offered_per_s / capacity - 1)
    assert high.summary.ttft_ms.max / 1e3 == pytest.approx(1 + behind_s, rel=0.2)
    assert high.summary.itl_ms.percentiles["p99"] == pytest.approx(100)
    assert high.summary.num_failed == 0
    assert high.goodput_per_s < 0.5 * high.offered_per_s
    assert not low.why_invalid
    assert not high.why_invalid


async def test_a_late_generator_is_no_slow_server(monkeypatch):
    clock = Clock(monkeypatch)

    class Blocking(Server):
        async def answer(self, request, on_piece):
            clock.now_s += 0.05  # work of the client, in which nothing can be sent
            on_piece()
            return TokenCounts(5, 1)

    found = await swept(monkeypatch, Blocking(), [10, 90], "--request-rate", "20", "--sweep-s", "30")
    assert found.capacity.how == "given by --request-rate"
    for point in found.points:
        assert "the generator sent requests" in point.why_invalid
        assert point.summary.late_ms.max > 10
        # its lateness is in the latencies, rather than left out
        assert point.summary.ttft_ms.max >= point.summary.late_ms.max
    assert "90% is not valid" in found.as_text()


async def test_a_server_that_hangs_ends_its_point(monkeypatch):
    Clock(monkeypatch)
    found = await swept(
        monkeypatch, Server(max_running=1), [300], "--request-rate", "0.7", "--sweep-s", "200"
    )
    (point,) = found.points
    assert point.summary.errors["no whole answer within 60 s"] == point.summary.num_failed > 100
    assert "were given up" in point.why_invalid


async def test_a_point_has_so_many_requests_at_most(monkeypatch):
    Clock(monkeypatch)
    words = ("--request-rate", "10", "--num-prompts", "25", "--sweep-s", "3600")
    found = await swept(monkeypatch, Server(), [100], *words)
    (point,) = found.points
    assert point.summary.num_completed == 25
    assert point.offered_per_s == pytest.approx(10, rel=0.5)


async def test_the_seed_draws_the_times(monkeypatch):
    offered = []
    for seed in ("1", "1", "2"):
        with monkeypatch.context() as patch:
            Clock(patch)
            words = ("--request-rate", "3", "--seed", seed, "--sweep-s", "30")
            found = await swept(patch, Server(), [50, 90], *words)
            offered.append([point.summary.ttft_ms.count for point in found.points])
    assert offered[0] == offered[1] != offered[2]


async def test_one_doubling_in_vain_may_be_chance(monkeypatch):
    rates = iter([10.0, 10.1, 15.0, 15.1, 14.0])

    async def probe(self, backend, requests, num_users):
        return next(rates)

    monkeypatch.setattr(Sweep, "_probe", probe)
    found = await swept(monkeypatch, Server(), [], "--num-warmups", "0")
    assert found.capacity.requests_per_s == 15.1


def test_a_closed_loop_counts_from_the_first_answer_of_all_users():
    ends_s = [2.0, 2.5, 4.0, 4.5, 6.0, 6.5]  # 2 users; one leaves at 5, one goes on
    records = [RequestRecord(0.0, 0.0, [end_s - 1, end_s], end_s) for end_s in ends_s]
    # After 2.5 and by 5: both pieces of 4.0 and 4.5, and one of 6.0.
    assert rate_of_users(LoadResult(records, 6.5), 2, 5.0) == pytest.approx(2.5 / 2.5)
    with pytest.raises(TriptychError, match="2 users had 2 answers in 2 s, and more than one each is needed"):
        rate_of_users(LoadResult(records[:2], 2.5), 2, 2.5)


# The command


def test_a_sweep_is_reported(frontend, capsys, monkeypatch):
    measure = Sweep._probe

    async def probe(self, backend, requests, num_users):
        assert await measure(self, backend, requests, num_users) > 0
        return 100.0  # so that each point has requests on the slowest machine

    monkeypatch.setattr(Sweep, "_probe", probe)
    frontend.token_delay_s = 0.001
    words = ("--max-concurrency", "2", "--sweep-s", "0.3", "--num-prompts", "20", "--goodput", "ttft:60000")
    assert serve(frontend, "25,50", *words, "--json") == 0
    shown = capsys.readouterr()
    report = json.loads(shown.out)
    assert report["goals_ms"] == {"ttft": 60000}
    assert report["capacity"]["requests_per_s"] == 100.0
    assert report["capacity"]["how"] == "a closed loop of 2 users, as given"
    assert [point["percent"] for point in report["points"]] == [25, 50]
    for point in report["points"]:
        assert 0 < point["summary"]["num_completed"] <= 20
        assert point["goodput_per_s"] == pytest.approx(point["offered_per_s"])
        assert point["rate"] == pytest.approx(point["percent"])
    assert "sweep: 50%: " in shown.err


@pytest.mark.thorough  # matplotlib takes 2 s to load
def test_a_sweep_is_plotted(frontend, tmp_path):
    pytest.importorskip("matplotlib")
    plot = tmp_path / "sweep.svg"
    words = ("--request-rate", "50", "--sweep-s", "0.2", "--goodput", "ttft:60000", "--plot", str(plot))
    assert serve(frontend, "25,50", *words) == 0
    text = plot.read_text()
    assert ElementTree.fromstring(text).tag.endswith("svg")
    for word in ("Time to first token", "Gap between outputs", "within all goals"):
        assert f">{word}</text>" in text


def test_an_interrupt_leaves_the_points_so_far(frontend, capsys):
    def interrupt(request):
        if len(frontend.requests) == 5:  # the warm-up, and what the first point has at most
            os.kill(os.getpid(), signal.SIGINT)

    frontend.on_request = interrupt
    words = ("--request-rate", "100", "--num-prompts", "4", "--sweep-s", "5")
    assert serve(frontend, "50,100,150", *words) == 130
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "capacity    100.00 requests/s: given by --request-rate"
    assert [line.split()[0] for line in lines[2:3]] == ["50%"]
    assert not any(line.lstrip().startswith(("100%", "150%")) for line in lines)


def test_an_interrupt_before_the_capacity_is_said(frontend, capsys):
    frontend.on_request = lambda request: os.kill(os.getpid(), signal.SIGINT)
    assert serve(frontend, "50") == 130
    assert capsys.readouterr().out == "interrupted before the capacity was found\n"


def test_failures_end_the_search_for_the_capacity(frontend, capsys):
    frontend.errors = [EngineFailure("broken")]
    assert serve(frontend, "50", "--num-warmups", "0", "--max-concurrency", "2") == 1
    assert "--sweep: 2 users in a closed loop: broken\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--sweep", "50,x,0"), "--sweep: 'x' is no number from 1 to 1000; --sweep: '0' is no number"),
        (("--sweep", "--sweep-s", "0"), "--sweep-s: 0.0 is out of range, allowed is 0.1 to 3600"),
        (
            ("--sweep", "--dataset-name", "custom", "--dataset-path", "x"),
            "--sweep: sends more requests than dataset custom has; takes random or prefix_repetition",
        ),
    ],
)
def test_options_that_do_not_fit_a_sweep_are_one_line(words, told, capsys):
    assert exit_code("bench", "serve", "--address", NOBODY, *words) == 2
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert told in shown


def test_prefixes_of_a_sweep_stay_the_same(frontend):
    words = ("--dataset-name", "prefix_repetition", "--num-prefixes", "2", "--prefix-len", "7")
    limits = ("--num-prompts", "12", "--sweep-s", "0.2", "--request-rate", "100", "--num-warmups", "8")
    assert serve(frontend, "50,100", *words, *limits) == 0
    prompts = [tuple(request.generation.token_ids.ids) for request in frontend.requests]
    assert len({prompt[:7] for prompt in prompts}) == 2
    assert len(set(prompts)) == len(prompts) > 20
