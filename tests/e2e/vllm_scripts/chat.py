"""Conversations, one and several, with a template of the program's own."""

from vllm import LLM, SamplingParams

llm = LLM(
    model="embedded",
    trust_remote_code=True,
    tensor_parallel_size=1,
    enforce_eager=True,
    seed=0,
    dtype="auto",
    max_num_seqs=16,
    gpu_memory_utilization=0.3,
)
conversation = [
    {"role": "system", "content": "You are a helpful assistant"},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hello! How can I assist you today?"},
    {"role": "user", "content": "Write an essay about the importance of higher education."},
]
sampling_params = SamplingParams(max_tokens=8)
[output] = llm.chat(conversation, sampling_params, use_tqdm=False)
assert "higher education" in output.prompt
outputs = llm.chat([conversation for _ in range(3)], sampling_params, use_tqdm=True)
assert len({output.prompt for output in outputs}) == 1
template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
[output] = llm.chat(conversation, sampling_params, chat_template=template, use_tqdm=False)
assert output.prompt.startswith("<system>You are a helpful assistant<user>Hello<assistant>")
tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
llm.chat(conversation, sampling_params, tools=[tool], add_generation_prompt=True, use_tqdm=False)
print("generated:", output.outputs[0].text)
