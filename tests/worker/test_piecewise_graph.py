"""Steps with prompts, recorded around attention on CPU tensors, say what they say operation by operation."""

from __future__ import annotations

import itertools
import logging
from collections import Counter

import pytest
import torch
from torch import nn

from services.worker.attention.paged import PagedAttention
from services.worker.context.resolved_config import ResolvedConfig
from services.worker.loader.load import load_model
from services.worker.loader.random import RandomCheckpoint
from services.worker.models.base import CausalLM
from services.worker.runner.cuda.piecewise_graph import (
    LEAST_GRAPH_TOKENS,
    MOST_GRAPH_TOKENS,
    PiecewiseGraphBackend,
    graph_token_limit,
    token_buckets,
)
from services.worker.runner.model_runner import ModelRunner
from tests.worker.deferred import DeferredStream
from tests.worker.sampling_kinds import KINDS
from tests.worker.step_runs import assert_same, plans, runner_for
from tests.worker.tiny import new_row, step_plan, tiny_architecture, tiny_config
from tests.worker.traced_graphs import TracedGraphs
from triptych.errors import ConfigError


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> TracedGraphs:
    """Those of every runner over a link, whose attention is not recorded, so that decodes are cut as well."""
    graphs = TracedGraphs(monkeypatch)
    monkeypatch.setattr(
        "services.worker.runner.model_runner.create_graph_recorder", lambda device, enforce_eager: graphs
    )
    monkeypatch.setattr(
        "services.worker.runner.model_runner.PagedAttention", lambda: PagedAttention(impl="torch")
    )
    return graphs


def tiny_model(**sizes: int) -> tuple[ResolvedConfig, CausalLM]:
    architecture = tiny_architecture()
    config = tiny_config(architecture, **sizes)
    model = load_model(config, RandomCheckpoint(architecture, seed=3))
    assert isinstance(model, nn.Module)
    return config, model


def backend_of(runner: ModelRunner) -> PiecewiseGraphBackend:
    backend = runner._backend
    assert isinstance(backend, PiecewiseGraphBackend)
    return backend


def test_buckets_reach_up_to_the_longest_recorded_step() -> None:
    assert token_buckets(8) == (8,)
    assert token_buckets(40) == (16, 32, 40)
    assert token_buckets(100) == (16, 32, 48, 64, 96, 100)
    assert token_buckets(512)[-3:] == (384, 448, 512)
    sizes = token_buckets(2048)
    assert sizes[-3:] == (1792, 1920, 2048)
    assert all(second - first <= max(16, first // 2) for first, second in itertools.pairwise(sizes))
    assert all(second - first <= first // 8 for first, second in itertools.pairwise(sizes) if first >= 512)


def test_steps_are_recorded_as_long_as_their_launches_outlast_them() -> None:
    small = tiny_architecture(
        hidden_size=576, intermediate_size=1536, num_heads=9, num_kv_heads=3, head_dim=64
    )
    medium = tiny_architecture(
        hidden_size=2048, intermediate_size=8192, num_heads=32, num_kv_heads=8, head_dim=64
    )
    large = tiny_architecture(
        hidden_size=4096, intermediate_size=14336, num_heads=32, num_kv_heads=8, head_dim=128
    )
    assert graph_token_limit(small) == MOST_GRAPH_TOKENS
    assert LEAST_GRAPH_TOKENS < graph_token_limit(medium) < MOST_GRAPH_TOKENS
    assert graph_token_limit(large) == LEAST_GRAPH_TOKENS


def test_pieces_captured_at_start_are_replayed_from_the_first_step_on(graphs: TracedGraphs) -> None:
    config, model = tiny_model(max_num_seqs=8, num_blocks=80)
    alone = runner_for(model, config, None)
    expected = [alone.execute(plan) for plan in plans(list(KINDS), 20)]
    replayed = runner_for(model, config, DeferredStream())
    told: list[float] = []
    replayed.capture_graphs(told.append)
    sizes = token_buckets(64)
    assert [bucket.size for bucket in backend_of(replayed)._buckets.values()] == [*reversed(sizes)]
    assert told == [done / len(sizes) for done in range(1, len(sizes) + 1)]
    for plan, other in zip(plans(list(KINDS), 20), expected, strict=True):
        assert_same(replayed.execute(plan), other)
    assert (graphs.num_recorded, graphs.num_replayed) == (len(sizes), 20)


@pytest.mark.parametrize("kinds", [["greedy"], ["sampled", "top_k", "greedy"], list(KINDS)], ids="+".join)
@pytest.mark.parametrize("window", [1, 3])
def test_a_model_says_the_same_in_pieces_and_one_by_one(
    graphs: TracedGraphs, kinds: list[str], window: int
) -> None:
    config, model = tiny_model(max_num_seqs=8, num_blocks=80)
    alone = runner_for(model, config, None)
    expected = [alone.execute(plan) for plan in plans(kinds, 20)]
    replayed = runner_for(model, config, DeferredStream())
    flying = []
    results = []
    for plan in plans(kinds, 20):
        flying.append(replayed.launch(plan))
        if len(flying) >= window:
            results.append(flying.pop(0).wait())
    results += [step.wait() for step in flying]
    for one, other in zip(results, expected, strict=True):
        assert_same(one, other)
    num_buckets = len(backend_of(replayed)._buckets)
    assert graphs.num_recorded == num_buckets
    assert graphs.num_replayed == 20 - num_buckets, "a bucket's first step is not replayed"


def test_a_long_step_is_not_recorded(graphs: TracedGraphs) -> None:
    config, model = tiny_model(max_num_seqs=10, budget=600, block_size=16, num_blocks=80)
    runner = runner_for(model, config, DeferredStream())
    rows = [new_row(slot, [5] * 60, range(1 + 4 * slot, 5 + 4 * slot)) for slot in range(10)]
    runner.execute(step_plan(1, new=rows, chunks=dict.fromkeys(range(10), 52)))
    assert graphs.num_recorded == 0
    runner.execute(step_plan(2, chunks=dict.fromkeys(range(10), 8)))
    assert graphs.num_recorded == 1


def test_queries_and_results_of_all_layers_share_memory(graphs: TracedGraphs) -> None:
    config, model = tiny_model()
    runner = runner_for(model, config, DeferredStream())
    rows = [new_row(0, [5, 6, 7], [1, 2])]
    runner.execute(step_plan(1, new=rows, chunks={0: 3}))
    (bucket,) = backend_of(runner)._buckets.values()
    assert len(bucket.pieces) == config.architecture.num_layers + 1
    assert len({call.kv_cache.blocks.data_ptr() for call in bucket.calls}) == config.architecture.num_layers


def test_without_memory_for_pieces_steps_go_on_and_the_log_says_so_once(
    graphs: TracedGraphs, caplog: pytest.LogCaptureFixture
) -> None:
    config, model = tiny_model()
    alone = runner_for(model, config, None)
    expected = [alone.execute(plan) for plan in plans(["greedy"], 8)]
    graphs.failure = torch.OutOfMemoryError("tried to allocate 2.00 MiB")
    runner = runner_for(model, config, DeferredStream())
    with caplog.at_level(logging.WARNING):
        for plan, other in zip(plans(["greedy"], 8), expected, strict=True):
            assert_same(runner.execute(plan), other)
    assert Counter(record.message.split(",")[0] for record in caplog.records) == {
        "no memory for a CUDA graph of steps of 16 tokens": 1
    }


def test_a_model_that_cannot_be_recorded_is_refused_and_the_way_out_is_named(graphs: TracedGraphs) -> None:
    config, model = tiny_model()
    forward = model.model.layers[0].mlp.forward  # type: ignore[attr-defined]
    model.model.layers[0].mlp.forward = lambda hidden: forward(hidden) * (hidden.sum().item() > -1e9)  # type: ignore[attr-defined]
    runner = runner_for(model, config, DeferredStream())
    with pytest.raises(ConfigError, match=r"enforce_eager: steps of 16 tokens .* not permitted .* true"):
        runner.execute(step_plan(1, new=[new_row(0, [1, 2], [1])], chunks={0: 2}))
