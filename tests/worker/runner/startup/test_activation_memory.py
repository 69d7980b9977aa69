"""Runs that measure the memory of a step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.worker.tiny import tiny_architecture, tiny_config
from triptych_kernels.weights.adapters import AdapterRef
from triptych_services.worker.adapters.store import AdapterLimits, AdapterStore
from triptych_services.worker.attention.paged import PagedAttention
from triptych_services.worker.layers.adapted import AdaptedLayer
from triptych_services.worker.layers.embedding import LogitsHead
from triptych_services.worker.loader.load import load_model
from triptych_services.worker.loader.random import RandomCheckpoint
from triptych_services.worker.runner.startup.activation_memory import LargestSteps, measure_activations
from triptych_services.worker.runner.startup.kv_plan import plan_kv_cache

BUDGET, MAX_NUM_SEQS, MAX_MODEL_LEN = 70, 6, 32
PROMPT, DECODE = 5_000, 300


def measured(*, max_graph_tokens: int, peaks: dict[int, int]) -> tuple[int, list[tuple[int, ...]]]:
    """The bytes found, and the shape of each batch that the model saw: `peaks` by its number of tokens."""
    architecture = tiny_architecture()
    config = tiny_config(architecture, max_num_seqs=MAX_NUM_SEQS, budget=BUDGET)
    model = load_model(config, RandomCheckpoint(architecture, seed=3))
    assert isinstance(model, torch.nn.Module)
    seen: list[tuple[int, ...]] = []

    def note(_: object, arguments: tuple) -> None:
        token_ids, _, context = arguments
        (batch,) = context.attention
        assert context.kv_caches[0].blocks.shape[0] == 1, "there is no other block yet"
        assert (batch.slot_mapping == -1).all()
        seen.append((token_ids.numel(), *batch.seq_lens_list))

    model.register_forward_pre_hook(note)

    def peak_of(launch: Callable[[], None]) -> int:
        launch()
        return peaks[seen[-1][0]]

    device = torch.device("cpu")
    steps = LargestSteps(
        model,
        plan_kv_cache(config, free_bytes=1 << 30),
        device,
        attention=PagedAttention(),
        max_num_batched_tokens=BUDGET,
        max_num_rows=MAX_NUM_SEQS,
        max_model_len=MAX_MODEL_LEN,
    )
    found = measure_activations(steps, device, max_graph_tokens=max_graph_tokens, peak_of=peak_of)
    return found, seen


def test_measuring_runs_a_full_prompt_step_and_a_full_decode() -> None:
    found, seen = measured(max_graph_tokens=0, peaks={BUDGET: PROMPT, MAX_NUM_SEQS: DECODE})
    assert seen == [(BUDGET, *[MAX_MODEL_LEN] * 3), (MAX_NUM_SEQS, *[MAX_MODEL_LEN] * MAX_NUM_SEQS)]
    assert found == PROMPT


def test_the_logits_of_prompts_that_are_scored_are_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triptych_services.worker.runner.startup.activation_memory.MAX_SCORED_AT_ONCE", 23)
    num_rows: list[int] = []
    honest = LogitsHead.forward

    def note(head: LogitsHead, hidden: torch.Tensor, slots: torch.Tensor | None) -> torch.Tensor:
        num_rows.append(len(hidden))
        return honest(head, hidden, slots)

    monkeypatch.setattr(LogitsHead, "forward", note)
    measured(max_graph_tokens=0, peaks={BUDGET: PROMPT, MAX_NUM_SEQS: DECODE})
    assert num_rows == [MAX_NUM_SEQS, 23, MAX_NUM_SEQS]


def test_what_adapters_add_is_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every product of the largest steps has slots, whose adapters are computed as if each row had one."""
    monkeypatch.setattr("triptych_services.worker.runner.startup.activation_memory.MAX_SCORED_AT_ONCE", 23)
    architecture = tiny_architecture()
    config = tiny_config(architecture, max_num_seqs=MAX_NUM_SEQS, budget=BUDGET)
    model = load_model(config, RandomCheckpoint(architecture, seed=3))
    assert isinstance(model, torch.nn.Module)
    AdapterStore(architecture, AdapterLimits(max_adapters=1, max_rank=4, max_bytes=1)).attach(model)
    num_rows: dict[AdaptedLayer, list[int]] = {}
    honest = AdaptedLayer.adapters_of

    def note(layer: AdaptedLayer, slots: torch.Tensor | None) -> AdapterRef | None:
        assert slots is not None
        assert (slots >= 0).all()
        num_rows.setdefault(layer, []).append(len(slots))
        return honest(layer, slots)

    monkeypatch.setattr(AdaptedLayer, "adapters_of", note)
    steps = LargestSteps(
        model,
        plan_kv_cache(config, free_bytes=1 << 30),
        torch.device("cpu"),
        attention=PagedAttention(),
        max_num_batched_tokens=BUDGET,
        max_num_rows=MAX_NUM_SEQS,
        max_model_len=MAX_MODEL_LEN,
    )
    steps.run_prompts()
    layers = [layer for layer in model.modules() if isinstance(layer, AdaptedLayer)]
    assert set(num_rows) == set(layers)
    for layer, rows in num_rows.items():
        assert rows == ([MAX_NUM_SEQS, 23] if isinstance(layer, LogitsHead) else [BUDGET])


@pytest.mark.parametrize("verifies_guesses", [False, True])
def test_rows_that_verify_guesses_copy_logits_once_more(
    monkeypatch: pytest.MonkeyPatch, verifies_guesses: bool
) -> None:
    config = tiny_config(tiny_architecture(), max_num_seqs=MAX_NUM_SEQS, budget=BUDGET)
    model = load_model(config, RandomCheckpoint(config.architecture, seed=3))
    steps = LargestSteps(
        model,
        plan_kv_cache(config, free_bytes=1 << 30),
        torch.device("cpu"),
        attention=PagedAttention(),
        max_num_batched_tokens=BUDGET,
        max_num_rows=MAX_NUM_SEQS,
        max_model_len=MAX_MODEL_LEN,
        verifies_guesses=verifies_guesses,
    )
    copied: list[tuple[int, ...]] = []
    honest = torch.Tensor.clone

    def note(tensor: torch.Tensor) -> torch.Tensor:
        copied.append(tuple(tensor.shape))
        return honest(tensor)

    monkeypatch.setattr(torch.Tensor, "clone", note)
    steps.run_decodes()
    assert copied == [(MAX_NUM_SEQS, config.architecture.vocab_size)] * (1 + verifies_guesses)


@pytest.mark.parametrize(
    ("prompt", "recorded", "decode", "bytes_needed"), [(5000, 100, 300, 5300), (5000, 400, 300, 5400)]
)
def test_graphs_need_the_largest_recorded_step_twice(
    prompt: int, recorded: int, decode: int, bytes_needed: int
) -> None:
    found, seen = measured(max_graph_tokens=11, peaks={BUDGET: prompt, 11: recorded, MAX_NUM_SEQS: decode})
    assert seen[-1] == (11, 11)
    assert found == bytes_needed
