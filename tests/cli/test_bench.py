"""`triptych bench`: rounds, and load that is described, over gRPC and HTTP."""

from __future__ import annotations

import json
import sys
from typing import cast
from xml.etree import ElementTree

import pytest

from tests.helpers.command import NOBODY, exit_code
from tests.helpers.fake_generator import MODEL
from triptych.cli import stack
from triptych.cli.bench.rounds import RoundBackend, Workload, medians, run_round
from triptych.client.grpc_client import GenerationClient
from triptych.client.load.backends import TokenCounts
from triptych.client.load.run import LoadResult, RequestRecord
from triptych.client.load.statistics import summarize
from triptych.errors import ConfigError, EngineFailure, EngineUnavailable


def serve(frontend, *words):
    """Exit code of `bench serve` over gRPC, of short requests."""
    lengths = ("--num-prompts", "6", "--input-len", "5", "--output-len", "5")
    return exit_code("bench", "serve", "--address", frontend.address, *lengths, *words)


# Rounds


def test_bench_counts_what_the_server_sent(frontend, capsys):
    def overlap(request):
        frontend.waits_for_running = 2 if frontend.requests else 0  # but for the warm-up, which comes alone

    frontend.on_request = overlap
    words = ("--address", frontend.address, "--num-prompts", "6", "--input-len", "5", "--concurrency", "2")
    assert exit_code("bench", "throughput", *words, "--rounds", "2", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["workload"] == {
        "num_prompts": 6,
        "input_len": 5,
        "output_len": 128,
        "concurrency": 2,
        "seed": 0,
    }
    assert report["total_tokens_per_s"] == pytest.approx(2 * report["output_tokens_per_s"])  # it echoes
    assert frontend.max_running == 2
    prompts = [tuple(request.generation.token_ids.ids) for request in frontend.requests]
    assert len(prompts) == len(set(prompts)) == 1 + 6 + 6  # a warm-up, and no prompt twice


def test_bench_waits_for_a_full_server(frontend, capsys):
    def refuse_one(request):
        frontend.waits_for_refusals = 1 if frontend.requests else 0  # the warm-up comes alone

    frontend.capacity, frontend.on_request = 1, refuse_one
    words = ("--address", frontend.address, "--num-prompts", "4", "--input-len", "3", "--rounds", "1")
    assert exit_code("bench", "throughput", *words) == 0
    assert "4 x 3 tokens in" in capsys.readouterr().out
    assert frontend.num_refused > 0


def test_bench_ends_at_the_first_error(frontend, capsys):
    frontend.errors = [EngineFailure("broken")] * 9
    words = ("--address", frontend.address, "--num-prompts", "4", "--input-len", "3", "--rounds", "1")
    assert exit_code("bench", "throughput", *words) == 1
    assert capsys.readouterr().err == "triptych bench: broken\n"


async def test_a_round_sends_nothing_after_a_failure():
    num_sent = 0

    class Dead:
        async def generate(self, prompt, sampling, options):
            nonlocal num_sent
            num_sent += 1
            raise EngineUnavailable("no engine is there")
            yield

    backend = RoundBackend(cast(GenerationClient, Dead()), {}, "")
    with pytest.raises(EngineUnavailable):
        await run_round(backend, Workload(64, 3, 5, concurrency=1), 100, 1)
    assert num_sent == 1


def test_a_figure_is_the_median_of_the_rounds():
    def of_round(wall_s):
        records = [
            RequestRecord(0.0, 0.0, times_s, wall_s, TokenCounts(50, 25)) for times_s in ([0.1], [0.3, 0.4])
        ]
        return summarize(LoadResult(records, wall_s), (50, 99), {})

    figures = medians([of_round(wall_s) for wall_s in (1.0, 4.0, 2.0)])
    assert (figures["output_tokens_per_s"], figures["total_tokens_per_s"], figures["wall_s"]) == (25, 75, 2)
    assert (figures["ttft_p50_ms"], figures["itl_p99_ms"]) == (pytest.approx(200.0), pytest.approx(100.0))


# The server that is measured


def test_the_server_that_is_up_is_measured(frontend, capsys, monkeypatch):
    monkeypatch.delenv("TRIPTYCH_ADDRESS", raising=False)
    monkeypatch.setattr(stack, "DEFAULT_ADDRESS", frontend.address)
    lengths = ("--num-prompts", "3", "--input-len", "4", "--output-len", "4")
    assert exit_code("bench", "serve", *lengths, "--json") == 0
    shown = capsys.readouterr()
    assert f"triptych bench: measures the server at {frontend.address}\n" in shown.err
    assert json.loads(shown.out)["num_completed"] == 3
    frontend.set_ready(False)  # it is there, though: nothing else is started beside it
    assert exit_code("bench", "throughput", *lengths, "--rounds", "1") == 0


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), f"no server answers at {NOBODY}, so it measures a stack of its own"),
        (("--model.dtype", "float32"), "measures a stack of its own, with the options given"),
    ],
)
def test_a_stack_of_its_own_is_said(words, told, capsys, monkeypatch):
    def refuse(config):
        raise ConfigError("started")

    monkeypatch.delenv("TRIPTYCH_ADDRESS", raising=False)
    monkeypatch.setattr(stack, "DEFAULT_ADDRESS", NOBODY)
    monkeypatch.setattr(stack, "launch", refuse)
    for what in ("serve", "throughput", "latency"):
        assert exit_code("bench", what, *words) == 2
        assert capsys.readouterr().err == f"triptych bench: {told}\ntriptych bench: started\n"


# serve


def test_closed_loop_keeps_so_many_in_flight(frontend, capsys):
    frontend.waits_for_running = 2
    assert serve(frontend, "--max-concurrency", "2", "--num-warmups", "0", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["num_completed"], report["num_failed"], report["max_in_flight"]) == (6, 0, 2)
    assert report["num_input_tokens"] == report["num_output_tokens"] == 30  # it echoes
    assert report["load"]["max_concurrency"] == frontend.max_running == 2
    assert list(report["ttft_ms"]["percentiles"]) == ["p90", "p95", "p99"]
    assert report["itl_ms"]["count"] == 6 * 4
    for request in frontend.requests:
        assert (request.generation.length.max_tokens, request.generation.length.ignore_eos) == (5, True)
        assert request.generation.sampling.temperature == 0.0


def test_open_loop_sends_all_whatever_comes_back(frontend, capsys):
    frontend.waits_for_running = 6  # nothing is answered until all have come
    words = ("--request-rate", "1000", "--burstiness", "0.5", "--num-warmups", "0", "--goodput", "e2el:1e6")
    assert serve(frontend, *words, "--percentiles", "50,99.9", "--temperature", "0.5") == 0
    out = capsys.readouterr().out
    assert "6 answered, 0 failed" in out
    assert "requests/s within e2el 1e+06 ms" in out
    assert "p99.9" in out
    assert frontend.requests[0].generation.sampling.temperature == 0.5


def test_the_seed_draws_the_prompts_and_the_warm_up_has_its_own(frontend):
    for seed in ("1", "1", "2"):
        assert serve(frontend, "--max-concurrency", "1", "--seed", seed, "--num-warmups", "2") == 0
    prompts = [tuple(request.generation.token_ids.ids) for request in frontend.requests]
    first, again, other = prompts[:8], prompts[8:16], prompts[16:]
    assert sorted(first) == sorted(again)
    assert not set(first) & set(other)
    assert len(set(first)) == 8


def test_prefixes_are_repeated(frontend):
    words = ("--dataset-name", "prefix_repetition", "--num-prefixes", "2", "--prefix-len", "7")
    assert serve(frontend, *words, "--num-warmups", "0") == 0
    prompts = [tuple(request.generation.token_ids.ids) for request in frontend.requests]
    assert len({prompt[:7] for prompt in prompts}) == 2
    assert {len(prompt) for prompt in prompts} == {12}


def test_a_file_of_prompts_is_used_once_and_sharegpt_has_lengths_of_its_answers(frontend, tmp_path, capsys):
    custom = tmp_path / "custom.jsonl"
    custom.write_text(
        '"a a"\n{"prompt": "b", "max_tokens": 3}\n{"messages": [{"role": "user", "content": "c"}]}'
    )
    words = ("bench", "serve", "--address", frontend.address, "--max-concurrency", "1", "--json")
    assert exit_code(*words, "--dataset-name", "custom", "--dataset-path", str(custom)) == 0
    assert json.loads(capsys.readouterr().out)["num_completed"] == 2  # one is the warm-up
    lengths = {r.generation.text.text: r.generation.length for r in frontend.requests}
    assert lengths["b"].max_tokens == 3
    assert not lengths["a a"].HasField("max_tokens")
    assert not lengths["a a"].ignore_eos
    frontend.requests.clear()
    sharegpt = tmp_path / "sharegpt.json"
    turns = [[{"value": "q"}, {"value": "x " * number}] for number in (3, 4)]
    sharegpt.write_text(json.dumps([{"conversations": pair} for pair in turns]))
    assert exit_code(*words, "--dataset-name", "sharegpt", "--dataset-path", str(sharegpt)) == 0
    assert sorted(r.generation.length.max_tokens for r in frontend.requests) == [3, 4]
    assert (
        exit_code(*words, "--dataset-name", "custom", "--dataset-path", str(custom), "--num-prompts", "9")
        == 2
    )
    assert "holds 3 requests, 10 are needed" in capsys.readouterr().err


def test_failures_are_counted_and_all_of_them_are_a_failure(frontend, capsys):
    frontend.errors = [EngineFailure("broken")] * 2
    assert serve(frontend, "--num-warmups", "0") == 0
    out = capsys.readouterr().out
    assert "4 answered, 2 failed" in out
    assert "failed      2 x broken" in out
    frontend.errors = [EngineFailure("broken")] * 6
    assert serve(frontend, "--num-warmups", "0") == 1
    frontend.errors = [EngineFailure("broken")]
    assert serve(frontend) == 1
    assert capsys.readouterr().err == "triptych bench: warm-up: broken\n"


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions"])
def test_an_openai_server_is_measured_by_its_usage(api, tmp_path, capsys, endpoint):
    file = tmp_path / "custom.jsonl"
    file.write_text('"a"\n' * 5)
    words = ("--backend", "openai", "--base-url", f"http://127.0.0.1:{api.port}/v1", "--endpoint", endpoint)
    data = ("--dataset-name", "custom", "--dataset-path", str(file), "--output-len", "4", "--json")
    assert exit_code("bench", "serve", *words, *data) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["num_completed"], report["num_output_tokens"]) == (4, 16)
    assert {raw.model for raw in api.generator.requests} == {MODEL}
    assert {raw.sampling["max_tokens"] for raw in api.generator.requests} == {4}


@pytest.mark.thorough
def test_a_plot_shows_what_was_measured(frontend, tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "plot.svg"
    frontend.errors = [EngineFailure("broken")]
    assert serve(frontend, "--num-warmups", "0", "--plot", str(file)) == 0
    assert ElementTree.parse(file).getroot().tag.endswith("svg")
    text = file.read_text()
    for title in ("Share of requests within a latency", "Requests in flight", "Output tokens/s"):
        assert f"<!-- {title} -->" in text


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--request-rate", "0"), "--request-rate: 0.0 is out of range"),
        (
            ("--num-prompts", "0", "--max-concurrency", "0"),
            "--max-concurrency: 0 is out of range, allowed is >= 1; ",
        ),
        (("--percentiles", "50,x,101"), "'x' is no number from 0 to 100; --percentiles: '101'"),
        (("--goodput", "ttft", "itl:5", "tpot:-1"), "'ttft' is not FIGURE:MS"),
        (("--base-url", "http://x"), "--base-url: is for --backend openai"),
        (("--backend", "openai"), "--address: is for --backend grpc"),
        (("--dataset-name", "custom"), "--dataset-path: is needed by dataset custom"),
        (("--dataset-path", "x"), "--dataset-path: is none of dataset random"),
        (
            ("--backend", "openai", "--base-url", "http://x", "--endpoint", "/v1/chat/completions"),
            "takes text",
        ),
        (("--plot", "/no/such/plot.svg"), "expected a file *.svg in a folder that exists"),
        (("--model.dtype", "float32"), "model.dtype: the stack at"),
    ],
)
def test_options_that_do_not_fit_are_one_line(words, told, capsys):
    assert exit_code("bench", "serve", "--address", NOBODY, *words) == 2
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert told in shown


def test_a_plot_without_matplotlib_is_refused_before_the_measurement(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert exit_code("bench", "serve", "--address", NOBODY, "--plot", "x.svg") == 1
    assert "pip install 'triptych[bench]'" in capsys.readouterr().err


@pytest.mark.parametrize("what", ["serve", "throughput", "latency"])
def test_every_kind_has_help(what, capsys):
    assert exit_code("bench", what, "--help") == 0
    assert capsys.readouterr().out.startswith(f"usage: triptych bench {what}")
