"""Replayed decodes on CPU tensors: a recorder that launches again what it was given stands for CUDA graphs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.worker.deferred import DeferredStream
from tests.worker.runner.test_overlapped_steps import continuation
from tests.worker.runner.test_random_plans import BUDGET, MAX_NUM_SEQS, NUM_BLOCKS, VOCAB, NaiveEngine
from tests.worker.sampling_kinds import KINDS
from tests.worker.step_runs import assert_same, plans, runner_for
from tests.worker.tiny import EchoModel, new_row, step_plan, tiny_architecture, tiny_config
from triptych.errors import ConfigError
from triptych_services.worker.layers.step_context import StepContext
from triptych_services.worker.loader.load import load_model
from triptych_services.worker.loader.random import RandomCheckpoint
from triptych_services.worker.runner.cuda.create import CudaBackend
from triptych_services.worker.runner.cuda.decode_graph import DecodeGraphPath
from triptych_services.worker.runner.cuda.forward import DeviceForward, EagerPath
from triptych_services.worker.runner.cuda.graph_recorder import Cut, Replay
from triptych_services.worker.runner.cuda.inputs import DeviceInputs
from triptych_services.worker.runner.graph_sizes import decode_buckets
from triptych_services.worker.runner.model_runner import ModelRunner
from triptych_services.worker.service.runner_app import RunnerApp


class FakeRecorder:
    """A `GraphRecorder`: launches are kept, and not run until replayed."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.num_recorded = self.num_replayed = 0
        self.failure: Exception | None = None

    def record(self, launch: Callable[[Cut], None]) -> tuple[Replay, ...]:
        if self.failure is not None:
            raise self.failure
        self.num_recorded += 1

        def replay() -> None:
            self.num_replayed += 1
            launch(self.must_not_cut)

        return (replay,)

    def must_not_cut(self) -> None:
        raise AssertionError("decodes are recorded whole")


class LengthsFromTensors(nn.Module):
    """A model that believes tensors, as a recorded kernel must: the host's lengths are bounds there."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, token_ids: Tensor, positions: Tensor, context: StepContext) -> Tensor:
        (batch,) = context.attention
        seq_lens = tuple(batch.seq_lens.tolist())
        query_lens = tuple(batch.query_starts.diff().tolist())
        assert all(own <= bound for own, bound in zip(seq_lens, batch.seq_lens_list, strict=True))
        assert query_lens == batch.query_lens_list
        num_padding = int((batch.block_tables[:, 0] == 0).sum())
        assert not token_ids[len(token_ids) - num_padding :].any()
        exact = replace(batch, seq_lens_list=seq_lens, query_lens_list=query_lens, max_seq_len=max(seq_lens))
        hidden: Tensor = self.model(token_ids, positions, replace(context, attention=(exact,)))
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.model.compute_logits(hidden)
        return logits


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> FakeRecorder:
    return recorder_in(monkeypatch)


def recorder_in(monkeypatch: pytest.MonkeyPatch) -> FakeRecorder:
    """Return the recorder of the graphs of every runner made from now on."""
    recorder = FakeRecorder()

    def create(model, kv_caches, inputs, *, stream, last_tokens, max_model_len, vocab_size, **_):
        device_inputs = DeviceInputs(inputs, stream)
        launch = DeviceForward(LengthsFromTensors(model), kv_caches, last_tokens)
        decodes = DecodeGraphPath(
            launch, device_inputs, recorder=recorder, max_seq_len=max_model_len, vocab_size=vocab_size
        )
        return CudaBackend((decodes, EagerPath(launch, device_inputs)))

    monkeypatch.setattr("triptych_services.worker.runner.model_runner.create_cuda_backend", create)
    return recorder


def echo_runner(**arguments: int) -> tuple[ModelRunner, EchoModel]:
    model = EchoModel(VOCAB)
    config = tiny_config(tiny_architecture(vocab_size=VOCAB), **arguments)
    return runner_for(model, config, DeferredStream()), model


@pytest.mark.parametrize(
    ("max_num_seqs", "buckets"),
    [
        (1, (1,)),
        (3, (1, 2, 3)),
        (8, (1, 2, 4, 8)),
        (20, (1, 2, 4, 8, 16, 20)),
        (32, (1, 2, 4, 8, 16, 24, 32)),
    ],
)
def test_buckets_reach_up_to_the_largest_batch(max_num_seqs: int, buckets: tuple[int, ...]) -> None:
    assert decode_buckets(max_num_seqs) == buckets
    assert decode_buckets(1000)[-4:] == (928, 960, 992, 1000)


def test_a_bucket_is_recorded_after_its_first_step(recorder: FakeRecorder) -> None:
    runner, model = echo_runner()
    prompts = [[5, 6], [7], [8, 9, 10]]
    rows = [new_row(slot, prompt, [1 + slot]) for slot, prompt in enumerate(prompts)]
    said = [runner.execute(step_plan(1, new=rows, chunks={0: 2, 2: 3})).token_ids.tolist()]
    assert (recorder.num_recorded, recorder.num_replayed) == (0, 0), "a step with prompts is not a decode"
    said.append(runner.execute(step_plan(2)).token_ids.tolist())
    assert (recorder.num_recorded, recorder.num_replayed) == (1, 0)
    assert model.written_slots == [1 * 4 + 2, 2 * 4 + 1, 3 * 4 + 3], "padding writes nothing"
    said.append(runner.execute(step_plan(3, blocks=[(2, 9)])).token_ids.tolist())
    assert (recorder.num_recorded, recorder.num_replayed) == (1, 1)
    said.append(runner.execute(step_plan(4, removed=[1], blocks=[(0, 7)])).token_ids.tolist())
    assert (recorder.num_recorded, recorder.num_replayed) == (2, 1), "two rows have a bucket of their own"
    expected = [continuation(prompt, 4) for prompt in prompts]
    assert said[:3] == [list(tokens) for tokens in zip(*expected, strict=True)][:3]
    assert said[3] == [expected[0][3], expected[2][3]]


def test_all_buckets_are_captured_at_start_largest_first(recorder: FakeRecorder) -> None:
    runner, model = echo_runner(max_num_seqs=8)
    sizes: list[int] = []
    model.register_forward_pre_hook(lambda _, arguments: sizes.append(len(arguments[0])))
    told: list[float] = []
    runner.capture_graphs(told.append)
    assert sizes == [8, 4, 2, 1], "each runs once before it is recorded"
    assert told == [0.25, 0.5, 0.75, 1.0]
    assert recorder.num_recorded == 4
    assert model.written_slots == []
    prompts = [[5, 6], [7], [8, 9, 10]]
    rows = [new_row(slot, prompt, [1 + slot]) for slot, prompt in enumerate(prompts)]
    said = [runner.execute(step_plan(1, new=rows, chunks={0: 2, 2: 3})).token_ids.tolist()]
    said.append(runner.execute(step_plan(2)).token_ids.tolist())
    assert (recorder.num_recorded, recorder.num_replayed) == (4, 1)
    expected = [continuation(prompt, 2) for prompt in prompts]
    assert said == [list(tokens) for tokens in zip(*expected, strict=True)]


def test_capture_without_memory_leaves_steps_eager(recorder: FakeRecorder) -> None:
    recorder.failure = torch.OutOfMemoryError("tried to allocate 2.00 MiB")
    runner, _ = echo_runner()
    runner.capture_graphs(lambda progress: None)
    recorder.failure = None
    results = [runner.execute(step_plan(1, new=[new_row(0, [1, 2], [1])], chunks={0: 2}))]
    results += [runner.execute(step_plan(2)), runner.execute(step_plan(3, blocks=[(0, 2)]))]
    assert [int(result.token_ids[0]) for result in results] == continuation([1, 2], 3)
    assert recorder.num_recorded == 0


@pytest.mark.thorough
@settings(max_examples=30, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 4))
def test_random_plans_say_and_write_what_single_requests_would(random, window) -> None:
    with pytest.MonkeyPatch.context() as patch:
        recorder = recorder_in(patch)
        runner, model = echo_runner(
            max_num_seqs=MAX_NUM_SEQS, budget=BUDGET, num_blocks=NUM_BLOCKS, max_model_len=23
        )
        engine = NaiveEngine(random, 4, 23)
        flying = []
        for _ in range(25):
            model.written_slots = []
            step = runner.launch(engine.plan())
            tokens, written = engine.expect()
            assert model.written_slots == written
            flying.append((step, tokens))
            if len(flying) >= window:
                step, tokens = flying.pop(0)
                assert step.wait().token_ids.tolist() == tokens
        assert recorder.num_recorded <= len(decode_buckets(MAX_NUM_SEQS))


@pytest.mark.parametrize("kinds", [["greedy"], ["sampled", "top_k", "greedy"], list(KINDS)], ids="+".join)
def test_a_model_says_the_same_replayed_and_one_by_one(recorder: FakeRecorder, kinds: list[str]) -> None:
    architecture = tiny_architecture()
    config = tiny_config(architecture, max_num_seqs=8, num_blocks=80)
    model = load_model(config, RandomCheckpoint(architecture, seed=3))
    assert isinstance(model, nn.Module)
    alone = runner_for(model, config, None)
    expected = [alone.execute(plan) for plan in plans(kinds, 20)]
    replayed = runner_for(model, config, DeferredStream())
    flying = [replayed.launch(plan) for plan in plans(kinds, 20)]
    for one, other in zip((step.wait() for step in flying), expected, strict=True):
        assert_same(one, other)
    assert recorder.num_replayed > 12


def test_a_decode_graph_without_memory_is_logged_and_skipped(
    recorder: FakeRecorder, caplog: pytest.LogCaptureFixture
) -> None:
    recorder.failure = torch.OutOfMemoryError("tried to allocate 2.00 MiB")
    runner, _ = echo_runner()
    results = [runner.execute(step_plan(1, new=[new_row(0, [1, 2], [1])], chunks={0: 2}))]
    with caplog.at_level(logging.WARNING):
        results += [runner.execute(step_plan(2)), runner.execute(step_plan(3, blocks=[(0, 2)]))]
    assert [int(result.token_ids[0]) for result in results] == continuation([1, 2], 3)
    assert [record.message.split(",")[0] for record in caplog.records] == [
        "no memory for a CUDA graph of decodes of 1 rows"
    ]


@pytest.mark.parametrize(
    "failure",
    [
        RuntimeError("operation not permitted when stream is capturing"),
        torch.AcceleratorError(
            "CUDA error: operation not permitted when stream is capturing\nCompile with …"
        ),
        RuntimeError("CUDA error: dependency created on uncaptured work in another stream"),
    ],
    ids=["words", "torch", "older torch"],
)
def test_an_unrecordable_model_names_enforce_eager(recorder: FakeRecorder, failure: RuntimeError) -> None:
    recorder.failure = failure
    runner, _ = echo_runner()
    runner.execute(step_plan(1, new=[new_row(0, [1, 2], [1])], chunks={0: 2}))
    with pytest.raises(ConfigError, match=r"enforce_eager: .*captur.* true"):
        runner.execute(step_plan(2))


@pytest.mark.parametrize(
    "failure",
    [
        torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered"),
        torch.AcceleratorError("CUDA error: unspecified launch failure\nwhile capturing, see …"),
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
    ],
    ids=["memory", "launch", "triton"],
)
def test_a_device_lost_at_capture_is_no_mistake_of_the_config(
    recorder: FakeRecorder, failure: RuntimeError
) -> None:
    recorder.failure = failure
    runner, _ = echo_runner()
    with pytest.raises(type(failure)) as raised:
        runner.capture_graphs(lambda _: None)
    assert raised.value is failure
    assert not any(isinstance(failure, kind) for kind, _ in RunnerApp.exit_codes), "a restart may help"
