"""Vectors, scores and classes through the typed client and LLM, over a real frontend before a fake engine."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from tests.frontend.http.openai.test_pooling import CLASSIFIER, EMBEDDER, expected, pool
from tests.helpers.byte_tokenizer import byte_tokenizer
from tests.helpers.fake_engine import MODEL, FakeEngine
from tests.helpers.grpc_api import open_api
from triptych import LLM, AsyncLLM
from triptych.errors import FeatureDisabled, InvalidRequest
from triptych.types.pooling import PoolingParams, Task

TOKENIZER = byte_tokenizer()


async def with_llm(model: Any, use: Any) -> FakeEngine:
    """Run a plain program with an LLM on a thread."""
    async with FakeEngine(model=model, pool=pool) as engine, open_api(engine) as api:

        def run() -> None:
            with LLM(address=api.address) as llm:
                use(llm)

        await asyncio.wait_for(asyncio.to_thread(run), 30)
        return engine


async def test_embed_keeps_order_over_many_messages() -> None:
    texts = [f"t {number}" for number in range(200)]

    def use(llm: LLM) -> None:
        outputs = llm.embed(texts)
        assert [output.outputs.embedding for output in outputs] == [expected(text) for text in texts]
        assert outputs[0].num_prompt_tokens == len(TOKENIZER.encode("t 0"))
        assert llm.embed(TOKENIZER.encode("abc"))[0].outputs.embedding == expected("abc")
        (short,) = llm.embed("Hello", dimensions=2, normalize=True, tenant="me")
        assert short.outputs.hidden_size == 2
        (tokens,) = llm.encode("abc")
        assert tokens.outputs.data[:, 0].tolist() == TOKENIZER.encode("abc")
        first, second = llm.score("abc", ["abc", "zzz"])
        assert first.outputs.score == pytest.approx(1)
        assert second.outputs.score < 1
        with pytest.raises(InvalidRequest, match=r"inputs\[1\]"):
            llm.embed(["fine", ""])
        with pytest.raises(FeatureDisabled, match="serves embed"):
            llm.classify("x")

    engine = await with_llm(EMBEDDER, use)
    request = next(each.request for each in engine.submitted if each.request.head.tenant == "me")
    assert request.pooling == PoolingParams(Task.EMBED, normalize=True, dimensions=2)


async def test_classify_names_the_label() -> None:
    def use(llm: LLM) -> None:
        (output,) = llm.classify("x", activation=False)
        assert output.outputs.label == "LABEL_1"
        np.testing.assert_allclose(output.outputs.probs, [0.1, 0.7, 0.2], rtol=1e-6)

    await with_llm(CLASSIFIER, use)


async def test_a_model_that_only_generates_refuses() -> None:
    def use(llm: LLM) -> None:
        with pytest.raises(FeatureDisabled, match="serves generate"):
            llm.embed("x")

    await with_llm(MODEL, use)


async def test_asyncio_programs_have_the_same_calls() -> None:
    async with (
        FakeEngine(model=EMBEDDER, pool=pool) as engine,
        open_api(engine) as api,
        AsyncLLM(address=api.address) as llm,
    ):
        (output,) = await llm.embed("abc", priority=3)
        assert output.outputs.embedding == expected("abc")
        assert engine.submitted[0].request.head.priority == 3
        assert (await llm.encode("abc"))[0].outputs.data.shape == (len(TOKENIZER.encode("abc")), 2)
        assert (await llm.score("a", "a"))[0].outputs.score == pytest.approx(1)
        with pytest.raises(FeatureDisabled, match="serves embed"):
            await llm.classify("x")
