"""Benchmarks of others, unchanged, against the stack: lm-eval and GuideLLM. `make test-clients` runs them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.clients.conftest import RunProgram
from tests.oracle.reference import load_reference, teacher_forced_logprobs
from triptych.hub import resolve_model
from triptych.launcher.local_cluster import LocalCluster
from triptych.text.tokenizer import Tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.model]

QUESTIONS = [
    {"question": "The capital of France is", "choices": ["Paris", "Rome", "a small fish"], "answer": 0},
    {"question": "Two and two make", "choices": ["seventeen", "four", "blue"], "answer": 1},
    {"question": "Water freezes at zero degrees", "choices": ["Celsius", "metres", "per hour"], "answer": 0},
]


@pytest.fixture(scope="module")
def directory() -> Path:
    return resolve_model("embedded")


def test_lm_eval_measures_what_transformers_says(
    stack: LocalCluster, directory: Path, tmp_path: Path, run_program: RunProgram
) -> None:
    """Log-likelihoods by echo and logprobs, generation by stop strings; the tokenizer is the server's."""
    data = tmp_path / "questions.jsonl"
    data.write_text("\n".join(map(json.dumps, QUESTIONS)))
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    for name, terms in {
        "choose": {
            "output_type": "multiple_choice",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "{{answer}}",
            "metric_list": [{"metric": "acc"}],
        },
        "generate": {
            "output_type": "generate_until",
            "doc_to_target": "{{choices[answer]}}",
            "generation_kwargs": {"until": ["\n", "."], "max_gen_toks": 8, "temperature": 0},
            "metric_list": [{"metric": "exact_match"}],
        },
    }.items():
        task = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data)}},
            "test_split": "test",
            "doc_to_text": "{{question}}",
            **terms,
        }
        (tasks / f"{name}.yaml").write_text(yaml.safe_dump(task))
    server = f"base_url=http://{stack.http_address}/v1/completions,model=embedded,tokenizer_backend=remote"
    run_program(
        "lm_eval", "--model", "local-completions", "--model_args", f"{server},num_concurrent=4",
        "--include_path", str(tasks), "--tasks", "choose,generate",
        "--log_samples", "--output_path", str(tmp_path / "out"),
    )  # fmt: skip

    model, tokenizer = load_reference(directory), Tokenizer.from_directory(directory)
    for sample in read_samples(tmp_path, "choose"):
        for [[logprob, _]], arguments in zip(sample["resps"], sample["arguments"].values(), strict=True):
            prompt = tokenizer.encode(arguments["arg_0"])
            whole = tokenizer.encode(arguments["arg_0"] + arguments["arg_1"])
            expected = sum(teacher_forced_logprobs(model, prompt, whole[len(prompt) :]))
            assert float(logprob) == pytest.approx(expected, abs=5e-3)
    for sample in read_samples(tmp_path, "generate"):
        [[text]] = sample["resps"]
        assert text
        assert "\n" not in text
        assert "." not in text


def read_samples(folder: Path, task: str) -> list[dict[str, Any]]:
    [path] = folder.glob(f"out/**/samples_{task}_*.jsonl")
    samples = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(samples) == len(QUESTIONS)
    return samples


def test_guidellm_measures_a_load(
    stack: LocalCluster, directory: Path, tmp_path: Path, run_program: RunProgram
) -> None:
    report = tmp_path / "report.json"
    run_program(
        "guidellm", "run", "--backend", f"kind=openai_http,target=http://{stack.http_address},model=embedded",
        "--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=6",
        "--tokenizer", f"kind=hf_auto,model={directory}",
        "--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=16",
        "--output", f"kind=json,path={report}", "--disable-console-interactive",
    )  # fmt: skip
    [benchmark] = json.loads(report.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert totals["errored"] == 0
    assert (
        totals["successful"] + totals["incomplete"] == 6
    )  # it may break one off that runs when it has enough
    assert totals["successful"] >= 4
    outputs = benchmark["metrics"]["output_token_count"]["successful"]
    assert outputs["mean"] == 16
