"""The model's own sampling parameters, changed a little."""

from vllm import LLM

llm = LLM(model="embedded", max_model_len=2048)
sampling_params = llm.get_default_sampling_params()
sampling_params.max_tokens = 8
sampling_params.temperature = 0.5
sampling_params.stop_token_ids = [0]
[output] = llm.generate("Once upon a time", sampling_params, use_tqdm=False)
assert 1 <= len(output.outputs[0].token_ids) <= 8
print("generated:", output.outputs[0].text)
