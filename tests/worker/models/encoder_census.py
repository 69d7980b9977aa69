"""Which encoders of transformers the fallback computes: a tiny random checkpoint of each class against transformers.

    python -m tests.worker.models.encoder_census [--write | --verify] [MODEL_TYPE ...]

The findings are in encoder_census.json beside this file. The class of a type is the one that classifies, if there is
one, so that its body and its head are both examined.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

from tests.worker.models.census import Finding, distance, main, short
from tests.worker.models.checkpoints import save_checkpoint
from tests.worker.models.small_configs import small_config
from tests.worker.tiny import tiny_config
from triptych.checkpoint.architecture import ModelArchitecture
from triptych.errors import FeatureDisabled
from triptych_kernels.cpu.library import isa
from triptych_kernels.cpu.recording import NotRecordable
from triptych_services.worker.loader.load import load_model, open_checkpoint
from triptych_services.worker.models.fallback.describe_encoder import describe_encoder
from triptych_services.worker.models.fallback.encoder import TransformersEncoder
from triptych_services.worker.models.fallback.skeleton import encoder_types, first_name
from triptych_services.worker.runner.encoder_runner import EagerEncoder, EncoderInputs, RecordedEncoder

FILE = Path(__file__).with_name("encoder_census.json")
LENGTHS = (1, 3, 100, 7, 18)
_TOLERANCE = 1e-5  # of the largest number, float32 with sums in another order
_MOST_TOLERANCE = 1e-3  # of classes that amplify a unit of float32


def _class_of(kind: str) -> str:
    classifier = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(kind)
    body = MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES.get(kind) or first_name(MODEL_MAPPING_NAMES[kind])
    # the classifier of an encoder and a decoder reads a state of the latter
    return classifier if classifier and not body.endswith("EncoderModel") else body


CLASSES = {kind: _class_of(kind) for kind in encoder_types()}
"""Type of a model -> the class that is examined."""


def examine(model_type: str) -> Finding:
    """Build a tiny model of a class, save it, load it by the fallback and compare the two."""
    class_name = CLASSES[model_type]
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as path, torch.inference_mode():
        directory = Path(path)
        try:
            oracle = getattr(transformers, class_name)._from_config(
                small_config(model_type, class_name), attn_implementation="eager"
            )
            oracle = save_checkpoint(oracle, directory)
            expected = _expected(oracle)
            tolerance = min(max(_TOLERANCE, 10 * _sensitivity(oracle, expected)), _MOST_TOLERANCE)
        except Exception as error:
            return Finding(model_type, class_name, "not examined", short(error))
        try:
            return Finding(
                model_type, class_name, *_compare(directory, describe_encoder(directory), expected, tolerance)
            )
        except FeatureDisabled as error:
            return Finding(model_type, class_name, "refused", str(error))
        except Exception as error:
            return Finding(model_type, class_name, "wrong", short(error))


def _texts() -> list[np.ndarray[Any, np.dtype[np.int64]]]:
    generator = np.random.default_rng(1)
    return [generator.integers(5, 97, length) for length in LENGTHS]


def _expected(oracle: Any) -> list[tuple[Tensor, Tensor | None]]:
    """Return the states of each text, and its scores if the class has some."""
    found: list[tuple[Tensor, Tensor | None]] = []
    for text in _texts():
        ids = torch.from_numpy(text)[None]
        states = oracle.base_model(ids)[0][0]
        scores = oracle(ids).logits[0] if oracle.base_model is not oracle else None
        found.append((states, scores))
    return found


def _sensitivity(oracle: Any, expected: list[tuple[Tensor, Tensor | None]]) -> float:
    """Return how far states change, relative to the largest, when weights do by some units of float32."""
    for parameter in oracle.parameters():
        parameter.mul_(1 + 2e-7 * torch.randn(parameter.shape))
    return max(distance(own[0], theirs[0]) for own, theirs in zip(_expected(oracle), expected, strict=True))


def _compare(
    directory: Path,
    architecture: ModelArchitecture,
    expected: list[tuple[Tensor, Tensor | None]],
    tolerance: float,
) -> tuple[str, str, str]:
    """Compare states and scores, and the states of a text alone with those in a step."""
    loaded: Any = load_model(tiny_config(architecture), open_checkpoint(directory))
    model: TransformersEncoder = loaded
    assert architecture.encoder is not None, "described as one"
    inputs, texts = EncoderInputs(max_num_seqs=8, max_num_batched_tokens=200), _texts()
    backend: EagerEncoder | RecordedEncoder = EagerEncoder(model, inputs, torch.device("cpu"))
    steps = "text by text" if architecture.encoder.is_by_text else "eager"
    if isa() and steps == "eager":
        with suppress(NotRecordable):
            backend, steps = RecordedEncoder(model, inputs), "recorded"
    lens = inputs.gather(texts, [None] * len(texts))
    together = backend.forward(lens).clone().split(lens)
    for text, own, (states, scores) in zip(texts, together, expected, strict=True):
        if not (error := distance(own, states)) < tolerance:
            return "wrong", f"states differ by {error:.2g} of the largest", steps
        alone = backend.forward(inputs.gather([text], [None]))
        if steps != "eager" and not torch.equal(alone, own):
            return "wrong", "a text has other bits alone", steps
        if scores is not None:
            assert model.classifier is not None, "a class with scores"
            pooled = {"first": own[0], "last": own[-1], "mean": own.mean(0)}[model.classifier.pooling]
            error = distance(torch.from_numpy(model.classifier.of_vector(pooled.numpy())), scores)
            if not error < tolerance:
                return "wrong", f"scores differ by {error:.2g} of the largest", steps
    return "loads", "", steps


if __name__ == "__main__":
    sys.exit(main(__doc__, FILE, examine, CLASSES))
