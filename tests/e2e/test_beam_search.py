"""Beam search over a whole stack finds the beams of transformers, token by token, with their scores."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.helpers.byte_tokenizer import EOS, byte_backend, write_model_directory
from tests.helpers.cores import share_of_cores
from tests.worker.models.checkpoints import SIZES, save_checkpoint
from triptych import LLM, AsyncLLM, BeamSearchParams
from triptych.errors import InvalidRequest

EOS_IDS = [byte_backend().token_to_id(EOS), 17, 60, 101]
PROMPTS = [[5, 90, 33], [1], list(range(40, 75)), [200, 201, 202, 203, 204]]
MAX_TOKENS = 11


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A random model that likes to end, and its directory."""
    directory = tmp_path_factory.mktemp("random-llama")
    write_model_directory(directory)
    sizes = SIZES | {"vocab_size": byte_backend().get_vocab_size(), "eos_token_id": EOS_IDS}
    model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=False, dtype=torch.float32))
    with torch.no_grad():
        save_checkpoint(model, directory)
        model.lm_head.weight[EOS_IDS] *= 1.3
    model.save_pretrained(directory)
    return directory, model


@pytest.fixture(scope="module")
def llm(checkpoint: tuple[Path, Any]) -> Iterator[LLM]:
    options = {"worker.num_threads": share_of_cores(), "block_size": 4}
    with LLM(str(checkpoint[0]), dtype="float32", **options) as made:
        yield made


def beams_of(model: Any, prompt: list[int], params: BeamSearchParams) -> list[tuple[list[int], float]]:
    """Beams of transformers: tokens, the one that ends it included, and score, the best first."""
    eos_token_id = None if params.ignore_eos else EOS_IDS
    found = model.generate(
        torch.tensor([prompt]), num_beams=params.beam_width, num_return_sequences=params.beam_width,
        max_new_tokens=params.max_tokens, length_penalty=params.length_penalty, do_sample=False,
        eos_token_id=eos_token_id, pad_token_id=0, return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    beams = []
    for sequence, score in zip(found.sequences.tolist(), found.sequences_scores.tolist(), strict=True):
        output = sequence[len(prompt) :]
        ends = [place for place, token in enumerate(output) if token in EOS_IDS and not params.ignore_eos]
        beams.append((sequence[: len(prompt) + (ends[0] + 1 if ends else len(output))], score))
    return beams


@pytest.mark.thorough
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "options",
    [
        {"beam_width": 4},
        {"beam_width": 4, "length_penalty": 0.0},
        {"beam_width": 7, "length_penalty": 2.5},
        {"beam_width": 3, "length_penalty": -1.0},
        {"beam_width": 5, "ignore_eos": True},
        {"beam_width": 2, "max_tokens": 1},
    ],
    ids=str,
)
def test_beams_equal_those_of_transformers(
    llm: LLM, checkpoint: tuple[Path, Any], options: dict[str, Any]
) -> None:
    params = BeamSearchParams(**{"max_tokens": MAX_TOKENS, "include_stop_str_in_output": True, **options})
    for prompt, output in zip(PROMPTS, llm.beam_search(PROMPTS, params), strict=True):
        expected = beams_of(checkpoint[1], prompt, params)
        assert [found.tokens for found in output.sequences] == [tokens for tokens, _ in expected]
        scores = [score for _, score in expected]
        assert [found.score for found in output.sequences] == pytest.approx(scores, abs=1e-4)
        for found in output.sequences:
            own = [entry.chosen for entry in found.logprobs]
            assert [entry.token_id for entry in own] == found.tokens[len(prompt) :]
            assert sum(entry.logprob for entry in own) == pytest.approx(found.cum_logprob)


def test_some_beams_end_by_themselves(llm: LLM) -> None:
    """Otherwise the test above would prove less than it says."""
    params = BeamSearchParams(4, MAX_TOKENS)
    outputs = llm.beam_search(PROMPTS, params, concurrency_limit=3)
    reasons = [found.finish_reason for output in outputs for found in output.sequences]
    assert {"stop", "length"} == set(reasons)
    whole = BeamSearchParams(4, MAX_TOKENS, include_stop_str_in_output=True)
    for cut, kept in zip(outputs, llm.beam_search(PROMPTS, whole), strict=True):
        for one, other in zip(cut.sequences, kept.sequences, strict=True):
            is_stopped = one.finish_reason == "stop"
            assert one.tokens == (other.tokens[:-1] if is_stopped else other.tokens)
            assert len(one.logprobs) == len(other.logprobs) - is_stopped
            assert (one.stop_reason in EOS_IDS) == is_stopped
            assert one.score == pytest.approx(other.score, abs=1e-4)


async def test_texts_begin_with_the_prompt(llm: LLM) -> None:
    async with AsyncLLM(address=llm.address) as async_llm:
        output = await async_llm.beam_search("Hello the world", BeamSearchParams(2, 3))
    assert all(found.text.startswith("Hello the world") for found in output.sequences)


def test_what_cannot_be_searched_is_refused_by_name(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="beam_width: 17 is above the limit 16"):
        llm.beam_search("a", BeamSearchParams(17, 3))
    with pytest.raises(
        InvalidRequest, match=r"prompts\[1\]: prompt 2 \+ max_tokens 63 exceeds max_model_len 64"
    ):
        llm.beam_search([[1], [1, 2]], BeamSearchParams(2, 63))
    with pytest.raises(InvalidRequest, match=r"prompts\[1\].*999999"):
        llm.beam_search([[1], [999999]], BeamSearchParams(2, 3))
    with pytest.raises(InvalidRequest, match=r"beam_width: 0 .*; max_tokens: 1\.5 .*; temperature: 0\.7 "):
        BeamSearchParams(0, 1.5, temperature=0.7)  # type: ignore[arg-type]
