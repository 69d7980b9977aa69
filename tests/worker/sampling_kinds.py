"""One request's sampling of each kind that the runner treats in a way of its own."""

from __future__ import annotations

from triptych.types.sampling import SamplingParams

KINDS = {
    "greedy": SamplingParams(temperature=0.0),
    "sampled": SamplingParams(temperature=1.3, top_p=0.9),
    "top_k": SamplingParams(temperature=0.9, top_k=7, logprobs=3, prompt_logprobs=2),
    "min_tokens": SamplingParams(temperature=0.0, min_tokens=5, logit_bias=((2, 50.0),)),
    "penalties": SamplingParams(temperature=0.0, repetition_penalty=1.9, presence_penalty=0.5, logprobs=0),
    "allowed": SamplingParams(temperature=1.0, allowed_token_ids=(4, 9, 30, 31)),
}
