"""Log-probabilities of the output and of the prompt, read as dictionaries."""

from vllm import LLM, SamplingParams

llm = LLM(model="embedded")
sampling_params = SamplingParams(temperature=0, max_tokens=4, logprobs=3, prompt_logprobs=1)
output = llm.generate(["The capital of France is"], sampling_params)[0]
for position, candidates in enumerate(output.outputs[0].logprobs):
    for token_id, logprob in candidates.items():
        print(position, token_id, logprob.logprob, logprob.rank, logprob.decoded_token)
    chosen = output.outputs[0].token_ids[position]
    assert candidates[chosen].rank == 1
    assert len(candidates) == 3
assert output.prompt_logprobs[0] is None
assert next(iter(output.prompt_logprobs[1].values())).logprob < 0
choice = output.outputs[0]
total = sum(row[chosen].logprob for row, chosen in zip(choice.logprobs, choice.token_ids, strict=True))
assert abs(output.outputs[0].cumulative_logprob - total) < 1e-3
print(
    "generated:", output.outputs[0].finish_reason, output.finished, output.num_cached_tokens, output.metrics
)
