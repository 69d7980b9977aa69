"""Rows that are pooled: as transformers and sentence-transformers have it, whatever the chunks, rows and programs."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from tests.helpers.in_process import InProcessEngine
from tests.worker.deferred import DeferredStream
from tests.worker.pooled import (
    generating_row,
    pool,
    pooled_row,
    pooling_runner,
    run,
    save_decoder,
    save_modules,
    texts_of,
)
from tests.worker.tiny import step_plan
from triptych.checkpoint import pooling
from triptych.errors import FeatureDisabled, ModelError, ProtocolViolation
from triptych.types.pooling import PoolingKind, PoolingParams, Task
from triptych.types.sampling import SamplingParams
from triptych.types.step import F32, RowErrorCode
from triptych_services.worker.runner.model_runner import ModelRunner

EMBED = PoolingParams(Task.EMBED)
LENGTHS = (1, 7, 64, 33, 2, 100)


def runner_of(directory: Path, kind: str) -> ModelRunner:
    if kind == "device":
        return pooling_runner(directory, stream=DeferredStream())
    return pooling_runner(directory, enforce_eager=kind == "eager")


def states(model: Any, text: list[int]) -> torch.Tensor:
    """[num_tokens, hidden_size] after the last norm, as transformers computes a text by itself."""
    with torch.inference_mode():
        body = getattr(model, "model", model)
        return body(input_ids=torch.tensor([text])).last_hidden_state[0]


def expected(hidden: torch.Tensor, kind: PoolingKind) -> torch.Tensor:
    return {
        PoolingKind.FIRST: hidden[0],
        PoolingKind.LAST: hidden[-1],
        PoolingKind.MEAN: hidden.double().mean(0).float(),
    }[kind]


@pytest.fixture(params=["recorded", "eager", "device"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_every_kind_is_that_of_transformers(tmp_path: Path, family: str, kind: str) -> None:
    model = save_decoder(tmp_path, family)
    runner, texts = runner_of(tmp_path, kind), texts_of(LENGTHS)
    facts = runner.facts.model
    assert (facts.tasks, facts.embedding_size) == (("generate", "embed", "token_embed"), 64)
    for way in PoolingKind:
        found = pool(runner, texts, PoolingParams(Task.EMBED, way, normalize=False))
        for vectors, text in zip(found, texts, strict=True):
            assert vectors.dtype == np.float32
            torch.testing.assert_close(
                torch.from_numpy(vectors[0]), expected(states(model, text), way), rtol=1e-5, atol=1e-5
            )
    # by default the last state, of length 1
    for vectors, text in zip(pool(runner, texts, EMBED), texts, strict=True):
        last = torch.nn.functional.normalize(states(model, text)[-1], dim=0)
        torch.testing.assert_close(torch.from_numpy(vectors[0]), last, rtol=1e-5, atol=1e-6)
    for vectors, text in zip(
        pool(runner, texts[:3], PoolingParams(Task.TOKEN_EMBED, dimensions=16)), texts, strict=False
    ):
        cut = torch.nn.functional.normalize(states(model, text)[:, :16], dim=1)
        torch.testing.assert_close(torch.from_numpy(vectors), cut, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", ["mean", "lasttoken", "cls"])
def test_chains_of_sentence_transformers(tmp_path: Path, mode: str) -> None:
    modules = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
    dense_module = pytest.importorskip("sentence_transformers.base.modules.dense")
    model = save_decoder(tmp_path, "Qwen3", "Model")
    torch.manual_seed(4)
    dense = dense_module.Dense(64, 40, activation_function=nn.Tanh())
    save_modules(tmp_path, "dense", "normalize", pooling_mode=mode, dense=dense)
    runner, texts = pooling_runner(tmp_path), texts_of(LENGTHS)
    facts = runner.facts.model
    assert (facts.tasks, facts.embedding_size) == (("embed", "token_embed"), 40)
    theirs_pooling = modules.Pooling(64, pooling_mode=mode)
    for vectors, text in zip(pool(runner, texts, EMBED), texts, strict=True):
        features = {
            "token_embeddings": states(model, text)[None],
            "attention_mask": torch.ones(1, len(text), dtype=torch.int64),
        }
        with torch.inference_mode():
            theirs = dense(theirs_pooling(features))["sentence_embedding"]
        theirs = torch.nn.functional.normalize(theirs, dim=1)
        torch.testing.assert_close(torch.from_numpy(vectors), theirs, rtol=1e-5, atol=1e-5)
    whole = pool(runner, texts[:1], PoolingParams(Task.EMBED, normalize=False))[0]
    (cut,) = pool(runner, texts[:1], PoolingParams(Task.EMBED, dimensions=8))
    np.testing.assert_allclose(cut, whole[:, :8] / np.linalg.norm(whole[:, :8]), rtol=1e-6)


@pytest.mark.parametrize(
    ("changes", "activate"),
    [
        ({"num_labels": 3}, lambda logits: logits.softmax(-1)),
        ({"num_labels": 1}, lambda logits: logits.sigmoid()),
        ({"num_labels": 2, "problem_type": "multi_label_classification"}, lambda logits: logits.sigmoid()),
        ({"num_labels": 1, "problem_type": "regression"}, lambda logits: logits),
    ],
)
@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Qwen2", "Mistral"])
def test_classifiers_are_those_of_transformers(
    tmp_path: Path, family: str, changes: dict[str, Any], activate: Any
) -> None:
    model = save_decoder(tmp_path, family, "ForSequenceClassification", **changes)
    runner, texts = pooling_runner(tmp_path), texts_of(LENGTHS)
    facts = runner.facts.model
    assert (facts.tasks, facts.num_labels) == (("classify", "embed", "token_embed"), changes["num_labels"])
    found = pool(runner, texts, PoolingParams(Task.CLASSIFY))
    raw = pool(runner, texts, PoolingParams(Task.CLASSIFY, activation=False))
    for vectors, unchanged, text in zip(found, raw, texts, strict=True):
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([text])).logits
        torch.testing.assert_close(torch.from_numpy(unchanged), logits, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(torch.from_numpy(vectors), activate(logits), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("way", list(PoolingKind))
@pytest.mark.parametrize("task", [Task.EMBED, Task.TOKEN_EMBED])
def test_a_vector_has_the_same_bits_in_any_batch(
    tmp_path: Path, way: PoolingKind, task: Task, kind: str
) -> None:
    save_decoder(tmp_path, "Llama")
    runner, texts, params = runner_of(tmp_path, kind), texts_of(LENGTHS), PoolingParams(task, way)
    together = pool(runner, texts, params)
    if kind == "recorded":  # plain torch and its products round otherwise in a batch
        for text, vectors in zip(texts, together, strict=True):
            (alone,) = pool(runner, [text], params)
            assert alone.tobytes() == vectors.tobytes()
    again = pool(runner, texts, params)
    assert [vectors.tobytes() for vectors in again] == [vectors.tobytes() for vectors in together]


@pytest.mark.parametrize("way", list(PoolingKind))
@pytest.mark.parametrize("task", [Task.EMBED, Task.TOKEN_EMBED])
def test_chunks_give_the_vectors_of_the_whole(
    tmp_path: Path, way: PoolingKind, task: Task, kind: str
) -> None:
    save_decoder(tmp_path, "Llama")
    runner, (text,) = runner_of(tmp_path, kind), texts_of([100])
    params = PoolingParams(task, way)
    (whole,) = pool(runner, [text], params)
    runner.reset()
    results = [
        runner.execute(
            step_plan(step, new=[pooled_row(0, text, params)] if step == 1 else (), chunks={0: length})
        )
        for step, length in enumerate((1, 30, 50, 19), 1)
    ]
    assert [len(result.vectors) for result in results] == [0, 0, 0, 1]
    (chunked,) = results[-1].vectors.values()
    np.testing.assert_allclose(chunked, whole, rtol=1e-5, atol=1e-6)
    # it leaves, comes back and is computed from the start: what it had is forgotten
    runner.reset()
    runner.execute(step_plan(1, new=[pooled_row(0, text, params)], chunks={0: 40}))
    row = pooled_row(0, text, params, slot_version=2)
    result = runner.execute(step_plan(2, removed=[0], new=[row], chunks={0: 100}))
    assert result.vectors[row.key].tobytes() == whole.tobytes()


def test_rows_that_generate_do_not_notice(tmp_path: Path, kind: str) -> None:
    save_decoder(tmp_path, "Qwen3")
    runner, texts = runner_of(tmp_path, kind), texts_of((20, 31, 9, 50))

    def tokens(*pooled: int) -> tuple[list[int], dict[int, F32]]:
        runner.reset()
        rows = [generating_row(0, texts[0]), *(pooled_row(slot, texts[slot], EMBED) for slot in pooled)]
        rows.append(generating_row(5, texts[1]))
        entering = {1: rows[:1], 2: rows[1:]}
        found: list[int] = []
        vectors: dict[int, F32] = {}
        for step in range(1, 8):
            new = entering.get(step, ())
            chunks = {row.slot: len(row.token_ids) for row in new}
            removed = pooled if step == 3 else ()
            result = runner.execute(step_plan(step, new=new, chunks=chunks, removed=removed))
            assert not result.row_errors
            found += result.token_ids.tolist()
            vectors |= {key.slot: values for key, values in result.vectors.items()}
        return found, vectors

    alone, _ = tokens()
    beside, vectors = tokens(1, 2, 3)
    assert beside == alone
    for slot in (1, 2, 3):
        (expected_vector,) = pool(runner, [texts[slot]], EMBED)
        np.testing.assert_allclose(vectors[slot], expected_vector, rtol=1e-5, atol=1e-6)


def test_a_row_that_has_ended_computes_nothing_until_it_is_removed(tmp_path: Path, kind: str) -> None:
    save_decoder(tmp_path, "Qwen3")
    runner, texts = runner_of(tmp_path, kind), texts_of((20, 31))
    alone = generating_row(0, texts[0])
    beside = pooled_row(1, texts[1], EMBED)
    found = []
    for rows in ([alone], [alone, beside]):
        runner.reset()
        plans = [
            step_plan(1, new=rows, chunks={row.slot: len(row.token_ids) for row in rows}),
            step_plan(2),
            step_plan(3),
        ]
        results = [runner.execute(plan) for plan in plans]
        found.append([result.token_ids.tolist() for result in results])
        assert [len(result.vectors) for result in results] == [len(rows) - 1, 0, 0]
    assert found[0] == found[1]


def test_an_engine_pools_and_generates_with_too_few_blocks(tmp_path: Path, kind: str) -> None:
    """Several steps are in flight, rows are preempted and start again, and equal prompts hit the cache."""
    save_decoder(tmp_path, "Qwen3")
    runner, texts = runner_of(tmp_path, kind), texts_of((60, 31, 9, 50, 100, 60, 17, 40))
    texts[5] = texts[0][:40] + texts[5][40:]
    ways = [PoolingParams(kind=way) for way in PoolingKind] + [PoolingParams(Task.TOKEN_EMBED)]
    pooling = {number: ways[number // 2] for number in range(1, len(texts), 2)}
    sampling = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)

    def engine(**options: Any) -> InProcessEngine:
        return InProcessEngine(
            runner, steps_in_flight=3, max_num_seqs=8, max_num_batched_tokens=48, **options
        )

    alone = engine(enable_prefix_caching=False).generate(texts[::2], sampling)
    busy = engine(num_blocks=34)
    tokens = busy.generate(texts, sampling, pooling=pooling)
    assert busy.scheduler.counters.num_preemptions > 0
    assert tokens[::2] == alone
    assert not any(tokens[1::2])
    busy.generate([texts[5]] * 2, sampling, first_number=20, pooling={20: ways[1], 21: ways[1]})
    vectors = {**busy.vectors, 5: busy.vectors[21]}
    for number, way in {**pooling, 5: ways[1]}.items():
        (expected_vectors,) = pool(runner, [texts[number]], way)
        np.testing.assert_allclose(vectors[number], expected_vectors, rtol=1e-4, atol=1e-5)


def test_a_row_of_the_first_block_hit_may_read_its_last_state_alone(tmp_path: Path) -> None:
    save_decoder(tmp_path, "Llama")
    runner, (text,) = pooling_runner(tmp_path), texts_of([40])
    (whole,) = pool(runner, [text], EMBED)
    first = pooled_row(0, text, EMBED)
    runner.reset()
    runner.execute(step_plan(1, new=[first], chunks={0: 40}))
    # another row with the same first four blocks, which are not computed again
    second = pooled_row(1, text, EMBED, computed=32)
    shared = np.concatenate((first.block_ids[:4], second.block_ids[4:]))
    result = runner.execute(step_plan(2, removed=[0], new=[replace(second, block_ids=shared)], chunks={1: 8}))
    np.testing.assert_allclose(result.vectors[second.key], whole, rtol=1e-5, atol=1e-6)
    mean = pooled_row(2, text, PoolingParams(Task.EMBED, PoolingKind.MEAN), computed=32)
    with pytest.raises(ProtocolViolation, match="needs the states of all its prompt"):
        runner.execute(step_plan(3, removed=[1], new=[mean], chunks={2: 8}))


def test_a_row_with_states_that_are_not_finite_fails_alone(tmp_path: Path, kind: str) -> None:
    model = save_decoder(tmp_path, "Llama", tie_word_embeddings=False)
    with torch.no_grad():
        model.model.embed_tokens.weight[50] = float("nan")
    model.save_pretrained(tmp_path)
    runner = runner_of(tmp_path, kind)
    texts = [[3, 4, 5], [6, 50, 7], [8, 9]]
    rows = [pooled_row(slot, text, EMBED) for slot, text in enumerate(texts)]
    rows.append(generating_row(5, [10, 11]))
    result = run(runner, rows)
    assert {key.slot for key in result.vectors} == {0, 2}
    assert {key.slot: error.code for key, error in result.row_errors.items()} == {
        1: RowErrorCode.ENGINE_FAILURE
    }
    assert "NaN" in next(iter(result.row_errors.values())).message
    assert result.token_ids.size == 1


@pytest.mark.parametrize(
    ("head", "params", "words"),
    [
        ("ForCausalLM", PoolingParams(Task.CLASSIFY), "task: classify is none of this model's"),
        ("ForCausalLM", PoolingParams(Task.EMBED, dimensions=65), "dimensions: 65"),
        ("Model", None, "task: generate is none of this model's: embed, token_embed"),
        ("ForSequenceClassification", None, "task: generate is none"),
    ],
)
def test_refused_rows_do_not_disturb_others(
    tmp_path: Path, head: str, params: PoolingParams | None, words: str, kind: str
) -> None:
    save_decoder(tmp_path, "Qwen3", head)
    runner, texts = runner_of(tmp_path, kind), texts_of((5, 6))
    refused = generating_row(0, texts[0]) if params is None else pooled_row(0, texts[0], params)
    served = pooled_row(1, texts[1], EMBED)
    result = run(runner, [refused, served])
    error = result.row_errors[refused.key]
    assert error.code is RowErrorCode.INVALID_REQUEST
    assert words in error.message
    assert set(result.vectors) == {served.key}
    (alone,) = pool(runner, [texts[1]], EMBED)
    np.testing.assert_allclose(result.vectors[served.key], alone, rtol=1e-5, atol=1e-6)


def test_a_row_with_an_adapter_that_is_not_there_reports_no_vector(tmp_path: Path) -> None:
    save_decoder(tmp_path, "Qwen3")
    runner, texts = pooling_runner(tmp_path), texts_of((5, 6))
    refused, served = (pooled_row(slot, text, EMBED) for slot, text in enumerate(texts))
    refused = replace(refused, content=replace(refused.content, adapter="ab" * 32))
    result = run(runner, [refused, served])
    assert set(result.row_errors) == {refused.key}
    assert set(result.vectors) == {served.key}


def test_published_embedding_models_without_a_head(tmp_path: Path) -> None:
    """Names and weights as of Qwen3-Embedding: a body, under the architecture of a whole decoder."""
    whole = save_decoder(tmp_path, "Qwen3", "ForCausalLM", tie_word_embeddings=False)
    config = (tmp_path / "config.json").read_bytes()
    whole.model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_bytes(config)
    save_modules(tmp_path, "normalize", pooling_mode="lasttoken")
    runner, (text,) = pooling_runner(tmp_path), texts_of([20])
    assert runner.facts.model.tasks == ("embed", "token_embed")
    (vectors,) = pool(runner, [text], EMBED)
    last = torch.nn.functional.normalize(states(whole, text)[-1:], dim=1)
    torch.testing.assert_close(torch.from_numpy(vectors), last, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("head", ["Model", "ForSequenceClassification"])
def test_a_family_with_names_of_its_own(tmp_path: Path, head: str) -> None:
    sizes: dict[str, Any] = {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 256, "vocab_size": 97}
    config = transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=2, pad_token_id=0, num_labels=3)
    torch.manual_seed(0)
    model = getattr(transformers, f"GPT2{head}")(config).eval()
    model.save_pretrained(tmp_path)
    runner, (text,) = pooling_runner(tmp_path), texts_of([20])
    with torch.inference_mode():
        output = model(input_ids=torch.tensor([text]))
    if head == "Model":
        params, theirs = PoolingParams(Task.EMBED, normalize=False), output.last_hidden_state[:, -1]
    else:
        params, theirs = PoolingParams(Task.CLASSIFY, activation=False), output.logits
    (vectors,) = pool(runner, [text], params)
    torch.testing.assert_close(torch.from_numpy(vectors), theirs, rtol=1e-5, atol=1e-5)


def test_a_dense_layer_that_does_not_fit_is_named(tmp_path: Path) -> None:
    dense_module = pytest.importorskip("sentence_transformers.base.modules.dense")
    save_decoder(tmp_path, "Qwen3", "Model")
    save_modules(tmp_path, "dense", dense=dense_module.Dense(32, 16))
    with pytest.raises(ModelError, match=r"2_Dense/config\.json: in_features: 32"):
        pooling_runner(tmp_path)


def test_what_is_not_built_is_refused_only_where_nothing_else_is_served(tmp_path: Path) -> None:
    both, bare = tmp_path / "both", tmp_path / "bare"
    for directory, head in ((both, "ForCausalLM"), (bare, "Model")):
        save_decoder(directory, "Qwen3", head)
        save_modules(directory, pooling_mode="max")
    assert pooling_runner(both).facts.model.tasks == ("generate",)
    with pytest.raises(FeatureDisabled, match="pooling_mode = max"):
        pooling_runner(bare)


def largest(states: F32) -> F32:
    """A pooler as another package may have it."""
    found: F32 = states.max(axis=0)
    return found


def test_a_pooler_of_an_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is found by the `pooling_mode` that the checkpoint names."""
    point = EntryPoint("largest", f"{__name__}:largest", pooling.ENTRY_POINT_GROUP)
    found = {pooling.ENTRY_POINT_GROUP: [point]}
    monkeypatch.setattr(pooling, "entry_points", lambda group: found.get(group, []))
    model = save_decoder(tmp_path, "Qwen3")
    save_modules(tmp_path, pooling_mode="largest")
    runner, texts = pooling_runner(tmp_path), texts_of(LENGTHS)
    for vectors, text in zip(pool(runner, texts, EMBED), texts, strict=True):
        theirs = states(model, text).amax(0)
        torch.testing.assert_close(torch.from_numpy(vectors[0]), theirs, rtol=1e-5, atol=1e-5)


def test_a_model_that_reads_last_states_hits_prefixes_unasked(tmp_path: Path) -> None:
    save_decoder(tmp_path, "Qwen3")
    runner, (text,) = pooling_runner(tmp_path), texts_of([70])
    assert runner.facts.model.last_state_tasks == ("embed",)
    (whole,) = pool(runner, [text], EMBED)
    engine = InProcessEngine(runner, max_num_seqs=8)
    for number in (1, 2):
        engine.generate([text], SamplingParams(), first_number=number, pooling={number: EMBED})
        np.testing.assert_allclose(engine.vectors[number], whole, rtol=1e-5, atol=1e-6)
    assert engine.scheduler.counters.prefix_hits == 64, "eight whole blocks, of the second one"


def test_a_classifier_reads_its_last_state_and_a_mean_does_not(tmp_path: Path) -> None:
    for folder, head, mode, expected_tasks in (
        ("classifier", "ForSequenceClassification", None, ("embed", "classify")),
        ("mean", "ForCausalLM", "mean", ()),
        ("last", "ForCausalLM", "lasttoken", ("embed",)),
    ):
        (directory := tmp_path / folder).mkdir()
        save_decoder(directory, "Qwen3", head, **({"pad_token_id": 0} if mode is None else {}))
        if mode is not None:
            save_modules(directory, pooling_mode=mode)
        assert pooling_runner(directory).facts.model.last_state_tasks == expected_tasks, folder
