"""The decoder beyond the logits of its families: bfloat16, cached prefixes, what is missing, what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.worker.models.sequences import CUTS, Sequences
from tests.worker.tiny import dense, tiny_architecture, tiny_config
from triptych.checkpoint.architecture import EndsSpec, ModelArchitecture, RopeParameters
from triptych.errors import FeatureDisabled, ModelError
from triptych_services.worker.attention.base import KvCache
from triptych_services.worker.context.model_context import ModelContext
from triptych_services.worker.models.decoder import DecoderForCausalLM
from triptych_services.worker.models.registry import create_model

GQA = {"hidden_size": 24, "num_heads": 6, "num_kv_heads": 2, "head_dim": 4}


def transformers_llama(architecture: ModelArchitecture) -> Any:
    from transformers import LlamaConfig
    from transformers import LlamaForCausalLM as TransformersLlama

    config = LlamaConfig(
        vocab_size=architecture.vocab_size,
        hidden_size=architecture.hidden_size,
        intermediate_size=architecture.intermediate_size,
        num_hidden_layers=architecture.num_layers,
        num_attention_heads=architecture.num_heads,
        num_key_value_heads=architecture.num_kv_heads,
        head_dim=architecture.head_dim,
        max_position_embeddings=architecture.max_position_embeddings,
        rms_norm_eps=architecture.block.norm.eps,
        tie_word_embeddings=architecture.tie_word_embeddings,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    model = TransformersLlama(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # far from transformers' small weights: logits that differ
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    return model


def checkpoint(oracle: Any, architecture: ModelArchitecture) -> Iterator[tuple[str, Tensor]]:
    """The oracle's weights as a checkpoint stores them: tied heads once."""
    for name, tensor in oracle.state_dict().items():
        if not (architecture.tie_word_embeddings and name == "lm_head.weight"):
            yield name, tensor


def loaded_pair(**changes: Any) -> tuple[Any, DecoderForCausalLM]:
    architecture = tiny_architecture(**changes)
    oracle = transformers_llama(architecture)
    model = create_model(context=ModelContext(tiny_config(architecture)))
    model.load_weights(checkpoint(oracle, architecture))
    return oracle, model


def test_bfloat16_is_as_near_to_float32_as_transformers_own() -> None:
    architecture = tiny_architecture(**GQA)
    oracle = transformers_llama(architecture)
    rounded = {name: tensor.bfloat16() for name, tensor in oracle.state_dict().items()}
    model = create_model(context=ModelContext(replace(tiny_config(architecture), dtype="bfloat16")))
    model.load_weights(checkpoint(oracle, architecture))
    sequences = Sequences(model, architecture, (40, 33))
    sequences.kv_caches = [KvCache(cache.blocks.bfloat16()) for cache in sequences.kv_caches]
    logits = sequences.run(CUTS["whole prompts"])
    ours, theirs = [], []
    oracle.load_state_dict(rounded)  # float32 arithmetic on the weights that both have
    exact = [oracle(token_ids[None]).logits[0].detach() for token_ids in sequences.token_ids]
    oracle.bfloat16()
    for token_ids, wanted, got in zip(sequences.token_ids, exact, logits, strict=True):
        ours.append((got.log_softmax(-1) - wanted.log_softmax(-1)).abs().mean())
        their_logits = oracle(token_ids[None]).logits[0].detach().float()
        theirs.append((their_logits.log_softmax(-1) - wanted.log_softmax(-1)).abs().mean())
    assert torch.stack(ours).mean() <= 1.2 * torch.stack(theirs).mean()


def test_a_cached_prefix_is_read_and_not_written() -> None:
    oracle, model = loaded_pair()
    sequences = Sequences(model, tiny_architecture(), (11,))
    sequences.step({0: 8})
    before = [cache.blocks.clone() for cache in sequences.kv_caches]
    # the next sequence shares the two full blocks and computes the rest
    follower = Sequences(model, tiny_architecture(), (11,))
    follower.kv_caches, follower.num_computed = sequences.kv_caches, [8]
    follower.token_ids, follower.block_tables = sequences.token_ids, sequences.block_tables
    logits = follower.step({0: 3})[0]
    with torch.no_grad():
        expected = oracle(sequences.token_ids[0][None]).logits[0, 8:]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    shared = sequences.block_tables[0, :2].long()
    for cache, old in zip(sequences.kv_caches, before, strict=True):
        assert torch.equal(cache.blocks[shared], old[shared])


def test_stored_tied_heads_and_frequencies_are_ignored() -> None:
    architecture = tiny_architecture()
    oracle = transformers_llama(architecture)
    tensors = dict(oracle.state_dict())
    assert "lm_head.weight" in tensors
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    model = create_model(context=ModelContext(tiny_config(architecture)))
    model.load_weights(tensors.items())
    assert torch.equal(dense(model.model.embed_tokens.weight), tensors["model.embed_tokens.weight"])


def test_an_untied_head_must_be_there_and_a_bias_must_not() -> None:
    architecture = tiny_architecture(tie_word_embeddings=False)
    tensors = dict(transformers_llama(architecture).state_dict())
    del tensors["lm_head.weight"]
    tensors["model.layers.1.mlp.up_proj.bias"] = torch.zeros(architecture.intermediate_size)
    with pytest.raises(
        ModelError, match=r"missing: lm_head.weight; .* unexpected: model.layers.1.mlp.up_proj.bias"
    ):
        create_model(context=ModelContext(tiny_config(architecture))).load_weights(tensors.items())


def test_a_prefix_moves_every_name() -> None:
    architecture = tiny_architecture()
    model = DecoderForCausalLM(context=ModelContext(tiny_config(architecture)), prefix="language_model.")
    tensors = checkpoint(transformers_llama(architecture), architecture)
    model.load_weights((f"language_model.{name}", tensor) for name, tensor in tensors)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope": RopeParameters(kind="spiral")}, "rope_type spiral"),
        (
            {"attention": "none", "mlp": "none"},
            "LlamaForCausalLM, layer 0: attention = none, mlp = none, parallel = no: a layer has an attention",
        ),
        ({"kv_from": 0}, "layer 0: kv_from = 0: it must be an earlier layer"),
        ({"value_dim": 4}, "layer 0: value_dim = 4: values are as long as keys"),
        (
            {"ends": EndsSpec(head_bias=True)},
            "tie_word_embeddings = true: the head of this family has a bias",
        ),
    ],
)
def test_unsupported_architectures_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(FeatureDisabled, match=message):
        create_model(context=ModelContext(tiny_config(tiny_architecture(**changes))))


def test_layers_of_which_blocks_do_not_hold_whole_tokens_are_refused() -> None:
    architecture = tiny_architecture(num_heads=4, num_kv_heads=2)
    wider = replace(architecture.layers[0], head_dim=12)
    architecture = replace(architecture, layers=(architecture.layers[0], wider))
    with pytest.raises(FeatureDisabled, match="key heads of 2 x 8 and 2 x 12 elements in its layers: blocks"):
        create_model(context=ModelContext(tiny_config(architecture)))


@pytest.mark.parametrize(
    "changes", [{"head_dim": 16}, {"num_kv_heads": 1}, {"attention": "sliding", "window": 7}, {"kv_from": 0}]
)
def test_keys_of_a_layer_that_is_not_like_it_are_refused(changes: dict[str, Any]) -> None:
    architecture = tiny_architecture(num_heads=4, num_kv_heads=2)
    first = architecture.layers[0]
    layers = (first, replace(first, **changes), replace(first, kv_from=1))
    with pytest.raises(FeatureDisabled, match="layer 2: kv_from = 1"):
        create_model(context=ModelContext(tiny_config(replace(architecture, layers=layers))))
