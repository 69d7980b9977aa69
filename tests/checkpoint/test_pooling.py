"""How a checkpoint's files say that vectors are made, and what is refused of them."""

import json
from pathlib import Path
from typing import Any

import pytest

from triptych.checkpoint.pooling import ClassifierSpec, DenseSpec, PoolingSpec, read_pooling
from triptych.errors import FeatureDisabled, ModelError
from triptych.types.pooling import PoolingKind

TRANSFORMER = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}
POOLING = {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
DENSE = {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"}
NORMALIZE = {"idx": 3, "name": "3", "path": "3_Normalize", "type": "sentence_transformers.models.Normalize"}


def write(directory: Path, **files: Any) -> Path:
    """Write JSON files: `a__b` is `a/b.json`."""
    for name, value in files.items():
        path = directory / f"{name.replace('__', '/')}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(value))
    return directory


def test_without_files_it_is_the_last_state_scaled(tmp_path: Path) -> None:
    assert read_pooling(tmp_path) == PoolingSpec(PoolingKind.LAST)
    assert read_pooling(tmp_path, default_kind=PoolingKind.FIRST).kind is PoolingKind.FIRST


def test_all_files_of_sentence_transformers(tmp_path: Path) -> None:
    write(
        tmp_path,
        modules=[TRANSFORMER, POOLING, DENSE, NORMALIZE],
        **{
            "1_Pooling__config": {
                "word_embedding_dimension": 64,
                "pooling_mode_cls_token": False,
                "pooling_mode_mean_tokens": True,
            },
            "2_Dense__config": {
                "in_features": 64,
                "out_features": 16,
                "bias": False,
                "activation_function": "torch.nn.modules.linear.Identity",
            },
        },
        sentence_bert_config={"max_seq_length": 256, "do_lower_case": True},
        config_sentence_transformers={
            "prompts": {"query": "Query: ", "document": ""},
            "default_prompt_name": "query",
            "similarity_fn_name": "dot",
        },
        config={"matryoshka_dimensions": [16, 8]},
    )
    spec = read_pooling(tmp_path)
    assert spec == PoolingSpec(
        PoolingKind.MEAN,
        normalize=True,
        dense=(DenseSpec("2_Dense", 64, 16, bias=False, activation="none"),),
        max_seq_length=256,
        lower_case=True,
        prompts={"query": "Query: ", "document": ""},
        default_prompt_name="query",
        similarity="dot",
        matryoshka_dimensions=(8, 16),
        is_stated=True,
    )
    assert spec.vector_size(64) == 16
    assert [bool(spec.refusal_of_dimensions(size, 64)) for size in (0, 8, 16, 9, 17, -1)] == [
        False,
        False,
        False,
        True,
        True,
        True,
    ]


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"pooling_mode": "lasttoken"}, PoolingKind.LAST),
        ({"pooling_mode": ["cls"], "include_prompt": True}, PoolingKind.FIRST),
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, PoolingKind.LAST),
        ({"pooling_mode_cls_token": True}, PoolingKind.FIRST),
        ({}, PoolingKind.MEAN),
    ],
)
def test_modes_of_both_layouts(tmp_path: Path, config: dict[str, Any], kind: PoolingKind) -> None:
    write(tmp_path, modules=[TRANSFORMER, POOLING], **{"1_Pooling__config": config})
    spec = read_pooling(tmp_path)
    assert (spec.kind, spec.normalize) == (kind, False)


def test_files_that_sentence_transformers_writes(tmp_path: Path) -> None:
    modules = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
    for number, (mode, kind) in enumerate(
        [("mean", PoolingKind.MEAN), ("cls", PoolingKind.FIRST), ("lasttoken", PoolingKind.LAST)]
    ):
        directory = tmp_path / str(number)
        (directory / "1_Pooling").mkdir(parents=True)
        modules.Pooling(32, pooling_mode=mode).save(str(directory / "1_Pooling"))
        write(directory, modules=[TRANSFORMER, {**POOLING, "type": "a.b.c.modules.pooling.Pooling"}])
        assert read_pooling(directory).kind is kind


@pytest.mark.parametrize(
    ("config", "classifier"),
    [
        ({}, ClassifierSpec(("LABEL_0", "LABEL_1"), "softmax")),
        ({"id2label": {"0": "score"}}, ClassifierSpec(("score",), "sigmoid")),
        ({"num_labels": 1}, ClassifierSpec(("LABEL_0",), "sigmoid")),
        ({"num_labels": 1, "problem_type": "regression"}, ClassifierSpec(("LABEL_0",), "none")),
        (
            {"id2label": {"0": "no", "1": "yes"}, "problem_type": "multi_label_classification"},
            ClassifierSpec(("no", "yes"), "sigmoid"),
        ),
        (
            {
                "id2label": {"0": "s"},
                "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"},
            },
            ClassifierSpec(("s",), "none"),
        ),
    ],
)
def test_classifiers(tmp_path: Path, config: dict[str, Any], classifier: ClassifierSpec) -> None:
    write(tmp_path, config={"architectures": ["LlamaForSequenceClassification"], **config})
    assert read_pooling(tmp_path).classifier == classifier
    write(tmp_path, config={"architectures": ["LlamaForCausalLM"], **config})
    assert read_pooling(tmp_path).classifier is None


@pytest.mark.parametrize(
    ("files", "error", "words"),
    [
        ({"modules": {}}, ModelError, "modules.json: must be a list"),
        ({"modules": [TRANSFORMER] * 40}, ModelError, "1 to 32"),
        ({"modules": [3]}, ModelError, "entry 0"),
        ({"modules": [TRANSFORMER, {**POOLING, "path": "../1"}]}, ModelError, "outside"),
        ({"modules": [{**TRANSFORMER, "path": "0_T"}]}, FeatureDisabled, "0_T"),
        ({"modules": [POOLING]}, FeatureDisabled, "must be a Transformer"),
        ({"modules": [TRANSFORMER, {**NORMALIZE, "type": "my.LSTM"}]}, FeatureDisabled, "LSTM"),
        ({"modules": [TRANSFORMER, POOLING]}, ModelError, "1_Pooling/config.json: no such file"),
        ({"modules": [TRANSFORMER, NORMALIZE, DENSE]}, FeatureDisabled, "behind Normalize"),
        ({"sentence_bert_config": {"max_seq_length": -1}}, ModelError, "max_seq_length: -1"),
        ({"sentence_bert_config": {"max_seq_length": 1 << 40}}, ModelError, "above the limit"),
        (
            {"config_sentence_transformers": {"default_prompt_name": "q"}},
            ModelError,
            "default_prompt_name: 'q'",
        ),
        ({"config_sentence_transformers": {"prompts": {"q": 3}}}, ModelError, "prompts.q: 3"),
        ({"config_sentence_transformers": {"prompts": {"q": "a" * 70_000}}}, ModelError, "prompts.q"),
        (
            {"config_sentence_transformers": {"similarity_fn_name": "x"}},
            ModelError,
            "similarity_fn_name: 'x'",
        ),
        ({"config": {"matryoshka_dimensions": [0]}}, ModelError, "matryoshka_dimensions: [0]"),
    ],
)
def test_odd_files_are_named(
    tmp_path: Path, files: dict[str, Any], error: type[Exception], words: str
) -> None:
    write(tmp_path, **files)
    with pytest.raises(error) as raised:
        read_pooling(tmp_path)
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("config", "error", "words"),
    [
        ({"pooling_mode": "max"}, FeatureDisabled, "pooling_mode = max"),
        ({"pooling_mode": ["cls", "mean"]}, FeatureDisabled, "cls + mean"),
        ({"pooling_mode_weightedmean_tokens": True}, FeatureDisabled, "weightedmean"),
        ({"pooling_mode": 3}, ModelError, "pooling_mode: 3"),
        ({"pooling_mode": "mean", "include_prompt": False}, FeatureDisabled, "include_prompt"),
    ],
)
def test_modes_that_are_not_built(
    tmp_path: Path, config: dict[str, Any], error: type[Exception], words: str
) -> None:
    write(tmp_path, modules=[TRANSFORMER, POOLING], **{"1_Pooling__config": config})
    with pytest.raises(error) as raised:
        read_pooling(tmp_path)
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"in_features": 1 << 30, "out_features": 3}, "in_features"),
        ({"in_features": 3}, "out_features: is missing"),
        ({"in_features": 3, "out_features": 3, "activation_function": "os.system"}, "activation_function"),
    ],
)
def test_odd_dense_layers(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    write(
        tmp_path,
        modules=[TRANSFORMER, POOLING, DENSE],
        **{"1_Pooling__config": {}, "2_Dense__config": config},
    )
    with pytest.raises(ModelError, match=words):
        read_pooling(tmp_path)


@pytest.mark.parametrize(
    "config",
    [
        {"num_labels": 0},
        {"num_labels": 1 << 30},
        {"num_labels": 3, "id2label": {"0": "a"}},
        {"id2label": {"0": "a", "2": "b"}},
        {"id2label": [1]},
        {"problem_type": "other"},
        {"sentence_transformers": {"activation_fn": "my.Softmax"}},
    ],
)
def test_odd_classifiers(tmp_path: Path, config: dict[str, Any]) -> None:
    write(tmp_path, config={"architectures": ["LlamaForSequenceClassification"], **config})
    with pytest.raises(ModelError, match=next(iter(reversed(config)))):
        read_pooling(tmp_path)
