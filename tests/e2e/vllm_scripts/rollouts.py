"""Several samples per prompt, the best of them, and an engine that sleeps in between, as trainers do."""

from vllm import LLM, SamplingParams

llm = LLM(
    "embedded",
    max_logprobs=20,
    disable_log_stats=True,
    enable_sleep_mode=True,
    max_num_batched_tokens=4096,
    swap_space=4,
    block_size=16,
    max_seq_len_to_capture=2048,
    disable_custom_all_reduce=True,
    distributed_executor_backend="mp",
    enable_chunked_prefill=True,
    quantization=None,
    tokenizer_mode="auto",
    skip_tokenizer_init=False,
)
wide = SamplingParams(n=4, temperature=1.0, seed=1, max_tokens=4, logprobs=0)
narrow = SamplingParams(n=2, max_tokens=4, stop=["x"], include_stop_str_in_output=True, logprobs=0)
outputs = llm.generate(["a", "b"], [wide, narrow], lora_request=None)
best = max(outputs[0].outputs, key=lambda choice: choice.cumulative_logprob)
assert [len(output.outputs) for output in outputs] == [4, 2]
llm.sleep(level=1)
llm.wake_up(tags=["weights"])
llm.wake_up(tags=["kv_cache"])
assert (
    llm.generate("a", wide.clone(), use_tqdm=False)[0].outputs[0].token_ids == outputs[0].outputs[0].token_ids
)
assert llm.llm_engine.model_config.max_model_len == llm.llm_engine.get_tokenizer().model_max_length
print("generated:", best.text)
