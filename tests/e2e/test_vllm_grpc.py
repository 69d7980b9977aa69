"""A client of vLLM's gRPC service, with the stubs that SMG publishes, against the whole stack."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from triptych.client.llm import LLM
from triptych.launcher.local_cluster import LocalCluster
from triptych.types.sampling import SamplingParams

pytestmark = pytest.mark.model

RUN_S = 180.0
PROMPT = "The capital of France is"
CLIENT = """
import io, json, sys, zipfile
import grpc
from smg_grpc_proto import vllm_engine_pb2 as pb, vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2
from tokenizers import Tokenizer

address, prompt = sys.argv[1:]
channel = grpc.insecure_channel(address, options=(("grpc.enable_http_proxy", 0),))
stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
archive = b"".join(chunk.data for chunk in stub.GetTokenizer(common_pb2.GetTokenizerRequest()))
tokenizer = Tokenizer.from_str(zipfile.ZipFile(io.BytesIO(archive)).read("tokenizer.json").decode())
request = pb.GenerateRequest(
    request_id="smg-1",
    tokenized=pb.TokenizedInput(input_ids=tokenizer.encode(prompt).ids),
    sampling_params=pb.SamplingParams(temperature=0.0, max_tokens=8, logprobs=2, prompt_logprobs=1),
    stream=True,
)
token_ids, logprobs, complete = [], [], None
for response in stub.Generate(request):
    token_ids += response.chunk.token_ids
    logprobs += response.chunk.output_logprobs.token_logprobs
    complete = response.complete
info = stub.GetModelInfo(pb.GetModelInfoRequest())
print(json.dumps({
    "text": tokenizer.decode(token_ids),
    "logprobs": logprobs,
    "finish_reason": complete.finish_reason,
    "num_prompt_logprobs": len(complete.input_logprobs.token_logprobs),
    "prompt_tokens": complete.prompt_tokens,
    "model_type": info.model_type,
    "architectures": list(info.architectures),
    "healthy": stub.HealthCheck(pb.HealthCheckRequest()).healthy,
}))
"""


@pytest.fixture(scope="module")
def seen(cluster: LocalCluster) -> dict[str, Any]:
    """The findings of a gateway that fetches the tokenizer and asks for a few tokens."""
    command = [sys.executable, "-c", CLIENT, cluster.address, PROMPT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_answer_is_that_of_the_own_api(cluster: LocalCluster, seen: dict[str, Any]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=2)
    with LLM(address=cluster.address) as llm:
        (own,) = llm.generate([PROMPT], params)
    (choice,) = own.outputs
    assert seen["text"] == choice.text
    assert choice.logprobs is not None
    assert seen["logprobs"] == pytest.approx([row.chosen.logprob for row in choice.logprobs], abs=1e-3)
    assert seen["finish_reason"] == choice.finish_reason
    assert seen["prompt_tokens"] == seen["num_prompt_logprobs"] == len(own.prompt_token_ids)


def test_the_model_is_the_one_of_the_checkpoint(seen: dict[str, Any]) -> None:
    assert (seen["model_type"], seen["architectures"]) == ("llama", ["LlamaForCausalLM"])
    assert seen["healthy"]
