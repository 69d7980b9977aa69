"""The runner's steps on the device: launched ahead, replayed, and short of memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tests.gpu.test_models import SHAPES, make_runner
from tests.worker.sampling_kinds import KINDS
from tests.worker.tiny import new_row, step_plan
from triptych.types.step import StepPlan
from triptych_services.worker.attention.paged import PagedAttention
from triptych_services.worker.runner.cuda.graph_recorder import CudaGraphRecorder, Cut
from triptych_services.worker.runner.sleepable_runner import SleepableRunner
from triptych_services.worker.runner.startup.activation_memory import LargestSteps, measure_activations

NUM_STEPS = 24


@pytest.fixture
def model(device: torch.device) -> PreTrainedModel:
    return SHAPES["groups of 3, heads of 64, tied"]().to(device).eval()


@pytest.fixture
def runners(model: PreTrainedModel, tmp_path: Path) -> tuple[SleepableRunner, SleepableRunner]:
    """With graphs, and without, of one checkpoint."""
    return make_runner(model, tmp_path), make_runner(model, tmp_path, eager=True)


def plans() -> list[StepPlan]:
    rng = np.random.default_rng(4)
    rows = [
        new_row(
            slot,
            rng.integers(3, 97, 5 + slot).tolist(),
            range(1 + 4 * slot, 5 + 4 * slot),
            sampling=sampling,
            seed=slot,
        )
        for slot, sampling in enumerate(KINDS.values())
    ]
    slots = range(len(rows))
    return [
        step_plan(1, new=rows, chunks=dict.fromkeys(slots, 2)),
        step_plan(2, chunks=dict.fromkeys(slots, 2)),  # in a bucket that the first step has recorded
        step_plan(3, chunks={slot: 1 + slot for slot in slots}),
        *(step_plan(step_id, removed=[2] if step_id == 9 else []) for step_id in range(4, NUM_STEPS)),
    ]


def test_replayed_steps_equal_eager_steps(runners) -> None:
    graphs, eager = runners
    assert (graphs.facts.kernels, eager.facts.kernels) == ("triton graphs", "triton eager")
    eager.reset()
    expected = [eager.execute(plan) for plan in plans()]
    graphs.reset()
    flying, results = [], []
    for plan in plans():
        flying.append(graphs.launch(plan))
        if len(flying) == 4:
            results.append(flying.pop(0).wait())
    results += [step.wait() for step in flying]
    for result, wanted in zip(results, expected, strict=True):
        assert result.token_ids.tolist() == wanted.token_ids.tolist()
        assert result.row_errors == wanted.row_errors == {}
    assert all(result.timings.gap_ns > 0 for result in results[1:])


def test_a_replayed_step_is_launched_while_the_device_is_busy(runners) -> None:
    graphs, _ = runners
    graphs.reset()
    prompt = new_row(0, [5, 6, 7], [1, 2])
    graphs.execute(step_plan(1, new=[prompt], chunks={0: 3}))
    for step_id in (2, 3):
        graphs.execute(step_plan(step_id))
    torch.cuda._sleep(1_000_000_000)
    pending = [graphs.launch(step_plan(step_id)) for step_id in (4, 5, 6)]
    assert not any(step.is_done() for step in pending)
    assert [step.wait().step_id for step in pending] == [4, 5, 6]


def test_out_of_memory_fails_requests_not_the_runner(runners, device: torch.device) -> None:
    _, eager = runners
    eager.reset()
    rows = [new_row(0, range(3, 90), range(1, 7), slot_version=3)]
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    del free
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved(device) / total, device)
    hog = []
    try:
        try:
            while True:  # what is reserved already, too
                hog.append(torch.empty(1 << 12, dtype=torch.uint8, device=device))
        except torch.OutOfMemoryError:
            pass
        failed = eager.execute(step_plan(1, new=rows, chunks={0: 87}))
    finally:
        hog.clear()
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    assert list(failed.row_errors) == [(0, 3)]
    assert "no memory for a step of 87 tokens of 1 requests" in failed.row_errors[0, 3].message
    result = eager.execute(step_plan(2, removed=[0], new=[new_row(1, [5, 6], [1])], chunks={1: 2}))
    assert result.row_errors == {}


def test_no_step_takes_more_than_was_measured(runners, device: torch.device) -> None:
    _, eager = runners
    facts = eager.facts
    model = eager.model
    steps = LargestSteps(
        model,
        facts.kv,
        device,
        attention=PagedAttention(),
        max_num_batched_tokens=facts.max_num_batched_tokens,
        max_num_rows=facts.max_num_seqs,
        max_model_len=facts.model.max_model_len,
    )
    measured = measure_activations(steps, device, max_graph_tokens=0)
    del steps
    eager.reset()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    sampling = KINDS["sampled"]
    rows = [new_row(slot, range(3, 15), [1 + slot], sampling=sampling, seed=1) for slot in range(8)]
    eager.execute(step_plan(1, new=rows, chunks=dict.fromkeys(range(8), 12)))
    assert torch.cuda.max_memory_allocated(device) - before <= measured


def test_unrecorded_attention_replays_decodes_in_pieces(
    runners, model: PreTrainedModel, tmp_path: Path
) -> None:
    _, eager = runners
    pieces = make_runner(model, tmp_path, attention="torch")
    assert "piecewise graphs" in pieces.facts.kernels
    for runner in (pieces, eager):
        runner.reset()
    for plan in plans():
        assert pieces.execute(plan).token_ids.tolist() == eager.execute(plan).token_ids.tolist()


def test_a_replay_reads_the_current_inputs(device: torch.device) -> None:
    recorder = CudaGraphRecorder(device)
    inputs = torch.zeros(1 << 20, device=device)
    outputs = torch.zeros_like(inputs)

    def launch(_: Cut) -> None:
        outputs.copy_((inputs + 1.0) * 2.0)

    launch(lambda: None)
    replays = [recorder.record(launch)[0] for _ in range(3)]
    held = recorder.num_bytes
    assert held >= 2 * inputs.nbytes, "its scratch counts"
    assert held < 6 * inputs.nbytes, "and is shared"
    for value, replay in enumerate(replays):
        inputs.fill_(value)
        replay()
        assert outputs.unique().tolist() == [2.0 * (value + 1)]
