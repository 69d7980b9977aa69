"""`LLM` and `AsyncLLM` with vLLM's arguments, against a frontend without a model."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from tests.helpers.fake_frontend import MAX_MODEL_LEN, FakeFrontend
from triptych import vllm
from triptych.errors import ConfigError, FeatureDisabled, InvalidRequest
from triptych.vllm import LLM, AsyncEngineArgs, EngineArgs, SamplingParams
from triptych.vllm.lora.request import LoRARequest
from triptych.vllm.outputs import RequestOutput
from triptych.vllm.v1.engine.async_llm import AsyncLLM

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def frontend():
    with FakeFrontend() as fake:
        yield fake


@pytest.fixture
def llm(frontend):
    with LLM(address=frontend.address) as made:
        yield made


def seeds_of(frontend):
    return [request.generation.sampling.seed for request in frontend.requests]


@pytest.mark.parametrize("name", vllm.__all__)
def test_every_name_is_there(name):
    assert getattr(vllm, name) is getattr(vllm, name)
    assert name in dir(vllm)


def test_a_name_that_is_not_there_is_an_import_error():
    with pytest.raises(ImportError, match="PoolingParams"):
        exec("from triptych.vllm import PoolingParams")


def test_importing_it_costs_nothing():
    program = "import triptych.vllm, sys; print(sorted({'grpc', 'numpy', 'asyncio'} & set(sys.modules)))"
    assert (
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
        == "[]\n"
    )


def test_a_program_draws_the_same_seeds_in_each_run(frontend):
    for seed in (0, 0, 7, None):
        with LLM(address=frontend.address, seed=seed) as llm:
            llm.generate(["a", "b"], SamplingParams(), use_tqdm=False)
            llm.generate("c", None, use_tqdm=False)
            llm.generate("d", SamplingParams(seed=5), use_tqdm=False)
    first, second, third, drawn_there = (seeds_of(frontend)[start : start + 4] for start in (0, 4, 8, 12))
    assert first == second
    assert len({*first, *third}) == 7
    assert first[3] == third[3] == drawn_there[3] == 5
    assert not any(r.generation.sampling.HasField("seed") for r in frontend.requests[12:15])


def test_parameters_count_as_they_are_when_they_are_submitted(llm, frontend):
    params = SamplingParams(max_tokens=8)
    frontend.on_request = lambda request: setattr(params, "max_tokens", 99)
    llm.generate(["a"] * 600, params, use_tqdm=False)  # more than are sent at once
    assert {request.generation.length.max_tokens for request in frontend.requests} == {8}
    assert params.max_tokens == 99


def test_arguments_that_ask_for_nothing_are_taken(llm, frontend):
    [output] = llm.generate("a b", SamplingParams(), False, None, None, {}, None)
    assert isinstance(output, RequestOutput)
    llm.generate(["a", "b"], SamplingParams(truncate_prompt_tokens=3), use_tqdm=False, priority=[1, 2])
    assert sorted(request.generation.priority for request in frontend.requests) == [0, 1, 2]
    assert {request.generation.truncation.max_tokens for request in frontend.requests[1:]} == {3}


def test_an_adapter_is_loaded_by_the_first_request_that_brings_it(llm, frontend, monkeypatch):
    loaded = []
    monkeypatch.setattr(llm, "load_adapter", lambda name, path: loaded.append((name, path)))
    sql, law = LoRARequest("sql", 1, "/a/sql"), LoRARequest("law", 2, lora_path="/a/law")
    llm.generate(["a", "b"], SamplingParams(), use_tqdm=False, lora_request=sql)
    llm.generate(["c", "d", "e"], SamplingParams(), use_tqdm=False, lora_request=[law, None, sql])
    llm.chat(HELLO, SamplingParams(), use_tqdm=False, lora_request=law)
    assert loaded == [("sql", "/a/sql"), ("law", "/a/law")]
    named = [request.generation.adapter for request in frontend.requests]
    assert sorted(named[:2]) == ["sql", "sql"]
    assert sorted(named[2:5]) == ["", "law", "sql"]
    assert named[5:] == ["law"]
    with pytest.raises(InvalidRequest, match="lora_request: expected a LoRARequest"):
        llm.generate("a", use_tqdm=False, lora_request=object())


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            {"tokenization_kwargs": {"add_special_tokens": False}},
            "tokenization_kwargs: .*token ids as the prompt",
        ),
        ({"mm_processor_kwargs": {"fps": 1}}, "mm_processor_kwargs: .*pictures"),
    ],
)
def test_arguments_that_are_not_served_are_refused_by_name(llm, frontend, arguments, told):
    with pytest.raises(FeatureDisabled, match=told):
        llm.generate("a", use_tqdm=False, **arguments)
    assert frontend.requests == []


def test_chat_renders_the_prompt_here(llm, frontend):
    tokenizer = llm.get_tokenizer()
    [output] = llm.chat(HELLO, SamplingParams(), use_tqdm=False)
    assert output.prompt == "user: Hello\nassistant:"
    assert output.prompt_token_ids == tokenizer.encode(output.prompt, add_special_tokens=False)
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    called = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    argument = "{{ m.tool_calls[0].function.arguments.x if m.tool_calls }}"
    template = "{% for m in messages %}{{ m.content }}" + argument + "{% endfor %}"
    turn = {"role": "assistant", "content": "c", "tool_calls": [called]}
    outputs = llm.chat([HELLO, [*parts, turn]], use_tqdm=False, chat_template=template)
    assert [output.prompt for output in outputs] == ["Hello", "a\nbc1"]
    [output] = llm.chat([*HELLO, turn | {"tool_calls": None}], use_tqdm=False, continue_final_message=True)
    assert output.prompt == "user: Hello\nassistant: c"


def test_templates_may_be_files(frontend, tmp_path):
    file = tmp_path / "template.jinja"
    file.write_text("{{ messages[0].content }}!")
    with LLM(address=frontend.address, chat_template=str(file)) as llm:
        assert llm.chat(HELLO, use_tqdm=False)[0].prompt == "Hello!"
        assert llm.chat(HELLO, use_tqdm=False, chat_template="{{ 1 }}")[0].prompt == "1"
        with pytest.raises(ConfigError, match="no/such: No such file"):
            llm.chat(HELLO, use_tqdm=False, chat_template="no/such")
        with pytest.raises(InvalidRequest, match="chat_template_content_format: 'xml' is none of auto"):
            llm.chat(HELLO, use_tqdm=False, chat_template_content_format="xml")


def test_the_engine_may_be_looked_into(llm):
    config = llm.llm_engine.model_config
    assert (config.model, config.max_model_len, config.get_vocab_size()) == ("fake", MAX_MODEL_LEN, 50)
    assert llm.llm_engine.get_tokenizer() is llm.get_tokenizer()
    assert llm.model_config == config
    assert isinstance(llm.get_default_sampling_params(), SamplingParams)


def test_waking_takes_vllms_tags(llm):
    with pytest.raises(InvalidRequest, match="tags: 'lora' is none of weights, kv_cache"):
        llm.wake_up(tags=["weights", "lora"])


def test_engine_arguments_are_an_object(frontend):
    arguments = EngineArgs(address=frontend.address, swap_space=4, enforce_eager=None)
    arguments.seed = 3
    assert "swap_space=4" in repr(arguments)
    with LLM.from_engine_args(arguments) as llm:
        assert llm.generate("a", use_tqdm=False)[0].finished
    with pytest.raises(ConfigError, match=r"worker_cls=.* is not served"):
        LLM.from_engine_args(EngineArgs(worker_cls="x"))


async def test_an_async_engine_streams_and_shuts_down(frontend):
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(address=frontend.address, disable_log_stats=True))
    params = SamplingParams(max_tokens=8)
    stream = engine.generate(prompt="a b", sampling_params=params, request_id="1", lora_request=None)
    params.max_tokens = 99
    assert [output.outputs[0].text async for output in stream] == [" a", " a b"]
    [request] = frontend.requests
    assert (request.request_id, request.generation.length.max_tokens) == ("1", 8)
    assert request.generation.sampling.HasField("seed")
    assert (await engine.get_model_config()).max_model_len == MAX_MODEL_LEN
    assert len(await engine.get_tokenizer()) > 0
    with pytest.raises(FeatureDisabled, match="data_parallel_rank"):
        engine.generate("a", params, data_parallel_rank=1)
    hanging = asyncio.ensure_future(anext(engine.generate("hang", params)))
    while frontend.num_running == 0:
        await asyncio.sleep(0.01)
    engine.shutdown()
    with pytest.raises(asyncio.CancelledError):
        await hanging
    while frontend.num_cancelled == 0:
        await asyncio.sleep(0.01)
    engine.shutdown()


def test_an_engine_is_shut_down_after_its_loop(frontend):
    engine = AsyncLLM(address=frontend.address)

    async def use() -> None:
        async for _ in engine.generate("a", SamplingParams()):
            pass

    asyncio.run(use())
    engine.shutdown()
