"""A stack whose KV cache has 8 bits."""

from __future__ import annotations

import openai
import pytest

from tests.e2e.conftest import READY_S
from triptych.config.loader import load_config
from triptych.launcher.local_cluster import LocalCluster
from triptych_kernels.cpu.library import isa

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(not isa(), reason="no native kernels are built for this processor"),
]


@pytest.mark.thorough
def test_it_answers_and_answers_again_from_its_cached_prefix() -> None:
    flags = {
        "cache.dtype": "int8",
        "model.max_model_len": "512",
        "scheduler.max_num_seqs": "4",
        **{f"{leaf}.port": "0" for leaf in ("frontend", "engine", "worker")},
        **{f"{leaf}.metrics_port": "0" for leaf in ("frontend", "engine", "worker")},
        "frontend.admin_port": "0",
        "frontend.http_port": "0",
    }
    question = [{"role": "user", "content": "What is the capital of France?"}]
    with LocalCluster(load_config(env={}, flags=flags)) as cluster:
        cluster.wait_ready(READY_S)
        client = openai.OpenAI(base_url=f"http://{cluster.http_address}/v1", api_key="none", max_retries=0)
        answers = [
            client.chat.completions.create(model="embedded", messages=question, temperature=0, max_tokens=24)
            .choices[0]
            .message.content
            for _ in range(2)
        ]
    assert answers == ["The capital of France is Paris."] * 2
