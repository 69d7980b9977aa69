"""The tokenizer of the model, and prompts that are token ids."""

from vllm import LLM, SamplingParams, TokensPrompt

llm = LLM(model="embedded", enable_prefix_caching=True)
tokenizer = llm.get_tokenizer()
ids = tokenizer.encode("The capital of France is", add_special_tokens=False)
assert tokenizer("The capital of France is").input_ids == ids
assert tokenizer.batch_decode([ids, ids[:2]]) == ["The capital of France is", "The capital"]
assert tokenizer.convert_ids_to_tokens(ids)[1] == "Ġcapital"
assert tokenizer.decode(tokenizer.eos_token_id) == tokenizer.eos_token
print(len(tokenizer), tokenizer.vocab_size, tokenizer.bos_token_id, tokenizer.pad_token_id)
text = tokenizer.apply_chat_template(
    [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
)
prompts = [{"prompt_token_ids": ids}, TokensPrompt(prompt_token_ids=ids), text]
outputs = llm.generate(prompts, SamplingParams(max_tokens=4, stop_token_ids=[tokenizer.eos_token_id]))
assert outputs[0].prompt_token_ids == ids
print("generated:", [output.outputs[0].token_ids for output in outputs])
