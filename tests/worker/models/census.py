"""Which decoders of transformers the fallback computes: a tiny random checkpoint of each class against transformers.

    python -m tests.worker.models.census [--write | --verify] [MODEL_TYPE ...]

The findings are in census.json beside this file. `make test-models` examines all classes again and compares, and so it
does with those of encoders (encoder_census.py).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.helpers.in_process import InProcessEngine
from tests.worker.models.checkpoints import random_prompts, save_checkpoint
from tests.worker.models.sequences import CUTS, Sequences
from tests.worker.models.small_configs import small_config
from tests.worker.tiny import tiny_config
from triptych.checkpoint.architecture import ModelArchitecture
from triptych.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, WorkerConfig
from triptych.errors import FeatureDisabled
from triptych.types.sampling import SamplingParams
from triptych_kernels.cpu.library import isa
from triptych_services.worker.context.device import resolve_config
from triptych_services.worker.loader.load import load_model, open_checkpoint
from triptych_services.worker.models.fallback.describe import describe
from triptych_services.worker.runner.startup.create import create_runner

FILE = Path(__file__).with_name("census.json")
LENGTHS = (1, 3, 4, 5, 11, 18)
TIMEOUT_S = 200.0
_PROMPTS = random_prompts(1, 5, 23)
_NUM_NEW = 5  # tokens
_TOLERANCE = 1e-3  # of the largest logit, float32 with sums in another order


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome for one class."""

    model_type: str
    class_name: str
    outcome: str
    """loads: logits and greedy tokens equal transformers'. refused. wrong. not examined: no tiny config is known."""
    reason: str = ""
    steps: str = ""
    """How steps are computed on CPUs: recorded, eager, or text by text. Empty: not at all, or on a machine without
    native kernels."""


def examine(model_type: str) -> Finding:
    """Build a tiny model of a class, save it, load it by the fallback and compare the two."""
    class_name = str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as path:
        directory = Path(path)
        try:
            config = small_config(model_type)
            torch.manual_seed(0)
            oracle = getattr(transformers, class_name)._from_config(config, attn_implementation="eager")
            oracle = save_checkpoint(oracle, directory)
            expected, said = _logits(oracle), [_greedy(oracle, prompt) for prompt in _PROMPTS]
            tolerance = min(max(_TOLERANCE, 10 * _sensitivity(oracle, expected)), 10 * _TOLERANCE)
        except Exception as error:
            return Finding(model_type, class_name, "not examined", short(error))
        try:
            architecture = describe(directory)
            outcome, reason = _compare(directory, architecture, expected, tolerance)
            if outcome != "loads":
                return Finding(model_type, class_name, outcome, reason)
            return Finding(model_type, class_name, *_serve(directory, architecture, said))
        except FeatureDisabled as error:
            return Finding(model_type, class_name, "refused", str(error))
        except Exception as error:
            return Finding(model_type, class_name, "wrong", short(error))


def _token_ids(vocab_size: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, vocab_size, (length,), generator=generator) for length in LENGTHS]


@torch.inference_mode()
def _logits(oracle: Any) -> list[torch.Tensor]:
    vocab_size = oracle.get_input_embeddings().num_embeddings
    return [oracle(ids[None], use_cache=False).logits[0] for ids in _token_ids(vocab_size)]


@torch.inference_mode()
def _sensitivity(oracle: Any, expected: list[torch.Tensor]) -> float:
    """Return how far logits change, relative to the largest, when weights do by some units of float32."""
    for parameter in oracle.parameters():
        parameter.mul_(1 + 2e-7 * torch.randn(parameter.shape))
    return max(distance(*pair) for pair in zip(_logits(oracle), expected, strict=True))


def distance(own: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((own - theirs).abs().max() / theirs.abs().max())


@torch.inference_mode()
def _compare(
    directory: Path, architecture: ModelArchitecture, expected: list[torch.Tensor], tolerance: float
) -> tuple[str, str]:
    """Compare logits of all tokens, computed in pieces."""
    model = load_model(tiny_config(architecture), open_checkpoint(directory))
    for cut in ("whole prompts", "prompts beside decodes"):
        sequences = Sequences(model, architecture, LENGTHS)
        for own, theirs in zip(sequences.run(CUTS[cut]), expected, strict=True):
            if not (error := distance(own, theirs)) < tolerance:
                return "wrong", f"{cut}: logits differ by {error:.2g} of the largest"
            if not torch.equal(own.argmax(-1), theirs.argmax(-1)):
                return "wrong", f"{cut}: greedy tokens differ"
    return "loads", ""


@torch.inference_mode()
def _greedy(oracle: Any, prompt: list[int]) -> list[int]:
    tokens = list(prompt)
    for _ in range(_NUM_NEW):
        tokens.append(int(oracle(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def _serve(directory: Path, architecture: ModelArchitecture, said: list[list[int]]) -> tuple[str, str, str]:
    """Compare greedy tokens of a runner, whose steps are recorded where they can be."""
    engine = EngineConfig(
        model=ModelConfig(model="somewhere/tiny"),
        cache=CacheConfig(block_size=5),
        scheduler=SchedulerConfig(max_num_seqs=5, max_num_batched_tokens=16),
        worker=WorkerConfig(device="cpu", num_threads=1),
    )
    config = resolve_config(engine, architecture)
    runner = create_runner(config, directory, boot_id="b", on_phase=lambda phase, progress: None)
    steps = "recorded" if "recorded" in runner.facts.kernels else "eager" if isa() else ""
    params = SamplingParams(temperature=0, max_tokens=_NUM_NEW, ignore_eos=True)
    own = InProcessEngine(runner, max_num_batched_tokens=16).generate(_PROMPTS, params)
    return ("loads", "", steps) if own == said else ("wrong", "greedy tokens differ", steps)


def short(error: Exception) -> str:
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {str(error)[:300]} ({Path(where.filename).name}:{where.lineno})"


Examine = Callable[[str], Finding]
"""Finds out about a type of models."""


def _answer(examine_type: Examine, model_type: str, pipe: Any) -> None:
    pipe.send(asdict(examine_type(model_type)))


def census(model_types: list[str], examine_type: Examine, classes: Mapping[str, str]) -> Iterator[Finding]:
    """Examine classes, each in a process of its own that may take `TIMEOUT_S`.

    Args:
        classes: Type of a model -> its class.
    """
    context = multiprocessing.get_context("fork")
    for model_type in model_types:
        ours, theirs = context.Pipe()
        process = context.Process(target=_answer, args=(examine_type, model_type, theirs))
        process.start()
        theirs.close()
        class_name = classes[model_type]
        try:
            if ours.poll(TIMEOUT_S):
                yield Finding(**ours.recv())
            else:
                yield Finding(model_type, class_name, "wrong", f"took more than {TIMEOUT_S:g} s")
        except EOFError:
            yield Finding(model_type, class_name, "wrong", "its process ended")
        process.kill()
        process.join()


def read_findings(file: Path = FILE) -> dict[str, Finding]:
    """Return type of a model -> what a file of findings says of it."""
    return {entry["model_type"]: Finding(**entry) for entry in json.loads(file.read_text())}


def main(doc: str | None, file: Path, examine_type: Examine, classes: Mapping[str, str]) -> int:
    """Examine what the command line names, and write or compare the findings."""
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("model_types", nargs="*", default=list(classes))
    parser.add_argument("--write", action="store_true", help="put the findings into census.json")
    parser.add_argument("--verify", action="store_true", help="fail where they differ from census.json")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    known = read_findings(file) if file.is_file() else {}
    differing = []
    for finding in census(arguments.model_types, examine_type, classes):
        print(json.dumps(asdict(finding)), flush=True)
        before = known.get(finding.model_type)
        # the words of a reason are other libraries' in part
        if before is None or (before.outcome, before.steps) != (finding.outcome, finding.steps):
            differing.append(finding.model_type)
        known[finding.model_type] = finding
    if arguments.write:
        lines = ",\n".join(json.dumps(asdict(known[name])) for name in sorted(known))
        file.write_text(f"[\n{lines}\n]\n")
    if arguments.verify and differing:
        print(f"other than in {file.name}: {', '.join(differing)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    decoders = {kind: str(name) for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()}
    sys.exit(main(__doc__, FILE, examine, decoders))
