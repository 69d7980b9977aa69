"""LLM and AsyncLLM with a stack of their own, simulated: what operators and trainers call from Python."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from transformers import LlamaConfig

from tests.helpers.byte_tokenizer import write_model_directory
from tests.worker.models.checkpoints import SIZES
from triptych import LLM, AsyncLLM, OutputKind, SamplingParams
from triptych.errors import ConfigError, WrongState

pytestmark = pytest.mark.model  # of which the config and the tokenizer are read

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
SIMULATION = {"simulation.enabled": True, "simulation.base_ms": 1.0, "gpu_memory_utilization": 0.2}
SLOW = SIMULATION | {"simulation.base_ms": 5.0}
ENDLESS = SamplingParams(max_tokens=1500, ignore_eos=True, output_kind=OutputKind.DELTA)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_model_len=2048, served_model_name="sim", **SIMULATION) as made:
        yield made


@pytest.fixture
async def async_llm() -> AsyncIterator[AsyncLLM]:
    async with AsyncLLM(max_model_len=2048, **SLOW) as made:
        yield made


def test_a_program_puts_its_stack_to_sleep_and_wakes_it(llm: LLM) -> None:
    assert not llm.is_sleeping()
    assert llm.sleep(level=2) >= 0
    assert llm.is_sleeping()
    figures = {metric.name: metric for metric in llm.get_metrics()}
    assert figures["vllm:engine_sleep_state"].value == 1
    assert figures["vllm:engine_sleep_state"].labels["model_name"] == "sim"
    llm.wake_up()
    assert not llm.is_sleeping()
    assert llm.generate("a", SamplingParams(max_tokens=2), use_tqdm=False)[0].finished
    assert llm.reset_prefix_cache()


@pytest.mark.thorough
async def test_a_stack_that_sleeps_says_that_requests_wait(async_llm: AsyncLLM) -> None:
    client = await async_llm.start()
    await async_llm.sleep()
    async with asyncio.timeout(120):
        while not await client.why_waiting():
            await asyncio.sleep(0.05)
    assert "is asleep (`triptych admin wake`)" in await client.why_waiting()
    await async_llm.wake_up()
    async with asyncio.timeout(120):
        while await client.why_waiting():
            await asyncio.sleep(0.05)


def test_the_tokenizer_of_a_stack_agrees_with_its_prompts(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    text = "The capital of größer 🙂"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    params = SamplingParams(max_tokens=1)
    [plain] = llm.generate(text, params, use_tqdm=False)
    [chat] = llm.chat(QUESTION, params, use_tqdm=False)
    assert plain.prompt_token_ids == tokenizer.encode(text)
    assert chat.prompt_token_ids == tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True)
    rendered = tokenizer.apply_chat_template(QUESTION, tokenize=False)
    assert isinstance(rendered, str)
    assert QUESTION[0]["content"] in rendered
    assert tokenizer.eos_token_id is not None
    assert tokenizer.eos_token_id < tokenizer.vocab_size


@pytest.mark.thorough
def test_bad_prompts_among_thousands_fail_alone(llm: LLM) -> None:
    prompts = [[number % 1000] for number in range(2000)]
    for number in (3, 999, 1500):
        prompts[number] = [10_000_000]
    outputs = llm.generate(
        prompts, SamplingParams(max_tokens=1), use_tqdm=False, on_error="return", priority=range(2000)
    )
    assert [number for number, output in enumerate(outputs) if output.error] == [3, 999, 1500]
    assert all("10000000" in str(outputs[number].error) for number in (3, 999, 1500))
    assert sum(len(output.outputs) for output in outputs) == 1997


@pytest.mark.thorough
def test_the_models_own_sampling_parameters_are_known(tmp_path: Path) -> None:
    write_model_directory(tmp_path)  # generation_config.json among its files
    LlamaConfig(**SIZES, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    with LLM(str(tmp_path), **SIMULATION) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.5, top_k=40)


async def test_pausing_aborting_and_health(async_llm: AsyncLLM) -> None:
    await async_llm.check_health()
    deltas = async_llm.generate("a", ENDLESS, "long-one")
    assert (await anext(deltas)).request_id == "long-one"
    with pytest.raises(WrongState):
        await async_llm.reset_prefix_cache()
    assert await async_llm.abort("long-one") == ["long-one"]
    rest = [output async for output in deltas]
    assert rest[-1].outputs[0].finish_reason == "abort"
    assert await async_llm.abort(["long-one"]) == []
    await async_llm.pause("keep")
    answer = asyncio.create_task(anext(async_llm.generate("a", SamplingParams(max_tokens=1))))
    done, _ = await asyncio.wait([answer], timeout=0.2)
    assert not done
    await async_llm.resume()
    assert (await answer).outputs[0].token_ids
    assert not await async_llm.is_sleeping()


def test_names_of_options_are_checked() -> None:
    with pytest.raises(ConfigError, match="did you mean tensor_parallel_size"):
        LLM(tensor_paralel_size=2)
    with pytest.raises(ConfigError, match="did you mean gpu_memory_utilization"):
        LLM(gpu_memory_utilisation=0.5)
    with pytest.raises(ConfigError, match="admin_address: only with address"):
        LLM(admin_address="127.0.0.1:50050")
