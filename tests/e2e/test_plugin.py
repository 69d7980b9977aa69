"""The example of a plugin, installed and served: its family, pooler, adapter and proposer, held to their oracles."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from sentence_transformers.sentence_transformer.modules import Pooling
from transformers import LlamaForCausalLM

from tests.e2e.test_fine_tunes import write_fine_tune
from tests.worker.models.checkpoints import greedy_tokens

ROOT = Path(__file__).parents[2]
PROMPT = list(range(40, 70))
SCALE = 3.0
PROGRAM = """
import json, sys
from triptych import LLM, SamplingParams
prompt = json.loads(sys.argv[2])
adapters = {"max_adapters": 1, "adapters": {"npz": sys.argv[3]}}
guesses = {"speculative.enabled": True, "speculative.proposers": "ngram,repeating"}
with LLM(sys.argv[1], dtype="float32", num_blocks=64, **adapters, **guesses) as llm:
    sampling = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=1)
    (answer,) = llm.generate([{"prompt_token_ids": prompt}], sampling)
    (vector,) = llm.embed([{"prompt_token_ids": prompt}])
    (adapted,) = llm.generate([{"prompt_token_ids": prompt}], sampling, adapter="npz")
print(json.dumps({
    "tokens": answer.outputs[0].token_ids,
    "logprob": answer.outputs[0].logprobs[0].chosen.logprob,
    "vector": vector.outputs.embedding,
    "adapted": adapted.outputs[0].token_ids,
}))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory that the plugin is installed in."""
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    source = target / "source"
    subprocess.run(["cp", "-r", ROOT / "examples" / "plugin", source], check=True)
    subprocess.run([*command, "--target", target, source], check=True, timeout=120)
    return target


def write_adapter(directory: Path, model: LlamaForCausalLM) -> None:
    """Write an adapter of two projections of each layer in the plugin's layout."""
    generator, arrays = np.random.default_rng(7), {}
    for name, module in model.named_modules():
        if name.endswith(("q_proj", "down_proj")):
            arrays[f"{name}.down"] = generator.normal(0, 0.3, (3, module.in_features)).astype(np.float32)
            arrays[f"{name}.up"] = generator.normal(0, 0.3, (module.out_features, 3)).astype(np.float32)
            arrays[f"{name}.alpha"] = np.float32(6)
    directory.mkdir()
    np.savez(directory / "lora.npz", **arrays)


def merge_adapter(directory: Path, model: LlamaForCausalLM) -> None:
    """Add the adapter to the weights of a model."""
    arrays = np.load(directory / "lora.npz")
    for name, module in model.named_modules():
        if f"{name}.down" in arrays:
            module.weight.data += torch.from_numpy(arrays[f"{name}.up"] @ arrays[f"{name}.down"] * 2)


def test_the_family_the_pooler_the_adapter_and_the_proposer_of_a_plugin_are_served(
    installed: Path, tmp_path: Path
) -> None:
    directory = write_fine_tune(tmp_path / "model", seed=5)
    oracle = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)
    config = json.loads((directory / "config.json").read_text())
    config |= {"architectures": ["ScaledLlamaForCausalLM"], "logit_scale": SCALE}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "weightedmean"}))
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
    (directory / "modules.json").write_text(
        json.dumps(
            [
                {
                    "idx": place,
                    "name": str(place),
                    "path": path,
                    "type": f"sentence_transformers.models.{kind}",
                }
                for place, (path, kind) in enumerate(modules)
            ]
        )
    )
    write_adapter(tmp_path / "adapter", oracle)
    paths = [str(installed), *filter(None, [os.environ.get("PYTHONPATH")])]
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, directory, json.dumps(PROMPT), tmp_path / "adapter"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        check=True,
        capture_output=True,
        text=True,
        timeout=180,
    )
    served = json.loads(run.stdout.splitlines()[-1])
    assert "switched off" not in run.stdout + run.stderr

    with torch.inference_mode():
        whole = oracle(torch.tensor([PROMPT]), output_hidden_states=True)
    assert served["tokens"] == greedy_tokens(oracle, PROMPT, 12)
    scaled = torch.log_softmax(whole.logits[0, -1] * SCALE, dim=-1).max()
    assert served["logprob"] == pytest.approx(float(scaled), abs=1e-4)
    states = whole.hidden_states[-1]
    features = {"token_embeddings": states, "attention_mask": torch.ones(1, len(PROMPT))}
    vector = Pooling(states.shape[-1], pooling_mode="weightedmean")(features)["sentence_embedding"][0]
    torch.testing.assert_close(torch.tensor(served["vector"]), vector, atol=1e-5, rtol=0)
    merge_adapter(tmp_path / "adapter", oracle)
    assert served["adapted"] == greedy_tokens(oracle, PROMPT, 12) != served["tokens"]
