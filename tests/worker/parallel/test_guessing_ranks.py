"""Two ranks with what is loaded to guess, at rank 0, say what they say without guesses and what one rank says."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.helpers.byte_tokenizer import byte_backend
from tests.helpers.processes import free_port
from tests.worker.parallel.test_tensor_parallel import SIZES, check_guesses
from tests.worker.ranks import Case, Together, generate_together, run_ranks, save_checkpoint
from tests.worker.runner.drafting import eagle_checkpoints, mtp_checkpoints
from triptych_kernels.cpu.library import isa

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(not isa(), reason="without native kernels numbers depend on the batch"),
]

PROMPTS = ((5, 6, 7), (9,) * 21, (40, 41, 42, 43, 44))
WAYS: Mapping[str, Mapping[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "q4": {"quantization": "q4", "sleeps": True},
}


def case_of(directory: Path, guessing: Path | None, **options: Any) -> Case:
    return Case(
        directory,
        2,
        port=free_port(),
        prompts=PROMPTS,
        num_new=20,
        guesses=True,
        guessing=guessing,
        **options,
    )


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    directory = save_checkpoint(
        tmp_path_factory.mktemp("model"), SIZES | {"architectures": ["LlamaForCausalLM"]}
    )
    (directory / "tokenizer.json").write_text(byte_backend().to_str())
    wrong = Path(shutil.copytree(directory, tmp_path_factory.mktemp("wrong") / "model"))
    tensors = load_file(wrong / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"].roll(
        1, dims=0
    )  # says the token after the right one
    save_file(tensors, wrong / "model.safetensors", {"format": "pt"})
    right = {name: case_of(directory, directory, proposers="draft", **way) for name, way in WAYS.items()}
    return right | {"wrong": case_of(directory, wrong, proposers="draft")}


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    """Layers and heads that are right or wrong by construction, and random ones."""
    cases = {}
    for reads in ("state", "nothing new"):
        mtp_checkpoints.save_cycle(
            directory := tmp_path_factory.mktemp("mtp"), reads, head_dim=16, moe_intermediate_size=64
        )
        ways = WAYS if reads == "state" else {"wrong": {}}
        for name, way in ways.items():
            cases[f"mtp, {name}"] = case_of(directory, None, proposers="mtp", **way)
    mtp_checkpoints.save_cycle(directory := tmp_path_factory.mktemp("mtp"), "state", "Qwen 3.5")
    cases["mtp, beside states"] = case_of(directory, None, proposers="mtp")
    for is_right in (True, False):
        head = tmp_path_factory.mktemp("eagle") / "head"
        eagle_checkpoints.save_cycle(head.parent, head, is_right=is_right, head_dim=16)
        for name, way in (WAYS if is_right else {"wrong": {}}).items():
            cases[f"eagle3, {name}"] = case_of(head.parent, head, proposers="draft", **way)
    return cases


@pytest.fixture(scope="module")
def answers(
    drafts: dict[str, Case], heads: dict[str, Case], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[Together]]:
    return run_ranks(drafts | heads, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", [*WAYS, "wrong"])
def test_a_draft_model_guesses_for_all_ranks(
    name: str, drafts: dict[str, Case], answers: dict[str, list[Together]]
) -> None:
    first, second = answers[name]
    check_guesses(first, second)
    num_guesses, num_right = first.guesses["draft"]
    assert num_guesses > 100
    assert num_right < 0.1 * num_guesses if name == "wrong" else num_right > 30
    if name == "float32":
        alone = generate_together(replace(drafts[name], num_ranks=1), rank=0)
        assert alone.tokens == first.tokens


@pytest.mark.parametrize(
    ("proposer", "name"),
    [
        *((proposer, name) for proposer in ("mtp", "eagle3") for name in (*WAYS, "wrong")),
        ("mtp", "beside states"),
    ],
)
def test_a_head_guesses_for_all_ranks(
    proposer: str, name: str, heads: dict[str, Case], answers: dict[str, list[Together]]
) -> None:
    """Its states are those of rank 0, and the embedding and head that it reads are whole there."""
    case = heads[f"{proposer}, {name}"]
    first, second = answers[f"{proposer}, {name}"]
    check_guesses(first, second)
    num_guesses, num_right = first.guesses[proposer]
    assert num_guesses > 60
    assert num_right > 30 if name != "wrong" else num_right < 0.1 * num_guesses
    if name == "float32":
        alone = generate_together(replace(case, num_ranks=1), rank=0)
        assert (alone.tokens, alone.guesses) == (first.tokens, first.guesses)
