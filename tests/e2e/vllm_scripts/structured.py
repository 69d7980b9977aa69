"""Outputs of a given form."""

import json

from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

choice = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["Positive", "Negative"]))
schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
form = SamplingParams(structured_outputs=StructuredOutputsParams(json=schema), max_tokens=64)
regex = SamplingParams(structured_outputs=StructuredOutputsParams(regex=r"\w{1,5}@x\.com\n"), max_tokens=32)
llm = LLM(model="embedded", max_model_len=256)
[output] = llm.generate(prompts="Classify this sentiment: vLLM is wonderful!", sampling_params=choice)
assert output.outputs[0].text in ("Positive", "Negative")
[output] = llm.generate("A person, as JSON:", sampling_params=form)
assert output.outputs[0].finish_reason == "length" or isinstance(
    json.loads(output.outputs[0].text)["age"], int
)
[output] = llm.generate("An address:", sampling_params=regex)
assert output.outputs[0].text.endswith("@x.com\n")
print("generated:", output.outputs[0].text)
