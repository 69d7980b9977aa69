"""Embeddings over the whole stack, held to sentence-transformers: vectors, and how alike people find two sentences."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import grpc
import numpy as np
import pytest
from safetensors.numpy import load_file
from scipy.stats import spearmanr
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer

from tests.checkpoint.test_gguf_tokenizer import described_by_converter
from tests.e2e.bystander import Bystander
from tests.e2e.test_adapters import post
from tests.e2e.test_fine_tunes import write_fine_tune
from triptych import LLM
from triptych.config.loader import load_config
from triptych.errors import TriptychError
from triptych.hub import resolve_model
from triptych.launcher.local_cluster import LocalCluster
from triptych.launcher.ports import with_free_ports
from triptych.v1 import embedding_pb2 as pb
from triptych.v1.embedding_pb2_grpc import EmbeddingServiceStub

pytestmark = pytest.mark.thorough

PAIRS = Path(__file__).parents[1] / "oracle" / "sentence_pairs.tsv"
"""Likeness from 0 to 5, and two sentences, in each line."""


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("embedded-embedding") as llm:
        yield llm


@pytest.fixture(scope="module")
def oracle() -> SentenceTransformer:
    return SentenceTransformer(str(resolve_model("embedded-embedding", progress=False)))


def embed(llm: LLM, texts: list[str]) -> np.ndarray:
    return np.array([each.outputs.embedding for each in llm.embed(texts)], np.float32)


def test_vectors_and_likeness_of_a_hundred_pairs(llm, oracle):
    rows = [line.split("\t") for line in PAIRS.read_text().splitlines()]
    likeness = [float(row[0]) for row in rows]
    sides = [[row[column] for row in rows] for column in (1, 2)]
    left, right = (embed(llm, side) for side in sides)
    for ours, side in zip((left, right), sides, strict=True):
        np.testing.assert_allclose(ours, oracle.encode(side), atol=1e-5)
    assert spearmanr((left * right).sum(axis=1), likeness).statistic > 0.92


def test_texts_of_all_lengths_have_the_vectors_that_they_have_alone(llm, oracle):
    text = "the quick brown fox jumps over a lazy dog and thinks about frogs "
    texts = [text * count + "end" for count in (0, 1, 3, 9, 15)] * 5
    together = embed(llm, texts)
    np.testing.assert_allclose(together, oracle.encode(texts), atol=1e-5)
    for place in range(5):
        alone = embed(llm, [texts[place]])
        assert all(np.array_equal(alone[0], together[place + 5 * again]) for again in range(5))


def test_what_the_model_does_not_do_is_refused_by_name(llm):
    with pytest.raises(TriptychError, match="embed"):
        llm.generate("Hello")
    with pytest.raises(TriptychError, match="classify"):
        llm.classify(["Hello"])
    assert embed(llm, ["Hello"]).shape == (1, 384)


def write_gguf(directory: Path, path: Path) -> Path:
    """Write the .gguf file that llama.cpp makes of a checkpoint of BERT; tensors keep their numbers."""
    config = json.loads((directory / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "bert")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_eps(config["layer_norm_eps"])
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    backend = Tokenizer.from_file(str(directory / "tokenizer.json"))
    for key, value in described_by_converter(backend, "bert", "jina-v2-en", path.parent).items():
        kinds = {
            bool: gguf.GGUFValueType.BOOL,
            int: gguf.GGUFValueType.UINT32,
            str: gguf.GGUFValueType.STRING,
        }
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            writer.add_key_value(key, value, kinds[type(value)])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BERT, config["num_hidden_layers"])
    for name, tensor in load_file(directory / "model.safetensors").items():
        if found := names.get_name(name, (".weight", ".bias")):
            writer.add_tensor(found, tensor.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_file_has_the_vectors_of_its_checkpoint(oracle, tmp_path):
    path = write_gguf(resolve_model("embedded-embedding", progress=False), tmp_path / "model.gguf")
    texts = ["Hello world", "Größe naïve 好的 世界", "a fox " * 60]
    flags = {"model.model": str(path), "model.dtype": "float32"}
    with LocalCluster(with_free_ports(load_config(env={}, flags=flags))) as cluster:
        cluster.wait_ready(120)
        status, answer = post(cluster.http_address, "/v1/embeddings", {"input": texts})
    assert status == 200, answer
    vectors = [entry["embedding"] for entry in answer["data"]]
    np.testing.assert_allclose(vectors, oracle.encode(texts), atol=1e-5)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """A decoder that generates and embeds."""
    base = write_fine_tune(tmp_path_factory.mktemp("decoder") / "base", seed=1)
    flags = {"model.model": str(base), "model.dtype": "float32", "cache.num_blocks": "512"}
    with LocalCluster(with_free_ports(load_config(env={}, flags=flags))) as cluster:
        cluster.wait_ready(120)
        yield cluster


LONGEST = 2048
BAD_CALLS: dict[str, tuple[str, dict[str, Any], str]] = {
    "100,000 inputs": ("/v1/embeddings", {"input": ["a"] * 100_000}, "100000 texts are above the limit 2048"),
    "an empty text": ("/v1/embeddings", {"input": ["a", ""]}, "input[1]"),
    "a text over the context": ("/v1/embeddings", {"input": ["a", "b" * 40_000]}, "2048 tokens"),
    "ids over the context": ("/v1/embeddings", {"input": [[7], [7] * (LONGEST + 1)]}, "2048 tokens"),
    "more dimensions than there are": ("/v1/embeddings", {"input": "a", "dimensions": 1000}, "1000 is not"),
    "classes of no classifier": ("/classify", {"input": "a"}, "classify"),
    "documents without a query": ("/rerank", {"documents": ["a"]}, "query"),
}
BAD_MESSAGES = {
    "100,000 inputs": (
        pb.EmbedRequest(inputs=[{"token_ids": {"ids": [7]}}] * 100_000),
        "above the limit 2048",
    ),
    "an empty text": (pb.EmbedRequest(inputs=[{"text": {"text": ""}}]), "empty"),
    "ids over the context": (pb.EmbedRequest(inputs=[{"token_ids": {"ids": [7] * 2049}}]), "2048 tokens"),
    "more dimensions": (pb.EmbedRequest(inputs=[{"text": {"text": "a"}}], dimensions=1000), "1000 is not"),
}


def test_bad_calls_are_refused_beside_a_stream(cluster):
    with (
        Bystander(cluster.http_address, "base", range(3, 43)),
        grpc.insecure_channel(cluster.address) as channel,
    ):
        for name, (path, body, words) in BAD_CALLS.items():
            status, answer = post(cluster.http_address, path, body)
            assert status in (400, 501), (name, answer)
            assert words in answer["error"]["message"], (name, answer)
        stub = EmbeddingServiceStub(channel)
        for name, (request, words) in BAD_MESSAGES.items():
            with pytest.raises(grpc.RpcError) as refused:
                stub.Embed(request, timeout=60)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT, name
            assert words in refused.value.details(), name
        cut = {"input": [[7] * (LONGEST + 1)], "truncate_prompt_tokens": -1}
        assert post(cluster.http_address, "/v1/embeddings", cut)[0] == 200
