"""Reads how a checkpoint makes vectors: sentence-transformers' files, and the classifier's keys of config.json.

modules.json                        the modules in their order: Transformer, Pooling, Dense, Normalize
1_Pooling/config.json               which states become the vector
2_Dense/config.json                 a layer behind it, with weights in its own directory
sentence_bert_config.json           the length at which texts are cut
config_sentence_transformers.json   texts that precede queries and documents
config.json                         labels and activation of a classifier, sizes to which vectors may be cut
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import entry_points
from itertools import pairwise
from pathlib import Path

from triptych.checkpoint.config_file import ConfigFile, check_inside
from triptych.checkpoint.config_json import CONFIG_FILE, MODULES_FILE
from triptych.checkpoint.families.registry import CLASSIFIER_SUFFIX
from triptych.checkpoint.labels import read_labels
from triptych.errors import FeatureDisabled, ModelError
from triptych.types.pooling import PoolingKind

ENTRY_POINT_GROUP = "triptych.poolers"
"""Entry points of installed packages that pool: name = `pooling_mode`, value = `module:function`."""

_PROMPTS_FILE = "config_sentence_transformers.json"
_LENGTH_FILES = (
    "sentence_bert_config.json",
    "sentence_roberta_config.json",
    "sentence_distilbert_config.json",
    "sentence_camembert_config.json",
    "sentence_albert_config.json",
    "sentence_xlm-roberta_config.json",
    "sentence_xlnet_config.json",
)
"""Names under which sentence-transformers has written the same file, of which the first that exists counts."""

_MODE_TO_KIND = {"cls": PoolingKind.FIRST, "mean": PoolingKind.MEAN, "lasttoken": PoolingKind.LAST}
_FLAG_TO_MODE = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Keys of older files -> the mode that each switches on."""

_ACTIVATIONS = {
    "Identity": "none",
    "Sigmoid": "sigmoid",
    "Softmax": "softmax",
    "Tanh": "tanh",
    "ReLU": "relu",
    "GELU": "gelu",
    "SiLU": "silu",
}
"""Classes of torch.nn, the last words of their paths -> our names."""
_PROBLEM_TO_ACTIVATION = {
    "regression": "none",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}
_SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")

_MAX_MODULES = 32
_MAX_FEATURES = 1 << 20
_MAX_PROMPTS = 1 << 10
_MAX_TEXT = 1 << 16  # characters of a prompt


@dataclass(frozen=True, slots=True)
class DenseSpec:
    """One linear layer behind the pooled state."""

    directory: str
    """Place of its weights, within the checkpoint: 2_Dense."""
    in_features: int
    out_features: int
    bias: bool
    activation: str
    """none, sigmoid, tanh, relu, gelu or silu."""


@dataclass(frozen=True, slots=True)
class ClassifierSpec:
    """The meaning of a classifier's numbers."""

    labels: tuple[str, ...]
    activation: str
    """The way from its numbers to what clients get: none, softmax, sigmoid, tanh, relu, gelu or silu."""


@dataclass(frozen=True, slots=True)
class PoolingSpec:
    """The way from the states of a text to vectors, as a checkpoint states it."""

    kind: PoolingKind
    normalize: bool = True
    """Whether a vector is scaled to length 1."""
    dense: tuple[DenseSpec, ...] = ()
    """Layers between the pooled state and the scaling, in their order."""
    max_seq_length: int = 0
    """Tokens at which sentence-transformers cuts a text; 0: the model's own limit."""
    lower_case: bool = False
    """Whether texts are made lower case before the tokenizer sees them."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    """Name -> text that precedes an input of that sort: query, document."""
    default_prompt_name: str = ""
    """The one of inputs that name none; empty: nothing precedes them."""
    similarity: str = "cosine"
    """cosine, dot, euclidean or manhattan: the number that compares two vectors."""
    matryoshka_dimensions: tuple[int, ...] = ()
    """Sizes to which a vector may be cut; empty: the checkpoint names none."""
    classifier: ClassifierSpec | None = None
    own_pooler: str = ""
    """`module:function` of an installed package, from the states of all tokens, [num_tokens, hidden_size] float32, to
    the pooled one, [hidden_size]. Empty: `kind` says it."""
    is_stated: bool = False
    """Whether the checkpoint has sentence-transformers' modules, rather than the defaults of a plain model."""

    def vector_size(self, hidden_size: int) -> int:
        """Return the length of a whole vector."""
        return self.dense[-1].out_features if self.dense else hidden_size

    def refusal_of_dimensions(self, dimensions: int, hidden_size: int) -> str:
        """Return why a vector is not cut to this size; empty if it is. 0 is the whole vector."""
        size = self.vector_size(hidden_size)
        if not 0 <= dimensions <= size:
            return f"{dimensions} is not within 1..{size}, the size of the model's vectors"
        if (
            dimensions in (0, size)
            or not self.matryoshka_dimensions
            or dimensions in self.matryoshka_dimensions
        ):
            return ""
        return f"{dimensions} is none of {', '.join(map(str, self.matryoshka_dimensions))}, the sizes of this model"


def read_pooling(directory: Path, *, default_kind: PoolingKind = PoolingKind.LAST) -> PoolingSpec:
    """Read how the checkpoint in a directory makes vectors.

    Args:
        default_kind: Kind of a checkpoint that does not state one. Its vectors are scaled to length 1.

    Raises:
        FeatureDisabled: It states a module or a mode that is not built; names it.
        ModelError: A file is odd; names file, key and value.
    """
    config = ConfigFile.read_optional(directory / CONFIG_FILE)
    modules = _read_modules(directory)
    chain = PoolingSpec(default_kind)
    if modules:
        chain = _read_chain(directory, modules, default_kind)
    length = _length_file(directory)
    prompts = ConfigFile.read_optional(directory / _PROMPTS_FILE)
    names = _read_prompts(prompts)
    default_prompt_name = prompts.text("default_prompt_name", default="")
    if default_prompt_name and default_prompt_name not in names:
        prompts.fail(
            "default_prompt_name", default_prompt_name, f"is none of its prompts: {', '.join(names)}"
        )
    similarity = prompts.text("similarity_fn_name", default="cosine")
    if similarity not in _SIMILARITIES:
        prompts.fail("similarity_fn_name", similarity, f"is none of {', '.join(_SIMILARITIES)}")
    return replace(
        chain,
        max_seq_length=length.integer("max_seq_length", default=0, minimum=0),
        lower_case=length.boolean("do_lower_case", default=False),
        prompts=names,
        default_prompt_name=default_prompt_name,
        similarity=similarity,
        matryoshka_dimensions=_read_matryoshka(config),
        classifier=_read_classifier(config),
        is_stated=bool(modules),
    )


def _read_modules(directory: Path) -> list[tuple[str, str]]:
    """Return (class, directory) of each module, in order; empty where the checkpoint has no list of them."""
    path = directory / MODULES_FILE
    if not path.is_file():
        return []
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(values, list) or not 0 < len(values) <= _MAX_MODULES:
        raise ModelError(f"{path}: must be a list of 1 to {_MAX_MODULES} modules")
    modules: list[tuple[str, str]] = []
    for index, value in enumerate(values):
        if not isinstance(value, dict):
            raise ModelError(f"{path}: entry {index} must be an object")
        entry = ConfigFile(path, value, section=f"[{index}].")
        place = entry.text("path", default="")
        check_inside(path, place)
        modules.append((entry.text("type").rpartition(".")[2], place))
    return modules


def _read_chain(directory: Path, modules: list[tuple[str, str]], default_kind: PoolingKind) -> PoolingSpec:
    """Return the kind, whether vectors are scaled, and the layers between."""
    path = directory / MODULES_FILE
    chain, normalize, dense = PoolingSpec(default_kind), False, list[DenseSpec]()
    for index, (name, place) in enumerate(modules):
        if index == 0:
            if name != "Transformer":
                raise FeatureDisabled(f"module {name}", f"{path}: the first module must be a Transformer")
            if place:
                raise FeatureDisabled(
                    f"module path {place}",
                    f"{path}: weights in a directory of their own are not read; move what {place} holds up",
                )
        elif normalize:
            raise FeatureDisabled(f"module {name}", f"{path}: a module behind Normalize is not built")
        elif name == "Pooling" and index == 1:
            chain = _read_kind(ConfigFile.read(directory / place / CONFIG_FILE))
        elif name == "Dense":
            dense.append(_read_dense(ConfigFile.read(directory / place / CONFIG_FILE), place))
        elif name == "Normalize":
            normalize = True
        elif name != "Dropout":  # nothing at inference
            raise FeatureDisabled(f"module {name}", f"{path}: at place {index} it is not built")
    for before, after in pairwise(dense):
        if before.out_features != after.in_features:
            raise ModelError(
                f"{path}: {before.directory} has {before.out_features} outputs, and {after.directory} "
                f"{after.in_features} inputs"
            )
    return replace(chain, normalize=normalize, dense=tuple(dense))


def _read_kind(config: ConfigFile) -> PoolingSpec:
    mode = config.values.get("pooling_mode")
    if mode is None:
        flags = [name for key, name in _FLAG_TO_MODE.items() if config.boolean(key, default=False)]
        mode = flags or ["mean"]
    modes = mode if isinstance(mode, list) else [mode]
    if not modes or not all(isinstance(name, str) for name in modes):
        config.fail("pooling_mode", mode, "must be a mode or a list of them")
    config.expect("include_prompt", True, otherwise="tokens of a prompt are left out of the vector")
    if len(modes) == 1 and modes[0] in _MODE_TO_KIND:
        return PoolingSpec(_MODE_TO_KIND[modes[0]])
    # looking through all installed packages takes milliseconds
    own = {point.name: point.value for point in entry_points(group=ENTRY_POINT_GROUP)}
    if len(modes) == 1 and modes[0] in own:
        return PoolingSpec(PoolingKind.MEAN, own_pooler=own[modes[0]])
    raise FeatureDisabled(
        f"pooling_mode = {' + '.join(modes)[:200]}",
        f"{config.path}: one of {', '.join((*_MODE_TO_KIND, *own))} is built or installed",
    )


def _read_dense(config: ConfigFile, place: str) -> DenseSpec:
    for key in ("module_input_name", "module_output_name"):
        config.expect(key, "sentence_embedding", otherwise="the layer reads or writes something else")
    config.expect("use_residual", False, otherwise="the layer adds its input")
    in_features, out_features = (config.integer(key) for key in ("in_features", "out_features"))
    for key, size in (("in_features", in_features), ("out_features", out_features)):
        if size > _MAX_FEATURES:
            config.fail(key, size, f"is above the limit {_MAX_FEATURES}")
    return DenseSpec(
        place,
        in_features,
        out_features,
        bias=config.boolean("bias", default=True),
        activation=_read_activation(config, "activation_function", default="tanh"),
    )


def _read_activation(config: ConfigFile, key: str, *, default: str) -> str:
    """Return an activation that a file names by the path of its class."""
    if not config.has(key):
        return default
    path = config.text(key)
    name = path.rpartition(".")[2]
    if not path.startswith("torch.") or name not in _ACTIVATIONS:
        config.fail(key, path, f"must be one of torch.nn's {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _length_file(directory: Path) -> ConfigFile:
    for name in _LENGTH_FILES:
        if (directory / name).is_file():
            return ConfigFile.read(directory / name)
    return ConfigFile(directory / _LENGTH_FILES[0], {})


def _read_prompts(config: ConfigFile) -> dict[str, str]:
    section = config.section("prompts")
    if section is None:
        return {}
    if len(section.values) > _MAX_PROMPTS:
        config.fail("prompts", len(section.values), f"entries are above the limit {_MAX_PROMPTS}")
    return {name: _short_text(section, name) for name in section.values if section.has(name)}


def _short_text(config: ConfigFile, key: str) -> str:
    text = config.text(key)
    if len(text) > _MAX_TEXT:
        config.fail(key, text, f"is longer than {_MAX_TEXT} characters")
    return text


def _read_matryoshka(config: ConfigFile) -> tuple[int, ...]:
    values = config.values.get("matryoshka_dimensions")
    if values is None:
        return ()
    if (
        not isinstance(values, list)
        or not all(type(value) is int and 0 < value <= _MAX_FEATURES for value in values)
        or len(set(values)) != len(values)
    ):
        config.fail("matryoshka_dimensions", values, "must be a list of different sizes, each 1 or more")
    return tuple(sorted(values))


def _read_classifier(config: ConfigFile) -> ClassifierSpec | None:
    """Read the classifier of an architecture that has one; None for others."""
    names = config.values.get("architectures")
    if not isinstance(names, list) or not any(str(name).endswith(CLASSIFIER_SUFFIX) for name in names):
        return None
    labels = read_labels(config)
    activation = "sigmoid" if len(labels) == 1 else "softmax"
    if config.has("problem_type"):
        problem = config.text("problem_type")
        if problem not in _PROBLEM_TO_ACTIVATION:
            config.fail("problem_type", problem, f"is none of {', '.join(_PROBLEM_TO_ACTIVATION)}")
        activation = _PROBLEM_TO_ACTIVATION[problem]
    # what sentence-transformers writes for a cross-encoder, today and formerly
    activation = _read_activation(config, "sbert_ce_default_activation_function", default=activation)
    section = config.section("sentence_transformers")
    if section is not None:
        activation = _read_activation(section, "activation_fn", default=activation)
    return ClassifierSpec(labels, activation)
