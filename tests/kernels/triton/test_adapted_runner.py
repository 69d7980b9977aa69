"""Rows with adapters on Triton's kernels, interpreted, in steps that a stand-in for a device records: against peft."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import LlamaConfig

from tests.worker.adapters.trained import LLAMA, PROJECTIONS, merged, save_adapter, save_base
from tests.worker.deferred import DeferredStream
from tests.worker.models.checkpoints import greedy_tokens
from tests.worker.runner.cuda.traced_graphs import TracedGraphs
from tests.worker.step_runs import runner_for
from tests.worker.tiny import new_row, step_plan, tiny_config
from triptych.checkpoint.config_json import read_architecture
from triptych.types.step import StepResult
from triptych_kernels import registry
from triptych_kernels.cpu.library import forced_isa
from triptych_kernels.weights.adapters import StackedTable
from triptych_services.worker.adapters.store import AdapterLimits, AdapterStore
from triptych_services.worker.loader.load import load_model, open_checkpoint
from triptych_services.worker.runner.model_runner import ModelRunner

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="in the interpreter")

CONFIG = LlamaConfig(**LLAMA.to_dict() | {"num_hidden_layers": 1, "head_dim": 16, "num_attention_heads": 2})
EVERYWHERE = [*PROJECTIONS, "embed_tokens", "lm_head"]
KINDS = {"ends": {"target_modules": EVERYWHERE, "r": 3}, "one": {"r": 1}, "large": {"r": 64}}
PROMPTS = [[5, 9, 11], [7, 3], [40, 2, 31, 8], [17]]
NUM_STEPS = 4


@pytest.fixture(autouse=True)
def plain_weights() -> Iterator[None]:
    """Pack no weights for native kernels, as on a device."""
    with forced_isa(""):
        yield


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("base"), CONFIG)


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("adapters")
    return {
        name: save_adapter(base, directory / name, seed=seed, **changes)
        for seed, (name, changes) in enumerate(KINDS.items())
    }


def create(base: Path) -> tuple[nn.Module, ModelRunner, AdapterStore]:
    architecture = read_architecture(base)
    config = tiny_config(architecture, max_num_seqs=4, num_blocks=40)
    model = load_model(config, open_checkpoint(base))
    assert isinstance(model, nn.Module)
    store = AdapterStore(architecture, AdapterLimits(max_adapters=2, max_rank=64, max_bytes=1 << 30))
    return model, runner_for(model, config, DeferredStream(), adapters=store), store


def tokens_of(result: StepResult) -> list[int]:
    assert not result.row_errors
    tokens: list[int] = result.token_ids.tolist()
    return tokens


@pytest.mark.thorough
def test_adapters_come_and_go_between_the_replays_of_a_graph(
    base: Path, adapters: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of three rows has none. Then an adapter leaves its slot to a third one, and its row to another."""
    monkeypatch.setitem(registry.DEVICE_TO_IMPL, "cpu", "triton")
    graphs = TracedGraphs(monkeypatch)
    monkeypatch.setattr(
        "triptych_services.worker.runner.model_runner.create_graph_recorder", lambda *_, **__: graphs
    )
    _, runner, store = create(base)
    digest = {name: store.load(name, "", adapters[name]).digest for name in ("ends", "one")}
    rows = [
        new_row(slot, PROMPTS[slot], range(1 + 8 * slot, 9 + 8 * slot), adapter=digest.get(name, ""))
        for slot, name in enumerate(("ends", "", "one"))
    ]
    said: list[list[int]] = [[], [], []]
    plan = step_plan(1, new=rows, chunks={slot: len(PROMPTS[slot]) for slot in range(3)})
    for step_id in range(2, NUM_STEPS + 2):
        for own, token in zip(said, tokens_of(runner.execute(plan)), strict=True):
            own.append(token)
        plan = step_plan(step_id)
    before = graphs.num_recorded, graphs.num_replayed
    store.unload(digest["ends"])
    large = store.load("large", "", adapters["large"]).digest
    row = new_row(0, PROMPTS[3], range(25, 33), slot_version=2, adapter=large)
    plan = step_plan(NUM_STEPS + 1, removed=[0], new=[row], chunks={0: len(PROMPTS[3])})
    late: list[int] = []
    for step_id in range(NUM_STEPS + 2, 2 * NUM_STEPS + 2):
        tokens = tokens_of(runner.execute(plan))
        late.append(tokens[0])
        for own, token in zip(said[1:], tokens[1:], strict=True):
            own.append(token)
        plan = step_plan(step_id)
    assert graphs.num_recorded == before[0], "another adapter needs no other graph"
    assert graphs.num_replayed > before[1] > 0
    for tokens, prompt, name in zip((*said, late), PROMPTS, ("ends", None, "one", "large"), strict=True):
        oracle = merged(base, None if name is None else adapters[name])
        assert tokens == greedy_tokens(oracle, prompt, len(tokens)), name
    assert [len(tokens) for tokens in (*said, late)] == [NUM_STEPS, 2 * NUM_STEPS, 2 * NUM_STEPS, NUM_STEPS]


def test_another_model_takes_the_memory_of_the_slots_with_what_they_hold(
    base: Path, adapters: dict[str, Path]
) -> None:
    _, _, store = create(base)
    digest = store.load("large", "", adapters["large"]).digest
    slot = store.slot_of(digest)
    tables = store.sites.tables
    before = [(table.a.clone(), table.b.clone()) for table in tables if isinstance(table, StackedTable)]
    again, _, _ = create(base)
    store.attach(again)
    assert all(one is other for one, other in zip(store.sites.tables, tables, strict=True))
    held = {id(layer.adapters) for layer in again.modules() if hasattr(layer, "adapters")}
    assert held >= {id(table) for table in tables}
    assert any(bool(a[slot].any()) for a, _ in before)
    after = [(table.a, table.b) for table in tables if isinstance(table, StackedTable)]
    for (old_a, old_b), (new_a, new_b) in zip(before, after, strict=True):
        assert torch.equal(old_a, new_a)
        assert torch.equal(old_b, new_b)
