"""A tiny config of transformers for each family of encoders, with what its files may say and the default does not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import transformers

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 700,
    "pad_token_id": 0,
    "attn_implementation": "eager",
}
DISTIL = {
    "vocab_size": 97,
    "dim": 32,
    "hidden_dim": 56,
    "n_layers": 3,
    "n_heads": 4,
    "max_position_embeddings": 700,
    "attn_implementation": "eager",
}
MODERN = {**SIZES, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}

ENCODERS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "BERT": ("BertModel", SIZES),
    "BERT of one type": ("BertModel", {**SIZES, "type_vocab_size": 1, "hidden_act": "relu"}),
    "RoBERTa": ("RobertaModel", {**SIZES, "pad_token_id": 1, "type_vocab_size": 1}),
    "XLM-R": ("XLMRobertaModel", {**SIZES, "pad_token_id": 1, "type_vocab_size": 1}),
    "CamemBERT": ("CamembertModel", {**SIZES, "pad_token_id": 1, "type_vocab_size": 1}),
    "DistilBERT": ("DistilBertModel", DISTIL),
    "ModernBERT": ("ModernBertModel", {**MODERN, "local_attention": 10}),
    "ModernBERT with biases": (
        "ModernBertModel",
        {**MODERN, "norm_bias": True, "attention_bias": True, "mlp_bias": True, "local_attention": 300},
    ),
    "MPNet": ("MPNetModel", {**SIZES, "pad_token_id": 1}),
    "Nomic": ("NomicBertModel", {**SIZES, **ROPE}),
    "GTE": ("GteModel", {**SIZES, **ROPE}),
    "Jina v3": ("JinaEmbeddingsV3Model", {**SIZES, "pad_token_id": 1}),
}
"""Name -> class of transformers and arguments of its config."""

HEADS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "BERT": ("BertForSequenceClassification", {**SIZES, "num_labels": 3}),
    "BERT of one label": ("BertForSequenceClassification", {**SIZES, "num_labels": 1}),
    "RoBERTa": ("RobertaForSequenceClassification", {**SIZES, "num_labels": 3, "pad_token_id": 1}),
    "XLM-R": ("XLMRobertaForSequenceClassification", {**SIZES, "num_labels": 1, "pad_token_id": 1}),
    "CamemBERT": ("CamembertForSequenceClassification", {**SIZES, "num_labels": 1, "pad_token_id": 1}),
    "DistilBERT": ("DistilBertForSequenceClassification", {**DISTIL, "num_labels": 3}),
    "ModernBERT": ("ModernBertForSequenceClassification", {**MODERN, "num_labels": 3}),
    "ModernBERT of means": (
        "ModernBertForSequenceClassification",
        {**MODERN, "num_labels": 1, "classifier_pooling": "mean", "classifier_bias": True},
    ),
    "MPNet": ("MPNetForSequenceClassification", {**SIZES, "num_labels": 3, "pad_token_id": 1}),
    "Nomic": ("NomicBertForSequenceClassification", {**SIZES, **ROPE, "num_labels": 3}),
    "GTE": ("GteForSequenceClassification", {**SIZES, **ROPE, "num_labels": 3}),
    "Jina v3": ("JinaEmbeddingsV3ForSequenceClassification", {**SIZES, "num_labels": 3, "pad_token_id": 1}),
}


DEBERTA = {
    **SIZES,
    "relative_attention": True,
    "position_buckets": 8,
    "pos_att_type": ["p2c", "c2p"],
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
    "position_biased_input": False,
}
"""As of DeBERTa v3."""

AT_ONCE: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "ALBERT": ("AlbertForSequenceClassification", {**SIZES, "embedding_size": 16, "num_hidden_groups": 2}),
    "ELECTRA": ("ElectraForSequenceClassification", {**SIZES, "embedding_size": 16, "num_labels": 3}),
    "ERNIE": ("ErnieForSequenceClassification", {**SIZES, "num_labels": 1}),
    "EuroBERT": ("EuroBertModel", SIZES),
    "Data2Vec": ("Data2VecTextModel", {**SIZES, "pad_token_id": 1}),
    "RoBERTa, norms first": ("RobertaPreLayerNormForSequenceClassification", {**SIZES, "pad_token_id": 1}),
    "XLM-R XL": ("XLMRobertaXLForSequenceClassification", {**SIZES, "pad_token_id": 1}),
}
"""Encoders without a native model, of which transformers' modules compute all texts of a step at once."""

BY_TEXT: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "FNet": ("FNetForSequenceClassification", SIZES),
    "ConvBERT": ("ConvBertForSequenceClassification", {**SIZES, "embedding_size": 16}),
    "DeBERTa": ("DebertaModel", {**SIZES, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    "DeBERTa v3": ("DebertaV2ForSequenceClassification", DEBERTA),
    "LUKE": ("LukeModel", {**SIZES, "pad_token_id": 1, "entity_vocab_size": 10}),
    "MegatronBERT": ("MegatronBertForSequenceClassification", SIZES),
    "RemBERT": ("RemBertForSequenceClassification", {**SIZES, "input_embedding_size": 16}),
    "RoFormer": ("RoFormerForSequenceClassification", {**SIZES, "embedding_size": 16}),
    "T5": ("T5EncoderModel", {**SIZES, "d_model": 32, "d_kv": 8, "num_layers": 2, "num_heads": 4}),
    "XLM": ("XLMForSequenceClassification", {**SIZES, "emb_dim": 32, "n_layers": 2, "n_heads": 4}),
}
"""Likewise those of which they compute text after text."""


def create_encoder(class_name: str, arguments: Mapping[str, Any]) -> Any:
    """Return a model of transformers with random weights, in float32."""
    model_class = getattr(transformers, class_name)
    return model_class(model_class.config_class(**arguments)).float()
