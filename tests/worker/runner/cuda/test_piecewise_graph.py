"""Steps with prompts, recorded around attention on CPU tensors, say what they say operation by operation."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.worker.deferred import DeferredStream
from tests.worker.runner.cuda.traced_graphs import TracedGraphs
from tests.worker.sampling_kinds import KINDS
from tests.worker.step_runs import assert_same, plans, runner_for
from tests.worker.tiny import new_row, step_plan, tiny_architecture, tiny_config
from triptych.errors import ConfigError
from triptych_services.worker.attention.base import KvCache
from triptych_services.worker.attention.paged import PagedAttention
from triptych_services.worker.context.resolved_config import ResolvedConfig
from triptych_services.worker.loader.load import load_model
from triptych_services.worker.loader.random import RandomCheckpoint
from triptych_services.worker.models.base import CausalLM
from triptych_services.worker.runner.graph_sizes import (
    LEAST_GRAPH_TOKENS,
    MOST_GRAPH_TOKENS,
    graph_token_limit,
    token_buckets,
)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> TracedGraphs:
    """Those of every runner over a link, whose attention is not recorded, so that decodes are cut as well."""
    graphs = TracedGraphs(monkeypatch)
    monkeypatch.setattr(
        "triptych_services.worker.runner.model_runner.create_graph_recorder",
        lambda device, enforce_eager: graphs,
    )
    monkeypatch.setattr(
        "triptych_services.worker.runner.model_runner.PagedAttention", lambda: PagedAttention(impl="torch")
    )
    return graphs


def tiny_model(**sizes: int) -> tuple[ResolvedConfig, CausalLM]:
    architecture = tiny_architecture()
    config = tiny_config(architecture, **sizes)
    model = load_model(config, RandomCheckpoint(architecture, seed=3))
    assert isinstance(model, nn.Module)
    return config, model


def test_buckets_reach_up_to_the_longest_recorded_step() -> None:
    assert token_buckets(8) == (8,)
    assert token_buckets(40) == (16, 32, 40)
    assert token_buckets(100) == (16, 32, 48, 64, 96, 100)
    assert token_buckets(512)[-3:] == (384, 448, 512)
    sizes = token_buckets(2048)
    assert sizes[-3:] == (1792, 1920, 2048)
    assert all(second - first <= max(16, first // 2) for first, second in itertools.pairwise(sizes))
    assert all(second - first <= first // 8 for first, second in itertools.pairwise(sizes) if first >= 512)


def test_the_graph_token_limit_falls_with_model_size() -> None:
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


def test_pieces_captured_at_start_are_replayed(graphs: TracedGraphs) -> None:
    config, model = tiny_model(max_num_seqs=8, num_blocks=80)
    alone = runner_for(model, config, None)
    expected = [alone.execute(plan) for plan in plans(list(KINDS), 20)]
    replayed = runner_for(model, config, DeferredStream())
    seen: list[int] = []
    hook = model.register_forward_pre_hook(lambda _, arguments: seen.append(len(arguments[0])))
    progress: list[float] = []
    replayed.capture_graphs(progress.append)
    hook.remove()
    sizes = token_buckets(64)
    assert seen == [size for size in reversed(sizes) for _ in ("launch", "record")]
    assert progress == [done / len(sizes) for done in range(1, len(sizes) + 1)]
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
    assert 0 < graphs.num_recorded <= len(token_buckets(64))
    assert graphs.num_replayed == 20 - graphs.num_recorded, "a bucket's first step is not replayed"


def test_a_long_step_is_not_recorded(graphs: TracedGraphs) -> None:
    config, model = tiny_model(max_num_seqs=10, budget=600, block_size=16, num_blocks=80)
    runner = runner_for(model, config, DeferredStream())
    rows = [new_row(slot, [5] * 60, range(1 + 4 * slot, 5 + 4 * slot)) for slot in range(10)]
    runner.execute(step_plan(1, new=rows, chunks=dict.fromkeys(range(10), 52)))
    assert graphs.num_recorded == 0
    runner.execute(step_plan(2, chunks=dict.fromkeys(range(10), 8)))
    assert graphs.num_recorded == 1


def test_a_replayed_step_attends_between_the_pieces(
    graphs: TracedGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, model = tiny_model()
    runner = runner_for(model, config, DeferredStream())
    rows = [new_row(0, [5, 6, 7], [1, 2])]
    runner.execute(step_plan(1, new=rows, chunks={0: 3}))
    num_layers = config.architecture.num_layers
    assert graphs.num_pieces == [num_layers + 1]
    caches: list[int] = []
    attend = PagedAttention.attend

    def note(attention: PagedAttention, query: Tensor, kv_cache: KvCache, *rest: Any) -> Tensor:
        caches.append(kv_cache.blocks.data_ptr())
        return attend(attention, query, kv_cache, *rest)

    monkeypatch.setattr(PagedAttention, "attend", note)
    runner.execute(step_plan(2))
    assert graphs.num_replayed == 1
    assert len(caches) == len(set(caches)) == num_layers


def test_pieces_without_memory_are_logged_once_and_skipped(
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


def test_an_unrecordable_model_names_enforce_eager(graphs: TracedGraphs) -> None:
    config, model = tiny_model()
    forward = model.model.layers[0].mlp.forward  # type: ignore[attr-defined]
    model.model.layers[0].mlp.forward = lambda hidden, *rest: forward(hidden) * (hidden.sum().item() > -1e9)  # type: ignore[attr-defined]
    runner = runner_for(model, config, DeferredStream())
    with pytest.raises(ConfigError, match=r"enforce_eager: steps of 16 tokens .* not permitted .* true"):
        runner.execute(step_plan(1, new=[new_row(0, [1, 2], [1])], chunks={0: 2}))
