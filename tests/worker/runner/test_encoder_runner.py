"""The runner of encoders against transformers: plans of whole texts, pairs, refusals, sleep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from tests.worker.models.checkpoints import save_checkpoint
from tests.worker.models.encoder_families import ENCODERS, HEADS, SIZES, create_encoder
from triptych.checkpoint.config_json import read_architecture
from triptych.config import EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig, WorkerConfig
from triptych.errors import ConfigError, FeatureDisabled, ProtocolViolation
from triptych.types.facts import SleepLevel
from triptych.types.pooling import PoolingKind, PoolingParams, Task
from triptych.types.sampling import SamplingParams
from triptych.types.step import NewRow, RowContent, RowErrorCode, RowKey, StepPlan, empty_u32
from triptych_services.worker.context.device import resolve_config
from triptych_services.worker.runner.encoder_runner import second_text
from triptych_services.worker.runner.sleepable_runner import SleepableRunner
from triptych_services.worker.runner.startup.create import create_runner
from triptych_services.worker.runner.startup.encoder import read_pair_separator

EMBED = PoolingParams(kind=PoolingKind.MEAN)
CLASSIFY = PoolingParams(Task.CLASSIFY, activation=False)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp("encoder")
    return directory, save_checkpoint(create_encoder(*ENCODERS["BERT"]), directory)


@pytest.fixture(scope="module")
def cross_encoder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """(directory, model, tokenizer of transformers)"""
    from transformers import BertTokenizerFast

    directory = tmp_path_factory.mktemp("cross_encoder")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz"]
    (directory / "vocab.txt").write_text("\n".join(words))
    tokenizer = BertTokenizerFast(str(directory / "vocab.txt"))
    tokenizer.save_pretrained(directory)
    return directory, save_checkpoint(create_encoder(*HEADS["BERT of one label"]), directory), tokenizer


def make_runner(directory: Path, **scheduler: int) -> SleepableRunner:
    engine = EngineConfig(
        model=ModelConfig(model="somewhere/tiny"),
        scheduler=SchedulerConfig(**scheduler),
        worker=WorkerConfig(device="cpu", num_threads=1),
    )
    config = resolve_config(engine, read_architecture(directory))
    return create_runner(config, directory, boot_id="b", on_phase=lambda phase, progress: None)


def entering(slot: int, text: Sequence[int], pooling: PoolingParams | None, **content: Any) -> NewRow:
    tokens = np.array(text, np.uint32)
    shared = RowContent(tokens, SamplingParams(), pooling, **content)
    return NewRow(slot, 1, shared, empty_u32(), 0, 0, np.ones(1, np.uint32), 0)


def step(step_id: int, rows: Sequence[NewRow], removed: Sequence[int] = ()) -> StepPlan:
    return StepPlan(
        step_id,
        step_id - 1,
        removed_slots=np.array(removed, np.uint32),
        new_rows=tuple(rows),
        chunk_slots=np.array([row.slot for row in rows], np.uint32),
        chunk_lengths=np.array([row.num_prompt_tokens for row in rows], np.uint32),
    )


def random_texts(*lengths: int) -> list[list[int]]:
    generator = np.random.default_rng(1)
    return [generator.integers(5, SIZES["vocab_size"], length).tolist() for length in lengths]


@torch.inference_mode()
def test_vectors_equal_transformers_in_steps_of_any_form(encoder: tuple[Path, Any]) -> None:
    directory, oracle = encoder
    runner, texts = make_runner(directory), random_texts(1, 512, 30, 7)
    assert runner.facts.model.is_encoder
    assert runner.facts.model.tasks == ("embed", "token_embed")
    assert runner.facts.kv.block_bytes == 0
    together = runner.execute(step(1, [entering(i, text, EMBED) for i, text in enumerate(texts)]))
    assert together.token_ids.size == 0
    for slot, text in enumerate(texts):
        states = oracle(torch.tensor([text])).last_hidden_state[0]
        vector = together.vectors[RowKey(slot, 1)]
        np.testing.assert_allclose(vector, normalize(states.mean(0, keepdim=True)), atol=1e-6)
        # alone in the slot of a text that has left, while others are still there
        row = replace(entering(slot, text, EMBED), slot_version=2)
        alone = runner.execute(step(slot + 2, [row], removed=[slot]))
        assert alone.vectors[row.key].tobytes() == vector.tobytes()


@torch.inference_mode()
def test_kinds_of_vectors(encoder: tuple[Path, Any]) -> None:
    directory, oracle = encoder
    (text,) = random_texts(9)
    states = oracle(torch.tensor([text])).last_hidden_state[0]
    rows = [
        entering(0, text, PoolingParams(kind=PoolingKind.FIRST, normalize=False)),
        entering(1, text, PoolingParams(kind=PoolingKind.LAST, dimensions=8)),
        entering(2, text, PoolingParams(Task.TOKEN_EMBED, normalize=False)),
    ]
    vectors = make_runner(directory).execute(step(1, rows)).vectors
    np.testing.assert_allclose(vectors[RowKey(0, 1)], states[:1], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(vectors[RowKey(1, 1)], normalize(states[-1:, :8]), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(vectors[RowKey(2, 1)], states, rtol=1e-5, atol=1e-5)


@torch.inference_mode()
def test_scores_of_pairs_equal_transformers(cross_encoder: tuple[Path, Any, Any]) -> None:
    directory, oracle, tokenizer = cross_encoder
    runner = make_runner(directory)
    assert runner.facts.model.tasks == ("classify", "embed", "token_embed")
    assert runner.facts.model.num_labels == 1
    pairs = [("a b c", "d e"), ("q", "r s t u"), ("x", "y")]
    separator = read_pair_separator(directory)
    assert separator == tokenizer.sep_token_id
    rows, expected = [], []
    for slot, pair in enumerate(pairs):
        encoded = tokenizer(*pair, return_tensors="pt")
        token_ids = encoded["input_ids"][0].numpy().astype(np.uint32)
        types = second_text(token_ids, separator)
        assert types is not None
        assert types.tolist() == encoded["token_type_ids"][0].tolist()
        rows.append(entering(slot, token_ids.tolist(), CLASSIFY))
        expected.append(oracle(**encoded).logits[0])
    single = tokenizer("a b", return_tensors="pt")
    rows.append(entering(3, single["input_ids"][0].tolist(), CLASSIFY))
    expected.append(oracle(**single).logits[0])
    vectors = runner.execute(step(1, rows)).vectors
    for row, scores in zip(rows, expected, strict=True):
        np.testing.assert_allclose(vectors[row.key][0], scores, rtol=1e-5, atol=1e-5)


def test_a_row_that_cannot_be_served_is_refused_alone(encoder: tuple[Path, Any]) -> None:
    runner, (text,) = make_runner(encoder[0]), random_texts(5)
    rows = [
        entering(0, text, None),
        entering(1, text, CLASSIFY),
        entering(2, text, PoolingParams(dimensions=33)),
        entering(3, text, EMBED, adapter="ab" * 32),
        entering(4, text, EMBED),
    ]
    result = runner.execute(step(1, rows))
    assert set(result.vectors) == {RowKey(4, 1)}
    reasons = [result.row_errors[RowKey(slot, 1)] for slot in range(4)]
    assert [reason.message.partition(":")[0] for reason in reasons] == [
        "task",
        "task",
        "dimensions",
        "adapter",
    ]
    assert {reason.code for reason in reasons} == {RowErrorCode.INVALID_REQUEST}


def test_a_plan_that_contradicts_the_rows_is_refused(encoder: tuple[Path, Any]) -> None:
    runner, (text,) = make_runner(encoder[0], max_num_seqs=3), random_texts(5)
    good = entering(0, text, EMBED)
    for plan, complaint in (
        (step(2, [good]), "step_id: 2 came after 0"),
        (step(1, [good], removed=[1]), "slot 1 is not live"),
        (step(1, [good, good]), "slot 0 is live"),
        (step(1, [entering(3, text, EMBED)]), "not below max_num_seqs 3"),
        (step(1, [entering(0, [97], EMBED)]), "token id 97"),
        (step(1, [entering(0, text * 200, EMBED)]), "max_model_len is 700"),
        (step(1, [entering(slot, text * 140, EMBED) for slot in range(3)]), "max_num_batched_tokens is 2048"),
        (replace(step(1, [good]), chunk_lengths=np.array([4], np.uint32)), "computes 4 tokens from 0 on"),
        (step(1, [replace(good, num_computed_tokens=1)]), "from 1 on"),
    ):
        runner.reset()
        with pytest.raises(ProtocolViolation, match=complaint):
            runner.execute(plan)
    runner.reset()
    assert len(runner.execute(step(1, [good])).vectors) == 1


@pytest.mark.thorough
def test_it_sleeps_and_wakes_with_the_same_bits(encoder: tuple[Path, Any]) -> None:
    runner, (text,) = make_runner(encoder[0]), random_texts(40)
    before = runner.execute(step(1, [entering(0, text, EMBED)])).vectors[RowKey(0, 1)]
    for level in SleepLevel:
        runner.sleep(level)
        runner.wake()
        after = runner.execute(step(1, [entering(0, text, EMBED)])).vectors[RowKey(0, 1)]
        assert after.tobytes() == before.tobytes()


def test_steps_that_hold_no_text_and_several_ranks_are_refused(encoder: tuple[Path, Any]) -> None:
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens: 128 is below model\.max_model_len 700"):
        make_runner(encoder[0], max_num_batched_tokens=128, max_num_seqs=4)
    architecture = read_architecture(encoder[0])
    for option in ("tensor_parallel_size", "pipeline_parallel_size"):
        engine = EngineConfig(
            parallel=ParallelConfig(**{option: 2}), worker=WorkerConfig(device="cpu", num_threads=1)
        )
        with pytest.raises(FeatureDisabled, match=f"parallel.{option} = 2"):
            resolve_config(engine, architecture)
