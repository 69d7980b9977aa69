"""Sampling fields beyond OpenAI's through the whole stack with the real model."""

from __future__ import annotations

from dataclasses import replace

import openai
import pytest

from triptych import LLM, RepetitionDetection, SamplingParams
from triptych.launcher.local_cluster import LocalCluster

pytestmark = pytest.mark.model

PROMPT = "The capital of France is"


@pytest.fixture
def client(cluster: LocalCluster) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://{cluster.http_address}/v1", api_key="none", max_retries=0)


@pytest.mark.thorough
def test_bad_words_never_appear(cluster: LocalCluster, client: openai.OpenAI) -> None:
    def complete(**fields: object) -> str:
        answer = client.completions.create(
            model="embedded", prompt=PROMPT, max_tokens=12, temperature=0, extra_body=fields
        )
        return answer.choices[0].text

    words = [complete().split()[0].strip(".,"), "the French"]
    texts = [complete(bad_words=words[:1]), complete(bad_words=words)]
    with LLM(address=cluster.address) as llm:
        params = SamplingParams(temperature=0, max_tokens=12, bad_words=tuple(words))
        (output,) = llm.generate(PROMPT, params, use_tqdm=False)
    assert words[0] == "Paris"
    assert not any(words[0] in text for text in texts)
    assert texts[0] != texts[1] == output.outputs[0].text


@pytest.mark.thorough
def test_an_output_that_repeats_itself_ends(cluster: LocalCluster) -> None:
    detection = RepetitionDetection(max_pattern_size=2, min_count=5)
    with LLM(address=cluster.address) as llm:
        params = SamplingParams(temperature=0, max_tokens=64, allowed_token_ids=(260,))
        (plain,) = llm.generate(PROMPT, params, use_tqdm=False)
        params = replace(params, repetition_detection=detection)
        (ended,) = llm.generate(PROMPT, params, use_tqdm=False)
    assert len(plain.outputs[0].token_ids) == 64
    assert ended.outputs[0].token_ids == [260] * 5
    assert ended.outputs[0].finish_reason == "repetition"


def test_named_tokens_have_the_log_probabilities_that_they_have_among_the_best(
    cluster: LocalCluster, client: openai.OpenAI
) -> None:
    with LLM(address=cluster.address) as llm:
        params = SamplingParams(temperature=0, max_tokens=2, logprobs=5)
        (best,) = llm.generate(PROMPT, params, use_tqdm=False)
        first = best.outputs[0].logprobs[0]
        ids = sorted(entry.token_id for entry in first.top)
        params = SamplingParams(temperature=0, max_tokens=2, logprob_token_ids=ids)
        (named,) = llm.generate(PROMPT, params, use_tqdm=False)
    own = named.outputs[0].logprobs[0]
    assert [(entry.token_id, entry.rank) for entry in own.top] == [(token_id, 0) for token_id in ids]
    expected = {entry.token_id: entry.logprob for entry in first.top}
    assert {e.token_id: e.logprob for e in own.top} == pytest.approx(expected, abs=1e-4)  # float32
    answer = client.completions.create(
        model="embedded",
        prompt=PROMPT,
        max_tokens=1,
        temperature=0,
        extra_body={"logprob_token_ids": ids, "return_tokens_as_token_ids": True},
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.top_logprobs is not None
    values = {int(name.partition(":")[2]): value for name, value in logprobs.top_logprobs[0].items()}
    assert values == pytest.approx(expected, abs=1e-4)
