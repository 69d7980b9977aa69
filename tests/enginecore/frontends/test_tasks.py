"""Requests for vectors, from a frontend's submit to its batch: those that are served, and those that are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.helpers.scheduling import (
    BLOCK_SIZE,
    EOS,
    NAIVE_IDENTITY,
    NAIVE_TASKS,
    VOCAB_SIZE,
    Clock,
    NaiveWorker,
    make_prompt,
    naive_vectors,
)
from tests.helpers.stack import make_config
from triptych.errors import ConfigError
from triptych.types.facts import KvLayout, ModelFacts, WorkerFacts
from triptych.types.outputs import FinishReason, OutputBatch
from triptych.types.pooling import PoolingKind, PoolingParams, Task
from triptych.types.sampling import SamplingParams
from triptych.types.submit import single_choice
from triptych_services.enginecore.engine import EngineCore
from triptych_services.enginecore.tasks import MAX_VECTOR_BYTES

MEAN = PoolingParams(kind=PoolingKind.MEAN)
MAX_MODEL_LEN = 80
FACTS = WorkerFacts(
    boot_id="1",
    model=ModelFacts(
        "naive",
        NAIVE_IDENTITY,
        VOCAB_SIZE,
        MAX_MODEL_LEN,
        (EOS,),
        "float32",
        "float32",
        "none",
        tasks=NAIVE_TASKS,
        embedding_size=4,
        num_labels=4,
    ),
    kv=KvLayout(30, BLOCK_SIZE, 1, 1, 1, "float32"),
    max_num_seqs=8,
    max_num_batched_tokens=100,
    max_steps_in_flight=4,
)


def facts_with(max_adapters: int = 0, **model: Any) -> WorkerFacts:
    return replace(FACTS, model=replace(FACTS.model, **model), max_adapters=max_adapters)


def make_engine(facts: WorkerFacts = FACTS) -> EngineCore:
    config = make_config(max_num_seqs=8, max_num_batched_tokens=100)
    engine = EngineCore(config, Clock())
    engine.worker_ready(facts, after_crash=False)
    engine.frontends.open_session(1)
    return engine


def submit(
    engine: EngineCore, prompt: list[int], pooling: PoolingParams | None, *, number: int = 1, **fields: Any
) -> None:
    sampling = fields.pop("sampling", SamplingParams(max_tokens=1))
    engine.frontends.submit(
        1, single_choice(number, str(number), prompt, sampling, seed=1, pooling=pooling, **fields)
    )


def run(engine: EngineCore) -> OutputBatch:
    worker = NaiveWorker()
    while (plan := engine.plan()) is not None:
        engine.apply(worker.execute(plan))
    return engine.take_outputs()[1]


@pytest.mark.parametrize("length", [1, 16, MAX_MODEL_LEN])
@pytest.mark.parametrize("pooling", [MEAN, PoolingParams(Task.TOKEN_EMBED), PoolingParams(Task.CLASSIFY)])
def test_vectors_come_with_the_end(pooling: PoolingParams, length: int) -> None:
    engine, prompt = make_engine(), make_prompt(length)
    submit(engine, prompt, pooling, keep_ms=1000, resume_secret=b"s" * 32)
    assert not len(engine.frontends.kept)
    batch = run(engine)
    assert batch.admitted.tolist() == [1]
    assert not len(batch.token_ids)
    (end,) = batch.finished
    assert (end.number, end.reason, end.stop_token_id) == (1, FinishReason.STOP, None)
    np.testing.assert_array_equal(batch.vectors[1], naive_vectors(prompt, pooling))


LONG = MAX_VECTOR_BYTES // 16 + 1


@pytest.mark.parametrize(
    ("facts", "pooling", "fields", "code", "words"),
    [
        (facts_with(tasks=("generate",)), MEAN, {}, "FEATURE_DISABLED", "naive serves generate"),
        (
            facts_with(tasks=("embed", "classify")),
            None,
            {},
            "FEATURE_DISABLED",
            "naive serves embed, classify",
        ),
        (FACTS, PoolingParams(dimensions=5), {}, "INVALID_REQUEST", "5 are more than the 4"),
        (FACTS, PoolingParams(Task.CLASSIFY, dimensions=2), {}, "INVALID_REQUEST", "none that classify can"),
        (FACTS, MEAN, {"num_prompt_tokens": 5}, "INVALID_REQUEST", "has a prompt only"),
        (
            FACTS,
            MEAN,
            {"sampling": SamplingParams(max_tokens=1, prompt_logprobs=1)},
            "INVALID_REQUEST",
            "no log",
        ),
        (FACTS, None, {"adapter": "a", "adapter_digest": "d"}, "FEATURE_DISABLED", "max_adapters is 0"),
    ],
)
def test_what_the_worker_cannot_compute_is_refused_by_itself(
    facts: WorkerFacts, pooling: PoolingParams | None, fields: dict[str, Any], code: str, words: str
) -> None:
    engine = make_engine(facts)
    submit(engine, make_prompt(8), pooling, **fields)
    other = None if "generate" in facts.model.tasks else MEAN
    submit(engine, make_prompt(8), other, number=2)
    batch = run(engine)
    (failure,) = batch.failures
    assert (failure.number, failure.code) == (1, code)
    assert words in failure.message
    assert [end.number for end in batch.finished] == [2]


@pytest.mark.parametrize(
    ("pooling", "length", "words"),
    [
        (MEAN, MAX_MODEL_LEN + 1, "81 tokens are above the limit"),
        (PoolingParams(Task.TOKEN_EMBED), LONG, "above the limit"),
        (MEAN, 0, "at least one is needed"),
    ],
)
def test_prompts_that_cannot_be_pooled_are_refused(pooling: PoolingParams, length: int, words: str) -> None:
    engine = make_engine()
    submit(engine, [1] * length, pooling)
    (failure,) = run(engine).failures
    assert (failure.code, failure.field) == ("INVALID_REQUEST", "prompt")
    assert words in failure.message


def test_one_choice_has_vectors() -> None:
    engine = make_engine()
    one = single_choice(1, "1", make_prompt(8), SamplingParams(max_tokens=1), seed=1, pooling=MEAN)
    two = replace(one, numbers=np.array([1, 2], np.uint32), seeds=np.array([1, 2], np.uint64))
    engine.frontends.submit(1, two)
    failures = engine.take_outputs()[1].failures
    assert [(failure.number, failure.field) for failure in failures] == [(1, "n"), (2, "n")]


def test_an_adapter_reaches_the_worker_by_its_digest() -> None:
    engine = make_engine(facts_with(max_adapters=1))
    submit(engine, make_prompt(8), None, adapter="a", adapter_digest="d")
    plan = engine.plan()
    assert plan is not None
    assert [row.content.adapter for row in plan.new_rows] == ["d"]


def test_another_worker_may_not_have_the_task() -> None:
    engine = make_engine()
    submit(engine, make_prompt(8), MEAN)
    assert engine.plan() is not None
    engine.worker_lost()
    engine.worker_ready(facts_with(tasks=("generate",)), after_crash=False)
    (failure,) = engine.take_outputs()[1].failures
    assert failure.code == "FEATURE_DISABLED"


def test_an_encoder_needs_steps_that_hold_its_longest_text() -> None:
    engine = EngineCore(make_config(max_num_seqs=8, max_num_batched_tokens=64), Clock())
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens 64 is below max_model_len 80"):
        engine.worker_ready(facts_with(is_encoder=True, tasks=("embed",)), after_crash=False)
