"""From LLM's arguments to a config."""

from __future__ import annotations

from typing import Any

import pytest

from triptych.errors import ConfigError
from triptych.launcher.launch import OWN, config_from_overrides, request_model, stack_config
from triptych.launcher.vllm_arguments import HINTS, NEUTRAL


@pytest.fixture(autouse=True)
def _no_options_in_the_environment(monkeypatch):
    monkeypatch.delenv("TRIPTYCH_LOG_LEVEL", raising=False)


def test_options_go_by_bare_name_or_by_key():
    config = config_from_overrides(
        {"max_num_seqs": 16, "scheduler.steps_in_flight": 1, "enable_prefix_caching": False}
    )
    assert (config.scheduler.max_num_seqs, config.scheduler.steps_in_flight) == (16, 1)
    assert config.cache.enable_prefix_caching is False


def test_a_name_of_several_sections_means_the_model_or_is_refused():
    assert config_from_overrides({"dtype": "float32"}).model.dtype == "float32"
    assert config_from_overrides({"cache.dtype": "float32"}).model.dtype == "auto"
    with pytest.raises(ConfigError, match=r"'frontend\.host' or 'engine\.host' or 'worker\.host'"):
        config_from_overrides({"host": "0.0.0.0"})


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ({"max_num_seq": 16}, "max_num_seq: no such option; did you mean max_num_seqs"),
        ({"gpu_magic": 1}, "gpu_magic: no such option"),
        ({"max_num_seqs": -1}, "scheduler.max_num_seqs: -1 is out of range, allowed is >= 0"),
        ({"max_num_seqs": "many"}, "scheduler.max_num_seqs: 'many' is no int"),
    ],
)
def test_what_is_unknown_or_bad_is_named(overrides, told):
    with pytest.raises(ConfigError, match=told):
        config_from_overrides(overrides)


# The arguments of vLLM's LLM (0.33, and some that older scripts have), with what asks for nothing.
OF_VLLM: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        ["tokenizer", "allowed_media_domains", "quantization", "revision", "tokenizer_revision", "chat_template",
         "offload_params", "hf_token", "hf_overrides", "mm_processor_kwargs", "pooler_config", "attention_config",
         "structured_outputs_config", "profiler_config", "kv_cache_memory_bytes", "compilation_config",
         "quantization_config", "logits_processors", "spec_method", "spec_model", "spec_tokens", "max_num_seqs",
         "max_num_batched_tokens", "block_size", "enable_prefix_caching", "enable_chunked_prefill",
         "num_gpu_blocks_override", "speculative_config", "kv_transfer_config", "attention_backend", "max_model_len",
         "override_generation_config", "served_model_name", "download_dir", "async_scheduling", "dtype", "seed",
         "load_format", "tensor_parallel_size", "gpu_memory_utilization"],
        (),
    ),
    "runner": ("auto", "generate"), "convert": ("auto", "none"), "task": ("auto", "generate"),
    "tokenizer_mode": ("auto", "hf"), "skip_tokenizer_init": (False,), "trust_remote_code": (False, True),
    "allowed_local_media_path": ("",), "dtype": ("auto",), "seed": (0,), "cpu_offload_gb": (0, 0.0),
    "offload_group_size": (0,), "offload_num_in_group": (1,), "offload_prefetch_step": (1,),
    "enforce_eager": (False, True), "enable_return_routed_experts": (False,), "return_sampling_mask": (False,),
    "disable_custom_all_reduce": (False, True), "hf_overrides": ({},), "enable_lora": (False,), "max_loras": (1,),
    "max_lora_rank": (16,), "data_parallel_size": (1,), "revision": ("main",), "tokenizer_revision": ("main",),
    "swap_space": (4,), "max_seq_len_to_capture": (8192,), "max_logprobs": (5, 20), "disable_log_stats": (True, False),
    "distributed_executor_backend": ("mp", "ray", None), "compilation_config": ({}, 3), "limit_mm_per_prompt": ({},),
    "generation_config": ("auto",), "guided_decoding_backend": ("auto", "xgrammar"), "logits_processors": ([],),
    "structured_outputs_config": ({}, {"backend": "xgrammar"}), "config_format": ("auto",), "max_model_len": (-1,),
    "tensor_parallel_size": (1,), "pipeline_parallel_size": (1,), "load_format": ("auto", "safetensors"),
    "enable_sleep_mode": (True,), "override_generation_config": ({},), "tokenizer": ("embedded",),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_VLLM)
def test_vllms_arguments_that_ask_for_nothing_are_taken(name):
    plain = config_from_overrides({}, preferred=OWN)
    for value in (None, *OF_VLLM[name]):
        changed = stack_config("embedded", None, {name: value})
        assert changed == plain or (name, value) == ("enforce_eager", True)  # which is an option here, too


def test_a_stack_that_runs_takes_what_asks_for_nothing():
    for name, values in OF_VLLM.items():
        for value in (None, *(values if name in {*HINTS, *NEUTRAL, "revision"} else ())):
            assert stack_config("embedded", "127.0.0.1:1", {name: value}) is None
    with pytest.raises(ConfigError, match="max_num_seqs: options of a stack that is started here"):
        stack_config("embedded", "127.0.0.1:1", {"max_num_seqs": 16, "swap_space": 4})


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"tokenizer": "another"}, "tokenizer='another' is not served; the model's own is used"),
        ({"enable_lora": True, "lora_modules": ["sql"]}, "lora_modules: 'sql' is neither NAME=PATH"),
        ({"enable_lora": True, "lora_modules": ["{sql"]}, "lora_modules: '{sql' is no JSON"),
        ({"max_logprobs": 50}, "max_logprobs=50 is not served; a request may ask for 20"),
        ({"task": "embed", "worker_cls": "x"}, "task='embed' is not served; worker_cls='x' is not served"),
        ({"revision": "v2", "tokenizer_revision": "v3"}, "tokenizer_revision='v3' is not served"),
        ({"download_dir": "x"}, r"set \$TRIPTYCH_HOME"),
        ({"speculative_config": {"method": "ngram"}}, "speculative_config=.* is not served"),
        (
            {"speculative_config": {"method": "eagle3"}},
            "speculative_config=.* is not served, but method draft_model",
        ),
        (
            {"speculative_config": {"model": "a", "draft_tensor_parallel_size": 2}},
            "speculative_config=.* is not served",
        ),
        ({"speculative_config": {"method": "mtp", "model": "a"}}, "is not served, .* or mtp without one"),
        ({"speculative_config": "eagle3"}, "speculative_config: 'eagle3' is no object"),
        ({"speculative_config": {"model": "a", "num_speculative_tokens": 17}}, "speculative.max_tokens: 17"),
        ({"structured_outputs_config": {"disable_any_whitespace": True}}, "is not served"),
        ({"served_model_name": ["a", "b"]}, "served_model_name: .* are several names"),
        ({"quantization": "awq"}, "model.quantization: 'awq'"),
        ({"max_num_seq": None}, "max_num_seq: no such option; did you mean max_num_seqs"),
    ],
)
def test_vllms_arguments_that_would_change_an_answer_are_refused(arguments, told):
    with pytest.raises(ConfigError, match=told):
        stack_config("embedded", None, arguments)


def test_vllms_values_have_their_names_here():
    import torch

    given = {"dtype": torch.float32, "served_model_name": ["m"], "load_format": "dummy"}
    config = config_from_overrides(given)
    assert (config.model.dtype, config.model.served_name, config.load.format) == ("float32", "m", "random")
    assert config_from_overrides({"dtype": "half"}).model.dtype == "float16"
    both = {"revision": "v2", "tokenizer_revision": "v2"}
    assert config_from_overrides(both).model.revision == "v2"


def test_vllms_adapters_are_options_here():
    modules = ["sql=/a/sql", '{"name": "chat", "path": "/a/chat"}', {"name": "law", "path": "/a/law"}]
    config = config_from_overrides({"enable_lora": True, "max_loras": 4, "lora_modules": modules})
    assert (config.worker.max_adapters, config.worker.max_adapter_rank) == (4, 16)
    assert config.model.adapters == "sql=/a/sql,chat=/a/chat,law=/a/law"
    assert config_from_overrides({"max_loras": 4}).worker.max_adapters == 0


def test_vllms_models_that_guess_are_options_here():
    config = config_from_overrides(
        {"speculative_config": {"method": "eagle3", "model": "org/head", "num_speculative_tokens": 3}}
    )
    assert (config.speculative.model, config.speculative.max_tokens) == ("org/head", 3)
    config = config_from_overrides({"speculative_config": {"model": "org/small", "method": None}})
    assert (config.speculative.model, config.speculative.max_tokens) == ("org/small", 8)


def test_vllms_name_of_a_layer_that_guesses_is_an_option_here():
    for method in ("mtp", "qwen3_next_mtp"):
        config = config_from_overrides(
            {"speculative_config": {"method": method, "num_speculative_tokens": 2}}
        )
        assert (config.speculative.wants_mtp, config.speculative.max_tokens) == (True, 2)
        assert config.speculative.proposer_names == ("grammar", "ngram", "suffix", "mtp")


def test_a_programs_own_stack_takes_free_ports_and_is_quiet(monkeypatch):
    config = config_from_overrides({})
    ports = [config.frontend.port, config.frontend.admin_port, config.frontend.http_port]
    ports += [config.frontend.metrics_port]
    ports += [config.engine.port, config.engine.metrics_port, config.worker.port, config.worker.metrics_port]
    assert set(ports) == {0}
    assert config.log.level == "warning"
    assert config_from_overrides({"level": "info"}).log.level == "info"
    monkeypatch.setenv("TRIPTYCH_LOG_LEVEL", "debug")
    assert config_from_overrides({}).log.level == "debug"


def test_preferences_yield_to_whatever_was_said(monkeypatch):
    preferred = {"model.dtype": "float32"}
    assert config_from_overrides({}, preferred=preferred).model.dtype == "float32"
    assert config_from_overrides({"dtype": "auto"}, preferred=preferred).model.dtype == "auto"
    monkeypatch.setenv("TRIPTYCH_MODEL_DTYPE", "bfloat16")
    assert config_from_overrides({}, preferred=preferred).model.dtype == "bfloat16"


def test_the_model_is_what_to_serve_or_whom_to_ask():
    assert stack_config("here/it/is", None, {}).model.model == "here/it/is"
    assert stack_config(None, None, {}).model.model == "embedded"
    assert not stack_config(None, None, {}).frontend.serve_http
    assert stack_config(None, None, {"serve_http": True}).frontend.serve_http
    assert stack_config("name", "host:1", {}) is None
    assert (request_model("name", "host:1"), request_model("name", None), request_model(None, "host:1")) == (
        "name", "", "",
    )  # fmt: skip
